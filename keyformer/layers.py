"""Layers of a model in groups: what follows attention is done for all layers of a group at once.

Nothing needs the evictions of one token before the next token, nor those of a prompt's chunk before the next chunk, so
they can wait until the last layer of a group has attended; on a GPU one dispatch then serves them all, in the time that
one layer would take. Any cache may be asked for what it knows at any time: whatever waits is decided first.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx

from .eviction import walk
from .kernels.build import backend
from .kernels.decode import MOST_LAYERS, Read, Rows, decode_step, join
from .noise import draw

if TYPE_CHECKING:
    from .cache import KeyformerKVCache


@dataclass(frozen=True)
class Walk:
    """New rows of a layer's prompt, each key of which is to score the rows before it, one after another.

    Attributes:
        keys: [1, Hkv, prior + S, D]; the first `prior` have been through this.
        scores: [1, Hkv, prior + S] float32.
        noise: distribution and seed of each row's noise, or None.
        positions: [1, Hkv, prior + S] int32 and the layer, coordinates of that noise.
        limits: budget, first and last rows that are protected.
        temperatures: tau at each of the S decisions.
        tile_bytes: bound on float32 logits at once.
    """

    keys: mx.array
    prior: int
    scores: mx.array
    noise: tuple[str, int] | None
    positions: mx.array
    layer: int
    limits: tuple[int, int, int]
    temperatures: Sequence[float]
    tile_bytes: int

    def alike(self, other: Walk) -> bool:
        """Whether both can go in one batch."""
        return (
            self.keys.shape == other.keys.shape
            and self.keys.dtype == other.keys.dtype
            and (self.prior, self.limits) == (other.prior, other.limits)
            and (self.temperatures, self.tile_bytes) == (other.temperatures, other.tile_bytes)
            and self.noise == other.noise
        )


class LayerGroup:
    """Caches of several layers that decide together, once the last of `size` has come."""

    def __init__(self, size: int) -> None:
        self.size = size
        # weakly: caches dropped in the middle of a token are to free their memory at once, and they hold the group
        self._tokens: list[tuple[weakref.ref[KeyformerKVCache], Read]] = []
        self._prompts: list[weakref.ref[KeyformerKVCache]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroup:
        """For the copies of those that wait; what waited of a cache that nobody copied for its own sake is dropped."""
        other = memo[id(self)] = LayerGroup(self.size)
        tokens, prompts = self._waiting()
        other._tokens = [(weakref.ref(copy.deepcopy(c, memo)), copy.deepcopy(read, memo)) for c, read in tokens]
        other._prompts = [weakref.ref(copy.deepcopy(c, memo)) for c in prompts]
        return other

    def _waiting(self) -> tuple[list[tuple[KeyformerKVCache, Read]], list[KeyformerKVCache]]:
        """What waits, of caches that somebody still has."""
        tokens = [(cache, read) for held, read in self._tokens if (cache := held()) is not None]
        return tokens, [cache for held in self._prompts if (cache := held()) is not None]

    def add(self, cache: KeyformerKVCache, read: Read) -> list[mx.array]:
        """Take in what one layer's attention has read of a decoded token.

        Returns:
            What should be evaluated with the attention's output, so that no graph grows from token to token.
        """
        self._tokens.append((weakref.ref(cache), read))
        return self._added(cache)

    def add_prompt(self, cache: KeyformerKVCache) -> list[mx.array]:
        """Take in a layer whose new prompt rows are to be walked over; returns the same as `add`."""
        self._prompts.append(weakref.ref(cache))
        return self._added(cache)

    def _added(self, cache: KeyformerKVCache) -> list[mx.array]:
        cache.undecided = True
        return self.decide() if len(self._tokens) + len(self._prompts) >= self.size else []

    def decide(self) -> list[mx.array]:
        """Score the rows of the layers that wait, and evict, or choose where their next rows go; returns what is
        new."""
        tokens, prompts = self._waiting()
        self._tokens, self._prompts = [], []
        made: list[mx.array] = []
        if tokens and _as_before(tokens):
            made += _decide(tokens, tokens[0][0]._held)
        else:
            for alike in _runs(tokens, lambda one, other: _alike(*one, *other)):
                made += _decide(alike)
        walks = [(cache, cache._to_walk()) for cache in prompts]
        for together in _runs(walks, lambda one, other: one[1].alike(other[1])):
            made += _walk(together)
        return made


T = TypeVar("T")


def _runs(items: list[T], alike: Callable[[T, T], bool]) -> Iterator[list[T]]:
    """The items in order, those together that are like the first of them."""
    first = 0
    for last in range(1, len(items) + 1):
        if last == len(items) or not alike(items[first], items[last]):
            yield items[first:last]
            first = last


def _walk(alike: Sequence[tuple[KeyformerKVCache, Walk]]) -> list[mx.array]:
    walks = [w for _, w in alike]
    first, m = walks[0], walks[0].prior
    keys, scores = _together([w.keys for w in walks]), _together([w.scores for w in walks])
    frozen = None
    if first.noise is not None:
        heads, positions = mx.arange(keys.shape[1])[:, None], _together([w.positions for w in walks])
        frozen = draw(*first.noise, [w.layer for w in walks], heads, positions)
    index, kept = walk(
        keys[:, :, :m],
        keys[:, :, m:],
        scores,
        *first.limits,
        frozen,
        first.temperatures,
        first.tile_bytes,
    )
    made = []
    for i, (cache, _) in enumerate(alike):
        made += cache._walked(index[i : i + 1], kept[i : i + 1])
    return made


def _together(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def _alike(one: KeyformerKVCache, read: Read, other: KeyformerKVCache, its_read: Read) -> bool:
    """Whether one `decode_step` serves both layers."""
    if (read.buffer is None) != (its_read.buffer is None) or (read.asked is None) != (its_read.asked is None):
        return False
    if read.buffer is not None and its_read.buffer is not None and read.buffer.shape != its_read.buffer.shape:
        return False
    if read.asked is not None and its_read.asked is not None and not read.asked.alike(its_read.asked):
        return False
    keys, its_keys = read.keys, its_read.keys
    return keys.shape == its_keys.shape and keys.dtype == its_keys.dtype and one._goes_with(other)


def _as_before(tokens: Sequence[tuple[KeyformerKVCache, Read]]) -> bool:
    """Whether these are just the layers that decided together on the token before, and nothing has come between."""
    first = tokens[0][0]
    held, B = first._held, len(first._rows)
    if held is None or held.slot.shape[0] != B * len(tokens):
        return False
    for i, (cache, read) in enumerate(tokens):
        if cache._held is not held or cache._place != i * B or cache._steady is None or read.buffer is None:
            return False
        if read.asked is not None and isinstance(read.asked.mask, mx.array):
            return False
    return True


def _decide(alike: Sequence[tuple[KeyformerKVCache, Read]], held: Rows | None = None) -> list[mx.array]:
    """One `decode_step` for layers that are alike; `held`: what all of them hold together."""
    caches = [cache for cache, _ in alike]
    first, B, L = caches[0], len(caches[0]._rows), len(caches)
    if held is None:
        held = join([c._undecided_rows() for c in caches])
    after = decode_step(first.policy, [read for _, read in alike], held, first._now())
    slots = [after.slot] if L == 1 else mx.split(after.slot, L)
    targets: list[tuple[mx.array, mx.array]] | list[None] = [None] * L
    if all(c._can_be_steady() for c in caches[: 1 if first._steady else L]):
        targets = _targets(after.slot, first, L)
    for i, (cache, slot, target) in enumerate(zip(caches, slots, targets, strict=True)):
        cache._decided(after, i * B, slot, target)
    made = [after.scores, after.positions, after.masses, after.slot, *(c.shifts for c in caches)]
    return [a for a in made if a is not None]


def _targets(slot: mx.array, cache: KeyformerKVCache, layers: int) -> list[tuple[mx.array, mx.array]]:
    """The slots as indices for keys and for values, of each layer: spread here once, not in each layer."""
    assert cache.keys is not None and cache.values is not None
    sizes = cache.keys.shape[3], cache.values.shape[3]
    each = {D: mx.split(mx.broadcast_to(slot, (*slot.shape[:3], D)), layers) for D in set(sizes)}
    return list(zip(each[sizes[0]], each[sizes[1]], strict=True))


def group_layers(caches: Sequence[KeyformerKVCache], most: int | None = None) -> None:
    """Put the layers of one model into groups of `most`, or as many as suit where MLX computes: one on a CPU, which
    gains nothing from more, 8 on an Apple GPU, 32 with CUDA. In a batch's prompt each sequence's are grouped too."""
    most = MOST_LAYERS.get(backend() or "", 1) if most is None else most
    count = -(-len(caches) // most) if caches else 0
    for i in range(count):
        layers = caches[i * len(caches) // count : (i + 1) * len(caches) // count]
        for each in (layers, *zip(*(c.sequences() for c in layers), strict=False)):
            group = LayerGroup(len(layers))
            for cache in each:
                cache._settle()
                cache.group = group
