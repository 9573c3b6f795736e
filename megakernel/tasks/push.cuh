// A rank's part of an exchange to its peers. See push.py for the formula.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct PushConfig {
  bool sampled = false;
  bool stamped = false;
};

template <PushConfig kConfig>
struct Push {
  using Fields = abi::PushFields;

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const abi::Link& l = *link(w);
    const uint32_t rows = kConfig.sampled ? w.header->sampled : w.header->rows;
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t width = least(f.cols - first, record.tile_count * f.tile_cols);
    const uint64_t place = uint64_t(l.rank) * f.rows * f.cols + first;  // of this rank in every peer's buffer
    const float* in = workspace<const float>(w, f.input) + first;
    if constexpr (kConfig.stamped) {
      send_stamped(w, f, l, in, place, rows, width);
    } else {
      send(w, f, l, in, place, rows, width);
      const uint32_t index = sender_index(f.exchange, l.rank);
      for (uint32_t i = 1; i < abi::kRanks; ++i) {
        uint64_t* counter = sender_counter(l.window[peer(l, i)], index);
        dev::signal_peer(w, counter, record.tile_count, w.args.counter_count + index);
      }
    }
  }

 private:
  // Every rank begins with another one.
  MK_DEVICE static uint32_t peer(const abi::Link& l, uint32_t i) { return (l.rank + i) % abi::kRanks; }

  MK_DEVICE static void send(
      Worker& w, const Fields& f, const abi::Link& l, const float* in, uint64_t place, uint32_t rows, uint32_t width) {
    for (uint32_t i = 1; i < abi::kRanks; ++i) {
      float* out = at<float>(l.window[peer(l, i)] + f.buffer) + place;
      w.for_each(rows, width, [&](uint32_t r, uint32_t c, auto part) {
        const uint64_t index = uint64_t(r) * f.cols + c;
        dev::store(out + index, dev::load(in + index, part), part);
      });
    }
    w.sync();
  }

  MK_DEVICE static void send_stamped(
      Worker& w, const Fields& f, const abi::Link& l, const float* in, uint64_t place, uint32_t rows, uint32_t width) {
    const uint32_t stamp = stamp_of(w, f.exchange, f.exchanges);
    for (uint32_t i = w.lane(); i < rows * width; i += w.lanes()) {
      const uint64_t index = uint64_t(i / width) * f.cols + i % width;
      const float v = kConfig.sampled ? in[index] : dev::take(w, in + index);
      for (uint32_t k = 1; k < abi::kRanks; ++k) {
        dev::put_stamped(at<uint64_t>(l.window[peer(l, k)] + f.buffer) + place + index, v, stamp);
      }
    }
  }
};

}  // namespace megakernel::tasks
