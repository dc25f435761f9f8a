"""The driver as a user meets it: real sweeps of a tiny model into a real MLflow server, and every mistake's one
message.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient

from pipeline import tracking
from pipeline.__main__ import main
from tests.conftest import write_tiny_model

PROJECT = Path(__file__).resolve().parents[2]
TASK = ["task=fact", "task.tokens=250", "task.items=4", "task.max_gen_toks=4"]


def command(outputs: Path, model: Path, *overrides: str, experiment: str = "") -> list[str]:
    small = ["generate.batch_size=2", "generate.prefill_step_size=64"]
    name = [f"experiment_name={experiment or outputs.name}"]
    return [f"outputs={outputs}", "model=local", f"model.path={model}", *TASK, *small, *name, *overrides]


def child(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=PROJECT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip


@pytest.fixture
def tracked(uri: str, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """Sweeps of this test go to the session's MLflow server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(uri)


def runs(client: MlflowClient, experiment: str, kind: str = "job") -> list[Any]:
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id], f"tags.kind = '{kind}'"))


def answers(outputs: Path) -> dict[str, dict[str, Any]]:
    """Every job's responses by request, without its clocks."""
    found = {}
    for path in (outputs / "jobs").glob("*/responses.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = {line["id"]: line["response"] for line in lines}
    return found


# -- a sweep ----------------------------------------------------------------------------------------------------------


def test_a_sweep_runs_each_distinct_job_once_and_shows_it(
    tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    grid = ["policy=full,h2o,keyformer", "budget=0.25,0.5", "seed=0,1"]
    arguments = ["-m", *command(tmp_path, tiny_model_folder, *grid)]
    assert main([*arguments, "--dry-run"]) == 0
    assert not (tmp_path / "jobs").exists() and not (tmp_path / "mlflow").exists()
    assert "7 jobs" in capfd.readouterr().out

    assert main(arguments) == 0
    jobs = runs(tracked, tmp_path.name)
    # full ignores the budget and the seed, h2o has no noise: 1 + 2 + 4 of the grid's 12
    assert sorted(r.info.run_name for r in jobs) == [
        "full-fact", "h2o-25pct-fact", "h2o-50pct-fact", "keyformer-25pct-s0-fact", "keyformer-25pct-s1-fact",
        "keyformer-50pct-s0-fact", "keyformer-50pct-s1-fact",
    ]  # fmt: skip
    assert {r.info.status for r in jobs} == {"FINISHED"}
    h2o = next(r for r in jobs if r.info.run_name == "h2o-25pct-fact")
    assert h2o.data.params["policy.name"] == "h2o" and h2o.data.params["budget"] == "0.25"
    assert int(h2o.data.params["budget_rows"]) > 10
    names = {"accuracy", "task/contains", "kv/bytes_decode_peak", "kv/saved_fraction", "speed/decode_tok_per_s"}
    assert names <= h2o.data.metrics.keys()
    assert 0.6 < h2o.data.metrics["kv/saved_fraction"] < 0.8
    (parent,) = runs(tracked, tmp_path.name, "sweep")
    assert parent.info.status == "FINISHED"
    assert {a.path for a in tracked.list_artifacts(parent.info.run_id)} >= {"summary.csv", "report.md", "figures"}
    out = capfd.readouterr().out
    assert "[7/7]" in out and "accuracy_vs_budget.png" in out and "/#/experiments/" in out

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "jobs").glob("*/*.jsonl")}
    assert main(arguments) == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "jobs").glob("*/*.jsonl")} == before
    assert len(runs(tracked, tmp_path.name)) == 7 and len(runs(tracked, tmp_path.name, "sweep")) == 1
    assert "7 already finished" in capfd.readouterr().out


def test_kill_9_and_the_same_command_again_end_as_if_nothing_happened(
    tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    grid = ["-m", "policy=h2o,keyformer", "task.items=12", "task.max_gen_toks=32", "task.until=[]"]
    assert main(command(whole, tiny_model_folder, *grid)) == 0
    killed = child(*command(broken, tiny_model_folder, *grid))
    while killed.poll() is None and not any(p.stat().st_size for p in broken.glob("jobs/*/responses.jsonl")):
        pass
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    partial = answers(broken)
    assert 0 < sum(map(len, partial.values())) < 24
    assert main(command(broken, tiny_model_folder, *grid)) == 0
    assert answers(broken) == answers(whole)
    jobs = runs(tracked, "broken")
    assert sorted(r.info.run_name for r in jobs if r.info.status == "FINISHED") == [
        "h2o-25pct-fact",
        "keyformer-25pct-s0-fact",
    ]
    assert not [r for r in jobs if r.info.status == "RUNNING"]
    expected = {r.info.run_name: r.data.metrics["accuracy"] for r in runs(tracked, "whole")}
    assert {r.info.run_name: r.data.metrics["accuracy"] for r in jobs if r.info.status == "FINISHED"} == expected


def test_two_at_once_do_each_job_once(tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path) -> None:
    arguments = ["-m", *command(tmp_path, tiny_model_folder, "policy=full,h2o,window")]
    both = [child(*arguments) for _ in range(2)]
    printed = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    jobs = runs(tracked, tmp_path.name)
    assert sorted(r.info.run_name for r in jobs if r.info.status == "FINISHED") == [
        "full-fact",
        "h2o-25pct-fact",
        "window-25pct-fact",
    ]
    assert not [r for r in jobs if r.info.status == "RUNNING"]
    assert all(len(lines) == 4 for lines in answers(tmp_path).values())


def test_ctrl_c_ends_the_runs_as_killed(tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path) -> None:
    long = ["task.items=12", "task.max_gen_toks=64", "task.until=[]"]
    process = child("-m", *command(tmp_path, tiny_model_folder, "policy=h2o,keyformer", *long))
    while process.poll() is None and not any(p.stat().st_size for p in tmp_path.glob("jobs/*/responses.jsonl")):
        pass
    process.send_signal(signal.SIGINT)
    printed = process.communicate()[0]
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert {r.info.status for r in runs(tracked, tmp_path.name)} == {"KILLED"}
    assert {r.info.status for r in runs(tracked, tmp_path.name, "sweep")} == {"KILLED"}


def test_a_job_that_fails_leaves_the_others(
    tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-m", *command(tmp_path, tiny_model_folder, "policy=h2o,window")]
    main([*arguments, "--dry-run"])
    key = next(line.split()[0] for line in capfd.readouterr().out.splitlines() if "h2o" in line)
    (tmp_path / "jobs" / key / "responses.jsonl").mkdir(parents=True)  # cannot be written: a real error, in one job
    assert main(arguments) == 1
    status = {r.info.run_name: (r.info.status, r.data.tags.get("reason", "")) for r in runs(tracked, tmp_path.name)}
    assert status["window-25pct-fact"][0] == "FINISHED"
    assert status["h2o-25pct-fact"][0] == "FAILED" and "IsADirectoryError" in status["h2o-25pct-fact"][1]
    assert runs(tracked, tmp_path.name, "sweep")[0].info.status == "FAILED"
    assert len(runs(tracked, tmp_path.name)) == 2
    (tmp_path / "jobs" / key / "responses.jsonl").rmdir()
    assert main(arguments) == 0
    assert runs(tracked, tmp_path.name, "sweep")[0].info.status == "FINISHED"


def test_a_job_that_fails_before_it_has_a_run_is_seen_as_well(
    tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-m", *command(tmp_path, tiny_model_folder, "policy=h2o,window")]
    main([*arguments, "--dry-run"])
    key = next(line.split()[0] for line in capfd.readouterr().out.splitlines() if "h2o" in line)
    (tmp_path / "jobs" / key / "config.yaml").mkdir(parents=True)  # the first file of a job
    for times in (1, 2):  # a failure of an earlier command does not count for this one
        assert main(arguments) == 1
        failed = [run for run in runs(tracked, tmp_path.name) if run.data.tags["key"] == key]
        assert [run.info.status for run in failed] == ["FAILED"] * times
        assert all(run.data.tags["reason"].startswith("IsADirectoryError: ") for run in failed)
        assert all(run.data.params["policy.name"] == "h2o" for run in failed)
    out = capfd.readouterr().out
    assert "IsADirectoryError" in out[out.index("failed") :]  # the table says it, too


def test_no_tracking_server_costs_no_generation(
    uri: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert main(["-m", *command(tmp_path, tiny_model_folder, "policy=full,h2o")]) == 0
    out = capfd.readouterr().out
    assert "python -m pipeline.tracking publish" in out
    assert len(answers(tmp_path)) == 2
    env = os.environ | {"MLFLOW_TRACKING_URI": uri}
    later = [sys.executable, "-m", "pipeline.tracking", "publish", "--outputs", str(tmp_path)]
    for _ in range(2):  # exactly once, however often
        assert subprocess.run(later, cwd=PROJECT, env=env, capture_output=True).returncode == 0
        jobs = runs(MlflowClient(uri), tmp_path.name)
        assert sorted(r.info.run_name for r in jobs) == ["full-fact", "h2o-25pct-fact"]
        assert {r.info.status for r in jobs} == {"FINISHED"}


# -- stages -----------------------------------------------------------------------------------------------------------


def test_a_finished_job_is_scored_again_without_its_model(tracked: MlflowClient, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    outputs = tmp_path / "again"
    assert main(command(outputs, model, "policy=h2o")) == 0
    (job,) = (outputs / "jobs").iterdir()
    (before,) = runs(tracked, "again")
    assert before.data.metrics["accuracy"] == 0.0  # a random model
    shutil.rmtree(model)
    requests = {json.loads(line)["id"]: json.loads(line) for line in next(outputs.glob("data/*/requests.jsonl")).open()}
    lines = [json.loads(line) for line in (job / "responses.jsonl").read_text().splitlines()]
    for line in lines[:3]:
        line["response"] = requests[line["id"]]["target"]
    (job / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([f"job={job}", "stages=[score,publish]"]) == 0
    (after,) = runs(tracked, "again")
    assert after.info.run_id == before.info.run_id and after.info.status == "FINISHED"
    assert after.data.metrics["accuracy"] == 0.75


def test_a_stored_job_is_scored_where_it_lies_now(
    tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outputs = tmp_path / "here"
    assert main(command(outputs, tiny_model_folder, "policy=h2o")) == 0
    outputs.rename(tmp_path / "there")
    (job,) = (tmp_path / "there" / "jobs").iterdir()
    again = [f"job={job}", "stages=[score]"]
    (job / "score.json").unlink()
    with (job / "responses.jsonl").open("a") as out:
        out.write("damage\n")
    assert main(again) == 0
    assert (job / "score.json").is_file() and not outputs.exists()
    assert len((job / "responses.jsonl").read_text().splitlines()) == 4
    assert main([*again, "task.primary=nope"]) == 2
    assert main([*again, "task.tokens=300"]) == 2
    assert main(["-m", f"job={job},x", "stages=[score]"]) == 2
    assert main([f"job={job}", "stages=[cook]"]) == 2
    (job / "times.json").write_text("")
    assert main(again) == 0
    data = next((tmp_path / "there" / "data").iterdir())
    (data / "requests.jsonl").unlink()
    assert main(again) == 2
    (job / "config.yaml").write_text("")
    assert main(again) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_damaged_line_of_a_finished_job_costs_nothing(
    tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path
) -> None:
    arguments = [*command(tmp_path, tiny_model_folder, "policy=h2o"), "stages=[load,generate]"]
    assert main(arguments) == 0
    (path,) = tmp_path.glob("jobs/*/responses.jsonl")
    whole = answers(tmp_path)
    for damage in (b"garbage\n", b"\xff\n", b'{"id": "1"}\n', b"cut off"):
        path.write_bytes(path.read_bytes() + damage)
        assert main(arguments) == 0
        assert answers(tmp_path) == whole
    assert main([*command(tmp_path, tiny_model_folder, "policy=h2o")]) == 0


@pytest.mark.parametrize("where", ["finished", "_SweepRun.settle"])
def test_ctrl_c_before_and_after_the_jobs_ends_the_sweep_as_well(
    where: str, tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *inside, name = where.split(".")
    place = getattr(tracking, inside[0]) if inside else tracking
    real, calls = getattr(place, name), []

    def interrupted_once(*given: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(place, name, interrupted_once)
    assert main(command(tmp_path, tiny_model_folder, "policy=h2o", "task.items=2")) == 130
    assert [r.info.status for r in runs(tracked, tmp_path.name, "sweep")] == ["KILLED"]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_being_told_to_end_is_as_ctrl_c(
    tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    long = ["task.items=12", "task.max_gen_toks=64", "task.until=[]"]
    process = child(*command(tmp_path, tiny_model_folder, "policy=h2o", *long))
    while process.poll() is None and not any(p.stat().st_size for p in tmp_path.glob("jobs/*/responses.jsonl")):
        pass
    process.send_signal(ending)
    printed = process.communicate()[0]
    assert process.returncode == 130, printed
    assert {r.info.status for r in [*runs(tracked, tmp_path.name), *runs(tracked, tmp_path.name, "sweep")]} == {
        "KILLED"
    }


def test_stages_can_be_run_one_by_one(tracked: MlflowClient, tiny_model_folder: Path, tmp_path: Path) -> None:
    arguments = command(tmp_path, tiny_model_folder, "policy=window")
    assert main([*arguments, "stages=[score,publish]"]) == 2  # nothing to score yet
    assert main([*arguments, "stages=[load]"]) == 0
    assert not answers(tmp_path)
    assert main([*arguments, "stages=[load,generate]"]) == 0
    assert len(answers(tmp_path)) == 1 and not runs(tracked, tmp_path.name)
    assert main([*arguments, "stages=[score]"]) == 0
    assert main([*arguments, "stages=[score,publish]"]) == 0
    (run,) = runs(tracked, tmp_path.name)
    assert run.info.status == "FINISHED"


# -- bad input --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown override": (["no_such_option=1"], "no_such_option"),
    "unknown group choice": (["policy=magic"], "magic"),
    "unknown experiment": (["experiment=nothing"], "nothing"),
    "unknown policy choice": (["policy=h2o", "+policy.sauce=1"], "sauce"),
    "two values without -m": (["policy=h2o,window"], "h2o,window"),
    "budget 0": (["policy=h2o", "budget=0"], "at least 1, got 0"),
    "budget negative": (["policy=h2o", "budget=-5"], "got -5"),
    "fraction 0": (["policy=h2o", "budget=0.0"], "(0, 1]"),
    "fraction above 1": (["policy=h2o", "budget=1.5"], "(0, 1]"),
    "fraction negative": (["policy=h2o", "budget=-0.1"], "(0, 1]"),
    "budget a word": (["policy=h2o", "budget=lots"], "'lots'"),
    "budget null": (["policy=h2o", "budget=null"], "None"),
    "all protected": (["policy=window", "policy.n_sink=64", "budget=64"], "at least 65"),
    "recent fraction": (["policy=h2o", "policy.recent=1.5"], "recent"),
    "seed": (["seed=-1"], "seed"),
    "seed a word": (["seed=x"], "seed"),
    "temperature": (["policy=keyformer", "policy.tau_init=.nan"], "tau_init"),
    "stage": (["stages=[cook]"], "cook"),
    "no stage": (["stages=[]"], "stages"),
    "prefill": (["prefill=half"], "half"),
    "positions": (["positions=relative"], "'contiguous', got 'relative'"),
    "allocation": (["allocate=cube"], "'pyramid'"),
    "allocation weights": (["allocate=[1,-2]"], "positive numbers as weights, got -2"),
    "batch size": (["generate.batch_size=0"], "batch_size"),
    "chunk": (["generate.prefill_step_size=1.5"], "prefill_step_size"),
    "unknown task": (["task=lm_eval", "task.name=no_such_task", "task.include_path=conf"], "no_such_task"),
    "task without a name": (["task=lm_eval"], "task.name"),
    "no items": (["task.items=0"], "items"),
    "context": (["task.tokens=5000"], "4096"),
    "too short": (["task.tokens=10"], "tokens"),
    "prose": (["task.prose=/no/such/file"], "/no/such/file"),
    "job": (["job=/no/such/job", "stages=[score]"], "/no/such/job"),
    "job and generate": (["job=/no/such/job"], "stages=[score,publish]"),
    "unknown option added": (["+polcy=h2o"], "did you mean policy"),
    "unknown inner option": (["policy=h2o", "policy.sinks=3"], "policy.n_sink"),
    "unknown model option": (["+model.foo=1"], "model.foo"),
    "trailing comma": (["policy=h2o,"], "'policy=h2o,'"),
    "experiment a number": (["experiment_name=2024"], "experiment_name"),
    "experiment of 201 characters": ([f"experiment_name={'x' * 201}"], "at most 200 characters, got 201"),
    "outputs empty": (["outputs=''"], "outputs"),
    "outputs null": (["outputs=null"], "outputs"),
    "group null": (["policy=null"], "policy"),
    "stages a word": (["stages=load"], "stages"),
    "stages null": (["stages=null"], "stages"),
    "store infinite": (["generate.share_prefill_gb=.inf"], "share_prefill_gb"),
    "port": (["tracking.port=99999"], "65535"),
    "wait": (["tracking.wait_s=-1"], "tracking.wait_s"),
    "port a word": (["tracking.port=x"], "65535"),
    "sinks beyond reason": (["policy=window", "policy.n_sink=1000000000000"], "n_sink"),
    "recent beyond reason": (["policy=h2o", "policy.recent=0.999999999999", "budget=5"], "at least 49"),
    "window beyond reason": (["policy=h2o", "policy.window=10000000000000000"], "window"),
    "redraw": (["policy=keyformer", "policy.redraw=maybe"], "redraw"),
    "full with a word": (["policy=full", "budget=abc"], "'abc'"),
    "publish without a score": (["stages=[publish]"], "stages"),
    "mlflow nowhere": (["tracking=server"], "tracking.uri"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "sweep"),
    [(m, sweep) for m in MISTAKES for sweep in (False, True) if not (sweep and m == "two values without -m")],
)
def test_a_mistake_is_one_message_and_nothing_is_started(
    mistake: str, sweep: bool, tiny_model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    overrides, named = MISTAKES[mistake]
    arguments = command(tmp_path / "out", tiny_model_folder)
    arguments = [a for a in arguments if not a.startswith("task") or not any(o.startswith("task=") for o in overrides)]
    arguments = [] if mistake.startswith("job") else arguments
    assert main([*(["-m"] if sweep else []), *arguments, *overrides]) == 2
    printed = capfd.readouterr()
    assert named in printed.err
    assert printed.err.count("error:") == 1 and "Traceback" not in printed.err
    for folder in ("jobs", "mlflow", "reports", "prefill"):
        assert not (tmp_path / "out" / folder).exists()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_damaged_model_is_named(file: str, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    if damage == "missing":
        (model / file).unlink()
    else:
        (model / file).write_bytes((model / file).read_bytes()[:100])
    assert main(command(tmp_path / "out", model)) == 2
    assert file.split(".")[0] in capfd.readouterr().err
    assert not (tmp_path / "out" / "jobs").exists()


@pytest.mark.parametrize("override", ["outputs=a,b", "experiment_name=a,b", "stages=[load],[load,generate]"])
def test_a_sweep_has_one_place_one_name_and_one_list_of_stages(
    override: str, tiny_model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [a for a in command(tmp_path, tiny_model_folder) if not a.startswith(override.split("=")[0])]
    assert main(["-m", *arguments, override]) == 2
    assert "one value for a whole sweep" in capfd.readouterr().err


def test_an_outputs_folder_that_cannot_be_is_named(
    tiny_model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(command(tmp_path / "file", tiny_model_folder)) == 2
    assert "outputs" in capfd.readouterr().err


# -- configuration ----------------------------------------------------------------------------------------------------


def test_help_names_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for path in (PROJECT / "conf").glob("*/*.yaml"):
        assert path.stem in printed


@pytest.mark.parametrize("path", sorted((PROJECT / "conf").glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}={p.stem}")
def test_every_choice_composes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = {"task=lm_eval": ["task.name=x"], "model=local": ["model.path=x"]}
    choice = f"{path.parent.name}={path.stem}"
    sweep = ["-m"] if path.parent.name == "experiment" else []
    assert main([*sweep, "--cfg", choice, *needs.get(choice, [])]) == 0
    composed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert composed and all(path.parent.name == "experiment" or cfg[path.parent.name] for cfg in composed)
