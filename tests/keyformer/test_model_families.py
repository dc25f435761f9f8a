"""Every family of mlx-lm model: what is replaced, what is scored, and that attention goes on as if rows were masked.

The reference sees what the model itself computes: it stands in for MLX's attention function (or, where a model has its
own, its softmax), recomputes each call's softmax in float64, and knows nothing of the hook.
"""

from __future__ import annotations

import copy
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as own_cache
from small import kept_positions
from tiny_models import FAMILIES, SIZES, UNEVICTABLE, VOCABULARY, WITHOUT_ROWS, build

import keyformer.hook
from keyformer import H2O, Full, KeyformerKVCache, KeyformerProxy, Policy, Window, attached, make_prompt_cache
from keyformer.attention import REPLACEMENTS
from keyformer.hook import leaves

OWN_SOFTMAX = ("gemma2", "gemma2, no groups", "gear")
BUDGET = 8
PROMPT, STEPS = 19, 12


def ours(caches: list[Any]) -> dict[int, KeyformerKVCache]:
    return {i: c for i, c in enumerate(leaves(caches)) if isinstance(c, KeyformerKVCache)}


def text(n: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(0, VOCABULARY, n))


def call(model: Any, caches: list[Any], tokens: mx.array) -> mx.array:
    logits = model(tokens.reshape(-1, tokens.shape[-1]), cache=caches)
    mx.eval(logits)
    return logits


def prefill(model: Any, caches: list[Any], prompt: mx.array, chunk: int) -> list[mx.array]:
    for c in ours(caches).values():
        c.begin_prefill()
    logits = [call(model, caches, prompt[first : first + chunk]) for first in range(0, len(prompt), chunk)]
    for c in ours(caches).values():
        c.end_prefill()
    return logits


def decode(model: Any, caches: list[Any], tokens: mx.array) -> list[mx.array]:
    return [call(model, caches, t.reshape(1)) for t in tokens]


# -- the reference: mass in float64 of what the model computes ---------------------------------------------------------


def softmax(logits: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Over the last axis; `sinks` [Hq] take part and are dropped."""
    if sinks is not None:
        logits = np.concatenate([logits, np.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))], axis=-1)
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return p if sinks is None else p[..., :-1]


class Watched:
    """Mixed into a cache: says whose rows the next attention call reads, and where they are in the text."""

    def watch(self, spy: Spy, layer: int) -> Any:
        self.spy, self.number = spy, layer
        return self

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        first = int(self.offset)
        fetched = super().update_and_fetch(keys, values)  # type: ignore[misc]
        n = fetched[0].shape[2]
        if isinstance(self, KeyformerKVCache):
            positions = np.array(self.positions)[0, :, :n]
        else:
            positions = np.arange(first + keys.shape[2])[None]
        self.spy.current = self.number
        self.spy.rows[self.number] = fetched[0], positions, keys.shape[1]
        return fetched

    def keys_and_values(self) -> Any:
        self.spy.current = self.number
        return super().keys_and_values()  # type: ignore[misc]


class WatchedKVCache(Watched, KVCache):
    pass


class WatchedKeyformer(Watched, KeyformerKVCache):
    pass


class Spy:
    """The mass every row received: (layer, KV head, position) -> float64."""

    def __init__(self) -> None:
        self.mass: dict[tuple[int, int, int], float] = defaultdict(float)
        self.current: int | None = None
        self.rows: dict[int, tuple[mx.array, np.ndarray, int]] = {}

    def layer_of(self, keys: Any) -> int | None:
        shared = next((layer for layer, (rows, *_) in self.rows.items() if rows is keys), None)
        layer, self.current = self.current if shared is None else shared, None
        return layer

    def add(self, layer: int, p: np.ndarray) -> None:
        """p: [Hq, S, n], the softmax of one call."""
        _, positions, heads = self.rows[layer]
        per_head = p.reshape(heads, -1, *p.shape[1:]).sum(axis=(1, 2))
        for head, row in enumerate(per_head):
            for position, mass in zip(np.broadcast_to(positions, per_head.shape)[head], row, strict=True):
                self.mass[layer, head, int(position)] += mass

    def saw_attention(self, q: mx.array, k: mx.array, scale: float, mask: Any, sinks: Any) -> None:
        layer = self.layer_of(k)
        if layer is None:
            return
        q, k = (np.array(a.astype(mx.float32), np.float64)[0] for a in (q, k))
        logits = scale * np.einsum("hsd,hnd->hsn", q, np.repeat(k, len(q) // len(k), axis=0))
        S, n = logits.shape[1:]
        if isinstance(mask, str):
            mask = mx.arange(n - S, n)[:, None] >= mx.arange(n)
        if mask is not None and mask.dtype == mx.bool_:
            logits = np.where(np.array(mask), logits, -np.inf).reshape(logits.shape)
        elif mask is not None:
            added = np.array(mask, np.float64)
            logits = np.where(added > np.finfo(np.float32).min, logits + added, -np.inf).reshape(logits.shape)
        self.add(layer, softmax(logits, None if sinks is None else np.array(sinks, np.float64)))

    def saw_softmax(self, scores: mx.array) -> None:
        layer, self.current = self.current, None
        if layer is not None:
            n = scores.shape[-1]
            p = softmax(np.array(scores, np.float64))
            self.add(layer, p.reshape(-1, scores.shape[-2], n))

    @contextmanager
    def looking(self, own_softmax: bool) -> Iterator[None]:
        attention, plain = mx.fast.scaled_dot_product_attention, mx.softmax

        def seen_attention(q: Any, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None) -> mx.array:
            self.saw_attention(q, k, scale, mask, sinks)
            return attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

        def seen_softmax(a: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            self.saw_softmax(a)
            return plain(a, *args, **kwargs)

        mx.fast.scaled_dot_product_attention = seen_attention
        if own_softmax:
            mx.softmax = seen_softmax
        try:
            yield
        finally:
            mx.fast.scaled_dot_product_attention, mx.softmax = attention, plain


def watched(caches: list[Any], spy: Spy) -> list[Any]:
    """The same caches, plain and ours told apart from the others and watched."""
    kinds = {KVCache: WatchedKVCache, KeyformerKVCache: WatchedKeyformer}
    for layer, cache in enumerate(leaves(caches)):
        if type(cache) in kinds:
            cache.__class__ = kinds[type(cache)]
            cache.watch(spy, layer)
    return caches


def assert_scores(caches: list[Any], spy: Spy) -> None:
    for layer, cache in ours(caches).items():
        scores = np.array(cache.scores)[0]
        stored = np.array(cache.positions)[0]
        for head, positions in enumerate(kept_positions(cache)):
            for position in positions:
                (slot,) = np.flatnonzero(stored[head, : cache.slots()[0]] == position)
                assert scores[head, slot] == pytest.approx(spy.mass[layer, head, position], rel=2e-5, abs=2e-5)


# -- every family ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_budget_that_holds_everything_changes_no_bit(name: str) -> None:
    model = build(name)
    caches, reference = make_prompt_cache(model, H2O(), 100), own_cache(model)
    assert ours(caches)
    with attached(model):
        mine = prefill(model, caches, text(PROMPT), 7) + decode(model, caches, text(STEPS, 1))
    own = prefill(model, reference, text(PROMPT), 7) + decode(model, reference, text(STEPS, 1))
    for a, b in zip(mine, own, strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_scores_are_the_mass_that_the_model_itself_computed(name: str) -> None:
    """The model alone, with its own caches, computes what the cache of a second run must have accumulated."""
    model, spy = build(name), Spy()
    with spy.looking(own_softmax=name in OWN_SOFTMAX):
        prefill(model, watched(own_cache(model), spy), text(PROMPT), PROMPT)
    caches = make_prompt_cache(model, H2O(), 100)
    with attached(model):
        prefill(model, caches, text(PROMPT), PROMPT)
    assert_scores(caches, spy)
    # every query gives each of its heads' rows one in all, less what a sink takes
    for layer, cache in ours(caches).items():
        total = float(cache.scores.sum())
        assert total == pytest.approx(sum(m for (i, *_), m in spy.mass.items() if i == layer), rel=1e-5)
        assert total > 0


def run_and_compare(name: str, caches: list[Any], model: Any, chunk: int) -> list[Any]:
    spy = Spy()
    watched(caches, spy)
    with attached(model), spy.looking(own_softmax=name in OWN_SOFTMAX):
        prefill(model, caches, text(PROMPT), chunk)
        decode(model, caches, text(STEPS, 1))
    assert_scores(caches, spy)
    return caches


@pytest.mark.parametrize("name", FAMILIES)
def test_eviction_keeps_the_budget_and_scores_what_attention_gave(name: str) -> None:
    model = build(name)
    caches = make_prompt_cache(model, H2O(), BUDGET)
    before = [type(c) for c in leaves(own_cache(model))]
    run_and_compare(name, caches, model, chunk=7)
    for was, cache in zip(before, leaves(caches), strict=True):
        if was is KVCache:
            assert isinstance(cache, KeyformerKVCache)
            assert cache.size() == BUDGET
            assert [len(set(head)) for head in kept_positions(cache)] == [BUDGET] * cache.keys.shape[1]
            assert cache.offset == PROMPT + STEPS
        else:
            assert type(cache) is was


SHARED_MASK = ("llama", "gemma2", "deepseek_v3", "mistral4", "longcat_flash", "gpt2", "plamo2", "nemotron_h", "gear")


@pytest.mark.parametrize("name", [*SHARED_MASK, "gemma3n", "gemma4_text", "iquestloopcoder"])
def test_layers_of_other_budgets_in_a_prompt_that_evicts_after_every_chunk(name: str) -> None:
    """All layers get the first one's mask; each must attend by one that fits its own rows."""
    model = build(name)
    layers = len(ours(make_prompt_cache(model, H2O(), BUDGET)))
    caches = make_prompt_cache(model, H2O(), 12, "chunked", allocate=[1.0 + i for i in range(layers)])
    run_and_compare(name, caches, model, chunk=5)
    sizes = [c.size() for c in ours(caches).values()]
    assert sizes == [c.budget for c in ours(caches).values()]
    assert len(set(sizes)) == layers


@pytest.mark.parametrize("policy", [H2O(), Window(), KeyformerProxy(n_sink=0)], ids=lambda p: p.name)
@pytest.mark.parametrize("name", [*SHARED_MASK, "gemma3n", "gemma4_text", "iquestloopcoder"])
def test_masks_made_for_every_layer_are_those_they_stand_in_for(name: str, policy: Policy) -> None:
    """With equal budgets both ways must agree, also where rows go before attention asks for its mask."""
    model, logits = build(name), []
    for uneven in (False, True):
        caches = make_prompt_cache(model, policy, BUDGET, "chunked")
        for c in ours(caches).values():
            c.uneven = uneven
        with attached(model, policy, BUDGET):
            logits.append(prefill(model, caches, text(PROMPT), 5) + decode(model, caches, text(4, 1)))
    for a, b in zip(*logits, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4_text", "iquestloopcoder"])
def test_rows_of_several_layers_are_evicted_after_the_last_has_read_them(name: str) -> None:
    """Without queries eviction comes right after the rows are stored; the other layers still read them all."""
    model = build(name)
    caches, whole = make_prompt_cache(model, Window(), BUDGET, "chunked"), own_cache(model)
    with attached(model):
        a, b = (call(model, c, text(PROMPT)) for c in (caches, whole))
        assert all(c.size() == BUDGET for c in ours(caches).values())
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, rtol=0)


# -- eviction is masking for good --------------------------------------------------------------------------------------


class Masked(KVCache):
    """Keeps every row; attention is shown those that another cache has kept."""

    waiting = True  # layers that read these rows without a cache are masked as well

    def __init__(self, other: KeyformerKVCache) -> None:
        super().__init__()
        self.other = other

    def fit_mask(self, mask: Any, S: int) -> Any:
        if S > 1:
            return mask
        n = self.offset
        allowed = np.zeros((1, self.keys.shape[1], 1, n), bool)
        for head, positions in enumerate(kept_positions(self.other)):
            allowed[0, head, 0, [*positions, n - 1]] = True
        heads = 4  # query heads of every family tested
        allowed = np.repeat(allowed, heads // allowed.shape[1], axis=1)
        if mask is None:
            return mx.array(allowed)
        return mx.where(mx.array(allowed), mask, mx.finfo(mx.float32).min)

    def observe(self, *_: Any, **__: Any) -> list[mx.array]:
        return []


AFTER = ("llama", "phi3", "phi", "qwen2, rope yarn", "gpt2", "gpt_oss", "mimo_v2_flash", "gemma2", "gear", "plamo2")
AFTER_LATENT = ("deepseek_v2", "deepseek_v3", "mistral4", "longcat_flash")
AFTER_HYBRID = ("falcon_h1", "qwen3_next", "gemma3n", "gemma4_text")


@pytest.mark.parametrize("name", [*AFTER, *AFTER_LATENT, *AFTER_HYBRID])
def test_decoding_attends_as_if_evicted_rows_were_masked(name: str) -> None:
    model = build(name)
    caches = make_prompt_cache(model, H2O(), BUDGET)
    masked = {layer: Masked(c) for layer, c in ours(caches).items()}
    reference = keyformer.hook._with_caches(own_cache(model), masked)
    whole = own_cache(model)
    with attached(model):
        for c in (caches, reference, whole):
            prefill(model, c, text(PROMPT), PROMPT)
        for token in text(STEPS, 1):
            # the reference first: it asks which rows are kept at this step
            expected, unmasked = (call(model, c, token.reshape(1)) for c in (reference, whole))
            logits = call(model, caches, token.reshape(1))
            np.testing.assert_allclose(np.array(logits), np.array(expected), atol=2e-5, rtol=0)
    assert mx.abs(logits - unmasked).max().item() > 1e-4  # eviction is seen at all


@pytest.mark.parametrize(
    "name", ["falcon_h1", "baichuan_m1", "gemma2", "gear", "plamo2", "llama, sliding", "gemma4_text"]
)
def test_rows_numbered_anew_are_attended_where_they_are(name: str) -> None:
    """Numbers without a gap: as if the text had only those rows, a prompt that loses nothing first."""
    model = build(name)
    caches = make_prompt_cache(model, Window(), 100, positions="contiguous")
    for layer, c in ours(caches).items():
        assert c.rope is not None and c.layer == layer
    with attached(model):
        mine = prefill(model, caches, text(PROMPT), 7)
        for a, b in zip(mine, prefill(model, own_cache(model), text(PROMPT), 7), strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, rtol=0)
        tight = make_prompt_cache(model, H2O(), BUDGET, positions="contiguous")
        prefill(model, tight, text(PROMPT), 7)
        assert all(mx.isfinite(logits).all() for logits in decode(model, tight, text(STEPS, 1)))
    assert [c.offset for c in ours(tight).values()] == [BUDGET] * len(ours(tight))


@pytest.mark.parametrize("name", ["gemma3n", "iquestloopcoder", "deepseek_v3", "gpt2"])
def test_positions_that_cannot_be_numbered_anew_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="use positions='original'"):
        make_prompt_cache(build(name), H2O(), BUDGET, positions="contiguous")


# -- several sequences -------------------------------------------------------------------------------------------------

BATCHED = ("llama", "gemma2", "deepseek_v3", "longcat_flash")


@pytest.mark.parametrize("name", [*BATCHED, "gemma2, no groups", "falcon_h1", "gpt_oss", "gemma3n", "gemma4_text"])
@pytest.mark.parametrize("lengths", [(5, 19), (13, 19)], ids=["one below budget", "all above budget"])
def test_rows_of_a_batch_decode_as_they_do_alone(name: str, lengths: tuple[int, int]) -> None:
    model = build(name)
    single = [make_prompt_cache(model, H2O(), 11) for _ in lengths]
    with attached(model):
        for c, n in zip(single, lengths, strict=True):
            prefill(model, c, text(n, n), n)
        batch = [parts[0].merge([copy.deepcopy(p) for p in parts]) for parts in zip(*single, strict=True)]
        for t in text(8, 1):
            both = call(model, batch, mx.stack([t, t])[:, None])
            for b, c in enumerate(single):
                np.testing.assert_allclose(
                    np.array(both[b : b + 1]), np.array(call(model, c, t.reshape(1))), atol=1e-5, rtol=0
                )


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("lengths", [(5, 19), (13, 19)], ids=["one below budget", "the first layer full"])
def test_rows_of_a_batch_in_layers_of_other_budgets(name: str, lengths: tuple[int, int]) -> None:
    """The first layer's mask has another width than a later layer's rows, or is none where a later one needs one."""
    model = build(name)
    weights = [11.0, 15.0] * (len(ours(make_prompt_cache(model, H2O(), 13))) // 2)
    single = [make_prompt_cache(model, H2O(), 13, allocate=weights) for _ in lengths]
    assert [c.budget for c in ours(single[0]).values()][:2] == [11, 15]
    with attached(model):
        for c, n in zip(single, lengths, strict=True):
            prefill(model, c, text(n, n), n)
        batch = [parts[0].merge([copy.deepcopy(p) for p in parts]) for parts in zip(*single, strict=True)]
        for t in text(8, 1):
            both = call(model, batch, mx.stack([t, t])[:, None])
            for b, c in enumerate(single):
                np.testing.assert_allclose(
                    np.array(both[b : b + 1]), np.array(call(model, c, t.reshape(1))), atol=1e-5, rtol=0
                )


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_a_model_with_nothing_to_replace_is_refused_by_name(name: str) -> None:
    model = build(name)
    match = rf"mlx_lm.models.{name}: expected .*global-attention KVCache layers, got ArraysCache.*nothing to evict"
    for policy in (H2O(), Window()):
        with pytest.raises(ValueError, match=match):
            make_prompt_cache(model, policy, BUDGET)
    with pytest.raises(ValueError, match=match), attached(model):
        pass


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("afm7", "reuse the last layer's rows"),
        ("deepseek_v32", "an indexer chooses rows"),
        ("minimax_m3_vl", "an indexer chooses rows"),
        ("phi3small", "block-sparse attention hides rows by their place"),
    ],
)
def test_a_model_that_cannot_lose_rows_is_refused_by_name(name: str, reason: str) -> None:
    model = build(name)
    assert name in UNEVICTABLE
    match = rf"mlx_lm.models.{name}: rows of its global attention cannot be evicted: .*{reason}.*mlx-lm's own cache"
    for policy in (H2O(), Window(), Full()):
        with pytest.raises(ValueError, match=match):
            make_prompt_cache(model, policy, BUDGET)
    with pytest.raises(ValueError, match=match), attached(model):
        pass


def test_a_model_made_of_a_refused_one_is_refused_by_its_own_name() -> None:
    module = import_module("mlx_lm.models.glm_moe_dsa")
    _, differs = UNEVICTABLE["deepseek_v32"]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "model_type": "glm_moe_dsa"}
    more = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "first_k_dense_replace": 2}
    model = module.Model(module.ModelArgs.from_dict(SIZES | differs | rope | more))
    with pytest.raises(ValueError, match=r"mlx_lm.models.glm_moe_dsa: rows .* cannot be evicted"):
        make_prompt_cache(model, H2O(), BUDGET)


def test_olmo_is_refused_because_its_prompts_do_not_run_in_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    # mlx-lm's olmo only asks whether this package exists
    monkeypatch.setitem(sys.modules, "hf_olmo", types.ModuleType("hf_olmo"))
    olmo = import_module("mlx_lm.models.olmo")
    sizes = {"d_model": 48, "n_layers": 1, "mlp_hidden_size": 64, "n_heads": 4, "embedding_size": 97}
    model = olmo.Model(olmo.ModelArgs(model_type="olmo", vocab_size=97, weight_tying=True, **sizes))
    with pytest.raises(ValueError, match="array and str"):
        model(mx.array([[1, 2]]), cache=own_cache(model))
    with pytest.raises(ValueError, match=r"mlx_lm.models.olmo: .*adds the mask 'causal' to numbers"):
        make_prompt_cache(model, Window(), BUDGET)


OWN_ATTENTION = '''
import mlx.core as mx
from mlx_lm.models import llama


class Attention(llama.Attention):
    """Calls mx.fast itself, as some models do."""

    def __call__(self, x, mask=None, cache=None):
        B, L, _ = x.shape
        heads = self.n_heads, self.n_kv_heads, self.n_kv_heads
        q, k, v = (
            p(x).reshape(B, L, h, -1).transpose(0, 2, 1, 3)
            for p, h in zip((self.q_proj, self.k_proj, self.v_proj), heads)
        )
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, L, -1))


class Model(llama.Model):
    def __init__(self, args, hidden):
        super().__init__(args)
        for i in hidden:
            self.model.layers[i].self_attn = Attention(args)
'''


def model_from_a_file(hidden: list[int]) -> Any:
    """As mlx-lm loads a `model_file`: its module is in no sys.modules."""
    module = types.ModuleType("custom_model")
    exec(compile(OWN_ATTENTION, "custom_model.py", "exec"), module.__dict__)
    llama = import_module("mlx_lm.models.llama")
    model = module.Model(llama.ModelArgs.from_dict(SIZES | {"model_type": "llama"}), hidden)
    model.update(tree_map(lambda p: p, build("llama").parameters()))
    assert "custom_model" not in sys.modules
    return model


@pytest.mark.parametrize(("hidden", "which"), [([0, 1], r"2 of 2 .*\(0, 1\)"), ([1], r"1 of 2 .*\(1\)")])
def test_queries_that_cannot_be_seen_are_an_error_before_the_first_token(hidden: list[int], which: str) -> None:
    """All layers hidden, or only one: a policy that ranks by queries is refused, with those that would work."""
    model = model_from_a_file(hidden)
    match = (
        rf"custom_model: expected attention through mlx-lm's scaled_dot_product_attention, found none in {which}; "
        r"their queries cannot be seen. Policies that work without them: .*keyformer_proxy.*window"
    )
    with pytest.raises(ValueError, match=match):
        make_prompt_cache(model, H2O(), BUDGET)
    with pytest.raises(ValueError, match=match), attached(model):
        pass
    caches = make_prompt_cache(model, Window(), BUDGET)
    prefill(model, caches, text(PROMPT), 7)
    decode(model, caches, text(2))
    assert [c.size() for c in ours(caches).values()] == [BUDGET] * 2


def test_a_model_from_a_file_of_its_own_is_seen() -> None:
    model = model_from_a_file([])
    caches = make_prompt_cache(model, H2O(), BUDGET)
    run_and_compare("llama", caches, model, chunk=7)


# -- mlx-lm is left as it was ------------------------------------------------------------------------------------------


def names_of(model: Any) -> dict[Any, Any]:
    """Everything that attaching may touch."""
    classes = {c for _, m in model.named_modules() for c in type(m).__mro__}
    modules = {sys.modules[c.__module__] for c in classes}
    found = {(m.__name__, n): v for m in modules for n, v in vars(m).items() if callable(v)}
    return found | {(c, n): v for c in classes for n, v in vars(c).items() if n == "__call__"}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gear", "plamo2", "deepseek_v3", "gemma4_text"])
def test_attaching_undoes_itself_whatever_happens(name: str) -> None:
    model = build(name)
    before = names_of(model)
    caches = make_prompt_cache(model, H2O(), BUDGET)
    assert names_of(model) == before  # looking for readers patches too
    with attached(model):
        assert names_of(model) != before
        with attached(model):
            inside = names_of(model)
        assert names_of(model) == inside
        prefill(model, caches, text(PROMPT), 7)
    assert names_of(model) == before
    with pytest.raises(ZeroDivisionError), attached(model):
        raise ZeroDivisionError
    assert names_of(model) == before

    class Broken(KeyformerKVCache):
        def observe(self, *_: Any, **__: Any) -> list[mx.array]:
            raise ZeroDivisionError

    for c in ours(caches).values():
        c.__class__ = Broken
    with pytest.raises(ZeroDivisionError), attached(model):
        call(model, caches, text(1))
    assert names_of(model) == before
    assert not keyformer.hook._waiting


def test_a_call_that_fails_between_two_readers_leaves_nothing_behind() -> None:
    model = build("gemma4_text")
    caches = make_prompt_cache(model, H2O(), BUDGET)
    (owner,) = ours(caches).values()

    class Broken(KeyformerKVCache):
        def observe(self, *args: Any, **attention: Any) -> list[mx.array]:
            if self.waiting:
                raise ZeroDivisionError
            return super().observe(*args, **attention)

    owner.__class__ = Broken
    with pytest.raises(ZeroDivisionError), attached(model):
        call(model, caches, text(PROMPT))
    assert not keyformer.hook._waiting


@pytest.mark.parametrize("name", ["gemma2", "gear", "plamo2", "deepseek_v3"])
def test_calls_with_other_caches_go_to_the_class_itself(name: str) -> None:
    model = build(name)
    expected = prefill(model, own_cache(model), text(PROMPT), 7)
    alone = model(text(PROMPT)[None])
    with attached(model):
        for a, b in zip(prefill(model, own_cache(model), text(PROMPT), 7), expected, strict=True):
            assert mx.array_equal(a, b)
        assert mx.array_equal(model(text(PROMPT)[None]), alone)


@pytest.mark.parametrize("path", REPLACEMENTS)
def test_every_class_that_is_replaced_exists_and_calls_itself(path: str) -> None:
    module, name = path.rsplit(".", 1)
    assert "__call__" in vars(getattr(import_module(module), name))
