"""One prefill for many jobs: what the model's attention saw of a prompt, kept on disk.

With prefill "full" nothing is evicted before the prompt ends, so its queries, keys and values depend on the model, the
tokens and the chunk size alone, and its scores on the policy besides, never on the budget. A sweep over policies x
budgets x seeds therefore runs the model over a prompt once. Whatever comes from here is bit for bit what the model
would have computed again.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from keyformer import KeyformerKVCache, Policy

log = logging.getLogger(__name__)
_NOTES = ("scales", "seconds")


class RecordedAttention(KVCache):
    """mlx-lm's own cache of one layer that also remembers the queries of each call, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[mx.array] = []
        self.scale = 0.0
        self.tells_all = True  # queries, keys and scale are all that this layer's scores come from

    def observe(
        self, queries: mx.array, keys: mx.array, *, scale: float, mask: Any, sinks: Any = None, soft_cap: Any = None
    ) -> list[mx.array]:
        """Called by `keyformer.attached` after each attention."""
        self.queries.append(queries)
        self.scale = scale
        logits_in_mask = isinstance(mask, mx.array) and mask.dtype != mx.bool_
        once = self.offset == sum(q.shape[2] for q in self.queries)
        assert self.keys is not None
        same_keys = keys.shape[1] == self.keys.shape[1]
        if sinks is not None or soft_cap is not None or logits_in_mask or not once or not same_keys:
            self.tells_all = False
        return []


@dataclass(frozen=True)
class Prompt:
    """A prompt as every layer's attention saw it: [1, heads, n, D] queries, keys and values, un-evicted, and each
    layer's scale.

    `seconds` is what the model took for it when it was computed.
    """

    key: str
    queries: list[mx.array]
    keys: list[mx.array]
    values: list[mx.array]
    scales: list[float]
    seconds: float


class PrefillStore:
    """Prompts and their scores in a folder of bounded size, the least recently used ones dropped first.

    Args:
        folder: made when something is stored.
        identity: names the model, its weights, dtype and back-end.
        step: tokens per chunk; part of the identity, since it changes the last bits.
        limit_bytes: 0 stores nothing.
    """

    def __init__(self, folder: Path, identity: str, step: int, limit_bytes: int) -> None:
        self.folder, self.identity, self.step, self.limit_bytes = folder, identity, step, limit_bytes

    def prompt(self, model: Any, tokens: list[int]) -> Prompt | None:
        """The stored prompt, or the model's work on it now (inside `keyformer.attached`).

        None for a model whose scores need more than queries, keys and values: attention sinks, capped logits, latents.
        """
        key = _digest(self.identity, self.step, tokens)
        loaded = self._load(f"{key}.safetensors", [f"{name}{i}" for name in "qkv" for i, _ in enumerate(model.layers)])
        if loaded is not None:
            arrays, about = loaded
            queries, keys, values = ([arrays[f"{name}{i}"] for i, _ in enumerate(model.layers)] for name in "qkv")
            return Prompt(key, queries, keys, values, about["scales"], about["seconds"])
        started = time.perf_counter()
        caches = [RecordedAttention() for _ in model.layers]
        for first in range(0, len(tokens), self.step):
            model(mx.array(tokens[first : first + self.step])[None], cache=caches)
            mx.eval([c.state[:2] for c in caches], [c.queries for c in caches])
            if not all(c.tells_all for c in caches):
                return None
        prompt = Prompt(
            key,
            [mx.concatenate(c.queries, axis=2) for c in caches],
            [c.keys_and_values()[0] for c in caches],
            [c.keys_and_values()[1] for c in caches],
            [c.scale for c in caches],
            time.perf_counter() - started,
        )
        named = zip("qkv", (prompt.queries, prompt.keys, prompt.values), strict=True)
        self._save(
            f"{key}.safetensors",
            {f"{name}{i}": a for name, arrays in named for i, a in enumerate(arrays)},
            {"scales": prompt.scales, "seconds": prompt.seconds},
        )
        return prompt

    def fill(self, caches: list[KeyformerKVCache], prompt: Prompt) -> None:
        """Give new caches the whole prompt and its scores, ready for `end_prefill()`."""
        policy = caches[0].policy
        if policy.attention != "query":
            for cache, keys, values in zip(caches, prompt.keys, prompt.values, strict=True):
                cache.set_prompt(keys, values)
            return
        name = f"{prompt.key}-{_digest(_scoring(policy), caches[0].score_bytes)}.safetensors"
        kinds = "sm" if policy.window else "s"
        loaded = self._load(name, [f"{kind}{i}" for kind in kinds for i, _ in enumerate(caches)])
        if loaded is not None:
            arrays, _ = loaded
            for i, cache in enumerate(caches):
                cache.set_prompt(prompt.keys[i], prompt.values[i], arrays[f"s{i}"], arrays.get(f"m{i}"))
            return
        n = prompt.keys[0].shape[2]
        for i, cache in enumerate(caches):
            cache.begin_prefill()
            for first in range(0, n, self.step):
                rows = slice(first, min(first + self.step, n))
                seen, _ = cache.update_and_fetch(prompt.keys[i][:, :, rows], prompt.values[i][:, :, rows])
                mask = cache.fit_mask("causal" if rows.stop - first > 1 else None, rows.stop - first)
                mx.eval(cache.observe(prompt.queries[i][:, :, rows], seen, scale=prompt.scales[i], mask=mask))
        scored = {f"s{i}": c.scores[..., :n] for i, c in enumerate(caches) if c.scores is not None}
        scored |= {f"m{i}": c.masses[:, :, :n] for i, c in enumerate(caches) if c.masses is not None}
        self._save(name, scored, {"scales": prompt.scales, "seconds": prompt.seconds})

    def _load(self, name: str, wanted: list[str]) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
        """Arrays and notes of a file that holds what is wanted; None, and no file, otherwise."""
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            loaded: Any = mx.load(str(path), return_metadata=True)
            arrays, metadata = loaded
            os.utime(path)
            about = json.loads(metadata["about"])
            if missing := [w for w in wanted if w not in arrays] + [w for w in _NOTES if w not in about]:
                raise KeyError(", ".join(missing[:3]))
            return arrays, about
        except (RuntimeError, OSError, KeyError, TypeError, ValueError) as error:
            log.warning("Stored prefill %s is unreadable (%s); computing it again.", path.name, error)
            path.unlink(missing_ok=True)
            return None

    def _save(self, name: str, arrays: dict[str, mx.array], about: dict[str, Any]) -> None:
        size = sum(a.nbytes for a in arrays.values())
        if size > self.limit_bytes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            handle, draft = tempfile.mkstemp(dir=self.folder, prefix=".draft-", suffix=".safetensors")
            os.close(handle)
            try:
                mx.save_safetensors(draft, arrays, {"about": json.dumps(about)})
                os.replace(draft, self.folder / name)
            finally:
                Path(draft).unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            log.warning("Could not store a prefill in %s (%s); going on without.", self.folder, error)

    def _make_room(self, size: int) -> None:
        """Drop the least recently used files until `size` more bytes fit."""
        files = []
        for path in self.folder.glob("*.safetensors"):
            try:
                files.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another job dropped it
                continue
        total = sum(s for _, s, _ in files)
        for _, bytes_, path in sorted(files):
            if total + size <= self.limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= bytes_


def _scoring(policy: Policy) -> dict[str, Any]:
    """The choices that a prompt's scores depend on."""
    choices = asdict(policy)
    names = ["attention", "window", "decay"]
    if policy.noise != "select":
        names += ["tau_init"]
    if policy.noise == "logit":
        names += ["noise", "distribution", "redraw", "seed"]
    return {name: choices[name] for name in names}


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]
