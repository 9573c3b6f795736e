// What consumers do of a product. Part of cuda_matrix.cuh.
//
// Rows of the input are the 16 rows of the A operand, a tile the 8 columns of the B operand. Chains 0 and 1 take turns over
// steps of 16 columns. Beyond a warp's share stand zeros times weights of the share.
//
// With at most 8 rows the A operand is the eight columns of a row as they lie in registers: pairs 0 and 1 of the row in
// rows 0 to 7, pairs 2 and 3 in rows 8 to 15. Chain 0 multiplies with pairs 0 and 1 of the weights and counts in rows 0
// to 7, chain 1 with pairs 2 and 3 and counts in rows 8 to 15; the other halves of the results mean nothing.
#pragma once

namespace megakernel::dev {

using Chains = float[2][4];

template <bool kHalf, bool kHigh>
MK_DEVICE void multiply_chunk(Chains& d, const Fragments<kHigh>& x, uint32_t i, const Quad& b) {
  const Quad& low = x.low[i];
  if constexpr (kHigh) {
    const Quad& high = x.high[i];
    multiply<kHalf>(d[0], low.x, high.x, low.z, high.z, b.x, b.y);
    multiply<kHalf>(d[1], low.y, high.y, low.w, high.w, b.z, b.w);
  } else {
    multiply<kHalf>(d[0], low.x, low.y, low.z, low.w, b.x, b.y);
    multiply<kHalf>(d[1], low.x, low.y, low.z, low.w, b.z, b.w);
  }
}

// Columns 2 t and 2 t + 1 of row g, or g + 8.
template <bool kHigh>
MK_DEVICE float2 chains_sum(const Chains& d, uint32_t high) {
  const uint32_t first = kHigh ? high * 2 : 0, second = kHigh ? high * 2 : 2;
  return make_float2(d[0][first] + d[1][second], d[0][first + 1] + d[1][second + 1]);
}

// Where partial sums of the next block go, once the storer has read what was there. What the next block's turn is stays in
// shared memory meanwhile.
struct HandOver {
  uint32_t at;  // in scratch; its lowest bit is the slot

  MK_DEVICE void begin(Consumer& c) {
    const RoleState& s = c.w.state();
    const uint32_t room = Sums::room(*c.w.header), slot = Sums::slot(s.sums_slot, room);
    at = (kScratchBytes - (slot + 1) * Sums::bytes(room)) | slot;
    c.w.wait_barrier(&block().sums_empty[slot], (s.sums_parity >> slot & 1) ^ 1);
  }

  // Lane 4 g + t has rows g and g + 8, rows 2 t and 2 t + 1 of each tile's weights.
  template <class Input>
  MK_DEVICE void put(Consumer& c, const Input& input, const Chains (&d)[kBlockTiles], uint32_t rows, bool norm) {
    Worker& w = c.w;
    const uint32_t group = w.warp_lane() / 4, pair = w.warp_lane() % 4 * 2;
    const uint32_t slot = at & 1;
    float* sums = reinterpret_cast<float*>(block().scratch + (at & ~1u));
    float* out = sums + w.warp() * Sums::kOutputs + pair;
#pragma unroll
    for (uint32_t h = 0; h < (Input::kHigh ? 2 : 1); ++h) {
      if (group + h * 8 >= rows) continue;
      auto* to = reinterpret_cast<float2*>(out + (group + h * 8) * (kConsumers * Sums::kOutputs));
#pragma unroll
      for (uint32_t t = 0; t < kBlockTiles; ++t) {
        to[t * 4] = chains_sum<Input::kHigh>(d[t], h);
      }
    }
    if (norm) input.put_squares(w, sums + kConsumers * Sums::kOutputs * rows + w.warp(), rows);
    __syncwarp();
    barrier_arrive_warp(&block().sums_full[slot]);
    RoleState& s = w.state();
    const uint32_t turn = s.sums_slot + 1, parity = s.sums_parity ^ 1u << slot;
    RoleState& to = w.state_to_write();
    to.sums_slot = turn, to.sums_parity = parity;
    __syncwarp();
  }
};

// This warp's weights of a unit, by chunk.
template <class S>
struct ChunkPlaces {
  uint32_t offset[S::kEven ? 1 : kMaxChunks];

  MK_DEVICE ChunkPlaces(const Worker& w, const S& share) {
#pragma unroll
    for (uint32_t i = 0; i < sizeof offset / sizeof *offset; ++i) {
      offset[i] = (share.first + (i < share.count ? i : 0)) * 512 + operand_at(w.warp_lane());
    }
  }
  MK_DEVICE void load(uint32_t slot, Quad (&b)[kMaxChunks]) const {
    const uint8_t* stage = block().ring[slot];
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      b[i] = operands(stage + (S::kEven ? offset[0] + i * 512 : offset[S::kEven ? 0 : i]));
    }
  }
};

MK_DEVICE void clear_chains(Chains (&d)[kBlockTiles]) {
#pragma unroll
  for (uint32_t t = 0; t < kBlockTiles; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) d[t][0][i] = d[t][1][i] = 0.0f;
  }
}

using Weights = Quad[kMaxChunks];  // of a warp in a stage

// Known when all of them are; see once_loaded.
MK_DEVICE uint32_t word_of(const Weights& b) {
  return b[0].x | b[0].z | b[1].x | b[1].z | b[2].x | b[2].z | b[3].x | b[3].z;
}
static_assert(kMaxChunks == 4);

// Whether a stage may be read. One that is not there may: what is read is not used. For tools that look for races it is not.
MK_DEVICE bool may_read(bool there) { return kWarpArrivals == 1 || there; }

// Two tiles at a time, because a warp would wait for each product before it starts the next one of the same chain.
template <bool kHalf, bool kHigh>
MK_DEVICE void multiply_two(Chains& d, Chains& e, const Fragments<kHigh>& x, const Weights& b, const Weights& c) {
#pragma unroll
  for (uint32_t i = 0; i < kMaxChunks; ++i) {
    multiply_chunk<kHalf>(d, x, i, b[i]);
    multiply_chunk<kHalf>(e, x, i, c[i]);
  }
}

// Tiles kFirst and kFirst + 1 of a block, or the first alone; their stages are free again as soon as they are in registers.
// What is read and multiplied for a tile that is not there goes nowhere.
template <bool kHalf, uint32_t kFirst, bool kHigh, class S>
MK_DEVICE void take_pair(
    Consumer& c, Chains (&d)[kBlockTiles], const Fragments<kHigh>& x, const ChunkPlaces<S>& places, bool two) {
  Quad b[2][kMaxChunks];
  const Ring first = c.ring;
  c.await();
  c.ring.next();
  const uint32_t second = may_read(two) ? c.ring.slot : first.slot;
  if (two) {
    c.await();
    c.ring.next();
  }
  places.load(first.slot, b[0]);
  places.load(second, b[1]);
  const uint32_t none = once_loaded(word_of(b[0]) | word_of(b[1]), first.slot);
  __syncwarp();
  if (arrives()) {
    barrier_arrive(beyond(&block().empty[first.slot], none));
    if (two) barrier_arrive(beyond(&block().empty[second], none));
  }
  multiply_two<kHalf>(d[kFirst], d[kFirst + 1], x, b[0], b[1]);
}

template <bool kHalf, bool kHigh>
MK_DEVICE void multiply_one(Chains& d, const Fragments<kHigh>& x, const Weights& b) {
#pragma unroll
  for (uint32_t i = 0; i < kMaxChunks; ++i) multiply_chunk<kHalf>(d, x, i, b[i]);
}
template <bool kHalf, bool kHigh, class S>
MK_DEVICE void take_one(Consumer& c, Chains& d, const Fragments<kHigh>& x, const ChunkPlaces<S>& places) {
  Weights b;
  c.await();
  places.load(c.ring.slot, b);
  c.give_back(word_of(b));
  multiply_one<kHalf>(d, x, b);
}

// The first three stages of a record with one row, in registers before its input comes: then little is left to do, and the
// producer has their room for what follows. Of three tiles or four they are the first unit with the fourth stage, of two the
// first two units with it, of one the first three.
struct Held {
  Weights b0, b1, b2;

  MK_DEVICE static uint32_t units(uint32_t tiles, uint32_t unit_count) {
    return tasks::least(unit_count, tiles == 1 ? 3 : tiles == 2 ? 2 : 1);
  }
  template <class S>
  MK_DEVICE void take(Consumer& c, const ChunkPlaces<S>& places, uint32_t stages) {
    take(c, places, b0, true);
    take(c, places, b1, stages > 1);
    take(c, places, b2, stages > 2);
  }
  template <bool kHalf, class Input, class S>
  MK_DEVICE void multiply(Consumer& c, const ChunkPlaces<S>& places, Input& input, const S& share, uint32_t tiles,
                          uint32_t units, Chains (&d)[kBlockTiles]) {
    Fragments<false> x;
    input.fragments(share, 0, x);
    clear_chains(d);
    if (tiles == 1) {
      multiply_one<kHalf>(d[0], x, b0);
      if (units > 1) {
        input.fragments(share, 1, x);
        multiply_one<kHalf>(d[0], x, b1);
      }
      if (units > 2) {
        input.fragments(share, 2, x);
        multiply_one<kHalf>(d[0], x, b2);
      }
      return;
    }
    multiply_two<kHalf>(d[0], d[1], x, b0, b1);
    take(c, places, b1, tiles * units > 3);
    if (tiles == 2) {
      if (units == 1) return;
      input.fragments(share, 1, x);
      multiply_two<kHalf>(d[0], d[1], x, b2, b1);
    } else {
      multiply_two<kHalf>(d[2], d[3], x, b2, b1);
    }
  }

 private:
  // What is read of a stage that is not there is not used.
  template <class S>
  MK_DEVICE static void take(Consumer& c, const ChunkPlaces<S>& places, Weights& b, bool there) {
    if (there) c.await();
    if (may_read(there)) places.load(c.ring.slot, b);
    if (there) c.give_back(word_of(b));
  }
};

// The loop over a unit of 4 tiles is all that a warp runs for most of a step: it must be short.
template <bool kHalf, template <bool> class Input, class S>
MK_DEVICE void consume_blocks(Consumer& c, MatrixFlags flags) {
  constexpr bool kHigh = Input<kHalf>::kHigh;
  Worker& w = c.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const uint32_t rows = matrix_rows(w, flags.sampled()), units = f.units;
  const S share(w.warp(), f.k_unit);
  const ChunkPlaces<S> places(w, share);
  Input<kHalf> input(w, rows);
  HandOver out;
  out.begin(c);
  Chains d[kBlockTiles];
  const uint32_t tiles = tasks::least(record.tile_count, kBlockTiles);
  uint32_t unit = 0;
  if constexpr (kHigh) {
    clear_chains(d);
    input.begin(c, f, share, flags);
  } else {
    Held held;
    unit = Held::units(tiles, units);
    held.take(c, places, tiles * unit);
    trace::data_now(w);
    if (Input<kHalf>::kLooks && !c.has_input()) c.look(tasks::least((units - unit) * tiles, kLookStages));
    input.begin(c, f, share, flags);
    held.multiply<kHalf>(c, places, input, share, tiles, unit, d);
  }
#pragma unroll 1
  for (uint32_t left = record.tile_count;;) {
#pragma unroll 1
    for (; unit < units; ++unit) {
      Fragments<kHigh> x;
      input.fragments(w, f, share, flags, unit, x);
      take_pair<kHalf, 0>(c, d, x, places, left > 1);
      if (left > 2) take_pair<kHalf, 2>(c, d, x, places, left > 3);
    }
    const bool last = left <= kBlockTiles;
    input.finish(c);
    if (last) input.end(c);
    out.put(c, input, d, rows, flags.norm());
    if (last) break;
    out.begin(c);
    left -= kBlockTiles;
    unit = 0;
    input.restart();
    clear_chains(d);
  }
  input.leave(c, f);
}

// kEnd: of the ring, where it is known: one register less, or the way back would be in local memory.
template <bool kHalf, template <bool> class Input, class S, uint32_t kEnd = 0>
MK_DEVICE void consume_as(MatrixFlags flags) {
  Consumer c;
  c.load();
  if constexpr (kEnd > 0) c.ring.end = kEnd;
  consume_blocks<kHalf, Input, S>(c, flags);
  c.save_own();
}

// One row in a step is what must be fast.
template <bool kHalf, bool kEven>
__device__ __noinline__ void consume_row(MatrixFlags flags) {
  if constexpr (kEven) {
    consume_as<kHalf, OneRow, EvenShare, kStages>(flags);
  } else {
    consume_as<kHalf, OneRow, Share, kStages>(flags);
  }
}

}  // namespace megakernel::dev

namespace megakernel::several {
using namespace dev;

template <bool kHalf>
__device__ __noinline__ void consume_few(MatrixFlags flags) {
  consume_as<kHalf, FewRows, Share, kRowStages>(flags);
}

// The same of products whose outputs are added to something: that, and where they go, is known before the input is there.
template <bool kHalf, uint32_t kFlags>
__device__ __noinline__ void consume_few_adding() {
  constexpr MatrixFlags flags{kFlags};
  Consumer c;
  c.load();
  c.ring.end = kRowStages;
  OwnRows<kFlags, false> own{c.w, matrix_fields(c.w), c.w.header->rows};
  const LastBlock last(*c.w.record);
  own.ask(last.tile, last.tiles);
  consume_blocks<kHalf, FewRows, Share>(c, flags);
  c.save_own();
  const LastSums sums;
  own.store(sums.slot, sums.parity, [](const auto& from, const float* at, uint32_t r) {
    return from.factor(from.squares(at, r));
  });
}

// More than 8 rows: there are no registers for two tiles at a time.
template <bool kHalf, uint32_t kFlags>
__device__ __noinline__ void consume_tile() {
  constexpr MatrixFlags flags{kFlags};
  Consumer c;
  c.load();
  c.ring.end = kRowStages;
  Worker& w = c.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const uint32_t rows = matrix_rows(w, flags.sampled());
  const Share share(w.warp(), f.k_unit);
  const ChunkPlaces places(w, share);
  RoomInput<kHalf, true> input(w, rows);
  input.begin(c, f, share, flags);
  if constexpr (flags.sampled()) begin_best(w);
  OwnRows<kFlags, true> own{w, f, rows};
  HandOver out;
  out.begin(c);
#pragma unroll 1
  for (uint32_t first = 0; first < record.tile_count; first += kBlockTiles) {
    const uint32_t tiles = tasks::least(kBlockTiles, record.tile_count - first);
    const bool ours = consumers_store(rows, f.units, flags.sampled(), first + kBlockTiles >= record.tile_count);
    if (ours) own.ask(record.tile_begin + first, tiles);
    Chains d[kBlockTiles];
    clear_chains(d);
#pragma unroll 1
    for (uint32_t unit = 0; unit < f.units; ++unit) {
      Fragments<true> x;
      input.fragments(share, unit, x);
#pragma unroll
      for (uint32_t t = 0; t < kBlockTiles; ++t) {
        if (t < tiles) take_one<kHalf>(c, d[t], x, places);
      }
    }
    if (flags.norm() && first == 0) input.finish(c);
    if (first > 0) out.begin(c);
    out.put(c, input, d, rows, flags.norm() && !ours);
    input.restart();
    if (!ours) continue;
    const uint32_t slot = out.at & 1;
    own.store(slot, (w.state().sums_parity >> slot & 1) ^ 1, [](const auto& from, const float*, uint32_t r) {
      return from.factor(Room::squares() + r * kConsumers);
    });
  }
  if (!flags.norm()) input.finish(c);  // nothing was wanted of it
  input.leave(c, f);
  c.save_own();
  if constexpr (flags.sampled()) end_best<kFlags>();
}

template <bool kHalf>
__device__ __noinline__ void consume_rows(MatrixFlags flags) {
  consume_as<kHalf, ManyRows, Share>(flags);
}

}  // namespace megakernel::several
