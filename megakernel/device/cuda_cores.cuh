// How each role runs a task on this device. `Core<T>` of a task that streams is written for the matrix cores; any other
// task is executed by the group of consumers. Each is a function out of line, which takes and returns the role's state by
// value: so that the state stays in registers, and that tasks which differ in their epilogue only share code.
#pragma once

namespace megakernel::dev {

// Stages in the order in which they are filled. The producer fills each once it is empty, every consumer waits for each
// and gives it back: so no waiter is ever more than one phase behind.
struct Ring {
  uint32_t slot = 0, parity = 0;

  MK_DEVICE void next() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct ProducerState {
  WorkerState w;
  Ring head, tail;
  uint32_t in_flight;
};

// Warp-wide. Keeps at most kInFlight copies on their way: more would only make everyone else's loads wait.
struct Producer {
  Worker w;
  Ring head, tail;
  uint32_t in_flight = 0;
  uint64_t policy = streaming_policy();

  MK_DEVICE ProducerState state() const { return {w.state(), head, tail, in_flight}; }
  MK_DEVICE void set(const ProducerState& s) {
    w.set(s.w);
    head = s.head, tail = s.tail, in_flight = s.in_flight;
  }

  MK_DEVICE void put(const void* from, uint32_t bytes) {
    Block& b = block();
    w.wait_barrier(&b.empty[head.slot], head.parity ^ 1);
    if (in_flight == kInFlight) {
      w.wait_barrier(&b.full[tail.slot], tail.parity);
      tail.next();
    } else {
      ++in_flight;
    }
    b.copying[head.slot] = uint8_t(2 + head.parity);
    copy_to_shared(b.ring[head.slot], from, bytes, &b.full[head.slot], policy);
    head.next();
  }
};

struct ConsumerState {
  WorkerState w;
  Ring ring;
  uint32_t sums_slot, sums_parity;
};

// Warp-wide; every consumer takes every stage.
struct Consumer {
  Worker w;
  Ring ring;
  uint32_t sums_slot = 0, sums_parity = 0;  // parity: one bit a slot

  MK_DEVICE ConsumerState state() const { return {w.state(), ring, sums_slot, sums_parity}; }
  MK_DEVICE void set(const ConsumerState& s) {
    w.set(s.w);
    ring = s.ring, sums_slot = s.sums_slot, sums_parity = s.sums_parity;
  }

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

struct StorerState {
  WorkerState w;
  uint32_t sums_slot, sums_parity;
};

struct Storer {
  Worker w;
  uint32_t sums_slot = 0, sums_parity = 0;

  MK_DEVICE StorerState state() const { return {w.state(), sums_slot, sums_parity}; }
  MK_DEVICE void set(const StorerState& s) {
    w.set(s.w);
    sums_slot = s.sums_slot, sums_parity = s.sums_parity;
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
    w.wait(counter_of(w, wait.counter), wait.count * w.step, abi::FaultKind::kWaitBudget, wait.counter);
  }
}

MK_DEVICE void signal_counter(Worker& w, const abi::Record& record) {
  if (record.signal != abi::kNone) w.signal(counter_of(w, record.signal), record.signal);
}

template <class T>
struct Core {
  static constexpr bool kProduces = false, kStores = false;
  static constexpr bool kNeedsHeader = false;  // of its producer

  static __device__ __noinline__ ConsumerState consume(ConsumerState state) {
    Consumer c;
    c.set(state);
    const abi::Record& record = *c.w.record;
    wait_counters(c.w, record);
    T::execute(c.w, record, fields_of<T>(record));
    c.w.sync();
    if (block().failed) asm volatile("exit;");  // nothing after it may go on
    if (c.w.lane() == 0) signal_counter(c.w, record);
    return c.state();
  }
};

}  // namespace megakernel::dev

#include "megakernel/device/cuda_matrix.cuh"
#include "megakernel/device/cuda_pages.cuh"
#include "megakernel/device/cuda_tokens.cuh"
#include "megakernel/device/cuda_values.cuh"
