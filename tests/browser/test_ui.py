"""What a user sees: the link of a report, opened in a real browser on the real MLflow UI (`make test-browser`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright import sync_api as playwright

from pipeline import embedded_server, tracking
from pipeline.report import report
from tests.job_folders import SWEEP_KEY, fabricate

pytestmark = pytest.mark.browser

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PATIENCE_MS = 60_000  # a loaded machine; every wait ends as soon as the page shows what is expected


@pytest.fixture
def page() -> Iterator[playwright.Page]:
    if not Path(CHROMIUM).exists():
        pytest.fail(f"expected chromium at {CHROMIUM}, got none: apt-get install chromium, or set CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        try:
            opened = browser.new_page(viewport={"width": 1500, "height": 1000})
            opened.set_default_timeout(PATIENCE_MS)
            yield opened
        finally:
            browser.close()


def test_the_printed_link_shows_the_runs_by_accuracy_and_a_run_shows_its_samples(
    tmp_path: Path, page: playwright.Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "mlflow"
    uri = embedded_server.start(folder, port=5250)
    try:
        sweep = tracking.open_sweep(uri, "trial", SWEEP_KEY, {})
        best_first = {"full": 1.0, "h2o": 0.75, "keyformer": 0.5, "window": 0.25}
        for key, policy in enumerate(sorted(best_first)):
            right = round(4 * best_first[policy])
            budget = None if policy == "full" else 0.25
            fabricated = fabricate(
                tmp_path, f"k{key}", [1.0] * right + [0.0] * (4 - right), policy=policy, budget=budget
            )
            tracking.publish_job(sweep, fabricated)
        foreign = tracking.open_sweep(uri, "trial", "another", {})  # same experiment, not behind the link
        tracking.publish_job(
            foreign, fabricate(tmp_path, "other", [1.0], policy="keyformer_proxy", sweep_key="another")
        )
        result = report(sweep, tmp_path / "report")
        tracking.close_sweep(sweep, "FINISHED", result.files)

        page.goto(result.link)
        page.get_by_text("4 matching runs").wait_for()
        names = [f"{policy}-{None if policy == 'full' else 0.25}-s0-fact" for policy in best_first]
        rows = [page.get_by_role("link", name=name, exact=True) for name in names]
        heights = []
        for row in rows:
            row.wait_for()
            box = row.bounding_box()
            assert box is not None
            heights.append(box["y"])
        assert heights == sorted(heights)  # best accuracy on top
        page.screenshot(path=tmp_path / "runs.png")

        rows[1].click()
        page.get_by_text("kv/bytes_decode_peak", exact=True).first.wait_for()
        for shown in ("accuracy", "kv/saved_fraction", "policy.name", "budget_rows", "data-of-fact"):
            page.get_by_text(shown).first.wait_for()
        page.screenshot(path=tmp_path / "run.png")
        page.get_by_role("tab", name="Artifacts").click()
        page.get_by_text("samples.json").first.click()
        page.get_by_text("prompt_tail").first.wait_for()
        page.get_by_text("Paris é").first.wait_for()
        page.screenshot(path=tmp_path / "samples.png")

        page.goto("about:blank")  # else only the address behind the "#" changes and the page keeps its old run
        page.goto(f"{uri}/#/experiments/{sweep.experiment_id}/runs/{sweep.run_id}/artifacts")
        page.get_by_text("figures").first.click()
        page.get_by_text("accuracy_vs_budget.png").first.click()
        page.locator("img[src*='accuracy_vs_budget'], img[src^='blob:']").first.wait_for()
        page.screenshot(path=tmp_path / "figure.png")
    finally:
        embedded_server.stop(folder)
