"""Makes kernels out of Metal source, on the first use, for whichever GPU there is."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]  # called as mx.fast.metal_kernel's result is

MOST_BYTES = 32768  # of threadgroup memory, Metal's limit
THREADS = {"metal": 256, "cuda": 512}  # per threadgroup: an Apple GPU allows fewer the more registers a kernel takes

# What a kernel's Metal text needs to be CUDA: address spaces, attributes, barriers, simdgroup operations and vectors.
CUDA_HEADER = """
#define device
#define constant
#define thread
#define threadgroup __shared__
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_threadgroup threadIdx
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
// MLX writes the signature. Without a bound a variant may take more registers than a launch has.
#define __global__ __attribute__((global)) __launch_bounds__(THREADS_AT_MOST)
typedef unsigned char uchar;
typedef unsigned int uint;
typedef unsigned short ushort;
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
__device__ __forceinline__ void threadgroup_barrier(mem_flags) { __syncthreads(); }
template <typename T> __device__ __forceinline__ T simd_shuffle_xor(T v, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, v, int(mask));
}
__device__ __forceinline__ float simd_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
// Least and largest through one integer reduction: integers in the order of the floats. No NaN may be among them.
__device__ __forceinline__ int keyformer_ordered(int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
__device__ __forceinline__ float simd_max(float v) {
  const int key = __reduce_max_sync(0xffffffffu, keyformer_ordered(__float_as_int(v)));
  return __int_as_float(keyformer_ordered(key));
}
__device__ __forceinline__ float simd_min(float v) {
  const int key = __reduce_min_sync(0xffffffffu, keyformer_ordered(__float_as_int(v)));
  return __int_as_float(keyformer_ordered(key));
}
__device__ __forceinline__ bool simd_any(bool v) { return __any_sync(0xffffffffu, v); }
__device__ __forceinline__ int simd_min(int v) { return __reduce_min_sync(0xffffffffu, v); }
__device__ __forceinline__ int simd_prefix_exclusive_sum(int v) {
  int sum = v;
  for (int o = 1; o < 32; o *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, sum, o);
    if (thread_index_in_simdgroup >= uint(o)) sum += below;
  }
  return sum - v;
}
template <typename T> __device__ __forceinline__ T as_type(int bits);
template <> __device__ __forceinline__ float as_type<float>(int bits) { return __int_as_float(bits); }
template <typename T, int N> struct alignas(sizeof(T) * N) vec {
  T v[N];
  __device__ __forceinline__ T operator[](int i) const { return v[i]; }
  __device__ __forceinline__ T& operator[](int i) { return v[i]; }
};
""".replace("THREADS_AT_MOST", str(THREADS["cuda"]))


def backend() -> str | None:
    """Where kernels run now: "metal", "cuda", or None when MLX computes on a CPU.

    The environment variable KEYFORMER_KERNELS=0 turns them off, for comparison and as a way out.

    Raises:
        ValueError: KEYFORMER_KERNELS is neither 0 nor 1.
    """
    wanted = os.environ.get("KEYFORMER_KERNELS", "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"KEYFORMER_KERNELS: expected 0 or 1, got {wanted!r}.")
    if wanted == "0" or mx.default_device().type != mx.DeviceType.gpu:
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


@lru_cache
def build(
    back_end: str,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    source: str,
    header: str,
    cuda_header: str = "",
) -> Kernel:
    """A kernel for that back-end; the compiler runs when it is first called with new template arguments.

    `cuda_header` goes before `header` with CUDA alone.

    MLX's CUDA back-end knows compiled kernels, also those it left on disk, by name and template arguments alone. So the
    name carries a hash of the text, and every dtype that a body depends on must be a template argument.
    """
    make: Any = mx.fast.metal_kernel if back_end == "metal" else mx.fast.cuda_kernel
    if back_end == "cuda":
        header = CUDA_HEADER + cuda_header + header
    name = f"{name}_{hashlib.sha256((header + source).encode()).hexdigest()[:16]}"
    kernel: Kernel = make(name=name, input_names=inputs, output_names=outputs, source=source, header=header)
    return kernel


@lru_cache(maxsize=256)  # alike in all layers, or from step to step
def integers(*words: int) -> mx.array:
    """Numbers of a call, as one int32 array: one buffer, and fewer than 8 go into a GPU's constant memory. Calls share
    them: new ones would be fetched from the host's memory, which a CUDA GPU waits for."""
    return mx.array(words, mx.int32)


def bits(number: float) -> int:
    """A float32's bits as an int32."""
    (word,) = struct.unpack("<i", struct.pack("<f", number))
    return int(word)
