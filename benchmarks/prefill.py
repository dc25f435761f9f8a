"""What reading a long prompt costs: the chunks of mlx-lm's generate_step, with each cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

import keyformer

from .harness import Line

ARMS: dict[str, tuple[str, str, int | None]] = {  # policy, prefill, score_bytes
    "ours, streaming, chunked": ("streaming", "chunked", None),
    "ours, keyformer_proxy, chunked": ("keyformer_proxy", "chunked", None),
    "ours, keyformer_proxy, chunked, 256 MiB": ("keyformer_proxy", "chunked", 1 << 28),
    "ours, tova": ("tova", "full", None),
    "ours, snapkv": ("snapkv", "full", None),
    "ours, h2o": ("h2o", "full", None),
    "ours, keyformer": ("keyformer", "full", None),
}


def lines(model: Any, tokens: int, chunk: int, budget: int, limit: float, rounds: int) -> Iterator[Line]:
    """Least seconds of `rounds`. An arm that takes longer than `limit` seconds stops there, and its ratio is over the
    same number of tokens through KVCache."""
    prompt = mx.random.randint(0, model.args.vocab_size, (tokens,))
    arms: dict[str, tuple[str, str, int | None]] = {"KVCache": ("full", "full", None), **ARMS}
    best: dict[str, list[float]] = {}
    for i in range(-1, rounds):
        for name, (policy, *how) in arms.items():
            if name in best and best[name][-1] > limit:
                if i + 1 == rounds:
                    yield _line(name, best, tokens, chunk, budget)
                continue
            ends = _read(model, prompt[: 2 * chunk] if i < 0 else prompt, chunk, policy, budget, limit, *how)
            if i >= 0 and (name not in best or len(ends) > len(best[name]) or ends[-1] < best[name][-1]):
                best[name] = ends
            if i + 1 == rounds:  # now, so that whoever stops it has what there is
                yield _line(name, best, tokens, chunk, budget)


def _line(name: str, best: dict[str, list[float]], tokens: int, chunk: int, budget: int) -> Line:
    ends = best[name]
    plain = best["KVCache"][len(ends) - 1]
    done = min(tokens, len(ends) * chunk)
    return {"cache": name, "budget": budget, "tokens": done, "seconds": ends[-1], "over KVCache": ends[-1] / plain}


def _read(
    model: Any, prompt: mx.array, chunk: int, policy: str, budget: int, limit: float, when: str, score_bytes: int | None
) -> list[float]:
    """Seconds from the beginning to the end of each chunk; the last includes the eviction at the prompt's end."""
    if policy == "full":
        caches: list[Any] = [KVCache() for _ in model.layers]
    else:
        chosen = keyformer.POLICIES[policy]()
        caches = keyformer.make_prompt_cache(model, chosen, budget=budget, prefill=when, score_bytes=score_bytes)
    evicting = [c for c in caches if isinstance(c, keyformer.KeyformerKVCache)]
    ends: list[float] = []
    with keyformer.attached(model) if evicting else nullcontext():
        mx.eval(prompt)
        began = time.perf_counter()
        for cache in evicting:
            cache.begin_prefill()
        for first in range(0, len(prompt), chunk):
            model(prompt[None, first : first + chunk], cache=caches)
            mx.eval([c.state for c in caches])
            last = first + chunk >= len(prompt)
            if last:
                for cache in evicting:
                    cache.end_prefill()
                mx.eval([c.state for c in caches])
            mx.clear_cache()
            ends.append(time.perf_counter() - began)
            if ends[-1] > limit:
                break
    return ends
