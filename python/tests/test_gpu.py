"""On a Hopper GPU: streams of PyTorch, captured graphs, refusals. Whole models: test_gpu_models.py.

Skipped without such a GPU, and by a package that was built without GPU kernels (scripts/wheel --no-cuda).
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from conftest import MODELS, OwnExperts, rel_l2

torch = pytest.importorskip("torch")

import moesaic
import moesaic.torch as mtorch

if not torch.cuda.is_available() or not moesaic.env()["cuda"]["available"]:
    pytest.skip(f"needs a Hopper GPU: {moesaic.env()['cuda']['reason']}", allow_module_level=True)

CUDA = "cuda:0"


@pytest.fixture
def own() -> OwnExperts:
    """With weights that bf16 holds, so that their result in float64 is that of the stored ones."""
    made = OwnExperts(tokens=33, experts=8, hidden=256, width=128, top_k=2)
    for name in ("w13", "w2", "x"):
        setattr(made, name, torch.tensor(getattr(made, name)).bfloat16().float().numpy())
    return made


@pytest.fixture
def layer(own: OwnExperts) -> moesaic.RoutedExperts:
    return make(own)


def make(own: OwnExperts, device: Any = CUDA, **options: Any) -> moesaic.RoutedExperts:
    w13, w2 = torch.tensor(own.w13).bfloat16(), torch.tensor(own.w2).bfloat16()
    return moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k, device=device, **options)


def tensors(own: OwnExperts, dtype: Any = torch.bfloat16) -> tuple[Any, Any, Any]:
    return torch.tensor(own.x).to(CUDA, dtype), torch.tensor(own.ids).to(CUDA), torch.tensor(own.weights).to(CUDA)


def host(tensor: Any) -> np.ndarray:
    return tensor.float().cpu().numpy()


# --- Calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_results_are_within_the_bound(own: OwnExperts, layer: moesaic.RoutedExperts, ids_dtype: Any) -> None:
    dtype = torch.bfloat16
    x, ids, weights = tensors(own, dtype)
    y = layer(x, ids.to(ids_dtype), weights)
    assert isinstance(y, torch.Tensor) and y.device == x.device and y.dtype == dtype and y.shape == x.shape
    assert rel_l2(host(y), own.exact()) <= layer.bound
    out = torch.full_like(x, torch.nan)
    assert layer(x, ids, weights, out=out) is out and torch.equal(out, y)
    one = torch.cat([layer(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(x.shape[0])])
    assert torch.equal(one, y), "bits do not depend on the batch"
    batched = layer(x[:32].reshape(4, 8, -1), ids[:32], weights[:32])
    assert torch.equal(batched.reshape(32, -1), y[:32])


@pytest.mark.parametrize("quant", ["fp8-block", "fp8-bf16", "int4-g128", "int8", "mxfp4-bf16", "nvfp4"])
def test_weights_are_quantised_while_packing(own: OwnExperts, quant: str) -> None:
    try:
        layer = make(own, quant=quant)
    except moesaic.Unsupported as refused:
        pytest.skip(f"{quant}: {refused}")
    assert layer.quant == quant and rel_l2(host(layer(*tensors(own))), own.exact()) < 0.45
    assert rel_l2(host(layer(*tensors(own))), make(own, "cpu", quant=quant)(own.x, own.ids, own.weights)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_rows_are_computed_or_refused(own: OwnExperts, layer: moesaic.RoutedExperts, dtype: Any) -> None:
    """The kernels of Hopper take bf16; nothing is converted behind the caller's back."""
    x, ids, weights = tensors(own, dtype)
    try:
        y = layer(x, ids, weights)
    except moesaic.InvalidDType as refused:
        assert "hidden_states" in str(refused)
        return
    assert y.dtype == dtype and rel_l2(host(y), own.exact()) <= layer.bound


def test_integers_with_half_scales_take_half_rows() -> None:
    """Scales of integers have the dtype of the model, which its hidden states have too."""
    draw = torch.Generator().manual_seed(3)
    w13 = torch.randint(0, 256, (8, 256, 128), generator=draw, dtype=torch.uint8)  # two codes a byte
    w2 = torch.randint(0, 256, (8, 256, 64), generator=draw, dtype=torch.uint8)
    scales = {
        "w13_scale": (0.01 + 0.01 * torch.rand(8, 256, 2, generator=draw)).half(),
        "w2_scale": (0.01 + 0.01 * torch.rand(8, 256, 1, generator=draw)).half(),
    }
    x = torch.randn(33, 256, generator=draw).half()
    ids = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(33)])
    weights = torch.rand(33, 2, generator=draw)
    here, there = (
        moesaic.RoutedExperts.from_tensors(w13, w2, 2, stored="int4-g128", device=device, **scales)
        for device in (CUDA, "cpu")
    )
    y = here(x.to(CUDA), ids.to(CUDA), weights.to(CUDA))
    assert y.dtype == torch.float16
    assert rel_l2(host(y), host(there(x, ids, weights))) <= 2 * here.bound


def test_long_calls_are_split(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    want = layer(*tensors(own))
    assert torch.equal(make(own, max_tokens=8)(*tensors(own)), want)
    checkpoint = moesaic.Checkpoint(MODELS / "mini-qwen3-moe")
    short, long = (moesaic.FusedMoE.from_checkpoint(checkpoint, 1, device=CUDA, max_tokens=m) for m in (8, 64))
    x = torch.randn(33, short.spec.hidden_size, device=CUDA).bfloat16()
    (y, trace), (want, wanted) = short(x, trace=True), long(x, trace=True)
    assert torch.equal(y, want) and torch.equal(trace.topk_ids, wanted.topk_ids)
    assert torch.equal(trace.router_logits, wanted.router_logits)


def test_slots_without_an_expert(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    own.ids[3, 0] = -1
    assert rel_l2(host(layer(*tensors(own))), own.exact()) <= layer.bound
    dropping = make(own, drop_ids_beyond=True)
    x, ids, weights = tensors(own)
    beyond = torch.where(ids < 0, 8, ids)
    assert torch.equal(dropping(x, beyond, weights), layer(x, ids, weights))


def test_weights_may_be_on_the_device(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    w13, w2 = torch.tensor(own.w13).bfloat16().to(CUDA), torch.tensor(own.w2).bfloat16().to(CUDA)
    there = moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k, device=CUDA)
    w13.zero_(), w2.zero_()  # nothing of the caller's is kept
    assert torch.equal(there(*tensors(own)), layer(*tensors(own)))


def test_weights_are_read_after_they_are_written(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    real = [torch.tensor(w).bfloat16().to(CUDA) for w in (own.w13, own.w2)]
    w13, w2 = (torch.zeros_like(w) for w in real)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        w13.copy_(real[0]), w2.copy_(real[1])
        there = moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k, device=CUDA)
    assert torch.equal(there(*tensors(own)), layer(*tensors(own)))


def test_a_gate_of_weights_on_the_device() -> None:
    weight, x = torch.randn(8, 256), torch.randn(5, 256, device=CUDA).bfloat16()
    want = moesaic.GateLinear(weight, device=CUDA)(x)
    assert torch.equal(moesaic.GateLinear(weight.to(CUDA), device=CUDA)(x), want)


def test_token_ids_of_64_bits() -> None:
    table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    router = moesaic.Router(
        method="hash", scoring="sqrtsoftplus", num_experts=8, top_k=2, hash_table=table, device=CUDA
    )
    logits = torch.randn(4, 8, device=CUDA)
    ids = torch.tensor([2, 0, 1, 2**40], device=CUDA)
    assert router(logits, input_ids=ids)[1].cpu().tolist() == [[4, 5], [0, 1], [2, 3], [-1, -1]]


def test_a_whole_layer_of_a_checkpoint() -> None:
    checkpoint = moesaic.Checkpoint(MODELS / "mini-qwen3-moe")
    here, there = (moesaic.FusedMoE.from_checkpoint(checkpoint, 1, device=device) for device in ("cpu", CUDA))
    x = torch.randn(19, here.spec.hidden_size, generator=torch.Generator().manual_seed(5)).bfloat16()
    want, wanted = here(x, trace=True)
    y, trace = there(x.to(CUDA), trace=True)
    assert torch.equal(trace.topk_ids.cpu(), wanted.topk_ids)
    assert rel_l2(host(y), want.double().numpy()) <= 2 * there.bound
    again = there(x.to(CUDA), topk_ids=trace.topk_ids, topk_weights=trace.topk_weights)
    assert torch.equal(again, y)


def test_calls_allocate_nothing_on_the_device(own: OwnExperts) -> None:
    checkpoint = moesaic.Checkpoint(MODELS / "mini-qwen3-moe")
    whole = moesaic.FusedMoE.from_checkpoint(checkpoint, 1, device=CUDA)
    layer = make(own)
    arguments = tensors(own)
    hidden = torch.randn(33, whole.spec.hidden_size, device=CUDA).bfloat16()
    out, whole_out = torch.empty_like(arguments[0]), torch.empty_like(hidden)

    def calls() -> None:
        for _ in range(64):
            layer(*arguments, out=out)
            whole(hidden, out=whole_out)
        torch.cuda.synchronize()

    calls()
    free, of_torch = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]
    calls()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == of_torch
    assert torch.cuda.mem_get_info()[0] == free
    kept = [make(own) for _ in range(4)]
    assert torch.cuda.mem_get_info()[0] < free and kept, "this would be seen"


# --- Streams -----------------------------------------------------------------------------------------


def late(stream: Any, own: OwnExperts) -> tuple[Any, Any, Any]:
    """Arguments whose hidden states become right on this stream after 50 ms."""
    x, ids, weights = tensors(own)
    seen = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        seen.copy_(x)
    x.record_stream(stream)  # else the next tensor could have its memory before it is read
    return seen, ids, weights


def test_a_call_is_on_the_current_stream(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    want = layer(*tensors(own))
    stream = torch.cuda.Stream()
    arguments = late(stream, own)
    with torch.cuda.stream(stream):
        y = layer(*arguments)
        assert not stream.query(), "the call does not wait"
    stream.synchronize()
    assert torch.equal(y, want)


class OfProtocol:
    """Any object that speaks the CUDA stream protocol."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.stream.cuda_stream)


@pytest.mark.parametrize("form", [lambda s: s, lambda s: s.cuda_stream, OfProtocol], ids=["torch", "int", "protocol"])
def test_a_stream_that_is_named(own: OwnExperts, layer: moesaic.RoutedExperts, form: Any) -> None:
    want = layer(*tensors(own))
    stream = torch.cuda.Stream()
    arguments = late(stream, own)
    y = layer(*arguments, stream=form(stream), out=torch.empty_like(arguments[0]))
    stream.synchronize()
    assert torch.equal(y, want)


class OnlyInterface:
    """Device memory of a framework without DLPack."""

    def __init__(self, tensor: Any, stream: int | None = None) -> None:
        self.tensor = tensor
        self.stream = stream
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kinds = {"bfloat16": "<V2", "float32": "<f4", "int32": "<i4", "int64": "<i8"}
        return {
            "shape": tuple(self.tensor.shape),
            "typestr": kinds[self.dtype],
            "data": (self.tensor.data_ptr(), False),
            "stream": self.stream,
            "version": 3,
        }


def test_other_frameworks_name_their_stream_and_output(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    x, ids, weights = tensors(own)
    out = torch.empty_like(x)
    arguments = [OnlyInterface(t) for t in (x, ids, weights)]
    with pytest.raises(moesaic.InvalidArgument, match="out: got none"):
        layer(*arguments)
    with pytest.raises(moesaic.InvalidArgument, match="stream: got none"):
        layer(*arguments, out=OnlyInterface(out))
    stream = torch.cuda.current_stream()
    layer(*arguments, out=OnlyInterface(out), stream=stream)
    assert torch.equal(out, layer(x, ids, weights))


def test_weights_are_read_after_the_stream_that_an_interface_names(
    own: OwnExperts, layer: moesaic.RoutedExperts
) -> None:
    real = [torch.tensor(w).bfloat16().to(CUDA) for w in (own.w13, own.w2)]
    written = [torch.zeros_like(w) for w in real]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for to, w in zip(written, real, strict=True):
            to.copy_(w)
    w13, w2 = (OnlyInterface(w, stream.cuda_stream) for w in written)
    there = moesaic.RoutedExperts.from_tensors(w13, w2, own.top_k, device=CUDA)
    assert torch.equal(there(*tensors(own)), layer(*tensors(own)))


def test_arrays_of_cupy(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    cupy = pytest.importorskip("cupy")
    want = layer(*tensors(own))
    stream = cupy.cuda.Stream(non_blocking=True)
    seen, ids, weights = late(torch.cuda.ExternalStream(stream.ptr), own)
    out = torch.zeros_like(seen)
    try:
        arrays = [cupy.from_dlpack(t) for t in (seen, ids, weights, out)]
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        pytest.skip(f"this CuPy does not take bf16: {error}")
    with pytest.raises(moesaic.InvalidArgument, match="stream: got none"):
        layer(*arrays[:3], out=arrays[3])
    assert layer(*arrays[:3], out=arrays[3], stream=stream) is arrays[3]
    stream.synchronize()
    assert torch.equal(out, want)


# --- Graphs ------------------------------------------------------------------------------------------


def test_a_captured_call_routes_anew(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    module = mtorch.MoesaicExperts(layer)
    x, ids, weights = tensors(own)
    module(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x, ids, weights)
    generator = torch.Generator(device=CUDA).manual_seed(3)
    for _ in range(3):
        x.normal_(generator=generator)
        ids.copy_(torch.stack([torch.randperm(8, generator=generator, device=CUDA)[:2] for _ in range(x.shape[0])]))
        weights.uniform_(generator=generator)
        graph.replay()
        assert torch.equal(y, module(x, ids, weights))


def replays_equal_calls(call: Any, x: Any, ids: Any, weights: Any) -> None:
    """Captures one call and replays it with other rows, ids and weights."""
    call(x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x, ids, weights)
    generator = torch.Generator(device=CUDA).manual_seed(4)
    before = None
    for _ in range(2):
        x.normal_(generator=generator)
        ids.copy_(torch.stack([torch.randperm(8, generator=generator, device=CUDA)[:2] for _ in range(x.shape[0])]))
        weights.uniform_(generator=generator)
        graph.replay()
        assert torch.equal(y, call(x, ids, weights)) and bool(torch.isfinite(y).all())
        assert before is None or not torch.equal(y, before)
        before = y.clone()


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("quant", moesaic.quant_schemes())
def test_graphs_of_every_scheme(quant: str, tokens: int, own: OwnExperts) -> None:
    try:
        layer = make(own, quant=quant)
    except moesaic.Error as refused:
        pytest.skip(f"{quant}: {refused}")
    x, ids, weights = (t[:tokens].clone() for t in tensors(own))
    replays_equal_calls(mtorch.MoesaicExperts(layer), x, ids, weights)


def test_a_whole_layer_is_captured() -> None:
    checkpoint = moesaic.Checkpoint(MODELS / "mini-deepseek-v3")
    layer = moesaic.FusedMoE.from_checkpoint(checkpoint, checkpoint.layers[-1].layer, device=CUDA)
    x = torch.randn(9, layer.spec.hidden_size, device=CUDA).bfloat16()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(x)
    with torch.cuda.graph(graph):
        layer(x, out=out)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, layer(x))


def test_one_graph_for_all_lengths(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    module = mtorch.MoesaicExperts(layer)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    arguments = tensors(own)
    with torch.inference_mode():
        for tokens in (5, 17, 33):
            part = [t[:tokens] for t in arguments]
            assert torch.equal(compiled(*part), module(*part))
    assert counter.frame_count == 1


def test_inductor_with_graphs(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    """Code of inductor around the operator, replayed as a CUDA graph. Needs a C compiler for Triton's launchers."""
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    module = mtorch.MoesaicExperts(layer)

    def block(x: Any, ids: Any, weights: Any) -> Any:
        return module(x * 2, ids, weights) + x

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    x, ids, weights = tensors(own)
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(compiled(x, ids, weights).clone(), block(x, ids, weights))
            ids = ids.flip(0).contiguous()


def test_narrow_weights_are_captured_too(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    module = mtorch.MoesaicExperts(layer)
    x, ids, weights = tensors(own)
    narrow = weights.bfloat16()
    want = module(x, ids, narrow.float())
    assert torch.equal(module(x, ids, narrow), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x, ids, narrow)
    graph.replay()
    assert torch.equal(y, want)


def test_the_compiler_uses_graphs(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    module = mtorch.MoesaicExperts(layer)
    x, ids, weights = tensors(own)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="cudagraphs")
    with torch.inference_mode():
        want = module(x, ids, weights)
        for _ in range(4):
            assert torch.equal(compiled(x, ids, weights).clone(), want)
    torch.library.opcheck(torch.ops.moesaic.experts.int, (x, ids, weights, module._number))


# --- Refusals ----------------------------------------------------------------------------------------


def test_the_wrong_device_is_refused(own: OwnExperts, layer: moesaic.RoutedExperts) -> None:
    x, ids, weights = tensors(own)
    here = torch.tensor(own.x).bfloat16()
    with pytest.raises(moesaic.InvalidArgument, match="got a tensor on cpu, need one on cuda:0"):
        layer(here, torch.tensor(own.ids), torch.tensor(own.weights))
    copied = layer(here, torch.tensor(own.ids), torch.tensor(own.weights), copy=True)
    assert copied.device.type == "cpu" and torch.equal(copied, layer(x, ids, weights).cpu())
    for wrong in ((x, ids.cpu(), weights), (x, ids, weights.cpu())):
        with pytest.raises(moesaic.Error, match="topk_"):
            layer(*wrong)
    with pytest.raises(moesaic.Error, match="output"):
        layer(x, ids, weights, out=torch.empty_like(here))
    with pytest.raises(moesaic.InvalidArgument, match="got a tensor on cuda:0, need one on cpu"):
        make(own, "cpu")(x, ids, weights)
    with pytest.raises(moesaic.InvalidDType, match="topk_weights"):
        layer(x, ids, weights.bfloat16())
    module = mtorch.MoesaicExperts(layer)
    assert module.to(CUDA) is module
    with pytest.raises(moesaic.DeviceError, match="packed for cuda:0"):
        module.cpu()
    with pytest.raises(moesaic.Error):
        make(own, "cuda:63")
    x.untyped_storage().resize_(0)
    with pytest.raises(moesaic.InvalidArgument, match="without memory"):
        layer(x, ids, weights)
