// dot_tile on a CPU: columns of the tile are vector elements, so no sum ever crosses elements.
//
// A tile of k x n: float32 [k][n]; 16-bit types [k / 2][n][2], pairs of c side by side, k even. Each output is one chain
// of multiply-adds with c ascending. How many rows and columns share a pass changes speed only.
#pragma once
#include "megakernel/device/cpu_vector.h"

namespace megakernel::dev {

template <DType kType, int kN>
MK_INLINE uint32_t tile_index(uint32_t c, uint32_t j) {
  return kType == DType::kF32 ? c * kN + j : (c / 2 * kN + j) * 2 + c % 2;
}

#if defined(__AVX512F__)
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif
constexpr int kPrefetchBytes = 2048;  // ahead of the weights being read

// kRows x (kColumns vectors) outputs.
template <DType kType, int kN, int kLanes, int kRows, int kColumns>
MK_INLINE void dot_block(float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const char* tile, uint32_t k,
                         bool accumulate) {
  using F = Vector<float, kLanes>;
  using I = Vector<int32_t, kLanes>;
  F acc[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kColumns; ++j) acc[r][j] = accumulate ? load_whole<F>(out + r * ld_out + j * kLanes) : F{};
  }
  constexpr uint32_t kStep = kType == DType::kF32 ? 1 : 2;
  for (uint32_t c = 0; c < k; c += kStep, tile += kN * 4) {
    if constexpr (kRows == 1) {
      for (int line = 0; line < kColumns * kLanes * 4; line += 64) __builtin_prefetch(tile + kPrefetchBytes + line);
    }
    for (int j = 0; j < kColumns; ++j) {
      if constexpr (kType == DType::kF32) {
        const F w = load_whole<F>(tile + j * kLanes * 4);
        for (int r = 0; r < kRows; ++r) acc[r][j] += w * x[r * ld_x + c];
      } else {
        const I pair = load_whole<I>(tile + j * kLanes * 4);
        const F even = widen_high<kType, F>(pair << 16), odd = widen_high<kType, F>(pair);
        for (int r = 0; r < kRows; ++r) acc[r][j] += even * x[r * ld_x + c];
        for (int r = 0; r < kRows; ++r) acc[r][j] += odd * x[r * ld_x + c + 1];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kColumns; ++j) __builtin_memcpy(out + r * ld_out + j * kLanes, &acc[r][j], sizeof(F));
  }
}

// All columns from `column` on, at most kColumns vectors a pass.
template <DType kType, int kN, int kLanes, int kRows, int kColumns>
MK_INLINE void dot_columns(float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const char* tile, uint32_t k,
                           bool accumulate) {
  constexpr int kVectors = kN / kLanes;
  int j = 0;
  for (; j + kColumns <= kVectors; j += kColumns) {
    dot_block<kType, kN, kLanes, kRows, kColumns>(out + j * kLanes, ld_out, x, ld_x, tile + j * kLanes * 4, k, accumulate);
  }
  if constexpr (kVectors % kColumns != 0) {
    for (; j < kVectors; ++j) {
      dot_block<kType, kN, kLanes, kRows, 1>(out + j * kLanes, ld_out, x, ld_x, tile + j * kLanes * 4, k, accumulate);
    }
  }
}

template <DType kType, int kN, class W>
__attribute__((noinline)) void dot_tile(W&, float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const void* stage,
                                        uint32_t rows, uint32_t k, bool accumulate) {
  static_assert(kN % kWidth == 0, "a tile has whole vectors of columns");
  constexpr int kLanes = kN % kWide == 0 ? kWide : kWidth;
  constexpr int kVectors = kN / kLanes, kFew = kVectors < 4 ? kVectors : 4;
  const char* tile = static_cast<const char*>(stage);
  if (rows == 1) return dot_columns<kType, kN, kLanes, 1, kFew>(out, ld_out, x, ld_x, tile, k, accumulate);
  if (rows == 2) return dot_columns<kType, kN, kLanes, 2, kFew>(out, ld_out, x, ld_x, tile, k, accumulate);
  // Two vectors of columns stay in the cache while all rows pass over them.
  constexpr int kPair = kVectors % 2 == 0 ? 2 : 1;
  for (int j = 0; j < kVectors; j += kPair) {
    float* to = out + j * kLanes;
    const char* from = tile + j * kLanes * 4;
    uint32_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      dot_block<kType, kN, kLanes, 4, kPair>(to + r * ld_out, ld_out, x + r * ld_x, ld_x, from, k, accumulate);
    }
    const uint32_t left = rows - r;
    to += r * ld_out;
    const float* rest = x + r * ld_x;
    if (left == 3) dot_block<kType, kN, kLanes, 3, kPair>(to, ld_out, rest, ld_x, from, k, accumulate);
    if (left == 2) dot_block<kType, kN, kLanes, 2, kPair>(to, ld_out, rest, ld_x, from, k, accumulate);
    if (left == 1) dot_block<kType, kN, kLanes, 1, kPair>(to, ld_out, rest, ld_x, from, k, accumulate);
  }
}

}  // namespace megakernel::dev
