"""`perplexity`: real prose, evicted at the end of the context, then its true continuation fed token by token."""

import math
import random
from collections.abc import Sequence
from typing import Any

from pipeline.errors import BadInput
from pipeline.tasks.prompt import encode, largest
from pipeline.tasks.prose import Prose

_TRIES = 20  # words by which a context may be shorter, in search of a clean cut


def build(cfg: Any, prose: Prose, tokenizer: Any) -> list[dict]:
    """`items` windows of prose that do not overlap: a context of `cfg.tokens` tokens and a continuation of
    `cfg.continuation_tokens` tokens, each met from below to the word.

    The windows tile the prose; `cfg.seed` says which of them are used, in which order. The cut is clean: context and
    continuation together are the tokens of the context followed by those of the continuation. Raises BadInput when the
    prose has fewer windows than items, or when no cut of a window is clean.
    """
    windows, pieces = [], prose.pieces
    while window := _window(cfg, pieces, tokenizer):
        doc, used = window
        windows.append(doc)
        pieces = pieces[used:]
    if len(windows) < cfg.items:
        size = cfg.tokens + cfg.continuation_tokens
        raise BadInput(
            f"expected prose for task.items={cfg.items} windows of {size} tokens, got {len(windows)} windows; "
            "lower task.items or task.tokens, or name a longer file in task.prose"
        )
    return random.Random(f"perplexity/{cfg.seed}").sample(windows, cfg.items)


def _window(cfg: Any, pieces: list[str], tokenizer: Any) -> tuple[dict, int] | None:
    """The next document and how many pieces it used; None when the pieces left are too few for a whole window."""
    pieces = pieces[: cfg.tokens + cfg.continuation_tokens + 2]  # a word is at least one token

    def text(start: int, end: int) -> str:
        return "".join(pieces[start:end]) if start else "".join(pieces[:end]).lstrip()

    first = largest(len(pieces), lambda n: len(encode(tokenizer, text(0, n))), cfg.tokens)
    for cut in range(first, max(first - _TRIES, 0), -1):
        room = cfg.continuation_tokens
        end = cut + _words_that_fit(tokenizer, pieces[cut:], room)
        if end == len(pieces):
            return None
        context, whole, continuation = encode(tokenizer, text(0, cut)), encode(tokenizer, text(0, end)), text(cut, end)
        tail = whole[len(context) :]
        clean = whole[: len(context)] == context and tokenizer.decode(tail).strip() == continuation.strip()
        if clean and 0 < len(tail) <= room:
            return {"context": text(0, cut), "continuation": continuation}, end
    if len(pieces) - first < 2:
        return None
    raise BadInput(
        f"expected a whole word in {cfg.continuation_tokens} tokens after a context of {cfg.tokens}, sharing no token "
        f"with it, got none after {text(0, first)[-80:]!r}; raise task.continuation_tokens or change task.prose"
    )


def _words_that_fit(tokenizer: Any, pieces: list[str], tokens: int) -> int:
    """How many of the pieces fit into so many tokens, fed after others."""
    return largest(len(pieces), lambda n: len(tokenizer.encode("".join(pieces[:n]), add_special_tokens=False)), tokens)


def share(items: Sequence[tuple[float, int]]) -> float:
    """Total over total tokens of (total, tokens) pairs: long continuations weigh more."""
    return sum(total for total, _ in items) / sum(tokens for _, tokens in items)


def exp_share(items: Sequence[tuple[float, int]]) -> float:
    """Perplexity over all tokens of (negative log likelihood, tokens) pairs."""
    return math.exp(share(items))


def share_stderr(items: Sequence[tuple[float, int]]) -> float:
    """Standard error of `share` over items (ratio estimator); with equal token counts it is that of the mean."""
    n, mean, tokens = len(items), share(items), sum(t for _, t in items)
    return math.sqrt(n / (n - 1) * sum((total - mean * t) ** 2 for total, t in items)) / tokens


def judge(doc: dict, results: Sequence[Any]) -> dict[str, tuple[float, int]]:
    """(total, tokens) pairs for each metric from a response (logprob, is_greedy) with attributes `tokens` and `top1`:
    how many tokens the continuation has, and for how many of them the model's first choice was the true one."""
    (response,) = results
    nll = (-response[0], response.tokens)
    return {"top1": (response.top1, response.tokens), "nll_per_token": nll, "perplexity": nll}


def config(cfg: Any) -> dict:
    """The lm-eval side: one loglikelihood request a window."""
    if cfg.apply_chat_template:
        raise BadInput("expected task.apply_chat_template=false for perplexity (prose is no conversation), got true")
    if not cfg.query_aware:
        raise BadInput("expected task.query_aware=true for perplexity (it asks no question), got false")
    return {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "continuation",
        "process_results": judge,
        "metric_list": [
            {"metric": "top1", "aggregation": share, "higher_is_better": True},
            {"metric": "nll_per_token", "aggregation": share, "higher_is_better": False},
            {"metric": "perplexity", "aggregation": exp_share, "higher_is_better": False},
        ],
    }
