// The CUDA device: a worker is one resident block whose warps play one role each. Included after the generated records.
//
// Warps 0 to 7 are consumers, and together the group that runs simple tasks; then producer, storer and control. What they
// share is one `Block` in shared memory. See docs/memory-model.md for which instruction orders which write.
#pragma once

#define MEGAKERNEL_SPLIT_ROLES 1

#include "megakernel/device/types.cuh"

#include "megakernel/device/cuda_ptx.h"

namespace megakernel::dev {

#ifdef MEGAKERNEL_CHAOS
constexpr bool kChaos = true;
#else
constexpr bool kChaos = false;
#endif

// ------------------------------------------------------------------------------------------------ shape of a block
constexpr uint32_t kConsumers = 8;  // warps
constexpr uint32_t kProducerWarp = kConsumers, kStorerWarp = kConsumers + 1, kControlWarp = kConsumers + 2;
constexpr uint32_t kWarps = kConsumers + 3;
constexpr uint32_t kThreads = kWarps * 32;
constexpr uint32_t kStageBytes = 16384;
constexpr uint32_t kRecords = 8;                        // records that control reads ahead
constexpr uint32_t kRecordReaders = kConsumers + 1;     // consumers and storer; the producer reads its own
constexpr uint32_t kScratchBytes = MEGAKERNEL_SCRATCH_BYTES;  // inputs, partial sums and merges
constexpr uint32_t kStages = MEGAKERNEL_STAGES;
constexpr uint32_t kInFlight = MEGAKERNEL_IN_FLIGHT < kStages ? MEGAKERNEL_IN_FLIGHT : kStages;  // stages being copied

struct alignas(128) Block {
  uint8_t ring[kStages][kStageBytes];
  alignas(16) uint8_t scratch[kScratchBytes];
  abi::Record record[kRecords];
  abi::Record producer_record;
  abi::StepHeader header[2];
  abi::KernelArgs args;     // `workspace` is the copy of the step at work
  uint64_t last_workspace;  // the copy of the step before
  uint64_t first_step;      // the launch began after this one
  uint64_t full[kStages], empty[kStages];
  uint64_t record_full[kRecords], record_empty[kRecords];
  uint64_t header_full[2], step_done;
  uint64_t sums_full[2], sums_empty[2];
  uint64_t group, rolled;
  float reduce_float[2][kConsumers];
  int32_t reduce_int[2][kConsumers];
  uint64_t broadcast_word[2];
  uint32_t dropped;  // the signal that a test wants lost has been lost
};
static_assert(sizeof(Block) <= MEGAKERNEL_SHARED_BYTES, "a block's shared memory");

// ------------------------------------------------------------------------------------------------ portable values
using Vf = float;
using Vi = int32_t;
using Vu = uint32_t;
constexpr int kWidth = 1;
struct All {};

MK_DEVICE Vf splat(float v) { return v; }
MK_DEVICE Vi splat(int32_t v) { return v; }
MK_DEVICE Vi iota(uint32_t first) { return int32_t(first); }
MK_DEVICE Vi as_vi(Vf v) { return __float_as_int(v); }
MK_DEVICE Vf as_vf(Vi v) { return __int_as_float(v); }
MK_DEVICE Vf to_vf(Vi v) { return float(v); }
MK_DEVICE Vf select(bool mask, Vf a, Vf b) { return mask ? a : b; }
MK_DEVICE Vi select(bool mask, Vi a, Vi b) { return mask ? a : b; }
MK_DEVICE float max(float a, float b) { return a > b ? a : b; }
MK_DEVICE Vf load(const float* p, All) { return *p; }
MK_DEVICE void store(float* p, Vf v, All) { *p = v; }
MK_DEVICE Vf where(All, Vf v, float) { return v; }
MK_DEVICE Vi load_u16(const uint16_t* p, All) { return *p; }
MK_DEVICE int32_t rank_of(float v) {
  const int32_t i = __float_as_int(v);
  return i ^ ((i >> 31) & 0x7fffffff);
}
MK_DEVICE float exp(float x) { return expf(x); }
MK_DEVICE float log(float x) { return logf(x); }
MK_DEVICE float sqrt(float x) { return sqrtf(x); }
MK_DEVICE float tanh(float x) { return tanhf(x); }
MK_DEVICE float erf(float x) { return erff(x); }

template <DType kType>
MK_DEVICE Vf load_as(const void* p, uint32_t index, All) {
  if constexpr (kType == DType::kF32) return static_cast<const float*>(p)[index];
  const uint16_t bits = static_cast<const uint16_t*>(p)[index];
  if constexpr (kType == DType::kBf16) return as_float(uint32_t(bits) << 16);
  return half_to_float(bits);
}
template <DType kType>
MK_DEVICE void put(void* p, uint32_t index, float v) {
  if constexpr (kType == DType::kF32) {
    static_cast<float*>(p)[index] = v;
  } else {
    static_cast<uint16_t*>(p)[index] = uint16_t(pack<kType == DType::kF16>(v, 0.0f));
  }
}
// Tiles are multiplied by the matrix cores; these have no body here and no task that runs here calls them.
template <DType kType, int kN>
MK_DEVICE uint32_t tile_index(uint32_t c, uint32_t j);
template <DType kType, int kN, class W>
MK_DEVICE void dot_tile(
    W&, float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const void* tile, uint32_t rows, uint32_t k, bool accumulate);

MK_DEVICE void prefetch(const void*) {}

// ------------------------------------------------------------------------------------------------ worker
struct Patience {
  uint32_t tries = 0;
  uint64_t began = 0;
};

// One warp's view of its worker; the 8 consumers together are the group of a simple task.
struct Worker {
  Block& block;
  const abi::KernelArgs& launch_args;  // as given: what does not change with the step
  const abi::KernelArgs& args;
  const uint32_t id;
  const abi::Role role;
  const abi::StepHeader* header = nullptr;
  const abi::StepHeader* last = nullptr;  // of the step before: what this worker must clear
  uint64_t step = 0;
  const abi::Record* record = nullptr;
  uint32_t record_index = 0;
  bool failed = false;

  MK_DEVICE Worker(Block& b, const abi::KernelArgs& a, abi::Role r)
      : block(b), launch_args(a), args(b.args), id(blockIdx.x), role(r) {
    random_ = (a.chaos_seed + 1) * 0x9E3779B9u ^ (blockIdx.x * kWarps + threadIdx.x / 32 + 1) * 0x85EBCA6Bu;
  }

  MK_DEVICE uint32_t lane() const { return threadIdx.x; }
  static constexpr uint32_t lanes() { return kConsumers * 32; }
  MK_DEVICE uint32_t warp() const { return threadIdx.x / 32; }
  MK_DEVICE uint32_t warp_lane() const { return threadIdx.x % 32; }
  MK_DEVICE abi::LaunchState* launch() const { return reinterpret_cast<abi::LaunchState*>(launch_args.launch); }
  MK_DEVICE bool aborted() const { return load_word(&launch()->abort) != 0; }

  // The group of consumers meets: what each wrote before, all read after.
  MK_DEVICE void sync() {
    __syncwarp();
    if (warp_lane() == 0) barrier_arrive(&block.group);
    wait_barrier(&block.group, group_parity_);
    group_parity_ ^= 1;
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
  MK_DEVICE float sum(float v) {
    return reduce(v, block.reduce_float, [](float a, float b) { return a + b; });
  }
  MK_DEVICE float max(float v) {
    return reduce(v, block.reduce_float, [](float a, float b) { return a > b ? a : b; });
  }
  MK_DEVICE float min(float v) {
    return reduce(v, block.reduce_float, [](float a, float b) { return a < b ? a : b; });
  }
  MK_DEVICE int32_t sum(int32_t v) {
    return reduce(v, block.reduce_int, [](int32_t a, int32_t b) { return a + b; });
  }
  MK_DEVICE int32_t max(int32_t v) {
    return reduce(v, block.reduce_int, [](int32_t a, int32_t b) { return a > b ? a : b; });
  }
  MK_DEVICE int32_t min(int32_t v) {
    return reduce(v, block.reduce_int, [](int32_t a, int32_t b) { return a < b ? a : b; });
  }
  MK_DEVICE uint64_t broadcast(uint64_t v) {
    const uint32_t slot = turn_++ & 1;
    if (lane() == 0) block.broadcast_word[slot] = v;
    sync();
    return block.broadcast_word[slot];
  }

  template <class T>
  MK_DEVICE T* scratch(uint64_t) {
    return reinterpret_cast<T*>(block.scratch);
  }

  MK_DEVICE void notify_host() {}  // the host sleeps between looks at TokenRing.written

  // A phase of a barrier inside the block.
  MK_DEVICE void wait_barrier(uint64_t* barrier, uint32_t parity, abi::FaultKind kind = abi::FaultKind::kRingBudget) {
    if constexpr (kChaos) delay();
    if (barrier_try(barrier, parity)) return;
    Patience p;
    while (!barrier_try(barrier, parity)) lose_patience(p, kind, abi::kNone, parity, 0);
  }

  // Waits until *p >= target, acquire. Every lane that calls it waits.
  template <class T>
  MK_DEVICE bool wait(const T* p, uint64_t target, abi::FaultKind kind, uint32_t counter) {
    if constexpr (kChaos) delay();
    uint64_t value = load_acquire(p);
    if (value >= target) return true;
    Patience patience;
    do {
      lose_patience(patience, kind, counter, value, target);
      value = load_acquire(p);
    } while (value < target);
    return true;
  }
  template <class T, class Idle>
  MK_DEVICE bool wait(const T* p, uint64_t target, abi::FaultKind kind, uint32_t counter, Idle) {
    return wait(p, target, kind, counter);
  }
  MK_DEVICE bool wait_finished(uint64_t target) {
    return wait(&launch()->finished, target, abi::FaultKind::kHeaderBudget, abi::kNone);
  }

  // +1 on a counter, by one lane: what its warp wrote before a __syncwarp is visible to who sees it.
  MK_DEVICE void signal(uint64_t* p, uint32_t counter) {
    if constexpr (kChaos) {
      delay();
      if (counter == launch_args.drop_signal && atomicExch(&block.dropped, 1u) == 0) return;
    }
    add_release(p, 1);
  }

  // The first fault of a launch is recorded; every warp leaves when it next waits.
  __device__ __noinline__ void fault(
      abi::FaultKind kind, uint32_t tile, uint32_t counter, uint64_t value, uint64_t target) {
    failed = true;
    if (atomicCAS(&launch()->abort, 0u, 1u) != 0) return;
    auto* f = reinterpret_cast<abi::FaultRecord*>(launch_args.fault);
    f->claimed = 1;
    f->worker = id;
    f->role = uint32_t(role);
    f->record = record_index;
    f->opcode = record ? record->opcode : uint32_t(abi::kEnd);
    f->node = record ? record->node : abi::kNone;
    f->tile = tile;
    f->counter = counter;
    f->value = value;
    f->target = target;
    f->step = step;
    launch()->exit = uint32_t(abi::ExitReason::kFault);
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&f->kind) = uint32_t(kind);
  }

  // Called in every turn of a wait. Ends this thread when the launch is over, with a fault when that is its own doing.
  __device__ __noinline__ void lose_patience(
      Patience& p, abi::FaultKind kind, uint32_t counter, uint64_t value, uint64_t target) {
    if (++p.tries % 64 != 0) return;
    if (aborted()) end_thread();
    const uint64_t now_ns = clock_ns();
    if (p.began == 0) p.began = now_ns;
    if (now_ns - p.began < launch_args.spin_budget_ns) return;
    fault(kind, record ? record->tile_begin : abi::kNone, counter, value, target);
    end_thread();
  }

  // Memory of a block must not go away while copies into it are on their way.
  MK_DEVICE void drain() {
    for (uint32_t s = 0; s < kStages; ++s) {
      if (!(copying >> s & 1)) continue;
      while (!barrier_try(&block.full[s], copying_parity >> s & 1)) {}
    }
  }
  MK_DEVICE void end_thread() {
    if (role == abi::Role::kProducer) drain();
    asm volatile("exit;");
  }

  uint32_t copying = 0, copying_parity = 0;  // the producer's stages: whether a copy was started, and in which phase

  __device__ __noinline__ void delay() {
    random_ ^= random_ << 13, random_ ^= random_ >> 17, random_ ^= random_ << 5;
    if (random_ % 4 == 0) __nanosleep(random_ >> 8 & 1023);
    if (random_ % 64 == 1) __nanosleep(random_ >> 8 & 8191);
    __syncwarp(__activemask());
  }

 private:
  uint32_t group_parity_ = 0, turn_ = 0, random_;

  template <class T, class F>
  MK_DEVICE T reduce(T v, T (&memory)[2][kConsumers], F f) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v = f(v, __shfl_xor_sync(0xffffffffu, v, distance));
    const uint32_t slot = turn_++ & 1;
    if (warp_lane() == 0) memory[slot][warp()] = v;
    sync();
    T out = memory[slot][0];
#pragma unroll
    for (uint32_t i = 1; i < kConsumers; ++i) out = f(out, memory[slot][i]);
    return out;
  }
};

// ------------------------------------------------------------------------------------------------ values that say
// A float in the workspace is valid when its bits are not all ones. A step writes one copy of the workspace and clears
// what the step before wrote in the other.
constexpr uint32_t kInvalid = 0xffffffffu;

MK_DEVICE bool invalid(const Quad& v) {
  return v.x == kInvalid || v.y == kInvalid || v.z == kInvalid || v.w == kInvalid;
}

// The same place in the copy that the step before wrote.
template <class T>
MK_DEVICE T* before(const Worker& w, T* p) {
  return reinterpret_cast<T*>(reinterpret_cast<uint64_t>(p) - w.args.workspace + w.block.last_workspace);
}

MK_DEVICE void publish(float* p, float v) { store_word(p, as_bits(v)); }
MK_DEVICE void clear(float* p) { store_word(p, kInvalid); }

// A float that another worker publishes; waits for it.
MK_DEVICE float await(Worker& w, const float* p) {
  uint32_t v = load_word(p);
  Patience patience;
  while (v == kInvalid) {
    w.lose_patience(patience, abi::FaultKind::kValueBudget, abi::kNone, 0, 0);
    v = load_word(p);
  }
  return as_float(v);
}

}  // namespace megakernel::dev

namespace megakernel::dev {

// Prepares the block and says which role this warp plays.
MK_DEVICE abi::Role begin_block(Block& b, const abi::KernelArgs& args) {
  static_assert(sizeof(abi::KernelArgs) / 4 <= kThreads, "one word a thread");
  if (threadIdx.x < sizeof(abi::KernelArgs) / 4) {
    reinterpret_cast<uint32_t*>(&b.args)[threadIdx.x] = reinterpret_cast<const uint32_t*>(&args)[threadIdx.x];
  }
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; ++i) {
      barrier_init(&b.full[i], kFullArrivals);
      barrier_init(&b.empty[i], kConsumers);
    }
    for (uint32_t i = 0; i < kRecords; ++i) {
      barrier_init(&b.record_full[i], 1);
      barrier_init(&b.record_empty[i], kRecordReaders);
    }
    for (uint32_t i = 0; i < 2; ++i) {
      barrier_init(&b.header_full[i], 1);
      barrier_init(&b.sums_full[i], kConsumers);
      barrier_init(&b.sums_empty[i], 1);
    }
    barrier_init(&b.step_done, kConsumers + 2);  // consumers, producer, storer
    barrier_init(&b.group, kConsumers);
    barrier_init(&b.rolled, 1);
    b.dropped = 0;
  }
  fence_shared_for_copies();
  __syncthreads();
  const uint32_t warp = threadIdx.x / 32;
  if (warp == kProducerWarp) return abi::Role::kProducer;
  if (warp == kStorerWarp) return abi::Role::kStorer;
  return warp == kControlWarp ? abi::Role::kControl : abi::Role::kConsumer;
}

}  // namespace megakernel::dev

#define MEGAKERNEL_CORES "megakernel/device/cuda_cores.cuh"

#define MEGAKERNEL_ENTRY(Tasks)                                                                                      \
  extern "C" __device__ const unsigned long long mk_abi_hash = megakernel::abi::kAbiHash;                            \
  extern "C" __global__ void __launch_bounds__(megakernel::dev::kThreads, 1)                                         \
      mk_worker(const __grid_constant__ megakernel::abi::KernelArgs args) {                                         \
    extern __shared__ __align__(1024) unsigned char shared[];                                                        \
    megakernel::run_block<Tasks>(*reinterpret_cast<megakernel::dev::Block*>(shared), args);                          \
  }
