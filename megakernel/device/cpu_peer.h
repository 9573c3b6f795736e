// Hand-offs between CPU devices: memory that the threads of several kernels share, in one process or in several.
//
// Which write orders before which read: what a worker stored into a peer's window comes before its release addition to a
// counter there; a worker of the peer that has seen the counter with acquire reads it. A stamped element is one atomic
// store of 8 bytes, and nothing else is read on its word. Nobody can wake who sleeps in another process, so who waits
// long lets others run, then sleeps for moments.
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

// Until `seen` gives what `enough` says yes to. False when the launch is over; `target` is for the report.
template <class Seen, class Enough>
inline bool await_from_peer(Worker& w, Seen seen, Enough enough, uint64_t target, uint32_t counter) {
  constexpr uint32_t kPauses = 64, kYields = 4096;
  uint64_t value = seen();
  if (enough(value)) return true;
  trace::wait_begins(w, abi::Role::kWorker);
  const uint64_t began = clock_ns();
  for (uint32_t turn = 0; !enough(value = seen()); ++turn) {
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
    if (clock_ns() - began < peer_budget_ns(w.args.spin_budget_ns)) continue;
    w.fault(abi::FaultKind::kPeerBudget, w.record ? w.record->tile_begin : abi::kNone, counter, value, target);
    return false;
  }
  trace::waited(w, abi::Role::kWorker, counter);
  trace::ready_now(w, abi::Role::kWorker);
  return true;
}

inline bool await_peer(Worker& w, const uint64_t* p, uint64_t target, uint32_t counter) {
  if constexpr (kChaos) w.delay();
  return await_from_peer(
      w, [p] { return load_acquire(p); }, [target](uint64_t value) { return value >= target; }, target, counter);
}

MK_INLINE void put_stamped(uint64_t* p, float v, uint32_t stamp) {
  __atomic_store_n(p, uint64_t(stamp) << 32 | __builtin_bit_cast(uint32_t, v), __ATOMIC_RELAXED);
}

MK_INLINE bool take_stamped(Worker& w, const uint64_t* p, uint32_t stamp, float& v, uint32_t counter) {
  uint64_t element = 0;
  const bool good = await_from_peer(
      w, [&] { return (element = __atomic_load_n(p, __ATOMIC_RELAXED)) >> 32; },
      [stamp](uint64_t value) { return value == stamp; }, stamp, counter);
  v = __builtin_bit_cast(float, uint32_t(element));
  return good;
}

constexpr bool kAsksAtOnce = false;  // parts of an exchange are taken one after the other

MK_INLINE void settle(const Worker&, bool) {}  // the one lane knows

// No edge of a CPU device is by value.
MK_INLINE float take(Worker&, const float* p) { return *p; }
MK_INLINE void give(float* p, float v) { *p = v; }
MK_INLINE void retire(const Worker&, float*, uint32_t, uint32_t) {}

}  // namespace megakernel::dev
