"""Putting the cache under an mlx-lm model: the only file that patches mlx-lm, on request and undoably."""

import importlib
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from threading import RLock
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache
from mlx_lm.models.cache import make_prompt_cache as _default_cache

from .allocate import allocate as _allocate
from .attention import PLACED_ELSEWHERE, REFUSED, REPLACEMENTS, shown
from .batch import BatchKeyformerKVCache
from .cache import KeyformerKVCache
from .layers import group_layers
from .policies import NO_QUERIES, Policy
from .rope import Rope, read_ropes

log = logging.getLogger(__name__)
_lock = RLock()  # what is patched, and how often
_NAME = "scaled_dot_product_attention"

# load_prompt_cache looks classes up among that module's names
for _cache in (KeyformerKVCache, BatchKeyformerKVCache):
    setattr(mlx_lm.models.cache, _cache.__name__, _cache)


def make_prompt_cache(
    model: Module,
    policy: Policy,
    budget: int | None = None,
    prefill: str = "full",
    *,
    positions: str = "original",
    allocate: str | Sequence[float] = "uniform",
    score_bytes: int | None = None,
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
        score_bytes: bound on the float32 logits that scoring a prompt has at once; None is 256 MiB, or a 64th of the
            GPU's memory where that is more. More makes a long prompt of policies with attention "key" faster on a GPU.

    Returns:
        One cache per layer, for `prompt_cache=` of mlx-lm's functions.

    Raises:
        ValueError: no layer can be replaced, a budget that protects everything, an unknown option, or a rotary
            embedding that cannot be read.
    """
    return _planned(model, policy, budget, prefill, positions, allocate, score_bytes)()


def _planned(
    model: Module,
    policy: Policy,
    budget: int | None,
    prefill: str,
    positions: str,
    allocate: str | Sequence[float],
    score_bytes: int | None,
) -> Callable[[], list[Any]]:
    """What makes the caches of `make_prompt_cache`; the model is looked at here, once."""
    if not isinstance(policy, Policy):
        raise ValueError(f"policy: expected a policy such as keyformer.H2O(), got {policy!r}.")
    if positions not in ("original", "contiguous"):
        raise ValueError(f"positions: expected 'original' or 'contiguous', got {positions!r}.")
    with _own_make_cache():
        readers = _evicting_layers(model, needed=policy.attention == "query")
        layers = list(readers)
        ropes: Sequence[Rope | None] = [None] * len(layers)
        if positions == "contiguous":
            _refuse_by_name(model, PLACED_ELSEWHERE, "numbered anew", "use positions='original'")
            places = [place for place, cache in enumerate(_default_cache(model)) for _ in leaves([cache])]
            ropes = _once(model, "ropes", lambda: read_ropes(model, [places[layer] for layer in layers]))
    budgets: list[int | None] = [budget] * len(layers)
    if policy.evicts and budget is not None:
        budgets = list(_allocate(allocate, budget, len(layers), policy))
    elif not policy.evicts and allocate != "uniform":
        raise ValueError(f"allocate: policy {policy.name} keeps every row of every layer; leave it 'uniform'.")
    uneven = len(set(budgets)) > 1

    def make() -> list[Any]:
        new = {
            layer: KeyformerKVCache(
                policy, rows, layer, prefill, score_bytes, rope=rope, uneven=uneven, readers=readers[layer]
            )
            for layer, rows, rope in zip(layers, budgets, ropes, strict=True)
        }
        group_layers(list(new.values()))
        with _own_make_cache():
            return _with_caches(_default_cache(model), new)

    # a first time here: what a cache refuses is refused before generation begins
    log.info("%s: %s", type(model).__module__, cache_counts(make()))
    return make


def cache_counts(caches: Sequence[Any]) -> dict[str, int]:
    """How many layers have a cache of each class, by class name: which of them evict, and which stay mlx-lm's own."""
    return dict(Counter(type(c).__name__ for c in leaves(caches)))


# (model, what) -> the model's modules then, and what was found
_findings: dict[tuple[int, str], tuple[Any, Any]] = {}


def _once(model: Module, name: str, find: Callable[[], Any]) -> Any:
    """What `find` says of this model, asked once for the modules it has."""
    modules = [m for _, m in model.named_modules()]
    now = [(id(m), m.dims, m.base, m.scale, m.traditional) if isinstance(m, RoPE) else id(m) for m in modules]
    key = id(model), name
    with _lock:
        known = _findings.get(key)
    if known is not None and known[0] == now:
        return known[1]
    found = find()
    with _lock:
        _findings[key] = now, found
    if known is None:
        weakref.finalize(model, _findings.pop, key, None)
    return found


# in this thread: mlx-lm makes the caches that a model would have without us
_without_us: ContextVar[bool] = ContextVar("_without_us", default=False)


class _CacheMaker:
    """Stands in for a model's `make_cache`, which mlx-lm asks for the caches of a new text.

    It stays in its place while the model's own caches are asked for: another thread may be generating.
    """

    def __init__(self, model: Module, before: Any) -> None:
        self.model = model
        self.before = before  # what the model itself had under that name, if anything
        self.blocks: list[Callable[[], list[Any]]] = []  # the last one to begin decides

    def __call__(self) -> list[Any]:
        if not _without_us.get():
            return self.blocks[-1]()
        if self.before is not None:
            return list(self.before())
        own = getattr(type(self.model), "make_cache", None)
        return list(own(self.model) if own else _default_cache(SimpleNamespace(layers=self.model.layers)))


@contextmanager
def _own_make_cache() -> Iterator[None]:
    """Within this block mlx-lm makes the caches that a model would have without us."""
    before = _without_us.set(True)
    try:
        yield
    finally:
        _without_us.reset(before)


@contextmanager
def attached(
    model: Module,
    policy: Policy | None = None,
    budget: int | None = None,
    prefill: str = "full",
    *,
    positions: str = "original",
    allocate: str | Sequence[float] = "uniform",
    score_bytes: int | None = None,
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
        policy, budget, prefill, positions, allocate, score_bytes: as `make_prompt_cache` takes them.

    Raises:
        ValueError: what `make_prompt_cache` raises, or a model whose queries cannot be seen with a policy that needs
            them.
    """
    given = budget, prefill, positions, allocate, score_bytes
    if policy is None and given != (None, "full", "original", "uniform", None):
        raise ValueError(
            "attached: budget, prefill, positions, allocate and score_bytes need a policy beside them, got none."
        )

    if not callable(getattr(model, "named_modules", None)):
        raise ValueError(f"model: expected an mlx-lm model, got {type(model).__name__}; load returns model, tokenizer.")
    make = None
    if policy is None:
        with _own_make_cache():
            _evicting_layers(model, needed=True)
    else:
        make = _planned(model, policy, budget, prefill, positions, allocate, score_bytes)
    with ExitStack() as undo:
        undo.enter_context(_shows_queries(model))
        undo.enter_context(_told_prompts())
        if make is not None:
            undo.enter_context(_makes_caches(model, make))
        yield


@contextmanager
def _makes_caches(model: Module, make: Callable[[], list[Any]]) -> Iterator[None]:
    with _lock:
        before = vars(model).get("make_cache")
        maker = before if isinstance(before, _CacheMaker) else _CacheMaker(model, before)
        maker.blocks.append(make)
        model.make_cache = maker
    try:
        yield
    finally:
        with _lock:
            maker.blocks.remove(make)
            # unless somebody has put another in its place
            if not maker.blocks and vars(model).get("make_cache") is maker:
                if maker.before is None:
                    del model.make_cache
                else:
                    model.make_cache = maker.before


# -- which layers ------------------------------------------------------------------------------------------------------


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches of a model one by one, those inside a CacheList too; a cache's `layer` is its number here."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def _with_caches(caches: Sequence[Any], new: dict[int, Any], numbers: Iterator[int] | None = None) -> list[Any]:
    """The same caches with some leaves replaced: number of the leaf -> its new cache."""
    # no function inside this one: one that calls itself is a reference cycle, which would keep all caches until gc runs
    numbers = count() if numbers is None else numbers
    return [
        CacheList(*_with_caches(cache.caches, new, numbers))
        if isinstance(cache, CacheList)
        else new.get(next(numbers), cache)
        for cache in caches
    ]


def _evicting_layers(model: Module, needed: bool) -> dict[int, int]:
    """The layers whose KVCache can be replaced: number of the cache -> how many attention layers read its rows.

    Args:
        model: an mlx-lm model.
        needed: the policy ranks by the queries of every such layer.

    Raises:
        ValueError: there is none, the model cannot lose rows, or queries are needed and cannot be seen.
    """
    name = type(model).__module__
    _refuse_by_name(model, REFUSED, "evicted", "use mlx-lm's own cache")
    caches = list(leaves(_default_cache(model)))
    plain = [layer for layer, cache in enumerate(caches) if type(cache) is KVCache]
    if not plain:
        kinds = ", ".join(sorted({type(c).__name__ for c in caches}))
        raise ValueError(
            f"{name}: expected a model with global-attention KVCache layers, got {kinds}: there is nothing to evict."
        )
    readers = _once(model, "readers", lambda: _readers(model, plain))
    unseen = [layer for layer in plain if not readers[layer]]
    if unseen and needed:
        works = ", ".join(NO_QUERIES)
        raise ValueError(
            f"{name}: expected attention through mlx-lm's {_NAME}, found none in {len(unseen)} of {len(plain)} "
            f"global-attention layers ({', '.join(map(str, unseen))}); their queries cannot be seen. "
            f"Policies that work without them: {works}."
        )
    return {layer: max(1, readers[layer]) for layer in plain}


def _refuse_by_name(model: Module, refused: dict[str, str], done: str, instead: str) -> None:
    for module in sorted({c.__module__ for c in _classes(model)} & set(refused)):
        raise ValueError(
            f"{type(model).__module__}: rows of its global attention cannot be {done}: {refused[module]}; {instead}."
        )


class _Probe(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """A KVCache that counts the attention calls over its rows."""

    waiting = True

    def __init__(self) -> None:
        super().__init__()
        self.readers = 0

    def fit_mask(self, mask: Any, S: int) -> Any:
        return mask

    def observe(self, *_: Any, **__: Any) -> list[mx.array]:
        self.readers += 1
        return []


def _readers(model: Module, layers: list[int]) -> dict[int, int]:
    """Attention calls that read each layer's rows and can be seen, in one pass over two tokens.

    The pass only builds MLX's graph, which nothing evaluates: it costs Python's time, no computation and no memory.
    """
    probes = {layer: _Probe() for layer in layers}
    with _shows_queries(model):
        try:
            model(mx.zeros((1, 2), mx.int32), cache=_with_caches(_default_cache(model), probes))
        finally:
            for probe in probes.values():
                _waiting.pop(id(probe), None)
    return {layer: probe.readers for layer, probe in probes.items()}


# -- where mlx-lm begins and ends a prompt -----------------------------------------------------------------------------

_told = 0
_untold: list[tuple[Any, str, Any]] = []  # what to put back: owner, name, original


@contextmanager
def _told_prompts() -> Iterator[None]:
    """mlx-lm's generation calls `begin_prefill` and `end_prefill` of our caches."""
    global _told
    with _lock:
        if _told == 0:
            try:
                _patch_generation()
            except BaseException:
                _unpatch_generation()
                raise
        _told += 1
    try:
        yield
    finally:
        with _lock:
            _told -= 1
            if _told == 0:
                _unpatch_generation()


def _patch_generation() -> None:
    generation = importlib.import_module("mlx_lm.generate")
    for name, wrap in (("generate_step", _telling_step), ("speculative_generate_step", _refusing_draft)):
        original = getattr(generation, name)
        wrapped = wrap(original)
        # under every name it was imported by
        for module in list(sys.modules.values()):
            for alias in [k for k, v in list(getattr(module, "__dict__", {}).items()) if v is original]:
                _patch(module, alias, wrapped)
    _patch(generation.GenerationBatch, "__init__", _ending(generation.GenerationBatch.__init__))
    _patch(generation.PromptProcessingBatch, "prompt", _beginning(generation.PromptProcessingBatch.prompt))
    _patch(generation.BatchGenerator, "__init__", _refusing_size(generation.BatchGenerator.__init__))
    _patch(generation, "_merge_caches", _refusing_mixtures(generation._merge_caches))


def _unpatch_generation() -> None:
    while _untold:
        setattr(*_untold.pop())


def _patch(owner: Any, name: str, new: Any) -> None:
    _untold.append((owner, name, getattr(owner, name)))
    setattr(owner, name, new)


def _ours(caches: Sequence[Any] | None) -> list[KeyformerKVCache]:
    """Our caches among those of a model."""
    return [c for c in leaves(caches or []) if isinstance(c, KeyformerKVCache)]


def _refuse_plain(model: Module, caches: Sequence[Any]) -> None:
    """Caches that keep every row, in a block that promises to evict: most likely they were made before it."""
    plain = sorted({type(c).__name__ for c in leaves(caches) if type(c) in (KVCache, BatchKVCache)})
    if plain and isinstance(vars(model).get("make_cache"), _CacheMaker):
        raise ValueError(
            f"prompt_cache: expected evicting caches inside `attached(model, policy, ...)`, got {', '.join(plain)}, "
            "which keeps every row; make it inside the block or with keyformer.make_prompt_cache."
        )


def _refuse(option: str, value: Any, instead: str) -> None:
    raise ValueError(f"{option}: expected none beside a cache that evicts, got {value!r}; {instead}")


def _telling_step(original: Any) -> Any:
    def generate_step(prompt: mx.array, model: Module, *args: Any, **options: Any) -> Any:
        if options.get("prompt_cache") is None:
            options["prompt_cache"] = _default_cache(model, options.get("max_kv_size"))
        _refuse_plain(model, options["prompt_cache"])
        ours = _ours(options["prompt_cache"])
        if not ours:
            return original(prompt, model, *args, **options)
        if options.get("max_kv_size") is not None:
            _refuse("max_kv_size", options["max_kv_size"], "set the budget instead.")
        if options.get("kv_bits") is not None:
            _refuse("kv_bits", options["kv_bits"], "keys and values keep the model's dtype; leave it unset.")
        tell = options.get("prompt_progress_callback")

        def progress(done: int, total: int) -> None:
            if done == total - 1:
                for c in ours:
                    c.end_prefill()
            if tell is not None:
                tell(done, total)

        def run() -> Iterator[Any]:
            group_layers(ours)  # loaded from a file, or taken out of a batch, they have lost each other
            for c in ours:
                c.begin_prefill()
            try:
                yield from original(prompt, model, *args, **{**options, "prompt_progress_callback": progress})
            except GeneratorExit:  # after a prompt that has ended
                raise
            except BaseException:
                for c in ours:
                    c.abandon_prefill()
                raise

        return run()

    return generate_step


def _refusing_draft(original: Any) -> Any:
    def speculative_generate_step(
        prompt: mx.array, model: Module, draft_model: Module, *args: Any, **options: Any
    ) -> Any:
        caches = options.get("prompt_cache")
        if _ours(_default_cache(model) + _default_cache(draft_model) if caches is None else caches):
            _refuse("draft_model", type(draft_model).__module__, "rows that are evicted cannot be taken back.")
        return original(prompt, model, draft_model, *args, **options)

    return speculative_generate_step


def _beginning(original: Any) -> Any:
    def prompt(self: Any, tokens: list[list[int]]) -> None:
        _refuse_plain(self.model, self.prompt_cache)
        ours = _ours(self.prompt_cache) if tokens else []
        for c in ours:
            c.begin_prefill()
        group_layers(ours)
        try:
            original(self, tokens)
        except BaseException:
            for c in ours:
                c.abandon_prefill()
            raise

    return prompt


def _ending(original: Any) -> Any:
    def __init__(
        self: Any, model: Module, uids: list[int], inputs: mx.array, prompt_cache: list[Any], *args: Any, **more: Any
    ) -> None:
        _refuse_plain(model, prompt_cache)
        ours = _ours(prompt_cache)
        for c in ours:
            c.end_prefill()
        group_layers(ours)
        original(self, model, uids, inputs, prompt_cache, *args, **more)

    return __init__


def _refusing_size(original: Any) -> Any:
    def __init__(self: Any, model: Module, **options: Any) -> None:
        original(self, model, **options)  # first, since its __del__ expects that it has run
        if options.get("max_kv_size") is not None and _ours(_default_cache(model)):
            _refuse("max_kv_size", options["max_kv_size"], "set the budget instead.")

    return __init__


def _refusing_mixtures(original: Any) -> Any:
    def _merge_caches(caches: list[list[Any]]) -> list[Any]:
        for layer in zip(*caches, strict=True):
            # mlx-lm lets the first cache merge all of them: a KVCache would take our rows for its own
            if 0 < sum(bool(_ours([c])) for c in layer) < len(layer):
                kinds = ", ".join(sorted({type(c).__name__ for c in layer}))
                raise ValueError(
                    f"prompt_caches: expected evicting caches for every prompt of a batch or for none, got {kinds}; "
                    "make all of them in the same way."
                )
        return list(original(caches))

    return _merge_caches


# -- what the model's attention shows ----------------------------------------------------------------------------------


@dataclass
class _Patch:
    """One changed name and how many blocks want it changed."""

    original: Any
    blocks: int = 0


_patches: dict[tuple[int, str], _Patch] = {}
# rows that more attention layers will read: id of their cache -> (the keys as those layers hold them, the cache)
_waiting: dict[int, tuple[mx.array, Any]] = {}


def _classes(model: Module) -> set[type]:
    """The classes of the model's modules, with those they inherit from."""
    return {c for _, m in model.named_modules() for c in type(m).__mro__}


@contextmanager
def _shows_queries(model: Module) -> Iterator[None]:
    """Within this block the model's attention calls `fit_mask` and `observe` of every cache that has them."""
    undo: list[Callable[[], None]] = []
    classes = _classes(model)
    # a model from a file of its own is in no sys.modules: the names a function sees are found through the function
    namespaces = {
        id(f.__globals__): f.__globals__ for c in classes for f in vars(c).values() if hasattr(f, "__globals__")
    }
    for names in namespaces.values():
        if _NAME in names:
            undo.append(_patched(names, _NAME, _observed))
    for c in sorted(classes, key=lambda c: c.__qualname__):
        make = REPLACEMENTS.get(f"{c.__module__}.{c.__qualname__}")
        if make:
            undo.append(_patched(c, "__call__", make))
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()
        if not _patches:
            _waiting.clear()  # of a call that ended in an exception


def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Change a name of a module's namespace or of a class, unless another block has; returns what ends the wish."""
    key = id(owner), name
    with _lock:
        if key not in _patches:
            _patches[key] = _Patch((owner if isinstance(owner, dict) else vars(owner))[name])
            _assign(owner, name, make(_patches[key].original))
        patch = _patches[key]
        patch.blocks += 1

    def restore() -> None:
        with _lock:
            patch.blocks -= 1
            if patch.blocks == 0:
                del _patches[key]
                _assign(owner, name, patch.original)

    return restore


def _assign(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _rows_of(keys: Any) -> Any:
    """The cache of another layer whose rows these are, or None."""
    return next((cache for rows, cache in _waiting.values() if rows is keys), None)


def _observed(original: Any) -> Any:
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        # layers that attend to another layer's rows are given no cache (gemma4) or one of their own (iquestloopcoder)
        seen = _rows_of(keys) if _waiting else None
        seen = cache if seen is None else seen
        if not hasattr(seen, "observe"):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if hasattr(seen, "fit_mask"):
            mask = seen.fit_mask(mask, queries.shape[2])
        output = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        output = shown(output, seen, queries, keys, scale=scale, mask=mask, sinks=sinks)
        if getattr(seen, "waiting", False):
            _waiting[id(seen)] = keys, seen
        elif _waiting:
            _waiting.pop(id(seen), None)
        return output

    return scaled_dot_product_attention
