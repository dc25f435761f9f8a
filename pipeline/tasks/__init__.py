"""Tasks for lm-eval that need no download: documents made from a config, a tokenizer and prose.

A task is a config (`conf/task/*.yaml`) whose `source` names one of the modules here, or `lm_eval` for any task lm-eval
knows. `make` builds documents and task; `rebuild` makes the same task again from stored documents, for scoring.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask, Task
from omegaconf import OmegaConf

from pipeline.errors import BadInput
from pipeline.tasks import fact, kv_retrieval, named, niah, perplexity
from pipeline.tasks.prompt import prompt_tokens
from pipeline.tasks.prose import Prose, read_prose

_CONFIG = {
    "fact": fact.config,
    "kv_retrieval": kv_retrieval.config,
    "niah": niah.config,
    "perplexity": perplexity.config,
}
_FIELDS = {
    "fact": "items tokens depths prose until max_gen_toks",
    "kv_retrieval": "items tokens depths until max_gen_toks",
    "niah": "items tokens haystack prose key_type value_type needle_keys needle_values needle_queries "
    "until max_gen_toks",
    "perplexity": "items tokens continuation_tokens prose",
    "lm_eval": "include_path limit num_fewshot gen_kwargs metadata",
}
_SHARED_FIELDS = "source name seed query_aware apply_chat_template primary"
_COUNTS = {"items", "tokens", "continuation_tokens", "max_gen_toks", "needle_keys", "needle_values", "needle_queries"}


@dataclass(frozen=True)
class Made:
    """A task ready to build requests from its first `limit` documents (None: all of them).

    `origin` is what `rebuild` needs besides the documents (JSON); `prose_sha256` names the prose they were made of.
    """

    task: Task
    limit: int | None
    origin: dict[str, Any]
    prose_sha256: str | None


def settings(task_cfg: Any) -> SimpleNamespace:
    """The task's config as plain values, checked: `cfg.items` of a DictConfig is a method, and slow.

    Raises BadInput: a field that is missing or that this source does not know, a value of the wrong kind.
    """
    values = OmegaConf.to_container(task_cfg, resolve=True)
    assert isinstance(values, dict)
    source = values.get("source")
    if source not in _FIELDS:
        raise BadInput(f"expected task.source to be one of {', '.join(_FIELDS)}, got {source!r}")
    fields = {*_SHARED_FIELDS.split(), *_FIELDS[source].split()}
    if unlike := fields.symmetric_difference(values):
        raise BadInput(
            f"expected a task of source {source} to have the fields {', '.join(sorted(fields))}, got a config "
            f"without or with {', '.join(map(str, sorted(unlike)))}; correct the task's YAML or the override"
        )
    counts = _COUNTS | {field for field in ("limit", "num_fewshot") if values.get(field) is not None}
    for field in sorted(counts & set(values)):
        least = 0 if field == "num_fewshot" else 1
        if type(values[field]) is not int or values[field] < least:
            raise BadInput(f"expected task.{field} to be a whole number of at least {least}, got {values[field]!r}")
    if type(values["seed"]) is not int:
        raise BadInput(f"expected task.seed to be a whole number, got {values['seed']!r}")
    for field in ("prose", "include_path"):
        if not isinstance(values.get(field), str | None):
            raise BadInput(
                f"expected task.{field} to be a path or null, got {values[field]!r}; a path of digits needs quotes"
            )
    for field in ("gen_kwargs", "metadata"):
        if not isinstance(values.get(field), dict | None):
            raise BadInput(
                f"expected task.{field} to be a mapping or null, got {values[field]!r}; "
                f"write 'task.{field}={{key:value}}'"
            )
    if type(values["primary"]) is int:
        values["primary"] = str(values["primary"])  # RULER names its metrics by their length: task.primary=4096
    if not isinstance(values["primary"], str | None):
        raise BadInput(f"expected task.primary to be the name of a metric or null, got {values['primary']!r}")
    for field in ("query_aware", "apply_chat_template"):
        if type(values[field]) is not bool:
            raise BadInput(f"expected task.{field} to be true or false, got {values[field]!r}")
    if not isinstance(values["name"], str) or not re.fullmatch(r"[\w.:-]+", values["name"]) or values["name"] == "???":
        raise BadInput(
            f"expected task.name of letters, digits and _ . : -, got {values['name']!r}; set task.name=<name>"
        )
    depths = values.get("depths", [0.5])
    if not (isinstance(depths, list) and depths and all(type(d) in (int, float) and 0 <= d <= 1 for d in depths)):
        raise BadInput(f"expected task.depths to be fractions between 0 (start) and 1 (end), got {depths!r}")
    until = values.get("until", [])
    if not (isinstance(until, list) and all(isinstance(stop, str) and stop for stop in until)):
        raise BadInput(f"expected task.until to be a list of stop strings, got {until!r}")
    return SimpleNamespace(**{str(field): value for field, value in values.items()})


def make(cfg: SimpleNamespace, tokenizer: Any) -> Made:
    """The task that `cfg` (of `settings`) describes. Raises BadInput for values that cannot work, naming them."""
    if cfg.source == "lm_eval":
        task, origin = named.find(cfg)
        return Made(task, cfg.limit, origin, None)
    config = _CONFIG[cfg.source](cfg)  # refuses bad combinations before documents are made
    measure = prompt_tokens(tokenizer, cfg.apply_chat_template)
    prose: Prose | None = None
    match cfg.source:
        case "fact":
            docs = fact.build(cfg, prose := read_prose(cfg.prose), measure)
        case "perplexity":
            docs = perplexity.build(cfg, prose := read_prose(cfg.prose), tokenizer)
        case "niah":
            prose = niah.prose(cfg)
            docs = niah.build(cfg, prose, measure)
        case _:
            docs = kv_retrieval.build(cfg, measure)
    return Made(_task(cfg.name, config, docs), None, {}, prose.sha256 if prose else None)


def rebuild(cfg: SimpleNamespace, origin: dict[str, Any], docs: list[dict]) -> Task:
    """The task of `make` around stored documents; needs no tokenizer, prose, index or download."""
    if cfg.source == "lm_eval":
        return named.rebuild(cfg, origin, docs)
    return _task(cfg.name, _CONFIG[cfg.source](cfg), docs)


def reported(task: Any) -> list[tuple[str, str]]:
    """The (metric, filter) pairs that the task will report; [] where only code knows them: the task's own, or that of
    metrics which are not lm-eval's and may report by other names."""
    if task.config.process_results is None:
        known = all(metric in metric_registry for metric in task.aggregation())
    else:
        known = task.config.metric_list is not None
    if not known:
        return []
    return [(metric, filter_.name) for metric in task.aggregation() for filter_ in task._filters]


def primary_of(cfg: SimpleNamespace, keys: list[tuple[str, str]]) -> tuple[str, str]:
    """The one of the (metric, filter) pairs that `cfg.primary` names. Raises BadInput for none and many."""
    fitting = [key for key in keys if cfg.primary in (key[0], f"{key[0]},{key[1]}", f"{key[0]}/{key[1]}")]
    if len(fitting) != 1:
        known = ", ".join(metric if key == "none" else f"'{metric},{key}'" for metric, key in keys)
        raise BadInput(f"expected task.primary to be one metric of {cfg.name!r} ({known}), got {cfg.primary!r}")
    return fitting[0]


def _task(name: str, config: dict[str, Any], docs: list[dict]) -> Task:
    with named.quiet():  # lm-eval warns about each custom_dataset
        return ConfigurableTask(
            config=config
            | {
                "task": name,
                "test_split": "test",
                "custom_dataset": named.dataset_of(docs),
                "num_fewshot": 0,
                "metadata": {"version": 1.0},
            }
        )
