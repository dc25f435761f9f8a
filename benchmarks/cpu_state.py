"""The functional API beside VeloxQuant-MLX 0.94.15 and attention itself, on a CPU, in one process.

    python -m benchmarks.cpu_state [--json FILE] [--quick]

Each line alternates our call, the peer's and (for decoding) attention over the same rows, and keeps the least time of
each, so that a busy machine slows all three. 8 heads of size 64, n_sink 4, the other defaults of the seed, positions
"original". Decoding starts from a state that has seen 4 budgets of tokens. "on arrival" is the default, recent 0:
most new rows go at once, in all heads in the fastest step, and nothing is copied. "a middle row" protects a quarter of
the budget, so that every step returns new arrays of keys and values, in temporal order.
"""

import argparse
import json
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

    def bound(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        def update(state: Any, keys: mx.array, values: mx.array) -> Any:
            state = function(*state[:5], keys, values, next_pos=state[5], pos=state[6], **rule, **more)
            mx.eval(state[:5])
            return state

        return update

    out = {"ours": bound(keyformer_update_batched, position_mode="original")}
    if peer_update_batched is not None:
        out["peer"] = bound(peer_update_batched)
    return out


def least(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each call, the least of interleaved repeats."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def block(S: int, budget: int, dtype: str, repeats: int) -> dict[str, float]:
    """S tokens into an empty state."""
    keys, values = (mx.random.normal((BH, S, D)).astype(DTYPES[dtype]) for _ in range(2))
    mx.eval(keys, values)
    empty = (None,) * 5 + (0, 0)
    return least({n: lambda u=u: u(empty, keys, values) for n, u in updates(budget, 0).items()}, repeats)


def decode(budget: int, recent: int, dtype: str, repeats: int) -> dict[str, float]:
    """One token into a full state, again and again; attention reads the rows that state has."""
    n = 4 * budget
    keys, values = (mx.random.normal((BH, n + repeats, D)).astype(DTYPES[dtype]) for _ in range(2))
    tokens = [(keys[:, i : i + 1] + 0, values[:, i : i + 1] + 0) for i in range(n, n + repeats)]
    mx.eval(tokens)
    functions = updates(budget, recent)
    full = functions["ours"]((None,) * 5 + (0, 0), keys[:, :n], values[:, :n])
    states = dict.fromkeys(functions, full)
    at = dict.fromkeys(functions, 0)

    def step(name: str) -> None:
        states[name] = functions[name](states[name], *tokens[at[name]])
        at[name] += 1

    def attention() -> None:
        k, v = states["ours"][:2]
        mx.eval(mx.fast.scaled_dot_product_attention(keys[None, :, :1], k[None], v[None], scale=D**-0.5))

    calls: dict[str, Callable[[], Any]] = {name: lambda name=name: step(name) for name in functions}
    return least({**calls, "attention": attention}, repeats)


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
    repeats = 5 if arguments.quick else 40
    cases: list[tuple[dict[str, Any], Callable[[], dict[str, float]]]] = [
        ({"case": f"block of {S}", "budget": b, "dtype": "float32"}, lambda S=S, b=b: block(S, b, "float32", 3))
        for S, b in ((512, 256), (2048, 256))
    ]
    for dtype in ("float32",) if arguments.quick else DTYPES:
        for b in (1024, 4096):
            for name, recent in (("on arrival", 0), ("a middle row", b // 4)):
                case = {"case": f"decode, {name}", "budget": b, "dtype": dtype}
                cases.append((case, lambda b=b, r=recent, d=dtype: decode(b, r, d, repeats)))
    head = ("case", "budget", "dtype", "ours ms", "peer ms", "attention ms", "peer/ours", "ours/attention")
    print("{:22} {:>6} {:8} {:>9} {:>9} {:>12} {:>9} {:>14}".format(*head))
    table = []
    for case, measure in cases:
        line = {**case, **measure()}
        ours, peer, attention = (line.get(name) for name in ("ours", "peer", "attention"))
        line["peer/ours"] = peer / ours if peer else None
        line["ours/attention"] = ours / attention if attention else None
        table.append(line)
        numbers = [ours, peer, attention, line["peer/ours"], line["ours/attention"]]
        shown = ["-" if x is None else f"{x:.2f}" for x in numbers]
        print(
            "{case:22} {budget:6} {dtype:8}".format(**line),
            "{:>9} {:>9} {:>12} {:>9} {:>14}".format(*shown),
            flush=True,
        )
    if arguments.json:
        about = {"mlx": mx.__version__, "python": sys.version.split()[0], "BH": BH, "D": D, "n_sink": N_SINK}
        arguments.json.write_text(json.dumps({**about, "lines": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
