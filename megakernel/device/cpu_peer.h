// Hand-offs between CPU devices: memory that the threads of several kernels share, in one process or in several.
//
// Which write orders before which read: what a worker stored into a peer's window comes before its release addition to a
// counter there; a worker of the peer that has seen the counter with acquire reads it. Nobody can wake who sleeps in
// another process, so who waits long lets others run, then sleeps for moments.
#pragma once

namespace megakernel::dev {

MK_INLINE void signal_peer(Worker& w, uint64_t* p, uint64_t count, uint32_t counter) {
  if (w.loses(counter)) return;
#ifdef MEGAKERNEL_WEAK_PEER  // a deliberate error for a test of the race detector
  __atomic_fetch_add(p, count, __ATOMIC_RELAXED);
#else
  __atomic_fetch_add(p, count, __ATOMIC_RELEASE);
#endif
}

inline bool await_peer(Worker& w, const uint64_t* p, uint64_t target, uint32_t counter) {
  constexpr uint32_t kPauses = 64, kYields = 4096;
  if constexpr (kChaos) w.delay();
  uint64_t value = load_acquire(p);
  if (value >= target) return true;
  trace::wait_begins(w, abi::Role::kWorker);
  const uint64_t began = clock_ns();
  for (uint32_t turn = 0; (value = load_acquire(p)) < target; ++turn) {
    if (turn < kPauses) {
      pause();
    } else if (turn < kYields) {
      sched_yield();
    } else {
      const timespec moment{0, 50000};
      nanosleep(&moment, nullptr);
    }
    if (turn % 16 != 15) continue;
    if (w.aborted()) {
      w.failed = true;
      return false;
    }
    if (clock_ns() - began < w.args.spin_budget_ns) continue;
    w.fault(abi::FaultKind::kPeerBudget, w.record ? w.record->tile_begin : abi::kNone, counter, value, target);
    return false;
  }
  trace::waited(w, abi::Role::kWorker, counter);
  return true;
}

}  // namespace megakernel::dev
