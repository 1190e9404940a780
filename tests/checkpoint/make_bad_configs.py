#!/usr/bin/env python3
"""Malformed and unsupported configurations and MoE layers, with the refusal that each must get. Configurations are
opened ("checkpoint"); layers are opened and loaded with all experts ("layer": the first MoE layer)."""

import json
import math
import random
import struct

from corpus import main, simple_file
from tiny_model import Layer, Mxfp4Layer, Tensor, safetensors, tensor

CORRUPT, LIMIT, MISSING, ARGUMENT = "corrupt_file", "limit_exceeded", "missing_tensor", "invalid_argument"
UNSUPPORTED, AMBIGUOUS, SHAPE, DTYPE = "unsupported", "ambiguous_format", "invalid_shape", "invalid_dtype"

QWEN = {"model_type": "qwen3_moe", "hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "dtype": "bfloat16"}
V3 = {"model_type": "deepseek_v3", "hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2, "n_routed_experts": 4,
      "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
V32 = dict(V3, model_type="deepseek_v32")
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def config_cases(c):
    def text(name, content, code, keywords):
        c.folder(name, {"config.json": content, "model.safetensors": simple_file("a")}, code, keywords, door="checkpoint")

    def bad(name, base, changes, code, keywords):
        config = {k: v for k, v in dict(base, **changes).items() if v is not Ellipsis}
        text(name, json.dumps(config), code, ["config.json"] + ([keywords] if isinstance(keywords, str) else keywords))

    good = json.dumps(QWEN)
    # JSON itself.
    text("empty", "", CORRUPT, "config.json")
    text("not_json", "model_type: qwen3_moe", CORRUPT, "config.json")
    text("array", "[1]", CORRUPT, ["config.json", "object"])
    text("number", "7", CORRUPT, ["config.json", "object"])
    text("cut", good[:-5], CORRUPT, "config.json")
    text("trailing", good + "{}", CORRUPT, "config.json")
    text("duplicate_key", good[:-1] + ', "hidden_size": 32}', CORRUPT, ["duplicate", "hidden_size"])
    text("duplicate_nested_key", good[:-1] + ', "rope": {"a": 1, "a": 1}}', CORRUPT, ["duplicate", '"a"'])
    text("nan", good[:-1] + ', "x": nan}', CORRUPT, "config.json")
    # As Python writes it, where a number is read.
    bad("infinity", QWEN, {"hidden_size": math.inf}, CORRUPT, ["hidden_size", "Infinity"])
    text("overflow", good[:-1] + ', "x": 1e999}', CORRUPT, "config.json")
    text("comment", "// a model\n" + good, CORRUPT, "config.json")
    c.folder("not_utf8", {"config.json": b'{"model_type":"\xff"}', "model.safetensors": simple_file("a")}, CORRUPT, "UTF-8", door="checkpoint")
    text("deep", good[:-1] + ', "x": ' + "[" * 40 + "]" * 40 + "}", LIMIT, "config.json")
    text("deep_unclosed", '{"x":' + "[" * 1000000, LIMIT, "nesting")
    text("huge", good[:-1] + ', "x": "' + "x" * 32000000 + '"}', LIMIT, "config.json")
    c.folder("no_config", {"model.safetensors": simple_file("a")}, "not_found", "config.json", door="checkpoint")
    c.folder("no_tensors", {"config.json": good}, "not_found", "no safetensors", door="checkpoint")

    # Experts that the configuration denies.
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    for label, value in (("0", 0), ("null", None)):
        files = {"config.json": json.dumps(dict(QWEN, num_experts=value)), "model.safetensors": simple_file("model.embed_tokens.weight", name)}
        c.folder("experts_" + label, files, CORRUPT, ["config.json: num_experts: got " + label, "1 to 16384", name], door="checkpoint")
        c.folder("dense_" + label, dict(files, **{"model.safetensors": simple_file("model.layers.0.mlp.down_proj.weight")}), "ok", door="checkpoint")

    # Family and structure.
    bad("no_model_type", QWEN, {"model_type": ...}, CORRUPT, "model_type: missing")
    bad("model_type_number", QWEN, {"model_type": 3}, CORRUPT, ["model_type", "got 3", "a string"])
    bad("unknown_family", QWEN, {"model_type": "qwen3_mo"}, UNSUPPORTED, ["model_type", '"qwen3_mo"', "nearest is qwen3_moe"])
    bad("dense_family", QWEN, {"model_type": "llama"}, UNSUPPORTED, ["model_type", '"llama"', "nearest is llama4_text"])
    bad("text_config_string", QWEN, {"text_config": "x"}, CORRUPT, ["text_config", "an object"])
    bad("text_config_empty", QWEN, {"text_config": {}}, CORRUPT, ["text_config", "model_type: missing"])

    # Sizes.
    for field in ("hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_experts", "num_experts_per_tok"):
        bad("no_" + field, QWEN, {field: ...}, CORRUPT, [field, "missing"])
        for kind, value in {"string": "8", "float": 8.5, "bool": True, "list": [8], "object": {}}.items():
            bad("%s_%s" % (field, kind), QWEN, {field: value}, CORRUPT, [field, "need an integer"])
        bad(field + "_negative", QWEN, {field: -1}, ARGUMENT, [field, "got -1"])
        bad(field + "_huge", QWEN, {field: 2**63}, ARGUMENT, [field, str(2**63)])
        bad(field + "_beyond_64_bits", QWEN, {field: 2**70}, CORRUPT, [field, "need an integer"])
    for field in ("hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_experts_per_tok"):
        bad(field + "_zero", QWEN, {field: 0}, ARGUMENT, [field, "got 0"])
    bad("top_k_above_experts", QWEN, {"num_experts_per_tok": 5}, ARGUMENT, ["num_experts_per_tok", "got 5", "1 to 4"])
    bad("sizes_overflow", QWEN, {"hidden_size": 2**31, "moe_intermediate_size": 2**31, "num_experts": 16384}, LIMIT, "63-bit")
    bad("aliases_disagree", QWEN, {"num_local_experts": 8}, AMBIGUOUS, ["num_experts", "num_local_experts", "4", "8"])
    bad("top_k_aliases_disagree", QWEN, {"experts_per_token": 1}, AMBIGUOUS, ["num_experts_per_tok", "experts_per_token"])

    # Which layers.
    bad("sparse_step_zero", QWEN, {"decoder_sparse_step": 0}, ARGUMENT, ["decoder_sparse_step", "got 0"])
    bad("mlp_only_not_list", QWEN, {"mlp_only_layers": 3}, CORRUPT, ["mlp_only_layers", "list"])
    bad("mlp_only_out_of_range", QWEN, {"mlp_only_layers": [1]}, ARGUMENT, ["mlp_only_layers[0]", "got 1", "0 to 0"])
    bad("first_dense_negative", V3, {"first_k_dense_replace": -1}, ARGUMENT, "first_k_dense_replace")
    bad("layer_freq_zero", V3, {"moe_layer_freq": 0}, ARGUMENT, "moe_layer_freq")
    bad("layer_types_short", V32, {"mlp_layer_types": ["sparse"]}, ARGUMENT, ["mlp_layer_types", "1 entries", "2"])
    bad("layer_types_word", V32, {"mlp_layer_types": ["dense", "moe"]}, ARGUMENT, ["mlp_layer_types", '"moe"'])
    bad("layer_types_unknown", V3, {"mlp_layer_types": ["dense", "sparse"]}, UNSUPPORTED, ["mlp_layer_types", "DeepSeek-V3"])

    # Routing.
    bad("norm_topk_string", QWEN, {"norm_topk_prob": "true"}, CORRUPT, ["norm_topk_prob", "true or false"])
    bad("scoring_unknown", V3, {"scoring_func": "relu"}, AMBIGUOUS, ["scoring_func", '"relu"', "sigmoid"])
    bad("topk_method_unknown", dict(V3, model_type="deepseek_v2"), {"topk_method": "best"}, UNSUPPORTED, ["topk_method", '"best"', "noaux_tc"])
    bad("groups_do_not_divide", V3, {"n_group": 3}, ARGUMENT, ["n_group", "got 3", "divisor"])
    bad("groups_zero", V3, {"n_group": 0}, ARGUMENT, ["n_group", "got 0"])
    bad("topk_group_above_groups", V3, {"topk_group": 3}, ARGUMENT, ["topk_group", "got 3", "n_group 2"])
    bad("groups_of_one_with_bias", V3, {"n_group": 4}, ARGUMENT, ["num_expert_group", "2 experts in a group"])
    bad("top_k_beyond_groups", V3, {"num_experts_per_tok": 3}, ARGUMENT, ["top_k", "at most 2"])
    bad("scale_negative", V3, {"routed_scaling_factor": -2.5}, ARGUMENT, ["routed_scaling_factor", "-2.5"])
    bad("scale_zero", V3, {"routed_scaling_factor": 0}, ARGUMENT, "routed_scaling_factor")
    bad("scale_string", V3, {"routed_scaling_factor": "2.5"}, CORRUPT, ["routed_scaling_factor", "a number"])
    bad("shared_negative", V3, {"n_shared_experts": -1}, ARGUMENT, "n_shared_experts")
    bad("shared_width_missing", QWEN, {"model_type": "qwen2_moe"}, CORRUPT, ["shared_expert_intermediate_size", "missing"])
    bad("routing_bias_number", dict(QWEN, intermediate_size=8), {"model_type": "minimax_m2", "use_routing_bias": 1}, CORRUPT, "use_routing_bias")

    # Activation and dtype.
    bad("act_unknown", QWEN, {"hidden_act": "softmax"}, UNSUPPORTED, ["hidden_act", '"softmax"', "silu"])
    bad("act_not_gated", QWEN, {"hidden_act": "relu2"}, UNSUPPORTED, ["hidden_act", '"relu2"'])
    bad("act_list", QWEN, {"hidden_act": ["silu"]}, CORRUPT, "hidden_act")
    oss = dict({k: v for k, v in QWEN.items() if k != "moe_intermediate_size"}, model_type="gpt_oss", intermediate_size=8)
    bad("limit_zero", oss, {"swiglu_limit": 0.0}, ARGUMENT, "swiglu_limit")
    bad("limit_of_another_family", QWEN, {"swiglu_limit": 7}, UNSUPPORTED, ["swiglu_limit", "got 7", "Qwen3-MoE"])
    bad("dtype_unknown", QWEN, {"dtype": "float8"}, UNSUPPORTED, ["dtype", '"float8"'])
    bad("dtypes_disagree", QWEN, {"torch_dtype": "float16"}, AMBIGUOUS, ["dtype", "BF16", "F16"])

    # Quantisation: what cannot be read must not be read as something else.
    for method in ("quark", "fbgemm_fp8", "torchao", ""):
        bad("quant_" + (method or "blank"), QWEN, {"quantization_config": {"quant_method": method}}, UNSUPPORTED, ["quant_method", '"%s"' % method])
    quant = lambda name, q, code, keys: bad("quant_" + name, QWEN, {"quantization_config": q}, code, ["quantization_config"] + keys)
    quant("string", "fp8", CORRUPT, ["an object"])
    quant("no_method", {}, CORRUPT, ["quant_method: missing"])
    quant("block_large", dict(FP8, weight_block_size=[64, 2**20 + 1]), ARGUMENT, ["weight_block_size[1]"])
    quant("block_one", dict(FP8, weight_block_size=[128]), CORRUPT, ["weight_block_size", "need 2"])
    quant("block_zero", dict(FP8, weight_block_size=[0, 128]), ARGUMENT, ["weight_block_size[0]"])
    quant("static", dict(FP8, activation_scheme="static"), UNSUPPORTED, ["activation_scheme", "dynamic"])
    quant("fp4_experts", dict(FP8, expert_dtype="fp4"), UNSUPPORTED, ["expert_dtype", "fp4"])
    for name in ("e5m2", "float8_e5m2", "float8_e5m2fnuz", "float8_e4m3fnuz", "E4M3"):
        quant(name, dict(FP8, fmt=name), UNSUPPORTED, ['fmt: got "%s"' % name, '"float8_e4m3fn"'])
    quant("scale_fmt", dict(FP8, scale_fmt="int"), UNSUPPORTED, ["scale_fmt"])
    quant("skip_not_list", dict(FP8, ignored_layers="gate"), CORRUPT, ["ignored_layers", "list"])
    quant("skip_number", dict(FP8, modules_to_not_convert=["a", 3]), CORRUPT, ["modules_to_not_convert[1]"])
    quant("skip_regex", dict(FP8, ignored_layers=["re:.*gate"]), UNSUPPORTED, ["re:.*gate"])
    quant("skip_empty", dict(FP8, ignored_layers=[""]), ARGUMENT, ["ignored_layers"])
    bad("quant_compression_config", QWEN, {"compression_config": {"quant_method": "compressed-tensors"}}, CORRUPT, ["compression_config", "config_groups"])
    bad("quant_twice", QWEN, {"quantization_config": FP8, "compression_config": {"quant_method": "x"}}, AMBIGUOUS, ["quantization_config", "compression_config"])
    nested = {"model_type": "vl", "text_config": dict(QWEN, quantization_config={"quant_method": "awq"})}
    bad("quant_nested", nested, {}, CORRUPT, ["text_config", "missing"])
    bad("quant_nested_differs", dict(nested, quantization_config=FP8), {}, AMBIGUOUS, ["text_config"])


def layer_cases(c):
    def folder(name, config, tensors, code, keywords):
        c.folder(name, {"config.json": json.dumps(config), "model.safetensors": safetensors(tensors)}, code, keywords, door="layer")

    p = "model.layers.0.mlp."

    def qwen(name, spoil, code, keywords, config=QWEN):
        tensors = Layer(random.Random(name), 4, 16, 8).per_expert().router().named(p[:-1])
        spoil(tensors)
        folder(name, config, tensors, code, keywords)

    def replace(leaf, make):
        def spoil(tensors):
            tensors[p + leaf] = make(tensors[p + leaf])
        return spoil

    bf16 = lambda shape: (lambda t: Tensor("BF16", shape, bytes(2 * math.prod(shape))))
    pop = lambda *leaves: (lambda tensors: [tensors.pop(p + leaf) for leaf in leaves])
    qwen("layer_good", lambda t: None, "ok", [])
    # Missing, by name and by count.
    qwen("missing_up", pop("experts.3.up_proj.weight"), MISSING, [p + "experts.3.up_proj.weight", "1 of 13", "expert 3: 2 of 3"])
    qwen("missing_expert", pop(*["experts.2.%s_proj.weight" % x for x in ("gate", "up", "down")]), MISSING, ["experts.2.gate_proj", "3 of 13", "expert 2: 0 of 3"])
    qwen("missing_gate", pop("gate.weight"), MISSING, [p + "gate.weight", "1 of 13"])
    qwen("missing_all", lambda t: t.clear() or t.update({"x": tensor("BF16", [[b"\0\0"]])}), MISSING, ["13 of 13", p + "gate.weight", "and 5 more", "4 of 4 experts"])
    qwen("more_experts_promised", lambda t: None, MISSING, ["experts.4.gate_proj.weight"], dict(QWEN, num_experts=5))
    qwen("misspelt", lambda t: t.update({p + "experts.1.up.weight": t.pop(p + "experts.1.up_proj.weight")}), MISSING,
         ["experts.1.up_proj.weight", "not recognised", "experts.1.up.weight"])
    qwen("other_layer", lambda t: None, MISSING, ["layers.1"], dict(QWEN, num_hidden_layers=2, mlp_only_layers=[0]))
    qwen("shared_promised", lambda t: None, MISSING, ["shared_expert.gate_proj.weight", "shared_expert_gate.weight"],
         dict(QWEN, model_type="qwen2_moe", shared_expert_intermediate_size=8))
    # Unrecognised.
    add = lambda leaf, t=tensor("BF16", [[b"\0\0"]]): (lambda tensors: tensors.update({p + leaf: t}))
    qwen("extra_expert", add("experts.4.gate_proj.weight"), CORRUPT, ["not recognised", "experts.4.gate_proj.weight"])
    qwen("fewer_experts_promised", lambda t: None, SHAPE, [p + "gate.weight", "[4, 16]", "[3, 16]"], dict(QWEN, num_experts=3))
    qwen("extra_bias", add("experts.0.up_proj.bias"), UNSUPPORTED, ["not recognised", "experts.0.up_proj.bias"])
    qwen("extra_scale", add("experts.0.up_proj.weight_scale_inv"), UNSUPPORTED, ["not recognised", "weight_scale_inv"])
    qwen("extra_shared", add("shared_expert.up_proj.weight"), UNSUPPORTED, ["not recognised", "shared_expert"])
    qwen("extra_correction_bias", add("gate.e_score_correction_bias"), UNSUPPORTED, ["not recognised", "e_score_correction_bias"])
    qwen("zero_padded_number", add("experts.01.gate_proj.weight"), CORRUPT, ["not recognised", "experts.01"])
    qwen("stored_twice", lambda t: t.update(Layer(random.Random(2), 4, 16, 8).fused_nt().named(p[:-1])), AMBIGUOUS, ["stored twice", "gate_up_proj"])
    qwen("two_prefixes", lambda t: t.update({"language_model." + n: x for n, x in t.items()}), AMBIGUOUS, ["language_model.model.layers."])
    # Shapes: exact, without broadcasting.
    up = "experts.2.up_proj.weight"
    qwen("extra_row", replace(up, bf16([9, 16])), SHAPE, [up, "[9, 16]", "[8, 16]"])
    qwen("one_row", replace(up, bf16([1, 16])), SHAPE, [up, "[1, 16]", "[8, 16]"])
    qwen("transposed", replace(up, bf16([16, 8])), SHAPE, [up, "[16, 8]", "[8, 16]"])
    qwen("extra_rank", replace(up, bf16([1, 8, 16])), SHAPE, [up, "[1, 8, 16]"])
    qwen("rank_one", replace(up, bf16([128])), SHAPE, [up, "[128]"])
    qwen("rank_six", replace(up, bf16([1, 1, 1, 1, 8, 16])), SHAPE, [up, "rank 6"])
    qwen("empty_weight", replace(up, bf16([0, 16])), SHAPE, [up, "[0, 16]"])
    qwen("down_not_transposed", replace("experts.0.down_proj.weight", bf16([8, 16])), SHAPE, ["experts.0.down_proj", "[16, 8]"])
    qwen("gate_rows", replace("gate.weight", bf16([3, 16])), SHAPE, [p + "gate.weight", "[4, 16]"])
    qwen("wrong_width", lambda t: None, SHAPE, ["gate_proj", "[8, 16]", "[4, 16]"], dict(QWEN, moe_intermediate_size=4))
    # Dtypes.
    qwen("one_f32", replace(up, lambda t: Tensor("F32", t.shape, t.data + t.data)), "ok", [])
    qwen("one_f16", replace(up, lambda t: Tensor("F16", t.shape, t.data)), "ok", [])
    qwen("one_f64", replace(up, lambda t: Tensor("F64", t.shape, t.data * 4)), DTYPE, [up, "F64", "BF16"])
    qwen("one_f8", replace(up, lambda t: Tensor("F8_E4M3", t.shape, t.data[::2])), DTYPE, [up, "F8_E4M3", "BF16"])
    # Another storage altogether, and one that is incomplete.
    qwen("other_storage", lambda t: [t.update({n.replace("_proj", "_linear"): t.pop(n)}) for n in list(t) if "experts." in n], UNSUPPORTED,
         ["12 of 13 tensors are missing", "not recognised", "gate_linear"])
    qwen("fp8_without_config", replace("experts.0.gate_proj.weight", lambda t: Tensor("F8_E4M3", t.shape, t.data[::2])), DTYPE, ["experts.0.gate_proj", "F8_E4M3"])
    qwen("gate_fp8", replace("gate.weight", lambda t: Tensor("F8_E4M3", t.shape, t.data[::2])), DTYPE,
         [p + "gate.weight", "F8_E4M3", "quantised routers"])
    qwen("bf16_with_fp8_config", lambda t: None, DTYPE, ["gate_proj", "BF16", "F8_E4M3"], dict(QWEN, quantization_config=FP8))
    qwen("skip_one_expert", lambda t: None, UNSUPPORTED, ["3 of 12", "all or none"], dict(QWEN, quantization_config=dict(FP8, ignored_layers=[p + "experts.1"])))

    # Fused storages.
    def hunyuan(name, spoil, code, keywords, h=16, **config):
        rng = random.Random(name)
        layer = Layer(rng, 4, h, 8).up_first().router("gate.wg.weight").shared(rng, "shared_mlp", 8, up_first=True)
        tensors = layer.named(p[:-1])
        spoil(tensors)
        base = {"model_type": "hunyuan_v1_moe", "hidden_size": h, "intermediate_size": 8, "num_hidden_layers": 1, "num_experts": 4, "moe_topk": 2,
                "num_shared_expert": 1, "torch_dtype": "bfloat16"}
        c.folder("hunyuan_" + name, {"config.json": json.dumps(dict(base, **config)), "model.safetensors": safetensors(tensors)}, code, keywords, door="layer")
    both = "experts.2.gate_and_up_proj.weight"
    hunyuan("up_first_good", lambda t: None, "ok", [])
    hunyuan("one_half", replace(both, bf16([8, 16])), SHAPE, [both, "[8, 16]", "[16, 16]"])
    hunyuan("up_first_missing", pop(both), MISSING, [both, "1 of 4 experts"])
    hunyuan("up_first_fp8", lambda t: None, UNSUPPORTED, ["fp8-tensor", "Hunyuan", "fused"], quantization_config={"quant_method": "fp8"})
    hunyuan("both_forms", lambda t: t.update({p + "experts.0.gate_proj.weight": bf16([8, 16])(None)}), AMBIGUOUS, ["stored twice", "gate_and_up_proj"])

    def fused(name, spoil, code, keywords, h=16, i=8):
        tensors = Layer(random.Random(name), 4, h, i).fused_nt().router().named(p[:-1])
        spoil(tensors)
        folder(name, dict(QWEN, hidden_size=h, moe_intermediate_size=i), tensors, code, keywords)

    gu = "experts.gate_up_proj"
    fused("fused_good", lambda t: None, "ok", [])
    fused("fused_one_expert_less", replace(gu, bf16([3, 16, 16])), SHAPE, [gu, "[3, 16, 16]", "[4, 16, 16]"])
    fused("fused_wrong_orientation", replace(gu, bf16([4, 24, 16])), SHAPE, [gu, "[4, 24, 16]", "[4, 16, 24]"], h=24)
    fused("fused_flat", replace(gu, bf16([64, 16])), SHAPE, [gu, "[64, 16]"])
    fused("fused_no_down", pop("experts.down_proj"), MISSING, ["experts.down_proj", "1 of 3"])
    fused("fused_two_spellings", lambda t: t.update({p + gu + ".weight": t[p + gu]}), CORRUPT, ["not recognised", gu])

    def oss(name, spoil, code, keywords, h=16, i=16, **more):
        rng = random.Random(name)
        layer = Layer(rng, 4, h, i, expert_bias="BF16").fused_nn_interleaved().router("router.weight").router_bias(rng, "router.bias")
        tensors = layer.named(p[:-1])
        spoil(tensors)
        config = {"model_type": "gpt_oss", "hidden_size": h, "intermediate_size": i, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
        folder(name, dict(config, **more), tensors, code, keywords)

    oss("oss_good", lambda t: None, "ok", [])
    oss("oss_no_bias", pop("experts.gate_up_proj_bias"), MISSING, ["gate_up_proj_bias"])
    oss("oss_no_router_bias", pop("router.bias"), MISSING, ["router.bias"])
    oss("oss_bias_shape", replace("experts.down_proj_bias", bf16([4, 1])), SHAPE, ["down_proj_bias", "[4, 16]"])
    oss("oss_fused_nt_orientation", replace(gu, bf16([4, 16, 24])), SHAPE, [gu, "[4, 24, 16]"], h=24, i=8)
    oss("oss_mxfp4_tensors", lambda t: t.update({p + gu + "_blocks": t.pop(p + gu)}), AMBIGUOUS, [gu, "stored twice", "_blocks"])

    # Biases of the router.
    def v3(name, spoil, code, keywords):
        rng = random.Random(name)
        tensors = Layer(rng, 4, 16, 8).per_expert().router().shared(rng, "shared_experts", 8).correction_bias(
            rng, "gate.e_score_correction_bias").named("model.layers.1.mlp")
        spoil(tensors)
        folder(name, V3, tensors, code, keywords)

    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    v3("v3_good", lambda t: None, "ok", [])
    v3("v3_no_bias", lambda t: t.pop(bias), MISSING, [bias])
    v3("v3_bias_column", lambda t: t.update({bias: Tensor("F32", [4, 1], t[bias].data)}), SHAPE, [bias, "[4, 1]", "[4]"])
    v3("v3_bias_int", lambda t: t.update({bias: Tensor("BF16", [8], t[bias].data)}), SHAPE, [bias, "[8]", "[4]"])
    v3("v3_no_shared_down", lambda t: t.pop("model.layers.1.mlp.shared_experts.down_proj.weight"), MISSING, ["shared_experts.down_proj.weight"])

    # MXFP4 blocks.
    def mxfp4(name, spoil, code, keywords, quant=True, h=64, i=64):
        tensors = Mxfp4Layer(random.Random(name), 4, h, i).named(p[:-1])
        spoil(tensors)
        config = {"model_type": "gpt_oss", "hidden_size": h, "intermediate_size": i, "num_hidden_layers": 1, "num_local_experts": 4,
                  "num_experts_per_tok": 2}
        if quant:
            config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": quant if isinstance(quant, list) else []}
        folder(name, config, tensors, code, keywords)

    def reshape(name, shape, dtype="U8"):
        return lambda t: t.update({p + name: Tensor(dtype, shape, t[p + name].data)})

    blocks, powers = "experts.gate_up_proj_blocks", "experts.down_proj_scales"
    mxfp4("mxfp4_good", lambda t: None, "ok", [])
    mxfp4("mxfp4_unsaid", lambda t: None, AMBIGUOUS, ["MXFP4 blocks", "quantization_config"], quant=False)
    mxfp4("mxfp4_skipped", lambda t: None, AMBIGUOUS, ["MXFP4 blocks", "quantization_config"], quant=["mlp.experts"])
    mxfp4("mxfp4_skip_regex", lambda t: None, UNSUPPORTED, ["modules_to_not_convert", "re:.*"], quant=["re:.*"])
    mxfp4("mxfp4_skip_empty", lambda t: None, ARGUMENT, ["modules_to_not_convert"], quant=[""])
    mxfp4("mxfp4_no_blocks", pop(blocks), MISSING, [blocks])
    mxfp4("mxfp4_no_scales", pop(powers), MISSING, [powers])
    mxfp4("mxfp4_no_bias", pop("experts.down_proj_bias"), MISSING, ["down_proj_bias"])
    mxfp4("mxfp4_flat_blocks", reshape(blocks, [4, 128, 32]), SHAPE, [blocks, "[4, 128, 2, 16]"])
    mxfp4("mxfp4_group_16", reshape(blocks, [4, 128, 4, 8]), SHAPE, [blocks, "[4, 128, 4, 8]"])
    mxfp4("mxfp4_transposed_scales", reshape(powers, [4, 2, 64]), SHAPE, [powers, "[4, 2, 64]", "[4, 64, 2]"])
    mxfp4("mxfp4_scales_off_by_one", replace(powers, lambda t: Tensor("U8", [4, 64, 3], bytes(4 * 64 * 3))), SHAPE, [powers, "[4, 64, 3]"])
    mxfp4("mxfp4_nan_scale", replace(powers, lambda t: Tensor("U8", [4, 64, 2], bytes(4 * 64 * 2 - 1) + b"\xff")), CORRUPT, [powers, "0xFF"])
    mxfp4("mxfp4_one_expert_less", replace(powers, lambda t: Tensor("U8", [3, 64, 2], bytes(3 * 64 * 2))), SHAPE, [powers, "[3, 64, 2]"])
    mxfp4("mxfp4_signed_blocks", reshape(blocks, [4, 128, 2, 16], "F8_E4M3"), DTYPE, [blocks, "U8"])
    mxfp4("mxfp4_float_scales", replace(powers, lambda t: Tensor("F32", [4, 64, 2], bytes(4 * 64 * 2 * 4))), DTYPE, [powers, "U8"])
    mxfp4("mxfp4_plain_weights", lambda t: t.update({p + "experts.up_proj_blocks": t[p + blocks]}), UNSUPPORTED, ["not recognised", "up_proj_blocks"])
    oss("oss_says_mxfp4", lambda t: None, AMBIGUOUS, ["plain tensors", "mxfp4"], quantization_config={"quant_method": "mxfp4"})

    # FP8 blocks.
    def fp8(name, spoil, code, keywords, config=None, **kinds):
        rng = random.Random(name)
        layer = Layer(rng, 2, 130, 128, dtype="F8_E4M3", **kinds).per_expert().router()
        tensors = layer.named(p[:-1])
        spoil(tensors)
        base = dict(QWEN, hidden_size=130, moe_intermediate_size=128, num_experts=2, quantization_config=FP8)
        folder(name, dict(base, **(config or {})), tensors, code, keywords)

    s, w = p + "experts.1.up_proj.weight_scale_inv", p + "experts.1.up_proj.weight"

    def poke(name, at, value):
        def spoil(tensors):
            t = tensors[name]
            tensors[name] = Tensor(t.dtype, t.shape, t.data[:at] + value + t.data[at + len(value):])
        return spoil

    fp8("fp8_good", lambda t: None, "ok", [])
    fp8("fp8_no_scale", lambda t: t.pop(s), MISSING, [s, "expert 1: 5 of 6"])
    fp8("fp8_scale_shape", lambda t: t.update({s: Tensor("F32", [2, 1], t[s].data)}), SHAPE, [s, "[2, 1]", "[1, 2]"])
    fp8("fp8_scale_scalar", lambda t: t.update({s: Tensor("F32", [], t[s].data[:4])}), SHAPE, [s, "[]", "[1, 2]"])
    fp8("fp8_scale_dtype", lambda t: t.update({s: Tensor("F16", [1, 2], t[s].data[:4])}), DTYPE, [s, "F16", "F32"])
    fp8("fp8_scale_nan", poke(s, 4, b"\0\0\xc0\x7f"), CORRUPT, [s, "nan", "[0, 1]"])
    fp8("fp8_scale_inf", poke(s, 0, b"\0\0\x80\x7f"), CORRUPT, [s, "inf", "[0, 0]"])
    fp8("fp8_scale_negative", poke(s, 0, b"\0\0\x80\xbf"), CORRUPT, [s, "-1"])
    fp8("fp8_scale_zero", poke(s, 0, b"\0\0\0\0"), CORRUPT, [s, "got scale 0"])
    fp8("fp8_bf16_scale_nan", poke(s, 2, b"\xc0\x7f"), CORRUPT, [s, "nan"], scale_dtype="BF16")
    fp8("fp8_weight_nan", poke(w, 131, b"\x7f"), CORRUPT, [w, "0x7F", "[1, 1]"])
    fp8("fp8_weight_negative_nan", poke(w, 0, b"\xff"), CORRUPT, [w, "0xFF", "[0, 0]"])
    fp8("fp8_weight_bf16", lambda t: t.update({w: Tensor("BF16", [128, 130], t[w].data * 2)}), DTYPE, [w, "BF16", "F8_E4M3"])
    fp8("fp8_e5m2", lambda t: t.update({w: e5m2(t[w])}), DTYPE, [w, "F8_E5M2"])
    fp8("fp8_skipped_but_stored", lambda t: None, DTYPE, ["gate_proj", "F8_E4M3", "BF16"], {"quantization_config": dict(FP8, ignored_layers=["mlp.experts"])})
    fp8("fp8_static_input_scale", lambda t: t.update({p + "experts.0.up_proj.input_scale": Tensor("F32", [], b"\0\0\x80\x3f")}), UNSUPPORTED, ["not recognised", "input_scale"])
    half = dict(V3, quantization_config=dict(FP8, ignored_layers=["shared_experts.up_proj"]))
    folder("fp8_shared_half_skipped", half, {"x": Tensor("U8", [1], b"1")}, UNSUPPORTED, ["shared_experts.up_proj", "shared_experts.gate_proj", "all or none"])
    narrow = Layer(random.Random(1), 2, 130, 64, dtype="F8_E4M3").per_expert().router().named(p[:-1])
    # Less than a block wide and high: its blocks are ragged.
    folder("fp8_width_below_block", dict(QWEN, hidden_size=130, moe_intermediate_size=64, num_experts=2, quantization_config=FP8), narrow,
           "ok", [])


    # Tables of token ids, and routers that see normalised rows.
    def small(name, model_type, tensors, spoil, code, keywords, **more):
        spoil(tensors)
        config = {"model_type": model_type, "hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "num_experts": 4,
                  "num_experts_per_tok": 2, **more}
        folder(name, config, tensors, code, keywords)

    def v4(name, spoil, code, keywords, **more):
        rng = random.Random(name)
        layer = Layer(rng, 4, 16, 8).w123().router().shared(rng, "shared_experts", 8, names=("w1", "w3", "w2")).hash_table(
            rng, "gate.tid2eid", 3, 2)
        small(name, "deepseek_v4", layer.named("model.layers.0.ffn"), spoil, code, keywords, vocab_size=3, **more)

    table = "model.layers.0.ffn.gate.tid2eid"
    v4("v4_hash_good", lambda t: None, "ok", [])
    v4("v4_hash_missing", lambda t: t.pop(table), MISSING, [table])
    v4("v4_hash_rows", lambda t: t.update({table: Tensor("I64", [2, 2], t[table].data[:32])}), SHAPE, [table, "[2, 2]", "[3, 2]"])
    v4("v4_hash_floats", lambda t: t.update({table: Tensor("F64", [3, 2], t[table].data)}), DTYPE, [table, "F64", "I64"])
    v4("v4_hash_beyond", lambda t: t.update({table: Tensor("I64", [3, 2], struct.pack("<6q", 0, 1, 2, 4, 0, 0))}), CORRUPT,
       [table, "[1, 1]", "got expert 4", "0 to 3"])
    v4("v4_hash_negative", lambda t: t.update({table: Tensor("I32", [3, 2], struct.pack("<6i", -1, 1, 2, 3, 0, 0))}), CORRUPT, ["[0, 0]", "got expert -1"])
    v4("v4_table_of_a_scored_layer", lambda t: t.update({"model.layers.0.ffn.gate.bias": bf16([4])(None)}), UNSUPPORTED, ["not recognised", table],
       num_hash_layers=0)

    def gemma4(name, spoil, code, keywords):
        layer = Layer(random.Random(name), 4, 16, 8).fused_nt(module="").normed_router(random.Random(1))
        small(name, "gemma4_text", layer.named("model.layers.0.experts"), spoil, code, keywords, enable_moe_block=True)

    g = "model.layers.0."
    gemma4("gemma4_good", lambda t: None, "ok", [])
    for missing in ("router.scale", "router.per_expert_scale", "router.proj.weight", "pre_feedforward_layernorm_2.weight"):
        gemma4("gemma4_no_" + missing, lambda t: t.pop(g + missing), MISSING, [g + missing])
    gemma4("gemma4_scale_shape", lambda t: t.update({g + "router.scale": bf16([1])(None)}), SHAPE, ["router.scale", "[1]", "[16]"])
    gemma4("gemma4_router_bias", lambda t: t.update({g + "router.proj.bias": bf16([4])(None)}), UNSUPPORTED, ["not recognised", "router.proj.bias"])

    # A shared expert that lies beside the block is as much a part of it.
    def granite(name, spoil, code, keywords, **more):
        rng = random.Random(name)
        layer = Layer(rng, 4, 16, 8).granite().router("router.layer.weight").shared(rng, "^shared_mlp", 12, fused=True)
        small("granite_" + name, "granitemoeshared", layer.named("model.layers.0.block_sparse_moe"), spoil, code, keywords, intermediate_size=8,
              **dict({"shared_intermediate_size": 12}, **more))

    beside = lambda leaf, n: (lambda t: t.update({"model.layers.0." + leaf: bf16([n])(None)}))
    granite("good", lambda t: None, "ok", [])
    granite("bias_beside", beside("shared_mlp.output_linear.bias", 16), UNSUPPORTED, ["not recognised", "shared_mlp.output_linear.bias"])
    granite("other_module_beside", beside("shared_mlp.norm.weight", 16), UNSUPPORTED, ["not recognised", "shared_mlp.norm.weight"])
    granite("other_module_of_the_layer", beside("shared_mlp_norm.weight", 16), "ok", [])
    granite("denied_beside", lambda t: None, UNSUPPORTED, ["2 tensors", "not recognised", "shared_mlp.input_linear"], shared_intermediate_size=0)

    def step(name, leaf, code, keywords):
        rng = random.Random(name)
        layer = Layer(rng, 4, 16, 8).stacked().router().correction_bias(rng, "router_bias").shared(rng, "^share_expert", 12)
        small("step_" + name, "step3p5", layer.named("model.layers.0.moe"), beside(leaf, 16), code, keywords, share_expert_dim=12, moe_layers_enum="0")

    step("norm_beside", "post_attention_layernorm.weight", "ok", [])
    step("bias_beside", "share_expert.down_proj.bias", UNSUPPORTED, ["not recognised", "share_expert.down_proj.bias"])
    step("scale_beside", "share_expert.up_proj.pre_quant_scale", UNSUPPORTED, ["not recognised", "pre_quant_scale"])


def e5m2(t):
    t.dtype = "F8_E5M2"
    return t


def fill(c):
    for part in (config_cases, layer_cases):
        part(c)


main(fill)
