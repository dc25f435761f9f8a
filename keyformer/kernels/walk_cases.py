"""Inputs for the kernels of walk and insertion, made from a seed, for the self-test and the tests.

Keys are bfloat16 numbers in whatever dtype they come, so that a product in a GPU's shorter formats is exact too. Arrays
are slices of larger ones that hold huge finite numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .insert import Arrivals, Limits, Rows


@dataclass(frozen=True)
class Case:
    """A block of `tokens` for `rows` heads with `prior` stored rows each. `bad` keys hold a NaN; `tie`: all keys are 0
    and scores equal; `shout`: every fifth new key is large, goes, and had most of the mass of those after it."""

    rows: int = 3
    prior: int = 50
    tokens: int = 71
    size: int = 12
    budget: int = 50
    n_sink: int = 2
    recent: int = 7
    noise: bool = True
    width: float = 1.0
    dtype: mx.Dtype = mx.float32
    bad: int = 0
    bad_token: bool = False  # the third new one alone
    tie: bool = False
    shout: float = 0.0
    overflow: bool = False
    nan_score: bool = False
    nan_key: bool = False  # in a row whose score does not say so: it takes no mass
    tile: int = 0  # tokens of a tile, 0: as many as there are
    seed: int = 0


CASES: dict[str, Case] = {
    "noise": Case(),
    "no noise": Case(noise=False),
    "no recent rows": Case(recent=0, noise=False),
    "no recent rows, noise": Case(recent=0),
    "no sinks": Case(n_sink=0),
    "nothing stored": Case(prior=0, budget=40),
    "nothing stored, no noise": Case(prior=0, budget=40, noise=False, recent=0, n_sink=0),
    "one row may go": Case(n_sink=20, recent=29),
    "fewer stored than the budget": Case(prior=21),
    "never over the budget": Case(prior=11, tokens=30),
    "one token": Case(tokens=1),
    "one token, within the budget": Case(tokens=1, prior=13),
    "the first token of all": Case(rows=2, tokens=1, prior=0),
    "two tokens": Case(rows=1, tokens=2, prior=0, size=3),
    "three tokens": Case(rows=1, tokens=3, prior=2, budget=3, n_sink=0, recent=0, size=5),
    "a budget of one": Case(rows=1, tokens=40, prior=1, budget=1, n_sink=0, recent=0, size=5),
    "one head": Case(rows=1, size=7),
    "many heads": Case(rows=37, tokens=19, prior=15, budget=15, n_sink=1, recent=3, size=5),
    "several rows a thread": Case(prior=300, budget=300, tokens=120, recent=60, rows=2, size=8),
    "several rows a thread, from nothing": Case(prior=0, budget=250, tokens=310, recent=20, rows=2, size=8),
    "in tiles": Case(tile=16),
    "in tiles of one": Case(tile=1, tokens=23),
    "in tiles, from nothing": Case(tile=9, prior=0, budget=31),
    "bad keys": Case(bad=5),
    "bad keys, nothing stored": Case(bad=5, prior=0, noise=False, recent=0),
    "bad keys all along": Case(bad=40, tokens=20, noise=False, recent=0),
    "bad keys, in tiles": Case(bad=5, tile=11),
    "a score that is no number": Case(nan_score=True),
    "a logit that is no number": Case(nan_key=True, noise=False),
    "ties": Case(tie=True, noise=False),
    "ties, no recent rows": Case(tie=True, noise=False, recent=0, n_sink=0),
    "ties among several rows a thread": Case(tie=True, noise=False, prior=300, budget=300, tokens=40, rows=2, size=8),
    "logits far apart": Case(width=16.0, size=4, noise=False, recent=3),
    "logits far apart, noise": Case(width=16.0, size=4),
    "rows that took most of the mass go": Case(shout=25.0, size=4, noise=False, recent=0, budget=20, prior=20),
    "rows far above all others go": Case(shout=400.0, size=4, noise=False, recent=0, budget=20, prior=20),
    "logits leave float32": Case(overflow=True, noise=False),
    "float16": Case(dtype=mx.float16, size=64),
    "bfloat16": Case(dtype=mx.bfloat16, size=64),
}


@dataclass(frozen=True)
class Block:
    """The arguments of `walk_on_device`."""

    stored: mx.array
    new: mx.array
    scores: mx.array
    gumbel: mx.array | None
    taus: list[float]


def tile_bytes(case: Case) -> int:
    """The bound on logits that makes tiles of `case.tile` tokens."""
    slots = min(case.prior + case.tokens, case.budget)
    return 8 * case.rows * case.tile * (slots + case.tile) if case.tile else 1 << 28


def _slice_of_larger(a: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """`a` [R, n, ...] as a slice of an array with more rows, which win any comparison."""
    spare = np.full((a.shape[0], 3, *a.shape[2:]), 6e4, np.float32)
    return mx.array(np.concatenate([a.astype(np.float32), spare], axis=1)).astype(dtype)[:, : a.shape[1]]


def _numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.array(mx.array(rng.normal(size=shape).astype(np.float32)).astype(mx.bfloat16).astype(mx.float32))


def make(case: Case) -> Block:
    """The same case makes the same numbers."""
    rng = np.random.default_rng(500 + case.seed)
    n, m = case.prior + case.tokens, case.prior
    keys = _numbers(rng, case.rows, n, case.size) * np.float32(0 if case.tie else case.width)
    if case.shout:
        keys[:, m + 2 :: 5] = 0.0
        keys[:, m + 2 :: 5, 0] = case.shout
    if case.overflow:
        keys[0, 5::9] = 2e19
    scores = np.where(case.tie, 0.25, rng.random((case.rows, n)) * 3).astype(np.float32)
    scores[:, m:] = 0.0
    if case.nan_score:
        scores[:, [m // 2, m // 3]] = math.nan
    if case.nan_key:
        keys[:, m // 2, 1] = math.nan
    if case.bad:
        for r in range(case.rows):
            spoilt = rng.permutation(n)[: case.bad]
            keys[r, spoilt, 1] = rng.choice([math.nan, math.inf, -math.inf], case.bad)
            scores[r, spoilt] = -math.inf
    if case.bad_token:
        keys[:, m + 2, 3], scores[:, m + 2] = math.inf, -math.inf
    if case.bad and m == 0:
        keys[0, 0, 0], scores[0, 0] = math.nan, -math.inf
    return Block(
        _slice_of_larger(keys[:, :m], case.dtype),
        _slice_of_larger(keys[:, m:], case.dtype),
        _slice_of_larger(scores, mx.float32),
        _slice_of_larger(rng.gumbel(size=(case.rows, n)), mx.float32) if case.noise else None,
        [0.2 + 0.9 * (t % 7) / 7 for t in range(case.tokens)],
    )


# -- one new row -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowCase:
    """Row `token` of `tokens` joins `prior` rows; `walk` makes the keys and scores. `turns`: "contiguous"."""

    walk: Case = Case(tokens=5)
    token: int = 2
    values: int = 20
    values_dtype: mx.Dtype | None = None  # where it is not that of the keys
    noise_at: int = 7
    position: int = 400
    tau: float = 0.8
    turns: bool = False
    evicts: bool = False  # the stored rows alone: the last of them is the new one


ROW_CASES: dict[str, RowCase] = {
    "noise": RowCase(tau=0.25),
    "no noise": RowCase(tau=0.0),
    "no recent rows": RowCase(Case(tokens=5, recent=0), tau=0.0),
    "a new row that goes": RowCase(Case(tokens=5, recent=0, n_sink=49), tau=0.0),
    "within the budget": RowCase(Case(tokens=5, prior=40)),
    "within the budget, turned": RowCase(Case(tokens=5, prior=40), turns=True),
    "turned": RowCase(turns=True),
    "turned, odd size": RowCase(Case(tokens=5, size=9), turns=True, values=7),
    "size of one, turned": RowCase(Case(tokens=5, size=1), turns=True, values=9),
    "odd sizes": RowCase(Case(tokens=5, size=9), values=7),
    "float16, turned": RowCase(Case(tokens=5, size=64, dtype=mx.float16), turns=True),
    "bfloat16, turned": RowCase(Case(tokens=5, size=64, dtype=mx.bfloat16), turns=True),
    "bfloat16": RowCase(Case(tokens=5, size=64, dtype=mx.bfloat16)),
    "values of another dtype": RowCase(Case(tokens=5, dtype=mx.float16), values_dtype=mx.float32),
    "one head, one stored row": RowCase(Case(rows=1, tokens=9, prior=1, budget=3, n_sink=0, recent=0)),
    "several rows a thread": RowCase(Case(tokens=5, prior=300, budget=300, rows=2, recent=60)),
    "many heads": RowCase(Case(rows=301, tokens=2, prior=40, budget=40, size=4), token=1, values=4),
    "bad keys": RowCase(Case(tokens=5, bad=5, seed=1)),
    "a bad new key": RowCase(Case(tokens=5, bad_token=True), tau=0.0),
    "bad keys, turned": RowCase(Case(tokens=5, bad=5, seed=1), turns=True),
    "a score that is no number": RowCase(Case(tokens=5, nan_score=True)),
    "a logit that is no number": RowCase(Case(tokens=5, nan_key=True), tau=0.0),
    "ties": RowCase(Case(tokens=5, tie=True), tau=0.0),
    "ties among several rows a thread": RowCase(Case(tokens=5, tie=True, prior=300, budget=300), tau=0.0),
    "logits far apart": RowCase(Case(tokens=5, width=16.0, size=4), tau=0.0),
    "logits leave float32": RowCase(Case(tokens=5, overflow=True), token=0, tau=0.0),
    "one eviction": RowCase(evicts=True),
    "one eviction, turned": RowCase(turns=True, evicts=True),
    "one eviction, ties": RowCase(Case(tokens=5, tie=True), tau=0.0, evicts=True),
    "one eviction, float16, turned": RowCase(Case(tokens=5, size=64, dtype=mx.float16), turns=True, evicts=True),
}


def make_row(case: RowCase) -> tuple[Rows, Arrivals, Limits]:
    """Rows, what joins them, and the rule."""
    walk, rng = case.walk, np.random.default_rng(900 + case.walk.seed)
    block = make(walk)
    R, m, S, D = walk.rows, walk.prior, walk.tokens, walk.size
    kind = case.values_dtype or walk.dtype
    values = [_slice_of_larger(_numbers(rng, R, n, case.values), kind) for n in (m, S)]
    plain = [_slice_of_larger(_numbers(rng, R, n, D), mx.float32) for n in (m, S)]
    # a third of the rows are where they will be labelled, and are not to be turned
    positions = np.where(np.arange(m) < m // 3, np.arange(m), np.arange(m) + 5 + m)
    scores = block.scores[:, :m]
    rows = Rows(
        block.stored,
        values[0],
        scores,
        _slice_of_larger(rng.gumbel(size=(R, m)), mx.float32),
        mx.array(np.tile(positions.astype(np.int32), (R, 1))),
        plain[0] if case.turns else None,
    )
    noise = _slice_of_larger(rng.gumbel(size=(R, case.noise_at + 3)), mx.float32)
    new = Arrivals(block.new, values[1], noise, plain[1] if case.turns else None)
    budget = m - 1 if case.evicts else walk.budget
    return rows, new, Limits(budget, walk.n_sink, walk.recent, 50.0)
