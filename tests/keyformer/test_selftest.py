"""The self-test where there is nothing to test, and how it judges; tests/metal runs its checks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from keyformer import selftest
from keyformer.eviction import walk_mlx
from keyformer.kernels import checks, decode, insert, prefill, walk
from keyformer.kernels.decode_cases import CASES, QUICK, SIZES, Given, make
from keyformer.kernels.measure import copies, copy_bandwidth, seconds_each
from keyformer.scores import attention_mass

on_a_cpu = pytest.mark.skipif(mx.default_device().type == mx.DeviceType.gpu, reason="MLX computes on a GPU here")


@on_a_cpu
def test_a_cpu_cannot_test_kernels(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "keyformer.selftest", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("keyformer.selftest: expected a GPU that MLX computes on, got Device(cpu, 0) on ")
    assert f"mlx {mx.__version__}" in done.stderr and "A CPU cannot test kernels." in done.stderr
    assert "pip install 'mlx[cuda13]'" in done.stderr and len(done.stderr.splitlines()) == 1
    content = json.loads(report.read_text())
    assert content["back_end"] is None and content["result"] in done.stderr
    assert content["about"]["versions"]["mlx"] == mx.__version__


def test_kernels_that_are_switched_off_are_not_tested() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keyformer.selftest"],
        env=os.environ | {"KEYFORMER_KERNELS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "got KEYFORMER_KERNELS=0" in done.stderr and "unset it" in done.stderr


def test_an_environment_that_is_wrong_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEYFORMER_KERNELS", "yes")
    assert selftest.main([]) == 2
    assert capsys.readouterr().err == "keyformer.selftest: KEYFORMER_KERNELS: expected 0 or 1, got 'yes'.\n"


def test_options_that_are_wrong_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main(["--fast"]) == 2
    assert capsys.readouterr().err == "keyformer.selftest: unrecognized arguments: --fast\n"


def test_the_quick_cases_exist() -> None:
    assert set(QUICK) <= set(CASES | SIZES)


def compared(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> checks.Compared:
    """A case whose kernel is the definition, changed."""
    case = (CASES | SIZES)[name]

    def kernel(*_: Any) -> decode.Rows:
        given = make(case)
        return change(decode.decode_ops(case.policy, given.reads, given.rows, given.now), given)

    monkeypatch.setattr(decode, "decode_kernel", kernel)
    monkeypatch.setattr(decode, "decode_source", lambda *of: None)
    return checks.compare_decode("metal", case)


def moved(after: decode.Rows, slot: int, by: float) -> decode.Rows:
    scores = np.array(after.scores)
    scores[1, 2, slot] += by
    return replace(after, scores=mx.array(scores))


@pytest.mark.parametrize("name", CASES | SIZES)
def test_the_definition_agrees_with_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same = compared(monkeypatch, name, lambda after, given: after)
    assert (same.worst, same.differing, same.near, same.wrong) == (0.0, 0, 0, "")
    case = (CASES | SIZES)[name]
    assert same.rows == len(case.layers) * len(case.rows) * case.heads


def test_the_first_wrong_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = CASES["h2o"].seed
    one = compared(monkeypatch, "h2o", lambda after, given: moved(after, 5, 0.5))
    assert one.wrong.startswith(f"seed {seed}, layer 3, sequence 1, KV head 2, slot 5: score ") and one.worst > 0.1
    assert compared(monkeypatch, "h2o", lambda after, given: moved(after, 5, 2e-6)).wrong == ""
    lost = compared(monkeypatch, "h2o", lambda after, given: moved(after, 5, float("nan")))
    assert lost.wrong.startswith(f"seed {seed}, layer 3, sequence 1, KV head 2, slot 5: score nan, expected ")
    # beyond a sequence's own rows nothing is compared
    assert compared(monkeypatch, "h2o", lambda after, given: moved(after, given.now.rows[1], 0.5)).wrong == ""


def test_a_wrong_mass_or_position_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(after: decode.Rows, given: Given) -> decode.Rows:
        masses = np.array(after.masses)
        masses[0, 1, 7, 2] += 0.25
        return replace(after, masses=mx.array(masses))

    wrong = compared(monkeypatch, "h2o, window", change).wrong
    assert ", sequence 0, KV head 1, slot 7: mass " in wrong
    wrong = compared(monkeypatch, "window", lambda after, _: replace(after, positions=after.positions + 1)).wrong
    assert ", sequence 0, KV head 0, slot 0: position " in wrong


def test_another_choice_is_wrong_unless_it_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(after: decode.Rows, given: Given) -> decode.Rows:
        slot = np.array(after.slot)
        slot[0, 0] = (slot[0, 0] + 1) % given.now.rows[0]
        return replace(after, slot=mx.array(slot))

    one = compared(monkeypatch, "h2o", another)
    assert (one.differing, one.near) == (1, 0) and "sequence 0, KV head 0: next slot " in one.wrong
    monkeypatch.setattr(checks, "NEAR", 1e9)
    one = compared(monkeypatch, "proxy", another)
    assert (one.differing, one.near, one.wrong) == (1, 1, "")
    assert compared(monkeypatch, "ties, proxy", another).wrong  # equal ranks: the lowest position, exactly
    outside = compared(monkeypatch, "h2o", lambda a, _: replace(a, slot=mx.full(a.slot.shape, 99, mx.int32)))
    assert "next slot 99 (of 40 rows)" in outside.wrong
    assert compared(monkeypatch, "below the budget", another).wrong  # no row goes there


PREFILL, WALK, INSERT = checks.CHECKS[1:]


@pytest.fixture
def definitions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The other kernels are their definitions; what is in the dictionary under a kernel's name changes its outcome."""
    changes: dict[str, Any] = {}

    def mass(kernel: Any, tiles: Any, call: prefill.Call) -> mx.array:
        arguments = call.queries, call.keys[:, :, : call.n], call.scale, "causal" if call.causal else None
        rest = {"usable": call.usable, "noise": call.noise, "tau": call.tau, "weight": call.weight}
        out = attention_mass(*arguments, **rest, sinks=call.sinks, soft_cap=call.soft_cap, tile_bytes=1)
        return changes.get("prefill", lambda a: a)(out)

    def walked(kernel: Any, threads: int, *arguments: Any, tile_bytes: int = 0) -> Any:
        return changes.get("walk", lambda *a: a)(*walk_mlx(*arguments))

    def inserted(kernels: Any, *arguments: Any) -> Any:
        return changes.get("insert", lambda *a: a)(*insert.insert_ops(*arguments))

    monkeypatch.setattr(checks, "build", lambda *text: None)
    monkeypatch.setattr(insert, "_kernels", lambda back_end: (None, None))
    monkeypatch.setattr(prefill, "mass_kernel", mass)
    monkeypatch.setattr(walk, "walk_kernel", walked)
    monkeypatch.setattr(insert, "insert_kernel", inserted)
    monkeypatch.setattr(insert, "evict_kernel", lambda kernel, *arguments: insert.evict_ops(*arguments))
    return changes


@pytest.mark.parametrize("check", checks.CHECKS[1:], ids=lambda check: check.name)
def test_every_definition_agrees_with_itself(check: checks.Check, definitions: dict[str, Any]) -> None:
    report = selftest.examine(check, "metal", quick=False)
    assert (report.failed, report.worst, report.differing) == ([], 0.0, 0)
    assert report.cases == len(check.cases) and set(check.quick) <= set(check.cases)


def test_a_wrong_mass_of_a_prompt_is_named(definitions: dict[str, Any]) -> None:
    definitions["prefill"] = lambda mass: mx.concatenate([mass[..., :4], mass[..., 4:5] + 0.5, mass[..., 5:]], axis=-1)
    wrong = PREFILL.compare("metal", PREFILL.cases["group of 3"]).wrong
    assert wrong.startswith("seed 0, sequence 0, KV head 0, row 4: mass ")


def test_a_wrong_walk_is_named_unless_a_decision_was_close(
    definitions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions["walk"] = lambda index, scores: (index, scores + 1e-4)
    assert WALK.compare("metal", WALK.cases["noise"]).wrong.startswith("seed 0, head 0, column 0: score ")

    def other(index: mx.array, scores: mx.array) -> Any:
        return mx.concatenate([index[:, :-1], index[:, -1:] + mx.array([[0], [1], [0]])], axis=1), scores

    definitions["walk"] = other
    one = WALK.compare("metal", WALK.cases["noise"])
    assert (one.differing, one.near) == (1, 0) and one.wrong == "seed 0, head 1: kept column 121, expected 120"
    monkeypatch.setattr(checks, "NEAR", 1e9)
    one = WALK.compare("metal", WALK.cases["noise"])
    assert (one.differing, one.near, one.wrong) == (1, 1, "")
    assert WALK.compare("metal", WALK.cases["ties"]).wrong  # equal ranks: the lowest position, exactly


def test_a_wrong_insertion_is_named(definitions: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    definitions["insert"] = lambda rows, index: (rows._replace(values=rows.values + 0.01), index)
    wrong = INSERT.compare("metal", INSERT.cases["noise"]).wrong
    assert wrong.startswith("seed 0, head 0, values (0, 0): ")
    definitions["insert"] = lambda rows, index: (rows, index + (mx.arange(41) == 7))
    one = INSERT.compare("metal", INSERT.cases["within the budget"])
    assert one.differing == 3 and one.wrong.startswith("seed 0, head 0: freed row [7], expected []")
    definitions["insert"] = lambda rows, index: (rows, index - (index == index[:, 20:21]))
    one = INSERT.compare("metal", INSERT.cases["noise"])
    assert one.differing == 3 and ", head 0: freed row [" in one.wrong
    monkeypatch.setattr(checks, "NEAR", 1e9)
    assert INSERT.compare("metal", INSERT.cases["noise"]).differing == 3


def test_a_kernel_that_does_not_run_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    check = replace(selftest.CHECKS[0], compare=refuse, cases={"one": None, "two": None}, quick=("two",))
    report = selftest.examine(check, "metal", quick=False)
    assert report.cases == 2 and len(report.failed) == 2
    assert report.failed[0].startswith("case 'one': does not run: [metal::Device] Unable to build")
    assert report.failed[1] == "case 'two': does not run: as above"
    assert selftest.examine(check, "metal", quick=True).cases == 1


def test_end_to_end_notices_other_rows_and_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prefill = selftest.END_TO_END["h2o"]
    right = selftest._generate
    assert selftest.end_to_end(policy, prefill) == ""

    def changed(*arguments: Any) -> Any:
        kept, logits = right(*arguments)
        if os.environ["KEYFORMER_KERNELS"] == "1":
            if what == "rows":
                kept[1][0][0, 0] += 1
            else:
                logits = logits + 0.01
        return kept, logits

    monkeypatch.setattr(selftest, "_generate", changed)
    what = "rows"
    assert selftest.end_to_end(policy, prefill) == "layer 1, sequence 0: other rows are kept than without kernels"
    what = "logits"
    assert "1e-04 allowed" in selftest.end_to_end(policy, prefill)


def test_the_small_model_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it could show nothing."""
    for name, (policy, when) in selftest.END_TO_END.items():
        kept, _ = selftest._generate(selftest._model(), policy, when, (61, 40))
        assert all(rows.shape == (2, 24) for layer in kept for rows in layer), name
        assert len({rows.tobytes() for layer in kept for rows in layer}) == 4, name


def test_steps_are_measured_in_chains() -> None:
    """Each step begins with what the step before made: nothing may be left out or run beside another."""
    given: list[tuple[int, mx.array]] = []
    made: list[mx.array] = []

    def step(number: int, x: mx.array) -> mx.array:
        given.append((number, x))
        made.append(x + 1)
        return made[-1]

    took = seconds_each(step, mx.zeros((3,), mx.float16), 4, repeats=2)
    assert math.isfinite(took) and took >= 0  # a difference of times: anything else is the machine's affair
    lengths = [8, 8, 1, 1, 4, 8, 4, 8]  # twice to compile, two to time the products ahead, then one and two counts
    assert [number for number, _ in given] == [i for length in lengths for i in range(length)]
    assert all(x is made[at - 1] for at, (number, x) in enumerate(given) if number)
    assert all(x.dtype == mx.float16 and x.shape == (3,) for _, x in given)
    assert [int(made[at][0]) for at, (number, _) in enumerate(given) if number == 0] == [1] * len(lengths)


def test_copies_are_too_many_for_a_cache() -> None:
    assert copy_bandwidth(1) > 0
    large = mx.zeros((512, 512))
    kept = copies(large, 3)
    assert len(kept) == 3 and all(mx.array_equal(a, large) for a in kept)
    assert len(copies(mx.zeros((40 << 20,), mx.uint8), 100)) == 4  # 120 MiB are too few, 160 enough
