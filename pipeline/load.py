"""Stage 1: an lm-eval task becomes requests on disk, in a folder named by its content that the jobs of a sweep share.

lm-eval itself builds the prompts (few-shot examples, chat template, gen_prefix). The folder holds all that the later
stages need: `generate` reads requests.jsonl alone, `score` no tokenizer, prose, index or download.
"""

import errno
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS

from pipeline import tasks
from pipeline.errors import BadInput
from pipeline.tasks.named import quiet
from pipeline.tasks.prompt import encode, render_chat


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
    than `context`, query_aware false for a task that cannot say where its question starts, no room on the disk.
    """
    cfg = tasks.settings(task_cfg)
    made = tasks.make(cfg, tokenizer)
    task = made.task
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
    names = ("max_gen_toks", "max_new_tokens", "max_completion_tokens", "max_tokens")
    return int(next((gen_kwargs[name] for name in names if gen_kwargs.get(name) is not None), DEFAULT_MAX_GEN_TOKS))


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
        target = str(task.doc_to_target(instance.doc))
        for repeat in range(instance.repeats or 1):
            first = request_of(instance, cfg.query_aware)
            seen[first.id] += 1
            yield request_of(instance, cfg.query_aware, repeat, seen[first.id], target)


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
    """Write the files as a whole or not at all; a folder that is there already must hold the same."""
    if folder.exists():
        for name, text in files.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != text.encode():
                raise BadInput(
                    f"expected {folder} as the load stage wrote it, got a different {name}; delete the folder"
                )
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".load-") as parent:
            draft = Path(parent) / folder.name
            draft.mkdir()
            for name, text in files.items():
                (draft / name).write_bytes(text.encode())
            draft.rename(folder)
    except OSError as error:
        if folder.exists():  # another job of the sweep wrote the same at the same time
            return folder
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise BadInput(
                f"expected to write the task's data under {folder.parent}, got: {error.strerror}; free some space "
                "or choose another folder with outputs=<folder>"
            ) from error
        raise
    return folder
