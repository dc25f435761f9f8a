"""Any lm-eval task by name, from the user's folder of YAMLs or lm-eval's own; built again without its dataset."""

import contextlib
import difflib
import hashlib
import io
import json
import logging
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import lm_eval.tasks
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks._index import Entry, Kind
from lm_eval.tasks._yaml_loader import load_yaml

from pipeline.errors import BadInput

_OWN = Path(lm_eval.tasks.__file__).parent
_HUB_TIMEOUT_S = 5.0


def find(cfg: Any) -> tuple[Task, dict[str, Any]]:
    """The task named `cfg.name` with its dataset, and where it came from: {"root", "yaml", "sha256"}.

    Raises BadInput: unknown name (with close matches), a group or tag (with its members), a dataset that cannot be had,
    a task that runs the model's code or needs images or sound, settings the task cannot take.
    """
    entry, manager = _entry(cfg)
    if entry.kind in (Kind.GROUP, Kind.TAG):
        members = sorted(entry.tags) or [m if isinstance(m, str) else m.get("task") for m in (entry.cfg or {})["task"]]
        raise BadInput(
            f"expected task.name to be one task, got {cfg.name!r}, a group of {len(members)} "
            f"({', '.join(map(str, members[:8]))}{', ...' if len(members) > 8 else ''}); "
            "name one, or sweep over several with task.name=a,b"
        )
    if entry.kind is Kind.PY_TASK:
        raise BadInput(
            f"expected task.name to be a task described by a YAML alone, got {cfg.name!r}, a Python class of "
            "lm-eval: it cannot be scored from disk without its dataset; choose another task"
        )
    assert entry.yaml_path is not None
    with explained(cfg.name, entry.yaml_path):
        unknown = _unknown_metrics(entry.yaml_path)
    state = random.getstate()
    random.seed(cfg.seed)  # some tasks (RULER) make their documents from the global random
    try:
        with _fail_fast(entry, bool(unknown)) as reachable:
            task = manager.load(cfg.name)["tasks"][cfg.name]
    except (OSError, datasets.exceptions.DatasetGenerationError) as error:
        why = "its dataset needs a download and the Hugging Face hub is not reachable" if not reachable else "it failed"
        raise BadInput(
            f"expected the dataset of task {cfg.name!r} to load, got: {why} ({_short(error)}); "
            "use a task with local data, or fill the datasets cache where there is a network"
        ) from error
    except Exception as error:
        if unknown:  # lm-eval's own words for one are "KeyError: None"
            raise _unknown_metric(cfg.name, entry.yaml_path, unknown) from error
        raise _unbuilt(cfg.name, entry.yaml_path, error) from error
    finally:
        random.setstate(state)
    with explained(cfg.name, entry.yaml_path):
        _settle(task, cfg)
        if missing := [metric for metric in unknown if task._metric_fn_list.get(metric) is None]:
            raise _unknown_metric(cfg.name, entry.yaml_path, missing)
        if missing := [metric for metric, function in task.aggregation().items() if function is None]:
            raise BadInput(
                f"expected an aggregation that lm-eval knows for the metric {missing[0]!r} in {entry.yaml_path}, got "
                "another; correct it there"
            )
    root = "lm_eval" if entry.yaml_path.is_relative_to(_OWN) else "include_path"
    base = _OWN if root == "lm_eval" else Path(cfg.include_path).resolve()
    return task, {
        "root": root,
        "yaml": entry.yaml_path.relative_to(base).as_posix(),
        "sha256": _definition(entry.yaml_path),
    }


def rebuild(cfg: Any, origin: dict[str, Any], docs: list[dict]) -> Task:
    """The task of `find` around stored documents, from its YAML alone. Raises BadInput when that YAML is gone."""
    base = _OWN if origin["root"] == "lm_eval" else Path(cfg.include_path or ".")
    path = (base / origin["yaml"]).resolve()
    if not path.is_file():
        raise BadInput(
            f"expected the YAML of task {cfg.name!r} at {path}, got no file; set task.include_path to its folder"
        )
    with explained(cfg.name, path):
        settings = load_yaml(path)
    # The stored documents are those after process_docs, cut to the limit; few-shot examples are in the stored prompts.
    settings |= {
        "task": cfg.name,
        "custom_dataset": dataset_of(docs),
        "dataset_kwargs": None,
        "process_docs": None,
        "test_split": "test",
        "validation_split": None,
        "training_split": None,
        "fewshot_split": None,
        "fewshot_config": None,
        "num_fewshot": 0,
    }
    metadata = settings.get("metadata")
    settings["metadata"] = metadata if isinstance(metadata, dict) else {"version": metadata}
    for structural in ("tag", "group", "task_list"):
        settings.pop(structural, None)
    with explained(cfg.name, path), quiet():
        return ConfigurableTask(config=settings)


def dataset_of(docs: list[dict]) -> Callable[..., dict[str, datasets.Dataset]]:
    """What lm-eval's `custom_dataset` wants: a function that ignores the task's metadata and returns the splits."""

    def splits(**_: Any) -> dict[str, datasets.Dataset]:
        return {"test": datasets.Dataset.from_list(docs)}

    return splits


@contextlib.contextmanager
def explained(name: str, yaml: Path | None = None) -> Iterator[None]:
    """What lm-eval raises over a task's YAML, code or documents becomes a BadInput with its type and text."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # of any class: the YAML's templates and functions run in here
        raise _unbuilt(name, yaml, error) from error


def _unbuilt(name: str, yaml: Path | None, error: Exception) -> BadInput:
    return BadInput(
        f"expected lm-eval to build task {name!r}{f' from {yaml}' if yaml else ''}, got "
        f"{type(error).__name__}: {_short(error)}; correct the task's YAML, its functions or its data"
    )


def _unknown_metrics(path: Path) -> list[str]:
    """The YAML's metrics that lm-eval looks for in Hugging Face's `evaluate` because it has none of that name."""
    yaml = load_yaml(path, resolve_func=False)
    if yaml.get("process_results") is not None:
        return []  # the task's own code computes them
    names = [entry.get("metric") for entry in yaml.get("metric_list") or []]
    return [name for name in names if isinstance(name, str) and "!function" not in name and name not in metric_registry]


def _unknown_metric(name: str, yaml: Path, metrics: list[str]) -> BadInput:
    near = difflib.get_close_matches(metrics[0], list(metric_registry), n=3)
    return BadInput(
        f"expected metrics that lm-eval knows in {yaml} (task {name!r}), got {', '.join(metrics)}"
        f"{'; near: ' + ', '.join(near) if near else ''}; correct its metric_list"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's warnings and progress bars, which say nothing about the user's own input.

    Should the block fail, what it wrote to stderr is shown after all.
    """
    logger, held = logging.getLogger("lm_eval"), io.StringIO()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(held):
            yield
    except BaseException:
        sys.stderr.write(held.getvalue())
        raise
    finally:
        logger.setLevel(level)


def _entry(cfg: Any) -> tuple[Entry, lm_eval.tasks.TaskManager]:
    known: list[str] = []
    include = cfg.include_path
    if include is not None and not Path(include).is_dir():
        raise BadInput(f"expected task.include_path to be a folder of lm-eval YAMLs, got {include}, which is no folder")
    # lm-eval's own index takes 9 s (14,000 YAMLs): only when the user's folder does not have the name.
    include = str(Path(include).resolve()) if include is not None else None
    for own in [False, True] if include else [True]:
        with explained(cfg.name):
            manager = lm_eval.tasks.TaskManager(include_path=include, include_defaults=own, metadata=cfg.metadata)
        if entry := manager.task_index.get(cfg.name):
            return entry, manager
        known = manager.all_tasks
        for path in sorted(Path(include).rglob("*.yaml")) if include and not own else []:
            if cfg.name in path.read_text(encoding="utf-8", errors="replace"):
                with explained(cfg.name, path):  # lm-eval's index passes over damaged YAMLs without a word
                    load_yaml(path, resolve_func=False)
    near = difflib.get_close_matches(cfg.name, known, n=5)
    raise BadInput(
        f"expected task.name to be a task of lm-eval{' or of ' + cfg.include_path if include else ''}, "
        f"got {cfg.name!r}{'; near: ' + ', '.join(near) if near else ''}"
    )


def _settle(task: Task, cfg: Any) -> None:
    """Put the user's settings into the task, as simple_evaluate does; refuse what would be ignored."""
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise BadInput(
            f"expected a task of text alone, got {cfg.name!r}, which runs generated code or needs images or sound"
        )
    if cfg.num_fewshot is not None and task.get_config("num_fewshot") == 0 and cfg.num_fewshot != 0:
        raise BadInput(
            f"expected task.num_fewshot=null for {cfg.name!r} (the task fixes it at 0), got {cfg.num_fewshot}"
        )
    shots = task.get_config("num_fewshot") if cfg.num_fewshot is None else cfg.num_fewshot
    task.set_config("num_fewshot", shots or 0)
    task.set_fewshot_seed(cfg.seed)
    if cfg.gen_kwargs:
        if task.OUTPUT_TYPE != "generate_until":
            raise BadInput(
                f"expected task.gen_kwargs=null for {cfg.name!r} (it generates nothing), got {cfg.gen_kwargs}"
            )
        task.set_config("generation_kwargs", dict(cfg.gen_kwargs), update=True)


@contextlib.contextmanager
def _fail_fast(entry: Entry, metrics: bool) -> Iterator[bool]:
    """Whether the hub can be reached, where the dataset or (`metrics`) a metric may need it. If not, the hub's
    libraries use their caches or fail at once, instead of retrying for 50 s."""
    path = (entry.cfg or {}).get("dataset_path")
    local = path in datasets.packaged_modules._PACKAGED_DATASETS_MODULES or (path and Path(path).exists())
    reachable = (bool(local) and not metrics) or _hub_answers()
    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not reachable:
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reachable
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _hub_answers() -> bool:
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True  # an answer, if an unfriendly one
    except OSError:
        return False
    return True


def _definition(path: Path) -> str:
    """sha256 of what defines a task besides its documents: its merged YAML and the Python files beside it."""
    settings = {k: v for k, v in load_yaml(path, resolve_func=False).items() if not k.startswith("dataset_")}
    merged = json.dumps(settings, sort_keys=True, default=str).replace(str(path.parent), "")
    code = b"".join(source.read_bytes() for source in sorted(path.parent.glob("*.py")))
    return hashlib.sha256(merged.encode() + code).hexdigest()


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
