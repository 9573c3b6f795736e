// Lanes of an emulated group, as fibers of one thread of the host that take turns where they wait or meet. Included by a
// before.h, which says how many lanes there are (EMULATOR_LANES, in waves of EMULATOR_WAVE), and what is done when a wave
// has met (`before_pass`) and when a lane ends (`lane_ends`).
#pragma once
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

namespace emulator {

constexpr uint32_t kWave = EMULATOR_WAVE, kLanes = EMULATOR_LANES, kStackBytes = 256 * 1024;

struct Meeting {  // where `members` lanes wait for each other
  uint32_t members, arrived = 0;
  uint64_t turn = 0;
};

struct Fibers {
  ucontext_t main, lane[kLanes];  // how a lane begins
  jmp_buf at[kLanes];             // where it went away: no system call to come back
  void* stacks;
  bool begun[kLanes], ended[kLanes];
  const Meeting* waits[kLanes];  // where a lane waits, and the turn that it waits to see the end of
  uint64_t turn[kLanes];
  uint32_t current = 0, index = 0, alive = kLanes, stride = 1;  // odd: lanes take turns in an order of each group's own
  Meeting all{kLanes}, wave[kLanes / kWave];
  uint64_t word[kLanes];
};

inline thread_local Fibers* fibers;

void before_pass(Meeting& m);
void lane_ends();

inline bool ready(const Fibers& g, uint32_t lane) {
  return !g.ended[lane] && (!g.waits[lane] || g.waits[lane]->turn != g.turn[lane]);
}

[[noreturn]] inline void go_on(Fibers& g, uint32_t to) {
  g.current = to;
  if (g.begun[to]) _longjmp(g.at[to], 1);
  g.begun[to] = true;
  setcontext(&g.lane[to]);
  abort();
}

inline void give_way() {
  Fibers& g = *fibers;
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
  before_pass(m);
  m.arrived = 0;
  ++m.turn;
}

inline void meet(Meeting& m) {
  const uint32_t own = fibers->current;
  const uint64_t turn = m.turn;
  if (++m.arrived == m.members) return pass(m);
  fibers->waits[own] = &m;
  fibers->turn[own] = turn;
  while (m.turn == turn) give_way();
  fibers->waits[own] = nullptr;
}

inline Meeting& own_wave() { return fibers->wave[fibers->current / kWave]; }

[[noreturn]] inline void end_lane() {
  Fibers& g = *fibers;
  lane_ends();
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

// All lanes of a group, from the first to the end of the last.
inline void run(Fibers& g, uint32_t index, uint32_t seed, void (*lane)()) {
  fibers = &g;
  g.index = index;
  const uint32_t strides[] = {1, kLanes - 1, 77};
  g.stride = strides[(index + seed) % 3];
  g.stacks = mmap(nullptr, size_t(kLanes) * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  for (Meeting& m : g.wave) m = {kWave};
  for (uint32_t i = 0; i < kLanes; ++i) {
    g.begun[i] = g.ended[i] = false;
    g.waits[i] = nullptr;
    getcontext(&g.lane[i]);
    g.lane[i].uc_stack.ss_sp = static_cast<char*>(g.stacks) + size_t(i) * kStackBytes;
    g.lane[i].uc_stack.ss_size = kStackBytes;
    g.lane[i].uc_link = nullptr;
    makecontext(&g.lane[i], lane, 0);
  }
  g.begun[0] = true;
  swapcontext(&g.main, &g.lane[0]);
  munmap(g.stacks, size_t(kLanes) * kStackBytes);
}

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

}  // namespace emulator
