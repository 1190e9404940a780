"""What a call reports of its rounding, and the bound that follows."""

from __future__ import annotations

import math
import pathlib

import ml_dtypes
import numpy as np
import pytest
from conftest import OwnExperts, hidden_states, layer_of, rel_l2

import moesaic


def test_ordinary_rows_are_within_the_layers_bound(model_path: pathlib.Path) -> None:
    _, _, layer = layer_of(model_path)
    x = hidden_states(layer, 24)
    y, trace = layer(x, numerics=True)
    assert np.array_equal(y, layer(x)) and trace.topk_ids is None
    n = trace.numerics
    assert n.within and n.rows == 24 and n.outside == 0
    assert (n.saturated, n.flushed, n.not_finite, n.beyond_bound) == (0, 0, 0, 0)
    assert 0 < n.error_estimate <= n.activation_bound <= layer.bound <= n.bound < 2 * layer.bound
    assert type(n.row_errors) is np.ndarray and n.row_errors.shape == (24,)
    assert 0 < n.row_errors.min() <= n.error_estimate <= n.row_errors.max()
    assert n.row_flags.dtype == np.int32 and not n.row_flags.any()
    exact = layer_of(model_path, quant="f32")[2](x)
    assert 0 < rel_l2(y, exact) <= n.bound
    assert "0 of 24 rows outside" in repr(n)


def test_rows_that_the_bound_is_not_stated_for_are_named(qwen3: pathlib.Path) -> None:
    _, _, layer = layer_of(qwen3, quant="f16")
    x = hidden_states(layer, 24)
    x[5] *= 1e-7  # below the smallest normal number of F16
    _, trace = layer(x, trace=True, numerics=True)
    n = trace.numerics
    assert trace.topk_ids.shape == (24, layer.spec.top_k)
    assert not n.within and n.flushed == n.outside == 1
    assert n.row_flags[5] & n.FLUSHED and not np.delete(n.row_flags, 5).any()
    assert n.row_errors.argmax() == 5 and n.row_errors[5] > n.activation_bound
    n = layer(x * np.float32(2e-6), numerics=True)[1].numerics
    assert n.flushed == 24 and n.bound > 2 * layer.bound

    x[7] = np.nan
    n = layer(x, numerics=True)[1].numerics
    assert n.not_finite == 1 and n.row_flags[7] & n.NOT_FINITE and math.isinf(n.bound)
    assert (n.SATURATED, n.FLUSHED, n.NOT_FINITE, n.BEYOND_BOUND) == (1, 2, 4, 8)


@pytest.mark.parametrize(("dtype", "unit"), [(np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8)])
def test_an_output_of_16_bits_is_rounded(qwen3: pathlib.Path, dtype: type, unit: float) -> None:
    _, _, layer = layer_of(qwen3, quant="f32")
    x = hidden_states(layer, 24).astype(dtype)
    y, trace = layer(x, numerics=True)
    exact = layer(x.astype(np.float32))
    assert layer.bound < rel_l2(y.astype(np.float32), exact) <= trace.numerics.bound
    assert trace.numerics.bound == pytest.approx(math.hypot(layer.bound, unit))
    # It is the output's dtype that counts, not that of the hidden states.
    wide, narrow = np.empty(x.shape, np.float32), np.empty(x.shape, dtype)
    assert layer(x, out=wide, numerics=True)[1].numerics.bound == pytest.approx(layer.bound, rel=0.2)
    rounded = layer(x.astype(np.float32), out=narrow, numerics=True)[1].numerics
    assert layer.bound < rel_l2(narrow.astype(np.float32), exact) <= rounded.bound


def test_a_call_without_rows_or_without_the_option(qwen3: pathlib.Path) -> None:
    _, _, layer = layer_of(qwen3)
    n = layer(hidden_states(layer, 0), numerics=True)[1].numerics
    assert n.rows == 0 and n.within and n.error_estimate == 0 and n.row_errors.shape == (0,)
    assert layer(hidden_states(layer), trace=True)[1].numerics is None


def test_of_ones_own_experts(own: OwnExperts) -> None:
    experts = moesaic.RoutedExperts.from_tensors(own.w13, own.w2, own.top_k, quant="int8", gate_up="gate_then_up")
    y, trace = experts(own.x, own.ids, own.weights, numerics=True)
    n = trace.numerics
    assert n.rows == len(own.x) and n.within and np.array_equal(y, experts(own.x, own.ids, own.weights))
    assert 0.2 * n.error_estimate < rel_l2(y, own.exact()) <= n.bound
