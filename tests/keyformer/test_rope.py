"""Rotation against MLX's own RoPE and the float64 definition."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import state_oracle

from keyformer import rope_remap_positions
from keyformer.rope import rotate, turns, wavelengths


def mlx_rope(x: mx.array, position: int, dims: int, **more: Any) -> mx.array:
    """Rows [N, D], all at one position."""
    more = {"traditional": False, "base": 10000.0, "scale": 1.0, **more}
    return mx.fast.rope(x[None, :, None], dims, offset=position, **more)[0, :, 0]


@pytest.mark.parametrize("D", [2, 7, 64])
@pytest.mark.parametrize("base", [100.0, 10000.0, 500000.0])
def test_rotation_is_the_definition(D: int, base: float) -> None:
    x = np.random.default_rng(D).normal(size=(5, D)).astype(np.float32)
    at = np.array([0, 1, 17, 4096, 100_000])
    ours = rotate(mx.array(x), *turns(at, wavelengths(D, base)))
    expected = [state_oracle.rope(row, int(p), base) for row, p in zip(x, at, strict=True)]
    np.testing.assert_allclose(ours, np.array(expected), atol=2e-6)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [8, 16])
def test_remapping_mlx_rows_gives_mlx_rows(traditional: bool, dims: int) -> None:
    """From 20 to 3, and partial rotation (8 of 16) by the model's wavelengths."""
    x = mx.random.normal((4, 16))
    freqs = mx.array(wavelengths(dims, 10000.0))
    old, new = (mlx_rope(x, p, dims, traditional=traditional) for p in (20, 3))
    ours = rope_remap_positions(old, mx.array(20), mx.full((4,), 3), freqs=freqs, traditional=traditional)
    np.testing.assert_allclose(ours, new, atol=2e-6)
    assert np.array_equal(np.array(rope_remap_positions(old, mx.arange(4), mx.arange(4))), np.array(old))


def test_scaled_wavelengths_are_mlx_freqs() -> None:
    """llama3 and yarn give `mx.fast.rope` a table of wavelengths instead of a base."""
    x, freqs = mx.random.normal((4, 16)), mx.array(wavelengths(16, 10000.0) * np.linspace(1, 8, 8))
    old, new = (mlx_rope(x, p, 16, base=None, freqs=freqs) for p in (50, 2))
    np.testing.assert_allclose(rope_remap_positions(old, mx.array(50), mx.array(2), freqs=freqs), new, atol=2e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dtype_stays_and_rounding_happens_once(dtype: mx.Dtype) -> None:
    x = mx.random.normal((6, 12)).astype(dtype)
    ours = rope_remap_positions(x, mx.arange(6) + 9, mx.arange(6))
    assert ours.dtype == dtype
    exact = rope_remap_positions(x.astype(mx.float32), mx.arange(6) + 9, mx.arange(6))
    assert mx.array_equal(ours, exact.astype(dtype))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": mx.zeros((3, 4), mx.int32)}, "x: expected rows"),
        ({"old_positions": mx.arange(2)}, "expected one per row"),
        ({"new_positions": mx.zeros(3)}, "new_positions: expected integers"),
        ({"base": 0.0}, "base: expected a finite number above 0"),
        ({"base": float("nan")}, "base: expected"),
        ({"freqs": mx.ones(3)}, "freqs: expected at most 2 positive"),
        ({"freqs": mx.zeros(2)}, "freqs: expected at most 2 positive"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    good = {"x": mx.zeros((3, 4)), "old_positions": mx.arange(3), "new_positions": mx.arange(3)}
    with pytest.raises(ValueError, match=message):
        rope_remap_positions(**{**good, **arguments})
