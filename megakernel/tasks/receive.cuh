// The parts of all ranks put together. See receive.py for the formulas.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct ReceiveConfig {
  bool join = false;
  bool residual = false;
  bool stamped = false;
};

template <ReceiveConfig kConfig>
struct Receive {
  using Fields = abi::ReceiveFields;

  MK_DEVICE static void execute(Worker& w, const abi::Record& record, const Fields& f) {
    const Parts parts(w, f);
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t last = least(f.cols, first + record.tile_count * f.tile_cols);
    if constexpr (!kConfig.stamped) {
      if (!all_sent(w, f, parts)) return;
    }
    if constexpr (kConfig.join) {
      join(w, f, parts, first, last);
    } else if constexpr (kConfig.stamped) {
      sum_stamped(w, f, parts, first, last - first);
    } else {
      sum(w, f, parts, first, last - first);
    }
  }

 private:
  // Where each rank's part begins.
  struct Parts {
    const float* own;
    uint64_t buffer, size;  // of the window; elements of one rank
    uint32_t rank;

    MK_DEVICE Parts(const Worker& w, const Fields& f) {
      const abi::Link& l = *link(w);
      rank = l.rank;
      own = workspace<const float>(w, f.input);
      buffer = l.window[rank] + f.buffer;
      size = uint64_t(f.rows) * f.part_cols;
    }
    MK_DEVICE const float* of(uint32_t k) const { return k == rank ? own : at<const float>(buffer) + k * size; }
    MK_DEVICE const uint64_t* stamped(uint32_t k) const { return at<const uint64_t>(buffer) + k * size; }
  };

  MK_DEVICE static bool all_sent(Worker& w, const Fields& f, const Parts& parts) {
    const uint64_t window = parts.buffer - f.buffer;
    for (uint32_t k = 0; k < abi::kRanks; ++k) {
      const uint32_t index = sender_index(f.exchange, k);
      if (k == parts.rank) continue;
      const uint64_t target = f.sent_tiles * w.step;
      if (!dev::await_peer(w, sender_counter(window, index), target, w.args.counter_count + index)) return false;
    }
    return true;
  }

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

  // One element a lane at a time: false when the launch is over.
  MK_DEVICE static bool element(
      Worker& w, const Fields& f, const Parts& parts, uint32_t k, uint64_t index, uint32_t stamp, float& v) {
    const uint32_t counter = w.args.counter_count + sender_index(f.exchange, k);
    return dev::take_stamped(w, parts.stamped(k) + index, stamp, v, counter);
  }

  template <class W>  // dev::Worker; a device that asks for all at once has take_parts
  MK_DEVICE static bool every_part(
      W& w, const Fields& f, const Parts& parts, uint64_t index, uint32_t stamp, float (&v)[abi::kRanks]) {
    if constexpr (dev::kAsksAtOnce) {
      const uint32_t counter = w.args.counter_count + sender_index(f.exchange, 0);
      take_parts(w, parts.own + index, parts.rank, parts.stamped(0) + index, parts.size, stamp, counter, v);
      return true;
    } else {
      bool good = true;
      for (uint32_t k = 0; k < abi::kRanks; ++k) {
        if (k == parts.rank) {
          v[k] = dev::take(w, parts.own + index);
        } else {
          good = good && element(w, f, parts, k, index, stamp, v[k]);
        }
      }
      return good;
    }
  }

  MK_DEVICE static void sum_stamped(Worker& w, const Fields& f, const Parts& parts, uint32_t first, uint32_t width) {
    const uint32_t stamp = stamp_of(w, f.exchange, f.exchanges);
    float* out = workspace<float>(w, f.output) + first;
    bool good = true;
    for (uint32_t i = w.lane(); good && i < w.header->rows * width; i += w.lanes()) {
      const uint64_t inside = uint64_t(i / width) * f.cols + i % width, index = inside + first;
      float before = 0.0f;  // there since long before the parts
      if constexpr (kConfig.residual) before = dev::take(w, workspace<const float>(w, f.residual) + index);
      float v[abi::kRanks] = {};
      good = every_part(w, f, parts, index, stamp, v);
      float y = v[0];
      for (uint32_t k = 1; k < abi::kRanks; ++k) y += v[k];
      y = y * f.scale;
      if constexpr (kConfig.residual) y += before;
      if (good) dev::give(out + inside, y);
    }
    dev::settle(w, good);
    dev::retire(w, out, width, f.cols);
  }

  MK_DEVICE static void join(Worker& w, const Fields& f, const Parts& parts, uint32_t first, uint32_t last) {
    bool good = true;
    for (uint32_t k = 0; k < abi::kRanks; ++k) {
      const bool end = k + 1 == abi::kRanks;
      const uint32_t begins = end ? f.cols - f.part_cols : k * f.part_cols;  // column 0 of the part
      const uint32_t low = most(first, k * f.part_cols), high = end ? last : least(last, (k + 1) * f.part_cols);
      if (low >= high) continue;
      float* out = workspace<float>(w, f.output) + low;
      if (kConfig.stamped && k != parts.rank) {
        good = good && join_stamped(w, f, parts, k, low - begins, high - low, out);
        continue;
      }
      const float* from = parts.of(k) + (low - begins);
      w.for_each(w.header->sampled, high - low, [&](uint32_t r, uint32_t i, auto part) {
        dev::store(out + uint64_t(r) * f.cols + i, dev::load(from + uint64_t(r) * f.part_cols + i, part), part);
      });
    }
    if constexpr (kConfig.stamped) dev::settle(w, good);
  }

  MK_DEVICE static bool join_stamped(
      Worker& w, const Fields& f, const Parts& parts, uint32_t k, uint32_t column, uint32_t width, float* out) {
    const uint32_t stamp = stamp_of(w, f.exchange, f.exchanges);
    for (uint32_t i = w.lane(); i < w.header->sampled * width; i += w.lanes()) {
      float v;
      if (!element(w, f, parts, k, uint64_t(i / width) * f.part_cols + column + i % width, stamp, v)) return false;
      out[uint64_t(i / width) * f.cols + i % width] = v;
    }
    return true;
  }
};

}  // namespace megakernel::tasks
