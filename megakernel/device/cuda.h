// The CUDA device: a worker is one resident block whose warps play one role each. Included after the generated records.
//
// Warps 0 to 7 are consumers, and together the group that runs simple tasks; then producer, storer, control and 4
// loaders, who bring activations. What they share is one `Block` in shared memory. See docs/memory-model.md for which
// instruction orders which write.
#pragma once

#define MEGAKERNEL_DRIVER "megakernel/scheduler/roles.cuh"

#include "megakernel/device/types.cuh"

#include "megakernel/device/cuda_ptx.h"
#include "megakernel/device/f8.cuh"
#include "megakernel/device/cuda_values.h"
#include "megakernel/device/cuda_trace.cuh"

#include "megakernel/device/cuda_block.cuh"

namespace megakernel::dev {

#ifdef MEGAKERNEL_CHAOS
constexpr bool kChaos = true;
#else
constexpr bool kChaos = false;
#endif

// ------------------------------------------------------------------------------------------------ waiting
// The first fault of a launch is recorded; every worker leaves when it next waits.
__device__ __noinline__ void report_fault(
    uint32_t warp, abi::FaultKind kind, uint32_t tile, uint32_t counter, uint64_t value, uint64_t target) {
  const RoleState& at = block().state[warp];
  abi::LaunchState* launch = launch_state();
  if (atomicCAS(&launch->abort, 0u, 1u) != 0) return;
  auto* f = reinterpret_cast<abi::FaultRecord*>(block().args.fault);
  f->claimed = 1;
  f->worker = blockIdx.x;
  f->role = uint32_t(role_of(warp));
  f->record = at.record_index;
  f->opcode = at.record ? at.record->opcode : uint32_t(abi::kEnd);
  f->node = at.record ? at.record->node : abi::kNone;
  f->tile = tile != abi::kNone ? tile : at.record ? at.record->tile_begin : abi::kNone;
  f->counter = counter;
  f->value = value;
  f->target = target;
  f->step = at.step;
  launch->exit = uint32_t(abi::ExitReason::kFault);
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&f->kind) = uint32_t(kind);
}

// Memory of a block must not go away while copies into it are on their way.
MK_DEVICE void drain_copies() {
#pragma unroll 1
  for (uint32_t s = 0; s < kStages; ++s) {
    const uint32_t state = copying(s);
    while (state != 0 && !barrier_try(shared_address(&block().full[s]), state & 1)) {}
  }
}

// The end of a thread that waited in vain. The first of a block leaves a word, which the control warp reports. No call and
// no way back, so that a wait costs what is around it no register.
[[noreturn]] MK_DEVICE void give_up(abi::FaultKind kind, uint32_t counter, uint64_t value, uint64_t target) {
  if (atomicCAS(&block().stop, 0u, 1u) == 0) {
    block().words = {kind, threadIdx.x / 32, counter, uint32_t(target), value, target};
  }
  end_thread();
  __builtin_unreachable();
}

// Counts the turns of a wait and looks at the clock now and then. Only the control warp looks at the other workers.
template <bool kPeer>  // a wait for another device
struct PatienceOf {
  uint64_t began = 0;
  uint32_t turns = 0;

  MK_DEVICE static uint64_t budget_ns() {
    const uint64_t whole = block().args.spin_budget_ns;
    return kPeer ? peer_budget_ns(whole) : whole;
  }
  MK_DEVICE bool over() {
    if (++turns % 64 != 0) return false;
    const uint64_t now = clock_ns();
    if (began == 0) began = now;
    return *static_cast<volatile uint32_t*>(&block().stop) != 0 || now - began >= budget_ns();
  }
};

using Patience = PatienceOf<false>;

// One look at a phase, which may take as long as the processor lets a thread sleep on it. kNow: recording wants to know
// whether it was over at once.
template <bool kNow>
MK_DEVICE bool barrier_look(uint32_t address, uint32_t parity) {
  if (trace::kOn && kNow) return barrier_test(address, parity);
  return barrier_try(address, parity);
}

// A random delay: often none, rarely long. Returns the next state.
__device__ __noinline__ uint32_t random_delay(uint32_t state) {
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  if (state % 4 == 0) __nanosleep(state >> 8 & 1023);
  if (state % 64 == 1) __nanosleep(state >> 8 & 8191);
  return state;
}

// ------------------------------------------------------------------------------------------------ worker
// The same pointer, and the compiler knows where it points: loads from it are those of shared memory.
MK_DEVICE const abi::Record* in_shared(const abi::Record* p) {
  return reinterpret_cast<const abi::Record*>(mk_shared + (shared_address(p) - shared_address(mk_shared)));
}

// One warp's view of its worker; the 8 consumers together are the group of a simple task. Nothing takes its address, so
// that everything in it is a register.
struct Worker {
  // `advance` says a step ahead that there may be several rows, or more than kNarrowRows.
  static constexpr bool kAnnounces = kRooms || dev::kWide, kWide = dev::kWide;
  static constexpr uint32_t kNarrowRows = dev::kNarrowRows, kScratchRoom = dev::kScratchBytes;
  const abi::KernelArgs& args;
  const uint32_t id;
  uint64_t step = 0;
  const abi::StepHeader* header = nullptr;
  const abi::StepHeader* last = nullptr;  // of the step before: what this worker must clear
  const abi::Record* record = nullptr;
  uint32_t record_index = 0;
  uint32_t group_parity = 0, turn = 0, random;
  [[no_unique_address]] mutable trace::Scribe scribe;  // of control

  MK_DEVICE Worker() : args(block().args), id(blockIdx.x), random(0) {}
  MK_DEVICE void seed() {
    random = (args.chaos_seed + 1) * 0x9E3779B9u ^ (blockIdx.x * kWarps + threadIdx.x / 32 + 1) * 0x85EBCA6Bu;
  }

  Worker(const Worker&) = delete;

  MK_DEVICE RoleState& state() const { return block().state[threadIdx.x / 32]; }
  // All lanes have read what was there.
  MK_DEVICE RoleState& state_to_write() const {
    __syncwarp();
    return state();
  }
  MK_DEVICE void load() {
    const RoleState& s = state();
    begin_step(s.step);
    record = in_shared(s.record), record_index = s.record_index;
    group_parity = s.group_parity, turn = s.turn, random = s.random;
  }
  MK_DEVICE void save() const {
    RoleState& s = state_to_write();
    s.group_parity = group_parity, s.turn = turn, s.random = random;
    __syncwarp();
  }

  // What recording asks: places of records in the block, the one at work, and that of the consumers.
  static constexpr uint32_t kPlaces = kRecords;
  MK_DEVICE trace::Stamps<kRecords>& stamps() const { return block().stamps; }
  MK_DEVICE uint32_t index_in(uint32_t place) const { return block().record_at[place]; }
  MK_DEVICE uint32_t record_offset() const { return shared_address(record) - shared_address(block().record); }
  MK_DEVICE uint32_t consumed() const { return block().state[0].record ? block().state[0].record_index : abi::kNone; }

  MK_DEVICE uint32_t lane() const { return threadIdx.x; }
  static constexpr uint32_t lanes() { return kConsumers * 32; }
  MK_DEVICE uint32_t warp() const { return threadIdx.x / 32; }
  MK_DEVICE uint32_t warp_lane() const { return threadIdx.x % 32; }

  // What the functions that follow work on, and what their fault reports name.
  MK_DEVICE void mark(const abi::Record* r) {
    record = r;
    RoleState& s = state_to_write();
    s.step = step, s.record = r, s.record_index = record_index;
    __syncwarp();
  }

  MK_DEVICE void begin_step(uint64_t s) {
    step = s;
    header = &block().header[s & 1];
    last = &block().header[s & 1 ^ 1];
  }

  // The group of consumers meets: what each wrote before, all read after.
  MK_DEVICE void sync() {
    __syncwarp();
    barrier_arrive_warp(&block().group);
    wait_barrier(&block().group, group_parity);
    group_parity ^= 1;
  }

  template <class F>
  MK_DEVICE void for_each(uint32_t n, F f) const {
    for (uint32_t i = lane(); i < n; i += lanes()) f(i, All{});
  }
  template <class F>
  MK_DEVICE void for_each(uint32_t rows, uint32_t n, F f) const {
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t i = lane(); i < n; i += lanes()) f(r, i, All{});
    }
  }

  // Over the group, in a fixed order; every lane gets the result.
  MK_DEVICE float sum(float v) { return reduce(v, block().reduce_float, [](float a, float b) { return a + b; }); }
  MK_DEVICE float max(float v) { return reduce(v, block().reduce_float, [](float a, float b) { return a > b ? a : b; }); }
  MK_DEVICE float min(float v) { return reduce(v, block().reduce_float, [](float a, float b) { return a < b ? a : b; }); }
  MK_DEVICE int32_t sum(int32_t v) { return reduce(v, block().reduce_int, [](int32_t a, int32_t b) { return a + b; }); }
  MK_DEVICE int32_t max(int32_t v) {
    return reduce(v, block().reduce_int, [](int32_t a, int32_t b) { return a > b ? a : b; });
  }
  MK_DEVICE int32_t min(int32_t v) {
    return reduce(v, block().reduce_int, [](int32_t a, int32_t b) { return a < b ? a : b; });
  }
  template <class T>
  MK_DEVICE T broadcast(T v) {
    static_assert(sizeof(T) <= 8);
    const uint32_t slot = turn++ & 1;
    T* memory = reinterpret_cast<T*>(&block().broadcast_word[slot]);
    if (lane() == 0) *memory = v;
    sync();
    return *memory;
  }

  template <class T>
  MK_DEVICE T* scratch(uint64_t) const {
    return reinterpret_cast<T*>(block().scratch);
  }

  // The count that was asked for at the beginning of `advance`, or a fresh one when there may be commands.
  MK_DEVICE uint64_t commands_posted(const abi::Mailbox* mailbox) const {
    const uint64_t known = block().posted;
    return known == launch_state()->mailbox_taken ? known : load_acquire_system(&mailbox->posted);
  }

  MK_DEVICE void notify_host() {}  // the host sleeps between looks at TokenRing.written
  MK_DEVICE bool aborted() const { return load_word(&launch_state()->abort) != 0; }

  // Calls `ready` until it is true; ends the thread when the launch is over.
  template <class Ready>
  MK_DEVICE void spin(Ready ready, abi::FaultKind kind, uint32_t tile) {
    if constexpr (kChaos) random = random_delay(random);
    Patience patience;
    while (__builtin_expect(!ready(), 0)) {
      if (patience.over()) give_up(kind, abi::kNone, 0, tile);
    }
  }

  // A phase of a barrier inside the block: without a look at the clock. The control warp has one for all.
  MK_DEVICE void wait_barrier(uint64_t* barrier, uint32_t parity) {
    if constexpr (kChaos) random = random_delay(random);
    barrier_wait(shared_address(barrier), parity, shared_address(&block().stop));
  }
  // The same for the producer, which must not leave its copies alone. kRoom: for a stage of the ring.
  template <bool kRoom = false>
  MK_DEVICE void watch_barrier(uint64_t* barrier, uint32_t parity) {
    if constexpr (kChaos) random = random_delay(random);
    const uint32_t address = shared_address(barrier);
#pragma unroll 1
    while (!barrier_look<kRoom>(address, parity)) {
      if (trace::held_up<kRoom>(*this, address, parity)) return;
      if (*static_cast<volatile uint32_t*>(&block().stop) == 0) continue;
      drain_copies();
      end_thread();
    }
  }

  // Waits until *p >= target, acquire. Every lane that calls it waits.
  template <class T>
  MK_DEVICE bool wait(const T* p, uint64_t target, abi::FaultKind kind, uint32_t counter) {
    if constexpr (kChaos) random = random_delay(random);
    Patience patience;
    for (;;) {
      const uint64_t value = load_acquire(p);
      if (value >= target) return true;
      if (patience.over()) give_up(kind, counter, value, target);
    }
  }
  template <class T, class Idle>
  MK_DEVICE bool wait(const T* p, uint64_t target, abi::FaultKind kind, uint32_t counter, Idle) {
    return wait(p, target, kind, counter);
  }
  MK_DEVICE bool wait_finished(uint64_t target) {
    return wait(&launch_state()->finished, target, abi::FaultKind::kHeaderBudget, abi::kNone);
  }

  // +1 on a counter, by one lane: what its warp wrote before a __syncwarp is visible to who sees it.
  MK_DEVICE void signal(uint64_t* p, uint32_t counter) {
    if constexpr (kChaos) {
      random = random_delay(random);
      if (counter == args.drop_signal && atomicExch(&block().dropped, 1u) == 0) return;
    }
    add_release(p, 1);
  }

  MK_DEVICE void fault(abi::FaultKind kind, uint32_t tile, uint32_t counter, uint64_t value, uint64_t target) {
    report_fault(warp(), kind, tile, counter, value, target);
    block().failed = 1;
  }

 private:
  template <class T, class F>
  MK_DEVICE T reduce(T v, T (&memory)[2][kConsumers], F f) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v = f(v, __shfl_xor_sync(0xffffffffu, v, distance));
    const uint32_t slot = turn++ & 1;
    if (warp_lane() == 0) memory[slot][warp()] = v;
    sync();
    T out = memory[slot][0];
#pragma unroll
    for (uint32_t i = 1; i < kConsumers; ++i) out = f(out, memory[slot][i]);
    return out;
  }
};

// A worker as its warp left it.
struct Loaded : Worker {
  MK_DEVICE Loaded() { load(); }
};

// ------------------------------------------------------------------------------------------------ values that say
// A float in the workspace is valid when its bits are not all ones. A step writes one copy of the workspace and clears
// what the step before wrote in the other.
constexpr uint32_t kInvalid = 0xffffffffu;

// kInvalid when one of the words is.
MK_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
MK_DEVICE uint32_t worst(const Quad& v) { return larger(larger(v.x, v.y), larger(v.z, v.w)); }
MK_DEVICE bool invalid(const Quad& v) { return worst(v) == kInvalid; }

// The same place in the copy that the step before wrote.
template <class T>
MK_DEVICE T* before(const Worker& w, T* p) {
  return reinterpret_cast<T*>(reinterpret_cast<uint64_t>(p) - w.args.workspace + block().last_workspace);
}

MK_DEVICE void publish(float* p, float v) { store_word(p, as_bits(v)); }
// Of an even column.
MK_DEVICE void publish_two(float* p, float v, float next) { store_long(p, uint64_t(as_bits(next)) << 32 | as_bits(v)); }
MK_DEVICE void clear(float* p) { store_word(p, kInvalid); }

// By a warp, whose lanes have asked for `kCount` values each: until all are valid, those that are missing are asked for again.
template <uint32_t kCount, class Missing, class Ask>
MK_DEVICE void await_all(Worker& w, Missing missing, Ask ask, uint32_t tile) {
  w.spin([&] {
    bool some = false;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) some |= missing(i);
    if (!__any_sync(0xffffffffu, some)) return true;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      if (missing(i)) ask(i);
    }
    return false;
  }, abi::FaultKind::kValueBudget, tile);
}

// A float that another worker publishes; waits for it.
MK_DEVICE float await(Worker& w, const float* p) {
  uint32_t v = load_word(p);
  w.spin([&] { return v != kInvalid || (v = load_word(p)) != kInvalid; }, abi::FaultKind::kValueBudget, 0);
  return as_float(v);
}

}  // namespace megakernel::dev

#define MEGAKERNEL_CORES "megakernel/device/cuda_cores.cuh"

#define MEGAKERNEL_ENTRY(Tasks)                                                           \
  extern "C" __device__ const unsigned long long mk_abi_hash = megakernel::abi::kAbiHash; \
  extern "C" __global__ void __launch_bounds__(megakernel::dev::kThreads, 1)              \
      mk_worker(const __grid_constant__ megakernel::abi::KernelArgs args) {               \
    megakernel::dev::begin_block(args);                                                   \
    megakernel::run_block<Tasks>();                                                       \
  }
