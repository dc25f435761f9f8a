"""Rotary position embedding: rows that already carry a rotation are turned on, in float32; and which one a model has.

A pair of components of a row at position p is turned by the angle p / wavelength_i; MLX's default pairs component i
with i + dims / 2, `traditional` pairs 2i with 2i + 1. Angles are float64 on the host, so that far positions stay exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.cache import CacheList, KVCache, create_attention_mask

_LOW_BITS = 12  # of a shift; the high table has as many rows, so 2**24 positions are in reach
_FAR = 16384  # tells slow wavelengths apart, and MLX's own float32 angles are still right there


@dataclass(frozen=True)
class Rope:
    """How one attention layer turns its keys.

    Attributes:
        wavelengths: one per pair that turns, what `mx.fast.rope` calls `freqs` (a scale of the positions divides them);
            infinite for a pair that does not turn, negative where the model turns the other way. The components
            beyond 2 * len(wavelengths) stay as they are; an empty tuple is a layer without rotation.
        traditional: the model pairs neighbours, not component i with i + len(wavelengths).

    Raises:
        ValueError: a wavelength that is 0 or no number.
    """

    wavelengths: tuple[float, ...]
    traditional: bool = False

    def __post_init__(self) -> None:
        for w in self.wavelengths:
            if not isinstance(w, float) or math.isnan(w) or w == 0:
                raise ValueError(f"wavelengths: expected numbers other than 0, got {w!r}; take the model's own.")

    def turn(self, x: mx.array, shift: mx.array) -> mx.array:
        """Rows turned on by `shift` positions. Builds a graph, evaluates nothing.

        The angle sums of two tables (the high and the low bits of the shift) are within 2e-7 of the definition. Where a
        shift is 0 the row comes back bit for bit; beyond 2**24 positions it comes back as NaN. A row that a model
        turned on arrival keeps the error of `mx.fast.rope`, whose angles are float32: 1e-4 of a pair's length at
        position 4096, 1e-3 at 32768 (measured on a CPU, base 10000).

        Args:
            x: [..., n, D] of a floating dtype.
            shift: [..., n] int32, new position - old position, or what broadcasts to it.

        Returns:
            [..., n, D], computed in float32, in the dtype of `x`.

        Raises:
            ValueError: rows too short for the pairs that turn.
        """
        half = len(self.wavelengths)
        if x.shape[-1] < 2 * half:
            raise ValueError(f"x: expected rows of at least {2 * half} components, got {x.shape[-1]}.")
        if not half:
            return x
        low_table, high_table = _tables(self.wavelengths)
        distance = mx.minimum(mx.abs(shift), 1 << 2 * _LOW_BITS)
        low, high = low_table[distance & (1 << _LOW_BITS) - 1], high_table[distance >> _LOW_BITS]
        sense = mx.sign(shift).astype(mx.float32)[..., None]
        if self.traditional:
            a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        else:
            a, b = x[..., :half], x[..., half : 2 * half]
        a, b = _turn_pairs(
            a,
            b,
            low[..., :half],
            low[..., half:],
            high[..., :half],
            high[..., half:],
            sense,
        )
        if self.traditional:
            turned = mx.stack([a, b], axis=-1).reshape(*a.shape[:-1], 2 * half)
        else:
            turned = mx.concatenate([a, b], axis=-1)
        turned = turned.astype(x.dtype)
        if x.shape[-1] > 2 * half:
            turned = mx.concatenate([turned, x[..., 2 * half :]], axis=-1)
        # 1 * a - 0 * b is not a, bit for bit, where b is infinite or a is -0.0
        return mx.where((shift == 0)[..., None], x, turned)

    def to_json(self) -> str:
        """Text that `from_json` reads back exactly."""
        waves = [w if math.isfinite(w) else None for w in self.wavelengths]
        return json.dumps({"wavelengths": waves, "traditional": self.traditional})

    @classmethod
    def from_json(cls, text: str) -> Rope:
        """The Rope that `to_json` wrote."""
        s = json.loads(text)
        return cls(tuple(math.inf if w is None else w for w in s["wavelengths"]), s["traditional"])


@lru_cache(maxsize=32)
def _tables(waves: tuple[float, ...]) -> tuple[mx.array, mx.array]:
    """Cosines beside sines, float32 [rows, 2 * half], for every low part of a shift and every high part."""
    steps = np.arange(1 << _LOW_BITS)[:, None]
    low, high = (steps * unit / np.asarray(waves) for unit in (1.0, float(1 << _LOW_BITS)))
    high = np.concatenate([high, np.full((1, len(waves)), np.nan)])  # where shifts out of reach end
    low, high = (np.concatenate([np.cos(a), np.sin(a)], axis=1).astype(np.float32) for a in (low, high))
    return mx.array(low), mx.array(high)


@partial(mx.compile, shapeless=True)
def _turn_pairs(
    a: mx.array,
    b: mx.array,
    low_cos: mx.array,
    low_sin: mx.array,
    high_cos: mx.array,
    high_sin: mx.array,
    sense: mx.array,
) -> tuple[mx.array, mx.array]:
    """Pairs by the angle sum; the tables' float32 makes everything float32."""
    cos = low_cos * high_cos - low_sin * high_sin
    sin = (low_sin * high_cos + low_cos * high_sin) * sense
    return a * cos - b * sin, a * sin + b * cos


def read_ropes(model: Module, layers: Sequence[int]) -> list[Rope]:
    """How the model turns the keys that it stores in its caches `layers`.

    Candidates are the model's rotary modules. Which one turns the keys of which cache, or none (NoPE), is not
    taken from names: the model runs on one token at position 0, at 1 and far away, at a different position in each
    cache. The stored keys must differ by exactly one candidate's turn, the stored values not at all. So a model that
    scales keys after turning them, or places them in a way of its own, is refused rather than misread.

    Args:
        model: an mlx-lm model with its weights.
        layers: indices into the list of caches that mlx-lm makes for the model; each a plain KVCache, or a CacheList
            that holds one.

    Returns:
        A Rope for each of `layers`.

    Raises:
        ValueError: a layer without such a cache; keys that none of the rotary modules accounts for, or whose turn
            depends on the length of the text (MLA, learned positions, dynamic NTK): the module is named.
    """
    name = type(model).__module__
    latent = sorted({type(m).__name__ for _, m in model.named_modules() if hasattr(m, "kv_lora_rank")})
    if latent:
        raise ValueError(
            f"{name}: expected keys whose first components turn, got multi-head latent attention "
            f"(MLA: {', '.join(latent)}), whose cache holds latents; use positions='original'."
        )
    candidates, unreadable = _candidates(model)
    count = len(layers)
    left = [candidates] * count
    home = _stored_rows(model, layers, [0] * count)
    # near first: a table of learned positions has no row for far ones, and reading past its end can crash
    for positions in ([1] * count, [_FAR + 37 * i for i in range(count)]):
        for i, (k, v) in enumerate(_stored_rows(model, layers, positions)):
            shift = mx.array(positions[i], mx.int32)
            left[i] = [
                r for r in left[i] if 2 * len(r.wavelengths) <= k.shape[-1] and _equal(r.turn(home[i][0], shift), k)
            ]
            if left[i] and _equal(home[i][1], v):
                continue
            if left[i] or not unreadable:
                got = "keys or values that depend on their position in another way (learned positions?)"
            else:
                got = f"a rotary module that cannot be read ({', '.join(unreadable)})"
            raise ValueError(
                f"{name}, layer {layers[i]}: expected stored keys that turn as one of the model's rotary modules does, "
                f"or not at all, got {got}; use positions='original'."
            )
    for layer, ropes in zip(layers, left, strict=True):
        if len(ropes) > 1:
            raise ValueError(
                f"{name}, layer {layer}: expected keys that tell which of {len(ropes)} rotary embeddings turned them, "
                "got keys that fit each (are the weights loaded?); use positions='original'."
            )
    return [ropes[0] for ropes in left]


def _candidates(model: Module) -> tuple[list[Rope], list[str]]:
    """Every way of turning that the model's modules hold, no turning included; and the classes that cannot be read."""
    ropes, unreadable = [Rope(())], set()
    for _, module in model.named_modules():
        kind = type(module)
        if kind is RoPE:
            ropes.append(
                Rope(tuple((wavelengths(module.dims, module.base) / module.scale).tolist()), module.traditional)
            )
            continue
        known = ("_freqs", "_rope_freqs") if kind.__module__.startswith("mlx_lm.") else ()
        tables = [t for t in (getattr(module, n, None) for n in known) if isinstance(t, mx.array) and t.ndim == 1]
        # without the flag (nanochat and talkie turn in a function) the stored keys tell
        sides = [module.traditional] if hasattr(module, "traditional") else [False, True]
        ropes += [Rope(tuple(np.array(t, np.float64).tolist()), side) for t in tables for side in sides]
        if not tables and (isinstance(module, RoPE) or kind.__name__.endswith(("RoPE", "RotaryEmbedding"))):
            unreadable.add(kind.__name__)
    return list(dict.fromkeys(ropes)), sorted(unreadable)


class _Probe(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """A cache that notes what a layer stores at one position and shows it one row without a direction.

    With keys of zero every attention is the same wherever its rows are, and so is what the next layer sees.
    """

    def __init__(self, position: int) -> None:
        super().__init__()
        self.offset = position
        self.stored: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.stored = keys, values
        self.offset += keys.shape[2]
        return mx.zeros_like(keys), values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_attention_mask(N, offset=0, return_array=return_array, window_size=window_size)


def _stored_rows(model: Module, layers: Sequence[int], positions: list[int]) -> list[tuple[mx.array, mx.array]]:
    """The keys and values that `layers` store of a single token (of each of 8 sequences) at `positions`."""
    # asked of the class: inside keyformer.attached the model itself answers with evicting caches
    make = getattr(type(model), "make_cache", None)
    caches = [KVCache() for _ in model.layers] if make is None else list(make(model))
    probes = []
    for layer, position in zip(layers, positions, strict=True):
        probe, cache = _Probe(position), caches[layer]
        inner = list(cache.caches) if isinstance(cache, CacheList) else [cache]
        plain = [i for i, c in enumerate(inner) if type(c) is KVCache]
        if len(plain) != 1:
            raise ValueError(f"layer {layer}: expected one plain KVCache, got {type(cache).__name__}.")
        inner[plain[0]] = probe
        caches[layer] = CacheList(*inner) if isinstance(cache, CacheList) else probe
        probes.append(probe)
    model(mx.arange(8)[:, None], cache=caches)
    stored = [p.stored for p in probes if p.stored is not None]
    if len(stored) != len(probes):
        raise ValueError(
            f"{type(model).__module__}: expected each of the caches {list(layers)} in use, got one unused."
        )
    mx.eval(stored)
    return stored


def _equal(a: mx.array, b: mx.array) -> bool:
    """Whether rows agree up to the rounding of their dtype and of MLX's float32 angles."""
    bound = (4 * mx.finfo(a.dtype).eps + 5e-3) * mx.abs(a).max(axis=-1, keepdims=True)
    return bool(mx.all(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)) <= bound))


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
