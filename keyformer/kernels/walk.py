"""The walk over a block of new tokens, each key its own query: all of its evictions in one dispatch on a GPU.

`walk_on_device` is what `eviction.walk` and the functional API call. `eviction.walk_mlx` is the definition, in array
operations; `walk_kernel` computes the same: logits of a tile of new tokens by one matrix product, then one threadgroup
for each row of the batch (a KV head of a sequence of a layer) decides token by token. Rows do not wait for one another
and do not fill a GPU: callers do well to bring many layers' rows at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..eviction import take_rows, walk_mlx
from .build import Kernel, backend, bits, build, integers

log = logging.getLogger(__name__)
_TILE = 2048  # most tokens of a dispatch: then survivors move together, and columns of rows that went are left behind
_MOST_COLUMNS = 16384  # a byte of threadgroup memory each
# threads of a threadgroup and the most rows that each may hold, the first that suffices; a thread with few rows has
# idle lanes beside it, one with many takes long, and a wide threadgroup's barriers cost more
_SIZES = {
    "metal": ((128, 5), (256, 8), (512, 8)),
    "cuda": ((128, 5), (256, 9), (512, 16)),
}


def walk_on_device(
    stored: mx.array,
    new: mx.array,
    scores: mx.array,
    budget: int,
    n_sink: int,
    recent: int,
    gumbel: mx.array | None = None,
    temperatures: Sequence[float] = (),
    tile_bytes: int = 1 << 28,
) -> tuple[mx.array, mx.array]:
    """`eviction.walk` with one leading axis R = B * H, away from a CPU.

    On a GPU that is `walk_kernel`, except where array operations do the same: more rows than a threadgroup holds
    (`unsupported` says how many), or a kernel that this GPU's compiler refuses or that computes something else. It is
    tried on a few rows the first time of each case, and a warning says so.

    Args:
        stored: [R, m, D], m <= budget rows in temporal order.
        new: [R, S, D].
        scores: [R, m + S] float32.
        gumbel: [R, m + S] float32, or None.
        temperatures: tau at each of the S decisions; unused without `gumbel`.
        tile_bytes: bound on float32 logits at once: all of them, or those of two tiles of tokens.

    Returns:
        indices [R, min(m + S, budget)] int32 and scores, as `eviction.walk`.
    """
    rows = stored, new, scores, budget, n_sink, recent
    back_end = backend()
    slots = min(scores.shape[1], budget)
    if back_end is None or new.size == 0 or unsupported(back_end, slots):
        return walk_mlx(*rows, gumbel, temperatures)
    threads = _threads(back_end, slots)
    kernel = build(back_end, "keyformer_walk", INPUTS, OUTPUTS, SOURCE, HEADER)
    case = back_end, threads, -(-slots // threads), _columns(slots, new.shape[1]), gumbel is not None
    if case not in _serves:
        _serves[case] = _agrees(kernel, case, stored, new, scores, gumbel, temperatures)
    if not _serves[case]:
        return walk_mlx(*rows, gumbel, temperatures)
    return walk_kernel(kernel, threads, *rows, gumbel, temperatures, tile_bytes)


# what is compiled on its own -> whether this GPU does with it what the definition says
_serves: dict[tuple[Any, ...], bool] = {}


def _agrees(
    kernel: Kernel,
    case: tuple[Any, ...],
    stored: mx.array,
    new: mx.array,
    scores: mx.array,
    gumbel: mx.array | None,
    temperatures: Sequence[float],
) -> bool:
    """A corner of the rows walked both ways, down to half of them, by what is compiled for this case."""
    _, threads, per_thread, columns, _ = case
    m, at = stored.shape[1], slice(max(0, stored.shape[1] - 8), stored.shape[1] + 24)
    budget = max(3, (scores[:, at].shape[1]) // 2, m - at.start)
    rows = stored[:8, at.start :], new[:8, :24], scores[:8, at], budget, 1, 1
    frozen = None if gumbel is None else gumbel[:8, at]
    want, want_scores = walk_mlx(*rows, frozen, temperatures[:24])
    try:
        got, got_scores = walk_kernel(kernel, threads, *rows, frozen, temperatures[:24], variant=(per_thread, columns))
        same = (got == want).all(axis=1)
        near = (mx.abs(got_scores - want_scores) <= 1e-3 * (1 + mx.abs(want_scores))) | (got_scores == want_scores)
        few: Any = same.astype(mx.float32).mean().item()
        alike = few >= 0.5 and mx.all(near | ~same[:, None]).item()  # a tie may go either way
    except (RuntimeError, ValueError) as error:
        log.warning("The walk kernel does not run here (%s); array operations do its work, more slowly.", error)
        return False
    if not alike:
        log.warning("The walk kernel differs from its definition here; array operations do its work, more slowly.")
    return bool(alike)


def unsupported(back_end: str, slots: int) -> str | None:
    """Why `walk_kernel` cannot hold so many rows of a head, min(m + S, budget); None if it can."""
    threads, per_thread = _SIZES[back_end][-1]
    return f"{slots} rows" if slots > threads * per_thread else None


def _threads(back_end: str, slots: int) -> int:
    return next(threads for threads, most in _SIZES[back_end] if slots <= threads * most)


def _columns(slots: int, tokens: int) -> int:
    """Columns that a tile may have, as a power of two: few variants to compile while a sequence grows."""
    return max(1024, 1 << (slots + min(tokens, _TILE) - 1).bit_length())


def walk_kernel(
    kernel: Kernel,
    threads: int,
    stored: mx.array,
    new: mx.array,
    scores: mx.array,
    budget: int,
    n_sink: int,
    recent: int,
    gumbel: mx.array | None = None,
    temperatures: Sequence[float] = (),
    tile_bytes: int = 1 << 28,
    variant: tuple[int, int] | None = None,
) -> tuple[mx.array, mx.array]:
    """`walk_on_device` by `kernel`, made of SOURCE, with so many threads (a multiple of 32) per row.

    `variant` is how many rows a thread holds and how many columns have room, where they shall not be what suffices.
    """
    (R, m, D), S = stored.shape, new.shape[1]
    slots = min(m + S, budget)
    per_thread, columns = variant or (-(-slots // threads), _columns(slots, S))
    tile = min(_tile(R, m, S, slots, tile_bytes), columns - slots)
    keys = mx.concatenate([stored, new], axis=1) if m else new
    taus = None if gumbel is None else _floats(*temperatures)
    frozen = _in_device_memory(scores if gumbel is None else gumbel)
    scale = bits(D**-0.5 / math.log(2))
    index = mx.broadcast_to(mx.arange(m, dtype=mx.int32), (R, m))
    kept = scores[:, :m]
    for first in range(m, m + S, tile):
        last = min(first + tile, m + S)
        T, prior = last - first, index.shape[1]
        label = mx.concatenate([index, mx.broadcast_to(mx.arange(first, last, dtype=mx.int32), (R, T))], axis=1)
        rows = (keys if prior + T == m + S else take_rows(keys, label)).astype(mx.float32)
        before = kept, index
        index, kept = kernel(
            inputs=[
                _in_device_memory(rows[:, prior:] @ rows.swapaxes(1, 2)),
                _in_device_memory(mx.concatenate([kept, scores[:, first:last]], axis=1)),
                label,
                frozen,
                scores if taus is None else taus[first - m : last - m],
                integers(prior, T, slots, min(n_sink, slots), min(recent, slots), first, scale, m + S),
            ],
            output_shapes=[(R, min(prior + T, slots))] * 2,
            output_dtypes=[mx.int32, mx.float32],
            grid=(R * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            template=[
                ("THREADS", threads),
                ("PER", per_thread),
                ("COLUMNS", columns),
                ("NOISE", gumbel is not None),
            ],
        )
        if last < m + S:  # no more than two tiles' logits are there at once
            mx.async_eval(index, kept)
            mx.eval(before)
    return index, kept


def _tile(R: int, m: int, S: int, slots: int, tile_bytes: int) -> int:
    """Tokens of a tile: all where their logits fit, else as many as fit twice beside one another."""
    if S <= _TILE and 4 * R * S * (m + S) <= tile_bytes:
        return S
    fits = (math.isqrt(slots * slots + tile_bytes // (2 * R)) - slots) // 2  # 8 * R * T * (slots + T) <= tile_bytes
    tile = -(-S // -(-S // max(1, min(_TILE, fits))))  # as equal as they can be
    even = -(-tile // 64) * 64  # whole tiles of a matrix product are three times as fast as odd ones
    return even if even <= fits else tile if fits < 64 else fits // 64 * 64


@lru_cache(maxsize=256)
def _floats(*numbers: float) -> mx.array:
    """What `integers` is to integers."""
    return mx.array(numbers, mx.float32)


def _in_device_memory(a: mx.array) -> mx.array:
    """What the kernel has pointers to must not be so small that it goes into Metal's constant memory."""
    return a if a.size >= 8 else mx.concatenate([a.reshape(-1), mx.zeros((8,), a.dtype)])


INPUTS = ("logits", "scores", "label", "noise", "taus", "numbers")
OUTPUTS = ("label_out", "scores_out")

HEADER = """
// NaN and -inf give no mass; an infinity, of finite keys too large, is the largest number.
inline float keyformer_logit(float x) { return x > -INFINITY ? min(x, 3.402823466e+38f) : -INFINITY; }
"""

# One threadgroup per row. A thread holds PER of the rows alive, the newcomer aside: its numbers are the same for all
# threads. At token t the rows alive get its mass, e * share; the lowest rank and, for the mass of token t + 1, the
# largest logit and the sum of exponentials are found together, with one barrier, over all rows that were alive before
# t. The newcomer is then counted in and the row that goes is taken out. Exponentials are relative to the largest logit
# over rows that were alive a token earlier and the newcomers since: never above 1. Where too little of a sum is left,
# it is made again.
# `numbers`: rows alive at first, tokens, budget, sinks, recent rows, the first token's label, the scale of the
# products' exponentials (base 2), and how many rows of a head there is noise for.
SOURCE = """
  constexpr int NSG = THREADS / 32, FAR = 0x7fffffff;
  constexpr float LOWEST = -3.402823466e+38f;
  threadgroup vec<float, 4> found[2 * NSG];  // lowest rank, its row's exponential, sum, largest logit; two in turns
  threadgroup int found_at[2 * NSG];
  threadgroup float again_top[NSG];
  threadgroup float again_sum[NSG];
  threadgroup uchar alive[COLUMNS];
  threadgroup int counts[NSG];
  threadgroup int starts[THREADS];

  const int tid = int(thread_position_in_threadgroup.x);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int row = int(threadgroup_position_in_grid.x);
  const int prior = numbers[0], tokens = numbers[1], budget = numbers[2], n_sink = numbers[3], recent = numbers[4];
  const float scale = as_type<float>(int(numbers[6]));
  const int all = prior + tokens, final = tokens - 1, first = numbers[5];
  const device float* line = logits + size_t(row) * size_t(tokens) * size_t(all);
  const device float* start = scores + size_t(row) * size_t(all);
  const device float* noises = noise + size_t(row) * size_t(numbers[7]);
  const size_t row0 = size_t(row) * size_t(all);

  int column[PER];
  float score[PER], frozen[PER], e[PER], next[PER], second[PER], third[PER];  // logits of tokens t + 1 to t + 3
  for (int i = 0; i < PER; ++i) {
    const int j = i * THREADS + tid;
    const bool there = j < prior;
    column[i] = there ? j : FAR;
    score[i] = there ? start[j] : -INFINITY;
    frozen[i] = NOISE && there ? noises[label[row0 + size_t(j)]] : 0.0f;
    e[i] = 0.0f;
    next[i] = second[i] = third[i] = -INFINITY;
    if (score[i] != -INFINITY) {  // a bad row takes no mass, and neither does an empty place
      next[i] = keyformer_logit(line[j]);
      second[i] = keyformer_logit(line[min(1, final) * all + j]);
      third[i] = line[min(2, final) * all + j];
    }
  }
  // the newcomer of token t, and that of t + 1
  float new_score = 0.0f, new_frozen = 0.0f, new_next = 0.0f, new_second = 0.0f, new_third = 0.0f, tau = 0.0f;
  float coming_score = start[prior], coming_frozen = 0.0f, coming_tau = 0.0f;
  float coming_next = line[min(1, final) * all + prior];
  float coming_second = line[min(2, final) * all + prior];
  float coming_third = line[min(3, final) * all + prior];
  if (prior == 0 && coming_score != -INFINITY) coming_score = 1.0f;  // the first row of all
  if (NOISE) {
    coming_frozen = noises[first];
    coming_tau = taus[0];
  }

  float share = 0.0f, top = LOWEST;
  for (int t = -1; t < tokens; ++t) {
    bool redo = t < 1;  // the first two sums have nothing to go by
    if (t >= 0) {
      const int here = prior + t, after = min(t + 1, final);
      // asked for now, used in the next turn
      const int ahead = min(t + 3, final) * all, fresh = prior + after;
      for (int i = 0; i < PER; ++i) third[i] = score[i] != -INFINITY ? line[ahead + column[i]] : -INFINITY;
      coming_score = start[fresh];
      coming_next = line[min(t + 2, final) * all + fresh];
      coming_second = line[ahead + fresh];
      coming_third = line[min(t + 4, final) * all + fresh];
      if (NOISE) {
        coming_frozen = noises[first + after];
        coming_tau = taus[after];
      }

      top = max(top, new_next);
      const uint free_rows = uint(max(here + 1 - recent - n_sink, 0));
      float rank[PER];
      float low = INFINITY, sum = 0.0f, most = LOWEST;
      for (int i = 0; i < PER; ++i) {
        score[i] += e[i] * share;
        float x = NOISE ? score[i] + tau * frozen[i] : score[i];
        x = x > -INFINITY ? x : -INFINITY;  // NaN as well
        rank[i] = uint(column[i] - n_sink) < free_rows ? x : INFINITY;
        low = min(low, rank[i]);
        e[i] = exp2((next[i] - top) * scale);
        sum += e[i];
        second[i] = keyformer_logit(second[i]);
        most = max(most, second[i]);
      }
      float new_rank = NOISE ? new_score + tau * new_frozen : new_score;
      new_rank = new_rank > -INFINITY ? new_rank : -INFINITY;
      if (uint(here - n_sink) >= free_rows) new_rank = INFINITY;
      const float new_e = exp2((new_next - top) * scale);

      low = simd_min(low);
      int mine = FAR;
      for (int i = 0; i < PER; ++i) mine = rank[i] == low ? min(mine, column[i]) : mine;
      const int low_at = simd_min(mine);
      sum = simd_sum(sum);
      most = simd_max(most);
      const int half_ = (t & 1) * NSG;
      if (low_at == FAR ? lane == 0 : mine == low_at) {  // one of the simdgroup
        vec<float, 4> f;
        f[0] = low;
        f[1] = 0.0f;
        f[2] = sum;
        f[3] = most;
        for (int i = 0; i < PER; ++i) f[1] = column[i] == low_at ? e[i] : f[1];
        found[half_ + sg] = f;
        found_at[half_ + sg] = low_at;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float best[NSG], gone_e[NSG], sums[NSG], tops[NSG];
      int gone[NSG];
      for (int g = 0; g < NSG; ++g) {
        const vec<float, 4> f = found[half_ + g];
        best[g] = f[0];
        gone_e[g] = f[1];
        sums[g] = f[2];
        tops[g] = f[3];
        gone[g] = found_at[half_ + g];
      }
      for (int width = 1; width < NSG; width *= 2)
        for (int g = 0; g + width < NSG; g += 2 * width) {
          const int o = g + width;
          const int before = int(best[o] == best[g]) & int(gone[o] < gone[g]);
          const bool less = (int(best[o] < best[g]) | before) != 0;  // without a branch
          best[g] = less ? best[o] : best[g];
          gone_e[g] = less ? gone_e[o] : gone_e[g];
          gone[g] = less ? gone[o] : gone[g];
          sums[g] += sums[o];
          tops[g] = max(tops[g], tops[o]);
        }

      const bool full = here + 1 > budget;
      const bool leaves = full && new_rank < best[0];  // the newcomer; of equals the others, who came before it
      const float every = sums[0] + new_e;
      const float out = leaves ? new_e : full ? gone_e[0] : 0.0f;
      const float left = every - out;
      redo = redo || !(left > 1e-30f) || out > 0.5f * every;
      share = 1.0f / left;
      top = max(tops[0], new_second);
      if (!leaves && (full ? mine == gone[0] : here % THREADS == tid)) {
        for (int i = 0; i < PER; ++i)
          if (full ? column[i] == gone[0] : i == here / THREADS) {
            column[i] = here;
            score[i] = new_score;
            frozen[i] = new_frozen;
            e[i] = new_e;
            next[i] = new_next;
            second[i] = new_second;
            third[i] = new_third;
          }
      }
    }
    const bool asks = coming_score != -INFINITY;  // a bad key gives no mass
    if (redo || !asks) {
      float most = LOWEST;
      for (int i = 0; i < PER; ++i) most = max(most, next[i]);
      most = simd_max(most);
      if (lane == 0) again_top[sg] = most;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int g = 0; g < NSG; ++g) most = max(most, again_top[g]);
      float sum = 0.0f;
      for (int i = 0; i < PER; ++i) {
        e[i] = exp2((next[i] - most) * scale);
        sum += e[i];
      }
      sum = simd_sum(sum);
      if (lane == 0) again_sum[sg] = sum;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sum = 0.0f;
      for (int g = 0; g < NSG; ++g) sum += again_sum[g];
      share = asks && sum > 0.0f ? 1.0f / sum : 0.0f;
    }
    for (int i = 0; i < PER; ++i) {
      next[i] = second[i];
      second[i] = third[i];
    }
    new_score = coming_score;
    new_frozen = coming_frozen;
    tau = coming_tau;
    new_next = asks ? keyformer_logit(coming_next) : -INFINITY;
    new_second = asks ? keyformer_logit(coming_second) : -INFINITY;
    new_third = asks ? keyformer_logit(coming_third) : -INFINITY;
  }

  // the rows alive, in the order of their columns: each thread counts a stretch of columns
  for (int c = tid; c < all; c += THREADS) alive[c] = uchar(0);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < PER; ++i)
    if (column[i] != FAR) alive[column[i]] = uchar(1);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int stretch = (all + THREADS - 1) / THREADS;
  const int from = min(tid * stretch, all), to = min(from + stretch, all);
  int count = 0;
  for (int c = from; c < to; ++c) count += int(alive[c]);
  int at = simd_prefix_exclusive_sum(count);
  if (lane == 31) counts[sg] = at + count;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int g = 0; g < sg; ++g) at += counts[g];
  starts[tid] = at;
  const size_t out0 = size_t(row) * size_t(min(all, budget));
  for (int c = from; c < to; ++c)
    if (alive[c] != uchar(0)) label_out[out0 + size_t(at++)] = label[row0 + size_t(c)];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < PER; ++i)
    if (column[i] != FAR) {
      const int part = column[i] / stretch;
      int place = starts[part];
      for (int c = part * stretch; c < column[i]; ++c) place += int(alive[c]);
      scores_out[out0 + size_t(place)] = score[i];
    }
"""
