"""Putting the cache under an mlx-lm model: the only file that patches mlx-lm, on request and undoably."""

import importlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as _default_cache

from .allocate import allocate as _allocate
from .cache import BatchKeyformerKVCache, KeyformerKVCache
from .policies import POLICIES, Policy
from .rope import read_ropes

log = logging.getLogger(__name__)
_NAME = "scaled_dot_product_attention"
_attached: dict[str, tuple[int, Any]] = {}

# load_prompt_cache looks classes up among that module's names
for _cache in (KeyformerKVCache, BatchKeyformerKVCache):
    setattr(mlx_lm.models.cache, _cache.__name__, _cache)


def make_prompt_cache(
    model: nn.Module,
    policy: Policy,
    budget: int | None = None,
    prefill: str = "full",
    *,
    positions: str = "original",
    allocate: str | Sequence[float] = "uniform",
) -> list[Any]:
    """The model's own caches with every plain global-attention KVCache replaced by a KeyformerKVCache.

    Sliding-window, recurrent (SSM) and quantized caches stay as they are; `cache_counts` tells how many of each.

    Args:
        model: an mlx-lm model.
        policy: what ranks and protects rows.
        budget: rows kept per KV head and layer, an integer; unused by policy "full".
        prefill: "full" (evict once, at the end of the prompt) or "chunked" (after every chunk).
        positions: "original" (a row keeps its place in the text) or "contiguous" (the rows that are kept are numbered
            0..n-1, as StreamingLLM does and Keyformer's "new positions").
        allocate: how the layers share budget * layers rows: "uniform", "pyramid", or a weight for each layer that
            evicts.

    Returns:
        One cache per layer, for `prompt_cache=` of mlx-lm's functions.

    Raises:
        ValueError: no layer can be replaced, a budget that protects everything, an unknown option, or a rotary
            embedding that cannot be read.
    """
    return _planned(model, policy, budget, prefill, positions, allocate)()


def _planned(
    model: nn.Module,
    policy: Policy,
    budget: int | None,
    prefill: str,
    positions: str,
    allocate: str | Sequence[float],
) -> Callable[[], list[Any]]:
    """What makes the caches of `make_prompt_cache`; the model is looked at here, once."""
    if positions not in ("original", "contiguous"):
        raise ValueError(f"positions: expected 'original' or 'contiguous', got {positions!r}.")
    with _own_make_cache(model):
        caches = list(_default_cache(model))
        layers = [layer for layer, c in enumerate(caches) if type(c) is KVCache]
        if not layers:
            kinds = ", ".join(sorted({type(c).__name__ for c in caches}))
            raise ValueError(
                f"Expected a model with global-attention KVCache layers, got {kinds}: there is nothing to evict."
            )
        ropes = read_ropes(model, layers) if positions == "contiguous" else [None] * len(layers)
    budgets: list[int | None] = [budget] * len(layers)
    if policy.evicts and budget is not None:
        budgets = list(_allocate(allocate, budget, len(layers), policy))
    elif not policy.evicts and allocate != "uniform":
        raise ValueError(f"allocate: policy {policy.name} keeps every row of every layer; leave it 'uniform'.")
    uneven = len(set(budgets)) > 1

    def make() -> list[Any]:
        with _own_make_cache(model):
            caches = list(_default_cache(model))
        for layer, rows, rope in zip(layers, budgets, ropes, strict=True):
            caches[layer] = KeyformerKVCache(policy, rows, layer, prefill, rope=rope, uneven=uneven)
        return caches

    # a first time here: what a cache refuses is refused before generation begins
    log.info("%s: %s", type(model).__module__, cache_counts(make()))
    return make


def cache_counts(caches: Sequence[Any]) -> dict[str, int]:
    """How many layers have a cache of each class, by class name: which of them evict, and which stay mlx-lm's own."""
    return dict(Counter(type(c).__name__ for c in caches))


class _CacheMaker:
    """Stands in for a model's `make_cache`, which mlx-lm asks for the caches of a new text."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self.make = make

    def __call__(self) -> list[Any]:
        return self.make()


@contextmanager
def _own_make_cache(model: nn.Module) -> Iterator[None]:
    """Within this block mlx-lm makes the caches that the model would have without us."""
    ours = vars(model).get("make_cache")
    if not isinstance(ours, _CacheMaker):
        yield
        return
    del model.make_cache
    try:
        yield
    finally:
        model.make_cache = ours


@contextmanager
def attached(
    model: nn.Module,
    policy: Policy | None = None,
    budget: int | None = None,
    prefill: str = "full",
    *,
    positions: str = "original",
    allocate: str | Sequence[float] = "uniform",
) -> Iterator[None]:
    """Within this block mlx-lm runs the model with evicting caches; at its end everything is as it was.

    The model's attention shows its queries to every cache that has an `observe` method, which policies that rank rows
    by the model's real queries need, and mlx-lm's generation tells the caches where a prompt begins and ends. With a
    policy, every cache that mlx-lm makes for this model inside the block is ours: `mlx_lm.generate`, `stream_generate`,
    `batch_generate` and the server evict without another word. Without one, pass caches of `make_prompt_cache`.

    What cannot go together with an evicting cache (kv_bits, max_kv_size, a draft model) is refused when generation
    begins. Blocks nest; the last one to end restores mlx-lm.

    Args:
        model: an mlx-lm model.
        policy, budget, prefill, positions, allocate: as `make_prompt_cache` takes them.

    Raises:
        ValueError: what `make_prompt_cache` raises, or a model whose queries cannot be seen with a policy that needs
            them.
    """
    if policy is None and (budget, prefill, positions, allocate) != (None, "full", "original", "uniform"):
        raise ValueError("attached: budget, prefill, positions and allocate need a policy beside them, got none.")

    make = None if policy is None else _planned(model, policy, budget, prefill, positions, allocate)
    with ExitStack() as undo:
        undo.enter_context(_shown_queries(model, needed=policy is None or policy.attention == "query"))
        undo.enter_context(_told_prompts())
        if make is not None:
            before = vars(model).get("make_cache")
            model.make_cache = _CacheMaker(make)
            undo.callback(_restore_make_cache, model, before)
        yield


def _restore_make_cache(model: nn.Module, before: Any) -> None:
    if before is None:
        del model.make_cache
    else:
        model.make_cache = before


# -- where mlx-lm begins and ends a prompt -----------------------------------------------------------------------------

_told = 0
_untold: list[tuple[Any, str, Any]] = []  # what to put back: owner, name, original


@contextmanager
def _told_prompts() -> Iterator[None]:
    """mlx-lm's generation calls `begin_prefill` and `end_prefill` of our caches."""
    global _told
    generation = importlib.import_module("mlx_lm.generate")
    if _told == 0:
        for name, wrap in (("generate_step", _telling_step), ("speculative_generate_step", _refusing_draft)):
            original = getattr(generation, name)
            wrapped = wrap(original)
            # under every name it was imported by
            for module in list(sys.modules.values()):
                for alias in [k for k, v in list(vars(module).items()) if v is original] if module else []:
                    _patch(module, alias, wrapped)
        _patch(generation.GenerationBatch, "__init__", _ending(generation.GenerationBatch.__init__))
        _patch(generation.PromptProcessingBatch, "prompt", _beginning(generation.PromptProcessingBatch.prompt))
        _patch(generation.BatchGenerator, "__init__", _refusing_size(generation.BatchGenerator.__init__))
    _told += 1
    try:
        yield
    finally:
        _told -= 1
        while _told == 0 and _untold:
            setattr(*_untold.pop())


def _patch(owner: Any, name: str, new: Any) -> None:
    _untold.append((owner, name, getattr(owner, name)))
    setattr(owner, name, new)


def _ours(caches: Sequence[Any] | None) -> list[KeyformerKVCache]:
    """Our caches among those of a model, also inside mlx-lm's CacheList."""
    ours = []
    for c in caches or []:
        if isinstance(c, KeyformerKVCache):
            ours.append(c)
        else:
            ours += _ours(getattr(c, "caches", None))
    return ours


def _refuse(option: str, value: Any, instead: str) -> None:
    raise ValueError(f"{option}: expected none beside a cache that evicts, got {value!r}; {instead}")


def _telling_step(original: Any) -> Any:
    def generate_step(prompt: mx.array, model: nn.Module, *args: Any, **options: Any) -> Any:
        if options.get("prompt_cache") is None:
            options["prompt_cache"] = _default_cache(model, options.get("max_kv_size"))
        ours = _ours(options["prompt_cache"])
        if not ours:
            return original(prompt, model, *args, **options)
        if options.get("max_kv_size") is not None:
            _refuse("max_kv_size", options["max_kv_size"], "set the budget instead.")
        if options.get("kv_bits") is not None:
            _refuse("kv_bits", options["kv_bits"], "keys and values keep the model's dtype; leave it unset.")
        for c in ours:
            c.begin_prefill()
        tell = options.get("prompt_progress_callback")

        def progress(done: int, total: int) -> None:
            if done == total - 1:
                for c in ours:
                    c.end_prefill()
            if tell is not None:
                tell(done, total)

        return original(prompt, model, *args, **{**options, "prompt_progress_callback": progress})

    return generate_step


def _refusing_draft(original: Any) -> Any:
    def speculative_generate_step(
        prompt: mx.array, model: nn.Module, draft_model: nn.Module, *args: Any, **options: Any
    ) -> Any:
        caches = options.get("prompt_cache")
        if _ours(_default_cache(model) + _default_cache(draft_model) if caches is None else caches):
            _refuse("draft_model", type(draft_model).__module__, "rows that are evicted cannot be taken back.")
        return original(prompt, model, draft_model, *args, **options)

    return speculative_generate_step


def _beginning(original: Any) -> Any:
    def prompt(self: Any, tokens: list[list[int]]) -> None:
        for c in _ours(self.prompt_cache) if tokens else []:
            c.begin_prefill()
        original(self, tokens)

    return prompt


def _ending(original: Any) -> Any:
    def __init__(
        self: Any, model: nn.Module, uids: list[int], inputs: mx.array, prompt_cache: list[Any], *args: Any, **more: Any
    ) -> None:
        for c in _ours(prompt_cache):
            c.end_prefill()
        original(self, model, uids, inputs, prompt_cache, *args, **more)

    return __init__


def _refusing_size(original: Any) -> Any:
    def __init__(self: Any, model: nn.Module, **options: Any) -> None:
        if options.get("max_kv_size") is not None and _ours(_default_cache(model)):
            _refuse("max_kv_size", options["max_kv_size"], "set the budget instead.")
        original(self, model, **options)

    return __init__


# -- what the model's attention shows ----------------------------------------------------------------------------------


@contextmanager
def _shown_queries(model: nn.Module, needed: bool) -> Iterator[None]:
    modules = _attention_modules(model)
    if not modules and needed:
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
        if hasattr(cache, "fit_mask"):
            mask = cache.fit_mask(mask, queries.shape[2])
        output = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if hasattr(cache, "observe"):
            pending = cache.observe(queries, keys, scale=scale, mask=mask, sinks=sinks)
            if pending:
                # evaluated with this call's output, so that no graph grows from token to token
                (output,) = mx.depends([output], pending)
        return output

    return scaled_dot_product_attention
