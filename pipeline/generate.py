"""Stage 2: requests become responses.jsonl, a line each, written as soon as it is known; what is there is never
redone.
"""

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .errors import DiskFull
from .language_model import KeyformerLM, Response
from .load import Request, read_requests

log = logging.getLogger(__name__)
_TRACE_POINTS = 500
_QUIET_S = 20.0
_TELEMETRY = ("decode_rows", "row_bytes", "all_rows", "allocated_bytes", "rows_kept")


def generate(lm: KeyformerLM, requests: Sequence[Request], job: Path, on_progress: Callable[[int], None]) -> None:
    """Answer what `job`/responses.jsonl does not answer yet, then write `job`/telemetry.json.

    Requests are decoded in fixed groups of `lm.batch_size`, so an interrupted job, started again, gives the responses
    of an uninterrupted one: a group with a missing line is decoded whole and its missing lines are appended.

    Args:
        on_progress: called with the number of requests answered so far.

    Raises:
        DiskFull: no space on the disk; the lines written so far stay.
    """
    path = job / "responses.jsonl"
    done = read_back(path, requests)
    on_progress(len(done))
    mx.reset_peak_memory()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar,
        path.open("ab", buffering=0) as out,
    ):
        task = bar.add_task("generate", total=len(requests), completed=len(done))
        said = time.monotonic()

        def tell(now: str) -> None:
            nonlocal said
            bar.update(task, description=now)
            if bar.disable and time.monotonic() - said > _QUIET_S:  # no terminal, no bar: still a sign of life
                said = time.monotonic()
                bar.console.print(f"      {len(done)}/{len(requests)} answered, {now}", soft_wrap=True)

        for first in range(0, len(requests), lm.batch_size):
            group = requests[first : first + lm.batch_size]
            if all(r.id in done for r in group):
                continue
            for response in lm.respond(group, tell):
                if response.request.id in done:
                    continue
                line = _line(response, with_trace=response.request is requests[0])
                _append(out, line, path)
                done[response.request.id] = line
                bar.update(task, completed=len(done))
                on_progress(len(done))
    summary = _telemetry([done[r.id] for r in requests])
    write_whole(job / "telemetry.json", json.dumps(summary, indent=1))


def check_responses(requests: Path, responses: Path) -> tuple[int, int]:
    """How many requests of requests.jsonl have no usable line in responses.jsonl; how many lines are unusable."""
    asked = read_requests(requests)
    done, dropped = _usable(responses, {r.id: r.type for r in asked})
    return len(asked) - len(done), len(dropped)


def read_back(path: Path, requests: Sequence[Request]) -> dict[str, dict[str, Any]]:
    """The lines that answer a request, by id. Others (cut off, damaged, foreign) are dropped from the file."""
    done, dropped = _usable(path, {r.id: r.type for r in requests})
    if dropped:
        write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in done.values()))
        numbers = ", ".join(map(str, dropped[:10])) + (", ..." if len(dropped) > 10 else "")
        log.warning(
            "%s: %d unusable line(s) (%s) dropped; what they answered is asked again.", path, len(dropped), numbers
        )
    return done


def _usable(path: Path, wanted: dict[str, str]) -> tuple[dict[str, dict[str, Any]], list[int]]:
    """The first sound line of each wanted request (id -> type), by id, and the numbers of all other lines."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    done: dict[str, dict[str, Any]] = {}
    dropped: list[int] = []
    for number, raw in enumerate(lines, 1):
        if number == len(lines):  # behind the last newline: nothing, or a line that was cut off
            usable = not raw
        else:
            try:
                line = json.loads(raw)
                usable = line["id"] not in done and _sound(line, wanted[line["id"]])
            except (ValueError, KeyError, TypeError, RecursionError):
                usable = False
            if usable:
                done[line["id"]] = line
        if not usable:
            dropped.append(number)
    return done, dropped


def _sound(line: dict[str, Any], kind: str) -> bool:
    """Whether a line says all that scoring and the telemetry need of a request of that type."""
    numbers = [line["telemetry"][name] for name in _TELEMETRY] + [line["prompt_tokens"], line["generated_tokens"]]
    answer = line["response"]
    if kind == "generate_until":
        return isinstance(answer, str) and all(type(n) in (int, float) for n in numbers)
    numbers += [answer["logprob"], answer["tokens"], answer["top1"]]
    greedy = kind != "loglikelihood" or type(answer["is_greedy"]) is bool
    return greedy and all(type(n) in (int, float) for n in numbers)


def _line(response: Response, with_trace: bool) -> dict[str, Any]:
    r = response.request
    line = {
        "id": r.id,
        "task": r.task,
        "doc_id": r.doc_id,
        "idx": r.idx,
        "repeat": r.repeat,
        "response": response.response,
        "prompt_tokens": response.prompt_tokens,
        "generated_tokens": response.generated_tokens,
        "telemetry": response.telemetry,
    }
    if with_trace:
        stride = -(-len(response.trace) // _TRACE_POINTS)
        line["trace"] = response.trace[::stride]
    return line


def _append(out: RawIOBase, line: dict[str, Any], path: Path) -> None:
    """Unbuffered: a written line survives the death of this process, and closing the file cannot fail once more."""
    rest = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    try:
        while rest:
            rest = rest[out.write(rest) or 0 :]
    except OSError as error:
        raise no_space(error, path) from error


def write_whole(path: Path, text: str) -> None:
    """The whole file or none of it."""
    draft = path.with_name(path.name + ".draft")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise no_space(error, path) from error


def no_space(error: OSError, path: Path | str) -> Exception:
    """The error, or what to do about it when it says that the disk is full."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return DiskFull(
        f"No space left on the disk while writing {path}. Nothing is lost: free some space (outputs/prefill can be "
        "deleted) and give the same command again; it goes on at the next request."
    )


def _telemetry(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of a job from its response lines; bytes and rows are of one sequence, the mean over requests of its
    peak.
    """
    each = [line["telemetry"] for line in lines]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def total(name: str) -> float:
        return sum(t.get(name, 0.0) for t in each)

    decode_bytes = mean([t["decode_rows"] * t["row_bytes"] for t in each])
    full_bytes = mean([t["all_rows"] * t["row_bytes"] for t in each])
    metrics = {
        "kv/bytes_prefill_peak": mean([t.get("prefill_rows", 0.0) * t["row_bytes"] for t in each]),
        "kv/bytes_decode_peak": decode_bytes,
        "kv/bytes_allocated": mean([t["allocated_bytes"] for t in each]),
        "kv/bytes_full": full_bytes,
        "kv/saved_fraction": 1 - decode_bytes / full_bytes,
        "kv/rows_peak": max(t["decode_rows"] for t in each),
        "kv/rows_kept_mean": mean([t["rows_kept"] for t in each]),
        "kv/budget_floored": total("floored"),
        "memory/peak_bytes": float(mx.get_peak_memory()),
        "tokens/prompt": float(sum(line["prompt_tokens"] for line in lines)),
        "tokens/generated": float(sum(line["generated_tokens"] for line in lines)),
        "speed/decode_tok_per_s": total("decode_tokens") / max(total("decode_seconds"), 1e-9),
    }
    prefilled = [t for t in each if t.get("prefill_tokens")]
    if prefilled:
        seconds, evicting = total("prefill_seconds"), total("evict_seconds")
        metrics["speed/prefill_tok_per_s"] = total("prefill_tokens") / max(seconds, 1e-9)
        metrics["speed/ttft_s"] = mean(
            [t["prefill_seconds"] + t["evict_seconds"] + t["first_token_seconds"] for t in prefilled]
        )
        metrics["speed/eviction_share"] = evicting / max(seconds + evicting, 1e-9)
    trace: list[list[int]] = next((line["trace"] for line in lines if "trace" in line), [])
    series = {
        "kv/rows": [[position, rows] for position, rows, _ in trace],
        "kv/bytes": [[position, bytes_] for position, _, bytes_ in trace],
    }
    return {"metrics": metrics, "series": series}
