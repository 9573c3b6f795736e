// What streams ahead: a worker's queue is walked a second time, in front of what runs, and the units of every record are
// put into the stages of the device as long as there is room. Weights depend on nobody, so at the end of an operator, and
// of a step, those of the next are already on their way.
//
// For a device whose worker has `stages`: copies() says whether this lane starts copies, room() whether one more unit may
// be on its way, put(from, bytes) starts it, take() gives the oldest unit to the group and frees the one before,
// fetch(from, bytes) brings one that was not put, drain() waits for all that were put.
#pragma once
#include "megakernel/scheduler/queue.cuh"

namespace megakernel::pipeline {

template <class W>
concept Staged = requires(W& w) { w.stages; };

// A device that reads units where they are.
template <class Tasks, class W>
struct Feed {
  MK_DEVICE Feed(W&, uint64_t, bool) {}
  MK_DEVICE void fill(W&) {}
  MK_DEVICE void begin_step(W&) {}
  MK_DEVICE void drain(W&) {}
  template <class T>
  MK_DEVICE void* take(W&, const tasks::Unit& unit, bool) {
    return const_cast<void*>(unit.address);
  }
};

template <class Tasks, Staged W>
struct Feed<Tasks, W> {
  // `step` is the one before the first. `again`: the queue is run once a step, else once.
  MK_DEVICE Feed(W& w, uint64_t step, bool again)
      : first_(queue::records(w)), entry_(first_), done_(step), at_(step + 1), again_(again) {}

  MK_DEVICE void fill(W& w) {
    if (!w.stages.copies()) return;
    while (w.stages.room()) {
      if (left_ == 0 && !next(w)) return;
      w.stages.put(address_, bytes_);
      address_ += bytes_;
      --left_;
    }
  }
  MK_DEVICE void begin_step(W& w) {
    done_ = w.step;
    fill(w);
  }
  MK_DEVICE void drain(W& w) { w.stages.drain(); }

  // The unit's bytes, for the group. `shared`: of a record that is in no queue.
  template <class T>
  MK_DEVICE void* take(W& w, const tasks::Unit& unit, bool shared) {
    if constexpr (tasks::StreamsAhead<T>) {
      if (shared) return w.stages.fetch(unit.address, unit.bytes);
      void* stage = w.stages.take();
      fill(w);
      return stage;
    } else {
      return const_cast<void*>(unit.address);
    }
  }

 private:
  const abi::Record* first_;
  const abi::Record* entry_;  // the record after the one whose units are being put
  const char* address_ = nullptr;
  uint32_t bytes_ = 0, left_ = 0;
  uint64_t done_, at_;  // steps: whose header is known, and of `entry_`
  bool again_;

  // The units of the next record that has some. False when that is not known yet: at most one step ahead.
  MK_DEVICE bool next(W& w) {
    for (;;) {
      if (at_ > done_ + 1) return false;
      const abi::Record& record = *w.stages.constant(entry_);
      if (record.opcode == abi::kEnd) {
        if (!again_) return false;
        entry_ = first_;
        ++at_;
        continue;
      }
      if (record.opcode != abi::kTicket && !begin<0>(w, record, Tasks{})) return false;
      ++entry_;
      if (left_ > 0) return true;
    }
  }

  template <uint32_t kIndex, class T, class... Rest>
  MK_DEVICE bool begin(W& w, const abi::Record& record, TaskList<T, Rest...>) {
    if constexpr (tasks::StreamsAhead<T>) {
      if (record.opcode == kIndex) {
        if (T::kNeedsHeader && at_ != done_) return false;
        const tasks::Span span =
            T::span(w, record, *reinterpret_cast<const typename T::Fields*>(record.payload));
        address_ = span.address, bytes_ = span.unit_bytes, left_ = span.units;
        return true;
      }
    }
    if constexpr (sizeof...(Rest) > 0) {
      return begin<kIndex + 1>(w, record, TaskList<Rest...>{});
    } else {
      return true;
    }
  }
};

}  // namespace megakernel::pipeline
