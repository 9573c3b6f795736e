// The HIP device: a worker is one resident workgroup that plays all roles in turn, and the group of a task is all of it.
// Included after the generated records. Compiled and inspected for every target; see docs/amd.md for what has not run.
#pragma once
#include "megakernel/device/hip_matrix.h"
#include "megakernel/device/trace.cuh"

namespace megakernel::dev {

#ifdef MEGAKERNEL_CHAOS
constexpr bool kChaos = true;
#else
constexpr bool kChaos = false;
#endif

// ------------------------------------------------------------------------------------------------ LDS of a workgroup
constexpr uint32_t kSumBytes = kWaves * 256 * 4;
constexpr uint32_t kScratchBytes = MEGAKERNEL_LDS_BYTES - kSumBytes - 512;

struct Lds {
  abi::KernelArgs args;         // here they cost no scalar register between uses
  uint64_t word[2];             // broadcast
  uint32_t partial[2][kWaves];  // reduce
  float sums[kWaves * 256];     // dot_tile
  alignas(16) uint8_t scratch[kScratchBytes];
};
static_assert(sizeof(Lds) <= MEGAKERNEL_LDS_BYTES, "LDS of a workgroup");

MK_SHARED Lds lds;

// The kernel's first argument, a word a lane.
MK_DEVICE void take_args() {
  constexpr uint32_t kWords = sizeof(abi::KernelArgs) / 4;
  static_assert(kWords <= kThreads);
  const auto* from = (const __attribute__((address_space(4))) uint32_t*)__builtin_amdgcn_kernarg_segment_ptr();
  auto* to = (MK_SHARED_SPACE uint32_t*)&lds.args;
  if (thread_index() < kWords) to[thread_index()] = from[thread_index()];
  meet();
}

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
  [[no_unique_address]] mutable trace::Tracers tracers;

  MK_DEVICE bool traces() const { return lane() == 0; }  // whether this lane writes
  MK_DEVICE trace::Tracer& tracer(abi::Role role) const { return tracers.of(role); }

  // `overflow`: memory of this worker for records that need more scratch than there is LDS.
  MK_DEVICE Worker(uint32_t index, uint64_t overflow, uint64_t overflow_bytes)
      : args(lds.args), id(index), overflow_(overflow + index * overflow_bytes), overflow_bytes_(overflow_bytes) {
    random_ = (lds.args.chaos_seed + 1) * 0x9E3779B9u ^ (index * kWaves + wave_index() + 1) * 0x85EBCA6Bu;
  }

  MK_DEVICE uint32_t lane() const { return thread_index(); }
  static constexpr uint32_t lanes() { return kThreads; }
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
      __builtin_amdgcn_endpgm();
    }
    return reinterpret_cast<T*>(overflow_);
  }

  MK_DEVICE void notify_host() const {}  // the host looks at TokenRing.written

  MK_DEVICE abi::LaunchState* launch() const { return reinterpret_cast<abi::LaunchState*>(args.launch); }
  MK_DEVICE bool aborted() { return broadcast(load_relaxed(&launch()->abort)) != 0; }

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
  uint32_t turn_ = 0, random_;

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
#pragma unroll
    for (uint32_t mask = kWave / 2; mask > 0; mask /= 2) {
      v = f(v, __builtin_bit_cast(T, exchange(__builtin_bit_cast(uint32_t, v), mask)));
    }
    uint32_t* partial = lds.partial[turn()];
    if (wave_lane() == 0) partial[wave_index()] = __builtin_bit_cast(uint32_t, v);
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
// step; their sums are added in order. Nothing of it depends on the number of rows.
template <DType kType, int kN, class X>
MK_DEVICE void dot_matrix(
    float* out, uint32_t ld_out, const X* x, uint32_t ld_x, const MK_MEMORY uint32_t* tile, uint32_t rows, uint32_t k,
    bool accumulate) {
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
          x + uint64_t(row < rows ? row : rows - 1) * ld_x, tile, lane, unit % kBlocks * 16 + column, k, part);
#pragma unroll
      for (uint32_t i = 0; i < Matrix::kOut; ++i) mine[Matrix::row_of(lane, i) * 16 + column] = sums[i];
    }
    meet();
    for (uint32_t at = thread_index(); at < kTeams * 256; at += kThreads) {
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
  constexpr uint32_t kColumns = uint32_t(kN) < kThreads ? kN : kThreads, kParts = kThreads / kColumns;
  const uint32_t part = thread_index() / kColumns;
  for (uint32_t r = 0; r < rows; ++r) {
    for (uint32_t first = 0; first < kN; first += kColumns) {
      const uint32_t j = first + thread_index() % kColumns;
      const bool inside = part < kParts && j < kN;
      float sum = 0.0f;
      for (uint32_t c = part; inside && c < k; c += kParts) {
        sum += x[r * ld_x + c] * load_as<kType>(tile, tile_index<kType, kN>(c, j), All{});
      }
      lds.sums[thread_index()] = sum;
      meet();
      if (inside && part == 0) {
        for (uint32_t p = 1; p < kParts; ++p) sum += lds.sums[p * kColumns + thread_index()];
        float* to = out + r * ld_out + j;
        *to = accumulate ? *to + sum : sum;
      }
      meet();
    }
  }
}

template <DType kType, int kN>
MK_DEVICE void dot_tile(
    Worker&, float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const void* stage, uint32_t rows, uint32_t k,
    bool accumulate) {
  meet();  // readers of `out` have left it, writers of x and of the stage have written
  if constexpr (kN % 16 == 0) {
    const auto* tile = (const MK_MEMORY uint32_t*)stage;
    if (__builtin_amdgcn_is_shared((const void*)x)) {
      dot_matrix<kType, kN>(out, ld_out, (const MK_SHARED_SPACE float*)x, ld_x, tile, rows, k, accumulate);
    } else {
      dot_matrix<kType, kN>(out, ld_out, (const MK_MEMORY float*)x, ld_x, tile, rows, k, accumulate);
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
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(                                       \
      megakernel::dev::kThreads, megakernel::dev::kThreads))) void                                                     \
  mk_worker(const megakernel::abi::KernelArgs, uint64_t overflow, uint64_t overflow_bytes, uint64_t seats) {           \
    megakernel::dev::take_args();                                                                                      \
    megakernel::dev::Worker worker(megakernel::dev::take_seat(seats), overflow, overflow_bytes);                       \
    megakernel::run_worker<TASKS>(worker);                                                                             \
  }
