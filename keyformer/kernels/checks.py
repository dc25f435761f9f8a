"""Each kernel beside its definition: what `keyformer.selftest` runs. A new kernel is a new entry of CHECKS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..eviction import walk_mlx
from ..policies import Keyformer, KeyformerProxy, Policy
from ..ranking import rank_rows
from ..scores import attention_mass
from . import decode, insert, prefill, prefill_cases, walk, walk_cases
from .build import THREADS, build
from .decode_cases import CASES, QUICK, SIZES, Case, Given, make
from .measure import copies, seconds_each

ALLOWED = 1e-5  # of a score, relative above 1: float32 sums in another order, exponentials of another library
NEAR = 1e-6  # ranks closer than this may change places


@dataclass(frozen=True)
class Compared:
    """One case, computed by a kernel and by its definition.

    Attributes:
        rows: choices compared: sequences times KV heads.
        worst: the largest difference of a number, relative where it is above 1.
        differing: choices that differ.
        near: how many of those are between ranks closer than NEAR.
        wrong: the first row that is wrong, in words; empty where all is well.
    """

    rows: int
    worst: float
    differing: int
    near: int
    wrong: str


@dataclass(frozen=True)
class Timing:
    """GPU seconds of one dispatch, and the bytes of keys that it has to read."""

    seconds: float
    bytes: int


@dataclass(frozen=True)
class Check:
    """One kernel's part of the self-test.

    Attributes:
        name: of the kernel.
        cases: name -> case.
        quick: names of those that --quick runs.
        compare: computes a case both ways, for a back-end.
        timings: what is timed -> how, for a back-end and a number of dispatches.
    """

    name: str
    cases: Mapping[str, Any]
    quick: tuple[str, ...]
    compare: Callable[[str, Any], Compared]
    timings: Mapping[str, Callable[[str, int], Timing]]


# -- the decode kernel -------------------------------------------------------------------------------------------------


def compare_decode(back_end: str, case: Case) -> Compared:
    """A decode step of `decode_kernel` beside `decode_ops`."""
    given = make(case)
    step = given.reads, given.rows, given.now
    kernel = decode.decode_source(back_end, len(given.reads))
    got = decode.decode_kernel(kernel, THREADS[back_end], case.policy, *step)
    with mx.stream(mx.cpu):
        want = decode.decode_ops(case.policy, *step)
        ranks = _ranks(case, given, want)
    slot, expected = np.array(got.slot), np.array(want.slot)
    worst, wrong, differing, near = 0.0, "", 0, 0
    pairs = [("position", got.positions, want.positions)]
    if case.policy.attention != "none":
        pairs.append(("score", got.scores, want.scores))
    if got.masses is not None and want.masses is not None:
        pairs.append(("mass", got.masses, want.masses))
    for i, h in np.ndindex(*slot.shape[:2]):
        b, layer = i % len(case.rows), case.layers[i // len(case.rows)]
        where = f"seed {case.seed}, layer {layer}, sequence {b}, KV head {h}"
        rows = given.now.rows[b]
        for what, one, two in pairs:
            mine, right = np.array(one[i, h, :rows]), np.array(two[i, h, :rows])
            far = difference(mine, right)
            worst = max(worst, float(far.max()))
            if far.max() > ALLOWED and not wrong:
                at = tuple(int(x) for x in np.argwhere(far > ALLOWED)[0])
                wrong = f"{where}, slot {at[0]}: {what} {mine[at]!s}, expected {right[at]!s}"
        chosen, lowest = int(slot[i, h, 0, 0]), int(expected[i, h, 0, 0])
        if chosen != lowest:
            differing += 1
            there = 0 <= chosen < rows and lowest < rows
            exact = case.tie or case.policy.attention == case.policy.noise == "none"
            rank = ranks[i, h]
            exact = exact or not there or not math.isfinite(rank[lowest])
            if not exact and rank[chosen] - rank[lowest] < NEAR * max(1.0, abs(rank[lowest])):
                near += 1
            elif not wrong:
                shown = f"rank {rank[chosen]!s}" if there else f"of {rows} rows"
                wrong = f"{where}: next slot {chosen} ({shown}), expected {lowest}"
                wrong += f" (rank {rank[lowest]!s})" if there else ""
    return Compared(slot.size, worst, differing, near, wrong)


def _ranks(case: Case, given: Given, after: decode.Rows) -> np.ndarray:
    """What the definition compares, protected rows at infinity."""
    now, n, B = given.now, max(given.now.rows), len(given.now.rows)
    stored = mx.arange(n, dtype=mx.int32) < mx.array(now.rows, mx.int32)[:, None, None]
    offsets, recents = (mx.array(numbers, mx.int32)[:, None, None] for numbers in (now.offsets, now.recents))
    taus = mx.array(now.taus, mx.float32)[:, None, None]
    each = []
    for i, read in enumerate(given.reads):
        rows = decode.rows_of(after, i * B, B)
        scores, positions = rows.scores[..., :n], rows.positions[..., :n]
        rank = rank_rows(case.policy, read.layer, scores, positions, read.keys, stored, offsets, taus)
        protected = (positions < case.policy.n_sink) | (positions >= offsets - recents)
        each.append(mx.where(protected, mx.inf, rank))
    return np.array(mx.concatenate(each))


def difference(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Element by element, relative where numbers are above 1; infinite where only one of them is a number."""
    with np.errstate(invalid="ignore"):
        far = np.abs(got - want) / np.maximum(1.0, np.abs(want))
    far = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, far)
    return np.where(np.isnan(far), np.inf, far)


def time_decode(case: Case, back_end: str, count: int) -> Timing:
    """The decode kernel on a full cache; the keys come from memory, not from a cache of the chip."""
    given = make(case)
    (read,), rows = given.reads, given.rows
    kernel = decode.decode_source(back_end, 1)
    buffers = copies(read.keys if read.buffer is None else read.buffer, 2 * count)

    def one(i: int, scores: mx.array) -> mx.array:
        reads = [read._replace(buffer=buffers[i % len(buffers)])]
        before = replace(rows, scores=scores)
        return decode.decode_kernel(kernel, THREADS[back_end], case.policy, reads, before, given.now).scores

    return Timing(seconds_each(one, rows.scores, count), read.keys.nbytes)


def _timed(n: int, D: int, policy: Policy, group: int) -> Case:
    return Case(policy, rows=(n,), recents=(n // 4,), heads=8, group=group, size=D, spare=0, dtype=mx.float16, seen=n)


_TIMED = {
    f"{name}, 8 x {n} x {D} float16": _timed(n, D, policy, group)
    for n, D in ((512, 64), (1024, 128), (4096, 128))
    for name, policy, group in (
        ("keyformer_proxy", KeyformerProxy(), 1),
        ("keyformer, 4 queries a head", Keyformer(), 4),
    )
}

# -- the prefill kernel ------------------------------------------------------------------------------------------------


def compare_prefill(back_end: str, case: prefill_cases.Case) -> Compared:
    """A prompt chunk through `mass_kernel` beside `attention_mass`, a query at a time."""
    call = prefill_cases.make(case)
    got = _prefill_mass(back_end, call)
    rest: dict[str, Any] = {"noise": call.noise, "tau": call.tau, "weight": call.weight, "sinks": call.sinks}
    with mx.stream(mx.cpu):
        want = attention_mass(
            call.queries,
            call.keys[:, :, : call.n],
            call.scale,
            "causal" if call.causal else None,
            usable=call.usable,
            soft_cap=call.soft_cap,
            tile_bytes=1,
            **rest,
        )
    mine, right = np.array(got), np.array(want)
    far = difference(mine, right)
    wrong = ""
    if far.max() > ALLOWED:
        b, h, j = (int(i) for i in np.argwhere(far > ALLOWED)[0])
        wrong = f"seed {case.seed}, sequence {b}, KV head {h}, row {j}: mass {mine[b, h, j]!s}, expected "
        wrong += str(right[b, h, j])
    return Compared(case.batch * case.heads, float(far.max()), 0, 0, wrong)


def _prefill_mass(back_end: str, call: prefill.Call) -> mx.array:
    tiles = prefill._tiles(back_end, call.keys.dtype, call.keys.shape[3])
    headers = prefill._headers(back_end, tiles)
    kernel = build(back_end, "keyformer_prefill", prefill.INPUTS, prefill.OUTPUTS, prefill.SOURCE, *headers)
    return prefill.mass_kernel(kernel, tiles, call)


def time_prefill(case: prefill_cases.Case, back_end: str, count: int) -> Timing:
    """The mass of a whole chunk; the queries of one follow from the mass of the one before."""
    call = prefill_cases.make(case)
    usable = mx.ones(call.usable.shape, mx.bool_)
    keys = copies(call.keys, 2)

    def one(i: int, mass: mx.array) -> mx.array:
        queries = call.queries + (0 * mass[:1, :1, :1, None]).astype(call.queries.dtype)
        return _prefill_mass(back_end, replace(call, keys=keys[i % len(keys)], queries=queries, usable=usable))

    start = mx.zeros((case.batch, case.heads, case.rows))
    return Timing(seconds_each(one, start, max(count // 12, 2)), call.keys.nbytes)


# -- the walk and the insertion ----------------------------------------------------------------------------------------


def compare_walk(back_end: str, case: walk_cases.Case) -> Compared:
    """A block of new tokens through `walk_kernel` beside `walk_mlx`."""
    block = walk_cases.make(case)
    limits = case.budget, case.n_sink, case.recent
    arguments = block.stored, block.new, block.scores, *limits, block.gumbel, block.taus
    slots = min(case.prior + case.tokens, case.budget)
    kernel = build(back_end, "keyformer_walk", walk.INPUTS, walk.OUTPUTS, walk.SOURCE, walk.HEADER)
    tile = walk_cases.tile_bytes(case)
    index, scores = (
        np.array(a) for a in walk.walk_kernel(kernel, walk._threads(back_end, slots), *arguments, tile_bytes=tile)
    )
    with mx.stream(mx.cpu):
        want_index, want_scores = (np.array(a) for a in walk_mlx(*arguments))
    worst, wrong, differing, near = 0.0, "", 0, 0
    for r in range(case.rows):
        if (index[r] == want_index[r]).all():
            far = difference(scores[r], want_scores[r])
            worst = max(worst, float(far.max()))
            if far.max() > ALLOWED and not wrong:
                j = int(np.argmax(far > ALLOWED))
                wrong = f"seed {case.seed}, head {r}, column {index[r, j]}: score {scores[r, j]!s}, expected "
                wrong += str(want_scores[r, j])
            continue
        differing += 1
        if not case.tie and _closest(case, block, r) < NEAR:
            near += 1
        elif not wrong:
            j = int((index[r] != want_index[r]).argmax())
            wrong = f"seed {case.seed}, head {r}: kept column {index[r, j]}, expected {want_index[r, j]}"
    return Compared(case.rows, worst, differing, near, wrong)


def _closest(case: walk_cases.Case, block: walk_cases.Block, r: int) -> float:
    """In float64: how close the two lowest ranks of any of a head's decisions were."""
    keys = np.concatenate([np.array(a[r].astype(mx.float32), np.float64) for a in (block.stored, block.new)])
    scores = np.array(block.scores[r], np.float64)
    noise = None if block.gumbel is None else np.array(block.gumbel[r], np.float64)
    good, alive, closest = scores != -math.inf, list(range(case.prior)), math.inf
    if case.prior == 0 and good[0]:
        scores[0] = 1.0
    for here, tau in enumerate(block.taus, case.prior):
        rows = [j for j in alive if good[j]]
        if good[here] and rows:
            logits = keys[rows] @ keys[here] / math.sqrt(keys.shape[1])
            weights = np.exp(logits - logits.max())
            scores[rows] += weights / weights.sum()
        alive.append(here)
        if len(alive) > case.budget:
            free = [j for j in alive if case.n_sink <= j <= here - case.recent]
            rank = scores[free] + (0.0 if noise is None else tau * noise[free])
            rank = np.where(np.isnan(rank), -math.inf, rank)
            low = np.sort(rank)[:2]
            if len(low) == 2 and np.isfinite(low).all():
                closest = min(closest, float((low[1] - low[0]) / max(1.0, abs(low[0]))))
            alive.remove(free[int(rank.argmin())])
    return closest


def time_walk(case: walk_cases.Case, back_end: str, count: int) -> Timing:
    """A block into full rows; each begins with the scores that the one before it left."""
    block = walk_cases.make(case)
    kernel = build(back_end, "keyformer_walk", walk.INPUTS, walk.OUTPUTS, walk.SOURCE, walk.HEADER)
    threads, limits = walk._threads(back_end, case.budget), (case.budget, case.n_sink, case.recent)

    def one(i: int, kept: mx.array) -> mx.array:
        scores = mx.concatenate([kept, block.scores[:, case.prior :]], axis=1)
        return walk.walk_kernel(kernel, threads, block.stored, block.new, scores, *limits, block.gumbel, block.taus)[1]

    seconds = seconds_each(one, block.scores[:, : case.prior], max(count // 12, 2))
    return Timing(seconds, (case.prior + case.tokens) * case.rows * case.size * block.new.dtype.size)


def compare_insert(back_end: str, case: walk_cases.RowCase) -> Compared:
    """One new row through `insert_kernel` (or an eviction through `evict_kernel`) beside its array operations."""
    rows, new, limits = walk_cases.make_row(case)
    kernels = insert._kernels(back_end)
    arrival = rows, new, case.token, case.noise_at, case.position
    if case.evicts:
        got, index = insert.evict_kernel(kernels[1], rows, limits, case.tau)
    else:
        got, index = insert.insert_kernel(kernels, *arrival, limits, case.tau)
    mx.eval(got, index)
    with mx.stream(mx.cpu):
        if case.evicts:
            joined = rows
            want, want_index = insert.evict_ops(rows, limits, case.tau)
        else:
            joined, _ = insert.insert_ops(*arrival, limits._replace(budget=1 << 30), case.tau)
            want, want_index = insert.insert_ops(*arrival, limits, case.tau)
        rank = np.array(joined.scores + case.tau * joined.gumbel)
    mine, right = np.array(index), np.array(want_index)
    everything = np.arange(joined.scores.shape[1])
    worst, wrong, differing, near = 0.0, "", 0, 0
    for r in range(case.walk.rows):
        where = f"seed {case.walk.seed}, head {r}"
        if (mine[r] != right[r]).any():
            differing += 1
            gone, lowest = (np.setdiff1d(everything, kept[r]) for kept in (mine, right))
            if (
                not case.walk.tie
                and len(gone) == len(lowest) == 1
                and 0 <= rank[r, gone[0]] - rank[r, lowest[0]] < NEAR
            ):
                near += 1
            else:
                wrong = wrong or f"{where}: freed row {gone.tolist()}, expected {lowest.tolist()}"
            continue
        for name, one, two in zip(got._fields, got, want, strict=True):
            if one is None or two is None:
                continue
            allowed = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2}.get(one.dtype, ALLOWED)  # of keys that are turned
            far = difference(*(np.array(a[r].astype(mx.float32)) for a in (one, two)))
            worst = max(worst, float(far.max()) if allowed == ALLOWED else 0.0)
            if far.max() > allowed and not wrong:
                at = tuple(int(i) for i in np.argwhere(far > allowed)[0])
                wrong = f"{where}, {name} {at}: {one[r][at].item()}, expected {two[r][at].item()}"
    return Compared(case.walk.rows, worst, differing, near, wrong)


_A_CHUNK = prefill_cases.Case(
    heads=8, group=4, queries=2048, rows=4096, size=128, spare=0, dtype=mx.bfloat16, barred=0.0
)
_A_BLOCK = walk_cases.Case(8, 512, 512, 64, 512, 4, 128, dtype=mx.float16)

CHECKS: tuple[Check, ...] = (
    Check(
        "decode",
        CASES | SIZES,
        QUICK,
        compare_decode,
        {name: partial(time_decode, case) for name, case in _TIMED.items()},
    ),
    Check(
        "prefill",
        # of queries with logits beyond float32 the definition leaves out more than the kernel
        {name: case for name, case in prefill_cases.CASES.items() if not case.overflow},
        ("every axis differs", "bfloat16", "float16", "group of 3", "gumbel", "gaussian, frozen", "everything"),
        compare_prefill,
        {"a chunk, 8 x 4 x 2048 queries, 4096 rows of 128, bfloat16": partial(time_prefill, _A_CHUNK)},
    ),
    Check(
        "walk",
        walk_cases.CASES,
        ("noise", "no noise", "nothing stored", "in tiles", "bad keys", "ties", "bfloat16", "several rows a thread"),
        compare_walk,
        {"512 tokens, 8 x 512 x 64 float16": partial(time_walk, _A_BLOCK)},
    ),
    Check(
        "insert",
        walk_cases.ROW_CASES,
        ("noise", "turned", "odd sizes", "bad keys", "ties", "bfloat16, turned", "one eviction, turned"),
        compare_insert,
        {},
    ),
)
