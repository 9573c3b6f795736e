// How each role runs a task on this device. `Core<T>` of a task that streams is written for the matrix cores; any other
// task is executed by the group of consumers. A step runs through all of this code once a layer, and instructions are
// fetched through the same memory as the weights: so what is run in every layer must fit the instruction cache. Hence
// functions out of line that several tasks share, flags instead of template parameters, and loops that stay loops.
#pragma once

namespace megakernel::dev {

// Warp-wide. The producer fills each stage once it is empty. It keeps at most kInFlight copies on their way, and fewer
// while the loaders ask for values, which come the same way.
struct Producer {
  Worker w;
  Ring head, tail;
  uint32_t in_flight;
  uint64_t policy = streaming_policy();

  MK_DEVICE void load() {
    w.load();
    const RoleState& s = w.state();
    const uint32_t end = own_room().end;
    head = {s.ring, end}, tail = {s.tail, end}, in_flight = s.in_flight;
    trace::begin_pass(w);
  }
  MK_DEVICE void save() const {
    RoleState& s = w.state_to_write();
    s.ring = head, s.tail = tail, s.in_flight = in_flight;
    w.save();
  }

  MK_DEVICE void put(const void* from, uint32_t bytes) {
    Block& b = block();
    while (in_flight >= kCalm && (in_flight >= kInFlight || load_volatile_together(&b.asking) != 0)) {
      w.watch_barrier(&b.full[tail.slot], tail.parity);
      tail.next();
      --in_flight;
    }
    ++in_flight;
    w.watch_barrier<true>(&b.empty[head.slot], head.parity ^ 1);
    set_copying(head.slot, head.parity);
    copy_to_shared(b.ring[head.slot], from, bytes, &b.full[head.slot], policy);
    head.next();
  }
};

// Zero, which the processor knows when it has loaded `word`, and no sooner. `small` is less than 2^31, which compilers do not
// know.
//
// Loads of shared memory may still be on their way when a later arrival at a barrier is done: on an H200 a stage was filled
// again before all of it had been read, about once in 10^6 stages, where consumers keep the ring full. So who gives memory
// back as soon as it is in registers arrives at a place that depends on what was read.
MK_DEVICE uint32_t once_loaded(uint32_t word, uint32_t small) { return word & small >> 31; }
MK_DEVICE uint64_t* beyond(uint64_t* barrier, uint32_t bytes) {
  return reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(barrier) + bytes);
}

// Warp-wide. Every consumer gives every stage back, and waits for all but the pages that others need: so no waiter is more
// than one phase behind (docs/memory-model.md).
struct Consumer {
  Worker w;
  Ring ring;
  uint32_t input_parity;
  uint32_t landed = 0;  // stages from `ring` on that are known to be there

  MK_DEVICE void load() {
    w.load();
    const RoleState& s = w.state();
    ring = {s.ring, own_room().end}, input_parity = s.input_parity;
  }
  MK_DEVICE void save() const {
    save_own();
    w.save();
  }
  // When the group has not met, the worker is as it was loaded, but for the state of random delays.
  MK_DEVICE void save_own() const {
    RoleState& s = w.state_to_write();
    s.ring = ring, s.input_parity = input_parity;
    if constexpr (kChaos) s.random = w.random;
    __syncwarp();
  }
  // In the middle of a product, whose loader reads where the ring was at its begin.
  MK_DEVICE void save_but_ring() const {
    w.state_to_write().input_parity = input_parity;
    w.save();
  }
  // When it has met and neither summed nor broadcast.
  MK_DEVICE void save_met() const {
    save_own();
    w.state().group_parity = w.group_parity;
    __syncwarp();
  }

  // Scratch below the sums, with what the loaders have put there; and back again.
  MK_DEVICE bool has_input() const { return barrier_test(shared_address(&block().input_full), input_parity); }
  MK_DEVICE void take_input() { w.wait_barrier(&block().input_full, input_parity); }
  // word: of all that was loaded from it, where nothing that was made of it has been stored.
  MK_DEVICE void free_input(uint32_t word = 0) {
    __syncwarp();
    barrier_arrive_warp(beyond(&block().input_empty, once_loaded(word, ring.end)));
    input_parity ^= 1;
  }

  // The stage is there. A wait that is over at once takes some 170 cycles beside all the others', so those that can be had
  // while there is nothing else to do are not done again.
  MK_DEVICE void await() {
    if (landed > 0) {
      --landed;
    } else {
      w.wait_barrier(&block().full[ring.slot], ring.parity);
    }
  }
  // How many of the next `most` stages are there.
  MK_DEVICE void look(uint32_t most) {
    Ring at = ring;
#pragma unroll 1
    for (landed = 0; landed < most; ++landed, at.next()) {
      if (!barrier_test(shared_address(&block().full[at.slot]), at.parity)) break;
    }
  }
  // word: of all that was loaded from the stage.
  MK_DEVICE void give_back(uint32_t slot, uint32_t word) {
    __syncwarp();
    barrier_arrive_warp(beyond(&block().empty[slot], once_loaded(word, slot)));
  }
  MK_DEVICE void give_back(uint32_t word) {
    give_back(ring.slot, word);
    ring.next();
  }
};

// What one loader warp has: its turn at the scratch that inputs go through. The consumers give it back when they have read
// the input before; so loaders ask for values of other workers when their own have handed theirs over, not before.
struct Loader {
  static constexpr uint32_t kWarps = kLoaders;
  Worker w;
  uint32_t parity;

  MK_DEVICE void load() {
    w.load();
    parity = w.state().input_parity;
  }
  MK_DEVICE void save() const {
    w.state_to_write().input_parity = parity;
    w.save();
  }
  MK_DEVICE static uint32_t index() { return threadIdx.x / 32 - kLoaderWarp; }

  MK_DEVICE void begin() {
    w.wait_barrier(&block().input_empty, parity ^ 1);
    if (index() == 0) store_volatile(&block().asking, 1);
  }
  MK_DEVICE void end() {
    __syncwarp();
    barrier_arrive_warp(&block().input_full);
    if (index() == 0) store_volatile(&block().asking, 0);
    parity ^= 1;
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
    RoleState& s = w.state_to_write();
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
#pragma unroll 1
  for (uint32_t i = 0; i < record.wait_count; ++i) {
    const abi::Wait& wait = record.waits[i];
    const uint32_t began = trace::now();
    w.wait(counter_of(w, wait.counter), wait.count * w.step, abi::FaultKind::kWaitBudget, wait.counter);
    trace::waited(w, began, wait.counter);
  }
}

MK_DEVICE void signal_counter(Worker& w, const abi::Record& record) {
  if (record.signal != abi::kNone) w.signal(counter_of(w, record.signal), record.signal);
}

}  // namespace megakernel::dev

namespace megakernel::seldom {

// The task that makes headers begins a launch; on the first worker, by the group of consumers, in the scratch that the
// loaders lend them before their first record.
template <class T>
__device__ __noinline__ void begin_launch() {
  dev::Consumer c;
  c.load();
  c.take_input();
  T::begin(c.w);
  c.free_input();
  c.save();
}

}  // namespace megakernel::seldom

namespace megakernel::dev {

// The loaders' part of a task whose consumers fetch their input themselves: they lend them the scratch.
__device__ __noinline__ void lend_scratch() {
  Loader l;
  l.load();
  l.begin();
  l.end();
  l.save();
}

}  // namespace megakernel::dev

namespace megakernel::several {

// What consumers and loaders do for a task in a step of several rows, where that is other code.
template <class C>
__device__ __noinline__ void consume() {
  C::template run<true>();
}
template <class C>
__device__ __noinline__ void load() {
  C::template load_as<true>();
}

}  // namespace megakernel::several

namespace megakernel::dev {

template <class T>
struct Core {
  static constexpr bool kProduces = false, kStores = false, kLoads = true;
  static constexpr bool kNeedsHeader = false;  // of its producer

  MK_DEVICE static void load() { lend_scratch(); }

  static __device__ __noinline__ void consume() {
    Consumer c;
    c.load();
    const abi::Record& record = *c.w.record;
    wait_counters(c.w, record);
    c.take_input();
    trace::ready_now(c.w, abi::Role::kConsumer);
    T::execute(c.w, record, fields_of<T>(record));
    c.w.sync();
    if (block().failed) end_thread();  // nothing after it may go on
    trace::end(c.w, abi::Role::kConsumer);
    if (c.w.lane() == 0) signal_counter(c.w, record);
    c.free_input();
    c.save();
  }
};

}  // namespace megakernel::dev

#include "megakernel/device/cuda_matrix.cuh"
#include "megakernel/device/cuda_norm.cuh"
#include "megakernel/device/cuda_pages.cuh"
#include "megakernel/device/cuda_tokens.cuh"
#include "megakernel/device/cuda_values.cuh"
