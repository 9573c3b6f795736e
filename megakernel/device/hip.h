// The HIP device: a worker is one resident workgroup. Its first 256 lanes play all roles in turn and are the group of a
// task; the waves behind them only copy weights to the stages in LDS. They come to every barrier with the group, because a
// barrier is of all waves of a workgroup, so they run the same code with an index that is beyond every element.
// Included after the generated records. Compiled and inspected for every target; see docs/amd.md for what has not run.
#pragma once

#define MEGAKERNEL_DRIVER "megakernel/scheduler/pipeline.cuh"

#include "megakernel/device/hip_matrix.h"
#include "megakernel/device/trace.cuh"

namespace megakernel::dev {

#ifdef MEGAKERNEL_CHAOS
constexpr bool kChaos = true;
#else
constexpr bool kChaos = false;
#endif

// ------------------------------------------------------------------------------------------------ LDS of a workgroup
struct Fixed {
  abi::KernelArgs args;              // here they cost no scalar register between uses
  alignas(16) abi::Record record[2]; // in turn
  abi::StepHeader header[2];         // by step
  uint64_t word[2];                  // broadcast
  uint32_t partial[2][kWaves];       // reduce
  Mark mark[kCopiers][kStages];      // when the unit in a stage is complete, by copier
  float sums[kWaves * 256];          // dot_tile
};
constexpr uint32_t kScratchBytes = (MEGAKERNEL_LDS_BYTES - kStages * kStageBytes - sizeof(Fixed)) / 128 * 128;

struct Lds : Fixed {
  alignas(128) uint8_t ring[kStages][kStageBytes];
  alignas(128) uint8_t scratch[kScratchBytes - 128];
};
static_assert(sizeof(Lds) <= MEGAKERNEL_LDS_BYTES, "LDS of a workgroup");

MK_SHARED Lds lds;

// Words from memory to LDS, one a lane. Others read them after the group has met.
template <class T>
MK_DEVICE void copy_words(T& to, const T* from) {
  static_assert(sizeof(T) / 4 <= kLanes);
  if (const uint32_t i = lane_index(); i < sizeof(T) / 4) {
    ((MK_SHARED_SPACE uint32_t*)&to)[i] = ((const MK_MEMORY uint32_t*)from)[i];
  }
}

// The kernel's first argument, a word a lane.
MK_DEVICE void take_args() {
  constexpr uint32_t kWords = sizeof(abi::KernelArgs) / 4;
  static_assert(kWords <= kThreads);
  const auto* from = (const __attribute__((address_space(4))) uint32_t*)__builtin_amdgcn_kernarg_segment_ptr();
  auto* to = (MK_SHARED_SPACE uint32_t*)&lds.args;
  if (thread_index() < kWords) to[thread_index()] = from[thread_index()];
  meet();
}

// ------------------------------------------------------------------------------------------------ stages
// The ring of stages: what scheduler/feed.cuh puts in, the group takes in the same order. One barrier a unit: `take` waits
// for the oldest unit, and when all waves have met, nobody reads the stage before it any more, so that one is free. Hence
// of kStages one is read and at most kStages - 1 are on their way.
struct Stages {
  MK_DEVICE bool copies() const { return dev::copies(); }
  MK_DEVICE bool room() const { return uniform(on_way_) < kStages - 1; }
  template <class T>
  MK_DEVICE static const T* constant(const T* p) {
    return dev::constant(p);
  }

  // Called by the copiers, when there is room.
  MK_DEVICE void put(const void* from, uint32_t bytes) {
    start(head_, from, bytes);
    lds.mark[copier()][head_] = copies_.started;
    head_ = after(head_);
    ++on_way_;
  }

  // The oldest unit, for everyone. The one taken before must not be read any more.
  MK_DEVICE void* take() {
    if (copies()) {
      copies_.land(lds.mark[copier()][tail_]);
      --on_way_;
    }
    wait_lds();  // reads of the stage that is free from here on, writes of a copier without asynchronous copies
    meet();
    void* out = (void*)stage(tail_);
    tail_ = after(tail_);
    return out;
  }

  // A unit that is not in the ring, to the stage that is free. All others have landed before: kStages may not be on
  // their way.
  MK_DEVICE void* fetch(const void* from, uint32_t bytes) {
    const uint32_t slot = tail_ == 0 ? kStages - 1 : tail_ - 1;
    if (copies()) copies_.land();
    wait_lds();
    meet();
    if (copies()) {
      start(slot, from, bytes);
      copies_.land();
    }
    wait_lds();
    meet();
    return (void*)stage(slot);
  }

  // LDS must not be given to another workgroup while copies into it are on their way.
  MK_DEVICE void drain() {
    if (copies()) copies_.drain();
  }

 private:
  ChosenCopies copies_;
  uint32_t head_ = 0, tail_ = 0, on_way_ = 0;  // tail_: of every lane, the others of copiers

  MK_DEVICE static uint32_t after(uint32_t slot) { return uniform(slot + 1 == kStages ? 0 : slot + 1); }
  MK_DEVICE static uint32_t copier() { return wave_index() - kWaves; }
  MK_DEVICE static Stage* stage(uint32_t slot) { return (Stage*)lds.ring + slot * (kStageBytes / sizeof(Vector)); }
  MK_DEVICE void start(uint32_t slot, const void* from, uint32_t bytes) {
    copies_.start(stage(slot), from, bytes, copier());
  }
};

// ------------------------------------------------------------------------------------------------ worker
// `sync`, `wait` with an idle function, `aborted`, `signal`, reductions, broadcast, scratch and fault are called by the
// whole group, in the same order by every lane.
struct Worker {
  const abi::KernelArgs& args;
  const uint32_t id;
  const abi::StepHeader* header = nullptr;
  uint64_t step = 0;
  const abi::Record* record = nullptr;
  uint32_t record_index = 0;
  bool failed = false;  // this worker must leave the launch; the same in every lane
  Stages stages;
  [[no_unique_address]] mutable trace::Tracers tracers;

  MK_DEVICE bool traces() const { return lane() == 0; }  // whether this lane writes
  MK_DEVICE trace::Tracer& tracer(abi::Role role) const { return tracers.of(role); }

  // `overflow`: memory of this worker for records that need more scratch than there is LDS.
  MK_DEVICE Worker(uint32_t index, uint64_t overflow, uint64_t overflow_bytes)
      : args(lds.args), id(index), overflow_(overflow + index * overflow_bytes), overflow_bytes_(overflow_bytes) {
    random_ = (lds.args.chaos_seed + 1) * 0x9E3779B9u ^ (index * kWaves + wave_index() + 1) * 0x85EBCA6Bu;
  }

  MK_DEVICE uint32_t lane() const { return lane_index(); }
  static constexpr uint32_t lanes() { return kLanes; }
  MK_DEVICE void sync() const {
    drain();
    meet();
  }

  template <class F>
  MK_DEVICE void for_each(uint32_t n, F f) const {
    for (uint32_t base = 0; base < n; base += lanes()) {
      if (const uint32_t i = base + lane(); i < n) f(i, All{});
    }
  }
  template <class F>
  MK_DEVICE void for_each(uint32_t rows, uint32_t n, F f) const {
    for (uint32_t base = 0; base < rows * n; base += lanes()) {
      if (const uint32_t at = base + lane(); at < rows * n) f(at / n, at % n, All{});
    }
  }

  MK_DEVICE float sum(float v) {
    return reduce(v, [](float a, float b) { return a + b; });
  }
  MK_DEVICE float max(float v) {
    return reduce(v, [](float a, float b) { return a > b ? a : b; });
  }
  MK_DEVICE float min(float v) {
    return reduce(v, [](float a, float b) { return a < b ? a : b; });
  }
  MK_DEVICE int32_t sum(int32_t v) {
    return reduce(v, [](int32_t a, int32_t b) { return a + b; });
  }
  MK_DEVICE int32_t max(int32_t v) {
    return reduce(v, [](int32_t a, int32_t b) { return a > b ? a : b; });
  }
  MK_DEVICE int32_t min(int32_t v) {
    return reduce(v, [](int32_t a, int32_t b) { return a < b ? a : b; });
  }

  // The value of lane 0. Two words alternate, so one barrier is enough.
  template <class T>
  MK_DEVICE T broadcast(T v) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t& word = lds.word[turn()];
    if (lane() == 0) __builtin_memcpy(&word, &v, sizeof v);
    sync();
    const uint64_t bits = uint64_t(uniform(uint32_t(word >> 32))) << 32 | uniform(uint32_t(word));
    T out;
    __builtin_memcpy(&out, &bits, sizeof out);
    return out;
  }

  // In LDS when it fits, else in this worker's part of the overflow memory.
  template <class T>
  MK_DEVICE T* scratch(uint64_t count) {
    const uint64_t bytes = count * sizeof(T);
    meet();  // readers of the scratch before have left it
    if (bytes <= kScratchBytes) return reinterpret_cast<T*>(lds.scratch);
    if (bytes > overflow_bytes_) {
      fault(abi::FaultKind::kBadRecord, record->tile_begin, abi::kNone, bytes, overflow_bytes_);
      stages.drain();
      __builtin_amdgcn_endpgm();
    }
    return reinterpret_cast<T*>(overflow_);
  }

  MK_DEVICE void notify_host() const {}  // the host looks at TokenRing.written

  MK_DEVICE abi::LaunchState* launch() const { return reinterpret_cast<abi::LaunchState*>(args.launch); }
  MK_DEVICE bool aborted() {
    uint32_t word = 0;
    if (lane() == 0) word = load_relaxed(&launch()->abort);
    return broadcast(word) != 0;
  }

  // A record of the queue, in LDS until the second call after this one. The next of the queue is fetched meanwhile.
  MK_DEVICE const abi::Record* keep(const abi::Record* from) {
    constexpr uint32_t kWords = sizeof(abi::Record) / 4;
    abi::Record& to = lds.record[record_turn_ = uniform(record_turn_ ^ 1)];
    const auto* words = (const MK_MEMORY uint32_t*)from;
    if (lane() < kWords) ((MK_SHARED_SPACE uint32_t*)&to)[lane()] = from == ahead_ ? ahead_word_ : words[lane()];
    meet();
    if (to.opcode != abi::kEnd && lane() < kWords) ahead_word_ = words[kWords + lane()];
    ahead_ = to.opcode != abi::kEnd ? from + 1 : nullptr;
    return &to;
  }
  // A record of the shared list, which may be its last.
  MK_DEVICE const abi::Record* keep_shared(const abi::Record* from) {
    abi::Record& to = lds.record[record_turn_ = uniform(record_turn_ ^ 1)];
    copy_words(to, from);
    meet();
    return &to;
  }
  MK_DEVICE const abi::StepHeader* keep(const abi::StepHeader* from) {
    abi::StepHeader& to = lds.header[step & 1];
    copy_words(to, from);
    meet();
    return &to;
  }

  // Waits until *p >= target, called by one lane. False when the launch is over.
  template <class Word>
  MK_DEVICE bool wait(const Word* p, uint64_t target, abi::FaultKind kind, uint32_t counter) {
    if constexpr (kChaos) delay();
    trace::wait_begins(*this, abi::Role::kWorker);
    // Who waits for a header waits for workers that wait for counters: they must be the first to report.
    const uint64_t budget = args.spin_budget_ns * (kind == abi::FaultKind::kHeaderBudget ? 2 : 1);
    uint64_t began = 0;
    for (uint32_t spin = 1;; ++spin) {
      const uint64_t value = load_relaxed(p);
      if (value >= target) break;
      pause();
      if (spin % 64 != 0) continue;
      if (load_relaxed(&launch()->abort) != 0) return false;
      const uint64_t now = clock_ns();
      if (began == 0) began = now;
      if (now - began < budget) continue;
      report(kind, record ? record->tile_begin : abi::kNone, counter, value, target);
      return false;
    }
    acquire();
    trace::waited(*this, abi::Role::kWorker, counter);
    return true;
  }

  // The same for the group.
  template <class Word, class Idle>
  MK_DEVICE bool wait(const Word* p, uint64_t target, abi::FaultKind kind, uint32_t counter, Idle) {
    bool good = true;
    if (lane() == 0) good = wait(p, target, kind, counter);
    good = broadcast(good);
    failed = uniform(failed || !good);
    return good;
  }

  // +1 on a counter, after `sync`: what the group wrote before is visible to who sees it.
  MK_DEVICE void signal(uint64_t* p, uint32_t counter) {
    if constexpr (kChaos) delay();
    if (lane() != 0) return;
    if constexpr (kChaos) {
      if (counter == args.drop_signal && exchange_acquire_release(&launch()->pad, 1) == 0) return;
    }
    add_release(p, 1);
  }

  // The same; true in the lane that made the counter `complete`. It has then acquired what all of them released.
  template <class Word>
  MK_DEVICE bool signal_last(Word* p, uint32_t counter, uint64_t complete)
    requires(kGroups > 1)
  {
    if constexpr (kChaos) delay();
    if (lane() != 0) return false;
    if constexpr (kChaos) {
      if (counter == args.drop_signal && exchange_acquire_release(&launch()->pad, 1) == 0) return false;
    }
    return add_acquire_release(p, 1) == complete;
  }

  // The first fault of a launch is recorded; every worker leaves.
  MK_DEVICE void fault(abi::FaultKind kind, uint32_t tile, uint32_t counter, uint64_t value, uint64_t target) {
    if (lane() == 0) report(kind, tile, counter, value, target);
    failed = true;
  }

 private:
  uint64_t overflow_, overflow_bytes_;
  uint32_t turn_ = 0, record_turn_ = 0, random_;
  const abi::Record* ahead_ = nullptr;  // whose word this lane has in ahead_word_
  uint32_t ahead_word_ = 0;

  MK_DEVICE void report(abi::FaultKind kind, uint32_t tile, uint32_t counter, uint64_t value, uint64_t target) {
    if (exchange_acquire_release(&launch()->abort, 1) != 0) return;
    launch()->exit = uint32_t(abi::ExitReason::kFault);
    auto* f = reinterpret_cast<abi::FaultRecord*>(args.fault);
    f->claimed = 1;
    f->worker = id;
    f->role = uint32_t(abi::Role::kWorker);
    f->record = record_index;
    f->opcode = record ? record->opcode : uint32_t(abi::kEnd);
    f->node = record ? record->node : abi::kNone;
    f->tile = tile;
    f->counter = counter;
    f->value = value;
    f->target = target;
    f->step = step;
    store_release_system(&f->kind, uint32_t(kind));
  }

  MK_DEVICE uint32_t turn() { return turn_ = uniform(turn_ ^ 1); }

  // Halves of a wave, then waves in order. Two rows of partial results alternate, so one barrier is enough.
  template <class T, class F>
  MK_DEVICE T reduce(T v, F f) {
    uint32_t* partial = lds.partial[turn()];
    if (!copies()) {
#pragma unroll
      for (uint32_t mask = kWave / 2; mask > 0; mask /= 2) {
        v = f(v, __builtin_bit_cast(T, exchange(__builtin_bit_cast(uint32_t, v), mask)));
      }
      if (wave_lane() == 0) partial[wave_index()] = __builtin_bit_cast(uint32_t, v);
    }
    meet();
    T out = __builtin_bit_cast(T, partial[0]);
#pragma unroll
    for (uint32_t i = 1; i < kWaves; ++i) out = f(out, __builtin_bit_cast(T, partial[i]));
    return __builtin_bit_cast(T, uniform(__builtin_bit_cast(uint32_t, out)));
  }

  // A random delay of a wave: often none, sometimes short, rarely long.
  MK_DEVICE void delay() {
    random_ ^= random_ << 13, random_ ^= random_ >> 17, random_ ^= random_ << 5;
    const uint32_t times = random_ % 64 == 1 ? 256 : random_ % 4 == 0 ? random_ >> 8 & 31 : 0;
    for (uint32_t i = 0; i < times; ++i) pause();
  }
};

}  // namespace megakernel::dev

#include "megakernel/device/hip_seats.h"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ tiles
// Sums of 16 x 16 outputs by matrix cores. A tile of few columns is shared by kParts waves, each with every kParts-th
// step; their sums are added in order. Nothing of it depends on the number of rows. X, Tile: vectors in LDS or in memory.
template <DType kType, int kN, class X, class Tile>
MK_DEVICE void dot_matrix(
    float* out, uint32_t ld_out, const X* x, uint32_t ld_x, const Tile* tile, uint32_t rows, uint32_t k, bool accumulate) {
  constexpr uint32_t kBlocks = kN / 16, kParts = kWaves > kBlocks ? kWaves / kBlocks : 1, kTeams = kWaves / kParts;
  const uint32_t wave = wave_index(), team = wave / kParts, part = wave % kParts;
  const uint32_t lane = wave_lane(), column = lane % 16;
  const uint32_t units = kBlocks * ((rows + 15) / 16);
  float* mine = lds.sums + wave * 256;
  for (uint32_t base = 0; base < units; base += kTeams) {
    const uint32_t unit = base + team;
    if (team < kTeams && unit < units) {
      const uint32_t row = unit / kBlocks * 16 + column;
      const Matrix::Sums sums = dot_block<kType, kN, kParts>(
          x + uint64_t(row < rows ? row : rows - 1) * (ld_x / 4), tile, lane, unit % kBlocks * 16 + column, k, part);
#pragma unroll
      for (uint32_t i = 0; i < Matrix::kOut; ++i) mine[Matrix::row_of(lane, i) * 16 + column] = sums[i];
    }
    meet();
    for (uint32_t at = lane_index(); at < kTeams * 256; at += kLanes) {
      const uint32_t from = base + at / 256, row = from / kBlocks * 16 + at % 256 / 16;
      if (from >= units || row >= rows) continue;
      const float* sums = lds.sums + at / 256 * kParts * 256 + at % 256;
      float total = sums[0];
#pragma unroll
      for (uint32_t p = 1; p < kParts; ++p) total += sums[p * 256];
      float* to = out + row * ld_out + from % kBlocks * 16 + at % 16;
      *to = accumulate ? *to + total : total;
    }
    meet();
  }
}

// Any other number of columns: one output a lane, c dealt over what lanes are left.
template <DType kType, int kN>
MK_DEVICE void dot_plain(
    float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const void* tile, uint32_t rows, uint32_t k, bool accumulate) {
  constexpr uint32_t kColumns = uint32_t(kN) < kLanes ? kN : kLanes, kParts = kLanes / kColumns;
  const uint32_t lane = lane_index(), part = lane / kColumns;
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t first = 0; first < kN; first += kColumns) {
      const uint32_t j = first + lane % kColumns;
      const bool inside = part < kParts && j < kN;
      float sum = 0.0f;
      for (uint32_t c = part; inside && c < k; c += kParts) {
        sum += x[r * ld_x + c] * load_as<kType>(tile, tile_index<kType, kN>(c, j), All{});
      }
      if (lane < kLanes) lds.sums[lane] = sum;
      meet();
      if (inside && part == 0) {
        for (uint32_t p = 1; p < kParts; ++p) sum += lds.sums[p * kColumns + lane];
        float* to = out + r * ld_out + j;
        *to = accumulate ? *to + sum : sum;
      }
      meet();
    }
  }
}

// Of columns a multiple of 16: rows of x and tiles begin at 16 bytes, ld_x is a multiple of 4.
template <DType kType, int kN>
MK_DEVICE void dot_tile(
    Worker&, float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const void* stage, uint32_t rows, uint32_t k,
    bool accumulate) {
  meet();  // readers of `out` have left it, writers of x and of the stage have written
  if constexpr (kN % 16 == 0) {
    auto of = [&](auto* vectors) {
      if constexpr (kType == DType::kF8) {  // a page, which is never in a stage
        dot_matrix<kType, kN>(out, ld_out, vectors, ld_x, (const MK_MEMORY CodeVector*)stage, rows, k, accumulate);
      } else if (__builtin_amdgcn_is_shared((const void*)stage)) {
        dot_matrix<kType, kN>(out, ld_out, vectors, ld_x, (const Stage*)stage, rows, k, accumulate);
      } else {
        dot_matrix<kType, kN>(out, ld_out, vectors, ld_x, (const MK_MEMORY Vector*)stage, rows, k, accumulate);
      }
    };
    if (__builtin_amdgcn_is_shared((const void*)x)) {
      of((const MK_SHARED_SPACE Floats*)x);
    } else {
      of((const MK_MEMORY Floats*)x);
    }
  } else {
    dot_plain<kType, kN>(out, ld_out, x, ld_x, stage, rows, k, accumulate);
  }
}

}  // namespace megakernel::dev

// The entry of a program: `TASKS` is its TaskList. After KernelArgs come the address of the overflow memory, its bytes
// per worker, and the address of the Seats.
#define MEGAKERNEL_ENTRY(TASKS)                                                                                        \
  extern "C" __attribute__((device)) __attribute__((used)) const uint64_t mk_abi_hash =                                \
      megakernel::abi::kAbiHash;                                                                                       \
  extern "C" __attribute__((device)) __attribute__((used)) const char mk_compiler[] = __VERSION__;                     \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(                                       \
      megakernel::dev::kThreads, megakernel::dev::kThreads))) void                                                     \
  mk_worker(const megakernel::abi::KernelArgs, uint64_t overflow, uint64_t overflow_bytes, uint64_t seats) {           \
    megakernel::dev::take_args();                                                                                      \
    megakernel::dev::Worker worker(megakernel::dev::take_seat(seats), overflow, overflow_bytes);                       \
    megakernel::run_worker<TASKS>(worker);                                                                             \
  }
