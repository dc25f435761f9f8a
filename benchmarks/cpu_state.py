"""The functional API beside VeloxQuant-MLX 0.94.15 and attention itself, on a CPU, in one process.

    python -m benchmarks.cpu_state [--json FILE] [--quick]

Each line runs our call, the peer's and (for decoding) attention over as many rows in random order and keeps the least
time of each, so that a busy machine slows all alike. 8 heads of size 64, n_sink 4, the other defaults of the seed,
positions "original". Decoding starts from a state that has seen 4 budgets of tokens. "on arrival" is the default,
recent 0: most new rows go at once, in all heads in the fastest step, and nothing is copied. "a middle row" protects a
quarter of the budget, so that every step frees a row in the middle and writes the new one.

"ours" is the update, after which the next one can run; "ours read" also gathers keys and values in temporal order into
arrays, which a state does only when they are used. The peer's update has to evaluate its arrays for the next one. There
are enough steps for the rows to move to a new log at least once, which "ours mean", over all steps, pays for.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from keyformer import keyformer_update_batched

try:
    from veloxquant_mlx.quantizers.keyformer import keyformer_update_batched as peer_update_batched
except ImportError:
    peer_update_batched = None

BH, D, N_SINK = 8, 64, 4
SEEDS = list(range(BH))
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


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


def block(S: int, budget: int, dtype: str, repeats: int) -> dict[str, float]:
    """S tokens into an empty state."""
    keys, values = (mx.random.normal((BH, S, D)).astype(DTYPES[dtype]) for _ in range(2))
    mx.eval(keys, values)
    empty = (None,) * 5 + (0, 0)
    return measured({n: lambda u=u: u(empty, keys, values) for n, u in updates(budget, 0).items()}, repeats)


def decode(budget: int, recent: int, dtype: str, repeats: int) -> dict[str, float]:
    """One token into a full state, again and again; attention reads the rows that this state begins with."""
    n = 4 * budget
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the table there")
    parser.add_argument("--quick", action="store_true", help="the float32 lines only, few repeats")
    arguments = parser.parse_args()
    mx.set_default_device(mx.Device(mx.cpu))
    if peer_update_batched is None:
        print(
            "VeloxQuant-MLX is not importable: no comparison. pip install --no-deps VeloxQuant-MLX==0.94.15", flush=True
        )
    cases: list[tuple[dict[str, Any], Callable[[], dict[str, float]]]] = [
        ({"case": f"block of {S}", "budget": b, "dtype": "float32"}, lambda S=S, b=b: block(S, b, "float32", 3))
        for S, b in ((512, 256), (2048, 256))
    ]
    for dtype in ("float32",) if arguments.quick else DTYPES:
        for b in (1024, 4096):
            repeats = 5 if arguments.quick else b // 8 + 10
            for name, recent in (("on arrival", 0), ("a middle row", b // 4)):
                case = {"case": f"decode, {name}", "budget": b, "dtype": dtype}
                cases.append((case, lambda b=b, r=recent, d=dtype, n=repeats: decode(b, r, d, n)))
    columns = ("ours", "ours mean", "ours read", "peer", "attention")
    ratios = (("peer", "ours"), ("peer", "ours read"), ("ours", "attention"), ("ours read", "attention"))
    heads = [f"{name} ms" for name in columns] + ["/".join(pair) for pair in ratios]
    print(f"{'case':22} {'budget':>6} {'dtype':8}", *heads, sep="  ")
    table = []
    for case, measure in cases:
        times = measure()
        line: dict[str, Any] = {**case, **{f"{name} ms": times.get(name) for name in columns}}
        for above, below in ratios:
            known = above in times and below in times
            line[f"{above}/{below}"] = times[above] / times[below] if known else None
        table.append(line)
        shown = ["-" if line[head] is None else f"{line[head]:.2f}" for head in heads]
        start = "{case:22} {budget:6} {dtype:8}".format(**line)
        print(start, *(f"{x:>{len(head)}}" for x, head in zip(shown, heads, strict=True)), sep="  ", flush=True)
    if arguments.json:
        about = {"mlx": mx.__version__, "python": sys.version.split()[0], "BH": BH, "D": D, "n_sink": N_SINK}
        arguments.json.write_text(json.dumps({**about, "lines": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
