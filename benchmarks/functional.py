"""The functional API beside VeloxQuant-MLX 0.94.15 and attention itself, in one process.

Each line runs our call, the peer's and (for decoding) attention over as many rows in random order and keeps the least
time of each, so that a busy machine slows all alike. 8 rows, n_sink 4, the other defaults of the seed, positions
"original". "on arrival" is the default, recent 0: most new rows go at once, in all heads in the fastest step, and
nothing is copied. "a middle row" protects a quarter of the budget, so that every step frees a row in the middle and
writes the new one.

"ours" is the update, after which the next one can run; "ours read" also gathers keys and values in temporal order into
arrays, which a state does only when they are used. The peer's update has to evaluate its arrays for the next one. On a
CPU there are enough steps for the rows to move to a new log at least once, which "ours mean", over all steps, pays for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from keyformer import keyformer_update_batched

from .harness import Line, skipped

try:
    from veloxquant_mlx.quantizers.keyformer import keyformer_update_batched as peer_update_batched
except ImportError:
    peer_update_batched = None

BH, N_SINK = 8, 4
SEEDS = list(range(BH))
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
COLUMNS = ("ours", "ours mean", "ours read", "peer", "attention")
RATIOS = (("peer", "ours"), ("peer", "ours read"), ("ours", "attention"), ("ours read", "attention"))


def say_what_is_missing() -> None:
    if peer_update_batched is None:
        skipped("VeloxQuant-MLX is not importable. pip install --no-deps VeloxQuant-MLX==0.94.15")


def block_lines(S: int, budget: int, D: int, dtype: str, repeats: int) -> Iterator[Line]:
    """S tokens into an empty state."""
    yield _line(f"block of {S}", budget, D, dtype, block(S, budget, D, dtype, repeats))


def decode_lines(budget: int, D: int, dtype: str, seen: int, repeats: int) -> Iterator[Line]:
    """One token into a state that has seen so many."""
    for name, recent in (("on arrival", 0), ("a middle row", budget // 4)):
        times = decode(budget, recent, D, dtype, seen, repeats)
        yield _line(f"decode, {name}", budget, D, dtype, times)


def _line(case: str, budget: int, D: int, dtype: str, times: dict[str, float]) -> Line:
    line: Line = {"case": case, "budget": budget, "D": D, "dtype": dtype}
    line |= {f"{name} ms": times.get(name) for name in COLUMNS}
    for above, below in RATIOS:
        known = above in times and below in times
        line[f"{above}/{below}"] = times[above] / times[below] if known else None
    return line


def updates(budget: int, recent: int) -> dict[str, Callable[..., Any]]:
    """name -> update(state, keys, values), the state being what the last update returned."""
    rule = {"n_sink": N_SINK, "budget": budget, "recent": recent, "tau_init": 1.0, "tau_end": 1.0}
    rule |= {"anneal_steps": 0, "rope_base": 10000.0, "seeds": SEEDS}

    def bound(function: Callable[..., Any], evaluated: slice, **more: Any) -> Callable[..., Any]:
        def update(state: Any, keys: mx.array, values: mx.array) -> Any:
            state = function(*state[:5], keys, values, next_pos=state[5], pos=state[6], **rule, **more)
            mx.eval(state[evaluated])
            return state

        return update

    out = {
        "ours": bound(keyformer_update_batched, slice(2, 5), position_mode="original"),
        "ours read": bound(keyformer_update_batched, slice(0, 5), position_mode="original"),
    }
    if peer_update_batched is not None:
        out["peer"] = bound(peer_update_batched, slice(0, 5))
    return out


def measured(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each call, the least of interleaved repeats, and the mean of ours."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in random.sample(list(calls), len(calls)):  # what ran before decides what the caches hold
            start = time.perf_counter()
            calls[name]()
            times[name].append(1000 * (time.perf_counter() - start))
    return {"ours mean": sum(times["ours"]) / repeats, **{name: min(t) for name, t in times.items()}}


def block(S: int, budget: int, D: int, dtype: str, repeats: int) -> dict[str, float]:
    """S tokens into an empty state."""
    keys, values = (mx.random.normal((BH, S, D)).astype(DTYPES[dtype]) for _ in range(2))
    mx.eval(keys, values)
    empty = (None,) * 5 + (0, 0)
    return measured({n: lambda u=u: u(empty, keys, values) for n, u in updates(budget, 0).items()}, repeats)


def decode(budget: int, recent: int, D: int, dtype: str, n: int, repeats: int) -> dict[str, float]:
    """One token into a state that has seen `n`, again and again; attention reads the rows that it begins with."""
    keys, values = (mx.random.normal((BH, n + repeats, D)).astype(DTYPES[dtype]) for _ in range(2))
    tokens = [(keys[:, i : i + 1] + 0, values[:, i : i + 1] + 0) for i in range(n, n + repeats)]
    mx.eval(tokens)
    functions = updates(budget, recent)
    full = functions["ours read"]((None,) * 5 + (0, 0), keys[:, :n], values[:, :n])
    states = dict.fromkeys(functions, full)
    at = dict.fromkeys(functions, 0)

    def step(name: str) -> None:
        states[name] = functions[name](states[name], *tokens[at[name]])
        at[name] += 1

    def attention() -> None:
        k, v = full[:2]
        mx.eval(mx.fast.scaled_dot_product_attention(keys[None, :, :1], k[None], v[None], scale=D**-0.5))

    calls: dict[str, Callable[[], Any]] = {name: lambda name=name: step(name) for name in functions}
    return measured({**calls, "attention": attention}, repeats)
