// dot_tile on matrix cores: 16 rows of x by 16 columns of a tile, bfloat16 operands, float32 sums.
//
// A tile of k x n: float32 [k][n]; 16-bit types [k / 2][n][2], pairs of c side by side, k even. A float32 number is split
// without error into three bfloat16 numbers of 8 bits each (a float16 weight into two), and the products of the pieces
// are summed: the result is as good as float32, whatever the type of the weights.
#pragma once
#include "megakernel/device/hip_isa.h"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ one instruction
// Lane l holds row (of x) or column (of the tile) l % 16. Element i of an operand is c = k_of(l, i), the same for both
// operands; element i of a result is row row_of(l, i), column l % 16.
template <class T, int kCount>
using Pack __attribute__((ext_vector_type(kCount))) = T;

#if __has_builtin(__builtin_amdgcn_mfma_f32_16x16x32_bf16)
struct Matrix {
  static constexpr uint32_t kStep = 32, kIn = 8, kOut = 4;
  using Operand = Pack<uint32_t, 4>;
  using Sums = Pack<float, 4>;
  static MK_DEVICE uint32_t k_of(uint32_t lane, uint32_t i) { return lane / 16 * 8 + i; }
  static MK_DEVICE uint32_t row_of(uint32_t lane, uint32_t i) { return lane / 16 * 4 + i; }
  static MK_DEVICE Sums multiply(Operand a, Operand b, Sums c) {
    using In = Pack<__bf16, 8>;
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(In, a), __builtin_bit_cast(In, b), c, 0, 0, 0);
  }
};
#elif __has_builtin(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k)
struct Matrix {
  static constexpr uint32_t kStep = 16, kIn = 4, kOut = 4;
  using Operand = Pack<uint32_t, 2>;
  using Sums = Pack<float, 4>;
  static MK_DEVICE uint32_t k_of(uint32_t lane, uint32_t i) { return lane / 16 * 4 + i; }
  static MK_DEVICE uint32_t row_of(uint32_t lane, uint32_t i) { return lane / 16 * 4 + i; }
  static MK_DEVICE Sums multiply(Operand a, Operand b, Sums c) {
    using In = Pack<short, 4>;
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(In, a), __builtin_bit_cast(In, b), c, 0, 0, 0);
  }
};
#elif __has_builtin(__builtin_amdgcn_wmma_f32_16x16x32_bf16)
struct Matrix {
  static constexpr uint32_t kStep = 32, kIn = 16, kOut = 8;
  using Operand = Pack<uint32_t, 8>;
  using Sums = Pack<float, 8>;
  static MK_DEVICE uint32_t k_of(uint32_t lane, uint32_t i) { return i / 8 * 16 + lane / 16 * 8 + i % 8; }
  static MK_DEVICE uint32_t row_of(uint32_t lane, uint32_t i) { return lane / 16 * 8 + i; }
  static MK_DEVICE Sums multiply(Operand a, Operand b, Sums c) {
    using In = Pack<__bf16, 16>;
    return __builtin_amdgcn_wmma_f32_16x16x32_bf16(
        false, __builtin_bit_cast(In, a), false, __builtin_bit_cast(In, b), 0, c, false, false);
  }
};
#elif __has_builtin(__builtin_amdgcn_wmma_f32_16x16x16_bf16_w32)
struct Matrix {  // both halves of a wave hold the same operands
  static constexpr uint32_t kStep = 16, kIn = 16, kOut = 8;
  using Operand = Pack<uint32_t, 8>;
  using Sums = Pack<float, 8>;
  static MK_DEVICE uint32_t k_of(uint32_t, uint32_t i) { return i; }
  static MK_DEVICE uint32_t row_of(uint32_t lane, uint32_t i) { return i * 2 + lane / 16; }
  static MK_DEVICE Sums multiply(Operand a, Operand b, Sums c) {
    using In = Pack<short, 16>;
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(In, a), __builtin_bit_cast(In, b), c);
  }
};
#else
#error "this target has no matrix instruction that megakernel knows; known: gfx90a, gfx942, gfx950, gfx1100, gfx1250"
#endif

// ------------------------------------------------------------------------------------------------ operands
constexpr int pieces_of(DType type) { return type == DType::kBf16 ? 1 : type == DType::kF16 ? 2 : 3; }

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

// Elements (c, j) and (c + 1, j) of a tile, c even.
template <DType kType, int kN>
MK_DEVICE void tile_pair(
    const MK_MEMORY uint32_t* tile, uint32_t c, uint32_t j, uint32_t (&out)[pieces_of(kType)]) {
  if constexpr (kType == DType::kF32) {
    split(float_of(tile[c * kN + j]), float_of(tile[(c + 1) * kN + j]), out);
  } else {
    const uint32_t pair = tile[c / 2 * kN + j];
    if constexpr (kType == DType::kF16) {
      split(half_to_float(uint16_t(pair)), half_to_float(uint16_t(pair >> 16)), out);
    } else {
      out[0] = pair;
    }
  }
}

template <DType kType, int kN>
MK_DEVICE uint32_t tile_index(uint32_t c, uint32_t j) {
  return kType == DType::kF32 ? c * kN + j : (c / 2 * kN + j) * 2 + c % 2;
}

// ------------------------------------------------------------------------------------------------ 16 x 16 sums of a wave
// Adds columns c to c + kStep of the products; columns from k on count as zero.
template <DType kType, int kN, bool kTail, class X>
MK_DEVICE Matrix::Sums dot_step(
    Matrix::Sums sums, const X* x, const MK_MEMORY uint32_t* tile, uint32_t lane, uint32_t column, uint32_t c,
    uint32_t k) {
  constexpr int kPieces = pieces_of(kType);
  Matrix::Operand a[3], b[kPieces];
#pragma unroll
  for (uint32_t i = 0; i < Matrix::kIn; i += 2) {
    const uint32_t at = c + Matrix::k_of(lane, i);
    const bool inside = !kTail || at < k;
    const uint32_t from = inside ? at : 0;
    uint32_t left[3], right[kPieces];
    split(inside ? x[from] : 0.0f, inside ? x[from + 1] : 0.0f, left);
    tile_pair<kType, kN>(tile, from, column, right);
#pragma unroll
    for (int p = 0; p < 3; ++p) a[p][i / 2] = left[p];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) b[p][i / 2] = inside ? right[p] : 0;
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
template <DType kType, int kN, uint32_t kParts, class X>
MK_DEVICE Matrix::Sums dot_block(
    const X* x, const MK_MEMORY uint32_t* tile, uint32_t lane, uint32_t column, uint32_t k, uint32_t part) {
  Matrix::Sums sums{};
  uint32_t c = part * Matrix::kStep;
#pragma nounroll
  for (; c + Matrix::kStep <= k; c += kParts * Matrix::kStep) {
    sums = dot_step<kType, kN, false>(sums, x, tile, lane, column, c, k);
  }
  if (c < k) sums = dot_step<kType, kN, true>(sums, x, tile, lane, column, c, k);
  return sums;
}

}  // namespace megakernel::dev
