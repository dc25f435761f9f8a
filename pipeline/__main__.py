"""Run a job or a sweep: `python -m pipeline [-m] [overrides]`.

Hydra composes the configuration and launches the jobs; this driver stands between: it validates every job before
anything exists, drops jobs that differ only in axes that cannot matter, skips what is finished, and closes the sweep
whatever happens.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from .errors import BadInput, interrupted

_CONF = Path(__file__).parent.parent / "conf"
_LEAST_FREE_BYTES = 200 * 2**20
_FEW_ITEMS = 10
_AGAIN = ("job", "stages", "task.primary", "tracking")  # what may be said of a stored job
_LAUNCHERS = ("basic", "dask")
_OF_A_SWEEP = ("outputs", "experiment_name", "stages", "tracking", "job")  # one value for all jobs


@dataclass
class _Job:
    overrides: list[str]
    cfg: DictConfig
    data: str = ""
    key: str = ""
    sweep: str = ""  # of a stored job: the sweep that it belongs to
    memory: int = 0  # bytes that it takes at most; 0: no model is run
    model: dict[str, str] | None = None  # which weights


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all jobs done; 1 a job failed; 2 bad input, nothing started; 130 interrupted."""
    args = _parser().parse_intermixed_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn of what our own messages say
    if threading.current_thread() is threading.main_thread():
        interrupted.clear()
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # kill, timeout, a closed terminal: as Ctrl-C
            signal.signal(ending, _interrupt)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with _composer():
            master, jobs = _compose(args.overrides, args.multirun)
            if args.cfg:
                print("---\n".join(OmegaConf.to_yaml(job.cfg, resolve=True) for job in jobs), end="")
                return 0
            return _sweep(master, jobs, args.dry_run)
    except (BadInput, HydraException, OmegaConfBaseException) as error:
        print(f"error: {_short(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: object) -> None:
    interrupted.set()
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    groups = {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in sorted(_CONF.iterdir()) if p.is_dir()}
    listing = "\n".join(f"  {name}={' | '.join(choices)}" for name, choices in groups.items())
    parser = argparse.ArgumentParser(
        prog="python -m pipeline",
        description="Generate with a budgeted KV cache, score with lm-eval, track in MLflow: one job, or a sweep (-m).",
        epilog=f"""groups (folder = choice, file = option; conf/<group>/<choice>.yaml):
{listing}

options of conf/config.yaml and of the chosen files are overridden as name=value, e.g.
  python -m pipeline policy=h2o budget=0.1 task=fact task.tokens=1024
  python -m pipeline -m policy=full,h2o,keyformer budget=64,128,256 seed=0,1 task=niah
  python -m pipeline -m experiment=default           what `make sweep` runs
  python -m pipeline job=outputs/jobs/<key> stages=[score,publish]
                                                     scores a finished job's folder again, without the model
the same command again goes on with what is missing.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides: group=choice or option=value")
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="sweep over every combination of comma-separated values"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the jobs and their memory, run none; makes missing models and data"
    )
    parser.add_argument("--cfg", action="store_true", help="print the composed configuration of every job and exit")
    return parser


def _short(error: Exception) -> str:
    """The message without Hydra's search path, grammar and its advice to append, which would be ignored here."""
    text = str(error).split("\nConfig search path")[0]
    if isinstance(error, OverrideParseException):
        return f"expected overrides like name=value or name=a,b, got {error.override!r}"
    if unknown := re.match(r"Could not override '([^']+)'", text):
        return _unknown(unknown[1], _known())
    return "\n".join(line for line in text.splitlines() if line.strip()) or type(error).__name__


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    siblings = sorted(k for k in known if k.rpartition(".")[0] == name.rpartition(".")[0])
    return f"expected a known option, got {name!r}; " + (
        f"did you mean {' or '.join(near)}?" if near else f"known there: {', '.join(siblings) or 'none'}"
    )


def _known() -> set[str]:
    """Every option of conf/, those of each group's files included."""
    known = set()
    for path in [_CONF / "config.yaml", *_CONF.glob("*/*.yaml")]:
        options = OmegaConf.load(path)
        if path.parent.name == "experiment" or not isinstance(options, DictConfig):
            continue
        group = "" if path.parent == _CONF else f"{path.parent.name}."
        known.add(group.rstrip("."))
        for key, value in options.items_ex(resolve=False):
            name = str(key)
            if name not in ("defaults", "hydra"):
                known.add(f"{group}{name}")
                known |= {f"{group}{name}.{inner!s}" for inner in value} if isinstance(value, DictConfig) else set()
    return (known | {"experiment"}) - {""}


# -- composing --------------------------------------------------------------------------------------------------------


@contextmanager
def _composer() -> Iterator[None]:
    with initialize_config_dir(str(_CONF), version_base="1.3", job_name="pipeline"):
        yield


def _compose(overrides: list[str], multirun: bool) -> tuple[DictConfig, list[_Job]]:
    """The master configuration and every distinct job of the grid, validated."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.types import RunMode

    from .run import validate, without_idle_axes

    loader = GlobalHydra.instance().config_loader()
    _check_launcher([o.partition("=")[2] for o in overrides if o.partition("=")[0] == "hydra/launcher"])
    mode = RunMode.MULTIRUN if multirun else RunMode.RUN
    try:
        master = loader.load_configuration("config", overrides, run_mode=mode)
    except (ValueError, TypeError, AttributeError) as error:  # a group set to null
        raise BadInput(
            f"expected a choice for each group, as policy=h2o, got {' '.join(overrides)}: {error}"
        ) from error
    _check_launcher([master.hydra.runtime.choices["hydra/launcher"]])  # an experiment file can choose one, too
    params = [f"{k}={v}" for k, v in (master.hydra.sweeper.params or {}).items()] if multirun else []
    parsed = OverridesParser.create(config_loader=loader).parse_overrides([*params, *master.hydra.overrides.task])
    for override in parsed:
        name = override.get_key_element().lstrip("+~").partition(".")[0]
        if multirun and override.is_sweep_override() and name in _OF_A_SWEEP:
            raise BadInput(
                f"{name}: expected one value for a whole sweep, got {override.input_line}; give one at a time."
            )
    if master.job is not None:
        return master, [_stored_job(master)]
    jobs: dict[str, _Job] = {}
    for chosen in BasicSweeper.split_arguments(parsed, None)[0]:
        cfg = loader.load_sweep_config(master, list(chosen))
        with open_dict(cfg):
            del cfg["hydra"]
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            raise BadInput(f"{', '.join(missing)}: expected a value, got none; give it as {missing[0]}=...")
        _refuse_unknown(cfg)
        validate(cfg)
        idle = without_idle_axes(cfg)
        for name, value in idle.items():
            cfg[name] = value
        key = json.dumps(OmegaConf.to_container(cfg, resolve=True), sort_keys=True)
        jobs.setdefault(key, _Job([*chosen, *(f"{name}=null" for name in idle)], cfg))
    return master, list(jobs.values())


def _check_launcher(chosen: Sequence[str]) -> None:
    for name in chosen:
        if name not in _LAUNCHERS:
            raise BadInput(
                f"hydra/launcher: expected {' or '.join(_LAUNCHERS)}, got {name!r}: jobs run one at a time on each "
                "GPU, as several processes on one only share its memory and slow each other down; basic runs them "
                "here, dask on several machines."
            )


def _refuse_unknown(cfg: DictConfig) -> None:
    """BadInput for an option nobody reads, as `+name=value` or an experiment file can bring in.

    Tasks and policies check their own options.
    """
    known = _known()
    names = [str(name) for name in cfg]
    names += [f"{group}.{name}" for group in ("generate", "tracking", "model") for name in cfg[group]]
    for name in names:
        if name not in known:
            raise BadInput(_unknown(name, known))


def _stored_job(master: DictConfig) -> _Job:
    """The job in the folder `job`, as it was run, with the stages and the primary metric that are asked for now."""
    from .run import validate

    folder = Path(str(master.job))
    given = [str(override).partition("=") for override in master.hydra.overrides.task]
    other = sorted({name for name, _, _ in given if name not in _AGAIN and not name.startswith("tracking.")})
    if other:
        raise BadInput(f"job: a stored job takes only {', '.join(_AGAIN)} and tracking.*, got {', '.join(other)}.")
    if not {"score", "publish"}.issuperset(master.stages or ["generate"]):
        raise BadInput(f"job: expected stages of a finished job, e.g. stages=[score,publish], got {master.stages}.")
    try:
        about = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        cfg = OmegaConf.load(folder / "config.yaml")
        if not isinstance(cfg, DictConfig) or not cfg:
            raise ValueError("config.yaml is empty")
        cfg.stages, cfg.tracking, cfg.job = master.stages, master.tracking, str(folder)
        cfg.outputs = str(folder.parent.parent)  # where it lies now, which may not be where it was made
        for name, _, value in given:
            if name == "task.primary":
                cfg.task.primary = value
        validate(cfg)
        job = _Job([], cfg, about["data"]["hash"], about["key"], about["sweep_key"])
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OmegaConfBaseException) as error:
        raise BadInput(
            f"job: expected the whole folder of a job (outputs/jobs/<key>), got {folder}: {error}; run its sweep again."
        ) from error
    if folder.name != job.key:
        raise BadInput(f"job: expected a folder named like its key, {job.key}, got {folder}; give it its name back.")
    return job


# -- a sweep ----------------------------------------------------------------------------------------------------------


def _prepare(jobs: list[_Job]) -> None:
    """Models and data of all jobs, once each; every job gets its key. BadInput if some job cannot work."""
    from . import models
    from .load import load, read_requests
    from .memory import memory_need
    from .run import identity, job_key, language_model

    outputs = Path(jobs[0].cfg.outputs)
    _check_space(outputs)
    folders: dict[str, Any] = {}
    loaded: dict[str, Any] = {}
    for job in jobs:
        which = json.dumps(OmegaConf.to_container(job.cfg.model, resolve=True), sort_keys=True)
        if which not in folders:
            folder = models.resolve(job.cfg.model, outputs / "models")
            folders[which] = folder, models.load_tokenizer(folder)
        folder, tokenizer = folders[which]
        what = which + json.dumps(OmegaConf.to_container(job.cfg.task, resolve=True), sort_keys=True)
        if what not in loaded:
            data = load(job.cfg.task, tokenizer, folder.context, outputs / "data")
            loaded[what] = data, read_requests(data.path / "requests.jsonl")[0]
        data, first = loaded[what]
        language_model(job.cfg, folder, None, tokenizer).check(first)
        job.data, job.model = data.hash, identity(folder)
        job.key = job_key(job.cfg, folder, data.hash)
        job.memory = memory_need(job.cfg, folder, data).total


def _check_space(outputs: Path) -> None:
    outputs = outputs.absolute()
    existing = next(p for p in (outputs, *outputs.parents) if p.exists())
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        raise BadInput(
            f"outputs: expected a folder that can be written, got {outputs}; choose another with outputs=<folder>."
        )
    free = shutil.disk_usage(existing).free
    if free < _LEAST_FREE_BYTES:
        raise BadInput(
            f"outputs: expected at least {_LEAST_FREE_BYTES >> 20} MB of free disk at {existing}, got {free >> 20} MB; "
            "free some space or choose another disk with outputs=<folder>."
        )


def _sweep(master: DictConfig, jobs: list[_Job], dry_run: bool) -> int:
    from . import tracking
    from .run import console, job_name

    cfg = jobs[0].cfg
    outputs = Path(cfg.outputs)
    if cfg.job is None:
        with console.status("models and data ..."):  # seen in a terminal only
            _prepare(jobs)
    if list(cfg.stages) == ["load"]:
        console.print(f"requests of {len(jobs)} jobs are in {outputs / 'data'}")
        return 0
    if "generate" not in cfg.stages:
        _check_generated(jobs, outputs)
    if any(type(job.cfg.budget) is int and job.cfg.budget == 1 for job in jobs):
        console.print("[yellow]warning[/]: budget=1 keeps a single row; budget=1.0 keeps every row")
    keys = json.dumps([cfg.experiment_name, *sorted(j.key for j in jobs)])
    sweep_key = jobs[0].sweep or hashlib.sha256(keys.encode()).hexdigest()[:16]
    count = f"{len(jobs)} job{'s' * (len(jobs) != 1)}"
    if dry_run:
        for job in jobs:
            done = "done " if (outputs / "jobs" / job.key / "published.json").is_file() else "to do"
            memory = f"{job.memory / 2**30:6.2f} GB" if job.memory else ""
            print(f"{job.key}  {done}  {memory}  {job_name(job.cfg)}")
        print(f"{count}; nothing was run (--dry-run)")
        return 0
    launcher = _launcher(master)
    here = all((outputs / "jobs" / job.key / "published.json").is_file() for job in jobs)
    surveys = hasattr(launcher, "preflight") and cfg.job is None
    if surveys and not here:
        launcher.preflight(str(outputs), [_wanted(job) for job in jobs])
    sweep, left, ran = None, jobs, list[_Job]()
    status, failed = "KILLED", 0
    try:
        if "publish" in cfg.stages:
            try:
                uri = _tracking_uri(master, cfg, outputs)
                overrides = str(master.hydra.overrides.task)
                sweep = tracking.open_sweep(
                    uri, cfg.experiment_name, sweep_key, {"jobs": len(jobs), "overrides": overrides}
                )
                if "generate" in cfg.stages:
                    _publish_what_is_home(sweep, jobs, outputs)
                    finished = tracking.finished(sweep, [j.key for j in jobs])
                    left = [j for j in jobs if j.key not in finished]
            except tracking.TrackingUnreachable as error:
                _warn(error, outputs)
        skipped = f", {len(jobs) - len(left)} already finished" if len(left) < len(jobs) else ""
        console.print(f"{count} in experiment {cfg.experiment_name}{skipped}")
        if surveys and here and left:  # published elsewhere, or nobody can say
            launcher.preflight(str(outputs), [_wanted(job) for job in left])
        ran = left
        failed = _launch(launcher, left, sweep_key, sweep)
        status = "FAILED" if failed else "FINISHED"
    finally:
        if sweep is not None:
            try:
                if status != "KILLED":
                    sweep = _wait_for_server(sweep, cfg, outputs)
                _publish_what_is_home(sweep, ran, outputs)
            finally:
                _close(sweep, outputs, status)
    if sweep is None:
        console.print(
            f"results are in {outputs / 'jobs'}; publish them later with `python -m pipeline.tracking publish`"
        )
    return 1 if failed else 0


def _check_generated(jobs: list[_Job], outputs: Path) -> None:
    """BadInput unless every job has all its responses, and its score where that is only to be published."""
    from .generate import check_responses

    for job in jobs:
        if not (outputs / "data" / job.data / "requests.jsonl").is_file():
            raise BadInput(
                f"stages: expected the job's requests in {outputs / 'data' / job.data}, got none; run its sweep again."
            )
        if "score" not in job.cfg.stages and not (outputs / "jobs" / job.key / "score.json").is_file():
            raise BadInput(
                f"stages: expected a scored job in {outputs / 'jobs' / job.key}, got no score.json; run the same "
                "command with the stage score as well."
            )
        folder = outputs / "jobs" / job.key
        missing, _ = check_responses(outputs / "data" / job.data / "requests.jsonl", folder / "responses.jsonl")
        if missing:
            raise BadInput(
                f"stages: expected finished responses in {folder}, {missing} are missing; run the same "
                "command with the stage generate first."
            )


def _launcher(master: DictConfig) -> Any:
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext

    from .run import run_job

    context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks(master))
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=run_job, config=master)


def _wanted(job: _Job) -> dict[str, Any]:
    """What a host needs to have for a job."""
    groups = {name: OmegaConf.to_container(job.cfg[name], resolve=True) for name in ("model", "task")}
    return groups | {"memory": job.memory}


def _tracking_uri(master: DictConfig, cfg: DictConfig, outputs: Path) -> str:
    """The tracking server of this sweep: over several machines the head's, unless another one was chosen."""
    from . import tracking

    if master.hydra.runtime.choices["hydra/launcher"] == "dask":
        from .cluster import joined

        cluster = joined(outputs, master.hydra.launcher.head)
        embedded = cfg.tracking.uri in (None, "") and cfg.tracking.host not in (None, "")
        chosen = os.environ.get("MLFLOW_TRACKING_URI")
        if cluster.mlflow is not None and (chosen == cluster.mlflow or (embedded and not chosen)):
            os.environ.update(cluster.environment())
            return cluster.mlflow
    return tracking.resolve_uri(cfg.tracking, outputs)


def _warn(error: Any, outputs: Path) -> None:
    """Of a tracking server that cannot be reached, with how to publish what lies in `outputs`."""
    from . import tracking
    from .run import console

    console.print(f"[yellow]warning[/]: {tracking.TrackingUnreachable(error.reason, outputs)}")


def _wait_for_server(sweep: Any, cfg: DictConfig, outputs: Path) -> Any:
    """The sweep, after its server went away while the jobs ran: a local one is started again (maybe at another
    address), any other gets a while to come back.
    """
    from . import embedded_server, tracking
    from .run import console
    from .tracking_server import reachable

    if reachable(sweep.uri):
        return sweep
    if sweep.uri == embedded_server.last_address(outputs / "mlflow"):
        with suppress(tracking.TrackingUnreachable, BadInput):
            sweep = dataclasses.replace(sweep, uri=tracking.resolve_uri(cfg.tracking, outputs))
    if reachable(sweep.uri):
        return sweep
    console.print(f"{sweep.uri} does not answer; waiting for it, {cfg.tracking.wait_s:g} s at most")
    deadline = time.monotonic() + cfg.tracking.wait_s
    while time.monotonic() < deadline and not reachable(sweep.uri):
        time.sleep(1)
    return sweep


def _publish_what_is_home(sweep: Any, jobs: list[_Job], outputs: Path) -> None:
    """Finished jobs that could not be published when they ran, from their folders here."""
    from . import tracking
    from .run import console, job_name

    for job in jobs:
        folder = outputs / "jobs" / job.key
        if (folder / "score.json").is_file() and not (folder / "published.json").is_file():
            try:
                tracking.publish_job(sweep, folder)
                console.print(f"published {job_name(job.cfg)}")
            except tracking.TrackingUnreachable as error:
                _warn(error, outputs)
                return
            except Exception as error:  # one folder must not keep the others, or the sweep, from being closed
                console.print(f"[yellow]warning[/]: {job_name(job.cfg)} could not be published: {error}")


def _launch(launcher: Any, jobs: list[_Job], sweep_key: str, sweep: Any) -> int:
    """Hand the jobs to Hydra's launcher; returns how many failed."""
    from hydra.core.utils import JobStatus

    from .run import StopSweep, run_job

    if not jobs:
        return 0
    shared: dict[str, Any] = {"key": sweep_key, "total": len(jobs), "started": time.time(), "uri": None, "run_id": None}
    if sweep is not None:
        shared |= {"uri": sweep.uri, "experiment_id": sweep.experiment_id, "run_id": sweep.run_id}
    overrides = []
    for index, job in enumerate(jobs):
        one = shared | {"job": job.key, "data": job.data, "index": index, "memory": job.memory}
        overrides.append([*job.overrides, *(f"+sweep.{name}={_quoted(value)}" for name, value in one.items())])
    before = _failed_runs(sweep)
    try:
        if jobs[0].cfg.job is not None:
            cfg = OmegaConf.merge(
                jobs[0].cfg, {"sweep": shared | {"job": jobs[0].key, "data": jobs[0].data, "index": 0}}
            )
            assert isinstance(cfg, DictConfig)
            try:
                run_job(cfg)
            except Exception:  # run_job has said it
                return 1
            return 0
        returns = launcher.launch(overrides, initial_job_idx=0)
    except StopSweep as stop:
        raise BadInput(str(stop)) from stop
    pairs = zip(jobs, returns, strict=True)
    failures = [(job, each._return_value) for job, each in pairs if each.status != JobStatus.COMPLETED]
    if failures and sweep is not None:
        told = {key for run_id, key in _failed_runs(sweep).items() if run_id not in before}
        _record_failures(sweep, [(job, error) for job, error in failures if job.key not in told])
    return len(failures)


def _failed_runs(sweep: Any) -> dict[str, str]:
    """Run id -> key; none where nobody can say."""
    from . import tracking

    try:
        return {} if sweep is None else tracking.failed(sweep)
    except tracking.TrackingUnreachable:
        return {}


def _record_failures(sweep: Any, failures: Sequence[tuple[_Job, BaseException]]) -> None:
    """Runs for jobs that failed without one: whoever looks into MLflow must see that they are missing, and why."""
    from . import tracking
    from .run import configuration, job_name

    for job, error in failures:
        params = configuration(job.cfg) | {"model": configuration(job.cfg)["model"] | (job.model or {})}
        reason = getattr(error, "reason", None) or f"{type(error).__name__}: {error}"
        try:
            tracking.record_failure(sweep, job.key, job_name(job.cfg), params, reason)
        except tracking.TrackingUnreachable as unreachable:
            _warn(unreachable, Path(job.cfg.outputs))
            return


def _quoted(value: Any) -> str:
    """A value in Hydra's override grammar; strings quoted, so that a key of digits stays a string."""
    if value is None:
        return "null"
    return f"'{value}'" if isinstance(value, str) else repr(value)


def _close(sweep: Any, outputs: Path, status: str) -> None:
    """Close the parent run and show the results; a dead tracking server costs only the report."""
    from . import tracking
    from .report import report
    from .run import console

    shown = None
    try:
        try:
            shown = report(sweep, outputs / "reports" / sweep.sweep_key)
        except OSError as error:  # a full disk, say
            console.print(f"[yellow]warning[/]: the report could not be written: {error}")
        tracking.close_sweep(sweep, status, shown.files if shown else None)
    except tracking.TrackingUnreachable as error:
        _warn(error, outputs)
    except KeyboardInterrupt:  # enough waiting; but the parent must not stay RUNNING
        with suppress(tracking.TrackingUnreachable):
            tracking.close_sweep(sweep, "KILLED")
        raise
    if shown is None:
        return
    console.print(shown.table)
    if any(row["items"] is not None and row["items"] < _FEW_ITEMS for row in shown.rows):
        console.print(f"[dim]fewer than {_FEW_ITEMS} items: too few to conclude anything[/]")
    for path in shown.files:
        if path.suffix == ".png":
            console.print(f"figure  {os.path.relpath(path)}")
    console.print(f"runs    {shown.link}")


if __name__ == "__main__":
    sys.exit(main())
