"""`python -m keyformer.selftest` as a Mac would run it, the Metal source on this CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from emulator import MetalKernel

from keyformer import selftest
from keyformer.kernels import build, checks, decode
from keyformer.kernels.decode_cases import CASES, SIZES, Case
from keyformer.policies import KeyformerProxy

pytestmark = pytest.mark.metal

NAMES = ("keyformer", "h2o, window", "proxy", "bfloat16", "ties, proxy", "33 rows, keyformer")


@pytest.fixture(autouse=True)
def a_mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What makes kernels sees a Metal GPU; the arrays stay on the CPU. Fewer cases, short timings."""
    metal = SimpleNamespace(
        default_device=lambda: mx.Device(mx.gpu),
        DeviceType=mx.DeviceType,
        metal=SimpleNamespace(is_available=lambda: True),
        fast=SimpleNamespace(metal_kernel=MetalKernel),
    )
    monkeypatch.setattr(build, "mx", metal)
    monkeypatch.setattr(build, "THREADS", {"metal": 64})
    monkeypatch.setattr(decode, "THREADS", {"metal": 64})
    monkeypatch.setattr(checks, "THREADS", {"metal": 64})
    monkeypatch.setattr(decode, "_serves", {})
    timed = Case(KeyformerProxy(), rows=(64,), recents=(16,), heads=1, group=1, size=16, spare=0, dtype=mx.float16)
    (check,) = selftest.CHECKS
    fewer = replace(
        check,
        cases={name: (CASES | SIZES)[name] for name in NAMES},
        quick=NAMES[:3],
        timings={"small": lambda back_end, count: checks.time_decode(timed, back_end, count)},
    )
    monkeypatch.setattr(selftest, "CHECKS", (fewer,))
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
    assert f"\n  case 'keyformer': seed {seed}, sequence 0, KV head 0, slot 0: score " in output
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
