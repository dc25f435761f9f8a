"""The checker of the fault tests finds what it is there to find."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from desk import Desk, Result, results_in
from mlflow.tracking import MlflowClient

from tests.job_folders import fabricate

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_quick]
KEYS = ("a" * 16, "b" * 16)
Published = tuple[str, dict[str, Result], Path]  # experiment, expected results, outputs


@pytest.fixture
def published(whole_desk: Desk, tmp_path: Path) -> Published:
    """Two jobs of a closed sweep in the head's MLflow, and the driver's folders of them."""
    experiment = f"checker-{os.urandom(2).hex()}"
    for key in KEYS:
        fabricate(tmp_path, key, [0.5, 1.0], experiment=experiment)

    def publish() -> None:
        client = MlflowClient(whole_desk.uri)
        experiment_id = client.create_experiment(experiment)
        parent = client.create_run(experiment_id, tags={"kind": "sweep"})
        for key in KEYS:
            folder = tmp_path / "jobs" / key
            run_id = client.create_run(experiment_id, tags={"kind": "job", "key": key}).info.run_id
            client.log_metric(run_id, "accuracy", 0.75)
            packed = tmp_path / "responses.jsonl.gz"
            packed.write_bytes(gzip.compress((folder / "responses.jsonl").read_bytes()))
            client.log_artifact(run_id, str(packed))
            client.set_terminated(run_id, "FINISHED")
            (folder / "published.json").write_text(json.dumps({"run_id": run_id}))
        client.set_terminated(parent.info.run_id, "FINISHED")

    whole_desk.head.inside(publish)
    return experiment, results_in(tmp_path), tmp_path


def test_it_accepts_a_good_sweep(whole_desk: Desk, published: Published) -> None:
    experiment, expected, outputs = published
    assert set(whole_desk.check(experiment, expected, outputs)) == set(KEYS)


def double(client: MlflowClient, experiment_id: str) -> None:
    run = client.create_run(experiment_id, tags={"kind": "job", "key": KEYS[0]})
    client.set_terminated(run.info.run_id, "FINISHED")


def left_running(client: MlflowClient, experiment_id: str) -> None:
    client.create_run(experiment_id, tags={"kind": "job", "key": KEYS[0]})


def lost(client: MlflowClient, experiment_id: str) -> None:
    (run,) = client.search_runs([experiment_id], f"tags.key = '{KEYS[0]}'")
    client.delete_run(run.info.run_id)


def other_accuracy(client: MlflowClient, experiment_id: str) -> None:
    (run,) = client.search_runs([experiment_id], f"tags.key = '{KEYS[0]}'")
    client.log_metric(run.info.run_id, "accuracy", 0.1, timestamp=run.info.end_time + 10**6)


def parent_open(client: MlflowClient, experiment_id: str) -> None:
    (run,) = client.search_runs([experiment_id], "tags.kind = 'sweep'")
    client.update_run(run.info.run_id, status="RUNNING")


@pytest.mark.parametrize("breaking", [double, left_running, lost, other_accuracy, parent_open])
def test_it_sees_what_is_wrong_in_mlflow(
    whole_desk: Desk,
    published: Published,
    breaking: Callable[[MlflowClient, str], None],
) -> None:
    experiment, expected, outputs = published

    def harm() -> None:
        client = MlflowClient(whole_desk.uri)
        breaking(client, client.get_experiment_by_name(experiment).experiment_id)

    whole_desk.head.inside(harm)
    with pytest.raises(AssertionError):
        whole_desk.check(experiment, expected, outputs)


def test_it_sees_other_answers_and_a_job_missing_on_the_drivers_disk(whole_desk: Desk, published: Published) -> None:
    experiment, expected, outputs = published
    key = KEYS[0]
    other = {**expected, key: replace(expected[key], answers={"0" * 16: "Rome"})}
    with pytest.raises(AssertionError):
        whole_desk.check(experiment, other, outputs)
    note = outputs / "jobs" / key / "published.json"
    good = note.read_text()
    note.write_text(json.dumps({"run_id": "another"}))
    with pytest.raises(AssertionError):
        whole_desk.check(experiment, expected, outputs)
    note.write_text(good)
    (outputs / "jobs" / key / "score.json").unlink()
    with pytest.raises(AssertionError):
        whole_desk.check(experiment, expected, outputs)
