// Rows of a table. See embedding.py for the formula.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct EmbeddingConfig {
  DType dtype = DType::kF32;
  bool positions = false;
  bool inputs = false;
  bool gives = false;
};

template <EmbeddingConfig kConfig>
struct Embedding {
  using Fields = abi::EmbeddingFields;

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t width = least(f.cols - first, record.tile_count * f.tile_cols);
    float* out = workspace<float>(w, f.output) + first;
    const char* table = weights<char>(w, f.table);
    const uint64_t row_bytes = uint64_t(f.cols) * dev::bytes_of(kConfig.dtype);
    w.for_each(w.header->rows, width, [&](uint32_t r, uint32_t i, auto part) {
      const abi::Row& at_row = w.header->row[r];
      dev::Vf v;
      if (kConfig.inputs && at_row.token < 0) {
        v = dev::load(given(w, at_row, f.cols) + first + i, part);
      } else {
        v = dev::load_as<kConfig.dtype>(table + uint32_t(at_row.token) * row_bytes, first + i, part) * f.scale;
      }
      if constexpr (kConfig.positions) {
        const char* at = weights<char>(w, f.positions) + at_row.position * row_bytes;
        v += dev::load_as<kConfig.dtype>(at, first + i, part);
      }
      dev::store(out + uint64_t(r) * f.cols + i, v, part);
    });
  }

  // The row that the host wrote for a position.
  MK_DEVICE static const float* given(const Worker& w, const abi::Row& row, uint32_t cols) {
    return at<const float>(w.args.inputs) + (uint64_t(row.slot) * w.args.max_context + row.position) * cols;
  }
};

}  // namespace megakernel::tasks
