// Rows from the host. See input.py for the formula.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct InputConfig {};

template <InputConfig kConfig>
struct Input {
  using Fields = abi::InputFields;

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t width = least(f.cols - first, record.tile_count * f.tile_cols);
    float* out = workspace<float>(w, f.output) + first;
    const float* rows = at<const float>(w.args.inputs) + f.column + first;
    w.for_each(w.header->rows, width, [&](uint32_t r, uint32_t i, auto part) {
      const abi::Row& row = w.header->row[r];
      const uint64_t index = uint64_t(row.slot) * w.args.max_context + row.position;
      dev::store(out + uint64_t(r) * f.cols + i, dev::load(rows + index * f.width + i, part), part);
    });
  }
};

}  // namespace megakernel::tasks
