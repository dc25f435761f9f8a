"""One job: its stages in order, in a folder of its own and inside one tracked run."""

import fcntl
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.console import Console

from keyformer import Policy, make_policy
from keyformer.allocate import allocate

from . import models, tracking
from .errors import BadInput, DiskFull, HostUnfit, interrupted
from .generate import check_responses, generate, no_space, read_back, write_whole
from .gpu_lock import gpu_lock
from .language_model import KeyformerLM
from .load import load, read_requests
from .prefill import PrefillStore
from .score import score

STAGES = ("load", "generate", "score", "publish")
_VOLATILE = ("outputs", "tracking", "stages", "experiment_name", "experiment", "sweep", "job")
_LONGEST_NAME = 200  # MLflow's database has room for 256, and a deleted experiment is given a longer name
_ROOT = Path(__file__).parent.parent
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 150)


class StopSweep(BaseException):
    """No further job can succeed either (a full disk, say). Not an Exception, so that no launcher swallows it."""


# -- what a job is ----------------------------------------------------------------------------------------------------


def validate(cfg: DictConfig) -> Policy:
    """The job's policy, or BadInput for a value that cannot work. Nothing is written."""
    if not isinstance(cfg.stages, ListConfig) or not cfg.stages or any(s not in STAGES for s in cfg.stages):
        raise BadInput(f"stages: expected a list of some of {', '.join(STAGES)}, got {cfg.stages!r}.")
    for name in ("outputs", "experiment_name"):
        if not isinstance(cfg[name], str) or not cfg[name].strip():
            raise BadInput(
                f"{name}: expected a name in quotes, got {cfg[name]!r}; e.g. {name}=\\'{cfg[name] or 'mine'}\\'"
            )
    if len(cfg.experiment_name) > _LONGEST_NAME:
        raise BadInput(
            f"experiment_name: expected at most {_LONGEST_NAME} characters, got {len(cfg.experiment_name)}; shorten it."
        )
    for name in ("generate", "model", "policy", "task", "tracking"):
        if not isinstance(cfg[name], DictConfig):
            raise BadInput(f"{name}: expected options, got {cfg[name]!r}; choose a file with {name}=<choice>.")
    if cfg.prefill not in ("full", "chunked"):
        raise BadInput(f"prefill: expected 'full' or 'chunked', got {cfg.prefill!r}.")
    if cfg.positions not in (None, "original", "contiguous"):
        raise BadInput(f"positions: expected 'original' or 'contiguous', got {cfg.positions!r}.")
    for name, least in (("prefill_step_size", 1), ("batch_size", 1), ("share_prefill_gb", 0)):
        value = cfg.generate[name]
        whole = isinstance(value, int) or (name == "share_prefill_gb" and isinstance(value, float))
        if isinstance(value, bool) or not whole or not least <= value <= 10**9:
            raise BadInput(f"generate.{name}: expected a number from {least} to 10**9, got {value!r}.")
    wait = cfg.tracking.wait_s
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= 10**6:
        raise BadInput(f"tracking.wait_s: expected seconds, at least 0 and at most 10**6, got {wait!r}.")
    port = cfg.tracking.port
    if port is not None and (type(port) is not int or not 1 <= port <= 65535):
        raise BadInput(f"tracking.port: expected a whole number from 1 to 65535, got {port!r}.")
    seed = cfg.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise BadInput(f"seed: expected a whole number of at least 0, got {seed!r}.")
    choices = OmegaConf.to_container(cfg.policy, resolve=True)
    assert isinstance(choices, dict)
    try:
        policy = make_policy(**{**{str(k): v for k, v in choices.items()}, "seed": seed or 0})
        budget = cfg.budget
        if isinstance(budget, bool) or not isinstance(budget, (int, float)):
            if policy.evicts or budget is not None:
                raise ValueError(f"budget: expected a fraction in (0, 1] or a whole number of rows, got {budget!r}.")
        elif policy.evicts:
            if isinstance(budget, float):
                policy.budget_rows(budget, 1)
            else:
                policy.check_budget(budget)
            # how many layers evict is not known yet, so as many as there are weights
            how = _allocation(cfg)
            layers = 1 if isinstance(how, str) else len(how)
            allocate(how, budget if isinstance(budget, int) else policy.least_budget(), layers, policy)
    except (ValueError, TypeError) as error:
        raise BadInput(str(error)) from error
    return policy


def _allocation(cfg: DictConfig) -> str | list[float]:
    how = cfg.allocate
    return list(how) if isinstance(how, ListConfig) else "uniform" if how is None else how


def without_idle_axes(cfg: DictConfig) -> dict[str, None]:
    """Axes that cannot change this job's result, to be set to null: what `full` does with its budget, the seed of a
    policy without noise.
    """
    policy = validate(cfg)
    idle: dict[str, None] = {}
    if not policy.evicts:
        idle |= {"budget": None, "positions": None, "allocate": None}
    if policy.noise == "none" or policy.distribution == "constant":
        idle["seed"] = None
    return idle


def job_name(cfg: DictConfig) -> str:
    """<policy>-<budget>-s<seed>-<task>, axes without meaning left out."""
    budget = f"{cfg.budget * 100:g}pct" if isinstance(cfg.budget, float) else cfg.budget
    parts = [cfg.policy.name, budget, None if cfg.seed is None else f"s{cfg.seed}", cfg.task.name]
    return "-".join(str(p) for p in parts if p is not None)


def job_key(cfg: DictConfig, model: models.ModelFolder, data_hash: str) -> str:
    """What makes a job the same job: configuration, data, weights, back-end, library versions and our own code."""
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    kept = {k: v for k, v in config.items() if k not in _VOLATILE}
    kept["generate"] = {k: v for k, v in kept["generate"].items() if k != "share_prefill_gb"}
    kept["model"] = {"name": cfg.model.name, "revision": model.revision, "dtype": model.dtype, "backend": model.backend}
    kept |= {"data": data_hash, "code": code_hash(), "versions": versions("mlx", "mlx-lm", "lm-eval")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


@lru_cache
def code_hash() -> str:
    """sha256 over the Python files of keyformer/ and pipeline/; conf/ is already in the resolved configuration."""
    digest = hashlib.sha256()
    for path in sorted(p for package in ("keyformer", "pipeline") for p in (_ROOT / package).rglob("*.py")):
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def language_model(cfg: DictConfig, folder: models.ModelFolder, model: Any, tokenizer: Any) -> KeyformerLM:
    """The job's lm-eval model; `model` None checks requests without weights."""
    outputs = Path(cfg.outputs)
    limit = int(cfg.generate.share_prefill_gb * 2**30)
    identity = f"{folder.revision} {folder.dtype} {folder.backend} {code_hash()}"
    return KeyformerLM(
        model,
        tokenizer,
        validate(cfg),
        1.0 if cfg.budget is None else cfg.budget,
        context=folder.context,
        prefill=cfg.prefill,
        positions=cfg.positions or "original",
        allocate=_allocation(cfg),
        prefill_step_size=cfg.generate.prefill_step_size,
        batch_size=cfg.generate.batch_size,
        store=PrefillStore(outputs / "prefill", identity, cfg.generate.prefill_step_size, limit) if limit else None,
        query_aware=cfg.task.query_aware,
    )


@lru_cache(maxsize=1)
def loaded_model(folder: models.ModelFolder) -> tuple[Any, Any]:
    """Model and tokenizer, kept between the jobs of one process."""
    return models.load_model(folder)


# -- running it -------------------------------------------------------------------------------------------------------


def run_job(cfg: DictConfig) -> dict[str, float]:
    """The task function that Hydra's launcher calls: run the stages that are asked for and missing, and say how it
    went.

    All it needs is `cfg`, so it may run on another machine, in that machine's `cfg.outputs`. Returns the job's score
    metrics. Raises HostUnfit where another machine may be able to do the job, StopSweep where nothing can, and whatever
    made the job fail.
    """
    started = time.time()
    folder = Path(cfg.outputs) / "jobs" / cfg.sweep.job
    name = job_name(cfg)
    try:
        with _of_this_machine(folder), gpu_lock() if "generate" in cfg.stages else nullcontext():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder, name):
                metrics = _run_stages(cfg, folder, name)
    except BadInput as error:
        _say(cfg, name, f"[red]stopped[/]: {error}", started)
        raise StopSweep(str(error)) from error
    except HostUnfit as error:
        _say(cfg, name, f"[yellow]left to another machine[/]: {error}", started)
        raise
    except Exception as error:
        if interrupted.is_set():
            raise KeyboardInterrupt from error
        _say(cfg, name, f"[red]failed[/]: {type(error).__name__}: {error}", started)
        raise
    except KeyboardInterrupt:
        _say(cfg, name, "interrupted; the same command goes on where it stopped", started)
        raise
    _say(cfg, name, told(metrics), started)
    return metrics


def told(metrics: Mapping[str, float]) -> str:
    """A job's result in a line of progress."""
    forms = {"accuracy": "accuracy {:.3f}", "task/perplexity": "perplexity {:.2f}"}
    return "  ".join(form.format(metrics[name]) for name, form in forms.items() if name in metrics) or "done"


def _run_stages(cfg: DictConfig, folder: Path, name: str) -> dict[str, float]:
    data = Path(cfg.outputs) / "data" / cfg.sweep.data
    if "generate" in cfg.stages:
        model_folder, data = _prepared(cfg, data)
        _check_unchanged(cfg, model_folder)
        _describe(cfg, folder, name, model_folder, data)
    sweep = None if cfg.sweep.run_id is None else tracking.Sweep(
        cfg.sweep.uri, cfg.sweep.experiment_id, cfg.sweep.run_id, cfg.experiment_name, cfg.sweep.key
    )  # fmt: skip
    run = None
    if sweep is not None and "publish" in cfg.stages and "generate" in cfg.stages:
        try:
            run = tracking.start_job(sweep, folder)
        except tracking.TrackingUnreachable as error:
            console.print(f"[yellow]{error}[/]")
    times = _read_json(folder / "times.json")
    try:
        if "generate" in cfg.stages:
            clock = time.perf_counter()
            requests = read_requests(data / "requests.jsonl")
            missing, unusable = check_responses(data / "requests.jsonl", folder / "responses.jsonl")
            if missing or unusable or not _read_json(folder / "telemetry.json"):
                model, tokenizer = loaded_model(model_folder) if missing else (None, None)
                lm = language_model(cfg, model_folder, model, tokenizer)
                generate(lm, requests, folder, run.progress if run else lambda done: None)
                times["generate"] = times.get("generate", 0.0) + time.perf_counter() - clock
        if "score" in cfg.stages:
            clock = time.perf_counter()
            read_back(folder / "responses.jsonl", read_requests(data / "requests.jsonl"))
            scored = score(cfg.task, data, folder / "responses.jsonl")
            times["score"] = time.perf_counter() - clock
            write_whole(
                folder / "samples.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in scored.samples)
            )
            timed = {f"time/{stage}_s": seconds for stage, seconds in times.items()}
            write_whole(folder / "score.json", json.dumps({"metrics": scored.metrics | timed}, indent=1))
        write_whole(folder / "times.json", json.dumps(times))
        if sweep is not None and "publish" in cfg.stages:
            try:
                tracking.publish_job(sweep, folder)
            except tracking.TrackingUnreachable as error:
                console.print(f"[yellow]{error}[/]")
        return dict(_read_json(folder / "score.json").get("metrics", {}))
    except BaseException as error:
        if run is not None:
            if isinstance(error, DiskFull | HostUnfit) and _on_several_machines():
                run.kill(f"left to another machine: {error}")
            elif isinstance(error, Exception) and not interrupted.is_set():
                run.fail(f"{type(error).__name__}: {error}")
                write_whole(folder / "failure.txt", traceback.format_exc())
            else:
                run.kill()
        raise
    finally:
        if run is not None:
            run.close()


def _prepared(cfg: DictConfig, data: Path) -> tuple[models.ModelFolder, Path]:
    """The model and the requests, as the driver has them: what `cfg.sweep` names, in this machine's outputs."""
    try:
        model_folder = models.resolve(cfg.model, Path(cfg.outputs) / "models")
        if (data / "requests.jsonl").is_file():
            return model_folder, data
        made = load(cfg.task, models.load_tokenizer(model_folder), model_folder.context, data.parent)
    except BadInput as error:
        if _on_several_machines():  # the driver could: it is this machine that lacks something
            raise HostUnfit(str(error)) from error
        raise
    if made.hash != cfg.sweep.data:
        raise HostUnfit(
            f"expected the requests of {cfg.task.name} with hash {cfg.sweep.data}, got {made.hash} on "
            f"{socket.gethostname()}: the data set or a library differs there; fetch the same data and run `make setup`"
        )
    return model_folder, made.path


def _check_unchanged(cfg: DictConfig, model_folder: models.ModelFolder) -> None:
    """HostUnfit where this process would do another job than the one that the driver named.

    Hosts are compared when they join; their files may change while the sweep runs, and each job reads them anew.
    """
    if _on_several_machines() and job_key(cfg, model_folder, cfg.sweep.data) != cfg.sweep.job:
        raise HostUnfit(
            f"expected the job {cfg.sweep.job} as the sweep began, got another: code, libraries or model changed on "
            f"{socket.gethostname()} (commit {git_commit()}); bring it to the sweep's commit and give the command again"
        )


@contextmanager
def _of_this_machine(folder: Path) -> Iterator[None]:
    """A full disk is this machine's alone: others may go on where there are any."""
    try:
        yield
    except (DiskFull, OSError) as error:
        full = no_space(error, folder) if isinstance(error, OSError) else error
        if not isinstance(full, DiskFull):
            raise
        if _on_several_machines():
            raise HostUnfit(f"no space left on the disk of {socket.gethostname()}") from error
        raise full from error


def _on_several_machines() -> bool:
    """Whether the launcher that called us has other machines for a job."""
    return HydraConfig.initialized() and HydraConfig.get().runtime.choices.get("hydra/launcher") == "dask"


def configuration(cfg: DictConfig) -> dict[str, Any]:
    """The job's own options, resolved: what config.yaml and the params of its run say."""
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    return {str(k): v for k, v in config.items() if k not in ("sweep", "job")}


def identity(model: models.ModelFolder) -> dict[str, str]:
    """Which weights, in which numbers, on what: as job.json, keys and runs say."""
    return {"name": model.name, "revision": model.revision, "dtype": model.dtype, "backend": model.backend}


def _describe(cfg: DictConfig, folder: Path, name: str, model: models.ModelFolder, data: Path) -> None:
    """config.yaml and job.json: all that publishing and scoring again need to know."""
    about = json.loads((data / "data.json").read_text(encoding="utf-8"))
    write_whole(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(configuration(cfg))))
    rows = cfg.budget
    if isinstance(rows, float):
        policy = validate(cfg)
        rows = policy.budget_rows(rows, round(about["prompt_tokens"]["mean"]))[0]
    job = {
        "key": cfg.sweep.job,
        "name": name,
        "experiment_name": cfg.experiment_name,
        "sweep_key": cfg.sweep.key,
        "git_commit": git_commit(),
        "host": socket.gethostname(),
        "chip": chip(),
        "versions": {"python": platform.python_version(), "os": platform.platform(), **versions()},
        "model": identity(model),
        "data": about,
        "dataset_path": os.path.relpath(data),
        "budget_rows": rows,
    }
    write_whole(folder / "job.json", json.dumps(job, indent=1))


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """One process at a time in a job's folder; a second one waits and then finds the work done."""
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"{name}: another process on this machine works on it; waiting.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(cfg: DictConfig, name: str, what: str, started: float) -> None:
    """One line per job, with the time that the rest will take at this pace."""
    now, done, total = time.time(), cfg.sweep.index + 1, cfg.sweep.total
    left = (now - cfg.sweep.started) / done * (total - done)
    eta = f"  about {_duration(left)} left" if done < total else ""
    console.print(
        f"[dim]\\[{done:>{len(str(total))}}/{total}][/] {name}  {what}  [dim]{_duration(now - started)}{eta}[/]"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def versions(*names: str) -> dict[str, str]:
    """The installed versions of these packages; without names, of those that a run records."""
    return {
        n: version(n) for n in names or ("mlx", "mlx-lm", "lm-eval", "datasets", "transformers", "mlflow", "hydra-core")
    }


@lru_cache
def git_commit() -> str:
    """The commit of this checkout, "-dirty" when files differ from it; "unknown" outside of git."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(_ROOT), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@lru_cache
def chip() -> str:
    """The accelerator's name, or the processor's."""
    if mx.default_device() == mx.Device(mx.gpu):
        return str(mx.device_info().get("device_name", "gpu"))
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read_json(path: Path) -> dict[str, Any]:
    """What a side file says; nothing when it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
