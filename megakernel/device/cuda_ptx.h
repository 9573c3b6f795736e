// The instructions that have no C++ spelling, each as one function. Compute capability 8.0 and later; what 9.0 adds
// (bulk copies, waits that suspend) has a slower form for older devices here and nowhere else.
#pragma once

namespace megakernel::dev {

#define MK_DEVICE __device__ __forceinline__
#define MK_MEMORY
#define MK_OUT_OF_LINE __device__ __noinline__

#if __CUDA_ARCH__ >= 900
constexpr bool kBulkCopies = true;
#else
constexpr bool kBulkCopies = false;
#endif

MK_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
template <class T>
MK_DEVICE T* at_shared(uint32_t address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// ------------------------------------------------------------------------------------------------ barriers
// A barrier completes a phase when its count of arrivals came and the bytes it expects have landed.
MK_DEVICE void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

MK_DEVICE void barrier_arrive_at(uint32_t address) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address) : "memory");
}
// For several who share one.
MK_DEVICE void barrier_arrive_at(uint32_t address, uint32_t times) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0], %1;\n}" ::"r"(address), "r"(times) : "memory");
#else
  for (; times > 0; --times) barrier_arrive_at(address);
#endif
}
MK_DEVICE void barrier_arrive(uint64_t* barrier) { barrier_arrive_at(shared_address(barrier)); }

// By all lanes of a warp, of which one arrives. With MEGAKERNEL_EVERY_LANE all do, for tools that follow threads one by one
// and do not know that a __syncwarp orders what the others wrote.
#ifdef MEGAKERNEL_EVERY_LANE
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr uint32_t kWarpArrivals = 1;
#endif
MK_DEVICE bool arrives() { return kWarpArrivals > 1 || threadIdx.x % 32 == 0; }
MK_DEVICE void barrier_arrive_warp(uint64_t* barrier) {
  if (arrives()) barrier_arrive(barrier);
}

// Whether the phase with this parity is complete; may wait for a moment before the answer is no. `barrier` is its shared
// address.
MK_DEVICE bool barrier_try(uint32_t barrier, uint32_t parity) {
  uint32_t done;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
  return done != 0;
}

// The same without waiting.
MK_DEVICE bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}

// Waits for the phase with this parity in as few instructions as it can be done: the instruction cache is what a step is
// short of. Ends the thread when the word at `stop` is not zero.
MK_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity, uint32_t stop) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p, q;\n.reg .u32 s;\n"
      "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
      "ld.volatile.shared.u32 s, [%2];\nsetp.eq.u32 q, s, 0;\n@q bra AGAIN;\nexit;\nDONE:\n}" ::"r"(barrier),
      "r"(parity), "r"(stop) : "memory");
#else
  asm volatile(
      "{\n.reg .pred p, q;\n.reg .u32 s;\n"
      "AGAIN:\nmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\n"
      "ld.volatile.shared.u32 s, [%2];\nsetp.eq.u32 q, s, 0;\n@q bra AGAIN;\nexit;\nDONE:\n}" ::"r"(barrier),
      "r"(parity), "r"(stop) : "memory");
#endif
}

// The first lane's value, in every lane of the warp.
MK_DEVICE uint32_t of_first_lane(uint32_t v) { return __shfl_sync(0xffffffffu, v, 0); }

// Makes barrier_init, and ordinary writes to shared memory, visible to the copy engine.
MK_DEVICE void fence_shared_for_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Orders what this thread has seen of global memory before copies that it starts.
MK_DEVICE void fence_global_for_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------------------------ copies
// Arrivals of a stage's full barrier: one with bulk copies, else one of each lane of the producer.
constexpr uint32_t kFullArrivals = kBulkCopies ? 1 : 32;

MK_DEVICE uint64_t streaming_policy() {
  uint64_t policy = 0;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Starts the copy of `bytes` (a multiple of 16, both sides aligned to 16) and arrives at `barrier`, which completes
// when all have landed. Called by the whole warp.
MK_DEVICE void copy_to_shared(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  // Of one elected lane the compiler knows that it is alone: else it would loop over those that are there.
  asm volatile(
      "{\n"
      ".reg .pred mine;\n"
      "elect.sync _|mine, 0xffffffff;\n"
      "@mine mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
      "@mine cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n"
      "}\n" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
#else
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t at = lane * 16; at < bytes; at += 512) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to) + at),
                 "l"(static_cast<const char*>(from) + at), "l"(policy) : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// 16 bytes of each lane, past the first-level cache; a group of them, and the wait for all groups but the last kLater.
MK_DEVICE void copy_quad(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
MK_DEVICE void commit_quads() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t kLater>
MK_DEVICE void await_quads() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// What other workers of this step read too.
MK_DEVICE uint64_t keeping_policy() {
  uint64_t policy = 0;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The same of up to 32 pieces of `bytes`, one behind the other to shared memory; lane i says where piece i comes from.
MK_DEVICE void copy_pieces(void* to, const void* from, uint32_t bytes, uint32_t pieces, uint64_t* barrier, uint64_t policy) {
  const uint32_t lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes * pieces) : "memory");
  }
  __syncwarp();
  if (lane < pieces) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to) + lane * bytes), "l"(from), "r"(bytes),
        "r"(shared_address(barrier)), "l"(policy) : "memory");
  }
  __syncwarp();
#else
  for (uint32_t piece = 0; piece < pieces; ++piece) {
    const auto* source = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(from), piece));
    for (uint32_t at = lane * 16; at < bytes; at += 512) {
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                       shared_address(to) + piece * bytes + at),
                   "l"(source + at), "l"(policy) : "memory");
    }
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// One word of each lane from global to shared memory, on its way while the warp goes on; and the wait for all such words.
MK_DEVICE void copy_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
MK_DEVICE void await_words() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// ------------------------------------------------------------------------------------------------ global memory
struct alignas(8) Two {
  uint32_t x, y;
};
struct alignas(16) Quad {
  uint32_t x, y, z, w;
};

MK_DEVICE Quad load_quad(const void* p) {  // may be seen at any time, never from a stale cache line
  Quad v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

MK_DEVICE uint32_t load_word(const void* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

MK_DEVICE uint64_t load_system(const void* p) {  // of the host's memory; orders nothing
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

MK_DEVICE float2 load_two(const float* p) {
  uint32_t x, y;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(p) : "memory");
  return make_float2(__uint_as_float(x), __uint_as_float(y));
}

struct alignas(16) Pair {
  uint64_t x, y;
};

MK_DEVICE Pair load_pair(const void* p) {  // each half is one access, in no order
  Pair v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}

MK_DEVICE void store_long(void* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

MK_DEVICE void store_quad(void* p, const Quad& v) {  // each word is one access, in no order
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

MK_DEVICE void store_word(void* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MK_DEVICE Quad load_constant_quad(const void* p) {  // weights: never written during a launch
  Quad v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

MK_DEVICE float load_constant(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

MK_DEVICE uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

MK_DEVICE uint64_t load_acquire_system(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

MK_DEVICE void store_release(uint64_t* p, uint64_t v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

MK_DEVICE void store_release_system(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

MK_DEVICE void add_release(uint64_t* p, uint64_t v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

MK_DEVICE uint64_t fetch_add(uint64_t* p, uint64_t v) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(v) : "memory");
  return before;
}

MK_DEVICE uint32_t add_acquire_release(uint32_t* p, uint32_t v) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before + v;
}

MK_DEVICE uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// A word that warps read and write with no order between them, on purpose. Tools that look for races take it from atomics only.
template <class T>
MK_DEVICE uint32_t load_volatile(const T* p) {
  static_assert(sizeof(T) == 4);
#ifdef MEGAKERNEL_EVERY_LANE
  return atomicOr(reinterpret_cast<uint32_t*>(const_cast<T*>(p)), 0u);
#else
  return *reinterpret_cast<const volatile uint32_t*>(p);
#endif
}
// The same by a warp that must go one way: in the kernel for tools its lanes look one after the other.
template <class T>
MK_DEVICE uint32_t load_volatile_together(const T* p) {
#ifdef MEGAKERNEL_EVERY_LANE
  return of_first_lane(load_volatile(p));
#else
  return load_volatile(p);
#endif
}
MK_DEVICE void store_volatile(uint32_t* p, uint32_t v) {
#ifdef MEGAKERNEL_EVERY_LANE
  atomicExch(p, v);
#else
  *static_cast<volatile uint32_t*>(p) = v;
#endif
}
// threadIdx.x where what is made of it should not be kept: it is asked for anew each time.
MK_DEVICE uint32_t thread_again() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
// The same of the address of mk_shared.
MK_DEVICE uint32_t shared_again() {
  uint32_t v;
  asm volatile("mov.u32 %0, mk_shared;" : "=r"(v));
  return v;
}
// A number of which the compiler shall not know where it comes from: it keeps it, not what it was made of.
MK_DEVICE uint32_t in_register(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
MK_DEVICE void end_thread() { asm volatile("exit;"); }

MK_DEVICE uint64_t clock_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// ------------------------------------------------------------------------------------------------ matrix cores
// d[16 x 8] += a[16 x 16] b[16 x 8]; a1 and a3 are rows 8 to 15 of a.
template <bool kHalf>
MK_DEVICE void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Two floats, rounded to nearest even, in one word; `low` in the low half.
template <bool kHalf>
MK_DEVICE uint32_t pack(float low, float high) {
  uint32_t v;
  if constexpr (kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  }
  return v;
}

// Products of pairs of bfloat16.
MK_DEVICE uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u));
  return v;
}
MK_DEVICE uint32_t pick_bytes(uint32_t word, uint32_t which) { return __byte_perm(word, 0, which); }

MK_DEVICE float half_to_float(uint16_t bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}

MK_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
MK_DEVICE uint32_t as_bits(float v) { return __float_as_uint(v); }
MK_DEVICE float exp2_fast(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}

}  // namespace megakernel::dev
