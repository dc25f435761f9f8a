"""Rotary position embedding: the float32 rotation of rows that already carry one.

A pair of components of a row at position p is turned by the angle p / wavelength_i; MLX's default pairs component i
with i + dims / 2, `traditional` pairs 2i with 2i + 1. Angles are float64 on the host, so that far positions stay exact.
"""

import mlx.core as mx
import numpy as np


def wavelengths(dims: int, base: float) -> np.ndarray:
    """base ** (2 i / dims) for each of the dims // 2 pairs, float64: what `mx.fast.rope` calls `freqs`."""
    half = dims // 2
    return np.float64(base) ** (np.arange(half) / max(half, 1))


def turns(positions: np.ndarray, freqs: np.ndarray) -> tuple[mx.array, mx.array]:
    """Cosine and sine, float32 [*positions.shape, dims / 2], of the angles at integer positions."""
    angles = np.asarray(positions, np.float64)[..., None] / freqs
    return mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32))


def rotate(x: mx.array, cos: mx.array, sin: mx.array, traditional: bool = False) -> mx.array:
    """Rows [..., D] turned by `turns`, in float32; components beyond the pairs that turn stay as they are."""
    half = cos.shape[-1]
    x = x.astype(mx.float32)
    pairs, rest = x[..., : 2 * half], x[..., 2 * half :]
    if traditional:
        a, b = pairs[..., 0::2], pairs[..., 1::2]
        turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(pairs.shape)
    else:
        a, b = pairs[..., :half], pairs[..., half:]
        turned = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return mx.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def rope_remap_positions(
    x: mx.array,
    old_positions: mx.array,
    new_positions: mx.array,
    base: float = 10000.0,
    freqs: mx.array | None = None,
    *,
    traditional: bool = False,
) -> mx.array:
    """Rows rotated at `old_positions`, turned once to where they would be at `new_positions`.

    Rounding adds up over repeated calls (in float16, steps of -1 never turn the slow pairs at all): keep the rows as
    they first arrived and turn those.

    Args:
        x: [..., D] rows of a floating dtype, already rotated.
        old_positions, new_positions: integers, [...], or what broadcasts to it.
        base: the model's RoPE base; unused with `freqs`.
        freqs: the model's wavelengths [dims / 2], as `mx.fast.rope` takes them (llama3, yarn); dims < D for a partial
            rotation. By default every pair turns, and the last component of an odd D does not.
        traditional: the model pairs neighbours.

    Returns:
        [..., D], computed in float32, in the dtype of `x`.

    Raises:
        ValueError: positions that do not fit the rows, a dtype that does not float, a base or wavelengths that cannot
            work.
    """
    D = x.shape[-1] if x.ndim else 0
    if not D or not mx.issubdtype(x.dtype, mx.floating):
        raise ValueError(f"x: expected rows [..., D] of a floating dtype, got {x.dtype} {x.shape}.")
    old, new = (np.asarray(p) for p in (old_positions, new_positions))
    for name, p in (("old_positions", old), ("new_positions", new)):
        if p.dtype.kind not in "iu":
            raise ValueError(f"{name}: expected integers, got {p.dtype}; cast them to int32.")
    try:
        shift = np.broadcast_to(new.astype(np.int64) - old, x.shape[:-1])
    except ValueError:
        raise ValueError(
            f"positions: expected one per row {x.shape[:-1]}, got old {old.shape} and new {new.shape}."
        ) from None
    if freqs is None:
        check_base("base", base)
    waves = wavelengths(D, base) if freqs is None else np.asarray(freqs, np.float64)
    if waves.ndim != 1 or 2 * len(waves) > D or not (waves > 0).all():
        raise ValueError(f"freqs: expected at most {D // 2} positive wavelengths, got {waves.shape}.")
    return rotate(x, *turns(shift, waves), traditional).astype(x.dtype)


def check_base(name: str, base: object) -> None:
    """Raise ValueError unless `base` is a finite number above 0."""
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < float("inf"):
        raise ValueError(f"{name}: expected a finite number above 0, got {base!r}; take the model's own rope_theta.")
