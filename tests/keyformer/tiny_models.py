"""Tiny random models of mlx-lm's own classes, one for every way of attending there is; each runs in an instant.

`build(name)` gives one. A family is its module in mlx_lm.models and what differs from SIZES; keys that its arguments do
not know are dropped, as mlx-lm drops those of a config.json.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from small import randomize

VOCABULARY = 97

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_traditional": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}
KDA = {"kda_layers": [1, 3], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 3}
SLIDING = ["sliding_attention", "full_attention"]

# name -> (module of mlx_lm.models, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # attention through mlx-lm's function, one plain cache per layer
    "llama": ("llama", {}),
    "llama, rope llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama, rope yarn": ("llama", {"rope_scaling": YARN}),
    "llama, heads of 24": ("llama", {"head_dim": 24}),
    "llama, heads of 40": ("llama", {"head_dim": 40}),
    "llama, groups of 3": ("llama", {"num_attention_heads": 6}),
    "llama, groups of 5": ("llama", {"num_attention_heads": 10}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2, rope yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"head_dim": 20, "num_attention_heads": 6}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3, rope su": (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 6, "short_factor": [1.0] * 6},
            "original_max_position_embeddings": 32,
        },
    ),
    "phi": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "gemma": ("gemma", {}),
    "cohere": ("cohere", {}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "internlm2": ("internlm2", {"bias": False}),
    "stablelm": (
        "stablelm",
        {"num_key_value_heads": 4, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "rope_pct": 0.5},
    ),
    "hunyuan, shared projections": (
        "hunyuan",
        {
            "moe_topk": 1,
            "num_experts": 2,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
            "use_cla": True,
            "cla_share_factor": 2,
        },
    ),
    "gpt2": (
        "gpt2",
        {"n_ctx": 256, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 256}
        | {"layer_norm_epsilon": 1e-5, "num_key_value_heads": None},
    ),
    "gpt_neox, heads of 33": (
        "gpt_neox",
        {"hidden_size": 132, "num_key_value_heads": None, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    ),
    "openelm, other heads in every layer": (
        "openelm",
        {
            "num_transformer_layers": 2,
            "model_dim": 48,
            "ffn_dim_divisor": 8,
            "num_query_heads": [4, 6],
            "num_kv_heads": [2, 3],
            "ffn_multipliers": [1.0, 1.5],
        },
    ),
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 4},
    ),
    "nanbeige, two loops": ("nanbeige", {"num_loops": 2}),
    "mistral3": ("mistral3", {"text_config": SIZES | {"model_type": "llama"}}),
    "qwen2_vl": ("qwen2_vl", {"text_config": SIZES | {"model_type": "qwen2"}}),
    # sliding layers beside global ones
    "llama, sliding": ("llama", {"layer_types": SLIDING, "sliding_window": 6}),
    "ministral3": (
        "ministral3",
        {
            "layer_types": SLIDING,
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {"num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 12},
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": SIZES
            | {
                "model_type": "gemma3_text",
                "sliding_window": 6,
                "sliding_window_pattern": 2,
                "query_pre_attn_scalar": 12,
            }
        },
    ),
    "cohere2": (
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
    "llama4": (
        "llama4",
        {
            "text_config": SIZES
            | EXPERTS
            | {
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "attention_chunk_size": 8,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 64,
                "num_experts_per_tok": 1,
                "rope_scaling": None,
                "use_qk_norm": True,
                "floor_scale": 4,
            }
        },
    ),
    # attention sinks
    "gpt_oss": ("gpt_oss", EXPERTS | {"sliding_window": 6, "rope_scaling": YARN, "layer_types": SLIDING}),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        EXPERTS
        | {
            "hybrid_layer_pattern": [1, 0],
            "moe_layer_freq": [0, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": True,
            "sliding_window_size": 6,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 10000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 1,
            "v_head_dim": 8,
            "swa_head_dim": 12,
            "swa_v_head_dim": 8,
            "partial_rotary_factor": 0.34,
        },
    ),
    # latent attention: keys made anew for every head, half of the logits in the mask
    "deepseek_v2": (
        "deepseek_v2",
        MLA | EXPERTS | {"n_routed_experts": None, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "deepseek_v3": ("deepseek_v3", MLA | EXPERTS | {"n_routed_experts": None}),
    "minicpm3": (
        "minicpm3",
        MLA
        | {
            "dim_model_base": 16,
            "scale_depth": 1.4,
            "scale_emb": 1.0,
            "hidden_size": 48,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": [1.5] * 4,
                "short_factor": [1.0] * 4,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", MLA | EXPERTS | {"n_routed_experts": None}),
    "mistral4": (
        "mistral4",
        MLA
        | EXPERTS
        | {
            "first_k_dense_replace": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        MLA
        | {
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "ffn_hidden_size": 64,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "num_layers": 2,
            "routed_scaling_factor": 1.0,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
    ),
    "kimi_vl": (
        "kimi_vl",
        {"text_config": SIZES | MLA | EXPERTS | {"n_routed_experts": None, "model_type": "deepseek_v3"}},
    ),
    # attention of their own
    "gemma2": ("gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 12}),
    "gemma2, no groups": (
        "gemma2",
        {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 12, "num_key_value_heads": 4},
    ),
    "gear": (
        "gear",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv_mixer", *SLIDING],
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gear, no cap": ("gear", {"layer_types": SLIDING, "sliding_window": 6}),
    "plamo2": (
        "plamo2",
        {
            "hidden_size_per_head": 12,
            "mamba_d_state": 8,
            "mamba_num_heads": 4,
            "mamba_step": 2,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 8,
        },
    ),
    # state-space and convolution layers beside attention
    "jamba": (
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 3,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_d_conv": 3,
            "mamba_d_head": 8,
            "mamba_d_ssm": 32,
            "mamba_d_state": 8,
            "mamba_n_heads": 4,
        },
    ),
    "baichuan_m1": (
        "baichuan_m1",
        {"sliding_window": 6, "sliding_window_layers": [0], "conv_window": 2, "tie_word_embeddings": False},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_proj_bias": False,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
            "mlp_bias": False,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "mamba_proj_bias": False,
            "ssm_state_size": 8,
            "conv_kernel": 3,
            "n_groups": 1,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": ["M", "*", "-", "*"],
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        EXPERTS | LINEAR | {"decoder_sparse_step": 1, "mlp_only_layers": [0, 1], "partial_rotary_factor": 0.5},
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            "text_config": SIZES
            | LINEAR
            | {
                "model_type": "qwen3_5_text",
                "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            }
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 48,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 64,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        MLA
        | EXPERTS
        | {
            "num_hidden_layers": 3,
            "linear_attn_config": KDA,
            "model_max_length": 4096,
            "first_k_dense_replace": 3,
            "head_dim": 20,
        },
    ),
    # several layers read one layer's rows
    "gemma3n": (
        "gemma3n",
        {
            "text_config": SIZES
            | {
                "model_type": "gemma3n_text",
                "num_hidden_layers": 6,
                "intermediate_size": [64] * 6,
                "num_kv_shared_layers": 4,
                "vocab_size_per_layer_input": VOCABULARY,
                "sliding_window": 6,
                "rope_local_base_freq": 10000.0,
                "final_logit_softcapping": 30.0,
                "layer_types": SLIDING * 3,
                "activation_sparsity_pattern": [0.0] * 6,
                "hidden_size_per_layer_input": 8,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 4,
            }
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 8,
            "sliding_window": 6,
            "layer_types": SLIDING * 3,
        },
    ),
    "gemma4_text, none shared": (
        "gemma4_text",
        {
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 6,
            "layer_types": SLIDING,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "iquestloopcoder": ("iquestloopcoder", {"loop_window_size": 6}),
}

# nothing in them can be replaced
WITHOUT_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": (
        "mamba",
        {
            "state_size": 8,
            "conv_kernel": 3,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
        },
    ),
    "rwkv7": (
        "rwkv7",
        {
            "norm_eps": 1e-5,
            "head_dim": 12,
            "a_low_rank_dim": 4,
            "v_low_rank_dim": 4,
            "gate_low_rank_dim": 4,
            "decay_low_rank_dim": 4,
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "conv1d_width": 3,
            "logits_soft_cap": 30.0,
            "num_key_value_heads": 1,
            "attention_window_size": 6,
            "block_types": ["recurrent", "attention"],
        },
    ),
}

# rows of their global attention cannot be evicted
UNEVICTABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "afm7": (
        "afm7",
        {"hidden_dim": 48, "num_layers": 3, "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        MLA | EXPERTS | {"n_routed_experts": None, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4},
    ),
    "minimax_m3_vl": (
        "minimax_m3_vl",
        {
            "text_config": SIZES
            | EXPERTS
            | {
                "model_type": "minimax_m3",
                "mlp_layer_types": ["dense", "dense"],
                "layer_types": ["full_attention", "sparse"],
                "dense_intermediate_size": 64,
                "index_n_heads": 2,
                "index_head_dim": 8,
                "index_block_size": 4,
                "index_topk_blocks": 2,
            }
        },
    ),
    "phi3small": (
        "phi3small",
        {
            "dense_attention_every_n_layers": 2,
            "ff_intermediate_size": 64,
            "gegelu_limit": 20.0,
            "layer_norm_epsilon": 1e-5,
            "blocksparse_block_size": 32,
            "blocksparse_num_local_blocks": 1,
        },
    ),
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny float32 model of that family, its weights random, sinks included."""
    module_name, differs = (FAMILIES | WITHOUT_ROWS | UNEVICTABLE)[name]
    module = import_module(f"mlx_lm.models.{module_name}")
    arguments = module.ModelArgs.from_dict(SIZES | {"model_type": module_name} | differs | changes)
    model = randomize(module.Model(arguments), seed=seed)
    rng = np.random.default_rng(seed)
    sinks = [
        (path, mx.array(rng.normal(size=weights.shape).astype(np.float32)))
        for path, weights in tree_flatten(model.parameters())
        if path.endswith(("sinks", "attention_sink_bias"))
    ]
    model.update(tree_unflatten(sinks))
    model.eval()
    return model
