// How each role runs a task on this device. `Core<T>` of a task that streams is written for the matrix cores; any other
// task is executed by the group of consumers. A step runs through all of this code once a layer, and instructions are
// fetched through the same memory as the weights: so what is run in every layer must fit the instruction cache. Hence
// functions out of line that several tasks share, flags instead of template parameters, and loops that stay loops.
#pragma once

namespace megakernel::dev {

// Warp-wide. The producer fills each stage once it is empty. It keeps at most kInFlight copies on their way: more would
// only make everyone else's loads wait.
struct Producer {
  Worker w;
  Ring head, tail;
  uint32_t in_flight;
  uint64_t policy = streaming_policy();

  MK_DEVICE void load() {
    w.load();
    const RoleState& s = w.state();
    head = s.ring, tail = s.tail, in_flight = s.in_flight;
  }
  MK_DEVICE void save() const {
    RoleState& s = w.state();
    s.ring = head, s.tail = tail, s.in_flight = in_flight;
    w.save();
  }

  MK_DEVICE void put(const void* from, uint32_t bytes) {
    Block& b = block();
    w.watch_barrier(&b.empty[head.slot], head.parity ^ 1);
    if (in_flight == kInFlight) {
      w.watch_barrier(&b.full[tail.slot], tail.parity);
      tail.next();
    } else {
      ++in_flight;
    }
    trace::ready(w, abi::Role::kProducer);
    b.copying[head.slot] = uint8_t(2 + head.parity);
    copy_to_shared(b.ring[head.slot], from, bytes, &b.full[head.slot], policy);
    head.next();
  }
};

// Warp-wide. Every consumer waits for every stage and gives it back: so no waiter is more than one phase behind.
struct Consumer {
  Worker w;
  Ring ring;
  uint32_t sums_slot, sums_parity;

  MK_DEVICE void load() {
    w.load();
    const RoleState& s = w.state();
    ring = s.ring, sums_slot = s.sums_slot, sums_parity = s.sums_parity;
  }
  MK_DEVICE void save() const {
    RoleState& s = w.state();
    s.ring = ring, s.sums_slot = sums_slot, s.sums_parity = sums_parity;
    w.save();
  }

  MK_DEVICE void await() { w.wait_barrier(&block().full[ring.slot], ring.parity); }
  MK_DEVICE uint8_t* take() {
    w.wait_barrier(&block().full[ring.slot], ring.parity);
    return block().ring[ring.slot];
  }
  MK_DEVICE void give_back(uint32_t slot) {
    __syncwarp();
    if (w.warp_lane() == 0) barrier_arrive(&block().empty[slot]);
  }
  MK_DEVICE void give_back() {
    give_back(ring.slot);
    ring.next();
  }
};

struct Storer {
  Worker w;
  uint32_t sums_slot, sums_parity;

  MK_DEVICE void load() {
    w.load();
    const RoleState& s = w.state();
    sums_slot = s.sums_slot, sums_parity = s.sums_parity;
  }
  MK_DEVICE void save() const {
    RoleState& s = w.state();
    s.sums_slot = sums_slot, s.sums_parity = sums_parity;
    w.save();
  }
};

template <class T>
MK_DEVICE const typename T::Fields& fields_of(const abi::Record& record) {
  static_assert(sizeof(typename T::Fields) <= sizeof record.payload);
  return *reinterpret_cast<const typename T::Fields*>(record.payload);
}

MK_DEVICE uint64_t* counter_of(const Worker& w, uint32_t index) {
  return reinterpret_cast<uint64_t*>(w.args.counters) + uint64_t(index) * abi::kCounterStride;
}

// Each lane that calls it waits for every counter of the record.
MK_DEVICE void wait_counters(Worker& w, const abi::Record& record) {
  for (uint32_t i = 0; i < record.wait_count; ++i) {
    const abi::Wait& wait = record.waits[i];
    trace::wait_begins(w, abi::Role::kConsumer);
    w.wait(counter_of(w, wait.counter), wait.count * w.step, abi::FaultKind::kWaitBudget, wait.counter);
    trace::waited(w, abi::Role::kConsumer, wait.counter);
  }
}

MK_DEVICE void signal_counter(Worker& w, const abi::Record& record) {
  if (record.signal != abi::kNone) w.signal(counter_of(w, record.signal), record.signal);
}

// The task that makes headers begins a launch; on the first worker, by the group of consumers.
template <class T>
__device__ __noinline__ void begin_launch() {
  Worker w;
  w.load();
  T::begin(w);
  w.save();
}

template <class T>
struct Core {
  static constexpr bool kProduces = false, kStores = false;
  static constexpr bool kNeedsHeader = false;  // of its producer

  static __device__ __noinline__ void consume() {
    Consumer c;
    c.load();
    const abi::Record& record = *c.w.record;
    wait_counters(c.w, record);
    trace::ready(c.w, abi::Role::kConsumer);
    T::execute(c.w, record, fields_of<T>(record));
    c.w.sync();
    if (block().failed) asm volatile("exit;");  // nothing after it may go on
    trace::end(c.w, abi::Role::kConsumer);
    if (c.w.lane() == 0) signal_counter(c.w, record);
    c.save();
  }
};

}  // namespace megakernel::dev

#include "megakernel/device/cuda_matrix.cuh"
#include "megakernel/device/cuda_pages.cuh"
#include "megakernel/device/cuda_tokens.cuh"
#include "megakernel/device/cuda_values.cuh"
