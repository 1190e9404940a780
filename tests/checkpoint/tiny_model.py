"""Tiny checkpoints in every storage a family may have, made without the library under test.

Numbers are handled as the bytes of one element, so that the expected canonical tensors are exact by
construction: nothing here rounds. A matrix is a list of rows, a row a list of elements.
"""

import json
import os
import random
import struct

from corpus import container

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "F8_E8M0": 1, "F4": 0.5, "I8": 1, "I32": 4, "I64": 8, "F64": 8}


def element(rng, dtype):
    """One random finite element, as bytes."""
    if dtype == "F8_E4M3":
        return bytes([rng.choice([0x00, 0x80]) | rng.randrange(0x7F)])  # 0x7F and 0xFF are NaN
    value = struct.pack("<f", rng.uniform(-2, 2))
    if dtype == "BF16":
        return value[2:]
    if dtype == "F16":
        return struct.pack("<e", rng.uniform(-2, 2))
    return value


def widen(e, dtype):
    """The F32 bytes of an element."""
    if dtype == "F8_E8M0":
        return struct.pack("<f", 2.0**(e[0] - 127))
    if dtype == "BF16":
        return b"\0\0" + e
    if dtype == "F16":
        return struct.pack("<f", struct.unpack("<e", e)[0])
    return e


def matrix(rng, dtype, rows, cols):
    return [[element(rng, dtype) for _ in range(cols)] for _ in range(rows)]


def scales(rng, dtype, rows, cols):
    """Positive block scales."""
    def one():
        if dtype == "F8_E8M0":
            return bytes([rng.randrange(117, 124)])
        value = struct.pack("<f", rng.uniform(0.001, 0.1))
        return value[2:] if dtype == "BF16" else value
    return [[one() for _ in range(cols)] for _ in range(rows)]


def transpose(m):
    return [list(column) for column in zip(*m)]


def interleave(a, b):
    """Columns a0 b0 a1 b1 ..."""
    return [[e for pair in zip(x, y) for e in pair] for x, y in zip(a, b)]


def flat(m):
    return b"".join(b"".join(row) for row in m)


class Tensor:
    def __init__(self, dtype, shape, data):
        n = 1
        for d in shape:
            n *= d
        assert len(data) == n * SIZES[dtype], (dtype, shape, len(data))
        self.dtype, self.shape, self.data = dtype, list(shape), data


def tensor(dtype, m):
    return Tensor(dtype, [len(m), len(m[0])], flat(m))


def vector(dtype, row):
    return Tensor(dtype, [len(row)], b"".join(row))


def stack(dtype, matrices):
    return Tensor(dtype, [len(matrices), len(matrices[0]), len(matrices[0][0])], b"".join(map(flat, matrices)))


def stack_rows(dtype, rows):
    return Tensor(dtype, [len(rows), len(rows[0])], b"".join(b"".join(r) for r in rows))


def safetensors(tensors, rng=None):
    """A file; with rng the data lie in random order."""
    names = list(tensors)
    if rng:
        rng.shuffle(names)
    parts, data = [], b""
    for name in names:
        t = tensors[name]
        parts.append('%s:{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}'
                     % (json.dumps(name), t.dtype, json.dumps(t.shape), len(data), len(data) + len(t.data)))
        data += t.data
    return container("{" + ",".join(parts) + "}", data)


def write_model(folder, config, tensors, rng, shards=1):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    names = list(tensors)
    rng.shuffle(names)
    if shards == 1:
        files = {"model.safetensors": names}
    else:
        files = {"model-%05d-of-%05d.safetensors" % (s + 1, shards): names[s::shards] for s in range(shards)}
        index = {"weight_map": {n: f for f, held in files.items() for n in held}}
        with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
            json.dump(index, f)
    for name, held in files.items():
        with open(os.path.join(folder, name), "wb") as f:
            f.write(safetensors({n: tensors[n] for n in held}, rng))


class Mlp:
    """One expert: gate, up [I, H], down [H, I], and block scales when FP8."""

    def __init__(self, rng, dtype, h, i, scale_dtype="F32"):
        self.dtype, self.scale_dtype = dtype, scale_dtype
        self.gate, self.up, self.down = matrix(rng, dtype, i, h), matrix(rng, dtype, i, h), matrix(rng, dtype, h, i)
        if dtype == "F8_E4M3":
            blocks = lambda n: -(-n // 128)
            self.gate_scale = scales(rng, scale_dtype, blocks(i), blocks(h))
            self.up_scale = scales(rng, scale_dtype, blocks(i), blocks(h))
            self.down_scale = scales(rng, scale_dtype, blocks(h), blocks(i))

    def w13(self):
        return self.gate + self.up

    def w13_scale(self):
        return [[widen(e, self.scale_dtype) for e in row] for row in self.gate_scale + self.up_scale]

    def w2_scale(self):
        return [[widen(e, self.scale_dtype) for e in row] for row in self.down_scale]


class Layer:
    """One MoE layer: what goes into the files and what must come out of the loader. Files whose names begin with
    "^" lie beside the block. `columns`: of the router (more than e with zero experts)."""

    def __init__(self, rng, e, h, i, dtype="BF16", scale_dtype="F32", expert_bias=None, gate_dtype="BF16",
                 columns=None, gated=True):
        self.columns, self.gated = columns or e, gated
        self.e, self.h, self.i, self.dtype, self.scale_dtype = e, h, i, dtype, scale_dtype
        self.experts = [Mlp(rng, dtype, h, i, scale_dtype) for _ in range(e)]
        self.gate_dtype = gate_dtype
        self.gate = matrix(rng, gate_dtype, self.columns, h)
        self.files, self.expected = {}, {}
        self.shared_mlp = self.shared_dtype = None
        self.expert_bias = expert_bias
        if expert_bias:
            self.bias13 = [[element(rng, expert_bias) for _ in range(2 * i)] for _ in range(e)]  # gate entries first
            self.bias2 = [[element(rng, expert_bias) for _ in range(h)] for _ in range(e)]
        self.expected["w13"] = stack(dtype, [x.w13() if gated else x.up for x in self.experts])
        self.expected["w2"] = stack(dtype, [x.down for x in self.experts])
        if dtype == "F8_E4M3":
            self.expected["w13_scale"] = stack("F32", [x.w13_scale() for x in self.experts])
            self.expected["w2_scale"] = stack("F32", [x.w2_scale() for x in self.experts])
        if expert_bias:
            self.expected["w13_bias"] = stack_rows("F32", [[widen(b, expert_bias) for b in r] for r in self.bias13])
            self.expected["w2_bias"] = stack_rows("F32", [[widen(b, expert_bias) for b in r] for r in self.bias2])

    # --- router and shared expert ---

    def router(self, name="gate.weight"):
        self.files[name] = self.expected["gate_weight"] = tensor(self.gate_dtype, self.gate)
        return self

    def router_bias(self, rng, name, dtype="BF16"):
        self.files[name] = self.expected["gate_bias"] = vector(dtype, [element(rng, dtype) for _ in range(self.e)])
        return self

    def correction_bias(self, rng, name, dtype="F32", as_matrix=False):
        row = [element(rng, dtype) for _ in range(self.columns)]
        self.files[name] = tensor(dtype, [row]) if as_matrix else vector(dtype, row)
        self.expected["e_score_correction_bias"] = vector("F32", [widen(x, dtype) for x in row])
        return self

    def hash_table(self, rng, name, vocabulary, top_k):
        """Experts of every token id: I64 in the file, I32 when loaded."""
        ids = [rng.randrange(self.e) for _ in range(vocabulary * top_k)]
        self.files[name] = Tensor("I64", [vocabulary, top_k], struct.pack("<%dq" % len(ids), *ids))
        self.expected["hash_table"] = Tensor("I32", [vocabulary, top_k], struct.pack("<%di" % len(ids), *ids))
        return self

    def normed_router(self, rng):
        """Gemma 4: vectors beside the block; the router's scale and 1 / sqrt(h) become part of its weight (exact in F32
        where h is a power of four)."""
        value = lambda e, dtype="BF16": struct.unpack("<f", widen(e, dtype))[0]
        vectors = {n: [element(rng, "BF16") for _ in range(length)] for n, length in (
            ("router.scale", self.h), ("router.per_expert_scale", self.e), ("pre_feedforward_layernorm_2.weight", self.h))}
        self.files.update({"^" + n: vector("BF16", row) for n, row in vectors.items()})
        self.files["^router.proj.weight"] = tensor(self.gate_dtype, self.gate)
        root = self.h ** 0.5
        self.expected["gate_weight"] = tensor("F32", [
            [struct.pack("<f", value(w, self.gate_dtype) * value(s) / root) for w, s in zip(row, vectors["router.scale"])] for row in self.gate])
        wide = lambda n: vector("F32", [widen(x, "BF16") for x in vectors[n]])
        self.expected["expert_scale"] = wide("router.per_expert_scale")
        self.expected["experts_norm_weight"] = wide("pre_feedforward_layernorm_2.weight")
        return self

    def shared(self, rng, module, s, dtype=None, gate=None, fused=False, up_first=False, names=("gate_proj", "up_proj", "down_proj")):
        dtype = dtype or self.dtype
        mlp = Mlp(rng, dtype, self.h, s, self.scale_dtype)
        self.shared_mlp, self.shared_dtype = mlp, dtype
        if fused:
            leaves = (("input_linear", mlp.gate + mlp.up), ("output_linear", mlp.down))
        elif up_first:
            leaves = (("gate_and_up_proj", mlp.up + mlp.gate), ("down_proj", mlp.down))
        else:
            leaves = tuple(zip(names, (mlp.gate, mlp.up, mlp.down)))[0 if self.gated else 1:]
        for leaf, m in leaves:
            self.files["%s.%s.weight" % (module, leaf)] = tensor(dtype, m)
        self.expected["shared_w13"] = stack(dtype, [mlp.w13() if self.gated else mlp.up])
        self.expected["shared_w2"] = stack(dtype, [mlp.down])
        if dtype == "F8_E4M3":
            for leaf, m in (("gate_proj", mlp.gate_scale), ("up_proj", mlp.up_scale), ("down_proj", mlp.down_scale)):
                self.files["%s.%s.weight_scale_inv" % (module, leaf)] = tensor(self.scale_dtype, m)
            self.expected["shared_w13_scale"] = stack("F32", [mlp.w13_scale()])
            self.expected["shared_w2_scale"] = stack("F32", [mlp.w2_scale()])
        if gate:
            self.files[gate] = self.expected["shared_gate"] = tensor("BF16", matrix(rng, "BF16", 1, self.h))
        return self

    # --- storages of the experts ---

    def per_expert(self, gate="gate_proj", up="up_proj", down="down_proj", module="experts."):
        for n, x in enumerate(self.experts):
            for leaf, m in ((gate, x.gate), (up, x.up), (down, x.down))[0 if self.gated else 1:]:
                if len(m[0][0]) != SIZES[self.dtype]:
                    continue  # of another dtype: mixed()
                self.files["%s%d.%s.weight" % (module, n, leaf)] = tensor(self.dtype, m)
            if self.dtype == "F8_E4M3":
                for leaf, m in ((gate, x.gate_scale), (up, x.up_scale), (down, x.down_scale)):
                    self.files["experts.%d.%s.weight_scale_inv" % (n, leaf)] = tensor(self.scale_dtype, m)
        return self

    def scales_stacked(self):
        """Weights one by one, scales in tensors of all: what transformers makes of FP8 weights that it holds fused."""
        self.per_expert()
        self.files = {n: t for n, t in self.files.items() if not n.endswith("_scale_inv")}
        self.files["experts.gate_up_proj_scale_inv"] = stack(self.scale_dtype, [x.gate_scale + x.up_scale for x in self.experts])
        self.files["experts.down_proj_scale_inv"] = stack(self.scale_dtype, [x.down_scale for x in self.experts])
        return self

    def spare(self, rng, count):
        """Gate and up of zero experts, which nothing reads: behind those of the others, or one by one."""
        gate_up = self.files.get("experts.gate_up_proj")
        if gate_up:
            more = [matrix(rng, self.dtype, 2 * self.i, self.h) for _ in range(count)]
            self.files["experts.gate_up_proj"] = Tensor(self.dtype, [self.e + count] + gate_up.shape[1:], gate_up.data + b"".join(map(flat, more)))
            return self
        for e in range(self.e, self.e + count):
            for leaf in ("gate_proj", "up_proj"):
                self.files["experts.%d.%s.weight" % (e, leaf)] = tensor(self.dtype, matrix(rng, self.dtype, self.i, self.h))
        return self

    def mixed(self, rng, picks):
        """Other dtypes for some matrices (expert, leaf, dtype); the layer is F32 once loaded. Before the storage is chosen."""
        kinds = {(e, leaf): dtype for e, leaf, dtype in picks}
        wide = lambda m, dtype: [[widen(x, dtype) for x in row] for row in m]
        w13, w2 = [], []
        for e, x in enumerate(self.experts):
            parts = {}
            for leaf in ("gate", "up", "down"):
                dtype = kinds.get((e, leaf), self.dtype)
                if dtype != self.dtype:
                    m = getattr(x, leaf)
                    setattr(x, leaf, matrix(rng, dtype, len(m), len(m[0])))
                parts[leaf] = wide(getattr(x, leaf), dtype)
            w13.append(parts["gate"] + parts["up"])
            w2.append(parts["down"])
        self.expected["w13"], self.expected["w2"] = stack("F32", w13), stack("F32", w2)
        self.per_expert()
        for (e, leaf), dtype in kinds.items():
            self.files["experts.%d.%s_proj.weight" % (e, leaf)] = tensor(dtype, getattr(self.experts[e], leaf))
        return self

    def up_first(self):
        for n, x in enumerate(self.experts):
            self.files["experts.%d.gate_and_up_proj.weight" % n] = tensor(self.dtype, x.up + x.gate)
            self.files["experts.%d.down_proj.weight" % n] = tensor(self.dtype, x.down)
        return self

    def w123(self):
        return self.per_expert("w1", "w3", "w2")

    def fused_nt(self, suffix="", module="experts."):
        self.files[module + "gate_up_proj" + suffix] = stack(self.dtype, [x.gate + x.up for x in self.experts])
        self.files[module + "down_proj" + suffix] = stack(self.dtype, [x.down for x in self.experts])
        if self.dtype == "F8_E4M3":
            self.files["experts.gate_up_proj_scale_inv"] = stack(self.scale_dtype, [x.gate_scale + x.up_scale for x in self.experts])
            self.files["experts.down_proj_scale_inv"] = stack(self.scale_dtype, [x.down_scale for x in self.experts])
        return self

    def granite(self):
        self.files["input_linear.weight"] = stack(self.dtype, [x.gate + x.up for x in self.experts])
        self.files["output_linear.weight"] = stack(self.dtype, [x.down for x in self.experts])
        return self

    def fused_nn(self):
        self.files["experts.gate_up_proj"] = stack(self.dtype, [transpose(x.gate + x.up) for x in self.experts])
        self.files["experts.down_proj"] = stack(self.dtype, [transpose(x.down) for x in self.experts])
        return self

    def stacked(self):
        for leaf in ("gate", "up", "down"):
            self.files[leaf + "_proj.weight"] = stack(self.dtype, [getattr(x, leaf) for x in self.experts])
            if self.dtype == "F8_E4M3":
                self.files[leaf + "_proj.weight_scale_inv"] = stack(self.scale_dtype, [getattr(x, leaf + "_scale") for x in self.experts])
        return self

    def flat(self):
        rows = lambda part: [row for x in self.experts for row in part(x)]
        self.files["experts.mlp.w1"] = tensor(self.dtype, rows(lambda x: x.gate))
        self.files["experts.mlp.v1"] = tensor(self.dtype, rows(lambda x: x.up))
        self.files["experts.mlp.w2"] = tensor(self.dtype, rows(lambda x: transpose(x.down)))
        return self

    def fused_nn_interleaved(self):
        self.files["experts.gate_up_proj"] = stack(
            self.dtype, [interleave(transpose(x.gate), transpose(x.up)) for x in self.experts])
        self.files["experts.down_proj"] = stack(self.dtype, [transpose(x.down) for x in self.experts])
        if self.expert_bias:
            rows = [[b for pair in zip(r[:self.i], r[self.i:]) for b in pair] for r in self.bias13]
            self.files["experts.gate_up_proj_bias"] = stack_rows(self.expert_bias, rows)
            self.files["experts.down_proj_bias"] = stack_rows(self.expert_bias, self.bias2)
        return self

    def fused_nn_halves(self):
        """gpt-oss's biases beside gate and up in halves."""
        self.fused_nn()
        self.files["experts.gate_up_proj_bias"] = stack_rows(self.expert_bias, self.bias13)
        self.files["experts.down_proj_bias"] = stack_rows(self.expert_bias, self.bias2)
        return self

    def fused_nn_fc(self):
        self.fused_nn()
        for name, old in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
            self.files["experts.%s.weight" % name] = self.files.pop("experts." + old)
        return self

    def fused_nt_interleaved(self):
        self.files["experts.w13_weight"] = stack(self.dtype, [[r for pair in zip(x.gate, x.up) for r in pair] for x in self.experts])
        self.files["experts.w2_weight"] = stack(self.dtype, [x.down for x in self.experts])
        return self

    def named(self, prefix):
        layer = prefix.rsplit(".", 1)[0]
        return {"%s.%s" % (layer if n[0] == "^" else prefix, n.lstrip("^")): t for n, t in self.files.items()}


class Mxfp4Layer:
    """gpt-oss experts in MXFP4: bytes of two codes (low nibble first), a power of two per 32; rows of gate_up lie gate, up,
    gate, up in the file and gate first, then up, canonically."""

    def __init__(self, rng, e, h, i):
        byte = lambda n: bytes(rng.randrange(256) for _ in range(n))
        power = lambda n: bytes(rng.randrange(100, 150) for _ in range(n))
        self.files, self.expected = {}, {}
        matrices = {"w13": [], "w13_scale": [], "w2": [], "w2_scale": []}
        blocks, powers = [], []
        for _ in range(e):
            rows = [(byte(h // 2), power(h // 32)) for _ in range(2 * i)]  # canonical order
            in_file = [rows[r // 2 + (r % 2) * i] for r in range(2 * i)]
            blocks.append(b"".join(r[0] for r in in_file))
            powers.append(b"".join(r[1] for r in in_file))
            matrices["w13"].append(b"".join(r[0] for r in rows))
            matrices["w13_scale"].append(b"".join(r[1] for r in rows))
            matrices["w2"].append(byte(h * i // 2))
            matrices["w2_scale"].append(power(h * i // 32))
        join = b"".join
        self.files["experts.gate_up_proj_blocks"] = Tensor("U8", [e, 2 * i, h // 32, 16], join(blocks))
        self.files["experts.gate_up_proj_scales"] = Tensor("U8", [e, 2 * i, h // 32], join(powers))
        self.files["experts.down_proj_blocks"] = Tensor("U8", [e, h, i // 32, 16], join(matrices["w2"]))
        self.files["experts.down_proj_scales"] = Tensor("U8", [e, h, i // 32], join(matrices["w2_scale"]))
        self.expected["w13"] = Tensor("F4", [e, 2 * i, h], join(matrices["w13"]))
        self.expected["w2"] = Tensor("F4", [e, h, i], join(matrices["w2"]))
        self.expected["w13_scale"] = Tensor("F8_E8M0", [e, 2 * i, h // 32], join(matrices["w13_scale"]))
        self.expected["w2_scale"] = Tensor("F8_E8M0", [e, h, i // 32], join(matrices["w2_scale"]))
        bias13 = [[element(rng, "BF16") for _ in range(2 * i)] for _ in range(e)]  # gate entries first
        bias2 = [[element(rng, "BF16") for _ in range(h)] for _ in range(e)]
        lie = [[b for pair in zip(r[:i], r[i:]) for b in pair] for r in bias13]
        self.files["experts.gate_up_proj_bias"] = stack_rows("BF16", lie)
        self.files["experts.down_proj_bias"] = stack_rows("BF16", bias2)
        wide = lambda rows: stack_rows("F32", [[widen(b, "BF16") for b in r] for r in rows])
        self.expected["w13_bias"], self.expected["w2_bias"] = wide(bias13), wide(bias2)
        gate = tensor("BF16", matrix(rng, "BF16", e, h))
        self.files["router.weight"] = self.expected["gate_weight"] = gate
        bias = vector("BF16", [element(rng, "BF16") for _ in range(e)])
        self.files["router.bias"] = self.expected["gate_bias"] = bias

    def named(self, prefix):
        return {"%s.%s" % (prefix, n): t for n, t in self.files.items()}
