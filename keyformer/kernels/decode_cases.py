"""Inputs for kernels, made from a seed: decode steps of every shape and policy, for the self-test and the tests.

Rows past a sequence's own hold huge finite numbers, positions and scores that would win any comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..policies import H2O, Keyformer, KeyformerProxy, Policy, Random, Streaming, Tova, Window
from ..scores import Asked
from .decode import Now, Read, Rows


@dataclass(frozen=True)
class Case:
    """One step. `rows` of each sequence; `bad` rows have a key with a NaN; `tie`: all keys are 0 and scores equal."""

    policy: Policy
    rows: tuple[int, ...] = (40, 37)
    heads: int = 3
    group: int = 2
    size: int = 24
    spare: int = 5  # capacity beyond the longest sequence
    layers: tuple[int, ...] = (3,)
    dtype: mx.Dtype = mx.float32
    asked: mx.Dtype | None = None  # of queries and sinks, where it is not that of the keys
    recents: tuple[int, ...] = (6, 0)
    seen: int = 90  # tokens beyond the rows
    soft_cap: float | None = None
    sinks: bool = False
    sink_size: float = 1.0
    scale: float | None = None
    width: float = 1.0  # of the queries
    bad: bool = False
    broken: tuple[int, ...] = ()  # components of every new key that are NaN
    deaf: bool = False  # a query head with a NaN
    overflow: bool = False  # a logit that leaves float32
    tie: bool = False
    copied: bool = False  # keys as an array of their own, as turned ones are
    below: int = 0  # of the sequences, how many at the end are below their budget, by one more each
    seed: int = 0


POLICIES: dict[str, Policy] = {
    "window": Window(n_sink=1),
    "streaming": Streaming(),
    "random": Random(seed=2**40 + 5),
    "h2o": H2O(n_sink=2),
    "h2o, softmax(x/T)": H2O(tau_init=0.6, tau_end=2.0, anneal_steps=200, n_sink=1),
    "h2o, per query": H2O(normalize="count"),
    "h2o, window": H2O(window=3),
    "h2o, window, per query": H2O(window=7, normalize="count"),
    "h2o, decay": H2O(decay=0.8, normalize="count"),
    "h2o, slow decay": H2O(decay=0.99999, normalize="count"),
    "h2o, decay, not per query": H2O(decay=0.5),
    "h2o, smallest decay": H2O(decay=1e-40),
    "tova": Tova(),
    "keyformer": Keyformer(seed=7),
    "keyformer, frozen": Keyformer(redraw=False, tau_init=0.7, tau_end=1.9, seed=2**63 + 11),
    "keyformer, window": Keyformer(window=4),
    "keyformer, gaussian": Keyformer(distribution="gaussian", seed=3),
    "keyformer, gaussian, frozen": Keyformer(distribution="gaussian", redraw=False),
    "keyformer, constant": Keyformer(distribution="constant"),
    "keyformer, no noise": Keyformer(noise="none"),
    "query, select": Policy(noise="select", tau_init=0.5, tau_end=3.0, anneal_steps=300),
    "query, select, gaussian": Policy(noise="select", distribution="gaussian", normalize="count"),
    "proxy": KeyformerProxy(seed=9),
    "proxy, no noise": KeyformerProxy(tau_init=0, tau_end=0),
    "proxy, gaussian": KeyformerProxy(distribution="gaussian", tau_init=0.3, tau_end=0.3),
}

_OF_QUERIES = POLICIES["keyformer"]
CASES: dict[str, Case] = {name: Case(policy, seed=i) for i, (name, policy) in enumerate(POLICIES.items())} | {
    "one row of all": Case(POLICIES["proxy"], rows=(1, 1), seen=0, recents=(0, 0)),
    "one row, seen later": Case(POLICIES["proxy"], rows=(1, 2), seen=4, recents=(0, 0)),
    "one sequence": Case(_OF_QUERIES, rows=(51,), recents=(3,), heads=5, group=1, size=20),
    "one head": Case(_OF_QUERIES, rows=(7, 9, 1), recents=(0, 1, 0), heads=1, group=1, size=4, spare=0),
    "fewer than 8 of everything": Case(POLICIES["proxy"], rows=(3,), recents=(0,), heads=1, group=1, size=4, spare=0),
    "a simdgroup of rows": Case(_OF_QUERIES, rows=(32, 33), size=32, spare=0),
    "no room left": Case(POLICIES["h2o"], rows=(64, 64), spare=0),
    "sizes of 4 do not fill the lanes": Case(_OF_QUERIES, size=36),
    "odd group": Case(_OF_QUERIES, group=3, heads=2, size=16),
    "more heads than at once": Case(_OF_QUERIES, group=5, heads=2, size=12, sinks=True, soft_cap=4.0),
    "large heads": Case(POLICIES["h2o"], group=7, heads=1, size=192, rows=(45,), recents=(9,)),
    "several rows a thread": Case(_OF_QUERIES, rows=(200, 90, 131), recents=(5, 1, 0), heads=2, size=8),
    "many rows a thread": Case(POLICIES["h2o"], rows=(700,), recents=(50,), heads=1, group=4, size=8, seen=9),
    "many rows a thread, window": Case(POLICIES["h2o, window"], rows=(400, 3), recents=(9, 0), heads=1, size=4),
    "float16": Case(_OF_QUERIES, dtype=mx.float16, size=64),
    "bfloat16": Case(_OF_QUERIES, dtype=mx.bfloat16, size=64),
    "bfloat16, proxy": Case(POLICIES["proxy"], dtype=mx.bfloat16, size=48),
    "a window of bfloat16": Case(POLICIES["tova"], dtype=mx.bfloat16),
    "float32 queries, bfloat16 keys": Case(_OF_QUERIES, dtype=mx.bfloat16, asked=mx.float32, sinks=True),
    "bfloat16 queries, float32 keys": Case(_OF_QUERIES, asked=mx.bfloat16, sinks=True),
    "soft cap": Case(_OF_QUERIES, soft_cap=2.5, width=3.0),
    "sinks": Case(_OF_QUERIES, sinks=True),
    "sinks, temperature": Case(POLICIES["h2o, softmax(x/T)"], sinks=True),
    "sinks, constant noise": Case(POLICIES["keyformer, constant"], sinks=True),
    "a large sink": Case(POLICIES["h2o"], sinks=True, sink_size=90.0),
    "Gaussian tails": Case(POLICIES["proxy, gaussian"], rows=(1900,), recents=(9,), heads=2, size=4, seen=9),
    "scale": Case(POLICIES["h2o"], scale=0.05),
    "logits far apart": Case(POLICIES["h2o"], width=60.0),
    "bad keys": Case(POLICIES["h2o"], bad=True),
    "bad keys, noise": Case(POLICIES["query, select"], bad=True, recents=(0, 2)),
    "bad keys, proxy": Case(POLICIES["proxy"], bad=True, recents=(0, 0)),
    "bad keys, window": Case(POLICIES["window"], bad=True, recents=(0, 0)),
    "bad keys, last queries": Case(POLICIES["tova"], bad=True),
    "all keys are bad": Case(POLICIES["h2o"], rows=(3, 4), bad=True, broken=(0,), recents=(0, 0)),
    "a late NaN": Case(POLICIES["h2o"], broken=(23,), recents=(0, 0)),
    "a late NaN, proxy": Case(POLICIES["proxy"], broken=(22,)),
    "a deaf query": Case(_OF_QUERIES, deaf=True, sinks=True),
    "overflow": Case(POLICIES["h2o"], overflow=True),
    "one recent row": Case(POLICIES["proxy, no noise"], recents=(1, 1)),
    "ties": Case(POLICIES["h2o"], tie=True),
    "ties, window": Case(POLICIES["window"], tie=True, rows=(130, 77)),
    "ties, proxy": Case(POLICIES["proxy, no noise"], tie=True, rows=(130, 77)),
    "keys of their own": Case(_OF_QUERIES, copied=True),
    "keys of their own, proxy": Case(POLICIES["proxy"], copied=True),
    "everything is protected in a row below budget": Case(POLICIES["h2o"], rows=(40, 2), recents=(3, 5), below=1),
    "below the budget": Case(POLICIES["proxy"], below=2),
    "some below the budget": Case(POLICIES["h2o, window"], rows=(11, 37, 40), recents=(1, 2, 3), below=2),
    "two layers": Case(_OF_QUERIES, layers=(4, 9), soft_cap=3.0),
    "two layers of three sequences": Case(_OF_QUERIES, layers=(1, 2), rows=(9, 30, 21), recents=(1, 2, 3)),
    "three layers": Case(POLICIES["h2o, window"], layers=(0, 1, 2), sinks=True, group=3),
    "three layers, proxy": Case(POLICIES["proxy"], layers=(5, 2, 30), rows=(33, 70, 8), recents=(1, 0, 2), below=1),
    "three layers, keys of their own": Case(POLICIES["proxy"], layers=(0, 1, 2), copied=True, bad=True, recents=(0, 0)),
    "eight layers": Case(_OF_QUERIES, layers=tuple(range(8)), rows=(20,), recents=(3,), heads=2, size=8, sinks=True),
}


SIZES: dict[str, Case] = {
    f"{n} rows, {kind}": Case(POLICIES[kind], rows=(n, n - 1), recents=(n // 8, 0), heads=2, size=16, seed=n)
    for n in (2**e + d for e in (5, 6, 8, 9, 10) for d in (-1, 0, 1))
    for kind in ("keyformer", "proxy")
}

# of CASES and SIZES, for a quick look: what each of them has and no other
QUICK = (
    "keyformer",
    "keyformer, gaussian, frozen",
    "h2o, window, per query",
    "h2o, decay",
    "random",
    "query, select",
    "proxy",
    "odd group",
    "more heads than at once",
    "float16",
    "bfloat16, proxy",
    "bad keys",
    "ties, proxy",
    "overflow",
    "257 rows, keyformer",
    "1023 rows, proxy",
)


@dataclass(frozen=True)
class Given:
    """What the cache would hand over."""

    reads: list[Read]
    rows: Rows
    now: Now


def make(case: Case) -> Given:
    """The same case makes the same numbers."""
    p, B, H, n = case.policy, len(case.rows), case.heads, max(case.rows)
    N, capacity = len(case.layers) * B, n + case.spare
    rng = np.random.default_rng(1000 + case.seed)
    huge = 6e4 if case.dtype == mx.float16 else 3e38
    keys = rng.normal(size=(N, H, capacity, case.size)) * (0 if case.tie else 1)
    scores = np.where(case.tie, 0.25, rng.random((N, H, capacity)))
    masses = rng.random((N, H, capacity, p.window)) if p.window else None
    if masses is not None and case.tie:
        masses[:] = 0.25
    offsets = [r + case.seen for r in case.rows]
    positions = np.zeros((N, H, capacity), np.int32)
    slot = np.zeros((N, H, 1, 1), np.int32)
    for i, h in np.ndindex(N, H):
        rows, offset = case.rows[i % B], offsets[i % B]
        new = slot[i, h, 0, 0] = rng.integers(rows)
        others = rng.permutation(offset - 1)[: rows - 1]
        positions[i, h, :rows] = np.insert(others, new, offset - 1)
        if case.bad:
            spoilt = rng.permutation(rows)[:2]
            keys[i, h, spoilt, 1] = (math.nan, math.inf)
            scores[i, h, spoilt] = -math.inf
        if case.overflow and h == 0:
            keys[i, h, rows // 2] = 2e38
        keys[i, h, new, list(case.broken)] = math.nan
        keys[i, h, rows:] = huge
        # what the slot had before the token is no longer so
        for stale in (new, slice(rows, None)):
            scores[i, h, stale] = -1e30
            positions[i, h, stale] = 7
            if masses is not None:
                masses[i, h, stale] = 1e30
    reads = []
    buffers = mx.array(keys.astype(np.float32)).astype(case.dtype)
    for i, layer in enumerate(case.layers):
        buffer, at = buffers[i * B : i * B + B], mx.array(slot[i * B : i * B + B])
        buffer = mx.contiguous(buffer)
        asked = _ask(case, rng) if p.attention == "query" else None
        key = mx.take_along_axis(buffer, at, axis=2)
        first = buffer[:, :, :n]
        if case.copied:
            reads.append(Read(layer, mx.contiguous(first), None, key, asked))
        else:
            reads.append(Read(layer, first, buffer, key, asked))
    return Given(
        reads,
        Rows(
            mx.array(scores.astype(np.float32)),
            mx.array(positions),
            None if masses is None else mx.array(masses.astype(np.float32)),
            mx.array(slot),
        ),
        Now(
            rows=list(case.rows),
            offsets=offsets,
            recents=list(case.recents),
            taus=[p.tau_init + 0.15 * b for b in range(B)] if p.tau_init else [0.0] * B,
            budgets=[r - 1 if b < B - case.below else r + b - (B - case.below) for b, r in enumerate(case.rows)],
        ),
    )


def _ask(case: Case, rng: np.random.Generator) -> Asked:
    queries = rng.normal(size=(len(case.rows), case.heads * case.group, 1, case.size)) * case.width
    if case.overflow:
        queries = np.abs(queries) + 1
    if case.deaf:
        queries[:, 1, 0, case.size // 2] = math.nan
    dtype = case.dtype if case.asked is None else case.asked
    scale = case.size**-0.5 if case.scale is None else case.scale
    sinks = None
    if case.sinks:
        sinks = mx.array(rng.normal(size=case.heads * case.group) * case.sink_size, mx.float32).astype(dtype)
    return Asked(mx.array(queries, mx.float32).astype(dtype), scale, None, sinks, case.soft_cap)
