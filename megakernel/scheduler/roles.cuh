// The driver of a worker whose roles are warps of one block. Each role walks the worker's queue by itself:
//
//   control    reads records and headers ahead into shared memory, ends steps, answers the roll-call
//   producer   starts the copies of every record's stream; waits for no other worker, but for pages with rows of this step, so
//              it may be a step ahead
//   loaders    bring the input of a record, when other workers have published it, to where the consumers read it
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

// A task whose consumers publish, and whose values of the step before the storer clears.
template <class T>
concept Clearing = requires { dev::Core<T>::clear_last(); };

// A task that may have nothing to do in a step; then control keeps its record from the other roles.
template <class T>
concept Idling = requires(Worker& w, const abi::Record& r) { dev::Core<T>::idles(w, r); };

// A task whose producer wants the header in some steps only.
template <class T>
concept Asking = requires { dev::Core<T>::needs_header(); };

// A task whose consumers leave a part of it to their caller, which executes it in line: see Core::consume_several.
template <class T>
concept Pausing = requires { dev::Core<T>::resume(); };

template <class T>
MK_DEVICE bool needs_header() {
  if constexpr (Asking<T>) return dev::Core<T>::needs_header();
  return dev::Core<T>::kNeedsHeader;
}

template <class... T>
constexpr bool makes_headers(TaskList<T...>) {
  return (Beginning<T> || ...);
}

template <class... T>
constexpr bool pauses(TaskList<T...>) {
  return (Pausing<T> || ...);
}

template <class T, class... Rest>
MK_DEVICE void begin_launch(TaskList<T, Rest...>) {
  if constexpr (Beginning<T>) {
    seldom::begin_launch<T>();
  } else if constexpr (sizeof...(Rest) > 0) {
    begin_launch(TaskList<Rest...>{});
  }
}

// f.template operator()<T>() of the task with this opcode.
template <uint32_t kIndex, class F, class T, class... Rest>
MK_DEVICE void dispatch(uint32_t opcode, F f, TaskList<T, Rest...>) {
  if (opcode == kIndex) return f.template operator()<T>();
  if constexpr (sizeof...(Rest) > 0) {
    dispatch<kIndex + 1>(opcode, f, TaskList<Rest...>{});
  } else {
    dev::give_up(abi::FaultKind::kBadRecord, abi::kNone, opcode, kIndex);
  }
}

// ------------------------------------------------------------------------------------------------ consumers and storer
// Nothing lives from one of these functions to the next: see dev::RoleState.

// The next step's header is there. Answers whether it runs: else the launch ends here.
template <bool kProducer = false>
MK_OUT_OF_LINE void await_header() {
  Worker w;
  w.load();
  const uint32_t copy = w.step & 1, parity = w.state().header_parity;
  if constexpr (kProducer) {
    w.watch_barrier(&block().header_full[copy], parity >> copy & 1);
  } else {
    w.wait_barrier(&block().header_full[copy], parity >> copy & 1);
  }
  const bool runs = w.header->exit == uint32_t(abi::ExitReason::kRunning);
  w.state_to_write().header_parity = parity ^ 1u << copy;
  dev::own_answer() = runs;
  w.save();
}

template <bool kProducer = false>
MK_DEVICE bool step_begins() {
  await_header<kProducer>();
  return dev::own_answer() != 0;
}

MK_OUT_OF_LINE void begin_step() {
  Worker w;
  w.load();
  w.state_to_write().step = w.step + 1;
  w.state().record_index = ~0u;
  if (w.warp() == dev::kProducerWarp) block().header_known = 0;
  w.save();
  dev::begin_ring();
}

// This warp will not look at the step again.
MK_OUT_OF_LINE void end_step() {
  dev::warp_meets();
  dev::barrier_arrive_warp(&block().step_done);
}

// Waits for the record that control puts into this place, and answers with its opcode.
MK_DEVICE void await_record(dev::RingPlace at) {
  Worker w;
  dev::RoleState& s = w.state();
  if constexpr (dev::kChaos) w.random = s.random;
  w.wait_barrier(&block().record_full[at.slot], at.parity);
  const abi::Record& record = block().record[at.slot];
  const uint32_t index = block().record_at[at.slot], opcode = record.opcode;
  dev::warp_meets();
  if constexpr (dev::kChaos) s.random = w.random;
  s.record = &record;
  s.record_index = index;
  dev::own_answer() = opcode;
  dev::warp_meets();
}

// This warp is done with its record. Returns where the next will be.
MK_DEVICE dev::RingPlace leave_record() {
  dev::RoleState& s = dev::own_state();
  const uint32_t slot = s.record_slot, parity = s.record_parity;
  const bool wraps = slot + 1 == dev::kRecords;
  trace::done(block(), slot, dev::role_of_warp());
  dev::warp_meets();
  dev::barrier_arrive_warp(&block().record_empty[slot]);
  const dev::RingPlace next{wraps ? 0 : slot + 1, wraps ? parity ^ 1 : parity};
  s.record = nullptr;
  s.record_slot = next.slot;
  s.record_parity = next.parity;
  return next;
}

MK_OUT_OF_LINE void first_record() { await_record({dev::own_state().record_slot, dev::own_state().record_parity}); }
MK_OUT_OF_LINE void next_record() { await_record(leave_record()); }
MK_OUT_OF_LINE void last_record() {
  leave_record();
  dev::warp_meets();
}

// f of the record at work and of those behind it, until the step ends. kPauses: or one has paused.
template <class Tasks, bool kPauses = false, class Do>
MK_DEVICE void go_on(Do f) {
  for (;; next_record()) {
    const uint32_t opcode = dev::own_answer();
    if (opcode == abi::kEnd) return;
    dispatch<0>(opcode, f, Tasks{});
    if constexpr (kPauses) {
      if (dev::paused()) return;
    }
  }
}

template <class Tasks, class Do>
MK_DEVICE void each_record(Do f) {
  first_record();
  go_on<Tasks>(f);
}

// The records of a step. kSeveral: of one that the device treats apart, because it may have several rows: a task may have
// functions of its own for those, so that what is executed in others does not grow by them.
template <class Tasks>
MK_DEVICE void consume_records() {
  each_record<Tasks>([]<class T>() { dev::Core<T>::consume(); });
}

template <class Tasks, bool kSeveral>
MK_DEVICE void store_records() {
  each_record<Tasks>([]<class T>() {
    if constexpr (kSeveral && requires { dev::Core<T>::store_several(); }) {
      dev::Core<T>::store_several();
    } else if constexpr (dev::Core<T>::kStores) {
      dev::Core<T>::store();
    }
    if constexpr (kSeveral && requires { dev::Core<T>::clear_last_several(); }) {
      dev::Core<T>::clear_last_several();
    } else if constexpr (Clearing<T>) {
      dev::Core<T>::clear_last();
    }
  });
}

template <class Tasks, bool kSeveral>
MK_DEVICE void load_records() {
  each_record<Tasks>([]<class T>() {
    if constexpr (kSeveral && requires { dev::Core<T>::load_several(); }) {
      dev::Core<T>::load_several();
    } else if constexpr (dev::Core<T>::kLoads) {
      dev::Core<T>::load();
    }
  });
}

}  // namespace roles

namespace several {

// Consumers, from the record at work on, until a task pauses or the step ends.
template <class Tasks>
MK_OUT_OF_LINE void consume_records() {
  roles::go_on<Tasks, roles::pauses(Tasks{})>([]<class T>() {
    if constexpr (requires { dev::Core<T>::consume_several(); }) {
      dev::Core<T>::consume_several();
    } else {
      dev::Core<T>::consume();
    }
  });
}
// The same from where a task has paused on.
template <class Tasks>
MK_OUT_OF_LINE void resume_record() {
  roles::dispatch<0>(dev::own_answer() & ~dev::kPaused, []<class T>() {
    if constexpr (roles::Pausing<T>) dev::Core<T>::resume();
  }, Tasks{});
  if (dev::paused()) return;
  roles::next_record();
  consume_records<Tasks>();
}
template <class Tasks>
MK_OUT_OF_LINE void store_records() {
  roles::store_records<Tasks, true>();
}
template <class Tasks>
MK_OUT_OF_LINE void load_records() {
  roles::load_records<Tasks, true>();
}

}  // namespace several

namespace roles {

template <class Tasks>
MK_DEVICE void run_consumer(bool one_step) {
  if constexpr (makes_headers(Tasks{})) {
    if (dev::worker_index() == 0) begin_launch(Tasks{});
  }
  for (begin_step(); step_begins(); begin_step()) {
    if (dev::was_announced()) {
      first_record();
      several::consume_records<Tasks>();
      if constexpr (pauses(Tasks{})) {
        while (dev::paused()) {
          dev::work_in_pause(Tasks{});
          several::resume_record<Tasks>();
        }
      }
    } else {
      consume_records<Tasks>();
    }
    last_record();
    end_step();
    if (one_step) return;
  }
}

template <class Tasks>
MK_DEVICE void run_storer(bool one_step) {
  for (begin_step(); step_begins(); begin_step()) {
    if (dev::was_announced()) {
      several::store_records<Tasks>();
    } else {
      store_records<Tasks, false>();
    }
    last_record();
    end_step();
    if (one_step) return;
  }
}

template <class Tasks>
MK_DEVICE void run_loader(bool one_step) {
  if constexpr (makes_headers(Tasks{})) {
    if (dev::worker_index() == 0) dev::lend_scratch();
  }
  for (begin_step(); step_begins(); begin_step()) {
    if (dev::was_announced()) {
      several::load_records<Tasks>();
    } else {
      load_records<Tasks, false>();
    }
    last_record();
    end_step();
    if (one_step) return;
  }
}

// ------------------------------------------------------------------------------------------------ producer
// The word of this lane: a record is 32 of them.
static_assert(sizeof(abi::Record) == 128, "one word a lane");
MK_DEVICE const uint32_t* words_of(const Worker& w, uint32_t record) {
  return reinterpret_cast<const uint32_t*>(queue::records(w) + record) + w.warp_lane();
}
MK_DEVICE void put_word(const Worker& w, abi::Record& to, uint32_t word) {
  reinterpret_cast<uint32_t*>(&to)[w.warp_lane()] = word;
  dev::warp_meets();
}

MK_DEVICE void ask_record(const Worker& w, uint32_t record, uint32_t slot) {
  dev::copy_word(reinterpret_cast<uint32_t*>(&block().producer_record[slot]) + w.warp_lane(), words_of(w, record));
}

// The opcode of the next record, from the queue itself. The one after it is asked for: a trip to the queue for each record
// would let the memory rest as long.
MK_OUT_OF_LINE uint32_t fetch_record() {
  Worker w;
  w.load();
  dev::RoleState& s = w.state();
  const uint32_t slot = s.record_slot, index = w.record_index + 1;
  const auto& record = block().producer_record[slot];
  dev::await_words();
  const uint32_t opcode = record.opcode;
  ask_record(w, opcode == abi::kEnd ? 0 : index + 1, slot ^ 1);
  dev::warp_meets();
  s.record = &record;
  s.record_index = index;
  s.record_slot = slot ^ 1;
  w.save();
  return opcode;
}

// Whether the step that the producer is at runs; waits for its header when that is not known.
MK_OUT_OF_LINE bool step_runs() {
  if (block().header_known == 0) block().header_known = step_begins<true>() ? 1 : 2;
  return block().header_known == 1;
}

// Reads records by itself and asks for the header only where a task needs it: at the end of a step the weights of the
// next are already on their way.
template <class Tasks>
MK_DEVICE void run_producer(bool one_step) {
  ask_record(Worker(), 0, 0);
  for (begin_step();; begin_step()) {
    trace::begin_passes(dev::Loaded());
    for (;;) {
      const uint32_t opcode = fetch_record();
      if (opcode == abi::kEnd) break;
      dispatch<0>(opcode, []<class T>() {
        if constexpr (dev::Core<T>::kProduces) {
          if (!needs_header<T>() || step_runs()) dev::Core<T>::produce();
        }
      }, Tasks{});
      if (block().header_known == 2) break;
    }
    if (!step_runs()) break;
    end_step();
    if (one_step) break;
  }
  dev::await_words();
  dev::warp_meets();  // one lane has said what it copies, all look
  dev::drain_copies();
}

// ------------------------------------------------------------------------------------------------ control
// Waits for `ready`; looks at the clock, at the other warps and at the other workers meanwhile. When one has failed, or this
// has taken too long, it says so and stops the block.
template <class Ready>
MK_DEVICE void watch(Worker& w, Ready ready, abi::FaultKind kind) {
  auto& b = block();
  uint64_t began = 0;
  for (uint32_t turns = 1; !ready(); ++turns) {
    if (turns % 64 != 0) continue;
    const uint64_t now = dev::clock_ns();
    if (began == 0) began = now;
    // Twice the budget of other waits: the one that is at the root of a hang is to speak first.
    const bool stopped = dev::load_volatile(&b.stop) != 0, late = now - began >= 2 * w.args.spin_budget_ns;
    if (!stopped && !late && !w.aborted()) continue;
    trace::cut(w);
    if (w.warp_lane() == 0) {
      if (stopped) {
        while (dev::load_volatile(&b.words.kind) == uint32_t(abi::FaultKind::kNone)) {}
        const dev::LastWords& words = b.words;
        dev::report_fault(words.warp, words.kind, abi::kNone, words.counter, words.value, words.target);
      } else if (late) {
        dev::report_fault(kind == abi::FaultKind::kRingBudget ? 0 : w.warp(), kind, abi::kNone, abi::kNone, 0, 0);
      }
      dev::store_volatile(&b.stop, 1);
    }
    dev::end_thread();
  }
}

MK_DEVICE void copy_header(const Worker& w, uint64_t step) {
  const auto* from = reinterpret_cast<const uint32_t*>(queue::header(w, step));
  auto* to = reinterpret_cast<uint32_t*>(&block().header[step & 1]);
  if constexpr (sizeof(abi::StepHeader) > 512) return dev::copy_many<sizeof(abi::StepHeader)>(to, from);
  for (uint32_t i = w.warp_lane(); i < sizeof(abi::StepHeader) / 4; i += 32) to[i] = dev::load_word(from + i);
  dev::warp_meets();
}

// The header of the next step, once it is published, into shared memory. False: the launch ends here.
MK_DEVICE bool fetch_header(Worker& w) {
  auto& b = block();
  const uint64_t* published = &queue::launch(w)->published;
  trace::await_step(w);
  watch(w, [&] { return dev::load_acquire(published) >= w.step; }, abi::FaultKind::kHeaderBudget);
  dev::warp_meets();
  copy_header(w, w.step);
  if (w.warp_lane() == 0) {
    const uint64_t even = b.even_workspace, odd = even + w.args.workspace_stride;
    b.args.workspace = w.step & 1 ? odd : even;
    b.last_workspace = w.step & 1 ? even : odd;
  }
  dev::barrier_arrive_warp(&b.header_full[w.step & 1]);
  trace::step(w);
  return w.header->exit == uint32_t(abi::ExitReason::kRunning);
}

template <class Tasks>
MK_DEVICE bool idles(Worker& w, const abi::Record& record) {
  bool out = false;
  dispatch<0>(record.opcode, [&]<class T>() {
    if constexpr (Idling<T>) out = dev::Core<T>::idles(w, record);
  }, Tasks{});
  return out;
}

template <class Tasks>
MK_DEVICE void run_control(bool one_step) {
  auto& b = block();
  Worker w;
  w.seed();
  trace::begin_launch(w);
  const uint64_t last_step = queue::launch(w)->step;
  w.begin_step(last_step);
  copy_header(w, last_step);  // of the last launch, whose values are to be cleared
  dev::begin_headers(block().header[last_step & 1]);
  if (w.warp_lane() == 0) queue::arrive(w);
  if (w.id == 0) {
    const uint32_t* arrived = &queue::launch(w)->arrived;
    watch(w, [&] { return dev::load_acquire(arrived) >= w.args.workers; }, abi::FaultKind::kRollCall);
  }
  if (w.warp_lane() < dev::kWarps) b.state[w.warp_lane()].step = last_step;
  dev::warp_meets();
  dev::barrier_arrive_warp(&b.rolled);
  uint32_t slot = 0, parity = 1, done_parity = 0;
  for (w.begin_step(last_step + 1); fetch_header(w); w.begin_step(w.step + 1)) {
    bool last = false;
    uint32_t word = *words_of(w, 0);
    for (uint32_t index = 0; !last; ++index) {
      last = (dev::of_first_lane(word) & 0xffff) == abi::kEnd;
      const uint32_t after = last ? 0 : *words_of(w, index + 1);
      watch(w, [&] { return dev::barrier_try(dev::shared_address(&b.record_empty[slot]), parity); },
            abi::FaultKind::kRingBudget);
      trace::free(w, slot);
      b.record_at[slot] = index;
      put_word(w, b.record[slot], word);
      word = after;
      if (!last && idles<Tasks>(w, b.record[slot])) {
        dev::warp_meets();  // all have read it: the next comes to the same place
        continue;
      }
      dev::barrier_arrive_warp(&b.record_full[slot]);
      trace::filled(w, slot, index, last);
      if (++slot == dev::kRecords) {
        slot = 0;
        parity ^= 1;
      }
    }
    trace::handed_on(w);
    watch(w, [&] { return dev::barrier_try(dev::shared_address(&b.step_done), done_parity); }, abi::FaultKind::kRingBudget);
    done_parity ^= 1;
    trace::step_end(w);
    if (w.warp_lane() == 0) queue::end_step(w);
    dev::warp_meets();
    trace::step_told(w);
    if (one_step) break;
  }
  dev::store_volatile(&b.stop, 1);  // the producer may be in the step that will not be, waiting for room in the ring
  trace::leave(w);
  if (w.warp_lane() == 0) queue::leave(w);
}

}  // namespace roles

// A whole launch of one block. A program without a task that makes headers runs the one step whose header the host wrote.
template <class Tasks>
MK_DEVICE void run_block() {
  const abi::Role role = dev::role_of_warp();
  constexpr bool kOneStep = !roles::makes_headers(Tasks{});
  if (role == abi::Role::kControl) return roles::run_control<Tasks>(kOneStep);
  {
    dev::Worker w;
    w.seed();
    w.save();
    w.wait_barrier(&dev::block().rolled, 0);
  }
  if (role == abi::Role::kProducer) {
    roles::run_producer<Tasks>(kOneStep);
  } else if (role == abi::Role::kStorer) {
    roles::run_storer<Tasks>(kOneStep);
  } else if (role == abi::Role::kLoader) {
    roles::run_loader<Tasks>(kOneStep);
  } else {
    roles::run_consumer<Tasks>(kOneStep);
  }
}

}  // namespace megakernel
