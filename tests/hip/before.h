// The instructions that hip_isa.h and hip_matrix.h use, on the host: included before a kernel made for an AMD target.
//
// A workgroup is one thread of the host; its lanes are fibers that take turns where lanes meet. Matrix instructions follow
// the operand tables of the ISA documents, written here a second time and the other way round: from (row, k) to lane and
// element. Caches are not imitated, so this proves indices, barriers and arithmetic, not fences.
#pragma once
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

namespace emulator {

constexpr uint32_t kLanes = 256, kWave = MEGAKERNEL_WAVE, kStackBytes = 512 * 1024;

struct Meeting {  // where `members` lanes wait for each other
  uint32_t members, arrived = 0;
  uint64_t turn = 0;
};

struct Group {
  ucontext_t main, lane[kLanes];  // how a lane begins
  jmp_buf at[kLanes];             // where it went away: no system call to come back
  void* stacks;
  bool begun[kLanes], ended[kLanes];
  const Meeting* waits[kLanes];  // where a lane waits, and the turn that it waits to see the end of
  uint64_t turn[kLanes];
  uint32_t current = 0, index = 0, alive = kLanes, stride = 1;  // odd: lanes take turns in an order of each group's own
  const void* arguments;
  Meeting all{kLanes}, wave[kLanes / kWave];
  uint64_t word[kLanes];
  uint16_t a[kLanes][16], b[kLanes][16];
};

inline thread_local Group* group;

inline bool ready(const Group& g, uint32_t lane) {
  return !g.ended[lane] && (!g.waits[lane] || g.waits[lane]->turn != g.turn[lane]);
}

[[noreturn]] inline void go_on(Group& g, uint32_t to) {
  g.current = to;
  if (g.begun[to]) _longjmp(g.at[to], 1);
  g.begun[to] = true;
  setcontext(&g.lane[to]);
  abort();
}

inline void give_way() {
  Group& g = *group;
  const uint32_t from = g.current;
  uint32_t to = from;
  do {
    to = (to + g.stride) % kLanes;
    if (to == 0) sched_yield();
  } while (!ready(g, to) && to != from);
  if (to == from) return;
  if (_setjmp(g.at[from]) == 0) go_on(g, to);
}

inline void pass(Meeting& m) {
  m.arrived = 0;
  ++m.turn;
}

inline void meet(Meeting& m) {
  const uint32_t own = group->current;
  const uint64_t turn = m.turn;
  if (++m.arrived == m.members) return pass(m);
  group->waits[own] = &m;
  group->turn[own] = turn;
  while (m.turn == turn) give_way();
  group->waits[own] = nullptr;
}

inline Meeting& own_wave() { return group->wave[group->current / kWave]; }

[[noreturn]] inline void end_lane() {
  Group& g = *group;
  g.ended[g.current] = true;
  --g.alive;
  Meeting* places[] = {&g.all, &own_wave()};
  for (Meeting* m : places) {
    if (--m->members != 0 && m->arrived == m->members) pass(*m);
  }
  if (g.alive == 0) setcontext(&g.main);
  for (uint32_t to = 0; to < kLanes; ++to) {
    if (ready(g, to)) go_on(g, to);
  }
  abort();
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

inline uint32_t place[64], missing = 0;  // what mk_place says
inline uint32_t hardware_register(int which) {
  if ((which & 63) != 20) abort();  // XCC_ID
  return place[group->index % 64];
}

inline uint64_t ticks() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec)) / 10;
}

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
#define __builtin_amdgcn_s_barrier() emulator::meet(emulator::group->all)
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
