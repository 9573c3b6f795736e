// The portable values of the device API where the threads of a group are the vector: a vector is one scalar.
#pragma once

namespace megakernel::dev {

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
MK_DEVICE Vf powers(const uint8_t* p, All) { return power(*p); }
MK_DEVICE int32_t rank_of(float v) {
  const int32_t i = __float_as_int(v);
  return i ^ ((i >> 31) & 0x7fffffff);
}
MK_DEVICE float exp(float x) { return expf(x); }
MK_DEVICE float log(float x) { return logf(x); }
MK_DEVICE float sqrt(float x) { return sqrtf(x); }
MK_DEVICE float tanh(float x) { return tanhf(x); }
MK_DEVICE float erf(float x) { return erff(x); }

// Two codes of 8-bit vectors as bfloat16, exactly: their bits moved to where those of bfloat16 are, then the difference of
// the biases, which is right for zero and for denormal codes too.
MK_DEVICE uint32_t wide_codes(uint32_t upper_bytes) {
  return multiply_pairs((upper_bytes >> 4 & 0x07f007f0u) | (upper_bytes & 0x80008000u), 0x7b807b80u);  // 2^120
}
MK_DEVICE uint32_t low_codes(uint32_t four) { return wide_codes(pick_bytes(four, 0x1404)); }
MK_DEVICE uint32_t high_codes(uint32_t four) { return wide_codes(pick_bytes(four, 0x3424)); }

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

}  // namespace megakernel::dev
