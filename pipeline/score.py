"""Stage 3: stored responses become metrics by lm-eval's own filters, metrics and aggregation, without the model."""

import json
import logging
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import acc_all, acc_all_stderr, mean, mean_stderr
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from pipeline import tasks
from pipeline.errors import BadInput
from pipeline.load import Request, read_requests
from pipeline.tasks.named import quiet
from pipeline.tasks.perplexity import share, share_stderr

log = logging.getLogger(__name__)
_ANALYTIC = {mean: mean_stderr, acc_all: acc_all_stderr, share: share_stderr}  # lm-eval's own, and ours of `perplexity`
_HEAD = 200  # characters of a prompt shown at either end


@dataclass(frozen=True)
class Score:
    """What a job scored.

    `metrics` by name: `accuracy` (the primary metric, in [0, 1]; absent when the task has none such), `accuracy_stderr`
    (absent when unknown), `task/<metric>[/<filter>]`. `samples`: a row for each document with the same metrics of it.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


class LogLikelihood(tuple[float, bool]):
    """(logprob, is_greedy) as lm-eval wants it, with two attributes more.

    `tokens`: how many tokens the continuation has; `top1`: how many of them were the model's first choice.
    """

    tokens: int
    top1: int

    @classmethod
    def of(cls, response: dict[str, Any]) -> "LogLikelihood":
        """From the `response` of a stored line."""
        pair = cls((response["logprob"], response["is_greedy"]))
        pair.tokens, pair.top1 = response["tokens"], response["top1"]
        return pair


class ReplayLM(LM):
    """An lm-eval model that answers from stored responses: {(doc_id, idx): one response a repeat}."""

    def __init__(self, responses: dict[tuple[int, int], list[Any]]) -> None:
        super().__init__()
        self._left = {key: iter(answers) for key, answers in responses.items()}

    def _answers(self, requests: list[Instance]) -> list[Any]:
        return [next(self._left[int(request.doc_id or 0), request.idx]) for request in requests]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The stored texts."""
        return self._answers(requests)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The stored (logprob, is_greedy) pairs."""
        return [LogLikelihood.of(answer) for answer in self._answers(requests)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The stored log likelihoods."""
        return [answer["logprob"] for answer in self._answers(requests)]


def score(task_cfg: Any, data: Path, responses: Path) -> Score:
    """Score the responses (a responses.jsonl) to the requests of a data folder.

    Raises BadInput: files missing, corrupt lines, responses missing or to no request, a `primary` that the task does
    not report, metric names that would fall together.
    """
    cfg = tasks.settings(task_cfg)
    try:
        about = json.loads((data / "data.json").read_text(encoding="utf-8"))
        docs = [json.loads(line) for line in (data / "docs.jsonl").open(encoding="utf-8")]
        requests, origin = read_requests(data / "requests.jsonl"), about["origin"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadInput(
            f"expected a folder of the load stage at {data}, got: {error}; run stages=[load,generate,score]"
        ) from error
    answers = _match(requests, responses)
    task = tasks.rebuild(cfg, origin, docs)
    # The prompts are on disk: lm-eval need not build them again, so no tokenizer, template or few-shot example is used.
    setattr(task, "build_all_requests", partial(_instances, task, requests, docs))  # noqa: B010  mypy refuses the plain form
    with quiet():
        results: Any = evaluate(ReplayLM(answers), {"tasks": {cfg.name: task}}, bootstrap_iters=0)
    return _score(cfg, task, requests, results["samples"][cfg.name])


def _match(requests: list[Request], path: Path) -> dict[tuple[int, int], list[Any]]:
    """The responses of the file in the order of the requests."""
    stored: dict[str, Any] = {}
    try:
        with path.open("rb") as lines:  # bytes: a line that is no UTF-8 is told by its number
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line.decode())
                    stored[row["id"]] = row["response"]
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise BadInput(
                        f"expected a response in line {number} of {path}, got a corrupt line; "
                        "run the generate stage again, which redoes it"
                    ) from error
    except OSError as error:
        raise BadInput(f"expected responses at {path}, got: {error.strerror}; run the generate stage first") from error
    wanted = {request.id for request in requests}
    for what, ids in (
        ("without a response", [r.id for r in requests if r.id not in stored]),
        ("that the data folder does not have", [i for i in stored if i not in wanted]),
    ):
        if ids:
            raise BadInput(
                f"expected one response for each of {len(requests)} requests in {path}, got {len(ids)} {what}: "
                f"{', '.join(ids[:5])}{', ...' if len(ids) > 5 else ''}; run the generate stage again"
            )
    answers = defaultdict(list)
    for request in requests:
        answers[request.doc_id, request.idx].append(stored[request.id])
    return answers


def _instances(task: Task, requests: list[Request], docs: list[dict], **_: Any) -> None:
    """In place of `build_all_requests`: the stored requests as the task's instances, in their order."""
    repeats: dict[tuple[int, int], int] = defaultdict(int)
    for request in requests:
        repeats[request.doc_id, request.idx] += 1
    task._instances = [
        Instance(
            request_type=request.type,
            doc=docs[request.doc_id],
            arguments=_arguments(request),
            idx=request.idx,
            metadata=(request.task, request.doc_id, repeats[request.doc_id, request.idx]),
        )
        for request in requests
        if request.repeat == 0
    ]


def _arguments(request: Request) -> tuple[Any, ...]:
    match request.type:
        case "generate_until":
            return (request.prompt, request.gen_kwargs)
        case "loglikelihood":
            return (request.prompt, request.continuation)
        case _:
            return (request.prompt,)


def _score(cfg: Any, task: Task, requests: list[Request], rows: list[dict[str, Any]]) -> Score:
    """Metrics and samples from lm-eval's samples (one a document and filter)."""
    values: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        for metric in row["metrics"]:
            values[metric, row["filter"]].append(row[metric])
    # RULER reports every length it knows, with -1 for "no item of this length".
    values = {key: items for key, items in values.items() if not all(isinstance(v, float) and v == -1 for v in items)}
    aggregation = {metric: task.aggregation().get(metric, mean) for metric, _ in values}
    results = {key: float(aggregation[key[0]](items)) for key, items in values.items()}
    for (metric, key), items in values.items():
        stderr = _ANALYTIC.get(aggregation[metric])
        if stderr is not None and len(items) > 1:
            results[f"{metric}_stderr", key] = float(stderr(items))
    names = _names(list(results))
    metrics = {names[key]: value for key, value in results.items()}
    primary = _primary(cfg, task, list(values))
    if primary is not None and not 0 <= results[primary] <= 1:
        log.warning(
            "%s of %s is %g, outside [0, 1]: reported as %s, not as accuracy",
            primary[0],
            cfg.name,
            results[primary],
            names[primary],
        )
        primary = None
    if primary is not None:
        metrics["accuracy"] = results[primary]
        if (stderr_key := (f"{primary[0]}_stderr", primary[1])) in results:
            metrics["accuracy_stderr"] = results[stderr_key]
    first = {request.doc_id: request for request in reversed(requests)}
    samples: dict[int, dict[str, Any]] = {}
    for row in rows:
        prompt = first[row["doc_id"]].prompt
        sample = samples.setdefault(
            row["doc_id"],
            {
                "doc_id": row["doc_id"],
                "prompt_head": prompt[:_HEAD],
                "prompt_tail": prompt[-_HEAD:],
                "target": str(row["target"]),
                "response": _shown(row["resps"]),
            },
        )
        for metric in row["metrics"]:
            pair = metric, row["filter"]
            if pair in values and (value := _per_item(row[metric], aggregation[metric])) is not None:
                sample[names[pair].removeprefix("task/")] = value
                if pair == primary:
                    sample["accuracy"] = value
    return Score(metrics, list(samples.values()))


def _names(keys: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A name that MLflow takes for each (metric, filter): `task/<metric>/<filter>`, without lm-eval's filter "none"."""
    names = {}
    for metric, filter_name in keys:
        name = metric if filter_name == "none" else f"{metric}/{filter_name}"
        names[metric, filter_name] = "task/" + re.sub(r"[^\w\-. /]", "_", name.replace(",", "/"), flags=re.ASCII)
    if len(set(names.values())) < len(names):
        raise BadInput(
            f"expected metrics with different names, got {', '.join(map(str, keys))}, of which two become the same "
            "name in MLflow; rename a metric or filter in the task"
        )
    return names


def _primary(cfg: Any, task: Task, keys: list[tuple[str, str]]) -> tuple[str, str] | None:
    """The (metric, filter) reported as accuracy; None when the config names none and the task has none of which more is
    better."""
    if cfg.primary is None:
        better = task.higher_is_better()
        return next((key for key in keys if better.get(key[0], True)), None)
    return tasks.primary_of(cfg, keys)


def _per_item(value: Any, aggregation: Any) -> float | None:
    """A metric's value for one document: itself when it is a number, else what the aggregation makes of it alone."""
    if isinstance(value, tuple | list):
        try:
            value = aggregation([value])
        except (TypeError, ValueError, ZeroDivisionError, IndexError):
            return None  # a metric of the whole set, such as a correlation
    return float(value) if isinstance(value, bool | int | float) or hasattr(value, "dtype") else None


def _shown(responses: list[list[Any]]) -> str:
    """All responses to a document as text: one text as it is, anything else as JSON."""
    flat = [answer for repeats in responses for answer in repeats]
    if len(flat) == 1 and isinstance(flat[0], str):
        return flat[0]
    return json.dumps(
        [
            [None if isinstance(x, float) and not math.isfinite(x) else x for x in a] if isinstance(a, tuple) else a
            for a in flat
        ],
        ensure_ascii=False,
    )
