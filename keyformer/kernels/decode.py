"""What follows a decoded token's attention: new scores, and the slot of the next row. One dispatch on a GPU, for the
layers of a group together.

`decode_step` is what the cache calls. `decode_ops` is the definition, in array operations; `decode_kernel` computes the
same in one kernel, one threadgroup for each layer, sequence and KV head. Both take the cache's buffers as they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from .. import noise
from ..eviction import evict_row
from ..policies import Policy
from ..ranking import rank_rows
from ..scores import Asked, add_query_mass, attention_mass, starting_scores
from .build import MOST_BYTES, THREADS, Kernel, backend, bits, build, integers

log = logging.getLogger(__name__)
# in one dispatch; 2 inputs of each layer, 7 others and 4 outputs are 27 of Metal's 31 buffers
MOST_LAYERS = {"metal": 8, "cuda": 32}
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_MOST_REGISTERS = 32  # logits that one thread holds
_ATTENTION = {"none": 0, "query": 1, "key": 2}
_NOISE = {"none": 0, "select": 1, "logit": 2}
_DISTRIBUTION = {"gumbel": 0, "gaussian": 1, "constant": 2}


class Read(NamedTuple):
    """What one layer's attention has just read, the decoded token's row among it.

    Attributes:
        layer: index of the layer, a coordinate of the noise.
        keys: [B, H, n, D], what attention read.
        buffer: [B, Hkv, m, D], m >= n, the array that `keys` is the beginning of, so that no kernel copies it; None
            where there is none.
        key: [B, Hkv, 1, D], the token's own.
        asked: the attention call's queries [B, Hq, 1, D], for a policy that ranks by them; else None.
    """

    layer: int
    keys: mx.array
    buffer: mx.array | None
    key: mx.array
    asked: Asked | None = None


@dataclass(frozen=True)
class Rows:
    """What is known of the rows of L layers with B sequences each; the sequences of a layer lie side by side.

    Attributes:
        scores, positions: [L*B, Hkv, capacity] float32 and int32; a score of -inf marks a key that is not finite.
        masses: [L*B, Hkv, capacity, window] float32, for a policy with a window.
        slot: [L*B, Hkv, 1, 1] int32, where the next row goes: behind the others, or the slot that was freed.
    """

    scores: mx.array
    positions: mx.array
    masses: mx.array | None
    slot: mx.array


@dataclass(frozen=True)
class Now:
    """Each sequence when its token has been stored; the same in all layers.

    Attributes:
        rows: slots in use, the token's included.
        offsets: tokens seen.
        recents: protected last rows.
        taus: temperatures.
        budgets: rows kept; a sequence with more frees one.
        tile_bytes: bound on float32 logits at once.
    """

    rows: list[int]
    offsets: list[int]
    recents: list[int]
    taus: list[float]
    budgets: list[int]
    tile_bytes: int = 1 << 28


def decode_step(policy: Policy, reads: Sequence[Read], rows: Rows, now: Now) -> Rows:
    """Enter a decoded token of each sequence, whose row went to `rows.slot`, score, and choose the next slot.

    On a GPU that is one dispatch of `decode_kernel`, except where it does not serve and array operations do the same
    (`unsupported` says which): attention "norm" or "difference", pooling, a mask array, keys that the layer expanded
    (multi-head latent attention), head sizes that are no multiple of 4, other dtypes than float32, float16 and
    bfloat16, and more rows than registers hold (8192 on Metal, 16384 with CUDA). The first step of each case is
    computed both ways: a kernel that this GPU's compiler refuses, or that computes something else, is not used, and a
    warning says so.

    Args:
        policy: its choices; one that evicts.
        reads: of each layer; alike in shapes, dtypes and attention, no more than MOST_LAYERS.
        rows: before the token.
        now: after it.

    Returns:
        The rows with the token's.
    """
    back_end = backend()
    if back_end is None or unsupported(policy, reads[0], now, THREADS[back_end]):
        return decode_ops(policy, reads, rows, now)
    kernel = decode_source(back_end, len(reads))
    case = _case(back_end, policy, reads, now)
    if case not in _serves:
        _serves[case] = _agrees(kernel, THREADS[back_end], policy, reads, rows, now)
    if not _serves[case]:
        return decode_ops(policy, reads, rows, now)
    return decode_kernel(kernel, THREADS[back_end], policy, reads, rows, now)


# what is compiled on its own -> whether this GPU does with it what the definition says
_serves: dict[tuple[Any, ...], bool] = {}


def _case(back_end: str, policy: Policy, reads: Sequence[Read], now: Now) -> tuple[Any, ...]:
    keys, asked = reads[0].keys, reads[0].asked
    H, D = reads[0].key.shape[1], keys.shape[3]
    group = 1 if asked is None else asked.queries.shape[1] // H
    shown = asked and (asked.queries.dtype, asked.sinks is not None, asked.soft_cap is not None)
    tiles = _tiles(THREADS[back_end], max(now.rows), group, D)
    return back_end, len(reads), policy, keys.dtype, D, group, tiles, shown


def _agrees(kernel: Kernel, threads: int, policy: Policy, reads: Sequence[Read], rows: Rows, now: Now) -> bool:
    """One step computed both ways, the first time of each case: no compiler has been met that this was not tried on."""
    n, want = max(now.rows), decode_ops(policy, reads, rows, now)
    try:
        got = decode_kernel(kernel, threads, policy, reads, rows, now)
        alike = mx.allclose(got.scores[..., :n], want.scores[..., :n], rtol=1e-3, atol=1e-4).item()
        same: Any = (got.slot == want.slot).astype(mx.float32).mean().item()
        alike = alike and same >= 0.5  # a tie may go either way
    except (RuntimeError, ValueError) as error:
        log.warning("The decode kernel does not run here (%s); array operations do its work, more slowly.", error)
        return False
    if not alike:
        log.warning("The decode kernel differs from its definition here; array operations do its work, more slowly.")
    return bool(alike)


def decode_ops(policy: Policy, reads: Sequence[Read], rows: Rows, now: Now) -> Rows:
    """`decode_step` in array operations."""
    if len(reads) == 1:
        return _layer_ops(policy, reads[0], rows, now)
    B = len(now.rows)
    each = [_layer_ops(policy, read, rows_of(rows, i * B, B), now) for i, read in enumerate(reads)]
    return join(each)


def rows_of(rows: Rows, first: int, count: int) -> Rows:
    """Those of `count` sequences."""
    if count == rows.slot.shape[0]:
        return rows
    one = slice(first, first + count)
    masses = None if rows.masses is None else rows.masses[one]
    return Rows(rows.scores[one], rows.positions[one], masses, rows.slot[one])


def join(each: Sequence[Rows]) -> Rows:
    """Several, of one capacity, as one."""
    if len(each) == 1:
        return each[0]
    masses = [r.masses for r in each if r.masses is not None]
    return Rows(
        mx.concatenate([r.scores for r in each]),
        mx.concatenate([r.positions for r in each]),
        mx.concatenate(masses) if masses else None,
        mx.concatenate([r.slot for r in each]),
    )


def entered(rows: Rows, key: mx.array, offsets: list[int]) -> Rows:
    """The rows of one layer with a decoded token's, which has no score yet, in the slot."""
    slot, position = rows.slot[..., 0], mx.array(offsets, mx.int32)[:, None, None] - 1
    masses = None
    if rows.masses is not None:
        masses = mx.put_along_axis(rows.masses, rows.slot, mx.zeros((1, 1, 1, 1), mx.float32), axis=2)
    return Rows(
        mx.put_along_axis(rows.scores, slot, starting_scores(key), axis=2),
        mx.put_along_axis(rows.positions, slot, position, axis=2),
        masses,
        rows.slot,
    )


def _layer_ops(policy: Policy, read: Read, rows: Rows, now: Now) -> Rows:
    n, p, layer, keys, asked = max(now.rows), policy, read.layer, read.keys, read.asked
    rows = entered(rows, read.key, now.offsets)
    scores, positions, masses, slot = rows.scores, rows.positions, rows.masses, rows.slot[..., 0]
    offsets = mx.array(now.offsets, mx.int32)[:, None, None]
    stored = mx.arange(n, dtype=mx.int32) < mx.array(now.rows, mx.int32)[:, None, None]
    taus = now.taus
    tau = taus[0] if len(set(taus)) == 1 else mx.array(taus, mx.float32)[:, None, None, None]
    if asked is not None:
        scores, masses = add_query_mass(
            p, layer, keys, scores, positions, masses, stored, now.offsets, tau, asked, now.tile_bytes
        )
    elif p.attention == "key":
        scores = _add_key_mass(read, scores, slot, stored, now)
    budgets, counts = now.budgets, mx.array(now.rows, mx.int32)[:, None, None]
    behind = [r <= m for r, m in zip(now.rows, budgets, strict=True)]
    following = mx.broadcast_to(counts, slot.shape)
    if not all(behind):
        rank = rank_rows(
            p,
            layer,
            scores[..., :n],
            positions[..., :n],
            keys,
            stored,
            offsets,
            tau[..., 0] if isinstance(tau, mx.array) else tau,
        )
        recents = mx.array(now.recents, mx.int32)[:, None, None]
        freed = evict_row(rank, positions[..., :n], stored, offsets, p.n_sink, recents)
        following = mx.where(mx.array(behind)[:, None, None], following, freed) if any(behind) else freed
    return Rows(scores, positions, masses, following[..., None])


def _add_key_mass(read: Read, scores: mx.array, slot: mx.array, stored: mx.array, now: Now) -> mx.array:
    """The key as its query: each head's new row scores the rows stored before it."""
    keys, n = read.keys, stored.shape[-1]
    new = mx.arange(n, dtype=mx.int32) == slot
    usable = (scores[..., :n] != -mx.inf) & stored & ~new
    mass = attention_mass(read.key, keys, keys.shape[3] ** -0.5, usable=usable)
    if 1 in now.offsets:
        # the very first row of all starts with 1
        first = mx.array([o == 1 for o in now.offsets])[:, None, None]
        mass = mx.where(new & first, 1.0, mass)
    if n == scores.shape[2]:
        return scores + mass
    after = scores[...]
    after[..., :n] = scores[..., :n] + mass
    return after


def unsupported(policy: Policy, read: Read, now: Now, threads: int) -> str | None:
    """Why `decode_kernel` with so many threads per row cannot do this step; None if it can."""
    keys, asked = read.keys if read.buffer is None else read.buffer, read.asked
    D, H = keys.shape[3], read.key.shape[1]
    if policy.attention not in _ATTENTION:
        return f"attention {policy.attention!r}"
    if policy.pooling > 1:
        return "pooling"
    if asked is not None and isinstance(asked.mask, mx.array):
        return "a mask"
    if keys.shape[1] != H:
        return "keys of more heads than are stored"
    if keys.dtype not in _DTYPES:
        return f"keys of {keys.dtype}"
    if D % 4 or keys.size < 8:
        return f"a head size of {D}"
    if max(now.rows) > threads * _MOST_REGISTERS:
        return f"{max(now.rows)} rows"
    group = 1
    if asked is not None:
        group = asked.queries.shape[1] // H
        if asked.queries.size < 8:
            return "fewer than 8 numbers in the queries"
    if _threadgroup_bytes(_tiles(threads, max(now.rows), group, D), threads) > MOST_BYTES:
        return f"a head size of {D}"
    return None


@dataclass(frozen=True)
class _Tiles:
    """How a threadgroup divides its work."""

    per_thread: int  # rows
    heads: int  # query heads at once
    lanes: int  # that share a row
    vectors: int  # of 4 numbers in a query, rounded up to whole lanes


@lru_cache
def _tiles(threads: int, n: int, group: int, D: int) -> _Tiles:
    per_thread = step = 1
    while per_thread * threads < n:
        # in steps of an eighth: a full cache is one row longer than a power of two, and few variants are compiled
        step = max(1, (1 << per_thread.bit_length()) // 8)
        per_thread += step
    lanes = min(8, 1 << (D // 4).bit_length() - 1)
    heads = min(group, 4, _MOST_REGISTERS // per_thread)
    return _Tiles(per_thread, heads, lanes, -(-D // 4 // lanes) * lanes)


def _threadgroup_bytes(tiles: _Tiles, threads: int) -> int:
    return tiles.heads * tiles.vectors * 16 + threads // 32 * (2 * tiles.heads + 3) * 4


def decode_source(back_end: str, layers: int) -> Kernel:
    """The kernel for so many layers."""
    return build(back_end, "keyformer_decode", inputs(layers), OUTPUTS, SOURCE, header(layers))


def decode_kernel(kernel: Kernel, threads: int, policy: Policy, reads: Sequence[Read], rows: Rows, now: Now) -> Rows:
    """`decode_step` as one dispatch of `kernel`, made of SOURCE, with so many threads (a multiple of 32) per row."""
    p, asked = policy, reads[0].asked
    keys = [r.keys if r.buffer is None else r.buffer for r in reads]
    B, H, m, D = keys[0].shape
    group = 1 if asked is None else asked.queries.shape[1] // H
    tiles = _tiles(threads, max(now.rows), group, D)
    # what a policy does without is read by no thread; any array stands in its place
    queries = [k if r.asked is None else r.asked.queries for k, r in zip(keys, reads, strict=True)]
    given = [r.asked.sinks for r in reads if r.asked is not None and r.asked.sinks is not None]
    sinks = mx.concatenate(given) if given else rows.scores
    masses = rows.scores if rows.masses is None else rows.masses
    soft_cap = None if asked is None else asked.soft_cap
    each = zip(now.rows, now.offsets, now.recents, now.taus, now.budgets, strict=True)
    words = [w for r, o, recent, tau, budget in each for w in (r, o, recent, bits(tau), budget)]
    numbers = integers(H, B, rows.scores.shape[2], m, *words)
    scale = D**-0.5 if asked is None else asked.scale
    fixed = _fixed(p, tuple(r.layer for r in reads), scale, 1.0 if soft_cap is None else soft_cap)
    scores, positions, masses_after, slot = kernel(
        inputs=[*queries, *keys, rows.scores, rows.positions, masses, rows.slot, sinks, numbers, fixed],
        output_shapes=[
            rows.scores.shape,
            rows.scores.shape,
            (1,) if rows.masses is None else masses.shape,
            rows.slot.shape,
        ],
        output_dtypes=[mx.float32, mx.int32, mx.float32, mx.int32],
        grid=(len(reads) * B * H * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=_template(
            p,
            keys[0].dtype,
            queries[0].dtype,
            sinks.dtype,
            D,
            threads,
            group,
            tiles,
            soft_cap is not None,
            bool(given),
        ),
    )
    return Rows(scores, positions, None if rows.masses is None else masses_after, slot)


@lru_cache(maxsize=256)
def _template(
    p: Policy,
    keys: mx.Dtype,
    queries: mx.Dtype,
    sink: mx.Dtype,
    D: int,
    threads: int,
    group: int,
    tiles: _Tiles,
    soft_cap: bool,
    sinks: bool,
) -> list[tuple[str, Any]]:
    return [
        ("T", keys),
        ("Q", queries),
        ("SINK", sink),
        ("D", D),
        ("THREADS", threads),
        ("PER", tiles.per_thread),
        ("GROUP", group),
        ("HEADS", tiles.heads),
        ("LANES", tiles.lanes),
        ("ATTENTION", _ATTENTION[p.attention]),
        ("NOISE", _NOISE[p.noise]),
        ("DISTRIBUTION", _DISTRIBUTION[p.distribution]),
        ("REDRAW", p.redraw),
        ("WINDOW", p.window),
        ("COUNT", p.normalize == "count"),
        ("DECAY", p.decay < 1),
        ("SOFT_CAP", soft_cap),
        ("SINKS", sinks),
    ]


@lru_cache(maxsize=4096)
def _fixed(policy: Policy, layers: tuple[int, ...], scale: float, soft_cap: float) -> mx.array:
    """What does not change from step to step."""
    decay = math.log(policy.decay)
    floats = (scale, soft_cap, max(policy.decay, 1e-37), decay, 1 - policy.decay)
    streams = [noise.stream(policy.seed, layer) for layer in layers]
    return integers(policy.n_sink, *map(bits, floats), *(stream - (stream >> 31 << 32) for stream in streams))


@lru_cache
def inputs(layers: int) -> tuple[str, ...]:
    """Names of the kernel's inputs: queries and keys of each layer, then what all share."""
    own = [f"{name}{layer}" for name in ("queries", "keys") for layer in range(layers)]
    return (*own, "scores", "positions", "masses", "slot", "sinks", "now", "fixed")


OUTPUTS = ("scores_out", "positions_out", "masses_out", "slot_out")


@lru_cache
def header(layers: int, text: str | None = None) -> str:
    """HEADER, or that text in its place, and which layer's queries and keys a threadgroup reads."""

    def of_layer(name: str) -> str:
        choices = "".join(f"layer == {i} ? {name}{i} : " for i in range(layers - 1))
        return f"#define {name.upper()}_OF_LAYER ({choices}{name}{layers - 1})\n"

    return (HEADER if text is None else text) + of_layer("queries") + of_layer("keys")


# Functions without pointers, so that they compile whatever memory an input is in. C++14, for MSL 3.1.
HEADER = """
inline uint keyformer_mix(uint h) {  // noise.py, _mix
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}
inline uint keyformer_head(uint stream, int head) { return keyformer_mix(stream + uint(head) * 0x85EBCA77u); }
// The second word of noise.py, uniform: of a query, or of nobody.
inline uint keyformer_asking(uint head, bool redraw, int query) {
  return keyformer_mix(head ^ (redraw ? uint(query) * 0x27D4EB2Fu + 1u : 0x27D4EB2Fu));
}
// Inverse error function in float32: polynomials in -log(1 - x^2) (Giles, GPU Computing Gems, 2011).
inline float keyformer_erfinv(float x) {
  float w = -log((1.0f - x) * (1.0f + x)), p;
  if (w < 5.0f) {
    w = w - 2.5f;
    p = 2.81022636e-08f;
    p = p * w + 3.43273939e-07f;
    p = p * w - 3.5233877e-06f;
    p = p * w - 4.39150654e-06f;
    p = p * w + 0.00021858087f;
    p = p * w - 0.00125372503f;
    p = p * w - 0.00417768164f;
    p = p * w + 0.246640727f;
    p = p * w + 1.50140941f;
  } else {
    w = sqrt(w) - 3.0f;
    p = -0.000200214257f;
    p = p * w + 0.000100950558f;
    p = p * w + 0.00134934322f;
    p = p * w - 0.00367342844f;
    p = p * w + 0.00573950773f;
    p = p * w - 0.0076224613f;
    p = p * w + 0.00943887047f;
    p = p * w + 1.00167406f;
    p = p * w + 2.83297682f;
  }
  return p * x;
}
inline float keyformer_noise(int distribution, uint head, uint asking, int position) {
  if (distribution == 2) return 0.577215665f;
  const uint h = keyformer_mix(keyformer_mix(head + uint(position) * 0xC2B2AE3Du) + asking);
  const float u = (float(h >> 9) + 0.5f) * 1.1920929e-07f;  // 2^-23
  if (distribution == 0) return -log(-log(u));
  return 0.577215665f + 1.81379936f * keyformer_erfinv(2.0f * u - 1.0f);
}
// 1 - exp(x) for x <= 0, exact to rounding near 0 as well (Kahan): MSL has no expm1.
inline float keyformer_fallen(float x) {
  const float e = exp(x), d = 1.0f - e;
  return e == 1.0f ? -x : d == 1.0f ? d : d * (x / log(e));
}
"""

# One threadgroup per sequence and KV head. 32 rows at a time go to a simdgroup: LANES lanes share each of 32 / LANES
# rows, LANES times over, and then exchange sums so that every lane owns one row: a thread owns PER rows in all.
# `now`: KV heads, sequences, capacity of scores and of keys, then of each sequence: slots in use, tokens seen,
# protected last rows, tau, budget. `fixed`: sinks, the scale of the logits, the cap, the decay, its logarithm,
# 1 - decay, then the noise's stream of each layer.
SOURCE = """
  constexpr int NSG = THREADS / 32, RPS = 32 / LANES, NV = D / 4, NC = (NV + LANES - 1) / LANES, NQ = NC * LANES;
  constexpr int FAR = 0x7fffffff;
  constexpr bool BY_QUERY = ATTENTION == 1, BY_KEY = ATTENTION == 2, AT_SELECTION = NOISE == 1, IN_LOGIT = NOISE == 2;
  threadgroup vec<float, 4> query[HEADS * NQ];
  threadgroup float top[HEADS * NSG];
  threadgroup float sum[HEADS * NSG];
  threadgroup float least[NSG];
  threadgroup int least_at[NSG];
  threadgroup int least_row[NSG];

  const int tid = int(thread_position_in_threadgroup.x);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int sub = lane % LANES, part = lane / LANES;
  const int row = int(threadgroup_position_in_grid.x);
  const int kv_heads = now[0], sequences = now[1], capacity = now[2], key_rows = now[3];
  const int kv = row % kv_heads, batch = row / kv_heads % sequences, layer = row / kv_heads / sequences;
  const int its = 4 + batch * 5;
  const int n = now[its], offset = now[its + 1], recent = now[its + 2], budget = now[its + 4];
  const float tau = as_type<float>(int(now[its + 3]));
  const int n_sink = fixed[0];
  const uint stream = uint(fixed[6 + layer]);
  const float scale = as_type<float>(int(fixed[1])), cap = as_type<float>(int(fixed[2]));
  const float decay = as_type<float>(int(fixed[3]));
  const float divisor = BY_QUERY && !AT_SELECTION ? tau : 1.0f;
  const int of_layer = batch * kv_heads + kv;
  const size_t at0 = size_t(row) * size_t(capacity), key0 = size_t(of_layer) * size_t(key_rows);
  const device T* keys = KEYS_OF_LAYER;
  const device Q* queries = QUERIES_OF_LAYER;
  const int fresh = int(slot[row]);

  float broken = 0.0f;  // a new key that is not finite: its row is the lowest for good
  for (int d = lane; d < D; d += 32) broken += isfinite(float(keys[(key0 + size_t(fresh)) * D + d])) ? 0.0f : 1.0f;
  const float start = simd_sum(broken) == 0.0f ? 0.0f : -INFINITY;

  float mass[PER];
  for (int i = 0; i < PER; ++i) mass[i] = 0.0f;
  bool dead = false;  // a logit left float32: no row gets anything
  if (BY_QUERY || BY_KEY) {
    const device vec<T, 4>* rows = (const device vec<T, 4>*)(keys + key0 * D);
    for (int g0 = 0; g0 < GROUP; g0 += HEADS) {
      // whole vectors: to store one number of a vector may be to load, change and store all four
      for (int i = tid; i < HEADS * NQ; i += THREADS) {
        const int g = g0 + i / NQ, d = i % NQ * 4;
        vec<float, 4> q;
        for (int x = 0; x < 4; ++x) {
          float number = 0.0f;
          if (d + x < D && g < GROUP) {
            number = BY_QUERY ? float(queries[(size_t(of_layer) * GROUP + size_t(g)) * D + d + x])
                              : float(keys[(key0 + size_t(fresh)) * D + d + x]);
          }
          q[x] = number * scale;
        }
        query[i] = q;  // every read of the heads before was ahead of the barrier after their sums
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);

      bool asks[HEADS];  // a query that is not finite asks nobody
      uint head_stream[HEADS], asking[HEADS];
      for (int g = 0; g < HEADS; ++g) {
        float odd = 0.0f;
        for (int v = lane; v < NQ; v += 32) {
          const vec<float, 4> q = query[g * NQ + v];
          for (int i = 0; i < 4; ++i) odd += isfinite(q[i]) ? 0.0f : 1.0f;
        }
        asks[g] = simd_sum(odd) == 0.0f && g0 + g < GROUP;
        head_stream[g] = keyformer_head(stream, kv * GROUP + g0 + g);
        asking[g] = keyformer_asking(head_stream[g], REDRAW, offset - 1);
      }

      float e[PER][HEADS];
      float m[HEADS];
      for (int g = 0; g < HEADS; ++g) m[g] = -INFINITY;
      for (int i = 0; i < PER; ++i) {
        const int first = (i * NSG + sg) * 32;
        for (int g = 0; g < HEADS; ++g) e[i][g] = -INFINITY;
        if (first < n) {  // the same for the whole simdgroup
          float dots[HEADS][LANES];
          for (int g = 0; g < HEADS; ++g)
            for (int u = 0; u < LANES; ++u) dots[g][u] = 0.0f;
          for (int c = 0; c < NC; ++c) {
            const int v = c * LANES + sub;
            const int in_row = v < NV ? v : NV - 1;  // beyond a row the query is 0
            vec<T, 4> k[LANES];
            for (int u = 0; u < LANES; ++u) {
              const int j = first + u * RPS + part;
              k[u] = rows[size_t(j < n ? j : n - 1) * NV + in_row];
            }
            for (int g = 0; g < HEADS; ++g) {
              const vec<float, 4> q = query[g * NQ + v];
              for (int u = 0; u < LANES; ++u)
                for (int x = 0; x < 4; ++x) dots[g][u] += q[x] * float(k[u][x]);
            }
          }
          // each exchange halves the rows a lane has sums of and doubles what the sums cover
          for (int o = LANES / 2; o > 0; o /= 2) {
            const bool upper = (sub & o) != 0;
            for (int g = 0; g < HEADS; ++g)
              for (int u = 0; u < o; ++u) {
                const float keep = upper ? dots[g][u + o] : dots[g][u];
                const float give = upper ? dots[g][u] : dots[g][u + o];
                dots[g][u] = keep + simd_shuffle_xor(give, ushort(o));
              }
          }
          const int j = first + sub * RPS + part;
          const float its_score = j == fresh ? start : j < n ? scores[at0 + size_t(j)] : -INFINITY;
          if (its_score != -INFINITY && !(BY_KEY && j == fresh)) {
            const int position = j == fresh ? offset - 1 : positions[at0 + size_t(j)];
            for (int g = 0; g < HEADS; ++g) {
              float l = asks[g] ? dots[g][0] : 0.0f;
              if (SOFT_CAP) l = cap * tanh(l / cap);
              if (IN_LOGIT) l += keyformer_noise(DISTRIBUTION, head_stream[g], asking[g], position);
              e[i][g] = l / divisor;
              m[g] = max(m[g], e[i][g]);
            }
          }
        }
      }

      for (int g = 0; g < HEADS; ++g) {
        m[g] = simd_max(m[g]);
        if (m[g] == -INFINITY) m[g] = 0.0f;
        float s = 0.0f;
        for (int i = 0; i < PER; ++i) {
          e[i][g] = exp(e[i][g] - m[g]);
          s += e[i][g];
        }
        s = simd_sum(s);
        if (lane == 0) {
          top[g * NSG + sg] = m[g];
          sum[g * NSG + sg] = s;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int g = 0; g < HEADS; ++g) {
        const float mine = lane < NSG ? top[g * NSG + lane] : -INFINITY;
        float all = simd_max(mine);
        float sink = 0.0f;
        if (SINKS && g0 + g < GROUP) {
          sink = float(SINK(sinks[(layer * kv_heads + kv) * GROUP + g0 + g])) / divisor;
          all = max(all, sink);
        }
        float total = simd_sum(lane < NSG ? sum[g * NSG + lane] * exp(mine - all) : 0.0f);
        if (SINKS && g0 + g < GROUP) total += exp(sink - all);
        if (!(total < INFINITY)) dead = true;
        const float share = asks[g] && total > 0.0f ? exp(m[g] - all) / total : 0.0f;
        for (int i = 0; i < PER; ++i) mass[i] += e[i][g] * share;
      }
    }
  }

  float best = INFINITY;
  int best_at = FAR, best_row = FAR;
  const uint select_stream = keyformer_head(stream, kv);
  const uint select_asking = keyformer_asking(select_stream, false, 0);
  for (int i = 0; i < PER; ++i) {
    const int j = (i * NSG + sg) * 32 + sub * RPS + part;
    if (j < n) {
      const size_t at = at0 + size_t(j);
      const float before = j == fresh ? start : scores[at];
      float x = before;
      if (BY_QUERY || BY_KEY) {
        float given = dead ? 0.0f : mass[i];
        if (BY_KEY && j == fresh && offset == 1) given = 1.0f;  // the very first row of all
        if (WINDOW > 0) {
          float in_window = 0.0f;
          for (int c = 0; c + 1 < WINDOW; ++c) {
            const float counted = j == fresh ? 0.0f : masses[at * WINDOW + size_t(c + 1)];
            masses_out[at * WINDOW + size_t(c)] = counted;
            in_window += counted;
          }
          masses_out[at * WINDOW + size_t(WINDOW - 1)] = given;
          x = before == -INFINITY ? before : in_window + given;
        } else {
          x = (DECAY ? before * decay : before) + given;
        }
      }
      scores_out[at] = x;
      const int position = j == fresh ? offset - 1 : positions[at];
      positions_out[at] = position;
      if (!BY_QUERY && !BY_KEY) x = x == -INFINITY ? x : 0.0f;
      if (COUNT) {
        int seen = max(offset - position, 1);
        if (WINDOW > 0) seen = min(seen, int(WINDOW));
        float count = float(seen);
        if (DECAY) count = keyformer_fallen(count * as_type<float>(int(fixed[4]))) / as_type<float>(int(fixed[5]));
        x = x / count;
      }
      if (AT_SELECTION) x += tau * keyformer_noise(DISTRIBUTION, select_stream, select_asking, position);
      if (isnan(x)) x = -INFINITY;
      if (position < n_sink || position >= offset - recent) x = INFINITY;
      if (x < best || (x == best && position < best_at)) {
        best = x;
        best_at = position;
        best_row = j;
      }
    }
  }
  for (int j = n + tid; j < capacity; j += THREADS) {
    const size_t at = at0 + size_t(j);
    scores_out[at] = scores[at];
    positions_out[at] = positions[at];
    for (int c = 0; c < WINDOW; ++c) masses_out[at * WINDOW + size_t(c)] = 0.0f;
  }
  if (WINDOW == 0 && row == 0 && tid == 0) masses_out[0] = 0.0f;

  // the lowest; of equal ones that at the lowest position
  const float low = simd_min(best);
  const int low_at = simd_min(best == low ? best_at : FAR);
  const int low_row = simd_min(best == low && best_at == low_at ? best_row : FAR);
  if (lane == 0) {
    least[sg] = low;
    least_at[sg] = low_at;
    least_row[sg] = low_row;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg == 0) {
    const float l = lane < NSG ? least[lane] : INFINITY;
    const int a = lane < NSG ? least_at[lane] : FAR;
    const int r = lane < NSG ? least_row[lane] : FAR;
    const float l_all = simd_min(l);
    const int a_all = simd_min(l == l_all ? a : FAR);
    const int r_all = simd_min(l == l_all && a == a_all ? r : FAR);
    if (lane == 0) slot_out[row] = n <= budget ? n : r_all;
  }
"""
