"""Kernels beside the same work in array operations, by GPU time."""

from __future__ import annotations

import csv
import io
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from keyformer import KeyformerProxy
from keyformer.eviction import walk_mlx
from keyformer.kernels import decode
from keyformer.kernels.build import backend
from keyformer.kernels.checks import time_decode
from keyformer.kernels.decode_cases import Case, make
from keyformer.kernels.measure import Chain, copies, copy_bandwidth, seconds_each

from .harness import Line, skipped

try:
    from keyformer.kernels.walk import walk_on_device
except ImportError:
    walk_on_device = None  # type: ignore[assignment]

HEADS = 8


def decode_case(n: int, D: int) -> Case:
    """A full cache of 8 KV heads; the proxy, whose key is its query."""
    return Case(KeyformerProxy(), (n,), HEADS, 1, D, spare=0, dtype=mx.float16, recents=(n // 4,), seen=n)


def composed(case: Case, count: int) -> tuple[Chain, mx.array]:
    """The definition through mx.compile, as a chain of `count` steps on other keys, and the scores it begins with."""
    given = make(case)
    (read,), rows = given.reads, given.rows
    keys = copies(read.keys, count)

    @mx.compile
    def core(keys: mx.array, scores: mx.array, positions: mx.array, slot: mx.array) -> tuple[mx.array, mx.array]:
        before = decode.Rows(scores, positions, None, slot)
        after = decode.decode_ops(case.policy, [read._replace(keys=keys, buffer=None)], before, given.now)
        return after.scores, after.slot

    def one(i: int, scores: mx.array) -> mx.array:
        after, slot = core(keys[i % len(keys)], scores, rows.positions, rows.slot)
        return mx.depends([after], [slot])[0]

    return one, rows.scores


def decode_lines(sizes: list[tuple[int, int]], count: int, ncu: bool) -> Iterator[Line]:
    """One dispatch after another, each on other keys; under Nsight Compute too where `ncu` asks for it."""
    back_end = backend()
    bandwidth = copy_bandwidth(512 if count > 8 else 16)
    for n, D in sizes:
        case = decode_case(n, D)
        some = max(count // 4, 2)  # a dozen operations each
        ops = seconds_each(*composed(case, 2 * some), some)
        kernel = None if back_end is None else time_decode(case, back_end, count).seconds
        line: Line = {"rows": HEADS, "n": n, "D": D, "dtype": "float16", "composed us": ops * 1e6}
        line |= {"kernel us": None if kernel is None else kernel * 1e6, "kernel/composed": kernel and kernel / ops}
        line["keys at copy speed us"] = 1e6 * HEADS * n * D * 2 / bandwidth
        if ncu:
            under = {what: _under_ncu(what, n, D) for what in ("kernel", "composed")}
            line |= {f"ncu {what} us": took and took * 1e6 for what, took in under.items()}
        yield line


REPEATS = 8  # of what runs under Nsight Compute


def dispatch(what: str, n: int, D: int) -> None:
    """Runs under Nsight Compute: the kernel or the compiled definition, some times over."""
    case = decode_case(n, D)
    if what == "composed":
        one, scores = composed(case, 1)
        for i in range(REPEATS):
            scores = one(i, scores)
            mx.eval(scores)
        return
    given = make(case)
    for _ in range(REPEATS):
        mx.eval(decode.decode_step(case.policy, given.reads, given.rows, given.now).scores)


def _under_ncu(what: str, n: int, D: int) -> float | None:
    """Seconds of GPU time of one call, by a profiler's count of its kernels; None where there is none or it fails."""
    ncu = shutil.which("ncu")
    if ncu is None:
        skipped("GPU time by Nsight Compute: ncu is not on the path")
        return None
    command = [ncu, "--csv", "--metrics", "gpu__time_duration.sum", "--print-units", "base", "--clock-control", "none"]
    command += [sys.executable, "-m", "benchmarks.gpu", "--dispatch", f"{what},{n},{D}"]
    done = subprocess.run(command, env=os.environ | {"MLX_USE_CUDA_GRAPHS": "0"}, capture_output=True, text=True)
    try:
        return one_call(durations(done.stdout), "keyformer_decode" if what == "kernel" else "")
    except ValueError as error:
        skipped(f"{what} under ncu: {error}; exit code {done.returncode}: {done.stderr[-300:]}")
        return None


def durations(text: str) -> list[tuple[str, float]]:
    """(kernel, seconds) in the order of launches, from the CSV of ncu.

    Raises:
        ValueError: there is no such table.
    """
    start = text.find('"ID"')
    if start < 0:
        raise ValueError(f"no table in what ncu printed: {text[-300:]}")
    rows = csv.DictReader(io.StringIO(text[start:]))
    scale = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "s": 1.0, "second": 1.0}
    return [
        (row["Kernel Name"], float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]])
        for row in rows
        if row["Metric Name"] == "gpu__time_duration.sum"
    ]


def one_call(kernels: list[tuple[str, float]], name: str) -> float:
    """Seconds of one call: the median of the kernels of that name, or all of what repeats at the end, together.

    Raises:
        ValueError: nothing of that name, nothing that repeats.
    """
    if name:
        found = [seconds for kernel, seconds in kernels if name in kernel]
        if not found:
            raise ValueError(f"no kernel {name}")
        return statistics.median(found)
    times = REPEATS // 2
    for period in range(1, len(kernels) // times + 1):
        tail = [kernel for kernel, _ in kernels[-times * period :]]
        if tail == tail[:period] * times:
            return sum(seconds for _, seconds in kernels[-times * period :]) / times
    raise ValueError(f"{len(kernels)} kernels, and none repeat")


def walk_lines(rows: list[int], budgets: list[tuple[int, int]], tokens: int, ops_tokens: int) -> Iterator[Line]:
    """Microseconds per token of a block into full rows; the kernel's without what a call costs, whatever its length."""
    if walk_on_device is None:
        skipped("the walk's kernel: keyformer.kernels.walk is not importable")
    for R in rows:
        for budget, D in budgets:
            for noise in (False, True):
                line: Line = {"rows": R, "budget": budget, "D": D, "noise": noise, "tokens": tokens}
                ops = _walk_seconds(walk_mlx, R, budget, D, ops_tokens, noise) / ops_tokens
                line["array operations us"] = ops * 1e6
                took = None
                if walk_on_device is not None:
                    long, short = (_walk_seconds(walk_on_device, R, budget, D, n, noise) for n in (tokens, tokens // 4))
                    took = (long - short) / (tokens - tokens // 4)
                    line |= {"kernel us": took * 1e6, "call ms": long * 1e3, "operations/kernel": ops / took}
                yield line


def _walk_seconds(walk: Callable[..., Any], R: int, budget: int, D: int, tokens: int, noise: bool) -> float:
    stored, new = (mx.random.normal((R, n, D), dtype=mx.float16) for n in (budget, tokens))
    scores = mx.concatenate([mx.random.uniform(shape=(R, budget)) * 4, mx.zeros((R, tokens))], axis=1)
    gumbel = mx.random.gumbel((R, budget + tokens)) if noise else None
    arguments = (stored, new, scores, budget, 4, budget // 4, gumbel, [1.0] * tokens if noise else ())
    mx.eval(stored, new, scores, gumbel if noise else [])
    times = []
    for _ in range(4):
        began = time.perf_counter()
        mx.eval(walk(*arguments))
        times.append(time.perf_counter() - began)
    return min(times[1:])  # the first compiles
