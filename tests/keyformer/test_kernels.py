"""Kernels: array operations against float64 everywhere, the kernel against both where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import oracle
import pytest
from decode_cases import CASES, POLICIES, SIZES, Case, check, make, truth
from small import KINDS, Stream, a_policy, attend, kept_positions

from keyformer import H2O, KeyDiff, KeyformerKVCache, Knorm, SnapKV, noise
from keyformer.kernels import decode
from keyformer.kernels.build import THREADS, backend

on_a_gpu = pytest.mark.skipif(backend() is None, reason="needs a GPU that MLX computes on")


@pytest.mark.parametrize("case", (CASES | SIZES).values(), ids=CASES | SIZES)
def test_array_operations_against_float64(case: Case) -> None:
    given = make(case)
    after = decode.decode_ops(case.policy, given.reads, given.rows, given.now)
    assert check(case, given, after, truth(case.policy, given)) == 0


@on_a_gpu
@pytest.mark.parametrize("case", (CASES | SIZES).values(), ids=CASES | SIZES)
def test_the_kernel_against_float64(case: Case) -> None:
    back_end = backend()
    assert back_end is not None
    given = make(case)
    step = given.reads, given.rows, given.now
    assert decode.unsupported(case.policy, given.reads[0], given.now, THREADS[back_end]) is None
    kernel = decode.decode_source(back_end, len(given.reads))
    true = truth(case.policy, given)
    for threads in {64, THREADS[back_end]}:
        assert check(case, given, decode.decode_kernel(kernel, threads, case.policy, *step), true) == 0
    assert check(case, given, decode.decode_step(case.policy, *step), true) == 0


@on_a_gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
def test_a_cache_keeps_the_same_rows_with_and_without_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream.random(5, 70, 4, 2, 16, 12)
    kept = []
    for wanted in "01":
        monkeypatch.setenv("KEYFORMER_KERNELS", wanted)
        cache = KeyformerKVCache(a_policy(kind, n_sink=1, recent=2, seed=3), 20, layer=1)
        cache.begin_prefill()
        attend(cache, *stream.part(0, 30), stream.scale)
        cache.end_prefill()
        for i in range(30, 70):
            attend(cache, *stream.part(i, i + 1), stream.scale)
        kept.append(kept_positions(cache))
    assert kept[0] == kept[1]


def test_no_kernel_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher is the array operations there, bit for bit."""
    with mx.stream(mx.cpu):
        assert backend() is None
        for name in ("keyformer", "h2o, window", "proxy", "random"):
            case = CASES[name]
            given = make(case)
            step = given.reads, given.rows, given.now
            one = decode.decode_step(case.policy, *step)
            two = decode.decode_ops(case.policy, *step)
            assert mx.array_equal(one.slot, two.slot) and mx.array_equal(one.scores, two.scores)
    monkeypatch.setenv("KEYFORMER_KERNELS", "0")
    assert backend() is None
    monkeypatch.setenv("KEYFORMER_KERNELS", "yes")
    with pytest.raises(ValueError, match="expected 0 or 1, got 'yes'"):
        backend()


@pytest.mark.parametrize("fault", ["refused", "wrong scores", "wrong rows"])
def test_a_kernel_that_does_not_do_its_work_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU compiler that refuses the text, or gets it wrong: found on the first step, said once."""
    case = next(c for c in CASES.values() if c.policy.attention == "query")
    given = make(case)
    step = given.reads, given.rows, given.now
    expected = decode.decode_ops(case.policy, *step)
    calls = []

    def compiled(**call: Any) -> list[mx.array]:
        calls.append(call)
        if fault == "refused":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        scores = expected.scores + (1.0 if fault == "wrong scores" else 0.0)
        slot = expected.slot + (1 if fault == "wrong rows" else 0)
        return [scores, expected.positions, mx.zeros((1,)), slot]

    monkeypatch.setattr(decode, "backend", lambda: "metal")
    monkeypatch.setattr(decode, "decode_source", lambda *of: compiled)
    monkeypatch.setattr(decode, "_serves", {})
    for _ in range(2):
        after = decode.decode_step(case.policy, *step)
        assert mx.array_equal(after.scores, expected.scores)
        assert mx.array_equal(after.slot, expected.slot)
    assert len(calls) == 1
    (record,) = caplog.records
    assert "array operations do its work" in record.message


def test_what_no_kernel_does_is_named() -> None:
    def reason(case: Case, threads: int = 64, **changes: Any) -> str | None:
        given = make(case)
        read = given.reads[0]
        if changes:
            assert read.asked is not None
            read = read._replace(asked=read.asked._replace(**changes))
        return decode.unsupported(case.policy, read, given.now, threads)

    h2o = CASES["h2o"]
    assert reason(h2o) is None
    assert reason(replace(h2o, policy=Knorm())) == "attention 'norm'"
    assert reason(replace(h2o, policy=KeyDiff())) == "attention 'difference'"
    assert reason(replace(h2o, policy=SnapKV(recent=1))) == "pooling"
    assert reason(h2o, mask=mx.ones((1, 1, 1, 40), mx.bool_)) == "a mask"
    assert reason(h2o, mask="causal") is None
    assert reason(replace(h2o, size=30)) == "a head size of 30"
    assert reason(replace(h2o, size=4096, rows=(3,), recents=(0,))) == "a head size of 4096"
    assert reason(replace(h2o, rows=(2049,), recents=(0,), size=4)) == "2049 rows"
    assert reason(replace(h2o, rows=(2048,), recents=(0,), size=4)) is None
    assert reason(h2o, queries=mx.zeros((1, 1, 1, 4))) == "fewer than 8 numbers in the queries"
    given = make(h2o)
    read = given.reads[0]
    wide = read._replace(keys=mx.repeat(read.keys, 2, axis=1), buffer=None)
    assert decode.unsupported(h2o.policy, wide, given.now, 64) == "keys of more heads than are stored"
    odd = read._replace(keys=read.keys.astype(mx.int32), buffer=None)
    assert decode.unsupported(h2o.policy, odd, given.now, 64) == "keys of mlx.core.int32"


def test_what_no_kernel_does_is_done_in_array_operations() -> None:
    for policy in (Knorm(), KeyDiff(), SnapKV(recent=1), H2O(pooling=3)):
        given = make(replace(CASES["h2o"], policy=policy))
        step = given.reads, given.rows, given.now
        one, two = (f(policy, *step) for f in (decode.decode_step, decode.decode_ops))
        assert mx.array_equal(one.slot, two.slot)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_budget_decides_where_the_next_row_goes_and_nothing_else(policy: Any) -> None:
    given, below = make(Case(policy)), make(Case(policy, below=2))
    full = decode.decode_ops(policy, given.reads, given.rows, given.now)
    grows = decode.decode_ops(policy, below.reads, below.rows, below.now)
    assert mx.array_equal(grows.scores, full.scores)
    assert grows.slot.tolist() == [[[[rows]]] * 3 for rows in given.now.rows]


def test_a_step_leaves_the_arrays_it_was_given_as_they_were() -> None:
    for name in ("h2o", "h2o, window", "proxy"):
        given = make(CASES[name])
        before = np.array(given.rows.scores)
        mx.eval(decode.decode_ops(CASES[name].policy, given.reads, given.rows, given.now).scores)
        assert (np.array(given.rows.scores) == before).all()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**64 - 1])
def test_the_kernels_stream_is_that_of_the_noise(seed: int) -> None:
    """What a kernel is given of seed and layer leads to the hash that the text describes."""
    for layer, head in ((0, 0), (31, 7)):
        word = int(decode._fixed(H2O(seed=seed), (3, layer), 1.0, 1.0)[7].item()) & 0xFFFFFFFF
        assert word == noise.stream(seed, layer)
        assert oracle.mix((word + head * 0x85EBCA77) & 0xFFFFFFFF) == int(
            noise._stream(seed, layer, mx.array([head])).item()
        )


@pytest.mark.parametrize("turned", [False, True])
def test_the_cache_hands_over_its_own_buffer(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the keys for a kernel, and yet the step sees the rows that attention read."""
    from keyformer import layers as module
    from keyformer.rope import Rope

    steps = []

    def look(policy: Any, reads: Any, rows: Any, now: Any) -> decode.Rows:
        steps.extend(reads)
        return decode.decode_step(policy, reads, rows, now)

    monkeypatch.setattr(module, "decode_step", look)
    stream = Stream.random(6, 40, 4, 2, 16, 16)
    rope = Rope(tuple(10000 ** (i / 8) for i in range(8)), False) if turned else None
    cache = KeyformerKVCache(H2O(recent=2), 12, rope=rope)
    cache.begin_prefill()
    attend(cache, *stream.part(0, 20), stream.scale)
    cache.end_prefill()
    for i in range(20, 30):
        attend(cache, *stream.part(i, i + 1), stream.scale)
    assert len(steps) == 10 and all((s.buffer is None) == turned for s in steps)
    for s in steps:
        if s.buffer is not None:
            assert mx.array_equal(s.buffer[:, :, : s.keys.shape[2]], s.keys)
