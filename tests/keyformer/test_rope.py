"""Rotation against MLX's own RoPE and the float64 definition."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import state_oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from small import randomize, tiny_llama, tokens

from keyformer import rope_remap_positions
from keyformer.rope import Rope, read_ropes, rotate, turns, wavelengths


def mlx_rope(x: mx.array, position: int, dims: int, **more: Any) -> mx.array:
    """Rows [N, D], all at one position."""
    more = {"traditional": False, "base": 10000.0, "scale": 1.0, **more}
    return mx.fast.rope(x[None, :, None], dims, offset=position, **more)[0, :, 0]


@pytest.mark.parametrize("D", [2, 7, 64])
@pytest.mark.parametrize("base", [100.0, 10000.0, 500000.0])
def test_rotation_is_the_definition(D: int, base: float) -> None:
    x = np.random.default_rng(D).normal(size=(5, D)).astype(np.float32)
    at = np.array([0, 1, 17, 4096, 100_000])
    ours = rotate(mx.array(x), *turns(at, wavelengths(D, base)))
    expected = [state_oracle.rope(row, int(p), base) for row, p in zip(x, at, strict=True)]
    np.testing.assert_allclose(ours, np.array(expected), atol=2e-6)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [8, 16])
def test_remapping_mlx_rows_gives_mlx_rows(traditional: bool, dims: int) -> None:
    """From 20 to 3, and partial rotation (8 of 16) by the model's wavelengths."""
    x = mx.random.normal((4, 16))
    freqs = mx.array(wavelengths(dims, 10000.0))
    old, new = (mlx_rope(x, p, dims, traditional=traditional) for p in (20, 3))
    ours = rope_remap_positions(old, mx.array(20), mx.full((4,), 3), freqs=freqs, traditional=traditional)
    np.testing.assert_allclose(ours, new, atol=2e-6)
    assert np.array_equal(np.array(rope_remap_positions(old, mx.arange(4), mx.arange(4))), np.array(old))


def test_scaled_wavelengths_are_mlx_freqs() -> None:
    """llama3 and yarn give `mx.fast.rope` a table of wavelengths instead of a base."""
    x, freqs = mx.random.normal((4, 16)), mx.array(wavelengths(16, 10000.0) * np.linspace(1, 8, 8))
    old, new = (mlx_rope(x, p, 16, base=None, freqs=freqs) for p in (50, 2))
    np.testing.assert_allclose(rope_remap_positions(old, mx.array(50), mx.array(2), freqs=freqs), new, atol=2e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dtype_stays_and_rounding_happens_once(dtype: mx.Dtype) -> None:
    x = mx.random.normal((6, 12)).astype(dtype)
    ours = rope_remap_positions(x, mx.arange(6) + 9, mx.arange(6))
    assert ours.dtype == dtype
    exact = rope_remap_positions(x.astype(mx.float32), mx.arange(6) + 9, mx.arange(6))
    assert mx.array_equal(ours, exact.astype(dtype))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": mx.zeros((3, 4), mx.int32)}, "x: expected rows"),
        ({"old_positions": mx.arange(2)}, "expected one per row"),
        ({"new_positions": mx.zeros(3)}, "new_positions: expected integers"),
        ({"base": 0.0}, "base: expected a finite number above 0"),
        ({"base": float("nan")}, "base: expected"),
        ({"freqs": mx.ones(3)}, "freqs: expected at most 2 positive"),
        ({"freqs": mx.zeros(2)}, "freqs: expected at most 2 positive"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    good = {"x": mx.zeros((3, 4)), "old_positions": mx.arange(3), "new_positions": mx.arange(3)}
    with pytest.raises(ValueError, match=message):
        rope_remap_positions(**{**good, **arguments})


# -- Rope --------------------------------------------------------------------------------------------------------------


def turned(x: np.ndarray, shift: np.ndarray, rope: Rope) -> np.ndarray:
    """The definition in float64, one pair at a time."""
    out, half = x.astype(np.float64), len(rope.wavelengths)
    for i, wavelength in enumerate(rope.wavelengths):
        first, second = (2 * i, 2 * i + 1) if rope.traditional else (i, i + half)
        angle = shift.astype(np.float64) / wavelength
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first], out[..., second] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return out


def some_rope(half: int, base: float = 10000.0, traditional: bool = False) -> Rope:
    return Rope(tuple(wavelengths(2 * half, base).tolist()), traditional)


EPS = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
FAR = 2**24 - 1


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    half=st.integers(0, 9),
    rest=st.integers(0, 3),
    traditional=st.booleans(),
    leading=st.lists(st.integers(1, 3), max_size=3),
    dtype=st.sampled_from(list(EPS)),
)
def test_turn_is_the_definition(
    data: st.DataObject, half: int, rest: int, traditional: bool, leading: list[int], dtype: mx.Dtype
) -> None:
    """Any shape, odd and partly turning rows, far shifts of both signs, pairs that turn backwards or not at all."""
    some = st.one_of(st.floats(1, 1e7), st.floats(-1e7, -1), st.just(math.inf))
    rope = Rope(tuple(data.draw(st.lists(some, min_size=half, max_size=half))), traditional)
    n = data.draw(st.integers(1, 4))
    shift = np.array(data.draw(st.lists(st.integers(-FAR, FAR), min_size=n, max_size=n)), np.int32)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = mx.array(rng.normal(size=(*leading, n, max(2 * half + rest, 1))).astype(np.float32)).astype(dtype)
    ours = rope.turn(x, mx.array(shift))
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    exact = np.array(x.astype(mx.float32))
    size = np.abs(exact).max(axis=-1, keepdims=True)
    error = np.abs(np.array(ours.astype(mx.float32)) - turned(exact, shift, rope))
    assert (error <= size * (4e-7 + (0 if dtype == mx.float32 else EPS[dtype]))).all()


def test_every_row_of_every_head_has_its_own_shift() -> None:
    rng = np.random.default_rng(0)
    x, shift = rng.normal(size=(2, 3, 5, 8)).astype(np.float32), rng.integers(-9000, 9000, (2, 3, 5))
    ours = some_rope(3).turn(mx.array(x), mx.array(shift.astype(np.int32)))
    np.testing.assert_allclose(ours, turned(x, shift, some_rope(3)), atol=2e-6)
    shared = some_rope(3).turn(mx.array(x), mx.array(shift[:1, :1].astype(np.int32)))
    np.testing.assert_allclose(shared, turned(x, np.broadcast_to(shift[:1, :1], (2, 3, 5)), some_rope(3)), atol=2e-6)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_row_that_stays_is_the_same_bits(dtype: mx.Dtype, traditional: bool) -> None:
    x = mx.array(np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)).astype(dtype)
    x[0], x[1, 2], x[2, 3] = mx.array(-0.0, dtype), mx.array(-math.inf, dtype), mx.array(math.nan, dtype)
    ours = some_rope(3, traditional=traditional).turn(x, mx.array([0, 0, 0, 5], mx.int32))
    bits = [np.array(a.view(mx.uint32 if dtype == mx.float32 else mx.uint16)) for a in (ours, x)]
    assert np.array_equal(bits[0][:3], bits[1][:3])
    assert not np.array_equal(bits[0][3], bits[1][3])


def test_a_layer_without_rotation_leaves_rows_alone() -> None:
    x = mx.random.normal((2, 4, 6))
    assert mx.array_equal(Rope(()).turn(x, mx.full((4,), 9)), x)


def test_turning_evaluates_nothing() -> None:
    """Inside a traced function an evaluation would raise."""
    rope, x = some_rope(4), mx.random.normal((3, 8))
    traced = mx.compile(lambda x, shift: rope.turn(x, shift))
    shift = mx.array([0, -7, 100_000])
    np.testing.assert_allclose(traced(x, shift), rope.turn(x, shift), atol=1e-6)
    with pytest.raises(ValueError, match="compile"):
        mx.compile(lambda x: x + (1 if x.sum().item() > 0 else 0))(x)


def test_positions_out_of_reach_are_seen() -> None:
    ours = np.array(some_rope(2).turn(mx.ones((4, 4)), mx.array([FAR, -FAR, FAR + 1, -FAR - 1])))
    assert np.isfinite(ours[:2]).all() and np.isnan(ours[2:]).all()


def test_ropes_are_values() -> None:
    rope = Rope((1.0, 1 / 3, -2.5, math.inf), True)
    assert Rope.from_json(rope.to_json()) == rope and hash(Rope.from_json(rope.to_json())) == hash(rope)
    assert json.loads(rope.to_json())["wavelengths"][3] is None  # strict JSON has no infinity
    assert Rope((1.0,)) != Rope((1.0,), True)
    for bad in (0.0, math.nan, 1, "1"):
        with pytest.raises(ValueError, match="wavelengths: expected numbers"):
            Rope((bad,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 6 components, got 5"):
        some_rope(3).turn(mx.zeros((2, 5)), mx.zeros(2, mx.int32))


# -- Rope against MLX's own modules ------------------------------------------------------------------------------------

SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.5},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("kind", SCALED)
def test_every_scaling_of_mlx_lm(kind: str, dtype: mx.Dtype) -> None:
    """Read from a model's modules; its module at a position is our turn from any other position, one rounding apart."""
    model = tiny_llama(dtype, rope_scaling=SCALED[kind] or None, max_position_embeddings=1024)
    ropes = read_ropes(model, [0, 1])
    assert ropes[0] == ropes[1]
    module = model.layers[0].self_attn.rope
    x = mx.array(np.random.default_rng(0).normal(size=(1, 2, 1, 16)).astype(np.float32)).astype(dtype)
    for old, new in ((0, 1), (0, 63), (0, 2000), (2000, 3), (63, 64), (4096, 0)):
        rows, expected = (module(x, offset=p).astype(mx.float32) for p in (old, new))
        ours = ropes[0].turn(rows.astype(dtype), mx.array([new - old])).astype(mx.float32)
        # MLX's own angle is float32: its rounding grows with the position
        bound = 5e-6 + 3e-7 * max(old, new) + (0 if dtype == mx.float32 else 2 * EPS[dtype])
        assert mx.abs(ours - expected).max() <= bound * mx.abs(rows).max()


def test_yarn_scales_keys_once() -> None:
    """The scale of the rows was applied on arrival; a turn keeps it."""
    model = tiny_llama(rope_scaling=SCALED["yarn"])
    rows = model.layers[0].self_attn.rope(mx.ones((1, 1, 1, 16)), offset=9)
    assert mx.linalg.norm(rows) > 4.2
    ours = read_ropes(model, [0])[0].turn(rows, mx.array([-5]))
    assert abs(mx.linalg.norm(ours).item() - mx.linalg.norm(rows).item()) < 1e-5


def test_longrope_does_not_change_with_the_length() -> None:
    """mlx-lm 0.32.2 uses the long factors at every length, so one table is right for a whole generation."""
    model = tiny_llama(rope_scaling=SCALED["longrope"], max_position_embeddings=1024)
    long = wavelengths(16, 10000.0) * np.arange(1, 9)
    np.testing.assert_allclose(read_ropes(model, [0])[0].wavelengths, long, rtol=1e-6)
    x = mx.random.normal((1, 1, 200, 16))
    whole = model.layers[0].self_attn.rope(x)
    for n in (1, 63, 65):
        np.testing.assert_allclose(model.layers[0].self_attn.rope(x[:, :, :n]), whole[:, :, :n], atol=1e-6)


# -- read from models --------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "vocab_size": 300,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "attention_bias": False,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 4,
}
MINICPM3 = MLA | {
    "dim_model_base": 64,
    "scale_depth": 1.0,
    "scale_emb": 1.0,
    "num_key_value_heads": 4,
    "rope_scaling": {"original_max_position_embeddings": 64},
}
GPT2 = {"n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "layer_norm_epsilon": 1e-5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def tiny(module: str, **changes: Any) -> Any:
    """A small random model of mlx-lm's class, its norms not all ones, so that what comes after the turn is seen."""
    m = importlib.import_module(f"mlx_lm.models.{module}")
    model = randomize(m.Model(m.ModelArgs.from_dict(SHAPE | {"model_type": module} | changes)))
    rng = np.random.default_rng(1)
    norms = [(n, mx.array(rng.uniform(0.5, 1.5, p.shape).astype(np.float32))) for n, p in norm_weights(model)]
    model.update(tree_unflatten(norms))
    return model.eval()


def norm_weights(model: Any) -> list[tuple[str, mx.array]]:
    return [(n, p) for n, p in tree_flatten(model.parameters()) if "norm" in n and n.endswith("weight")]


def global_layers(model: Any) -> list[int]:
    inner = [c.caches if isinstance(c, CacheList) else [c] for c in make_prompt_cache(model)]
    return [i for i, caches in enumerate(inner) if any(type(c) is KVCache for c in caches)]


class Elsewhere(KVCache):
    """A real KVCache whose tokens are told to begin at `first`; attention sees the same rows as at 0."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.real = first, KVCache()
        self.offset = first

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched = self.real.update_and_fetch(keys, values)
        self.offset = self.first + self.real.offset
        return fetched

    def make_mask(self, *args: Any, **more: Any) -> Any:
        return self.real.make_mask(*args, **more)


def stored_keys(model: Any, layers: list[int], first: int) -> list[mx.array]:
    """The keys that each layer stores of seven tokens in two calls, the first token at `first`."""
    caches, ours = make_prompt_cache(model), []
    for i in layers:
        ours.append(Elsewhere(first))
        inner = [ours[-1] if type(c) is KVCache else c for c in getattr(caches[i], "caches", [caches[i]])]
        caches[i] = CacheList(*inner) if isinstance(caches[i], CacheList) else inner[0]
    for part in (tokens(7)[None, :4], tokens(7)[None, 4:]):
        mx.eval(model(part, cache=caches))
    return [c.real.keys[:, :, :7] for c in ours]


NEOX, NEIGHBOURS = False, True
FULL_AND_SLIDING = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
FALCON_H1 = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
# model, changes, and of each layer with a global KV cache: how many pairs turn, and which components pair
FAMILIES: dict[str, tuple[str, dict[str, Any], list[tuple[int, bool]]]] = {
    "llama": ("llama", {}, [(8, NEOX)] * 4),
    "llama, sliding layers": ("llama", {"layer_types": FULL_AND_SLIDING}, [(8, NEOX)] * 3),
    "qwen2": ("qwen2", {}, [(8, NEOX)] * 4),
    "qwen3": ("qwen3", {}, [(8, NEOX)] * 4),
    "qwen, attribute rotary_emb": (
        "qwen",
        {"kv_channels": 16, "num_key_value_heads": 4, "intermediate_size": 128},
        [(8, NEOX)] * 4,
    ),
    "phi3, half of the row": ("phi3", {}, [(4, NEOX)] * 4),
    "stablelm, a part of the row": ("stablelm", {"norm_eps": 1e-5, "use_qkv_bias": True}, [(4, NEOX)] * 4),
    "glm, neighbours": ("glm", {"num_key_value_heads": 2}, [(8, NEIGHBOURS)] * 4),
    "cohere, neighbours": ("cohere", {}, [(8, NEIGHBOURS)] * 4),
    "cohere2, global layers do not turn": ("cohere2", {}, [(0, NEOX)] * 2),
    "smollm3, every fourth layer does not turn": ("smollm3", {}, [(8, NEOX)] * 3 + [(0, NEOX)]),
    "llama4_text, a list of layers that turn": (
        "llama4_text",
        {"no_rope_layers": [1, 0, 1, 0], "intermediate_size_mlp": 64, "use_qk_norm": True},
        [(8, NEIGHBOURS), (0, NEOX)] * 2,
    ),
    "gemma2": ("gemma2", {}, [(8, NEOX)] * 4),
    "gemma3_text": ("gemma3_text", {"rope_local_base_freq": 10000.0, "rope_theta": 1e6}, [(8, NEOX)] * 2),
    "gemma4_text, part of the pairs": (
        "gemma4_text",
        {
            "layer_types": FULL_AND_SLIDING,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 16,
            "global_head_dim": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        [(16, NEOX)] * 3,
    ),
    "gpt_neox": (
        "gpt_neox",
        {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True},
        [(2, NEOX)] * 4,
    ),
    "gptj": ("gptj", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 8}, [(4, True)] * 2),
    "gpt_oss, yarn and sinks": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": FULL_AND_SLIDING, "rope_scaling": YARN},
        [(8, NEOX)] * 3,
    ),
    "hunyuan_v1_dense, NTK by a constant": (
        "hunyuan_v1_dense",
        {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "use_qk_norm": False},
        [(8, NEOX)] * 4,
    ),
    "talkie, a table in the attention, backwards": ("talkie", {}, [(8, NEOX)] * 4),
    "nanochat, a table in the attention, backwards": ("nanochat", {}, [(8, NEOX)] * 4),
    "qwen3_next, two of four layers have keys": ("qwen3_next", LINEAR_ATTENTION, [(4, NEOX)] * 2),
    "falcon_h1, a KV cache inside a list": (
        "falcon_h1",
        FALCON_H1,
        [(8, NEOX)] * 4,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_turn_that_was_read_is_the_models(family: str) -> None:
    """Rows that a real KVCache stores of a prompt at 0, turned by 300, are those it stores of the prompt at 300."""
    module, changes, expected = FAMILIES[family]
    model = tiny(module, **changes)
    layers = global_layers(model)
    ropes = read_ropes(model, layers)
    assert [(len(r.wavelengths), r.traditional) for r in ropes] == expected
    near, far = stored_keys(model, layers, 0), stored_keys(model, layers, 300)
    for rope, old, new in zip(ropes, near, far, strict=True):
        size = mx.abs(new).max().item()
        ours = rope.turn(old, mx.full((7,), 300, mx.int32))
        assert mx.abs(ours - new).max().item() < 3e-4 * size
        if rope.wavelengths:  # rows that did not move would show nothing
            assert mx.abs(old - new).max().item() > 0.1 * size


def test_layers_of_one_model_have_their_own_base() -> None:
    """gemma3: global layers turn by rope_theta and a linear scale, sliding ones by rope_local_base_freq."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    model = tiny("gemma3_text", rope_local_base_freq=10000.0, rope_theta=1e6, rope_scaling=scaling)
    assert global_layers(model) == [1, 3]
    ropes = read_ropes(model, [1, 3])
    np.testing.assert_allclose(ropes[0].wavelengths, 8 * wavelengths(16, 1e6))
    model = tiny("llama")
    model.layers[2].self_attn.rope = nn.RoPE(16, base=500.0)
    assert read_ropes(model, [2, 0]) == [some_rope(8, 500.0), some_rope(8)]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_models_in_half_precision_are_read(dtype: mx.Dtype) -> None:
    model = randomize(tiny("smollm3"), dtype)
    assert [len(r.wavelengths) for r in read_ropes(model, range(4))] == [8, 8, 8, 0]


def test_quantized_models_are_read() -> None:
    model = tiny("llama")
    nn.quantize(model, group_size=32, bits=4)
    assert read_ropes(model, [0, 3]) == [some_rope(8)] * 2


def test_reading_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    before = model(tokens(5)[None])
    read_ropes(model, [0])
    assert mx.array_equal(model(tokens(5)[None]), before)


class Backwards(nn.RoPE):
    """A rotary module of the user's own."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        return super().__call__(x, offset=-offset)


def with_own_rope() -> Any:
    model = tiny("llama")
    model.layers[2].self_attn.rope = Backwards(16)
    return model


def with_scaled_keys() -> Any:
    """hunyuan scales keys after their turn: a turn of scaled components is not the scale of turned ones."""
    scaling = {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}
    return tiny("hunyuan_v1_dense", rope_scaling=scaling, use_qk_norm=True)


class Noted(nn.Module):
    """The first module of the model: where it turned last, the others read."""

    at = 0

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        Noted.at = offset
        return nn.RoPE(16)(x, offset=offset)


class Follower(nn.Module):
    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        return nn.RoPE(16)(x, offset=Noted.at)


def placed_by_the_first_cache() -> Any:
    """Right only while all caches are as far as the first."""
    model = tiny("llama")
    model.layers[0].self_attn.rope, model.layers[1].self_attn.rope = Noted(), Follower()
    return model


class TurnedValues(llama.Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        store, turn = cache.update_and_fetch, self.rope
        cache.update_and_fetch = lambda k, v: store(k, turn(v, offset=cache.offset))
        return super().__call__(x, mask, cache)


def with_turned_values() -> Any:
    model = tiny("llama")
    weights = model.layers[0].self_attn.parameters()
    model.layers[0].self_attn = TurnedValues(model.args)
    model.layers[0].self_attn.update(weights)
    return model


def without_keys() -> Any:
    model = tiny("llama")
    model.layers[0].self_attn.k_proj.weight *= 0
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny("deepseek_v3", **MLA), r"deepseek_v3: .*\(MLA: DeepseekV3Attention\)"),
        (lambda: tiny("minicpm3", **MINICPM3), r"minicpm3: .*\(MLA: Attention\)"),
        (lambda: tiny("gpt2", **GPT2), r"gpt2, layer 0: .*\(learned positions\?\)"),
        (
            lambda: tiny("llama", rope_scaling={"type": "dynamic", "factor": 2.0}),
            r"cannot be read \(DynamicNTKScalingRoPE\)",
        ),
        (with_own_rope, r"llama, layer 2: .*cannot be read \(Backwards\)"),
        (with_scaled_keys, r"hunyuan_v1_dense, layer 0: .*got keys or values that depend on"),
        (with_turned_values, r"llama, layer 0: .*got keys or values that depend on"),
        (placed_by_the_first_cache, r"llama, layer 1: .*got keys or values that depend on"),
        (without_keys, r"layer 0: .*which of 2 rotary embeddings"),
    ],
    ids=[
        "MLA",
        "MLA with whole keys",
        "learned",
        "dynamic NTK",
        "unknown class",
        "scaled",
        "values",
        "first",
        "no keys",
    ],
)
def test_what_cannot_be_read_is_refused_by_name(build: Any, message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        read_ropes(model, range(len(make_prompt_cache(model))))


def test_layers_without_a_global_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 1: expected one plain KVCache, got RotatingKVCache"):
        read_ropes(tiny("llama", layer_types=FULL_AND_SLIDING), [0, 1])
