"""What eviction costs per decoded token: our caches beside mlx-lm's own, in one process, as ratios.

python benchmarks/decode.py --model outputs/models/smollm2-58a66dcdc4b5 --context 512 --budget 128 --batch 1 16
python benchmarks/decode.py --shape 8b --context 2048 --budget 2047 --batch 1 8     (random bfloat16 weights; a GPU)

The caches are filled with random rows; a token is timed from its input to its evaluated argmax. Medians of `--tokens`.
"""

import argparse
import statistics
import time
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache

import keyformer
from keyformer import POLICIES, Full, KeyformerKVCache, Policy
from keyformer.layers import group_layers

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="an mlx-lm folder")
    which.add_argument("--shape", choices=["8b"], help="random weights of that shape")
    parser.add_argument("--context", type=int, default=512, help="rows of the full cache")
    parser.add_argument("--budget", type=int, default=128, help="rows that the policies keep")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--policies", nargs="+", default=[n for n, k in POLICIES.items() if k().evicts])
    args = parser.parse_args()
    model: Any = mlx_lm.load(args.model)[0] if args.model else random_model()
    chip = mx.device_info().get("device_name", "") if mx.default_device() == mx.Device(mx.gpu) else "cpu"
    print(f"mlx {mx.__version__}, {mx.default_device()} {chip}, context {args.context}, budget {args.budget}")
    print(f"{'batch':>5}  {'cache':28}  {'ms/token':>9}  {'/ KVCache':>9}")
    for batch in args.batch:
        arms: list[tuple[str, list[Any]]] = [
            (f"mlx-lm KVCache, {args.context}", plain(model, batch, args.context, KVCache)),
            (f"mlx-lm RotatingKVCache, {args.budget + 1}", plain(model, batch, args.budget + 1, rotating)),
        ]
        arms += [(f"ours, full, {args.context}", ours(model, batch, args.context, Full(), None))]
        for policy in (POLICIES[name]() for name in args.policies):
            arms.append((f"ours, {policy.name}, {args.budget}", ours(model, batch, args.context, policy, args.budget)))
        times = [milliseconds(model, batch, caches, args.tokens) for _, caches in arms]
        for (name, _), took in zip(arms, times, strict=True):
            print(f"{batch:>5}  {name:28}  {took:9.2f}  {took / times[0]:9.2f}", flush=True)


def random_model() -> Any:
    model = llama.Model(llama.ModelArgs(**LLAMA_8B))
    model.update(tree_map(lambda p: mx.random.normal(p.shape, dtype=mx.bfloat16) * 0.02, model.parameters()))
    mx.eval(model.parameters())
    return model


def rotating(rows: int) -> RotatingKVCache:
    return RotatingKVCache(max_size=rows, keep=4)


def rows_of(model: Any, batch: int, n: int) -> tuple[mx.array, mx.array]:
    """Random keys and values as the model's first layer makes them."""
    cache = KVCache()
    attention = model.layers[0].self_attn
    weight = model.layers[0].input_layernorm.weight
    attention(mx.random.normal((1, 1, weight.shape[0])).astype(weight.dtype), cache=cache)
    k, v = cache.keys_and_values()
    return tuple(mx.random.normal((batch, a.shape[1], n, a.shape[3])).astype(a.dtype) for a in (k, v))  # type: ignore[return-value]


def plain(model: Any, batch: int, n: int, kind: Any) -> list[Any]:
    caches = []
    for _ in model.layers:
        cache = kind(n) if kind is rotating else kind()
        cache.update_and_fetch(*rows_of(model, batch, n))
        caches.append(cache)
    return caches


def ours(model: Any, batch: int, n: int, policy: Policy, budget: int | None) -> list[Any]:
    caches: list[Any] = []
    for layer, _ in enumerate(model.layers):
        row = []
        for _ in range(batch):
            cache = KeyformerKVCache(policy, budget, layer)
            keys, values = rows_of(model, 1, n)
            asked = policy.attention == "query"
            scores = mx.random.uniform(shape=keys.shape[:3]) if asked else None
            masses = mx.random.uniform(shape=(*keys.shape[:3], policy.window)) if policy.window else None
            cache.set_prompt(keys, values, scores, masses)
            cache.end_prefill()
            row.append(cache)
        caches.append(row[0] if batch == 1 else KeyformerKVCache.merge(row))
    group_layers(caches)
    return caches


def milliseconds(model: Any, batch: int, caches: list[Any], tokens: int) -> float:
    mx.eval([c.state for c in caches])
    times = []
    token = mx.full((batch, 1), 5, mx.int32)
    with keyformer.attached(model):
        for _ in range(tokens + 3):
            started = time.perf_counter()
            token = mx.argmax(model(token, cache=caches)[:, -1], axis=-1)[:, None]
            mx.eval(token)
            times.append(time.perf_counter() - started)
    return statistics.median(times[3:]) * 1e3


if __name__ == "__main__":
    main()
