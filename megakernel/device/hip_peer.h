// Hand-offs between AMD GPUs: windows in fine-grained memory of each that the others write over Infinity Fabric or PCIe.
//
// All at system scope. An element of an exchange is one 64-bit store, float and stamp: it orders nothing, and nothing else
// is read on its word; so no atomic addition goes over a bus that may not carry it. Compiled and inspected, never run.
#pragma once

namespace megakernel::dev {

// As Worker::fault, by any lane.
MK_DEVICE void report_peer(Worker& w, uint32_t counter, uint64_t value, uint64_t target) {
  abi::LaunchState* launch = w.launch();
  if (exchange_acquire_release(&launch->abort, 1) != 0) return;
  launch->exit = uint32_t(abi::ExitReason::kFault);
  auto* f = reinterpret_cast<abi::FaultRecord*>(w.args.fault);
  f->claimed = 1;
  f->worker = w.id;
  f->role = uint32_t(abi::Role::kWorker);
  f->record = w.record_index;
  f->opcode = w.record ? w.record->opcode : uint32_t(abi::kEnd);
  f->node = w.record ? w.record->node : abi::kNone;
  f->tile = w.record ? w.record->tile_begin : abi::kNone;
  f->counter = counter;
  f->value = value;
  f->target = target;
  f->step = w.step;
  store_release_system(&f->kind, uint32_t(abi::FaultKind::kPeerBudget));
}

// One lane polls until `enough`; false when the launch is over.
template <class Seen, class Enough>
MK_DEVICE bool await_from_peer(Worker& w, Seen seen, Enough enough, uint64_t target, uint32_t counter) {
  uint64_t began = 0;
  trace::wait_begins(w, abi::Role::kWorker);
  for (uint32_t turn = 1;; ++turn) {
    const uint64_t value = seen();
    if (enough(value)) {
      trace::waited(w, abi::Role::kWorker, counter);
      trace::ready_now(w, abi::Role::kWorker);
      return true;
    }
    pause();
    if (turn % 64 != 0) continue;
    if (load_relaxed(&w.launch()->abort) != 0) return false;
    const uint64_t now = clock_ns();
    if (began == 0) began = now;
    if (now - began < peer_budget_ns(w.args.spin_budget_ns)) continue;
    report_peer(w, counter, value, target);
    return false;
  }
}

constexpr bool kAsksAtOnce = false;  // parts of an exchange are taken one after the other

MK_DEVICE void settle(Worker& w, bool good) { w.failed = w.max(int32_t(w.failed || !good)) != 0; }

MK_DEVICE bool await_peer(Worker& w, const uint64_t* p, uint64_t target, uint32_t counter) {
  bool good = true;
  if (w.lane() == 0) {
    good = await_from_peer(
        w, [p] { return load_acquire_system(p); }, [target](uint64_t value) { return value >= target; }, target, counter);
  }
  settle(w, good);
  return !w.failed;
}

MK_DEVICE void signal_peer(Worker& w, uint64_t* p, uint64_t count, uint32_t counter) {
  if (w.lane() == 0) __hip_atomic_fetch_add(p, count, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}

MK_DEVICE void put_stamped(uint64_t* p, float v, uint32_t stamp) {
  __hip_atomic_store(p, uint64_t(stamp) << 32 | bits_of(v), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

MK_DEVICE bool take_stamped(Worker& w, const uint64_t* p, uint32_t stamp, float& v, uint32_t counter) {
  uint64_t element = 0;
  const bool good = await_from_peer(
      w,
      [&] {
        element = __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
        return element >> 32;
      },
      [stamp](uint64_t value) { return value == stamp; }, stamp, counter);
  v = float_of(uint32_t(element));
  return good;
}

// No edge of these targets is by value.
MK_DEVICE float take(Worker&, const float* p) { return *p; }
MK_DEVICE void give(float* p, float v) { *p = v; }
MK_DEVICE void retire(const Worker&, float*, uint32_t, uint32_t) {}

}  // namespace megakernel::dev
