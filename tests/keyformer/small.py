"""What the cache tests share: one attention layer's calls, kept rows, and small random models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from keyformer import (
    H2O,
    Full,
    KeyDiff,
    Keyformer,
    KeyformerKVCache,
    KeyformerProxy,
    Knorm,
    Policy,
    Random,
    SnapKV,
    Tova,
    Window,
)


def attend(cache: Any, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """One call of an attention layer, as mlx-lm makes it; only the output is evaluated, as mlx-lm does."""
    mask = cache.make_mask(q.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)
    if hasattr(cache, "observe"):
        pending = cache.observe(q, keys, scale=scale, mask=mask)
        if pending:
            (out,) = mx.depends([out], pending)
    mx.eval(out)
    return out


def alone(cache: KeyformerKVCache, b: int) -> tuple[KeyformerKVCache, int]:
    """Where sequence b is stored: a batch in its prompt holds a cache for each."""
    parts = getattr(cache, "_parts", None)
    return (cache, b) if parts is None else (parts[b], 0)


def kept(cache: KeyformerKVCache, b: int = 0) -> list[list[tuple[int, int]]]:
    """Per KV head of sequence b: (position, slot) of the stored rows, in temporal order."""
    cache, b = alone(cache, b)
    if cache.positions is None:
        return []
    rows = cache._rows[b]
    positions = np.array(cache.positions[b, :, :rows])
    over = rows > cache._budgets[b]
    freed = np.array(cache._slot[b, ..., 0]) if cache._slot is not None and over else np.full((len(positions), 1), -1)
    return [sorted((int(p), i) for i, p in enumerate(r) if i != freed[h, 0]) for h, r in enumerate(positions)]


def kept_positions(cache: KeyformerKVCache, b: int = 0) -> list[list[int]]:
    return [[p for p, _ in head] for head in kept(cache, b)]


def kept_scores(cache: KeyformerKVCache, b: int = 0) -> list[list[float]]:
    cache, b = alone(cache, b)
    assert cache.scores is not None
    scores = np.array(cache.scores[b])
    return [[float(scores[h, i]) for _, i in head] for h, head in enumerate(kept(cache, b))]


@dataclass(frozen=True)
class Stream:
    """The queries, keys and values of one sequence: [1, heads, n, size] float32."""

    q: mx.array
    k: mx.array
    v: mx.array

    @classmethod
    def random(cls, seed: int, n: int, heads: int, kv_heads: int, k_size: int, v_size: int) -> Stream:
        rng = np.random.default_rng(seed)
        shapes = (heads, k_size), (kv_heads, k_size), (kv_heads, v_size)
        return cls(*(mx.array(rng.normal(size=(1, h, n, d)).astype(np.float32)) for h, d in shapes))

    def part(self, first: int, last: int) -> tuple[mx.array, mx.array, mx.array]:
        return self.q[:, :, first:last], self.k[:, :, first:last], self.v[:, :, first:last]

    def numpy(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q, k, v = (np.array(a[0]) for a in self.part(first, last))
        return q, k, v

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[3])


NO_QUERIES = (
    "full",
    "window",
    "random",
    "keyformer_proxy",
    "proxy without noise",
    "knorm",
    "knorm, noise at the decision",
    "keydiff",
)


def a_policy(kind: str, n_sink: int = 0, recent: int | float = 0, seed: int = 0) -> Policy:
    """Every way of ranking there is."""
    same: dict[str, Any] = {"n_sink": n_sink, "recent": recent, "seed": seed}
    return {
        "full": lambda: Full(),
        "window": lambda: Window(**same),
        "h2o": lambda: H2O(**same),
        "h2o, last 3": lambda: H2O(window=3, **same),
        "h2o, decay": lambda: H2O(decay=0.8, normalize="count", **same),
        "h2o, per query, softmax(x/T)": lambda: H2O(
            normalize="count", tau_init=0.6, tau_end=2.0, anneal_steps=6, **same
        ),
        "keyformer": lambda: Keyformer(anneal_steps=5, **same),
        "keyformer, frozen": lambda: Keyformer(redraw=False, tau_init=0.7, tau_end=1.9, anneal_steps=5, **same),
        "keyformer, last 4": lambda: Keyformer(window=4, anneal_steps=5, **same),
        "keyformer, gaussian": lambda: Keyformer(distribution="gaussian", anneal_steps=5, **same),
        "keyformer_proxy": lambda: KeyformerProxy(tau_init=0.5, tau_end=2, anneal_steps=9, **same),
        "proxy without noise": lambda: KeyformerProxy(tau_init=0, tau_end=0, **same),
        "queries, noise at the decision": lambda: Policy(noise="select", tau_end=3.0, anneal_steps=6, **same),
        "random": lambda: Random(**same),
        "tova": lambda: Tova(**same),
        "snapkv": lambda: SnapKV(window=4, pooling=3, **same),
        "knorm": lambda: Knorm(**same),
        "knorm, noise at the decision": lambda: Knorm(
            noise="select", tau_init=0.2, tau_end=2.0, anneal_steps=15, **same
        ),
        "keydiff": lambda: KeyDiff(**same),
    }[kind]()


KINDS = (
    "full",
    "window",
    "h2o",
    "h2o, last 3",
    "h2o, decay",
    "h2o, per query, softmax(x/T)",
    "keyformer",
    "keyformer, frozen",
    "keyformer, last 4",
    "keyformer, gaussian",
    "keyformer_proxy",
    "proxy without noise",
    "queries, noise at the decision",
    "random",
    "tova",
    "snapkv",
    "knorm",
    "knorm, noise at the decision",
    "keydiff",
)


@st.composite
def policies_and_budgets(draw: st.DrawFn) -> tuple[Policy, int]:
    kind = draw(st.sampled_from(KINDS))
    recent = draw(st.one_of(st.integers(0, 4), st.sampled_from([0.25, 0.5])))
    policy = a_policy(kind, draw(st.integers(0, 3)), recent, draw(st.integers(0, 2**40)))
    return policy, policy.least_budget() + draw(st.integers(0, 12))


def tiny_llama(dtype: mx.Dtype = mx.float32, seed: int = 0, **changes: Any) -> llama.Model:
    """Two layers, 4 query heads on 2 KV heads of 16, weights wide enough that what comes out depends on the context."""
    arguments = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 300,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    } | changes
    return randomize(llama.Model(llama.ModelArgs(**arguments)), dtype, seed)


def randomize(model: Any, dtype: mx.Dtype = mx.float32, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    weights = [
        (
            name,
            mx.array(rng.normal(0, 2 * p.shape[-1] ** -0.5, p.shape)).astype(dtype) if p.ndim > 1 else p.astype(dtype),
        )
        for name, p in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def tokens(n: int, seed: int = 0, vocabulary: int = 300) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(0, vocabulary, n))


def feed(model: Any, caches: list[Any], prompt: mx.array, chunk: int) -> mx.array:
    """The prompt in chunks, announced and ended; the logits of its last token."""
    ours = [c for c in caches if isinstance(c, KeyformerKVCache)]
    for c in ours:
        c.begin_prefill()
    for first in range(0, len(prompt), chunk):
        logits = model(prompt[None, first : first + chunk], cache=caches)
        mx.eval(logits)
    for c in ours:
        c.end_prefill()
    return logits[:, -1]


def step(model: Any, caches: list[Any], *token: int) -> mx.array:
    """One token of each sequence; only the logits are evaluated."""
    logits = model(mx.array(token)[:, None], cache=caches)[:, -1]
    mx.eval(logits)
    return logits
