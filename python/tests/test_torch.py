"""PyTorch tensors and the operator moesaic::experts."""

from __future__ import annotations

import gc
import importlib
import json
import pathlib
import struct
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from conftest import OwnExperts, rel_l2

torch = pytest.importorskip("torch")
importlib.import_module("torch._dynamo.testing")

import moesaic
import moesaic.torch as mtorch


@pytest.fixture
def module(own: OwnExperts) -> mtorch.MoesaicExperts:
    return mtorch.MoesaicExperts(
        moesaic.RoutedExperts.from_tensors(torch.tensor(own.w13), torch.tensor(own.w2), own.top_k)
    )


def tensors(own: OwnExperts) -> tuple[Any, Any, Any]:
    return torch.tensor(own.x), torch.tensor(own.ids), torch.tensor(own.weights)


def test_tensors_are_read_and_written_in_place(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    x, ids, weights = tensors(own)
    y = module.layer(x, ids, weights)
    assert isinstance(y, torch.Tensor) and y.dtype == x.dtype
    assert rel_l2(y.numpy(), own.exact()) <= module.layer.bound
    assert np.array_equal(module.layer(own.x, own.ids, own.weights), y.numpy())
    out = torch.full_like(x, torch.nan)
    assert module.layer(x, ids, weights, out=out) is out and torch.equal(out, y)
    assert torch.equal(module(x, ids, weights), y)
    assert torch.equal(module(x, ids.int(), weights), y)
    # No rows: NumPy's strides of such an array are zero, and PyTorch keeps them.
    none = [torch.from_numpy(a[:0].copy()) for a in (own.x, own.ids, own.weights)]
    assert none[0].stride() == (0, 0) and module(*none).shape == none[0].shape
    uneven = torch.randn(4, 5, x.shape[1])[:, :4]  # 16 rows that are not equally far apart
    with pytest.raises(moesaic.InvalidLayout, match="not equally far apart"):
        module.layer(uneven, ids[:16].reshape(4, 4, -1), weights[:16].reshape(4, 4, -1))
    column = torch.randn(4, 8, x.shape[1], 3)[..., 0]
    with pytest.raises(moesaic.InvalidLayout):
        module.layer(column, ids[:4], weights[:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_and_weights(own: OwnExperts, module: mtorch.MoesaicExperts, dtype: Any) -> None:
    x, ids, weights = tensors(own)
    x, weights = x.to(dtype), weights.to(dtype)
    y = module(x, ids, weights)
    assert y.dtype == dtype
    assert torch.equal(y, module(x.float(), ids, weights.float()).to(dtype)), "rounded once"


def test_tensors_without_memory_are_refused(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    x, ids, weights = tensors(own)
    for wrong, text in ((x.to("meta"), "meta"), (x.to_sparse(), "storage")):
        with pytest.raises(
            moesaic.InvalidArgument, match=rf"^hidden_states: got a torch.Tensor that .*(?i:{text})"
        ) as caught:
            module.layer(wrong, ids, weights)
        assert "\n" not in str(caught.value)
    x.untyped_storage().resize_(0)
    with pytest.raises(moesaic.InvalidArgument, match="without memory"):
        module.layer(x, ids, weights)


def test_the_operator_refuses_some_tensors_without_memory(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    """PyTorch runs the shape's function where one of them is on meta."""
    x, ids, weights = tensors(own)
    with torch.device("meta"):
        made = mtorch.MoesaicExperts(module.layer)
    assert torch.equal(made(x, ids, weights), module(x, ids, weights))
    assert made(*(t.to("meta") for t in (x, ids, weights))).device.type == "meta"
    for wrong, name in (((ids.to("meta"), weights), "topk_ids"), ((ids, weights.to("meta")), "topk_weights")):
        with pytest.raises(moesaic.InvalidArgument, match=f"^{name}: got a tensor on meta, need one on cpu"):
            module(x, *wrong)
    with pytest.raises(moesaic.InvalidArgument, match="^layer: got a tensor on meta, need one on cpu"):
        torch.ops.moesaic.experts(x, ids, weights, module._handle.to("meta"))


def test_empty_weights_are_not_taken_for_none(own: OwnExperts) -> None:
    with pytest.raises(moesaic.InvalidArgument, match="num_experts: got 0, need at least 1"):
        moesaic.RoutedExperts.from_tensors(torch.zeros(0, 256, 128), torch.zeros(0, 128, 128), 2)
    with pytest.raises(moesaic.InvalidShape, match=r"w13_bias: got \[8, 0\], need elements"):
        moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, w13_bias=torch.zeros(8, 0))


def test_strided_hidden_states_are_the_ones_refused(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    x, ids, weights = (torch.from_numpy(a) for a in (own.x, own.ids, own.weights))
    for run in (module, torch.compile(module, fullgraph=True, backend="eager")):
        with pytest.raises(moesaic.InvalidLayout, match="hidden_states: "):
            run(x.T.contiguous().T, ids, weights)
    rows = torch.stack([x, x])[:, :16].transpose(0, 1)
    pairs = [t[:16, None].expand(-1, 2, -1).contiguous() for t in (ids, weights)]
    with pytest.raises(moesaic.InvalidLayout, match="hidden_states: .*contiguous"):
        module(rows, *pairs)
    assert torch.equal(module(rows.contiguous(), *pairs)[:, 1], module(x[:16], ids[:16], weights[:16]))


def test_weights_that_negate_their_memory_are_refused(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    w13, w2 = (torch._neg_view(torch.from_numpy(w)) for w in (own.w13, own.w2))
    for arguments, name in (((w13, own.w2), "w13"), ((own.w13, w2), "w2")):
        with pytest.raises(moesaic.InvalidLayout, match=rf"{name}: got a view that negates .* need resolve_neg\(\)"):
            moesaic.RoutedExperts.from_tensors(*arguments, own.top_k)
    layer = moesaic.RoutedExperts.from_tensors(own.w13, w2.resolve_neg(), own.top_k)
    assert torch.equal(layer(*tensors(own)), -module.layer(*tensors(own)))
    spec = moesaic.LayerSpec(hidden_size=128, intermediate_size=128, num_experts=8, top_k=2)
    loader = moesaic.WeightLoader.from_spec(spec, moesaic.ExpertNames())
    with pytest.raises(moesaic.InvalidLayout, match="need resolve_neg"):
        loader.load(loader.missing()[0], w13[0, :128])


def test_stages_refuse_views_that_negate_their_memory() -> None:
    negated = torch._neg_view(torch.ones(8, 16))
    with pytest.raises(moesaic.InvalidLayout, match=r"weight: got a view that negates .* resolve_neg\(\)"):
        moesaic.GateLinear(negated)
    gate = moesaic.GateLinear(negated.resolve_neg())
    assert torch.equal(gate(torch.ones(1, 16)), torch.full((1, 8), -16.0))
    row = torch._neg_view(torch.ones(8))
    with pytest.raises(moesaic.InvalidLayout, match="bias: got a view that negates"):
        moesaic.GateLinear(torch.ones(8, 16), row)
    for name in ("correction_bias", "expert_scale"):
        with pytest.raises(moesaic.InvalidLayout, match=f"{name}: got a view that negates"):
            moesaic.Router(num_experts=8, top_k=1, **{name: row})
    table = torch._neg_view(torch.ones((4, 1), dtype=torch.int32))
    with pytest.raises(moesaic.InvalidLayout, match="hash_table: got a view that negates"):
        moesaic.Router(num_experts=8, top_k=1, method="hash", scoring="sqrtsoftplus", hash_table=table)


class Refusing:
    """Another framework's tensor that says no."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __dlpack__(self, **_: object) -> object:
        raise self.error("not today\nand more")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_refusals_of_a_framework_without_memory_for_us(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    _, ids, weights = tensors(own)
    for error in (BufferError, RuntimeError, TypeError):
        with pytest.raises(moesaic.InvalidArgument, match=r"got a \S*Refusing that .*: not today$"):
            module.layer(Refusing(error), ids, weights)
    for error in (KeyboardInterrupt, MemoryError):
        with pytest.raises(error, match="not today"):
            module.layer(Refusing(error), ids, weights)


def test_experts_may_be_collected_while_others_are_kept(
    module: mtorch.MoesaicExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Collecting(dict[int, Any]):
        def __setitem__(self, number: int, layer: Any) -> None:
            mtorch.drop(1 << 40)  # as a finalizer does
            super().__setitem__(number, layer)

    monkeypatch.setattr(mtorch, "_layers", Collecting())
    kept = threading.Thread(target=mtorch.keep, args=(module.layer,), daemon=True)
    kept.start()
    kept.join(20)
    assert not kept.is_alive() and list(mtorch._layers.values()) == [module.layer]


def test_eight_bit_types_arrive(own: OwnExperts) -> None:
    w13 = torch.tensor(own.w13)
    tiles = w13.reshape(8, 2, 128, 1, 128)
    scale = tiles.abs().amax(dim=(2, 4)) / 448
    codes = (tiles / scale[:, :, None, :, None]).to(torch.float8_e4m3fn).reshape(w13.shape)
    w2 = torch.tensor(own.w2)
    scale2 = w2.abs().amax(dim=(1, 2)).reshape(8, 1, 1) / 448
    layer = moesaic.RoutedExperts.from_tensors(
        codes,
        (w2 / scale2).to(torch.float8_e4m3fn),
        2,
        stored="fp8-block",
        quant="fp8-bf16",
        w13_scale=scale,
        w2_scale=scale2,
    )
    assert rel_l2(layer(*tensors(own)).numpy(), own.exact()) < 0.06


def test_pairs_of_four_bits_arrive(own: OwnExperts) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch has no 4-bit type")
    torch.manual_seed(0)
    codes = [torch.randint(0, 256, (8, n, 64), dtype=torch.uint8) for n in (256, 128)]
    scales = {f"{name}_scale": torch.full((8, n, 4), 122, dtype=torch.uint8) for name, n in (("w13", 256), ("w2", 128))}
    make = moesaic.RoutedExperts.from_tensors
    want = make(*codes, 2, stored="mxfp4-bf16", **scales)
    pairs = make(*(c.view(torch.float4_e2m1fn_x2) for c in codes), 2, stored="mxfp4-bf16", **scales)
    assert want.spec.hidden_size == pairs.spec.hidden_size == 128
    assert torch.equal(pairs(*tensors(own)), want(*tensors(own)))


def test_pairs_of_four_bits_of_a_file_come_out(tmp_path: pathlib.Path) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this PyTorch has no 4-bit type")
    for shape in ([2, 8], [2, 3]):
        data = bytes(range(shape[0] * shape[1] // 2))
        header = json.dumps({"t": {"dtype": "F4", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
        (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header + data)
        tensor = moesaic.TensorFile(tmp_path / "file").read("t")
        if shape[1] % 2 == 0:
            seen = torch.from_dlpack(tensor)
            assert seen.dtype == torch.float4_e2m1fn_x2 and bytes(seen.view(torch.uint8).flatten().tolist()) == data
        else:
            with pytest.raises(moesaic.Unsupported, match=r"got F4 \[2, 3\], need an even number of codes in a row"):
                torch.from_dlpack(tensor)


WITHOUT_TABLE = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__
import moesaic
torch.manual_seed(0)
w13, w2 = torch.randn(4, 256, 128).bfloat16(), torch.randn(4, 128, 128).bfloat16()
layer = moesaic.RoutedExperts.from_tensors(w13, w2, 2)
x, ids, weights = torch.randn(3, 128).bfloat16().requires_grad_(), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
y = layer(x, ids, weights)
assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16 and y.shape == x.shape
out = torch.empty_like(y)
layer(x, ids, weights, out=out)
assert torch.equal(out, y) and float(y.float().norm()) > 0.1
"""


def test_pytorch_without_an_exchange_table() -> None:
    """2.9 and earlier: the same by calls of its functions."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("all other tests show it")
    done = subprocess.run([sys.executable, "-c", WITHOUT_TABLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_operator_passes_pytorchs_own_checks(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    arguments = tensors(own)
    torch.library.opcheck(torch.ops.moesaic.experts.default, (*arguments, module._handle))
    torch.library.opcheck(torch.ops.moesaic.experts.int, (*arguments, module._number))


def test_there_is_no_gradient(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    x, ids, weights = tensors(own)
    y = module(x.requires_grad_(), ids, weights)
    with pytest.raises(moesaic.Unsupported, match="inference only"):
        y.sum().backward()


def test_there_is_no_derivative_in_forward_mode(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    x, ids, weights = tensors(own)

    def run(rows: Any, factors: Any) -> Any:
        return module(rows, ids, factors) + rows

    ones = torch.ones_like(x), torch.ones_like(weights)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        assert torch.equal(run(x, weights), module(x, ids, weights) + x), "inputs without tangents"
        for pair in ((forward_ad.make_dual(x, ones[0]), weights), (x, forward_ad.make_dual(weights, ones[1]))):
            with pytest.raises(moesaic.Unsupported, match="no derivative in forward mode"):
                run(*pair)
    for derive in (
        lambda: torch.func.jvp(run, (x, weights), ones),
        lambda: torch.func.jacfwd(run, argnums=1)(x, weights),
        lambda: torch.func.jvp(lambda rows: mtorch.experts(rows, ids, weights, module._number), (x,), ones[:1]),
    ):
        with pytest.raises(moesaic.Unsupported, match="no derivative in forward mode"):
            derive()


def test_one_graph_for_all_lengths(own: OwnExperts, module: mtorch.MoesaicExperts) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    x, ids, weights = tensors(own)
    for rows in (5, 9, 17):
        assert torch.equal(compiled(x[:rows], ids[:rows], weights[:rows]), module(x[:rows], ids[:rows], weights[:rows]))
    assert counter.frame_count == 1


def test_one_graph_for_twelve_layers_compiled_one_by_one(own: OwnExperts) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = mtorch.MoesaicExperts(moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k))

        def forward(self, x: Any, ids: Any, weights: Any) -> Any:
            return x + self.experts(x, ids, weights)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    x, ids, weights = tensors(own)
    for _ in range(12):
        block = Block()
        block.compile(fullgraph=True, backend=counter)
        block(x, ids, weights)
    assert counter.frame_count == 1


def test_dropped_experts_are_not_found(own: OwnExperts) -> None:
    module = mtorch.MoesaicExperts(moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k))
    handle = module._handle
    del module
    gc.collect()
    with pytest.raises(moesaic.InvalidArgument, match="dropped"):
        torch.ops.moesaic.experts(*tensors(own), handle)


ELSEWHERE = """
import sys, torch
import moesaic, moesaic.torch
w13, w2 = torch.randn(8, 256, 128), torch.randn(8, 128, 128)
made = [moesaic.torch.MoesaicExperts(moesaic.RoutedExperts.from_tensors(w13, w2, 2)) for _ in range(4)]
arguments = torch.load(sys.argv[2])
for program in (torch.export.load(sys.argv[1]).module(), torch.jit.load(sys.argv[3])):
    try:
        program(*arguments)
    except (moesaic.InvalidArgument, RuntimeError) as error:  # torch.jit gives the text alone
        assert "another process" in str(error), error
    else:
        raise AssertionError("another layer was taken for the exported one")
"""


@pytest.mark.parametrize("on_cpu", [True, False])
def test_an_exported_program_does_not_find_another_processs_layer(
    own: OwnExperts, module: mtorch.MoesaicExperts, tmp_path: pathlib.Path, on_cpu: bool
) -> None:
    module._on_cpu = on_cpu  # as on a GPU, where compiled code has the number as an integer
    arguments = tensors(own)
    files = [str(tmp_path / name) for name in ("program.pt2", "arguments.pt", "program.pt")]
    program = torch.export.export(module, arguments)
    assert torch.equal(program.module()(*arguments), module(*arguments))
    torch.export.save(program, files[0])
    torch.save(arguments, files[1])
    torch.jit.trace(module, arguments).save(files[2])
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compiled_code_is_the_same_in_each_process() -> None:
    """Torch's cache of it on disk is looked up by the graph: on a GPU that has the number."""
    code = """if True:
        import torch, moesaic, moesaic.torch
        w13, w2 = torch.randn(8, 256, 128), torch.randn(8, 128, 128)
        for on_cpu in (True, False):
            module = moesaic.torch.MoesaicExperts(moesaic.RoutedExperts.from_tensors(w13, w2, 2))
            module._on_cpu = on_cpu
            def show(graph, inputs):
                print([n.args for n in graph.graph.nodes if n.op == "call_function"])
                return graph
            x, ids, weights = torch.randn(3, 128), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
            torch.compile(module, fullgraph=True, backend=show)(x, ids, weights)
    """
    graphs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(graphs) == 1 and "2)" in graphs.pop()


THREADS = """
import os, torch
torch.set_num_threads(1)
import moesaic
w13, w2 = torch.randn(8, 512, 256), torch.randn(8, 256, 256)
x, ids, weights = torch.randn(300, 256), torch.randint(0, 8, (300, 2)), torch.rand(300, 2)
def threads(**options):
    moesaic.RoutedExperts.from_tensors(w13, w2, 2, **options)(x, ids, weights)
    return len(os.listdir("/proc/self/task"))
print(threads(), threads(num_threads=2))
"""


def test_threads_follow_torch() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    torchs, two = map(int, done.stdout.split())
    assert torchs + 1 == two, "a layer that nobody gave a number has PyTorch's: one"


def test_bits_do_not_depend_on_threads(own: OwnExperts) -> None:
    one, two = (moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, num_threads=n) for n in (1, 2))
    x, ids, weights = (t.repeat(32, 1) for t in tensors(own))  # enough for two
    assert torch.equal(one(x, ids, weights), two(x, ids, weights))


@pytest.mark.parametrize("order", ["torch, moesaic", "moesaic, torch"])
def test_one_openmp_runtime_beside_torch(order: str) -> None:
    # In a process of its own: other packages may bring copies under other names.
    code = f"import {order}; torch.ones(8).sum(); print(*moesaic.env()['openmp'])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert len(run.stdout.split()) == 1, run.stdout
