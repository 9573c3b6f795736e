// A norm whose result is stored. See norm.py for the formulas.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

enum class Norming { kNone, kRms, kLayer };

struct NormConfig {
  Norming norming = Norming::kRms;
  bool beta = false;
  bool residual = false;
};

template <NormConfig kConfig>
struct Norm {
  using Fields = abi::NormFields;

  // What is subtracted from, and then multiplied with, the elements of a part of one row.
  struct Moments {
    float mean = 0.0f;
    float factor = 1.0f;
  };

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t last = least(f.cols, first + record.tile_count * f.tile_cols);
    for (uint32_t r = 0; r < w.header->rows; ++r) {
      if constexpr (kConfig.norming == Norming::kNone) {
        columns<false>(w, f, r, first, last, {});
      } else {
        part(w, f, r, first, last, 0, f.split);
        part(w, f, r, first, last, f.split, f.normed);
        const uint32_t low = most(first, f.normed);
        if (low < last) columns<false>(w, f, r, low, last, {});
      }
    }
  }

 private:
  // Columns of [first, last) that belong to the part [begin, end).
  MK_DEVICE static void part(
      Worker& w, const Fields& f, uint32_t r, uint32_t first, uint32_t last, uint32_t begin, uint32_t end) {
    const uint32_t low = most(first, begin), high = least(last, end);
    if (low < high) columns<true>(w, f, r, low, high, moments(w, f, r, begin, end));
  }

  MK_DEVICE static Moments moments(Worker& w, const Fields& f, uint32_t r, uint32_t begin, uint32_t end) {
    const float* x = workspace<const float>(w, f.input) + uint64_t(r) * f.cols + begin;
    const uint32_t count = end - begin;
    Moments m;
    if constexpr (kConfig.norming == Norming::kLayer) {
      dev::Vf sum = dev::splat(0.0f);
      w.for_each(count, [&](uint32_t i, auto part) { sum += dev::load(x + i, part); });
      m.mean = w.sum(sum) / float(count);
    }
    dev::Vf squares = dev::splat(0.0f);
    w.for_each(count, [&](uint32_t i, auto part) {
      const dev::Vf v = dev::where(part, dev::load(x + i, part) - m.mean, 0.0f);
      squares += v * v;
    });
    m.factor = 1.0f / dev::sqrt(w.sum(squares) / float(count) + f.eps);
    return m;
  }

  template <bool kNormed>
  MK_DEVICE static void columns(Worker& w, const Fields& f, uint32_t r, uint32_t low, uint32_t high, Moments m) {
    const uint64_t at = uint64_t(r) * f.cols + low;
    const float* x = workspace<const float>(w, f.input) + at;
    float* out = workspace<float>(w, f.output) + at;
    const float* gamma = kNormed ? weights<float>(w, f.gamma) + low : nullptr;
    w.for_each(high - low, [&](uint32_t i, auto part) {
      dev::Vf y = dev::load(x + i, part);
      if constexpr (kNormed) y = (y - m.mean) * m.factor * dev::load(gamma + i, part);
      if constexpr (kNormed && kConfig.beta) y += dev::load(weights<float>(w, f.beta) + low + i, part);
      y = y * f.scale;
      if constexpr (kConfig.residual) y += dev::load(workspace<const float>(w, f.residual) + at + i, part);
      dev::store(out + i, y, part);
    });
  }
};

}  // namespace megakernel::tasks
