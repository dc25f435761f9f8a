"""Each kernel beside its definition: what `keyformer.selftest` runs. A new kernel is a new entry of CHECKS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..policies import Keyformer, KeyformerProxy, Policy
from ..ranking import rank_rows
from . import decode
from .build import THREADS, build
from .decode_cases import CASES, QUICK, SIZES, Case, make
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
    step, asked = make(case)
    kernel = build(back_end, "keyformer_decode", decode.INPUTS, decode.OUTPUTS, decode.SOURCE, decode.HEADER)
    got = decode.decode_kernel(kernel, THREADS[back_end], case.policy, case.layer, step, asked)
    with mx.stream(mx.cpu):
        want = decode.decode_ops(case.policy, case.layer, step, asked)
        ranks = _ranks(case, step, want.scores)
    assert got.free is not None and want.free is not None
    free, expected = np.array(got.free), np.array(want.free)
    worst, wrong, differing, near = 0.0, "", 0, 0
    pairs = [("score", got.scores, want.scores)] if case.policy.attention != "none" else []
    if got.masses is not None and want.masses is not None:
        pairs.append(("mass", got.masses, want.masses))
    for b, h in np.ndindex(*step.slot.shape[:2]):
        where = f"seed {case.seed}, sequence {b}, KV head {h}"
        rows = step.rows[b]
        for what, one, two in pairs:
            mine, right = np.array(one[b, h, :rows]), np.array(two[b, h, :rows])
            far = difference(mine, right)
            worst = max(worst, float(far.max()))
            if far.max() > ALLOWED and not wrong:
                at = tuple(int(i) for i in np.argwhere(far > ALLOWED)[0])
                wrong = f"{where}, slot {at[0]}: {what} {mine[at]!s}, expected {right[at]!s}"
        freed, lowest = int(free[b, h, 0]), int(expected[b, h, 0])
        if freed != lowest:
            differing += 1
            rank = ranks[b, h]
            there = 0 <= freed < rows
            exact = case.tie or case.policy.attention == case.policy.noise == "none" or not math.isfinite(rank[lowest])
            if there and not exact and rank[freed] - rank[lowest] < NEAR * max(1.0, abs(rank[lowest])):
                near += 1
            elif not wrong:
                shown = f"rank {rank[freed]!s}" if there else f"of {rows} rows"
                wrong = f"{where}: freed slot {freed} ({shown}), expected slot {lowest} (rank {rank[lowest]!s})"
    return Compared(step.slot.size, worst, differing, near, wrong)


def _ranks(case: Case, step: decode.Step, scores: mx.array) -> np.ndarray:
    """What the definition compares, protected rows at infinity."""
    n = max(step.rows)
    stored = mx.arange(n, dtype=mx.int32) < mx.array(step.rows, mx.int32)[:, None, None]
    offsets, recents = (mx.array(numbers, mx.int32)[:, None, None] for numbers in (step.offsets, step.recents))
    taus = mx.array(step.taus, mx.float32)[:, None, None]
    positions = step.positions[..., :n]
    rank = rank_rows(case.policy, case.layer, scores[..., :n], positions, step.keys, stored, offsets, taus)
    protected = (positions < case.policy.n_sink) | (positions >= offsets - recents)
    return np.array(mx.where(protected, mx.inf, rank))


def difference(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Element by element, relative where numbers are above 1; infinite where only one of them is a number."""
    with np.errstate(invalid="ignore"):
        far = np.abs(got - want) / np.maximum(1.0, np.abs(want))
    far = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, far)
    return np.where(np.isnan(far), np.inf, far)


def time_decode(case: Case, back_end: str, count: int) -> Timing:
    """The decode kernel on a full cache; the keys come from memory, not from a cache of the chip."""
    step, asked = make(case)
    kernel = build(back_end, "keyformer_decode", decode.INPUTS, decode.OUTPUTS, decode.SOURCE, decode.HEADER)
    buffers = copies(step.keys if step.buffer is None else step.buffer, 2 * count)

    def one(i: int, scores: mx.array) -> mx.array:
        now = replace(step, buffer=buffers[i % len(buffers)], scores=scores)
        return decode.decode_kernel(kernel, THREADS[back_end], case.policy, case.layer, now, asked).scores

    return Timing(seconds_each(one, step.scores, count), step.keys.nbytes)


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

CHECKS: tuple[Check, ...] = (
    Check(
        "decode",
        CASES | SIZES,
        QUICK,
        compare_decode,
        {name: partial(time_decode, case) for name, case in _TIMED.items()},
    ),
)
