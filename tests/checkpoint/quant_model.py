"""Linear layers in every quantised format, made without the library under test.

A linear(rng, n, k, ...) returns files (end of the name -> Tensor) and values (n rows of k floats): what the stored numbers mean.
Scales are short dyadic numbers, so that every value is exact in fp32 and "equal" can mean equal bits.
"""

import json
import math
import struct

from tiny_model import Tensor


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def f32_bytes(xs):
    return struct.pack("<%df" % len(xs), *xs)


def e4m3(code):
    """OCP e4m3fn; 0x7F and 0xFF are NaN and never asked for."""
    sign, e, m = code >> 7, code >> 3 & 15, code & 7
    v = m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0**(e - 7)
    return -v if sign else v


E4M3 = [e4m3(c) for c in range(0x7F)]


def encode_e4m3(x):
    """Nearest, ties to the even code, saturating."""
    a = min(abs(x), 448.0)
    e = max(math.frexp(a)[1] - 1, -6) if a else -6
    m = round(a / 2.0**e * 8)  # ties to even
    code = min((e + 7) * 8 + m - 8, 0x7E)
    return code | (0x80 if math.copysign(1, x) < 0 else 0)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
NF4 = [-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1]
FP4 = [0, 0.0052083333, 0.6666667, 1, 0.3333333, 0.5, 0.1666667, 0.25]
FP4 += [-x for x in FP4]


def dyadic(rng, size, bits=4):
    """About `size`, with few significant bits."""
    return 2.0**round(math.log2(size)) * (1 + rng.randrange(2**bits) / 2**bits)


def float_bytes(dtype, xs):
    if dtype == "F32":
        return f32_bytes(xs)
    if dtype == "F16":
        return struct.pack("<%de" % len(xs), *xs)
    return b"".join(struct.pack("<f", x)[2:] for x in xs)  # BF16: the numbers are short


def floats(dtype, shape, xs):
    return Tensor(dtype, list(shape), float_bytes(dtype, xs))


def words(shape, ints):
    return Tensor("I32", list(shape), struct.pack("<%dI" % len(ints), *ints))


def fp8_codes(rng, n, k):
    return [[encode_e4m3(rng.gauss(0, RMS8)) for _ in range(k)] for _ in range(n)]


def signed_e4m3(c):
    return -E4M3[c & 0x7F] if c & 0x80 else E4M3[c]


# rms of the e4m3 codes, of random e2m1, int8, int4
RMS8, RMS_E2M1, RMS_I8, RMS_I4 = 100.0, 3.0, 74.0, 4.6


def byte_tensor(dtype, codes):
    return Tensor(dtype, [len(codes), len(codes[0])], bytes(c & 0xFF for row in codes for c in row))


def fp8_tensor(rng, n, k, scale=None, static=False, scalar=True, input_scale=None):
    codes = fp8_codes(rng, n, k)
    s = scale or dyadic(rng, 1 / RMS8 / math.sqrt(k))
    files = {".weight": byte_tensor("F8_E4M3", codes), ".weight_scale": floats("F32", [] if scalar else [1], [s])}
    if static:
        files[".input_scale"] = floats("F32", [] if scalar else [1], [input_scale or fp8_input_scale(rng)])
    return files, [[signed_e4m3(c) * s for c in row] for row in codes]


def inverse_names(make, **kinds):
    """fp8_tensor under the names of transformers."""
    ends = {".weight": ".weight", ".weight_scale": ".weight_scale_inv", ".input_scale": ".activation_scale"}
    def linear(*a, **k):
        files, values = make(*a, **dict(kinds, **k))
        return {ends[end]: t for end, t in files.items()}, values
    return linear


def fp8_channel(rng, n, k, dtype="F32", column=True):
    codes = fp8_codes(rng, n, k)
    s = [dyadic(rng, 1 / RMS8 / math.sqrt(k)) for _ in range(n)]
    return ({".weight": byte_tensor("F8_E4M3", codes), ".weight_scale": floats(dtype, [n, 1] if column else [n], s)},
            [[signed_e4m3(c) * s[r] for c in row] for r, row in enumerate(codes)])


def fp8_block(rng, n, k, name=".weight_scale", four_axes=False, block=(128, 128)):
    codes = fp8_codes(rng, n, k)
    bn, bk = -(-n // block[0]), -(-k // block[1])
    s = [[dyadic(rng, 1 / RMS8 / math.sqrt(k)) for _ in range(bk)] for _ in range(bn)]
    shape = [bn, 1, bk, 1] if four_axes else [bn, bk]
    return ({".weight": byte_tensor("F8_E4M3", codes), name: floats("F32", shape, [x for row in s for x in row])},
            [[signed_e4m3(c) * s[r // block[0]][j // block[1]] for j, c in enumerate(row)] for r, row in enumerate(codes)])


def exponents(rng, n, groups, rms, k):
    base = 127 + round(math.log2(1 / rms / math.sqrt(k)))
    return [[base + rng.randrange(-1, 2) for _ in range(groups)] for _ in range(n)]


def mxfp8(rng, n, k):
    codes, s = fp8_codes(rng, n, k), exponents(rng, n, k // 32, RMS8, k)
    return ({".weight": byte_tensor("F8_E4M3", codes), ".weight_scale": byte_tensor("U8", s)},
            [[signed_e4m3(c) * 2.0**(s[r][j // 32] - 127) for j, c in enumerate(row)] for r, row in enumerate(codes)])


def int8(rng, n, k, one_scale=False, dtype="BF16"):
    codes = [[rng.randrange(-128, 128) for _ in range(k)] for _ in range(n)]
    s = [dyadic(rng, 1 / RMS_I8 / math.sqrt(k)) for _ in range(1 if one_scale else n)]
    return ({".weight": byte_tensor("I8", codes), ".weight_scale": floats(dtype, [1] if one_scale else [n, 1], s)},
            [[c * s[0 if one_scale else r] for c in row] for r, row in enumerate(codes)])


def bnb8(rng, n, k):
    codes = [[rng.randrange(-127, 128) for _ in range(k)] for _ in range(n)]
    scb = [dyadic(rng, 127 / RMS_I8 / math.sqrt(k)) for _ in range(n)]
    return ({".weight": byte_tensor("I8", codes), ".SCB": floats("F32", [n], scb), ".weight_format": Tensor("U8", [], b"\0")},
            [[f32(c * f32(scb[r] / 127)) for c in row] for r, row in enumerate(codes)])


def nibbles(rng, n, k, low=0):
    return [[rng.randrange(low, 16) for _ in range(k)] for _ in range(n)]


def pack_low_first(codes):
    return [[row[j] | row[j + 1] << 4 for j in range(0, len(row), 2)] for row in codes]


def nvfp4(rng, n, k, compressed=True, static=True, global_scale=None, input_scale=None):
    codes = nibbles(rng, n, k)
    s = [[rng.randrange(0x30, 0x48) for _ in range(k // 16)] for _ in range(n)]  # e4m3 0.5 .. 4
    g = global_scale or 2.0**round(math.log2(1 / RMS_E2M1 / 1.5 / math.sqrt(k)))
    one = lambda x: floats("F32", [1] if compressed else [], [x])
    files = {".weight_packed" if compressed else ".weight": byte_tensor("U8", pack_low_first(codes)),
             ".weight_scale": byte_tensor("F8_E4M3", s)}
    files[".weight_global_scale" if compressed else ".weight_scale_2"] = one(1 / g if compressed else g)
    if static:
        x = input_scale or nvfp4_input_scale(rng)
        files[".input_global_scale" if compressed else ".input_scale"] = one(1 / x if compressed else x)
    return files, [[E2M1[c] * e4m3(s[r][j // 16]) * g for j, c in enumerate(row)] for r, row in enumerate(codes)]


def nvfp4_input_scale(rng):
    return 2.0**-7 * rng.choice([0.5, 1])  # up to 2688 times it: no saturation


def fp8_input_scale(rng):
    return 2.0**-5 * (1 + rng.randrange(4) / 4)


def mxfp4(rng, n, k, compressed=True, static=True):
    codes, s = nibbles(rng, n, k), exponents(rng, n, k // 32, RMS_E2M1, k)
    files = {".weight_packed" if compressed else ".weight": byte_tensor("U8", pack_low_first(codes)), ".weight_scale": byte_tensor("U8", s)}
    if not compressed and static:  # ModelOpt: one scale for all activations, like fp8_tensor's
        files[".input_scale"] = floats("F32", [], [fp8_input_scale(rng)])
    return (files,
            [[E2M1[c] * 2.0**(s[r][j // 32] - 127) for j, c in enumerate(row)] for r, row in enumerate(codes)])


def pack_line(codes, bits, order=None):
    """Consecutive codes into 32-bit words, the first in the lowest bits."""
    per = 32 // bits
    order = order or list(range(per))
    out = []
    for j in range(0, len(codes), per):
        group = codes[j:j + per] + [0] * (per - len(codes[j:j + per]))
        out.append(sum(group[order[i]] << bits * i for i in range(per)))
    return out


def columns_of(m):
    return [list(c) for c in zip(*m)]


def integer_parts(rng, n, k, bits, group, zeros, signed=False):
    """signed: of groups that have the longer end of the codes on the positive side, as AutoRound makes them."""
    g = k if group < 0 else group
    groups = -(-k // g)
    codes = [[rng.randrange(2**bits) for _ in range(k)] for _ in range(n)]
    rms = RMS_I4 if bits == 4 else RMS_I8
    s = [[dyadic(rng, 1 / rms / math.sqrt(k)) for _ in range(groups)] for _ in range(n)]
    if signed:
        s = [[x * rng.choice([-1, 1]) for x in row] for row in s]
    middle = 2**(bits - 1)
    z = [[rng.randrange(middle - 2, middle + 3) if zeros else middle for _ in range(groups)] for _ in range(n)]
    return codes, s, z, g, groups


def group_index(rng, k, g, shuffle):
    index = [j // g for j in range(k)]
    if shuffle:
        rng.shuffle(index)
    return index


def gptq(rng, n, k, bits=4, group=32, zeros=False, index=None, v2=False, with_index=True, bias=False, signed=False, empty=False):
    """empty: the last group of row 0 has zeros and a scale of 0."""
    codes, s, z, g, groups = integer_parts(rng, n, k, bits, group, zeros, signed)
    index = index or [j // g for j in range(k)]
    if empty:
        s[0][-1] = 0.0
        codes[0] = [z[0][-1] if index[j] == groups - 1 else c for j, c in enumerate(codes[0])]
    stored_z = [[x - (0 if v2 else 1) for x in row] for row in z]
    per = 32 // bits
    weight = columns_of([pack_line(row, bits) for row in codes])
    zero = [pack_line(col, bits) for col in columns_of(stored_z)]
    files = {".qweight": words([k // per, n], [w for row in weight for w in row]),
             ".qzeros": words([groups, len(zero[0])], [w for row in zero for w in row]),
             ".scales": floats("F16", [groups, n], [x for row in columns_of(s) for x in row])}
    if bias:  # some exporters give one to every linear
        files[".bias"] = floats("F16", [n], [0.0] * n)
    if with_index:
        files[".g_idx"] = words([k], index)
    return files, [[(c - z[r][index[j]]) * s[r][index[j]] for j, c in enumerate(row)] for r, row in enumerate(codes)]


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(rng, n, k, group=32, signed=False, zeros=True):
    codes, s, z, g, groups = integer_parts(rng, n, k, 4, group, zeros, signed)
    weight = [pack_line(col, 4, AWQ_ORDER) for col in columns_of(codes)]
    zero = [pack_line(col, 4, AWQ_ORDER) for col in columns_of(z)]
    flat = lambda rows: [w for row in rows for w in row]
    return ({".qweight": words([k, n // 8], flat(weight)), ".qzeros": words([groups, n // 8], flat(zero)),
             ".scales": floats("F16", [groups, n], flat(columns_of(s)))},
            [[(c - z[r][j // g]) * s[r][j // g] for j, c in enumerate(row)] for r, row in enumerate(codes)])


def byte_codes(rng, n, k, group=128, empty=False):
    """Signed 4-bit codes, one per byte. empty: row 0 has zeros and scales of 0."""
    codes, s, z, g, groups = integer_parts(rng, n, k, 4, group, False)
    if empty:
        codes[0], s[0] = [8] * k, [0.0] * groups
    files = {".weight": byte_tensor("I8", [[c - 8 for c in row] for row in codes]), ".weight_scale": floats("F32", [n, groups], [x for row in s for x in row])}
    return files, [[(c - 8) * s[r][j // g] for j, c in enumerate(row)] for r, row in enumerate(codes)]


def packed(rng, n, k, bits=4, group=32, zeros=False, index=None, dtype="BF16", signed=False):
    codes, s, z, g, groups = integer_parts(rng, n, k, bits, group, zeros, signed)
    weight = [pack_line(row, bits) for row in codes]
    flat = lambda rows: [w for row in rows for w in row]
    files = {".weight_packed": words([n, len(weight[0])], flat(weight)), ".weight_scale": floats(dtype, [n, groups], flat(s)),
             ".weight_shape": Tensor("I64", [2], struct.pack("<2q", n, k))}
    if zeros:
        zero = [pack_line(col, bits) for col in columns_of(z)]
        files[".weight_zero_point"] = words([len(zero[0]), groups], flat(columns_of(zero)))
    if index:
        files[".weight_g_idx"] = words([k], index)
    at = index or [j // g for j in range(k)]
    return files, [[(c - z[r][at[j]]) * s[r][at[j]] for j, c in enumerate(row)] for r, row in enumerate(codes)]


def bnb4(rng, n, k, table="nf4", nested=False, block=64, below=False):
    """below: the first block's scale, nearly 0, comes out of the second level as a negative number."""
    codes = nibbles(rng, n, k)
    values = [f32(x) for x in (NF4 if table == "nf4" else FP4)]
    flat = [c for row in codes for c in row]
    blocks = n * k // block
    size = 2.0**round(math.log2(2 / math.sqrt(k)))
    files = {".weight": Tensor("U8", [n * k // 2, 1], bytes(flat[j] << 4 | flat[j + 1] for j in range(0, n * k, 2))),
             ".weight.quant_map": floats("F32", [16], values)}
    state = {"quant_type": table, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    if nested:
        outer = -(-blocks // 256)
        table8 = [(j - 128) / 128 for j in range(256)]
        codes8, absmax8 = [rng.randrange(64, 192) for _ in range(blocks)], [size / 4 * 2.0**rng.randrange(2) for _ in range(outer)]
        offset = size
        if below:
            codes8[0], absmax8 = 60, [2 * size] * outer
        absmax = [f32(f32(table8[c] * absmax8[j // 256]) + offset) for j, c in enumerate(codes8)]
        files[".weight.absmax"] = Tensor("U8", [blocks], bytes(codes8))
        files[".weight.nested_absmax"] = floats("F32", [outer], absmax8)
        files[".weight.nested_quant_map"] = floats("F32", [256], table8)
        state.update({"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset})
    else:
        absmax = [size * 2.0**rng.randrange(-1, 2) for _ in range(blocks)]
        files[".weight.absmax"] = floats("F32", [blocks], absmax)
    text = json.dumps(state).encode()
    files[".weight.quant_state.bitsandbytes__" + table] = Tensor("U8", [len(text)], text)
    return files, [[f32(values[c] * absmax[(r * k + j) // block]) for j, c in enumerate(row)] for r, row in enumerate(codes)]


# --- GGUF: one block's bytes and values ---

def half(x):
    return struct.pack("<e", x)


def q4_0(rng, size):
    d, q = rng.choice([-1, 1]) * dyadic(rng, size / RMS_I4), [rng.randrange(16) for _ in range(32)]
    return half(d) + bytes(q[j] | q[j + 16] << 4 for j in range(16)), [(x - 8) * d for x in q]


def q8_0(rng, size):
    d, q = dyadic(rng, size / RMS_I8), [rng.randrange(-128, 128) for _ in range(32)]
    return half(d) + struct.pack("<32b", *q), [x * d for x in q]


def q4_k(rng, size):
    d = dyadic(rng, size / RMS_I4 / 32)
    dmin = dyadic(rng, size / RMS_I4 / 32 * 7.5)
    sc, mn = [rng.randrange(16, 64) for _ in range(8)], [rng.randrange(16, 64) for _ in range(8)]
    s = bytearray(12)
    for j in range(4):
        s[j], s[j + 4] = sc[j] | (sc[j + 4] >> 4) << 6, mn[j] | (mn[j + 4] >> 4) << 6
        s[j + 8] = sc[j + 4] & 15 | (mn[j + 4] & 15) << 4
    q = [rng.randrange(16) for _ in range(256)]
    qs = bytes(q[64 * c + l] | q[64 * c + 32 + l] << 4 for c in range(4) for l in range(32))
    return half(d) + half(dmin) + bytes(s) + qs, [d * sc[j // 32] * x - dmin * mn[j // 32] for j, x in enumerate(q)]


def q6_k(rng, size):
    d = dyadic(rng, size / 18 / 32)
    sc = [rng.choice([-1, 1]) * rng.randrange(16, 64) for _ in range(16)]
    q = [rng.randrange(64) for _ in range(256)]
    ql, qh = bytearray(128), bytearray(64)
    for h in range(2):
        for l in range(32):
            a, b, c, e = (q[128 * h + 32 * i + l] for i in range(4))
            ql[64 * h + l], ql[64 * h + 32 + l] = a & 15 | (c & 15) << 4, b & 15 | (e & 15) << 4
            qh[32 * h + l] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | e >> 4 << 6
    return bytes(ql) + bytes(qh) + struct.pack("<16b", *sc) + half(d), [d * sc[j // 16] * (x - 32) for j, x in enumerate(q)]


def q5_1(rng, size):
    d = dyadic(rng, size / 9.2)
    m, q = -d * rng.randrange(14, 18), [rng.randrange(32) for _ in range(32)]
    fifth = sum((x >> 4) << j for j, x in enumerate(q))
    return (half(d) + half(m) + struct.pack("<I", fifth) + bytes(q[j] & 15 | (q[j + 16] & 15) << 4 for j in range(16)), [x * d + m for x in q])


def two_bits(q):
    """256 numbers of two bits: byte l of each half holds values l, l + 32, l + 64 and l + 96 of it."""
    return bytes(sum(q[128 * h + 32 * s + l] << 2 * s for s in range(4)) for h in range(2) for l in range(32))


def q3_k(rng, size):
    d, sc = dyadic(rng, size / 2.3 / 18), [rng.randrange(64) for _ in range(16)]
    q = [rng.randrange(8) for _ in range(256)]
    third = bytes(sum((q[32 * s + l] >> 2) << s for s in range(8)) for l in range(32))
    scales = bytes(sc[j] & 15 | (sc[j + 8] & 15) << 4 for j in range(8)) + bytes(sum((sc[j + 4 * s] >> 4) << 2 * s for s in range(4)) for j in range(4))
    return third + two_bits([x & 3 for x in q]) + scales + half(d), [d * (sc[j // 16] - 32) * (x - 4) for j, x in enumerate(q)]


IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def iq4_nl(rng, size):
    d, q = rng.choice([-1, 1]) * dyadic(rng, size / 69), [rng.randrange(16) for _ in range(32)]
    return half(d) + bytes(q[j] | q[j + 16] << 4 for j in range(16)), [IQ4[x] * d for x in q]


def iq4_xs(rng, size):
    d, sc = dyadic(rng, size / 69 / 18), [rng.randrange(64) for _ in range(8)]
    q = [rng.randrange(16) for _ in range(256)]
    high = struct.pack("<H", sum((x >> 4) << 2 * j for j, x in enumerate(sc)))
    low = bytes(sc[j] & 15 | (sc[j + 1] & 15) << 4 for j in range(0, 8, 2))
    qs = bytes(q[32 * s + j] | q[32 * s + 16 + j] << 4 for s in range(8) for j in range(16))
    return half(d) + high + low + qs, [d * (sc[j // 32] - 32) * IQ4[x] for j, x in enumerate(q)]


def tq1_0(rng, size):
    d, q = dyadic(rng, size / 0.8), [rng.randrange(3) for _ in range(256)]

    def digits(first, step, count):
        """Values first, first + step, ... as ternary digits, the highest first, of a fraction of 256 rounded up."""
        number = sum(q[first + step * n] * 3**(4 - n) for n in range(count))
        return -(-number * 256 // 243)
    raw = [digits(m, 32, 5) for m in range(32)] + [digits(160 + m, 16, 5) for m in range(16)] + [digits(240 + m, 4, 4) for m in range(4)]
    return bytes(raw) + half(d), [d * (x - 1) for x in q]


def tq2_0(rng, size):
    d, q = dyadic(rng, size / 0.8), [rng.randrange(3) for _ in range(256)]
    return two_bits(q) + half(d), [d * (x - 1) for x in q]


def nvfp4_block(rng, size):
    d, q = [rng.randrange(0x30, 0x48) for _ in range(4)], [rng.randrange(16) for _ in range(64)]
    qs = bytes(q[16 * s + j] | q[16 * s + 8 + j] << 4 for s in range(4) for j in range(8))
    return bytes(d) + qs, [E2M1[x] * e4m3(d[j // 16]) for j, x in enumerate(q)]


def mxfp4_block(rng, size):
    e = round(math.log2(size / RMS_E2M1)) + rng.randrange(-1, 2)
    q = [rng.randrange(16) for _ in range(32)]
    return bytes([127 + e]) + bytes(q[j] | q[j + 16] << 4 for j in range(16)), [E2M1[x] * 2.0**e for x in q]


GGUF = {"Q4_0": (q4_0, 32), "Q8_0": (q8_0, 32), "Q4_K": (q4_k, 256), "Q6_K": (q6_k, 256), "Q5_1": (q5_1, 32), "Q3_K": (q3_k, 256),
        "IQ4_NL": (iq4_nl, 32), "IQ4_XS": (iq4_xs, 256), "TQ1_0": (tq1_0, 256), "TQ2_0": (tq2_0, 256), "NVFP4": (nvfp4_block, 64),
        "MXFP4": (mxfp4_block, 32)}


def gguf_rows(rng, kind, n, k):
    make, block = GGUF[kind]
    raw, values = b"", []
    for _ in range(n):
        row = []
        for _ in range(k // block):
            one, v = make(rng, 1 / math.sqrt(k))
            raw += one
            row += v
        values.append(row)
    return raw, values
