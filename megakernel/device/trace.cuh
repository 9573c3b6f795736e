// Recording the timeline: a role writes one event a record, in place, into its worker's ring; see TraceEvent.
//
// Every call stands on a line of its own, and without MEGAKERNEL_TRACE it is nothing: a test compares the compiled code
// with that of sources from which those lines are gone. A worker says by `traces()` whether this lane writes, and by
// `tracer(role)` where the state of that role's event is.
#pragma once

namespace megakernel::trace {

#ifdef MEGAKERNEL_TRACE
constexpr bool kOn = true;

// The event that a role writes now.
struct Tracer {
  abi::TraceEvent* event = nullptr;  // null: none, or not of a step that is recorded
  uint64_t written = abi::kNone64;   // of the ring; kNone64: not looked up yet
  uint64_t began = 0;                // of a wait
  uint64_t longest = 0;              // wait of the event
  bool ready = false, data = false;  // have been written
};

// Of a worker that plays all roles in turn: records, and the step around them.
struct Tracers {
  Tracer record, step;

  MK_DEVICE Tracer& of(abi::Role role) { return role == abi::Role::kControl ? step : record; }
};

MK_DEVICE uint32_t ring_of(abi::Role role) {
  return role == abi::Role::kProducer ? 1 : role == abi::Role::kStorer ? 2 : role == abi::Role::kControl ? 3 : 0;
}

// Of a worker whose roles run side by side, in memory that no constructor has seen before `begin`.
struct RoleTracers {
  Tracer role[abi::kTraceRings];

  MK_DEVICE Tracer& of(abi::Role r) { return role[ring_of(r)]; }
};
MK_DEVICE void begin(RoleTracers& tracers) {
  for (Tracer& t : tracers.role) t = Tracer{};
}

// A new event, if this step is recorded; what is not written of it stays zero, and `published` says that it is whole.
template <class W>
MK_DEVICE void open(const W& w, Tracer& t, abi::Role role, uint32_t record, uint32_t node, uint32_t first, uint32_t count,
                    uint64_t start) {
  t.event = nullptr;
  const abi::KernelArgs& a = w.args;
  if (a.trace == 0 || w.step < a.trace_first || w.step > a.trace_last) return;
  const uint64_t bytes = sizeof(abi::TraceRing) + uint64_t(a.trace_capacity) * sizeof(abi::TraceEvent);
  auto* ring = reinterpret_cast<abi::TraceRing*>(a.trace + (uint64_t(w.id) * abi::kTraceRings + ring_of(role)) * bytes);
  if (t.written == abi::kNone64) t.written = ring->written;
  auto* e = reinterpret_cast<abi::TraceEvent*>(ring + 1) + (t.written & (a.trace_capacity - 1));
  ring->written = ++t.written;
  e->worker = uint16_t(w.id), e->role = uint8_t(role), e->flags = 0;
  e->record = record, e->node = node, e->tile_begin = first, e->tile_count = count, e->step = uint32_t(w.step);
  e->start = start, e->ready = e->first_data = e->end = e->published = e->longest_wait = 0;
  e->longest_wait_counter = abi::kNone;
  t.event = e, t.longest = 0, t.ready = t.data = false;
}
#else
constexpr bool kOn = false;

struct Tracer {
  MK_DEVICE Tracer& of(abi::Role) { return *this; }
};
using Tracers = Tracer;
using RoleTracers = Tracer;
MK_DEVICE void begin(Tracer&) {}
#endif

// The role takes the worker's record.
template <class W>
MK_DEVICE void start(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (!w.traces()) return;
    const abi::Record& r = *w.record;
    open(w, w.tracer(role), role, w.record_index, r.node, r.tile_begin, r.tile_count, dev::ticks());
  }
}

// What it waits for is there. The first call of an event counts.
template <class W>
MK_DEVICE void ready(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (!w.traces()) return;
    auto& t = w.tracer(role);
    if (t.event == nullptr || t.ready) return;
    t.ready = true;
    t.event->ready = dev::ticks();
  }
}

// The same of a wait inside a task, for a peer: the last call of an event counts.
template <class W>
MK_DEVICE void ready_now(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (w.traces() && w.tracer(role).event) w.tracer(role).event->ready = dev::ticks();
  }
}

// Its first data is at hand. The first call of an event counts.
template <class W>
MK_DEVICE void data(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (!w.traces()) return;
    auto& t = w.tracer(role);
    if (t.event == nullptr || t.data) return;
    t.data = true;
    t.event->first_data = dev::ticks();
  }
}

// Around one wait that is not over at once.
template <class W>
MK_DEVICE void wait_begins(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (w.traces()) w.tracer(role).began = dev::ticks();
  }
}
template <class W>
MK_DEVICE void waited(const W& w, abi::Role role, uint32_t counter) {
  if constexpr (kOn) {
    if (!w.traces()) return;
    auto& t = w.tracer(role);
    const uint64_t took = dev::ticks() - t.began;
    if (t.event == nullptr || took <= t.longest) return;
    t.longest = t.event->longest_wait = took;
    t.event->longest_wait_counter = counter;
  }
}

// The work is done.
template <class W>
MK_DEVICE void end(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (w.traces() && w.tracer(role).event) w.tracer(role).event->end = dev::ticks();
  }
}

// Before the signal that others wait for: who has seen it is later.
template <class W>
MK_DEVICE void published(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (!w.traces()) return;
    auto& t = w.tracer(role);
    if (t.event) t.event->published = dev::ticks();
    t.event = nullptr;
  }
}

// ------------------------------------------------------------------------------------------------ steps
// A worker begins to wait for a header; the header is there; all its records are done. With each step come two readings of
// the one clock that all workers share: by them the host aligns their ticks and sees how they drift.
template <class W>
MK_DEVICE void await_step(const W& w) {
  if constexpr (kOn) {
    if (w.traces()) w.tracer(abi::Role::kControl).began = dev::ticks();
  }
}

template <class W>
MK_DEVICE void step(const W& w) {
  if constexpr (kOn) {
    if (!w.traces() || w.header->exit != uint32_t(abi::ExitReason::kRunning)) return;
    auto& t = w.tracer(abi::Role::kControl);
    uint32_t context = 0;
    for (uint32_t r = 0; r < w.header->rows; ++r) {
      if (w.header->row[r].position >= context) context = w.header->row[r].position + 1;
    }
    open(w, t, abi::Role::kControl, abi::kNone, abi::kNone, w.header->rows, context, t.began);
    if (t.event == nullptr) return;
    t.event->ready = dev::ticks();
    t.event->first_data = dev::clock_ns();
  }
}

template <class W>
MK_DEVICE void step_end(const W& w) {
  if constexpr (kOn) {
    if (!w.traces()) return;
    auto& t = w.tracer(abi::Role::kControl);
    if (t.event == nullptr) return;
    t.event->longest_wait = dev::clock_ns();
    t.event->end = t.event->published = dev::ticks();
    t.event = nullptr;
  }
}

// A worker leaves the launch: a step that a fault cut ends here, and nobody sees it published.
template <class W>
MK_DEVICE void leave(const W& w) {
  if constexpr (kOn) {
    if (!w.traces()) return;
    auto& t = w.tracer(abi::Role::kControl);
    if (t.event == nullptr) return;
    t.event->longest_wait = dev::clock_ns();
    t.event->end = dev::ticks();
  }
}

}  // namespace megakernel::trace
