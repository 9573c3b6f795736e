// The CUDA device: a worker is one resident block whose warps play one role each. Included after the generated records.
//
// Warps 0 to 7 are consumers, and together the group that runs simple tasks; then producer, storer, control and 4
// loaders, who bring activations. What they share is one `Block` in shared memory. See docs/memory-model.md for which
// instruction orders which write.
#pragma once

#define MEGAKERNEL_DRIVER "megakernel/scheduler/roles.cuh"

#include "megakernel/device/types.cuh"

#include "megakernel/device/cuda_ptx.h"
#include "megakernel/device/cuda_values.h"
#include "megakernel/device/cuda_trace.cuh"

namespace megakernel::dev {

#ifdef MEGAKERNEL_CHAOS
constexpr bool kChaos = true;
#else
constexpr bool kChaos = false;
#endif

// ------------------------------------------------------------------------------------------------ a block
constexpr uint32_t kConsumers = 8;  // warps
constexpr uint32_t kProducerWarp = kConsumers, kStorerWarp = kConsumers + 1, kControlWarp = kConsumers + 2;
constexpr uint32_t kLoaders = 4, kLoaderWarp = kConsumers + 3;  // the first of them
constexpr uint32_t kWarps = kConsumers + 3 + kLoaders;
constexpr uint32_t kThreads = kWarps * 32;
constexpr uint32_t kStageBytes = 16384, kFewestStages = 8;  // fewest: that are left when some are given up
constexpr uint32_t kRecords = 5;                     // records that control reads ahead
constexpr uint32_t kRecordReaders = kConsumers + 1 + kLoaders;  // consumers, storer, loaders; the producer reads its own
constexpr uint32_t kTileRows = 16;                 // of the matrix cores
constexpr bool kWide = abi::kMaxRows > kTileRows;  // steps may be wide, see cuda_wide.cuh
constexpr uint32_t kNarrowRows = kWide ? MEGAKERNEL_NARROW_ROWS : kTileRows;  // more make a step wide
// Inputs, partial sums and merges; less what headers of more rows take.
constexpr uint32_t kHeaderBytes = 2 * sizeof(abi::StepHeader) - 1024;
constexpr uint32_t kBaseScratch = MEGAKERNEL_SCRATCH_BYTES - (kWide ? kHeaderBytes : 0);
// A program whose widest input is no row that fits gives up stages for it, where there are enough.
constexpr uint32_t kRowScratch = MEGAKERNEL_UNITS * 2048 + 32 + 2 * (kConsumers * 33 * 4);  // see RowStash and Sums
constexpr uint32_t kLent = kRowScratch > kBaseScratch ? (kRowScratch - kBaseScratch + kStageBytes - 1) / kStageBytes : 0;
constexpr uint32_t kGivenUp = MEGAKERNEL_STAGES >= kLent + kFewestStages ? kLent : 0;
constexpr uint32_t kScratchBytes = kBaseScratch + kGivenUp * kStageBytes, kStages = MEGAKERNEL_STAGES - kGivenUp;
constexpr uint32_t kInFlight = MEGAKERNEL_IN_FLIGHT < kStages ? MEGAKERNEL_IN_FLIGHT : kStages;  // stages being copied
constexpr uint32_t kCalm = MEGAKERNEL_CALM < kInFlight ? MEGAKERNEL_CALM : kInFlight;  // the same while loaders ask for values
// In a step that was announced to have several rows the last stages are no part of the ring: inputs go there.
constexpr bool kRooms = kStages >= kFewestStages + 2;
constexpr uint32_t kRoomStages = kStages >= kFewestStages + 4 ? 4 : 2, kRowStages = kStages - kRoomStages;

// Stages in the order in which they are filled, the first `end` of them.
struct RingPlace {
  uint32_t slot, parity;
};
struct Ring : RingPlace {
  uint32_t end;

  __device__ __forceinline__ void next() {
    if (++slot == end) {
      slot = 0;
      parity ^= 1;
    }
  }
  // By less than three times all of them.
  __device__ __forceinline__ void skip(uint32_t stages) {
    slot += stages;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (slot < end) break;
      slot -= end;
      parity ^= 1;
    }
  }
};

// What a warp keeps from one record to the next, in shared memory. A value that lives across a call would go to local
// memory, and what is left of the first-level cache beside a block's shared memory is too small for the local memory of
// its threads: every such value would be a trip to the second level. So nothing lives across a call.
struct RoleState {
  uint64_t step;
  const abi::Record* record;
  uint32_t record_index, group_parity, turn, random;
  uint32_t record_slot, record_parity, header_parity;  // what to wait for next
  RingPlace ring;
  union {
    struct {  // of the producer
      RingPlace tail;
      uint32_t in_flight;
    };
    struct {  // of the others
      uint32_t sums_slot, sums_parity;  // parity: one bit a slot
      uint32_t input_parity;
    };
  };
};

// Of steps of several rows: what a warp keeps beside it.
struct RoomState {
  uint32_t end;                  // of its ring
  uint16_t parity, left_parity;  // of the room's stages, one bit each (of the storer: of `sums_read`); and when they left the
};                               // ring, theirs

// What the producer has found out about the pages of attention in this step: the same in every layer with the same tile.
struct KnownPages {
  static constexpr uint32_t kMost = 16;
  uint64_t step;
  uint32_t tile, window, head, count;
  uint32_t page[kMost];
};

// What a warp leaves that has waited in vain.
struct LastWords {
  abi::FaultKind kind;
  uint32_t warp, counter, detail;
  uint64_t value, target;
};

struct alignas(128) Block {
  uint8_t ring[kStages][kStageBytes];
  alignas(16) uint8_t scratch[kScratchBytes];
  abi::Record record[kRecords];
  abi::Record producer_record[2];  // the one at work and the next
  uint32_t record_at[kRecords];    // their places in the queue
  abi::StepHeader header[2];
  abi::KernelArgs args;      // `workspace` is the copy of the step at work
  uint64_t last_workspace;   // the copy of the step before
  uint64_t even_workspace;   // the copy of even steps
  uint64_t posted;           // commands, as the mailbox said a moment ago
  uint64_t first_step;       // the launch began after this one
  uint64_t full[kStages], empty[kStages];
  uint64_t record_full[kRecords], record_empty[kRecords];
  uint64_t header_full[2], step_done;
  uint64_t sums_full[2], sums_empty[2], sums_read[2];  // read: by the consumers themselves
  uint64_t input_full, input_empty;  // scratch below the sums: the loaders fill it, the consumers read it
  uint64_t room_full[kRoomStages], room_empty[kRoomStages];  // the same of stages for inputs
  uint32_t asking;                   // the loaders wait for values of other workers
  KnownPages known_pages;
  uint64_t group, rolled;
  float reduce_float[2][kConsumers];
  int32_t reduce_int[2][kConsumers];
  uint64_t broadcast_word[2];
  RoleState state[kWarps];
  RoomState room[kWarps];
  uint8_t copying[kStages];  // of each stage: 0 never filled, else 2 + parity of the phase that fills it
  uint32_t stop;             // every thread of the block ends when it next waits
  LastWords words;           // of the warp that set `stop`
  uint32_t header_known;     // to the producer, of its step: 0 not yet, 1 it runs, 2 the launch ends
  uint32_t failed;           // a task of this worker has reported a fault
  uint32_t dropped;          // the signal that a test wants lost has been lost
  [[no_unique_address]] trace::Stamps<kRecords> stamps;
};
static_assert(sizeof(Block) <= MEGAKERNEL_SHARED_BYTES, "a block's shared memory");

extern __shared__ __align__(1024) unsigned char mk_shared[];
MK_DEVICE Block& block() { return *reinterpret_cast<Block*>(mk_shared); }
MK_DEVICE abi::LaunchState* launch_state() { return reinterpret_cast<abi::LaunchState*>(block().args.launch); }

MK_DEVICE abi::Role role_of(uint32_t warp) {
  if (warp < kConsumers) return abi::Role::kConsumer;
  if (warp >= kLoaderWarp) return abi::Role::kLoader;
  return warp == kProducerWarp ? abi::Role::kProducer : warp == kStorerWarp ? abi::Role::kStorer : abi::Role::kControl;
}

MK_DEVICE abi::Role role_of_warp() { return role_of(threadIdx.x / 32); }

// Before anything else of a launch, by all threads.
MK_DEVICE void begin_block(const abi::KernelArgs& args) {
  Block& b = block();
  static_assert(sizeof(abi::KernelArgs) / 4 <= kThreads, "one word a thread");
  if (threadIdx.x < sizeof(abi::KernelArgs) / 4) {
    reinterpret_cast<uint32_t*>(&b.args)[threadIdx.x] = reinterpret_cast<const uint32_t*>(&args)[threadIdx.x];
  }
  if (threadIdx.x % 32 == 0) {
    b.state[threadIdx.x / 32] = RoleState{};
    b.room[threadIdx.x / 32] = {kStages, 0, 0};
  }
  if (threadIdx.x == 0) {
    b.even_workspace = args.workspace;
    for (uint32_t i = 0; i < kStages; ++i) {
      barrier_init(&b.full[i], kFullArrivals);
      barrier_init(&b.empty[i], kConsumers * kWarpArrivals);
      b.copying[i] = 0;
    }
    for (uint32_t i = 0; i < kRecords; ++i) {
      barrier_init(&b.record_full[i], kWarpArrivals);
      barrier_init(&b.record_empty[i], kRecordReaders * kWarpArrivals);
    }
    for (uint32_t i = 0; i < 2; ++i) {
      barrier_init(&b.header_full[i], kWarpArrivals);
      barrier_init(&b.sums_full[i], kConsumers * kWarpArrivals);
      barrier_init(&b.sums_empty[i], kWarpArrivals);
      barrier_init(&b.sums_read[i], kConsumers * kWarpArrivals);
    }
    barrier_init(&b.input_full, kLoaders * kWarpArrivals);
    barrier_init(&b.input_empty, kConsumers * kWarpArrivals);
    for (uint32_t i = 0; i < kRoomStages; ++i) {
      barrier_init(&b.room_full[i], kLoaders * kWarpArrivals);
      barrier_init(&b.room_empty[i], kConsumers * kWarpArrivals);
    }
    barrier_init(&b.step_done, (kConsumers + 2 + kLoaders) * kWarpArrivals);  // consumers, producer, storer, loaders
    barrier_init(&b.group, kConsumers * kWarpArrivals);
    barrier_init(&b.rolled, kWarpArrivals);
    b.dropped = b.failed = b.stop = b.asking = 0;
    b.words.kind = abi::FaultKind::kNone;
    b.posted = ~uint64_t(0);
    b.known_pages.step = 0;
    trace::begin(b.stamps);
  }
  fence_shared_for_copies();
  __syncthreads();
}

// Words that others have published, to shared memory: all on their way at once.
template <uint32_t kBytes>
MK_DEVICE void copy_many(uint32_t* to, const uint32_t* from) {
  constexpr uint32_t kQuads = (kBytes / 16 + 31) / 32;
  const uint32_t lane = threadIdx.x % 32;
  Quad v[kQuads];
#pragma unroll
  for (uint32_t i = 0; i < kQuads; ++i) {
    if (i * 32 + lane < kBytes / 16) v[i] = load_quad(from + (i * 32 + lane) * 4);
  }
#pragma unroll
  for (uint32_t i = 0; i < kQuads; ++i) {
    if (i * 32 + lane < kBytes / 16) reinterpret_cast<Quad*>(to)[i * 32 + lane] = v[i];
  }
  __syncwarp();
}

// The first step of a launch may be anything.
MK_DEVICE void begin_headers(abi::StepHeader& last) { last.widens = kWide ? 2 : block().args.max_rows > 1; }

MK_DEVICE uint32_t worker_index() { return blockIdx.x; }
MK_DEVICE uint32_t lane_of_warp() { return threadIdx.x % 32; }
MK_DEVICE void warp_meets() { __syncwarp(); }
MK_DEVICE bool first_warp() { return threadIdx.x < 32; }
MK_DEVICE RoleState& own_state() { return block().state[threadIdx.x / 32]; }
MK_DEVICE RoomState& own_room() { return block().room[threadIdx.x / 32]; }

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
    const uint32_t state = block().copying[s];
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
MK_DEVICE void clear(float* p) { store_word(p, kInvalid); }

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
