#!/usr/bin/env python3
"""Malformed and unsupported quantisation: descriptions of it ("checkpoint") and tensors against them ("layer"), with the
refusal that each must get."""

import json
import random
import struct

import quant_model as q
from bad_quant_parts import CORRUPT, LIMIT, MISSING, ARGUMENT, UNSUPPORTED, AMBIGUOUS, SHAPE, DTYPE, EXPERTS, P, UP, NAN, INF, base, ct, floats8, ints, GPTQ, AWQ, BNB, FP8, OPT
from bad_quant_stacked import stacked
from corpus import main, simple_file
from stacked_model import fused
from tiny_model import Tensor, matrix, safetensors, tensor


def descriptions(c):
    def bad(name, quant, code, keywords, side=None):
        files = {"config.json": json.dumps(dict(base(32, 32), **({"quantization_config": quant} if quant is not None else {}))),
                 "model.safetensors": simple_file("a")}
        files.update({n: x if isinstance(x, str) else json.dumps(x) for n, x in (side or {}).items()})
        c.folder(name, files, code, keywords, door="checkpoint")

    without = lambda d, key: {k: v for k, v in d.items() if k != key}
    # GPTQ and AWQ
    for name, method, key in (("gptq", GPTQ, "bits"), ("gptq", GPTQ, "group_size"), ("awq", AWQ, "bits"), ("awq", AWQ, "group_size")):
        bad("%s_no_%s" % (name, key), without(method, key), CORRUPT, [key, "missing"])
        bad("%s_%s_string" % (name, key), dict(method, **{key: "4"}), CORRUPT, [key, "an integer"])
        bad("%s_%s_fraction" % (name, key), dict(method, **{key: 4.5}), CORRUPT, [key])
    for bits in (2, 3, 5, 16):
        bad("gptq_bits_%d" % bits, dict(GPTQ, bits=bits), UNSUPPORTED, ["bits", "got %d" % bits, "4 or 8"])
    bad("gptq_bits_zero", dict(GPTQ, bits=0), ARGUMENT, ["bits", "got 0"])
    bad("awq_bits_8", dict(AWQ, bits=8), UNSUPPORTED, ["bits", "got 8", "need 4"])
    for group in (0, 1, 12, -2):
        bad("gptq_group_%d" % group, dict(GPTQ, group_size=group), ARGUMENT, ["group_size", "got %d" % group])
        bad("awq_group_%d" % group, dict(AWQ, group_size=group), ARGUMENT, ["group_size", "got %d" % group])
    bad("gptq_format", dict(GPTQ, checkpoint_format="marlin"), UNSUPPORTED, ["checkpoint_format", "marlin"])
    bad("gptq_sym_number", dict(GPTQ, sym=1), CORRUPT, ["sym"])
    bad("gptq_desc_act_string", dict(GPTQ, desc_act="yes"), CORRUPT, ["desc_act"])
    bad("gptq_dynamic_list", dict(GPTQ, dynamic=["x"]), CORRUPT, ["dynamic", "an object"])
    for mark in ("-:", "+:", ""):
        bad("gptq_dynamic_regex_" + {"-:": "minus", "+:": "plus"}.get(mark, "bare"), dict(GPTQ, dynamic={mark + "(": {}}), UNSUPPORTED,
            ["regular expression", "malformed"])
    bad("gptq_modules_string", dict(GPTQ, modules_in_block_to_quantize="mlp"), CORRUPT, ["modules_in_block_to_quantize", "a list of strings"])
    bad("gptq_modules_number", dict(GPTQ, modules_in_block_to_quantize=[["a"], ["b", 3]]), CORRUPT, ["modules_in_block_to_quantize[1]", "a list of 2"])
    bad("gptq_modules_empty", dict(GPTQ, modules_in_block_to_quantize=[["a"], ""]), ARGUMENT, ["modules_in_block_to_quantize", "parts of modules' names"])
    bad("gptq_dynamic_number", dict(GPTQ, dynamic={"+:lm_head": 8}), CORRUPT, ["dynamic", "+:lm_head", "got 8", "an object"])
    bad("gptq_dynamic_and_list", dict(GPTQ, dynamic={"-:x": {}}, modules_to_not_convert=["y"]), UNSUPPORTED, ["dynamic", "modules_to_not_convert"])
    bad("awq_version", dict(AWQ, version="gemv"), UNSUPPORTED, ["version", "gemv"])
    bad("awq_zero_point_text", dict(AWQ, zero_point="no"), CORRUPT, ["zero_point", "true or false"])
    bad("awq_backend", dict(AWQ, backend="llm-awq"), UNSUPPORTED, ["backend", "llm-awq"])
    bad("awq_backend_usual", dict(AWQ, backend="autoawq"), "ok", [])
    bad("awq_aliases_differ", dict(AWQ, w_bit=8), AMBIGUOUS, ["bits", "w_bit"])
    bad("awq_neither", dict(AWQ, zero_point=False, sym=False), AMBIGUOUS, ["zero_point is false", "sym"])
    bad("awq_both", dict(AWQ, zero_point=True, sym=True), "ok", [])
    # AutoRound
    ar = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq"}
    bad("auto_alone", without(ar, "packing_format"), "ok", [])
    bad("auto_early", dict(without(ar, "packing_format"), quant_method="intel/auto-round", backend="auto_round:gptq:exllamav2"), "ok", [])
    bad("auto_early_own", dict(without(ar, "packing_format"), backend="auto_round:exllamav2"), UNSUPPORTED, ["backend", "auto_round:exllamav2"])
    for packing in ("auto_round", "auto_round:gptqmodel", "auto_round:llm_compressor", "auto_gptq"):
        bad("auto_packing_" + packing.replace(":", "_"), dict(ar, packing_format=packing), UNSUPPORTED, ["packing_format", '"%s"' % packing, "auto_awq"])
    bad("auto_mx", dict(ar, data_type="mx_fp"), UNSUPPORTED, ["data_type", "mx_fp", "int"])
    bad("auto_inputs", dict(ar, act_bits=8), UNSUPPORTED, ["act_bits", "got 8"])
    bad("auto_inputs_plain", dict(ar, act_bits=16), "ok", [])
    bad("auto_rotation", dict(ar, transform_config={"kind": "hadamard"}), UNSUPPORTED, ["transform_config"])
    bad("auto_gptq_zeros", dict(ar, sym=False), UNSUPPORTED, ["sym", "AWQ", "one less"])
    bad("auto_bits_3", dict(ar, bits=3), UNSUPPORTED, ["bits", "got 3"])
    ar_awq = dict(ar, packing_format="auto_round:auto_awq")
    bad("auto_both", dict(ar_awq, zero_point=True), AMBIGUOUS, ["sym is true", "zero_point"])
    bad("auto_both_unsaid", dict(without(ar_awq, "sym"), zero_point=True), AMBIGUOUS, ["sym is true", "zero_point"])
    bad("auto_neither", dict(ar_awq, sym=False, zero_point=False), AMBIGUOUS, ["sym", "zero_point"])
    bad("auto_one", dict(ar_awq, sym=False, zero_point=True), "ok", [])
    bad("auto_extra_list", dict(ar, extra_config=["x"]), CORRUPT, ["extra_config", "an object"])
    bad("auto_extra_number", dict(ar, extra_config={"x": 16}), CORRUPT, ["extra_config", "x: got 16", "an object"])
    bad("auto_extra_regex", dict(ar, extra_config={"x(": {"bits": 16}}), UNSUPPORTED, ["regular expression", "malformed"])
    bad("auto_extra_and_list", dict(ar, extra_config={"x": {"bits": 16}}, modules_to_not_convert=["y"]), UNSUPPORTED, ["extra_config", "modules_to_not_convert"])
    # bitsandbytes
    bad("bnb_neither", {"quant_method": "bitsandbytes"}, AMBIGUOUS, ["load_in_4bit", "load_in_8bit"])
    bad("bnb_both", dict(BNB, load_in_8bit=True), AMBIGUOUS, ["load_in_4bit", "load_in_8bit"])
    bad("bnb_no_type", without(BNB, "bnb_4bit_quant_type"), UNSUPPORTED, ["bnb_4bit_quant_type", "none"])
    bad("bnb_type", dict(BNB, bnb_4bit_quant_type="int4"), UNSUPPORTED, ["bnb_4bit_quant_type", "int4"])
    bad("bnb_storage", dict(BNB, bnb_4bit_quant_storage="bfloat16"), UNSUPPORTED, ["bnb_4bit_quant_storage", "bfloat16"])
    bad("bnb_skip_string", dict(BNB, llm_int8_skip_modules="gate"), CORRUPT, ["llm_int8_skip_modules", "list"])
    # ModelOpt
    bad("opt_no_algo", {"quant_method": "modelopt"}, CORRUPT, ["quant_algo", "missing"])
    mixed = lambda name, layers, code, keys: bad("opt_mixed_" + name, dict(OPT, quant_algo="MIXED_PRECISION", quantized_layers=layers), code,
                                                 ["quantized_layers"] + keys)
    mixed("none", None, CORRUPT, ["missing", "MIXED_PRECISION"])
    mixed("empty", {}, CORRUPT, ["missing"])
    mixed("list", ["x"], CORRUPT, ["an object"])
    mixed("number", {"x": 3}, CORRUPT, ["x: got 3", "an object"])
    mixed("null", {"x": None}, ARGUMENT, ['"x": got null'])
    mixed("no_algo", {"x": {}}, CORRUPT, ['"x": quant_algo: missing'])
    mixed("algo_number", {"x": {"quant_algo": 8}}, CORRUPT, ['"x": quant_algo: got 8', "a string"])
    # Of a module that is not read.
    bad("opt_mixed_elsewhere", dict(OPT, quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}, "lm_head": {"quant_algo": "W4A8_AWQ"}}), "ok", [])
    mixed("group", {"x": {"quant_algo": "NVFP4", "group_size": 32}}, ARGUMENT, ['"x": group_size', "32", "16"])
    for algo in ("INT4_AWQ", "W4A8_AWQ", "NVFP4_AWQ", ""):
        bad("opt_algo_" + (algo or "blank"), dict(OPT, quant_algo=algo), UNSUPPORTED, ["quant_algo", '"%s"' % algo])
    bad("opt_group", dict(OPT, group_size=32), ARGUMENT, ["group_size", "32"])
    bad("opt_mx_group", dict(OPT, quant_algo="W4A8_MXFP4_FP8", group_size=16), ARGUMENT, ["group_size", "16", "32"])
    bad("opt_ignore_string", dict(OPT, ignore="lm_head"), CORRUPT, ["ignore", "list"])
    bad("opt_ignore_regex", dict(OPT, ignore=["re:.*"]), UNSUPPORTED, ["ignore", "re:.*"])
    bad("opt_ignore_long", dict(OPT, ignore=["x" * 600]), UNSUPPORTED, ["ignore", "600"])
    # side files
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        stem = name.split(".")[0]
        bad("side_%s_not_json" % stem, None, CORRUPT, [name], {name: "{"})
        bad("side_%s_array" % stem, None, CORRUPT, [name, "object"], {name: "[]"})
        bad("side_%s_empty" % stem, None, CORRUPT, [name, "missing"], {name: "{}"})
    bad("side_differs", GPTQ, AMBIGUOUS, ["quantize_config.json", "otherwise"], {"quantize_config.json": without(dict(GPTQ, group_size=64), "quant_method")})
    bad("side_two_differ", None, AMBIGUOUS, ["quant_config.json", "quantize_config.json"],
        {"quantize_config.json": without(GPTQ, "quant_method"), "quant_config.json": without(AWQ, "quant_method")})
    bad("side_quantization_string", None, CORRUPT, ["hf_quant_config.json", "quantization"], {"hf_quant_config.json": {"quantization": "FP8"}})
    bad("side_other_method", None, UNSUPPORTED, ["quantize_config.json", "hqq"], {"quantize_config.json": {"quant_method": "hqq"}})
    # compressed-tensors
    token = floats8("token", dynamic=True)
    bad("ct_no_groups", {"quant_method": "compressed-tensors", "format": "pack-quantized"}, CORRUPT, ["config_groups", "missing"])
    bad("ct_empty_groups", ct("pack-quantized", ints(), config_groups={}), CORRUPT, ["config_groups"])
    bad("ct_group_string", ct("pack-quantized", ints(), config_groups={"g": "x"}), CORRUPT, ["config_groups", '"g"', "object"])
    bad("ct_many_groups", ct("pack-quantized", ints(), config_groups={"g%d" % n: {"targets": ["Linear"], "weights": ints()} for n in range(65)}), LIMIT,
        ["config_groups", "65"])
    bad("ct_no_format", without(ct("x", ints()), "format"), CORRUPT, ["format", "missing"])
    for form in ("marlin-24", "sparse-24-bitmask", "dense", "fp4-quantized", "packed", ""):
        bad("ct_format_" + (form or "blank"), ct(form, ints()), UNSUPPORTED, ["format", '"%s"' % form])
    bad("ct_no_weights", ct("pack-quantized", None), "ok", [])
    bad("ct_cache_string", ct("x", None, config_groups={}, kv_cache_scheme="fp8"), CORRUPT, ["kv_cache_scheme", "an object"])
    bad("ct_no_targets", ct("x", ints(), config_groups={"g": {"weights": ints(), "format": "pack-quantized"}}), CORRUPT, ["targets", "missing"])
    bad("ct_targets_string", ct("x", ints(), config_groups={"g": {"weights": ints(), "format": "pack-quantized", "targets": "Linear"}}), CORRUPT, ["targets"])
    # As the format's own reader has it: 8 bits where the file says none, words in any case, a block as text.
    bad("ct_no_bits", ct("pack-quantized", without(ints(), "num_bits")), "ok", [])
    bad("ct_words", ct("pack-quantized", ints(type="INT", strategy="Group", actorder="Weight")), "ok", [])
    bad("ct_words_dynamic", ct("int-quantized", ints(8, strategy="CHANNEL"), ints(8, strategy="Token", dynamic="LOCAL")), UNSUPPORTED, ["static"])
    for text in ("64x32", "128X128"):
        k = int(text.lower().split("x")[1])
        bad("ct_block_text_" + text.lower(), ct("float-quantized", floats8("Block", block_structure=text), floats8("group", group_size=k, dynamic=True)), "ok", [])
    for n, text in enumerate(("128", "128x", "x128", "128x128x1", "0x128", "-1x128", "128*128", "axb", "1048577x1", "")):
        bad("ct_block_text_bad_%d" % n, ct("float-quantized", floats8("block", block_structure=text)), ARGUMENT, ["block_structure", '"%s"' % text, "need rows and columns"])
    bad("ct_group_size_of_channels", ct("int-quantized", ints(8, strategy="channel", group_size=32)), UNSUPPORTED, ["group_size", "got 32", "channel"])
    bad("ct_block_of_channels", ct("float-quantized", floats8("channel", block_structure=[128, 128])), UNSUPPORTED, ["block_structure", "[128, 128]", "channel"])
    for bits in (1, 2, 3, 5, 6, 7, 16):
        bad("ct_packed_bits_%d" % bits, ct("pack-quantized", ints(bits)), UNSUPPORTED, ["weights", "%d bits" % bits, "4 or 8"])
    bad("ct_packed_float", ct("pack-quantized", ints(type="float")), UNSUPPORTED, ["weights", "float"])
    bad("ct_type", ct("pack-quantized", ints(type="uint")), ARGUMENT, ["type", "uint"])
    bad("ct_packed_tensor", ct("pack-quantized", ints(strategy="tensor")), UNSUPPORTED, ["strategy", "tensor"])
    bad("ct_packed_no_group", ct("pack-quantized", without(ints(), "group_size")), UNSUPPORTED, ["group_size"])
    bad("ct_actorder", ct("pack-quantized", ints(actorder="sideways")), UNSUPPORTED, ["actorder", "sideways"])
    bad("ct_packed_int8_inputs", ct("pack-quantized", ints(), ints(8, strategy="token", dynamic=True)), UNSUPPORTED, ["input_activations"])
    bad("ct_w4a8_group_16", ct("pack-quantized", ints(group=16), token), UNSUPPORTED, ["input_activations", "32"])
    bad("ct_float_4_bits", ct("float-quantized", floats8(num_bits=4)), UNSUPPORTED, ["weights", "4 bits"])
    bad("ct_float_group", ct("float-quantized", floats8("group", group_size=128)), UNSUPPORTED, ["strategy", "group"])
    bad("ct_float_asymmetric", ct("float-quantized", floats8(symmetric=False)), UNSUPPORTED, ["weights: symmetric: got false, need true"])
    bad("ct_float_asymmetric_inputs", ct("float-quantized", floats8(), floats8("token", dynamic=True, symmetric=False)), UNSUPPORTED,
        ["input_activations: symmetric: got false, need true"])
    bad("ct_int_asymmetric", ct("int-quantized", ints(8, strategy="channel", symmetric=False)), UNSUPPORTED, ["weights: symmetric: got false, need true"])
    bad("ct_block_groups", ct("float-quantized", floats8("block", block_structure=[64, 32]), floats8("group", group_size=128, dynamic=True)), UNSUPPORTED,
        ["input_activations", "group_size 32"])
    bad("ct_block_one", ct("float-quantized", floats8("block", block_structure=[64])), UNSUPPORTED, ["block_structure", "[64]", "[rows, columns]"])
    bad("ct_no_block", ct("float-quantized", floats8("block")), UNSUPPORTED, ["block_structure"])
    bad("ct_static_token", ct("float-quantized", floats8(), floats8("token")), UNSUPPORTED, ["input_activations", "static"])
    bad("ct_block_static", ct("float-quantized", floats8("block", block_structure=[128, 128]), floats8("tensor")), UNSUPPORTED, ["input_activations"])
    bad("ct_block_token", ct("float-quantized", floats8("block", block_structure=[128, 128]), token), UNSUPPORTED, ["input_activations", "group"])
    bad("ct_int_static", ct("int-quantized", ints(8, strategy="channel"), ints(8, strategy="tensor")), UNSUPPORTED, ["input_activations", "static"])
    bad("ct_int_asymmetric_inputs", ct("int-quantized", ints(8, strategy="channel"), ints(8, strategy="token", dynamic=True, symmetric=False)), UNSUPPORTED,
        ["input_activations: symmetric: got false, need true"])
    bad("ct_int_4_bits", ct("int-quantized", ints(4, strategy="channel")), UNSUPPORTED, ["weights", "int 4 bits"])
    bad("ct_nvfp4_group", ct("nvfp4-pack-quantized", dict(ints(4, 32), type="float")), UNSUPPORTED, ["group_size 16"])
    bad("ct_mxfp4_group", ct("mxfp4-pack-quantized", dict(ints(4, 16), type="float")), UNSUPPORTED, ["group_size 32"])
    f8 = lambda **k: floats8(**dict({"strategy": "group", "group_size": 128, "dynamic": True}, **k))
    for name, inputs in (("static", f8(dynamic=False)), ("group_64", f8(group_size=64)), ("token", floats8("token", dynamic=True))):
        bad("ct_mxfp4_fp8_" + name, ct("mxfp4-pack-quantized", dict(ints(4, 32), type="float"), inputs), UNSUPPORTED, ["input_activations", "group_size 128"])
    bad("ct_w4a8_bytes", ct("int-quantized", ints(group=128), ints(8, strategy="token", dynamic=True)), UNSUPPORTED, ["weights", "int 4 bits"])
    bad("ct_w4afp8_group_16", ct("int-quantized", ints(group=16), token), UNSUPPORTED, ["input_activations", "32"])
    bad("ct_dynamic_word", ct("float-quantized", floats8(), floats8("token", dynamic="global")), UNSUPPORTED, ["dynamic", "global"])
    bad("ct_sparsity", ct("pack-quantized", ints(), sparsity_config={"format": "sparse-24-bitmask"}), UNSUPPORTED, ["sparsity_config"])
    bad("ct_transform", ct("pack-quantized", ints(), transform_config={"config_groups": {"r1": {}}}), UNSUPPORTED, ["transform_config"])
    bad("ct_ignore_regex", ct("pack-quantized", ints(), ignore=["re:*x"]), UNSUPPORTED, ["ignore", "malformed"])
    bad("ct_ignore_backreference", ct("pack-quantized", ints(), ignore=["re:(a)\\1"]), UNSUPPORTED, ["ignore", "regular expression"])
    bad("ct_ignore_long_regex", ct("pack-quantized", ints(), ignore=["re:" + "a" * 600]), UNSUPPORTED, ["ignore", "600"])
    bad("ct_ignore_bomb", ct("pack-quantized", ints(), ignore=["re:((((a{1,99}){1,99}){1,99}){1,99})"]), UNSUPPORTED, ["ignore", "regular expression"])
    bad("ct_target_regex", ct("x", ints(), config_groups={"g": {"weights": ints(), "format": "pack-quantized", "targets": ["re:["]}}), UNSUPPORTED, ["targets"])
    # fp8
    bad("fp8_scheme", dict(FP8, activation_scheme="sometimes"), ARGUMENT, ["activation_scheme", "sometimes"])
    bad("fp8_other_experts", {"quant_method": "fp8", "weight_block_size": [128, 128], "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16},
        UNSUPPORTED, ["moe_quant_algo", "NVFP4"])
    mx = {"quant_method": "mxfp8"}
    bad("mxfp8_alone", mx, "ok", [])
    bad("mxfp8_blocks", dict(mx, weight_block_size=[128, 128]), ARGUMENT, ["weight_block_size", "[128, 128]", "[1, 32]"])
    bad("mxfp8_static", dict(mx, activation_scheme="static"), UNSUPPORTED, ["activation_scheme", "static", "dynamic"])
    bad("mxfp8_float_scales", dict(mx, scale_fmt="float"), UNSUPPORTED, ["scale_fmt", "float", "ue8m0"])
    bad("mxfp8_other_experts", dict(mx, moe_quant_algo="NVFP4"), UNSUPPORTED, ["moe_quant_algo", "NVFP4"])
    bad("mxfp8_e5m2", dict(mx, fmt="e5m2"), UNSUPPORTED, ["fmt", "e5m2"])
    for method in ("quark", "hqq", "aqlm", "eetq", "marlin", "GPTQ"):
        bad("method_" + method, {"quant_method": method}, UNSUPPORTED, ["quant_method", '"%s"' % method])


def layers(c):
    def layer(name, quant, linear, spoil, code, keywords, h=64, i=64, config=None):
        rng = random.Random(name)
        tensors = {P + "gate.weight": tensor("BF16", matrix(rng, "BF16", EXPERTS, h))}
        for e in range(EXPERTS):
            for leaf, n, k in (("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)):
                files = linear(rng, n, k)[0]
                tensors.update({"%sexperts.%d.%s%s" % (P, e, leaf, end): t for end, t in files.items()})
        spoil(tensors)
        c.folder(name, {"config.json": json.dumps(dict(base(h, i), quantization_config=quant, **(config or {}))),
                        "model.safetensors": safetensors(tensors)}, code, keywords, door="layer")

    pop = lambda end: (lambda t: t.pop(UP + end))
    rename = lambda end, to: (lambda t: t.update({UP + to: t.pop(UP + end)}))
    add = lambda end, x: (lambda t: t.update({UP + end: x}))

    def replace(end, dtype, shape, data=None):
        def spoil(t):
            size = {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}[dtype]
            n = size
            for d in shape:
                n *= d
            t[UP + end] = Tensor(dtype, list(shape), data if data is not None else bytes(n))
        return spoil

    def poke(end, at, raw):
        def spoil(t):
            x = t[UP + end]
            t[UP + end] = Tensor(x.dtype, x.shape, x.data[:at] + raw + x.data[at + len(raw):])
        return spoil

    # GPTQ: what overrides a module of this layer, and what does not
    dyn = lambda name, entries, code, keys: layer("gptq_dynamic_" + name, dict(GPTQ, dynamic=entries), lambda rng, n, m: q.gptq(rng, n, m), lambda t: None,
                                                  code, keys)
    first = P + "experts.0."
    dyn("override", {"+:.*experts.*": {"bits": 8}}, UNSUPPORTED, ["dynamic", '"+:.*experts.*"', first, '"bits": got 8, need 4'])
    dyn("bare", {".*experts.*": {"group_size": 64}}, UNSUPPORTED, ["dynamic", '".*experts.*"', first, '"group_size": got 64, need 32'])
    dyn("new_field", {P + "experts": {"bits": 4, "format": "marlin"}}, UNSUPPORTED, [first, '"format": got "marlin", need no such field'])
    dyn("last_expert", {"+:.*experts\\.1\\.up_proj": {"sym": False}}, UNSUPPORTED, [UP, '"sym": got false, need true'])
    dyn("kept_and_left_out", {"+:.*mlp.*": {}, "-:.*mlp.*": {}}, AMBIGUOUS, ['"+:.*mlp.*"', first, "leaves it out"])
    dyn("elsewhere", {"lm_head": {}, "+:.*lm_head$": {"bits": 8}, ".*attn.*": {"bits": 8}, "experts": {"bits": 8}, "-:.*attn.*": {}}, "ok", [])
    dyn("as_the_rest", {"+:.*experts.*": {"bits": 4, "group_size": 32}, "+:.*up_proj": {}, "+:.*down_proj": None}, "ok", [])
    auto = lambda name, extra, code, keys: layer("auto_extra_" + name, dict(quant_method="auto-round", bits=4, group_size=32, sym=True, extra_config=extra),
                                                 lambda rng, n, m: q.gptq(rng, n, m), lambda t: None, code, keys)
    of_gptq = lambda name, extra, code, keys: layer("gptq_extra_" + name, dict(GPTQ, extra_config=extra), lambda rng, n, m: q.gptq(rng, n, m),
                                                    lambda t: None, code, keys)
    of_gptq("bits", {"mlp.experts": {"bits": 8}}, UNSUPPORTED, ["extra_config", first, '"bits": got 8, need 4'])
    of_gptq("plain", {UP: {"bits": 16}}, UNSUPPORTED, ["extra_config", UP, '"bits": got 16, need 4'])
    of_gptq("elsewhere", {"lm_head": {"bits": 16}, UP: {"bits": 4, "data_type": "int"}}, "ok", [])
    auto("bits", {UP: {"bits": 8}}, UNSUPPORTED, ["extra_config", UP, '"bits": got 8, need 4'])
    auto("search", {"experts\\.[01]\\.up": {"group_size": 64}}, UNSUPPORTED, ["extra_config", first + "up_proj", '"group_size": got 64, need 32'])
    auto("part", {"mlp.experts": {"sym": False}}, UNSUPPORTED, ["extra_config", first + "gate_proj", '"sym": got false, need true'])
    auto("one_plain", {UP: {"bits": 16}}, UNSUPPORTED, ["left out", UP, "all or none"])
    auto("elsewhere", {"lm_head": {"bits": 8}, "attn": {"bits": 16}, ".*attn.*": {"bits": 8}, UP + "_x": {"bits": 8}, P + "gate": {"bits": 16, "data_type": "fp"},
                       UP: {"bits": 4, "data_type": "int", "sym": True}}, "ok", [])
    # compressed-tensors of other things than these linears: of the cache, of attention, of nothing at all
    plain = lambda rng, n, m: ({".weight": tensor("BF16", matrix(rng, "BF16", n, m))},)
    # Left out by both of a writer's lists
    layer("gptq_extra_agrees", dict(GPTQ, dynamic={"-:.*mlp\\.experts.*": {}}, extra_config={"mlp.experts": {"bits": 16}}), plain, lambda t: None, "ok", [])
    cache, token = floats8("tensor"), floats8("token", dynamic=True)
    def beside(name, groups, code, keys, linear=plain, **more):
        groups = {"g%d" % n: group for n, group in enumerate(groups)}
        layer("ct_beside_" + name, ct("float-quantized", None, config_groups=groups, **more), linear, lambda t: None, code, keys)
    group = lambda targets, weights=None, inputs=None: {"targets": targets, "weights": weights, "input_activations": inputs}
    beside("cache", [], "ok", [], kv_cache_scheme=cache, format="dense")
    beside("no_targets", [group([])], "ok", [], kv_cache_scheme=cache, format="dense")
    beside("no_targets_of_weights", [group([], floats8())], "ok", [])
    beside("nothing", [group(["Linear"])], "ok", [])
    beside("attention", [group(["re:.*self_attn$"], None, cache)], "ok", [])
    beside("activations", [group(["Linear"], None, token)], UNSUPPORTED, ["mlp.experts", "activations alone"])
    beside("activations_left_out", [group(["Linear"], None, token)], "ok", [], ignore=["re:.*experts.*"])
    beside("attention_and_weights", [group(["re:.*self_attn$"], None, cache), group(["Linear"], floats8(), token)], "ok", [],
           linear=lambda rng, n, m: q.fp8_channel(rng, n, m))
    # Plain experts of a model whose linears are quantised: held in one tensor, they were none
    one = lambda t: t.update({UP + ".weight": Tensor("F8_E4M3", [64, 64], bytes(4096))})
    channels = ct("float-quantized", floats8(), token)
    for name, quant in (("bnb4", BNB), ("bnb8", {"quant_method": "bitsandbytes", "load_in_8bit": True}), ("ct", channels)):
        layer("plain_experts_" + name, quant, plain, lambda t: None, "ok", [])
    layer("plain_experts_but_one", channels, plain, one, MISSING, ["weight_scale"])
    layer("plain_experts_one_scale", channels, plain, add(".weight_scale", Tensor("F32", [64, 1], bytes(256))), MISSING, ["gate_proj.weight_scale"])
    layer("plain_experts_state", BNB, plain, add(".weight.absmax", Tensor("F32", [64], bytes(256))), MISSING, [".weight.absmax"])
    layer("plain_experts_one_missing", channels, plain, pop(".weight"), MISSING, [UP + ".weight", "1 of 7"])
    layer("plain_experts_awq", AWQ, plain, lambda t: None, UNSUPPORTED, ["qweight", "not recognised"])
    # GPTQ of some linears of a block: a list, or lists of those that are quantised together
    some = lambda name, entries, linear, code, keys: layer("gptq_modules_" + name, dict(GPTQ, modules_in_block_to_quantize=entries), linear,
                                                           lambda t: None, code, keys)
    packed = lambda rng, n, m: q.gptq(rng, n, m)
    attention = [["self_attn.q_proj", "self_attn.k_proj"], ["self_attn.o_proj"]]
    some("attention", attention, plain, "ok", [])
    some("flat", ["self_attn.q_proj"], plain, "ok", [])
    some("attention_packed", attention, packed, UNSUPPORTED, ["gate_proj.weight", "not recognised"])
    some("none", [], packed, "ok", [])
    some("null", None, packed, "ok", [])
    every = [["mlp.experts.%d.%s_proj" % (e, x) for e in range(EXPERTS)] for x in ("gate", "up", "down")]
    some("experts", attention + every, packed, "ok", [])
    some("projections", ["up_proj", "gate_proj", "down_proj"], packed, "ok", [])
    some("no_down", attention + every[:2], packed, UNSUPPORTED, ["left out", "down_proj", "up_proj", "all or none"])
    some("one_expert", ["experts.1."], packed, UNSUPPORTED, ["left out", "experts.0", "experts.1", "all or none"])
    # FP8 per tensor (static), per channel
    one = lambda **k: (lambda rng, n, m: q.fp8_tensor(rng, n, m, scale=2.0**-8, static=True, **k))
    f = lambda name, spoil, code, keys, quant=FP8, **k: layer("fp8t_" + name, quant, one(), spoil, code, keys, **k)
    f("good", lambda t: None, "ok", [])
    f("no_scale", pop(".weight_scale"), MISSING, [UP + ".weight_scale", "expert 1: 8 of 9"])
    f("no_input_scale", pop(".input_scale"), MISSING, [UP + ".input_scale"])
    f("extra_input_scale", lambda t: None, UNSUPPORTED, ["not recognised", "input_scale"], quant={"quant_method": "fp8"})
    f("inverse_name", rename(".weight_scale", ".weight_scale_inv"), MISSING, [UP + ".weight_scale", "weight_scale_inv"])
    f("scale_per_row", replace(".weight_scale", "F32", [64]), SHAPE, [UP + ".weight_scale", "[64]"])
    f("scale_two", replace(".weight_scale", "F32", [2]), SHAPE, [UP + ".weight_scale", "[2]"])
    f("scale_dtype", replace(".weight_scale", "I32", [1]), DTYPE, [UP + ".weight_scale", "I32"])
    for label, raw in (("nan", NAN), ("inf", INF), ("negative", struct.pack("<f", -1)), ("zero", bytes(4))):
        f("scale_" + label, poke(".weight_scale", 0, raw), CORRUPT, [UP + ".weight_scale", "scale"])
        f("input_scale_" + label, poke(".input_scale", 0, raw), CORRUPT, [UP + ".input_scale", "input scale"])
    # gate and up read one row: compressed-tensors has one scale for it
    apart = lambda by: lambda t: t.update({UP + ".input_scale": q.floats("F32", [], [2.0**-5 * (1 + by)])})
    for name, by, code, keys in (("good", 8e-6, "ok", []), ("differs", 2e-5, CORRUPT, [UP + ".input_scale", P + "experts.1.gate_proj.input_scale", "need the same"])):
        layer("ct_input_scale_" + name, ct("float-quantized", floats8("tensor"), floats8("tensor")), one(input_scale=2.0**-5), apart(by), code, keys)
    f("weight_nan", poke(".weight", 70, b"\x7f"), CORRUPT, [UP + ".weight", "0x7F", "[1, 6]"])
    f("weight_bf16", replace(".weight", "BF16", [64, 64]), DTYPE, [UP + ".weight", "BF16"])
    f("weight_row_more", replace(".weight", "F8_E4M3", [65, 64]), SHAPE, [UP + ".weight", "[65, 64]"])
    f("skip_one", lambda t: None, UNSUPPORTED, ["all or none"], quant=dict(FP8, ignored_layers=[UP]))
    channel = ct("float-quantized", floats8(), floats8("token", dynamic=True))
    g = lambda name, spoil, code, keys, **k: layer("fp8c_" + name, k.pop("quant", channel), lambda rng, n, m: q.fp8_channel(rng, n, m), spoil, code, keys, **k)
    g("good", lambda t: None, "ok", [])
    g("no_scale", pop(".weight_scale"), MISSING, [UP + ".weight_scale"])
    g("scale_row_less", replace(".weight_scale", "F32", [63, 1]), SHAPE, [UP + ".weight_scale", "[63, 1]"])
    g("scale_columns", replace(".weight_scale", "F32", [1, 64]), SHAPE, [UP + ".weight_scale", "[1, 64]"])
    g("scale_nan", poke(".weight_scale", 4 * 5, NAN), CORRUPT, [UP + ".weight_scale", "[5, 0]"])
    g("scale_negative", poke(".weight_scale", 4 * 63 + 3, b"\xbf"), CORRUPT, [UP + ".weight_scale", "[63, 0]"])
    g("ignored_in_part", lambda t: None, UNSUPPORTED, ["left out", "experts.1", "experts.0"], quant=dict(channel, ignore=["re:.*experts\\.1\\..*"]))
    g("ignored_projection", lambda t: None, UNSUPPORTED, ["left out", "up_proj"], quant=dict(channel, ignore=["re:.*up_proj"]))
    g("two_formats", lambda t: None, UNSUPPORTED, ["of the format"],
      quant=ct("x", None, config_groups={"a": {"targets": ["re:.*down_proj"], "weights": floats8("tensor"), "format": "float-quantized"},
                                         "b": {"targets": ["Linear"], "weights": floats8(), "format": "float-quantized"}}))
    g("no_target", lambda t: None, DTYPE, ["gate_proj", "F8_E4M3"],
      quant=ct("x", None, config_groups={"a": {"targets": ["re:.*attn.*"], "weights": floats8(), "format": "float-quantized"}}))
    m = lambda name, spoil, code, keys, **k: layer("mxfp8_" + name, dict(OPT, quant_algo="MXFP8"), lambda rng, n, x: q.mxfp8(rng, n, x), spoil, code, keys, **k)
    m("good", lambda t: None, "ok", [])
    m("scale_ff", poke(".weight_scale", 3, b"\xff"), CORRUPT, [UP + ".weight_scale", "0xFF", "[1, 1]"])
    m("scale_f32", replace(".weight_scale", "F32", [64, 2]), DTYPE, [UP + ".weight_scale", "F32"])
    m("scale_group_16", replace(".weight_scale", "U8", [64, 4]), SHAPE, [UP + ".weight_scale", "[64, 4]", "[64, 2]"])
    layer("mxfp8_odd_width", dict(OPT, quant_algo="MXFP8"), lambda rng, n, x: q.fp8_channel(rng, n, x), lambda t: None, UNSUPPORTED, ["48 columns", "32"], i=48)

    # int8
    w8 = ct("int-quantized", ints(8, strategy="channel"), ints(8, strategy="token", dynamic=True))
    j = lambda name, spoil, code, keys, **k: layer("int8_" + name, w8, lambda rng, n, x: q.int8(rng, n, x), spoil, code, keys, **k)
    j("good", lambda t: None, "ok", [])
    j("weight_u8", replace(".weight", "U8", [64, 64]), DTYPE, [UP + ".weight", "U8", "I8"])
    j("no_scale", pop(".weight_scale"), MISSING, [UP + ".weight_scale"])
    j("one_scale", replace(".weight_scale", "BF16", [1]), SHAPE, [UP + ".weight_scale", "[1]"])
    j("scale_inf", poke(".weight_scale", 2, b"\x80\x7f"), CORRUPT, [UP + ".weight_scale", "inf", "[1, 0]"])
    j("extra_zero_point", add(".weight_zero_point", Tensor("I8", [64, 1], bytes(64))), UNSUPPORTED, ["not recognised", "weight_zero_point"])
    b8 = lambda name, spoil, code, keys: layer("bnb8_" + name, {"quant_method": "bitsandbytes", "load_in_8bit": True}, lambda rng, n, x: q.bnb8(rng, n, x), spoil, code, keys)
    b8("good", lambda t: None, "ok", [])
    b8("no_format", pop(".weight_format"), "ok", [])
    for value, word in ((1, "col32"), (2, "col_turing"), (3, "col_ampere")):
        b8("format_" + word, poke(".weight_format", 0, bytes([value])), UNSUPPORTED, [UP + ".weight_format", "got %d" % value, word, "need 0 (row)"])
    b8("format_unknown", poke(".weight_format", 0, b"\4"), CORRUPT, [UP + ".weight_format", "got 4", "need 0 (row)"])
    b8("format_two", replace(".weight_format", "U8", [2]), SHAPE, [UP + ".weight_format", "[2]"])
    b8("format_text", replace(".weight_format", "F32", [1]), DTYPE, [UP + ".weight_format", "F32"])
    b8("no_scb", pop(".SCB"), MISSING, [UP + ".SCB"])
    b8("scb_column", replace(".SCB", "F32", [64, 1]), SHAPE, [UP + ".SCB", "[64, 1]"])
    b8("scb_nan", poke(".SCB", 8, NAN), CORRUPT, [UP + ".SCB", "[2, 0]"])

    # compressed-tensors integers
    pk = ct("pack-quantized", ints())
    def k4(name, spoil, code, keys, quant=pk, make=None, **k):
        layer("packed_" + name, quant, make or (lambda rng, n, x: q.packed(rng, n, x)), spoil, code, keys, **k)
    k4("good", lambda t: None, "ok", [])
    k4("no_packed", pop(".weight_packed"), MISSING, [UP + ".weight_packed"])
    k4("no_scale", pop(".weight_scale"), MISSING, [UP + ".weight_scale"])
    k4("no_shape", pop(".weight_shape"), MISSING, [UP + ".weight_shape"])
    k4("plain_name", rename(".weight_packed", ".weight"), MISSING, [UP + ".weight_packed", "not recognised"])
    k4("word_less", replace(".weight_packed", "I32", [64, 7]), SHAPE, [UP + ".weight_packed", "[64, 7]", "[64, 8]"])
    k4("word_more", replace(".weight_packed", "I32", [64, 9]), SHAPE, [UP + ".weight_packed", "[64, 9]"])
    k4("packed_along_rows", replace(".weight_packed", "I32", [8, 64]), SHAPE, [UP + ".weight_packed", "[8, 64]"])
    k4("bytes", replace(".weight_packed", "U8", [64, 32]), DTYPE, [UP + ".weight_packed", "U8", "I32"])
    k4("groups_of_16", replace(".weight_scale", "BF16", [64, 4]), SHAPE, [UP + ".weight_scale", "[64, 4]", "[64, 2]"])
    k4("groups_of_64", lambda t: None, SHAPE, ["weight_scale", "[64, 2]", "[64, 1]"], quant=ct("pack-quantized", ints(group=64)))
    k4("shape_differs", poke(".weight_shape", 0, struct.pack("<q", 65)), CORRUPT, [UP + ".weight_shape", "[65, 64]", "[64, 64]"])
    k4("shape_swapped_sizes", replace(".weight_shape", "I64", [3]), SHAPE, [UP + ".weight_shape", "[3]"])
    k4("shape_float", replace(".weight_shape", "F32", [2]), DTYPE, [UP + ".weight_shape", "F32"])
    k4("scale_nan", poke(".weight_scale", 0, b"\xc0\x7f"), CORRUPT, [UP + ".weight_scale", "nan", "[0, 0]"])
    k4("scale_zero", poke(".weight_scale", 6, b"\0\0"), CORRUPT, [UP + ".weight_scale", "[1, 1]"])
    k4("extra_zeros", add(".weight_zero_point", Tensor("I32", [8, 2], bytes(64))), UNSUPPORTED, ["not recognised", "weight_zero_point"])
    k4("missing_zeros", lambda t: None, MISSING, ["weight_zero_point"], quant=ct("pack-quantized", ints(symmetric=False)))
    k4("zeros_row_more", replace(".weight_zero_point", "I32", [9, 2]), SHAPE, [UP + ".weight_zero_point", "[9, 2]", "[8, 2]"],
       quant=ct("pack-quantized", ints(symmetric=False)), make=lambda rng, n, x: q.packed(rng, n, x, zeros=True))
    k4("extra_index", add(".weight_g_idx", Tensor("I32", [64], bytes(256))), UNSUPPORTED, ["not recognised", "weight_g_idx"])
    # A shared expert under the second of its family's names, whose tensors are not called ".weight".
    rng = random.Random(3)
    tensors = {P + "gate.weight": tensor("BF16", matrix(rng, "BF16", EXPERTS, 64)), P + "expert_bias": q.floats("F32", [EXPERTS], [0.5] * EXPERTS)}
    for module in ["experts.%d" % e for e in range(EXPERTS)] + ["shared_experts"]:
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            tensors.update({"%s%s.%s%s" % (P, module, leaf, end): t for end, t in q.packed(rng, 64, 64)[0].items()})
    config = dict(base(64, 64), model_type="hy_v3", first_k_dense_replace=0, quantization_config=pk)
    c.folder("packed_shared_second_name", {"config.json": json.dumps(config), "model.safetensors": safetensors(tensors)}, "ok", [], door="layer")
    w4 = ct("int-quantized", ints(group=128), floats8("token", dynamic=True))
    a4 = lambda name, spoil, code, keys, linear={}: layer("w4afp8_" + name, w4, lambda rng, n, x: q.byte_codes(rng, n, x, **linear), spoil, code, keys,
                                                          h=128, i=128)
    a4("good", lambda t: None, "ok", [])
    a4("code_8", poke(".weight", 128 * 3 + 5, b"\x08"), CORRUPT, [UP + ".weight", "got 8 at [3, 5]", "-8 to 7"])
    a4("code_minus_9", poke(".weight", 0, b"\xf7"), CORRUPT, [UP + ".weight", "got -9 at [0, 0]"])
    a4("scale_zero", poke(".weight_scale", 0, bytes(4)), CORRUPT, [UP + ".weight_scale", "[0, 0]"])
    a4("scale_negative", poke(".weight_scale", 3, b"\xbc"), UNSUPPORTED, [UP + ".weight_scale", "row 0, group 0", "not negative (int4-fp8)"])
    a4("scale_zero_over_zeros", lambda t: None, "ok", [], linear={"empty": True})
    a4("packed_name", rename(".weight", ".weight_packed"), MISSING, [UP + ".weight", "not recognised"])
    k4("bits_8_stored_4", lambda t: None, SHAPE, ["weight_packed", "[64, 8]", "[64, 16]"], quant=ct("pack-quantized", ints(8)))
    ordered = ct("pack-quantized", ints(actorder="group"))
    index = lambda rng, n, x: q.packed(rng, n, x, index=q.group_index(random.Random(7), x, 32, True))
    k4("order_good", lambda t: None, "ok", [], quant=ordered, make=index)
    k4("order_missing", pop(".weight_g_idx"), MISSING, [UP + ".weight_g_idx"], quant=ordered, make=index)
    k4("order_out_of_range", poke(".weight_g_idx", 40, struct.pack("<i", 2)), CORRUPT, [UP + ".weight_g_idx", "2"], quant=ordered, make=index)
    k4("order_negative", poke(".weight_g_idx", 40, struct.pack("<i", -1)), CORRUPT, [UP + ".weight_g_idx", "-1"], quant=ordered, make=index)
    k4("order_uneven", replace(".weight_g_idx", "I32", [64], struct.pack("<64i", *([0] * 33 + [1] * 31))), UNSUPPORTED, [UP + ".weight_g_idx", "uneven"],
       quant=ordered, make=index)
    k4("order_wide", replace(".weight_g_idx", "I64", [64]), DTYPE, [UP + ".weight_g_idx", "I64"], quant=ordered, make=index)

    # GPTQ and AWQ
    def gp(name, spoil, code, keys, quant=GPTQ, **k):
        more = k.pop("linear", {})
        layer("gptqt_" + name, quant, lambda rng, n, x: q.gptq(rng, n, x, **more), spoil, code, keys, **k)
    gp("good", lambda t: None, "ok", [])
    for end in (".qweight", ".qzeros", ".scales"):
        gp("no" + end, pop(end), MISSING, [UP + end])
    gp("qweight_row_less", replace(".qweight", "I32", [7, 64]), SHAPE, [UP + ".qweight", "[7, 64]", "[8, 64]"])
    gp("qweight_column_more", replace(".qweight", "I32", [8, 65]), SHAPE, [UP + ".qweight", "[8, 65]"])
    gp("qweight_transposed", replace(".qweight", "I32", [64, 8]), SHAPE, [UP + ".qweight", "[64, 8]"])
    gp("qweight_i64", replace(".qweight", "I64", [8, 64]), DTYPE, [UP + ".qweight", "I64"])
    gp("qzeros_width", replace(".qzeros", "I32", [2, 9]), SHAPE, [UP + ".qzeros", "[2, 9]", "[2, 8]"])
    gp("qzeros_groups", replace(".qzeros", "I32", [3, 8]), SHAPE, [UP + ".qzeros", "[3, 8]"])
    gp("scales_groups", replace(".scales", "F16", [1, 64]), SHAPE, [UP + ".scales", "[1, 64]", "[2, 64]"])
    gp("scales_transposed", replace(".scales", "F16", [64, 2]), SHAPE, [UP + ".scales", "[64, 2]"])
    gp("scales_nan", poke(".scales", 2, b"\0\x7e"), CORRUPT, [UP + ".scales", "nan", "[1, 0]"])
    gp("scales_inf", poke(".scales", 128 + 4, b"\0\x7c"), CORRUPT, [UP + ".scales", "inf", "[2, 1]"])
    gp("scales_negative", poke(".scales", 1, b"\xbc"), "ok", [])
    gp("scales_zero", poke(".scales", 0, b"\0\0"), CORRUPT, [UP + ".scales", "got scale 0 at [0, 0]", "a finite number (0 only"])
    gp("zero_in_symmetric", poke(".qzeros", 0, b"\x76"), CORRUPT, [UP + ".qzeros", "zero point 7", "symmetric"])
    gp("v1_said_v2", lambda t: None, CORRUPT, ["qzeros", "zero point 7", "need 8"], quant=dict(GPTQ, checkpoint_format="gptq_v2"))
    gp("index_out_of_range", poke(".g_idx", 0, struct.pack("<i", 2)), CORRUPT, [UP + ".g_idx", "2"])
    gp("index_huge", poke(".g_idx", 8, struct.pack("<i", 2**31 - 1)), CORRUPT, [UP + ".g_idx", "2147483647"])
    gp("index_negative", poke(".g_idx", 252, struct.pack("<i", -1)), CORRUPT, [UP + ".g_idx", "-1"])
    gp("index_short", replace(".g_idx", "I32", [63]), SHAPE, [UP + ".g_idx", "[63]", "[64]"])
    gp("index_float", replace(".g_idx", "F32", [64]), DTYPE, [UP + ".g_idx", "F32"])
    gp("index_unsorted", replace(".g_idx", "I32", [64], struct.pack("<64i", *([1] * 32 + [0] * 32))), CORRUPT, [UP + ".g_idx", "desc_act"])
    gp("index_missing_with_desc_act", pop(".g_idx"), MISSING, [UP + ".g_idx"], quant=dict(GPTQ, desc_act=True))
    gp("bias_not_zero", add(".bias", Tensor("F16", [64], bytes(126) + b"\0\x3c")), UNSUPPORTED, [".bias", "row 63", "need zeros"])
    gp("words_of_other_width", lambda t: None, SHAPE, ["qweight", "[8, 64]", "[16, 64]"], quant=dict(GPTQ, bits=8))
    dummy = lambda rng, n, m: ({".weight": Tensor("BF16", [n, m], bytes(2 * n * m))}, None)
    layer("gptqt_width_not_words", GPTQ, dummy, lambda t: None, UNSUPPORTED, ["60 columns", "8"], i=60)
    words = lambda rng, n, m: ({".weight_packed": Tensor("I32", [n, m // 8], bytes(4 * n * (m // 8)))}, None)
    layer("packed_width_not_groups", pk, words, lambda t: None, UNSUPPORTED, ["48 columns", "32"], i=48)
    layer("awqt_rows_not_words", AWQ, dummy, lambda t: None, UNSUPPORTED, ["rows", "8"], i=36)
    layer("awqt_columns_not_groups", AWQ, dummy, lambda t: None, UNSUPPORTED, ["48 columns", "32"], i=48)
    layer("nvfp4_width_24", OPT, dummy, lambda t: None, UNSUPPORTED, ["24 columns", "16"], i=24)
    aw = lambda name, spoil, code, keys, **k: layer("awqt_" + name, AWQ, lambda rng, n, x: q.awq(rng, n, x), spoil, code, keys, **k)
    aw("good", lambda t: None, "ok", [])
    layer("awqt_symmetric_zeros", dict(AWQ, zero_point=False), lambda rng, n, x: q.awq(rng, n, x), lambda t: None, CORRUPT, [".qzeros", "need 8", "symmetric"])
    for end in (".qweight", ".qzeros", ".scales"):
        aw("no" + end, pop(end), MISSING, [UP + end])
    aw("qweight_gptq_order", replace(".qweight", "I32", [8, 64]), SHAPE, [UP + ".qweight", "[8, 64]", "[64, 8]"])
    aw("qzeros_width", replace(".qzeros", "I32", [2, 7]), SHAPE, [UP + ".qzeros", "[2, 7]"])
    aw("scales_groups", replace(".scales", "F16", [4, 64]), SHAPE, [UP + ".scales", "[4, 64]"])
    aw("scales_zero", poke(".scales", 0, b"\0\0"), CORRUPT, [UP + ".scales", "[0, 0]"])
    aw("index", add(".g_idx", Tensor("I32", [64], bytes(256))), UNSUPPORTED, ["not recognised", "g_idx"])

    # NVFP4 and MXFP4
    opt = lambda name, spoil, code, keys, **k: layer("nvfp4_" + name, OPT, lambda rng, n, x: q.nvfp4(rng, n, x, compressed=False, global_scale=2.0**-5), spoil, code,
                                                     keys, **k)
    opt("good", lambda t: None, "ok", [])
    for end in (".weight", ".weight_scale", ".weight_scale_2", ".input_scale"):
        opt("no" + end, pop(end), MISSING, [UP + end])
    opt("scale_nan", poke(".weight_scale", 5, b"\x7f"), CORRUPT, [UP + ".weight_scale", "0x7F", "[1, 1]"])
    opt("scale_ff", poke(".weight_scale", 0, b"\xff"), CORRUPT, [UP + ".weight_scale", "0xFF"])
    opt("scale_negative", poke(".weight_scale", 4, b"\xb8"), CORRUPT, [UP + ".weight_scale", "-1", "[1, 0]"])
    opt("scale_zero_over_weights", poke(".weight_scale", 0, b"\0"), CORRUPT, [UP + ".weight_scale", "[0, 0]"])
    opt("scale_u8", replace(".weight_scale", "U8", [64, 4]), DTYPE, [UP + ".weight_scale", "U8", "F8_E4M3"])
    opt("scale_group_32", replace(".weight_scale", "F8_E4M3", [64, 2]), SHAPE, [UP + ".weight_scale", "[64, 2]", "[64, 4]"])
    opt("weight_unpacked", replace(".weight", "U8", [64, 64]), SHAPE, [UP + ".weight", "[64, 64]", "[64, 32]"])
    opt("weight_byte_less", replace(".weight", "U8", [64, 31]), SHAPE, [UP + ".weight", "[64, 31]"])
    for label, raw in (("nan", NAN), ("inf", INF), ("zero", bytes(4)), ("negative", struct.pack("<f", -2))):
        opt("global_" + label, poke(".weight_scale_2", 0, raw), CORRUPT, [UP + ".weight_scale_2", "global scale"])
        opt("input_" + label, poke(".input_scale", 0, raw), CORRUPT, [UP + ".input_scale", "input scale"])
    nv = ct("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, "dynamic": False})
    layer("ct_nvfp4_global_tiny", nv, lambda rng, n, x: q.nvfp4(rng, n, x, static=False), poke(".weight_global_scale", 0, struct.pack("<f", 1e-40)), CORRUPT,
          [UP + ".weight_global_scale", "reciprocal is finite"])
    opt("global_per_row", replace(".weight_scale_2", "F32", [64]), SHAPE, [UP + ".weight_scale_2", "[64]"])
    mx = lambda name, spoil, code, keys, **k: layer("mxfp4l_" + name, ct("mxfp4-pack-quantized", dict(ints(4, 32), type="float")), lambda rng, n, x: q.mxfp4(rng, n, x),
                                                    spoil, code, keys, **k)
    mx("good", lambda t: None, "ok", [])
    mo = lambda name, spoil, code, keys: layer("mxfp4m_" + name, dict(OPT, quant_algo="W4A8_MXFP4_FP8"), lambda rng, n, x: q.mxfp4(rng, n, x, compressed=False), spoil, code,
                                               keys)
    mo("good", lambda t: None, "ok", [])
    mo("no_input_scale", pop(".input_scale"), MISSING, [UP + ".input_scale"])
    mo("input_scale_zero", poke(".input_scale", 0, bytes(4)), CORRUPT, [UP + ".input_scale", "input scale"])
    mo("scale_ff", poke(".weight_scale", 5, b"\xff"), CORRUPT, [UP + ".weight_scale", "0xFF", "[2, 1]"])
    mx("scale_ff", poke(".weight_scale", 127, b"\xff"), CORRUPT, [UP + ".weight_scale", "0xFF", "[63, 1]"])
    mx("scale_float", replace(".weight_scale", "F8_E4M3", [64, 2]), DTYPE, [UP + ".weight_scale", "F8_E4M3"])
    mx("global_scale", add(".weight_global_scale", Tensor("F32", [1], bytes(4))), UNSUPPORTED, ["not recognised", "weight_global_scale"])

    # bitsandbytes 4-bit
    def bn(name, spoil, code, keys, nested=False, **k):
        layer("bnb4_" + name, dict(BNB, bnb_4bit_use_double_quant=nested), lambda rng, n, x: q.bnb4(rng, n, x, nested=nested), spoil, code, keys, **k)
    state = ".weight.quant_state.bitsandbytes__nf4"
    text = lambda s: Tensor("U8", [len(s)], s.encode())
    good = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64]}
    said = lambda **changes: (lambda t: t.update({UP + state: text(json.dumps({k: v for k, v in dict(good, **changes).items() if v is not None}))}))
    bn("good", lambda t: None, "ok", [])
    bn("nested_good", lambda t: None, "ok", [], nested=True)
    bn("router", lambda t: t.update({P + "gate.weight": Tensor("U8", [EXPERTS * 32, 1], bytes(EXPERTS * 32))}), DTYPE,
       [P + "gate.weight", "got U8", "quantised routers are not supported"])
    for end in (".weight", ".weight.absmax", ".weight.quant_map", state):
        bn("no" + end.replace(state, "_state"), pop(end), MISSING, [UP + end])
    bn("absmax_nan", poke(".weight.absmax", 16, NAN), CORRUPT, [UP + ".weight.absmax", "block 4"])
    bn("absmax_negative", poke(".weight.absmax", 3, b"\xbf"), CORRUPT, [UP + ".weight.absmax", "block 0"])
    bn("absmax_short", replace(".weight.absmax", "F32", [63]), SHAPE, [UP + ".weight.absmax", "[63]", "[64]"])
    bn("absmax_u8_not_nested", replace(".weight.absmax", "U8", [64]), DTYPE, [UP + ".weight.absmax", "U8", "F32"])
    bn("weight_half", replace(".weight", "U8", [1024, 1]), SHAPE, [UP + ".weight", "[1024, 1]", "[2048, 1]"])
    bn("weight_matrix", replace(".weight", "U8", [64, 32]), SHAPE, [UP + ".weight", "[64, 32]"])
    bn("map_other", poke(".weight.quant_map", 4, struct.pack("<f", -0.5)), UNSUPPORTED, [UP + ".weight.quant_map", "-0.5", "[1]"])
    bn("map_nan", poke(".weight.quant_map", 0, NAN), UNSUPPORTED, [UP + ".weight.quant_map", "nan"])
    bn("map_short", replace(".weight.quant_map", "F32", [15]), SHAPE, [UP + ".weight.quant_map", "[15]"])
    bn("state_not_json", add(state, text("{")), CORRUPT, ["quant_state", "JSON"])
    bn("state_array", add(state, text("[]")), CORRUPT, ["quant_state", "object"])
    bn("state_empty", add(state, Tensor("U8", [0], b"")), CORRUPT, ["quant_state"])
    bn("state_huge", add(state, Tensor("U8", [70000], bytes(70000))), LIMIT, ["quant_state", "70000"])
    bn("state_type", said(quant_type="fp4"), CORRUPT, ["quant_state", "quant_type", "fp4"])
    bn("state_no_block", said(blocksize=None), CORRUPT, ["quant_state", "blocksize", "none"])
    bn("state_block", said(blocksize=128), CORRUPT, ["quant_state", "blocksize", "got 128"])
    for block in (0, -64, 2**21):
        bn("state_block_%d" % block, said(blocksize=block), CORRUPT, ["quant_state", "blocksize", "got %d" % block])
    bn("state_nested_block", said(nested_blocksize=0, nested_offset=0.5), CORRUPT, ["quant_state", "nested_blocksize", "got 0"], nested=True)
    bn("state_shape", said(shape=[64, 63]), CORRUPT, ["quant_state", "shape", "64, 63"])
    bn("state_no_shape", said(shape=None), CORRUPT, ["quant_state", "shape"])
    bn("nested_no_offset", said(), CORRUPT, ["quant_state", "nested_offset"], nested=True)
    bn("nested_no_absmax", pop(".weight.nested_absmax"), MISSING, [UP + ".weight.nested_absmax"], nested=True)
    bn("nested_absmax_long", replace(".weight.nested_absmax", "F32", [2]), SHAPE, [UP + ".weight.nested_absmax", "[2]", "[1]"], nested=True)
    bn("nested_map_short", replace(".weight.nested_quant_map", "F32", [255]), SHAPE, [UP + ".weight.nested_quant_map", "[255]"], nested=True)
    bn("nested_absmax_inf", poke(".weight.nested_absmax", 0, INF), CORRUPT, [UP + ".weight.absmax"], nested=True)
    bn("fp4_said_nf4_stored", lambda t: t.update({UP + state: t[UP + state]}), "ok", [])
    layer("stacked_gptq", GPTQ, lambda rng, n, m: ({".weight": Tensor("BF16", [n, m], bytes(2 * n * m))}, None),
          lambda t: [t.clear(), t.update({P + "gate.weight": Tensor("BF16", [2, 64], bytes(256)), P + "experts.gate_up_proj": Tensor("BF16", [2, 128, 64], bytes(2 * 2 * 128 * 64)),
                                          P + "experts.down_proj": Tensor("BF16", [2, 64, 64], bytes(2 * 2 * 64 * 64))})], UNSUPPORTED, ["gptq", "fused"])

def fill(c):
    for part in (descriptions, layers, stacked):
        part(c)


main(fill)
