"""`moesaic.transformers.from_pretrained`: transformers loads a model, Moesaic its routed experts.

transformers never reads an expert: its experts modules are replaced before it loads weights, and
the library packs the experts from the mapped files afterwards, in the format that they are stored
in. This is done by a quantizer of our own ("moesaic"), which hands everything else to the one that
the checkpoint names.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import itertools
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moesaic

from ._env import check_device
from ._errors import Error, InternalError, InvalidArgument, NotFound, Unsupported

__all__ = ["from_pretrained"]

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
_quantizers: Any = importlib.import_module("transformers.quantizers.auto")
_base: Any = importlib.import_module("transformers.quantizers.base")
_configs: Any = importlib.import_module("transformers.utils.quantization_config")

METHOD = "moesaic"

# What a hub repository has beside weights in formats that nobody asked for.
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "tokenizer*"]

# dtypes of safetensors in which a weight is not quantised; other tensors of rank 2 are codes or
# scales.
_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}


@dataclasses.dataclass
class _Plan:
    """One call of from_pretrained, while transformers runs."""

    checkpoint: Any
    folder: str
    options: dict[str, Any]  # of RoutedExperts.from_checkpoint
    progress: Callable[[int, int], object]
    names: dict[str, int] = dataclasses.field(default_factory=dict)  # module -> layer
    top_k: dict[str, int | None] = dataclasses.field(default_factory=dict)  # module -> as the model has it
    rows: list[Any] = dataclasses.field(default_factory=list)  # of the report


# A configuration is copied and written as JSON on its way, so it carries a number instead of a
# plan.
_plans: dict[int, _Plan] = {}
_numbers = itertools.count(1)


def from_pretrained(
    model_id: str | os.PathLike[str],
    *,
    quant: str = "as-is",
    device: Any = "cpu",
    max_tokens: int = 512,
    num_threads: int | None = None,
    backend: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    model_class: Any = None,
    progress: bool | Callable[[int, int], object] | None = None,
    **hf: Any,
) -> Any:
    """Loads a model whose routed experts run on Moesaic and are never widened.

    model_id: a folder with config.json and safetensors, or a name on the hub.
    quant: "as-is" computes what is stored; another name of `moesaic.quant_schemes()` packs into it.
    device: of the whole model, "cpu" or "cuda:0".
    max_tokens: rows that a workspace allows in one piece; longer calls are split.
    num_threads, backend: as for `moesaic.RoutedExperts.from_checkpoint`.
    revision, local_files_only: for a name on the hub.
    model_class: a class of transformers, `AutoModelForCausalLM` if None.
    progress: a bar while experts are packed, on or off (None: as transformers' own bars are), or a
        function that is called with the bytes done and in all.
    hf: passed on to transformers' `from_pretrained` (dtype, attn_implementation, trust_remote_code
    ...).

    Returns the model in evaluation mode; `model.moesaic_report` is a `Report` as `accelerate`
    returns it, a line for each layer. Attention, dense layers and shared experts are as
    transformers loads them, with the checkpoint's own quantizer if anything but experts is
    quantised. Saving the model is refused (`state_dict`, `save_pretrained`): the folder that it came
    from is what to keep.

    Raises `moesaic.Unsupported` for a model whose experts modules are unlike the checkpoint's
    layers or are none that transformers lets replace, and for arguments that spread a model over
    devices; and what `moesaic.Checkpoint` and transformers raise. Nothing is left behind by a
    failure.
    """
    for name in (
        "device_map",
        "tp_plan",
        "tp_size",
        "distributed_config",
        "quantization_config",
        "gguf_file",
    ):
        if hf.get(name) is not None:
            raise Unsupported(f"{name}: got {hf[name]!r}, need None: experts are on one device, as stored")
    levels: Any = importlib.import_module("moesaic.transformers")  # which imports this module
    given: dict[str, Any] = {
        name: hf[name] for name in ("cache_dir", "force_download", "token") if hf.get(name) is not None
    }
    given["allow_patterns"] = [*_FILES, "*.py"] if hf.get("trust_remote_code") else _FILES
    folder = _resolve(os.fspath(model_id), revision, local_files_only, given)
    folder = os.path.join(folder, hf.pop("subfolder", None) or "")
    checkpoint = moesaic.Checkpoint(folder)
    layers = [spec.layer for spec in checkpoint.layers]
    if not layers:
        raise Unsupported(f"{folder}: got no MoE layers of model type {checkpoint.model_type}")
    total = sum(checkpoint.layer_bytes(layer) for layer in layers)
    check_device(device)
    for layer in layers:  # wrong options and files are refused before transformers reads the rest
        with contextlib.suppress(Unsupported):  # of a gate or shared experts perhaps, which are not ours here
            moesaic.explain(checkpoint, layer, quant=quant, device=device, max_tokens=max_tokens, backend=backend)
    config, hf = _configuration(folder, hf)
    inner = _take_quantization(config)
    if inner is not None and not _quantised_beside_experts(folder):
        inner = None
    options = {
        "quant": quant,
        "device": str(device),
        "max_tokens": max_tokens,
        "num_threads": num_threads,
        "backend": backend,
    }
    with _progress(progress, total) as advance:
        number = next(_numbers)
        plan = _plans[number] = _Plan(checkpoint, folder, options, advance)
        config.quantization_config = {"quant_method": METHOD, "plan": number, "inner": inner}
        if str(device) != "cpu":
            hf["device_map"] = str(device)
        loader = transformers.AutoModelForCausalLM if model_class is None else model_class
        try:
            model = loader.from_pretrained(folder, config=config, local_files_only=True, **hf)
        finally:
            del _plans[number]
    loaded = model[0] if isinstance(model, tuple) else model  # output_loading_info
    loaded.moesaic_report = levels.Report(tuple(plan.rows))
    importlib.import_module("moesaic.torch").refuse_saving(loaded)
    return model


def _resolve(model_id: str, revision: str | None, local_files_only: bool, given: dict[str, Any]) -> str:
    """A local folder with the files of a model. given: what else the hub is asked with."""
    path = os.path.expanduser(model_id)
    if os.path.isdir(path):
        return path
    if model_id.endswith(".gguf"):
        raise Unsupported(
            f"{model_id}: got a GGUF file, need a folder with config.json and safetensors; "
            "moesaic.FusedMoE.from_checkpoint reads single layers of GGUF files"
        )
    if os.path.isabs(path) or model_id.startswith(("~", "./", "../")):  # none is a name on the hub
        raise NotFound(f"{model_id}: no such folder")
    hub: Any = importlib.import_module("huggingface_hub")
    return str(hub.snapshot_download(model_id, revision=revision, local_files_only=local_files_only, **given))


# Arguments of transformers' that its classes of configurations would take as theirs.
_NOT_OF_CONFIGURATIONS = (
    "adapter_kwargs",
    "cache_dir",
    "code_revision",
    "dtype",
    "force_download",
    "proxies",
    "token",
    "trust_remote_code",
)


def _configuration(folder: str, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model's configuration, and what of the arguments it leaves for the model.

    Without a configuration among them it is made as transformers makes it: arguments that it has
    entries for replace those.
    """
    hf = dict(given)
    older = hf.pop("torch_dtype", None)  # as transformers 4 calls it
    if hf.get("dtype") is None:
        hf["dtype"] = "auto" if older is None else older
    config = hf.pop("config", None)
    if config is not None:
        return copy.deepcopy(config), hf  # the caller's stays as it is
    kept = {name: hf.pop(name) for name in _NOT_OF_CONFIGURATIONS if name in hf}
    remote = {name: kept[name] for name in ("trust_remote_code", "code_revision") if name in kept}
    config, rest = transformers.AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **remote, **hf)
    return config, rest | kept


def _take_quantization(config: Any) -> dict[str, Any] | None:
    """Removes the quantisation from where transformers looks for it, and returns it."""
    found = None
    for holder in (config.get_text_config(decoder=True), config):
        value = getattr(holder, "quantization_config", None)
        if value is not None:
            found = value if isinstance(value, dict) else value.to_dict()
            delattr(holder, "quantization_config")
    return found


def _weight_files(folder: str) -> list[Path]:
    """The safetensors of the model, as `moesaic.Checkpoint` finds them. Others may lie beside them (a golden file)."""
    index = Path(folder, "model.safetensors.index.json")
    if index.exists():
        return [Path(folder, name) for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    named = re.compile(r"model(-[0-9]{5,9}-of-[0-9]{5,9})?\.safetensors")
    return [path for path in sorted(Path(folder).iterdir()) if named.fullmatch(path.name)]


def _tensors(folder: str) -> Iterator[tuple[str, str, list[int], int]]:
    """Name, dtype, shape and bytes of every tensor of a folder's model, from the headers."""
    for path in _weight_files(folder):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield name, entry["dtype"], entry["shape"], end - start


def _quantised_beside_experts(folder: str) -> bool:
    """Whether anything but routed experts is stored in codes, which needs a quantizer."""
    return any(
        dtype not in _PLAIN_DTYPES and len(shape) >= 2 and ".experts." not in name and ".gate." not in name
        for name, dtype, shape, _ in _tensors(folder)
    )


@contextlib.contextmanager
def _progress(
    progress: bool | Callable[[int, int], object] | None, total: int
) -> Iterator[Callable[[int, int], object]]:
    """A function that is told of bytes done and in all."""
    if callable(progress):
        yield progress
        return
    logging = transformers.utils.logging
    if progress is None:
        progress = bool(logging.is_progress_bar_enabled())
    if not progress:
        yield lambda done, of: None
        return
    tqdm: Any = importlib.import_module("tqdm.auto").tqdm
    bars: list[Any] = []

    def advance(done: int, of: int) -> None:
        if not bars:  # made by the first expert, after transformers' own bar
            bars.append(tqdm(total=total, desc="Packing experts", unit="B", unit_scale=True))
        bars[0].update(done - bars[0].n)

    try:
        yield advance
    finally:
        for bar in bars:
            bar.close()


class _Reserved(torch.nn.Module):  # type: ignore[misc]
    """Stands where experts will be, while transformers loads the rest: it has no parameters."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        raise InternalError("the experts of this layer are not packed yet")


def _experts_modules(model: Any) -> dict[str, Any]:
    """Modules that transformers calls through its experts interface, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] == "experts" and (hasattr(module, "_apply_gate") or _stacked(module))
    }


def _stacked(module: Any) -> bool:
    return any(p.dim() == 3 for p in module.parameters(recurse=False))


def _match(model: Any, checkpoint: Any) -> dict[str, int]:
    """Experts modules and the checkpoint's layers: the same number, and the same sizes."""
    specs = {spec.layer: spec for spec in checkpoint.layers}
    names: dict[str, int] = {}
    for name, module in _experts_modules(model).items():
        numbers = re.findall(r"\.(\d+)\.", name)
        if not numbers or int(numbers[-1]) not in specs:
            raise Unsupported(f"{name}: got no layer of the checkpoint for it, need one of {sorted(specs)}")
        layer = int(numbers[-1])
        if layer in names.values():
            raise Unsupported(f"{name}: got a second experts module for layer {layer}, need one")
        _check(name, module, specs[layer])
        names[name] = layer
    if not names:
        raise Unsupported(
            f"{type(model).__name__}: got no experts module that transformers lets replace "
            "(a class decorated by "
            "use_experts_implementation)"
        )
    missing = sorted(set(specs) - set(names.values()))
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if any(layer < count for layer in missing):  # those beyond predict further tokens, and aren't loaded
        raise Unsupported(f"layers {missing}: got no experts module of {type(model).__name__} for them")
    return names


def _top_k(model: Any, name: str) -> int | None:
    """Of the model's configuration, which may be the caller's; None, the checkpoint's, where none says it."""
    top_k_of: Callable[[Any, Any], int] = importlib.import_module("moesaic._recognise").top_k_of
    try:
        return top_k_of(model.get_submodule(name), model.get_submodule(name.rpartition(".")[0]))
    except Error:
        return None


def _check(name: str, module: Any, spec: Any) -> None:
    """Raises where a module computes something else than the checkpoint's layer says."""
    if getattr(module, "has_post_expert_norm", False):
        raise Unsupported(f"{name}: got a norm after each expert, need none")
    if not hasattr(module, "_apply_gate"):
        raise Unsupported(f"{name}: got {type(module).__name__}, need a class decorated by use_experts_implementation")
    gated = bool(getattr(module, "has_gate", True))
    first = module.gate_up_proj if gated else module.up_proj
    hidden, wide = first.shape[1:] if module.is_transposed else first.shape[:0:-1]
    got = {
        "experts": (first.shape[0], spec.num_experts),
        "hidden size": (hidden, spec.hidden_size),
        "intermediate size": (wide // (2 if gated else 1), spec.intermediate_size),
        "gate": (gated, spec.activation.gated),
    }
    wrong = [f"{key} {theirs}, need {ours}" for key, (theirs, ours) in got.items() if theirs != ours]
    if wrong:
        raise Unsupported(f"{name}: got {'; '.join(wrong)} as layer {spec.layer} of the checkpoint has it")
    _check_activation(name, module, spec.activation, gated)


def _check_activation(name: str, module: Any, activation: Any, gated: bool) -> None:
    """Evaluates a module's activation and the checkpoint's, inside and beyond every limit."""
    reach = 20.0 if activation.limit == float("inf") else max(20.0, 1.5 * activation.limit)
    # The model is being made on the device "meta", which tensors without a device would be on too.
    with torch.device("cpu"), torch.no_grad():
        line = torch.linspace(-reach, reach, 61, dtype=torch.float32)
        if not gated:
            theirs, ours = module.act_fn(line[None]), moesaic.apply_activation(activation, line[None])
        else:
            gate, up = (t.reshape(1, -1) for t in torch.meshgrid(line, line, indexing="ij"))
            joined = module.is_concatenated
            both = torch.cat((gate, up), 1) if joined else torch.stack((gate, up), 2).reshape(1, -1)
            theirs = module._apply_gate(both)
            ours = moesaic.apply_activation(activation, both, gate_up="gate_then_up" if joined else "interleaved")
        difference = (theirs.double() - ours.double()).abs() / (1 + ours.double().abs())
    if not float(difference.max()) <= 2e-6:
        raise Unsupported(
            f"{name}: got an activation of {type(module).__name__} that is not {activation!r}, "
            "as the checkpoint's "
            f"configuration says; they differ by {float(difference.max()):.1e}"
        )


@_quantizers.register_quantization_config(METHOD)
class MoesaicConfig(_configs.QuantizationConfigMixin):  # type: ignore[misc]
    """What transformers carries to the quantizer.

    plan: its number. inner: the checkpoint's own configuration, if anything needs it.
    """

    def __init__(self, plan: int = 0, inner: dict[str, Any] | None = None, **rest: Any) -> None:
        self.quant_method = METHOD
        self.plan = plan
        self.inner = inner


@_quantizers.register_quantizer(METHOD)
class MoesaicHfQuantizer(_base.HfQuantizer):  # type: ignore[misc]
    """Keeps experts away from transformers; the rest is the checkpoint's own quantizer's."""

    requires_calibration = False

    def __init__(self, quantization_config: Any, **named: Any) -> None:
        super().__init__(quantization_config, **named)
        plan = _plans.get(quantization_config.plan)
        if plan is None:
            raise InvalidArgument(
                "quantization_config: got quant_method moesaic, which only moesaic.transformers.from_pretrained makes"
            )
        self._plan = plan
        self._inner: Any = None
        if quantization_config.inner is not None:
            if quantization_config.inner.get("quant_method") is None:
                raise Unsupported(
                    f"{plan.folder}: got quantised weights beside experts in two formats, which no "
                    "quantizer of "
                    "transformers reads"
                )
            self._inner = _quantizers.AutoHfQuantizer.from_config(quantization_config.inner, pre_quantized=True)

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> Any:
        self._plan.names = _match(model, self._plan.checkpoint)
        for name in self._plan.names:
            self._plan.top_k[name] = _top_k(model, name)
            model.set_submodule(name, _Reserved())
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
        kind = set if ignored is None else type(ignored)  # a list in some versions
        model._keys_to_ignore_on_load_unexpected = kind([*(ignored or ()), r"\.experts\."])
        if self._inner is not None:
            self._inner.pre_quantized = self.pre_quantized
            self._inner._process_model_before_weight_loading(model, **named)
        return model

    def _process_model_after_weight_loading(self, model: Any, **named: Any) -> Any:
        if self._inner is None:
            self.remove_quantization_config(model)  # to transformers it is a plain model from here on
            model.config._is_quantized = False
        else:
            model.hf_quantizer = self._inner
            model.quantization_method = self._inner.quantization_config.quant_method
            self._inner.postprocess_model(model, **named)
        _pack(model, self._plan)
        return model

    def is_serializable(self, *arguments: Any, **named: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def serialized_names(self) -> Any:
        return {} if self._inner is None else getattr(self._inner, "serialized_names", {})

    @property
    def quantized_element_size(self) -> Any:
        return None if self._inner is None else self._inner.quantized_element_size


def _forward(name: str) -> None:
    """Makes a method of our quantizer call the checkpoint's."""

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        owner = super(MoesaicHfQuantizer, self) if self._inner is None else self._inner
        return getattr(owner, name)(*arguments, **named)

    method.__name__ = name
    setattr(MoesaicHfQuantizer, name, method)


for _name in (
    "validate_environment",
    "update_dtype",
    "update_device_map",
    "update_attn_implementation",
    "adjust_max_memory",
    "param_element_size",
    "param_needs_quantization",
    "get_new_dtype",
    "get_quantize_ops",
    "get_load_operations",
    "get_weight_conversions",
    "update_weight_conversions",
    "get_state_dict_and_metadata",
):
    if hasattr(_base.HfQuantizer, _name):  # not every one is in every version
        _forward(_name)


def _pack(model: Any, plan: _Plan) -> None:
    """Packs the experts, layer by layer, and puts them where they were reserved."""
    levels: Any = importlib.import_module("moesaic.transformers")
    module_class: Any = importlib.import_module("moesaic.torch").MoesaicExperts
    sizes = {layer: plan.checkpoint.layer_bytes(layer) for layer in plan.names.values()}
    total, before = sum(sizes.values()), 0
    prefixes = {spec.layer: f"{spec.prefix}." for spec in plan.checkpoint.layers}
    stored: dict[int, int] = dict.fromkeys(prefixes, 0)
    for tensor, _, shape, count in _tensors(plan.folder):
        if ".experts." not in tensor and len(shape) < 3:  # Granite's are not called so, but lie in one tensor
            continue
        for layer, prefix in prefixes.items():
            stored[layer] += count if tensor.startswith(prefix) else 0
    for name, layer in plan.names.items():

        def advance(done: int, of: int, before: int = before, size: int = sizes[layer]) -> None:
            plan.progress(before + (size * done // of if of else size), total)

        experts = moesaic.RoutedExperts.from_checkpoint(
            plan.checkpoint, layer, progress=advance, top_k=plan.top_k[name], **plan.options
        )
        before += sizes[layer]
        plan.progress(before, total)
        module = module_class(experts)
        module.num_experts = experts.spec.num_experts  # some models look at it
        model.set_submodule(name, module.eval())
        plan.rows.append(
            levels.Row(
                module=name,
                backend=experts.experts_backend,
                scheme=experts.quant,
                bytes_before=stored[layer],
                bytes_after=experts.weight_bytes,
                bound=experts.bound,
            )
        )
