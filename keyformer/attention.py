"""What keyformer knows about single mlx-lm models: attention that has to be replaced to be seen, and who cannot evict.

Most models call mlx-lm's scaled_dot_product_attention, which the hook wraps once for all. The classes named here
compute attention in their own way; each replacement does the same operations in the same order as the class it stands
in for, so its outputs are the same to the bit, and hands calls whose cache does not ask for queries to the original.
It is the hook that puts them in place and takes them away; nothing here patches anything.
"""

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx

Call = Callable[..., Any]


def shown(output: mx.array, cache: Any, queries: mx.array, keys: mx.array, **attention: Any) -> mx.array:
    """`output`, after the cache has observed the attention call that made it.

    Args:
        output: of that call.
        cache: has `observe`.
        queries: [B, Hq, S, D], rotated.
        keys: [B, H, n, D], what the queries were multiplied with.
        attention: scale, mask, and where the model has them sinks and soft_cap.

    Returns:
        The same values; evaluating them also evaluates the cache's bookkeeping, so that no graph grows from token to
        token.
    """
    pending = cache.observe(queries, keys, **attention)
    if pending:
        (output,) = mx.depends([output], pending)
    return output


def _gemma2(original: Call) -> Call:
    """gemma2: logits capped by tanh, softmax by hand."""

    def call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> Any:
        if not hasattr(cache, "observe"):
            return original(self, x, mask, cache)
        B, S, _ = x.shape
        heads = self.n_heads, self.n_kv_heads, self.n_kv_heads
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (a.reshape(B, S, h, -1).transpose(0, 2, 1, 3) for a, h in zip(projected, heads, strict=True))
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        keys, values = cache.update_and_fetch(k, v)
        mask = cache.fit_mask(mask, S)

        group = self.repeats > 1
        scaled = q * self.scale
        if group:
            scaled = scaled.reshape(B, self.n_kv_heads, self.repeats, S, self.head_dim)
        scores = scaled @ (mx.expand_dims(keys, 2) if group else keys).swapaxes(-1, -2)
        scores = mx.tanh(scores / self.attn_logit_softcapping) * self.attn_logit_softcapping
        if mask is not None:
            here = mask
            if group and mask.ndim == 4:  # rows of a batch: heads are two axes here
                per_head = mask.shape[1] == self.n_heads
                here = mask.reshape(B, self.n_kv_heads, -1, *mask.shape[2:]) if per_head else mask[:, :, None]
            if mask.dtype == mx.bool_:
                scores = mx.where(here, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
            else:
                scores = scores + here
        output = mx.softmax(scores, precise=True, axis=-1) @ (mx.expand_dims(values, 2) if group else values)
        output = output.reshape(B, self.n_heads, S, -1)
        output = shown(output, cache, q, keys, scale=self.scale, mask=mask, soft_cap=self.attn_logit_softcapping)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(B, S, -1))

    return call


def _gear(original: Call) -> Call:
    """gear: logits capped by tanh in a helper that is not told the cache; without a cap it is like any other model."""
    capped_attention = original.__globals__["_softcap_attention"]

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        cap = self.attn_logit_softcapping
        if not cap or not hasattr(cache, "observe"):
            return original(self, x, mask, cache)
        B, S, _ = x.shape
        q = self.q_norm(self.q_proj(x).reshape(B, S, self.n_heads, self.head_dim)).transpose(0, 2, 1, 3)
        k = self.k_norm(self.k_proj(x).reshape(B, S, self.n_kv_heads, self.head_dim)).transpose(0, 2, 1, 3)
        v = self.v_proj(x).reshape(B, S, self.n_kv_heads, self.head_dim).transpose(0, 2, 1, 3)
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        keys, values = cache.update_and_fetch(k, v)
        mask = cache.fit_mask(mask, S)
        output = capped_attention(q, keys, values, scale=self.scale, softcap=cap, mask=mask)
        output = shown(output, cache, q, keys, scale=self.scale, mask=mask, soft_cap=cap)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(B, S, -1))

    return call


def _plamo2(original: Call) -> Call:
    """plamo2: calls mx.fast's attention itself."""

    def call(self: Any, hidden_states: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if not hasattr(cache, "observe"):
            return original(self, hidden_states, mask, cache)
        B, S, _ = hidden_states.shape
        edges = [self.q_proj_dim, self.q_proj_dim + self.k_proj_dim]
        parts = mx.split(self.qkv_proj(hidden_states), edges, axis=-1)
        heads = self.q_num_heads, self.k_num_heads, self.v_num_heads
        q, k, v = (a.reshape(B, S, h, -1).transpose(0, 2, 1, 3) for a, h in zip(parts, heads, strict=True))
        q = mx.fast.rms_norm(q, weight=None, eps=1e-6) * self.q_weight[:, None]
        k = mx.fast.rms_norm(k, weight=None, eps=1e-6) * self.k_weight[:, None]
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        keys, values = cache.update_and_fetch(k, v)
        mask = cache.fit_mask(mask, S)
        output = mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=mask)
        output = shown(output, cache, q, keys, scale=self.scale, mask=mask)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(B, S, -1))

    return call


def _own_mask(original: Call) -> Call:
    """MLA: the mask goes into half of the logits before the call we wrap, too late there to fit it to this cache."""
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        mask = given.get("mask")
        cache: Any = given.get("cache")
        if getattr(cache, "uneven", False) and not isinstance(mask, str):
            given["mask"] = cache.make_mask(given["x"].shape[1], return_array=mask is not None, window_size=None)
        return original(*bound.args, **bound.kwargs)

    return call


_MODELS = "mlx_lm.models."

# class of an attention module -> what makes a new `__call__` from its own
REPLACEMENTS: dict[str, Callable[[Call], Call]] = {
    _MODELS + "gemma2.Attention": _gemma2,
    _MODELS + "gear.Attention": _gear,
    _MODELS + "plamo2.Attention": _plamo2,
    _MODELS + "bailing_hybrid.MultiLatentAttention": _own_mask,
    _MODELS + "bailing_moe_v3.BailingMLA": _own_mask,
    _MODELS + "deepseek_v3.DeepseekV3Attention": _own_mask,
    _MODELS + "glm4_moe_lite.Glm4MoeLiteAttention": _own_mask,
    _MODELS + "kimi_k3.KimiK3MLAAttention": _own_mask,
    _MODELS + "kimi_linear.KimiMLAAttention": _own_mask,
    _MODELS + "longcat_flash.LongcatFlashMLA": _own_mask,
    _MODELS + "mistral4.Mistral4Attention": _own_mask,
}

_INDEXER = (
    "an indexer chooses rows by their place in a second cache, and both caches would have to lose the same rows, "
    "which no policy here does"
)
# Python module of a class in the model -> why rows of its global attention cannot be evicted
REFUSED: dict[str, str] = {
    _MODELS + "afm7": "layers that reuse the last layer's rows turn their queries by the number of stored rows",
    _MODELS + "deepseek_v32": _INDEXER,
    _MODELS + "minimax_m3_vl": _INDEXER,
    _MODELS + "olmo": "it adds the mask 'causal' to numbers, so no prompt of two tokens runs in mlx-lm itself",
    _MODELS + "phi3small": "its block-sparse attention hides rows by their place in the cache",
}

# Python module of a class in the model -> why rows cannot be numbered anew (positions "contiguous") in it
PLACED_ELSEWHERE: dict[str, str] = {
    _MODELS + "gemma3n": "every layer turns its keys and queries by the count of the first layer's cache",
    _MODELS + "iquestloopcoder": "its second loop turns the queries by the count of another cache",
}
