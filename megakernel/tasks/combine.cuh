// Pieces of attention into its output. See combine.py for the formula.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct CombineConfig {
  int head_dim = 64;
  int heads = 1;
  int shares = 1;
  int piece_tokens = 256;
  bool gives = false;
  bool half = false;
  int gives_wide = 0;
};

template <CombineConfig kConfig>
struct Combine {
  using Fields = abi::CombineFields;
  static constexpr uint32_t kDim = kConfig.head_dim, kShares = kConfig.shares;

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const uint64_t stride = kDim + 2;
    for (uint32_t r = 0; r < w.header->rows; ++r) {
      const uint32_t position = w.header->row[r].position;
      const uint32_t first = first_seen(position, f.window) / kConfig.piece_tokens;
      const uint32_t last = position / kConfig.piece_tokens;
      const uint32_t share = r % kShares, end = record.tile_begin + record.tile_count;
      for (uint32_t t = (record.tile_begin + kShares - 1 - share) / kShares * kShares + share; t < end; t += kShares) {
        const uint64_t index = uint64_t(r) * kConfig.heads + t / kShares;
        const float* pieces = workspace<const float>(w, f.partials) + index * f.max_pieces * stride;
        float* out = workspace<float>(w, f.output) + index * kDim;
        float top = -dev::kInfinity, total = 0.0f;
        for (uint32_t j = first; j <= last; ++j) top = dev::max(top, pieces[j * stride + kDim]);
        for (uint32_t j = first; j <= last; ++j) {
          total += dev::exp(pieces[j * stride + kDim] - top) * pieces[j * stride + kDim + 1];
        }
        w.for_each(kDim, [&](uint32_t i, auto part) {
          dev::Vf sum = dev::splat(0.0f);
          for (uint32_t j = first; j <= last; ++j) {
            sum += dev::exp(pieces[j * stride + kDim] - top) * dev::load(pieces + j * stride + i, part);
          }
          dev::store(out + i, sum / total, part);
        });
      }
    }
  }
};

}  // namespace megakernel::tasks
