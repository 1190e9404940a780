"""GGUF files from their parts, made without the library under test, with every part open to spoiling."""

import struct

# numbers of the value types
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q", F64: "<d"}
# numbers of the plain tensor types, and the blocks: (number, elements, bytes)
PLAIN = {"F32": (0, 4), "F16": (1, 2), "BF16": (30, 2), "F64": (28, 8), "I32": (26, 4)}
BLOCKS = {"Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210), "Q5_K": (13, 256, 176),
          "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q5_1": (7, 32, 24), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136),
          "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "Q8_K": (15, 256, 292), "IQ2_XXS": (16, 256, 66), "IQ3_S": (21, 256, 110),
          "IQ1_M": (29, 256, 56), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36)}


def string(text):
    raw = text.encode("utf-8") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind, v):
    if kind == STRING:
        return string(v)
    if kind == ARRAY:  # (element kind, list)
        return struct.pack("<IQ", v[0], len(v[1])) + b"".join(value(v[0], x) for x in v[1])
    return struct.pack(FORMATS[kind], v)


def entry(key, kind, v):
    return string(key) + struct.pack("<I", kind) + value(kind, v)


def info(name, shape, type_id, offset):
    """`shape` outermost first, as everywhere else; the file has it fastest first."""
    return string(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", d) for d in reversed(shape)) + struct.pack("<IQ", type_id, offset)


def pad(data, alignment=32):
    return data + b"\0" * (-len(data) % alignment)


def assemble(entries, infos, data, version=3, magic=b"GGUF", num_tensors=None, num_entries=None, alignment=32):
    header = magic + struct.pack("<I", version)
    header += struct.pack("<QQ", len(infos) if num_tensors is None else num_tensors, len(entries) if num_entries is None else num_entries)
    header += b"".join(entries) + b"".join(infos)
    return (pad(header, alignment) if infos else header) + data


def gguf(metadata, tensors, alignment=32):
    """metadata: (key, kind, value); tensors: name -> (type name, shape, bytes)."""
    infos, data = [], b""
    for name, (type_name, shape, raw) in tensors.items():
        type_id = PLAIN[type_name][0] if type_name in PLAIN else BLOCKS[type_name][0]
        infos.append(info(name, shape, type_id, len(data)))
        data = pad(data + raw, alignment)
    return assemble([entry(*m) for m in metadata], infos, data, alignment=alignment)


def metadata(architecture, **keys):
    """general.architecture and <architecture>.<key>, with the types that writers use."""
    out = [("general.architecture", STRING, architecture), ("general.name", STRING, "tiny"),
           ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "bc", ""])), ("tokenizer.ggml.scores", ARRAY, (F32, [0.5, 1.0, 2.0]))]
    for key, v in keys.items():
        kind = BOOL if isinstance(v, bool) else F32 if isinstance(v, float) else ARRAY if isinstance(v, tuple) else U32
        out.append(("%s.%s" % (architecture, key), kind, v))
    return out
