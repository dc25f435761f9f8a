"""Stage 1: an lm-eval task becomes requests on disk, in a folder named by its content that the jobs of a sweep share.

lm-eval itself builds the prompts (few-shot examples, chat template, gen_prefix). The folder holds all that the later
stages need: `generate` reads requests.jsonl alone, `score` no tokenizer, prose, index or download.
"""

import contextlib
import hashlib
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS

from pipeline import tasks
from pipeline.errors import BadInput
from pipeline.tasks.named import explained, quiet
from pipeline.tasks.prompt import encode, render_chat

log = logging.getLogger(__name__)
_ANSWER_TOKENS = ("max_gen_toks", "max_new_tokens", "max_completion_tokens", "max_tokens")
_MOST = 2**31 - 1  # MLX counts in 32 bits


@dataclass(frozen=True)
class Request:
    """One thing to ask the model. `id` is unique in its file and depends on what is asked alone.

    `question_start` is the character of `prompt` where the question starts, white space before it included: rows are
    evicted there; None = at the end of the prompt. For loglikelihood_rolling `prompt` is the text itself.
    """

    id: str
    type: str  # generate_until | loglikelihood | loglikelihood_rolling
    task: str
    doc_id: int
    idx: int  # which request of the document
    repeat: int  # which repetition of that request
    prompt: str
    question_start: int | None
    continuation: str | None
    gen_kwargs: dict[str, Any] | None
    target: str


@dataclass(frozen=True)
class DataFolder:
    """A folder written by `load`: requests.jsonl, docs.jsonl, data.json. `requests` counts the lines of the first."""

    path: Path
    hash: str
    task: str
    requests: int


def load(task_cfg: Any, tokenizer: Any, context: int, data_root: Path) -> DataFolder:
    """Build the task's requests and store them under `data_root`, or find the folder that holds the same ones already.

    `context` is how many tokens the model takes. Raises BadInput: unknown or unusable task, prompt and answer longer
    than `context`, query_aware false for a task that cannot say where its question starts, a `primary` that the task
    does not report, generation options that make no sense, no room on the disk.
    """
    cfg = tasks.settings(task_cfg)
    with _unworried_about_lengths():
        return _load(cfg, tokenizer, context, data_root)


def _load(cfg: Any, tokenizer: Any, context: int, data_root: Path) -> DataFolder:
    made = tasks.make(cfg, tokenizer)
    task = made.task
    if cfg.primary is not None and (metrics := tasks.reported(task)):
        tasks.primary_of(cfg, metrics)  # here rather than after the generation
    # The templates and functions of an lm-eval YAML run over every document: what they raise is told, not traced.
    with explained(cfg.name) if cfg.source == "lm_eval" else contextlib.nullcontext():
        try:
            with quiet():
                task.build_all_requests(
                    limit=made.limit,
                    apply_chat_template=cfg.apply_chat_template,
                    fewshot_as_multiturn=True,
                    chat_template=partial(render_chat, tokenizer) if cfg.apply_chat_template else None,
                )
        except ValueError as error:
            if "did not find any docs" not in str(error):
                raise
            raise BadInput(
                f"expected task {cfg.name!r} to have documents, got none; check its data and task.limit"
            ) from error
        requests = list(_requests(cfg, task))
    lengths = [_check_length(request, tokenizer, context) for request in requests]
    docs = [doc for _, doc in task.doc_iterator(limit=made.limit)]
    files = {"requests.jsonl": _jsonl([asdict(r) for r in requests]), "docs.jsonl": _jsonl(docs)}
    about: dict[str, Any] = {
        "task": cfg.name,
        "source": cfg.source,
        "items": len(docs),
        "origin": made.origin,
        "prose_sha256": made.prose_sha256,
    }
    digest = hashlib.sha256(json.dumps([files, about], sort_keys=True).encode()).hexdigest()[:16]
    about |= {
        "hash": digest,
        "requests": len(requests),
        "prompt_tokens": {"min": min(lengths), "max": max(lengths), "mean": sum(lengths) / len(lengths)},
    }
    files["data.json"] = json.dumps(about, indent=1)
    return DataFolder(_store(files, data_root / digest), digest, cfg.name, len(requests))


def read_requests(path: Path) -> list[Request]:
    """The requests of a requests.jsonl, in order."""
    with path.open(encoding="utf-8") as lines:
        return [Request(**json.loads(line)) for line in lines]


def answer_tokens(gen_kwargs: dict[str, Any]) -> int:
    """The most tokens that a generate_until request asks for (lm-eval's 256 when it does not say)."""
    given = (gen_kwargs[name] for name in _ANSWER_TOKENS if gen_kwargs.get(name) is not None)
    return int(next(given, DEFAULT_MAX_GEN_TOKS))


def request_of(instance: Instance, query_aware: bool, repeat: int = 0, number: int = 1, target: str = "") -> Request:
    """What lm-eval asks, as a request. `number` tells equal requests of one file apart (repeats, equal documents).

    Raises BadInput when query_aware is false and the document does not say where its question starts.
    """
    prompt, *rest = instance.args
    kind = str(instance.request_type)
    gen_kwargs = rest[0] if kind == "generate_until" else None
    continuation = rest[0] if kind == "loglikelihood" else None
    start = None if query_aware else _question_start(instance, prompt)
    asked = json.dumps([kind, prompt, continuation, gen_kwargs, start], sort_keys=True)
    return Request(
        id=hashlib.sha256(f"{number}{asked}".encode()).hexdigest()[:16],
        type=kind,
        task=str(instance.task_name),
        doc_id=int(instance.doc_id or 0),
        idx=instance.idx,
        repeat=repeat,
        prompt=prompt,
        question_start=start,
        continuation=continuation,
        gen_kwargs=gen_kwargs,
        target=target,
    )


def _requests(cfg: Any, task: Any) -> Iterator[Request]:
    seen: Counter[str] = Counter()
    instances: list[Instance] = task.instances
    for instance in instances:
        if instance.request_type == "generate_until":
            _check_options(cfg, instance.args[1])
        target = str(task.doc_to_target(instance.doc))
        for repeat in range(instance.repeats or 1):
            first = request_of(instance, cfg.query_aware)
            seen[first.id] += 1
            yield request_of(instance, cfg.query_aware, repeat, seen[first.id], target)


def _check_options(cfg: Any, options: Any) -> None:
    """Refuse generation options that would fail or mean something else while generating, wherever they come from."""
    where = "task.gen_kwargs or the task's YAML" if cfg.source == "lm_eval" else "the override"
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise BadInput(f"expected generation options as a mapping by name, got {options!r}; correct {where}")

    def number(least: float, most: float) -> Callable[[Any], bool]:
        return lambda value: type(value) in (int, float) and least <= value <= most

    def whole(least: int, most: int) -> Callable[[Any], bool]:
        return lambda value: type(value) is int and least <= value <= most

    def texts(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(stop, str) for stop in value))

    fits: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "until": ("a stop string or a list of them", texts),
        "do_sample": ("true or false", lambda value: type(value) is bool),
        "temperature": ("a number of at least 0", number(0, sys.float_info.max)),
        "top_p": ("a number above 0 and up to 1", number(sys.float_info.min, 1)),
        "top_k": (f"a whole number from 0 to {_MOST}", whole(0, _MOST)),
    } | dict.fromkeys(_ANSWER_TOKENS, (f"a whole number from 1 to {_MOST}", whole(1, _MOST)))
    for name, (wanted, fit) in fits.items():
        if name in options and not fit(options[name]):
            raise BadInput(
                f"expected the generation option {name} of {cfg.name!r} to be {wanted}, got {options[name]!r}; "
                f"correct it in {where}"
            )


def _question_start(instance: Instance, prompt: str) -> int | None:
    """Where the document's question last occurs in the prompt, moved back over the white space before it."""
    hint = f"with task.query_aware=false, so that eviction can come before the question of {instance.task_name!r}"
    if instance.request_type == "loglikelihood_rolling":
        raise BadInput(
            f"expected a task that asks a question {hint}, got a text without one; set task.query_aware=true"
        )
    if not prompt:
        return None  # lm-eval's unconditional likelihood of a choice: nothing to evict
    question = instance.doc.get("question")
    if not isinstance(question, str) or not question.strip():
        raise BadInput(
            f"expected documents with a `question` field {hint}, got the fields {', '.join(instance.doc)}; "
            "set task.query_aware=true"
        )
    start = prompt.rfind(question.strip())
    while start > 0 and prompt[start - 1].isspace():
        start -= 1
    if start <= 0:
        got = "it at the very start" if start == 0 else "it nowhere"
        raise BadInput(
            f"expected the `question` field to stand in the prompt after some context {hint}, got {got} in item "
            f"{instance.doc_id}; set task.query_aware=true"
        )
    return start


def _check_length(request: Request, tokenizer: Any, context: int) -> int:
    """The prompt's length in tokens, question and context measured separately, as they are fed."""
    cut = request.question_start
    if cut is None:
        prompt = len(encode(tokenizer, request.prompt))
    else:
        question = tokenizer.encode(request.prompt[cut:], add_special_tokens=False)
        prompt = len(encode(tokenizer, request.prompt[:cut])) + len(question)
    if request.gen_kwargs is not None:
        answer = answer_tokens(request.gen_kwargs)
    else:
        answer = len(tokenizer.encode(request.continuation or "", add_special_tokens=False))
    if prompt + answer > context:
        raise BadInput(
            f"expected prompt and answer within the model's {context} tokens, got {prompt} + {answer} in item "
            f"{request.doc_id} of {request.task!r}; lower task.tokens, the number of examples or the answer's "
            "length, or use a model with a longer context"
        )
    return prompt


def _jsonl(rows: list[Any]) -> str:
    try:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except TypeError as error:
        raise BadInput(f"expected documents of text and numbers, got: {error}; choose another task") from error


def _store(files: dict[str, str], folder: Path) -> Path:
    """Write the files as a whole or not at all. Files of a folder that is there already and that are not as they were
    written (its name is their hash) are put right, each in one step: another job may be reading them."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        there = folder.exists()
        damaged = [name for name, text in files.items() if not there or not _holds(folder / name, text)]
        if not damaged:
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".load-") as parent:
            draft = Path(parent) / folder.name
            draft.mkdir()
            for name, text in files.items():
                (draft / name).write_bytes(text.encode())
            if there:
                log.warning("%s was damaged (%s): written anew.", folder, ", ".join(damaged))
                for name in damaged:
                    (draft / name).replace(folder / name)
            else:
                draft.rename(folder)
    except OSError as error:
        if all(_holds(folder / name, text) for name, text in files.items()):
            return folder  # another job of the sweep wrote the same at the same time
        raise BadInput(
            f"expected to write the task's data as {folder}, got: {error.strerror}; free some space, delete what is "
            "in the way, or choose another folder with outputs=<folder>"
        ) from error
    return folder


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False


@contextlib.contextmanager
def _unworried_about_lengths() -> Iterator[None]:
    """Without transformers' "Token indices sequence length is longer than ...": lengths are checked and told here."""
    logger = logging.getLogger("transformers.tokenization_utils_base")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
