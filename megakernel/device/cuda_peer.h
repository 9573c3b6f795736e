// Hand-offs between GPUs: windows in the memory of each that the others write over NVLink or PCIe, without multicast.
//
// All at system scope, all ordinary stores and loads of addresses that the driver has made visible. An element of an
// exchange is one 64-bit store, float and stamp: it orders nothing, and nothing else is read on its word. The decision of
// rank 0 and counters are released after what comes before them. See docs/memory-model.md.
#pragma once

namespace megakernel::dev {

MK_DEVICE void add_release_system(uint64_t* p, uint64_t v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

MK_DEVICE void store_relaxed_system(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Called by the group after it has met: one lane speaks for all.
MK_DEVICE void signal_peer(Worker& w, uint64_t* p, uint64_t count, uint32_t counter) {
  if constexpr (kChaos) {
    w.random = random_delay(w.random);
    if (w.lane() == 0 && counter == w.args.drop_signal && atomicExch(&block().dropped, 1u) == 0) return;
  }
  if (w.lane() == 0) add_release_system(p, count);
}

// Called by the group; a lane that waits in vain ends, and with it the launch.
MK_DEVICE bool await_peer(Worker& w, const uint64_t* p, uint64_t target, uint32_t counter) {
  if (w.lane() == 0) {
    PatienceOf<true> patience;
    const uint32_t began = trace::now();
    for (uint64_t value; (value = load_acquire_system(p)) < target;) {
      if (patience.over()) give_up(abi::FaultKind::kPeerBudget, counter, value, target);
    }
    trace::waited(w, began, counter);
    trace::ready_now(w, abi::Role::kConsumer);
  }
  w.sync();
  return true;
}

MK_DEVICE void put_stamped(uint64_t* p, float v, uint32_t stamp) {
  store_relaxed_system(p, uint64_t(stamp) << 32 | as_bits(v));
}

MK_DEVICE bool take_stamped(Worker& w, const uint64_t* p, uint32_t stamp, float& v, uint32_t counter) {
  uint64_t element = load_system(p);
  if (__builtin_expect(uint32_t(element >> 32) != stamp, 0)) {
    PatienceOf<true> patience;
    const uint32_t began = trace::now();
    do {
      if (patience.over()) give_up(abi::FaultKind::kPeerBudget, counter, element >> 32, stamp);
      element = load_system(p);
    } while (uint32_t(element >> 32) != stamp);
    trace::waited(w, began, counter);
    trace::ready_now(w, abi::Role::kConsumer);
  }
  v = as_float(uint32_t(element));
  return true;
}

// One element of every rank's part, `own` from this device and the others stamped, `size` apart. All are asked for at once,
// again and again: a load takes about as long as the element from a peer, so none may wait for another.
constexpr bool kAsksAtOnce = true;

template <uint32_t kParts>
MK_DEVICE void take_parts(Worker& w, const float* own, uint32_t rank, const uint64_t* parts, uint64_t size, uint32_t stamp,
                          uint32_t counter, float (&v)[kParts]) {
  if constexpr (kChaos) w.random = random_delay(w.random);
  PatienceOf<true> for_peer;
  Patience for_own;
  uint32_t late = rank;  // whose was missing last
  const uint32_t began = trace::now();
  for (;;) {
    uint64_t seen[kParts];
#pragma unroll
    for (uint32_t k = 0; k < kParts; ++k) seen[k] = k == rank ? load_word(own) : load_system(parts + k * size);
    uint32_t missing = abi::kNone;
#pragma unroll
    for (uint32_t k = 0; k < kParts; ++k) {
      if (k == rank ? uint32_t(seen[k]) == kInvalid : uint32_t(seen[k] >> 32) != stamp) missing = k;
      v[k] = as_float(uint32_t(seen[k]));
    }
    if (__builtin_expect(missing == abi::kNone, 1)) break;
    late = missing;
    if (late != rank) {
      if (for_peer.over()) give_up(abi::FaultKind::kPeerBudget, counter + missing, 0, stamp);
    } else if (for_own.over()) {
      give_up(abi::FaultKind::kValueBudget, abi::kNone, 0, 0);
    }
  }
  if (late != rank) {
    trace::waited(w, began, counter + late);
    trace::ready_now(w, abi::Role::kConsumer);
  }
}

MK_DEVICE void settle(const Worker&, bool) {}  // who got no element has ended

MK_DEVICE float take(Worker& w, const float* p) { return await(w, p); }
MK_DEVICE void give(float* p, float v) { publish(p, v); }

// Columns of every row that the step before had.
MK_DEVICE void retire(const Worker& w, float* p, uint32_t cols, uint32_t stride) {
#pragma unroll 1
  for (uint32_t i = w.lane(); i < w.last->rows * cols; i += w.lanes()) {
    clear(before(w, p + uint64_t(i / cols) * stride + i % cols));
  }
}

}  // namespace megakernel::dev
