// The driver of a worker that plays all roles in turn: waits, loads, consumes and stores record by record.
//
// While a record waits for others, the memory that it will stream is touched ahead, or is on its way to the stages of the
// device (feed.cuh): it depends on nobody.
#pragma once

#include "megakernel/scheduler/feed.cuh"

namespace megakernel {

namespace pipeline {

using dev::Worker;

constexpr uint32_t kAheadBytes = 64 * 1024;  // touched ahead of one record at most; a part of a core's own cache

// f() of one lane of the group, after all of them have come; its result goes to all.
template <class W, class F>
MK_DEVICE auto once(W& w, F f) {
  using Result = decltype(f());
  if constexpr (W::lanes() == 1) {
    return f();
  } else if constexpr (__is_same(Result, void)) {
    w.sync();
    if (w.lane() == 0) f();
  } else {
    Result result{};
    if (w.lane() == 0) result = f();
    return w.broadcast(result);
  }
}

template <class T>
MK_DEVICE const typename T::Fields& fields_of(const abi::Record& record) {
  static_assert(sizeof(typename T::Fields) <= sizeof record.payload);
  return *reinterpret_cast<const typename T::Fields*>(record.payload);
}

template <tasks::SimpleTask T, class F>
MK_DEVICE void run_task(Worker& w, const abi::Record& record, F&, bool) {
  if (!queue::wait_all(w, record, [] {})) return;
  trace::ready(w, abi::Role::kWorker);
  T::execute(w, record, fields_of<T>(record));
}

// Touches the units of a walk one cache line a call.
template <class Walk>
struct Ahead {
  Worker& w;
  Walk walk;
  const char* at = nullptr;
  const char* end = nullptr;
  uint32_t left = kAheadBytes;

  MK_DEVICE void operator()() {
    if (left < 64) return;
    left -= 64;
    if (at >= end) {
      if (!walk.next(w)) {
        left = 0;
        return;
      }
      at = static_cast<const char*>(walk.unit.address);
      end = at + walk.unit.bytes;
    }
    dev::prefetch(at);
    at += 64;
  }
};

template <tasks::StreamingTask T, class F>
MK_DEVICE void run_task(Worker& w, const abi::Record& record, F& feed, bool shared) {
  const auto& fields = fields_of<T>(record);
  typename T::Walk walk(w, record, fields);
  Ahead<typename T::Walk> ahead{w, walk};
  if (!queue::wait_all(w, record, [&] { ahead(); })) return;
  trace::ready(w, abi::Role::kWorker);
  typename T::State state{};
  while (walk.next(w)) {
    if (walk.unit.load) T::load(w, fields, state, walk);
    void* unit = feed.template take<T>(w, walk.unit, shared);
    trace::data(w, abi::Role::kWorker);
    T::consume(w, fields, state, walk, unit);
    if (walk.unit.store) T::store(w, fields, state, walk);
  }
}

template <uint32_t kIndex, class F, class T, class... Rest>
MK_DEVICE void dispatch(Worker& w, const abi::Record& record, F& feed, bool shared, TaskList<T, Rest...>) {
  if (record.opcode == kIndex) return run_task<T>(w, record, feed, shared);
  if constexpr (sizeof...(Rest) > 0) {
    dispatch<kIndex + 1>(w, record, feed, shared, TaskList<Rest...>{});
  } else {
    w.fault(abi::FaultKind::kBadRecord, record.tile_begin, abi::kNone, record.opcode, kIndex);
  }
}

template <class Tasks, class F>
MK_DEVICE void run_record(Worker& w, const abi::Record& record, F& feed, bool shared) {
  w.record = &record;
  trace::start(w, abi::Role::kWorker);
  dispatch<0>(w, record, feed, shared, Tasks{});
  trace::end(w, abi::Role::kWorker);
  if (w.failed) return;
  w.sync();  // the next record may read what this one wrote, with or without a signal between them
  trace::published(w, abi::Role::kWorker);
  queue::signal(w, record);
}

// The next shared record of a ticketed node, or null.
MK_DEVICE const abi::Record* next_ticket(Worker& w, const abi::Record& record) {
  const auto& ticket = *reinterpret_cast<const abi::Ticket*>(record.payload);
  if (!queue::wait_all(w, record, [] {})) return nullptr;
  return once(w, [&] { return queue::take_ticket(w, ticket); });
}

// The record itself, or where it is nearer.
template <class W>
MK_DEVICE const abi::Record* near(W& w, const abi::Record* record, bool shared) {
  if constexpr (requires { w.keep(record); }) {
    return shared ? w.keep_shared(record) : w.keep(record);
  } else {
    return record;
  }
}

// One pass over the queue. False when the launch is over for this worker.
template <class Tasks, class F>
MK_DEVICE bool run_queue(Worker& w, F& feed) {
  const abi::Record* entry = queue::records(w);
  w.record_index = 0;
  feed.begin_step(w);
  for (;;) {
    const abi::Record* record = near(w, entry, false);
    if (record->opcode == abi::kEnd) return true;
    const bool shared = record->opcode == abi::kTicket;
    if (shared) {
      record = next_ticket(w, *record);
      if (record) record = near(w, record, true);
    }
    if (record) run_record<Tasks>(w, *record, feed, shared);
    if (w.failed) return false;
    if (!shared || !record) ++entry, ++w.record_index;
  }
}

// The task that makes headers, if the program has one.
template <class T>
concept Beginning = requires(Worker& w) { T::begin(w); };

template <class T, class... Rest>
MK_DEVICE bool begin_launch(Worker& w, TaskList<T, Rest...>) {
  if constexpr (Beginning<T>) {
    T::begin(w);
    return true;
  } else if constexpr (sizeof...(Rest) > 0) {
    return begin_launch(w, TaskList<Rest...>{});
  } else {
    return false;
  }
}

template <class... T>
constexpr bool makes_headers(TaskList<T...>) {
  return (Beginning<T> || ...);
}

}  // namespace pipeline

// A whole launch of one worker. A program without a task that makes headers runs the one step whose header the host
// wrote.
template <class Tasks>
MK_DEVICE void run_worker(dev::Worker& w) {
  uint64_t step = queue::launch(w)->step;  // read before arriving: worker 0 changes it when all have arrived
  constexpr bool kMakesHeaders = pipeline::makes_headers(Tasks{});
  pipeline::Feed<Tasks, dev::Worker> feed(w, step, kMakesHeaders);
  feed.fill(w);
  if constexpr (kMakesHeaders) {
    pipeline::once(w, [&] { queue::arrive(w); });
    if (w.id == 0 && queue::roll_call(w)) pipeline::begin_launch(w, Tasks{});
    while (!w.failed && queue::begin_step(w, ++step) && pipeline::run_queue<Tasks>(w, feed)) {
      trace::step_end(w);
      pipeline::once(w, [&] { queue::end_step(w); });
    }
    trace::leave(w);
    pipeline::once(w, [&] { queue::leave(w); });
  } else if (queue::begin_step(w, step + 1) && pipeline::run_queue<Tasks>(w, feed)) {
    trace::step_end(w);
  }
  feed.drain(w);
}

}  // namespace megakernel
