"""report on runs of a real MLflow server: numbers worked by hand, figures looked at, failures shown as failures."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from pipeline import report as report_module
from pipeline import tracking
from pipeline.report import report, student, wilson
from pipeline.tracking import Sweep
from tests.job_folders import SWEEP_KEY, fabricate


@pytest.fixture
def sweep(uri: str, request: pytest.FixtureRequest) -> Sweep:
    return tracking.open_sweep(uri, request.node.name, SWEEP_KEY, {"jobs": 4})


def publish(sweep: Sweep, *folders: Path) -> None:
    for folder in folders:
        tracking.publish_job(sweep, folder)


def text_of(result: report_module.Report) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(result.table)
    return console.export_text()


def test_intervals_worked_by_hand() -> None:
    # z = 1.959964, z^2 = 3.841459. p = 1/2 of n = 4: 1.959964 / 1.960365 * sqrt(1/16 + 3.841459/64) = 0.349961.
    assert wilson(0.5, 4) == pytest.approx((0.150039, 0.849961), abs=1e-6)
    assert wilson(1.0, 4) == pytest.approx((4 / (4 + 3.841459), 1.0), abs=1e-6)
    assert wilson(0.0, 4) == pytest.approx((0.0, 3.841459 / (4 + 3.841459)), abs=1e-6)
    # sd = 0.2, t(0.975, 2) = 4.302653: half = 4.302653 * 0.2 / sqrt(3) = 0.496827.
    assert student([0.2, 0.4, 0.6]) == pytest.approx((-0.096827, 0.896827), abs=1e-6)
    assert student([0.4]) is None


def test_rows_are_averaged_over_seeds_first_and_paired_with_the_full_cache(sweep: Sweep, tmp_path: Path) -> None:
    publish(
        sweep,
        fabricate(tmp_path, "k1", [1.0, 1.0, 1.0, 1.0], policy="full", budget=None),
        fabricate(tmp_path, "k2", [1.0, 0.0, 1.0, 0.0], seed=0, metrics={"speed/decode_tok_per_s": 10.0}),
        fabricate(tmp_path, "k3", [1.0, 0.0, 0.0, 0.0], seed=1, metrics={"kv/bytes_decode_peak": 6.0e6}),
        fabricate(tmp_path, "k4", [0.0, 1.0, 0.0, 0.0], budget=256, policy="h2o"),
    )
    result = report(sweep, tmp_path / "out")
    full, keyformer, h2o = result.rows
    assert (full["policy"], full["budget"], full["items"], full["seeds"]) == ("full", "full", 4, 1)
    assert full["accuracy_vs_full"] is None
    assert (full["accuracy"], full["accuracy_low"], full["accuracy_high"]) == pytest.approx(
        (1.0, 0.510109, 1.0), abs=1e-6
    )
    # Items over both seeds: 1, 0, 1/2, 0. Wilson with p = 3/8 and n = 4 items, not 8 answers.
    assert (keyformer["items"], keyformer["seeds"], keyformer["accuracy"]) == (4, 2, 0.375)
    interval = (keyformer["accuracy_low"], keyformer["accuracy_high"])
    assert interval == pytest.approx((0.091899, 0.780573), abs=1e-5)
    # Differences 0, -1, -1/2, -1: mean -5/8, sd 0.478714, t(0.975, 3) = 3.182446, half 0.761741; a difference is >= -1.
    assert keyformer["accuracy_vs_full"] == -0.625
    difference = (keyformer["accuracy_vs_full_low"], keyformer["accuracy_vs_full_high"])
    assert difference == pytest.approx((-1.0, 0.136741), abs=1e-5)
    assert keyformer["speed/decode_tok_per_s"] == pytest.approx((10.0 + 12.5) / 2)
    assert keyformer["kv/bytes_decode_peak"] == 6.0e6  # a peak over both seeds
    assert keyformer["kv/saved_fraction"] == 0.75
    assert (h2o["budget"], h2o["accuracy"], h2o["accuracy_vs_full"]) == ("256", 0.25, -0.75)
    assert result.failed == 0

    with open(tmp_path / "out" / "summary.csv", newline="") as lines:
        written = list(csv.DictReader(lines))
    assert [row["accuracy"] for row in written] == ["1.0", "0.375", "0.25"]
    assert written[1]["accuracy_vs_full"] == "-0.625" and written[1]["kv/bytes_full"] == "23600000.0"
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "-0.62 [-1.00, +0.14]" in markdown and "4 x 2" in markdown and "Wilson" in markdown
    for text in (text_of(result), markdown):
        assert "0.38 [0.09, 0.78]" in text and "-0.62" in text and "25 %" in text and "5.90" not in text
    assert SWEEP_KEY in unquote(result.link) and "orderByKey=metrics.`accuracy`" in unquote(result.link)


def test_graded_values_get_a_clipped_t_interval_and_perplexity_its_own(sweep: Sweep, tmp_path: Path) -> None:
    graded = fabricate(tmp_path, "k1", [0.2, 0.4, 0.6], task="perplexity", nll=[2.0, 3.0, 4.0])
    publish(sweep, graded)
    (row,) = report(sweep, tmp_path / "out").rows
    interval = (row["accuracy"], row["accuracy_low"], row["accuracy_high"])
    assert interval == pytest.approx((0.4, 0.0, 0.896827), abs=1e-6)
    assert row["task/perplexity"] == pytest.approx(math.exp(3.0))
    half = 4.302653 / math.sqrt(3)  # sd = 1
    bounds = (row["task/perplexity_low"], row["task/perplexity_high"])
    assert bounds == pytest.approx((math.exp(3 - half), math.exp(3 + half)), rel=1e-5)
    assert row["accuracy_vs_full"] is None  # no full cache in this sweep


def test_jobs_that_differ_in_a_setting_are_never_averaged(sweep: Sweep, tmp_path: Path) -> None:
    publish(
        sweep,
        fabricate(tmp_path, "k1", [1.0, 1.0], settings={"policy.tau_init": 1.0}),
        fabricate(tmp_path, "k2", [0.0, 0.0], settings={"policy.tau_init": 2.0}),
        fabricate(tmp_path, "k3", [1.0, 0.0], policy="h2o", settings={"task.length": 1024}),
    )
    rows = report(sweep, tmp_path / "out").rows
    cells = [(row["task"], row["policy"], row["accuracy"]) for row in rows]
    assert ("fact length=1024", "h2o", 0.5) in cells
    assert ("fact length=None", "keyformer policy.tau_init=1.0", 1.0) in cells
    assert ("fact length=None", "keyformer policy.tau_init=2.0", 0.0) in cells


def test_failures_are_shown_with_their_reason_and_never_as_a_number(sweep: Sweep, tmp_path: Path) -> None:
    publish(sweep, fabricate(tmp_path, "k1", [1.0, 1.0], policy="full", budget=None))
    tracking.start_job(sweep, fabricate(tmp_path, "k2", None, budget=0.1)).fail("RuntimeError: Metal ran out")
    no_number = fabricate(tmp_path, "k3", [1.0, 1.0], policy="h2o")
    (no_number / "score.json").write_text(json.dumps({"metrics": {"accuracy": float("nan")}}))
    publish(sweep, no_number)
    result = report(sweep, tmp_path / "out")
    assert result.failed == 2
    _, keyformer, h2o = result.rows
    assert keyformer["accuracy"] is None and keyformer["items"] is None and keyformer["failed"] == 1
    assert "failed (RuntimeError: Metal ran out)" in keyformer["note"]
    assert h2o["accuracy"] is None and "no finite accuracy (not finite: accuracy)" in h2o["note"]
    text = " ".join(text_of(result).split())  # it wraps at 80 columns
    assert "no result" in text and "Metal ran out" in text and "nan" not in text
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "Jobs without a result: 2" in markdown and "never started: 1 of 4" in markdown
    assert "Jobs that never started: 1 of 4." in str(result.table.caption)

    retried = fabricate(tmp_path / "again", "k2", [1.0, 0.0], budget=0.1)  # a later attempt that succeeds counts alone
    publish(sweep, retried)
    assert report(sweep, tmp_path / "out").failed == 1


def test_figures_are_drawn(sweep: Sweep, tmp_path: Path) -> None:
    blue, vermillion = (0, 0x72, 0xB2), (0xD5, 0x5E, 0)
    folders = [fabricate(tmp_path, f"f{task}", [1.0, 0.9], policy="full", budget=None, task=task) for task in "ab"]
    for task in "ab":
        for budget in (0.1, 0.5):
            for policy in ("keyformer", "h2o"):
                folders.append(
                    fabricate(
                        tmp_path, f"{task}{budget}{policy}", [budget, 0.5], policy=policy, budget=budget, task=task
                    )
                )
    publish(sweep, *folders)
    result = report(sweep, tmp_path / "out")
    figures = [file for file in result.files if file.suffix == ".png"]
    assert [file.name for file in figures] == ["accuracy_vs_budget.png", "accuracy_vs_memory.png"]
    for file in figures:
        pixels = (image.imread(file)[..., :3] * 255).round().astype(int)
        height, width, _ = pixels.shape
        assert width >= 800 and height >= 500
        for colour in (blue, vermillion):
            for half in (pixels[:, : width // 2], pixels[:, width // 2 :]):  # both policies in both facets
                assert (np.abs(half - colour).sum(axis=-1) < 12).sum() > 200


def test_the_caption_names_a_band_only_where_one_is_drawn(sweep: Sweep, tmp_path: Path) -> None:
    publish(sweep, fabricate(tmp_path, "k1", [1.0, 0.0]))
    assert report_module._caption(report(sweep, tmp_path / "out").rows, [("fact", "accuracy")]).startswith("Bars: 95")
    publish(sweep, fabricate(tmp_path, "k2", [1.0, 1.0], policy="full", budget=None))
    rows = report(sweep, tmp_path / "out").rows
    assert report_module._caption(rows, [("fact", "accuracy")]).startswith("Bars and band: 95")
    assert report_module._caption(rows, [("other", "accuracy")]).startswith("Bars: 95")


def test_the_command_creates_no_mistyped_folder_and_says_when_it_cannot_write(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sweep.uri)
    assert report_module.main(["--outputs", str(tmp_path / "nope")]) == 2
    assert not (tmp_path / "nope").exists() and "no folder: correct --outputs" in capsys.readouterr().err
    (tmp_path / "reports").write_text("a file where a folder should be", encoding="utf-8")
    assert report_module.main(["--experiment", sweep.experiment_name, "--outputs", str(tmp_path)]) == 2
    assert "expected to read and write files in" in capsys.readouterr().err


def test_an_empty_sweep_makes_a_report_without_figures(sweep: Sweep, tmp_path: Path) -> None:
    result = report(sweep, tmp_path / "out")
    assert (result.rows, result.failed) == ([], 0)
    assert [file.name for file in result.files] == ["summary.csv", "report.md"]
    assert "No job has run yet" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_the_command_prints_the_latest_table_again(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sweep.uri)
    publish(sweep, fabricate(tmp_path, "k1", [1.0, 0.0]))
    assert report_module.main(["--experiment", sweep.experiment_name, "--outputs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "keyformer" in said and "accuracy_vs_budget.png" in said and sweep.uri in said
    assert report_module.main(["--experiment", "no such thing", "--outputs", str(tmp_path)]) == 2
    assert "expected a sweep in no such thing" in capsys.readouterr().err
