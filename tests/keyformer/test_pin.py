"""What keyformer relies on in mlx-lm beyond its documented interface, and where to look when it moves.

mlx-lm is pinned exactly. Whoever moves the pin runs this file first: each failure names the part of keyformer that
stands on what has changed.
"""

from __future__ import annotations

import copy
import inspect
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm import generate as generate_function
from mlx_lm import server
from mlx_lm.models import base, deepseek_v3, gemma2, gpt_oss, llama, phi3, qwen2, qwen3, rope_utils
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import BatchKVCache, KVCache
from small import tiny_llama, tokens

generating = sys.modules["mlx_lm.generate"]
PIN = "0.32.2"
PROJECT = Path(__file__).resolve().parents[2]


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_the_pinned_one() -> None:
    pinned = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"mlx-lm=={PIN}" in pinned, "pyproject.toml pins another mlx-lm: run this file, then change PIN here."
    assert version("mlx-lm") == mlx_lm.__version__ == PIN, (
        f"mlx-lm {mlx_lm.__version__} is installed, keyformer is made for {PIN}: what fails below has moved."
    )


# -- the attention call: keyformer.hook shows queries to the cache -----------------------------------------------------


def test_attention_has_the_arguments_that_the_hook_passes_on() -> None:
    assert parameters(base.scaled_dot_product_attention) == [
        "queries",
        "keys",
        "values",
        "cache",
        "scale",
        "mask",
        "sinks",
    ], "scaled_dot_product_attention: look at the wrapper in keyformer/hook.py and at cache.observe"
    assert inspect.signature(base.scaled_dot_product_attention).parameters["sinks"].default is None


@pytest.mark.parametrize("module", [llama, qwen2, qwen3, phi3, gpt_oss, deepseek_v3], ids=lambda m: m.__name__)
def test_models_call_attention_through_a_name_of_their_own_module(module: Any) -> None:
    assert module.scaled_dot_product_attention is base.scaled_dot_product_attention, (
        "the hook replaces this global of each model's module; a model that calls it otherwise is not seen"
    )


def test_gemma2_has_an_attention_of_its_own() -> None:
    assert not hasattr(gemma2, "scaled_dot_product_attention"), (
        "gemma2 now calls the shared attention: the hook's special case for it (soft cap) may be dropped or doubled"
    )
    assert hasattr(gemma2, "Attention"), "keyformer/hook.py hooks this class"


def test_masks_are_made_once_by_the_first_cache() -> None:
    assert parameters(base.create_attention_mask) == ["h", "cache", "window_size", "return_array"]

    class Asked(KVCache):
        def make_mask(self, *arguments: Any, **keywords: Any) -> Any:
            asked.append((arguments, keywords))
            return super().make_mask(*arguments, **keywords)

    asked: list[Any] = []
    tiny_llama()(tokens(5)[None], cache=[Asked(), Asked()])
    assert asked == [((5,), {"return_array": False, "window_size": None})], (
        "make_mask is asked elsewhere or with other arguments: look at make_mask and fit_mask in keyformer/cache.py"
    )


def test_the_order_of_a_call() -> None:
    """make_mask, offset for RoPE, update_and_fetch, attention: cache.py reads none of it in another order."""

    class Recording(KVCache):
        def __init__(self) -> None:
            calls.append("made")
            super().__init__()

        def __getattribute__(self, name: str) -> Any:
            if name in ("offset", "make_mask", "update_and_fetch") and (not calls or calls[-1] != name):
                calls.append(name)
            return super().__getattribute__(name)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            fetched = super().update_and_fetch(keys, values)
            calls.append("fetched")
            return fetched

    calls: list[str] = []
    cache = Recording()
    original = llama.scaled_dot_product_attention

    def attention(*arguments: Any, **keywords: Any) -> mx.array:
        calls.append("attention")
        assert len(arguments) == 3, "queries, keys and values are no longer positional"
        assert keywords["cache"] is cache, "the layer's cache is no longer passed by keyword"
        assert set(keywords) <= {"cache", "scale", "mask", "sinks"}
        return original(*arguments, **keywords)

    model = tiny_llama(num_hidden_layers=1)
    calls.clear()
    llama.scaled_dot_product_attention = attention
    try:
        model(tokens(3)[None], cache=[cache])
    finally:
        llama.scaled_dot_product_attention = original
    order = [calls.index(name) for name in ("make_mask", "offset", "update_and_fetch", "fetched", "attention")]
    assert order == sorted(order), calls


# -- making caches: hook.make_prompt_cache and attached(model, policy) ------------------------------------------------


def test_make_prompt_cache_lets_the_model_decide() -> None:
    assert parameters(mlx_cache.make_prompt_cache) == ["model", "max_kv_size"]

    class Model:
        layers = (None, None)

    class WithCache(Model):
        def make_cache(self) -> str:
            return "the model's"

    assert [type(c) for c in mlx_cache.make_prompt_cache(Model())] == [KVCache, KVCache]
    assert mlx_cache.make_prompt_cache(WithCache()) == "the model's", "make_cache is no longer asked first"
    assert mlx_cache.make_prompt_cache(WithCache(), 8) == "the model's", (
        "max_kv_size is no longer ignored for a model with make_cache: look at what attached() refuses"
    )


def test_everything_that_generates_makes_its_caches_by_that_function() -> None:
    for module in (generating, server):
        assert module.make_prompt_cache is mlx_cache.make_prompt_cache, (
            f"{module.__name__} makes caches in another way: attached(model, policy) does not reach it"
        )


# -- the prompt's beginning and end: attached ------------------------------------------------------------------------


def test_generate_step_has_the_arguments_that_are_wrapped() -> None:
    assert parameters(generating.generate_step) == [
        "prompt",
        "model",
        "stream",
        "max_tokens",
        "sampler",
        "logits_processors",
        "max_kv_size",
        "prompt_cache",
        "prefill_step_size",
        "kv_bits",
        "kv_group_size",
        "quantized_kv_start",
        "prompt_progress_callback",
        "input_embeddings",
    ], "generate_step: look at what attached() wraps and refuses in keyformer/hook.py"
    assert inspect.isgeneratorfunction(generating.generate_step)
    assert parameters(generating.speculative_generate_step)[:3] == ["prompt", "model", "draft_model"], (
        "draft models are refused by name there"
    )
    assert generating.stream_generate.__globals__ is vars(generating), (
        "stream_generate no longer finds generate_step in mlx_lm.generate, where it is wrapped"
    )
    assert mlx_lm.generate is generate_function is generating.generate


@pytest.mark.parametrize(
    ("prompt", "step", "told"),
    [(1, 4, [0, 1]), (2, 4, [0, 1, 2]), (5, 4, [0, 4, 5]), (6, 4, [0, 4, 5, 6]), (9, 4, [0, 4, 8, 9])],
)
def test_generate_step_reports_the_last_token_but_one(prompt: int, step: int, told: list[int]) -> None:
    """end_prefill() is called where the callback says total - 1: all but the last token are in the cache."""
    model = tiny_llama(num_hidden_layers=1)
    caches = mlx_cache.make_prompt_cache(model)
    reports: list[tuple[int, int]] = []
    held: list[int] = []

    def callback(done: int, total: int) -> None:
        reports.append((done, total))
        held.append(caches[0].offset)

    answer = generating.generate_step(
        tokens(prompt),
        model,
        max_tokens=1,
        prompt_cache=caches,
        prefill_step_size=step,
        prompt_progress_callback=callback,
    )
    assert len(list(answer)) == 1
    assert reports == [(n, prompt) for n in told], "the progress callback is called at other places"
    assert held[:-1] == told[:-1], "the callback no longer tells how many tokens the cache holds"


def test_a_prompt_batch_pads_on_the_right_and_tells_the_cache_before_and_after() -> None:
    assert parameters(generating.PromptProcessingBatch.prompt) == ["self", "tokens"]

    class Told(BatchKVCache):
        def prepare(self, **keywords: Any) -> None:
            told.append(("prepare", keywords))
            super().prepare(**keywords)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            told.append(("update", keys.shape[2]))
            return super().update_and_fetch(keys, values)

        def finalize(self) -> None:
            told.append(("finalize", None))
            super().finalize()

    class Single(KVCache):
        @classmethod
        def merge(cls, caches: list[Any]) -> Told:
            return Told([0] * len(caches))

    told: list[tuple[str, Any]] = []
    batch = generating.PromptProcessingBatch(tiny_llama(num_hidden_layers=1), [0, 1], [[Single()], [Single()]])
    batch.prefill_step_size = 3
    batch.prompt([[1, 2, 3, 4], [5]])
    assert told == [
        ("prepare", {"lengths": [4, 1], "right_padding": [0, 3]}),
        ("update", 3),
        ("update", 1),
        ("finalize", None),
    ], "PromptProcessingBatch.prompt: look at prepare, finalize and padding in keyformer/batch.py"
    told.clear()
    batch.prompt([[1, 2], [3, 4]])
    assert told == [("update", 2)], "equal lengths are prepared too now, or no longer: keyformer/batch.py"


def test_a_generation_batch_steps_while_it_is_made() -> None:
    assert parameters(generating.GenerationBatch.__init__) == [
        "self",
        "model",
        "uids",
        "inputs",
        "prompt_cache",
        "tokens",
        "samplers",
        "fallback_sampler",
        "logits_processors",
        "stop_sequences",
        "max_tokens",
    ], "attached() ends prompts before this constructor's first step"
    model = tiny_llama(num_hidden_layers=1)
    prompts = generating.PromptProcessingBatch(model, [0, 1], [[KVCache()], [KVCache()]])
    prompts.prompt([[1, 2, 3], [4]])
    made = prompts.generate([[5], [6]])
    assert made.prompt_cache[0].offset.tolist() == [4, 2], (
        "GenerationBatch.__init__ no longer feeds the prompts' last tokens: end_prefill() has to go elsewhere"
    )
    empty = generating.GenerationBatch.empty(model, generating.greedy_sampler)
    assert empty.prompt_cache == []
    assert len(empty) == 0


def test_a_batch_generator_makes_merges_splits_and_extracts_caches_this_way() -> None:
    insert = inspect.getsource(generating.BatchGenerator.insert_segments)
    assert "make_prompt_cache(self.model, self.max_kv_size)" in insert, (
        "BatchGenerator makes the caches of its sequences differently: attached(model, policy) has to follow"
    )
    assert "deepcopy" in inspect.getsource(generating.PromptProcessingBatch._copy), (
        "splitting a prompt batch no longer copies caches: look at filter and __deepcopy__ in keyformer/batch.py"
    )
    for function, method in (("_merge_caches", "merge"), ("_extend_cache", "extend")):
        assert f".{method}(" in inspect.getsource(getattr(generating, function))
    for batch in (generating.PromptProcessingBatch, generating.GenerationBatch):
        assert "c.extract(idx)" in inspect.getsource(batch.extract_cache)
        assert "c.filter(keep)" in inspect.getsource(batch.filter)


# -- the cache protocol ------------------------------------------------------------------------------------------------


def test_the_base_cache_offers_what_is_overridden() -> None:
    names = {n for n in vars(mlx_cache._BaseCache) if not n.startswith("__")}
    assert names == {"state", "is_trimmable", "size", "nbytes", "empty", "from_state"}, (
        "_BaseCache has other members: each needs an answer in KeyformerKVCache and BatchKeyformerKVCache"
    )
    theirs = {n for n in vars(BatchKVCache) if not n.startswith("_")}
    assert theirs == {
        *("step", "update_and_fetch", "keys_and_values", "prepare", "finalize", "state", "is_trimmable", "trim"),
        *("make_mask", "filter", "extend", "extract", "merge", "size", "empty", "nbytes"),
    }, "BatchKVCache has other members: mlx-lm may call them on ours"
    assert parameters(BatchKVCache.prepare) == ["self", "left_padding", "lengths", "right_padding"]


def test_from_state_does_not_call_the_constructor() -> None:
    class NeedsArguments(mlx_cache._BaseCache):
        def __init__(self, needed: int) -> None:
            raise AssertionError

        @property
        def state(self) -> Any:
            return ()

        @state.setter
        def state(self, value: Any) -> None:
            self.given = value

    assert NeedsArguments.from_state((1, 2)).given == (1, 2), "the state setter of our caches sets everything itself"


def test_load_prompt_cache_finds_classes_by_name_in_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So keyformer registers its classes there; and a state may hold arrays, numbers, text and None."""

    class Strange(mlx_cache._BaseCache):
        def __init__(self) -> None:
            self._state: Any = (mx.arange(3), None, "text: é", 7, 0.5, True)

        @property
        def state(self) -> Any:
            return self._state

        @state.setter
        def state(self, value: Any) -> None:
            self._state = tuple(value)

    path = str(tmp_path / "cache.safetensors")
    mlx_cache.save_prompt_cache(path, [Strange()])
    with pytest.raises(KeyError, match="Strange"):
        mlx_cache.load_prompt_cache(path)
    monkeypatch.setitem(vars(mlx_cache), "Strange", Strange)
    (loaded,) = mlx_cache.load_prompt_cache(path)
    assert isinstance(loaded, Strange)
    array, *rest = loaded.state
    assert array.tolist() == [0, 1, 2]
    assert rest == [None, "text: é", 7, 0.5, True], "saved differently: look at `state` in keyformer/cache.py"


def test_kv_bits_quantizes_whatever_has_to_quantized() -> None:
    class Refusing(KVCache):
        def to_quantized(self, *arguments: Any, **keywords: Any) -> Any:
            raise ZeroDivisionError

    caches: list[Any] = [Refusing()]
    generating.maybe_quantize_kv_cache(caches, 0, 64, None)
    generating.maybe_quantize_kv_cache(caches, 1, 64, 8)
    with pytest.raises(ZeroDivisionError):
        generating.maybe_quantize_kv_cache(caches, 0, 64, 8)


def test_speculative_decoding_needs_a_cache_that_can_be_trimmed() -> None:
    class Fixed(KVCache):
        def is_trimmable(self) -> bool:
            return False

    model = tiny_llama(num_hidden_layers=1)
    with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
        next(generating.speculative_generate_step(tokens(4), model, model, prompt_cache=[Fixed(), Fixed()]))


def test_the_servers_prompt_cache_copies_deeply_and_counts_bytes() -> None:
    kept = mlx_cache.LRUPromptCache(max_size=2)
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
    kept.insert_cache("model", [1, 2, 3], [cache])
    assert kept.nbytes == cache.nbytes, "LRUPromptCache no longer counts c.nbytes"
    (again,), rest = kept.fetch_nearest_cache("model", [1, 2, 3, 4])
    assert rest == [4]
    assert again is not cache
    assert mx.array_equal(again.keys, copy.deepcopy(cache).keys)


def test_the_server_batches_what_can_be_merged() -> None:
    assert 'hasattr(c, "merge") for c in make_prompt_cache(model)' in inspect.getsource(server.ModelProvider._load), (
        "the server decides otherwise what it batches: look at KeyformerKVCache.merge and keyformer/server.py"
    )
    assert server.BatchGenerator is generating.BatchGenerator


def test_the_servers_command_can_be_given_another_parser_and_provider() -> None:
    """keyformer/server.py runs mlx_lm.server's own main with two globals replaced, and overrides the provider."""
    code = server.main.__code__
    assert code.co_freevars == () == code.co_varnames[: code.co_argcount]
    assert {"argparse", "ArgumentParser", "ModelProvider", "run"} <= set(code.co_names)
    provider = server.ModelProvider
    assert parameters(provider.__init__) == ["self", "cli_args"]
    assert parameters(provider._load) == ["self", "model_path", "adapter_path", "draft_model_path"]
    assert parameters(provider.load_default) == parameters(provider.reset) == ["self"]
    assert "self.reset()" in inspect.getsource(provider._load), "a model that is replaced is no longer detached first"


# -- rotary embeddings: keyformer.rope reads them from the model -------------------------------------------------------


def test_rope_modules_keep_their_frequencies_where_they_are_read() -> None:
    classes = {n for n, c in vars(rope_utils).items() if inspect.isclass(c) and n.endswith("RoPE")}
    assert classes == {"SuScaledRoPE", "Llama3RoPE", "YarnRoPE", "ProportionalRoPE", "DynamicNTKScalingRoPE"}, (
        "there are other rotary embeddings now: each is read or refused by name in keyformer/rope.py"
    )
    scaled = rope_utils.initialize_rope(
        16,
        10000.0,
        False,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    assert scaled._freqs.shape == (8,), "Llama3RoPE keeps its wavelengths elsewhere: keyformer/rope.py"
