// What the kernel's cuda_ptx.h has, in C++ for the host. See before.h.
#pragma once

// Tools that look for races must find one where these order nothing.
#ifdef EMULATOR_WEAK_RELEASE
#define EMULATOR_RELEASE __ATOMIC_RELAXED
#else
#define EMULATOR_RELEASE __ATOMIC_RELEASE
#endif
#ifdef EMULATOR_WEAK_BARRIER
#define EMULATOR_ARRIVE(barrier)
#else
#define EMULATOR_ARRIVE(barrier) __tsan_release(barrier)
#endif

namespace megakernel::dev {

#define MK_DEVICE inline
#define MK_MEMORY
#define MK_OUT_OF_LINE __attribute__((noinline))

constexpr bool kBulkCopies = true;
#ifdef MEGAKERNEL_EVERY_LANE
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr uint32_t kWarpArrivals = 1;
#endif
constexpr uint32_t kFullArrivals = 1;

extern "C" {
extern thread_local __attribute__((aligned(1024))) unsigned char mk_shared[];
}
inline uint32_t shared_address(const void* p) { return uint32_t(reinterpret_cast<uint64_t>(p) - reinterpret_cast<uint64_t>(mk_shared)); }
template <class T>
T* at_shared(uint32_t address) {
  return reinterpret_cast<T*>(mk_shared + address);
}

// ------------------------------------------------------------------------------------------------ barriers
// In the word of a barrier: arrivals that its phase waits for, arrivals of a phase, its parity.
struct Barrier {
  uint16_t pending, count;
  uint32_t parity;
};
static_assert(sizeof(Barrier) == 8);
inline void barrier_init(uint64_t* barrier, uint32_t count) {
  *reinterpret_cast<Barrier*>(barrier) = {uint16_t(count), uint16_t(count), 0};
}
EMULATOR_UNSEEN inline void barrier_arrive(uint64_t* barrier) {
  EMULATOR_ARRIVE(barrier);
  auto& b = *reinterpret_cast<Barrier*>(barrier);
  if (--b.pending != 0) return;
  b.pending = b.count;
  b.parity ^= 1;
}
inline void barrier_arrive_at(uint32_t address, uint32_t times = 1) {
  for (; times > 0; --times) barrier_arrive(at_shared<uint64_t>(address));
}
inline bool arrives() { return kWarpArrivals > 1 || threadIdx.x % 32 == 0; }
inline void barrier_arrive_warp(uint64_t* barrier) {
  if (arrives()) barrier_arrive(barrier);
}
EMULATOR_UNSEEN inline bool barrier_test(uint32_t barrier, uint32_t parity) {
  auto* b = at_shared<Barrier>(barrier);
  if (!emulator::is_over(&b->parity, parity)) return false;
  __tsan_acquire(b);
  return true;
}
inline bool barrier_try(uint32_t barrier, uint32_t parity) {
  if (barrier_test(barrier, parity)) return true;
  // At the end of a launch lanes of the producer may part, as threads of a warp do not: one that has announced a copy waits
  // for it, and nobody else is left.
  if (emulator::alone()) emulator::end_lane();
  emulator::sleep_while(&at_shared<Barrier>(barrier)->parity, parity);
  return false;
}
[[noreturn]] inline void end_thread() { emulator::end_lane(); }
inline void barrier_wait(uint32_t barrier, uint32_t parity, uint32_t stop) {
  while (!barrier_try(barrier, parity)) {
    if (__atomic_load_n(at_shared<uint32_t>(stop), __ATOMIC_RELAXED) != 0) end_thread();
  }
}
inline uint32_t shared_again() { return 0; }
inline uint32_t in_register(uint32_t v) { return v; }
inline uint32_t of_first_lane(uint32_t v) { return __shfl_sync(0xffffffffu, v, 0); }
inline void fence_shared_for_copies() {}
inline void fence_global_for_copies() {}

// ------------------------------------------------------------------------------------------------ copies
inline uint64_t streaming_policy() { return 0; }
inline uint64_t keeping_policy() { return 0; }
inline void copy_to_shared(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  memcpy(to, from, bytes);
  barrier_arrive(barrier);
}
inline void copy_pieces(void* to, const void* from, uint32_t bytes, uint32_t pieces, uint64_t* barrier, uint64_t) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane < pieces) memcpy(static_cast<char*>(to) + lane * bytes, from, bytes);
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

struct alignas(8) Two {
  uint32_t x, y;
};
struct alignas(16) Quad {
  uint32_t x, y, z, w;
};
struct alignas(16) Pair {
  uint64_t x, y;
};

// ------------------------------------------------------------------------------------------------ global memory
template <class T>
T load_as_one(const void* p, int order = __ATOMIC_RELAXED) {
  emulator::before_load();
  return T(__atomic_load_n(static_cast<const T*>(p), order));
}
inline uint32_t load_word(const void* p) { return load_as_one<uint32_t>(p); }
inline Quad load_quad(const void* p) {
  emulator::before_load();
  Quad v;
  const auto* from = static_cast<const uint32_t*>(p);
  v.x = __atomic_load_n(from, __ATOMIC_RELAXED), v.y = __atomic_load_n(from + 1, __ATOMIC_RELAXED);
  v.z = __atomic_load_n(from + 2, __ATOMIC_RELAXED), v.w = __atomic_load_n(from + 3, __ATOMIC_RELAXED);
  return v;
}
inline void copy_word(void* to, const void* from) { *static_cast<uint32_t*>(to) = load_word(from); }
inline void await_words() { __syncwarp(); }
inline void copy_quad(void* to, const void* from) { *static_cast<Quad*>(to) = load_quad(from); }
inline void commit_quads() {}
template <uint32_t kLater>
void await_quads() {}
inline uint64_t load_system(const void* p) { return load_as_one<uint64_t>(p); }
inline float2 load_two(const float* p) {
  if (reinterpret_cast<uint64_t>(p) % 8 != 0) abort();
  return {__uint_as_float(load_word(p)), __uint_as_float(load_word(p + 1))};
}
inline Pair load_pair(const void* p) {
  return {load_as_one<uint64_t>(p), load_as_one<uint64_t>(static_cast<const uint64_t*>(p) + 1)};
}
inline void store_long(void* p, uint64_t v) { __atomic_store_n(static_cast<uint64_t*>(p), v, __ATOMIC_RELAXED); }
inline void store_word(void* p, uint32_t v) { __atomic_store_n(static_cast<uint32_t*>(p), v, __ATOMIC_RELAXED); }
inline void store_quad(void* p, const Quad& v) {
  if (reinterpret_cast<uint64_t>(p) % 16 != 0) abort();
  auto* to = static_cast<uint32_t*>(p);
  store_word(to, v.x), store_word(to + 1, v.y), store_word(to + 2, v.z), store_word(to + 3, v.w);
}
inline Quad load_constant_quad(const void* p) {
  if (reinterpret_cast<uint64_t>(p) % 16 != 0) abort();
  return *static_cast<const Quad*>(p);
}
inline float load_constant(const float* p) { return *p; }
inline uint64_t load_acquire(const uint64_t* p) { return load_as_one<uint64_t>(p, __ATOMIC_ACQUIRE); }
inline uint32_t load_acquire(const uint32_t* p) { return load_as_one<uint32_t>(p, __ATOMIC_ACQUIRE); }
inline uint64_t load_acquire_system(const uint64_t* p) { return load_acquire(p); }
inline void store_release(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, EMULATOR_RELEASE); }
inline void store_release_system(uint64_t* p, uint64_t v) { store_release(p, v); }
inline void add_release(uint64_t* p, uint64_t v) { __atomic_fetch_add(p, v, EMULATOR_RELEASE); }
inline uint64_t fetch_add(uint64_t* p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline uint32_t add_acquire_release(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL) + v; }
template <class T>
uint32_t load_volatile(const T* p) {
  emulator::before_load();
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(p), __ATOMIC_RELAXED);
}
template <class T>
uint32_t load_volatile_together(const T* p) {  // lanes take turns: each could see another value
  return of_first_lane(load_volatile(p));
}
inline void store_volatile(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline uint64_t clock_ns() { return emulator::now_ns(); }
inline uint32_t thread_again() { return threadIdx.x; }

// ------------------------------------------------------------------------------------------------ matrix cores
inline float half_to_float(uint16_t bits) {
  _Float16 v;
  memcpy(&v, &bits, 2);
  return float(v);
}
template <bool kHalf>
float of_half(uint16_t bits) {
  return kHalf ? half_to_float(bits) : __uint_as_float(uint32_t(bits) << 16);
}

// Of m16n8k16: lane 4 g + t has of a the rows g and g + 8, columns 2 t, 2 t + 1 and those 8 further; of b the column g, rows
// 2 t, 2 t + 1 and those 8 further; of d the rows g and g + 8, columns 2 t and 2 t + 1.
template <bool kHalf>
EMULATOR_UNSEEN void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  auto& all = *emulator::group;
  const uint32_t own = all.current, first = own / 32 * 32, g = own % 32 / 4, t = own % 4;
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(all.a[own], a, sizeof a);
  memcpy(all.b[own], b, sizeof b);
  emulator::meet(emulator::own_wave());
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = g + i / 2 * 8, column = t * 2 + i % 2;
    for (uint32_t k = 0; k < 16; ++k) {
      const uint32_t left = all.a[first + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const uint32_t right = all.b[first + column * 4 + k % 8 / 2][k / 8];
      d[i] = fmaf(of_half<kHalf>(uint16_t(left >> k % 2 * 16)), of_half<kHalf>(uint16_t(right >> k % 2 * 16)), d[i]);
    }
  }
  emulator::meet(emulator::own_wave());
}

template <bool kHalf>
uint16_t rounded(float v) {
  if constexpr (kHalf) {
    const _Float16 h = _Float16(v);
    return bits_as<uint16_t>(h);
  }
  const uint32_t bits = __float_as_uint(v);
  if (v != v) return 0x7fff;
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
template <bool kHalf>
uint32_t pack(float low, float high) {
  return rounded<kHalf>(low) | uint32_t(rounded<kHalf>(high)) << 16;
}
inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  return pack<false>(of_half<false>(uint16_t(a)) * of_half<false>(uint16_t(b)),
                     of_half<false>(uint16_t(a >> 16)) * of_half<false>(uint16_t(b >> 16)));
}
inline uint32_t pick_bytes(uint32_t word, uint32_t which) {  // a digit for each byte of the result; from 4 on they are zeros
  uint32_t v = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t from = which >> i * 4 & 7;
    if (from < 4) v |= (word >> from * 8 & 0xff) << i * 8;
  }
  return v;
}
inline float as_float(uint32_t bits) { return __uint_as_float(bits); }
inline uint32_t as_bits(float v) { return __float_as_uint(v); }
inline float exp2_fast(float x) { return exp2f(x); }

}  // namespace megakernel::dev
