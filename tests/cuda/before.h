// A CUDA kernel on the host: included before one that was made for a CUDA target, with include/ in front of the kernel's own
// headers, where cuda_ptx.h is written a second time in C++.
//
// A block is one thread of the host; its threads are fibers that take turns where they wait or meet. Copies land at once and
// caches are not imitated, so this proves indices, barriers and arithmetic, not fences.
#pragma once
#include <math.h>

#include <initializer_list>

#define EMULATOR_WAVE 32
#define EMULATOR_LANES (15 * 32)
#include "../emulator/fibers.h"

namespace emulator {

struct Group : Fibers {
  uint32_t a[kLanes][4], b[kLanes][2];
  const uint32_t* phase[kLanes];  // of a barrier that a lane asks about, together with its warp
  uint32_t parity[kLanes];
  uint32_t loads[kLanes];
  bool over[kLanes];  // the answer, the same moment for all: lanes of a warp go the same way
};

inline thread_local Group* group;

inline void before_pass(Meeting& m) {
  Group& g = *group;
  if (&m == &g.all) return;
  const uint32_t first = uint32_t(&m - g.wave) * kWave;
  for (uint32_t i = first; i < first + kWave; ++i) {
    if (g.phase[i]) g.over[i] = *g.phase[i] != g.parity[i];
    g.phase[i] = nullptr;
  }
}
inline void lane_ends() {}

// Before a load that may be one of a loop that waits for others.
inline void before_load() {
  if (++group->loads[group->current] % 8 == 0) give_way();
}

// Whether the phase of that parity is over. By all lanes of a warp.
inline bool is_over(const uint32_t* phase, uint32_t parity) {
  Group& g = *group;
  const uint32_t own = g.current;
  g.phase[own] = phase, g.parity[own] = parity;
  meet(own_wave());
  return g.over[own];
}

// What every lane of the warp gave: f(lane of the warp) is its word.
template <class F>
uint64_t exchange(uint64_t word, F f) {
  Group& g = *group;
  const uint32_t own = g.current, first = own / kWave * kWave;
  g.word[own] = word;
  meet(own_wave());
  const uint64_t out = f([&](uint32_t lane) { return g.word[first + lane % kWave]; });
  meet(own_wave());
  return out;
}

template <class T>
T shuffle(T v, uint32_t from) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  memcpy(&word, &v, sizeof v);
  word = exchange(word, [&](auto of) { return of(from); });
  memcpy(&v, &word, sizeof v);
  return v;
}
inline uint32_t lane() { return group->current % kWave; }
// A lane of the caller's segment of so many.
inline uint32_t in_segment(uint32_t from, uint32_t width = kWave) {
  return (lane() & ~(width - 1)) | (from & (width - 1));
}
inline bool alone() { return own_wave().members == group->alive; }

template <class F>
uint32_t reduce(uint32_t v, F f) {
  return uint32_t(exchange(v, [&](auto of) {
    uint32_t out = uint32_t(of(0));
    for (uint32_t i = 1; i < kWave; ++i) out = f(out, uint32_t(of(i)));
    return uint64_t(out);
  }));
}

struct Index {
  uint32_t x;
};
inline Index thread_index() { return {group->current}; }
inline Index block_index() { return {group->index}; }

}  // namespace emulator

#define __device__
#define __global__
#define __host__
#define __shared__ thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900
#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define __syncwarp(...) emulator::meet_in_order(emulator::own_wave())
#define __syncthreads() emulator::meet_in_order(emulator::group->all)
#define __shfl_sync(mask, v, ...) emulator::shuffle(v, emulator::in_segment(__VA_ARGS__))
#define __shfl_xor_sync(mask, v, distance) emulator::shuffle(v, emulator::lane() ^ uint32_t(distance))
#define __shfl_down_sync(mask, v, distance) \
  emulator::shuffle(v, emulator::lane() + distance < 32 ? emulator::lane() + distance : emulator::lane())
#define __shfl_up_sync(mask, v, distance) \
  emulator::shuffle(v, emulator::lane() >= distance ? emulator::lane() - distance : emulator::lane())
#define __any_sync(mask, p) (emulator::reduce((p) ? 1u : 0u, [](uint32_t a, uint32_t b) { return a | b; }) != 0)
#define __all_sync(mask, p) (emulator::reduce((p) ? 1u : 0u, [](uint32_t a, uint32_t b) { return a & b; }) != 0)
#define __ballot_sync(mask, p) \
  emulator::reduce((p) ? 1u << emulator::lane() : 0u, [](uint32_t a, uint32_t b) { return a | b; })
#define __reduce_max_sync(mask, v) emulator::reduce(v, [](uint32_t a, uint32_t b) { return a > b ? a : b; })
#define __reduce_add_sync(mask, v) emulator::reduce(v, [](uint32_t a, uint32_t b) { return a + b; })
#define __clz(v) __builtin_clz(v)  // of what is not 0
#define __ffs(v) __builtin_ffs(v)
#define __nanosleep(n) emulator::give_way()
#define __threadfence_system() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __fdividef(a, b) ((a) / (b))
#define __expf(x) expf(x)
#define rsqrtf(x) (1.0f / sqrtf(x))

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class To, class From>
To bits_as(From v) {
  To out;
  memcpy(&out, &v, sizeof out);
  return out;
}
inline float __uint_as_float(uint32_t v) { return bits_as<float>(v); }
inline float __int_as_float(int32_t v) { return bits_as<float>(v); }
inline uint32_t __float_as_uint(float v) { return bits_as<uint32_t>(v); }
inline int32_t __float_as_int(float v) { return bits_as<int32_t>(v); }
template <class T, class U>
auto max(T a, U b) {
  return a > b ? a : b;
}
template <class T, class U>
auto min(T a, U b) {
  return a < b ? a : b;
}
inline uint32_t atomicCAS(uint32_t* p, uint32_t expected, uint32_t v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
inline uint32_t atomicExch(uint32_t* p, uint32_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
inline uint32_t atomicOr(uint32_t* p, uint32_t v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
template <class T>
T atomicMax(T* p, T v) {
  T there = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (there < v && !__atomic_compare_exchange_n(p, &there, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return there;
}
