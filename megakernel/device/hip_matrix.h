// dot_tile on matrix cores: 16 rows of x by 16 columns of a tile, bfloat16 operands, float32 sums.
//
// A tile of k x n with n a multiple of 16 is in the order of the operands: vectors of 16 bytes, each of consecutive c of
// one column, [k / kGroup][n][kGroup]; so 16 lanes read 16 vectors side by side. Of any other n: float32 [k][n]; 16-bit
// types [k / 2][n][2], k even; 8-bit codes [k / 4][n][4], their vectors of columns a multiple of 16 are 8 bytes. A float32 number is split without error into three bfloat16 numbers of 8 bits each (a
// float16 weight into two), and the products of the pieces are summed: the result is as good as float32, whatever the
// type of the weights.
#pragma once
#include "megakernel/device/hip_copy.h"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ one step
// Sums of 16 x 16 outputs take kStep columns c at a time, in octets of 8. Lane l holds row (of x) or column (of the
// tile) l % 16, of octets octet_of(l, 0 .. kOctets - 1), the same for both operands: which c an instruction calls its
// first does not matter. Element i of a result is row row_of(l, i), column l % 16.
using Octet = Vector;  // 8 bfloat16
MK_DEVICE Pack<uint32_t, 8> both(const Octet (&v)[2]) { return __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 4, 5, 6, 7); }

#if __has_builtin(__builtin_amdgcn_mfma_f32_16x16x32_bf16)
struct Matrix {  // lane l: 8 c from l / 16 * 8
  static constexpr uint32_t kStep = 32, kOctets = 1, kOut = 4;
  using Sums = Pack<float, 4>;
  static MK_DEVICE uint32_t octet_of(uint32_t lane, uint32_t) { return lane / 16; }
  static MK_DEVICE uint32_t row_of(uint32_t lane, uint32_t i) { return lane / 16 * 4 + i; }
  static MK_DEVICE Sums multiply(const Octet (&a)[1], const Octet (&b)[1], Sums c) {
    using In = Pack<__bf16, 8>;
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(
        __builtin_bit_cast(In, a[0]), __builtin_bit_cast(In, b[0]), c, 0, 0, 0);
  }
};
#elif __has_builtin(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k)
struct Matrix {  // lane l: 4 c from l / 16 * 4 of each of two steps, which are the halves of its octet
  static constexpr uint32_t kStep = 32, kOctets = 1, kOut = 4;
  using Sums = Pack<float, 4>;
  static MK_DEVICE uint32_t octet_of(uint32_t lane, uint32_t) { return lane / 16; }
  static MK_DEVICE uint32_t row_of(uint32_t lane, uint32_t i) { return lane / 16 * 4 + i; }
  static MK_DEVICE Sums multiply(const Octet (&a)[1], const Octet (&b)[1], Sums c) {
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(half<0>(a[0]), half<0>(b[0]), c, 0, 0, 0);
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(half<1>(a[0]), half<1>(b[0]), c, 0, 0, 0);
  }

 private:
  template <int kWhich>
  static MK_DEVICE Pack<short, 4> half(Octet v) {  // a swizzle in __builtin_bit_cast would give the first half twice
    const Pack<uint32_t, 2> out = __builtin_shufflevector(v, v, kWhich * 2, kWhich * 2 + 1);
    return __builtin_bit_cast(Pack<short, 4>, out);
  }
};
#elif __has_builtin(__builtin_amdgcn_wmma_f32_16x16x32_bf16)
struct Matrix {  // lane l: 8 c from l / 16 * 8 and 8 from 16 + l / 16 * 8
  static constexpr uint32_t kStep = 32, kOctets = 2, kOut = 8;
  using Sums = Pack<float, 8>;
  static MK_DEVICE uint32_t octet_of(uint32_t lane, uint32_t i) { return i * 2 + lane / 16; }
  static MK_DEVICE uint32_t row_of(uint32_t lane, uint32_t i) { return lane / 16 * 8 + i; }
  static MK_DEVICE Sums multiply(const Octet (&a)[2], const Octet (&b)[2], Sums c) {
    using In = Pack<__bf16, 16>;
    return __builtin_amdgcn_wmma_f32_16x16x32_bf16(
        false, __builtin_bit_cast(In, both(a)), false, __builtin_bit_cast(In, both(b)), 0, c, false, false);
  }
};
#elif __has_builtin(__builtin_amdgcn_wmma_f32_16x16x16_bf16_w32)
struct Matrix {  // every lane: all 16 c; both halves of a wave hold the same operands
  static constexpr uint32_t kStep = 16, kOctets = 2, kOut = 8;
  using Sums = Pack<float, 8>;
  static MK_DEVICE uint32_t octet_of(uint32_t, uint32_t i) { return i; }
  static MK_DEVICE uint32_t row_of(uint32_t lane, uint32_t i) { return i * 2 + lane / 16; }
  static MK_DEVICE Sums multiply(const Octet (&a)[2], const Octet (&b)[2], Sums c) {
    using In = Pack<short, 16>;
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(
        __builtin_bit_cast(In, both(a)), __builtin_bit_cast(In, both(b)), c);
  }
};
#else
#error "this target has no matrix instruction that megakernel knows; known: gfx90a, gfx942, gfx950, gfx1100, gfx1250"
#endif

// ------------------------------------------------------------------------------------------------ operands
using Floats = Pack<float, 4>;

constexpr int pieces_of(DType type) { return type == DType::kF32 ? 3 : type == DType::kF16 ? 2 : 1; }
constexpr uint32_t group_of(DType type) { return type == DType::kF32 ? 4 : 8; }  // elements of a vector

template <DType kType, int kN>
MK_DEVICE uint32_t tile_index(uint32_t c, uint32_t j) {
  constexpr uint32_t kGroup = kN % 16 == 0 ? group_of(kType) : 4 / bytes_of(kType);
  return (c / kGroup * kN + j) * kGroup + c % kGroup;
}

// Two floats as pairs of bfloat16, the largest piece first, `a` in the low halves. Nothing is lost: each piece takes the
// upper 8 bits of what is left.
template <int kPieces>
MK_DEVICE void split(float a, float b, uint32_t (&out)[kPieces]) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const uint32_t low = bits_of(a) & 0xffff0000, high = bits_of(b) & 0xffff0000;
    out[piece] = low >> 16 | high;
    a -= float_of(low);
    b -= float_of(high);
  }
}

MK_DEVICE Floats read_floats(const MK_SHARED_SPACE Floats* p) { return *p; }
MK_DEVICE Floats read_floats(const MK_MEMORY Floats* p) { return *p; }
MK_DEVICE Floats floats_of(const MK_MEMORY Vector* p) { return __builtin_bit_cast(Floats, read_vector(p)); }
MK_DEVICE Floats floats_of(const Stage* p) { return __builtin_bit_cast(Floats, read_vector(p)); }

// Eight floats as octets of bfloat16.
template <int kPieces, uint32_t kWhich>
MK_DEVICE void split_octet(Floats low, Floats high, Octet (&out)[kPieces][kWhich], uint32_t which) {
#pragma unroll
  for (uint32_t pair = 0; pair < 4; ++pair) {
    uint32_t piece[kPieces];
    if (pair < 2) {
      split(low[pair * 2], low[pair * 2 + 1], piece);
    } else {
      split(high[pair * 2 - 4], high[pair * 2 - 3], piece);
    }
#pragma unroll
    for (int p = 0; p < kPieces; ++p) out[p][which][pair] = piece[p];
  }
}

// The octet from c of `column`. Vectors from c = k on are not read.
template <DType kType, int kN, uint32_t kWhich, class Tile>
MK_DEVICE void tile_octet(
    const Tile* tile, uint32_t c, uint32_t column, uint32_t k, Octet (&out)[pieces_of(kType)][kWhich], uint32_t which) {
  constexpr uint32_t kGroup = group_of(kType);
  const Tile* at = tile + c / kGroup * kN + column;
  if constexpr (kType == DType::kF32) {
    const Floats none = {0.0f, 0.0f, 0.0f, 0.0f};
    split_octet(c < k ? floats_of(at) : none, c + 4 < k ? floats_of(at + kN) : none, out, which);
  } else if constexpr (kType == DType::kF8) {
    const CodeVector v = c < k ? read_vector(at) : CodeVector{0, 0};
#pragma unroll
    for (uint32_t pair = 0; pair < 4; ++pair) {
      const uint32_t two = v[pair / 2] >> pair % 2 * 16;
      out[0][which][pair] = bits_of(of_f8(two & 0xff)) >> 16 | bits_of(of_f8(two >> 8 & 0xff));
    }
  } else {
    const Vector v = c < k ? read_vector(at) : Vector{0, 0, 0, 0};
    if constexpr (kType == DType::kBf16) {
      out[0][which] = v;
    } else {
      float f[8];
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) f[i] = half_to_float(uint16_t(v[i / 2] >> i % 2 * 16));
      split_octet(Floats{f[0], f[1], f[2], f[3]}, Floats{f[4], f[5], f[6], f[7]}, out, which);
    }
  }
}

// ------------------------------------------------------------------------------------------------ 16 x 16 sums of a wave
// Adds columns c to c + kStep of the products; columns from k on, which is even, count as zero whatever is stored there.
template <DType kType, int kN, bool kTail, class X, class Tile>
MK_DEVICE Matrix::Sums dot_step(
    Matrix::Sums sums, const X* x, const Tile* tile, uint32_t lane, uint32_t column, uint32_t c, uint32_t k) {
  constexpr int kPieces = pieces_of(kType);
  constexpr uint32_t kOctets = Matrix::kOctets;
  const uint32_t end = kTail ? k : ~0u;
  Octet a[3][kOctets], b[kPieces][kOctets];
#pragma unroll
  for (uint32_t i = 0; i < kOctets; ++i) {
    const uint32_t at = c + Matrix::octet_of(lane, i) * 8;
    const Floats none = {0.0f, 0.0f, 0.0f, 0.0f};
    split_octet(at < end ? read_floats(x + at / 4) : none, at + 4 < end ? read_floats(x + at / 4 + 1) : none, a, i);
    tile_octet<kType, kN>(tile, at, column, end, b, i);
    if constexpr (kTail) {
#pragma unroll
      for (uint32_t pair = 0; pair < 4; ++pair) {
        const bool inside = at + pair * 2 < k;
#pragma unroll
        for (int p = 0; p < 3; ++p) a[p][i][pair] = inside ? a[p][i][pair] : 0;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) b[p][i][pair] = inside ? b[p][i][pair] : 0;
      }
    }
  }
#pragma unroll
  for (int p = 0; p < 3; ++p) {
#pragma unroll
    for (int q = 0; q < kPieces; ++q) {
      if (p + q < 3) sums = Matrix::multiply(a[p], b[q], sums);  // the rest is below 2^-24
    }
  }
  return sums;
}

// Steps part, part + kParts, ... of a row of x by 16 columns of the tile.
template <DType kType, int kN, uint32_t kParts, class X, class Tile>
MK_DEVICE Matrix::Sums dot_block(
    const X* x, const Tile* tile, uint32_t lane, uint32_t column, uint32_t k, uint32_t part) {
  constexpr uint32_t kStep = Matrix::kStep;
  Matrix::Sums sums{};
  uint32_t c = part * kStep;
#pragma nounroll
  for (; c + kStep <= k; c += kParts * kStep) sums = dot_step<kType, kN, false>(sums, x, tile, lane, column, c, k);
  if (c < k) sums = dot_step<kType, kN, true>(sums, x, tile, lane, column, c, k);
  return sums;
}

}  // namespace megakernel::dev
