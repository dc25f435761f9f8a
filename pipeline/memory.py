"""How much memory a job takes, known before it runs: weights, the KV rows of a batch, and the longest prompt.

Computed from config.json, the weights' headers and the requests; nothing is loaded. It is an upper bound of
`mx.get_peak_memory` of the job: at most about twice that for jobs of any size, and three times where other jobs have
stored its prompts. Compared with jobs on the CPU and on an H200; Metal is taken to be like the latter, but for what its
fused attention can do. What Python itself takes is not in it.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from omegaconf import DictConfig

from keyformer import Policy
from keyformer.cache import default_score_bytes

from .errors import BadInput
from .load import DataFolder, answer_tokens, read_requests
from .models import ModelFolder
from .run import validate

_STEP = 256  # caches grow by so many rows
_FUSED = (64, 80, 128)  # head sizes whose attention Metal computes without storing its logits
_IN_FLIGHT = 16  # layers whose temporary arrays a GPU may hold at once, as the host runs ahead: 13 were seen on an H200
_TILE = 64  # queries whose logits the scores of a prompt take at once on the CPU
_FLOATS = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_SLACK = 1.1


@dataclass(frozen=True)
class Need:
    """Bytes a job takes at most. Prefill and decoding do not happen at once: `total` has the larger of the two."""

    model_bytes: int
    kv_bytes: int  # the rows of a whole batch and what decoding it takes beside
    prefill_bytes: int  # the longest prompt and what its attention and scores take, beside the rest of its batch
    total: int


@dataclass(frozen=True)
class _Shape:
    """A model's sizes, as its config.json has them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    itemsize: int  # bytes of a number in activations and the KV cache

    @property
    def row(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize * self.layers

    @property
    def queries(self) -> int:
        """Bytes of one token's queries in all layers."""
        return self.heads * self.head_dim * self.itemsize * self.layers

    def activations(self, tokens: int) -> int:
        """Bytes beside attention's logits that so many tokens take on their way through a layer."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return tokens * (8 * self.hidden + 4 * self.intermediate + 3 * qkv) * 4


def memory_need(cfg: DictConfig, model_folder: ModelFolder, data: DataFolder) -> Need:
    """What the job of `cfg` takes at most on a machine with `model_folder`'s back-end, in bytes.

    Raises BadInput for a model whose config.json does not say how many layers and heads it has, or for a budget that
    cannot work.
    """
    policy = validate(cfg)
    shape = _shape(model_folder)
    prompt, answer, rolling = _longest(data.path)
    step, batch = cfg.generate.prefill_step_size, min(cfg.generate.batch_size, data.requests)
    if rolling:  # a text without a prompt: fed token by token
        prompt, answer = 0, prompt
    tokens = prompt + answer
    kept = _kept(policy, cfg.budget, prompt, tokens)
    book = (shape.kv_heads * (12 + 4 * policy.window) * shape.layers) if policy.evicts else 0
    row = shape.row + book

    # A policy that scores a stored prompt keeps a view of it, so the prompt's keys stay with each sequence.
    stored = bool(cfg.generate.share_prefill_gb) and cfg.prefill == "full" and not rolling
    view = shape.row // 2 * prompt if stored and policy.attention == "query" else 0
    sequence = _rounded(kept) * row + view
    logits = batch * shape.vocab * 4 * 4
    attention = batch * shape.heads * kept * 4 * 3
    copies = 1 if rolling else 2  # the batch is joined from caches of its sequences, which stay beside it
    growing = shape.layers // 2 if model_folder.backend != "cpu" else 2  # layers that are copied while they grow
    growth = _rounded(kept) * row * batch * growing // shape.layers
    decode = copies * batch * sequence + logits + attention + growth + shape.activations(batch)

    chunked = cfg.prefill == "chunked"
    longest = min(prompt, kept + step) if chunked else prompt
    scratch = _attention_bytes(shape, model_folder.backend, min(step, prompt), longest, masked=chunked)
    scored = _score_bytes(policy, shape, longest, model_folder.backend)
    scratch = max(scratch, scored) + shape.activations(min(step, prompt))
    prefill = (batch - 1) * sequence + _rounded(longest) * row * (shape.layers + 2) // shape.layers
    prefill += max(scratch, sequence if policy.evicts else 0)
    if stored:
        whole = 2 * prompt * (shape.row + shape.queries)
        beside = _rounded(prompt) * row + prompt * (shape.row + shape.queries) + scratch
        prefill = max(prefill, (batch - 1) * sequence + max(whole, beside))

    model = _weights(model_folder)
    kv, prefill = int(decode * _SLACK), int(prefill * _SLACK)
    return Need(model, kv, prefill, model + max(kv, prefill))


def _rounded(rows: int) -> int:
    return -(-rows // _STEP) * _STEP


def _kept(policy: Policy, budget: float | int | None, prompt: int, tokens: int) -> int:
    """Rows per KV head that a sequence has while it decodes."""
    if not policy.evicts or budget is None or (isinstance(budget, float) and budget == 1.0):
        return tokens
    try:
        rows = policy.budget_rows(budget, prompt)[0] if isinstance(budget, float) else budget
    except ValueError as error:
        raise BadInput(str(error)) from error
    return min(rows + 1, tokens)


def _attention_bytes(shape: _Shape, backend: str, queries: int, rows: int, *, masked: bool) -> int:
    """The attention logits that a chunk of a prompt holds at once, where they are stored at all.

    masked: with a mask of its own, as evicted rows need, instead of a causal one.
    """
    one = shape.heads * queries * rows * max(4, shape.itemsize)
    if backend == "cpu":
        return one
    if backend == "metal":
        stored = shape.head_dim not in _FUSED
    else:  # cuDNN's attention
        stored = shape.itemsize > 2 or masked or shape.head_dim > 128
    return one * min(shape.layers, _IN_FLIGHT) if stored else 0


def _score_bytes(policy: Policy, shape: _Shape, rows: int, backend: str) -> int:
    """What scoring a prompt takes at once: float32 copies of one layer's keys, and logits in tiles of bounded size."""
    if not policy.evicts or policy.attention == "none":
        return 0
    keys = 3 * shape.kv_heads * rows * shape.head_dim * 4
    if policy.attention == "key" and backend != "cpu":  # all keys are queries, in tiles as large as allowed
        return keys + min(shape.heads * rows * rows * 4, default_score_bytes()) * 4 // 3
    one_query = shape.heads * rows * 4 * 5
    return keys + max(one_query, min(_TILE * one_query, 2 * default_score_bytes()))


@lru_cache
def _longest(data: Path) -> tuple[int, int, bool]:
    """Tokens of the longest prompt, of the longest answer, and whether texts are scored whole."""
    prompt = json.loads((data / "data.json").read_text(encoding="utf-8"))["prompt_tokens"]["max"]
    requests = read_requests(data / "requests.jsonl")
    # a continuation has at least a character per token, but for bytes that are tokens
    answers = [
        answer_tokens(r.gen_kwargs) if r.gen_kwargs is not None else len((r.continuation or "").encode())
        for r in requests
    ]
    return prompt, max(answers), any(r.type == "loglikelihood_rolling" for r in requests)


@lru_cache
def _weights(folder: ModelFolder) -> int:
    """Bytes of the weights in memory, as the number type they are computed with."""
    total = 0
    for path in sorted(folder.path.glob("model*.safetensors")):
        tensors: Any = mx.load(str(path))  # lazily: only the header is read
        for tensor in tensors.values():
            as_loaded = _FLOATS.get(folder.dtype) if mx.issubdtype(tensor.dtype, mx.floating) else None
            total += tensor.size * as_loaded.size if as_loaded else tensor.nbytes
    return total


@lru_cache
def _shape(folder: ModelFolder) -> _Shape:
    config = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    config |= config.get("text_config") or {}

    def size(*names: str) -> int:  # the first is the usual name
        return int(next(config[name] for name in names if config.get(name)))

    try:
        heads, hidden = size("num_attention_heads", "n_heads", "n_head"), size("hidden_size", "d_model", "n_embd")
        latent = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)
        itemsize = _FLOATS[folder.dtype].size if folder.dtype in _FLOATS else 2
        return _Shape(
            size("num_hidden_layers", "n_layers", "n_layer"),
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("head_dim") or latent or hidden // heads),
            hidden,
            int(config.get("intermediate_size") or 4 * hidden),
            int(config["vocab_size"]),
            4 if folder.backend == "cpu" else itemsize,
        )
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise BadInput(
            f"expected the sizes of a model (num_hidden_layers, num_attention_heads, hidden_size, vocab_size) in "
            f"{folder.path / 'config.json'}, got not all of them: add them, or take another model."
        ) from error
