"""The benchmarks, at sizes that measure nothing: every part runs, says what it has to and writes it down."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from small import tiny_llama

import keyformer
from benchmarks import cpu, decode_model, functional, gpu, harness, kernels, models, prefill

PROJECT = Path(__file__).resolve().parent.parent


def report(module: str, file: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", "--tiny", "--json", str(file), *arguments]
    variables = os.environ | {"PYTHONPATH": str(PROJECT)} | environment
    done = subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


def positive(line: dict[str, Any], *keys: str) -> None:
    for key in keys:
        assert line[key] > 0 and math.isfinite(line[key]), (key, line)


def test_every_part_for_a_gpu(tmp_path: Path) -> None:
    content, printed = report("gpu", tmp_path / "gpu.json")
    assert content["command"].startswith("python -m benchmarks.gpu --tiny --json ")
    assert content["about"]["versions"]["mlx"] == mx.__version__ and content["date"] in printed
    assert list(content["parts"]) == list(gpu.PARTS)
    lines = {name: part["lines"] for name, part in content["parts"].items()}
    for line in lines["decode-kernel"]:
        positive(line, "composed us", "keys at copy speed us")
    for line in lines["walk"]:
        positive(line, "array operations us")
    decode = lines["decode-model"]
    caches = ["KVCache", "RotatingKVCache", *(f"ours, {name}" for name in gpu.POLICIES)]
    assert [line["cache"] for line in decode] == caches * 4
    assert [(line["batch"], line["context"]) for line in decode[:: len(caches)]] == [
        (1, 64),
        (1, 128),
        (2, 64),
        (2, 128),
    ]
    for line in decode:
        positive(line, "KV MiB", "piped ms", "synced ms")
        plain = next(
            p for p in decode if (p["batch"], p["context"], p["cache"]) == (line["batch"], line["context"], "KVCache")
        )
        assert line["piped tokens/s over KVCache"] == pytest.approx(plain["piped ms"] / line["piped ms"])
    assert [line["cache"] for line in lines["prefill"]] == ["KVCache", *prefill.ARMS]
    for line in lines["prefill"]:
        assert line["tokens"] == 96
        assert line["over KVCache"] == pytest.approx(line["seconds"] / lines["prefill"][0]["seconds"])
    assert [line["budget"] for line in lines["functional"]] == [16, 16, 16, 24, 24]
    for line in lines["functional"]:
        positive(line, "ours ms", "ours read ms")
    for line in lines["peer-decode"]:
        positive(line, "synced ms", "over RotatingKVCache")
    assert all(part["seconds"] > 0 for part in content["parts"].values())


def test_every_part_for_a_cpu(tmp_path: Path) -> None:
    content, _ = report("cpu", tmp_path / "cpu.json")
    assert list(content["parts"]) == ["functional", "decode-model"]
    caches = [line["cache"] for line in content["parts"]["decode-model"]["lines"] if line["batch"] == 1]
    assert caches[2:] == [f"ours, {name}" for name in keyformer.POLICIES if keyformer.POLICIES[name].evicts]


def test_a_part_alone(tmp_path: Path) -> None:
    content, printed = report("gpu", tmp_path / "gpu.json", "--only", "peer-decode", "walk")
    assert list(content["parts"]) == ["peer-decode", "walk"] and "decode-model" not in printed


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: Any) -> Any:
        """a part"""
        yield {"case": "first", "ms": 1.0}
        raise RuntimeError("out of memory")

    monkeypatch.setitem(gpu.PARTS, "walk", broken)
    file = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--only", "walk", "functional", "--json", str(file)]) == 1
    parts = json.loads(file.read_text())["parts"]
    assert parts["walk"]["lines"] == [{"case": "first", "ms": 1.0}]
    assert parts["walk"]["failed"] == "RuntimeError: out of memory"
    assert len(parts["functional"]["lines"]) == 5 and "failed" not in parts["functional"]


def test_what_cannot_work_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nowhere" / "r.json"
    for arguments, message in (
        (["--json", str(file)], f"--json: expected a file that can be written, got {file} (No such file or directory)"),
        (["--policies", "h20"], "argument --policies: invalid choice: 'h20'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            gpu.main(["--tiny", "--only", "walk", *arguments])
        output = capsys.readouterr()
        assert stopped.value.code == 2 and output.out == "" and message in output.err


def test_a_part_that_is_stopped_leaves_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def long(options: Any) -> Any:
        """takes long"""
        yield {"case": "the first"}
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "PARTS", {"long": long, "next": long})
    file = tmp_path / "r.json"
    assert gpu.main(["--json", str(file)]) == 130
    parts = json.loads(file.read_text())["parts"]
    assert list(parts) == ["long"]
    assert (parts["long"]["lines"], parts["long"]["failed"]) == ([{"case": "the first"}], "stopped")


def test_the_peer_is_missing_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(functional, "peer_update_batched", None)
    monkeypatch.setattr(models, "peers", lambda model, budget: None)
    functional.say_what_is_missing()
    (line,) = functional.block_lines(8, 6, 4, "float32", 1)
    assert line["peer ms"] is None and line["peer/ours"] is None
    assert len(list(decode_model.with_peer(tiny_llama(), 40, 1, 1))) == 3
    assert capsys.readouterr().out.count("pip install --no-deps VeloxQuant-MLX") == 2
    assert harness._shown(None) == "-"


def test_a_prompt_that_takes_too_long_is_cut_and_says_so() -> None:
    lines = list(prefill.lines(tiny_llama(), 96, 32, 40, 0.0, 1))
    assert [line["tokens"] for line in lines] == [32] * (1 + len(prefill.ARMS))
    assert lines[0]["over KVCache"] == 1.0


def test_measured_caches_are_full_and_stay_so() -> None:
    model = tiny_llama()
    for name in gpu.POLICIES:
        caches = models.ours(model, 2, 40, name)
        assert [cache.size() for cache in caches] == [40, 40]
        token = mx.full((2, 1), 5, mx.int32)
        with keyformer.attached(model):
            for mode in (decode_model.piped, decode_model.synced):
                mode(model, caches, token, 3)
        assert [cache.size() for cache in caches] == [40, 40]
        assert {int(cache._offsets[0]) for cache in caches} == {45 + 6}
    (one, _) = models.full(model, 1, 64)
    assert one.offset == 48 and one.keys.shape[2] == 256
    assert models.rotating(model, 1, 40)[0].keys.shape[2] == 41


def test_piped_and_synced_make_the_same_tokens() -> None:
    model = tiny_llama()
    ends = []
    for mode in (decode_model.piped, decode_model.synced):
        caches = keyformer.make_prompt_cache(model, keyformer.Full())
        ends.append(mode(model, caches, mx.full((1, 1), 5, mx.int32), 5).item())
        assert caches[0].offset == 5
    assert ends[0] == ends[1]


TABLE = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","warm_up","gpu__time_duration.sum","ns","9,000"
{rows}"""


def test_gpu_time_is_read_from_a_profilers_table() -> None:
    row = '"{i}","1","{name}","gpu__time_duration.sum","{unit}","{value}"\n'
    two = [("gemv", "ns", "1,500"), ("softmax", "us", "2")] * kernels.REPEATS
    rows = "".join(row.format(i=i, name=n, unit=u, value=v) for i, (n, u, v) in enumerate(two))
    found = kernels.durations(TABLE.format(rows=rows))
    assert found[:3] == [
        ("warm_up", pytest.approx(9e-6)),
        ("gemv", pytest.approx(1.5e-6)),
        ("softmax", pytest.approx(2e-6)),
    ]
    assert kernels.one_call(found, "") == pytest.approx(3.5e-6)
    assert kernels.one_call(found, "gem") == pytest.approx(1.5e-6)
    with pytest.raises(ValueError, match="no kernel keyformer"):
        kernels.one_call(found, "keyformer")
    with pytest.raises(ValueError, match="none repeat"):
        kernels.one_call([(str(i), 1.0) for i in range(20)], "")
    with pytest.raises(ValueError, match="no table"):
        kernels.durations("==ERROR== no permission")


def test_the_profiler_is_run_and_what_fails_is_said(tmp_path: Path) -> None:
    """A stand-in for ncu: it runs the command, as ncu does, and prints a table for the definition alone."""
    row = '"1","1","gemv","gpu__time_duration.sum","ns","3000"\n'
    table = TABLE.format(rows=row * kernels.REPEATS)
    program = tmp_path / "ncu"
    program.write_text(
        f'#!/bin/sh\nwhile [ "$1" != {sys.executable} ]; do shift; done\n"$@" || exit 3\n'
        f'case "$*" in *composed*) cat <<"END"\n{table}END\n;; esac\n'
    )
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    content, printed = report("gpu", tmp_path / "j", "--only", "decode-kernel", "--ncu", PATH=path)
    for line in content["parts"]["decode-kernel"]["lines"]:
        assert line["ncu composed us"] == pytest.approx(3.0) and line["ncu kernel us"] is None
    assert "kernel under ncu: no table in what ncu printed" in printed
    _, printed = report("gpu", tmp_path / "j", "--only", "decode-kernel", "--ncu", PATH=os.path.dirname(sys.executable))
    assert "ncu is not on the path" in printed


def test_help_names_every_option_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (gpu, cpu):
        with pytest.raises(SystemExit):
            command.main(["--help"])
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("--only", "--json", "--tiny", *command.PARTS))
