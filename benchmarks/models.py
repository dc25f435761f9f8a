"""Models and filled caches to measure with: random weights and rows, of the shapes that matter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache

from keyformer import POLICIES, KeyformerKVCache
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
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
N_SINK = 4


@lru_cache(maxsize=1)
def random_model(tiny: bool) -> Any:
    """A llama of the 8B shape with random bfloat16 weights, or a tiny one."""
    model = llama.Model(llama.ModelArgs(**(TINY if tiny else LLAMA_8B)))
    model.update(tree_map(lambda p: mx.random.normal(p.shape, dtype=mx.bfloat16) * 0.02, model.parameters()))
    mx.eval(model.parameters())
    return model


@lru_cache(maxsize=1)
def loaded(folder: str) -> Any:
    """The model of an mlx-lm folder."""
    return mlx_lm.load(folder)[0]


def rows_of(model: Any, batch: int, n: int) -> tuple[mx.array, mx.array]:
    """Random keys and values as the model's first layer makes them."""
    cache = KVCache()
    layer = model.layers[0]
    weight = layer.input_layernorm.weight
    layer.self_attn(mx.random.normal((1, 1, weight.shape[0])).astype(weight.dtype), cache=cache)
    assert cache.keys is not None
    keys, values = (
        mx.random.normal((batch, a.shape[1], n, a.shape[3]), dtype=a.dtype) for a in (cache.keys, cache.values)
    )
    return keys, values


def full(model: Any, batch: int, context: int) -> list[Any]:
    """mlx-lm's own caches, with room in their last step for the tokens that are measured: growing moves all rows."""
    return _filled(model, batch, context - min(128, context // 4), KVCache)


def rotating(model: Any, batch: int, budget: int) -> list[Any]:
    """mlx-lm's sliding window with sinks, full: as many rows as ours attend to."""
    return _filled(model, batch, budget + 1, lambda: RotatingKVCache(max_size=budget + 1, keep=N_SINK))


def _filled(model: Any, batch: int, n: int, kind: Callable[[], Any]) -> list[Any]:
    caches = []
    for _ in model.layers:
        cache = kind()
        cache.update_and_fetch(*rows_of(model, batch, n))
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
        mx.clear_cache()
    return caches


def ours(model: Any, batch: int, budget: int, name: str) -> list[Any]:
    """Ours of a policy's defaults, full: a decoded token costs the same whatever was evicted before."""
    policy = POLICIES[name]()
    caches: list[Any] = []
    for layer, _ in enumerate(model.layers):
        cache = KeyformerKVCache(policy, budget if policy.evicts else None, layer)
        keys, values = rows_of(model, 1, budget + budget // 8)
        asked = policy.attention == "query"
        scores = mx.random.uniform(shape=keys.shape[:3]) if asked else None
        masses = mx.random.uniform(shape=(*keys.shape[:3], policy.window)) if policy.window else None
        cache.set_prompt(keys, values, scores, masses)
        cache.end_prefill()
        caches.append(cache if batch == 1 else KeyformerKVCache.merge([cache] * batch))
        mx.eval(caches[-1].state[:-1])
        mx.clear_cache()
    group_layers(caches)
    return caches


def peers(model: Any, budget: int) -> list[Any] | None:
    """VeloxQuant-MLX's Keyformer caches, full; None where it is not importable."""
    try:
        from veloxquant_mlx.cache.base import KVCacheBuilder, KVCacheConfig
    except ImportError:
        return None
    config = KVCacheConfig(method="keyformer", keyformer_budget=budget, keyformer_n_sink=N_SINK)
    caches = KVCacheBuilder.for_model(model, config)
    caches[0].update_and_fetch(*rows_of(model, 1, budget))  # token by token: the others start from copies
    mx.eval(caches[0].keys, caches[0].values)
    for i in range(1, len(caches)):
        caches[i] = copy.copy(caches[0])
    return list(caches)
