// What a task's device half is, and what it may ask of a device.
//
// A device header (included before this file, after the generated records) defines in namespace megakernel::dev:
//
//   MK_DEVICE              qualifiers of every function here
//   Vf, Vi, Vu             kWidth floats, int32_t, uint32_t: a vector where one thread has vector units, a plain
//                          scalar where the threads of a group are the vector. Arithmetic and comparison operators;
//                          select(mask, a, b), to_vf(Vi or Vu), to_vu(Vi), bits(Vf) -> Vu, splat(scalar)
//   exp, log, tanh, erf    of Vf; sqrt(float), exp(float), log(float)
//   load(p, part), store(p, v, part), where(part, v, fill), iota(i)
//                          `part` comes from for_each: all kWidth elements or fewer; a partial load gives zeros beyond
//   to_float(DType tag, bits), element<DType>(p, i)                  one stored element as float
//   put<DType>(p, i, float)                                          rounded to nearest even and stored
//   power_of(top), power(exponent), inverse_power(exponent), to_f8(float, inverse), of_f8(code)    8-bit vectors, see f8.py
//   powers(p, part)        of kWidth exponents, as Vf
//   dot_tile<DType, n>(worker, out, ld_out, x, ld_x, tile, rows, k, accumulate)
//                          out[r, j] (+)= sum over c of x[r, c] * tile(c, j), c ascending and in an order that does
//                          not depend on `rows`. `tile` is in the order that tile_index describes
//   tile_index<DType, n>(c, j)                                       where element (c, j) of such a tile is
//   load_acquire, store_release, add_release, fetch_add, ...         between workers; *_system with the host
//
// and `Worker`, a group of threads that runs one role of one worker:
//
//   w.args, w.header, w.step, w.id       KernelArgs, StepHeader of this step, its number, index of the worker
//   w.lane(), w.lanes(), w.sync()        1 lane on a CPU
//   w.for_each(n, f)                     f(i, part) for i in [0, n), kWidth elements a call, dealt over lanes
//   w.for_each(rows, n, f)               f(r, i, part)
//   w.sum(Vf), w.max(Vf), w.min(Vf), w.sum(Vu), w.any(mask), w.broadcast(value)    over the group; a fixed order
//   w.scratch<T>(n)                      memory of this worker, valid until the record ends
//   w.fault(kind, tile, counter, value, target)   writes the fault record and stops the launch
//
// With more than one rank a second device header adds, for the whole group:
//
//   await_peer(w, p, target, counter)     until *p, a word of this device's window, reached the target: acquire at system
//                                         scope. False when the launch is over. `counter` is for reports
//   signal_peer(w, p, n, counter)         after w.sync(): +n on a word of a peer's window, release at system scope
//
// and for a lane:
//
//   put_stamped(p, v, stamp)              a float and its stamp into a peer's window, as one store that orders nothing
//   take_stamped(w, p, stamp, v, counter) waits for that; false when the launch is over. settle(w, good), by the whole
//                                         group, makes it known to all lanes that one of them got false
//   take(w, p)                            a float that another worker may publish by value; waits for it
//   give(p, v)                            publishes by value
//   retire(w, p, cols, stride)            clears p[r * stride + c] of the step before, of its rows. Where no edges
//                                         are by value a plain load, a plain store and nothing
#pragma once

namespace megakernel::tasks {

using dev::Worker;

// One contiguous piece of memory that a streaming task reads: weights, or a page of keys and values. It never depends
// on what other workers do in this step, so it may be fetched any time ahead.
struct Unit {
  const void* address;
  uint32_t bytes;
  uint32_t tile;
  uint32_t index;  // of this unit within its tile
  bool load;       // the activations of what follows are to be brought in before this unit
  bool store;      // after this unit a result is complete
};

template <class A, class B>
concept Same = __is_same(A, B);

// Runs `execute` for all tiles of a record at once.
template <class T>
concept SimpleTask = requires(Worker& w, const abi::Record& record, const typename T::Fields& fields) {
  { T::execute(w, record, fields) } -> Same<void>;
};

// A stream of units and what is done with each. One driver owns the loops and the stages:
//
//   State s; Walk walk(w, record, fields);
//   while (walk.next(w)) {
//     if (walk.unit.load) load(w, fields, s, walk);              waits for the record's dependencies come before
//     consume(w, fields, s, walk, stage);                        stage: the unit's bytes, in place or copied
//     if (walk.unit.store) store(w, fields, s, walk);
//   }
//
// Every role that needs the sequence has its own Walk and sees the same units. A stage may be written to by `consume`
// (keys and values of this step go into their page); a device that streams copies writes them to the page as well.
template <class T>
concept StreamingTask = requires(
    Worker& w, const abi::Record& record, const typename T::Fields& f, typename T::State& s, typename T::Walk& walk,
    const typename T::Walk& at, void* stage) {
  typename T::State;
  typename T::Walk;
  requires __is_constructible(typename T::Walk, Worker&, const abi::Record&, const typename T::Fields&);
  { walk.next(w) } -> Same<bool>;
  { walk.unit } -> Same<Unit&>;
  { T::load(w, f, s, at) } -> Same<void>;
  { T::consume(w, f, s, at, stage) } -> Same<void>;
  { T::store(w, f, s, at) } -> Same<void>;
};

// Units that lie one behind the other and are known from the record alone.
struct Span {
  const char* address;
  uint32_t unit_bytes, units;
};

// A streaming task whose units may be fetched before its step begins, or, if it needs the header to know that there are
// any, before the record begins. `span` gives the units that Walk does.
template <class T>
concept StreamsAhead = StreamingTask<T> && requires(const Worker& w, const abi::Record& r, const typename T::Fields& f) {
  { T::span(w, r, f) } -> Same<Span>;
  { T::kNeedsHeader } -> Same<const bool&>;
};

template <class T>
concept Task = SimpleTask<T> || StreamingTask<T>;

// Memory of the device at an address.
template <class T>
MK_DEVICE T* at(uint64_t address) {
  return (T*)(MK_MEMORY T*)address;
}

// Where something of the program is.
template <class T>
MK_DEVICE T* workspace(const Worker& w, uint32_t offset) {
  return at<T>(w.args.workspace + offset);
}

template <class T>
MK_DEVICE const T* weights(const Worker& w, uint64_t offset) {
  return at<const T>(w.args.weights + offset);
}

// What this device knows of the others that run the program with it.
MK_DEVICE abi::Link* link(const Worker& w) { return at<abi::Link>(w.args.launch + sizeof(abi::LaunchState)); }

// Of the window at `window`, the counter of what rank `sender` has sent of an exchange. Its number in reports follows
// those of the device's own counters.
MK_DEVICE uint32_t sender_index(uint32_t exchange, uint32_t sender) { return exchange * abi::kRanks + sender; }
MK_DEVICE uint64_t* sender_counter(uint64_t window, uint32_t index) {
  return at<uint64_t>(window + sizeof(abi::Window)) + uint64_t(index) * abi::kCounterStride;
}

// Of elements that belong to one exchange of one step; never 0. The host clears windows before a stamp comes again.
MK_DEVICE uint32_t stamp_of(const Worker& w, uint32_t exchange, uint32_t exchanges) {
  return uint32_t(w.step * exchanges + exchange) | 0x80000000u;
}

// Where the i-th peer from this rank on has this rank's part of an exchange, stamped elements [max_rows][cols]. Every rank
// begins with another one.
MK_DEVICE uint64_t* sent_at(const Worker& w, const abi::Link& l, uint32_t i, uint64_t buffer, uint32_t cols) {
  return at<uint64_t>(l.window[(l.rank + i) % abi::kRanks] + buffer) + uint64_t(l.rank) * w.args.max_rows * cols;
}

MK_DEVICE uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
MK_DEVICE uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

// First position that the row at `position` sees.
MK_DEVICE uint32_t first_seen(uint32_t position, uint32_t window) {
  return position >= window ? position + 1 - window : 0;
}

// Whether all that it sees is in one piece of so many tokens.
MK_DEVICE bool one_piece(uint32_t position, uint32_t window, uint32_t piece_tokens) {
  return first_seen(position, window) / piece_tokens == position / piece_tokens;
}

}  // namespace megakernel::tasks

namespace megakernel {

// The variants of a program; the opcode of a record is the index in this list.
template <class... T>
struct TaskList {
  static constexpr uint32_t kCount = sizeof...(T);
};

}  // namespace megakernel
