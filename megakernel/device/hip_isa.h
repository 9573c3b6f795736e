// The instructions that have no C++ spelling, each as one function: gfx90a, gfx942, gfx950, gfx1100, gfx1250.
//
// Freestanding: no HIP header and no device library. The compiler is told by -D what the target has: MEGAKERNEL_WAVE
// lanes of a wave, MEGAKERNEL_LDS_BYTES of LDS, MEGAKERNEL_GROUPS of workers, and the ring of hip_ring.py.
#pragma once
#include "megakernel/device/types.cuh"

#define MK_DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#if defined(__AMDGCN__)
#define MK_SHARED __attribute__((shared)) static
#else
#define MK_SHARED static thread_local  // emulated on the host: a thread is a workgroup
#endif
#define MK_SHARED_SPACE __attribute__((address_space(3)))

#include "megakernel/device/f8.cuh"

namespace megakernel::dev {

constexpr uint32_t kWave = MEGAKERNEL_WAVE;
constexpr uint32_t kLanes = 256;  // that compute
constexpr uint32_t kWaves = kLanes / kWave;
constexpr uint32_t kCopiers = MEGAKERNEL_COPIERS;  // waves behind them that only copy
constexpr uint32_t kThreads = kLanes + kCopiers * kWave;  // of a workgroup, which is one worker
constexpr uint32_t kNoLane = 0x40000000;  // of a copier: more than there are elements of anything
constexpr uint32_t kGroups = MEGAKERNEL_GROUPS;  // of workers that share an L2: see hip_seats.h

// ------------------------------------------------------------------------------------------------ where a lane is
// Opaque, so that masks made of it are computed where they are used: a kernel of this size has no scalar registers to
// keep them all.
MK_DEVICE uint32_t thread_index() {
  uint32_t index = __builtin_amdgcn_workitem_id_x();
#if defined(__AMDGCN__)
  asm volatile("" : "+v"(index));
#endif
  __builtin_assume(index < kThreads);
  return index;
}
MK_DEVICE uint32_t group_index() { return __builtin_amdgcn_workgroup_id_x(); }
MK_DEVICE uint32_t uniform(uint32_t v) { return uint32_t(__builtin_amdgcn_readfirstlane(int(v))); }
MK_DEVICE uint32_t wave_index() { return uniform(thread_index() / kWave); }
MK_DEVICE uint32_t wave_lane() { return thread_index() % kWave; }
MK_DEVICE bool copies() { return wave_index() >= kWaves; }
MK_DEVICE uint32_t lane_index() {
  const uint32_t index = thread_index();
  return index < kLanes ? index : kNoLane;
}

// The value of the lane whose number differs in the bits of `mask`.
MK_DEVICE uint32_t exchange(uint32_t v, uint32_t mask) {
  return uint32_t(__builtin_amdgcn_ds_bpermute(int((wave_lane() ^ mask) * 4), int(v)));
}

// ------------------------------------------------------------------------------------------------ order
// This wave's loads and stores have reached the L2. A fence of the workgroup alone does not wait for that, because all
// waves of a workgroup share the first-level cache; but the one lane that publishes for all of them waits only for its
// own wave's stores, so each wave waits for its own before they meet. A copier has stored nothing, and what it has on its
// way may stay there.
MK_DEVICE void drain() {
  if (copies()) return;
#if defined(__GFX12__)
  asm volatile("s_wait_loadcnt 0x0\n\ts_wait_storecnt 0x0" ::: "memory");
#elif defined(__GFX9__)
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#elif defined(__AMDGCN__)
  asm volatile("s_waitcnt vmcnt(0)\n\ts_waitcnt_vscnt null, 0x0" ::: "memory");
#endif
}

// All waves of the workgroup come here; what each wrote before, to LDS or global memory, all read after.
MK_DEVICE void meet() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Between workers: agent scope. gfx942 and gfx950 write the L2 of an XCD back (buffer_wbl2 sc1) before a release and
// invalidate after an acquire (buffer_inv sc1), because each XCD has an L2 of its own; gfx90a has one L2 and invalidates
// the L1 only; gfx1100 invalidates GL0 and GL1; gfx1250 uses global_wb and global_inv of the device scope.
MK_DEVICE uint64_t load_acquire(const uint64_t* p) {
  return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE uint32_t load_acquire(const uint32_t* p) {
  return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
}
// `p`, the same in all lanes, of memory that nobody writes during a launch: it is read by the scalar unit, which counts
// its loads by itself.
template <class T>
MK_DEVICE const T* constant(const T* p) {
  const uint64_t address = uint64_t(p);
  const uint64_t same = uint64_t(uniform(uint32_t(address >> 32))) << 32 | uniform(uint32_t(address));
  return (const T*)(const __attribute__((address_space(4))) T*)same;
}

template <class Word>
MK_DEVICE Word load_relaxed(const Word* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE void acquire() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent"); }
MK_DEVICE void store_release(uint64_t* p, uint64_t v) {
  __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE void add_release(uint64_t* p, uint64_t v) {
  __hip_atomic_fetch_add(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE uint64_t fetch_add(uint64_t* p, uint64_t v) {
  return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
MK_DEVICE uint32_t add_acquire_release(uint32_t* p, uint32_t v) {
  return __hip_atomic_fetch_add(p, v, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT) + v;
}
MK_DEVICE uint64_t add_acquire_release(uint64_t* p, uint64_t v) {
  return __hip_atomic_fetch_add(p, v, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT) + v;
}
MK_DEVICE uint32_t exchange_acquire_release(uint32_t* p, uint32_t v) {
  return __hip_atomic_exchange(p, v, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}

// With the host: system scope, loads and stores only, since a bus may not carry atomic additions.
MK_DEVICE uint64_t load_acquire_system(const uint64_t* p) {
  return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
MK_DEVICE void store_release_system(uint64_t* p, uint64_t v) {
  __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
MK_DEVICE void store_release_system(uint32_t* p, uint32_t v) {
  __hip_atomic_store(p, v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}

// ------------------------------------------------------------------------------------------------ time
constexpr uint64_t kTickNs = 10;  // the constant clock runs at 100 MHz; hip.py refuses a device where it does not
MK_DEVICE uint64_t clock_ns() { return __builtin_readsteadycounter() * kTickNs; }
MK_DEVICE uint64_t ticks() { return clock_ns(); }
MK_DEVICE void pause() { __builtin_amdgcn_s_sleep(2); }  // 128 cycles
MK_DEVICE void prefetch(const void*) {}

// ------------------------------------------------------------------------------------------------ portable values
using Vf = float;
using Vi = int32_t;
using Vu = uint32_t;
constexpr int kWidth = 1;
struct All {};

MK_DEVICE Vf splat(float v) { return v; }
MK_DEVICE Vi splat(int32_t v) { return v; }
MK_DEVICE Vi iota(uint32_t first) { return int32_t(first); }
MK_DEVICE Vi as_vi(Vf v) { return __builtin_bit_cast(int32_t, v); }
MK_DEVICE Vf as_vf(Vi v) { return __builtin_bit_cast(float, v); }
MK_DEVICE Vf to_vf(Vi v) { return float(v); }
MK_DEVICE Vf select(bool mask, Vf a, Vf b) { return mask ? a : b; }
MK_DEVICE Vi select(bool mask, Vi a, Vi b) { return mask ? a : b; }
MK_DEVICE float max(float a, float b) { return a > b ? a : b; }
MK_DEVICE Vf load(const float* p, All) { return *p; }
MK_DEVICE void store(float* p, Vf v, All) { *p = v; }
MK_DEVICE Vf where(All, Vf v, float) { return v; }
MK_DEVICE Vi load_u16(const uint16_t* p, All) { return *p; }
MK_DEVICE Vf powers(const uint8_t* p, All) { return power(*p); }
MK_DEVICE uint32_t bits_of(float v) { return __builtin_bit_cast(uint32_t, v); }
MK_DEVICE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Integers in the order of the floats.
MK_DEVICE int32_t rank_of(float v) {
  const int32_t i = as_vi(v);
  return i ^ ((i >> 31) & 0x7fffffff);
}

MK_DEVICE float exp(float x) { return __builtin_expf(x); }
MK_DEVICE float log(float x) { return __builtin_logf(x); }
MK_DEVICE float sqrt(float x) { return __builtin_sqrtf(x); }
MK_DEVICE float tanh(float x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// Within 1.5e-7: Abramowitz and Stegun, formula 7.1.26.
MK_DEVICE float erf(float x) {
  const float a = __builtin_fabsf(x), t = 1.0f / (1.0f + 0.3275911f * a);
  const float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  return __builtin_copysignf(1.0f - p * exp(-a * a), x);
}

MK_DEVICE float half_to_float(uint16_t bits) { return float(__builtin_bit_cast(_Float16, bits)); }
MK_DEVICE uint16_t to_bf16(float v) {
  const uint32_t bits = bits_of(v);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;  // not a number stays one
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <DType kType>
MK_DEVICE Vf load_as(const void* p, uint32_t index, All) {
  if constexpr (kType == DType::kF32) {
    return static_cast<const float*>(p)[index];
  } else if constexpr (kType == DType::kF8) {
    return of_f8(static_cast<const uint8_t*>(p)[index]);
  } else {
    const uint16_t bits = static_cast<const uint16_t*>(p)[index];
    return kType == DType::kBf16 ? float_of(uint32_t(bits) << 16) : half_to_float(bits);
  }
}

template <DType kType>
MK_DEVICE void put(void* p, uint32_t index, float v) {
  if constexpr (kType == DType::kF32) static_cast<float*>(p)[index] = v;
  if constexpr (kType == DType::kBf16) static_cast<uint16_t*>(p)[index] = to_bf16(v);
  if constexpr (kType == DType::kF16) static_cast<_Float16*>(p)[index] = _Float16(v);
}

}  // namespace megakernel::dev
