"""The functional API: key rows kept per head by accumulated proxy attention with Gumbel noise, as pure functions.

Each incoming key stands for its query. Per new token: every stored row's score grows by its share of
softmax(K . k / sqrt(D)), the new row excluded; the new row joins with score 0 (the first row of all with 1); over
budget, the unprotected row with the lowest score + tau * g goes, ties to the oldest, where g is Gumbel noise frozen per
token and tau = tau_init + min(t, T) * (tau_end - tau_init) / T after t tokens. Names, arguments and shapes are those of
VeloxQuant-MLX's documentation, which adapts Adnan et al., Keyformer, MLSys 2024, arXiv 2403.09054. At tau 0 the rule is
H2O's on proxy attention. A new row starts at score 0, so without `recent` rows most late tokens go on arrival.

Keys come in rotated at their true position. Two ways to go on from there:

- "contiguous": after every eviction the survivors are labelled 0..n-1 and turned to their labels, and the next token is
  scored against the rows as they are then. A row is turned from its un-rotated float32 form each time, never from its
  last rounding; that form travels with the returned keys (`RotatedKeys`).
- "original": survivors keep their arrival position and rotation. The fast way, with one matrix product per block.

On a CPU a one-token update in "original" mode writes one row and copies none: rows lie in a log in order of arrival,
which the states that follow one another share, and the keys and values of a state are gathered from it when they are
first used (`LoggedRows`). The log has an eighth more rows than the state that began it; when it is full, and when a
state is updated a second time, the rows move to a new one. What a state holds never changes. Several threads may update
one state; as with any MLX array, `mx.eval` its arrays before another thread gets them.

On a GPU a one-token update is two dispatches, with CUDA one while the rows are few, and so is each token of a longer
one in "contiguous" mode; in "original" mode all evictions of up to 2048 tokens are one (`kernels.insert`,
`kernels.walk`). What single tokens give is started every eighth token, or when it is first evaluated.

Unlike the documentation, keys and values keep their dtype instead of becoming float16, and the sizes of keys and values
may differ. A key with a NaN or an infinity gives and takes no mass and has score -inf: it goes before any other
unprotected row.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partialmethod
from threading import Lock
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from . import noise
from .eviction import (
    as_float32,
    as_numpy,
    join_row,
    on_cpu,
    row_logits,
    row_to_free,
    starting_scores,
    take_rows,
    walk_numpy,
)
from .kernels.insert import Arrivals, Limits, Rows, evict_row, insert_row, steps
from .kernels.walk import walk_on_device
from .policies import KeyformerProxy, check_integer
from .rope import check_base, rotate, turns, wavelengths

PositionMode = Literal["contiguous", "original"]
_NOISE_BLOCK = 256
_GRAPH_TOKENS = 8  # one by one, so many are started together: a start costs a GPU's host more than a token does
_LEAST_SPARE = 16  # free rows of a new log


@dataclass(frozen=True, eq=False)
class KeyformerState:
    """The rows one head keeps, and how it chooses them. Immutable: an update returns a new one.

    Attributes:
        keys: [n_kept, D] stored keys in temporal order, rotated at `positions`; None before the first update.
        values: [n_kept, Dv] stored values, or None.
        scores: [n_kept] float32 accumulated proxy-attention mass, or None.
        gumbel: [n_kept] float32 noise, drawn when the token arrived, or None. It enters the decision, not the score.
        positions: [n_kept] int32, the position each key is rotated at, or None.
        pos: tokens this head has inserted: indexes the noise and drives the temperature.
        n_sink: first rows, never evicted.
        budget: most rows kept, sinks and recent rows included.
        recent: last rows, never evicted.
        tau_init, tau_end, anneal_steps: the temperature is tau_init at pos 0, tau_end from pos anneal_steps on, linear
            between; tau_init throughout where anneal_steps is 0.
        rope_base: base of the model's RoPE.
        next_pos: position of the next token, whatever was evicted.
        seed: seed of the noise.
        position_mode: "contiguous" or "original", see the module.

    Raises:
        ValueError: a value that cannot work, with what was expected.
    """

    keys: mx.array | None
    values: mx.array | None
    scores: mx.array | None
    gumbel: mx.array | None
    positions: mx.array | None
    pos: int
    n_sink: int
    budget: int
    recent: int
    tau_init: float
    tau_end: float
    anneal_steps: int
    rope_base: float
    next_pos: int
    seed: int
    position_mode: PositionMode = "contiguous"

    def __post_init__(self) -> None:
        _Rule.of(self).check([self.seed], self.next_pos, self.pos)

    @property
    def tau(self) -> float:
        """tau_init, under its older name."""
        return self.tau_init


class RotatedKeys(mx.array):
    """Keys in "contiguous" mode, with the float32 rows before rotation that they were turned from.

    An ordinary array to every operation; what an operation returns is a plain array, and an update that is given one
    un-rotates the rows it sees. Changes in place are refused.
    """

    unrotated: mx.array  # the shape of the keys, float32

    def __init__(self, keys: mx.array, unrotated: mx.array) -> None:
        super().__init__(keys)
        self.unrotated = unrotated

    def __copy__(self) -> "RotatedKeys":
        return RotatedKeys(self, self.unrotated)

    def __deepcopy__(self, memo: Any) -> "RotatedKeys":
        return RotatedKeys(self, self.unrotated)

    def __reduce__(self) -> tuple[Any, ...]:
        return RotatedKeys, (mx.array(self), self.unrotated)

    def _change(self, method: str, *arguments: Any) -> Any:
        raise TypeError("RotatedKeys: assigning rows would leave their un-rotated form behind; use mx.array(keys).")


class LoggedRows(mx.array):
    """Keys or values in "original" mode on a CPU, gathered from a log of rows when they are first used.

    An ordinary array to every operation; what an operation returns is a plain array, and so are copies and pickles. An
    update that is given the keys and values of one state goes on in their log; one that is given any other arrays, or
    arrays that were changed in place, copies them to a log of its own. Numbers written through NumPy's view of the
    array are not seen by updates.
    """

    _slots: "_Slots | None"

    def __init__(self, rows: mx.array, slots: "_Slots | None") -> None:
        super().__init__(rows)
        self._slots = slots

    def __copy__(self) -> mx.array:
        return mx.array(self)

    def __deepcopy__(self, memo: Any) -> mx.array:
        return mx.array(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return mx.array, (mx.array(self),)

    def _change(self, method: str, *arguments: Any) -> Any:
        self._slots = None
        return getattr(mx.array, method)(self, *arguments)


_CHANGES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _change in ("__setitem__", *(f"__i{name}__" for name in _CHANGES)):
    setattr(RotatedKeys, _change, partialmethod(RotatedKeys._change, _change))
    setattr(LoggedRows, _change, partialmethod(LoggedRows._change, _change))


class _Log:
    """Keys and values of R heads in order of arrival; each row is written once, so that states can share them."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        R, self.end = keys.shape[:2]  # rows written so far, of every head
        spare = max(_LEAST_SPARE, self.end // 8)
        self.capacity = self.end + spare
        self.first = self.capacity * np.arange(R, dtype=np.int32)[:, None]  # each head's first row in `flat`
        arrays = [mx.concatenate([a, mx.zeros((R, spare, a.shape[2]), a.dtype)], axis=1) for a in (keys, values)]
        self.flat = [a.reshape(R * self.capacity, -1) for a in arrays]
        mx.eval(arrays, self.flat)
        self.memory = [as_numpy(a) for a in arrays]  # [R, capacity, ...], the memory of `flat`, written from here
        self._lock = Lock()

    def append(self, end: int, key: np.ndarray, value: np.ndarray) -> bool:
        """Write one row [R, D] behind the first `end`, unless another state did so or there is no room."""
        with self._lock:
            if end != self.end or end == self.capacity:
                return False
            self.end += 1
        for memory, row in zip(self.memory, (key, value), strict=True):
            memory[:, end] = row
        return True


class _Slots(NamedTuple):
    """The rows of one state in a log that had `end` rows."""

    log: _Log
    at: np.ndarray  # [R, n] int32 into `log.flat`
    end: int


class _Rule(NamedTuple):
    """What every head of one call shares."""

    n_sink: int
    budget: int
    recent: int
    tau_init: float
    tau_end: float
    anneal_steps: int
    rope_base: float
    position_mode: PositionMode

    @classmethod
    def of(cls, state: KeyformerState) -> "_Rule":
        return cls(*(getattr(state, name) for name in cls._fields))

    def check(self, seeds: Sequence[int], next_pos: int = 0, pos: int = 0) -> None:
        try:
            _check_rule(*self)
            _check_seeds(*seeds)
        except TypeError:  # a value that has no hash
            _check_rule.__wrapped__(*self)
            _check_seeds.__wrapped__(*seeds)
        check_integer("next_pos", next_pos, 0)
        check_integer("pos", pos, 0)

    @property
    def limits(self) -> Limits:
        return Limits(self.budget, self.n_sink, self.recent, self.rope_base)

    def temperatures(self, pos: int, count: int) -> Sequence[float]:
        """tau at each decision of `count` tokens, `pos` of them inserted before."""
        if self.anneal_steps == 0 or self.tau_init == self.tau_end:
            return (self.tau_init,) * count
        return noise.temperatures(pos, count, self.tau_init, self.tau_end, self.anneal_steps)


@lru_cache(maxsize=64, typed=True)
def _check_rule(
    n_sink: int,
    budget: int,
    recent: int,
    tau_init: float,
    tau_end: float,
    anneal_steps: int,
    rope_base: float,
    position_mode: PositionMode,
) -> None:
    """Refuse a rule that cannot work; what has passed once costs a decoding step nothing."""
    check_integer("recent", recent, 0)
    check_base("rope_base", rope_base)
    if position_mode not in ("contiguous", "original"):
        raise ValueError(f"positions: expected 'contiguous' or 'original', got {position_mode!r}.")
    KeyformerProxy(
        n_sink=n_sink, recent=recent, tau_init=tau_init, tau_end=tau_end, anneal_steps=anneal_steps
    ).check_budget(budget)


@lru_cache(maxsize=1024, typed=True)
def _check_seeds(*seeds: int) -> None:
    for seed in seeds:
        check_integer("seed", seed, 0)
        if seed >= 2**64:
            raise ValueError(f"seed: expected an integer below 2**64, got {seed}.")


def init_keyformer_state(
    n_sink: int,
    budget: int,
    head_dim: int,
    recent: int = 0,
    tau: float | None = None,
    tau_init: float = 1.0,
    tau_end: float = 1.0,
    anneal_steps: int = 0,
    rope_base: float = 10000.0,
    seed: int = 0,
    positions: PositionMode = "contiguous",
) -> KeyformerState:
    """An empty state, before any token.

    Args:
        n_sink: first rows to protect.
        budget: most rows kept, n_sink + recent included.
        head_dim: head size D; the state takes it from the first keys, so this is checked and not stored.
        recent: last rows to protect.
        tau: deprecated, sets tau_init and tau_end.
        tau_init, tau_end, anneal_steps: see KeyformerState; temperature 0 is H2O.
        rope_base: base of the model's RoPE; for "contiguous".
        seed: seed of the noise, in [0, 2**64).
        positions: "contiguous" or "original", see the module.

    Raises:
        ValueError: negative or fractional counts; temperatures that are negative, NaN, infinite or fall; sinks and
            recent rows that leave nothing to evict; a seed or base out of range.
    """
    check_integer("head_dim", head_dim, 1)
    if tau is not None:
        warnings.warn("tau is deprecated: set tau_init and tau_end.", DeprecationWarning, stacklevel=2)
        tau_init = tau_end = tau
    return KeyformerState(
        keys=None,
        values=None,
        scores=None,
        gumbel=None,
        positions=None,
        pos=0,
        n_sink=n_sink,
        budget=budget,
        recent=recent,
        tau_init=tau_init,
        tau_end=tau_end,
        anneal_steps=anneal_steps,
        rope_base=rope_base,
        next_pos=0,
        seed=seed,
        position_mode=positions,
    )


def keyformer_update(state: KeyformerState, new_keys: mx.array, new_values: mx.array) -> KeyformerState:
    """The state after S more tokens, one after another; how they are cut into calls changes nothing.

    Args:
        state: unchanged.
        new_keys: [S, D] of a floating dtype, rotated at state.next_pos and on.
        new_values: [S, Dv].

    Raises:
        ValueError: shapes or dtypes that do not fit the state.
    """
    _check_new(new_keys, new_values, "[S, D]")
    if new_keys.shape[0] == 0:
        return state
    stored = (state.keys, state.values, state.scores, state.gumbel, state.positions)
    heads = [None if a is None else _in_same_log(a, a[None]) for a in stored]
    rows = _stored_rows(heads, new_keys[None], new_values[None], state.budget)
    if isinstance(state.keys, RotatedKeys):
        rows = rows._replace(unrotated=state.keys.unrotated[None])
    seeds = [state.seed]
    rows, _ = _insert(rows, new_keys[None], new_values[None], _Rule.of(state), state.next_pos, state.pos, seeds)
    # rows that stayed as they were: the same array, or its indexing would grow from call to call
    keys, values = (
        old if new is given else _in_same_log(new, new[0])
        for old, given, new in zip(stored[:2], heads[:2], rows[:2], strict=True)
    )
    if rows.unrotated is not None:
        keys = RotatedKeys(rows.keys[0], rows.unrotated[0])
    S = new_keys.shape[0]
    return replace(
        state,
        keys=keys,
        values=values,
        scores=rows.scores[0],
        gumbel=rows.gumbel[0],
        positions=rows.positions[0],
        next_pos=state.next_pos + S,
        pos=state.pos + S,
    )


def _in_same_log(a: mx.array, reshaped: mx.array) -> mx.array:
    return LoggedRows(reshaped, a._slots) if isinstance(a, LoggedRows) else reshaped


def keyformer_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    scores: mx.array | None,
    gumbel: mx.array | None,
    positions: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    budget: int,
    recent: int,
    tau_init: float,
    tau_end: float,
    anneal_steps: int,
    rope_base: float,
    next_pos: int,
    pos: int,
    seeds: Sequence[int],
    return_indices: bool = False,
    position_mode: PositionMode = "contiguous",
) -> tuple[Any, ...]:
    """`keyformer_update` for BH heads at once, all but their seeds alike.

    Args:
        keys, values, scores, gumbel, positions: what the last call returned, or five times None.
        new_keys, new_values: [BH, S, D] and [BH, S, Dv].
        n_sink, budget, recent, tau_init, tau_end, anneal_steps, rope_base: as in KeyformerState.
        next_pos, pos: position of the first new token, and tokens inserted before it.
        seeds: one seed per head.
        return_indices: also return where each kept row was.
        position_mode: "contiguous" or "original", see the module (`positions` is the name of the array here).

    Returns:
        keys [BH, n_kept, D], values [BH, n_kept, Dv], scores, gumbel (float32) and positions (int32) [BH, n_kept],
        next_pos, pos; with return_indices also [BH, n_kept] int32, ascending, into the stored rows followed by the new.

    Raises:
        ValueError: a value that cannot work; shapes or dtypes that do not fit together.
    """
    _check_new(new_keys, new_values, "[BH, S, D]")
    BH, S = new_keys.shape[:2]
    if len(seeds) != BH:
        raise ValueError(f"seeds: expected one per head ({BH}), got {len(seeds)}.")
    rule = _Rule(n_sink, budget, recent, tau_init, tau_end, anneal_steps, rope_base, position_mode)
    rule.check(seeds, next_pos, pos)
    rows = _stored_rows([keys, values, scores, gumbel, positions], new_keys, new_values, budget)
    if isinstance(keys, RotatedKeys):
        rows = rows._replace(unrotated=keys.unrotated)
    rows, index = _insert(rows, new_keys, new_values, rule, next_pos, pos, seeds, return_indices)
    kept = rows.keys if rows.unrotated is None else RotatedKeys(rows.keys, rows.unrotated)
    out = (kept, *rows[1:5], next_pos + S, pos + S)
    return (*out, index) if return_indices else out


def keyformer_get_kv(state: KeyformerState) -> tuple[mx.array, mx.array]:
    """Keys [n_kept, D] and values [n_kept, Dv] of the state; two [0, 1] arrays before the first update."""
    if state.keys is None or state.values is None:
        return mx.zeros((0, 1), mx.float16), mx.zeros((0, 1), mx.float16)
    return state.keys, state.values


def keyformer_fp16_bytes(state: KeyformerState) -> int:
    """Bytes of the stored keys and values at 2 bytes a number; bookkeeping is not counted."""
    return sum(2 * a.size for a in keyformer_get_kv(state))


def full_keyformer_fp16_bytes(tokens_seen: int, head_dim: int) -> int:
    """Bytes of keys and values at 2 bytes a number if all `tokens_seen` tokens were stored."""
    check_integer("tokens_seen", tokens_seen, 0)
    check_integer("head_dim", head_dim, 1)
    return 2 * tokens_seen * head_dim * 2


def metal_available() -> bool:
    """Whether MLX can run on an Apple GPU here: what it computes there, updates and evictions do in Metal kernels."""
    return bool(mx.metal.is_available())


def keyformer_fused_evict(
    keys_mid: mx.array,
    values_mid: mx.array,
    scores_mid: mx.array,
    gumbel_mid: mx.array,
    positions_mid: mx.array,
    n_sink: int,
    rope_base: float,
    tau: float = 0.0,
    recent: int = 0,
    return_indices: bool = False,
    position_mode: PositionMode = "contiguous",
) -> tuple[mx.array, ...]:
    """One eviction per head: the step after a new row has joined rows that were at the budget.

    On a GPU one kernel chooses, gathers and turns, except for dtypes other than float32, float16 and bfloat16 and for
    fewer than 8 numbers in all; a turned key may differ from that of array operations by one unit in the last place.
    Keys other than those of an update are un-rotated first. Elsewhere array operations do it.

    Args:
        keys_mid, values_mid: [BH, n, D] and [BH, n, Dv], the new row last.
        scores_mid, gumbel_mid: [BH, n] float32.
        positions_mid: [BH, n] int32, where each key is rotated.
        n_sink, recent: protected first and last rows; n_sink + recent < n.
        rope_base: for "contiguous".
        tau: temperature of this decision.
        return_indices: also return the kept rows' indices.
        position_mode: "contiguous" or "original", see the module.

    Returns:
        keys, values, scores, gumbel, positions with n - 1 rows; with return_indices also [BH, n - 1] int32.

    Raises:
        ValueError: a value that cannot work; shapes that do not fit together.
    """
    _check_new(keys_mid, values_mid, "[BH, n, D]")
    n = keys_mid.shape[1]
    rule = _Rule(n_sink, n - 1, recent, tau, tau, 0, rope_base, position_mode)
    rule.check([0])
    rows = _stored_rows([keys_mid, values_mid, scores_mid, gumbel_mid, positions_mid], keys_mid, values_mid, n)
    if position_mode == "contiguous":
        given = keys_mid.unrotated if isinstance(keys_mid, RotatedKeys) else None
        if given is None:
            given = _unrotated(keys_mid, np.array(positions_mid), rope_base)
        rows = rows._replace(unrotated=given)
    rows, index = evict_row(rows, rule.limits, tau)
    keys = rows.keys if rows.unrotated is None else RotatedKeys(rows.keys, rows.unrotated)
    return (keys, *rows[1:5], index) if return_indices else (keys, *rows[1:5])


# -- what goes in --------------------------------------------------------------------------------------------------


def _check_new(keys: mx.array, values: mx.array, axes: str) -> None:
    ndim = axes.count(",") + 1
    for name, a in (("keys", keys), ("values", values)):
        if a.ndim != ndim or a.shape[-1] == 0 or not mx.issubdtype(a.dtype, mx.floating):
            raise ValueError(f"{name}: expected {axes} of a floating dtype, got {a.dtype} {a.shape}.")
    if keys.shape[:-1] != values.shape[:-1]:
        raise ValueError(f"values: expected as many rows as keys {keys.shape}, got {values.shape}.")


def _stored_rows(arrays: Sequence[mx.array | None], keys: mx.array, values: mx.array, budget: int) -> Rows:
    """The stored rows that new keys and values [R, S, ...] join, checked against them; none given: zero rows."""
    names = Rows._fields[:5]
    there = [a for a in arrays if a is not None]
    R = keys.shape[0]
    if not there:
        flat = [mx.zeros((R, 0), dtype) for dtype in (mx.float32, mx.float32, mx.int32)]
        return Rows(keys[:, :0], values[:, :0], *flat)
    if len(there) < len(arrays):
        missing = next(name for name, a in zip(names, arrays, strict=True) if a is None)
        raise ValueError(f"{missing}: expected an array, as {len(there)} of the others are, got None.")
    n = there[0].shape[1] if there[0].ndim == 3 else -1
    small = (R, n)
    fits = [(R, n, keys.shape[2]), (R, n, values.shape[2]), small, small, small]
    types = [keys.dtype, values.dtype, mx.float32, mx.float32, mx.int32]
    if [a.shape for a in there] != fits or [a.dtype for a in there] != types:
        for name, a, shape, dtype in zip(names, there, fits, types, strict=True):
            if a.shape != shape or a.dtype != dtype:
                raise ValueError(
                    f"{name}: expected {dtype} {shape} to match the new keys and values and the other arrays, "
                    f"got {a.dtype} {a.shape}."
                )
    if n > budget:
        raise ValueError(f"keys: expected at most budget ({budget}) stored rows, got {n}; evict them first.")
    return Rows(*there)


# -- insertion -------------------------------------------------------------------------------------------------------


def _insert(
    rows: Rows,
    new_keys: mx.array,
    new_values: mx.array,
    rule: _Rule,
    next_pos: int,
    pos: int,
    seeds: Sequence[int],
    indices: bool = False,
) -> tuple[Rows, mx.array | None]:
    """The rows after the S new ones, and, where asked for, [R, n_kept] int32 `indices` into stored, then new rows."""
    R, S = new_keys.shape[:2]
    if S == 0:
        n = rows.keys.shape[1]
        return rows, mx.broadcast_to(mx.arange(n, dtype=mx.int32), (R, n))
    taus = rule.temperatures(pos, S)
    index: mx.array | None
    if rule.position_mode == "original" and on_cpu():
        gumbel = _gumbel(tuple(seeds), pos, S)
        if S == 1 and rows.keys.shape[1] > 0:
            return _insert_row(rows, new_keys, new_values, gumbel, next_pos, rule, taus[0], indices)
        positions = np.arange(next_pos, next_pos + S, dtype=np.int32)[None].repeat(R, axis=0)
        rows, index = _insert_numpy(rows, new_keys, new_values, gumbel, positions, rule, taus)
    elif S == 1:
        block, at = divmod(pos, _NOISE_BLOCK)
        new = Arrivals(new_keys, new_values, _gumbel_on_device(tuple(seeds), block))
        if rule.position_mode == "contiguous":
            rows, new = _with_unrotated(rows, new, rule, next_pos)
        step = _steps(rule, block, next_pos - pos)[at]
        rows, index = insert_row(rows, new, 0, at, next_pos, rule.limits, taus[0], step)
        if at % _GRAPH_TOKENS != _GRAPH_TOKENS - 1:
            return rows, index
    else:
        new = Arrivals(new_keys, new_values, _noise_of(tuple(seeds), pos, S))
        insert = _insert_block if rule.position_mode == "original" else _insert_contiguous
        rows, index = insert(rows, new, rule, next_pos, taus, indices)
    mx.async_eval(*(a for a in (*rows, index) if a is not None))  # so that no graph grows from call to call
    return rows, index


def _insert_numpy(
    rows: Rows,
    new_keys: mx.array,
    new_values: mx.array,
    gumbel: np.ndarray,
    positions: np.ndarray,
    rule: _Rule,
    taus: Sequence[float],
) -> tuple[Rows, mx.array]:
    """`_insert` for "original" on a CPU, all but keys and values in NumPy: each wait for MLX costs time."""
    new = (starting_scores(as_float32(as_numpy(new_keys))), gumbel, positions)
    joined = [np.concatenate([np.asarray(a), b], axis=1) for a, b in zip(rows[2:5], new, strict=True)]
    frozen = joined[1] if any(taus) else None
    limits = (rule.budget, rule.n_sink, rule.recent)
    kept, scores = walk_numpy(rows.keys, new_keys, joined[0], *limits, frozen, taus)
    index = mx.array(kept)
    small = (mx.array(a) for a in (scores, _rows_of(joined[1], kept), _rows_of(joined[2], kept)))
    return Rows(_take(rows.keys, new_keys, index), _take(rows.values, new_values, index), *small), index


@np.errstate(over="ignore", invalid="ignore")
def _insert_row(
    rows: Rows,
    new_keys: mx.array,
    new_values: mx.array,
    gumbel: np.ndarray,
    position: int,
    rule: _Rule,
    tau: float,
    indices: bool,
) -> tuple[Rows, mx.array | None]:
    """`_insert_numpy` for one row, which is decoding: stored keys are read once, and no stored row is copied."""
    R, n, _ = rows.keys.shape
    scores, noise, came = (np.ascontiguousarray(a) for a in rows[2:5])
    arrived = as_numpy(new_keys)[:, 0], as_numpy(new_values)[:, 0]
    key = as_float32(arrived[0])
    slots = _slots(rows)
    if slots is None:
        logits = row_logits(as_numpy(rows.keys), key, np.empty((R, n), np.float32))
    else:
        logits = np.empty((R, slots.log.capacity), np.float32)
        row_logits(slots.log.memory[0][:, : slots.end], key, logits[:, : slots.end])
        logits = logits.take(slots.at)
    scores, start = join_row(logits, scores, key)
    gone = None
    if n == rule.budget:
        scaled = (noise, gumbel[:, 0]) if tau == 1 else (noise * np.float32(tau), gumbel[:, 0] * np.float32(tau))
        gone = row_to_free(scores, start, rule.n_sink, rule.recent, *(scaled if tau else ()))
    kept = None
    if indices:
        column = np.arange(n + 1 if gone is None else n, dtype=np.int32)
        kept = mx.array(np.tile(column, (R, 1)) if gone is None else column + (column >= gone[:, None]))
    if gone is not None and rule.recent == 0 and (gone == n).all():
        return rows._replace(scores=mx.array(scores)), kept
    if slots is None or not slots.log.append(slots.end, *arrived):
        log = _Log(rows.keys, rows.values)
        log.append(n, *arrived)
        slots = _Slots(log, log.first + np.arange(n, dtype=np.int32), n)
    log = slots.log
    at, *small = _joined(
        (slots.at, scores, noise, came), (log.first + slots.end, start[:, None], gumbel, np.int32(position)), gone
    )
    slots = _Slots(log, np.asarray(at), slots.end + 1)
    keys, values = (LoggedRows(mx.take(a, at, axis=0), slots) for a in log.flat)
    return Rows(keys, values, *small), kept


def _joined(
    old: Sequence[np.ndarray], new: Sequence[np.ndarray | np.generic], gone: np.ndarray | None
) -> list[mx.array]:
    """Each old [R, n], contiguous, with its new [R, 1] or number behind it, less the column `gone` [R] of each head.

    `gone` counts the new one as column n.
    """
    R, n = old[0].shape
    pairs = list(zip(old, new, strict=True))
    if gone is None:
        return [mx.array(np.concatenate([a, np.broadcast_to(b, (R, 1))], axis=1)) for a, b in pairs]
    gone = gone.astype(np.int32)[:, None]
    moves, joins = _columns(n - 1) >= gone, gone < n
    joined = []
    for a, b in pairs:
        out = mx.array(a)
        memory = np.asarray(out)  # not a copy: the array is ours alone until it is returned
        np.copyto(memory[:, :-1], a[:, 1:], where=moves)
        np.copyto(memory[:, -1:], b, where=joins)
        joined.append(out)
    return joined


@lru_cache(maxsize=8)
def _columns(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def _slots(rows: Rows) -> _Slots | None:
    """Where in a log the keys and values are that one update returned."""
    if isinstance(rows.keys, LoggedRows) and isinstance(rows.values, LoggedRows):
        return rows.keys._slots if rows.keys._slots is rows.values._slots else None
    return None


def _rows_of(a: np.ndarray, index: np.ndarray) -> np.ndarray:
    """`np.take_along_axis` over [R, n], several times faster."""
    taken: np.ndarray = a.take(index + a.shape[1] * np.arange(len(a))[:, None])
    return taken


def _insert_block(
    rows: Rows, new: Arrivals, rule: _Rule, next_pos: int, taus: Sequence[float], indices: bool
) -> tuple[Rows, mx.array]:
    """`_insert` of several rows for "original", without leaving the device."""
    R, S = new.keys.shape[:2]
    # 0, or -inf for a bad key, without a number from the host: x - x is 0 or NaN, and the logarithms are of 1 and 0
    nought = (new.keys - new.keys).sum(axis=-1)
    start = mx.log((nought == nought).astype(mx.float32))
    places = mx.broadcast_to(mx.arange(next_pos, next_pos + S, dtype=mx.int32), (R, S))
    came = start, new.gumbel, places
    scores, gumbel, positions = (mx.concatenate([a, b], axis=1) for a, b in zip(rows[2:5], came, strict=True))
    frozen = gumbel if any(taus) else None
    index, scores = walk_on_device(rows.keys, new.keys, scores, rule.budget, rule.n_sink, rule.recent, frozen, taus)
    gumbel, positions = (mx.take_along_axis(a, index, axis=1) for a in (gumbel, positions))
    keys, values = _take(rows.keys, new.keys, index), _take(rows.values, new.values, index)
    return Rows(keys, values, scores, gumbel, positions), index


def _take(old: mx.array, new: mx.array, index: mx.array) -> mx.array:
    """Rows `index` [R, kept] of old [R, n, D] and new [R, S, D] in a row; one new row joins without a copy of all."""
    n, S, kept = old.shape[1], new.shape[1], index.shape[1]
    if kept == n + S:
        return mx.concatenate([old, new], axis=1)
    if S > 1:
        return take_rows(mx.concatenate([old, new], axis=1), index)
    taken = take_rows(old, mx.minimum(index, n - 1))
    # not `taken` on the right: read while it is written, it would be copied
    taken[:, -1:] = mx.where((index[:, -1:] == n)[..., None], new, old[:, -1:])
    return taken


def _insert_contiguous(
    rows: Rows, new: Arrivals, rule: _Rule, next_pos: int, taus: Sequence[float], indices: bool
) -> tuple[Rows, mx.array | None]:
    """`_insert`, token by token: an eviction changes the rows that the next token is scored against."""
    rows, new = _with_unrotated(rows, new, rule, next_pos)
    R, n = rows.scores.shape
    index = mx.broadcast_to(mx.arange(n, dtype=mx.int32), (R, n)) if indices else None
    S = len(taus)
    table = steps(range(S), range(S), range(next_pos, next_pos + S), taus)
    for i, tau in enumerate(taus):
        rows, kept = insert_row(rows, new, i, i, next_pos + i, rule.limits, tau, table[i])
        if index is not None:
            index = take_rows(mx.concatenate([index, mx.full((R, 1), n + i, mx.int32)], axis=1), kept)
        if i % _GRAPH_TOKENS == _GRAPH_TOKENS - 1:
            mx.async_eval(*(a for a in (*rows, index) if a is not None))
    return rows, index


def _with_unrotated(rows: Rows, new: Arrivals, rule: _Rule, next_pos: int) -> tuple[Rows, Arrivals]:
    """Both with their keys before rotation."""
    if rows.unrotated is None:
        rows = rows._replace(unrotated=_unrotated(rows.keys, np.array(rows.positions), rule.rope_base))
    D = new.keys.shape[2]
    if new.keys.shape[1] == 1:
        block, at = divmod(next_pos, _NOISE_BLOCK)
        cosines, sines = _turns_back(block, D, rule.rope_base)
        unrotated = rotate(new.keys, cosines[at : at + 1], sines[at : at + 1])
    else:
        unrotated = _unrotated(new.keys, np.arange(next_pos, next_pos + new.keys.shape[1]), rule.rope_base)
    return rows, new._replace(unrotated=unrotated)


@lru_cache(maxsize=16)
def _turns_back(block: int, dims: int, rope_base: float) -> tuple[mx.array, mx.array]:
    """`turns` to position 0 from a stretch of positions; decoding asks for one of them at a time."""
    return turns(-np.arange(block * _NOISE_BLOCK, (block + 1) * _NOISE_BLOCK), wavelengths(dims, rope_base))


@lru_cache(maxsize=64)
def _steps(rule: _Rule, block: int, lead: int) -> mx.array:
    """`steps` of a stretch of single tokens, which are at position `lead` + pos."""
    first = block * _NOISE_BLOCK
    positions = range(first + lead, first + lead + _NOISE_BLOCK)
    return steps([0] * _NOISE_BLOCK, range(_NOISE_BLOCK), positions, rule.temperatures(first, _NOISE_BLOCK))


def _unrotated(keys: mx.array, positions: np.ndarray, rope_base: float) -> mx.array:
    """Keys before rotation, float32, as far as the rounding of their dtype lets us know them."""
    return rotate(keys, *turns(-positions, wavelengths(keys.shape[2], rope_base)))


def _gumbel(seeds: tuple[int, ...], first: int, count: int) -> np.ndarray:
    """[R, count] float32, the frozen noise of tokens first, first + 1, ...: one stream per seed."""
    block, start = divmod(first, _NOISE_BLOCK)
    drawn = _gumbel_block(seeds, block)
    if start + count > _NOISE_BLOCK:
        rest = range(block + 1, -(-(first + count) // _NOISE_BLOCK))
        drawn = np.concatenate([drawn, *(_gumbel_block(seeds, b) for b in rest)], axis=1)
    return drawn[:, start : start + count]


@lru_cache(maxsize=1024)
def _gumbel_block(seeds: tuple[int, ...], block: int) -> np.ndarray:
    """A stretch of the noise; decoding asks for one number of it at a time."""
    positions = mx.arange(block * _NOISE_BLOCK, (block + 1) * _NOISE_BLOCK)
    return np.asarray(mx.stack([noise.gumbel(seed, 0, mx.array(0), positions) for seed in seeds]))


def _noise_of(seeds: tuple[int, ...], first: int, count: int) -> mx.array:
    """[R, count] float32, the same numbers where MLX computes, not yet computed."""
    return noise.gumbel_of_streams(_streams(seeds), mx.arange(first, first + count))


@lru_cache(maxsize=64)
def _streams(seeds: tuple[int, ...]) -> mx.array:
    return mx.array([noise.stream(seed, 0) for seed in seeds], mx.uint32)


@lru_cache(maxsize=64)
def _gumbel_on_device(seeds: tuple[int, ...], block: int) -> mx.array:
    """The same [R, _NOISE_BLOCK] numbers where MLX computes."""
    drawn = _noise_of(seeds, block * _NOISE_BLOCK, _NOISE_BLOCK)
    mx.eval(drawn)
    return drawn
