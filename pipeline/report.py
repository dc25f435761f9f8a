"""MLflow -> paired tables, figures and markdown of one sweep: the only reader of MLflow.

`python -m pipeline.report [--experiment NAME] [--outputs DIR]` prints the table of the latest sweep again.

A row is one (task, policy, budget). Jobs that differ in anything but the seed are never averaged: the differing setting
becomes part of the row's task or policy name. Values per item come from the samples of each job. An item is averaged
over its seeds first, so that n is the number of items; intervals are 95 %.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from scipy import stats

from pipeline.errors import BadInput
from pipeline.tracking import (
    OUTPUTS,
    Sweep,
    TrackingUnreachable,
    cannot_write,
    check_folder,
    embedded_config,
    is_fraction,
    resolve_uri,
    talking_to,
)

if TYPE_CHECKING:  # at run time mlflow comes through tracking, which sets its time limits before importing it
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

METHOD = (
    "Each item is averaged over its seeds first; n is the number of items. Intervals are 95 %: Wilson's where every "
    "value is 0 or 1, else Student's t over the items (clipped to [0, 1]). `vs full` is the mean difference to the "
    "full cache over the same items, with Student's t interval of the differences (zero width: no item differed from "
    "the others; not certainty). KV bytes are those of the stored rows, measured. Perplexity is exp of the mean "
    "negative log-likelihood per token."
)
MEASURES = (
    "kv/bytes_decode_peak",
    "kv/bytes_prefill_peak",
    "kv/bytes_full",
    "kv/saved_fraction",
    "speed/decode_tok_per_s",
)
COLUMNS = (
    *("task", "policy", "budget", "items", "seeds", "accuracy", "accuracy_low", "accuracy_high"),
    *("accuracy_vs_full", "accuracy_vs_full_low", "accuracy_vs_full_high"),
    *("task/nll_per_token", "task/perplexity", "task/perplexity_low", "task/perplexity_high"),
    *MEASURES,
    *("failed", "note"),
)
# Okabe and Ito's colours: told apart by colour-blind readers.
STYLES = {
    "full": ("#444444", "s"),
    "keyformer": ("#0072B2", "o"),
    "h2o": ("#D55E00", "^"),
    "streaming": ("#009E73", "D"),
    "keyformer_proxy": ("#CC79A7", "v"),
}
MORE_STYLES = [("#E69F00", "P"), ("#56B4E9", "X"), ("#000000", "<"), ("#B8A800", ">")]
# Settings that tell nothing about what was measured, only where, when and in which order.
NOT_A_VARIANT = re.compile(
    r"(.*\.)?seed|budget|budget_rows|(policy|task|model)\.name|experiment_name|stages|outputs"
    r"|(sweep|tracking|generate|data)(\..*)?"
)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Report:
    """What a sweep showed.

    rows: one dict per table row with the keys COLUMNS (None where unknown; `accuracy` in [0, 1], bytes, tokens/s);
    failed: jobs without a result; files: summary.csv, report.md, the figures; link: the MLflow UI at the sweep's runs.
    """

    rows: list[dict[str, Any]]
    table: Table
    files: list[Path]
    link: str
    failed: int


@dataclass
class _Cell:
    """The jobs of one row: what differs between them is the seed only."""

    task: str
    policy: str
    budget: str  # "0.25", "256" or "full"
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    values: dict[tuple[str, Any], list[float]] = field(default_factory=dict)  # item -> accuracy of each seed
    nll: dict[tuple[str, Any], list[float]] = field(default_factory=dict)


def wilson(p: float, n: int) -> Interval:
    """95 % score interval of a share p seen in n items; never of zero width."""
    z = float(stats.norm.ppf(0.975))
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))  # rounding must not leave p outside


def student(values: Sequence[float]) -> Interval | None:
    """95 % t interval of the mean; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return mean - half, mean + half


def runs_link(sweep: Sweep) -> str:
    """The MLflow UI's table of this sweep's job runs, best accuracy first."""
    where = f"tags.sweep_key LIKE '%{sweep.sweep_key}%' and tags.kind = 'job'"
    query = f"searchFilter={quote(where)}&orderByKey={quote('metrics.`accuracy`')}&orderByAsc=false"
    return f"{sweep.uri}/#/experiments/{sweep.experiment_id}/runs?{query}"


def report(sweep: Sweep, out: Path) -> Report:
    """Read the sweep's job runs, write `summary.csv`, `report.md` and `figures/*.png` into `out`.

    Jobs without a result appear with their reason, never as a number. Raises TrackingUnreachable.
    """
    with talking_to(sweep.uri) as client:
        cells = _cells(client, sweep)
        parent = client.get_run(sweep.run_id)
    full = {cell.task: cell for cell in cells if cell.budget == "full"}
    rows = [_row(cell, full.get(cell.task)) for cell in cells]
    failed = sum(row["failed"] for row in rows)
    figures = out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    files = [out / "summary.csv", out / "report.md"]
    with open(files[0], "w", newline="", encoding="utf-8") as target:
        writer = csv.DictWriter(target, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if any(row["accuracy"] is not None for row in rows):
        for name, draw in (("accuracy_vs_budget", _draw_budget), ("accuracy_vs_memory", _draw_memory)):
            files.append(figures / f"{name}.png")
            draw(rows, sweep.experiment_name).savefig(files[-1], dpi=150)
    absent = _absent(parent.data.params.get("jobs", ""), sum(len(cell.runs) + len(cell.problems) for cell in cells))
    result = Report(rows, _table(rows, sweep, absent), files, runs_link(sweep), failed)
    files[1].write_text(_markdown(result, sweep, absent), encoding="utf-8")
    return result


# --- reading --------------------------------------------------------------------------------------------------------


def _cells(client: MlflowClient, sweep: Sweep) -> list[_Cell]:
    jobs = _one_run_per_key(client, sweep)
    labels = _labels([run.data.params for run in jobs])
    cells: dict[tuple[str, str, str], _Cell] = {}
    for run, (task, policy) in zip(jobs, labels, strict=True):
        budget = "full" if run.data.params.get("policy.name") == "full" else run.data.params.get("budget", "")
        cell = cells.setdefault((task, policy, budget), _Cell(task, policy, budget))
        problem = _problem(run) or _read_samples(client, run, cell)
        if problem:
            cell.problems.append(f"seed {run.data.params.get('seed')}: {problem}")
        else:
            cell.runs.append(run)
    tasks = list(dict.fromkeys(cell.task for cell in cells.values()))
    policies = list(dict.fromkeys([*STYLES, *sorted(cell.policy for cell in cells.values())]))
    return sorted(
        cells.values(),
        key=lambda cell: (tasks.index(cell.task), policies.index(cell.policy), _budget_order(cell.budget)),
    )


def _one_run_per_key(client: MlflowClient, sweep: Sweep) -> list[Run]:
    """The FINISHED run of each job of the sweep, or its last attempt."""
    where = f"tags.kind = 'job' and tags.sweep_key LIKE '%{sweep.sweep_key}%'"
    chosen: dict[str, Run] = {}
    token: str | None = None
    while True:
        page = client.search_runs([sweep.experiment_id], where, order_by=["start_time ASC"], page_token=token)
        for run in page:
            key = run.data.tags.get("key", run.info.run_id)
            if key not in chosen or chosen[key].info.status != "FINISHED":
                chosen[key] = run
        token = page.token
        if not token:
            return list(chosen.values())


def _labels(params: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """(task, policy) of each job; a setting that varies between jobs of the same name is written behind the name."""

    def varying(group: str, among: Sequence[Mapping[str, str]]) -> list[str]:
        names = {name for one in among for name in one if not NOT_A_VARIANT.fullmatch(name)}
        mine = [name for name in sorted(names) if (name.startswith(("task.", "model."))) == (group == "task")]
        return [name for name in mine if len({one.get(name) for one in among}) > 1]

    def label(one: Mapping[str, str], name: str, settings: Sequence[str]) -> str:
        return " ".join([name, *(f"{setting.removeprefix('task.')}={one.get(setting)}" for setting in settings)])

    many_models = len({one.get("model.name") for one in params}) > 1
    labels = []
    for one in params:
        task, policy, model = (one.get(f"{group}.name", "?") for group in ("task", "policy", "model"))
        same_task = [other for other in params if other.get("task.name") == task and other.get("model.name") == model]
        same_policy = [other for other in params if other.get("policy.name") == policy]
        task_label = label(one, task, varying("task", same_task))
        labels.append(
            (
                f"{task_label}, {model}" if many_models else task_label,
                label(one, policy, varying("policy", same_policy)),
            )
        )
    return labels


def _problem(run: Run) -> str | None:
    if run.info.status != "FINISHED":
        reason = run.data.tags.get("reason")
        return run.info.status.lower() + (f" ({reason})" if reason else "")
    if "accuracy" not in run.data.metrics:
        return f"no finite accuracy (not finite: {run.data.tags.get('nonfinite', 'unknown')})"
    return None


def _read_samples(client: MlflowClient, run: Run, cell: _Cell) -> str | None:
    """Put the run's per-item values into the cell; returns what is wrong with them, if anything."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            local = Path(client.download_artifacts(run.info.run_id, "samples.json", temporary))
            table = json.loads(local.read_text(encoding="utf-8"))
            columns, data = table["columns"], table["data"]
            item, accuracy = columns.index("doc_id"), columns.index("accuracy")
        except (OSError, ValueError, KeyError) as error:
            return f"its samples cannot be read ({error})"
        except Exception as error:  # mlflow's own exception for a missing artifact
            return f"its samples are not there ({str(error).splitlines()[0]})"
    if not data or any(not isinstance(line[accuracy], int | float) for line in data):
        return "its samples hold no accuracy for some item"
    nll = next((columns.index(name) for name in ("nll_per_token", "task/nll_per_token") if name in columns), None)
    source = run.data.params.get("data.hash", "")  # the same number in other data is another item
    for line in data:
        cell.values.setdefault((source, line[item]), []).append(float(line[accuracy]))
        if nll is not None and isinstance(line[nll], int | float):
            cell.nll.setdefault((source, line[item]), []).append(float(line[nll]))
    return None


# --- numbers --------------------------------------------------------------------------------------------------------


def _row(cell: _Cell, full: _Cell | None) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"task": cell.task, "policy": cell.policy, "budget": cell.budget, "failed": len(cell.problems)}
    row["note"] = "; ".join(dict.fromkeys(cell.problems)).replace("\n", " ")
    if not cell.runs:
        return row
    items = _means(cell.values)
    row["items"], row["seeds"] = len(items), len({run.data.params.get("seed") for run in cell.runs})
    row["accuracy"] = sum(items.values()) / len(items)
    if all(value in (0.0, 1.0) for values in cell.values.values() for value in values):
        interval: Interval | None = wilson(row["accuracy"], len(items))
    else:
        interval = student(list(items.values()))
    if interval:
        row["accuracy_low"], row["accuracy_high"] = max(0.0, interval[0]), min(1.0, interval[1])
    if full is not None and full is not cell and full.runs:
        reference = _means(full.values)
        differences = [value - reference[item] for item, value in items.items() if item in reference]
        if differences:
            row["accuracy_vs_full"] = sum(differences) / len(differences)
            low, high = student(differences) or (None, None)
            row["accuracy_vs_full_low"] = None if low is None else max(-1.0, low)
            row["accuracy_vs_full_high"] = None if high is None else min(1.0, high)
    nll = _metric(cell.runs, "task/nll_per_token")
    row["task/nll_per_token"] = nll
    row["task/perplexity"] = math.exp(nll) if nll is not None else _metric(cell.runs, "task/perplexity")
    if nll is not None and len(cell.nll) == len(items) and (interval := student(list(_means(cell.nll).values()))):
        # a perplexity below 1 would be a likelihood above 1
        row["task/perplexity_low"], row["task/perplexity_high"] = math.exp(max(0.0, interval[0])), math.exp(interval[1])
    for name in MEASURES:
        row[name] = _metric(cell.runs, name)
    return row


def _means(values: Mapping[tuple[str, Any], Sequence[float]]) -> dict[tuple[str, Any], float]:
    return {item: sum(each) / len(each) for item, each in values.items()}


def _metric(runs: Sequence[Run], name: str) -> float | None:
    values = [run.data.metrics[name] for run in runs if name in run.data.metrics]
    if not values:
        return None
    return max(values) if name.endswith("_peak") else sum(values) / len(values)


def _budget_order(budget: str) -> tuple[bool, float]:
    try:
        return not is_fraction(budget), float(budget)
    except ValueError:
        return False, -1.0


def _budget_text(budget: str) -> str:
    try:
        return f"{float(budget) * 100:g} %" if is_fraction(budget) else budget
    except ValueError:
        return "all" if budget == "full" else budget


# --- words ----------------------------------------------------------------------------------------------------------


def _lines(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and texts of the table people read; columns nobody filled are left out."""

    def number(value: float | None, form: str, low: float | None = None, high: float | None = None) -> str:
        if value is None:
            return ""
        return format(value, form) + (f" [{low:{form}}, {high:{form}}]" if low is not None else "")

    def mega(value: float | None) -> str:
        return number(None if value is None else value / 1e6, ".2f")

    table = []
    for row in rows:
        difference = number(row["accuracy_vs_full"], "+.2f", row["accuracy_vs_full_low"], row["accuracy_vs_full_high"])
        saved = row["kv/saved_fraction"]
        table.append(
            {
                "task": row["task"],
                "policy": row["policy"],
                "budget": _budget_text(row["budget"]),
                "accuracy [95 %]": number(row["accuracy"], ".2f", row["accuracy_low"], row["accuracy_high"])
                if row["accuracy"] is not None
                else "no result",
                "vs full [95 %]": difference,
                "perplexity": number(row["task/perplexity"], ".2f"),
                "KV MB": mega(row["kv/bytes_decode_peak"]),
                "saved": number(None if saved is None else saved * 100, ".0f") + (" %" if saved is not None else ""),
                "tok/s": number(row["speed/decode_tok_per_s"], ".1f"),
                "items x seeds": f"{row['items']} x {row['seeds']}" if row["items"] else "",
                "failed": f"{row['failed']}: {row['note']}" if row["failed"] else "",
            }
        )
    header = [name for name in (table[0] if table else {}) if any(line[name] for line in table)]
    return header, [[line[name] for name in header] for line in table]


def _absent(expected: str, started: int) -> str:
    """What of a sweep has not even begun; nothing where all of it has."""
    if expected.isdigit() and int(expected) > started:
        return f"Jobs that never started: {int(expected) - started} of {expected}."
    return ""


def _table(rows: Sequence[Mapping[str, Any]], sweep: Sweep, absent: str) -> Table:
    """What fits a terminal of 80 columns: the rest is in report.md, the reasons of failures in the caption."""
    header, lines = _lines(rows)
    failed = [row for row in rows if row["failed"]]
    notes = [f"{row['policy']} at {_budget_text(row['budget'])}, {row['task']}: {row['note']}" for row in failed]
    title = f"{sweep.experiment_name}: accuracy with 95 % intervals"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, caption_justify="left")
    captions = [*(["Jobs without a result:", *notes] if notes else []), *filter(None, [absent])]
    table.caption = "\n".join(captions) or None
    shown = [name for name in header if name not in ("tok/s", "items x seeds", "failed")]
    for name in shown:
        names = name in ("task", "policy")  # only these may wrap
        title = {"vs full [95 %]": "vs full", "perplexity": "ppl"}.get(name, name)
        table.add_column(title, justify="left" if names else "right", no_wrap=not names, overflow="fold")
    for number, line in enumerate(lines):
        cells = dict(zip(header, line, strict=True))
        if difference := cells.get("vs full [95 %]"):
            cells["vs full [95 %]"] = difference.partition(" ")[0]
        ends = number + 1 == len(rows) or rows[number + 1]["task"] != rows[number]["task"]
        table.add_row(*(cells[name] for name in shown), end_section=ends)
    return table


def _markdown(result: Report, sweep: Sweep, absent: str) -> str:
    header, lines = _lines(result.rows)
    text = io.StringIO()
    text.write(f"# {sweep.experiment_name}\n\n")
    for file in result.files[2:]:
        text.write(f"![{file.stem.replace('_', ' ')}](figures/{file.name})\n\n")
    if header:
        text.write("| " + " | ".join(header) + " |\n|" + "---|" * len(header) + "\n")
        text.writelines("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
    else:
        text.write("No job has run yet.\n")
    if result.failed:
        text.write(f"\n**Jobs without a result: {result.failed}**; see the column `failed`.\n")
    if absent:
        text.write(f"\n**{absent}**\n")
    text.write(f"\n{METHOD}\n\n[The runs in MLflow]({result.link}) · sweep key `{sweep.sweep_key}`\n")
    return text.getvalue()


# --- pictures -------------------------------------------------------------------------------------------------------


def _style(policy: str, policies: Sequence[str]) -> tuple[str, str]:
    if policy in STYLES:
        return STYLES[policy]
    base = policy.split(" ")[0]
    others = [name for name in policies if name not in STYLES]
    colour, marker = MORE_STYLES[others.index(policy) % len(MORE_STYLES)]
    alone = base in STYLES and base not in policies and sum(name.split(" ")[0] == base for name in policies) == 1
    return STYLES[base] if alone else (colour, marker)


def _panels(rows: Sequence[Mapping[str, Any]], *, perplexity: bool) -> list[tuple[str, str]]:
    """(task, quantity) of each panel, tasks in order, perplexity beside its accuracy."""
    panels = []
    for task in dict.fromkeys(row["task"] for row in rows):
        panels.append((task, "accuracy"))
        if perplexity and any(row["task"] == task and row["task/perplexity"] is not None for row in rows):
            panels.append((task, "task/perplexity"))
    return panels


def _canvas(panels: Sequence[tuple[str, str]], title: str, caption: str) -> tuple[Figure, SubFigure, list[Axes]]:
    """The whole figure, its upper part (title, panels, legend; the caption is below) and one axis per panel."""
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    width, height = max(5.6, 4.2 * across), 3.7 * down + 0.8
    lines = textwrap.wrap(caption, int(width * 14.5))
    foot = 0.16 * len(lines) + 0.1
    figure = Figure(figsize=(width, height + foot), layout="constrained")  # no pyplot: no global state
    FigureCanvasAgg(figure)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[height, foot]).flat
    upper.suptitle(title, fontsize=13, fontweight="bold")
    lower.text(0.5, 1, "\n".join(lines), ha="center", va="top", fontsize=8.5, color="#555555")
    axes = list(upper.subplots(down, across, squeeze=False).flat)
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    for axis, (task, quantity) in zip(axes, panels, strict=False):
        measured = quantity.removeprefix("task/")
        axis.set_title(measured if task == measured else f"{task}: {measured}", fontsize=11)
        axis.set_ylabel("accuracy" if quantity == "accuracy" else "perplexity (lower is better)")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, upper, axes[: len(panels)]


def _legend(upper: SubFigure, axes: Sequence[Axes]) -> None:
    """One legend for all panels."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = max(1, int(upper.get_figure(root=True).get_figwidth() * 9 / (6 + max(map(len, handles), default=0))))
    upper.legend(handles.values(), handles.keys(), loc="outside lower center", ncol=columns, frameon=False)


def _limits(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Accuracy from 0 to 1, except where all of it lies so close together that nothing could be read."""
    ends = [row[end] for row in rows for end in ("accuracy", "accuracy_low", "accuracy_high") if row[end] is not None]
    if not ends or max(ends) - min(ends) > 0.3:
        axis.set_ylim(-0.03, 1.03)


def _plot(
    axis: Axes,
    at: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
    quantity: str,
    style: tuple[str, str],
    label: str,
) -> None:
    ends = [(row[quantity], row[f"{quantity}_low"], row[f"{quantity}_high"]) for row in rows]
    below = [
        value - low if low is not None else math.nan for value, low, _ in ends
    ]  # no bar where the interval is unknown
    above = [high - value if high is not None else math.nan for value, _, high in ends]
    values = [value for value, _, _ in ends]
    colour, marker = style
    axis.errorbar(
        at,
        values,
        [below, above],
        color=colour,
        marker=marker,
        markersize=5.5,
        linewidth=1.8,
        capsize=3,
        elinewidth=1,
        label=label,
    )


def _reference(axis: Axes, rows: Sequence[Mapping[str, Any]], quantity: str) -> None:
    """The full cache: it has no budget, so it is a line with its interval as a band."""
    for row in rows:
        if row["budget"] == "full":
            axis.axhline(
                row[quantity], color=STYLES["full"][0], linestyle="--", linewidth=1.5, label="full cache", zorder=1
            )
            if row[f"{quantity}_low"] is not None:
                axis.axhspan(
                    row[f"{quantity}_low"], row[f"{quantity}_high"], color=STYLES["full"][0], alpha=0.08, linewidth=0
                )


def _failures(rows: Sequence[Mapping[str, Any]]) -> str:
    missing = [f"{row['policy']} at {_budget_text(row['budget'])} of {row['task']}" for row in rows if row["failed"]]
    return f" Jobs without a result: {', '.join(missing)}." if missing else ""


def _draw_budget(rows: Sequence[Mapping[str, Any]], experiment: str) -> Figure:
    panels = _panels(rows, perplexity=True)
    title = f"{experiment}: quality over the budget of the KV cache"
    figure, upper, axes = _canvas(panels, title, _caption(rows, panels) + _failures(rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows if row["budget"] != "full"))
    for axis, (task, quantity) in zip(axes, panels, strict=True):
        shown = [row for row in rows if row["task"] == task and row[quantity] is not None]
        _reference(axis, shown, quantity)
        if quantity == "accuracy":
            _limits(axis, shown)
        else:
            axis.set_yscale("log")  # intervals of a mean log-likelihood are even there
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        budgets = [row for row in shown if row["budget"] != "full"]
        fractions = all(is_fraction(row["budget"]) for row in budgets)
        spots = {row["budget"]: float(row["budget"]) * (100 if is_fraction(row["budget"]) else 1) for row in budgets}
        spread = max(spots.values(), default=0) - min(spots.values(), default=0)
        dodge = 0.012 * (spread or max(spots.values(), default=0))  # else error bars hide each other
        for number, policy in enumerate(policies):
            # Fractions and rows are different questions: in one panel they are different lines.
            for kind in (True, False):
                line = [row for row in budgets if row["policy"] == policy and is_fraction(row["budget"]) == kind]
                if line:
                    at = [spots[row["budget"]] + dodge * (number - (len(policies) - 1) / 2) for row in line]
                    name = policy if kind or fractions or not any(is_fraction(b) for b in spots) else f"{policy} (rows)"
                    _plot(axis, at, line, quantity, _style(policy, policies), name)
        if not spread:  # else the little that separates the points would look like a range of budgets
            middle = max(spots.values(), default=1.0)
            axis.set_xlim(0.5 * middle, 1.5 * middle)
        axis.set_xticks(sorted(set(spots.values())), [f"{spot:g}" for spot in sorted(set(spots.values()))])
        axis.set_xlabel("budget (% of the prompt's rows kept)" if fractions else "budget (rows kept per KV head)")
    _legend(upper, axes)
    return figure


def _draw_memory(rows: Sequence[Mapping[str, Any]], experiment: str) -> Figure:
    panels = _panels(rows, perplexity=False)
    prefill = []
    for task, _ in panels:
        peaks = [
            row["kv/bytes_prefill_peak"]
            for row in rows
            if row["task"] == task and row["kv/bytes_prefill_peak"] is not None
        ]
        if peaks:
            low, high = min(peaks) / 1e6, max(peaks) / 1e6
            prefill.append(f"{task} {high:.1f} MB" if high - low < 0.05 else f"{task} {low:.1f} to {high:.1f} MB")
    peak = f" KV cache at the prefill peak, before eviction: {', '.join(prefill)}." if prefill else ""
    title = f"{experiment}: accuracy over KV memory while decoding"
    beside = " Points of equal memory are drawn side by side."
    figure, upper, axes = _canvas(panels, title, _caption(rows, panels) + beside + peak + _failures(rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for axis, (task, quantity) in zip(axes, panels, strict=True):
        shown = [row for row in rows if row["task"] == task and row[quantity] is not None]
        _reference(axis, shown, quantity)
        if quantity == "accuracy":
            _limits(axis, shown)
        dodge = 0.006e-6 * max((row["kv/bytes_decode_peak"] or 0 for row in shown), default=0)
        for number, policy in enumerate(policies):
            line = sorted(
                (row for row in shown if row["policy"] == policy and row["kv/bytes_decode_peak"] is not None),
                key=lambda row: float(row["kv/bytes_decode_peak"]),
            )
            if line:
                shift = dodge * (number - (len(policies) - 1) / 2)
                at = [row["kv/bytes_decode_peak"] / 1e6 + (shift if row["budget"] != "full" else 0) for row in line]
                label = "_in the line's legend entry" if line[0]["budget"] == "full" else policy
                _plot(axis, at, line, quantity, _style(policy, policies), label)
        axis.set_xlim(left=0)
        axis.set_xlabel("KV cache at the decode peak (MB)")
    _legend(upper, axes)
    return figure


def _caption(rows: Sequence[Mapping[str, Any]], panels: Sequence[tuple[str, str]]) -> str:
    banded = any(  # as _reference draws it
        row["task"] == task
        and row["budget"] == "full"
        and row[quantity] is not None
        and row[f"{quantity}_low"] is not None
        for row in rows
        for task, quantity in panels
    )
    counts = sorted({(row["items"], row["seeds"]) for row in rows if row["items"]})
    items = " to ".join(str(n) for n in sorted({counts[0][0], counts[-1][0]}))
    marks = "Bars and band" if banded else "Bars"
    return f"{marks}: 95 % intervals over {items} items per point, each item averaged over its seeds."


# --- the command ----------------------------------------------------------------------------------------------------


def latest_sweep(uri: str, experiment: str | None) -> Sweep:
    """The sweep begun last, in `experiment` or anywhere. Raises BadInput if there is none, TrackingUnreachable."""
    with talking_to(uri) as client:
        experiments = {one.experiment_id: one.name for one in client.search_experiments()}
        wanted = [number for number, name in experiments.items() if experiment in (None, name)]
        found = (
            client.search_runs(wanted, "tags.kind = 'sweep'", max_results=1, order_by=["start_time DESC"])
            if wanted
            else []
        )
        if not found:
            names = ", ".join(sorted(experiments.values()))
            where = experiment or "any experiment"
            raise BadInput(f"expected a sweep in {where} at {uri}, got none (there: {names}): run `make sweep`")
        run = found[0]
        number = run.info.experiment_id
        return Sweep(uri, number, run.info.run_id, experiments[number], run.data.tags["sweep_key"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `python -m pipeline.report`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.report", description="Print the table of the latest sweep."
    )
    parser.add_argument("--experiment", help="the experiment's name; default: the one that ran last")
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="where the embedded server and the reports live")
    options = parser.parse_args(arguments)
    try:
        check_folder(options.outputs)
        sweep = latest_sweep(resolve_uri(embedded_config(), options.outputs), options.experiment)
        result = report(sweep, options.outputs / "reports" / sweep.sweep_key)
    except (BadInput, TrackingUnreachable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {cannot_write(options.outputs, error)}", file=sys.stderr)
        return 2
    console = Console()
    console.print(result.table)
    for file in result.files:
        console.print(str(file), soft_wrap=True, highlight=False)
    console.print(result.link, soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
