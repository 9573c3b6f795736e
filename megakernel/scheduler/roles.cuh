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

using dev::Block;
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
MK_DEVICE void dispatch(Worker& w, const abi::Record& record, F&& f, TaskList<T, Rest...>) {
  if (record.opcode == kIndex) return f.template operator()<T>();
  if constexpr (sizeof...(Rest) > 0) {
    dispatch<kIndex + 1>(w, record, static_cast<F&&>(f), TaskList<Rest...>{});
  } else {
    w.fault(abi::FaultKind::kBadRecord, record.tile_begin, abi::kNone, record.opcode, kIndex);
  }
}

// The worker's records as control has put them into shared memory, step after step.
struct Reader {
  Worker& w;
  uint32_t slot = 0, parity = 0;

  MK_DEVICE const abi::Record& next() {
    w.wait_barrier(&w.block.record_full[slot], parity);
    w.record = &w.block.record[slot];
    return w.block.record[slot];
  }
  MK_DEVICE void done() {
    __syncwarp();
    w.record = nullptr;
    if (w.warp_lane() == 0) dev::barrier_arrive(&w.block.record_empty[slot]);
    if (++slot == dev::kRecords) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Waits for the header of step w.step. False: the launch ends here.
MK_DEVICE bool await_header(Worker& w, uint32_t& parity) {
  const uint32_t copy = w.step & 1;
  w.wait_barrier(&w.block.header_full[copy], parity >> copy & 1, abi::FaultKind::kHeaderBudget);
  parity ^= 1u << copy;
  w.header = &w.block.header[copy];
  w.last = &w.block.header[copy ^ 1];
  return w.header->exit == uint32_t(abi::ExitReason::kRunning);
}

// This warp will not look at the step again.
MK_DEVICE void end_step(Worker& w) {
  __syncwarp();
  if (w.warp_lane() == 0) dev::barrier_arrive(&w.block.step_done);
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
  auto* to = reinterpret_cast<uint32_t*>(&w.block.header[step & 1]);
  for (uint32_t i = w.warp_lane(); i < sizeof(abi::StepHeader) / 4; i += 32) to[i] = dev::load_word(from + i);
  __syncwarp();
}

// The header of the next step, once it is published, into shared memory. False: the launch ends here.
MK_DEVICE bool fetch_header(Worker& w) {
  Block& b = w.block;
  w.wait(&w.launch()->published, w.step, abi::FaultKind::kHeaderBudget, abi::kNone);
  __syncwarp();
  copy_header(w, w.step);
  if (w.warp_lane() == 0) {
    const uint64_t even = w.launch_args.workspace, odd = even + w.launch_args.workspace_stride;
    b.args.workspace = w.step & 1 ? odd : even;
    b.last_workspace = w.step & 1 ? even : odd;
    dev::barrier_arrive(&b.header_full[w.step & 1]);
  }
  return b.header[w.step & 1].exit == uint32_t(abi::ExitReason::kRunning);
}

MK_DEVICE void run_control(Worker& w, bool one_step) {
  Block& b = w.block;
  abi::LaunchState* state = w.launch();
  w.step = state->step;
  copy_header(w, w.step);  // of the last launch, whose values are to be cleared
  if (w.warp_lane() == 0) {
    b.first_step = w.step;
    queue::arrive(w);
    if (w.id == 0) queue::roll_call(w);
    dev::barrier_arrive(&b.rolled);
  }
  __syncwarp();
  uint32_t slot = 0, parity = 1, done_parity = 0;
  for (;;) {
    ++w.step;
    if (!fetch_header(w)) break;
    bool last = false;
    uint32_t word = *words_of(w, 0);
    for (w.record_index = 0; !last; ++w.record_index) {
      last = (__shfl_sync(0xffffffffu, word, 0) & 0xffff) == abi::kEnd;
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
MK_DEVICE void run_producer(Worker& w, bool one_step) {
  dev::Producer producer(w);
  uint32_t parity = 0;
  bool running = true;
  while (running) {
    ++w.step;
    bool known = false, last = false;
    auto need_header = [&] {
      if (!known) running = await_header(w, parity);
      known = true;
      return running;
    };
    uint32_t word = *words_of(w, 0);
    for (w.record_index = 0; !last && running; ++w.record_index) {
      put_word(w, w.block.producer_record, word);
      const abi::Record& record = w.block.producer_record;
      last = record.opcode == abi::kEnd;
      if (!last) {
        word = *words_of(w, w.record_index + 1);
        w.record = &record;
        dispatch<0>(w, record, [&]<class T>() {
          if (dev::Core<T>::kNeedsHeader && !need_header()) return;
          dev::Core<T>::produce(producer, record, dev::fields_of<T>(record));
        }, Tasks{});
      }
      __syncwarp();
    }
    w.record = nullptr;
    if (!need_header() || one_step) break;
    end_step(w);
  }
  if (one_step && running) end_step(w);
  w.drain();
}

template <class Tasks>
MK_DEVICE void run_consumer(Worker& w, bool one_step) {
  dev::Consumer consumer(w);
  Reader reader{w};
  uint32_t parity = 0;
  if constexpr (makes_headers(Tasks{})) {
    if (w.id == 0) begin_launch(w, Tasks{});
  }
  for (;;) {
    ++w.step;
    if (!await_header(w, parity)) return;
    for (w.record_index = 0;; ++w.record_index) {
      const abi::Record& record = reader.next();
      const bool last = record.opcode == abi::kEnd;
      if (!last) {
        dispatch<0>(w, record, [&]<class T>() { dev::Core<T>::consume(consumer, record, dev::fields_of<T>(record)); }, Tasks{});
      }
      reader.done();
      if (last) break;
    }
    end_step(w);
    if (one_step) return;
  }
}

template <class Tasks>
MK_DEVICE void run_storer(Worker& w, bool one_step) {
  dev::Storer storer(w);
  Reader reader{w};
  uint32_t parity = 0;
  for (;;) {
    ++w.step;
    if (!await_header(w, parity)) return;
    for (w.record_index = 0;; ++w.record_index) {
      const abi::Record& record = reader.next();
      const bool last = record.opcode == abi::kEnd;
      if (!last) {
        dispatch<0>(w, record, [&]<class T>() { dev::Core<T>::store(storer, record, dev::fields_of<T>(record)); }, Tasks{});
      }
      reader.done();
      if (last) break;
    }
    end_step(w);
    if (one_step) return;
  }
}

}  // namespace roles

// A whole launch of one block. A program without a task that makes headers runs the one step whose header the host wrote.
template <class Tasks>
MK_DEVICE void run_block(dev::Block& block, const abi::KernelArgs& args) {
  const abi::Role role = dev::begin_block(block, args);
  dev::Worker w(block, args, role);
  constexpr bool kOneStep = !roles::makes_headers(Tasks{});
  if (role == abi::Role::kControl) return roles::run_control(w, kOneStep);
  w.wait_barrier(&block.rolled, 0, abi::FaultKind::kRollCall);
  w.step = block.first_step;
  if (role == abi::Role::kProducer) return roles::run_producer<Tasks>(w, kOneStep);
  if (role == abi::Role::kStorer) return roles::run_storer<Tasks>(w, kOneStep);
  roles::run_consumer<Tasks>(w, kOneStep);
}

}  // namespace megakernel
