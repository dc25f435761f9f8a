"""What several test files share: a tiny random model, made here, and the real default model, converted once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.models import ModelFolder, resolve

PROJECT = Path(__file__).resolve().parent.parent
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
TINY_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TINY_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY_TEXT = """
When a description of an arithmetic operator below uses the phrase "the numeric arguments are converted to a common
type", this means that the operator implementation for built-in types works as follows: if either argument is a complex
number, the other is converted to complex; otherwise, if either argument is a floating-point number, the other is
converted to floating point; otherwise, both must be integers and no conversion is necessary. The capital of France is
Paris and Alice lives in the city of Rome. Question: where does Alice live? Answer: in the city of Rome. Some additional
rules apply for certain operators, and extensions must define their own conversion behaviour. Once upon a time there was
a garden in which the names of things were kept: for each name the value, and for each value the place where it was
found. The code of the blue door is 4821, the code of the green door is 7365.
"""


def write_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a whole mlx-lm folder of a random llama (2 layers, 4 heads on 2 KV heads of 16, context 4096)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that any text at all can be encoded
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=TINY_SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TINY_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    end, stop = TINY_SPECIALS[0], TINY_SPECIALS[2]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": stop,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": TINY_CONFIG["max_position_embeddings"],
        "chat_template": TINY_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = TINY_CONFIG | {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": tokenizer.token_to_id(end),
        "eos_token_id": tokenizer.token_to_id(stop),
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    parameters = tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters())
    # Wide enough that greedy answers depend on the whole context (a narrow one repeats a token whatever came before).
    wide = {name: random.normal(0, 2 * p.shape[-1] ** -0.5, p.shape) for name, p in parameters if p.ndim == 2}
    weights = {name: mx.array(wide.get(name, np.ones(p.shape)), mx.float32) for name, p in parameters}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


@pytest.fixture(scope="session", autouse=True)
def own_gpu_lock(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests that run side by side, and a real sweep beside them, do not wait for each other."""
    os.environ["KEYFORMER_GPU_LOCK"] = str(tmp_path_factory.mktemp("gpu") / "gpu.lock")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete mlx-lm model folder that loads in milliseconds. Shared by all tests: copy it before changing it."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    """The embedded default model, real and trained; converted once into the checkout's own cache (0.5 GB)."""
    return resolve(OmegaConf.load(PROJECT / "conf" / "model" / "smollm2.yaml"), PROJECT / "outputs" / "models")
