"""What the plugins rely on, looked up in the Python files of vLLM and SGLang, without importing
them.

MOESAIC_ENGINE_FILES names folders with unpacked wheels (separated by colons), each with `vllm` or
`sglang` in it; without it the installed packages are looked at, and without those nothing is.

    python -m pip download --no-deps vllm==0.33.0 && python -m zipfile -e vllm-*.whl vllm-0.33.0
    MOESAIC_ENGINE_FILES=vllm-0.33.0 python -m pytest python/tests/test_plugin_files.py
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest


def folders(package):
    named = os.environ.get("MOESAIC_ENGINE_FILES")
    if named:
        return [Path(f) / package for f in named.split(":") if (Path(f) / package).is_dir()]
    spec = importlib.util.find_spec(package)
    # Our own modules of these names are in a package, so they are not found here.
    return [Path(spec.submodule_search_locations[0])] if spec and spec.submodule_search_locations else []


def each(package):
    found = folders(package)
    skipped = pytest.param(None, marks=pytest.mark.skip(reason=f"no files of {package}"))
    return pytest.mark.parametrize("root", found or [skipped], ids=lambda f: f.parent.name if f else "none")


class File:
    """Functions and classes of one Python file, by dotted names."""

    def __init__(self, path):
        self.nodes = {}
        self._add("", ast.parse(path.read_text()).body)

    def _add(self, prefix, body):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.nodes[prefix + node.name] = node
            if isinstance(node, ast.ClassDef):
                self._add(f"{prefix}{node.name}.", node.body)
            if isinstance(node, ast.Assign):
                self.nodes.update({prefix + t.id: node for t in node.targets if isinstance(t, ast.Name)})
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.nodes[prefix + node.target.id] = node

    def arguments(self, name):
        a = self.nodes[name].args
        return [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]

    def fields(self, name):
        return {n.split(".")[1] for n in self.nodes if n.startswith(f"{name}.")}

    def abstract(self, name):
        methods = {n: f for n, f in self.nodes.items() if n.startswith(f"{name}.") and isinstance(f, ast.FunctionDef)}
        return {
            n.split(".")[1]
            for n, f in methods.items()
            if any(ast.unparse(d).endswith("abstractmethod") for d in f.decorator_list)
        }


LAYERS = "model_executor/layers"

ABSTRACT = {
    "activation_format",
    "_supports_current_device",
    "_supports_no_act_and_mul",
    "_supports_quant_scheme",
    "_supports_activation",
    "_supports_parallel_config",
    "workspace_shapes",
    "finalize_weight_and_reduce_impl",
    "apply",
}


@each("vllm")
def test_vllm_experts(root):
    kernel = File(root / LAYERS / "fused_moe/modular_kernel.py")
    both = kernel.abstract("FusedMoEExperts") | kernel.abstract("FusedMoEExpertsModular")
    assert both == ABSTRACT  # a new one would have to be written
    assert kernel.arguments("FusedMoEExpertsModular.apply") == [
        "self",
        "output",
        "hidden_states",
        "w1",
        "w2",
        "topk_weights",
        "topk_ids",
        "activation",
        "global_num_experts",
        "expert_map",
        "a1q_scale",
        "a2_scale",
        "workspace13",
        "workspace2",
        "expert_tokens_meta",
        "apply_router_weight_on_input",
    ]
    assert kernel.arguments("FusedMoEExperts.is_supported_config") == [
        "cls",
        "moe_config",
        "weight_key",
        "activation_key",
        "activation_format",
    ]
    assert kernel.arguments("FusedMoEExpertsModular.workspace_shapes") == [
        "self",
        "M",
        "N",
        "K",
        "topk",
        "global_num_experts",
        "local_num_experts",
        "expert_tokens_meta",
        "activation",
    ]
    assert "FusedMoEExperts.process_weights_after_loading" in kernel.nodes
    assert "TopKWeightAndReduceNoOP" in File(root / LAYERS / "fused_moe/topk_weight_and_reduce.py").nodes


@each("vllm")
@pytest.mark.parametrize(
    ("module", "backends", "identity", "arguments"),
    [
        ("unquantized", "UnquantizedMoeBackend", {"TRITON", "CPU"}, ["moe_config"]),
        ("fp8", "Fp8MoeBackend", {"TRITON"}, ["moe_config", "weight_key", "activation_key"]),
        ("int8", "Int8MoeBackend", {"TRITON"}, ["moe_config"]),
    ],
)
def test_vllm_oracles(root, module, backends, identity, arguments):
    oracle = File(root / LAYERS / f"fused_moe/oracle/{module}.py")
    assert oracle.arguments("_get_priority_backends") == arguments
    assert oracle.arguments("backend_to_kernel_cls") == ["backend"]
    assert identity <= oracle.fields(backends)


@each("vllm")
def test_vllm_configuration(root):
    keys = File(root / LAYERS / "quantization/utils/quant_utils.py").nodes
    assert {
        "kFp8Static128BlockSym",
        "kFp8Dynamic128Sym",
        "kFp8StaticChannelSym",
        "kFp8DynamicTokenSym",
        "kInt8StaticChannelSym",
        "kInt8DynamicTokenSym",
    } <= set(keys)
    config = File(root / LAYERS / "fused_moe/config.py")
    assert {
        "num_local_experts",
        "experts_per_token",
        "hidden_dim",
        "intermediate_size_per_partition",
        "activation",
        "device",
        "in_dtype",
        "moe_parallel_config",
        "moe_backend",
    } <= config.fields("FusedMoEConfig")
    assert {
        "w1_scale",
        "w2_scale",
        "w1_bias",
        "w2_bias",
        "gemm1_clamp_limit",
        "gemm1_alpha",
        "gemm1_beta",
    } <= (config.fields("FusedMoEQuantConfig"))
    assert {"use_all2all_kernels", "enable_eplb"} <= config.fields("FusedMoEParallelConfig")
    assert "additional_config" in File(root / "config/vllm.py").fields("VllmConfig")
    assert "vllm.general_plugins" in (root / "plugins/__init__.py").read_text()


@each("vllm")
def test_vllm_methods_that_leave_kernels_alone(root):
    base = File(root / LAYERS / "fused_moe/fused_moe_method_base.py")
    assert "self.moe_kernel: mk.FusedMoEKernel | None" in ast.unparse(base.nodes["FusedMoEMethodBase.__init__"])
    kernel = File(root / LAYERS / "fused_moe/modular_kernel.py")
    assert "self.fused_experts = fused_experts" in ast.unparse(kernel.nodes["FusedMoEKernelModularImpl.__init__"])
    assert "FusedMoEKernel.fused_experts" in kernel.nodes
    for file, name in (
        ("fp8.py", "Fp8MoEMethod"),
        (
            "compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py",
            "CompressedTensorsW8A8Fp8MoEMethod",
        ),
    ):
        method = File(root / LAYERS / "quantization" / file)
        assert method.arguments(f"{name}.process_weights_after_loading") == ["self", "layer"]


@each("sglang")
def test_sglang(root):
    srt = root / "srt"
    runner = File(srt / "layers/moe/moe_runner/runner.py")
    assert runner.arguments("register_moe_runner_core") == ["backend_name", "factory"]
    assert runner.arguments("MoeRunner.__init__")[:3] == ["self", "runner_backend", "config"]
    base = File(srt / "layers/moe/moe_runner/base.py")
    assert base.abstract("DispatchMoeRunnerCore") == {"runner_backend", "run_from_dispatch"}
    assert base.arguments("DispatchMoeRunnerCore.run_from_dispatch") == [
        "self",
        "dispatch_output",
        "quant_info",
        "runner_config",
        "hooks",
    ]
    assert {
        "activation",
        "is_gated",
        "gemm1_alpha",
        "gemm1_beta",
        "gemm1_clamp_limit",
        "swiglu_limit",
        "gate_up_interleaved",
        "top_k",
        "no_combine",
        "apply_router_weight_on_input",
        "routed_scaling_factor",
    } <= base.fields("MoeRunnerConfig")
    triton = File(srt / "layers/moe/moe_runner/triton.py")
    assert {
        "w13_weight",
        "w2_weight",
        "b13",
        "b2",
        "w13_scale",
        "w2_scale",
        "a13_scale",
        "a2_scale",
        "block_shape",
        "use_fp8_w8a8",
        "use_mxfp8",
        "use_int8_w8a8",
        "use_int8_w8a16",
        "use_int4_w4a16",
        "per_channel_quant",
        "fuse_swiglu_interleaved",
    } <= triton.fields("TritonMoeQuantInfo")
    standard = File(srt / "layers/moe/token_dispatcher/standard.py")
    assert {"hidden_states", "hidden_states_scale", "topk_output", "format"} <= standard.fields(
        "StandardDispatchOutput"
    )
    assert "hidden_states" in standard.fields("StandardCombineInput")
    utils = File(srt / "layers/moe/utils.py")
    assert {"RegisteredMoeRunnerBackend", "get_moe_runner_backend"} <= set(utils.nodes)
    assert "_MoeRunnerBackendPredicates.is_triton" in utils.nodes
    hooks = File(srt / "plugins/hook_registry.py")
    assert hooks.arguments("HookRegistry.register")[:4] == ["cls", "target", "hook", "hook_type"]
    assert "AFTER" in hooks.fields("HookType")
    assert "add_moe_runner_backend_choices" in File(srt / "arg_groups/choices.py").nodes
    for file, name in ("unquant.py", "UnquantizedFusedMoEMethod"), ("fp8.py", "Fp8MoEMethod"):
        method = File(srt / "layers/quantization" / file)
        assert method.arguments(f"{name}.create_moe_runner") == [
            "self",
            "layer",
            "moe_runner_config",
        ]
    layer = File(srt / "layers/moe/fused_moe_triton/layer.py").nodes["FusedMoE.__init__"]
    stated = [ast.unparse(node) for node in layer.body]
    made = stated.index("self.quant_method.create_moe_runner(self, self.moe_runner_config)")
    assert stated[made + 1] == "self.runner_backend = self.quant_method.get_moe_runner_backend(self)"
    assert "sglang.srt.plugins" in (srt / "plugins/__init__.py").read_text()
