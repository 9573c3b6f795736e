// The vector half of the device API on a CPU: compiler vectors of 8 floats, lowered to whatever the target has.
#pragma once
#include "megakernel/device/types.cuh"

#define MK_DEVICE inline
#define MK_INLINE inline __attribute__((always_inline))

#include "megakernel/device/f8.cuh"

namespace megakernel::dev {

constexpr int kWidth = 8;
template <class T, int kCount>
using Vector __attribute__((vector_size(sizeof(T) * kCount))) = T;
using Vf = Vector<float, kWidth>;
using Vi = Vector<int32_t, kWidth>;
using Vu = Vector<uint32_t, kWidth>;

// How many elements of a vector are meant: all, or the first `count`.
struct All {};
struct Some {
  uint32_t count;
};

MK_INLINE Vf splat(float v) { return Vf{} + v; }
MK_INLINE Vi splat(int32_t v) { return Vi{} + v; }
MK_INLINE Vi iota(uint32_t first) { return Vi{0, 1, 2, 3, 4, 5, 6, 7} + int32_t(first); }
MK_INLINE Vi as_vi(Vf v) { return (Vi)v; }
MK_INLINE Vf as_vf(Vi v) { return (Vf)v; }
MK_INLINE Vf to_vf(Vi v) { return __builtin_convertvector(v, Vf); }
MK_INLINE Vf select(Vi mask, Vf a, Vf b) { return mask ? a : b; }
MK_INLINE Vi select(Vi mask, Vi a, Vi b) { return mask ? a : b; }
MK_INLINE Vf max(Vf a, Vf b) { return a > b ? a : b; }
MK_INLINE float max(float a, float b) { return a > b ? a : b; }

template <class V>
MK_INLINE V load_whole(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

MK_INLINE Vf load(const float* p, All) { return load_whole<Vf>(p); }
MK_INLINE Vf load(const float* p, Some part) {
  Vf v{};
  for (uint32_t i = 0; i < part.count; ++i) v[i] = p[i];
  return v;
}
MK_INLINE void store(float* p, Vf v, All) { __builtin_memcpy(p, &v, sizeof v); }
MK_INLINE void store(float* p, Vf v, Some part) {
  for (uint32_t i = 0; i < part.count; ++i) p[i] = v[i];
}
MK_INLINE Vf where(All, Vf v, float) { return v; }
MK_INLINE Vf where(Some part, Vf v, float fill) { return iota(0) < int32_t(part.count) ? v : splat(fill); }

MK_INLINE Vi load_u16(const uint16_t* p, All) {
  return __builtin_convertvector(load_whole<Vector<uint16_t, kWidth>>(p), Vi);
}
MK_INLINE Vi load_u16(const uint16_t* p, Some part) {
  Vi v{};
  for (uint32_t i = 0; i < part.count; ++i) v[i] = p[i];
  return v;
}

// Integers in the order of the floats.
MK_INLINE int32_t rank_of(float v) {
  const int32_t i = __builtin_bit_cast(int32_t, v);
  return i ^ ((i >> 31) & 0x7fffffff);
}

// exp with about one unit in the last place: 2^n times a polynomial (coefficients of the Cephes library's expf).
MK_INLINE Vf exp(Vf x) {
  constexpr float kRound = 12582912.0f;  // adding it rounds to an integer
  const Vf clamped = x > 88.3f ? splat(88.3f) : x;
  const Vf shifted = clamped * 1.44269504088896341f + kRound;
  const Vf n = shifted - kRound;
  const Vf r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Vi scale = (as_vi(shifted) - __builtin_bit_cast(int32_t, kRound) + 127) << 23;
  return x < -87.3f ? splat(0.0f) : p * as_vf(scale);
}

MK_INLINE float exp(float x) { return exp(splat(x))[0]; }
MK_INLINE float log(float x) { return __builtin_logf(x); }
MK_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
MK_INLINE Vf tanh(Vf x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }
MK_INLINE Vf erf(Vf x) {
  for (int i = 0; i < kWidth; ++i) x[i] = __builtin_erff(x[i]);
  return x;
}

// Floats of 16 or 8 bits in 32-bit elements, the number in the highest bits and anything below it.
template <DType kType, class F, class I>
MK_INLINE F widen_high(I bits) {
  if constexpr (kType == DType::kBf16) return (F)(bits & int32_t(0xffff0000));
  // The exponent moves by 4 bits and its bias by 120; right for zero and for denormal numbers too.
  if constexpr (kType == DType::kF8) {
    return (F)((bits & int32_t(0x80000000)) | ((bits >> 4) & int32_t(0x07f00000))) * 1.329227995784916e36f;
  }
  // The exponent moves by 3 bits and its bias by 112; right for zero and for denormal numbers too.
  return (F)((bits >> 3) & int32_t(0x8fffe000)) * 5.192296858534828e33f;
}

template <DType kType>
MK_INLINE Vf load_as(const void* p, uint32_t index, All part) {
  if constexpr (kType == DType::kF32) return load(static_cast<const float*>(p) + index, part);
  return widen_high<kType, Vf>(load_u16(static_cast<const uint16_t*>(p) + index, part) << 16);
}
template <DType kType>
MK_INLINE Vf load_as(const void* p, uint32_t index, Some part) {
  if constexpr (kType == DType::kF32) return load(static_cast<const float*>(p) + index, part);
  return widen_high<kType, Vf>(load_u16(static_cast<const uint16_t*>(p) + index, part) << 16);
}

// Powers of two of 8-bit vectors, from their exponents.
MK_INLINE Vf powers(const uint8_t* p, All) {
  const Vi e = __builtin_convertvector(load_whole<Vector<uint8_t, kWidth>>(p), Vi);
  return as_vf(e << 23 | ((e == int32_t(kNotFinite)) & (1 << 22)));
}
MK_INLINE Vf powers(const uint8_t* p, Some part) {
  Vf v{};
  for (uint32_t i = 0; i < part.count; ++i) v[i] = power(p[i]);
  return v;
}

MK_INLINE uint16_t to_bf16(float v) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;  // not a number stays one
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

MK_INLINE uint16_t to_f16(float v) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to more than 65504
  if (size < 0x38800000) {  // denormal: adding 0.5 rounds to a multiple of 2^-24
    return uint16_t(sign | (__builtin_bit_cast(uint32_t, __builtin_bit_cast(float, size) + 0.5f) - 0x3f000000));
  }
  return uint16_t(sign | ((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13));
}

template <DType kType>
MK_INLINE void put(void* p, uint32_t index, float v) {
  if constexpr (kType == DType::kF32) static_cast<float*>(p)[index] = v;
  if constexpr (kType == DType::kBf16) static_cast<uint16_t*>(p)[index] = to_bf16(v);
  if constexpr (kType == DType::kF16) static_cast<uint16_t*>(p)[index] = to_f16(v);
}

}  // namespace megakernel::dev
