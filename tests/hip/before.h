// The instructions that hip_isa.h and hip_matrix.h use, on the host: included before a kernel made for an AMD target.
//
// A workgroup is one thread of the host; its lanes are fibers that take turns where lanes meet. Matrix instructions follow
// the operand tables of the ISA documents, written here a second time and the other way round: from (row, k) to lane and
// element. Caches are not imitated, so this proves indices, barriers and arithmetic, not fences.
//
// A copy to LDS is imitated as late as the kernel allows: its destination is spoilt when it starts, and its data arrive when
// a wait for its counter asks for them, in random order, or now and then before. Reads of a stage are outstanding until
// DScnt is waited for; writes to LDS that a wave must wait for arrive then. So a kernel that waits too little computes with
// spoilt data, or starts a copy to a stage that is still read, which is counted as an error.
#pragma once
#include <math.h>
#include <stdio.h>

#define EMULATOR_WAVE MEGAKERNEL_WAVE
#define EMULATOR_LANES (256 + MEGAKERNEL_COPIERS * MEGAKERNEL_WAVE)
#include "../emulator/fibers.h"

namespace emulator {

constexpr uint32_t kStages = MEGAKERNEL_STAGES, kStageBytes = MEGAKERNEL_STAGE_BYTES;

// What a test takes away: a wait of one kind, or one barrier of the copiers.
enum Missing { kNone, kLoads, kTensors, kLds, kLast, kBarrier };
#ifndef EMULATOR_MISSING
#define EMULATOR_MISSING 0
#endif
constexpr Missing kMissing = Missing(EMULATOR_MISSING);

// What was seen of the copies, by all workgroups of the process.
struct Seen {
  uint64_t copies, waits, most_stages, early_reuse, unawaited, uneven_barriers, bad_descriptors;
};
inline Seen seen;
inline void count(uint64_t& n, uint64_t by = 1) { __atomic_fetch_add(&n, by, __ATOMIC_RELAXED); }

// One counter of one lane: what it has started and not waited for, oldest first.
struct Copy {
  char* to;
  const char* from;
  uint32_t bytes;
  bool done;
};
struct Counter {
  static constexpr uint32_t kMost = 1024;
  Copy* copy = nullptr;
  uint32_t first = 0, count = 0;

  Copy& at(uint32_t i) { return copy[(first + i) % kMost]; }
};
enum CounterKind { kLoadCounter, kTensorCounter, kLdsCounter, kCounters };

struct Group : Fibers {
  const void* arguments;
  uint16_t a[kLanes][16], b[kLanes][16];
  Counter counter[kLanes][kCounters];
  char* ring;                      // of this group
  uint32_t on_way[kStages], busy;  // copies to each stage that nobody has waited for; stages with some
  uint32_t reads[kLanes];          // stages that a lane has read since it waited for DScnt, a bit each
  uint32_t readers[kStages];       // lanes with that bit
  uint64_t barriers[kLanes];
  bool skipped[kLanes];
  uint32_t random = 1;
};

inline thread_local Group* group;

inline void before_pass(Meeting&) {}
inline void lane_ends() {
  for (const Counter& c : group->counter[group->current]) {
    if (c.count > 0) count(seen.unawaited);
  }
}

inline int permute(int byte, int v) {
  Group& g = *group;
  const uint32_t own = g.current;
  g.word[own] = uint32_t(v);
  meet(own_wave());
  const int out = int(g.word[own / kWave * kWave + uint32_t(byte) / 4 % kWave]);
  meet(own_wave());
  return out;
}

struct Place {
  uint32_t lane, element;
};

// Where operand element (row or column, k), and result element (row, column), of each instruction is.
struct Mfma16x16x16 {
  static constexpr uint32_t kDepth = 16, kIn = 4, kOut = 4;
  static Place operand(uint32_t i, uint32_t k) { return {i + 16 * (k / 4), k % 4}; }
  static Place result(uint32_t i, uint32_t j) { return {j + 16 * (i / 4), i % 4}; }
};
struct Mfma16x16x32 {
  static constexpr uint32_t kDepth = 32, kIn = 8, kOut = 4;
  static Place operand(uint32_t i, uint32_t k) { return {i + 16 * (k / 8), k % 8}; }
  static Place result(uint32_t i, uint32_t j) { return {j + 16 * (i / 4), i % 4}; }
};
struct Wmma16x16x16 {
  static constexpr uint32_t kDepth = 16, kIn = 16, kOut = 8;
  static Place operand(uint32_t i, uint32_t k) { return {i, k}; }
  static Place result(uint32_t i, uint32_t j) { return {j + 16 * (i % 2), i / 2}; }
};
struct Wmma16x16x32 {
  static constexpr uint32_t kDepth = 32, kIn = 16, kOut = 8;
  static Place operand(uint32_t i, uint32_t k) { return {i + 16 * (k / 8 % 2), k % 8 + k / 16 * 8}; }
  static Place result(uint32_t i, uint32_t j) { return {j + 16 * (i / 8), i % 8}; }
};

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float v;
  memcpy(&v, &wide, 4);
  return v;
}

template <class Shape, class A, class B, class C>
C multiply(A a, B b, C c) {
  Group& g = *group;
  const uint32_t own = g.current, first = own / kWave * kWave, lane = own % kWave;
  static_assert(sizeof(A) == Shape::kIn * 2 && sizeof(C) == Shape::kOut * 4);
  memcpy(g.a[own], &a, sizeof a);
  memcpy(g.b[own], &b, sizeof b);
  meet(own_wave());
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t j = lane % 16;
    const Place to = Shape::result(i, j);
    if (to.lane != lane) continue;
    float sum = c[to.element];
    for (uint32_t k = 0; k < Shape::kDepth; ++k) {
      const Place left = Shape::operand(i, k), right = Shape::operand(j, k);
      sum = fmaf(from_bf16(g.a[first + left.lane][left.element]), from_bf16(g.b[first + right.lane][right.element]), sum);
    }
    c[to.element] = sum;
  }
  meet(own_wave());
  return c;
}

inline uint32_t place[64];  // what mk_place says
inline uint32_t hardware_register(int which) {
  if ((which & 63) != 20) abort();  // XCC_ID
  return place[group->index % 64];
}

// ------------------------------------------------------------------------------------------------ copies to LDS
inline uint32_t draw(uint32_t below) {
  uint32_t& r = group->random;
  r ^= r << 13, r ^= r >> 17, r ^= r << 5;
  return r % below;
}

inline uint32_t stage_of(const void* p) {
  const uint64_t at = uint64_t((const char*)p - group->ring);
  return at < uint64_t(kStages) * kStageBytes ? uint32_t(at / kStageBytes) : kStages;
}

inline void arrive(Copy& c) {
  if (!c.done && c.bytes) memcpy(c.to, c.from, c.bytes);
  c.done = true;
}

inline void start(CounterKind kind, char* to, const char* from, uint32_t bytes) {
  Group& g = *group;
  Counter& c = g.counter[g.current][kind];
  if (!c.copy) c.copy = new Copy[Counter::kMost];
  if (c.count == Counter::kMost) abort();
  c.at(c.count++) = {to, from, bytes, false};
  if (kind == kLdsCounter || bytes == 0) return;
  count(seen.copies);
  const uint32_t stage = stage_of(to);
  if (stage == kStages) abort();  // not a stage
  if (g.readers[stage] != 0) count(seen.early_reuse);
  memset(to, 0xff, bytes);  // not a number
  if (g.on_way[stage]++ == 0) ++g.busy;
  const uint64_t stages = g.busy;
  if (stages > __atomic_load_n(&seen.most_stages, __ATOMIC_RELAXED)) __atomic_store_n(&seen.most_stages, stages, __ATOMIC_RELAXED);
}

// At most `most` of this lane's are on their way. The others arrive in random order.
inline void wait(CounterKind kind, uint32_t most) {
  Group& g = *group;
  Counter& c = g.counter[g.current][kind];
  if (c.count <= most) return;
  count(seen.waits);
  const uint32_t ends = c.count - most;
  for (uint32_t i = ends; i > 0; --i) {
    const uint32_t other = draw(i);
    const Copy swapped = c.at(i - 1);
    c.at(i - 1) = c.at(other);
    c.at(other) = swapped;
  }
  for (uint32_t i = 0; i < ends; ++i) {
    Copy& copy = c.at(i);
    arrive(copy);
    if (kind == kLdsCounter) {
      delete[] copy.from;
    } else if (copy.bytes) {
      if (--g.on_way[stage_of(copy.to)] == 0) --g.busy;
    }
  }
  c.first += ends;
  c.count = most;
}

// Now and then something arrives unasked.
inline void drift() {
  Group& g = *group;
  if (kMissing != kNone || draw(16) != 0) return;
  Counter& c = g.counter[kLanes - 1 - draw(MEGAKERNEL_COPIERS * kWave)][draw(2)];
  if (c.count > 0) arrive(c.at(draw(c.count)));
}

inline void copy_load(char* to, const char* from, uint32_t bytes) { start(kLoadCounter, to, from, bytes); }
inline void wait_loads(uint32_t most) {
  if (kMissing != kLoads) wait(kLoadCounter, most);
}
inline void wait_tensors(uint32_t most) {
  if (kMissing != kTensors) wait(kTensorCounter, most);
}
inline void wait_all() {
  if (kMissing == kLast) return;
  wait(kLoadCounter, 0);
  wait(kTensorCounter, 0);
}
inline void read_lds(const void* p) {
  Group& g = *group;
  const uint32_t stage = stage_of(p);
  if (stage == kStages || g.reads[g.current] >> stage & 1) return;
  g.reads[g.current] |= 1u << stage;
  ++g.readers[stage];
}
inline void write_lds(void* to, const void* from, uint32_t bytes) {
  char* kept = new char[bytes];
  memcpy(kept, from, bytes);
  memset(to, 0xff, bytes);
  start(kLdsCounter, (char*)to, kept, bytes);
}
inline void wait_lds() {
  if (kMissing == kLds) return;
  Group& g = *group;
  wait(kLdsCounter, 0);
  for (uint32_t stage = 0; stage < kStages; ++stage) {
    if (g.reads[g.current] >> stage & 1) --g.readers[stage];
  }
  g.reads[g.current] = 0;
}

// The descriptor is read field by field, from its table in hip_copy.h the other way round: one row of 4-byte elements.
template <class Where, class Shape>
void tensor_load(Where where, Shape shape) {
  Group& g = *group;
  auto bits = [](auto v, uint32_t low, uint32_t count) {
    return uint32_t(v[low / 32]) >> low % 32 & uint32_t((uint64_t(1) << count) - 1);
  };
  const uint32_t tensor = bits(shape, 48, 16) | bits(shape, 64, 16) << 16, tile = bits(shape, 112, 16);
  const bool valid = bits(where, 0, 2) == 1 && bits(where, 126, 2) == 2 && bits(shape, 0, 16) == 0;
  const bool row = bits(shape, 80, 16) == 1 && bits(shape, 96, 16) == 0 && bits(shape, 128, 16) == 1;
  if (!valid || !row || tensor != tile || tile == 0 || bits(shape, 160, 32) != tile || bits(shape, 18, 14) != 0) {
    return count(seen.bad_descriptors);
  }
  const uint32_t bytes = tile << bits(shape, 16, 2);
  const char* from = (const char*)(uint64_t(bits(where, 64, 32)) | uint64_t(bits(where, 96, 25)) << 32);
  char* to = g.ring + int32_t(bits(where, 32, 32) - uint32_t(uint64_t(g.ring)));
  const bool first = g.current % kWave == 0;  // of the wave, for all of it
  start(kTensorCounter, to, from, first ? bytes : 0);
}

inline void barrier() {
  constexpr uint32_t kSkipped = 8;
  uint64_t& count = group->barriers[group->current];
  if (kMissing == kBarrier && group->current >= 256 && count == kSkipped && !group->skipped[group->current]) {
    group->skipped[group->current] = true;
    return;
  }
  ++count;
  drift();
  meet(group->all);
}

inline uint64_t ticks() { return now_ns() / 10; }

}  // namespace emulator

#define amdgpu_flat_work_group_size(...)
#undef __has_builtin
#define __has_builtin(name) EMULATED##name
#define __builtin_amdgcn_workitem_id_x() (emulator::group->current)
#define __builtin_amdgcn_workgroup_id_x() (emulator::group->index)
#define __builtin_amdgcn_readfirstlane(v) (v)
#define __builtin_amdgcn_s_getreg(which) emulator::hardware_register(which)
#define __builtin_amdgcn_ds_bpermute(byte, v) emulator::permute(byte, v)
#define __builtin_amdgcn_fence(...) __atomic_signal_fence(__ATOMIC_SEQ_CST)
#define __builtin_amdgcn_s_barrier() emulator::barrier()
#define __builtin_amdgcn_s_sleep(n) emulator::give_way()
#define __builtin_amdgcn_endpgm() emulator::end_lane()
#define __builtin_amdgcn_is_shared(p) \
  ((const char*)(p) >= (const char*)&lds && (const char*)(p) < (const char*)&lds + sizeof lds)
#define __builtin_amdgcn_kernarg_segment_ptr() (emulator::group->arguments)
#define __builtin_readsteadycounter() emulator::ticks()
#define __HIP_MEMORY_SCOPE_AGENT 0
#define __HIP_MEMORY_SCOPE_SYSTEM 0
#define __hip_atomic_load(p, order, scope) __atomic_load_n(p, order)
#define __hip_atomic_store(p, v, order, scope) __atomic_store_n(p, v, order)
#define __hip_atomic_fetch_add(p, v, order, scope) __atomic_fetch_add(p, v, order)
#define __hip_atomic_exchange(p, v, order, scope) __atomic_exchange_n(p, v, order)
#define __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, c, ...) emulator::multiply<emulator::Mfma16x16x32>(a, b, c)
#define __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, ...) emulator::multiply<emulator::Mfma16x16x16>(a, b, c)
#define __builtin_amdgcn_wmma_f32_16x16x32_bf16(na, a, nb, b, m, c, ...) \
  emulator::multiply<emulator::Wmma16x16x32>(a, b, c)
#define __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c) emulator::multiply<emulator::Wmma16x16x16>(a, b, c)
#define __builtin_amdgcn_s_wait_asynccnt(n) emulator::wait_loads(n)
#define __builtin_amdgcn_s_wait_tensorcnt(n) emulator::wait_tensors(n)
#define __builtin_amdgcn_global_load_async_to_lds_b128(from, to, offset, policy) \
  emulator::copy_load((char*)(to), (const char*)(from), 16)
#define __builtin_amdgcn_tensor_load_to_lds_d2(where, shape, policy) emulator::tensor_load(where, shape)
