// Recording the timeline on this device: the calls are those of trace.cuh, of which each stands on a line of its own here
// too, and without MEGAKERNEL_TRACE is nothing.
//
// The roles of a record are warps side by side, and what they run from one record to the next is what a step waits for: a
// hundred instructions of one of them are 1 % of a step. So they leave marks in shared memory beside the record, three or
// four instructions each: the low half of their processor's clock. All warps of a role write the same word, and the last
// of them counts. Control, who is ahead, copies the words when it wants the record's place for another one, a word a lane.
// The producer, who is further ahead, is what keeps the memory busy: it writes two words a record, and nothing for a stage
// that is free when it comes to it. The host makes events of them (marks.py).
#pragma once

namespace megakernel::trace {

// Of a record, as in abi::TraceMarks. 0: not yet, or nobody needs it.
enum Word : uint32_t { kReady, kData, kDone, kSeen, kSums, kOut, kWait, kStep, kWords };
constexpr uint32_t kClock = kWords, kClockNs = kWords + 1, kRecordAt = kWords + 2, kMore = 3;
constexpr uint32_t kWaitShift = 6;
static_assert(1 << kWaitShift == abi::kWaitTicks);
static_assert(__builtin_offsetof(abi::TraceMarks, wait) == kWait * 4);
static_assert(__builtin_offsetof(abi::TraceMarks, step) == kStep * 4 && __builtin_offsetof(abi::TraceStep, step) == kStep * 4);
static_assert(__builtin_offsetof(abi::TraceMarks, clock) == kClock * 4);
static_assert(__builtin_offsetof(abi::TraceMarks, clock_ns) == kClockNs * 4);
static_assert(__builtin_offsetof(abi::TraceMarks, record) == kRecordAt * 4);
static_assert(__builtin_offsetof(abi::TraceStep, record) == kRecordAt * 4);
static_assert(sizeof(abi::TraceMarks) == sizeof(abi::TraceStep));
static_assert(sizeof(abi::TracePass) == 8 && __builtin_offsetof(abi::TracePass, done) == 4);

#ifdef MEGAKERNEL_TRACE
constexpr bool kOn = true;

// In shared memory, which no constructor has seen before `begin`.
template <uint32_t kRecords>
struct Stamps {
  uint64_t passes;  // of the producer: the first record's place in the row of its step, or 0
  uint32_t word[kRecords][kWords], more[kRecords][kMore];
};

// What a warp keeps. Registers, of which each role has those that it uses.
struct Scribe {
  // Of the producer, in a record: where its step's row is, or 0; when it last got a stage that it had to wait for.
  uint64_t row;
  uint32_t room, stride;
  // Of control, in a launch.
  uint32_t word, each;    // of this lane, in shared memory: its word of the first place, and to that of the next one
  uint32_t held;          // what was in it, for the ring
  uint64_t next;          // where the next entry goes
  uint64_t written;       // entries, before the ring last began anew
  uint32_t left;          // places of the ring from `next` on
  uint32_t step;          // at work, 0: it is not recorded
  uint64_t began, ready;  // of that step
  uint64_t entry, end;    // of the last step that has an entry: where it is, or 0 when nothing of it is to come
  uint32_t told, told_ns; // of that step
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
    s.passes = 0;
    for (uint32_t i = 0; i < kRecords * kWords; ++i) s.word[0][i] = 0;
    for (uint32_t i = 0; i < kRecords * kMore; ++i) s.more[0][i] = 0;
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
// What workers write at about the same time is side by side, so that they need few pages of memory. First the head of each
// worker's ring; then for each place of a ring that of all workers, marks or steps; then what producers leave: a row for
// each step, in which each record of the queue has a place of all workers. A row begins with the step.
template <class W>
MK_DEVICE abi::TraceRing* ring(const W& w) {
  return reinterpret_cast<abi::TraceRing*>(w.args.trace) + w.id;
}
template <class W>
MK_DEVICE uint64_t marks_at(const W& w, uint32_t place) {
  const uint64_t begin = w.args.trace + w.args.workers * sizeof(abi::TraceRing);
  return begin + (place * uint64_t(w.args.workers) + w.id) * sizeof(abi::TraceMarks);
}
template <class W>
MK_DEVICE uint64_t passes_row(const W& w) {
  const uint32_t places = w.args.queue_length + 1, rows = w.args.trace_capacity / places;
  const uint64_t begin = marks_at(w, w.args.trace_capacity) - w.id * sizeof(abi::TraceMarks);
  const uint64_t place = uint32_t(w.step) % rows * places;
  return begin + (place * w.args.workers + w.id) * sizeof(abi::TracePass);
}

// With no recording both are 0, which no step is.
template <class W>
MK_DEVICE bool recorded(const W& w) {
  return w.step >= w.args.trace_first && w.step <= w.args.trace_last;
}

// ------------------------------------------------------------------------------------------------ control
// The next entry is the one with so many before it.
template <class W>
MK_DEVICE void seek(const W& w, uint64_t written) {
  auto& t = w.scribe;
  const uint32_t at = uint32_t(written) & (w.args.trace_capacity - 1);
  t.next = marks_at(w, at);
  t.left = w.args.trace_capacity - at;
  t.written = written - at;
}
template <class W>
MK_DEVICE void wrote(const W& w) {
  auto& t = w.scribe;
  t.next += w.args.workers * sizeof(abi::TraceMarks);
  if (--t.left == 0) seek(w, t.written + w.args.trace_capacity);
}

template <class W>
MK_DEVICE void begin_launch(const W& w) {
  if constexpr (kOn) {
    auto& t = w.scribe;
    const auto& s = w.stamps();
    const uint32_t lane = threadIdx.x % 32, other = lane - kWords;
    t.began = t.ready = t.entry = t.end = 0, t.step = t.told = t.told_ns = t.held = 0;
    t.word = dev::shared_address(lane < kWords ? &s.word[0][lane] : &s.more[0][other < kMore ? other : 0]);
    t.each = (lane < kWords ? kWords : kMore) * 4;
    seek(w, w.args.trace != 0 ? ring(w)->written : 0);
  }
}

// Control is about to put another record into the place, whose words it takes and clears. Nothing else is done before the
// roles have the record.
template <class W>
MK_DEVICE void free(const W& w, uint32_t slot) {
  if constexpr (kOn) {
    const uint32_t at = w.scribe.word + slot * w.scribe.each;
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    if (threadIdx.x % 32 < kWords) asm volatile("st.shared.u32 [%0], 0;" ::"r"(at) : "memory");
    w.scribe.held |= word;  // of a place that a record has left which nobody needs nothing comes again, or the same
  }
}
// To the ring, if it is of a step that is recorded. Whole sectors are written.
template <class W>
MK_DEVICE void write_held(const W& w) {
  auto& t = w.scribe;
  const uint32_t word = t.held, lane = threadIdx.x % 32;
  t.held = 0;
  if (__shfl_sync(0xffffffffu, word, kStep) == 0) return;
  if (lane < sizeof(abi::TraceMarks) / 4) asm volatile("st.global.u32 [%0], %1;" ::"l"(t.next + lane * 4), "r"(word));
  wrote(w);
}
// The roles have the record, but for `last`, which is the end of the queue. Beside its words go both clocks: those of the
// processors run at rates that differ and change within a step.
template <class W>
MK_DEVICE void filled(const W& w, uint32_t slot, uint32_t index, bool last) {
  if constexpr (kOn) {
    write_held(w);
    auto& s = w.stamps();
    s.word[slot][kStep] = last ? 0 : w.scribe.step;
    read_both(s.more[slot][0], s.more[slot][1]);
    s.more[slot][2] = index;
  }
}

// What was not written when the last step ended.
template <class W>
MK_DEVICE void write_end(const W& w) {
  auto& t = w.scribe;
  if (t.entry == 0) return;
  auto* entry = reinterpret_cast<abi::TraceStep*>(t.entry);
  entry->end = t.end, entry->told = t.told, entry->told_ns = t.told_ns;
  t.entry = 0;
}

// The step at work; its end comes later.
template <class W>
MK_DEVICE void write_step(const W& w) {
  auto& t = w.scribe;
  write_end(w);
  if (t.step == 0) return;
  uint32_t context = 0;
#pragma unroll 1
  for (uint32_t r = 0; r < w.header->rows; ++r) context = max(context, w.header->row[r].position + 1);
  *reinterpret_cast<abi::TraceStep*>(t.next) = {
      t.began, t.ready, 0, w.header->rows, t.step, ticks(), abi::kNone, context, dev::clock_ns(), 0, 0};
  t.entry = t.next, t.end = 0;
  wrote(w);
}

// All records of the step are with the roles.
template <class W>
MK_DEVICE void handed_on(const W& w) {
  if constexpr (kOn) write_step(w);
}

// The launch ends, and nothing is at work: all that is left, and how much is in the ring.
template <class W>
MK_DEVICE void leave(const W& w) {
  if constexpr (kOn) {
    if (w.args.trace == 0) return;
    write_end(w);
#pragma unroll 1
    for (uint32_t slot = 0; slot < W::kPlaces; ++slot) {
      write_held(w);
      free(w, slot);
    }
    write_held(w);
    ring(w)->written = w.scribe.written + (w.args.trace_capacity - w.scribe.left);
  }
}

// This worker ends before its time: what it is at has no end, and what it has not begun is not there. By value, so that
// nothing needs an address before.
template <class W>
MK_OUT_OF_LINE void write_cut(uint64_t step, Scribe t) {
  W w;
  w.begin_step(step);
  w.scribe = t;
  if (t.ready > t.began && (t.entry == 0 || t.end != 0)) write_step(w);
#pragma unroll 1
  for (uint32_t slot = 0; slot < W::kPlaces; ++slot) {
    uint32_t* words = w.stamps().word[slot];
    const uint32_t lane = threadIdx.x % 32;
    const bool marked = __any_sync(0xffffffffu, lane < kStep && words[lane] != 0);
    if (!marked && w.index_in(slot) != w.consumed()) words[kStep] = 0;
  }
  leave(w);
}
template <class W>
MK_DEVICE void cut(const W& w) {
  if constexpr (kOn) write_cut<W>(w.step, w.scribe);
}

// Control begins to wait for a header; the header is there; all records of the step are done.
template <class W>
MK_DEVICE void await_step(const W& w) {
  if constexpr (kOn) w.scribe.began = ticks();
}
template <class W>
MK_DEVICE void step(const W& w) {
  if constexpr (kOn) w.scribe.ready = ticks(), w.scribe.step = recorded(w) ? uint32_t(w.step) : 0;
}
template <class W>
MK_DEVICE void step_end(const W& w) {
  if constexpr (kOn) w.scribe.end = ticks();
}
// And others have been told so.
template <class W>
MK_DEVICE void step_told(const W& w) {
  if constexpr (kOn) read_both(w.scribe.told, w.scribe.told_ns);
}

// ------------------------------------------------------------------------------------------------ producer
// It comes to the next step.
template <class W>
MK_DEVICE void begin_passes(const W& w) {
  if constexpr (kOn) {
    const uint64_t row = recorded(w) ? passes_row(w) : 0;
    if (row != 0) asm volatile("st.global.v2.u32 [%0], {%1, %1};" ::"l"(row), "r"(uint32_t(w.step)));
    __syncwarp();
    w.stamps().passes = row != 0 ? row + w.args.workers * sizeof(abi::TracePass) : 0;
    __syncwarp();
  }
}

// It begins with a record.
template <class W>
MK_DEVICE void begin_pass(const W& w) {
  if constexpr (kOn) {
    auto& t = w.scribe;
    t.row = w.stamps().passes, t.room = 0, t.stride = w.args.workers * sizeof(abi::TracePass);
  }
}

// A wait that is not over at once. Of those for room in the ring a look that waits is here; true: it has come.
template <bool kRoom, class W>
MK_DEVICE bool held_up(const W& w, uint32_t barrier, uint32_t parity) {
  if constexpr (kOn && kRoom) {
    const bool there = dev::barrier_try(barrier, parity);
    // Also when it has not: the next look may find it. `now` would take the slower way of values that all lanes share.
    w.scribe.room = uint32_t(ticks());
    return there;
  }
  return false;
}

// It is done with a record of which it has copied something. All lanes write the same.
template <class W>
MK_DEVICE void passed(const W& w, bool any = true) {
  if constexpr (kOn) {
    const auto& t = w.scribe;
    if (t.row == 0 || !any) return;
    const uint64_t place = t.row + w.record_index * uint64_t(t.stride);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(place), "r"(t.room), "r"(now()));
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

// Around one wait for a counter. Of all who wait for one the longest counts.
template <class W>
MK_DEVICE void waited(const W& w, uint32_t began, uint32_t counter) {
  if constexpr (kOn) {
    const uint32_t took = min((now() - began) >> kWaitShift, 0xffffu), who = min(counter, 0xffffu);
    asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(place(w, kWait)), "r"(took << 16 | who) : "memory");
  }
}

// The work is done, but for telling others: the moment before they can see it. The last call counts.
template <class W>
MK_DEVICE void end(const W& w, abi::Role) {
  if constexpr (kOn) mark(w, kOut);
}

// A warp is done with the record in a place; that the consumers are is what counts.
template <class B>
MK_DEVICE void done(const B& block, uint32_t slot, abi::Role role) {
  if constexpr (kOn) {
    if (role == abi::Role::kConsumer) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(dev::shared_address(&block.stamps.word[slot][kDone])), "r"(now()));
    }
  }
}

}  // namespace megakernel::trace
