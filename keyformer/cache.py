"""The Keyformer KV cache for mlx-lm: a fixed number of rows per KV head, whatever the length of the text.

Rows live in slots. A prompt is stored in temporal order; while decoding, a new row takes the slot that the last
eviction freed, so a step writes one row and the order of rows no longer matters (attention has none; each row keeps
its true position and rotation). Everything that ranks rows is float32; keys and values keep the model's dtype, bit
for bit.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from . import noise
from .eviction import keep_rows, take_rows
from .kernels.decode import Now, Read, Rows, entered, rows_of
from .layers import LayerGroup, Walk
from .policies import NO_QUERIES, POLICIES, Policy, check_integer, make_policy
from .ranking import rank_rows
from .rope import Rope
from .scores import Asked, Mask, add_query_mass, starting_scores

if TYPE_CHECKING:
    from .batch import BatchKeyformerKVCache

_LEAST_SCORE_BYTES = 1 << 28
_STEP = 256
_UNBOUNDED = 2**31 - 2
_STATE_VERSION = 2
NO_WINDOW = (
    "KeyformerKVCache serves global attention only, got a sliding window of {}; keep mlx-lm's RotatingKVCache for that "
    "layer."
)


class _Last(NamedTuple):
    """A prompt's last queries so far, of which a policy counts no others, and how many rows and tokens there were."""

    asked: Asked
    rows: int
    offset: int


class KeyformerKVCache(_BaseCache):  # type: ignore[misc]  # mlx-lm has no types
    """The KV cache of one layer for one sequence.

    mlx-lm calls `make_mask`, reads `offset`, calls `update_and_fetch`; with a policy that ranks by real queries, the
    hook of `keyformer.attached` then calls `observe`. Rows are evicted after that call's attention, never before.

    The prompt: with prefill "full" every prompt row is kept until the prompt ends, then one selection keeps `budget` of
    them; with "chunked" a selection follows every chunk, so at most budget + chunk rows exist. The prompt ends with
    `end_prefill()`, which `keyformer.attached` sees to. Where nobody will call it (no `begin_prefill()` came before),
    the first one-token call after a longer one counts as the end; a prompt whose last chunk is a single token then
    ends one token early.

    Positions: by default rows keep the positions and rotations they came with, and `offset` counts the tokens seen.
    With `rope`, rows are numbered 0..n-1 as they are kept (the paper's "new positions"): they are stored as they came,
    turned to their number whenever they are returned, and `offset` is n, the number of the next token.

    Args:
        policy: what ranks and protects rows.
        budget: rows kept per KV head once the prompt has ended, an integer. Ignored by policy "full".
        layer: index of the layer, a coordinate of the noise.
        prefill: "full" or "chunked".
        score_bytes: bound on the float32 logits of one tile of the score pass; None: `default_score_bytes()`.
        rope: the layer's rotary embedding, for positions that are contiguous; None keeps the original ones.
        uneven: other layers have other budgets, so that one mask cannot serve them all (see `fit_mask`).
        readers: attention layers that read these rows in one call of the model (gemma3n, gemma4: layers without rows
            of their own); their queries count together, and eviction waits for the last of them.

    Raises:
        ValueError: a budget that protects everything, an unknown prefill.
    """

    def __init__(
        self,
        policy: Policy,
        budget: int | None,
        layer: int = 0,
        prefill: str = "full",
        score_bytes: int | None = None,
        *,
        rope: Rope | None = None,
        uneven: bool = False,
        readers: int = 1,
    ) -> None:
        if prefill not in ("full", "chunked"):
            raise ValueError(f"prefill: expected 'full' or 'chunked', got {prefill!r}.")
        if policy.evicts:
            if budget is None:
                raise ValueError(f"budget: policy {policy.name} needs a number of rows, got None.")
            policy.check_budget(budget)
        score_bytes = default_score_bytes() if score_bytes is None else score_bytes
        check_integer("score_bytes", score_bytes, 1)
        self.policy = policy
        self.layer = layer
        self.prefill = prefill
        self.score_bytes = score_bytes
        self.rope = rope
        self.uneven = uneven
        self.readers = readers
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.shifts: mx.array | None = None  # [B, Hkv, capacity] int32, with `rope`: the row's number now - on arrival
        self._scores: mx.array | None = None
        self._positions: mx.array | None = None
        self._masses: mx.array | None = None
        self._budgets = [budget if policy.evicts and budget is not None else _UNBOUNDED]
        self._rows = [0]  # slots in use, the freed one included
        self._offsets = [0]  # tokens seen
        self._steps = [0]  # decoded tokens, what the temperature counts
        self._slot: mx.array | None = None  # [B, Hkv, 1, 1] int32, where the next decoded row goes
        self.group = LayerGroup(1)  # the layers whose decoded tokens are scored together
        self.undecided = False  # this call's rows wait for those of the other layers of the group
        self._steady: tuple[Any, Any] | None = None  # shapes of a token's keys and values, where all rows are in use
        self._targets: tuple[mx.array, mx.array]  # `_slot` in those shapes, while steady
        self._held: Rows | None = None  # scores, positions and masses of the whole group, while decoding
        self._place = 0  # this layer's first sequence there
        self._in_prompt = True
        self._announced = False
        self._prior = 0  # rows stored before the open prompt
        self._new: mx.array | None = None  # keys of this call's rows
        self._unseen = 0  # new rows whose attention nobody has shown us yet
        self._last_asked: _Last | None = None
        self._asked: list[Asked] = []  # by the layers that have read this call's rows, while more will
        self._read: tuple[mx.array, mx.array] | None = None  # what this call returned, where eviction would change it
        self._whole: weakref.ref[mx.array] | None = None  # keys last fetched, where they are the first of `keys`
        self._returned = 0  # rows this call's attention reads
        self._unfit = False  # uneven: nobody has asked for this call's mask yet
        self._touched = False  # something was scored or evicted
        self._shifted = False  # some row's number is no longer that of its arrival

    # -- what mlx-lm reads --------------------------------------------------------------------------------------------

    @property
    def offset(self) -> Any:
        """What RoPE needs: tokens seen, or, with contiguous positions, rows stored."""
        return self._offsets[0] if self.rope is None else self.size()

    @property
    def budget(self) -> int | None:
        """Rows kept per KV head; None for policy "full"."""
        return self._budgets[0] if self.policy.evicts else None

    @property
    def scores(self) -> mx.array | None:
        """[B, Hkv, capacity] float32; -inf: a key that is not finite, ranked last. With policy "full", 0 and -inf."""
        if not self.policy.evicts:
            return None if self.keys is None else starting_scores(self.keys)
        rows = self._own_rows()
        self._ask_now()
        return self._scores if rows is None else rows.scores

    @property
    def positions(self) -> mx.array | None:
        """[B, Hkv, capacity] int32, of each row the tokens that came before it."""
        if not self.policy.evicts:
            if self.keys is None:
                return None
            return mx.broadcast_to(mx.arange(self.keys.shape[2], dtype=mx.int32), self.keys.shape[:3])
        rows = self._own_rows()
        return self._positions if rows is None else rows.positions

    @property
    def masses(self) -> mx.array | None:
        """[B, Hkv, capacity, window] float32, one column per counted query, for a policy with a window."""
        rows = self._own_rows() if self.policy.window else None
        self._ask_now()
        return self._masses if rows is None else rows.masses

    def _own_rows(self) -> Rows | None:
        """Of a decoded token on, what is known of the rows; None in a prompt."""
        self._settle()
        if self._slot is None:
            return None
        rows = self._undecided_rows()
        if self._unseen:  # its queries are still to come
            assert self._new is not None
            rows = entered(rows, self._new, self._offsets)
        return rows

    def _settle(self) -> None:
        """What waits for other layers waits no longer."""
        if self.undecided:
            self.group.decide()

    def size(self) -> int:
        """Rows stored per KV head."""
        return self._stored(0)

    def slots(self) -> list[int]:
        """Rows of memory in use by each sequence, per KV head, a freed one included: what attention reads."""
        self._settle()
        return list(self._rows)

    def sequences(self) -> Sequence[KeyformerKVCache]:
        """Of a batch in its prompt, the cache of each sequence; none of any other."""
        return ()

    def sizes(self) -> list[int]:
        """Rows stored by each sequence."""
        return [self._stored(b) for b in range(len(self._rows))]

    def _stored(self, b: int) -> int:
        if self.undecided and self._slot is None:  # a prompt's rows; which of a token's rows goes is another matter
            self._settle()
        return min(self._rows[b], self._budgets[b]) if self._slot is not None else self._rows[b]

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes allocated, bookkeeping included."""
        asked = () if self._last_asked is None else (self._last_asked.asked.queries,)
        return sum(a.nbytes for a in (*self._arrays(), self._slot, *asked) if a is not None)

    def _arrays(self) -> tuple[mx.array | None, ...]:
        """Everything stored per row; rows are axis 2 of each."""
        rows = self._own_rows() if self.policy.evicts else None
        if rows is not None:
            return self.keys, self.values, rows.scores, rows.positions, rows.masses, self.shifts
        return self.keys, self.values, self._scores, self._positions, self._masses, self.shifts

    def _set_arrays(self, arrays: Iterable[mx.array | None]) -> None:
        self.keys, self.values, scores, positions, masses, self.shifts = arrays
        self._set_rows(scores, positions, masses)

    def _set_rows(self, scores: mx.array | None, positions: mx.array | None, masses: mx.array | None) -> None:
        """Keep these for oneself."""
        self._held = self._steady = None
        if self.policy.evicts:
            self._scores, self._positions, self._masses = scores, positions, masses

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored token: its keys and values in every KV head, without bookkeeping."""
        if self.keys is None or self.values is None:
            return 0
        return sum(a.shape[1] * a.shape[3] * a.dtype.size for a in (self.keys, self.values))

    def kept(self, sequence: int = 0) -> mx.array:
        """[Hkv, size] int32, the positions of the rows that each KV head stores, in temporal order."""
        if self.positions is None:
            return mx.zeros((0, 0), mx.int32)
        return mx.sort(_take(self.positions, self._temporal()), axis=-1)[0]

    def ranks(self, sequence: int = 0) -> mx.array:
        """[Hkv, size] float32, beside `kept`: what a decision taken now would compare; the lowest that is not protected
        goes. -inf for a key that is not finite."""
        if self.keys is None or self.scores is None or self.positions is None:
            return mx.zeros((0, 0), mx.float32)
        index = self._temporal()
        keys = _take(self._turned(self._rows[0]), index)
        scores, positions = _take(self.scores, index), _take(self.positions, index)
        return self._rank(keys, scores, positions)[0]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for the next call with N tokens, as mlx-lm's caches make it; a sliding window is a ValueError."""
        if window_size is not None:
            raise ValueError(NO_WINDOW.format(window_size))
        # Old rows come first in any order and new rows last, so "causal" aligned at the bottom right is exact.
        return create_attention_mask(N, offset=self.size(), return_array=return_array, window_size=None)

    def fit_mask(self, mask: Any, N: int) -> Any:
        """The mask for this call's attention, asked for by the hook between `update_and_fetch` and attention.

        mlx-lm makes one mask, from the first layer's cache, for all layers. Where layers have budgets of their own, it
        is made anew; a mask that carries logits of its own (multi-head latent attention) must fit as it is.
        """
        self._unfit = False
        if not self.uneven:
            return mask
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            if mask.shape[-1] == self._returned:
                return mask
            raise ValueError(
                "allocate: this model's masks carry logits (multi-head latent attention) and fit equal budgets only; "
                "use allocate 'uniform'."
            )
        return self._own_mask(N, isinstance(mask, mx.array))

    def _own_mask(self, N: int, return_array: bool) -> Any:
        """The mask of the call whose rows are stored already."""
        if return_array and N > 1:
            return create_causal_mask(N, offset=self._returned - N)
        return "causal" if N > 1 else None

    def is_trimmable(self) -> bool:
        """True only while nothing was scored or evicted; an empty cache that will evict is not either, so that
        speculative decoding, which trims, refuses it at once."""
        return not (self._touched or (self.policy.evicts and self.empty()))

    def trim(self, n: int) -> int:
        """Forget the last n tokens, only while nothing was scored or evicted; returns how many were forgotten."""
        if not self.is_trimmable():
            return 0
        self._settle()
        if self._slot is not None:  # the next row goes behind those there are now
            self._set_arrays(self._arrays())
            self._slot = None
        n = min(self._offsets[0], n)
        self._offsets[0] -= n
        self._rows[0] -= n
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Refused with a ValueError: mlx-lm calls it for kv_bits."""
        raise ValueError("KeyformerKVCache keeps the model's dtype and cannot be quantized; leave kv_bits unset.")

    # -- one call of the model ----------------------------------------------------------------------------------------

    def begin_prefill(self) -> None:
        """Say that `end_prefill()` will be called, so that one-token chunks before it still belong to the prompt."""
        self._settle()
        if not self._in_prompt:
            self._open_prompt()
        self._announced = True

    def abandon_prefill(self) -> None:
        """Nobody will call `end_prefill()` after all: the prompt ends as one that was never announced."""
        self._announced = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [B, Hkv, S, D] and return all rows this call attends to: those kept so far, then the new ones.

        Raises:
            ValueError: more than one sequence, or sizes that differ from those stored.
            RuntimeError: the policy needs `keyformer.attached` and this call happens outside it.
        """
        if self._steady == (keys.shape, values.shape) and not (self._unseen or self.undecided):
            return self._replace_rows(keys, values)
        self._check_call(keys, values)
        S = keys.shape[2]
        if self.policy.window > S or not self._in_prompt:
            self._ask_now()
        if S > 1 and not self._in_prompt:
            self._open_prompt()
        elif S == 1 and self._in_prompt and self._rows[0] and not self._announced:
            self._check_unannounced_end()
            self.end_prefill()
        self._settle()  # a prompt that has just ended included
        if S == 0:
            return (keys, values) if self.keys is None else self._fetched()
        if self._in_prompt:
            self._append(keys, values)
        else:
            self._write(keys, values)
        return self._new_rows_fetched(keys)

    def _replace_rows(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """`update_and_fetch` of a decoded token where every sequence is full, in as little Python as it takes: on a GPU
        a token is bound by that."""
        assert self.keys is not None and self.values is not None
        self.keys = k = mx.put_along_axis(self.keys, self._targets[0], keys, axis=2)
        self.values = v = mx.put_along_axis(self.values, self._targets[1], values, axis=2)
        self._offsets = [o + 1 for o in self._offsets]
        self._steps = [s + 1 for s in self._steps]
        self._new = keys
        if self.policy.attention == "query":
            self._unseen = 1
            return k, v
        pending = self.group.add(self, Read(self.layer, k, k, keys))
        if pending:
            k, v = mx.depends([k, v], pending)
        return k, v

    def _check_unannounced_end(self) -> None:
        if self.rope is not None and self.prefill == "full" and self._rows[0] > self._budgets[0]:
            raise RuntimeError(
                "positions 'contiguous' with prefill 'full': expected end_prefill() before the first decoded token, "
                "whose position it changes; run inside `with keyformer.attached(model)`, call end_prefill(), or use "
                "prefill 'chunked'."
            )

    def _check_call(self, keys: mx.array, values: mx.array) -> None:
        B, batch = keys.shape[0], len(self._rows)
        if batch != B:
            raise ValueError(
                f"{type(self).__name__}: expected a batch of {batch}, got {B}; "
                "use KeyformerKVCache.merge for several sequences."
            )
        if self._unseen:
            raise RuntimeError(
                f"Policy {self.policy.name} ranks rows by the model's queries, which no one reported: run the model "
                f"inside `with keyformer.attached(model)`, or take a policy that needs none ({', '.join(NO_QUERIES)})."
            )
        if self._unfit:
            raise RuntimeError(
                "Budgets that differ between layers need masks of their own: run the model inside "
                "`with keyformer.attached(model)`, or use allocate 'uniform'."
            )
        for name, stored, new in (("keys", self.keys, keys), ("values", self.values, values)):
            if stored is not None and (stored.shape[1], stored.shape[3]) != (new.shape[1], new.shape[3]):
                raise ValueError(
                    f"{name}: expected {stored.shape[1]} heads of size {stored.shape[3]} as stored, got {new.shape[1]} "
                    f"of {new.shape[3]}; use a new cache for another model."
                )

    def _new_rows_fetched(self, keys: mx.array) -> tuple[mx.array, mx.array]:
        """What attention reads, once the new rows (`keys` [B, Hkv, S, D]) are stored."""
        k, v = self._fetched()
        self._unfit = self.uneven
        self._for_readers(k, v)
        self._new = keys
        if self.policy.attention == "query":
            self._unseen = keys.shape[2]
            return k, v
        pending = self._after_attention(k, None)
        # the bookkeeping is evaluated with the attention, so that no graph grows from token to token
        if pending:
            k, v = mx.depends([k, v], pending)
        return k, v

    def _for_readers(self, keys: mx.array, values: mx.array) -> None:
        """What this call returns, for those who ask once rows may have gone."""
        self._asked, self._returned = [], keys.shape[2]
        changes = self._in_prompt or self.rope is not None
        self._read = (keys, values) if self.readers > 1 and changes else None

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last call returned, for layers that attend to this layer's rows (gemma3n)."""
        return self._fetched() if self._read is None else self._read

    @property
    def waiting(self) -> bool:
        """More layers will attend to the rows of this call, before any goes."""
        return bool(self._asked)

    def _fetched(self) -> tuple[mx.array, mx.array]:
        """Keys, turned to where they count from, and values, of all slots in use."""
        assert self.keys is not None and self.values is not None
        n = max(self._rows)
        keys = self._turned(n)
        # held weakly: a slice that lives on would keep the next row from being written in place
        self._whole = None if self.rope is not None and self._shifted else weakref.ref(keys)
        return keys, self.values if n == self.values.shape[2] else self.values[..., :n, :]

    def _turned(self, n: int) -> mx.array:
        assert self.keys is not None
        keys = self.keys if n == self.keys.shape[2] else self.keys[..., :n, :]
        if self.rope is not None and self._shifted:
            assert self.shifts is not None
            keys = self.rope.turn(keys, self.shifts[..., :n])
        return keys

    def observe(
        self,
        queries: mx.array,
        keys: mx.array,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> list[mx.array]:
        """Score the rows by the attention that has just been computed, then evict, once the last reader has asked.

        Args:
            queries: [B, Hq, S, D], rotated.
            keys: [B, H, n, D], what the queries were multiplied with: what `update_and_fetch` returned, or keys that
                the layer made of it for more heads (multi-head latent attention).
            scale, mask: of that attention call.
            sinks: [Hq] logits that take a share of every softmax and belong to no row (gpt_oss).
            soft_cap: logits are soft_cap * tanh(logits / soft_cap) (gemma2).

        Returns:
            Arrays to evaluate together with the attention's output.
        """
        if self._steady is not None and keys is self.keys and not isinstance(mask, mx.array):
            if not self._unseen:
                return []
            self._unseen = 0
            assert self._new is not None
            asked = Asked(queries, scale, mask, sinks, soft_cap)
            return self.group.add(self, Read(self.layer, keys, keys, self._new, asked))
        self._asked.append(Asked(queries, scale, mask, sinks, soft_cap))
        if len(self._asked) < self.readers:
            return []
        calls, self._asked = self._asked, []
        return self._score(keys, _one_layer(calls, keys.shape[1])) if self._unseen else []

    def _score(self, keys: mx.array, asked: Asked) -> list[mx.array]:
        self._unseen = 0
        return self._after_attention(keys, asked)

    def end_prefill(self) -> None:
        """The prompt has ended: select the rows to keep. Calls that follow decode. Calling it again does nothing."""
        if not self._in_prompt:
            return
        self._settle()
        self._ask_now()
        if self.keys is not None:
            self._select()  # still part of the prompt: the temperature is that of step 0
        self._read = self._new = None  # the last chunk's keys are not to live on
        self._in_prompt = False
        self._announced = False

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
        rows = keys.shape[:3]
        wanted = (*rows, self.policy.window) if self.policy.window and scores is not None else None
        for name, given, shape in (("scores", scores, rows), ("masses", masses, wanted)):
            if name == "masses" and (given is None) != (shape is None):
                raise ValueError(f"set_prompt: masses go with scores of a policy with a window, got {self.policy}.")
            if given is not None and given.shape != shape:
                raise ValueError(f"set_prompt: expected {name} {shape} for keys {keys.shape}, got {given.shape}.")
        self._check_call(keys, values)
        self._append(keys, values)
        if scores is not None and self.policy.evicts:
            n = keys.shape[2]
            self._touched = True
            positions = mx.broadcast_to(mx.arange(n, dtype=mx.int32), scores.shape)
            shifts = None if self.rope is None else mx.zeros(scores.shape, mx.int32)
            self._set_arrays((keys, values, scores, positions, masses, shifts))

    # -- storage ------------------------------------------------------------------------------------------------------

    def _capacity(self, rows: int) -> int:
        """Rows to allocate for `rows`: in steps of 256; once evicting, never more than budget + 1."""
        capacity = -(-rows // _STEP) * _STEP
        return capacity if self._in_prompt else max(rows, min(capacity, max(self._budgets) + 1))

    def _new_rows(self, keys: mx.array, values: mx.array) -> tuple[mx.array | None, ...]:
        """What is stored of a prompt's new rows, as `_arrays` orders it."""
        rows, w, evicts = keys.shape[:3], self.policy.window, self.policy.evicts
        first = self._offsets[0]
        return (
            keys,
            values,
            starting_scores(keys) if evicts else None,
            mx.broadcast_to(mx.arange(first, first + rows[2], dtype=mx.int32), rows) if evicts else None,
            mx.zeros((*rows, w), mx.float32) if w else None,
            mx.zeros(rows, mx.int32) if self.rope is not None else None,
        )

    def _reserve(self, new: Sequence[mx.array | None], rows: int) -> None:
        """Make room for `rows` rows, shaped like `new`."""
        have = 0 if self.keys is None else self.keys.shape[2]
        if rows <= have:
            return
        more = self._capacity(rows) - have
        room = [None if a is None else mx.zeros((*a.shape[:2], more, *a.shape[3:]), a.dtype) for a in new]
        self._set_arrays(
            r if o is None or r is None else mx.concatenate([o, r], axis=2)
            for o, r in zip(self._arrays(), room, strict=True)
        )

    def _append(self, keys: mx.array, values: mx.array) -> None:
        """Prompt rows: behind the stored ones, in order."""
        S, first = keys.shape[2], self._rows[0]
        new = self._new_rows(keys, values)
        self._reserve(new, first + S)
        for a, rows in zip(self._arrays(), new, strict=True):
            if a is not None and rows is not None:
                a[:, :, first : first + S] = rows
        self._rows[0] += S
        self._offsets[0] += S

    def _write(self, keys: mx.array, values: mx.array) -> None:
        """A decoded token's row: into the freed slot, or behind the stored rows of a sequence still below budget.

        Its score and position are entered when they are first needed, by `decode_step`.
        """
        grown = [r + (r <= m) for r, m in zip(self._rows, self._budgets, strict=True)]
        if self.keys is None or max(grown) > self.keys.shape[2]:
            self._reserve(self._new_rows(keys, values), max(grown))
        assert self.keys is not None and self.values is not None
        if not self.policy.evicts and len(set(self._rows)) == 1:
            n = self._rows[0]
            self.keys[:, :, n : n + 1], self.values[:, :, n : n + 1] = keys, values
        else:
            if self._slot is None or not self.policy.evicts:
                behind = mx.array(self._rows, mx.int32)[:, None, None, None]
                self._slot = mx.broadcast_to(behind, (*keys.shape[:2], 1, 1))
            self.keys = mx.put_along_axis(self.keys, self._slot, keys, axis=2)
            self.values = mx.put_along_axis(self.values, self._slot, values, axis=2)
            if self.shifts is not None:
                self.shifts = mx.put_along_axis(self.shifts, self._slot[..., 0], mx.array(0, mx.int32), axis=2)
        self._rows = grown
        self._offsets = [o + 1 for o in self._offsets]
        self._steps = [s + 1 for s in self._steps]

    def _gather(self, index: mx.array) -> None:
        """Keep the rows `index` [1, Hkv, m], in that order; the allocation shrinks to them."""
        self._set_arrays(None if a is None else _take(a, index) for a in self._arrays())
        self._rows = [index.shape[2]]
        self._slot = None

    def _open_prompt(self) -> None:
        """More prompt after decoding: back to temporal order, the freed slot dropped."""
        if self._slot is not None:
            self._gather(self._temporal())
        self._in_prompt = True
        self._prior = self._rows[0]

    def _temporal(self) -> mx.array:
        """[1, Hkv, stored] indices of the stored rows by position."""
        assert self.positions is not None
        n = self._rows[0]
        positions = self.positions[..., :n]
        if self._slot is not None and n > self._budgets[0]:
            positions = mx.put_along_axis(positions, self._slot[..., 0], mx.array(_UNBOUNDED, mx.int32), axis=2)
        return mx.argsort(positions, axis=-1)[..., : self._stored(0)]

    # -- scores and eviction ------------------------------------------------------------------------------------------

    def _after_attention(self, keys: mx.array, asked: Asked | None) -> list[mx.array]:
        """Scores, then eviction, for the rows just added. `keys`: those attention read; `asked`: its queries, for a
        policy that ranks by them."""
        if not self.policy.evicts:
            return []
        if not self._in_prompt:
            return self._decide(keys, asked)
        self._touched = self._touched or asked is not None
        if asked is not None and self._can_ask_later(keys, asked):
            queries = mx.contiguous(asked.queries[:, :, -self.policy.window :])
            self._last_asked = _Last(asked._replace(queries=queries), self._rows[0], self._offsets[0])
            return [queries, *(a for a in (self._scores, self._positions, self.shifts) if a is not None)]
        if asked is not None:
            self._add_query_mass(keys, asked, self._offsets)
        made = self._select() if self.prefill == "chunked" else []
        return made + [a for a in (self._scores, self._positions, self._masses, self.shifts) if a is not None]

    def _taus(self) -> list[float]:
        """The temperature of each sequence now."""
        p = self.policy
        if p.attention == "query":
            steps = [0] * len(self._steps) if self._in_prompt else self._steps
        else:
            steps = [o - 1 for o in self._offsets]
        return [float(noise.temperature(s, p.tau_init, p.tau_end, p.anneal_steps)) for s in steps]

    def _can_ask_later(self, keys: mx.array, asked: Asked) -> bool:
        """Only the prompt's last queries count, and these may be them: whether it is enough to know when it ends."""
        return (
            0 < self.policy.window <= asked.queries.shape[2]
            and self.prefill == "full"
            and not isinstance(asked.mask, mx.array)
            and (self.rope is None or not self._shifted)
            and self.keys is not None
            and keys.shape[:3] == (*self.keys.shape[:2], self._rows[0])
        )

    def _ask_now(self) -> None:
        """The last queries that were kept for later score the rows they attended to."""
        if self._last_asked is not None:
            (asked, rows, offset), self._last_asked = self._last_asked, None
            assert self.keys is not None
            self._add_query_mass(self.keys[..., :rows, :], asked, [offset])

    def _add_query_mass(self, keys: mx.array, asked: Asked, offsets: list[int]) -> None:
        """A prompt call's queries score the rows they attended to."""
        assert self._scores is not None and self._positions is not None
        self._scores, self._masses = add_query_mass(
            self.policy,
            self.layer,
            keys,
            self._scores,
            self._positions,
            self._masses,
            mx.ones((1, 1, keys.shape[2]), mx.bool_),
            offsets,
            self._taus()[0],
            asked,
            self.score_bytes,
            self.keys if self._whole is not None and self._whole() is keys else None,
        )

    def _rank(self, keys: mx.array, scores: mx.array, positions: mx.array) -> mx.array:
        """[1, Hkv, n] float32, what a decision compares, of rows that all exist; `keys` as attention reads them."""
        stored = mx.ones(scores.shape, mx.bool_)
        offset, (tau,) = self._offsets[0], self._taus()
        return rank_rows(self.policy, self.layer, scores, positions, keys, stored, offset, tau)

    def _decide(self, keys: mx.array, asked: Asked | None) -> list[mx.array]:
        """After a decode step: the new row and its queries score the rows, and each full sequence frees one, together
        with the other layers of the group."""
        whole = self._whole is not None and self._whole() is keys
        over = any(r > m for r, m in zip(self._rows, self._budgets, strict=True))
        self._touched = self._touched or over or self.policy.attention in ("query", "key")
        assert self._new is not None
        return self.group.add(self, Read(self.layer, keys, self.keys if whole else None, self._new, asked))

    def _now(self) -> Now:
        """What `decode_step` needs to know of the sequences."""
        recents = [self.policy.recent_rows(m) for m in self._budgets]
        return Now(self._rows, self._offsets, recents, self._taus(), self._budgets, self.score_bytes)

    def _goes_with(self, other: KeyformerKVCache) -> bool:
        """Whether another layer has the same policy, and its sequences the same history."""
        mine = self._scores if self._held is None else self._held.scores
        theirs = other._scores if other._held is None else other._held.scores
        assert mine is not None and theirs is not None
        return (
            (mine is theirs or mine.shape[1:] == theirs.shape[1:])
            and (self.policy is other.policy or self.policy == other.policy)
            and self._rows == other._rows
            and self._offsets == other._offsets
            and self._steps == other._steps
            and self._budgets == other._budgets
            and self.score_bytes == other.score_bytes
        )

    def _undecided_rows(self) -> Rows:
        """Scores, positions and masses as before the token that is being decided on, whose row is in the slot."""
        assert self._slot is not None
        if self._held is not None:
            return replace(rows_of(self._held, self._place, len(self._rows)), slot=self._slot)
        assert self._scores is not None and self._positions is not None
        return Rows(self._scores, self._positions, self._masses, self._slot)

    def _can_be_steady(self) -> bool:
        """Every sequence has used all its rows, and nothing but one more token is to be done for each token."""
        n = self.keys.shape[2] if self.keys is not None else 0
        plain = self.rope is None and self.readers == 1 and not self.uneven
        return plain and all(r == n and r > m for r, m in zip(self._rows, self._budgets, strict=True))

    def _decided(self, held: Rows, place: int, slot: mx.array, targets: tuple[mx.array, mx.array] | None) -> None:
        """Scores, positions and masses are in `held`, from sequence `place` on, and the next row goes to `slot`."""
        self._scores = self._positions = self._masses = None
        self._held, self._place, self._slot = held, place, slot
        self.undecided = False
        if targets is not None:
            self._targets = targets
            self._steady = targets[0].shape, targets[1].shape
            return
        over = [r > m for r, m in zip(self._rows, self._budgets, strict=True)]
        if self.shifts is not None and any(over):
            n = max(self._rows)
            positions = rows_of(held, place, len(over)).positions[..., :n]
            gone = mx.minimum(slot[..., 0], n - 1)  # of a sequence below its budget it is not there yet
            later = positions > mx.take_along_axis(positions, gone, axis=2)
            later = later & mx.array(over)[:, None, None]
            self.shifts[..., :n] = self.shifts[..., :n] - later.astype(mx.int32)
            self._shifted = True

    def _select(self) -> list[mx.array]:
        """In or after the prompt: one selection down to the budget (with "key" attention, the walk over new rows, with
        the other layers of the group); returns what it made."""
        n, budget = self._rows[0], self._budgets[0]
        p = self.policy
        if not p.evicts or (n <= budget and p.attention != "key") or (p.attention == "key" and n == self._prior):
            return []
        self._touched = True
        if p.attention == "key":
            return self.group.add_prompt(self)
        assert self._scores is not None and self._positions is not None
        positions = self._positions[..., :n]
        rank = self._rank(self._turned(n), self._scores[..., :n], positions)
        self._keep(keep_rows(rank, positions, self._offsets[0], budget, p.n_sink, p.recent_rows(budget)))
        self._prior = self._rows[0]
        return []

    def _to_walk(self) -> Walk:
        """The new rows of a prompt, each of which is to score the rows before it."""
        assert self._scores is not None and self._positions is not None
        p, n, budget = self.policy, self._rows[0], self._budgets[0]
        first = self._offsets[0] - (n - self._prior)  # tokens inserted before the first new row
        taus = noise.temperatures(first, self._offsets[0] - first, p.tau_init, p.tau_end, p.anneal_steps)
        limits = budget, p.n_sink, p.recent_rows(budget)
        drawn = (p.distribution, p.seed) if p.noise == "select" else None
        rows = self._scores[..., :n], drawn, self._positions[..., :n], self.layer
        return Walk(self._turned(n), self._prior, *rows, limits, taus, self.score_bytes)

    def _walked(self, index: mx.array, scores: mx.array) -> list[mx.array]:
        """Keep the rows `index` [1, Hkv, m], whose scores are these; returns what that made."""
        self.undecided = False
        if self._rows[0] > self._budgets[0]:
            self._keep(index)
        assert self._scores is not None
        self._scores[..., : index.shape[2]] = scores
        self._prior = self._rows[0]
        return [a for a in (self._scores, self._positions, self.shifts) if a is not None]

    def _keep(self, index: mx.array) -> None:
        """Down to the rows `index` [1, Hkv, m], in temporal order, and numbered anew."""
        self._gather(index)
        if self.shifts is not None:
            self.shifts = self.shifts + mx.arange(index.shape[2], dtype=mx.int32) - index
            self._shifted = True

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Everything, rows in temporal order: keys, values, scores, positions, masses, shifts; a prompt's last queries
        and their sinks, where they are still to be scored; settings as JSON."""
        arrays = self._arrays()
        if not self.policy.evicts:
            arrays = self.keys, self.values, self.scores, self.positions, None, None
        if self.keys is not None:
            index = None if self._slot is None else self._temporal()
            n = self._rows[0]
            arrays = tuple(None if a is None else a[:, :, :n] if index is None else _take(a, index) for a in arrays)
        known = type(self.policy) in (Policy, POLICIES.get(self.policy.name))
        settings: dict[str, Any] = {
            "version": _STATE_VERSION,
            "policy": _as_settings(self.policy) if known else None,
            "budget": self.budget,
            "layer": self.layer,
            "prefill": self.prefill,
            "score_bytes": self.score_bytes,
            "rope": None if self.rope is None else self.rope.to_json(),
            "uneven": self.uneven,
            "readers": self.readers,
            "offset": self._offsets[0],
            "steps": self._steps[0],
            "in_prompt": self._in_prompt,
            "announced": self._announced,
            "prior": self._prior,
            "touched": self._touched,
            "shifted": self._shifted,
        }
        last = self._last_asked
        if last is None:
            return (*arrays, None, None, json.dumps(settings))
        asked = last.asked
        settings["last"] = last.rows, last.offset, asked.scale, asked.mask, asked.soft_cap
        return (*arrays, asked.queries, asked.sinks, json.dumps(settings))

    @state.setter
    def state(self, v: Any) -> None:
        *arrays, queries, sinks, text = v
        s = json.loads(text)
        if s.get("version") != _STATE_VERSION:
            raise ValueError(
                f"state: expected version {_STATE_VERSION}, got {s.get('version')}: it was saved by another version of "
                "keyformer; read the prompt again."
            )
        if s["policy"] is None:
            raise ValueError(
                "state: expected a policy of keyformer.POLICIES or keyformer.Policy itself, got one of another class, "
                "which cannot be made again from text."
            )
        name, choices = s["policy"].pop("name"), s["policy"]
        policy = make_policy(name, **choices) if name in POLICIES else Policy(**choices)
        rope = None if s["rope"] is None else Rope.from_json(s["rope"])
        KeyformerKVCache.__init__(
            self,
            policy,
            s["budget"],
            s["layer"],
            s["prefill"],
            s["score_bytes"],
            rope=rope,
            uneven=s["uneven"],
            readers=s["readers"],
        )
        self._set_arrays(arrays)
        if queries is not None:
            n, offset, scale, mask, soft_cap = s["last"]
            self._last_asked = _Last(Asked(queries, scale, mask, sinks, soft_cap), n, offset)
        self._rows = [0 if self.keys is None else self.keys.shape[2]]
        self._offsets, self._steps = [s["offset"]], [s["steps"]]
        self._in_prompt, self._announced, self._prior = s["in_prompt"], s["announced"], s["prior"]
        self._touched, self._shifted = s["touched"], s["shifted"]

    def _copy(self) -> KeyformerKVCache:
        """A cache that goes its own way from here; arrays are shared until one of the two writes."""
        self._settle()
        other = copy.copy(self)
        other._set_arrays(None if a is None else a[...] for a in self._arrays())
        other._budgets, other._rows = list(self._budgets), list(self._rows)
        other._offsets, other._steps = list(self._offsets), list(self._steps)
        other._asked, other._read = [], None
        other.group = LayerGroup(1)
        return other

    # -- several sequences --------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: list[KeyformerKVCache]) -> BatchKeyformerKVCache:
        """One cache for several sequences; budgets, lengths and histories may differ. The given ones stay as they are.

        Raises:
            ValueError: caches that differ in policy, layer or the treatment of the prompt, or hold several sequences.
        """
        from .batch import BatchKeyformerKVCache  # which builds on this module

        return BatchKeyformerKVCache(caches)


def default_score_bytes() -> int:
    """256 MiB; on a GPU a 64th of its memory where that is more, as a walk over many heads is faster in few tiles."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return _LEAST_SCORE_BYTES
    info = mx.device_info()
    memory = info.get("max_recommended_working_set_size") or info.get("total_memory") or 0  # Metal, CUDA
    return max(_LEAST_SCORE_BYTES, int(memory) // 64)


@lru_cache(maxsize=64)
def _as_settings(policy: Policy) -> dict[str, Any]:
    return {"name": policy.name, **asdict(policy)}


def _one_layer(asked: list[Asked], heads: int) -> Asked:
    """Calls of several layers, alike but for queries and sinks, as one with more query heads to each of `heads`."""

    def together(arrays: list[mx.array], axis: int) -> mx.array:
        grouped = [a.reshape(*a.shape[:axis], heads, -1, *a.shape[axis + 1 :]) for a in arrays]
        return mx.concatenate(grouped, axis=axis + 1).flatten(axis, axis + 1)

    if len(asked) == 1:
        return asked[0]
    queries, sinks = [a.queries for a in asked], [a.sinks for a in asked if a.sinks is not None]
    return asked[0]._replace(queries=together(queries, 1), sinks=together(sinks, 0) if sinks else None)


def _take(a: mx.array, index: mx.array) -> mx.array:
    """Rows `index` [B, Hkv, m] of an array whose axis 2 is rows."""
    if a.ndim == 3:
        return mx.take_along_axis(a, index, axis=2)
    B, H = a.shape[:2]
    return take_rows(a.reshape(B * H, *a.shape[2:]), index.reshape(B * H, -1)).reshape(B, H, -1, *a.shape[3:])
