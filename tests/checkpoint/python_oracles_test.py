#!/usr/bin/env python3
"""Files and numbers of other people's Python packages against ours: what gguf, safetensors and transformers write, what
ml_dtypes rounds, what the MoE blocks of transformers compute.

usage: python_oracles_test.py gguf|ml_dtypes|safetensors|transformers TOOL CODEC_FILTER SOURCE_DIR

Exit code 77, with the reason, where the package is not installed. MOESAIC_ORACLE_PYTHON names an interpreter that has
them (a virtual environment); nothing is ever installed here."""

import importlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

SKIPPED = 77
PACKAGE, TOOL, FILTER, SOURCE = sys.argv[1:5] if len(sys.argv) == 5 else sys.exit(__doc__)
MODEL = os.path.join(SOURCE, "testdata", "models", "mini-qwen3-moe")


def needed(*names):
    """The packages, or the end of the program."""
    other = os.environ.get("MOESAIC_ORACLE_PYTHON")
    if other and os.environ.get("MOESAIC_ORACLE_STARTED") != other:
        os.environ["MOESAIC_ORACLE_STARTED"] = other
        os.execv(other, [other] + sys.argv)
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ImportError as e:
            print("SKIPPED: %s; to run this check: pip install %s, or MOESAIC_ORACLE_PYTHON=<interpreter that has it>" % (e, name.split(".")[0]))
            sys.exit(SKIPPED)
    return found


def moesaic(*arguments):
    done = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.exit("moesaic %s: exit code %d\n%s" % (" ".join(map(str, arguments)), done.returncode, done.stderr))
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


def verified(model, golden, quant):
    return moesaic("verify", "--model", model, "--golden", golden, "--quant", quant, "--device", "cpu", "--json")["worst_rel_l2"]


def expect(condition, *words):
    if not condition:
        sys.exit(" ".join(map(str, words)))


def read_container(path):
    """{name: (dtype, shape, bytes)} by hand."""
    with open(path, "rb") as f:
        data = f.read()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    at = lambda t: data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]]
    return {name: (t["dtype"], t["shape"], at(t)) for name, t in header.items()}


def model_tensors(folder):
    tensors = {}
    for file in sorted(os.listdir(folder)):
        if file.startswith("model") and file.endswith(".safetensors"):
            tensors.update(read_container(os.path.join(folder, file)))
    return tensors


def plain_container(path, tensors):
    """tensors: name -> (dtype, numpy array)"""
    header, blob = {}, b""
    for name, (dtype, array) in tensors.items():
        data = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + blob)


# --- gguf: its writer, its quantisers and its own decoding, in float64 ---

def random_blocks(np, gguf, rng, kind, rows, columns):
    """Blocks of types that the package reads but does not write: random codes, scales that give values of 1/sqrt(columns)."""
    name = kind.name
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, size=(rows, columns // elements, size), dtype=np.uint8)
    # Where the F16 scale and the scale of the minima lie; the latter is the middle code times the former, so that values
    # average to zero.
    halves = {"Q2_K": ((80, 1), (82, 1.5)), "Q4_K": ((0, 1), (2, 7.5)), "Q5_K": ((0, 1), (2, 15.5)), "Q6_K": ((208, 1),),
              "Q3_K": ((108, 1),), "IQ4_NL": ((0, 1),), "IQ4_XS": ((0, 1),), "TQ1_0": ((52, 1),), "TQ2_0": ((64, 1),)}

    def set_scale(value):
        if name == "MXFP4":
            blocks[:, :, 0] = 127 + np.round(np.log2(value)).astype(int) + rng.integers(-1, 2, size=blocks.shape[:2])
        elif name == "NVFP4":
            blocks[:, :, :4] = rng.integers(4, 20, size=blocks.shape[:2] + (4,))  # the smallest e4m3 numbers
        else:
            d = value * 2.0**rng.uniform(-0.5, 0.5, size=blocks.shape[:2])
            for at, factor in halves[name]:
                blocks[:, :, at:at + 2] = (d * factor).astype(np.float16).view(np.uint8).reshape(blocks.shape[:2] + (2,))

    flat = lambda: blocks.reshape(rows, -1)
    set_scale(0.01)
    spread = float(np.std(gguf.quants.dequantize(flat(), kind)))
    set_scale(0.01 / spread / columns**0.5)
    return flat()


def same_values(np, gguf, kind, rng):
    """Every value of random blocks against the package's own decoding: equal fp32 numbers."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, size=(3000, size), dtype=np.uint8)
    # Two-byte fields that are scales: the exponent bits of infinities and NaNs are never all set.
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,),
              "TQ2_0": (64,), "MXFP4": (), "NVFP4": ()}
    for at in halves.get(kind.name, (0,)):
        blocks[:, at + 1] = np.where(blocks[:, at + 1] & 0x7C == 0x7C, blocks[:, at + 1] ^ 0x40, blocks[:, at + 1])
    if kind.name == "MXFP4":
        blocks[:, 0] %= 255
    if kind.name == "NVFP4":
        blocks[:, :4] &= 0x7F
    with np.errstate(over="ignore"):  # the largest exponents of MXFP4: infinite there and here
        want = gguf.quants.dequantize(blocks, kind).reshape(-1)
    done = subprocess.run([FILTER, "gguf", str(int(kind))], input=blocks.tobytes(), capture_output=True, check=True, timeout=120)
    got = np.frombuffer(done.stdout, dtype=np.float32)
    expect(want.dtype == np.float32 and got.shape == want.shape == (3000 * elements,), kind.name, got.shape, want.dtype)
    wrong = np.flatnonzero(got != want)
    expect(wrong.size == 0, kind.name, "value", wrong[:1] % elements, "is", got[wrong[:1]], "not", want[wrong[:1]])
    return got.size


def gguf_test(folder):
    np, gguf, _ = needed("numpy", "gguf", "gguf.quants")
    types = gguf.GGMLQuantizationType
    experts, top_k, hidden, inner, tokens = 8, 2, 256, 512, 16
    rng = np.random.default_rng(5)
    names = ("F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
             "NVFP4")
    known = [n for n in names if hasattr(types, n) and (n == "F16" or hasattr(gguf.quants, n))]
    expect(len(known) >= 8, "this gguf package knows only", known)
    for name in known:
        kind = types[name]
        path = os.path.join(folder, name + ".gguf")
        out = gguf.GGUFWriter(path, "qwen3moe")
        for key, value in (("block_count", 1), ("embedding_length", hidden), ("expert_count", experts), ("expert_used_count", top_k),
                           ("expert_feed_forward_length", inner), ("feed_forward_length", inner)):
            out.add_uint32("qwen3moe." + key, value)
        gate = rng.normal(size=(experts, hidden)).astype(np.float32) / 16
        out.add_tensor("blk.0.ffn_gate_inp.weight", gate)
        weights = {}
        for leaf, shape in (("gate", (experts, inner, hidden)), ("up", (experts, inner, hidden)), ("down", (experts, hidden, inner))):
            values = (rng.normal(size=shape) / shape[-1]**0.5).astype(np.float32)
            if name == "F16":
                stored = values.astype(np.float16)
                weights[leaf] = stored.astype(np.float64)
                out.add_tensor("blk.0.ffn_%s_exps.weight" % leaf, stored)
                continue
            try:
                raw = gguf.quants.quantize(values, kind)
            except NotImplementedError:
                raw = random_blocks(np, gguf, rng, kind, shape[0] * shape[1], shape[2])
                raw = raw.reshape(shape[:2] + (-1,))
            weights[leaf] = gguf.quants.dequantize(raw, kind).reshape(shape).astype(np.float64)
            out.add_tensor("blk.0.ffn_%s_exps.weight" % leaf, raw, raw_dtype=kind)
        for step in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
            step()
        x = rng.normal(size=(tokens, hidden)).astype(np.float32)
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in bf16
        logits = x.astype(np.float64) @ gate.T.astype(np.float64)
        scores = np.exp(logits - logits.max(1, keepdims=True))
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        y = np.zeros((tokens, hidden))
        for m in range(tokens):
            for e in chosen[m]:
                g, u = weights["gate"][e] @ x[m], weights["up"][e] @ x[m]
                y[m] += scores[m, e] / scores[m, chosen[m]].sum() * (weights["down"][e] @ (g / (1 + np.exp(-g)) * u))
        expect(0.05 < y.std() < 5, name, "outputs of", y.std(), "test nothing")
        golden = os.path.join(folder, name + ".golden")
        plain_container(golden, {"model.layers.0.mlp.input": ("F32", x), "model.layers.0.mlp.output": ("F64", y)})
        exact, own = verified(path, golden, "f32"), verified(path, golden, "as-is")
        values = 0 if name == "F16" else same_values(np, gguf, kind, rng)
        print("%-6s relative L2 %.1e in fp32, %.1e as stored; %d values decoded alike" % (name, exact, own, values))
        expect(exact < 2e-6 and own < 6e-3, name, "is beyond its bound")


# --- ml_dtypes: its casts, and quantisers put together from them ---

def filtered(np, name, direction, values, result):
    done = subprocess.run([FILTER, name, direction], input=values.tobytes(), capture_output=True, check=True, timeout=120)
    return np.frombuffer(done.stdout, dtype=result)


def ml_dtypes_test(folder):
    np, ml = needed("numpy", "ml_dtypes")
    rng = np.random.default_rng(6)
    formats = (("bf16", ml.bfloat16, 16, True), ("f16", np.float16, 16, True), ("e4m3", ml.float8_e4m3fn, 8, True), ("e5m2", ml.float8_e5m2, 8, False),
               ("e2m1", getattr(ml, "float4_e2m1fn", None), 4, True), ("e8m0", getattr(ml, "float8_e8m0fnu", None), 8, False),
               ("e4m3fnuz", ml.float8_e4m3fnuz, 8, False), ("e5m2fnuz", ml.float8_e5m2fnuz, 8, False))
    every_bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    patterns = rng.integers(0, 2**32, size=200000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    normal = rng.normal(size=200000).astype(np.float32) * 2.0**rng.integers(-12, 10, size=200000).astype(np.float32)
    inputs = np.concatenate([every_bf16, patterns, normal])
    inputs = inputs[np.isfinite(inputs)]
    for name, dtype, bits, encodes in formats:
        if dtype is None:
            print("%s: this ml_dtypes has no such type" % name)
            continue
        codes = np.arange(2**bits, dtype=np.uint16)
        theirs = codes.astype(np.uint16 if bits == 16 else np.uint8).view(dtype).astype(np.float32)
        ours = filtered(np, name, "decode", codes, np.float32)
        same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
        expect(same.all(), name, "code", codes[~same][:1], "is", ours[~same][:1], "not", theirs[~same][:1])
        checked = ""
        if encodes:
            # Ours saturate; beyond the largest number theirs may become infinite or NaN.
            largest = np.nanmax(np.where(np.isfinite(theirs), theirs, -1))
            x = inputs if bits == 16 else inputs[np.abs(inputs) <= largest]
            with np.errstate(over="ignore"):
                want = x.astype(dtype).view(np.uint16 if bits == 16 else np.uint8)
            got = filtered(np, name, "encode", x, np.uint16)
            wrong = got != want
            expect(not wrong.any(), name, "of", x[wrong][:1], "is", got[wrong][:1], "not", want[wrong][:1])
            checked = ", %d numbers rounded" % len(x)
        print("%s: %d codes%s" % (name, 2**bits, checked))
    if getattr(ml, "float4_e2m1fn", None) is not None:
        quantisers(np, ml, folder)


def quantisers(np, ml, folder):
    """What convert writes against the formats' definitions with casts of ml_dtypes."""
    before = {n: t for n, t in model_tensors(MODEL).items() if ".experts." in n}
    expect(len(before) > 10, "no experts in", MODEL)
    for scheme in ("fp8-channel", "fp8-block", "mxfp8", "mxfp4"):
        to = os.path.join(folder, scheme)
        moesaic("convert", "--model", MODEL, "--quant", scheme, "--output", to)
        after = model_tensors(to)
        for name, (dtype, shape, raw) in before.items():
            expect(dtype == "BF16", name, dtype)
            w = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
            n, k = shape
            module = name[:-len(".weight")]
            if scheme == "fp8-channel":
                scale = np.abs(w).max(1, keepdims=True) / np.float32(448)
                want = ((w / scale).astype(ml.float8_e4m3fn), scale)
            elif scheme == "fp8-block":
                bn, bk = -(-n // 128), -(-k // 128)
                padded = np.zeros((bn * 128, bk * 128), np.float32)
                padded[:n, :k] = np.abs(w)
                scale = padded.reshape(bn, 128, bk, 128).max((1, 3)) / np.float32(448)
                inverse = np.float32(1) / scale
                want = ((w * np.repeat(np.repeat(inverse, 128, 0), 128, 1)[:n, :k]).astype(ml.float8_e4m3fn), scale)
            else:
                groups = w.reshape(n, k // 32, 32)
                amax = np.abs(groups).max(2).astype(np.float64)
                if scheme == "mxfp8":
                    exponent = np.ceil(np.log2(amax / 448))
                else:  # the power of two below amax, or the one above from 1.75 times it; e2m1 reaches 4 times 1.5
                    down = np.floor(np.log2(amax))
                    exponent = down + (amax >= 1.75 * 2.0**down) - 2
                scaled = np.clip(groups / 2.0**exponent[:, :, None], -448 if scheme == "mxfp8" else -6, 448 if scheme == "mxfp8" else 6)
                codes = scaled.astype(ml.float8_e4m3fn if scheme == "mxfp8" else ml.float4_e2m1fn).reshape(n, k)
                if scheme == "mxfp4":
                    nibbles = codes.view(np.uint8) & 15
                    codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
                want = (codes, (exponent + 127).astype(np.uint8))
            suffixes = {"mxfp4": (".weight_packed", ".weight_scale"), "fp8-block": (".weight", ".weight_scale_inv")}
            for suffix, array in zip(suffixes.get(scheme, (".weight", ".weight_scale")), want):
                expect(after[module + suffix][2] == array.tobytes(), scheme, module + suffix, "differs")
        print("%s: %d linears, every byte" % (scheme, len(before)))


# --- safetensors: written there and read here, and the reverse ---

def safetensors_test(folder):
    np, package, numpy_api = needed("numpy", "safetensors", "safetensors.numpy")
    arrays = {}
    for name, (dtype, shape, raw) in model_tensors(MODEL).items():
        expect(dtype == "BF16", name, dtype)
        arrays[name] = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    theirs = os.path.join(folder, "theirs")
    os.makedirs(theirs)
    numpy_api.save_file(arrays, os.path.join(theirs, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    with open(os.path.join(theirs, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    error = verified(theirs, os.path.join(MODEL, "golden.safetensors"), "as-is")
    print("a model that the package wrote: relative L2 %.1e" % error)
    expect(error < 2e-6, "beyond the bound of f32")

    ours = os.path.join(folder, "ours")
    moesaic("convert", "--model", MODEL, "--quant", "nvfp4", "--output", ours)
    tensors = 0
    for file in sorted(os.listdir(ours)):
        if not file.endswith(".safetensors"):
            continue
        path = os.path.join(ours, file)
        with open(path, "rb") as f:
            read = dict(package.deserialize(f.read()))  # checks the container
        by_hand = read_container(path)
        expect(set(read) == set(by_hand), file, "has other names")
        for name, t in read.items():
            expect((t["dtype"], list(t["shape"]), bytes(t["data"])) == by_hand[name], file, name, "differs")
        tensors += len(read)
    print("files that we wrote: %d tensors read alike" % tensors)
    expect(tensors > 50, "too few")
    result = os.path.join(folder, "out.safetensors")
    golden = os.path.join(MODEL, "golden.safetensors")
    moesaic("run", "--model", MODEL, "--layer", 1, "--input", golden + ":model.layers.1.mlp.input", "--output", result, "--device", "cpu")
    out = numpy_api.load_file(result)
    expect(out["output"].dtype == np.float32 and out["topk_ids"].dtype == np.int32, "dtypes of", out)
    expect(out["output"].shape[0] == out["topk_ids"].shape[0] == 256, "rows of", result)


# --- transformers: every family as it saves it, and its own block in float64 ---

def transformers_test(folder):
    torch, transformers, _ = needed("torch", "transformers", "safetensors.torch")
    import family_checkpoints
    wrong, count = [], 0
    for row, folders in family_checkpoints.write_all(torch, transformers, folder):
        for model in folders:
            name, count = os.path.basename(model), count + 1
            for quant, bound in (("f32", 2e-6), ("bf16", 6e-3))[:1 if name.endswith(".memory") else 2]:
                done = subprocess.run([TOOL, "verify", "--model", model, "--quant", quant, "--device", "cpu", "--json"],
                                      capture_output=True, text=True, timeout=300)
                report = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
                error = report.get("worst_rel_l2")
                good = done.returncode == 0 and error is not None and error <= bound
                print("%-32s %-4s %s" % (name, quant, "relative L2 %.1e" % error if error is not None else report.get("message", done.stderr)),
                      flush=True)
                if not good:
                    wrong.append("%s as %s" % (name, quant))
    print("%d checkpoints of %d rows" % (count, len(family_checkpoints.ROWS)))
    expect(not wrong, "refused or beyond the bound:", ", ".join(wrong))


def main():
    tests = {"gguf": gguf_test, "ml_dtypes": ml_dtypes_test, "safetensors": safetensors_test, "transformers": transformers_test}
    folder = tempfile.mkdtemp()
    try:
        tests[PACKAGE](folder)
    finally:
        shutil.rmtree(folder)
    print("ok")


main()
