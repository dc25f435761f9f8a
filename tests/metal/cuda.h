// What the kernels' CUDA text needs to be C++ for `runtime.cpp`: a thread is a fiber, a block is a threadgroup.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using std::isfinite;
using std::isnan;
using std::max;
using std::min;
typedef _Float16 __half;
typedef __bf16 __nv_bfloat16;
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Shape {
  const int* sizes;
  int operator[](int i) const { return sizes[i]; }
};
#define __device__
#define __forceinline__
#define __launch_bounds__(...)
#define __shared__ static

extern "C" {
void kf_barrier(int flags, int line);
uint32_t kf_shuffle(uint32_t bits, int op, uint32_t arg, int line);
uint64_t kf_ballot(int predicate, int line);
uint32_t kf_attribute(int which, int axis);
}
struct Thread {
  unsigned x;
};
#define threadIdx (Thread{kf_attribute(1, 0)})
#define blockIdx (Thread{kf_attribute(2, 0)})
inline void __syncthreads(int line = __builtin_LINE()) { kf_barrier(1, line); }
inline bool __any_sync(unsigned, bool v, int line = __builtin_LINE()) { return kf_ballot(v, line) != 0; }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
template <typename T>
T __shfl_xor_sync(unsigned, T v, int mask, int line = __builtin_LINE()) {
  return __builtin_bit_cast(T, kf_shuffle(__builtin_bit_cast(uint32_t, v), 1, uint32_t(mask), line));
}
inline int __shfl_up_sync(unsigned, int v, int by, int line = __builtin_LINE()) {
  const int lane = int(kf_attribute(6, 0));
  return int(kf_shuffle(uint32_t(v), 0, uint32_t(lane < by ? lane : lane - by), line));
}
inline int __reduce_max_sync(unsigned, int v) {
  for (int o = 16; o; o /= 2) v = max(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
inline int __reduce_min_sync(unsigned, int v) {
  for (int o = 16; o; o /= 2) v = min(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
inline uint32_t kf_lane_of(uint32_t v, int lane, int line = __builtin_LINE()) {
  return kf_shuffle(v, 0, uint32_t(lane), line);
}

// The instructions, as the PTX manual lays out what each lane holds.
inline void kf_ldmatrix(uint32_t (&b)[4], const void* row) {
  const uint64_t at = uint64_t(row);
  const int lane = int(kf_attribute(6, 0));
  for (int m = 0; m < 4; ++m) {
    const int from = m * 8 + lane / 4;
    const uint64_t low = kf_lane_of(uint32_t(at), from), high = kf_lane_of(uint32_t(at >> 32), from);
    memcpy(&b[m], (const char*)(high << 32 | low) + lane % 4 * 4, 4);
  }
}
inline float kf_number(__half, uint32_t bits, int k) { return float(__builtin_bit_cast(_Float16, uint16_t(bits >> k % 2 * 16))); }
inline float kf_number(__nv_bfloat16, uint32_t bits, int k) { return __uint_as_float(bits >> k % 2 * 16 << 16); }
inline float kf_number(float, uint32_t bits, int) { return __uint_as_float(bits & ~0x1fffu); }
template <typename T>
void kf_mma(T type, float (&c)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  constexpr int PER = 4 / sizeof(T);  // numbers in a register
  const int lane = int(kf_attribute(6, 0));
  for (int half = 0; half < 2; ++half)
    for (int quarter = 0; quarter < 4; ++quarter) {
      uint32_t left[2], right[2];
      for (int w = 0; w < 2; ++w) left[w] = kf_lane_of(a[half * 2 + w], lane / 4 * 4 + quarter);
      const int column = lane % 4 * 2;
      for (int e = 0; e < 2; ++e) right[e] = kf_lane_of(half ? b1 : b0, (column + e) * 4 + quarter);
      for (int w = 0; w < 2; ++w)
        for (int e = 0; e < 2; ++e)
          for (int k = 0; k < PER; ++k) c[w * 2 + e] += kf_number(type, left[w], k) * kf_number(type, right[e], k);
    }
}
inline uint32_t kf_tf32(float x) {  // to the nearest, ties away from 0
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}
