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
from keyformer.kernels.build import THREADS, backend, build

on_a_gpu = pytest.mark.skipif(backend() is None, reason="needs a GPU that MLX computes on")


@pytest.mark.parametrize("case", (CASES | SIZES).values(), ids=CASES | SIZES)
def test_array_operations_against_float64(case: Case) -> None:
    step, asked = make(case)
    outcome = decode.decode_ops(case.policy, case.layer, step, asked)
    assert check(case, step, outcome, truth(case.policy, case.layer, step, asked)) == 0


@on_a_gpu
@pytest.mark.parametrize("case", (CASES | SIZES).values(), ids=CASES | SIZES)
def test_the_kernel_against_float64(case: Case) -> None:
    back_end = backend()
    assert back_end is not None
    step, asked = make(case)
    assert decode.unsupported(case.policy, step, asked, THREADS[back_end]) is None
    kernel = build(back_end, "keyformer_decode", decode.INPUTS, decode.OUTPUTS, decode.SOURCE, decode.HEADER)
    true = truth(case.policy, case.layer, step, asked)
    for threads in {64, THREADS[back_end]}:
        outcome = decode.decode_kernel(kernel, threads, case.policy, case.layer, step, asked)
        assert check(case, step, outcome, true) == 0
    assert check(case, step, decode.decode_step(case.policy, case.layer, step, asked), true) == 0


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
            step, asked = make(case)
            one = decode.decode_step(case.policy, case.layer, step, asked)
            two = decode.decode_ops(case.policy, case.layer, step, asked)
            assert one.free is not None and two.free is not None
            assert mx.array_equal(one.free, two.free) and mx.array_equal(one.scores, two.scores)
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
    step, asked = make(case)
    expected = decode.decode_ops(case.policy, case.layer, step, asked)
    calls = []

    def compiled(**call: Any) -> list[mx.array]:
        calls.append(call)
        if fault == "refused":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        assert expected.free is not None
        scores = expected.scores + (1.0 if fault == "wrong scores" else 0.0)
        return [scores, mx.zeros((1,)), expected.free + (1 if fault == "wrong rows" else 0)]

    monkeypatch.setattr(decode, "backend", lambda: "metal")
    monkeypatch.setattr(decode, "build", lambda *text: compiled)
    monkeypatch.setattr(decode, "_serves", {})
    for _ in range(2):
        outcome = decode.decode_step(case.policy, case.layer, step, asked)
        assert mx.array_equal(outcome.scores, expected.scores)
        assert outcome.free is not None
        assert mx.array_equal(outcome.free, expected.free)
    assert len(calls) == 1
    (record,) = caplog.records
    assert "array operations do its work" in record.message


def test_what_no_kernel_does_is_named() -> None:
    def reason(case: Case, threads: int = 64, **changes: Any) -> str | None:
        step, asked = make(case)
        if "mask" in changes and asked is not None:
            asked = replace(asked, mask=changes["mask"])
        return decode.unsupported(case.policy, step, asked, threads)

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
    step, asked = make(h2o)
    assert asked is not None
    wide = replace(step, keys=mx.repeat(step.keys, 2, axis=1), buffer=None)
    assert decode.unsupported(h2o.policy, wide, asked, 64) == "keys of more heads than are stored"
    odd = replace(step, keys=step.keys.astype(mx.int32), buffer=None)
    assert decode.unsupported(h2o.policy, odd, asked, 64) == "keys of mlx.core.int32"


def test_what_no_kernel_does_is_done_in_array_operations() -> None:
    for policy in (Knorm(), KeyDiff(), SnapKV(recent=1), H2O(pooling=3)):
        step, asked = make(replace(CASES["h2o"], policy=policy))
        one, two = (f(policy, 0, step, asked) for f in (decode.decode_step, decode.decode_ops))
        assert one.free is not None and two.free is not None and mx.array_equal(one.free, two.free)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_nothing_is_decided_below_every_budget(policy: Any) -> None:
    step, asked = make(Case(policy))
    below = decode.decode_ops(policy, 0, replace(step, decide=False), asked)
    full = decode.decode_ops(policy, 0, step, asked)
    assert below.free is None and mx.array_equal(below.scores, full.scores)


def test_a_step_leaves_the_arrays_it_was_given_as_they_were() -> None:
    for name in ("h2o", "h2o, window", "proxy"):
        step, asked = make(CASES[name])
        before = np.array(step.scores)
        mx.eval(decode.decode_ops(CASES[name].policy, 0, step, asked).scores)
        assert (np.array(step.scores) == before).all()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**64 - 1])
def test_the_kernels_stream_is_that_of_the_noise(seed: int) -> None:
    """What a kernel is given of seed and layer leads to the hash that the text describes."""
    for layer, head in ((0, 0), (31, 7)):
        word = int(decode._fixed(H2O(seed=seed), layer, 1.0, 1.0)[1].item()) & 0xFFFFFFFF
        assert word == noise.stream(seed, layer)
        assert oracle.mix((word + head * 0x85EBCA77) & 0xFFFFFFFF) == int(
            noise._stream(seed, layer, mx.array([head])).item()
        )


@pytest.mark.parametrize("turned", [False, True])
def test_the_cache_hands_over_its_own_buffer(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the keys for a kernel, and yet the step sees the rows that attention read."""
    from keyformer import cache as module
    from keyformer.rope import Rope

    steps = []

    def look(policy: Any, layer: int, step: decode.Step, asked: Any) -> decode.Outcome:
        steps.append(step)
        return decode.decode_step(policy, layer, step, asked)

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
