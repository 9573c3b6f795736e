// The driver of a worker whose roles are warps of one block. Each role walks the worker's queue by itself:
//
//   control    reads records and headers ahead into shared memory, ends steps, answers the roll-call
//   producer   starts the copies of every record's stream; never waits for another worker, so it may be a step ahead
//   consumers  take the stages in the order of the queue and compute; the group of them runs simple tasks
//   storer     sums, runs epilogues, publishes
//
// `dev::Core<T>` says what each role does for a task T. A role's view is the same records in the same order.
#pragma once
#include "megakernel/scheduler/queue.cuh"

#include MEGAKERNEL_CORES

namespace megakernel {

namespace roles {

using dev::block;
using dev::Worker;

template <class T>
concept Beginning = requires(Worker& w) { T::begin(w); };

template <class... T>
constexpr bool makes_headers(TaskList<T...>) {
  return (Beginning<T> || ...);
}

template <class T, class... Rest>
MK_DEVICE void begin_launch(Worker& w, TaskList<T, Rest...>) {
  if constexpr (Beginning<T>) {
    T::begin(w);
  } else if constexpr (sizeof...(Rest) > 0) {
    begin_launch(w, TaskList<Rest...>{});
  }
}

// f.template operator()<T>() of the record's task.
template <uint32_t kIndex, class F, class T, class... Rest>
MK_DEVICE void dispatch(Worker& w, F&& f, TaskList<T, Rest...>) {
  if (w.record->opcode == kIndex) return f.template operator()<T>();
  if constexpr (sizeof...(Rest) > 0) {
    dispatch<kIndex + 1>(w, static_cast<F&&>(f), TaskList<Rest...>{});
  } else {
    w.fault(abi::FaultKind::kBadRecord, w.record->tile_begin, abi::kNone, w.record->opcode, kIndex);
  }
}

// The worker's records as control has put them into shared memory, step after step.
struct Reader {
  uint32_t slot = 0, parity = 0;

  // False: the record ends the step.
  MK_DEVICE bool next(Worker& w) {
    w.wait_barrier(&block().record_full[slot], parity);
    w.mark(&block().record[slot]);
    return w.record->opcode != abi::kEnd;
  }
  MK_DEVICE void done(Worker& w) {
    __syncwarp();
    w.mark(nullptr);
    if (w.warp_lane() == 0) dev::barrier_arrive(&block().record_empty[slot]);
    if (++slot == dev::kRecords) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Waits for the header of step w.step. False: the launch ends here.
MK_DEVICE bool await_header(Worker& w, uint32_t& parity) {
  const uint32_t copy = w.step & 1;
  w.wait_barrier(&block().header_full[copy], parity >> copy & 1, abi::FaultKind::kHeaderBudget);
  parity ^= 1u << copy;
  return w.header->exit == uint32_t(abi::ExitReason::kRunning);
}

// This warp will not look at the step again.
MK_DEVICE void end_step(Worker& w) {
  __syncwarp();
  if (w.warp_lane() == 0) dev::barrier_arrive(&block().step_done);
}

// The word of this lane: a record is 32 of them.
static_assert(sizeof(abi::Record) == 128, "one word a lane");
MK_DEVICE const uint32_t* words_of(const Worker& w, uint32_t record) {
  return reinterpret_cast<const uint32_t*>(queue::records(w) + record) + w.warp_lane();
}
MK_DEVICE void put_word(const Worker& w, abi::Record& to, uint32_t word) {
  reinterpret_cast<uint32_t*>(&to)[w.warp_lane()] = word;
  __syncwarp();
}

MK_DEVICE void copy_header(const Worker& w, uint64_t step) {
  const auto* from = reinterpret_cast<const uint32_t*>(queue::header(w, step));
  auto* to = reinterpret_cast<uint32_t*>(&block().header[step & 1]);
  for (uint32_t i = w.warp_lane(); i < sizeof(abi::StepHeader) / 4; i += 32) to[i] = dev::load_word(from + i);
  __syncwarp();
}

// The header of the next step, once it is published, into shared memory. False: the launch ends here.
MK_DEVICE bool fetch_header(Worker& w) {
  auto& b = block();
  w.wait(&queue::launch(w)->published, w.step, abi::FaultKind::kHeaderBudget, abi::kNone);
  __syncwarp();
  copy_header(w, w.step);
  if (w.warp_lane() == 0) {
    const uint64_t even = b.even_workspace, odd = even + w.args.workspace_stride;
    b.args.workspace = w.step & 1 ? odd : even;
    b.last_workspace = w.step & 1 ? even : odd;
    dev::barrier_arrive(&b.header_full[w.step & 1]);
  }
  return w.header->exit == uint32_t(abi::ExitReason::kRunning);
}

MK_DEVICE void run_control(Worker& w, bool one_step) {
  auto& b = block();
  const uint64_t last_step = queue::launch(w)->step;
  copy_header(w, last_step);  // of the last launch, whose values are to be cleared
  if (w.warp_lane() == 0) {
    b.first_step = last_step;
    queue::arrive(w);
    if (w.id == 0) queue::roll_call(w);
    dev::barrier_arrive(&b.rolled);
  }
  __syncwarp();
  uint32_t slot = 0, parity = 1, done_parity = 0;
  for (w.begin_step(last_step + 1); fetch_header(w); w.begin_step(w.step + 1)) {
    bool last = false;
    uint32_t word = *words_of(w, 0);
    for (w.record_index = 0; !last; ++w.record_index) {
      last = (dev::of_first_lane(word) & 0xffff) == abi::kEnd;
      const uint32_t after = last ? 0 : *words_of(w, w.record_index + 1);
      w.wait_barrier(&b.record_empty[slot], parity);
      put_word(w, b.record[slot], word);
      if (w.warp_lane() == 0) dev::barrier_arrive(&b.record_full[slot]);
      if (++slot == dev::kRecords) {
        slot = 0;
        parity ^= 1;
      }
      word = after;
    }
    w.wait_barrier(&b.step_done, done_parity);
    done_parity ^= 1;
    if (w.warp_lane() == 0) queue::end_step(w);
    __syncwarp();
    if (one_step) break;
  }
  if (w.warp_lane() == 0) queue::leave(w);
}

// Reads records by itself and asks for the header only where a task needs it: at the end of a step the weights of the
// next are already on their way.
template <class Tasks>
MK_DEVICE void run_producer(dev::Producer& p, bool one_step) {
  uint32_t parity = 0;
  bool running = true;
  auto& record = block().producer_record;
  for (p.w.begin_step(block().first_step + 1); running; p.w.begin_step(p.w.step + 1)) {
    bool known = false;
    auto need_header = [&] {
      if (!known) running = await_header(p.w, parity);
      known = true;
      return running;
    };
    uint32_t word = *words_of(p.w, 0);
    for (p.w.record_index = 0; running; ++p.w.record_index) {
      put_word(p.w, record, word);
      if (record.opcode == abi::kEnd) break;
      word = *words_of(p.w, p.w.record_index + 1);
      p.w.mark(&record);
      p.w.trace(7);
      dispatch<0>(p.w, [&]<class T>() {
        if constexpr (dev::Core<T>::kProduces) {
          if (!dev::Core<T>::kNeedsHeader || need_header()) p.set(dev::Core<T>::produce(p.state()));
        }
      }, Tasks{});
      p.w.trace(8);
      p.w.mark(nullptr);
      __syncwarp();
    }
    if (!need_header()) break;
    end_step(p.w);
    if (one_step) break;
  }
  dev::drain_copies();
}

template <class Tasks>
MK_DEVICE void run_consumer(dev::Consumer& c, bool one_step) {
  Reader reader;
  uint32_t parity = 0;
  if constexpr (makes_headers(Tasks{})) {
    if (c.w.id == 0) begin_launch(c.w, Tasks{});
  }
  for (c.w.begin_step(block().first_step + 1); await_header(c.w, parity); c.w.begin_step(c.w.step + 1)) {
    for (c.w.record_index = 0; reader.next(c.w); ++c.w.record_index) {
      if (c.w.warp() == 0) c.w.trace(0);
      dispatch<0>(c.w, [&]<class T>() { c.set(dev::Core<T>::consume(c.state())); }, Tasks{});
      if (c.w.warp() == 0) c.w.trace(3);
      if (c.w.warp() == 7) c.w.trace(4);
      reader.done(c.w);
    }
    reader.done(c.w);
    end_step(c.w);
    if (one_step) return;
  }
}

template <class Tasks>
MK_DEVICE void run_storer(dev::Storer& s, bool one_step) {
  Reader reader;
  uint32_t parity = 0;
  for (s.w.begin_step(block().first_step + 1); await_header(s.w, parity); s.w.begin_step(s.w.step + 1)) {
    for (s.w.record_index = 0; reader.next(s.w); ++s.w.record_index) {
      s.w.trace(5);
      dispatch<0>(s.w, [&]<class T>() {
        if constexpr (dev::Core<T>::kStores) s.set(dev::Core<T>::store(s.state()));
      }, Tasks{});
      s.w.trace(6);
      reader.done(s.w);
    }
    reader.done(s.w);
    end_step(s.w);
    if (one_step) return;
  }
}

}  // namespace roles

// A whole launch of one block. A program without a task that makes headers runs the one step whose header the host wrote.
template <class Tasks>
MK_DEVICE void run_block() {
  const abi::Role role = dev::role_of_warp();
  constexpr bool kOneStep = !roles::makes_headers(Tasks{});
  if (role == abi::Role::kControl) {
    dev::Worker w;
    return roles::run_control(w, kOneStep);
  }
  dev::Worker w;
  w.wait_barrier(&dev::block().rolled, 0, abi::FaultKind::kRollCall);
  if (role == abi::Role::kProducer) {
    dev::Producer p;
    roles::run_producer<Tasks>(p, kOneStep);
  } else if (role == abi::Role::kStorer) {
    dev::Storer s;
    roles::run_storer<Tasks>(s, kOneStep);
  } else {
    dev::Consumer c;
    roles::run_consumer<Tasks>(c, kOneStep);
  }
}

}  // namespace megakernel
