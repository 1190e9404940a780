#!/usr/bin/env python3
"""Malformed GGUF files and models, with the refusal that each must get."""

import random
import struct

from corpus import main
from gguf_file import ARRAY, BOOL, F32, F64, I32, I64, STRING, U8, U16, U32, U64, assemble, entry, info, metadata, pad, string, value
from gguf_model import gguf_file, layer_tensors
from tiny_model import Layer, Tensor

CORRUPT, LIMIT, MISSING, ARGUMENT = "corrupt_file", "limit_exceeded", "missing_tensor", "invalid_argument"
UNSUPPORTED, AMBIGUOUS, SHAPE, DTYPE, NOT_FOUND = "unsupported", "ambiguous_format", "invalid_shape", "invalid_dtype", "not_found"
BIG = 2**64 - 1


def container(c):
    good = assemble([entry("k", U8, 1)], [info("a", [2, 3], 0, 0)], pad(bytes(24)))
    def cut(name, n, keywords):
        c.gguf(name, good[:n], CORRUPT, keywords)
    c.gguf("empty", b"", CORRUPT, ["magic", "got 0 bytes"])
    cut("cut_in_magic", 3, ["magic", "ends too early"])
    cut("cut_after_magic", 4, ["version", "ends too early"])
    cut("cut_in_counts", 20, ["metadata count", "ends too early"])
    cut("cut_in_key", 30, ["metadata count", "fit"])
    cut("cut_in_infos", len(good) - 60, ["tensor"])
    cut("cut_in_data", len(good) - 10, ["data", "need 24"])
    c.gguf("wrong_magic", assemble([], [], b"", magic=b"GGML"), CORRUPT, ["magic", "GGUF"])
    c.gguf("version_0", assemble([], [], b"", version=0), CORRUPT, ["version", "got 0"])
    c.gguf("version_1", assemble([], [], b"", version=1), UNSUPPORTED, ["version", "got 1"])
    c.gguf("version_4", assemble([], [], b"", version=4), UNSUPPORTED, ["version", "got 4"])
    c.gguf("version_huge", assemble([], [], b"", version=1 << 20), CORRUPT, ["version", "1048576"])
    c.gguf("big_endian", assemble([], [], b"", version=3 << 24), UNSUPPORTED, ["version", "big-endian"])
    for name, n in {"one_more": 2, "many": 10**6, "all_ones": BIG, "sign_bit": 1 << 63}.items():
        c.gguf("tensor_count_" + name, assemble([entry("k", U8, 1)], [info("a", [2, 3], 0, 0)], bytes(32), num_tensors=n), CORRUPT, "tensor")
        c.gguf("entry_count_" + name, assemble([entry("k", U8, 1)], [info("a", [2, 3], 0, 0)], bytes(32), num_entries=n), CORRUPT,
               "tensor 0" if n == 2 else "metadata")
    c.gguf("trailing_byte", good + b"\0", CORRUPT, ["data", "need 24"])
    c.gguf("trailing_block", good + bytes(32), CORRUPT, ["data", "need 24"])
    c.gguf("data_without_tensors", assemble([], [], bytes(64)), CORRUPT, ["data", "without a tensor"])
    c.gguf("not_gguf_at_all", b'{"a": 1}' * 10, CORRUPT, "magic")


def entries(c):
    def bad(name, raw, code, keywords):
        c.gguf("entry_" + name, assemble(raw if isinstance(raw, list) else [raw], [info("a", [2, 3], 0, 0)], pad(bytes(24))), code, keywords)
    head = lambda kind: string("k") + struct.pack("<I", kind)
    bad("kind_13", head(13) + bytes(8), CORRUPT, ["\"k\"", "value type", "got 13"])
    bad("kind_huge", head(2**32 - 1) + bytes(8), CORRUPT, ["\"k\"", "value type"])
    bad("bool_2", head(BOOL) + b"\2", CORRUPT, ["\"k\"", "bool", "got the bool 2"])
    bad("u64_above", entry("k", U64, 1 << 63), LIMIT, ["\"k\"", str(1 << 63)])
    bad("twice", [entry("k", U8, 1), entry("k", U8, 1)], CORRUPT, ["\"k\"", "twice"])
    bad("empty_key", entry("", U8, 1), CORRUPT, ["metadata key 0", "name"])
    bad("nul_key", entry("a\0b", U8, 1), CORRUPT, ["metadata key 0", "a\\x00b"])
    bad("newline_key", entry("a\nb", U8, 1), CORRUPT, "metadata key 0")
    bad("long_key", entry("k" * 70000, U8, 1), LIMIT, ["metadata key 0", "65535"])
    bad("key_beyond_file", struct.pack("<Q", 10**9) + b"k" * 20, CORRUPT, ["metadata key 0", "ends too early"])
    bad("key_all_ones", struct.pack("<Q", BIG) + b"k" * 20, CORRUPT, ["metadata key 0", "ends too early"])
    bad("string_beyond_file", head(STRING) + struct.pack("<Q", 10**6), CORRUPT, ["\"k\"", "ends too early"])
    bad("string_huge", head(STRING) + struct.pack("<Q", 17 << 20) + bytes(17 << 20), LIMIT, ["\"k\"", "16777216"])
    bad("list_of_lists", head(ARRAY) + struct.pack("<IQ", ARRAY, 1) + value(ARRAY, (U8, [1])), UNSUPPORTED, ["\"k\"", "list of lists"])
    bad("list_kind", head(ARRAY) + struct.pack("<IQ", 77, 1) + bytes(8), CORRUPT, ["\"k\"", "element type", "77"])
    for kind, label in ((U8, "u8"), (U64, "u64"), (STRING, "string"), (F64, "f64")):
        bad("list_%s_too_long" % label, head(ARRAY) + struct.pack("<IQ", kind, 10**9), CORRUPT, ["\"k\"", "1000000000"])
        bad("list_%s_all_ones" % label, head(ARRAY) + struct.pack("<IQ", kind, BIG), CORRUPT, ["\"k\"", "fit"])
    bad("list_string_cut", head(ARRAY) + struct.pack("<IQ", STRING, 2) + string("a") + struct.pack("<Q", 999), CORRUPT, ["\"k\"", "ends too early"])
    bad("list_bool_3", head(ARRAY) + struct.pack("<IQ", BOOL, 2) + b"\1\3", CORRUPT, ["\"k\"", "got the bool 3"])
    for name, kind, v in (("zero", U32, 0), ("not_power", U32, 48), ("negative", I32, -32), ("huge", U32, 1 << 21)):
        bad("alignment_" + name, entry("general.alignment", kind, v), CORRUPT, ["general.alignment", "got %d" % v, "power of two"])
    bad("alignment_string", entry("general.alignment", STRING, "32"), CORRUPT, ["general.alignment", "a string"])
    bad("alignment_float", entry("general.alignment", F32, 32.0), CORRUPT, ["general.alignment", "a number"])


def infos(c):
    def bad(name, raw, code, keywords, data=pad(bytes(24))):
        c.gguf("info_" + name, assemble([entry("k", U8, 1)], raw if isinstance(raw, list) else [raw], data), code, keywords)
    raw = lambda dims, kind=0, offset=0, n=None: string("a") + struct.pack("<I", len(dims) if n is None else n) + b"".join(
        struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset)
    bad("rank_0", raw([]), CORRUPT, ["\"a\"", "n_dims", "got 0"])
    bad("rank_5", raw([1, 1, 1, 2, 3]), CORRUPT, ["\"a\"", "n_dims", "got 5"])
    bad("rank_huge", raw([2, 3], n=2**32 - 1), CORRUPT, ["\"a\"", "n_dims"])
    bad("empty_name", info("", [2, 3], 0, 0), CORRUPT, ["tensor 0", "name"])
    bad("control_name", info("a\1", [2, 3], 0, 0), CORRUPT, ["tensor 0", "a\\x01"])
    bad("long_name", info("a" * 2000, [2, 3], 0, 0), LIMIT, ["tensor 0", "1024"])
    bad("name_beyond", struct.pack("<Q", 10**9) + bytes(40), CORRUPT, ["tensor 0", "ends too early"])
    bad("twice", [info("a", [8], 0, 0), info("a", [8], 0, 32)], CORRUPT, ["\"a\"", "twice"], bytes(64))
    bad("dim_all_ones", raw([BIG, 1]), LIMIT, ["\"a\"", "overflow"])
    bad("dims_overflow", raw([1 << 32, 1 << 31]), LIMIT, ["\"a\"", "overflow"])
    bad("dims_wrap_to_small", raw([1 << 32, 1 << 32]), LIMIT, ["\"a\"", "overflow"])
    bad("bytes_overflow", raw([1 << 61]), LIMIT, ["\"a\"", "overflow"])
    bad("too_many_elements", raw([1 << 40]), CORRUPT, ["data"])
    bad("one_element_more", raw([25]), CORRUPT, ["data", "need 100"])
    bad("type_4", raw([2, 3], 4), UNSUPPORTED, ["\"a\"", "type", "number 4"])
    bad("type_99", raw([2, 3], 99), UNSUPPORTED, ["\"a\"", "type", "number 99"])
    for kind, name, block in ((2, "Q4_0", 32), (8, "Q8_0", 32), (12, "Q4_K", 256), (14, "Q6_K", 256), (7, "Q5_1", 32), (11, "Q3_K", 256),
                              (20, "IQ4_NL", 32), (23, "IQ4_XS", 256), (34, "TQ1_0", 256), (16, "IQ2_XXS", 256), (41, "Q1_0", 128)):
        bad("row_not_blocks_" + name, raw([block + 1], kind), CORRUPT, ["\"a\"", name, str(block)])
        bad("row_below_block_" + name, raw([block // 2], kind), CORRUPT, ["\"a\"", name, str(block)])
        bad("block_off_by_one_" + name, raw([block], kind), CORRUPT, ["data", "got 1"], bytes(1))
    bad("offset_unaligned", raw([2, 3], offset=8), CORRUPT, ["\"a\"", "offset", "got 8", "alignment 32"])
    bad("offset_hole", raw([2, 3], offset=32), CORRUPT, ["\"a\"", "offset", "got 32", "need 0"], bytes(64))
    bad("offset_all_ones", raw([2, 3], offset=BIG - 31), CORRUPT, ["\"a\"", "offset"])
    two = lambda second, n=8: [info("a", [8], 0, 0), info("b", [n], 0, second)]
    bad("second_hole", two(64), CORRUPT, ["\"b\"", "got 64", "need 32"], bytes(96))
    bad("second_overlap", two(0), CORRUPT, ["\"b\"", "got 0", "need 32"], bytes(64))
    bad("second_missing_data", two(32), CORRUPT, ["data", "got 32", "need 64"], bytes(32))


def models(c):
    sizes = {"block_count": 2, "embedding_length": 16, "expert_feed_forward_length": 8, "expert_count": 4, "expert_used_count": 2}
    p = "blk.1."

    def tensors(seed, **kinds):
        return layer_tensors(Layer(random.Random(seed), 4, 16, 8, **kinds).router(), 1)

    def meta(name, changes, code, keywords, architecture="qwen3moe", door="checkpoint", extra=()):
        keys = {k: v for k, v in dict(sizes, **changes).items() if v is not Ellipsis}
        c.gguf("meta_" + name, gguf_file(metadata(architecture, **keys) + list(extra), tensors(name)), code, keywords, door)

    meta("good", {}, "ok", [], door="layer")
    c.gguf("meta_no_architecture", gguf_file([("k", U8, 1)], tensors("x")), CORRUPT, ["general.architecture", "missing"])
    c.gguf("meta_architecture_number", gguf_file([("general.architecture", U32, 3)], tensors("x")), CORRUPT, ["general.architecture", "an integer"])
    meta("unknown_architecture", {}, UNSUPPORTED, ["general.architecture", "qwen3mo", "nearest is qwen3moe"], architecture="qwen3mo")
    meta("dense_architecture", {}, UNSUPPORTED, ["general.architecture", "whisper"], architecture="whisper")
    for key in ("block_count", "embedding_length", "expert_used_count"):
        meta("no_" + key, {key: ...}, CORRUPT, ["qwen3moe." + key, "missing"])
        meta("zero_" + key, {key: 0}, ARGUMENT, ["qwen3moe." + key, "got 0"])
        meta("float_" + key, {key: 2.0}, CORRUPT, ["qwen3moe." + key, "a number"])
        meta("bool_" + key, {key: True}, CORRUPT, ["qwen3moe." + key, "a bool"])
    meta("no_width", {"expert_feed_forward_length": ...}, CORRUPT, ["qwen3moe.feed_forward_length", "missing"])
    meta("top_k_above_experts", {"expert_used_count": 5}, ARGUMENT, ["expert_used_count", "got 5", "1 to 4"])
    for name, value, found in (("no_expert_count", ..., "missing"), ("zero_expert_count", 0, "got 0")):
        meta(name, {"expert_count": value}, CORRUPT, ['"qwen3moe.expert_count": ' + found, "1 to 16384", "blk.1.ffn_gate_exps"])
    c.gguf("meta_dense", gguf_file(metadata("qwen3moe", **dict(sizes, expert_count=0)), {"blk.0.ffn_up.weight": Tensor("BF16", [8, 16], bytes(256))}), "ok")
    single = {"blk.1.ffn_up.0.weight": Tensor("BF16", [8, 16], bytes(256))}
    c.gguf("meta_dense_with_an_expert", gguf_file(metadata("qwen3moe", **dict(sizes, expert_count=0)), single), CORRUPT, ["expert_count", "got 0", "blk.1.ffn_up.0"])
    meta("only_prediction_layers", {"nextn_predict_layers": 2}, ARGUMENT, ["qwen3moe.nextn_predict_layers", "got 2", "0 to 1"])
    meta("too_many_experts", {"expert_count": 1 << 20}, ARGUMENT, ["expert_count", "1048576"])
    meta("too_many_layers", {"block_count": 1 << 20}, ARGUMENT, ["block_count", "1048576"])
    meta("hidden_huge", {"embedding_length": 2**32 - 1}, LIMIT, ["embedding_length"])
    meta("width_lists_differ", {"expert_feed_forward_length": (I32, [8, 16])}, UNSUPPORTED, ["expert_feed_forward_length", "8 and 16"])
    meta("width_list_of_strings", {"expert_feed_forward_length": (STRING, ["8"])}, CORRUPT, ["expert_feed_forward_length", "a list"])
    meta("gating_sigmoid", {"expert_gating_func": 2}, AMBIGUOUS, ["expert_gating_func", "got 2", "need 1"])
    meta("norm_is_a_number", {"expert_weights_norm": 1}, CORRUPT, ["expert_weights_norm", "a bool"])
    meta("groups_do_not_divide", {"expert_gating_func": 2, "expert_group_count": 3, "expert_group_used_count": 1}, ARGUMENT, ["n_group", "3"],
         architecture="deepseek2")
    meta("scale_negative", {"expert_gating_func": 2, "expert_weights_scale": -1.0, "expert_group_count": 1, "expert_group_used_count": 1}, ARGUMENT,
         ["routed_scaling_factor"], architecture="deepseek2")
    meta("scale_nan", {"expert_gating_func": 2, "expert_weights_scale": float("nan")}, CORRUPT, ["expert_weights_scale", "nan"], architecture="deepseek2")
    # What the family does not leave to the file, and keys of somebody else's engine.
    meta("norm_of_mixtral", {"expert_weights_norm": False}, UNSUPPORTED, ["llama.expert_weights_norm", "got false", "need true"], architecture="llama")
    meta("norm_of_deepseek_ocr", {"expert_weights_norm": True}, UNSUPPORTED, ["expert_weights_norm", "got true", "DeepSeek-V2"], architecture="deepseek2-ocr")
    meta("norm_of_afmoe_unsaid", {}, UNSUPPORTED, ["afmoe.expert_weights_norm", "missing, need true"], architecture="afmoe")
    meta("scale_of_qwen3", {"expert_weights_scale": 2.5}, UNSUPPORTED, ["qwen3moe.expert_weights_scale", "got 2.5", "need 1"])
    meta("groups_of_qwen3", {"expert_group_count": 4, "expert_group_used_count": 2}, UNSUPPORTED, ["qwen3moe.expert_group_count", "got 4"])
    for name, architecture, reason in (("cohere2moe", "cohere2moe", "averaged"), ("kimi_k3", "kimi-k3", "narrower space")):
        meta("refused_" + name, {}, UNSUPPORTED, ["general.architecture", architecture, reason], architecture=architecture)
    # Limits of each block, and the shared expert's beside the routed ones'.
    clamp = {"expert_weights_norm": True, "swiglu_clamp_exp": (F32, [0.0, 2.5])}
    def limit(name, changes, code, keywords, architecture="glm5-next"):
        meta("limit_" + name, dict(clamp, **changes), code, ["%s.swiglu_clamp_%s" % (architecture, keywords[0])] + keywords[1:], architecture=architecture)
    limit("missing", {"swiglu_clamp_exp": ...}, UNSUPPORTED, ["exp", "missing for layer 1"])
    limit("zero", {"swiglu_clamp_exp": (F32, [2.5, 0.0])}, UNSUPPORTED, ["exp", "got 0 for layer 1"])
    limit("of_another_count", {"swiglu_clamp_exp": (F32, [2.5])}, CORRUPT, ["exp", "got a list of 1", "2 blocks"])
    limit("nan", {"swiglu_clamp_exp": (F32, [0.0, float("nan")])}, CORRUPT, ["exp", "nan"])
    limit("of_integers", {"swiglu_clamp_exp": (I32, [0, 2])}, CORRUPT, ["exp", "a number for each"])
    limit("shared_differs", {"swiglu_clamp_shexp": (F32, [0.0, 3.5])}, UNSUPPORTED, ["shexp", "got 3.5 for layer 1, need 2.5"])
    limit("shared_of_hy_v4", {"swiglu_clamp_shexp": (F32, [0.0, 2.5])}, UNSUPPORTED, ["shexp", "got 2.5 for layer 1, need 0"], architecture="hy_v4")
    meta("limit_of_another", {"swiglu_clamp_exp": 2.5}, UNSUPPORTED, ["qwen3moe.swiglu_clamp_exp", "not known"])
    for name, changes, found in (("count", {"expert_shared_count": 1, "expert_shared_feed_forward_length": 16}, "got 16, need 8"),
                                 ("part", {"expert_shared_feed_forward_length": 12}, "got 12, need a multiple of")):
        meta("shared_width_" + name, dict(changes, expert_weights_norm=True), AMBIGUOUS, ["hy_v3.expert_shared_feed_forward_length", found], architecture="hy_v3")
    meta("no_hash_layers", {"expert_gating_func": 4, "expert_weights_norm": True, "swiglu_clamp_exp": 2.5}, CORRUPT, ["deepseek4.hash_layer_count", "missing"],
         architecture="deepseek4")
    meta("no_epsilon", {}, CORRUPT, ["gemma4.attention.layer_norm_rms_epsilon", "missing"], architecture="gemma4")
    meta("gating_of_deepseek4", {"expert_gating_func": 2}, AMBIGUOUS, ["deepseek4.expert_gating_func", "got 2, need 4"], architecture="deepseek4")
    meta("unknown_of_experts", {"experts_per_group": 2}, UNSUPPORTED, ["qwen3moe.experts_per_group", "not known"])
    meta("router_softcap", {"router_logit_softcapping": 30.0}, UNSUPPORTED, ["router_logit_softcapping"])
    meta("without_effect", {"interleave_moe_layer_step": 1, "expert_group_count": 1, "expert_weights_scale": 1.0, "expert_shared_count": 0,
                            "leading_dense_block_count": 1}, "ok", [], door="layer")
    # The first files of Qwen's models: one width, of the experts that are used together and of the shared one.
    old = {"expert_feed_forward_length": ..., "feed_forward_length": 16}
    meta("old_widths", old, "ok", [], door="layer")
    meta("old_width_odd", dict(old, feed_forward_length=17), ARGUMENT, ["qwen3moe.feed_forward_length", "got 17", "expert_used_count 2"])
    shared = {p + "ffn_%s_shexp.weight" % leaf: Tensor("BF16", shape, bytes(2 * 16 * 16)) for leaf, shape in (("gate", [16, 16]), ("up", [16, 16]), ("down", [16, 16]))}
    shared[p + "ffn_gate_inp_shexp.weight"] = Tensor("BF16", [16], bytes(32))
    keys = {k: v for k, v in dict(sizes, **old).items() if v is not Ellipsis}
    c.gguf("meta_old_shared_width", gguf_file(metadata("qwen2moe", **keys), dict(tensors("old"), **shared)), "ok", [], "layer")
    meta("no_shared_width", {}, CORRUPT, ["qwen2moe.expert_shared_feed_forward_length", "missing"], architecture="qwen2moe")
    meta("second_part", {}, ARGUMENT, ["split.no", "first part"], extra=[("split.no", U16, 1), ("split.count", U16, 2)])
    meta("split_name", {}, CORRUPT, ["split.count", "-00001-of-00002.gguf"], extra=[("split.no", U16, 0), ("split.count", U16, 2)])
    meta("split_count_string", {}, CORRUPT, ["split.count", "a string"], extra=[("split.count", STRING, "2")])
    meta("split_count_huge", {}, CORRUPT, ["split.count", "1000000"], extra=[("split.count", U32, 10**6)])

    def layer(name, spoil, code, keywords, changes=None, architecture="qwen3moe"):
        t = tensors(name)
        spoil(t)
        c.gguf("layer_" + name, gguf_file(metadata(architecture, **dict(sizes, **(changes or {}))), t), code, keywords, "layer")

    pop = lambda leaf: (lambda t: t.pop(p + leaf))
    put = lambda leaf, *x: (lambda t: t.update({p + leaf: x if isinstance(x[0], str) else x[0]}))
    bf16 = lambda shape: Tensor("BF16", shape, bytes(2 * __import__("math").prod(shape)))
    layer("no_up", pop("ffn_up_exps.weight"), MISSING, [p + "ffn_up_exps.weight", "1 of 4"])
    def single(t):  # every expert by itself
        for leaf, shape in (("gate", [8, 16]), ("up", [8, 16]), ("down", [16, 8])):
            t.pop(p + "ffn_%s_exps.weight" % leaf)
            t.update({p + "ffn_%s.%d.weight" % (leaf, e): bf16(shape) for e in range(4)})
    layer("single_experts", single, "ok", [])
    def other(t, leaf, *tensor):  # of one of them
        single(t)
        t.update({p + leaf: tensor if tensor else None})
        if not tensor:
            t.pop(p + leaf)
    layer("single_missing", lambda t: other(t, "ffn_up.2.weight"), MISSING, [p + "ffn_up.2.weight", "1 of 4 experts are incomplete"])
    layer("single_shape", lambda t: other(t, "ffn_down.3.weight", "BF16", [8, 16], bytes(256)), SHAPE, ["ffn_down.3", "[8, 16]", "[16, 8]"])
    layer("single_type", lambda t: other(t, "ffn_up.1.weight", "Q8_0", [8, 32], bytes(8 * 34)), DTYPE, ["ffn_up.1", "Q8_0"])
    layer("single_too_many", lambda t: other(t, "ffn_up.4.weight", "BF16", [8, 16], bytes(256)), CORRUPT, ["ffn_up.4"])
    layer("single_bias", lambda t: other(t, "ffn_up.1.bias", "F32", [8], bytes(32)), UNSUPPORTED, ["not recognised", "ffn_up.1.bias"])
    layer("no_router", pop("ffn_gate_inp.weight"), MISSING, [p + "ffn_gate_inp.weight"])
    layer("no_experts", lambda t: [t.pop(p + "ffn_%s_exps.weight" % x) for x in ("gate", "up", "down")], MISSING, ["3 of 4"])
    layer("old_names", lambda t: t.update({p + "ffn_up.0.weight": t.pop(p + "ffn_up_exps.weight")}), AMBIGUOUS, ["stored twice", "ffn_gate_exps", "ffn_gate.{e}"])
    layer("extra_bias", put("ffn_up_exps.bias", bf16([4, 8])), UNSUPPORTED, ["not recognised", "ffn_up_exps.bias"])
    layer("extra_shared", put("ffn_up_shexp.weight", bf16([8, 16])), UNSUPPORTED, ["not recognised", "ffn_up_shexp"])
    layer("extra_selection_bias", put("exp_probs_b.bias", bf16([4])), UNSUPPORTED, ["not recognised", "exp_probs_b"])
    layer("transposed", put("ffn_up_exps.weight", bf16([4, 16, 8])), SHAPE, ["ffn_up_exps", "[4, 16, 8]", "[4, 8, 16]"])
    layer("one_expert_less", put("ffn_up_exps.weight", bf16([3, 8, 16])), SHAPE, ["ffn_up_exps", "[3, 8, 16]"])
    layer("flat", put("ffn_down_exps.weight", bf16([64, 8])), SHAPE, ["ffn_down_exps", "[64, 8]"])
    layer("two_types", put("ffn_up_exps.weight", Tensor("F16", [4, 8, 16], bytes(1024))), "ok", [])
    layer("integers", put("ffn_up_exps.weight", "I32", [4, 8, 16], bytes(2048)), DTYPE, ["ffn_up_exps", "I32"])
    layer("wrong_width", lambda t: None, SHAPE, ["ffn_gate_exps", "[4, 8, 16]", "[4, 4, 16]"], {"expert_feed_forward_length": 4})
    layer("more_experts", lambda t: None, SHAPE, ["ffn_gate_inp", "[4, 16]", "[8, 16]"], {"expert_count": 8})
    layer("no_selection_bias", lambda t: None, MISSING, ["exp_probs_b.bias"], {"expert_gating_func": 2, "expert_shared_count": 0}, "deepseek2")
    layer("no_expert_bias", lambda t: None, MISSING, ["ffn_gate_inp.bias", "ffn_up_exps.bias"], None, "gpt-oss")


def fill(c):
    for part in (container, entries, infos, models):
        part(c)


main(fill)
