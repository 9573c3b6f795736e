// Recording the timeline on this device: the calls are those of trace.cuh, of which each stands on a line of its own here
// too, and without MEGAKERNEL_TRACE is nothing.
//
// The roles of a record are warps side by side, and what they run from one record to the next is what a step waits for: a
// hundred instructions of one of them are 1 % of a step. So they leave marks in shared memory beside the record, three or
// four instructions each: the low half of their processor's clock. All warps of a role write the same word, and the last
// of them counts. Control, who is ahead, copies the words when it wants the record's place for another one, and never
// while others wait for it: at the begin of a step, and before it says that its worker has ended one. The producer, who
// is further ahead, is what keeps the memory busy: it writes two words a record, and nothing for a stage that is free when
// it comes to it. The host makes events of them (marks.py).
#pragma once

namespace megakernel::trace {

// Of a record, as in abi::TraceMarks. 0: not yet, or nobody needs it.
enum Word : uint32_t { kReady, kData, kDone, kSeen, kSums, kOut, kWait, kWords = 8 };
constexpr uint32_t kRecordAt = kWords, kStepAt = kWords + 1, kClockAt = kWords + 2, kClockNsAt = kWords + 3;
constexpr uint32_t kWaitShift = 6;
static_assert(1 << kWaitShift == abi::kWaitTicks);
static_assert(__builtin_offsetof(abi::TraceMarks, wait) == kWait * 4);
static_assert(__builtin_offsetof(abi::TraceMarks, record) == kRecordAt * 4);
static_assert(__builtin_offsetof(abi::TraceMarks, clock_ns) == kClockNsAt * 4);
static_assert(__builtin_offsetof(abi::TraceStep, record) == kRecordAt * 4);
static_assert(sizeof(abi::TraceMarks) == sizeof(abi::TraceStep));
static_assert(sizeof(abi::TracePass) == 8 && __builtin_offsetof(abi::TracePass, done) == 4);

#ifdef MEGAKERNEL_TRACE
constexpr bool kOn = true;

// In shared memory, which no constructor has seen before `begin`.
template <uint32_t kRecords>
struct Stamps {
  uint32_t word[kRecords][kWords];
  uint64_t passes;  // of the producer: the first record's place in the row of its step, or 0
  uint32_t room;    // and when it last got a stage that it had to wait for
};

// What control keeps from the begin of a launch on.
struct Scribe {
  uint64_t marks, written;  // where they are, and how many
  uint64_t began, ready;    // of the step at work
  uint64_t entry;           // of the last step that has one; 0: its end is written
  uint64_t end;             // of that step; 0: it is at work
  uint32_t held;            // of that step's last record, the word of this lane
  uint32_t last;            // and its place; kPlaces: the step had no record
  uint32_t pending;         // places whose words are not copied yet
};

// Of a record of the storer, whether it has been marked.
struct Once {
  bool marked = false;
};
#else
constexpr bool kOn = false;

template <uint32_t kRecords>
struct Stamps {};
struct Scribe {};
struct Once {};
#endif

MK_DEVICE uint32_t now() {
  uint32_t t = 0;
  if constexpr (kOn) asm volatile("mov.u32 %0, %%clock;" : "=r"(t));
  return t;
}
// The same beside the low half of the one clock that all workers share.
MK_DEVICE void read_both(uint32_t& clock, uint32_t& ns) {
  asm volatile("mov.u32 %0, %%clock;\nmov.u32 %1, %%globaltimer_lo;" : "=r"(clock), "=r"(ns));
}
MK_DEVICE uint64_t ticks() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
  return t;
}

template <uint32_t kRecords>
MK_DEVICE void begin(Stamps<kRecords>& s) {
  if constexpr (kOn) {
    s.passes = s.room = 0;
    for (auto& record : s.word) {
      for (uint32_t& word : record) word = 0;
    }
  }
}

template <class W>
MK_DEVICE uint32_t place(const W& w, Word word) {
  static_assert(sizeof(abi::Record) == 4 * kWords * 4);
  return dev::shared_address(&w.stamps().word[0][word]) + w.record_offset() / 4;
}
template <class W>
MK_DEVICE void mark(const W& w, Word word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(place(w, word)), "r"(now()));
}
template <class W>
MK_DEVICE void mark_first(const W& w, Word word) {
  uint32_t there;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(there) : "r"(place(w, word)));
  if (there == 0) mark(w, word);
}

constexpr Word ready_word(abi::Role role) {
  return role == abi::Role::kLoader ? kSeen : role == abi::Role::kStorer ? kSums : kReady;
}

// ------------------------------------------------------------------------------------------------ rings
// Of each worker: a ring of marks and steps, and as many places for what its producer leaves: a row for each step, with a
// place for each record of the queue. A row begins with the step.
constexpr uint64_t kMarksAt = sizeof(abi::TraceRing);

template <class W>
MK_DEVICE uint64_t marks_ring(const W& w) {
  return w.args.trace + w.id * (kMarksAt + w.args.trace_capacity * uint64_t(sizeof(abi::TraceMarks) + sizeof(abi::TracePass)));
}
template <class W>
MK_DEVICE uint64_t passes_row(const W& w) {
  const uint32_t places = w.args.queue_length + 1, rows = w.args.trace_capacity / places;
  const uint64_t row = uint64_t(uint32_t(w.step) % rows) * places * sizeof(abi::TracePass);
  return marks_ring(w) + kMarksAt + w.args.trace_capacity * uint64_t(sizeof(abi::TraceMarks)) + row;
}
template <class W>
MK_DEVICE uint32_t* next_marks(const W& w) {
  const uint32_t index = uint32_t(w.scribe.written) & (w.args.trace_capacity - 1);
  return reinterpret_cast<uint32_t*>(w.scribe.marks + index * sizeof(abi::TraceMarks));
}

// With no recording both are 0, which no step is.
template <class W>
MK_DEVICE bool recorded(const W& w) {
  return w.step >= w.args.trace_first && w.step <= w.args.trace_last;
}

// ------------------------------------------------------------------------------------------------ control
template <class W>
MK_DEVICE void begin_launch(const W& w) {
  if constexpr (kOn) {
    auto& t = w.scribe;
    t.written = t.began = t.ready = t.entry = t.end = 0;
    t.held = t.pending = 0, t.last = W::kPlaces;
    t.marks = marks_ring(w) + kMarksAt;
    if (w.args.trace != 0) t.written = reinterpret_cast<abi::TraceRing*>(marks_ring(w))->written;
  }
}

// The words of the record in a place, one a lane; they are free again. Beside them go both clocks: those of the processors
// run at rates that differ and change within a step.
template <class W>
MK_DEVICE uint32_t take_marks(const W& w, uint32_t slot) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t clock, ns;
  read_both(clock, ns);
  uint32_t* words = w.stamps().word[slot];
  uint32_t word = lane == kRecordAt ? w.index_in(slot) : lane == kStepAt ? uint32_t(w.step) : lane == kClockAt ? clock : ns;
  if (lane < kWords) {
    word = words[lane];
    words[lane] = 0;
  }
  return word;
}
template <class W>
MK_DEVICE void write_marks(const W& w, uint32_t word) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane <= kClockNsAt) asm volatile("st.global.u32 [%0], %1;" ::"l"(next_marks(w) + lane), "r"(word));
  ++w.scribe.written;
}
template <class W>
MK_DEVICE void copy_marks(const W& w, uint32_t slot) {
  const uint32_t word = take_marks(w, slot);
  if (recorded(w)) write_marks(w, word);
}

// What was not written when the last step ended.
template <class W>
MK_DEVICE void write_end(const W& w) {
  auto& t = w.scribe;
  if (t.entry == 0) return;
  reinterpret_cast<abi::TraceStep*>(t.entry)->end = t.end;
  if (t.last < W::kPlaces) write_marks(w, t.held);
  t.entry = 0;
}

// The place is free, and control is about to put another record there; it has. The first records of a step find places
// of which nothing is left to copy.
template <class W>
MK_DEVICE void free(const W& w, uint32_t slot) {
  if constexpr (kOn) {
    if (w.scribe.pending < W::kPlaces) return;
    write_end(w);
    copy_marks(w, slot);
    --w.scribe.pending;
  }
}
template <class W>
MK_DEVICE void filled(const W& w) {
  if constexpr (kOn) ++w.scribe.pending;
}

// The step at work; its end comes later.
template <class W>
MK_DEVICE void write_step(const W& w) {
  if (!recorded(w)) return;
  auto& t = w.scribe;
  uint32_t context = 0;
  for (uint32_t r = 0; r < w.header->rows; ++r) {
    if (w.header->row[r].position >= context) context = w.header->row[r].position + 1;
  }
  auto* entry = reinterpret_cast<abi::TraceStep*>(next_marks(w));
  *entry = {t.began, t.ready, 0, dev::clock_ns(), abi::kNone, uint32_t(w.step), ticks(), w.header->rows, context};
  t.entry = reinterpret_cast<uint64_t>(entry), t.end = 0;
  ++t.written;
}

// All records of the step are with the roles, the next place is `slot`, and `await` waits for a place to be free. All but
// the last record are copied while that runs.
template <class W, class Await>
MK_DEVICE void last_records(W& w, uint32_t slot, uint32_t parity, Await await) {
  if constexpr (kOn) {
    auto& t = w.scribe;
    write_end(w);
    write_step(w);
    const auto place = [&] {
      const uint32_t behind = slot + W::kPlaces - t.pending;
      return behind < W::kPlaces ? behind : behind - W::kPlaces;
    };
#pragma unroll 1
    for (; t.pending > 2; --t.pending) {
      const uint32_t p = place();
      await(w, p, p >= slot ? parity : parity ^ 1);
      copy_marks(w, p);
    }
    t.last = t.pending == 2 ? place() : W::kPlaces;
    t.pending = 0;  // the end of the queue has no marks
  }
}

// How much is in the ring.
template <class W>
MK_DEVICE void leave(const W& w) {
  if constexpr (kOn) {
    if (w.args.trace == 0) return;
    write_end(w);
    reinterpret_cast<abi::TraceRing*>(marks_ring(w))->written = w.scribe.written;
  }
}

// This worker ends before its time: what it is at has no end. By value, so that nothing needs an address before.
template <class W>
MK_OUT_OF_LINE void write_cut(uint64_t step, uint32_t running, Scribe t) {
  W w;
  w.begin_step(step);
  w.scribe = t;
  if (t.end != 0) write_end(w);
  for (uint32_t slot = 0; slot < W::kPlaces && running; ++slot) {
    const uint32_t lane = threadIdx.x % 32;
    const bool marked = lane < kWords && w.stamps().word[slot][lane] != 0;
    if (__any_sync(0xffffffffu, marked) || w.index_in(slot) == w.consumed()) copy_marks(w, slot);
  }
  if (running && w.scribe.entry == 0) write_step(w);
  w.scribe.last = W::kPlaces;
  leave(w);
}
template <class W>
MK_DEVICE void cut(const W& w) {
  if constexpr (kOn) write_cut<W>(w.step, w.scribe.ready > w.scribe.began, w.scribe);
}

// Control begins to wait for a header; the header is there; all records of the step are done.
template <class W>
MK_DEVICE void await_step(const W& w) {
  if constexpr (kOn) w.scribe.began = ticks();
}
template <class W>
MK_DEVICE void step(const W& w) {
  if constexpr (kOn) w.scribe.ready = ticks();
}
template <class W>
MK_DEVICE void step_end(const W& w) {
  if constexpr (kOn) w.scribe.end = ticks();
}
// And others have been told so.
template <class W>
MK_DEVICE void step_told(const W& w) {
  if constexpr (kOn) {
    if (w.scribe.last < W::kPlaces) w.scribe.held = take_marks(w, w.scribe.last);
  }
}

// ------------------------------------------------------------------------------------------------ producer
// It comes to the next step.
template <class W>
MK_DEVICE void begin_passes(const W& w) {
  if constexpr (kOn) {
    const uint64_t row = recorded(w) ? passes_row(w) : 0;
    if (row != 0) asm volatile("st.global.v2.u32 [%0], {%1, %1};" ::"l"(row), "r"(uint32_t(w.step)));
    __syncwarp();
    w.stamps().passes = row != 0 ? row + sizeof(abi::TracePass) : 0;
    __syncwarp();
  }
}

// A wait that is not over at once; of those for room in the ring, the moment that it came.
template <bool kRoom, class W>
MK_DEVICE void held_up(const W& w, uint32_t barrier, uint32_t parity) {
  if constexpr (kOn && kRoom) {
    while (!dev::barrier_try(barrier, parity)) {
      if (w.stopped()) return;
    }
    w.stamps().room = now();
  }
}

// It is done with a record of which it has copied something. All lanes write the same.
template <class W>
MK_DEVICE void passed(const W& w, bool any = true) {
  if constexpr (kOn) {
    const auto& s = w.stamps();
    if (s.passes == 0 || !any) return;
    const uint64_t place = s.passes + w.record_index * uint64_t(sizeof(abi::TracePass));
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(place), "r"(s.room), "r"(now()));
  }
}

// ------------------------------------------------------------------------------------------------ roles
// What a role waits for is there. Of several calls the last counts.
template <class W>
MK_DEVICE void ready_now(const W& w, abi::Role role) {
  if constexpr (kOn) mark(w, ready_word(role));
}

// The same where the first call counts.
template <class W>
MK_DEVICE void ready(const W& w, abi::Role role) {
  if constexpr (kOn) mark_first(w, ready_word(role));
}
template <class W, class O>
MK_DEVICE void ready(const W& w, abi::Role role, O& once) {
  if constexpr (kOn) {
    if (once.marked) return;
    once.marked = true;
    mark(w, ready_word(role));
  }
}

// Its first data is at hand. The first call counts.
template <class W>
MK_DEVICE void data(const W& w, abi::Role) {
  if constexpr (kOn) mark_first(w, kData);
}

// The same where there is one call.
template <class W>
MK_DEVICE void data_now(const W& w) {
  if constexpr (kOn) mark(w, kData);
}

// Around one wait for a counter.
template <class W>
MK_DEVICE void waited(const W& w, uint32_t began, uint32_t counter) {
  if constexpr (kOn) {
    // In one piece: nothing of it is done for a record that waits for no counter. Lanes that do not speak write nothing.
    asm volatile(
        "{\n"
        ".reg .pred mine, longer;\n"
        ".reg .u32 took, longest, who;\n"
        "mov.u32 who, %%tid.x;\n"
        "setp.eq.u32 mine, who, 0;\n"
        "setp.eq.or.u32 mine, who, %3, mine;\n"
        "mov.u32 took, %%clock;\n"
        "sub.u32 took, took, %1;\n"
        "shr.u32 took, took, %4;\n"
        "min.u32 took, took, 0xffff;\n"
        "ld.shared.u32 longest, [%0 + %5];\n"
        "shr.u32 longest, longest, 16;\n"
        "setp.gt.and.u32 longer, took, longest, mine;\n"
        "min.u32 who, %2, 0xffff;\n"
        "shl.b32 took, took, 16;\n"
        "or.b32 took, took, who;\n"
        "@longer st.shared.u32 [%0 + %5], took;\n"
        "}\n" ::"r"(place(w, kReady)), "r"(began), "r"(counter), "n"(W::kSpeaker), "n"(kWaitShift), "n"(kWait * 4));
  }
}

// The work is done, but for telling others: the moment before they can see it. The last call counts.
template <class W>
MK_DEVICE void end(const W& w, abi::Role) {
  if constexpr (kOn) mark(w, kOut);
}

// The consumers are done with the record.
template <class W>
MK_DEVICE void published(const W& w, abi::Role) {
  if constexpr (kOn) mark(w, kDone);
}

}  // namespace megakernel::trace
