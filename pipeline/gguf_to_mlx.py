"""One GGUF file (llama architecture, SmolLM tokenizer) to an mlx-lm folder with float32 weights.

It exists because PyPI carries a small trained model as GGUF and none as safetensors. What it writes is byte for byte
the same on every machine: only numpy computes, and tensors are stored in sorted order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.errors import BadInput

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL = 3  # the GGUF token type of special tokens
_SPECIALS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def convert(source: Path, folder: Path) -> None:
    """Write `folder` (it exists) as a complete mlx-lm model folder from the GGUF file `source`.

    Raises BadInput for an architecture or a tokenizer that this conversion has not been proved right for.
    """
    reader = gguf.GGUFReader(source)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    kind = field("general.architecture"), field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if kind != ("llama", "gpt2", "smollm"):
        raise BadInput(
            f"expected a GGUF file of a llama model with SmolLM's tokenizer in {source.name}, got {' / '.join(kind)}. "
            "Convert other models with mlx-lm itself (mlx_lm.convert) and use model=local."
        )
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            weight = unpermute(weight, heads)
        elif ".attn_k." in tensor.name:
            weight = unpermute(weight, kv_heads)
        weights[_weight_name(tensor.name)] = np.ascontiguousarray(weight)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it unreadable to others

    special = {key: field(f"tokenizer.ggml.{name}_token_id") for key, name in _SPECIALS.items()}
    ids = {f"{key}_token_id": special[key] for key in ("bos", "eos", "pad")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "num_hidden_layers": field("llama.block_count"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": field("llama.rope.dimension_count"),
        # Stored as float32: 9.99999975e-06 is 1e-05.
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": field("llama.vocab_size"),
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": float(field("llama.rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "float32",
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            # Not GPT2Tokenizer: transformers 5 would silently replace the pre-tokenizer by one without the digits rule.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{key}_token": tokens[i] for key, i in special.items()},
            "clean_up_tokenization_spaces": False,
            "model_max_length": field("llama.context_length"),
            "chat_template": field("tokenizer.chat_template"),
        },
    )


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of a query or key projection: (heads * head_dim, hidden) to the same.

    llama.cpp rotates neighbouring pairs of rows, so its files hold each head as (head_dim / 2, 2); MLX rotates the two
    halves of a head, (2, head_dim / 2), as the model was trained.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _weight_name(name: str) -> str:
    """mlx-lm's name of a GGUF tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    return f"{_TOP[parts[0]]}.weight"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
