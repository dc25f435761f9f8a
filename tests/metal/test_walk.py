"""The walk's and the insertion's Metal source, run on a CPU, against float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import BACKWARD, FORWARD, MetalKernel, run_sanitized
from mistakes import INSERT_MISTAKES, LOGIT_MISTAKES, WALK_MISTAKES, Mistake
from walk_cases import CASES, ROW_CASES, Case, RowCase, check, check_row, make, make_row, tile_bytes, truth

import keyformer
from keyformer import state
from keyformer.kernels import insert, walk
from keyformer.kernels.build import MOST_BYTES

pytestmark = pytest.mark.metal

SCHEDULES = (FORWARD, BACKWARD, 2, 3)
Pair = tuple[MetalKernel, MetalKernel]


def walk_kernel(source: str = walk.SOURCE, header: str = walk.HEADER) -> MetalKernel:
    return MetalKernel("keyformer_walk", walk.INPUTS, walk.OUTPUTS, source, header)


def insert_kernels(
    source: str = insert.SOURCE, header: str = insert.HEADER, logit_source: str = insert.LOGIT_SOURCE
) -> Pair:
    return (
        MetalKernel("keyformer_row_logits", insert.LOGIT_INPUTS, insert.LOGIT_OUTPUTS, logit_source, ""),
        MetalKernel("keyformer_insert", insert.INPUTS, insert.OUTPUTS, source, header),
    )


@pytest.fixture(scope="module")
def kernel() -> MetalKernel:
    return walk_kernel()


@pytest.fixture(scope="module")
def kernels() -> Pair:
    return insert_kernels()


def run(kernel: MetalKernel, case: Case, threads: int, schedule: int = FORWARD) -> int:
    block = make(case)
    kernel.schedule = schedule
    limits = case.budget, case.n_sink, case.recent
    index, scores = walk.walk_kernel(
        kernel, threads, block.stored, block.new, block.scores, *limits, block.gumbel, block.taus, tile_bytes(case)
    )
    return check(case, truth(case, block), index, scores)


def run_row(kernels: Pair, case: RowCase, threads: int, schedule: int = FORWARD, alone: bool = False) -> int:
    rows, new, limits = make_row(case)
    assert insert.unsupported(rows, new) is None
    for kernel in kernels:
        kernel.schedule = schedule
    if case.evicts:
        after, index = insert.evict_kernel(kernels[1], rows, limits, case.tau, threads)
    else:
        arrival = case.token, case.noise_at, case.position
        after, index = insert.insert_kernel(kernels, rows, new, *arrival, limits, case.tau, threads, alone)
    return check_row(case, rows, new, limits, after, index)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_walk_in_every_order(kernel: MetalKernel, case: Case) -> None:
    assert sum(run(kernel, case, 64, schedule) for schedule in SCHEDULES) == 0


@pytest.mark.parametrize("case", ROW_CASES.values(), ids=ROW_CASES)
def test_every_insertion_in_every_order(kernels: Pair, case: RowCase) -> None:
    ways = (False,) if case.evicts else (False, True)
    assert sum(run_row(kernels, case, 64, schedule, alone) for schedule in SCHEDULES for alone in ways) == 0


@pytest.mark.parametrize("threads", [32, 96, 128, 256, 512])
def test_any_number_of_threads(kernel: MetalKernel, kernels: Pair, threads: int) -> None:
    for name in ("several rows a thread", "ties among several rows a thread", "in tiles"):
        assert run(kernel, CASES[name], threads) == 0
        assert kernel.threadgroup_bytes <= MOST_BYTES
    for name in ("several rows a thread", "float16, turned"):
        for alone in (False, True):
            assert run_row(kernels, ROW_CASES[name], threads, alone=alone) == 0
            assert kernels[1].threadgroup_bytes <= MOST_BYTES


def test_the_widest_walk_fits_into_threadgroup_memory(kernel: MetalKernel) -> None:
    for sizes in walk._SIZES.values():
        threads, per_thread = sizes[-1]
        case = CASES["noise"]
        block = make(case)
        limits = case.budget, case.n_sink, case.recent
        columns = walk._columns(threads * per_thread, walk._TILE)
        assert columns <= walk._MOST_COLUMNS
        index, scores = walk.walk_kernel(
            kernel,
            threads,
            block.stored,
            block.new,
            block.scores,
            *limits,
            block.gumbel,
            block.taus,
            variant=(1, columns),
        )
        assert check(case, truth(case, block), index, scores) == 0
        assert kernel.threadgroup_bytes <= MOST_BYTES


def test_the_same_block_gives_the_same_bits_in_every_order(kernel: MetalKernel) -> None:
    block, bits = make(CASES["noise"]), set()
    for schedule in range(6):
        kernel.schedule = schedule
        out = walk.walk_kernel(kernel, 128, block.stored, block.new, block.scores, 50, 2, 7, block.gumbel, block.taus)
        bits.add(b"".join(np.array(a).tobytes() for a in out))
    assert len(bits) == 1


def test_a_float16_key_turned_by_the_kernel_is_that_of_the_operations_but_for_its_last_bit(kernels: Pair) -> None:
    case = ROW_CASES["one eviction, float16, turned"]
    rows, _, limits = make_row(case)
    one, _ = insert.evict_kernel(kernels[1], rows, limits, case.tau, 64)
    two, _ = insert.evict_ops(rows, limits, case.tau)
    a, b = (np.array(x.keys.view(mx.int16), np.int32) for x in (one, two))
    a, b = (np.where(x < 0, -32768 - x, x) for x in (a, b))  # in the order of the numbers
    assert np.abs(a - b).max() <= 1 and (a == b).mean() > 0.99


@pytest.mark.parametrize("mode", ["original", "contiguous"])
@pytest.mark.parametrize("back_end", ["metal", "cuda"])
def test_updates_token_by_token_and_in_blocks(
    kernels: Pair, kernel: MetalKernel, mode: Any, back_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across the end of a stretch of noise, while the temperature rises, at positions that are not counts."""
    rng = np.random.default_rng(12)
    keys, values = (mx.array(rng.normal(size=(3, 280, d)).astype(np.float32)) for d in (16, 12))
    outs: list[Any] = []
    for emulated in (False, True):
        if emulated:
            for module in (insert, walk):
                monkeypatch.setattr(module, "backend", lambda: back_end)
            monkeypatch.setattr(state, "on_cpu", lambda: False)
            monkeypatch.setattr(state, "_noise_of", lambda seeds, first, n: mx.array(state._gumbel(seeds, first, n)))
            monkeypatch.setattr(insert, "_kernels", lambda back_end: kernels)
            monkeypatch.setattr(walk, "build", lambda *text: kernel)
            monkeypatch.setattr(insert, "_serves", {})
            monkeypatch.setattr(walk, "_serves", {})
        cuts = (0, 248, *range(249, 262), 270)
        rows: Any = [None] * 5
        for first, last in pairwise(cuts):
            old = mode == "contiguous" and last == 248  # a long block of these takes long
            *rows, _, _, index = keyformer.keyformer_update_batched(
                *rows, keys[:, first:last], values[:, first:last], 1, 24, 5, 0.5, 3.0, 300, 1e4, first + 7, first,
                [3, 4, 5], True, "original" if old else mode,
            )  # fmt: skip
        if emulated:
            assert insert._serves and all(insert._serves.values())
        outs.append([*rows, index])
    for a, b in zip(*outs, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, rtol=1e-5)


def caught(mistake: Mistake, run_case: object) -> None:
    with pytest.raises(mistake.caught_by) as error:
        for schedule in SCHEDULES:
            for case in mistake.cases:
                assert run_case(case, schedule) == 0, "another row"  # type: ignore[operator]
    assert mistake.says in str(error.value)


@pytest.mark.parametrize("name", WALK_MISTAKES)
def test_a_mistake_planted_in_the_walk_is_caught(name: str) -> None:
    mistake = WALK_MISTAKES[name]
    kernel = walk_kernel(*mistake.plant(walk.SOURCE, walk.HEADER))
    caught(mistake, lambda case, schedule: run(kernel, CASES[case], 64, schedule))


@pytest.mark.parametrize("name", INSERT_MISTAKES)
def test_a_mistake_planted_in_the_insertion_is_caught(name: str) -> None:
    mistake = INSERT_MISTAKES[name]
    kernels = insert_kernels(*mistake.plant(insert.SOURCE, insert.HEADER))
    ways = (False, True)
    caught(mistake, lambda case, schedule: sum(run_row(kernels, ROW_CASES[case], 64, schedule, a) for a in ways))


@pytest.mark.parametrize("name", LOGIT_MISTAKES)
def test_a_mistake_planted_in_the_new_rows_logits_is_caught(name: str) -> None:
    mistake = LOGIT_MISTAKES[name]
    logit_source, _ = mistake.plant(insert.LOGIT_SOURCE, "")
    kernels = insert_kernels(logit_source=logit_source)
    caught(mistake, lambda case, schedule: run_row(kernels, ROW_CASES[case], 64, schedule))


@pytest.mark.parametrize(
    ("what", "sanitizer", "mistake"),
    [
        ("walk", "thread", ""),
        ("walk", "thread", "the same half every time"),
        ("walk", "address", ""),
        ("walk", "address", "reads beyond the tokens"),
        ("insert", "thread", ""),
        ("insert", "thread", "no barrier before the last choice"),
        ("insert", "address", ""),
        ("insert", "address", "reads beyond the rows"),
    ],
)
def test_sanitizers_find_nothing_but_planted_mistakes(what: str, sanitizer: str, mistake: str) -> None:
    run_sanitized(what, sanitizer, mistake, finds=bool(mistake))
