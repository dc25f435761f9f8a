"""Several sequences in one cache, as mlx-lm's batching joins, pads and parts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from .cache import NO_WINDOW, KeyformerKVCache
from .kernels.build import integers
from .scores import Asked, Mask


class BatchKeyformerKVCache(KeyformerKVCache):
    """The KV cache of one layer for several sequences; budgets, lengths and positions may differ.

    In a prompt it is its sequences' own caches side by side, so that a sequence is scored and evicted exactly as it
    would be alone; attention gets their rows stacked, from slot 0 on, with a mask over what a shorter one lacks.
    Decoding, it is one array of rows, of which sequence b uses slots 0.._rows[b]-1. Padding is never stored.

    Args:
        caches: single sequences with one policy, layer and treatment of the prompt; they stay as they are.

    Raises:
        ValueError: no caches, or some that do not go together.
    """

    def __init__(self, caches: Sequence[KeyformerKVCache]) -> None:
        kinds = sorted({type(c).__name__ for c in caches})
        if kinds != [KeyformerKVCache.__name__]:
            raise ValueError(
                f"merge: expected single sequences, each a KeyformerKVCache, got {', '.join(kinds) or 'none'}; "
                "extend joins batches."
            )
        first = caches[0]
        for name in ("policy", "layer", "prefill", "score_bytes", "rope", "uneven", "readers"):
            values = {getattr(c, name) for c in caches}
            if len(values) > 1:
                raise ValueError(f"merge: expected caches with one {name}, got {sorted(map(repr, values))}.")
        super().__init__(
            first.policy,
            first.budget,
            first.layer,
            first.prefill,
            first.score_bytes,
            rope=first.rope,
            uneven=first.uneven,
            readers=first.readers,
        )
        self._touched = True  # a batch cannot be trimmed
        self._left = [0] * len(caches)  # left padding still to come
        self._lengths: list[int] | None = None  # tokens still to come before right padding
        self._offset_of: list[int] | None = None  # the tokens seen when `_offset` was made
        self._offset = mx.array(0)
        self._call: list[tuple[int, int, int]] = []  # of the last prompt call: left padding, tokens, rows read
        self._hold([c._copy() for c in caches])

    def _hold(self, parts: list[KeyformerKVCache]) -> None:
        """Become these sequences, each in a cache of its own."""
        self._parts: list[KeyformerKVCache] | None = parts
        self._set_arrays([None] * 6)
        self._slot = None
        self._count()

    def _count(self) -> None:
        """Counters as the parts have them."""
        assert self._parts is not None
        for name in ("_budgets", "_rows", "_offsets", "_steps"):
            setattr(self, name, [getattr(p, name)[0] for p in self._parts])
        self._were_touched = [p._touched for p in self._parts]
        self._in_prompt = any(p._in_prompt for p in self._parts)
        self._shifted = any(p._shifted for p in self._parts)

    def _singles(self) -> list[KeyformerKVCache]:
        """The sequences, each in a cache of its own."""
        return self._parts if self._parts is not None else [self._single(b) for b in range(len(self._rows))]

    def sequences(self) -> Sequence[KeyformerKVCache]:
        return self._parts or ()

    def _single(self, b: int) -> KeyformerKVCache:
        """Sequence b out of the array of rows."""
        budget, n = self._budgets[b], self._rows[b]
        one = KeyformerKVCache(
            self.policy,
            budget,
            self.layer,
            self.prefill,
            self.score_bytes,
            rope=self.rope,
            uneven=self.uneven,
            readers=self.readers,
        )
        one._set_arrays(None if a is None else mx.contiguous(a[b : b + 1, :, :n]) for a in self._arrays())
        if self._slot is not None and n > budget:
            one._slot = self._slot[b : b + 1]
        one._rows, one._offsets, one._steps = [n], [self._offsets[b]], [self._steps[b]]
        one._in_prompt, one._prior = False, n
        # decoding since has scored every sequence, or evicted from those over their budget
        one._touched = self._were_touched[b] or self.policy.attention in ("query", "key") or n > budget
        one._shifted = self._shifted
        return one

    def _stack(self, keys: mx.array, values: mx.array) -> None:
        """One array of rows, for decoding; new keys and values give the shapes where no sequence has a row yet."""
        assert self._parts is not None
        self._settle()
        parts, capacity = self._parts, self._capacity(max(self._rows) + 1)
        self._set_arrays(
            None
            if like is None
            else mx.concatenate([_padded(p._arrays()[i], p._rows[0], capacity, like) for p in parts])
            for i, like in enumerate(self._new_rows(keys, values))
        )
        if any(p._slot is not None for p in parts):
            behind = (mx.full((1, keys.shape[1], 1, 1), p._rows[0], mx.int32) for p in parts)
            self._slot = mx.concatenate([b if p._slot is None else p._slot for p, b in zip(parts, behind, strict=True)])
        self._parts = None

    def _settle(self) -> None:
        super()._settle()
        if self._parts is None:
            return
        if any(p.undecided for p in self._parts):
            for p in self._parts:
                p._settle()
        self._count()  # another layer may have had them decided

    # -- what mlx-lm reads

    @property
    def offset(self) -> mx.array:
        """[B] int32, what RoPE needs of each sequence; left padding counts down to it."""
        if self._offset_of is self._offsets and self._steady is not None:
            return self._offset
        at = self._offsets if self.rope is None else self.sizes()
        self._offset = integers(*(o - p for o, p in zip(at, self._left, strict=True)))
        self._offset_of = self._offsets
        return self._offset

    def size(self) -> int:
        """Rows stored by the longest sequence."""
        return max(self.sizes(), default=0)

    def _stored(self, b: int) -> int:
        return super()._stored(b) if self._parts is None else self._parts[b].size()

    def empty(self) -> bool:
        return self.keys is None if self._parts is None else all(p.empty() for p in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, bookkeeping included."""
        return sum(p.nbytes for p in self._parts) if self._parts is not None else super().nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored token: its keys and values in every KV head, without bookkeeping."""
        return max(p.row_bytes for p in self._parts) if self._parts is not None else super().row_bytes

    def kept(self, sequence: int = 0) -> mx.array:
        """[Hkv, size] int32, the positions of the rows that each KV head stores, in temporal order."""
        return self._one(sequence).kept()

    def ranks(self, sequence: int = 0) -> mx.array:
        """[Hkv, size] float32, beside `kept`: what a decision taken now would compare."""
        return self._one(sequence).ranks()

    def _one(self, sequence: int) -> KeyformerKVCache:
        return self._parts[sequence] if self._parts is not None else self._single(sequence)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None:
            raise ValueError(NO_WINDOW.format(window_size))
        self._enter(N)
        if not self._in_prompt:
            if self._parts is not None:
                self._settle()
            # the rows as they will be after this call's write
            return _decode_mask([r + (r <= m) for r, m in zip(self._rows, self._budgets, strict=True)])
        spans = self._spans(N)
        return _prompt_mask(self.sizes(), spans, N, return_array)

    def _own_mask(self, N: int, return_array: bool) -> Any:
        if not self._in_prompt:
            return _decode_mask(self._rows)
        starts = [rows - real for _, real, rows in self._call]
        return _prompt_mask(starts, [(left, real) for left, real, _ in self._call], N, return_array)

    # -- padding

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | mx.array | None = None,
        lengths: Sequence[int] | mx.array | None = None,
        right_padding: Sequence[int] | mx.array | None = None,
    ) -> None:
        """Announce padding of the prompt tokens to come, in as many calls as they take.

        Args:
            left_padding: [B] padding tokens before the first token of each sequence.
            lengths: [B] tokens of each sequence, without padding; needed where right padding follows them.
            right_padding: [B] padding tokens after the last token.

        Raises:
            ValueError: not one number per sequence, a negative one, or right padding without lengths.
        """
        given = {"left_padding": left_padding, "lengths": lengths, "right_padding": right_padding}
        counts = {name: [int(n) for n in numbers] for name, numbers in given.items() if numbers is not None}
        for name, values in counts.items():
            if len(values) != len(self._rows) or min(values) < 0:
                raise ValueError(f"{name}: expected {len(self._rows)} numbers of at least 0, got {values}.")
        if max(counts.get("right_padding", [0])) and "lengths" not in counts:
            raise ValueError("right_padding: expected lengths beside it, to know where it begins.")
        if "left_padding" in counts:
            self._left = [a + b for a, b in zip(self._left, counts["left_padding"], strict=True)]
        if "lengths" in counts:
            self._lengths = counts["lengths"]

    def finalize(self) -> None:
        """The padded prompt tokens have all come."""
        self._lengths = None

    def _spans(self, S: int) -> list[tuple[int, int]]:
        """Of the next call's S columns: padding on the left, then tokens, for each sequence."""
        spans = []
        for b, left in enumerate(self._left):
            left = min(S, left)
            spans.append((left, S - left if self._lengths is None else min(S - left, self._lengths[b])))
        return spans

    # -- one call of the model

    def begin_prefill(self) -> None:
        """Say that `end_prefill()` will be called, so that one-token chunks before it still belong to the prompt."""
        parts = self._singles()
        for p in parts:
            p.begin_prefill()
        if self._parts is None:
            self._hold(parts)
        self._count()
        self._announced = True

    def abandon_prefill(self) -> None:
        """Nobody will call `end_prefill()` after all: the prompt ends as one that was never announced."""
        for p in self._parts or []:
            p.abandon_prefill()
        self._announced = False

    def end_prefill(self) -> None:
        """The prompt has ended: each sequence selects the rows it keeps. Calling it again does nothing."""
        if self._parts is not None:
            for p in self._parts:
                p.end_prefill()
            self._count()
        self._read = None
        self._announced = False

    def _enter(self, S: int) -> None:
        """Into the prompt, or out of it, as a call of S tokens says."""
        announced, padded = self._announced, self._lengths is not None or any(self._left)
        if S == 1 and self._in_prompt and any(self._rows) and not announced and not padded:
            for p in self._singles():
                p._check_unannounced_end()
            self.end_prefill()
        elif self._in_prompt or S > 1:
            self.begin_prefill()
            self._announced = announced

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._steady == (keys.shape, values.shape) and not (self._unseen or self.undecided):
            return self._replace_rows(keys, values)
        self._check_call(keys, values)
        S = keys.shape[2]
        self._settle()
        if S:
            self._enter(S)
        if not self._in_prompt and S:
            if self._parts is not None:
                self._stack(keys, values)
            self._write(keys, values)
            return self._new_rows_fetched(keys)
        if self._parts is None:
            return self._fetched()
        self._call, fetched = [], []
        for b, (left, real) in enumerate(self._spans(S)):
            part, columns = self._parts[b], slice(left, left + real)
            k, v = part.update_and_fetch(keys[b : b + 1, :, columns], values[b : b + 1, :, columns])
            part._unfit = False
            self._call.append((left, real, k.shape[2]))
            fetched.append((k, v))
            self._left[b] -= left
            if self._lengths is not None:
                self._lengths[b] -= real
        self._count()
        n = max(1, *(rows for _, _, rows in self._call))
        k, v = (mx.concatenate([_padded(a, a.shape[2], n, a) for a in side]) for side in zip(*fetched, strict=True))
        self._unfit = self.uneven
        self._for_readers(k, v)
        self._unseen = S if self.policy.attention == "query" else 0
        return k, v

    def _score(self, keys: mx.array, asked: Asked) -> list[mx.array]:
        mask = asked.mask
        carries = isinstance(mask, mx.array) and mask.dtype != mx.bool_
        if self._parts is None:
            # which rows a sequence has is known here; only logits that a mask carries are news
            return super()._score(keys, asked if carries or mask is None else asked._replace(mask=None))
        self._unseen = 0
        pending = []
        for b, (left, real, rows) in enumerate(self._call):
            if not real:
                continue
            columns = slice(left, left + real)
            own: Mask = "causal" if real > 1 else None
            if carries:
                assert isinstance(mask, mx.array)
                own = mx.broadcast_to(mask, (len(self._rows), *mask.shape[-3:]))[b : b + 1, :, columns, :rows]
            one = asked._replace(queries=asked.queries[b : b + 1, :, columns], mask=own)
            pending += self._parts[b]._score(keys[b : b + 1, :, :rows], one)
        self._count()
        return pending

    # -- which sequences

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Go on with these sequences only, in this order."""
        stay = [int(b) for b in batch_indices]
        self._left = [self._left[b] for b in stay]
        self._lengths = None if self._lengths is None else [self._lengths[b] for b in stay]
        if self._parts is not None:
            self._hold([self._parts[b] for b in stay])
            return
        index = mx.array(stay, mx.int32)
        self._set_arrays(None if a is None else a[index] for a in self._arrays())
        self._slot = None if self._slot is None else self._slot[index]
        for name in ("_budgets", "_rows", "_offsets", "_steps", "_were_touched"):
            values = getattr(self, name)
            setattr(self, name, [values[b] for b in stay])

    def extend(self, other: BatchKeyformerKVCache) -> None:
        """Take in the sequences of another batch, behind one's own; the other one is used up.

        Raises:
            ValueError: a batch with another policy, layer or treatment of the prompt, or padding still to come.
        """
        if not isinstance(other, BatchKeyformerKVCache):
            raise ValueError(f"extend: expected a BatchKeyformerKVCache, got {type(other).__name__}; merge makes one.")
        for name in ("policy", "layer", "prefill", "score_bytes", "rope", "uneven", "readers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"extend: expected {name} {mine!r}, got {theirs!r}.")
        if self._lengths is not None or other._lengths is not None or any(self._left + other._left):
            raise ValueError("extend: expected batches whose padded prompts have come, got one that waits for tokens.")
        self._left += other._left
        self._hold(self._singles() + other._singles())

    def extract(self, idx: int) -> KeyformerKVCache:
        """Sequence `idx` in a cache of its own, as `merge` takes it; this batch stays as it is."""
        one = self._parts[idx]._copy() if self._parts is not None else self._single(idx)
        one._announced = False  # whoever goes on with it says so anew
        return one

    @property
    def state(self) -> Any:
        """The state of each sequence."""
        return [p.state for p in self._singles()]

    @state.setter
    def state(self, v: Any) -> None:
        BatchKeyformerKVCache.__init__(self, [KeyformerKVCache.from_state(s) for s in v])


def _decode_mask(rows: list[int]) -> mx.array | None:
    """[B, 1, 1, max(rows)] boolean: the rows each sequence has; None if they all have as many."""
    n = max(rows)
    return None if min(rows) == n else (mx.arange(n) < mx.array(rows)[:, None])[:, None, None]


def _prompt_mask(starts: list[int], spans: list[tuple[int, int]], N: int, return_array: bool) -> Any:
    """The causal mask of N columns, of which `spans` says which are tokens, after `starts` rows: [B, 1, N, n] boolean,
    or what mlx-lm has for it where all sequences are alike. Padding sees a row or more, so that nothing is NaN."""
    if len(set(starts)) == 1 and all(span == (0, N) for span in spans):
        return create_attention_mask(N, offset=starts[0], return_array=return_array, window_size=None)
    ends = [start + real for start, (_, real) in zip(starts, spans, strict=True)]
    first = mx.array([start - left for start, (left, _) in zip(starts, spans, strict=True)])[:, None]
    last = mx.clip(first + mx.arange(N), 0, mx.array([max(end - 1, 0) for end in ends])[:, None])
    return (mx.arange(max(1, *ends)) <= last[..., None])[:, None]


def _padded(a: mx.array | None, rows: int, n: int, like: mx.array) -> mx.array:
    """The first `rows` rows of [1, Hkv, ...] and zeros up to n; `like` gives shape and dtype where there are none."""
    shape = (1, like.shape[1], n - rows, *like.shape[3:])
    zeros = mx.zeros(shape, like.dtype)
    return zeros if a is None or rows == 0 else mx.concatenate([a[:, :, :rows], zeros], axis=2)
