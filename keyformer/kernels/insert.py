"""One new row per head into the rows of the functional API, and out of them the one that goes, on a GPU in two
dispatches or one.

`insert_row` scores the stored rows by the new key and lets it join; over the budget one row goes, and what is left is
written in temporal order. `evict_row` is the second half alone, one dispatch. `insert_ops` and `evict_ops` are the
definitions, in array operations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .. import eviction
from ..eviction import take_rows
from ..rope import rotate, turns, wavelengths
from . import walk
from .build import Kernel, backend, bits, build, integers

log = logging.getLogger(__name__)
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_THREADS, _ALONE_THREADS = 256, 512
_BLOCKS = 256  # threadgroups at most: each makes its head's choice for itself, and then moves a share of the rows
# Up to so many bytes of a head's keys, and so many rows, each threadgroup finds the logits for itself as well: with
# CUDA that takes less time than a second dispatch.
_ALONE_BYTES, _ALONE_ROWS = 1 << 19, 4096


class Rows(NamedTuple):
    """What R heads store, in temporal order: [R, n, D], [R, n, Dv] and three times [R, n] (see KeyformerState)."""

    keys: mx.array
    values: mx.array
    scores: mx.array
    gumbel: mx.array
    positions: mx.array
    unrotated: mx.array | None = None  # for "contiguous" only: the keys before rotation, float32


class Arrivals(NamedTuple):
    """New rows: [R, S, D], [R, S, Dv], noise [R, N] with N apart from S; `unrotated` [R, S, D] where `Rows` have it."""

    keys: mx.array
    values: mx.array
    gumbel: mx.array
    unrotated: mx.array | None = None


class Limits(NamedTuple):
    """How a row is chosen, and with which base keys are turned to their new labels; 0 where they are not."""

    budget: int
    n_sink: int
    recent: int
    rope_base: float = 0.0


def insert_row(
    rows: Rows,
    new: Arrivals,
    token: int,
    noise_at: int,
    position: int,
    limits: Limits,
    tau: float,
    step: mx.array | None = None,
) -> tuple[Rows, mx.array]:
    """The rows after one token more, and their indices into the stored rows and the new one.

    On a GPU that is `insert_kernel`, except where it does not serve (`unsupported` says where) and array operations do
    the same. It is tried against them the first time of each case, and a warning says where they differ.

    Args:
        rows: at most `limits.budget` stored rows of each head, none too.
        new: S rows that arrive; `token` says which of them is meant.
        noise_at: column of its noise.
        position: where its key is rotated.
        limits, tau: the rule, and the temperature of this decision.
        step: one of `steps`, for this token; without it the numbers are fetched from the host's memory.

    Returns:
        `Rows` with at most `budget` of them, and [R, n_kept] int32.
    """
    back_end = backend()
    arguments = rows, new, token, noise_at, position, limits, tau
    if back_end is not None and not unsupported(rows, new):
        kernels = _kernels(back_end)
        _, n, D = rows.keys.shape
        alone = back_end == "cuda" and n <= _ALONE_ROWS and n * D * rows.keys.dtype.size <= _ALONE_BYTES
        case = "insert", back_end, alone, *_compiled_for(rows)
        how = _ALONE_THREADS if alone else _THREADS, alone, step
        if case not in _serves:
            _serves[case] = _agrees(lambda: insert_kernel(kernels, *arguments, *how), lambda: insert_ops(*arguments))
        if _serves[case]:
            return insert_kernel(kernels, *arguments, *how)
    return insert_ops(*arguments)


def evict_row(rows: Rows, limits: Limits, tau: float) -> tuple[Rows, mx.array]:
    """The rows without the one that goes in each head, and the indices [R, n - 1] int32 of the others.

    `limits.budget` is not read. One dispatch on a GPU, under the conditions of `insert_row`.
    """
    back_end = backend()
    if back_end is not None and not unsupported(rows, rows):
        kernel = _kernels(back_end)[1]
        case = "evict", back_end, *_compiled_for(rows)
        if case not in _serves:
            _serves[case] = _agrees(
                lambda: evict_kernel(kernel, rows, limits, tau), lambda: evict_ops(rows, limits, tau)
            )
        if _serves[case]:
            return evict_kernel(kernel, rows, limits, tau)
    return evict_ops(rows, limits, tau)


# what is compiled on its own -> whether this GPU does with it what the definition says
_serves: dict[tuple[Any, ...], bool] = {}


def _compiled_for(rows: Rows) -> tuple[Any, ...]:
    return rows.keys.dtype, rows.values.dtype, rows.keys.shape[2], rows.values.shape[2], rows.unrotated is not None


def _kernels(back_end: str) -> tuple[Kernel, Kernel]:
    logits = build(back_end, "keyformer_row_logits", LOGIT_INPUTS, LOGIT_OUTPUTS, LOGIT_SOURCE, "")
    return logits, build(back_end, "keyformer_insert", INPUTS, OUTPUTS, SOURCE, HEADER)


def _agrees(kernel: Callable[[], tuple[Rows, mx.array]], definition: Callable[[], tuple[Rows, mx.array]]) -> bool:
    """One call computed both ways, the first time of each case."""
    want, want_index = definition()
    try:
        got, got_index = kernel()
        same = (got_index == want_index).all(axis=1)
        few: Any = same.astype(mx.float32).mean().item()
        alike = bool(few >= 0.5)  # a tie may go either way
        for a, b in zip(got, want, strict=True):
            if alike and a is not None and b is not None:
                near = (mx.abs(a - b) <= 1e-2 * (1 + mx.abs(b))) | (a == b) | (mx.isnan(a) & mx.isnan(b))
                alike = bool(mx.all(near.reshape(len(same), -1) | ~same[:, None]).item())
    except (RuntimeError, ValueError) as error:
        log.warning("The insertion kernel does not run here (%s); array operations do its work, more slowly.", error)
        return False
    if not alike:
        log.warning("The insertion kernel differs from its definition; array operations do its work, more slowly.")
    return alike


def unsupported(rows: Rows, new: Rows | Arrivals) -> str | None:
    """Why the kernels cannot do this step; None if they can."""
    for a in (rows.keys, rows.values):
        if a.dtype not in _DTYPES:
            return f"rows of {a.dtype}"
    if min(a.size for a in (rows.keys, rows.values, new.keys, new.values)) < 8:
        return "fewer than 8 numbers"
    return None


# -- the definition ----------------------------------------------------------------------------------------------------


def insert_ops(
    rows: Rows, new: Arrivals, token: int, noise_at: int, position: int, limits: Limits, tau: float
) -> tuple[Rows, mx.array]:
    """`insert_row` in array operations."""
    R, n, D = rows.keys.shape
    key, value = (a[:, token : token + 1] for a in (new.keys, new.values))
    bad = mx.any(~mx.isfinite(key), axis=-1)
    start = mx.where(bad, -mx.inf, 0.0 if n else 1.0)
    one = Rows(
        key,
        value,
        start,
        new.gumbel[:, noise_at : noise_at + 1],
        mx.full((R, 1), position, mx.int32),
        None if new.unrotated is None else new.unrotated[:, token : token + 1],
    )
    if n:
        usable = rows.scores != -mx.inf
        keys = mx.where(usable[..., None], rows.keys.astype(mx.float32), 0.0)
        logits = (keys @ key.astype(mx.float32).swapaxes(1, 2))[..., 0] * D**-0.5
        lowest = mx.finfo(mx.float32).min
        logits = mx.where(usable & ~mx.isnan(logits), mx.clip(logits, lowest, -lowest), lowest)
        mass = mx.softmax(logits, axis=-1)
        rows = rows._replace(scores=mx.where(usable & ~bad, rows.scores + mass, rows.scores))
    joined = (
        None if a is None or b is None else mx.concatenate([a, b], axis=1) for a, b in zip(rows, one, strict=True)
    )
    rows = Rows(*joined)  # type: ignore[arg-type]
    if n + 1 > limits.budget:
        return evict_ops(rows, limits, tau)
    return rows, mx.broadcast_to(mx.arange(n + 1, dtype=mx.int32), (R, n + 1))


def evict_ops(rows: Rows, limits: Limits, tau: float) -> tuple[Rows, mx.array]:
    """`evict_row` in array operations."""
    R, n, D = rows.keys.shape
    column = mx.arange(n, dtype=mx.int32)
    rank = rows.scores if tau == 0 else rows.scores + tau * rows.gumbel
    everything = mx.ones((R, n), mx.bool_)
    gone = eviction.evict_row(rank, column, everything, mx.array(n), limits.n_sink, mx.array(limits.recent))
    labels = column[:-1]
    index = labels + (labels >= gone)
    rows = Rows(*(None if a is None else take_rows(a, index) for a in rows))  # type: ignore[arg-type]
    if rows.unrotated is not None:
        turned = rotate(rows.unrotated, *_label_turns(n - 1, D, limits.rope_base)).astype(rows.keys.dtype)
        moved = rows.positions != labels
        rows = rows._replace(
            keys=mx.where(moved[..., None], turned, rows.keys), positions=mx.broadcast_to(labels, (R, n - 1))
        )
    return rows, index


@lru_cache(maxsize=8)
def _label_turns(count: int, dims: int, rope_base: float) -> tuple[mx.array, mx.array]:
    return turns(np.arange(count), wavelengths(dims, rope_base))


# -- the kernels -------------------------------------------------------------------------------------------------------


def insert_kernel(
    kernels: tuple[Kernel, Kernel],
    rows: Rows,
    new: Arrivals,
    token: int,
    noise_at: int,
    position: int,
    limits: Limits,
    tau: float,
    threads: int = _THREADS,
    alone: bool = False,
    step: mx.array | None = None,
) -> tuple[Rows, mx.array]:
    """`insert_row` with so many threads (a multiple of 32) per threadgroup: LOGIT_SOURCE and SOURCE, or SOURCE alone.

    On its own it holds up to `_ALONE_ROWS` stored rows.
    """
    R, n, D = rows.keys.shape
    if step is None:
        step = integers(token, noise_at, position, bits(tau), 0, 0, 0, 0)
    if alone:
        logits = rows.scores  # any array stands in their place
    else:
        groups = -(-n // (threads // 8))
        (logits,) = kernels[0](
            inputs=[rows.keys, new.keys, step, integers(bits(D**-0.5))],
            output_shapes=[(R, n)],
            output_dtypes=[mx.float32],
            grid=(R * groups * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            template=[("T", rows.keys.dtype), ("D", D), ("THREADS", threads)],
        )
    n_kept = min(n + 1, limits.budget)
    return _choose(kernels[1], rows, new, logits, n_kept, step, limits, threads, alone)


def evict_kernel(
    kernel: Kernel, rows: Rows, limits: Limits, tau: float, threads: int = _THREADS
) -> tuple[Rows, mx.array]:
    """`evict_row` as one dispatch of SOURCE."""
    step = integers(0, 0, 0, bits(tau), 0, 0, 0, 0)
    nobody = Arrivals(rows.keys, rows.values, rows.gumbel, rows.unrotated)
    return _choose(kernel, rows, nobody, None, rows.keys.shape[1] - 1, step, limits, threads, False)


def _choose(
    kernel: Kernel,
    rows: Rows,
    new: Arrivals,
    logits: mx.array | None,
    n_kept: int,
    step: mx.array,
    limits: Limits,
    threads: int,
    alone: bool,
) -> tuple[Rows, mx.array]:
    R, n, D = rows.keys.shape
    share = max(32, 32 * -(-R * n_kept // (32 * _BLOCKS)))  # rows that a threadgroup moves
    shares = -(-n_kept // share)
    # what is left out is read by no thread; any array stands in its place
    plain, new_plain, tables = rows.scores, rows.scores, (rows.scores, rows.scores)
    if rows.unrotated is not None:
        plain, new_plain = rows.unrotated, rows.unrotated if new.unrotated is None else new.unrotated
        if n + (logits is not None) > n_kept:
            tables = _label_turns(n_kept, D, limits.rope_base)
    small = (R, n_kept)
    shapes = [(*small, D), (*small, rows.values.shape[2]), small, small, small, small]
    keys, values, scores, gumbel, positions, index, turned = kernel(
        inputs=[
            *rows[:5],
            plain,
            rows.scores if logits is None else logits,
            new.keys,
            new.values,
            new.gumbel,
            new_plain,
            *tables,
            step,
            integers(min(limits.n_sink, n), min(limits.recent, n), n_kept, share, shares, bits(D**-0.5)),
        ],
        output_shapes=[*shapes, (1,) if rows.unrotated is None else shapes[0]],
        output_dtypes=[rows.keys.dtype, rows.values.dtype, mx.float32, mx.float32, mx.int32, mx.int32, mx.float32],
        grid=(R * shares * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=[
            ("T", rows.keys.dtype),
            ("V", rows.values.dtype),
            ("D", D),
            ("DV", rows.values.shape[2]),
            ("THREADS", threads),
            ("JOINS", logits is not None),
            ("TURNS", rows.unrotated is not None),
            ("ROOM", _ALONE_ROWS if alone else 0),
        ],
    )
    rest = None if rows.unrotated is None else turned
    return Rows(keys, values, scores, gumbel, positions, rest), index


def steps(tokens: Sequence[int], noise_at: Sequence[int], positions: Sequence[int], taus: Sequence[float]) -> mx.array:
    """[N, 8] int32, not to go into Metal's constant memory: what changes from one of N insertions to the next.

    A row of it is a `step` of `insert_row`, whose arguments of the same names are the numbers in it. Made for many
    tokens at once: a CUDA GPU waits for numbers in the host's memory.
    """
    numbers = np.zeros((len(tokens), 8), np.int32)
    numbers[:, 0], numbers[:, 1], numbers[:, 2] = tokens, noise_at, positions
    numbers[:, 3] = np.asarray(taus, np.float32).view(np.int32)
    return mx.array(numbers)


LOGIT_INPUTS = ("keys", "new_keys", "step", "numbers")
LOGIT_OUTPUTS = ("logits",)

# The product of the key at `asks` and the stored one at `at`: 8 lanes share a row, each a `sub`.
_PRODUCT = """
  float sum = 0.0f;
  if (D % 4 == 0) {
    const device vec<T, 4>* query = (const device vec<T, 4>*)(new_keys + asks);
    const device vec<T, 4>* key = (const device vec<T, 4>*)(keys + at);
    for (int v = sub; v < D / 4; v += 8) {
      const vec<T, 4> q = query[v], k = key[v];
      for (int x = 0; x < 4; ++x) sum += float(q[x]) * float(k[x]);
    }
  } else {
    for (int d = sub; d < D; d += 8) sum += float(new_keys[asks + d]) * float(keys[at + d]);
  }
  for (int o = 4; o > 0; o /= 2) sum += simd_shuffle_xor(sum, ushort(o));
"""

# `step`: which of the new rows asks. `numbers`: the scale.
LOGIT_SOURCE = (
    """
  constexpr int ROWS = THREADS / 8;
  const int n = keys_shape[1], groups = (n + ROWS - 1) / ROWS, group = int(threadgroup_position_in_grid.x);
  const int tid = int(thread_position_in_threadgroup.x), sub = tid % 8;
  const int row = group / groups, j = group % groups * ROWS + tid / 8;
  const size_t asks = (size_t(row) * size_t(new_keys_shape[1]) + size_t(step[0])) * D;
  const size_t at = (size_t(row) * size_t(n) + size_t(min(j, n - 1))) * D;
"""
    + _PRODUCT
    + """
  if (sub == 0 && j < n) logits[size_t(row) * size_t(n) + size_t(j)] = sum * as_type<float>(int(numbers[0]));
"""
)

INPUTS = (
    "keys",
    "values",
    "scores",
    "noise",
    "positions",
    "plain",
    "logits",
    "new_keys",
    "new_values",
    "new_noise",
    "new_plain",
    "cosines",
    "sines",
    "step",
    "numbers",
)
OUTPUTS = ("keys_out", "values_out", "scores_out", "noise_out", "positions_out", "index_out", "plain_out")

HEADER = f"""{walk.HEADER}
// A stored row's score after the new key's mass: a bad row takes none.
inline float keyformer_scored(float score, float logit, float top, float share) {{
  return score != -INFINITY ? score + exp(keyformer_logit(logit) - top) * share : score;
}}
"""

# Every threadgroup of a head makes the choice, from n numbers, and moves its share of the rows that stay.
# `step`: which of the new rows joins, the column of its noise, its position, tau.
# `numbers`: sinks, recent rows, rows that stay, rows that a threadgroup moves, threadgroups of a head, scale of logits.
# ROOM: 0, or how many logits the threadgroup has room for; it finds them itself.
SOURCE = (
    """
  constexpr int NSG = THREADS / 32, FAR = 0x7fffffff, HALF = D > 1 ? D / 2 : 1;
  constexpr float LOWEST = -3.402823466e+38f;
  threadgroup float tops[NSG];
  threadgroup float sums[NSG];
  threadgroup float odds[NSG];
  threadgroup float least[NSG];
  threadgroup int least_at[NSG];
  threadgroup float own[ROOM > 0 ? ROOM : 1];

  const int tid = int(thread_position_in_threadgroup.x);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int stay = numbers[2], moves = numbers[3], shares = numbers[4];
  const int row = int(threadgroup_position_in_grid.x) / shares, part = int(threadgroup_position_in_grid.x) % shares;
  const int n = keys_shape[1], every = JOINS ? n + 1 : n;
  const int n_sink = numbers[0], recent = numbers[1], position = step[2];
  const float tau = as_type<float>(int(step[3]));
  const size_t row0 = size_t(row) * size_t(n), fresh = size_t(row) * size_t(new_keys_shape[1]) + size_t(step[0]);

  float top = LOWEST, share = 0.0f, new_score = 0.0f, new_noise_ = 0.0f;
  if (JOINS && ROOM > 0) {
    const int sub = tid % 8;
    const size_t asks = fresh * D;
    for (int j = tid / 8; j - tid / 8 < n; j += THREADS / 8) {
      const size_t at = (row0 + size_t(min(j, n - 1))) * D;
"""
    + _PRODUCT
    + """
      if (sub == 0 && j < n) own[j] = sum * as_type<float>(int(numbers[5]));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (JOINS) {
    float sum = 0.0f, odd = 0.0f;
    for (int j = tid; j < n; j += THREADS) {
      if (scores[row0 + size_t(j)] != -INFINITY) {
        const float l = keyformer_logit(ROOM > 0 ? own[j] : logits[row0 + size_t(j)]);
        if (l > top) {
          sum = sum * exp(top - l) + 1.0f;
          top = l;
        } else {
          sum += exp(l - top);
        }
      }
    }
    for (int d = tid; d < D; d += THREADS) odd += isfinite(float(new_keys[fresh * D + size_t(d)])) ? 0.0f : 1.0f;
    const float most = simd_max(top);
    sum = simd_sum(sum * exp(top - most));
    odd = simd_sum(odd);
    if (lane == 0) {
      tops[sg] = most;
      sums[sg] = sum;
      odds[sg] = odd;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    top = LOWEST;
    for (int g = 0; g < NSG; ++g) top = max(top, tops[g]);
    sum = 0.0f;
    odd = 0.0f;
    for (int g = 0; g < NSG; ++g) {
      sum += sums[g] * exp(tops[g] - top);
      odd += odds[g];
    }
    share = odd == 0.0f && sum > 0.0f ? 1.0f / sum : 0.0f;  // a bad key gives no mass
    new_score = odd == 0.0f ? 0.0f : -INFINITY;
    new_noise_ = new_noise[size_t(row) * size_t(new_noise_shape[1]) + size_t(step[1])];
  }

  int gone = FAR;
  if (every > stay) {
    float best = INFINITY;
    int best_at = FAR;
    for (int j = n_sink + tid; j < every - recent; j += THREADS) {
      const bool old = j < n;
      const size_t at = row0 + size_t(old ? j : 0);
      float x = old ? scores[at] : new_score;
      if (JOINS && old) x = keyformer_scored(x, ROOM > 0 ? own[j] : logits[at], top, share);
      if (tau != 0.0f) x += tau * (old ? noise[at] : new_noise_);
      x = x > -INFINITY ? x : -INFINITY;  // NaN as well
      if (x < best || best_at == FAR) {  // of equals the first, which is the oldest
        best = x;
        best_at = j;
      }
    }
    const float low = simd_min(best);
    const int low_at = simd_min(best == low ? best_at : FAR);
    if (lane == 0) {
      least[sg] = low;
      least_at[sg] = low_at;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    best = least[0];
    gone = least_at[0];
    for (int g = 1; g < NSG; ++g) {
      if (least[g] < best || (least[g] == best && least_at[g] < gone)) {
        best = least[g];
        gone = least_at[g];
      }
    }
  }

  const int from = part * moves, count = min(moves, stay - from);
  const size_t out0 = size_t(row) * size_t(stay) + size_t(from);
  const bool turns = TURNS && every > stay;  // the rows that stay are numbered anew
  for (int r = tid; r < count; r += THREADS) {
    const int j = from + r, source = j + (j >= gone ? 1 : 0);
    const bool old = source < n;
    const size_t at = row0 + size_t(old ? source : 0), out = out0 + size_t(r);
    float x = old ? scores[at] : new_score;
    if (JOINS && old) x = keyformer_scored(x, ROOM > 0 ? own[source] : logits[at], top, share);
    scores_out[out] = x;
    noise_out[out] = old ? noise[at] : new_noise_;
    positions_out[out] = turns ? j : old ? positions[at] : position;
    index_out[out] = source;
  }

  if (DV % 4 == 0) {
    const device vec<V, 4>* old_rows = (const device vec<V, 4>*)values;
    const device vec<V, 4>* new_rows = (const device vec<V, 4>*)new_values;
    device vec<V, 4>* out_rows = (device vec<V, 4>*)values_out;
    for (int i = tid; i < count * (DV / 4); i += THREADS) {
      const int r = i / (DV / 4), source = from + r + (from + r >= gone ? 1 : 0);
      const size_t d = size_t(i % (DV / 4)), out = (out0 + size_t(r)) * (DV / 4) + d;
      out_rows[out] = source < n ? old_rows[(row0 + size_t(source)) * (DV / 4) + d] : new_rows[fresh * (DV / 4) + d];
    }
  } else {
    for (int i = tid; i < count * DV; i += THREADS) {
      const int r = i / DV, source = from + r + (from + r >= gone ? 1 : 0);
      const size_t d = size_t(i % DV), out = (out0 + size_t(r)) * DV + d;
      values_out[out] = source < n ? values[(row0 + size_t(source)) * DV + d] : new_values[fresh * DV + d];
    }
  }
  if (!TURNS && D % 4 == 0) {
    const device vec<T, 4>* old_rows = (const device vec<T, 4>*)keys;
    const device vec<T, 4>* new_rows = (const device vec<T, 4>*)new_keys;
    device vec<T, 4>* out_rows = (device vec<T, 4>*)keys_out;
    for (int i = tid; i < count * (D / 4); i += THREADS) {
      const int r = i / (D / 4), source = from + r + (from + r >= gone ? 1 : 0);
      const size_t d = size_t(i % (D / 4)), out = (out0 + size_t(r)) * (D / 4) + d;
      out_rows[out] = source < n ? old_rows[(row0 + size_t(source)) * (D / 4) + d] : new_rows[fresh * (D / 4) + d];
    }
  } else {
    for (int i = tid; i < count * D; i += THREADS) {
      const int r = i / D, d = i % D, j = from + r, source = j + (j >= gone ? 1 : 0);
      const bool old = source < n;
      const size_t at = (row0 + size_t(old ? source : 0)) * D, out = (out0 + size_t(r)) * D + size_t(d);
      T x = old ? keys[at + size_t(d)] : new_keys[fresh * D + size_t(d)];
      if (TURNS) {
        const float a = old ? plain[at + size_t(d)] : new_plain[fresh * D + size_t(d)];
        plain_out[out] = a;
        if (turns && (old ? positions[row0 + size_t(source)] : position) != j) {
          x = T(a);  // an odd last one, which does not turn
          if (d < D / 2 * 2) {
            const int other = d < HALF ? d + HALF : d - HALF;
            const float b = old ? plain[at + size_t(other)] : new_plain[fresh * D + size_t(other)];
            const size_t angle = size_t(j) * HALF + size_t(d % HALF);
            const float cosine = cosines[angle], sine = sines[angle];
            x = T(d < HALF ? a * cosine - b * sine : b * sine + a * cosine);
          }
        }
      }
      keys_out[out] = x;
    }
  }
"""
)
