// Two RMS norms and a residual in one task. See double_norm.py for the formula.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct DoubleNormConfig {};

template <DoubleNormConfig kConfig>
struct DoubleNorm {
  using Fields = abi::DoubleNormFields;

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const uint32_t low = record.tile_begin * f.tile_cols;
    const uint32_t width = least(f.cols - low, record.tile_count * f.tile_cols);
    const float* first = weights<float>(w, f.first);
    const float* second = weights<float>(w, f.second);
    for (uint32_t r = 0; r < w.header->rows; ++r) {
      const uint64_t row = uint64_t(r) * f.cols;
      const float* x = workspace<const float>(w, f.input) + row;
      const float* residual = workspace<const float>(w, f.residual) + row + low;
      float* out = workspace<float>(w, f.output) + row + low;
      // Every tile sums the whole row, so that none waits for another.
      const float once = factor(w, f, [&](uint32_t i, auto part) { return dev::load(x + i, part); });
      const float twice = factor(w, f, [&](uint32_t i, auto part) {
        return dev::load(x + i, part) * once * dev::load(first + i, part);
      });
      w.for_each(width, [&](uint32_t i, auto part) {
        const dev::Vf n = dev::load(x + low + i, part) * once * dev::load(first + low + i, part);
        dev::store(out + i, dev::load(residual + i, part) + n * twice * dev::load(second + low + i, part), part);
      });
    }
  }

 private:
  // 1 / sqrt(mean of value^2 + eps) over a whole row.
  template <class Value>
  MK_DEVICE static float factor(Worker& w, const Fields& f, Value value) {
    dev::Vf squares = dev::splat(0.0f);
    w.for_each(f.cols, [&](uint32_t i, auto part) {
      const dev::Vf v = dev::where(part, value(i, part), 0.0f);
      squares += v * v;
    });
    return 1.0f / dev::sqrt(w.sum(squares) / float(f.cols) + f.eps);
  }
};

}  // namespace megakernel::tasks
