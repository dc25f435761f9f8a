"""One job at a time on a machine's GPU, whichever sweep or worker started it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.gpu_lock import gpu_lock, lock_path

PROJECT = Path(__file__).resolve().parents[2]
STAGES = "stages=[load,generate,score]"


def test_a_sweep_waits_for_the_job_of_another_command_and_scoring_does_not(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    small = ["task=fact", "task.tokens=250", "task.items=2", "task.max_gen_toks=4", "generate.prefill_step_size=64"]
    given = ["-m", f"outputs={tmp_path}", "model=local", f"model.path={tiny_model_folder}", *small, "policy=h2o"]
    line = [sys.executable, "-m", "pipeline", *given]
    with open(lock_path(), "w", encoding="utf-8") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with subprocess.Popen([*line, STAGES], cwd=PROJECT, text=True, stdout=subprocess.PIPE) as sweep:
            assert sweep.stdout is not None
            said = next(text for text in sweep.stdout if "GPU" in text)
            assert said == "another job works on this machine's GPU; waiting\n"
            assert not (tmp_path / "jobs").exists()
            fcntl.flock(other, fcntl.LOCK_UN)
            assert "accuracy" in sweep.stdout.read()
        assert sweep.returncode == 0
        fcntl.flock(other, fcntl.LOCK_EX)
        subprocess.run([*line, "stages=[score]"], cwd=PROJECT, check=True, timeout=60)


def test_it_is_held_once_by_a_process_and_free_afterwards() -> None:
    with open(lock_path(), "w", encoding="utf-8") as other:
        with gpu_lock(), gpu_lock():
            pass
        with pytest.raises(ZeroDivisionError), gpu_lock():
            with gpu_lock():
                pass
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise ZeroDivisionError
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_that_cannot_be_is_named_at_once(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEYFORMER_GPU_LOCK", str(tmp_path))
    small = ["task=fact", "task.tokens=250", "task.items=2", "task.max_gen_toks=4", "generate.prefill_step_size=64"]
    given = ["-m", f"outputs={tmp_path}", "model=local", f"model.path={tiny_model_folder}", *small]
    assert main([*given, "policy=h2o,streaming", STAGES]) == 2
    said = capfd.readouterr()
    assert f"error: KEYFORMER_GPU_LOCK: expected a file that can be written, got {tmp_path} (Is a dir" in said.err
    assert "streaming-" not in said.out  # nor could any other job


def test_a_file_that_is_there_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.tex").write_text("words")
    monkeypatch.setenv("KEYFORMER_GPU_LOCK", str(tmp_path / "thesis.tex"))
    with gpu_lock():
        pass
    assert (tmp_path / "thesis.tex").read_text() == "words"


def test_jobs_on_other_devices_have_a_lock_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEYFORMER_GPU_LOCK")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain = lock_path()
    monkeypatch.setenv("TMPDIR", "/elsewhere")  # as a service has it
    assert lock_path() == plain and plain.parent == Path("/tmp")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,../2")
    assert lock_path().parent == plain.parent and lock_path().name == plain.stem + "-1,2.lock"
