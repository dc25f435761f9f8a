"""Attaching to mlx-lm's models and undoing it, which layers are replaced, and what the package may import and patch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base, gemma2, gemma3_text, gpt_oss, llama, qwen3
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache
from small import NO_QUERIES, a_policy, feed, kept_positions, randomize, step, tiny_llama, tokens

import keyformer
from keyformer import H2O, Full, Keyformer, KeyformerKVCache, Window, attached, make_prompt_cache

mlx_generate = importlib.import_module("mlx_lm.generate")
PACKAGE = Path(keyformer.__file__).parent


def tiny_qwen3() -> Any:
    arguments = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=20,
        rms_norm_eps=1e-6,
        vocab_size=300,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    return randomize(qwen3.Model(arguments))


def tiny_gemma2() -> Any:
    arguments = gemma2.ModelArgs(
        model_type="gemma2",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        head_dim=8,
        rms_norm_eps=1e-6,
        vocab_size=300,
        num_key_value_heads=2,
    )
    return randomize(gemma2.Model(arguments))


def tiny_gemma3(pattern: int = 2) -> Any:
    arguments = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=4,
        head_dim=8,
        query_pre_attn_scalar=8,
        vocab_size=300,
        num_key_value_heads=2,
        sliding_window=6,
        sliding_window_pattern=pattern,
    )
    return randomize(gemma3_text.Model(arguments))


def tiny_gpt_oss() -> Any:
    arguments = gpt_oss.ModelArgs(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=32,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=6,
        vocab_size=300,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    return randomize(gpt_oss.Model(arguments))


def sliding_llama() -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return tiny_llama(num_hidden_layers=4, layer_types=kinds, sliding_window=6)


# -- attaching ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def mlx_lm_is_as_it_was() -> Any:
    """Whatever a test here does, mlx-lm's functions are its own again afterwards."""
    modules = [base, gemma3_text, gpt_oss, llama, qwen3]
    before = [m.scaled_dot_product_attention for m in modules]
    assert len(set(before)) == 1
    yield
    assert [m.scaled_dot_product_attention for m in modules] == before


def is_attached(module: Any) -> bool:
    return module.scaled_dot_product_attention is not base.scaled_dot_product_attention


def test_it_undoes_itself() -> None:
    model = tiny_llama()
    with attached(model):
        assert is_attached(llama)
        assert not is_attached(qwen3)
    assert not is_attached(llama)


def test_it_undoes_itself_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), attached(tiny_llama()):
        assert is_attached(llama)
        raise ZeroDivisionError
    assert not is_attached(llama)


def test_it_nests() -> None:
    model = tiny_llama()
    caches = make_prompt_cache(model, H2O(), 8)
    with attached(model):
        with attached(model):
            inner = llama.scaled_dot_product_attention
            feed(model, caches, tokens(12), 12)
        assert llama.scaled_dot_product_attention is inner
        step(model, caches, 1)
        step(model, caches, 1)
    assert not is_attached(llama)
    other = make_prompt_cache(model, H2O(), 8)
    with attached(model):
        feed(model, other, tokens(12), 12)
        step(model, other, 1)
        step(model, other, 1)
    # a call seen twice by two hooks would have counted every query twice
    assert mx.array_equal(caches[0].scores, other[0].scores)
    assert kept_positions(caches[0]) == kept_positions(other[0])


def test_two_models_in_any_order() -> None:
    one, same, two = tiny_llama(), tiny_llama(seed=1), tiny_qwen3()
    first, second, third = attached(one), attached(two), attached(same)
    first.__enter__()
    second.__enter__()
    third.__enter__()
    for model in (one, same, two):
        caches = make_prompt_cache(model, Keyformer(), 8)
        feed(model, caches, tokens(12), 5)
        step(model, caches, 3)
        step(model, caches, 3)
        assert [c.size() for c in caches] == [8, 8]
    first.__exit__(None, None, None)
    assert is_attached(llama)  # the other llama still needs it
    assert is_attached(qwen3)
    third.__exit__(None, None, None)
    assert not is_attached(llama)
    assert is_attached(qwen3)
    second.__exit__(None, None, None)
    assert not is_attached(qwen3)


def test_other_caches_are_not_affected() -> None:
    model = tiny_llama()
    expected = model(tokens(12)[None], cache=[KVCache(), KVCache()])
    with attached(model):
        assert mx.array_equal(model(tokens(12)[None], cache=[KVCache(), KVCache()]), expected)
        assert mx.array_equal(model(tokens(12)[None]), model(tokens(12)[None], cache=[KVCache(), KVCache()]))


def test_what_needs_no_queries_runs_without_attaching() -> None:
    """In a model with an attention of its own as well."""
    model = tiny_gemma2()
    for kind in NO_QUERIES:
        full, caches = make_prompt_cache(model, Full()), make_prompt_cache(model, a_policy(kind, 1, 2), 8)
        for chunk in (tokens(12), tokens(7, seed=1)):
            a, b = (model(chunk[None], cache=c) for c in (full, caches))
            np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5, rtol=0)
        for _ in range(2):
            step(model, caches, 4)
        assert [c.size() for c in caches] == [21 if kind == "full" else 8] * 2


# -- which layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_gemma3, sliding_llama], ids=["gemma3", "llama"])
def test_sliding_layers_keep_their_own_cache(make: Any) -> None:
    model = make()
    caches = make_prompt_cache(model, H2O(), 9)
    assert [type(c) for c in caches] == [RotatingKVCache, KeyformerKVCache] * 2
    assert [c.layer for c in caches[1::2]] == [1, 3]
    reference = model.make_cache()
    assert [c.max_size for c in caches[::2]] == [c.max_size for c in reference[::2]]
    with attached(model):
        for c in (caches, reference):
            logits = [feed(model, c, tokens(14), 20)]
            logits += [step(model, c, t) for t in range(4)]
        assert [c.size() for c in caches[1::2]] == [9, 9]
        assert [c.offset for c in caches] == [18] * 4
        # at a budget that holds everything the two kinds of layers still agree with mlx-lm on which mask is whose
        whole, reference = make_prompt_cache(model, H2O(), 50), model.make_cache()
        for chunk in (tokens(14), tokens(9, seed=2), tokens(1)):
            a, b = (model(chunk[None], cache=c) for c in (whole, reference))
            assert mx.array_equal(a, b)


def test_nothing_to_replace_is_an_error() -> None:
    model = tiny_gemma3(pattern=6)  # its first global layer would be the sixth
    with pytest.raises(
        ValueError, match="global-attention KVCache layers, got RotatingKVCache: there is nothing to evict"
    ):
        make_prompt_cache(model, H2O(), 9)


def test_every_layer_has_its_number_budget_and_prefill() -> None:
    caches = make_prompt_cache(tiny_llama(num_hidden_layers=3), H2O(), 9, "chunked")
    assert [(c.layer, c.budget, c.prefill) for c in caches] == [(i, 9, "chunked") for i in range(3)]
    with pytest.raises(ValueError, match="budget: expected more rows than are protected"):
        make_prompt_cache(tiny_llama(), Window(n_sink=4), 4)


def test_odd_groups_and_head_sizes_score_the_right_heads() -> None:
    """qwen3 with 3 query heads to a KV head of 20; its queries are normalised before they are seen."""
    model = tiny_qwen3()
    caches = make_prompt_cache(model, H2O(), 9)
    with attached(model):
        feed(model, caches, tokens(20), 7)
        for t in range(4):
            step(model, caches, t)
    for c in caches:
        assert c.size() == 9
        # every row has received its share: 3 heads x (20 - position) queries at most, and in all no more than that
        assert 0 < c.scores.sum().item() < 2 * 3 * 24


# -- what a breaker found ----------------------------------------------------------------------------------------------


def test_a_prompt_that_breaks_off_is_no_longer_waited_for() -> None:
    """An exception between two chunks; decoded tokens that follow by hand then keep to the budget."""
    model = tiny_llama()

    def stop(done: int, total: int) -> None:
        if done == 32:
            raise KeyboardInterrupt

    caches = make_prompt_cache(model, H2O(), 8)
    with attached(model):
        with pytest.raises(KeyboardInterrupt):
            for _ in mlx_generate.generate_step(
                tokens(60), model, prompt_cache=caches, prefill_step_size=16, prompt_progress_callback=stop
            ):
                pass
        for t in range(20):
            step(model, caches, t)
    assert [(c.size(), c.offset) for c in caches] == [(8, 52)] * 2


def test_a_model_that_changes_is_looked_at_again() -> None:
    model = tiny_llama()

    def slow() -> float:
        return float(make_prompt_cache(model, Window(), 16, positions="contiguous")[0].rope.wavelengths[1])

    assert slow() == pytest.approx(10000 ** (1 / 8))
    for layer in model.layers:
        layer.self_attn.rope = nn.RoPE(16, base=500000.0)
    assert slow() == pytest.approx(500000 ** (1 / 8))
    model.layers[0].self_attn.rope.base = model.layers[1].self_attn.rope.base = 1000.0
    assert slow() == pytest.approx(1000 ** (1 / 8))
    model.model.layers.append(model.layers[0])
    assert len(make_prompt_cache(model, H2O(), 16)) == 3


def test_a_cache_that_keeps_everything_is_refused_where_everything_evicts() -> None:
    """Made before the block, as chats do; without a policy nothing was promised."""
    model = tiny_llama()
    plain = [KVCache(), KVCache()]
    with attached(model, H2O(), 8):
        with pytest.raises(ValueError, match=r"prompt_cache: expected evicting .* got KVCache, which keeps"):
            next(mlx_generate.generate_step(tokens(20), model, prompt_cache=plain))
        for prompt in ([1], [1, 2, 3]):
            generator = mlx_generate.BatchGenerator(model)
            generator.insert([prompt], caches=[[KVCache(), KVCache()]])
            with pytest.raises(ValueError, match="got BatchKVCache, which keeps every"):
                generator.next_generated()
        fresh = mlx_cache.make_prompt_cache(model)
        next(mlx_generate.generate_step(tokens(20), model, prompt_cache=fresh))
        assert fresh[0].size() == 8
    with attached(model):
        next(mlx_generate.generate_step(tokens(20), model, prompt_cache=plain))
    assert plain[0].size() > 8


def test_what_is_no_model_is_refused() -> None:
    for wrong in (object(), "model", None):
        with pytest.raises(ValueError, match="model: expected an mlx-lm model, got"), attached(wrong, H2O(), 8):
            pass


def test_make_cache_of_ones_own_is_left_alone() -> None:
    model = tiny_llama()
    mine = lambda: [KVCache(), KVCache()]  # noqa: E731
    with attached(model, H2O(), 8):
        model.make_cache = mine
    assert model.make_cache is mine


def test_modules_of_all_kinds_may_be_loaded() -> None:
    sys.modules["odd"] = object()  # type: ignore[assignment]
    try:
        with attached(tiny_llama(), H2O(), 8):
            pass
    finally:
        del sys.modules["odd"]


# -- the package -------------------------------------------------------------------------------------------------------


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_it_imports_mlx_mlx_lm_numpy_and_the_standard_library_only(path: Path) -> None:
    assert imported(ast.parse(path.read_text())) <= {"mlx", "mlx_lm", "numpy", *sys.stdlib_module_names}


def test_only_the_hook_sets_attributes_of_other_modules() -> None:
    """Found by reading: `setattr` on anything but self and the file's own classes, or an assignment to an attribute of
    an imported name."""
    patching = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        aliases = {
            a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                target = node.args[0]
                own = {"self", *(n.name for n in tree.body if isinstance(n, ast.ClassDef))}
                if not (isinstance(target, ast.Name) and target.id in own):
                    patching.add(path.name)
            for target in getattr(node, "targets", []):
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in aliases - sys.stdlib_module_names
                ):
                    patching.add(path.name)
    assert patching == {"hook.py"}


def test_importing_it_patches_nothing_and_loads_neither_pipeline_nor_torch() -> None:
    program = """
import sys
from mlx_lm.models import base, llama
import keyformer
assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
print(sorted({"pipeline", "hydra", "mlflow", "lm_eval", "torch"} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
