"""The attention mass of a prompt chunk: two passes of matrix products over queries and keys, no logit in memory.

`prompt_mass` is what `add_query_mass` calls. `keyformer.scores.attention_mass` is the definition, in array operations;
`mass_kernel` computes the same in two dispatches of one kernel: the first gives each query the logarithm of its sum of
exponentials, the second computes the logits again and sums each row's shares. A threadgroup keeps a block of one
side in registers (queries in the first pass, rows of the cache in the second) and the other side streams past it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx

from .. import noise as _noise
from ..scores import LogitNoise, Mask, attention_mass
from .build import Kernel, backend, bits, build, integers
from .decode import HEADER as NOISE_HEADER

log = logging.getLogger(__name__)
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_DISTRIBUTION = {"gumbel": 0, "gaussian": 1, "constant": 2}
_MOST_SIZE = 256  # of a head: its queries, or its keys, are in registers
_ENOUGH = 1024  # threadgroups; with fewer a GPU idles, so the queries are divided among several
_CORNER = 128, 320  # queries and rows that are computed both ways the first time


@dataclass(frozen=True)
class Call:
    """The arguments of one call, as `attention_mass` takes them.

    Attributes:
        queries: [B, Hq, S, D].
        keys: [B, Hkv, m, D], m >= n: the first n rows count. The cache's whole buffer, so that no kernel copies it.
        n: rows that the queries attended to.
        scale, causal: the attention's; not causal means that every query sees every row.
        usable: [B, Hkv, n] boolean.
        noise, tau, weight, sinks, soft_cap: as in `attention_mass`.
    """

    queries: mx.array
    keys: mx.array
    n: int
    scale: float
    causal: bool
    usable: mx.array
    noise: LogitNoise | None = None
    tau: mx.array | float = 1.0
    weight: mx.array | None = None
    sinks: mx.array | None = None
    soft_cap: float | None = None


def prompt_mass(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    mask: Mask,
    *,
    usable: mx.array,
    buffer: mx.array | None = None,
    noise: LogitNoise | None = None,
    tau: mx.array | float = 1.0,
    weight: mx.array | None = None,
    sinks: mx.array | None = None,
    soft_cap: float | None = None,
    tile_bytes: int = 1 << 28,
) -> mx.array:
    """`attention_mass` summed over queries, on a GPU in two dispatches and without its evaluations.

    Where no kernel serves (`unsupported` says why: a mask array, head sizes that are no multiple of 16 or above 256,
    other dtypes than float32, float16 and bfloat16) it is `attention_mass`. The first call of each case is computed
    both ways on a corner of its arrays: a kernel that this GPU's compiler refuses, or that computes something else, is
    not used, and a warning says so.

    A mass is within 1e-5 of float64's, relatively, for every dtype: products of 16-bit numbers are exact, sums float32.
    One difference: of queries with logits that leave float32, the kernel leaves out each one alone, not its whole tile.

    Args:
        queries, keys, scale, mask, usable, noise, tau, weight, sinks, soft_cap, tile_bytes: as in `attention_mass`.
        buffer: [B, Hkv, m, D], m >= n, the array that `keys` is the beginning of, so that no kernel copies it; None
            where there is none.

    Returns:
        [B, Hkv, n] float32.
    """
    back_end = backend()
    call = Call(
        queries,
        keys if buffer is None else buffer,
        keys.shape[2],
        scale,
        mask is not None,
        usable,
        noise,
        tau,
        weight,
        sinks,
        soft_cap,
    )
    if back_end is not None and not isinstance(mask, mx.array) and unsupported(call) is None:
        tiles = _tiles(back_end, keys.dtype, keys.shape[3])
        kernel = build(back_end, "keyformer_prefill", INPUTS, OUTPUTS, SOURCE, *_headers(back_end, tiles))
        case = back_end, tiles, tuple(_template(call, tiles))
        if case not in _serves:
            _serves[case] = _agrees(kernel, tiles, call)
        if _serves[case]:
            return mass_kernel(kernel, tiles, call)
    return attention_mass(
        queries,
        keys,
        scale,
        mask,
        usable=usable,
        noise=noise,
        tau=tau,
        weight=weight,
        sinks=sinks,
        soft_cap=soft_cap,
        tile_bytes=tile_bytes,
    )


# what is compiled on its own -> whether this GPU does with it what the definition says
_serves: dict[tuple[Any, ...], bool] = {}


def unsupported(call: Call) -> str | None:
    """Why `mass_kernel` cannot do this call; None if it can."""
    D = call.keys.shape[3]
    if call.keys.dtype not in _DTYPES:
        return f"keys of {call.keys.dtype}"
    if call.queries.dtype != call.keys.dtype:
        return f"queries of {call.queries.dtype}, keys of {call.keys.dtype}"
    if D % 16 or D > _MOST_SIZE:
        return f"a head size of {D}"
    if call.causal and call.queries.shape[2] > call.n:
        return "more queries than rows"
    if call.scale <= 0:
        return f"a scale of {call.scale}"
    return None


def _agrees(kernel: Kernel, tiles: Tiles, call: Call) -> bool:
    """The last queries and rows computed both ways: no compiler has been met that this was not tried on."""
    corner = _corner(call)
    with mx.stream(mx.cpu):  # MLX's CUDA matrix products of float32 are of tf32, too coarse to compare with
        want = attention_mass(
            corner.queries,
            corner.keys,
            corner.scale,
            "causal" if corner.causal else None,
            usable=corner.usable,
            noise=corner.noise,
            tau=corner.tau,
            weight=corner.weight,
            sinks=corner.sinks,
            soft_cap=corner.soft_cap,
        )
        mx.eval(want)
    try:
        alike = mx.allclose(mass_kernel(kernel, tiles, corner), want, rtol=1e-3, atol=1e-4).item()
    except (RuntimeError, ValueError) as error:
        log.warning("The prefill kernel does not run here (%s); array operations do its work, more slowly.", error)
        return False
    if not alike:
        log.warning("The prefill kernel differs from its definition here; array operations do its work, more slowly.")
    return bool(alike)


def _corner(call: Call) -> Call:
    """The call's last queries and last rows."""
    s, r = (max(0, size - most) for size, most in zip((call.queries.shape[2], call.n), _CORNER, strict=True))
    if call.causal:
        r = min(r, call.n - call.queries.shape[2] + s)  # no fewer rows than queries
    noise = call.noise
    if noise is not None:
        asking = None if noise.queries is None else noise.queries[:, s:]
        noise = replace(noise, rows=noise.rows[..., r:], queries=asking)
    return replace(
        call,
        queries=call.queries[:, :, s:],
        keys=call.keys[:, :, r : call.n],
        n=call.n - r,
        usable=call.usable[..., r:],
        noise=noise,
        weight=None if call.weight is None else call.weight[..., s:],
    )


@dataclass(frozen=True)
class Tiles:
    """How a threadgroup divides its work."""

    simdgroups: int
    rows: int  # matrices of rows that a simdgroup keeps in registers
    columns: int  # matrices of columns that stream past them at once, an even number
    height: int = 8  # of a matrix of products; all are 8 wide
    groups: int = 1  # threadgroups that a CUDA multiprocessor should hold: bounds their registers


def _tiles(back_end: str, dtype: mx.Dtype, D: int) -> Tiles:
    if back_end == "metal":
        # 32 columns of so many bytes fit into 32 KB
        return Tiles(4, 2 if D <= 128 else 1, 4 if D * dtype.size <= 512 else 2)
    if dtype == mx.float32:
        return Tiles(4, 1, 4 if D <= 128 else 2, 16, 2)
    return Tiles(4, 2, 8, 16, 2) if D <= 128 else Tiles(4, 1, 4, 16, 2)


@lru_cache  # the same strings every time: `build` looks them up
def _headers(back_end: str, tiles: Tiles) -> tuple[str, str]:
    """What stands before the kernel: for both GPUs, for Metal or CUDA alone."""
    if back_end == "metal":
        return METAL_HEADER + NOISE_HEADER + NOISE_BITS, ""
    bounds = f"__launch_bounds__({tiles.simdgroups * 32}, {tiles.groups})"
    return NOISE_HEADER + NOISE_BITS, CUDA_HEADER.replace("LAUNCH_BOUNDS", bounds)


def _template(call: Call, tiles: Tiles) -> list[tuple[str, Any]]:
    return [
        ("T", call.keys.dtype),
        ("D", call.keys.shape[3]),
        ("SIMDGROUPS", tiles.simdgroups),
        ("MF", tiles.rows),
        ("NF", tiles.columns),
        ("CAUSAL", call.causal),
        ("NOISE", call.noise is not None),
        ("DISTRIBUTION", 0 if call.noise is None else _DISTRIBUTION[call.noise.distribution]),
        ("REDRAW", call.noise is not None and call.noise.queries is not None),
        ("WEIGHTED", call.weight is not None),
        ("SOFT_CAP", call.soft_cap is not None),
        ("SINKS", call.sinks is not None),
    ]


def mass_kernel(kernel: Kernel, tiles: Tiles, call: Call) -> mx.array:
    """The mass as two dispatches of `kernel`, made of SOURCE: [B, Hkv, n] float32."""
    # not contiguous, they would be copied for each dispatch
    queries, keys, n = mx.contiguous(call.queries), mx.contiguous(call.keys), call.n
    B, Hq, S = queries.shape[:3]
    Hkv = keys.shape[1]
    block, columns = tiles.simdgroups * tiles.rows * tiles.height, tiles.columns * 8
    key_blocks = B * Hkv * -(-n // block)
    parts = min(-(-_ENOUGH // key_blocks), Hq // Hkv * -(-S // columns))
    words = 0 if call.noise is None else _noise.stream(call.noise.seed, call.noise.layer)
    cap = 1.0 if call.soft_cap is None else call.soft_cap
    fixed = integers(n, parts, words - (words >> 31 << 32), bits(call.scale), bits(cap))
    if isinstance(call.tau, mx.array):
        taus = mx.broadcast_to(call.tau.reshape(-1), (B,)).astype(mx.float32)
    else:
        taus = _repeated(call.tau, B)
    # what a call does without is read by no thread; an array of the same dtype stands in its place
    rows, asking, weight, sinks = fixed, fixed, taus, taus
    if call.noise is not None:
        rows = call.noise.rows
        asking = fixed if call.noise.queries is None else call.noise.queries
    if call.weight is not None:
        weight = mx.broadcast_to(call.weight, (B, S))
    if call.sinks is not None:
        sinks = call.sinks.astype(mx.float32)
    barred = mx.where(call.usable, 0.0, mx.inf)
    threads = tiles.simdgroups * 32

    def dispatch(lse: mx.array, threadgroups: int, shape: tuple[int, ...], second: bool) -> mx.array:
        (out,) = kernel(
            inputs=[queries, keys, barred, rows, asking, lse, weight, sinks, taus, fixed],
            output_shapes=[shape],
            output_dtypes=[mx.float32],
            grid=(threadgroups * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            template=[*_template(call, tiles), ("MASS", second)],
        )
        return out

    lse = dispatch(taus, B * Hq * -(-S // block), (B, Hq, S), False)
    mass = dispatch(lse, key_blocks * parts, (parts, B, Hkv, n), True)
    return mass[0] if parts == 1 else mass.sum(axis=0)


@lru_cache(maxsize=256)
def _repeated(number: float, times: int) -> mx.array:
    return mx.array([number] * times, mx.float32)


INPUTS = ("queries", "keys", "barred", "positions", "asking", "lse", "weight", "sinks", "taus", "fixed")
OUTPUTS = ("out",)

# What the body asks of matrix units. A matrix of products has KEYFORMER_HEIGHT rows and 8 columns; a lane holds
# 2 * KEYFORMER_SLOTS numbers of it: of row `keyformer_row(lane)` and every eighth one after it, two neighbours from
# column `keyformer_column(lane)` on. The lanes of a row differ in bits 1 and KEYFORMER_FAR.
METAL_HEADER = """
#include <metal_simdgroup_matrix>
#define KEYFORMER_HEIGHT 8
#define KEYFORMER_SLOTS 1
#define KEYFORMER_FAR 8
#define KEYFORMER_STAGES 1
#define KEYFORMER_COPY(to, from) to = from
inline int keyformer_row(int lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline int keyformer_column(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
template <typename T>
inline void keyformer_copy(threadgroup uint4* to, const device T* from) {
  *to = *(const device uint4*)from;
}
inline float keyformer_exp2(float x) { return exp2(x); }
inline float keyformer_log2(float x) { return log2(x); }
inline void keyformer_copied() {}
inline void keyformer_arrived() {}
// A simdgroup's rows, as left operands of its products.
template <typename T, int D>
struct KeyformerRows {
  T v[D / 4];
};
template <typename T, int D>
inline void keyformer_read(thread KeyformerRows<T, D>& a, const device T* from, int first, int last, int lane) {
  const device T* row = from + size_t(min(first + keyformer_row(lane), last)) * D + keyformer_column(lane);
#pragma unroll
  for (int k = 0; k < D / 8; ++k) {
    a.v[2 * k] = row[8 * k];
    a.v[2 * k + 1] = row[8 * k + 1];
  }
}
// Float32 matrices for every dtype: a product of two 16-bit numbers is exact in them.
template <typename T, int D, int MF, int NF>
inline void keyformer_multiply(
    thread float (&c)[MF][NF][2], const thread KeyformerRows<T, D> (&a)[MF], const threadgroup uint4* from, int lane) {
  constexpr int PITCH = D + 16 / int(sizeof(T));
  const threadgroup T* tile =
      (const threadgroup T*)from + keyformer_column(lane) * PITCH + keyformer_row(lane);
  simdgroup_matrix<float, 8, 8> sums[MF][NF];
#pragma unroll
  for (int i = 0; i < MF; ++i)
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      sums[i][j].thread_elements()[0] = 0.0f;
      sums[i][j].thread_elements()[1] = 0.0f;
    }
#pragma unroll
  for (int k = 0; k < D / 8; ++k) {
    simdgroup_matrix<float, 8, 8> x, y[NF];
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      y[j].thread_elements()[0] = float(tile[j * 8 * PITCH + k * 8]);
      y[j].thread_elements()[1] = float(tile[(j * 8 + 1) * PITCH + k * 8]);
    }
#pragma unroll
    for (int i = 0; i < MF; ++i) {
      x.thread_elements()[0] = float(a[i].v[2 * k]);
      x.thread_elements()[1] = float(a[i].v[2 * k + 1]);
#pragma unroll
      for (int j = 0; j < NF; ++j) simdgroup_multiply_accumulate(sums[i][j], x, y[j], sums[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < MF; ++i)
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      c[i][j][0] = sums[i][j].thread_elements()[0];
      c[i][j][1] = sums[i][j].thread_elements()[1];
    }
}
"""

# Tensor cores sum exact products of 16-bit numbers in float32. Float32 numbers are split into two of tf32 each, which
# keep 22 of their 24 bits, and three products are summed. Memory is copied while the tile before is multiplied.
CUDA_HEADER = """
#undef __global__
#define __global__ __attribute__((global)) LAUNCH_BOUNDS
#define KEYFORMER_HEIGHT 16
#define KEYFORMER_SLOTS 2
#define KEYFORMER_FAR 2
#define KEYFORMER_STAGES 2
#define KEYFORMER_COPY(to, from) keyformer_copy4(&(to), &(from))
__device__ __forceinline__ int keyformer_row(int lane) { return lane / 4; }
__device__ __forceinline__ int keyformer_column(int lane) { return lane % 4 * 2; }
template <typename T> __device__ __forceinline__ void keyformer_copy(uint4* to, const T* from) {
  const uint at = uint(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
__device__ __forceinline__ void keyformer_copy4(void* to, const void* from) {
  const uint at = uint(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}
__device__ __forceinline__ void keyformer_copied() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void keyformer_arrived() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void keyformer_matrices(uint (&b)[4], const void* row) {
  const uint at = uint(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}
#define KEYFORMER_MMA(name, type, shape)                                                                              \
  __device__ __forceinline__ void keyformer_mma(type, float (&c)[4], const uint* a, uint b0, uint b1) {               \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "  \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                                        \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                     \
  }
KEYFORMER_MMA("f16", __half, "m16n8k16")
KEYFORMER_MMA("bf16", __nv_bfloat16, "m16n8k16")
KEYFORMER_MMA("tf32", float, "m16n8k8")
// The nearest tf32, and what it leaves.
__device__ __forceinline__ void keyformer_split(uint bits, uint& high, uint& low) {
  const float x = __uint_as_float(bits);
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(x - __uint_as_float(high)));
}
// A simdgroup's rows, as left operands of its products: word w of matrix k is of row `keyformer_row` + w % 2 * 8.
template <typename T, int D> struct KeyformerRows {
  uint v[D * sizeof(T) / 8];
};
template <typename T, int D>
__device__ __forceinline__ void keyformer_read(KeyformerRows<T, D>& a, const T* from, int first, int last, int lane) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const int row = min(first + keyformer_row(lane) + w * 8, last);
    const uint* words = (const uint*)(from + size_t(row) * D) + lane % 4;
#pragma unroll
    for (int k = 0; k < int(D * sizeof(T) / 16); ++k) a.v[k * 2 + w] = words[k * 4];
  }
}
template <typename T, int D, int MF, int NF>
__device__ __forceinline__ void keyformer_multiply(
    float (&c)[MF][NF][4], const KeyformerRows<T, D> (&a)[MF], const uint4* from, int lane) {
  constexpr int PITCH = D * sizeof(T) / 16 + 1;
#pragma unroll
  for (int i = 0; i < MF; ++i)
#pragma unroll
    for (int j = 0; j < NF; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][j][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < int(D * sizeof(T) / 32); ++k)
#pragma unroll
    for (int j = 0; j < NF; j += 2) {
      uint b[4];  // 8 columns and 16 bytes each, of the same bytes of a row two and two
      keyformer_matrices(b, from + (j * 8 + lane / 16 * 8 + lane % 8) * PITCH + k * 2 + lane / 8 % 2);
      if (sizeof(T) == 4) {
        uint high[4], low[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) keyformer_split(b[w], high[w], low[w]);
#pragma unroll
        for (int i = 0; i < MF; ++i) {
          uint over[4], under[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) keyformer_split(a[i].v[k * 4 + w], over[w], under[w]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            keyformer_mma(T(0.0f), c[i][j + h], under, high[h * 2], high[h * 2 + 1]);
            keyformer_mma(T(0.0f), c[i][j + h], over, low[h * 2], low[h * 2 + 1]);
            keyformer_mma(T(0.0f), c[i][j + h], over, high[h * 2], high[h * 2 + 1]);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < MF; ++i) {
          keyformer_mma(T(0.0f), c[i][j], a[i].v + k * 4, b[0], b[1]);
          keyformer_mma(T(0.0f), c[i][j + 1], a[i].v + k * 4, b[2], b[3]);
        }
      }
    }
}
__device__ __forceinline__ float keyformer_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float keyformer_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""

# `keyformer_noise` over ln 2, with the GPU's own logarithm where it serves: two of them for each logit. It is exact to
# 2^-22 between 1/2 and 2, not to so much of a result near 0.
NOISE_BITS = """
inline float keyformer_noise_bits(int distribution, uint head, uint asking, int position) {
  if (distribution != 0) return 1.44269504f * keyformer_noise(distribution, head, asking, position);
  const uint h = keyformer_mix(keyformer_mix(head + uint(position) * 0xC2B2AE3Du) + asking);
  const float u = as_type<float>(int(h >> 9 | 0x3f800000u)) - 0.99999994f, v = 1.0f - u;  // exact both
  float near = v * 0.166666667f + 0.2f;  // -log(1 - v)
  near = v * near + 0.25f;
  near = v * near + 0.333333333f;
  near = v * near + 0.5f;
  near = v * (v * near) + v;
  const float far = -0.693147181f * keyformer_log2(u);
  return -keyformer_log2(v < 0.0625f ? near : far);
}
"""

# MASS false: a block of queries of one head in registers, keys stream past it; `out` is the logarithm, to base 2, of
# each query's sum of exponentials, sink included; infinite where the query gives nothing. MASS true: a block of keys in
# registers, queries stream past it, and `out` holds the block's sums, of every parts-th tile of queries.
# `barred` (of a key) and `lse` (of a query) are infinite where a row or a query has no part in anything.
# `fixed`: rows, parts, the noise's stream, the scale of the logits, the cap.
SOURCE = """
  constexpr int STAGES = KEYFORMER_STAGES, SLOTS = KEYFORMER_SLOTS, HIGH = MF * KEYFORMER_HEIGHT;
  constexpr int ROWS = SIMDGROUPS * HIGH, COLS = NF * 8, THREADS = SIMDGROUPS * 32;
  constexpr int PIECES = D * int(sizeof(T)) / 16, PITCH = PIECES + 1;  // 16 bytes each; an odd pitch: no bank conflicts
  threadgroup uint4 tile[STAGES * COLS * PITCH];
  threadgroup float bars[STAGES * COLS];
  threadgroup float counts[STAGES * COLS];
  threadgroup int names[STAGES * COLS];

  const int tid = int(thread_position_in_threadgroup.x);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int heads = queries_shape[1], S = queries_shape[2], kv_heads = keys_shape[1], group = heads / kv_heads;
  const int n = fixed[0], parts = fixed[1], shift = n - S;  // query t sees rows 0..t + shift
  const uint stream = uint(fixed[2]);
  const float scale = as_type<float>(int(fixed[3])), cap = as_type<float>(int(fixed[4]));

  const int block = int(threadgroup_position_in_grid.x);
  const int blocks = ((MASS ? n : S) + ROWS - 1) / ROWS;
  const int part = MASS ? block / blocks % parts : 0;
  const int whose = MASS ? block / blocks / parts : block / blocks;  // sequence and KV head, or query head
  const int batch = whose / (MASS ? kv_heads : heads);
  const int kv = MASS ? whose : batch * kv_heads + whose % heads / group;  // of all sequences
  // blocks with the most to do come first
  const int first = (MASS ? block % blocks : blocks - 1 - block % blocks) * ROWS;
  const int last = (MASS ? n : S) - 1;
  const int low = first + sg * HIGH;  // the simdgroup's rows

  // what streams past: tiles of each query head, from the first that sees the block, or of keys up to the last seen
  const int skipped = MASS && CAUSAL ? max(0, first - shift) / COLS : 0;
  const int seen = MASS ? S : CAUSAL ? min(n, first + ROWS + shift) : n;
  const int tiles = (seen + COLS - 1) / COLS - skipped;
  const int step = MASS ? parts : 1;
  const int count = ((MASS ? group * tiles : tiles) - part + step - 1) / step;
  const size_t key0 = size_t(kv) * size_t(keys_shape[2]), row0 = size_t(kv) * size_t(n);
  const float inverse = 1.0f / taus[batch], divisor = 1.44269504f * inverse;  // exponentials are of base 2

  KeyformerRows<T, D> a[MF];
  int name[MF][SLOTS];  // of a key its position, of a query what it brings to the noise
  float top[MF][SLOTS], sum[MF][SLOTS];
#pragma unroll
  for (int i = 0; i < MF; ++i) {
    keyformer_read(a[i], MASS ? keys + key0 * D : queries + size_t(whose) * size_t(S) * D, low + i * KEYFORMER_HEIGHT,
                   last, lane);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int r = min(low + i * KEYFORMER_HEIGHT + s * 8 + keyformer_row(lane), last);
      top[i][s] = -3e38f;
      sum[i][s] = 0.0f;
      name[i][s] = 0;
      if (NOISE && MASS) name[i][s] = positions[row0 + size_t(r)];
      if (NOISE && !MASS && REDRAW) name[i][s] = asking[size_t(batch) * size_t(S) + size_t(r)];
    }
  }

  // of the tile to copy next and of the one before it: the query head of the group, the number among its tiles
  int head_next = part / tiles, tile_next = part % tiles, head_before = 0, tile_before = 0;
  for (int at = 1 - STAGES; at < count; ++at) {
    if (STAGES == 1 || at >= 0) {
      keyformer_arrived();
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const int next = at + STAGES - 1;
    if (next < count) {
      const int buffer = next % STAGES * COLS;
      const int y0 = (skipped + tile_next) * COLS, most = (MASS ? S : n) - 1;
      const int q = MASS ? kv * group + head_next : whose;  // of all sequences
      const device T* from = MASS ? queries + size_t(q) * size_t(S) * D : keys + key0 * D;
      constexpr int COPIED = COLS * PIECES;
      constexpr bool SAME = THREADS % PIECES == 0;  // a thread's pieces stand alike in their rows
#pragma unroll
      for (int i = 0; i < (COPIED + THREADS - 1) / THREADS; ++i) {
        const int x = i * THREADS + tid;
        const int y = SAME ? i * (THREADS / PIECES) + tid / PIECES : x / PIECES, piece = (SAME ? tid : x) % PIECES;
        if (COPIED % THREADS == 0 || x < COPIED) {
          keyformer_copy(tile + (buffer + y) * PITCH + piece,
                         from + size_t(min(y0 + y, most)) * D + piece * (16 / int(sizeof(T))));
        }
      }
      for (int x = tid; x < COLS; x += THREADS) {
        const size_t y = size_t(min(y0 + x, most));
        if (MASS) {
          KEYFORMER_COPY(bars[buffer + x], lse[size_t(q) * size_t(S) + y]);
          if (WEIGHTED) KEYFORMER_COPY(counts[buffer + x], weight[size_t(batch) * size_t(S) + y]);
          if (NOISE && REDRAW) KEYFORMER_COPY(names[buffer + x], asking[size_t(batch) * size_t(S) + y]);
        } else {
          KEYFORMER_COPY(bars[buffer + x], barred[row0 + y]);
          if (NOISE) KEYFORMER_COPY(names[buffer + x], positions[row0 + y]);
        }
      }
      keyformer_copied();
    }
    if (STAGES == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    const int head_now = STAGES == 1 ? head_next : head_before, tile_now = STAGES == 1 ? tile_next : tile_before;
    head_before = head_next;
    tile_before = tile_next;
    for (tile_next += step; tile_next >= tiles; tile_next -= tiles) ++head_next;
    if (at < 0) continue;

    const int buffer = at % STAGES * COLS, y0 = (skipped + tile_now) * COLS;
    const int head = MASS ? whose % kv_heads * group + head_now : whose % heads;
    float c[MF][NF][2 * SLOTS];
    keyformer_multiply<T, D, MF, NF>(c, a, tile + buffer * PITCH, lane);

    // does any of the simdgroup's logits not count?
    bool edge = y0 + COLS > (MASS ? S : n);
    if (CAUSAL) edge = edge || (MASS ? low + HIGH - 1 > y0 + shift : y0 + COLS - 1 > low + shift);
    bool bar = false;
    for (int x = lane; x < COLS; x += 32) bar = bar || !(bars[buffer + x] < INFINITY);
    edge = simd_any(bar) || edge;
    float unit = scale * divisor;
    if (NOISE || SOFT_CAP) {
      const uint hashed = NOISE ? keyformer_head(stream, head) : 0u;
#pragma unroll
      for (int j = 0; j < NF; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int named = NOISE && (REDRAW || !MASS) ? names[buffer + j * 8 + keyformer_column(lane) + e] : 0;
#pragma unroll
          for (int i = 0; i < MF; ++i)
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) {
              float l = c[i][j][2 * s + e] * (SOFT_CAP ? scale : unit);
              if (SOFT_CAP) l = isfinite(l) ? cap * tanh(l / cap) * divisor : INFINITY;  // its query gives nothing
              if (NOISE) {
                const uint asks = keyformer_asking(hashed, REDRAW, MASS ? named : name[i][s]);
                l += keyformer_noise_bits(DISTRIBUTION, hashed, asks, MASS ? name[i][s] : named) * inverse;
              }
              c[i][j][2 * s + e] = l;
            }
        }
      unit = 1.0f;
    }
    if (edge) {
#pragma unroll
      for (int j = 0; j < NF; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int x = buffer + j * 8 + keyformer_column(lane) + e, y = y0 + x - buffer;
          const bool outside = y >= (MASS ? S : n) || !(bars[x] < INFINITY);
#pragma unroll
          for (int i = 0; i < MF; ++i)
#pragma unroll
            for (int s = 0; s < SLOTS; ++s) {
              const int r = low + i * KEYFORMER_HEIGHT + s * 8 + keyformer_row(lane);
              const bool unseen = CAUSAL && (MASS ? r > y + shift : y > r + shift);
              if (outside || unseen) c[i][j][2 * s + e] = -INFINITY;
            }
        }
    }

#pragma unroll
    for (int i = 0; i < MF; ++i)
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) {
        float added = 0.0f;
        if (MASS) {
#pragma unroll
          for (int j = 0; j < NF; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int x = buffer + j * 8 + keyformer_column(lane) + e;
              const float share = keyformer_exp2(c[i][j][2 * s + e] * unit - bars[x]);
              added += WEIGHTED ? counts[x] * share : share;
            }
          sum[i][s] += added;
        } else {
          float most = c[i][0][2 * s];
#pragma unroll
          for (int j = 0; j < NF; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) most = fmax(most, c[i][j][2 * s + e]);
          most = fmax(top[i][s], most * unit);
#pragma unroll
          for (int j = 0; j < NF; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) added += keyformer_exp2(c[i][j][2 * s + e] * unit - most);
          sum[i][s] = sum[i][s] * keyformer_exp2(top[i][s] - most) + added;
          top[i][s] = most;
        }
      }
  }

#pragma unroll
  for (int i = 0; i < MF; ++i)
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int r = low + i * KEYFORMER_HEIGHT + s * 8 + keyformer_row(lane);
#pragma unroll
      for (int o = 1; o <= KEYFORMER_FAR; o *= KEYFORMER_FAR) {
        const float other = simd_shuffle_xor(sum[i][s], ushort(o));
        if (MASS) {
          sum[i][s] += other;
        } else {
          const float most = simd_shuffle_xor(top[i][s], ushort(o)), both = fmax(top[i][s], most);
          sum[i][s] = sum[i][s] * keyformer_exp2(top[i][s] - both) + other * keyformer_exp2(most - both);
          top[i][s] = both;
        }
      }
      if (!MASS && SINKS) {
        const float sink = sinks[whose % heads] * divisor, both = fmax(top[i][s], sink);
        sum[i][s] = sum[i][s] * keyformer_exp2(top[i][s] - both) + keyformer_exp2(sink - both);
        top[i][s] = both;
      }
      if (keyformer_column(lane) == 0 && r <= last) {
        if (MASS) {
          const size_t to = size_t(part) * size_t(queries_shape[0] * kv_heads) * size_t(n) + row0 + size_t(r);
          out[to] = barred[row0 + size_t(r)] < INFINITY ? sum[i][s] : 0.0f;
        } else {
          const bool gives = sum[i][s] > 0.0f && sum[i][s] < INFINITY;
          out[size_t(whose) * size_t(S) + size_t(r)] = gives ? top[i][s] + log2(sum[i][s]) : INFINITY;
        }
      }
    }
"""
