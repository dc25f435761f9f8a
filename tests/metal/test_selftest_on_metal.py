"""`python -m keyformer.selftest` as a Mac would run it, the Metal source on this CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from emulator import MetalKernel

from keyformer import selftest
from keyformer.kernels import build, checks, decode, insert, prefill, prefill_cases, walk, walk_cases
from keyformer.kernels.decode_cases import CASES, Case
from keyformer.policies import KeyformerProxy

pytestmark = pytest.mark.metal

NAMES = {
    "decode": ("keyformer", "h2o, window", "proxy", "bfloat16", "ties, proxy", "33 rows, keyformer"),
    "prefill": ("every axis differs", "gumbel", "deaf queries"),
    "walk": ("noise", "bad keys", "ties"),
    "insert": ("noise", "turned", "one eviction"),
}


@pytest.fixture(autouse=True)
def a_mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What makes kernels sees a Metal GPU; the arrays stay on the CPU. Fewer cases, short timings."""
    metal = SimpleNamespace(
        default_device=lambda: mx.Device(mx.gpu),
        DeviceType=mx.DeviceType,
        metal=SimpleNamespace(is_available=lambda: True),
        fast=SimpleNamespace(metal_kernel=MetalKernel),
        array=mx.array,
        int32=mx.int32,
    )
    monkeypatch.setattr(build, "mx", metal)
    monkeypatch.setattr(build, "THREADS", {"metal": 64})
    monkeypatch.setattr(decode, "THREADS", {"metal": 64})
    monkeypatch.setattr(checks, "THREADS", {"metal": 64})
    monkeypatch.setattr(walk, "_SIZES", {"metal": ((64, 8),)})
    for module in (decode, insert, prefill, walk):
        monkeypatch.setattr(module, "_serves", {})
    timed = {
        "decode": partial(
            checks.time_decode, Case(KeyformerProxy(), (64,), 1, 1, 16, 0, dtype=mx.float16, recents=(16,))
        ),
        "prefill": partial(checks.time_prefill, prefill_cases.Case(queries=9, rows=12, spare=0)),
        "walk": partial(checks.time_walk, walk_cases.Case(2, 24, 9, 8, 24)),
    }
    fewer = [
        replace(
            check,
            cases={name: case for name, case in check.cases.items() if name in NAMES[check.name]},
            quick=NAMES[check.name][:3],
            timings={"small": timed[check.name]} if check.timings else {},
        )
        for check in selftest.CHECKS
    ]
    monkeypatch.setattr(selftest, "CHECKS", tuple(fewer))
    monkeypatch.setattr(selftest, "END_TO_END", {"keyformer": selftest.END_TO_END["keyformer"]})
    build.build.cache_clear()
    yield
    build.build.cache_clear()


def test_all_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert selftest.main(["--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("device: Device(cpu, 0) (metal), ")
    assert lines[4].startswith("kernel decode: 6 cases, 34 rows chosen; worst difference ")
    assert lines[4].endswith("; 0 cases wrong")
    assert lines[5].startswith("  small: ") and lines[5].endswith(" times that")
    assert lines[-1] == "All good."
    content = json.loads(file.read_text())
    assert [(name, kernel["cases"], kernel["failed"]) for name, kernel in content["kernels"].items()] == [
        (name, len(names), []) for name, names in NAMES.items()
    ]
    report = content["kernels"]["decode"]
    assert (report["cases"], report["failed"], report["differing"]) == (6, [], 0)
    assert 0 < report["worst"] < checks.ALLOWED
    (timing,) = report["timings"]
    assert timing["ratio"] == pytest.approx(timing["seconds"] / timing["floor"])
    assert content["models"] == {"keyformer": ""} and content["back_end"] == "metal"
    assert decode._serves and all(decode._serves.values())  # the small models did use the kernel


def test_a_planted_mistake_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = "mass[i] += e[i][g] * share;"
    assert right in decode.SOURCE
    monkeypatch.setattr(decode, "SOURCE", decode.SOURCE.replace(right, "mass[i] += e[i][g] * share * 1.01f;"))
    file = tmp_path / "report.json"
    assert selftest.main(["--quick", "--json", str(file)]) == 1
    output = capsys.readouterr().out
    seed = CASES["keyformer"].seed
    assert f"\n  case 'keyformer': seed {seed}, layer 3, sequence 0, KV head 0, slot 0: score " in output
    assert "\nsmall model, keyformer: The decode kernel differs from its definition here" in output
    last = output.splitlines()[-1]
    assert last.startswith("WRONG: kernel decode; small model, keyformer") and "send this whole output" in last
    content = json.loads(file.read_text())
    assert content["result"] == last and len(content["kernels"]["decode"]["failed"]) == 3


def test_a_kernel_that_does_not_compile_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "SOURCE", "double wrong = 1.0;" + decode.SOURCE)
    assert selftest.main(["--quick"]) == 1
    output = capsys.readouterr().out
    assert "\n  case 'keyformer': does not run: OpenCL C++: body:1:1: error: use of type 'double'" in output
    assert "\n  case 'proxy': does not run: as above\n" in output
    assert "WRONG: kernel decode" in output


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert selftest.main(["--json", str(tmp_path / "nowhere" / "report.json")]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("keyformer.selftest: --json: expected a file that can be written")


def test_a_report_that_was_stopped_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "CHECKS", (replace(selftest.CHECKS[0], compare=stop),))
    file = tmp_path / "report.json"
    assert selftest.main(["--quick", "--json", str(file)]) == 130
    content = json.loads(file.read_text())
    assert content["result"] == "Not finished." and content["back_end"] == "metal"
