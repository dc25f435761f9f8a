"""What a decoded token costs with each cache, all of them in one process, in rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

import keyformer

from . import models
from .harness import Line, skipped


def lines(
    model: Any, batch: int, context: int, budget: int, policies: list[str], rounds: int, tokens: int
) -> Iterator[Line]:
    """One batch and context. "piped": the next token is asked for before this one is waited for, as mlx-lm generates;
    "synced": each token is waited for. Medians over rounds, the caches in another order in each."""
    caches: dict[str, list[Any]] = {
        "KVCache": models.full(model, batch, context),
        "RotatingKVCache": models.rotating(model, batch, budget),
    }
    caches |= {f"ours, {name}": models.ours(model, batch, budget, name) for name in policies}
    modes: dict[str, Mode] = {"piped": piped, "synced": synced}
    times = measured(model, batch, caches, rounds, tokens, modes)
    for name, arm in caches.items():
        line: Line = {"batch": batch, "context": context, "budget": budget, "cache": name}
        line |= {"KV MiB": sum(c.nbytes for c in arm) / 2**20}
        for mode in modes:
            took, plain = (statistics.median(times[n, mode]) for n in (name, "KVCache"))
            line |= {f"{mode} ms": 1e3 * took, f"{mode} tokens/s over KVCache": plain / took}
        yield line | {"rounds": rounds, "tokens": tokens}


def with_peer(model: Any, budget: int, rounds: int, tokens: int) -> Iterator[Line]:
    """Batch 1, each token waited for, beside the peer's cache."""
    caches = {"RotatingKVCache": models.rotating(model, 1, budget)}
    caches |= {f"ours, {name}": models.ours(model, 1, budget, name) for name in ("keyformer_proxy", "keyformer")}
    peers = models.peers(model, budget)
    if peers is None:
        skipped("VeloxQuant-MLX's cache. pip install --no-deps VeloxQuant-MLX==0.94.15")
    else:
        caches["VeloxQuant-MLX, keyformer"] = peers
    times = measured(model, 1, caches, rounds, tokens, {"synced": synced})
    plain = statistics.median(times["RotatingKVCache", "synced"])
    for name in caches:
        took = statistics.median(times[name, "synced"])
        yield {"cache": name, "budget": budget, "synced ms": 1e3 * took, "over RotatingKVCache": took / plain}


Mode = Callable[[Any, list[Any], mx.array, int], mx.array]


def measured(
    model: Any, batch: int, caches: dict[str, list[Any]], rounds: int, tokens: int, modes: dict[str, Mode]
) -> dict[tuple[str, str], list[float]]:
    """Seconds per token of (cache, mode), one number for each round; what disturbs a round disturbs all in it."""
    times: dict[tuple[str, str], list[float]] = {(name, mode): [] for name in caches for mode in modes}
    current = {name: mx.full((batch, 1), 5, mx.int32) for name in caches}
    for i in range(-1, rounds):
        for name in random.sample(list(caches), len(caches)):
            plain = not isinstance(caches[name][0], keyformer.KeyformerKVCache)
            with nullcontext() if plain else keyformer.attached(model):
                for mode, generate in modes.items():
                    began = time.perf_counter()
                    current[name] = generate(model, caches[name], current[name], 2 if i < 0 else tokens)
                    if i >= 0:  # the first is for compilers
                        times[name, mode].append((time.perf_counter() - began) / tokens)
    return times


def piped(model: Any, caches: list[Any], token: mx.array, tokens: int) -> mx.array:
    """As mlx-lm's generate_step: the GPU works on the next token while Python reads this one."""
    token = _next(model, caches, token)
    mx.async_eval(token)
    for i in range(tokens):
        following = token
        if i + 1 < tokens:
            following = _next(model, caches, token)
            mx.async_eval(following)
        token.tolist()
        token = following
    return token


def synced(model: Any, caches: list[Any], token: mx.array, tokens: int) -> mx.array:
    """Each token is read before the next one is asked for."""
    for _ in range(tokens):
        token = _next(model, caches, token)
        mx.eval(token)
    return token


def _next(model: Any, caches: list[Any], token: mx.array) -> mx.array:
    return mx.argmax(model(token, cache=caches)[:, -1], axis=-1)[:, None]
