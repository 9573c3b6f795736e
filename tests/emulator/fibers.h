// Lanes of an emulated group, as fibers of one thread of the host that take turns where they wait or meet. Included by a
// before.h, which says how many lanes there are (EMULATOR_LANES, in waves of EMULATOR_WAVE), and what is done when a wave
// has met (`before_pass`) and when a lane ends (`lane_ends`).
#pragma once
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

// To ThreadSanitizer a wave is a thread: its lanes may write the same value to one place, and what orders them otherwise it
// does not see. It is told which wave runs and what orders waves; a switch does not. Nor does it see the emulator's own
// memory (ignore.txt, EMULATOR_UNSEEN).
#if __has_feature(thread_sanitizer)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_set_fiber_name(void*, const char*);
void __tsan_acquire(void*);
void __tsan_release(void*);
// Volatile words are read and written whole, and order nothing.
__attribute__((used)) inline void __tsan_volatile_read4(void*) {}
__attribute__((used)) inline void __tsan_volatile_write4(void*) {}
}
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))
#else
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void __tsan_destroy_fiber(void*) {}
inline void __tsan_switch_to_fiber(void*, unsigned) {}
inline void __tsan_set_fiber_name(void*, const char*) {}
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
#define EMULATOR_UNSEEN
#endif

namespace emulator {

constexpr unsigned kNoOrder = 1;  // flag of __tsan_switch_to_fiber

constexpr uint32_t kWave = EMULATOR_WAVE, kLanes = EMULATOR_LANES, kStackBytes = 256 * 1024;

struct Meeting {  // where `members` lanes wait for each other
  uint32_t members, arrived = 0;
  uint64_t turn = 0;
  uint64_t order[2];  // addresses that stand for the order of this turn and the next
};

struct Fibers {
  ucontext_t main, lane[kLanes];  // how a lane begins
  jmp_buf at[kLanes];             // where it went away: no system call to come back
  void* stacks;
  bool begun[kLanes], ended[kLanes];
  const Meeting* waits[kLanes];  // where a lane waits, and the turn that it waits to see the end of
  uint64_t turn[kLanes];
  const uint32_t* asleep[kLanes];  // until this word is another than `until`, or for some rounds
  uint32_t until[kLanes];
  uint32_t current = 0, index = 0, alive = kLanes, round = 0;
  uint32_t stride = 1;  // odd: lanes take turns in an order of each group's own
  Meeting all{kLanes}, wave[kLanes / kWave];
  uint64_t word[kLanes];
  void *seen_main, *seen[kLanes / kWave];  // the same, for ThreadSanitizer
};

inline thread_local Fibers* fibers;

void before_pass(Meeting& m);
void lane_ends();

constexpr uint32_t kRounds = 64;  // after which a lane looks for itself why it sleeps

inline bool ready(const Fibers& g, uint32_t lane) {
  if (g.ended[lane] || (g.waits[lane] && g.waits[lane]->turn == g.turn[lane])) return false;
  return !g.asleep[lane] || *g.asleep[lane] != g.until[lane] || g.round % kRounds == 0;
}

[[noreturn]] inline void go_on(Fibers& g, uint32_t to) {
  if (to / kWave != g.current / kWave) __tsan_switch_to_fiber(g.seen[to / kWave], kNoOrder);
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
    if (to == 0) ++g.round, sched_yield();
  } while (!ready(g, to) && to != from);
  if (to == from) return;
  if (_setjmp(g.at[from]) == 0) go_on(g, to);
}

inline void sleep_while(const uint32_t* word, uint32_t value) {
  Fibers& g = *fibers;
  const uint32_t own = g.current;
  g.asleep[own] = word, g.until[own] = value;
  give_way();
  g.asleep[own] = nullptr;
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

// What lanes wrote before it, all may read after it.
inline void meet_in_order(Meeting& m) {
  uint64_t* turn = &m.order[m.turn & 1];
  __tsan_release(turn);
  meet(m);
  __tsan_acquire(turn);
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
  __tsan_release(&g);
  if (g.alive == 0) {
    __tsan_switch_to_fiber(g.seen_main, 0);
    setcontext(&g.main);
  }
  for (uint32_t i = 0; i <= kRounds; ++g.round, ++i, sched_yield()) {
    for (uint32_t to = 0; to < kLanes; ++to) {
      if (ready(g, to)) go_on(g, to);
    }
  }
  abort();  // all that are left wait to meet one that is gone
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
    g.asleep[i] = nullptr;
    getcontext(&g.lane[i]);
    g.lane[i].uc_stack.ss_sp = static_cast<char*>(g.stacks) + size_t(i) * kStackBytes;
    g.lane[i].uc_stack.ss_size = kStackBytes;
    g.lane[i].uc_link = nullptr;
    makecontext(&g.lane[i], lane, 0);
  }
  for (uint32_t i = 0; i < kLanes / kWave; ++i) {
    g.seen[i] = __tsan_create_fiber(0);
    char name[64];
    snprintf(name, sizeof name, "group %u wave %u", index, i);
    __tsan_set_fiber_name(g.seen[i], name);
  }
  g.begun[0] = true;
  g.seen_main = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(g.seen[0], 0);
  swapcontext(&g.main, &g.lane[0]);
  __tsan_acquire(&g);
  for (void* wave : g.seen) __tsan_destroy_fiber(wave);
  munmap(g.stacks, size_t(kLanes) * kStackBytes);
}

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

}  // namespace emulator
