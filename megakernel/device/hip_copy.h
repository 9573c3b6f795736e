// Copies from memory to a stage in LDS, and what waits for them: every instruction of it, each as one function.
//
// A copy is started by the copier waves, which do nothing else, and counted by the wave that started it:
//
//   gfx90a, gfx942, gfx950   buffer_load ... lds       vmcnt, with every other load and store of the wave: so the waves
//                                                      that compute, which wait for theirs all the time, do not copy
//   gfx1250                  tensor_load_to_lds        TENSORcnt, one instruction a unit
//                            global_load_async_to_lds  ASYNCcnt, for units too small to be worth a descriptor
//   gfx1100                  global_load, ds_store     registers hold the one unit that is on its way
//
// All of one counter end in the order in which they were started, as far as a wait can tell; nothing is known of the order
// between counters. DScnt counts reads and writes of LDS itself: a stage may be copied to again when it is 0 in every wave.
#pragma once
#include "megakernel/device/hip_isa.h"

namespace megakernel::dev {

constexpr uint32_t kStages = MEGAKERNEL_STAGES, kStageBytes = MEGAKERNEL_STAGE_BYTES;
constexpr uint32_t kCopyBytes = MEGAKERNEL_COPY_BYTES;
static_assert(kStages >= 3, "one stage is read, one is free, one is on its way");

template <class T, int kCount>
using Pack __attribute__((ext_vector_type(kCount))) = T;
using Vector = Pack<uint32_t, 4>;  // what one lane reads at once
using Stage = MK_SHARED_SPACE Vector;
using CodeVector = Pack<uint32_t, 2>;  // the same, of 8-bit codes

// ------------------------------------------------------------------------------------------------ LDS
// This wave's reads and writes of LDS are done.
MK_DEVICE void wait_lds() {
#if defined(__GFX12__)
  asm volatile("s_wait_dscnt 0x0" ::: "memory");
#elif defined(__AMDGCN__)
  asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
#else
  emulator::wait_lds();
#endif
}

MK_DEVICE Vector read_vector(const Stage* p) {
#if !defined(__AMDGCN__)
  emulator::read_lds((const void*)p);
#endif
  return *p;
}
MK_DEVICE Vector read_vector(const MK_MEMORY Vector* p) { return *p; }
MK_DEVICE CodeVector read_vector(const MK_MEMORY CodeVector* p) { return *p; }

MK_DEVICE uint32_t lds_address(const Stage* p) { return uint32_t(uint64_t(p)); }

// ------------------------------------------------------------------------------------------------ waits
// f.template operator()<n>() with the largest multiple n of kStep that is at most `most` and at most kTop.
template <uint32_t kTop, uint32_t kStep, class F>
MK_DEVICE void with_count(uint32_t most, F f) {
  if constexpr (kTop == 0) {
    f.template operator()<0>();
  } else {
    if (most >= kTop) return f.template operator()<kTop>();
    with_count<kTop - kStep, kStep>(most, f);
  }
}

// At most `most` of this wave's copies of a counter are still on their way. Waiting for more than is asked is correct.
MK_DEVICE void wait_loads(uint32_t most) {
#if __has_builtin(__builtin_amdgcn_global_load_async_to_lds_b128)
  with_count<56, 8>(most, []<uint32_t kMost>() { __builtin_amdgcn_s_wait_asynccnt(kMost); });
#elif defined(__AMDGCN__)
  with_count<60, 4>(most, []<uint32_t kMost>() { asm volatile("s_waitcnt vmcnt(%0)" ::"n"(kMost) : "memory"); });
#else
  with_count<60, 4>(most, []<uint32_t kMost>() { emulator::wait_loads(kMost); });
#endif
}

MK_DEVICE void wait_tensors(uint32_t most) {
#if __has_builtin(__builtin_amdgcn_s_wait_tensorcnt)
  with_count<kStages - 1, 1>(most, []<uint32_t kMost>() { __builtin_amdgcn_s_wait_tensorcnt(kMost); });
#endif
}

// None is on its way any more.
MK_DEVICE void wait_copies() {
#if __has_builtin(__builtin_amdgcn_global_load_async_to_lds_b128) && defined(__AMDGCN__)
  __builtin_amdgcn_s_wait_asynccnt(0);
  __builtin_amdgcn_s_wait_tensorcnt(0);
#elif defined(__AMDGCN__)
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#else
  emulator::wait_all();
#endif
}

// ------------------------------------------------------------------------------------------------ copies of one wave
// Where a lane's part of chunk c is: a chunk is what one instruction brings, and the copiers take them in turn.
constexpr uint32_t kChunk = kWave * (kCopyBytes ? kCopyBytes : 16);
constexpr uint32_t kTensorBytes = 4096;  // smaller units are copied by lanes

// What a copier has started since the launch, by counter. A mark is what it had started when a unit was complete.
struct Mark {
  uint32_t loads, tensors;
};

#if __has_builtin(__builtin_amdgcn_tensor_load_to_lds_d2) || __has_builtin(__builtin_amdgcn_tensor_load_to_lds)
constexpr bool kTensors = true;

// One row of `bytes / 4` elements of 4 bytes. The fields are those of the descriptor of a tensor of two dimensions: group
// 0 holds validity, LDS address, global address and type 2; group 1 the element's size, the tensor's and the tile's extents
// and the stride of a row. Not in a vendor's document yet: the same fields are set by LLVM's and Triton's gfx1250 code.
MK_DEVICE void tensor_copy(const Stage* stage, const void* from, uint32_t bytes) {
  const uint64_t address = uint64_t(from);
  const uint32_t words = uniform(bytes / 4);
  const Pack<int, 4> where = {1, int(uniform(lds_address(stage))), int(uniform(uint32_t(address))),
                              int(uniform(uint32_t(address >> 32)) & 0x01ffffff | 0x80000000u)};
  const Pack<int, 8> shape = {2 << 16, int(words << 16), int(words >> 16 | 1u << 16), int(words << 16), 1, int(words), 0, 0};
#if __has_builtin(__builtin_amdgcn_tensor_load_to_lds_d2)
  __builtin_amdgcn_tensor_load_to_lds_d2(where, shape, 0);
#else
  const Pack<int, 4> none = {0, 0, 0, 0};
  __builtin_amdgcn_tensor_load_to_lds(where, shape, none, none, Pack<int, 8>{0, 0, 0, 0, 0, 0, 0, 0}, 0);
#endif
}
#else
constexpr bool kTensors = false;
MK_DEVICE void tensor_copy(const Stage*, const void*, uint32_t) {}
#endif

// Lane l brings bytes [at + l * kCopyBytes, + kCopyBytes) of `from` to the same place of the stage.
MK_DEVICE void lane_copy(Stage* stage, const void* from, uint32_t at, uint32_t bytes) {
#if __has_builtin(__builtin_amdgcn_global_load_async_to_lds_b128)
  const uint32_t mine = (at + wave_lane() * 16) / 16;
  __builtin_amdgcn_global_load_async_to_lds_b128(
      (MK_MEMORY Pack<int, 4>*)from + mine, (MK_SHARED_SPACE Pack<int, 4>*)stage + mine, 0, 0);
#elif defined(__GFX9__)
  // M0 holds where the first lane writes; the buffer is the unit. No other code here uses M0, so it need not be kept. The
  // compiler does not look into assembly, so the wait states are here: 5 between a vector instruction that writes a scalar
  // register and a memory instruction that reads it, 1 between M0 and its use.
  const uint64_t address = uint64_t(from);
  const Vector buffer = {uniform(uint32_t(address)), uniform(uint32_t(address >> 32)), uniform(bytes), 0x00020000};
  const uint32_t to = uniform(lds_address(stage) + at), offset = uniform(at), mine = wave_lane() * kCopyBytes;
#if MEGAKERNEL_COPY_BYTES == 16
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 4\n\tbuffer_load_dwordx4 %1, %2, %3 offen nt lds" ::"s"(to), "v"(mine),
               "s"(buffer), "s"(offset) : "memory");
#elif defined(__gfx90a__)
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 4\n\tbuffer_load_dword %1, %2, %3 offen slc lds" ::"s"(to), "v"(mine),
               "s"(buffer), "s"(offset) : "memory");
#else
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 4\n\tbuffer_load_dword %1, %2, %3 offen nt lds" ::"s"(to), "v"(mine),
               "s"(buffer), "s"(offset) : "memory");
#endif
#elif !defined(__AMDGCN__)
  const uint32_t mine = at + wave_lane() * kCopyBytes;
  emulator::copy_load((char*)stage + mine, (const char*)from + mine, kCopyBytes);
#endif
}

// The copies of copier `index`. Called by whole waves.
struct Copies {
  Mark started{0, 0};

  // A part of `bytes` (whole chunks of every kind) from `from` to the stage; the copiers together start all of it.
  MK_DEVICE void start(Stage* stage, const void* from, uint32_t bytes, uint32_t index) {
    const uint32_t size = uniform(bytes);
    if (kTensors && size >= kTensorBytes) {
      if (index != 0) return;
      tensor_copy(stage, from, size);
      ++started.tensors;
      return;
    }
#pragma nounroll
    for (uint32_t at = index * kChunk; at < size; at += kCopiers * kChunk) {
      lane_copy(stage, from, at, size);
      ++started.loads;
    }
  }

  // Everything up to the mark is in LDS.
  MK_DEVICE void land(Mark mark) {
    wait_loads(uniform(started.loads - mark.loads));
    if constexpr (kTensors) wait_tensors(uniform(started.tensors - mark.tensors));
  }
  MK_DEVICE void land() { wait_copies(); }
  MK_DEVICE void drain() { wait_copies(); }
};

// Without asynchronous copies: what is on its way is in registers, and goes to its stage before the next unit starts.
struct HeldCopies {
  static constexpr uint32_t kHeld = kStageBytes / (kCopiers * kChunk);
  Mark started{0, 0};
  Vector held[kHeld];
  Stage* to = nullptr;
  uint32_t bytes = 0, index = 0;

  MK_DEVICE void start(Stage* stage, const void* from, uint32_t size, uint32_t copier) {
    land();
    to = stage, bytes = uniform(size), index = copier;
    const auto* mine = (const MK_MEMORY Vector*)from + wave_lane();
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) {
      const uint32_t at = (i * kCopiers + copier) * kChunk;
      if (at < bytes) held[i] = mine[at / 16];
    }
    ++started.loads;
  }

  MK_DEVICE void land(Mark mark) {
    if (mark.loads == started.loads) land();
  }
  MK_DEVICE void land() {
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) {
      const uint32_t at = (i * kCopiers + index) * kChunk;
      if (at < bytes) write_vector(to + at / 16 + wave_lane(), held[i]);
    }
    bytes = 0;
  }
  MK_DEVICE void drain() {
    bytes = 0;
    wait_lds();  // what has landed since the last meeting
  }

 private:
  MK_DEVICE static void write_vector(Stage* p, Vector v) {
#if defined(__AMDGCN__)
    *p = v;
#else
    emulator::write_lds((void*)p, &v, sizeof v);
#endif
  }
};

template <bool kAsync>
struct Choose {
  using Type = Copies;
};
template <>
struct Choose<false> {
  using Type = HeldCopies;
};
using ChosenCopies = Choose<kCopyBytes != 0>::Type;

}  // namespace megakernel::dev
