// The input of a product in a step of several rows, up to 16. Part of cuda_input.cuh.
//
// Such a step was announced, and the last stages of the ring are no part of it: they are the room in which the loaders put
// the input, normed, in the type of the weights, as the A operand. A stage has 8 rows of one unit; of more rows each unit
// takes two. A product whose input is in the room as a whole finds it there for every block of tiles; that of a longer one
// passes through, once a block. The work of norms and types is done once for all workers: each packs a part and publishes
// it by value.
//
// Functions of steps of several rows are in a namespace of their own: the compiler puts functions in the order of their full
// names, and what one row runs should lie together.
#pragma once

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ the ring
// Whether a step was announced to have several rows, and no more than a narrow one.
MK_DEVICE bool has_room(uint64_t step) {
  if constexpr (kRooms) return block().header[step & 1 ^ 1].widens == 1;
  return false;
}

// Stages from `slot` to `end` are used with nothing in them. Of the producer and of the consumers, in the same place of the
// order of stages.
MK_DEVICE void pass_stages(Worker& w, uint32_t slot, uint32_t end, uint32_t parity) {
  Block& b = block();
#pragma unroll 1
  for (; slot < end; ++slot) {
    if (w.warp() == kProducerWarp) {
      w.watch_barrier(&b.empty[slot], parity ^ 1);
      b.copying[slot] = uint8_t(2 + parity);
      __syncwarp();
      if (w.warp_lane() < kFullArrivals) barrier_arrive(&b.full[slot]);
    } else {
      w.wait_barrier(&b.full[slot], parity);
      __syncwarp();
      barrier_arrive_warp(&b.empty[slot]);
    }
  }
}

}  // namespace megakernel::dev

namespace megakernel::several {
using namespace dev;

// The ring of the next step gets another length, at its end. The stages of the room come back with the parity of all: they
// are passed once, so that the consumers have left the room before the producer fills them, or twice.
__device__ __noinline__ void turn_ring(uint32_t end) {
  Worker w;
  w.load();
  RoleState& s = w.state();
  RoomState& room = own_room();
  Ring ring = {s.ring, room.end};
  uint32_t left = room.left_parity;
  if (w.warp() == kProducerWarp) {
    Ring tail = {s.tail, room.end};
    for (uint32_t i = s.in_flight; i > 0; --i, tail.next()) w.watch_barrier(&block().full[tail.slot], tail.parity);
  }
  if (ring.slot != 0) {
    pass_stages(w, ring.slot, ring.end, ring.parity);
    ring.slot = 0, ring.parity ^= 1;
  }
  if (end < ring.end) {
    left = ring.parity;
  } else {
    do {
      pass_stages(w, ring.end, end, left);
      left ^= 1;
    } while (left != ring.parity);
  }
  w.state_to_write().ring = ring;
  room.end = end, room.left_parity = uint16_t(left);
  if (w.warp() == kProducerWarp) s.tail = ring, s.in_flight = 0;
  w.save();
}

}  // namespace megakernel::several

namespace megakernel::dev {

// At the begin of a step, by each role.
MK_DEVICE void begin_ring() {
  if constexpr (kRooms) {
    if (threadIdx.x / 32 > kProducerWarp) return;
    const RoleState& s = own_state();
    const uint32_t end = has_room(s.step) ? kRowStages : kStages;
    if (own_room().end != end) several::turn_ring(end);
  }
}

// ------------------------------------------------------------------------------------------------ what is where
// Rows as the A operand: by eights of them the chunks as they lie in a stage. Words that say whether they are valid.
struct OperandRows {
  uint8_t* first;
  uint32_t chunks;

  MK_DEVICE uint8_t* chunk(uint32_t half, uint32_t index) const { return first + (half * chunks + index) * 512; }
  MK_DEVICE uint8_t* octet(uint32_t row, uint32_t column) const {
    return chunk(row / 8, column / 32) + row % 8 * 64 + column % 32 / 8 * 16;
  }
  MK_DEVICE uint32_t bytes() const { return kTileRows / 8 * chunks * 512; }
};

// What is published for one product to read, behind it, packed by who publishes it: of each row the sums of squares of its
// octets, if the product norms it, then the rows times its gamma.
struct GivenRows : OperandRows {
  uint8_t* base;

  MK_DEVICE GivenRows(const Worker& w, uint32_t tensor, uint32_t columns) {
    base = tasks::workspace<uint8_t>(w, (tensor + w.args.max_rows * columns * 4 + 255) / 256 * 256);
    chunks = (columns + 31) / 32;
    first = base + kTileRows * chunks * 16;
  }
  MK_DEVICE float* squares(uint32_t row) const { return reinterpret_cast<float*>(base) + row * chunks * 4; }
  // Of columns 2 i and 2 i + 1; see `packed`.
  MK_DEVICE uint32_t* pair(uint32_t row, uint32_t column) const {
    return reinterpret_cast<uint32_t*>(octet(row, column)) + (column % 4 / 2 * 2 + column % 8 / 4);
  }
  MK_DEVICE uint8_t* end() const { return first + bytes(); }
};

// Behind a product's output, for as many rows as it has room for.
MK_DEVICE uint8_t* behind_output(const Worker& w, const MatrixFields& f, bool sampled) {
  if (!sampled) return GivenRows(w, f.output, f.n).end();
  const uint32_t bytes = sampled_room(w) * (w.args.vocab * 4 + w.args.workers * 16);
  return tasks::workspace<uint8_t>(w, (f.output + bytes + 255) / 256 * 256);
}

// There is the input that the workers of the product pack: of each row the squares of its shares, then the rows.
struct PackedRows : OperandRows {
  static constexpr uint32_t kSquareBytes = kTileRows * kConsumers * 4;
  uint8_t* base;

  MK_DEVICE PackedRows(const Worker& w, const MatrixFields& f, bool sampled) {
    base = behind_output(w, f, sampled);
    chunks = f.k_unit / 32 * f.units;
    first = base + kSquareBytes;
  }
  MK_DEVICE float* squares(uint32_t row) const { return reinterpret_cast<float*>(base) + row * kConsumers; }
  MK_DEVICE uint8_t* end() const { return first + bytes(); }

  MK_DEVICE void put(uint32_t row, const Share&, uint32_t, uint32_t, uint32_t column, const Quad& v) const {
    store_quad(octet(row, column), v);
  }
  MK_DEVICE void put_square(uint32_t row, uint32_t share, float v) const { publish(squares(row) + share, v); }
};

// The (row, share) of a product's input that a record's worker packs.
struct Parts {
  uint32_t begin, end;

  MK_DEVICE Parts(const abi::Record& record, const MatrixFields& f, bool pairs, uint32_t rows) {
    const uint32_t width = pairs ? 4 : 8, tiles = (f.n + width - 1) / width, parts = rows * kConsumers;
    begin = record.tile_begin * parts / tiles;  // at most 2^15 tiles and 2^9 parts
    end = (record.tile_begin + record.tile_count) * parts / tiles;
  }
};

struct Room {
  uint32_t halves;  // stages of a unit
  bool stays;       // from the first block of tiles to the last

  MK_DEVICE Room(const MatrixFields& f, uint32_t rows) : halves(rows > 8 ? 2 : 1), stays(f.units * halves <= kRoomStages) {}

  MK_DEVICE static uint8_t* stage(uint32_t slot) { return block().ring[kRowStages + slot]; }
  // Of each row and share the sum of squares: below the sums.
  MK_DEVICE static float* squares() { return reinterpret_cast<float*>(block().scratch); }

  // Whether the input of a product comes this way in the step of that header.
  MK_DEVICE static bool takes(const abi::StepHeader& h, const MatrixFields& f, uint32_t rows) {
    if constexpr (!kRooms) return false;
    return h.widened == 1 && rows > 0 && f.k % 8 == 0;
  }
};

// Whether values of the step of that header are given packed to the product that reads them.
MK_DEVICE bool gives(const abi::StepHeader& h) {
  if constexpr (!kRooms) return false;
  return h.widened == 1;
}

// Whether the step at work was announced to have several rows, or comes behind one that was and has left values to clear.
MK_DEVICE bool was_announced() {
  if constexpr (!kRooms && !kWide) return false;
  return block().header[own_state().step & 1].widened != 0;
}

// Whether that of the record at work does.
MK_DEVICE bool input_in_room(bool sampled) {
  const abi::StepHeader& h = block().header[own_state().step & 1];
  return Room::takes(h, *reinterpret_cast<const MatrixFields*>(own_state().record->payload), sampled ? h.sampled : h.rows);
}

// ------------------------------------------------------------------------------------------------ giving
// What a lane publishes for the product that reads it, beside its output; of a product that gives nothing, nothing. Lanes
// of eight columns, or of four, are side by side.
template <uint32_t kFlags>
struct Giver {
  static constexpr MatrixFlags flags{kFlags};
  static constexpr bool kOn = kRooms && flags.gives();
  uint32_t* pair;
  float* square;
  uint32_t row_squares, half_words;
  float gamma = 1.0f;
  bool on, normed, first, third;  // first: of a pair; third: of an octet

  MK_DEVICE Giver(const Worker& w, const MatrixFields& f, uint32_t column, bool active) {
    if constexpr (!kOn) return;
    const GivenRows to(w, f.output, f.n);
    pair = to.pair(0, column), square = to.squares(0) + column / 8;
    row_squares = to.chunks * 4, half_words = to.chunks * 128;
    on = gives(*w.header);
    normed = !flags.norm() && f.gamma != abi::kNone64;
    first = active && column % 2 == 0, third = active && column % 8 == 0;
    if (on && normed && active) gamma = load_constant(tasks::weights<float>(w, f.gamma) + column);
  }

  MK_DEVICE uint32_t* pair_of(uint32_t row) const { return pair + row / 8 * half_words + row % 8 * 16; }

  MK_DEVICE void put(uint32_t row, float v) const {
    if constexpr (!kOn) return;
    if (!on) return;
    const float x = v * gamma, next = __shfl_down_sync(0xffffffffu, x, 1);
    if (first) store_word(pair_of(row), pack<flags.half()>(x, next));
    if (flags.norm() || !normed) return;
    float all[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) all[i] = __shfl_sync(0xffffffffu, v, (lane_of_warp() & 24) + i);
    if (third) publish(square + row * row_squares, sum_of_squares(all));
  }

  // What the step before left.
  MK_DEVICE void clear_last(const Worker& w) const {
    if constexpr (!kOn) return;
    if (!gives(*w.last)) return;
#pragma unroll 1
    for (uint32_t r = 0; r < w.last->rows; ++r) {
      if (first) store_word(before(w, pair_of(r)), kInvalid);
      if (third && normed) clear(before(w, square + r * row_squares));
    }
  }
};

// ------------------------------------------------------------------------------------------------ packing
// One share of one row: its octets in the type of the weights, times gamma, and its sum of squares, both as those of the
// one-row way. kOdd: rows may have a length that is no multiple of 8.
template <bool kHalf, bool kNorm, bool kOdd, class To>
struct SharePacker {
  static constexpr uint32_t kRounds = kNorm ? 2 : 4;  // octets of a lane on their way
  Worker& w;
  const MatrixFields& f;
  const To& to;
  const float *x, *gamma;
  uint32_t row, number;
  Share share;

  MK_DEVICE void run() {
    float squares = 0.0f;
    const uint32_t total = f.units * share.count * 4;
#pragma unroll 1
    for (uint32_t base = 0; base < total; base += 32 * kRounds) squares = pack(base, total, squares);
    if constexpr (kNorm) {
      squares += __shfl_xor_sync(0xffffffffu, squares, 1);
      squares += __shfl_xor_sync(0xffffffffu, squares, 2);
      if (w.warp_lane() == 0) to.put_square(row, number, squares);
    }
  }

  MK_DEVICE void fetch(Octet& octet, const float* p, uint32_t column) const {
    octet.zero();
    if constexpr (kOdd) {
      if (f.k % 8 != 0) {
        octet = fetch_odd(p, column, f.k);
        return;
      }
    }
    if (column < f.k) octet.fetch(p + column);
  }

  // Of octet o of the share; k of one that is not there.
  MK_DEVICE uint32_t column_of(uint32_t o, uint32_t total) const {
    const uint32_t q = o / 4, unit = share.count == kMaxChunks ? q / kMaxChunks : q / share.count, chunk = q - unit * share.count;
    return o < total ? unit * f.k_unit + (share.first + chunk) * 32 + o % 4 * 8 : f.k;
  }

  MK_DEVICE float pack(uint32_t base, uint32_t total, float squares) const {
    Octet octet[kRounds], scale[kNorm ? kRounds : 1];
    uint32_t column[kRounds];
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
      column[i] = column_of(base + i * 32 + w.warp_lane(), total);
      if constexpr (kNorm) fetch(scale[i], gamma, column[i]);
      fetch(octet[i], x, column[i]);
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kRounds; ++i) missing |= octet[i].missing();
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kRounds; ++i) {
        if (octet[i].missing()) fetch(octet[i], x, column[i]);
      }
      return false;
    }, abi::FaultKind::kValueBudget, row);
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
      const uint32_t begin = base + i * 32, o = begin + w.warp_lane();
      if (begin >= total) continue;
      float v[8];
      octet[i].values(v);
      if constexpr (kNorm) {
        add_squares(squares, sum_of_squares(v));
        multiply_gamma(v, scale[i]);
      }
      if (o < total) to.put(row, share, f.units, o, column[i], packed<kHalf>(v));
    }
    return squares;
  }
};

// By a loader warp: every kLoaders-th of the worker's parts. How many these were.
template <bool kHalf, bool kNorm, bool kOdd, class To>
MK_DEVICE uint32_t pack_parts(Worker& w, const MatrixFields& f, const To& to, const Parts& parts, bool sampled) {
  uint32_t packed = 0;
#pragma unroll 1
  for (uint32_t i = parts.begin + Loader::index(); i < parts.end; i += kLoaders, ++packed) {
    const uint32_t row = i / kConsumers, share = i % kConsumers;
    const float* gamma = kNorm ? tasks::weights<float>(w, f.gamma) : nullptr;
    SharePacker<kHalf, kNorm, kOdd, To>{w, f, to, input_row(w, f, sampled, row), gamma, row, share, Share(share, f.k_unit)}.run();
  }
  return packed;
}

// By the storer: what the worker packed in the step before is not valid any more.
MK_DEVICE void clear_parts(const Worker& w, const MatrixFields& f, MatrixFlags flags) {
  const uint32_t rows = flags.sampled() ? w.last->sampled : w.last->rows;
  if (flags.given() || !Room::takes(*w.last, f, rows)) return;
  const PackedRows past(w, f, flags.sampled());
  const Parts parts(*w.record, f, flags.epilogue() == tasks::Epilogue::kGlu, rows);
#pragma unroll 1
  for (uint32_t i = parts.begin; i < parts.end; ++i) {
    const uint32_t row = i / kConsumers, lane = w.warp_lane();
    const Share share(i % kConsumers, f.k_unit);
    if (lane == 0) clear(before(w, past.squares(row) + i % kConsumers));
#pragma unroll 1
    for (uint32_t unit = 0; unit < f.units; ++unit) {
      if (lane < share.count * 4) {
        store_quad(before(w, past.octet(row, unit * f.k_unit + share.first * 32 + lane * 8)), {kInvalid, kInvalid, kInvalid, kInvalid});
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ loaders
// The loaders of all workers that have tiles of the product pack its input, each some shares of rows; then those of each
// worker bring all of it, a quarter of each stage a warp. It goes to shared memory at once, and is looked at there: what was
// not valid yet is asked for again.
struct RoomLoader {
  static constexpr uint32_t kChunks = kStageBytes / 512 / kLoaders;

  Loader& l;
  const uint8_t *low, *high;  // this lane's part of the first chunk, of the first eight rows and the others
  const uint32_t units, chunks, halves, rows, first;  // chunks: of a unit; first: of this warp
  uint32_t parity;

  // sampled: of a step of many rows only those.
  MK_DEVICE RoomLoader(Loader& loader, const MatrixFields& f, const OperandRows& from, uint32_t n, bool sampled)
      : l(loader), units(f.units), chunks(f.k_unit / 32), halves(n > 8 ? 2 : 1), rows(n), first(Loader::index() * kChunks),
        parity(own_room().parity) {
    const uint32_t row = l.w.warp_lane() / 4, column = first * 32 + l.w.warp_lane() % 4 * 8;
    const uint32_t* picked = l.w.header->sample_row;
    low = from.octet(sampled && row < n ? picked[row] : row, column);
    high = from.octet(sampled && row + 8 < n ? picked[row + 8] : row + 8, column);
  }

  // Stages that stay are brought a quarter by each warp, all at once.
  MK_DEVICE void run(uint32_t stages) {
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages; ++stage) begin(stage);
#pragma unroll 1
    for (uint32_t stage = 0; stage < stages; ++stage) await(stage, stages - 1 - stage);
    __syncwarp();
    own_room().parity = uint16_t(parity);
  }

  // Where they pass through, each warp has a place of the room and fills it again and again: what the consumers give back
  // is asked for at once.
  MK_DEVICE void pass(uint32_t stages) {
    const uint32_t own = Loader::index();
#pragma unroll 1
    for (uint32_t stage = own; own < kRoomStages && stage < stages; stage += kRoomStages) {
      l.w.wait_barrier(&block().room_empty[own], (parity >> own & 1) ^ 1);
      parity ^= 1u << own;
      fill(stage, stage + kRoomStages >= stages);
      // What passes through is hardly waited for any more: weights need not be held back.
      if (own == 0) store_volatile(&block().asking, 0);
    }
#pragma unroll
    for (uint32_t slot = 0; slot < kRoomStages; ++slot) {
      if (slot != own) parity ^= ((stages - slot + kRoomStages - 1) / kRoomStages & 1) << slot;
    }
    __syncwarp();
    own_room().parity = uint16_t(parity);
  }

  // Some octets of this warp, each lane's of another column, are there; then the others will be soon. Before that it would
  // not do to ask for all of them again and again: what all workers ask for is in the way of the weights.
  MK_DEVICE void probe(const OperandRows& from, bool sampled) {
    const uint32_t lane = l.w.warp_lane(), o = lane * units + units - 1, chunk = first + o % 32 / 4, row = lane % rows;
    const uint8_t* p = from.octet(sampled ? l.w.header->sample_row[row] : row, (o / 32 * chunks + chunk) * 32 + o % 4 * 8);
    static_assert(kChunks == 8);
    Quad v{0, 0, 0, 0};
    l.w.spin([&] {
      if (chunk < chunks) v = load_quad(p);
      return !__any_sync(0xffffffffu, invalid(v));
    }, abi::FaultKind::kValueBudget, 0);
  }

 private:
  MK_DEVICE uint32_t half_of(uint32_t stage) const { return stage & (halves - 1); }
  MK_DEVICE bool has(uint32_t stage, uint32_t i) const {
    return half_of(stage) * 8 + l.w.warp_lane() / 4 < rows && first + i < chunks;
  }
  MK_DEVICE const uint8_t* source(uint32_t stage) const {
    return (half_of(stage) ? high : low) + (halves == 2 ? stage / 2 : stage) % units * chunks * 512;
  }
  MK_DEVICE uint8_t* place(uint32_t stage) const {
    return block().ring[kRowStages + stage % kRoomStages] + first * 512 + l.w.warp_lane() * 16;
  }

  // A whole stage. last: of this warp's place, which is part of the ring again then.
  MK_DEVICE void fill(uint32_t stage, bool last) {
    const uint8_t* p = source(stage) - first * 512;
    uint8_t* to = place(stage) - first * 512;
    const bool there = half_of(stage) * 8 + l.w.warp_lane() / 4 < rows;
#pragma unroll 4
    for (uint32_t i = 0; i < chunks; ++i) {
      if (there) copy_quad(to + i * 512, p + i * 512);
    }
    l.w.spin([&] {
      commit_quads();
      await_quads<0>();
      bool missing = false;
#pragma unroll 4
      for (uint32_t i = 0; i < chunks; ++i) missing |= invalid(*reinterpret_cast<const Quad*>(to + i * 512));
      if (!__any_sync(0xffffffffu, there && missing)) return true;
#pragma unroll 1
      for (uint32_t i = 0; i < chunks; ++i) {
        if (there && invalid(*reinterpret_cast<const Quad*>(to + i * 512))) copy_quad(to + i * 512, p + i * 512);
      }
      return false;
    }, abi::FaultKind::kValueBudget, stage);
    trace::ready_now(l.w, abi::Role::kLoader);
    if (last) fence_shared_for_copies();
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < kLoaders; ++i) barrier_arrive_warp(&block().room_full[stage % kRoomStages]);
  }

  MK_DEVICE void begin(uint32_t stage) {
    const uint32_t slot = stage % kRoomStages;
    l.w.wait_barrier(&block().room_empty[slot], (parity >> slot & 1) ^ 1);
    parity ^= 1u << slot;
    const uint8_t* p = source(stage);
    uint8_t* to = place(stage);
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
      if (has(stage, i)) copy_quad(to + i * 512, p + i * 512);
    }
    commit_quads();
  }

  // `later`: stages that were asked for after it.
  MK_DEVICE void await(uint32_t stage, uint32_t later) {
    static_assert(kRoomStages <= 4);
    if (later == 0) await_quads<0>();
    if (later == 1) await_quads<1>();
    if (later == 2) await_quads<2>();
    if (later == 3) await_quads<3>();
    const uint8_t* p = source(stage);
    uint8_t* at = place(stage);
    l.w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) {
        if (!has(stage, i) || !invalid(*reinterpret_cast<const Quad*>(at + i * 512))) continue;
        missing = true;
        copy_quad(at + i * 512, p + i * 512);
      }
      if (!__any_sync(0xffffffffu, missing)) return true;
      commit_quads();
      await_quads<0>();
      return false;
    }, abi::FaultKind::kValueBudget, stage);
    trace::ready_now(l.w, abi::Role::kLoader);
    __syncwarp();
    barrier_arrive_warp(&block().room_full[stage % kRoomStages]);
  }
};

// Two lanes a row; by all loaders alike, as each says that the input is there.
MK_DEVICE void bring_squares(Worker& w, const PackedRows& packed, uint32_t rows) {
  Quad v{0, 0, 0, 0};
  const float* p = packed.squares(0) + w.warp_lane() * 4;
  const bool there = w.warp_lane() / 2 < rows;
  w.spin([&] {
    if (there) v = load_quad(p);
    return !__any_sync(0xffffffffu, invalid(v));
  }, abi::FaultKind::kValueBudget, 0);
  if (there) *reinterpret_cast<Quad*>(Room::squares() + w.warp_lane() * 4) = v;
}

// The same of a given input: of each row and share by one lane, in the order of those who pack. The four octets of a chunk
// lie side by side.
MK_DEVICE void add_given_squares(Worker& w, const MatrixFields& f, const GivenRows& given, uint32_t rows, bool sampled) {
  static_assert(kLoaders * 32 == kTileRows * kConsumers && kMaxChunks == 4);
  const uint32_t place = Loader::index() * 32 + w.warp_lane(), row = place / kConsumers;
  const Share share(place % kConsumers, f.k_unit);
  const uint32_t count = row < rows ? share.count : 0;
  const float* p = given.squares(sampled && row < rows ? w.header->sample_row[row] : row) + share.first * 4;
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (uint32_t unit = 0; unit < f.units; unit += 2, p += f.k_unit / 4) {
    Quad v[2 * kMaxChunks];
    auto there = [&](uint32_t i) { return i % kMaxChunks < count && unit + i / kMaxChunks < f.units; };
    auto fetch = [&](uint32_t i) { v[i] = load_quad(p + i / kMaxChunks * (f.k_unit / 8) + i % kMaxChunks * 4); };
#pragma unroll
    for (uint32_t i = 0; i < 2 * kMaxChunks; ++i) {
      v[i] = Quad{0, 0, 0, 0};
      if (there(i)) fetch(i);
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < 2 * kMaxChunks; ++i) missing |= invalid(v[i]);
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < 2 * kMaxChunks; ++i) {
        if (invalid(v[i])) fetch(i);
      }
      return false;
    }, abi::FaultKind::kValueBudget, unit);
#pragma unroll
    for (uint32_t i = 0; i < 2 * kMaxChunks; ++i) {
      sum[0] += as_float(v[i].x), sum[1] += as_float(v[i].y), sum[2] += as_float(v[i].z), sum[3] += as_float(v[i].w);
    }
  }
  if (row < rows) Room::squares()[place] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

}  // namespace megakernel::dev

namespace megakernel::several {
using namespace dev;

template <bool kHalf, bool kNorm>
__device__ __noinline__ void pack_input(MatrixFlags flags) {
  Loader l;
  l.load();
  Worker& w = l.w;
  const MatrixFields& f = matrix_fields(w);
  const Parts parts(*w.record, f, flags.epilogue() == tasks::Epilogue::kGlu, matrix_rows(w, flags.sampled()));
  wait_counters(w, *w.record);
  if (Loader::index() == 0) store_volatile(&block().asking, 1);
  pack_parts<kHalf, kNorm, false>(w, f, PackedRows(w, f, flags.sampled()), parts, flags.sampled());
  l.save();
}

// `stages`: that pass through from here on.
MK_DEVICE void end_input(Loader& l, RoomLoader& loader, uint32_t stages) {
  if (stages == 0) fence_shared_for_copies();  // before the room is part of the ring again
  l.end();
  if (stages > 0) loader.pass(stages);
}

template <bool kGiven>
__device__ __noinline__ void bring_rows(MatrixFlags flags) {
  Loader l;
  l.load();
  const MatrixFields& f = matrix_fields(l.w);
  const uint32_t rows = matrix_rows(l.w, flags.sampled());
  const Room room(f, rows);
  const uint32_t passes = room.stays ? 1 : (l.w.record->tile_count + kBlockTiles - 1) / kBlockTiles;
  const uint32_t stages = passes * f.units * room.halves;
  // That the squares are there is said before an input passes through: the consumers want them for the first block of tiles,
  // and what passes for the second waits for the consumers.
  if constexpr (kGiven) {
    const GivenRows given(l.w, f.input, f.k);
    wait_counters(l.w, *l.w.record);
    l.begin();
    RoomLoader loader(l, f, given, rows, flags.sampled());
    loader.probe(given, flags.sampled());
    if (room.stays) loader.run(stages);
    if (flags.norm()) add_given_squares(l.w, f, given, rows, flags.sampled());
    end_input(l, loader, room.stays ? 0 : stages);
  } else {
    const PackedRows packed(l.w, f, flags.sampled());
    l.begin();
    RoomLoader loader(l, f, packed, rows, false);
    loader.probe(packed, false);
    if (room.stays) loader.run(stages);
    if (flags.norm()) bring_squares(l.w, packed, rows);
    end_input(l, loader, room.stays ? 0 : stages);
  }
  l.save();
}

}  // namespace megakernel::several

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ consumers
// The input of a consumer when the room has it; kMany: more than 8 rows. What it knows is in one word: registers are short.
template <bool kHalf, bool kMany>
struct RoomInput {
  static constexpr bool kHigh = kMany, kLooks = false;
  static constexpr uint32_t kHalves = kMany ? 2 : 1, kSlotAt = 8, kStays = 1u << 16, kKnown = 1u << 17;
  Worker& w;
  uint32_t word;  // parities of the room's stages; the next of them; whether the input stays, and is there

  MK_DEVICE RoomInput(Worker& worker, uint32_t) : w(worker), word(own_room().parity) {}

  MK_DEVICE void begin(Consumer&, const MatrixFields& f, const Share&, MatrixFlags) {
    if (f.units * kHalves <= kRoomStages) word |= kStays;
  }

  MK_DEVICE void fragments(const Share& share, uint32_t, Fragments<kHigh>& a) {
    const uint32_t slot = word >> kSlotAt & 15;
    if (!(word & kKnown)) {
#pragma unroll
      for (uint32_t h = 0; h < kHalves; ++h) w.wait_barrier(&block().room_full[slot + h], word >> (slot + h) & 1);
    }
    trace::ready(w, abi::Role::kConsumer);
    const uint8_t* at = Room::stage(slot) + share.first * 512 + w.warp_lane() * 16;
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      a.low[i] = Quad{0, 0, 0, 0};
      if (i < share.count) a.low[i] = *reinterpret_cast<const Quad*>(at + i * 512);
      if constexpr (kHigh) {
        a.high[i] = Quad{0, 0, 0, 0};
        if (i < share.count) a.high[i] = *reinterpret_cast<const Quad*>(at + kStageBytes + i * 512);
      }
    }
    if (!(word & kStays)) give_back(slot, kHalves);
    set_slot((slot + kHalves) % kRoomStages);
  }
  MK_DEVICE void fragments(
      Worker&, const MatrixFields&, const Share& share, MatrixFlags, uint32_t unit, Fragments<kHigh>& a) {
    fragments(share, unit, a);
  }

  // Before the next block of tiles.
  MK_DEVICE void restart() {
    if (!(word & kStays)) return;
    set_slot(0);
    word |= kKnown;
  }

  // When all units were read once.
  MK_DEVICE void finish(Consumer& c) {
    c.take_input();  // at once, but for the first block
  }
  MK_DEVICE void end(Consumer&) {}
  MK_DEVICE void put_squares(const Worker&, float* out, uint32_t rows) const {
    if (w.warp_lane() < rows) out[w.warp_lane() * kConsumers] = Room::squares()[w.warp_lane() * kConsumers + w.warp()];
  }
  // When the squares were read, too.
  MK_DEVICE void leave(Consumer& c, const MatrixFields& f) {
    if (word & kStays) give_back(0, f.units * kHalves);
    c.free_input();
    __syncwarp();
    own_room().parity = uint16_t(word & ((1u << kRoomStages) - 1));
  }

 private:
  MK_DEVICE void set_slot(uint32_t slot) { word = (word & ~(15u << kSlotAt)) | slot << kSlotAt; }
  MK_DEVICE void give_back(uint32_t from, uint32_t count) {
    __syncwarp();
    for (uint32_t i = 0; i < count; ++i) barrier_arrive_warp(&block().room_empty[from + i]);
    word ^= ((1u << count) - 1) << from;
  }
};

template <bool kHalf>
using FewRows = RoomInput<kHalf, false>;

// Whether the consumers do the storer's work for a block of tiles, each for every eighth row: of many rows, and where nothing
// comes after it that the storer could do it beside.
MK_DEVICE bool consumers_store(uint32_t rows, bool sampled, bool last) { return rows > 8 || (last && !sampled); }

}  // namespace megakernel::dev
