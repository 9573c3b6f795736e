// A block in shared memory: sizes, rings, what each role remembers between records. Part of cuda.h.
#pragma once

namespace megakernel::dev {

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
// Inputs, partial sums and merges; less answers, what headers of more rows take, and consumers in wide steps.
constexpr uint32_t kHeaderBytes = 2 * sizeof(abi::StepHeader) - 1024, kWalkWords = kWide ? 22 : 1;
constexpr uint32_t kAnswerBytes = 64;
constexpr uint32_t kBaseScratch = MEGAKERNEL_SCRATCH_BYTES - kAnswerBytes - (kWide ? kHeaderBytes + kConsumers * kWalkWords * 4 : 0);
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
  uint32_t fresh;  // a bit for each with rows of this step that are dealt in stretches
  uint32_t page[kMost];
};

// What a warp leaves that has waited in vain.
struct LastWords {
  abi::FaultKind kind;
  uint32_t warp, counter, detail;
  uint64_t value, target;
};

// Of a stage: 0 never filled, else 2 + parity of the phase that fills it. When a launch ends, lanes of the producer go one
// after the other, each with a look at what those before it have said: tools want such words to be atomic.
template <bool kTool>
struct CopyWord {
  using Type = uint8_t;
};
template <>
struct CopyWord<true> {
  using Type = uint32_t;
};
using CopyState = CopyWord<(kWarpArrivals > 1)>::Type;

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
  uint32_t answer[kAnswerBytes / 4];  // of a function to its warp, see own_answer()
  CopyState copying[kStages];
  uint32_t walk[kConsumers][kWalkWords];  // see StretchWalk, WideWalk
  uint32_t stop;             // every thread of the block ends when it next waits
  LastWords words;           // of the warp that set `stop`
  uint32_t header_known;     // to the producer, of its step: 0 not yet, 1 it runs, 2 the launch ends
  uint32_t failed;           // a task of this worker has reported a fault
  uint32_t dropped;          // the signal that a test wants lost has been lost
  [[no_unique_address]] trace::Stamps<kRecords> stamps;
};
static_assert(sizeof(Block) <= MEGAKERNEL_SHARED_BYTES, "a block's shared memory");

extern "C" {
extern __shared__ __align__(1024) unsigned char mk_shared[];
}
MK_DEVICE Block& block() { return *reinterpret_cast<Block*>(mk_shared); }
// The same where its address should not be kept, see thread_again.
MK_DEVICE Block& block_again() { return *at_shared<Block>(shared_again()); }

MK_DEVICE void set_copying(uint32_t slot, uint32_t parity) {
  CopyState& state = block().copying[slot];
  if constexpr (sizeof state == 4) {
    store_volatile(reinterpret_cast<uint32_t*>(&state), 2 + parity);
  } else {
    state = CopyState(2 + parity);
  }
}
MK_DEVICE uint32_t copying(uint32_t slot) {
  const CopyState& state = block().copying[slot];
  if constexpr (sizeof state == 4) return load_volatile(reinterpret_cast<const uint32_t*>(&state));
  return state;
}

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
// What a function that is called has to say: the compiler may return values through local memory, see RoleState.
MK_DEVICE uint32_t& own_answer() { return block().answer[threadIdx.x / 32]; }

// A bit of a consumer's answer beside the opcode of its record: it has left products of that to its caller.
constexpr uint32_t kPaused = 1u << 31;
MK_DEVICE bool paused() { return (of_first_lane(block_again().answer[thread_again() / 32]) & kPaused) != 0; }
MK_DEVICE void set_paused(bool on) {
  const uint32_t opcode = own_answer() & ~kPaused;
  warp_meets();
  own_answer() = on ? opcode | kPaused : opcode;
  warp_meets();
}

}  // namespace megakernel::dev
