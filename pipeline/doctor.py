"""`python -m pipeline.tracking doctor [--dry-run]`: finds what crashes left on a tracking server, and mends it.

Of our own runs only (those with a tag `kind`), in every experiment of the server: runs that are RUNNING but dead, runs
that a retried request made twice, keys that are FINISHED more than once; and finished jobs of this machine's outputs
folder that were never published. Whatever is alive is left alone.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline.leases import BEAT_S, LEASE_S, Watch
from pipeline.tracking import DEAD_JOB, DEAD_SWEEP, end, first, publish_all, search, unpublished
from pipeline.tracking_server import server_time, talking_to


@dataclass(frozen=True)
class _Finding:
    what: str
    remedy: str
    mend: Callable[[], None]


def doctor(uri: str, outputs: Path, *, dry_run: bool) -> int:
    """List what is wrong on the server at `uri` and in `outputs`, and mend it unless `dry_run`.

    Takes up to a minute and a half where it must be watched whether something is alive. Returns how many things are
    still wrong. Raises TrackingUnreachable.
    """
    with talking_to(uri, outputs) as client:
        findings = _findings(client, uri)
        for finding in findings:
            print(f"{finding.what}: {'to be ' if dry_run else ''}{finding.remedy}")
            if not dry_run:
                finding.mend()
    folders = unpublished(outputs)
    for folder in folders:
        print(f"finished, but not published: {folder}{': to be published' if dry_run else ''}")
    if dry_run:
        wrong = len(findings) + len(folders)
        print(f"{wrong} to mend; nothing was changed (--dry-run)" if wrong else f"nothing to mend at {uri}")
        return wrong
    failed = publish_all(uri, outputs) if folders else 0
    if not findings and not folders:
        print(f"nothing to mend at {uri}")
    return failed


def _findings(client: MlflowClient, uri: str) -> list[_Finding]:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    dead = _dead(client, uri, experiments)
    findings: list[_Finding] = []
    for experiment in experiments:
        sweeps, jobs = (search(client, experiment, f"tags.kind = '{kind}'") for kind in ("sweep", "job"))
        ghosts = _ghosts([*sweeps, *jobs], dead)
        findings += [_ended(client, run, "created twice by a retried request", delete=True) for run in ghosts]
        gone = {run.info.run_id for run in ghosts}
        sweeps, jobs = ([run for run in runs if run.info.run_id not in gone] for runs in (sweeps, jobs))
        findings += [_ended(client, run, DEAD_JOB) for run in jobs if run.info.run_id in dead]
        at_work = {
            run.data.tags.get("mlflow.parentRunId")
            for run in jobs
            if run.info.status == "RUNNING" and run.info.run_id not in dead
        }
        findings += [
            _ended(client, run, DEAD_SWEEP)
            for run in sweeps
            if run.info.run_id in dead and run.info.run_id not in at_work
        ]
        for done in _by(jobs, "key", "FINISHED"):
            kept = first(done).info.run_id
            reason = f"the same job finished as {kept}"
            findings += [_ended(client, run, reason) for run in done if run.info.run_id != kept]
    return findings


def _ended(client: MlflowClient, run: Run, reason: str, *, delete: bool = False) -> _Finding:
    def mend() -> None:
        if client.get_run(run.info.run_id).info.status == run.info.status:  # nobody else has mended it meanwhile
            end(client, run.info.run_id, "KILLED", reason)
        if delete:
            client.delete_run(run.info.run_id)

    kind, host = run.data.tags["kind"], run.data.tags.get("host")
    where = f" on {host}" if host else ""
    what = f"{run.info.status} {kind} {run.info.run_name}{where} (run {run.info.run_id}): {reason}"
    return _Finding(what, "KILLED and deleted" if delete else "KILLED", mend)


def _dead(client: MlflowClient, uri: str, experiments: list[str]) -> set[str]:
    """The run ids of what is RUNNING in the experiments but dead; watches until it is known of each."""
    watch, deadline = Watch(), time.monotonic() + LEASE_S + 3 * BEAT_S
    while True:
        now = server_time(uri)
        running = [run for each in experiments for run in search(client, each, "attributes.status = 'RUNNING'")]
        known = watch.look([run for run in running if "kind" in run.data.tags], now)
        unsure = sum(alive is None for alive in known.values())
        if not unsure or time.monotonic() > deadline:
            return {run_id for run_id, alive in known.items() if alive is False}
        print(
            f"watching whether {unsure} run{'s' * (unsure != 1)} of other machines renew their lease", file=sys.stderr
        )
        time.sleep(BEAT_S)


def _ghosts(runs: list[Run], dead: set[str]) -> list[Run]:
    """Of runs that share an attempt all but one: that which finished, or lives, or came first."""
    ghosts = []
    for twins in _by(runs, "attempt"):
        kept = min(
            twins,
            key=lambda run: (
                run.info.status != "FINISHED",
                run.info.run_id in dead,
                run.info.status != "RUNNING",
                run.info.start_time,
                run.info.run_id,
            ),
        )
        ghosts += [run for run in twins if run is not kept]
    return ghosts


def _by(runs: list[Run], tag: str, status: str | None = None) -> list[list[Run]]:
    """The runs that have a tag in common with others."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if tag in run.data.tags and status in (None, run.info.status):
            groups.setdefault(run.data.tags[tag], []).append(run)
    return [group for group in groups.values() if len(group) > 1]
