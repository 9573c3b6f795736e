// Rows of a tensor to the host. See hidden.py for the formula.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct HiddenConfig {};

template <HiddenConfig kConfig>
struct Hidden {
  using Fields = abi::HiddenFields;

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t width = least(f.cols - first, record.tile_count * f.tile_cols);
    const float* input = workspace<const float>(w, f.input) + first;
    float* hidden = at<float>(w.args.hidden) + first;
    w.for_each(w.header->rows, width, [&](uint32_t r, uint32_t i, auto part) {
      const abi::Row& row = w.header->row[r];
      float* out = hidden + (uint64_t(row.slot) * w.args.max_context + row.position) * f.cols;
      dev::store(out + i, dev::load(input + uint64_t(r) * f.cols + i, part), part);
    });
  }
};

}  // namespace megakernel::tasks
