// Runs every thread of a threadgroup as a fiber with a stack of its own; one threadgroup at a time, in one OS thread.
// Barriers and simdgroup operations are meetings that all must reach at the same line: a thread that waits hands over
// to the next one of the schedule, and what nobody can end is reported as a deadlock. Included by what `emulator.py`
// writes; built without sanitizers, while the kernel may be built with them (their fiber interfaces are told).
#include <sys/mman.h>

#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#ifdef KF_TSAN
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#define TSAN(x) x  // a meeting releases and acquires a clock, which is what orders memory
#else
#define TSAN(x)
#endif
#ifdef KF_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake, const void** bottom_old, size_t* size_old);
}
#endif

extern "C" void kf_swap(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl kf_swap
.type kf_swap,@function
kf_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kf_swap,.-kf_swap
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl kf_swap
kf_swap:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "add kf_swap for this processor"
#endif

extern "C" void kf_invoke(void** args);

// Rounding to bfloat is a call into clang's own library, which is not linked.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  uint16_t rounded = uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);  // to nearest, ties to even
  if (x != x) rounded = 0x7fc0;
  __bf16 y;
  memcpy(&y, &rounded, 2);
  return y;
}

namespace {
constexpr int LANES = 32;
constexpr size_t STACK = 64 << 10;
enum Status { READY, AT_SIMDGROUP, AT_BARRIER, DONE };
// epoch: of the meeting it waits for, which is over once the simdgroup's or the barrier's differs.
struct Fiber {
  void* sp;
  char* stack;
  Status status;
  uint32_t epoch;
  int lane, group;
  uint32_t tid[3];
  const char* what;
  int line;
#ifdef KF_TSAN
  void* tsan_fiber;
#endif
};
// What lanes bring to a meeting lies in the half of the epoch's parity, so that the next one cannot overwrite it.
struct Simd {
  int n = 0, alive = 0, arrived = 0, line_met = 0;
  uint32_t epoch = 0;
  uint32_t slot[2][LANES];
  uint8_t has[2][LANES];
  float left[2][8][8], right[2][8][8];  // operands of a product of matrices
  char clock[2];
};
std::vector<Fiber> fibers;
std::vector<Simd> simdgroups;
Fiber* cur;
void* main_sp;
int threads, barrier_arrived, barrier_line, alive;
uint32_t barrier_epoch;
char barrier_clock[2], done_clock;  // barriers in turn: who comes late must not learn of what follows
void** arguments;
uint32_t grid_size[3], group_size[3], group_at[3], groups[3];
std::string error;
std::vector<std::pair<char*, size_t>> poisoned;
// Of one run: many kernels are loaded in one process, and a process has only so many mappings.
struct Stacks : std::vector<char*> {
  ~Stacks() {
    for (char* stack : *this) munmap(stack - 4096, STACK + 4096);
  }
};
#ifdef KF_TSAN
void* tsan_main;
#endif
#ifdef KF_ASAN
const void* main_bottom;
size_t main_size;
#endif

void fail(const char* format, ...) {
  if (!error.empty()) return;
  char b[512];
  va_list ap;
  va_start(ap, format);
  vsnprintf(b, sizeof b, format, ap);
  va_end(ap);
  error = b;
}
void to_main() {
  Fiber* me = cur;
  TSAN(__tsan_switch_to_fiber(tsan_main, 1));
#ifdef KF_ASAN
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(me->status == DONE ? nullptr : &fake, main_bottom, main_size);
#endif
  kf_swap(&me->sp, main_sp);
#ifdef KF_ASAN
  __sanitizer_finish_switch_fiber(fake, &main_bottom, &main_size);
#endif
}
void entry() {
#ifdef KF_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
#endif
  kf_invoke(arguments);
  cur->status = DONE;
  --alive;
  --simdgroups[cur->group].alive;
  TSAN(__tsan_release(&done_clock));
  to_main();
  abort();
}
void resume(Fiber& f) {
  cur = &f;
  f.status = READY;
  TSAN(__tsan_switch_to_fiber(f.tsan_fiber, 1));
#ifdef KF_ASAN
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, f.stack, STACK);
#endif
  kf_swap(&main_sp, f.sp);
#ifdef KF_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}
bool runnable(const Fiber& f) {
  switch (f.status) {
    case READY:
      return true;
    case AT_SIMDGROUP:
      return simdgroups[f.group].epoch != f.epoch;
    case AT_BARRIER:
      return barrier_epoch != f.epoch;
    default:
      return false;
  }
}
// One simdgroup collective; returns the parity of the slots to read.
int meet(uint32_t v, int line_met, const char* what, bool clock) {
  Fiber* me = cur;
  Simd& s = simdgroups[me->group];
  int half = s.epoch & 1;
  if (s.arrived == 0) {
    s.line_met = line_met;
    memset(s.has[half], 0, LANES);
  } else if (s.line_met != line_met)
    fail("%s at line %d meets another simdgroup operation at line %d: divergent simdgroup %d", what, line_met,
         s.line_met, me->group);
  s.slot[half][me->lane] = v;
  s.has[half][me->lane] = 1;
  if (clock) {
    TSAN(__tsan_release(&s.clock[half]));
  }
  if (++s.arrived == s.n) {
    s.arrived = 0;
    ++s.epoch;
  } else {
    me->epoch = s.epoch;
    me->status = AT_SIMDGROUP;
    me->what = what;
    me->line = line_met;
    to_main();
  }
  if (clock) {
    TSAN(__tsan_acquire(&s.clock[half]));
  }
  return half;
}
template <class T>
T bits(uint32_t u) {
  T t;
  memcpy(&t, &u, 4);
  return t;
}
template <class T>
uint32_t ubits(T t) {
  uint32_t u;
  memcpy(&u, &t, 4);
  return u;
}
template <class T>
T reduce(T v, int op, int line) {
  int p = meet(ubits(v), line, "simd reduction", false);
  Simd& s = simdgroups[cur->group];
  T x[LANES];
  for (int i = 0; i < s.n; ++i) x[i] = bits<T>(s.slot[p][i]);
  if (op >= 4) {
    T a = 0;
    int e = cur->lane + (op == 5);
    for (int i = 0; i < e; ++i) a = a + x[i];
    return a;
  }
  // butterfly order, as hardware does it for a full simdgroup
  if (s.n == LANES) {
    for (int o = LANES / 2; o; o >>= 1)
      for (int i = 0; i < o; ++i) {
        T a = x[i], b = x[i + o];
        x[i] = op == 0 ? a + b : op == 1 ? (b < a ? b : a) : op == 2 ? (a < b ? b : a) : a * b;
      }
    return x[0];
  }
  T a = x[0];
  for (int i = 1; i < s.n; ++i)
    a = op == 0 ? a + x[i] : op == 1 ? (x[i] < a ? x[i] : a) : op == 2 ? (a < x[i] ? x[i] : a) : a * x[i];
  return a;
}
}  // namespace

extern "C" {
void kf_barrier(int flags, int line) {
  Fiber* me = cur;
  const int half = barrier_epoch & 1;
  if (barrier_arrived == 0)
    barrier_line = line;
  else if (barrier_line != line)
    fail("threadgroup_barrier at line %d meets the one at line %d: barrier in divergent control flow", line,
         barrier_line);
  if (flags) {
    TSAN(__tsan_release(&barrier_clock[half]));
  }
  if (++barrier_arrived == threads) {
    barrier_arrived = 0;
    ++barrier_epoch;
  } else {
    me->epoch = barrier_epoch;
    me->status = AT_BARRIER;
    me->what = "threadgroup_barrier";
    me->line = line;
    to_main();
  }
  if (flags) {
    TSAN(__tsan_acquire(&barrier_clock[half]));
  }
}
void kf_simdbar(int flags, int line) { meet(0, line, "simdgroup_barrier", flags != 0); }
uint32_t kf_shuffle(uint32_t v, int op, uint32_t arg, int line) {
  int p = meet(v, line, "simd_shuffle", false);
  Simd& s = simdgroups[cur->group];
  int l = cur->lane;
  int src = op == 0 ? (int)arg : op == 1 ? l ^ (int)arg : op == 2 ? l - (int)arg : l + (int)arg;
  if (op >= 2 && (src < 0 || src >= s.n)) return v;
  if (src < 0 || src >= LANES || !s.has[p][src]) {
    fail("simd_shuffle at line %d reads lane %d, which is not active", line, src);
    return 0;
  }
  return s.slot[p][src];
}
float kf_red_f(float v, int op, int line) { return reduce<float>(v, op, line); }
uint32_t kf_red_u(uint32_t v, int op, int line) { return reduce<uint32_t>(v, op, line); }
int32_t kf_red_i(int32_t v, int op, int line) { return reduce<int32_t>(v, op, line); }
uint64_t kf_ballot(int pred, int line) {
  int p = meet(pred != 0, line, "simd_ballot", false);
  Simd& s = simdgroups[cur->group];
  uint64_t m = 0;
  for (int i = 0; i < s.n; ++i)
    if (s.slot[p][i]) m |= 1ull << i;
  return m;
}
// Lane l holds row `row` and columns `column`, `column` + 1 of an 8 x 8 matrix, as MLX's steel kernels know them.
void kf_multiply(float* d, const float* a, const float* b, const float* c, int line) {
  Simd& s = simdgroups[cur->group];
  const int half = s.epoch & 1, l = cur->lane;
  const int row = (l / 4 & 4) + l / 2 % 4, column = (l / 4 & 2) * 2 + l % 2 * 2;
  for (int e = 0; e < 2; ++e) {
    s.left[half][row][column + e] = a[e];
    s.right[half][row][column + e] = b[e];
  }
  float sums[2] = {c[0], c[1]};
  meet(0, line, "simdgroup_multiply_accumulate", false);
  if (s.n != LANES) fail("simdgroup_multiply_accumulate at line %d in a simdgroup of %d threads", line, s.n);
  for (int k = 0; k < 8; ++k)
    for (int e = 0; e < 2; ++e) sums[e] += s.left[half][row][k] * s.right[half][k][column + e];
  for (int e = 0; e < 2; ++e) d[e] = sums[e];
}
uint32_t kf_attribute(int which, int d) {
  uint32_t nt = group_size[0] * group_size[1] * group_size[2];
  switch (which) {
    case 0:
      return group_at[d] * group_size[d] + cur->tid[d];  // thread_position_in_grid
    case 1:
      return cur->tid[d];  // thread_position_in_threadgroup
    case 2:
      return group_at[d];  // threadgroup_position_in_grid
    case 3:
      return grid_size[d];  // threads_per_grid, grid_size
    case 4:
      return group_size[d];  // threads_per_threadgroup
    case 5:
      return groups[d];  // threadgroups_per_grid
    case 6:
      return cur->lane;  // thread_index_in_simdgroup
    case 7:
      return cur->group;  // simdgroup_index_in_threadgroup
    case 8:
      return (nt + LANES - 1) / LANES;  // simdgroups_per_threadgroup
    case 9:
      return LANES;  // threads_per_simdgroup
    case 10:
      return (cur->tid[2] * group_size[1] + cur->tid[1]) * group_size[0] + cur->tid[0];  // thread_index_in_threadgroup
  }
  return 0;
}
void kf_poison(void* p, size_t n) { poisoned.emplace_back((char*)p, n); }

// schedule: 0 forward, 1 backward, more: random with that seed. Returns what went wrong, or null.
const char* kf_run(void** args, const int* grid, const int* tg, int schedule) {
  error.clear();
  arguments = args;
  size_t total = 1;
  for (int d = 0; d < 3; ++d) {
    grid_size[d] = grid[d];
    group_size[d] = std::min(tg[d], grid[d]);
    groups[d] = (grid[d] + group_size[d] - 1) / group_size[d];
    total *= groups[d];
  }
  Stacks stacks;
  std::mt19937 rng(schedule);
  std::vector<size_t> order(total);
  for (size_t i = 0; i < total; ++i) order[i] = schedule == 1 ? total - 1 - i : i;
  if (schedule > 1) std::shuffle(order.begin(), order.end(), rng);
  TSAN(tsan_main = __tsan_get_current_fiber());
  for (size_t g : order) {
    group_at[0] = g % groups[0];
    group_at[1] = g / groups[0] % groups[1];
    group_at[2] = g / groups[0] / groups[1];
    uint32_t t[3];  // dispatchThreads: edge threadgroups are smaller
    for (int d = 0; d < 3; ++d) t[d] = std::min(group_size[d], grid_size[d] - group_at[d] * group_size[d]);
    threads = alive = t[0] * t[1] * t[2];
    barrier_arrived = 0;
    int nsg = (threads + LANES - 1) / LANES;
    simdgroups.assign(nsg, Simd());
    fibers.resize(threads);
    for (auto& p : poisoned) memset(p.first, 0xff, p.second);
    while ((int)stacks.size() < threads) {
      char* m = (char*)mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                            -1, 0);
      if (m == MAP_FAILED) {
        fail("mmap of a stack failed");
        return error.c_str();
      }
      mprotect(m, 4096, PROT_NONE);
      stacks.push_back(m + 4096);
    }
    for (int i = 0; i < threads; ++i) {
      Fiber& f = fibers[i];
      f.stack = stacks[i];
      f.status = READY;
      f.lane = i % LANES;
      f.group = i / LANES;
      ++simdgroups[f.group].n;
      ++simdgroups[f.group].alive;
      f.tid[0] = i % t[0];
      f.tid[1] = i / t[0] % t[1];
      f.tid[2] = i / t[0] / t[1];
      void** sp = (void**)(f.stack + STACK);
#if defined(__x86_64__)
      *--sp = nullptr;
      *--sp = (void*)entry;
      for (int k = 0; k < 6; ++k) *--sp = nullptr;
#else
      sp -= 20;
      memset(sp, 0, 160);
      sp[11] = (void*)entry;
#endif
      f.sp = sp;
      TSAN(f.tsan_fiber = __tsan_create_fiber(0));
    }
    std::vector<int> group_order(nsg), lane_order(LANES);
    for (int i = 0; i < nsg; ++i) group_order[i] = schedule == 1 ? nsg - 1 - i : i;
    for (int i = 0; i < LANES; ++i) lane_order[i] = schedule == 1 ? LANES - 1 - i : i;
    while (alive && error.empty()) {
      bool any = false;
      if (schedule > 1) {
        std::shuffle(group_order.begin(), group_order.end(), rng);
        std::shuffle(lane_order.begin(), lane_order.end(), rng);
      }
      for (int s : group_order) {
        bool progress;
        do {  // run one simdgroup as far ahead as it can go
          progress = false;
          for (int l : lane_order) {
            int i = s * LANES + l;
            if (i < threads && runnable(fibers[i])) {
              resume(fibers[i]);
              progress = any = true;
              if (!error.empty()) return error.c_str();
            }
          }
        } while (progress);
      }
      if (!any && alive) {
        for (auto& f : fibers)
          if (f.status == AT_SIMDGROUP || f.status == AT_BARRIER) {
            fail("deadlock: thread %d waits at %s, line %d, which %d of %d threads never reach",
                 int(&f - fibers.data()), f.what, f.line,
                 f.status == AT_BARRIER ? threads - barrier_arrived
                                        : simdgroups[f.group].n - simdgroups[f.group].arrived,
                 f.status == AT_BARRIER ? threads : simdgroups[f.group].n);
            break;
          }
      }
    }
    TSAN(__tsan_acquire(&done_clock));
    TSAN(for (auto& f : fibers) __tsan_destroy_fiber(f.tsan_fiber));
    if (!error.empty()) return error.c_str();
  }
  return nullptr;
}
}
