"""The walk and single insertions: array operations against float64 everywhere, the kernels where there is a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from walk_cases import CASES, ROW_CASES, Case, RowCase, check, check_row, make, make_row, tile_bytes, truth

import keyformer
from keyformer import noise, state
from keyformer.eviction import walk, walk_mlx
from keyformer.kernels import insert
from keyformer.kernels import walk as walk_module
from keyformer.kernels.build import backend, build

on_a_gpu = pytest.mark.skipif(backend() is None, reason="needs a GPU that MLX computes on")


def limits_of(case: Case) -> tuple[int, int, int]:
    return case.budget, case.n_sink, case.recent


@pytest.mark.parametrize("case", [c for n, c in CASES.items() if n != "logits leave float32"])
def test_the_definition_of_the_walk_against_float64(case: Case) -> None:
    block = make(case)
    index, scores = walk_mlx(block.stored, block.new, block.scores, *limits_of(case), block.gumbel, block.taus)
    assert check(case, truth(case, block), index, scores) == 0


@pytest.mark.parametrize("case", ROW_CASES.values(), ids=ROW_CASES)
def test_the_definition_of_an_insertion_against_float64(case: RowCase) -> None:
    rows, new, limits = make_row(case)
    if case.evicts:
        after, index = insert.evict_row(rows, limits, case.tau)
    else:
        after, index = insert.insert_row(rows, new, case.token, case.noise_at, case.position, limits, case.tau)
    assert check_row(case, rows, new, limits, after, index) == 0


@on_a_gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_walks_kernel_against_float64(case: Case) -> None:
    back_end = backend()
    assert back_end is not None
    block = make(case)
    true = truth(case, block)
    kernel = build(
        back_end, "keyformer_walk", walk_module.INPUTS, walk_module.OUTPUTS, walk_module.SOURCE, walk_module.HEADER
    )
    rows = block.stored, block.new, block.scores, *limits_of(case), block.gumbel, block.taus, tile_bytes(case)
    for threads in (64, 128, 256):
        assert check(case, true, *walk_module.walk_kernel(kernel, threads, *rows)) == 0
    assert check(case, true, *walk_module.walk_on_device(*rows)) == 0


@on_a_gpu
@pytest.mark.parametrize("case", ROW_CASES.values(), ids=ROW_CASES)
def test_the_insertions_kernels_against_float64(case: RowCase) -> None:
    back_end = backend()
    assert back_end is not None
    rows, new, limits = make_row(case)
    assert insert.unsupported(rows, new) is None
    kernels = insert._kernels(back_end)
    for threads in (64, 256):
        if case.evicts:
            after, index = insert.evict_kernel(kernels[1], rows, limits, case.tau, threads)
        else:
            arrival = case.token, case.noise_at, case.position
            after, index = insert.insert_kernel(kernels, rows, new, *arrival, limits, case.tau, threads)
        assert check_row(case, rows, new, limits, after, index) == 0


@on_a_gpu
@pytest.mark.parametrize("case", [CASES["several rows a thread"], CASES["in tiles"]], ids=["rows", "tiles"])
def test_no_case_of_the_walk_is_refused_by_its_trial(case: Case) -> None:
    block = make(case)
    walk_module.walk_on_device(block.stored, block.new, block.scores, *limits_of(case), block.gumbel, block.taus)
    assert walk_module._serves and all(walk_module._serves.values())


@on_a_gpu
@pytest.mark.parametrize("mode", ["original", "contiguous"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_updates_with_and_without_kernels_agree(mode: Any, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    keys, values = (
        mx.array(rng.normal(size=(3, 80, d)).astype(np.float32)).astype(mx.bfloat16).astype(dtype) for d in (16, 12)
    )
    outs = []
    for wanted in "01":
        monkeypatch.setenv("KEYFORMER_KERNELS", wanted)
        rows: Any = [None] * 5
        for first, last in ((0, 30), (30, 31), (31, 32), (32, 79), (79, 80)):
            *rows, _, _, index = keyformer.keyformer_update_batched(
                *rows, keys[:, first:last], values[:, first:last], 1, 24, 5, 1.0, 2.0, 50, 1e4, first, first,
                [3, 4, 5], True, mode,
            )  # fmt: skip
        outs.append([*rows, index])
    for a, b in zip(*outs, strict=True):
        near = 1e-5 if dtype == mx.float32 else 1e-2
        np.testing.assert_allclose(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)), atol=near, rtol=near)


def test_the_dispatcher_takes_batches_and_heads_as_they_come() -> None:
    case = CASES["noise"]
    block = make(replace(case, rows=6))
    flat = walk_module.walk_on_device(block.stored, block.new, block.scores, *limits_of(case), block.gumbel, block.taus)
    assert block.gumbel is not None
    folded = [mx.unflatten(a, 0, (2, 3)) for a in (block.stored, block.new, block.scores, block.gumbel)]
    index, scores = walk(*folded[:3], *limits_of(case), folded[3], block.taus)
    assert index.shape == scores.shape == (2, 3, case.budget)
    assert mx.array_equal(index.reshape(6, -1), flat[0])
    np.testing.assert_allclose(scores.reshape(6, -1), flat[1], atol=1e-5)


@pytest.mark.parametrize("fault", ["refused", "wrong scores", "wrong rows"])
def test_a_walk_that_is_not_right_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES["noise"]
    block = make(case)
    rows = block.stored, block.new, block.scores, *limits_of(case), block.gumbel, block.taus
    expected, calls = walk_mlx(*rows), []

    def compiled(*, output_shapes: Any, **call: Any) -> list[mx.array]:
        calls.append(call)
        if fault == "refused":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        return [mx.zeros(output_shapes[0], mx.int32), mx.zeros(output_shapes[1])]

    if fault == "wrong scores":
        right = walk_mlx

        def wrong(kernel: Any, threads: int, *arguments: Any, **_: Any) -> Any:
            calls.append(arguments)
            index, scores = right(*arguments)
            return index, scores + 0.5

        monkeypatch.setattr(walk_module, "walk_kernel", wrong)
    monkeypatch.setattr(walk_module, "backend", lambda: "metal")
    monkeypatch.setattr(walk_module, "build", lambda *text: compiled)
    monkeypatch.setattr(walk_module, "_serves", {})
    for _ in range(2):
        index, scores = walk_module.walk_on_device(*rows)
        assert mx.array_equal(index, expected[0]) and mx.array_equal(scores, expected[1])
    assert len(calls) == 1
    (record,) = caplog.records
    assert "array operations do its work" in record.message


@pytest.mark.parametrize(
    ("prior", "tokens", "budget", "tile", "expected"),
    [(50, 71, 50, 0, [71]), (0, 71, 50, 0, [71]), (50, 71, 50, 16, [15] * 4 + [11]), (9, 3, 50, 1, [1] * 3),
     (5, 2061, 6, 0, [1088, 973]), (300, 400, 300, 150, [128] * 3 + [16])],
)  # fmt: skip
def test_a_block_is_cut_only_where_its_logits_do_not_fit(
    prior: int, tokens: int, budget: int, tile: int, expected: list[int]
) -> None:
    """All at once, or two tiles' logits; no dispatch of more columns than the kernel has room for."""
    case = Case(rows=2, prior=prior, tokens=tokens, budget=budget, tile=tile, size=4)
    block, called = make(case), []

    def kernel(*, inputs: list[mx.array], output_shapes: Any, template: Any, **call: Any) -> list[mx.array]:
        called.append(inputs[0].shape)
        assert inputs[0].shape[2] <= dict(template)["COLUMNS"]
        return [mx.zeros(output_shapes[0], mx.int32), mx.zeros(output_shapes[1])]

    most = tile_bytes(case)
    rows = block.stored, block.new, block.scores, *limits_of(case), block.gumbel, block.taus
    index, _ = walk_module.walk_kernel(kernel, 64, *rows, most)
    assert index.shape == (2, min(prior + tokens, budget))
    assert [shape[1] for shape in called] == expected
    for shape in called:
        assert 4 * math.prod(shape) <= (most if len(called) == 1 else most // 2)


@pytest.mark.parametrize("fault", ["refused", "wrong rows", "wrong keys"])
@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("back_end", ["metal", "cuda"])
def test_an_insertion_that_is_not_right_is_not_used(
    fault: str, evicts: bool, back_end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = ROW_CASES["one eviction" if evicts else "noise"]
    rows, new, limits = make_row(case)
    calls = []

    def either() -> tuple[insert.Rows, mx.array]:
        if evicts:
            return insert.evict_row(rows, limits, case.tau)
        return insert.insert_row(rows, new, case.token, case.noise_at, case.position, limits, case.tau)

    expected, expected_index = either()

    def compiled(*, output_shapes: Any, output_dtypes: Any, **call: Any) -> list[mx.array]:
        calls.append(call)
        if fault == "refused":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        if len(output_shapes) == 1:
            return [mx.zeros(output_shapes[0])]
        keys = expected.keys + (1.0 if fault == "wrong keys" else 0.0)
        index = expected_index + (1 if fault == "wrong rows" else 0)
        return [keys, *expected[1:5], index, mx.zeros((1,))]

    monkeypatch.setattr(insert, "backend", lambda: back_end)
    monkeypatch.setattr(insert, "build", lambda *text: compiled)
    monkeypatch.setattr(insert, "_serves", {})
    for _ in range(2):
        after, index = either()
        assert mx.array_equal(index, expected_index) and mx.array_equal(after.keys, expected.keys)
    # one dispatch is enough with CUDA, as the rows are few
    assert len(calls) == (1 if evicts or fault == "refused" or back_end == "cuda" else 2)
    (record,) = caplog.records
    assert "array operations do its work" in record.message


def test_what_no_kernel_does_is_named() -> None:
    assert walk_module.unsupported("metal", 4096) is None
    assert walk_module.unsupported("metal", 4097) == "4097 rows"
    assert walk_module.unsupported("cuda", 8192) is None
    assert walk_module.unsupported("cuda", 8193) == "8193 rows"
    rows, new, _ = make_row(ROW_CASES["noise"])
    assert insert.unsupported(rows, new) is None
    assert insert.unsupported(rows._replace(keys=rows.keys[:, :0]), new) == "fewer than 8 numbers"
    assert insert.unsupported(rows, new._replace(keys=new.keys[:1, :1, :5])) == "fewer than 8 numbers"
    double = rows._replace(values=rows.values.astype(mx.complex64))
    assert insert.unsupported(double, new) == "rows of mlx.core.complex64"


@pytest.mark.parametrize("back_end", ["metal", "cuda"])
def test_every_number_of_rows_has_threads_that_hold_it(back_end: str) -> None:
    threads, most = walk_module._SIZES[back_end][-1]
    for slots in range(1, threads * most + 1):
        chosen = walk_module._threads(back_end, slots)
        assert -(-slots // chosen) <= dict(walk_module._SIZES[back_end])[chosen]
        assert slots + walk_module._TILE <= walk_module._columns(slots, 10**6) <= walk_module._MOST_COLUMNS


def test_noise_of_many_seeds_is_that_of_each() -> None:
    seeds, at = (0, 7, 2**32, 2**64 - 1), mx.arange(100, 160)
    drawn = noise.gumbel_of_streams(mx.array([noise.stream(seed, 0) for seed in seeds], mx.uint32), at)
    for r, seed in enumerate(seeds):
        assert mx.array_equal(drawn[r], noise.gumbel(seed, 0, mx.array(0), at))
    block = state._gumbel_on_device(seeds, 2)
    np.testing.assert_array_equal(block, state._gumbel_block(seeds, 2))
