"""Putting the cache under an mlx-lm model: the only file that patches mlx-lm, on request and undoably."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as _default_cache

from .cache import KeyformerKVCache
from .policies import POLICIES, Policy

_NAME = "scaled_dot_product_attention"
_attached: dict[str, tuple[int, Any]] = {}


def make_prompt_cache(model: nn.Module, policy: Policy, budget: int | None = None, prefill: str = "full") -> list[Any]:
    """The model's own caches with every plain global-attention KVCache replaced by a KeyformerKVCache.

    Args:
        model: an mlx-lm model.
        policy: what ranks and protects rows.
        budget: rows kept per KV head, an integer; unused by policy "full".
        prefill: "full" (evict once, at the end of the prompt) or "chunked" (after every chunk).

    Raises:
        ValueError: no layer can be replaced, or a budget that protects everything.
    """
    caches = _default_cache(model)
    replaced = [
        KeyformerKVCache(policy, budget, layer, prefill) if type(c) is KVCache else c for layer, c in enumerate(caches)
    ]
    if not any(isinstance(c, KeyformerKVCache) for c in replaced):
        kinds = ", ".join(sorted({type(c).__name__ for c in caches}))
        raise ValueError(
            f"Expected a model with global-attention KVCache layers, got {kinds}: there is nothing to evict."
        )
    return replaced


@contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Within this block the model's attention shows its queries to every cache that has an `observe` method.

    Policies that rank rows by the model's real queries need it. Blocks may nest; the last one to end restores mlx-lm.

    Raises:
        ValueError: the model's attention does not go through mlx-lm's scaled_dot_product_attention.
    """
    modules = _attention_modules(model)
    if not modules:
        works = ", ".join(sorted(name for name, p in POLICIES.items() if p.attention != "query"))
        raise ValueError(
            f"{type(model).__module__}: expected attention through mlx-lm's {_NAME}, found none; its queries cannot be "
            f"seen. Policies that work without them: {works}."
        )
    for module in modules:
        count, original = _attached.get(module.__name__, (0, getattr(module, _NAME)))
        if count == 0:
            setattr(module, _NAME, _observed(original))
        _attached[module.__name__] = count + 1, original
    try:
        yield
    finally:
        for module in modules:
            count, original = _attached.pop(module.__name__)
            if count > 1:
                _attached[module.__name__] = count - 1, original
            else:
                setattr(module, _NAME, original)


def _attention_modules(model: nn.Module) -> list[ModuleType]:
    """The Python modules whose classes make up the model and that call the function we wrap."""
    names = {type(m).__module__ for _, m in model.named_modules()}
    return [sys.modules[n] for n in sorted(names) if hasattr(sys.modules[n], _NAME)]


def _observed(original: Any) -> Any:
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        output = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if hasattr(cache, "observe"):
            # of a cache without a policy we know nothing, so it is refused too
            if sinks is not None and getattr(getattr(cache, "policy", None), "attention", "query") == "query":
                raise ValueError(
                    "Attention sinks (gpt_oss, mimo): their share of the softmax is not scored yet; "
                    "use policy 'window'."
                )
            pending = cache.observe(queries, keys, scale=scale, mask=mask)
            if pending:
                # evaluated with this call's output, so that no graph grows from token to token
                (output,) = mx.depends([output], pending)
        return output

    return scaled_dot_product_attention
