// dot_tile on a CPU: columns of the tile are vector elements, so no sum ever crosses elements.
//
// A tile of k x n: float32 [k][n]; 16-bit types [k / 2][n][2], pairs of c side by side, k even; 8-bit codes [k / 4][n][4],
// k a multiple of 4. Each output is a sum of
// chains of kChain multiply-adds, c ascending in each and from chain to chain: one long chain would round more often on
// its way than the sums of others do. How many rows and columns share a pass changes speed only.
#pragma once
#include "megakernel/device/cpu_vector.h"

namespace megakernel::dev {

template <DType kType, int kN>
MK_INLINE uint32_t tile_index(uint32_t c, uint32_t j) {
  constexpr uint32_t kStack = 4 / bytes_of(kType);
  return (c / kStack * kN + j) * kStack + c % kStack;
}

#if defined(__AVX512F__)
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif
// Bytes ahead of the weights being read; measured. Float32 streams are left to the hardware.
template <DType kType>
constexpr int kPrefetchBytes = kType == DType::kF32 ? 0 : 1024;

constexpr uint32_t kChain = 128;  // multiply-adds

// One chain of kRows x (kColumns vectors) outputs, columns [c, end). kFirst: the weights come from memory, not from a pass
// before.
template <DType kType, int kN, int kLanes, int kRows, int kColumns, bool kFirst>
MK_INLINE const char* dot_chain(float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const char* tile, uint32_t c,
                                uint32_t end, bool accumulate) {
  using F = Vector<float, kLanes>;
  using I = Vector<int32_t, kLanes>;
  F acc[kRows][kColumns] = {};
  constexpr uint32_t kStep = 4 / bytes_of(kType);
  for (; c < end; c += kStep, tile += kN * 4) {
    if constexpr (kFirst && kPrefetchBytes<kType> > 0) {
      const char* ahead = tile + kPrefetchBytes<kType>;
      for (int line = 0; line < kColumns * kLanes * 4; line += 64) __builtin_prefetch(ahead + line);
    }
    for (int j = 0; j < kColumns; ++j) {
      if constexpr (kType == DType::kF32) {
        const F w = load_whole<F>(tile + j * kLanes * 4);
        for (int r = 0; r < kRows; ++r) acc[r][j] += w * x[r * ld_x + c];
      } else if constexpr (kType == DType::kF8) {
        const I four = load_whole<I>(tile + j * kLanes * 4);
        for (uint32_t s = 0; s < kStep; ++s) {
          const F w = widen_high<kType, F>(four << int32_t(24 - 8 * s));
          for (int r = 0; r < kRows; ++r) acc[r][j] += w * x[r * ld_x + c + s];
        }
      } else {
        const I pair = load_whole<I>(tile + j * kLanes * 4);
        const F even = widen_high<kType, F>(pair << 16), odd = widen_high<kType, F>(pair);
        for (int r = 0; r < kRows; ++r) acc[r][j] += even * x[r * ld_x + c];
        for (int r = 0; r < kRows; ++r) acc[r][j] += odd * x[r * ld_x + c + 1];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kColumns; ++j) {
      float* to = out + r * ld_out + j * kLanes;
      if (accumulate) acc[r][j] += load_whole<F>(to);
      __builtin_memcpy(to, &acc[r][j], sizeof(F));
    }
  }
  return tile;
}

// All chains of those outputs.
template <DType kType, int kN, int kLanes, int kRows, int kColumns, bool kFirst>
MK_INLINE void dot_block(float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const char* tile, uint32_t k,
                         bool accumulate) {
  for (uint32_t c = 0; c < k; c += kChain) {
    const uint32_t end = k - c < kChain ? k : c + kChain;
    tile = dot_chain<kType, kN, kLanes, kRows, kColumns, kFirst>(out, ld_out, x, ld_x, tile, c, end, accumulate || c);
  }
}

// All rows of a few vectors of columns: threes, and twos where threes would leave a single row.
template <DType kType, int kN, int kLanes, int kColumns>
MK_INLINE void dot_rows(float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const char* tile, uint32_t rows,
                        uint32_t k, bool accumulate) {
  if (rows == 1) return dot_block<kType, kN, kLanes, 1, kColumns, true>(out, ld_out, x, ld_x, tile, k, accumulate);
  if (rows == 2) return dot_block<kType, kN, kLanes, 2, kColumns, true>(out, ld_out, x, ld_x, tile, k, accumulate);
  uint32_t r = rows == 4 ? 2 : 3;
  if (rows == 4) {
    dot_block<kType, kN, kLanes, 2, kColumns, true>(out, ld_out, x, ld_x, tile, k, accumulate);
  } else {
    dot_block<kType, kN, kLanes, 3, kColumns, true>(out, ld_out, x, ld_x, tile, k, accumulate);
  }
  while (r < rows) {
    const uint32_t left = rows - r;
    float* to = out + r * ld_out;
    const float* from = x + r * ld_x;
    if (left == 2 || left == 4) {
      dot_block<kType, kN, kLanes, 2, kColumns, false>(to, ld_out, from, ld_x, tile, k, accumulate);
      r += 2;
    } else {
      dot_block<kType, kN, kLanes, 3, kColumns, false>(to, ld_out, from, ld_x, tile, k, accumulate);
      r += 3;
    }
  }
}

// Many rows of a float32 tile: blocks of more rows and fewer columns, as many as the registers hold; measured.
template <int kN, int kLanes>
MK_INLINE void dot_many(float* out, uint32_t ld_out, const float* x, uint32_t ld_x, const char* tile, uint32_t rows,
                        uint32_t k, bool accumulate) {
  constexpr DType kF32 = DType::kF32;
  constexpr int kRows = kWide == 16 ? 8 : 5, kVectors = kN / kLanes;
  uint32_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    for (int j = 0; j < kVectors; j += 2) {
      dot_block<kF32, kN, kLanes, kRows, 2, false>(out + r * ld_out + j * kLanes, ld_out, x + r * ld_x, ld_x,
                                                   tile + j * kLanes * 4, k, accumulate);
    }
  }
  if (r == rows) return;
  for (int j = 0; j < kVectors; j += 2) {
    dot_rows<kF32, kN, kLanes, 2>(out + r * ld_out + j * kLanes, ld_out, x + r * ld_x, ld_x, tile + j * kLanes * 4,
                                  rows - r, k, accumulate);
  }
}

constexpr uint32_t kManyRows = 24;

// A tile of smaller numbers as float32, exactly.
template <DType kType, int kN, int kLanes>
MK_INLINE void widen_tile(float* out, const char* tile, uint32_t k) {
  using F = Vector<float, kLanes>;
  using I = Vector<int32_t, kLanes>;
  constexpr uint32_t kStep = 4 / bytes_of(kType), kBits = 8 * bytes_of(kType);
  for (uint32_t c = 0; c < k; c += kStep, tile += kN * 4) {
    for (int line = 0; line < kN * 4; line += 64) __builtin_prefetch(tile + 2048 + line);
    for (int j = 0; j < kN / kLanes; ++j) {
      const I word = load_whole<I>(tile + j * kLanes * 4);
      for (uint32_t s = 0; s < kStep; ++s) {
        const F v = widen_high<kType, F>(word << int32_t(32 - kBits * (s + 1)));
        __builtin_memcpy(out + uint64_t(c + s) * kN + j * kLanes, &v, sizeof v);
      }
    }
  }
}

template <DType kType, int kN, class W>
__attribute__((noinline)) void dot_tile(W& worker, float* out, uint32_t ld_out, const float* x, uint32_t ld_x,
                                        const void* stage, uint32_t rows, uint32_t k, bool accumulate) {
  static_assert(kN % kWidth == 0, "a tile has whole vectors of columns");
  constexpr int kLanes = kN % kWide == 0 ? kWide : kWidth;
  constexpr int kVectors = kN / kLanes;
  const char* tile = static_cast<const char*>(stage);
  if (rows == 0) return;
  if constexpr (kVectors % 2 == 0) {
    if (rows >= kManyRows) {
      if constexpr (kType != DType::kF32) {
        float* wide = worker.wide(uint64_t(k) * kN);
        widen_tile<kType, kN, kLanes>(wide, tile, k);
        tile = reinterpret_cast<const char*>(wide);
      }
      return dot_many<kN, kLanes>(out, ld_out, x, ld_x, tile, rows, k, accumulate);
    }
  }
  for (int j = 0; j + 4 <= kVectors; j += 4) {
    dot_rows<kType, kN, kLanes, 4>(out + j * kLanes, ld_out, x, ld_x, tile + j * kLanes * 4, rows, k, accumulate);
  }
  if constexpr (constexpr int kLeft = kVectors % 4; kLeft != 0) {
    constexpr int kDone = (kVectors - kLeft) * kLanes;
    dot_rows<kType, kN, kLanes, kLeft>(out + kDone, ld_out, x, ld_x, tile + kDone * 4, rows, k, accumulate);
  }
}

}  // namespace megakernel::dev
