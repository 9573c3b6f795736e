// Recording the timeline on this device: the calls are those of trace.cuh, of which each stands on a line of its own here
// too, and without MEGAKERNEL_TRACE is nothing.
//
// The roles of a record are warps side by side, and what they run from one record to the next is what a step waits for: a
// hundred instructions of one of them are 1 % of a step. So they leave marks in shared memory beside the record, three or
// four instructions each: the low half of their processor's clock. All warps of a role write the same word, and the last
// of them counts. Control, who is ahead, copies the words when it wants the record's place for another one; only the
// producer, who is further ahead, writes its own. The host makes events of them (recording.py).
#pragma once

namespace megakernel::trace {

// Of a record, as in abi::TraceMarks. 0: not yet, or nobody needs it.
enum Word : uint32_t { kReady, kData, kDone, kSeen, kSums, kOut, kWait, kWords = 8 };
constexpr uint32_t kRecordAt = kWords, kStepAt = kWords + 1, kClockAt = kWords + 2, kClockNsAt = kWords + 3;
static_assert(__builtin_offsetof(abi::TraceMarks, wait) == kWait * 4);
static_assert(__builtin_offsetof(abi::TraceMarks, record) == kRecordAt * 4);
static_assert(__builtin_offsetof(abi::TraceMarks, clock_ns) == kClockNsAt * 4);
static_assert(__builtin_offsetof(abi::TraceStep, record) == kRecordAt * 4);
static_assert(sizeof(abi::TraceMarks) == sizeof(abi::TraceStep));

#ifdef MEGAKERNEL_TRACE
constexpr bool kOn = true;

// In shared memory, which no constructor has seen before `begin`.
template <uint32_t kRecords>
struct Stamps {
  uint32_t word[kRecords][kWords];
  uint64_t passes;                        // of the producer: where its ring is
  uint32_t mask, passed, producer_ready;  // of its places; records so far; when the one at work got a stage
};

// What control keeps from the begin of a launch on.
struct Scribe {
  uint64_t marks, written;  // where they are, and how many
  uint64_t began, ready;    // of the step at work
  uint64_t entry;           // of that step, where its end belongs; 0: it has none yet, or is not recorded
  uint32_t pending;         // places whose words are not copied yet
};

// Of a record, whether it has been marked.
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
    s.passed = s.producer_ready = 0;
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
// Of each worker: a ring of marks and steps, and one of the producer's.
constexpr uint64_t kMarksAt = sizeof(abi::TraceRing);

template <class W>
MK_DEVICE uint64_t marks_ring(const W& w) {
  const uint64_t events = w.args.trace_capacity * uint64_t(sizeof(abi::TraceMarks) + sizeof(abi::TracePass));
  return w.args.trace + w.id * (2 * kMarksAt + events);
}
template <class W>
MK_DEVICE uint64_t passes_ring(const W& w) {
  return marks_ring(w) + kMarksAt + w.args.trace_capacity * uint64_t(sizeof(abi::TraceMarks));
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
    t.written = t.began = t.ready = t.entry = 0;
    t.pending = 0;
    t.marks = marks_ring(w) + kMarksAt;
    if (w.args.trace == 0) return;
    t.written = reinterpret_cast<abi::TraceRing*>(marks_ring(w))->written;
    auto& s = w.stamps();
    s.passes = passes_ring(w) + kMarksAt, s.mask = w.args.trace_capacity - 1;
    s.passed = uint32_t(reinterpret_cast<abi::TraceRing*>(passes_ring(w))->written);
  }
}

// Copies the words of the record in a place; they are free again. Beside them go both clocks: those of the processors run
// at rates that differ and change within a step.
template <class W>
MK_DEVICE void copy_marks(const W& w, uint32_t slot) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t clock, ns;
  read_both(clock, ns);
  uint32_t* words = w.stamps().word[slot];
  uint32_t word = lane == kRecordAt ? w.index_in(slot) : lane == kStepAt ? uint32_t(w.step) : lane == kClockAt ? clock : ns;
  if (lane < kWords) {
    word = words[lane];
    words[lane] = 0;
  }
  if (recorded(w)) {
    if (lane <= kClockNsAt) asm volatile("st.global.u32 [%0], %1;" ::"l"(next_marks(w) + lane), "r"(word));
    ++w.scribe.written;
  }
}

// The place is free, and control is about to put another record there; it has.
template <class W>
MK_DEVICE void free(const W& w, uint32_t slot) {
  if constexpr (kOn) {
    if (w.scribe.pending < W::kPlaces) return;
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
  t.entry = reinterpret_cast<uint64_t>(entry);
  ++t.written;
}

// All records of the step are with the roles, the next place is `slot`, and `await` waits for a place to be free. What is
// left of the step is copied while it ends: at its begin the next one waits for nothing but control.
template <class W, class Await>
MK_DEVICE void last_records(W& w, uint32_t slot, uint32_t parity, Await await) {
  if constexpr (kOn) {
    write_step(w);
#pragma unroll 1
    for (; w.scribe.pending > 1; --w.scribe.pending) {
      const uint32_t behind = slot + W::kPlaces - w.scribe.pending, place = behind < W::kPlaces ? behind : behind - W::kPlaces;
      await(w, place, place >= slot ? parity : parity ^ 1);
      copy_marks(w, place);
    }
    w.scribe.pending = 0;  // the end of the queue has no marks
  }
}

// How much is in the rings.
template <class W>
MK_DEVICE void leave(const W& w) {
  if constexpr (kOn) {
    if (w.args.trace == 0) return;
    reinterpret_cast<abi::TraceRing*>(marks_ring(w))->written = w.scribe.written;
    reinterpret_cast<abi::TraceRing*>(passes_ring(w))->written = w.stamps().passed;
  }
}

// This worker ends before its time: what it is at has no end. By value, so that nothing needs an address before.
template <class W>
MK_OUT_OF_LINE void write_cut(uint64_t step, uint32_t running, Scribe t) {
  W w;
  w.begin_step(step);
  w.scribe = t;
  for (uint32_t slot = 0; slot < W::kPlaces && running; ++slot) {
    const uint32_t lane = threadIdx.x % 32;
    const bool marked = lane < kWords && w.stamps().word[slot][lane] != 0;
    if (__any_sync(0xffffffffu, marked) || w.index_in(slot) == w.consumed()) copy_marks(w, slot);
  }
  if (running && t.entry == 0) write_step(w);
  leave(w);
}
template <class W>
MK_DEVICE void cut(const W& w) {
  if constexpr (kOn) write_cut<W>(w.step, w.scribe.ready > w.scribe.began, w.scribe);
}

// Control begins to wait for a header; the header is there; all records of the step are done.
template <class W>
MK_DEVICE void await_step(const W& w) {
  if constexpr (kOn) w.scribe.began = ticks(), w.scribe.entry = 0;
}
template <class W>
MK_DEVICE void step(const W& w) {
  if constexpr (kOn) w.scribe.ready = ticks();
}
template <class W>
MK_DEVICE void step_end(const W& w) {
  if constexpr (kOn) {
    if (w.scribe.entry != 0) reinterpret_cast<abi::TraceStep*>(w.scribe.entry)->end = ticks();
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
    if (role == abi::Role::kProducer) {
      w.stamps().producer_ready = now();
    } else {
      mark(w, ready_word(role));
    }
  }
}

// Its first data is at hand. The first call counts.
template <class W>
MK_DEVICE void data(const W& w, abi::Role) {
  if constexpr (kOn) mark_first(w, kData);
}

// The same of consumers who take stages: a stage that is there already says nothing, and is not waited for again.
template <class C>
MK_DEVICE void first_stage(C& c) {
  if constexpr (kOn) {
    if (c.landed > 0) return;
    c.await();
    c.landed = 1;
    mark(c.w, kData);
  }
}

// Around one wait for a counter.
template <class W>
MK_DEVICE void waited(const W& w, uint32_t began, uint32_t counter) {
  if constexpr (kOn) {
    if (!w.speaks()) return;
    constexpr uint32_t kMost = 0xffff;
    const uint32_t took = (now() - began) / abi::kWaitTicks, length = took < kMost ? took : kMost;
    uint32_t& longest = w.stamps().word[w.record_offset() / uint32_t(sizeof(abi::Record))][kWait];
    if (length > longest >> 16) longest = length << 16 | (counter < kMost ? counter : kMost);
  }
}

// The work is done, but for telling others: the moment before they can see it. The last call counts.
template <class W>
MK_DEVICE void end(const W& w, abi::Role) {
  if constexpr (kOn) mark(w, kOut);
}

// The role is done with the record.
template <class W>
MK_DEVICE void published(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (role == abi::Role::kConsumer) return mark(w, kDone);
    auto& s = w.stamps();
    if (recorded(w)) {  // all lanes write the same
      const uint32_t index = s.passed;
      static_assert(sizeof(abi::TracePass) == 16);
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(s.passes + (index & s.mask) * 16),
                   "r"(s.producer_ready), "r"(now()), "r"(w.record_index), "r"(uint32_t(w.step)));
      __syncwarp();
      s.passed = index + 1;
    }
    s.producer_ready = 0;
  }
}

}  // namespace megakernel::trace
