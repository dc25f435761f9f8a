"""The Keyformer KV cache for mlx-lm: a fixed number of rows per KV head, whatever the length of the text.

Rows live in slots. A prompt is stored in temporal order; while decoding, a new row takes the slot that the last
eviction freed, so a step writes one row and the order of rows no longer matters (attention has none; each row keeps
its true position and rotation). Everything that ranks rows is float32; keys and values keep the model's dtype, bit
for bit.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from . import noise
from .eviction import evict_row, keep_rows, walk
from .policies import POLICIES, Policy, make_policy
from .ranking import rank_rows
from .scores import LogitNoise, Mask, attention_mass

_STEP = 256
_UNBOUNDED = 2**31 - 2


class KeyformerKVCache(_BaseCache):
    """The KV cache of one layer for one sequence.

    mlx-lm calls `make_mask`, reads `offset`, calls `update_and_fetch`; with a policy that ranks by real queries, the
    hook of `keyformer.attached` then calls `observe`. Rows are evicted after that call's attention, never before.

    The prompt: with prefill "full" every prompt row is kept until the prompt ends, then one selection keeps `budget` of
    them; with "chunked" a selection follows every chunk, so at most budget + chunk rows exist. The prompt ends with
    `end_prefill()`. Where nobody will call it (no `begin_prefill()` came before), the first one-token call after a
    longer one counts as the end; a prompt whose last chunk is a single token then ends one token early.

    Args:
        policy: what ranks and protects rows.
        budget: rows kept per KV head once the prompt has ended, an integer. Ignored by policy "full".
        layer: index of the layer, a coordinate of the noise.
        prefill: "full" or "chunked".
        score_bytes: bound on the float32 logits of one tile of the score pass.

    Raises:
        ValueError: a budget that protects everything, an unknown prefill.
    """

    def __init__(
        self,
        policy: Policy,
        budget: int | None,
        layer: int = 0,
        prefill: str = "full",
        score_bytes: int = 1 << 28,
    ) -> None:
        if prefill not in ("full", "chunked"):
            raise ValueError(f"prefill: expected 'full' or 'chunked', got {prefill!r}.")
        if policy.evicts:
            if budget is None:
                raise ValueError(f"budget: policy {policy.name} needs a number of rows, got None.")
            policy.check_budget(budget)
        self.policy = policy
        self.layer = layer
        self.prefill = prefill
        self.score_bytes = score_bytes
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.scores: mx.array | None = None  # [B, Hkv, capacity] float32; -inf: a NaN or infinite key, ranked last
        self.positions: mx.array | None = None  # [B, Hkv, capacity] int32
        self.masses: mx.array | None = None  # [B, Hkv, capacity, window] float32, one column per counted query
        self._budgets = [budget if policy.evicts and budget is not None else _UNBOUNDED]
        self._rows = [0]  # slots in use, the freed one included
        self._offsets = [0]
        self._steps = [0]  # decoded tokens, what the temperature counts
        self._free: mx.array | None = None  # [B, Hkv, 1] int32, the slot the last eviction freed
        self._in_prompt = True
        self._announced = False
        self._prior = 0  # rows stored before the open prompt
        self._unseen = 0  # new rows whose attention nobody has shown us yet
        self._touched = False  # something was scored or evicted

    # -- what mlx-lm reads --------------------------------------------------------------------------------------------

    @property
    def offset(self) -> Any:
        """Tokens seen, what RoPE needs."""
        return self._offsets[0]

    @property
    def budget(self) -> int | None:
        """Rows kept per KV head; None for policy "full"."""
        return self._budgets[0] if self.policy.evicts else None

    def size(self) -> int:
        """Rows stored per KV head."""
        return self._stored(0)

    def slots(self) -> list[int]:
        """Rows of memory in use by each sequence, per KV head, a freed one included: what attention reads."""
        return list(self._rows)

    def sizes(self) -> list[int]:
        """Rows stored by each sequence."""
        return [self._stored(b) for b in range(len(self._rows))]

    def _stored(self, b: int) -> int:
        return min(self._rows[b], self._budgets[b]) if self._free is not None else self._rows[b]

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes allocated, bookkeeping included."""
        return sum(a.nbytes for a in (*self._arrays(), self._free) if a is not None)

    def _arrays(self) -> tuple[mx.array | None, ...]:
        """Everything stored per row; rows are axis 2 of each."""
        return self.keys, self.values, self.scores, self.positions, self.masses

    def _set_arrays(self, arrays: Any) -> None:
        self.keys, self.values, self.scores, self.positions, self.masses = arrays

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored token: its keys and values in every KV head, without bookkeeping."""
        if self.keys is None or self.values is None:
            return 0
        return sum(a.shape[1] * a.shape[3] * a.dtype.size for a in (self.keys, self.values))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None:
            raise ValueError(
                "KeyformerKVCache serves global attention only, got a sliding window of "
                f"{window_size}; keep mlx-lm's RotatingKVCache for that layer."
            )
        # Old rows come first in any order and new rows last, so "causal" aligned at the bottom right is exact.
        return create_attention_mask(N, offset=self.size(), return_array=return_array, window_size=None)

    def is_trimmable(self) -> bool:
        return not self._touched

    def trim(self, n: int) -> int:
        """Forget the last n tokens, only while nothing was scored or evicted; returns how many were forgotten."""
        if not self.is_trimmable():
            return 0
        n = min(self._offsets[0], n)
        self._offsets[0] -= n
        self._rows[0] -= n
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        raise ValueError("KeyformerKVCache keeps the model's dtype and cannot be quantized; leave kv_bits unset.")

    # -- one call of the model ----------------------------------------------------------------------------------------

    def begin_prefill(self) -> None:
        """Say that `end_prefill()` will be called, so that one-token chunks before it still belong to the prompt."""
        if not self._in_prompt:
            self._open_prompt()
        self._announced = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [B, Hkv, S, D] and return all rows this call attends to: those kept so far, then the new ones.

        Raises:
            ValueError: more than one sequence.
            RuntimeError: the policy ranks by queries and nobody showed the queries of the call before.
        """
        B, _, S, _ = keys.shape
        batch = len(self._rows)
        if batch != B:
            raise ValueError(
                f"KeyformerKVCache: expected a batch of {batch}, got {B}; "
                "use KeyformerKVCache.merge for several sequences."
            )
        if self._unseen:
            raise RuntimeError(
                f"Policy {self.policy.name} ranks rows by the model's queries, which no one reported: run the model "
                "inside `with keyformer.attached(model)`, or take a policy that needs none (window, keyformer_proxy)."
            )
        if S == 0:
            if self.keys is None or self.values is None:
                return keys, values
            return self.keys[:, :, : max(self._rows)], self.values[:, :, : max(self._rows)]
        if S > 1 and not self._in_prompt:
            self._open_prompt()
        elif S == 1 and self._in_prompt and self._rows[0] and not self._announced:
            self.end_prefill()
        if self._in_prompt:
            self._append(keys, values)
        else:
            self._write(keys, values)
        n = max(self._rows)
        assert self.keys is not None and self.values is not None
        fetched = self.keys[..., :n, :], self.values[..., :n, :]
        if self.policy.attention == "query":
            self._unseen = S
            return fetched
        pending = self._after_attention(keys, None)
        # the bookkeeping is evaluated with the attention, so that no graph grows from token to token
        k, v = mx.depends(list(fetched), pending) if pending else fetched
        return k, v

    def observe(self, queries: mx.array, keys: mx.array, *, scale: float, mask: Mask) -> list[mx.array]:
        """Score the rows by the attention that has just been computed, then evict.

        Args:
            queries: [B, Hq, S, D], rotated.
            keys: [B, Hkv, n, D], what `update_and_fetch` returned.
            scale, mask: of that attention call.

        Returns:
            Arrays to evaluate together with the attention's output.
        """
        if not self._unseen:
            return []
        self._unseen = 0
        return self._after_attention(keys, (queries, scale, mask))

    def end_prefill(self) -> None:
        """The prompt has ended: select the rows to keep. Calls that follow decode. Calling it again does nothing."""
        if not self._in_prompt:
            return
        if self.keys is not None:
            self._select()  # still part of the prompt: the temperature is that of step 0
        self._in_prompt = False
        self._announced = False
        self._prior = self._rows[0]

    def set_prompt(
        self, keys: mx.array, values: mx.array, scores: mx.array | None = None, masses: mx.array | None = None
    ) -> None:
        """Start from a prompt that was computed elsewhere and not evicted; `end_prefill()` then selects as always.

        Args:
            keys, values: [1, Hkv, n, D], rows in temporal order from position 0.
            scores: [1, Hkv, n] float32, as a cache of the same policy accumulated them; None: nothing scored yet.
            masses: [1, Hkv, n, window] float32, for a policy with a window.

        Raises:
            ValueError: this cache is not empty, or evicts inside the prompt ("chunked").
        """
        if self.keys is not None or self.prefill == "chunked":
            raise ValueError("set_prompt: expected an empty cache with prefill 'full'.")
        n = keys.shape[2]
        self._append(keys, values)
        assert self.keys is not None
        if scores is not None:
            self.scores, self._touched = scores, True
            self.keys, self.values = keys, values
            self.positions = mx.broadcast_to(mx.arange(n, dtype=mx.int32), scores.shape)
            self.masses = masses

    # -- storage ------------------------------------------------------------------------------------------------------

    def _reserve(self, like_k: mx.array, like_v: mx.array, rows: int) -> None:
        """Make room for `rows` rows, in steps of 256; once evicting, never more than budget + 1."""
        have = 0 if self.keys is None else self.keys.shape[2]
        if rows <= have:
            return
        capacity = -(-rows // _STEP) * _STEP
        if not self._in_prompt:
            capacity = max(rows, min(capacity, max(self._budgets) + 1))
        B, H = like_k.shape[:2]
        new = (
            mx.zeros((B, H, capacity - have, like_k.shape[3]), like_k.dtype),
            mx.zeros((B, H, capacity - have, like_v.shape[3]), like_v.dtype),
            mx.zeros((B, H, capacity - have), mx.float32),
            mx.zeros((B, H, capacity - have), mx.int32),
            mx.zeros((B, H, capacity - have, self.policy.window), mx.float32) if self.policy.window else None,
        )
        old = self._arrays()
        self._set_arrays(
            a if o is None or a is None else mx.concatenate([o, a], axis=2) for o, a in zip(old, new, strict=True)
        )

    def _append(self, keys: mx.array, values: mx.array) -> None:
        """Prompt rows: behind the stored ones, in order."""
        S, first = keys.shape[2], self._rows[0]
        last = first + S
        self._reserve(keys, values, last)
        assert (
            self.keys is not None and self.values is not None and self.scores is not None and self.positions is not None
        )
        self.keys[..., first:last, :] = keys
        self.values[..., first:last, :] = values
        self.scores[..., first:last] = _starting_score(keys)
        self.positions[..., first:last] = mx.arange(self._offsets[0], self._offsets[0] + S, dtype=mx.int32)
        self._rows[0] = last
        self._offsets[0] += S

    def _write(self, keys: mx.array, values: mx.array) -> None:
        """A decoded token's row: into the freed slot, or behind the stored rows of a sequence still below budget."""
        appends = [r <= m for r, m in zip(self._rows, self._budgets, strict=True)]
        self._reserve(keys, values, max(r + a for r, a in zip(self._rows, appends, strict=True)))
        assert (
            self.keys is not None and self.values is not None and self.scores is not None and self.positions is not None
        )
        position = mx.array(self._offsets, mx.int32)[:, None, None]
        if all(appends) and len(set(self._rows)) == 1:
            at = self._rows[0]
            self.keys[..., at : at + 1, :] = keys
            self.values[..., at : at + 1, :] = values
            self.scores[..., at : at + 1] = _starting_score(keys)
            self.positions[..., at : at + 1] = mx.broadcast_to(position, (*keys.shape[:2], 1))
            slot = mx.full((*keys.shape[:2], 1), at, mx.int32)
        else:
            behind = mx.array(self._rows, mx.int32)[:, None, None]
            slot = mx.broadcast_to(behind, (*keys.shape[:2], 1))
            if self._free is not None:
                slot = mx.where(mx.array(appends)[:, None, None], slot, self._free)
            self.keys = mx.put_along_axis(self.keys, slot[..., None], keys, axis=2)
            self.values = mx.put_along_axis(self.values, slot[..., None], values, axis=2)
            self.scores = mx.put_along_axis(self.scores, slot, _starting_score(keys), axis=2)
            self.positions = mx.put_along_axis(self.positions, slot, mx.broadcast_to(position, slot.shape), axis=2)
        if self.masses is not None:
            self.masses = mx.where(mx.arange(self.masses.shape[2])[:, None] == slot[..., None], 0.0, self.masses)
        self._free = slot
        self._rows = [r + a for r, a in zip(self._rows, appends, strict=True)]
        self._offsets = [o + 1 for o in self._offsets]
        self._steps = [s + 1 for s in self._steps]

    def _gather(self, index: mx.array) -> None:
        """Keep the rows `index` [1, Hkv, m], in that order; the allocation shrinks to them."""
        self._set_arrays(None if a is None else _take(a, index) for a in self._arrays())
        self._rows = [index.shape[2]]
        self._free = None

    def _open_prompt(self) -> None:
        """More prompt after decoding: back to temporal order, the freed slot dropped."""
        if self._free is not None:
            assert self.positions is not None
            self._gather(self._temporal())
        self._in_prompt = True
        self._prior = self._rows[0]

    def _temporal(self) -> mx.array:
        """[1, Hkv, stored] indices of the stored rows by position."""
        assert self.positions is not None
        n = self._rows[0]
        positions = self.positions[..., :n]
        if self._free is not None and n > self._budgets[0]:
            positions = mx.put_along_axis(positions, self._free, mx.array(_UNBOUNDED, mx.int32), axis=2)
        return mx.argsort(positions, axis=-1)[..., : self._stored(0)]

    # -- scores and eviction ------------------------------------------------------------------------------------------

    def _after_attention(self, keys: mx.array, asked: tuple[mx.array, float, Mask] | None) -> list[mx.array]:
        """Scores, then eviction, for the rows just added. `asked`: queries, scale and mask of a real-query policy."""
        if asked is not None:
            self._touched = True
            self._add_query_mass(keys, *asked)
        if not self.policy.evicts:
            pass  # the bookkeeping is written all the same, and must be evaluated with the attention
        elif not self._in_prompt:
            if self.policy.attention == "key":
                self._touched = True
                self._add_key_mass(keys)
            self._evict()
        elif self.prefill == "chunked":
            self._select()
            self._prior = self._rows[0]
        return [a for a in (*self._arrays()[2:], self._free) if a is not None]

    def _stored_mask(self, n: int) -> mx.array:
        """[B, 1, n] boolean: slots in use."""
        return mx.arange(n, dtype=mx.int32) < mx.array(self._rows, mx.int32)[:, None, None]

    def _tau(self) -> mx.array | float:
        p = self.policy
        if p.attention == "key":
            steps = [o - 1 for o in self._offsets]
        else:
            steps = [0] * len(self._steps) if self._in_prompt else self._steps
        taus = [noise.temperature(s, p.tau_init, p.tau_end, p.anneal_steps) for s in steps]
        return taus[0] if len(set(taus)) == 1 else mx.array(taus, mx.float32)[:, None, None, None]

    def _add_query_mass(self, keys: mx.array, queries: mx.array, scale: float, mask: Mask) -> None:
        assert self.scores is not None and self.positions is not None
        p = self.policy
        S, n = queries.shape[2], max(self._rows)
        if 0 < p.window < S:
            # only the last queries count; they keep their place at the bottom right of a causal mask
            queries = queries[:, :, S - p.window :]
            mask = mask[..., S - p.window :, :] if isinstance(mask, mx.array) and mask.shape[-2] == S else mask
            S = p.window
        usable = (self.scores[..., :n] != -mx.inf) & self._stored_mask(n)
        logit_noise = None
        if p.noise == "logit":
            asking = mx.array([list(range(o - S, o)) for o in self._offsets], mx.int32) if p.redraw else None
            logit_noise = LogitNoise(p.seed, self.layer, self.positions[..., :n], asking, p.distribution)
        mass = attention_mass(
            queries,
            keys,
            scale,
            mask,
            usable=usable,
            noise=logit_noise,
            tau=1.0 if p.noise == "select" else self._tau(),
            per_query=bool(p.window),
            tile_bytes=self.score_bytes,
        )
        if p.window:
            assert self.masses is not None
            mass = mx.pad(mass.swapaxes(2, 3), [(0, 0), (0, 0), (0, self.masses.shape[2] - n), (0, 0)])
            self.masses = mx.concatenate([self.masses[..., S:], mass], axis=3)
            self.scores = mx.where(self.scores == -mx.inf, -mx.inf, self.masses.sum(axis=3))
        elif n == self.scores.shape[2]:
            self.scores = self.scores + mass
        else:
            self.scores[..., :n] = self.scores[..., :n] + mass

    def _add_key_mass(self, key: mx.array) -> None:
        """Decoding with the key as query: the new key [B, Hkv, 1, D] scores the rows stored before it."""
        assert self.keys is not None and self.scores is not None and self._free is not None
        n = max(self._rows)
        scores = self.scores[..., :n]
        usable = (scores != -mx.inf) & self._stored_mask(n) & (mx.arange(n, dtype=mx.int32) != self._free)
        mass = attention_mass(key, self.keys[..., :n, :], key.shape[3] ** -0.5, usable=usable)
        if self._offsets == [1]:
            mass = mx.ones_like(mass)  # the very first row of all starts with 1
        self.scores[..., :n] = scores + mass

    def _rank(self, n: int) -> mx.array:
        """[B, Hkv, n] float32, what the decision compares."""
        assert self.scores is not None and self.positions is not None and self.keys is not None
        tau = self._tau()
        return rank_rows(
            self.policy,
            self.layer,
            self.scores[..., :n],
            self.positions[..., :n],
            self.keys[..., :n, :],
            self._stored_mask(n),
            mx.array(self._offsets, mx.int32)[:, None, None],
            tau[..., 0] if isinstance(tau, mx.array) else tau,
        )

    def _frozen_noise(self, positions: mx.array) -> mx.array:
        heads = mx.arange(positions.shape[1])[:, None]
        return noise.draw(self.policy.distribution, self.policy.seed, self.layer, heads, positions)

    def _evict(self) -> None:
        """After a decode step: choose the slot each full sequence frees."""
        if all(r <= m for r, m in zip(self._rows, self._budgets, strict=True)):
            return
        assert self.positions is not None
        self._touched = True
        n = max(self._rows)
        recent = [self.policy.recent_rows(m) if m < _UNBOUNDED else 0 for m in self._budgets]
        self._free = evict_row(
            self._rank(n),
            self.positions[..., :n],
            self._stored_mask(n),
            mx.array(self._offsets, mx.int32)[:, None, None],
            self.policy.n_sink,
            mx.array(recent, mx.int32)[:, None, None],
        )

    def _select(self) -> None:
        """In or after the prompt: one selection down to the budget (with "key" attention, the walk over new rows)."""
        n, budget = self._rows[0], self._budgets[0]
        p = self.policy
        if not p.evicts or (n <= budget and p.attention != "key"):
            return
        assert self.keys is not None and self.scores is not None and self.positions is not None
        self._touched = True
        recent = p.recent_rows(budget)
        if p.attention == "key":
            first = self._offsets[0] - (n - self._prior)  # tokens inserted before the first new row
            index, scores = walk(
                self.keys[..., : self._prior, :],
                self.keys[..., self._prior : n, :],
                self.scores[..., :n],
                budget,
                p.n_sink,
                recent,
                self._frozen_noise(self.positions[..., :n]) if p.noise == "select" else None,
                [noise.temperature(t, p.tau_init, p.tau_end, p.anneal_steps) for t in range(first, self._offsets[0])],
            )
            if n > budget:
                self._gather(index)
            self.scores[..., : index.shape[2]] = scores
        else:
            self._gather(keep_rows(self._rank(n), self.positions[..., :n], self._offsets[0], budget, p.n_sink, recent))

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Everything, rows in temporal order: keys, values, scores, positions, masses and the settings as JSON."""
        arrays = self._arrays()
        if self.keys is not None:
            index = None if self._free is None else self._temporal()
            n = self._rows[0]
            arrays = tuple(None if a is None else a[:, :, :n] if index is None else _take(a, index) for a in arrays)
        settings = {
            "policy": {"name": self.policy.name, **asdict(self.policy)},
            "budget": self.budget,
            "layer": self.layer,
            "prefill": self.prefill,
            "score_bytes": self.score_bytes,
            "offset": self._offsets[0],
            "steps": self._steps[0],
            "in_prompt": self._in_prompt,
            "announced": self._announced,
            "prior": self._prior,
            "touched": self._touched,
        }
        return (*arrays, json.dumps(settings))

    @state.setter
    def state(self, v: Any) -> None:
        *arrays, text = v
        s = json.loads(text)
        name, choices = s["policy"].pop("name"), s["policy"]
        policy = make_policy(name, **choices) if name in POLICIES else Policy(**choices)
        KeyformerKVCache.__init__(self, policy, s["budget"], s["layer"], s["prefill"], s["score_bytes"])
        self._set_arrays(arrays)
        self._rows = [0 if self.keys is None else self.keys.shape[2]]
        self._offsets, self._steps = [s["offset"]], [s["steps"]]
        self._in_prompt, self._announced, self._prior = s["in_prompt"], s["announced"], s["prior"]
        self._touched = s["touched"]

    # -- several sequences --------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: list[KeyformerKVCache]) -> BatchKeyformerKVCache:
        """One cache for several sequences whose prompts have ended; they are decoded together, a token each per step.

        Raises:
            ValueError: an open or empty prompt, or caches that differ in policy or layer.
        """
        return BatchKeyformerKVCache(caches)


class BatchKeyformerKVCache(KeyformerKVCache):
    """The KV cache of one layer for sequences decoded together; budgets, lengths and positions may differ.

    Row b uses slots 0.._rows[b]-1; a mask hides the rest while some sequence holds fewer rows than the longest.
    """

    def __init__(self, caches: list[KeyformerKVCache]) -> None:
        first = caches[0]
        if any(c.policy != first.policy or c.layer != first.layer or len(c._rows) != 1 for c in caches):
            raise ValueError("merge: expected single sequences with one policy and layer, got different ones.")
        if any(c._in_prompt or c.keys is None for c in caches):
            raise ValueError(
                "merge: expected prompts that have ended, got an open or empty one; call end_prefill() first."
            )
        super().__init__(first.policy, first.budget, first.layer, first.prefill, first.score_bytes)
        parts = [c.state[:5] for c in caches]
        self._budgets = [c._budgets[0] for c in caches]
        self._rows = [p[0].shape[2] for p in parts]
        self._offsets = [c._offsets[0] for c in caches]
        self._steps = [c._steps[0] for c in caches]
        self._in_prompt = False
        self._touched = True  # a batch cannot be trimmed
        n = max(self._rows)

        def stack(arrays: tuple[mx.array | None, ...]) -> mx.array | None:
            padded = [
                mx.pad(a, [(0, 0), (0, 0), (0, n - a.shape[2]), (0, 0)][: a.ndim]) for a in arrays if a is not None
            ]
            return mx.concatenate(padded) if padded else None

        self._set_arrays(stack(p) for p in zip(*parts, strict=True))

    @property
    def offset(self) -> mx.array:
        """[B] int32, tokens seen by each sequence."""
        return mx.array(self._offsets, mx.int32)

    def size(self) -> int:
        """Rows stored by the longest sequence."""
        return max(self.sizes())

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if N != 1 or window_size is not None:
            raise ValueError(
                f"BatchKeyformerKVCache decodes one token at a time, got {N} tokens, window {window_size}."
            )
        # the rows as they will be after this call's write
        rows = [r + (r <= m) for r, m in zip(self._rows, self._budgets, strict=True)]
        n = max(rows)
        if min(rows) == n:
            return None
        return (mx.arange(n, dtype=mx.int32) < mx.array(rows, mx.int32)[:, None])[:, None, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.shape[2] != 1:
            raise ValueError(f"BatchKeyformerKVCache decodes one token at a time, got {keys.shape[2]} tokens.")
        return super().update_and_fetch(keys, values)

    def filter(self, keep: list[int]) -> None:
        """Go on with the sequences `keep` only, in that order."""
        index = mx.array(keep, mx.int32)
        self._set_arrays(None if a is None else a[index] for a in self._arrays())
        self._free = None if self._free is None else self._free[index]
        for name in ("_budgets", "_rows", "_offsets", "_steps"):
            values = getattr(self, name)
            setattr(self, name, [values[b] for b in keep])

    @property
    def state(self) -> Any:
        """The arrays, to evaluate; a batch is not saved."""
        return [a for a in self._arrays() if a is not None]

    @state.setter
    def state(self, v: Any) -> None:
        raise ValueError("BatchKeyformerKVCache has no state to set; save and load single sequences.")


def _starting_score(keys: mx.array) -> mx.array:
    """[B, Hkv, S] float32: 0, or -inf (ranked last for good) for a key with a NaN or infinite component."""
    return mx.where(mx.all(mx.isfinite(keys), axis=-1), 0.0, -mx.inf).astype(mx.float32)


def _take(a: mx.array, index: mx.array) -> mx.array:
    """Rows `index` [B, Hkv, m] of an array whose axis 2 is rows."""
    return mx.take_along_axis(a, index if a.ndim == 3 else index[..., None], axis=2)
