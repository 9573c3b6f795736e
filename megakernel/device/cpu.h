// The CPU device: a worker is one thread that plays all roles in turn, so a group has one lane and stages are the
// sources themselves.
#pragma once

#define MEGAKERNEL_DRIVER "megakernel/scheduler/pipeline.cuh"

#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "megakernel/device/cpu_dot.h"

namespace megakernel::dev {

#ifdef MEGAKERNEL_CHAOS
constexpr bool kChaos = true;
#else
constexpr bool kChaos = false;
#endif

// Which write orders before which read: a worker's stores to the workspace and to pages come before its add_release on
// a counter; a worker that has seen the counter's value by load_acquire reads them. Headers and slots come before
// store_release of LaunchState.published in the same way. With the host it is the same: threads share memory.
MK_INLINE uint64_t load_acquire(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
MK_INLINE uint64_t load_acquire_system(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
MK_INLINE void store_release(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
MK_INLINE void store_release_system(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
MK_INLINE uint64_t fetch_add(uint64_t* p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
MK_INLINE uint32_t add_acquire_release(uint32_t* p, uint32_t v) { return __atomic_add_fetch(p, v, __ATOMIC_ACQ_REL); }
MK_INLINE uint32_t load_acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
MK_INLINE uint32_t load_relaxed(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
MK_INLINE void add_release(uint64_t* p, uint64_t v) {
#ifdef MEGAKERNEL_WEAK_RELEASE  // a deliberate error for a test of the race detector
  __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
#else
  __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);  // more than release: comes before the look for sleepers in wake()
#endif
}
MK_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

MK_INLINE uint64_t clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

// A clock of this core that costs little to read.
MK_INLINE uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t t;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t));
  return t;
#else
  return clock_ns();
#endif
}

}  // namespace megakernel::dev

#include "megakernel/device/trace.cuh"

namespace megakernel::dev {

MK_INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline void futex_wait(const uint32_t* word, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, timeout, nullptr, 0);
}
inline void futex_wake(const uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

// Where workers sleep that have waited long for a word of memory. A sleeper counts itself and then looks at the word; who
// changes the word then looks for sleepers. So one sees the other; should a change be made without a look, a sleeper
// wakes by itself soon.
struct alignas(64) Bed {
  uint32_t sleepers = 0;
  uint32_t wakes = 0;
};

// What a worker thread shares with the host thread that launches it.
struct HostLink {
  static constexpr uint32_t kBeds = 64;
  void (*notify)(HostLink*) = nullptr;
  uint32_t spins = 4096;  // pauses before a waiter sleeps
  uint32_t dropped = 0;   // the signal that a test wants lost has been lost
  Bed beds[kBeds];

  MK_INLINE Bed& bed(const void* word) { return beds[(reinterpret_cast<uint64_t>(word) >> 7) % kBeds]; }

  MK_INLINE void wake(const void* word) {
    Bed& b = bed(word);
    if (__atomic_load_n(&b.sleepers, __ATOMIC_SEQ_CST) == 0) return;
    __atomic_add_fetch(&b.wakes, 1u, __ATOMIC_SEQ_CST);
    futex_wake(&b.wakes);
  }

  template <class Word>
  void sleep(const Word* word, uint64_t target) {
    const timespec limit{0, 1000000};
    Bed& b = bed(word);
    const uint32_t wakes = __atomic_load_n(&b.wakes, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&b.sleepers, 1u, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) < target) futex_wait(&b.wakes, wakes, &limit);
    __atomic_sub_fetch(&b.sleepers, 1u, __ATOMIC_SEQ_CST);
  }
};

struct Worker {
  const abi::KernelArgs& args;
  HostLink& host;
  const uint32_t id;
  const abi::StepHeader* header = nullptr;
  uint64_t step = 0;
  const abi::Record* record = nullptr;
  uint32_t record_index = 0;
  bool failed = false;  // this worker must leave the launch
  [[no_unique_address]] mutable trace::Tracers tracers;

  MK_INLINE bool traces() const { return true; }  // whether this lane writes
  MK_INLINE trace::Tracer& tracer(abi::Role role) const { return tracers.of(role); }

  Worker(const abi::KernelArgs& a, HostLink& h, uint32_t index) : args(a), host(h), id(index) {
    random_ = (uint64_t(a.chaos_seed) << 32 | (index + 1)) * 0x9E3779B97F4A7C15u;
  }
  Worker(const Worker&) = delete;
  ~Worker() {
    ::free(memory_);
    ::free(wide_);
  }

  MK_INLINE uint32_t lane() const { return 0; }
  static constexpr uint32_t lanes() { return 1; }
  MK_INLINE void sync() const {}
  template <class T>
  MK_INLINE T broadcast(T v) const {
    return v;
  }

  template <class F>
  MK_INLINE void for_each(uint32_t n, F f) const {
    uint32_t i = 0;
    for (; i + kWidth <= n; i += kWidth) f(i, All{});
    if (i < n) f(i, Some{n - i});
  }
  template <class F>
  MK_INLINE void for_each(uint32_t rows, uint32_t n, F f) const {
    for (uint32_t r = 0; r < rows; ++r) {
      for_each(n, [&](uint32_t i, auto part) { f(r, i, part); });
    }
  }

  template <class T, class V, class F>
  static MK_INLINE T fold(V v, F f) {
    T out = v[0];
    for (int i = 1; i < kWidth; ++i) out = f(out, v[i]);
    return out;
  }

  MK_INLINE float sum(Vf v) const { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
  MK_INLINE int32_t sum(Vi v) const { return v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7]; }
  MK_INLINE float max(Vf v) const { return fold<float>(v, [](float a, float b) { return a > b ? a : b; }); }
  MK_INLINE int32_t max(Vi v) const { return fold<int32_t>(v, [](int32_t a, int32_t b) { return a > b ? a : b; }); }
  MK_INLINE int32_t min(Vi v) const { return fold<int32_t>(v, [](int32_t a, int32_t b) { return a < b ? a : b; }); }
  MK_INLINE float min(float v) const { return v; }  // of one value a lane
  MK_INLINE int32_t min(int32_t v) const { return v; }

  template <class T>
  MK_INLINE T* scratch(uint64_t count) {
    const uint64_t bytes = (count * sizeof(T) + 63) & ~uint64_t(63);
    if (bytes > memory_bytes_) grow(bytes);
    return static_cast<T*>(memory_);
  }

  // Memory of dot_tile alone.
  MK_INLINE float* wide(uint64_t count) {
    if (count > wide_count_) grow_wide(count);
    return wide_;
  }

  void notify_host() { host.notify(&host); }

  abi::LaunchState* launch() const { return reinterpret_cast<abi::LaunchState*>(args.launch); }
  bool aborted() const { return load_relaxed(&launch()->abort) != 0; }

  // Waits until *p >= target. `idle` is called while waiting. False when the launch is over for this worker.
  template <class Word, class Idle>
  MK_INLINE bool wait(const Word* p, uint64_t target, abi::FaultKind kind, uint32_t counter, Idle idle) {
    if constexpr (kChaos) delay();
    if (load_acquire(p) >= target) return true;
    return wait_slow(p, target, kind, counter, idle);
  }
  template <class Word>
  MK_INLINE bool wait(const Word* p, uint64_t target, abi::FaultKind kind, uint32_t counter) {
    return wait(p, target, kind, counter, [] {});
  }

  // +1 on a counter: what this worker wrote before is visible to who sees it.
  MK_INLINE void signal(uint64_t* p, uint32_t counter) {
    if constexpr (kChaos) {
      delay();
      if (counter == args.drop_signal && __atomic_exchange_n(&host.dropped, 1u, __ATOMIC_RELAXED) == 0) return;
    }
    add_release(p, 1);
    host.wake(p);
  }

  // The same; true for the signal that makes the counter `complete`. Who gets true has acquired what all of them wrote.
  MK_INLINE bool signal_last(uint64_t* p, uint32_t counter, uint64_t complete) {
    if constexpr (kChaos) {
      delay();
      if (counter == args.drop_signal && __atomic_exchange_n(&host.dropped, 1u, __ATOMIC_RELAXED) == 0) return false;
    }
#ifdef MEGAKERNEL_WEAK_RELEASE  // as in add_release
    return __atomic_add_fetch(p, 1u, __ATOMIC_RELAXED) == complete;
#else
    return __atomic_add_fetch(p, 1u, __ATOMIC_ACQ_REL) == complete;
#endif
  }

  // Of a signal to a peer: a delay, and whether a test wants it lost.
  MK_INLINE bool loses(uint32_t counter) {
    if constexpr (kChaos) {
      delay();
      return counter == args.drop_signal && __atomic_exchange_n(&host.dropped, 1u, __ATOMIC_RELAXED) == 0;
    }
    return false;
  }

  // After a step: its end, and the next header, which one worker published before.
  MK_INLINE void wake_step() {
    host.wake(&launch()->published);
    host.wake(&launch()->finished);
  }

  // The first fault of a launch is recorded; every worker leaves.
  __attribute__((noinline, cold)) void fault(abi::FaultKind kind, uint32_t tile, uint32_t counter, uint64_t value,
                                             uint64_t target) {
    failed = true;
    auto* f = reinterpret_cast<abi::FaultRecord*>(args.fault);
    if (__atomic_exchange_n(&f->claimed, 1u, __ATOMIC_ACQ_REL) == 0) {
      f->worker = id;
      f->role = uint32_t(abi::Role::kWorker);
      f->record = record_index;
      f->opcode = record ? record->opcode : uint32_t(abi::kEnd);
      f->node = record ? record->node : abi::kNone;
      f->tile = tile;
      f->counter = counter;
      f->value = value;
      f->target = target;
      f->step = step;
      __atomic_store_n(&f->kind, uint32_t(kind), __ATOMIC_RELEASE);
    }
    __atomic_store_n(&launch()->exit, uint32_t(abi::ExitReason::kFault), __ATOMIC_RELAXED);
    __atomic_store_n(&launch()->abort, 1u, __ATOMIC_RELEASE);
  }

  // A random delay: often none, sometimes a pause, rarely the whole core.
  __attribute__((noinline)) void delay() {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    const uint32_t draw = uint32_t(random_ >> 40);
    if (draw % 64 == 0) {
      sched_yield();
    } else if (draw % 4 == 0) {
      for (uint32_t i = 0; i < draw / 4 % 512; ++i) pause();
    }
  }

 private:
  void* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  float* wide_ = nullptr;
  uint64_t wide_count_ = 0;
  uint64_t random_ = 0;
  uint32_t spins_ = host.spins;  // pauses before it sleeps, by what the last waits were like

  __attribute__((noinline)) void grow(uint64_t bytes) {
    free(memory_);
    memory_bytes_ = bytes + bytes / 2;
    if (posix_memalign(&memory_, 4096, memory_bytes_) != 0) abort();
  }

  __attribute__((noinline)) void grow_wide(uint64_t count) {
    ::free(wide_);
    wide_count_ = count + count / 2;
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, wide_count_ * sizeof(float)) != 0) abort();
    wide_ = static_cast<float*>(memory);
  }

  template <class Word, class Idle>
  __attribute__((noinline)) bool wait_slow(const Word* p, uint64_t target, abi::FaultKind kind, uint32_t counter,
                                           Idle idle) {
    // Who waits for a header waits for workers that wait for counters: they must be the first to report.
    const uint64_t budget = args.spin_budget_ns * (kind == abi::FaultKind::kHeaderBudget ? 2 : 1);
    trace::wait_begins(*this, abi::Role::kWorker);
    for (uint32_t spin = 0; spin < spins_; ++spin) {
      idle();
      pause();
      if (load_acquire(p) < target) continue;
      spins_ = spins_ + spins_ / 4 < host.spins ? spins_ + spins_ / 4 : host.spins;
      trace::waited(*this, abi::Role::kWorker, counter);
      return true;
    }
    // Perhaps who should signal has no core because this worker spins on it: next time it sleeps sooner.
    spins_ = spins_ / 2 > host.spins / 8 ? spins_ / 2 : host.spins / 8;
    for (const uint64_t began = clock_ns();;) {
      host.sleep(p, target);
      const uint64_t value = load_acquire(p);
      trace::waited(*this, abi::Role::kWorker, counter);
      if (value >= target) return true;
      if (aborted()) {
        failed = true;
        return false;
      }
      if (clock_ns() - began < budget) continue;
      fault(kind, record ? record->tile_begin : abi::kNone, counter, value, target);
      return false;
    }
  }
};

}  // namespace megakernel::dev

#include "megakernel/device/cpu_host.h"
