// A worker's queue: waits, signals, tickets and step headers. Every wait has a budget and ends in a fault record.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::queue {

using dev::Worker;

MK_DEVICE uint64_t* counter(const Worker& w, uint32_t index) {
  return tasks::at<uint64_t>(w.args.counters) + uint64_t(index) * abi::kCounterStride;
}

MK_DEVICE const abi::Record* records(const Worker& w) {
  return tasks::at<const abi::Record>(w.args.queues) + uint64_t(w.id) * w.args.queue_length;
}

MK_DEVICE abi::LaunchState* launch(const Worker& w) { return tasks::at<abi::LaunchState>(w.args.launch); }

MK_DEVICE abi::StepHeader* header(const Worker& w, uint64_t step) {
  return tasks::at<abi::StepHeader>(w.args.headers) + (step & 1);
}

// False: the launch is over for this worker.
template <class Idle>
MK_DEVICE bool wait_all(Worker& w, const abi::Record& record, Idle idle) {
  for (uint32_t i = 0; i < record.wait_count; ++i) {
    const abi::Wait& wait = record.waits[i];
    if (!w.wait(counter(w, wait.counter), wait.count * w.step, abi::FaultKind::kWaitBudget, wait.counter, idle)) {
      return false;
    }
  }
  return true;
}

// The counter of a group has a relay: whose signal completes it signals the counter of all groups. Devices whose workers
// are all one group have no `signal_last` and no records with relays.
template <class W>
MK_DEVICE void signal(W& w, const abi::Record& record) {
  if (record.signal == abi::kNone) return;
  uint64_t* own = counter(w, record.signal);
  if constexpr (requires { w.signal_last(own, 0u, uint64_t(0)); }) {
    if (record.members != 0) {
      if (w.signal_last(own, record.signal, record.members * w.step)) w.signal(counter(w, record.relay), record.relay);
      return;
    }
  }
  w.signal(own, record.signal);
}

// The next shared record of a ticketed node, or null when there are no more in this step.
MK_DEVICE const abi::Record* take_ticket(Worker& w, const abi::Ticket& ticket) {
  const uint64_t taken = dev::fetch_add(counter(w, ticket.counter), 1) - (w.step - 1) * ticket.pops;
  if (taken >= ticket.count) return nullptr;
  return tasks::at<const abi::Record>(w.args.queues) + ticket.first + taken;
}

// Every worker answers before the first step. Worker 0 makes no header until all have: False when some never came.
MK_DEVICE void arrive(Worker& w) { dev::add_acquire_release(&launch(w)->arrived, 1); }

MK_DEVICE bool roll_call(Worker& w) {
  return w.wait(&launch(w)->arrived, w.args.workers, abi::FaultKind::kRollCall, abi::kNone, [] {});
}

// The last worker to leave makes room for the first header of the next launch.
MK_DEVICE void leave(Worker& w) {
  abi::LaunchState* state = launch(w);
  if (dev::add_acquire_release(&state->arrived, ~0u) == 0) state->published = state->step;
}

// The header of `step`, valid and not an exit; false when the launch is over.
template <class W>
MK_DEVICE bool begin_step(W& w, uint64_t step) {
  w.record = nullptr;
  trace::await_step(w);
  if (w.aborted()) return false;
  if (!w.wait(&launch(w)->published, step, abi::FaultKind::kHeaderBudget, abi::kNone, [] {})) return false;
  w.header = header(w, step);
  w.step = step;
  if constexpr (requires { w.keep(w.header); }) w.header = w.keep(w.header);  // a copy that is nearer
  trace::step(w);
  return w.header->exit == uint32_t(abi::ExitReason::kRunning);
}

template <class W>
MK_DEVICE void end_step(W& w) {
  dev::add_release(&launch(w)->finished, 1);
  if constexpr (requires { w.wake_step(); }) w.wake_step();  // where a worker that waits long may sleep
}

}  // namespace megakernel::queue
