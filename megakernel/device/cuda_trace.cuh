// Recording the timeline on this device: the calls are those of trace.cuh, of which each stands on a line of its own here
// too, and without MEGAKERNEL_TRACE is nothing.
//
// The roles of a record are warps side by side, and what they run between two records is what a step waits for. So they
// leave moments in shared memory beside the record, three or four instructions each: the low half of their processor's
// clock. All warps of a role write the same word, and the last of them counts. Control, who is ahead, turns moments into
// events when it wants the record's place for another one; only the producer, who is further ahead, writes its own.
#pragma once

namespace megakernel::trace {

// Of a record. 0: not yet, or nobody needs it.
enum Word : uint32_t {
  kReady,  // consumers: what they wait for is there
  kData,   // their first stage is full; 0: it was before
  kDone,   // they are done with the record
  kSeen,   // loaders: what others publish is there
  kLent,   // they hand it to the consumers
  kSums,   // storer: the first sums are there
  kOut,    // storer, or consumers of a task without one: the moment before others can see the last of it
  kWait,   // the longest wait for a counter: its length in kWaitTicks in the upper half, the counter in the lower one
  kWords
};
constexpr uint32_t kWaitTicks = 64, kMostHalf = 0xffff;

// What control knows of each ring in the lane of its number: events so far, and when its role was last done.
struct Pen {
  uint64_t written;
  uint32_t last;
};

#ifdef MEGAKERNEL_TRACE
constexpr bool kOn = true;

// In shared memory, which no constructor has seen before `begin`.
template <uint32_t kRecords>
struct Stamps {
  uint64_t produced;  // events of the producer; kNone64: not looked up yet
  uint32_t producer_ready, producer_last;
  uint32_t word[kRecords][kWords];
};

// What control keeps from the begin of a launch on: the step before, ticks of the one at work, nanoseconds beside them.
struct Scribe {
  Pen pen;
  uint64_t step, began, ready, ended, ready_ns, ended_ns;
  uint32_t slot, pending, old;  // the next place; places with records whose events are not written; of the step before
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
MK_DEVICE uint64_t ticks() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
  return t;
}

template <uint32_t kRecords>
MK_DEVICE void begin(Stamps<kRecords>& s) {
  if constexpr (kOn) {
    s.produced = abi::kNone64, s.producer_ready = 0, s.producer_last = now();
    for (auto& record : s.word) {
      for (uint32_t& word : record) word = 0;
    }
  }
}

template <class W>
MK_DEVICE uint32_t place(const W& w, Word word) {
  return dev::shared_address(&w.stamps().word[0][word]) + w.record_place() * uint32_t(kWords * 4);
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

// ------------------------------------------------------------------------------------------------ events
// Rings: 0 consumers, 1 producer, 2 storer, 3 steps, 4 loaders.
MK_DEVICE uint32_t ring_of(abi::Role role) {
  return role == abi::Role::kProducer ? 1 : role == abi::Role::kStorer ? 2 : role == abi::Role::kControl ? 3
         : role == abi::Role::kLoader ? 4 : 0;
}
MK_DEVICE abi::TraceRing* ring_at(const abi::KernelArgs& a, uint32_t ring) {
  const uint64_t bytes = sizeof(abi::TraceRing) + uint64_t(a.trace_capacity) * sizeof(abi::TraceEvent);
  return reinterpret_cast<abi::TraceRing*>(a.trace + (uint64_t(blockIdx.x) * abi::kTraceRings + ring) * bytes);
}

// What an event is about.
struct Subject {
  abi::Role role;
  uint32_t record, node, tile_begin, tile_count, step;
};

// Words of an event are one lane each: `own` of lanes from kFirst on is the moment, in pairs of low and high, that the lane
// has a half of; then what the longest wait was for.
constexpr uint32_t kFirst = __builtin_offsetof(abi::TraceEvent, start) / 4, kEventWords = sizeof(abi::TraceEvent) / 4;
constexpr uint32_t kCounterAt = __builtin_offsetof(abi::TraceEvent, longest_wait_counter) / 4;
enum Moment : uint32_t { kStart, kReadyAt, kFirstData, kEnd, kPublished, kLongest, kMoments };
static_assert(kFirst == 6 && kCounterAt == kFirst + 2 * kMoments && kEventWords <= 31, "a word a lane");

MK_DEVICE void write(abi::TraceRing* ring, uint32_t capacity, uint64_t index, const Subject& s, uint64_t own) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t word = blockIdx.x | uint32_t(s.role) << 16;
  if (lane == 1) word = s.record;
  if (lane == 2) word = s.node;
  if (lane == 3) word = s.tile_begin;
  if (lane == 4) word = s.tile_count;
  if (lane == 5) word = s.step;
  if (lane >= kFirst) word = uint32_t(lane % 2 ? own >> 32 : own);
  auto* event = reinterpret_cast<uint32_t*>(reinterpret_cast<abi::TraceEvent*>(ring + 1) + (index & (capacity - 1)));
  if (lane < kEventWords) event[lane] = word;
  if (lane == 31) ring->written = index + 1;
}
__device__ __noinline__ void write_event(abi::TraceRing* ring, uint32_t capacity, uint64_t index, Subject s, uint64_t own) {
  write(ring, capacity, index, s, own);
}

// The moment that this lane has a half of.
MK_DEVICE uint32_t own_moment() { return (threadIdx.x % 32 - kFirst) / 2; }
// A moment before `base`, by less than a turn of the low half.
MK_DEVICE uint64_t whole(uint32_t moment, uint64_t base) {
  return moment == 0 ? 0 : base - (uint32_t(base) - moment);
}

template <class W>
MK_DEVICE bool recorded(const W& w, uint64_t step) {
  return w.args.trace != 0 && step >= w.args.trace_first && step <= w.args.trace_last;
}

// The events of a record whose roles are done, or as far as they have come; its words are free again. `step` of a record
// that is not to be recorded is kNone.
__device__ __noinline__ Pen drain(
    Pen pen, const abi::KernelArgs& args, const abi::Record& record, uint32_t at, uint32_t* words, uint32_t step, uint64_t base) {
  const uint32_t lane = threadIdx.x % 32, moment = own_moment();
  const bool loaded = words[kSeen] != 0, stored = words[kSums] != 0, done = words[kDone] != 0;
  const uint32_t wait = words[kWait];
#pragma unroll 1
  for (uint32_t i = 0; i < 3 && record.opcode != abi::kEnd; ++i) {
    const abi::Role role = i == 0 ? abi::Role::kConsumer : i == 1 ? abi::Role::kStorer : abi::Role::kLoader;
    const uint32_t ring = ring_of(role), before = __shfl_sync(0xffffffffu, pen.last, ring);
    const uint32_t out = i == 2 ? kLent : i == 1 || (done && !stored && words[kOut] != 0) ? kOut : kDone;
    if (lane == ring && words[i == 0 ? uint32_t(kDone) : out] != 0 && (i != 1 || stored)) {
      pen.last = words[i == 0 ? uint32_t(kDone) : out];
    }
    if (step == abi::kNone || (i == 1 && !stored) || (i == 2 && !loaded)) continue;
    const uint32_t from = moment == kReadyAt ? uint32_t(ready_word(role)) : moment == kFirstData && i == 0 ? uint32_t(kData)
                          : moment == kPublished ? out : uint32_t(kWords);
    uint64_t own = whole(moment == kStart ? before : from < kWords ? words[from] : 0, base);
    const bool waited = wait != 0 && i == (loaded ? 2 : 0);
    if (moment == kLongest && waited) own = (wait >> 16) * kWaitTicks;
    if (lane == kCounterAt) own = waited && (wait & kMostHalf) != kMostHalf ? wait & kMostHalf : abi::kNone;
    const uint64_t index = __shfl_sync(0xffffffffu, pen.written, ring);
    write(ring_at(args, ring), args.trace_capacity, index,
          {role, at, record.node, record.tile_begin, record.tile_count, step}, own);
    if (lane == ring) ++pen.written;
  }
  __syncwarp();
  if (lane < kWords) words[lane] = 0;
  __syncwarp();
  return pen;
}

// ------------------------------------------------------------------------------------------------ control
template <class W>
MK_DEVICE void begin_launch(const W& w) {
  if constexpr (kOn) {
    auto& t = w.scribe;
    const uint32_t lane = threadIdx.x % 32;
    t.pen = {w.args.trace != 0 && lane < abi::kTraceRings ? ring_at(w.args, lane)->written : 0, 0};
    t.step = t.began = t.ready = t.ended = t.ready_ns = t.ended_ns = 0;
    t.slot = t.pending = t.old = 0;
  }
}

// The place of the record that was handed over first.
template <class W>
MK_DEVICE uint32_t oldest(const W& w) {
  const uint32_t behind = w.scribe.slot + W::kPlaces - w.scribe.pending;
  return behind < W::kPlaces ? behind : behind - W::kPlaces;
}

// Writes the events of that record.
template <class W>
MK_DEVICE void pop(const W& w) {
  auto& t = w.scribe;
  const uint32_t slot = oldest(w);
  const bool old = t.old > 0;
  const uint64_t step = old ? t.step : w.step;
  t.pen = drain(t.pen, w.args, w.record_in(slot), w.index_in(slot), w.stamps().word[slot],
                recorded(w, step) ? uint32_t(step) : abi::kNone, old ? t.ended : ticks());
  --t.pending;
  if (old && --t.old == 0) t.pen.last = uint32_t(t.ready);
}

// The next place is free, and control is about to put another record there; it has.
template <class W>
MK_DEVICE void free(const W& w) {
  if constexpr (kOn) {
    if (w.scribe.pending == W::kPlaces) pop(w);
  }
}
template <class W>
MK_DEVICE void filled(const W& w) {
  if constexpr (kOn) {
    auto& t = w.scribe;
    ++t.pending;
    t.slot = t.slot + 1 == W::kPlaces ? 0 : t.slot + 1;
  }
}

template <class W>
MK_DEVICE void write_step(const W& w, uint64_t end, uint64_t end_ns, bool whole) {
  if (!recorded(w, w.step)) return;
  auto& t = w.scribe;
  uint32_t context = 0;
  for (uint32_t r = 0; r < w.header->rows; ++r) {
    if (w.header->row[r].position >= context) context = w.header->row[r].position + 1;
  }
  const uint32_t lane = threadIdx.x % 32, moment = own_moment(), ring = ring_of(abi::Role::kControl);
  uint64_t own = moment == kStart ? t.began : moment == kReadyAt ? t.ready : moment == kFirstData ? t.ready_ns
                 : moment == kEnd || (moment == kPublished && whole) ? end : moment == kLongest ? end_ns : 0;
  if (lane == kCounterAt) own = abi::kNone;
  write_event(ring_at(w.args, ring), w.args.trace_capacity, __shfl_sync(0xffffffffu, t.pen.written, ring),
              {abi::Role::kControl, abi::kNone, abi::kNone, w.header->rows, context, uint32_t(w.step)}, own);
  if (lane == ring) ++t.pen.written;
}

// This worker ends before its time: what it is at has no end. By value, so that nothing needs an address before.
template <class W>
MK_OUT_OF_LINE void write_cut(uint64_t step, bool within, Scribe t) {
  W w;
  w.begin_step(step);
  w.scribe = t;
  for (bool open = false; w.scribe.pending > 0 && !open;) {
    open = w.stamps().word[oldest(w)][kDone] == 0;
    pop(w);
  }
  if (within) write_step(w, ticks(), dev::clock_ns(), false);
}
template <class W>
MK_DEVICE void cut(const W& w) {
  if constexpr (kOn) write_cut<W>(w.step, w.scribe.ready > w.scribe.ended, w.scribe);
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
    const uint32_t took = (now() - began) / kWaitTicks, length = took < kMostHalf ? took : kMostHalf;
    const uint32_t word = length << 16 | (counter < kMostHalf ? counter : kMostHalf);
    uint32_t& longest = w.stamps().word[w.record_place()][kWait];
    if (word >> 16 > longest >> 16) longest = word;
  }
}

// The work is done, but for telling others: the moment before they can see it. The last call counts.
template <class W>
MK_DEVICE void end(const W& w, abi::Role role) {
  if constexpr (kOn) mark(w, role == abi::Role::kLoader ? kLent : kOut);
}

// The role is done with the record.
template <class W>
MK_DEVICE void published(const W& w, abi::Role role) {
  if constexpr (kOn) {
    if (role == abi::Role::kConsumer) return mark(w, kDone);
    auto& s = w.stamps();
    const uint64_t done = ticks();
    if (recorded(w, w.step)) {
      const uint32_t lane = threadIdx.x % 32, moment = own_moment(), ring = ring_of(role);
      abi::TraceRing* to = ring_at(w.args, ring);
      const uint64_t index = s.produced == abi::kNone64 ? to->written : s.produced;
      const uint32_t low = moment == kStart ? s.producer_last : moment == kReadyAt ? s.producer_ready : 0;
      uint64_t own = moment == kPublished ? done : whole(low, done);
      if (lane == kCounterAt) own = abi::kNone;
      const abi::Record& r = *w.record;
      write_event(to, w.args.trace_capacity, index,
                  {role, w.record_index, r.node, r.tile_begin, r.tile_count, uint32_t(w.step)}, own);
      __syncwarp();
      if (lane == 0) s.produced = index + 1;
    }
    __syncwarp();
    s.producer_ready = 0, s.producer_last = uint32_t(done);
    __syncwarp();
  }
}

// ------------------------------------------------------------------------------------------------ steps
// Control begins to wait for a header; the header is there; all records of the step are done; and others know. With each
// step come two readings of the one clock that all workers share: by them the host aligns the processors' clocks.
template <class W>
MK_DEVICE void await_step(const W& w) {
  if constexpr (kOn) w.scribe.began = ticks();
}

template <class W>
MK_DEVICE void step(const W& w) {
  if constexpr (kOn) {
    auto& t = w.scribe;
    t.ready = ticks();
    t.ready_ns = dev::clock_ns();
    if (t.old == 0) t.pen.last = uint32_t(t.ready);
  }
}

template <class W>
MK_DEVICE void step_end(const W& w) {
  if constexpr (kOn) {
    auto& t = w.scribe;
    while (t.old > 0) pop(w);  // of a step before that had fewer records than there are places
    t.ended = ticks();
    t.ended_ns = dev::clock_ns();
    t.step = w.step, t.old = t.pending;
  }
}
template <class W>
MK_DEVICE void step_told(const W& w) {
  if constexpr (kOn) write_step(w, w.scribe.ended, w.scribe.ended_ns, true);
}

// Control leaves the launch.
template <class W>
MK_DEVICE void leave(const W& w) {
  if constexpr (kOn) {
    while (w.scribe.pending > 0) pop(w);
  }
}

}  // namespace megakernel::trace
