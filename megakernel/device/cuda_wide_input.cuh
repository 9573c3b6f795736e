// The input of a wide product, packed by the loaders. Part of cuda_wide.cuh.
#pragma once

namespace megakernel::dev {

// One share of one row: its octets in the type of the weights, times gamma, and its sum of squares, both as in a narrow
// step.
template <bool kHalf, bool kNorm>
struct SharePacker {
  static constexpr uint32_t kRounds = kNorm ? 2 : 4;  // octets of a lane on their way
  Worker& w;
  const MatrixFields& f;
  const PackedInput& to;
  const float *x, *gamma;
  uint32_t row, share, first, count;  // the share's first chunk, its chunks

  MK_DEVICE void run() {
    float squares = 0.0f;
    const uint32_t total = f.units * count * 4;
#pragma unroll 1
    for (uint32_t base = 0; base < total; base += 32 * kRounds) squares = pack(base, total, squares);
    if constexpr (kNorm) {
      squares += __shfl_xor_sync(0xffffffffu, squares, 1);
      squares += __shfl_xor_sync(0xffffffffu, squares, 2);
      if (w.warp_lane() == 0) to.squares(row)[share] = squares;
    }
  }

  MK_DEVICE void fetch(Octet& octet, const float* p, uint32_t column) const {
    octet.zero();
    if (f.k % 8 != 0) {
      octet = fetch_odd(p, column, f.k);
    } else if (column < f.k) {
      octet.fetch(p + column);
    }
  }

  MK_DEVICE float pack(uint32_t base, uint32_t total, float squares) const {
    Octet octet[kRounds], scale[kNorm ? kRounds : 1];
    uint32_t column[kRounds];
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
      const uint32_t o = base + i * 32 + w.warp_lane(), q = o / 4;
      const uint32_t unit = count == kMaxChunks ? q / kMaxChunks : q / count, chunk = q - unit * count;
      column[i] = o < total ? unit * f.k_unit + (first + chunk) * 32 + o % 4 * 8 : f.k;
      if constexpr (kNorm) fetch(scale[i], gamma, column[i]);
      fetch(octet[i], x, column[i]);
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kRounds; ++i) missing |= octet[i].missing();
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kRounds; ++i) {
        if (octet[i].missing()) fetch(octet[i], x, column[i]);
      }
      return false;
    }, abi::FaultKind::kValueBudget, row);
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
      const uint32_t begin = base + i * 32, o = begin + w.warp_lane();
      if (begin >= total) continue;
      float v[8];
      octet[i].values(v);
      if constexpr (kNorm) {
        add_squares(squares, sum_of_squares(v));
        multiply_gamma(v, scale[i]);
      }
      if (o < total) {
        *reinterpret_cast<Quad*>(to.chunk(first * f.units + o / 4) + row * 64 + o % 4 * 16) = packed<kHalf>(v);
      }
    }
    return squares;
  }
};

// All four loaders: the worker's part of the (row, share) of a product's input.
template <bool kHalf, bool kNorm>
__device__ __noinline__ void pack_rows(MatrixFlags flags) {
  Loader l;
  l.load();
  Worker& w = l.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const PackedInput to(w, f, flags.sampled());
  const uint32_t parts = matrix_rows(w, flags.sampled()) * kConsumers, tiles = tiles_of(f, flags);
  const uint32_t begin = uint64_t(record.tile_begin) * parts / tiles;
  const uint32_t end = uint64_t(record.tile_begin + record.tile_count) * parts / tiles;
  wait_counters(w, record);
  if (Loader::index() == 0) store_volatile(&block().asking, 1);
  uint32_t packed = 0;
#pragma unroll 1
  for (uint32_t i = begin + Loader::index(); i < end; i += kLoaders, ++packed) {
    const Share share(i % kConsumers, f.k_unit);
    const uint32_t row = i / kConsumers;
    const float* gamma = kNorm ? tasks::weights<float>(w, f.gamma) : nullptr;
    const float* x = input_row(w, f, flags.sampled(), row);
    SharePacker<kHalf, kNorm>{w, f, to, x, gamma, row, i % kConsumers, share.first, share.count}.run();
  }
  __syncwarp();
  if (Loader::index() == 0) store_volatile(&block().asking, 0);
  if (w.warp_lane() == 0 && packed > 0) add_release(packed_counter(w), packed);
  l.save();
}

}  // namespace megakernel::dev
