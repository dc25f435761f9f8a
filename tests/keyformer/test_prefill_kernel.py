"""A prompt chunk's mass: array operations against float64 everywhere, the kernel against both where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from prefill_cases import CASES, Case, check, make, truth
from small import Stream, a_policy, attend, kept_positions, kept_scores

from keyformer import H2O, KeyformerKVCache
from keyformer.kernels import prefill
from keyformer.kernels.build import backend, build
from keyformer.scores import attention_mass

on_a_gpu = pytest.mark.skipif(backend() is None, reason="needs a GPU that MLX computes on")


def by_definition(call: prefill.Call) -> mx.array:
    return attention_mass(
        call.queries,
        call.keys[:, :, : call.n],
        call.scale,
        "causal" if call.causal else None,
        usable=call.usable,
        noise=call.noise,
        tau=call.tau,
        weight=call.weight,
        sinks=call.sinks,
        soft_cap=call.soft_cap,
    )


def dispatched(call: prefill.Call, **changes: Any) -> mx.array:
    options: dict[str, Any] = {
        "usable": call.usable,
        "noise": call.noise,
        "tau": call.tau,
        "weight": call.weight,
        "sinks": call.sinks,
        "soft_cap": call.soft_cap,
        "buffer": call.keys,
    }
    keys, mask = call.keys[:, :, : call.n], "causal" if call.causal else None
    return prefill.prompt_mass(call.queries, keys, call.scale, **{"mask": mask, **options, **changes})


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].overflow])
def test_array_operations_against_float64(name: str) -> None:
    call = make(CASES[name])
    check(by_definition(call), truth(call))


@on_a_gpu
@pytest.mark.parametrize("enough", [1, 1024])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_against_float64(case: Case, enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.overflow and backend() == "cuda":
        pytest.skip("three TF32 products of a number near float32's end are not what one float32 product is")
    monkeypatch.setattr(prefill, "_ENOUGH", enough)
    back_end = backend()
    assert back_end is not None
    call = make(case)
    assert prefill.unsupported(call) is None
    tiles = prefill._tiles(back_end, case.dtype, case.size)
    headers = prefill._headers(back_end, tiles)
    kernel = build(back_end, "keyformer_prefill", prefill.INPUTS, prefill.OUTPUTS, prefill.SOURCE, *headers)
    check(prefill.mass_kernel(kernel, tiles, call), truth(call))
    if not case.overflow:
        check(dispatched(call), truth(call))


@on_a_gpu
@pytest.mark.parametrize("kind", ["h2o", "h2o, decay", "keyformer", "keyformer, frozen", "keyformer, gaussian"])
@pytest.mark.parametrize("prefill_by", ["full", "chunked"])
def test_a_cache_keeps_the_same_rows_with_and_without_kernels(
    kind: str, prefill_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream.random(5, 170, 4, 2, 16, 12)
    kept = []
    for wanted in "01":
        monkeypatch.setenv("KEYFORMER_KERNELS", wanted)
        cache = KeyformerKVCache(a_policy(kind, n_sink=1, recent=2, seed=3), 60, layer=1, prefill=prefill_by)
        cache.begin_prefill()
        for first in range(0, 170, 85):
            attend(cache, *stream.part(first, first + 85), stream.scale)
        cache.end_prefill()
        kept.append((kept_positions(cache), kept_scores(cache)))
    assert kept[0][0] == kept[1][0]
    np.testing.assert_allclose(kept[0][1], kept[1][1], rtol=1e-4)


@pytest.mark.parametrize("fault", ["", "refused", "wrong"])
def test_a_kernel_that_does_not_do_its_work_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tried once on a corner of the call: its last queries and rows."""
    call = make(replace(CASES["everything"], queries=150, rows=400, deaf=False))
    expected = np.array(by_definition(call))
    tried: list[prefill.Call] = []

    def kernel(kernel: Any, tiles: prefill.Tiles, call: prefill.Call) -> mx.array:
        tried.append(call)
        if fault == "refused":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        return by_definition(call) + (0.01 if fault == "wrong" else 0.0)

    monkeypatch.setattr(prefill, "backend", lambda: "metal")
    monkeypatch.setattr(prefill, "build", lambda *text: None)
    monkeypatch.setattr(prefill, "mass_kernel", kernel)
    monkeypatch.setattr(prefill, "_serves", {})
    for _ in range(2):
        np.testing.assert_allclose(np.array(dispatched(call)), expected, rtol=1e-6)
    corner = tried[0]
    assert corner.queries.shape[2] == 128 and corner.n == corner.keys.shape[2] == 320
    assert mx.array_equal(corner.queries, call.queries[:, :, 22:])
    assert mx.array_equal(corner.usable, call.usable[..., 80:])
    if fault:
        assert len(tried) == 1
        (record,) = caplog.records
        assert "array operations do its work" in record.message
    else:
        assert len(tried) == 3 and not caplog.records  # the corner, and each call


def test_a_corner_of_a_causal_call_has_a_row_for_each_query() -> None:
    call = make(Case(queries=400, rows=400))
    corner = prefill._corner(call)
    assert corner.queries.shape[2] == 128 and corner.n >= 128
    mass = by_definition(corner)
    assert mass.shape == (1, 2, corner.n)


def test_what_no_kernel_does_is_named() -> None:
    def reason(**changes: Any) -> str | None:
        return prefill.unsupported(make(Case(**changes)))

    assert reason() is None
    assert reason(size=256) is None
    assert reason(size=24) == "a head size of 24"
    assert reason(size=272) == "a head size of 272"
    assert reason(queries=51) == "more queries than rows"
    assert reason(queries=51, causal=False) is None
    call = make(Case())
    assert prefill.unsupported(replace(call, keys=call.keys.astype(mx.int32))) == "keys of mlx.core.int32"
    mixed = replace(call, keys=call.keys.astype(mx.float16))
    assert prefill.unsupported(mixed) == "queries of mlx.core.float32, keys of mlx.core.float16"
    assert prefill.unsupported(replace(call, scale=-1.0)) == "a scale of -1.0"


def test_what_no_kernel_does_is_done_in_array_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher is `attention_mass` there, bit for bit; no kernel is built."""
    call, odd = make(CASES["everything"]), make(Case(size=24))
    assert mx.array_equal(dispatched(call), by_definition(call)) or backend() is not None
    monkeypatch.setattr(prefill, "backend", lambda: "metal")
    monkeypatch.setattr(prefill, "build", None)
    assert mx.array_equal(dispatched(odd), by_definition(odd))
    shape = (1, 1, call.queries.shape[2], call.n)
    mask = mx.tril(mx.ones(shape[2:], mx.bool_), k=shape[3] - shape[2]).reshape(shape)
    np.testing.assert_allclose(np.array(dispatched(call, mask=mask)), np.array(by_definition(call)), rtol=1e-5)


def test_the_cache_hands_over_its_own_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the keys for a kernel, and yet the call sees the rows that attention read."""
    seen = []

    def look(queries: mx.array, keys: mx.array, *call: Any, buffer: mx.array | None, **options: Any) -> mx.array:
        assert buffer is not None and buffer.shape[2] > keys.shape[2]
        assert mx.array_equal(buffer[:, :, : keys.shape[2]], keys)
        seen.append(keys.shape[2])
        return attention_mass(queries, keys, *call, **options)

    monkeypatch.setattr(prefill, "prompt_mass", look)
    stream = Stream.random(6, 40, 4, 2, 16, 16)
    cache = KeyformerKVCache(H2O(recent=2), 12, prefill="full")
    cache.begin_prefill()
    attend(cache, *stream.part(0, 20), stream.scale)
    attend(cache, *stream.part(20, 40), stream.scale)
    cache.end_prefill()
    assert seen == [20, 40]
