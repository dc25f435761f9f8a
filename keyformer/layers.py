"""Layers of a model in groups: what follows a decoded token is done for all layers of a group at once.

Nothing needs the evictions of one token before the next token, so they can wait until the last layer of a group has
attended; on a GPU one dispatch then serves them all, in the time that one layer would take. Any cache may be asked for
what it knows at any time: whatever waits is decided first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .kernels.build import backend
from .kernels.decode import MOST_LAYERS, Read, decode_step, join

if TYPE_CHECKING:
    from .cache import KeyformerKVCache


class LayerGroup:
    """Caches of several layers that decide together, once the last of `size` has come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._waiting: list[tuple[KeyformerKVCache, Read]] = []

    def add(self, cache: KeyformerKVCache, read: Read) -> list[mx.array]:
        """Take in what one layer's attention has read of a decoded token.

        Returns:
            What should be evaluated with the attention's output, so that no graph grows from token to token.
        """
        self._waiting.append((cache, read))
        cache.undecided = True
        return self.decide() if len(self._waiting) >= self.size else []

    def decide(self) -> list[mx.array]:
        """Score the rows of the layers that wait, and choose where their next rows go; returns the new arrays."""
        waiting, self._waiting = self._waiting, []
        made: list[mx.array] = []
        first = 0
        for last in range(1, len(waiting) + 1):
            if last == len(waiting) or not _alike(*waiting[first], *waiting[last]):
                made += _decide(waiting[first:last])
                first = last
        return made


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


def _decide(alike: Sequence[tuple[KeyformerKVCache, Read]]) -> list[mx.array]:
    caches = [cache for cache, _ in alike]
    first, held = caches[0], caches[0]._held
    B = len(first._rows)
    together = held is not None and held.slot.shape[0] == B * len(caches)
    if held is None or not together or any(c._held is not held or c._place != i * B for i, c in enumerate(caches)):
        held = join([c._undecided_rows() for c in caches])
    after = decode_step(first.policy, [read for _, read in alike], held, first._now())
    slots = [after.slot] if len(caches) == 1 else mx.split(after.slot, len(caches))
    for i, (cache, slot) in enumerate(zip(caches, slots, strict=True)):
        cache._decided(after, i * B, slot)
    made = [after.scores, after.positions, after.masses, after.slot, *(c.shifts for c in caches)]
    return [a for a in made if a is not None]


def group_layers(caches: Sequence[KeyformerKVCache], most: int | None = None) -> None:
    """Put the layers of one model into groups of `most`, or as many as suit where MLX computes: one on a CPU, which
    gains nothing from more, 8 on an Apple GPU, 32 with CUDA."""
    most = MOST_LAYERS.get(backend() or "", 1) if most is None else most
    count = -(-len(caches) // most) if caches else 0
    for i in range(count):
        part = caches[i * len(caches) // count : (i + 1) * len(caches) // count]
        group = LayerGroup(len(part))
        for cache in part:
            if cache.undecided:
                cache.group.decide()
            cache.group = group
