// Vectors of 8-bit floats: e4m3 codes and a power of two for all of them. The format is in tasks/f8.py. By bit arithmetic,
// the same on every device, and none of it needs numbers that are denormal in float32. Included where MK_DEVICE is known.
#pragma once

namespace megakernel::dev {

constexpr uint32_t kLeastPower = 10, kMostPower = 246, kNotFinite = 255;  // exponents of vectors
constexpr uint32_t kMostCode = 0x43e00000;                                // 448.0f
constexpr uint32_t kLeastNormal = 0x3c800000;                             // 2^-6, the smallest code that is not denormal

// Of a vector; `top`: the largest of its elements' bits without their signs.
MK_DEVICE uint32_t power_of(uint32_t top) {
  if (top >= 0x7f800000) return kNotFinite;
  const uint32_t exponent = (top + 0x17ffff) >> 23;  // one more from 464 on, which would not round to 448
  return exponent < kLeastPower + 8 ? kLeastPower : exponent > kMostPower + 8 ? kMostPower : exponent - 8;
}

// What codes are multiplied by.
MK_DEVICE float power(uint32_t exponent) {
  return __builtin_bit_cast(float, exponent << 23 | uint32_t(exponent == kNotFinite) << 22);
}
// What elements are multiplied by before they are rounded; 0: all codes are 0.
MK_DEVICE float inverse_power(uint32_t exponent) {
  return __builtin_bit_cast(float, exponent == kNotFinite ? 0 : (254 - exponent) << 23);
}

// The code of v, of a vector with that inverse power.
MK_DEVICE uint8_t to_f8(float v, float inverse) {
  if (inverse == 0.0f) return 0;
  const uint32_t bits = __builtin_bit_cast(uint32_t, v * inverse), sign = bits >> 24 & 0x80;
  const uint32_t whole = bits & 0x7fffffff, size = whole < kMostCode ? whole : kMostCode;
  if (size < kLeastNormal) {  // adding 2^14 rounds to a multiple of 2^-9
    return uint8_t(sign | (__builtin_bit_cast(uint32_t, __builtin_bit_cast(float, size) + 16384.0f) - 0x46800000));
  }
  return uint8_t(sign | ((size + 0x7ffff + (size >> 20 & 1) - 0x3c000000) >> 20));
}

// Of every code that `to_f8` gives, which are all but 0x7f and 0xff.
MK_DEVICE float of_f8(uint32_t code) {
  const uint32_t size = code & 0x7f, sign = (code & 0x80) << 24;
  const float least = __builtin_bit_cast(float, kLeastNormal);
  const float normal = __builtin_bit_cast(float, (size << 20) + 0x3c000000);
  const float small = __builtin_bit_cast(float, (size << 20) + kLeastNormal) - least;
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, size < 8 ? small : normal) | sign);
}

}  // namespace megakernel::dev
