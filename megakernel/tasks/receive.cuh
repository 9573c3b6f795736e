// The parts of all ranks put together. See receive.py for the formulas.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct ReceiveConfig {
  bool join = false;
  bool residual = false;
};

template <ReceiveConfig kConfig>
struct Receive {
  using Fields = abi::ReceiveFields;

  // Row 0 of each rank's part.
  struct Parts {
    const float* own;
    const float* received;
    uint64_t size;  // of one rank's buffer
    uint32_t rank;

    MK_DEVICE const float* of(uint32_t k) const { return k == rank ? own : received + k * size; }
  };

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const abi::Link& l = *link(w);
    const uint64_t window = l.window[l.rank];
    for (uint32_t k = 0; k < abi::kRanks; ++k) {
      const uint32_t index = sender_index(f.exchange, k);
      if (k == l.rank) continue;
      const uint64_t target = f.sent_tiles * w.step;
      if (!dev::await_peer(w, sender_counter(window, index), target, w.args.counter_count + index)) return;
    }
    const Parts parts{workspace<const float>(w, f.input), at<const float>(window + f.buffer),
                      uint64_t(f.rows) * f.part_cols, l.rank};
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t last = least(f.cols, first + record.tile_count * f.tile_cols);
    if constexpr (kConfig.join) {
      join(w, f, parts, first, last);
    } else {
      sum(w, f, parts, first, last - first);
    }
  }

 private:
  MK_DEVICE static void sum(Worker& w, const Fields& f, const Parts& parts, uint32_t first, uint32_t width) {
    w.for_each(w.header->rows, width, [&](uint32_t r, uint32_t i, auto part) {
      const uint64_t index = uint64_t(r) * f.cols + first + i;
      dev::Vf y = dev::load(parts.of(0) + index, part);
      for (uint32_t k = 1; k < abi::kRanks; ++k) y += dev::load(parts.of(k) + index, part);
      y = y * f.scale;
      if constexpr (kConfig.residual) y += dev::load(workspace<const float>(w, f.residual) + index, part);
      dev::store(workspace<float>(w, f.output) + index, y, part);
    });
  }

  MK_DEVICE static void join(Worker& w, const Fields& f, const Parts& parts, uint32_t first, uint32_t last) {
    for (uint32_t k = 0; k < abi::kRanks; ++k) {
      const bool end = k + 1 == abi::kRanks;
      const uint32_t begins = end ? f.cols - f.part_cols : k * f.part_cols;  // column 0 of the part
      const uint32_t low = most(first, k * f.part_cols), high = end ? last : least(last, (k + 1) * f.part_cols);
      if (low >= high) continue;
      const float* from = parts.of(k) + (low - begins);
      float* out = workspace<float>(w, f.output) + low;
      w.for_each(w.header->sampled, high - low, [&](uint32_t r, uint32_t i, auto part) {
        dev::store(out + uint64_t(r) * f.cols + i, dev::load(from + uint64_t(r) * f.part_cols + i, part), part);
      });
    }
  }
};

}  // namespace megakernel::tasks
