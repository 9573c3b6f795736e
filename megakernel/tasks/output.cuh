// Rows to the host. See output.py for the formula.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct OutputConfig {};

template <OutputConfig kConfig>
struct Output {
  using Fields = abi::OutputFields;

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t width = least(f.cols - first, record.tile_count * f.tile_cols);
    const float* in = workspace<const float>(w, f.input) + first;
    float* rows = at<float>(w.args.outputs) + f.column + first;
    w.for_each(w.header->rows, width, [&](uint32_t r, uint32_t i, auto part) {
      const abi::Row& row = w.header->row[r];
      const uint64_t index = uint64_t(row.slot) * w.args.max_context + row.position;
      dev::store(rows + index * f.width + i, dev::load(in + uint64_t(r) * f.cols + i, part), part);
    });
    if (f.result == abi::kNone || record.tile_begin != 0) return;
    for (uint32_t s = w.lane(); s < w.header->sampled; s += w.lanes()) {
      abi::SampleResult& result = workspace<abi::SampleResult>(w, f.result)[s];
      result.token = 0;
      result.logprob = 0.0f;
      result.top_count = 0;
    }
  }
};

}  // namespace megakernel::tasks
