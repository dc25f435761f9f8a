"""The prefill kernel's text, Metal's and CUDA's, run on a CPU against float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cuda import CudaKernel
from emulator import BACKWARD, FORWARD, MetalKernel, run_sanitized
from mistakes import PREFILL_MISTAKES
from prefill_cases import CASES, Case, check, make, truth
from small import Stream, a_policy, attend, kept_positions, kept_scores

from keyformer import KeyformerKVCache
from keyformer.kernels import prefill
from keyformer.kernels.build import MOST_BYTES
from keyformer.kernels.prefill import INPUTS, OUTPUTS, SOURCE, Tiles

pytestmark = pytest.mark.metal

SMALL = Tiles(2, 2, 2)  # as many blocks and tiles as larger calls have with larger ones
SMALL_CUDA = Tiles(2, 2, 2, 16)


def metal(tiles: Tiles, source: str = SOURCE, change: tuple[str, str] = ("", "")) -> MetalKernel:
    header = prefill._headers("metal", tiles)[0].replace(*change)
    return MetalKernel("keyformer_prefill", INPUTS, OUTPUTS, source, header)


def cuda(tiles: Tiles, source: str = SOURCE, change: tuple[str, str] = ("", "")) -> CudaKernel:
    header, before = prefill._headers("cuda", tiles)
    return CudaKernel("keyformer_prefill", INPUTS, OUTPUTS, source, (before + header).replace(*change))


def run(kernel: MetalKernel | CudaKernel, tiles: Tiles, case: Case, true: np.ndarray | None = None) -> None:
    call = make(case)
    assert prefill.unsupported(call) is None
    check(prefill.mass_kernel(kernel, tiles, call), truth(call) if true is None else true)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dispatched, and with one threadgroup for all tiles of queries."""
    tiles, true = prefill._tiles("metal", case.dtype, case.size), truth(make(case))
    kernel = metal(tiles)
    run(kernel, tiles, case, true)
    assert kernel.threadgroup_bytes <= MOST_BYTES
    monkeypatch.setattr(prefill, "_ENOUGH", 1)
    run(kernel, tiles, case, true)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_in_the_text_for_cuda(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, true = prefill._tiles("cuda", case.dtype, case.size), truth(make(case))
    kernel = cuda(tiles)
    run(kernel, tiles, case, true)
    monkeypatch.setattr(prefill, "_ENOUGH", 1)
    run(kernel, tiles, case, true)


@pytest.mark.parametrize("enough", [1, 30, 1024])
@pytest.mark.parametrize("name", ["every axis differs", "everything", "many queries"])
def test_many_blocks_and_parts_in_every_order(name: str, enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_ENOUGH", enough)
    true = truth(make(CASES[name]))
    kernel = metal(SMALL)
    for schedule in (FORWARD, BACKWARD, 2):
        kernel.schedule = schedule
        run(kernel, SMALL, CASES[name], true)
    run(cuda(SMALL_CUDA), SMALL_CUDA, CASES[name], true)


def test_the_same_call_gives_the_same_bits_in_every_order() -> None:
    kernel, call = metal(SMALL), make(CASES["everything"])
    bits = set()
    for schedule in range(4):
        kernel.schedule = schedule
        bits.add(np.array(prefill.mass_kernel(kernel, SMALL, call)).tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize("prefill_by", ["full", "chunked"])
@pytest.mark.parametrize(
    "kind", ["h2o", "h2o, decay", "keyformer", "keyformer, frozen", "queries, noise at the decision"]
)
def test_a_cache_keeps_the_same_rows_with_and_without_kernels(
    kind: str, prefill_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the dispatcher: its first try on a corner, the cache's own buffer, scores and positions."""
    stream = Stream.random(5, 110, 4, 2, 16, 12)
    built = []

    def build(
        back_end: str, name: str, inputs: Any, outputs: Any, source: str, header: str, cuda_header: str
    ) -> MetalKernel:
        built.append(MetalKernel(name, inputs, outputs, source, header))
        return built[-1]

    kept = []
    for back_end in (None, "metal"):
        monkeypatch.setattr(prefill, "backend", lambda back_end=back_end: back_end)
        monkeypatch.setattr(prefill, "build", build)
        monkeypatch.setattr(prefill, "_serves", {})
        cache = KeyformerKVCache(a_policy(kind, n_sink=1, recent=2, seed=3), 40, layer=1, prefill=prefill_by)
        cache.begin_prefill()
        for first in range(0, 110, 55):
            attend(cache, *stream.part(first, first + 55), stream.scale)
        cache.end_prefill()
        kept.append((kept_positions(cache), kept_scores(cache)))
    assert len(built) == 2 and list(prefill._serves.values()) == [True]
    assert kept[0][0] == kept[1][0]
    np.testing.assert_allclose(kept[0][1], kept[1][1], rtol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("D", range(16, 257, 16))
def test_threadgroup_memory_of_every_head_size(dtype: mx.Dtype, D: int) -> None:
    for back_end, stages, most in (("metal", 1, MOST_BYTES), ("cuda", 2, 48 << 10)):
        columns = prefill._tiles(back_end, dtype, D).columns * 8
        assert stages * columns * (D * dtype.size + 16 + 12) <= most


@pytest.mark.parametrize("name", PREFILL_MISTAKES)
def test_a_planted_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above are able to fail: each mistake is, by a compiler, by the runtime or by a wrong number."""
    mistake = PREFILL_MISTAKES[name]
    monkeypatch.setattr(prefill, "_ENOUGH", mistake.enough)
    tiles = SMALL_CUDA if mistake.cuda else SMALL
    make_kernel = cuda if mistake.cuda else metal
    source = SOURCE
    if mistake.in_source:
        assert mistake.old in SOURCE, f"the kernel no longer has {mistake.old!r}"
        kernel = make_kernel(tiles, SOURCE.replace(mistake.old, mistake.new, 1))
    else:
        assert mistake.old in "".join(prefill._headers("cuda" if mistake.cuda else "metal", tiles))
        kernel = make_kernel(tiles, source, (mistake.old, mistake.new))
    with pytest.raises(mistake.caught_by) as caught:
        for schedule in (FORWARD, BACKWARD, 2, 3):
            kernel.schedule = schedule
            for case in mistake.cases:
                run(kernel, tiles, CASES[case])
    assert mistake.says in str(caught.value)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize("mistake", ["", "a barrier is missing", "another barrier is missing", "reads beyond the rows"])
def test_sanitizers_find_nothing_but_planted_mistakes(sanitizer: str, mistake: str) -> None:
    found_by = "address" if mistake == "reads beyond the rows" else "thread"
    run_sanitized("prefill", sanitizer, mistake, bool(mistake) and sanitizer == found_by)
