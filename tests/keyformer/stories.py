"""Random lives of a model's caches, to be lived twice: with layers in groups or alone, with kernels or without."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from small import a_policy, tiny_llama

from keyformer import KeyformerKVCache, attached, make_prompt_cache
from keyformer.layers import group_layers

LAYERS, BUDGET = 5, 14

QUESTIONS = {
    "kept": lambda c, b: c.kept(b),
    "ranks": lambda c, b: c.ranks(b),
    "scores": lambda c, b: _own(c, b).scores,
    "positions": lambda c, b: _own(c, b).positions,
    "masses": lambda c, b: _own(c, b).masses,
    "offset": lambda c, b: c.offset,
    "sizes": lambda c, b: c.sizes(),
    "slots": lambda c, b: c.slots(),
    "nbytes": lambda c, b: c.nbytes,
    "size": lambda c, b: c.size(),
    "state": lambda c, b: c.state,
    "row_bytes": lambda c, b: c.row_bytes,
    "mask": lambda c, b: c.make_mask(1, return_array=True) if not c._in_prompt else None,
}


def _own(cache: KeyformerKVCache, b: int) -> KeyformerKVCache:
    parts = getattr(cache, "_parts", None)
    return cache if parts is None else parts[b]


class Stopped(Exception):
    """What a model call is stopped with."""


class Spied(llama.TransformerBlock):
    """A layer after which something happens."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        out = super().__call__(*arguments, **options)
        if self.then is not None:
            self.then()
        return out


def spied() -> llama.Model:
    model = tiny_llama(num_hidden_layers=LAYERS)
    for layer in model.model.layers:
        layer.__class__, layer.then = Spied, None
    return model


class Story:
    """One life: sequences of their own and batches of some; everything that is seen of them.

    What happens depends on seed and kind alone; layers are put in groups of one of `sizes`.
    """

    def __init__(self, seed: int, kind: str, sizes: Sequence[int], model: llama.Model) -> None:
        self.rng = random.Random(f"{seed} {kind}")
        self.sizes = sizes
        self.model = model
        self.options = {
            "prefill": self.rng.choice(["full", "chunked"]),
            "positions": self.rng.choice(["original", "contiguous"]),
            "allocate": self.rng.choice(["uniform", "uniform" if kind == "full" else "pyramid"]),
        }
        self.policy = a_policy(kind, n_sink=self.rng.choice([0, 1]), recent=self.rng.choice([2, 0.25]), seed=seed)
        self.singles: list[list[Any]] = []
        self.batches: list[list[Any]] = []
        self.seen: list[tuple[str, Any]] = []

    def tell(self, length: int) -> list[tuple[str, Any]]:
        self.begin()
        deeds = [getattr(self, name) for name in dir(Story) if name.startswith("do_")]
        with attached(self.model):
            for _ in range(length):
                deed = self.rng.choice(deeds)
                try:
                    deed()
                except Stopped:
                    self.seen.append((f"{deed.__name__} stopped", None))
                except (ValueError, RuntimeError, AssertionError, IndexError) as error:
                    self.seen.append((f"{deed.__name__} {error!r}"[:500], None))
                finally:
                    for layer in self.model.model.layers:
                        layer.then = None
            for caches in self.singles + self.batches:
                self.look("the end", [_seen(c, "state", 0) for c in caches])
        return self.seen

    def look(self, what: str, found: Any) -> None:
        self.seen.append((what, found))

    def begin(self) -> None:
        caches = make_prompt_cache(
            self.model, self.policy, None if self.policy.name == "full" else BUDGET, **self.options
        )
        self.singles.append(caches)
        self.group(caches)

    def group(self, caches: list[Any]) -> None:
        group_layers(caches, self.sizes[int(self.rng.random() * len(self.sizes))])

    def one(self) -> list[Any]:
        if not self.singles:
            self.begin()
        return self.rng.choice(self.singles)

    def some(self) -> list[Any] | None:
        return self.rng.choice(self.batches) if self.batches else None

    def any(self) -> list[Any]:
        return self.rng.choice(self.singles + self.batches) if self.singles + self.batches else self.one()

    def call(self, caches: list[Any], tokens: list[list[int]], what: str) -> None:
        """A call of the model, in the middle of which something may be asked, changed, or go wrong."""
        at, chance = self.rng.randrange(LAYERS), self.rng.random()
        name, seat = self.rng.choice(list(QUESTIONS)), self.rng.randrange(LAYERS)
        b = self.rng.randrange(len(tokens))

        def then() -> None:
            if chance < 0.3:
                self.look(f"{what}, layer {at}: {name} of {seat}", _seen(caches[seat], name, b))
            elif chance < 0.36:
                raise Stopped
            elif chance < 0.42:
                self.group(caches)
            elif chance < 0.5:
                self.look(f"{what}, a copy of {seat}", _seen(copy.deepcopy(caches[seat]), "state", b))

        self.model.model.layers[at].then = then
        try:
            logits = self.model(mx.array(tokens), cache=caches)
        finally:
            self.model.model.layers[at].then = None
        mx.eval(logits)
        self.look(what, np.array(logits))

    def tokens(self, batch: int, n: int) -> list[list[int]]:
        return [[self.rng.randrange(300) for _ in range(n)] for _ in range(batch)]

    # -- what may happen

    def do_begin(self) -> None:
        if len(self.singles) < 3:
            self.begin()

    def do_read(self) -> None:
        caches, announced = self.one(), self.rng.random() < 0.7
        chunks = [self.rng.choice([1, 2, 3, 7, 16, 23]) for _ in range(self.rng.randint(1, 3))]
        ends = self.rng.random() < 0.8
        if announced:
            for c in caches:
                c.begin_prefill()
        for n in chunks:
            self.call(caches, self.tokens(1, n), f"read {n}")
        if ends:
            for c in caches:
                c.end_prefill()
        elif announced and self.rng.random() < 0.5:
            for c in caches:
                c.abandon_prefill()

    def do_decode(self) -> None:
        caches = self.any()
        batch = len(caches[0].sizes())
        for _ in range(self.rng.randint(1, 8)):
            self.call(caches, self.tokens(batch, 1), "decode")

    do_decode_more = do_decode

    def do_group(self) -> None:
        self.group(self.any())

    def do_ask(self) -> None:
        caches, name, layer = self.any(), self.rng.choice(list(QUESTIONS)), self.rng.randrange(LAYERS)
        self.look(f"{name} of {layer}", _seen(caches[layer], name, 0))

    def do_copy(self) -> None:
        if len(self.singles) < 4:
            caches = copy.deepcopy(self.one())
            self.singles.append(caches)

    def do_save(self) -> None:
        caches = self.one()
        at = next(i for i, c in enumerate(self.singles) if c is caches)
        self.singles[at] = [type(c).from_state(c.state) for c in caches]
        if self.rng.random() < 0.7:
            self.group(self.singles[at])

    def do_trim(self) -> None:
        caches = self.one()
        self.look("trim", [c.trim(2) for c in caches])

    def do_merge(self) -> None:
        if len(self.batches) > 2:
            self.batches.pop(0)
        chosen = [self.one() for _ in range(self.rng.randint(1, 3))]
        batch = [type(layer[0]).merge(list(layer)) for layer in zip(*chosen, strict=True)]
        if self.rng.random() < 0.8:
            self.group(batch)
        self.batches.append(batch)

    do_merge_more = do_merge

    def do_filter(self) -> None:
        batch = self.some()
        if batch is not None:
            n = len(batch[0].sizes())
            stay = self.rng.sample(range(n), self.rng.randint(1, n))
            for c in batch:
                c.filter(stay)

    def do_extend(self) -> None:
        batch = self.some()
        if batch is not None and len(batch[0].sizes()) < 4:
            other = [type(c).merge([c]) for c in self.one()]
            for c, more in zip(batch, other, strict=True):
                c.extend(more)
            if self.rng.random() < 0.5:
                self.group(batch)

    def do_extract(self) -> None:
        batch = self.some()
        if batch is not None:
            b = self.rng.randrange(len(batch[0].sizes()))
            self.singles = [*self.singles[-2:], [c.extract(b) for c in batch]]

    def do_read_together(self) -> None:
        """Another prompt for each sequence of a batch, padded on a side."""
        batch = self.some()
        if batch is None:
            return
        lengths = [self.rng.choice([1, 2, 5, 9, 20]) for _ in batch[0].sizes()]
        most, announced = max(lengths), self.rng.random() < 0.7
        if announced:
            for c in batch:
                c.begin_prefill()
            self.group(batch)
        padding = [most - n for n in lengths]
        side = self.rng.choice(["left", "right"])
        for c in batch:
            if side == "left":
                c.prepare(left_padding=padding)
            else:
                c.prepare(lengths=lengths, right_padding=padding)
        chunk = self.rng.choice([3, 7, 30])
        try:
            for first in range(0, most, chunk):
                n = min(chunk, most - first)
                self.call(batch, self.tokens(len(lengths), n), f"read {side} {n}")
        finally:
            for c in batch:
                c.finalize()
        for c in batch:
            c.end_prefill()


def _seen(cache: Any, name: str, b: int) -> Any:
    return _plain(QUESTIONS[name](cache, b))


def _plain(found: Any) -> Any:
    if isinstance(found, mx.array):
        return np.array(found)
    return [_plain(a) for a in found] if isinstance(found, (list, tuple)) else found


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        if not (isinstance(two, np.ndarray) and one.shape == two.shape):
            return False
        return (
            np.allclose(one, two, rtol=1e-5, atol=1e-5, equal_nan=True) if one.dtype.kind == "f" else (one == two).all()
        )
    if isinstance(one, list):
        return len(one) == len(two) and all(equal(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def compare(one: list[tuple[str, Any]], two: list[tuple[str, Any]]) -> None:
    """Both saw the same."""
    for i, (a, b) in enumerate(zip(one, two, strict=False)):
        assert a[0] == b[0], (i, a[0], b[0])
        assert equal(a[1], b[1]), (i, a, b)
    assert len(one) == len(two)
