"""The doctor on a real server full of what crashes leave: it lists all of it, mends all of it, and touches no more."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline import leases, tracking
from tests.job_folders import fabricate

PROJECT = Path(__file__).resolve().parents[2]
ALIVE = """
import sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from pipeline import leases, tracking
from tests.job_folders import fabricate
leases.BEAT_S = tracking.BEAT_S = 1.0
leases._machine = lambda: "mini-1"
uri, experiment, folder = sys.argv[1:]
sweep = tracking.open_sweep(uri, experiment, "alive", {})
tracking.start_job(sweep, fabricate(Path(folder), "alive", None, sweep_key="alive"))
tags = {"kind": "sweep", "sweep_key": "busy", "process": "mini-2:1:1", "lease": "1"}
busy = MlflowClient(uri).create_run(sweep.experiment_id, tags=tags, run_name="dead sweep whose job lives").info.run_id
busy = tracking.Sweep(uri, sweep.experiment_id, busy, experiment, "busy")
tracking.start_job(busy, fabricate(Path(folder), "living", None, seed=1, sweep_key="busy"))
print(flush=True)
input()
"""


def everything(client: MlflowClient, experiments: list[str]) -> dict[str, str]:
    """Run name -> status, or "deleted", of all runs of the experiments."""
    runs: list[Run] = client.search_runs(experiments, run_view_type=3)
    gone = {run.info.run_id for run in runs if run.info.lifecycle_stage == "deleted"}
    return {run.info.run_name: "deleted" if run.info.run_id in gone else run.info.status for run in runs}


def test_what_crashes_leave_is_listed_and_mended_and_the_living_are_left_alone(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for module in (leases, tracking):
        for name, value in (("LEASE_S", 6.0), ("BEAT_S", 1.0), ("CONFIRM_S", 3.0)):
            monkeypatch.setattr(module, name, value, raising=False)
    client = MlflowClient(uri)
    outputs, elsewhere = tmp_path / "outputs", tmp_path / "elsewhere"
    line = [sys.executable, "-c", ALIVE, uri, "doctored", str(elsewhere)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, cwd=PROJECT, text=True, **pipes) as driver:  # type: ignore[call-overload]
        driver.stdout.readline()
        first, second = client.get_experiment_by_name("doctored").experiment_id, client.create_experiment("doctored 2")

        def left(name: str, status: str = "RUNNING", experiment: str = first, **tags: str) -> str:
            died = {"process": "mini-2:1:1", "lease": str(int(time.time()) - 500), "attempt": name} | tags
            run = client.create_run(experiment, tags=died, run_name=name)
            if status != "RUNNING":
                client.set_terminated(run.info.run_id, status)
            return str(run.info.run_id)

        parent = left("dead sweep", kind="sweep", sweep_key="dead")
        left("dead job", kind="job", key="k1", **{"mlflow.parentRunId": parent})
        left("dead job of another experiment", experiment=second, kind="job", key="k1")
        kept = left("finished first", "FINISHED", kind="job", key="k3")
        time.sleep(0.01)
        left("finished again", "FINISHED", kind="job", key="k3")
        left("finished elsewhere", "FINISHED", second, kind="job", key="k3")
        left("created", "FINISHED", kind="job", key="k4", attempt="a4")
        left("its ghost", kind="job", key="k4", attempt="a4")
        left("ghost of a sweep, now dead", kind="sweep", sweep_key="x", attempt="ghostly")
        left("failed", "FAILED", kind="job", key="k5")
        client.create_run(first, run_name="somebody else's")
        fabricate(outputs, "k6", [1.0], policy="h2o", experiment="doctored", sweep_key="dead")
        fabricate(outputs, "k7", None, experiment="doctored", sweep_key="dead")

        before = everything(client, [first, second])
        assert tracking.main(["doctor", "--outputs", str(outputs), "--dry-run"]) == 1
        listed = capsys.readouterr().out.splitlines()
        assert everything(client, [first, second]) == before and not (outputs / "reports").exists()
        wrong = ["dead sweep", "dead job", "dead job of another experiment", "finished again", "its ghost"]
        wrong += ["ghost of a sweep, now dead"]
        found = [line for line in listed if "(run " in line]
        assert sorted(line.split(" (run ")[0].split(" ", 2)[2] for line in found) == sorted(wrong)
        assert sum("to be KILLED" in line for line in found) == 6
        assert [line for line in listed if "not published" in line] == [
            f"finished, but not published: {outputs / 'jobs' / 'k6'}: to be published"
        ]
        assert listed[-1].startswith("7 to mend")

        assert tracking.main(["doctor", "--outputs", str(outputs)]) == 0
        assert "published k6" in capsys.readouterr().out
        after = everything(client, [first, second])
        changed = {name: state for name, state in after.items() if before.get(name) != state}
        assert {name: changed.pop(name) for name in wrong[1:]} == dict.fromkeys(wrong[1:], "KILLED") | {
            "its ghost": "deleted"
        }
        # its unpublished job was published under it
        assert changed == {"dead sweep": "FINISHED", "h2o-0.25-s0-fact": "FINISHED"}
        again = next(run for run in client.search_runs([first]) if run.info.run_name == "finished again")
        assert again.data.tags["reason"] == f"the same job finished as {kept}"

        assert tracking.main(["doctor", "--outputs", str(outputs)]) == 0
        assert f"nothing to mend at {uri}" in capsys.readouterr().out
        assert everything(client, [first, second]) == after
        running = {name for name, state in after.items() if state == "RUNNING"}
        assert {"keyformer-0.25-s0-fact", "keyformer-0.25-s1-fact", "dead sweep whose job lives"} < running
        driver.kill()
    assert tracking.main(["doctor", "--outputs", str(outputs)]) == 0
    assert sum("KILLED" in line for line in capsys.readouterr().out.splitlines()) == 4
    running = {name for name, state in everything(client, [first, second]).items() if state == "RUNNING"}
    assert running == {"somebody else's"}
    shutil.rmtree(outputs)
    assert tracking.main(["doctor", "--outputs", str(outputs)]) == 2
    assert "no folder" in capsys.readouterr().err


def test_only_the_doctor_has_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tracking.main(["publish", "--dry-run"])
    assert "only doctor" in capsys.readouterr().err
