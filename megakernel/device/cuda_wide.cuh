// Products of wide steps, of more than kNarrowRows rows, with the bits of narrow ones. Part of cuda_matrix.cuh.
//
// An output is the sum over the eight shares of the columns, in order, of two chains over a share's chunks. In a narrow
// step each warp has a share and all rows. Here each warp has some of the rows and some of the tiles and goes through
// the shares itself, one after the other, so that the chains of one share at a time are all that it keeps. Hence the
// order of the stages: of a group of tiles, for each share, for as many units as fit, the share's chunks of them, of the
// input and of all tiles of the group (a slice). Each byte of the weights comes once a step.
//
// The input is packed once, by the loaders of all workers that have tiles of the product: each packs some (row, share),
// behind the product's output and the room of narrow steps, and when all have said so on a counter they copy slices of it
// into their rings. The producer brings the weights alone, so it waits for nothing but room.
//
// A worker with two tiles would bring a long input for little. So a product may be dealt by shares (builder/dealing.py): a
// worker multiplies as many (share, tile) as its own tiles have, but most of one share, publishes the chains of each for all
// rows, and adds up those of its own tiles when all have said on a counter that theirs are there: the same sums in the same
// order. The weights that it multiplies are other workers' tiles, which nobody has to be asked for.
#pragma once

namespace megakernel::dev {

constexpr uint32_t kWideTiles = 8;  // of which a slice fits a stage; a group has so many, or twice as many
static_assert(abi::kMaxRows <= 64, "four tiles of 16 rows");

// ------------------------------------------------------------------------------------------------ what and where
// Of a step that the producer is at: whether it has to know its rows.
MK_DEVICE bool may_be_wide() {
  if constexpr (kWide) return block().header[own_state().step & 1 ^ 1].widens == 2;
  return false;
}

MK_DEVICE uint32_t padded_rows(const Worker& w, bool sampled) { return (matrix_rows(w, sampled) + 15) / 16 * 16; }

// The packed input of a product, behind its output: of each row the squares of its shares, then the slices, of each
// chunk the rows of the step in 16s. Of 16 rows the two A operands, of chain 0 and of chain 1, as lanes have them: lane
// 4 g + t has octet t of rows g and g + 8, of which chain 0 takes pairs 0 and 2 as they are packed.
struct PackedInput {
  static constexpr uint32_t kSquareBytes = abi::kMaxRows * kConsumers * 4;
  uint8_t* base;
  uint32_t padded;  // rows

  MK_DEVICE PackedInput(const Worker& w, const MatrixFields& f, bool sampled) {
    base = PackedRows(w, f, sampled).end();
    padded = padded_rows(w, sampled);
  }
  MK_DEVICE float* squares(uint32_t row) const { return reinterpret_cast<float*>(base) + row * kConsumers; }
  MK_DEVICE uint8_t* chunk(uint32_t index) const { return base + kSquareBytes + uint64_t(index) * padded * 64; }

  // Octet o of a share, which begins at its columns of the first unit.
  MK_DEVICE void put(uint32_t row, const Share& share, uint32_t units, uint32_t o, uint32_t, const Quad& v) const {
    uint8_t* operand = chunk(share.first * units + o / 4) + row / 16 * 1024 + (row % 8 * 4 + o % 4) * 16;
    auto* to = reinterpret_cast<uint32_t*>(operand) + row / 8 % 2;
    to[0] = v.x, to[2] = v.z, to[128] = v.y, to[130] = v.w;
  }
  MK_DEVICE void put_square(uint32_t row, uint32_t share, float v) const { squares(row)[share] = v; }
};

// Counters of a product beside those of the schedule: of its packed input, and of the sums of one that is dealt.
MK_DEVICE uint32_t packed_counter(const Worker& w) { return w.args.counter_count - 1 - 2 * w.record->node; }
MK_DEVICE uint32_t sums_counter(const Worker& w) { return packed_counter(w) - 1; }

// What of a product a record's worker multiplies, in groups of tiles: all shares of its own tiles. Of one that is dealt as
// many (share, tile) out of all, share by share. A group of a dealt one may have two stages of weights a slice.
template <bool kDealt>
struct WideShape {
  uint32_t chunks, units, row_bytes;  // row_bytes: of a chunk of the input
  uint32_t tiles, begin, end, group;  // tiles: of the product

  MK_DEVICE WideShape(const abi::Record& record, const MatrixFields& f, uint32_t padded)
      : chunks(f.k_unit / 32), units(f.units), row_bytes(padded * 64), tiles((f.n + 7) / 8), begin(record.tile_begin),
        end(record.tile_begin + record.tile_count) {
    if constexpr (kDealt) begin *= kConsumers, end *= kConsumers;
    const uint32_t most = kDealt && padded > kTileRows ? 2 * kWideTiles : kWideTiles, groups = (end - begin + most - 1) / most;
    group = (end - begin + groups - 1) / groups;
  }
  // Of a slice: as many as fit a stage, of the input and of the weights.
  MK_DEVICE uint32_t slice_units(uint32_t count_of_tiles) const {
    const uint32_t weights = tasks::least(count_of_tiles, kWideTiles) * 512, most = (chunks + kConsumers - 1) / kConsumers;
    return tasks::least(units, kStageBytes / (tasks::most(row_bytes, weights) * most));
  }
};

// The slices of a record in order: groups of tiles, shares, units.
template <bool kDealt>
struct Slices {
  const WideShape<kDealt>& shape;
  uint32_t place, tile, group, each, share, unit, now, first, count;  // now: units of this slice

  MK_DEVICE Slices(const WideShape<kDealt>& of) : Slices(of, of.begin) {}
  MK_DEVICE Slices(const WideShape<kDealt>& of, uint32_t from) : shape(of), place(from) { begin_group(); }
  MK_DEVICE bool done() const { return place >= shape.end; }
  MK_DEVICE uint32_t chunk() const { return first * shape.units + unit * count; }  // of the packed input
  // Tiles whose weights are in the slice's first stage of weights, and in its second, which most have not.
  MK_DEVICE uint32_t first_tiles() const { return kDealt ? tasks::least(group, kWideTiles) : group; }
  MK_DEVICE uint32_t more_tiles() const { return group - first_tiles(); }
  MK_DEVICE uint32_t stages() const { return more_tiles() > 0 ? 3 : 2; }

  MK_DEVICE void next() {
    if (!next_unit() && !next_share()) next_group();
  }
  // The next slice of the share, if there is one; the first of the next share of the group; of the next group.
  MK_DEVICE bool next_unit() {
    unit += now;
    now = tasks::least(each, shape.units - unit);
    return now > 0;
  }
  MK_DEVICE bool next_share() {
    if (kDealt || first + count == shape.chunks) return false;
    ++share;
    begin_share();
    unit = 0, now = each;
    return true;
  }
  MK_DEVICE void next_group() {
    place += group;
    begin_group();
  }

 private:
  MK_DEVICE void begin_group() {
    if (done()) return;
    group = tasks::least(shape.group, shape.end - place);
    tile = place, share = 0;
    if constexpr (kDealt) {
      share = place / shape.tiles;
      tile = place - share * shape.tiles;
      group = tasks::least(group, shape.tiles - tile);
    }
    unit = 0;
    each = now = shape.slice_units(group);
    begin_share();
  }
  // Of few chunks some shares have none.
  MK_DEVICE void begin_share() {
    do {
      first = share * shape.chunks / kConsumers;
      count = (share + 1) * shape.chunks / kConsumers - first;
    } while (!kDealt && count == 0 && ++share < kConsumers);
  }
};

// Slices and their stages: of each slice the weights, filled by the producer, then the input, filled by a loader, then, of
// more than kWideTiles tiles, the other weights. So each may be as far ahead as the ring allows. Who fills a stage has
// waited for one at most a lap before it, and stages are given back in this order: so he is never two phases behind.
struct WideOrder {
  RingPlace at;

  MK_DEVICE WideOrder(const RingPlace& first) : at(first) {}
  MK_DEVICE RingPlace stage(uint32_t i) const {
    const uint32_t slot = at.slot + i;
    return slot < kStages ? RingPlace{slot, at.parity} : RingPlace{slot - kStages, at.parity ^ 1};
  }
  MK_DEVICE RingPlace weights() const { return at; }
  MK_DEVICE RingPlace input() const { return stage(1); }
  MK_DEVICE RingPlace more() const { return stage(2); }
  MK_DEVICE void next(uint32_t stages) { at = stage(stages); }
  MK_DEVICE Ring end() const { return {at, kStages}; }  // when all are taken
};

// ------------------------------------------------------------------------------------------------ producer
// Weights, and the stages for the input left out. It counts no copies on their way, the ring is bound enough.
template <bool kSampled, bool kDealt>
__device__ __noinline__ void produce_wide() {
  Producer p;
  p.load();
  Block& b = block();
  const MatrixFields& f = matrix_fields(p.w);
  const WideShape<kDealt> shape(*p.w.record, f, padded_rows(p.w, kSampled));
  const uint32_t unit_bytes = f.k_unit * 16, lane = p.w.warp_lane();
  const uint64_t tile_bytes = uint64_t(unit_bytes) * f.units;
  WideOrder order(p.head);
  Slices<kDealt> at(shape);
#pragma unroll 1
  while (!at.done()) {
    // One lane a piece: a tile's part of a unit.
    const char* group = tasks::weights<char>(p.w, f.weight) + at.tile * tile_bytes;
    const auto piece = [&](uint32_t first, uint32_t tiles) {
      const uint32_t unit = lane / tiles;
      return group + (first + lane - unit * tiles) * tile_bytes + unit * unit_bytes;
    };
    const auto put = [&](const RingPlace& to, const char* from, uint32_t tiles) {
      p.w.watch_barrier<true>(&b.empty[to.slot], to.parity ^ 1);
      set_copying(to.slot, to.parity);
      copy_pieces(b.ring[to.slot], from + (at.unit * unit_bytes + at.first * 512), at.count * 512, at.now * tiles,
                  &b.full[to.slot], p.policy);
    };
    const uint32_t tiles = at.first_tiles(), others = at.more_tiles(), stages = at.stages();
    const char* from = piece(0, tiles);
    const char* more_from = kDealt && others > 0 ? piece(tiles, others) : nullptr;
    do {
      put(order.weights(), from, tiles);
      if (kDealt && others > 0) put(order.more(), more_from, others);
      order.next(stages);
    } while (at.next_unit() || at.next_share());
    at.next_group();
  }
  p.head = p.tail = order.end();
  p.in_flight = 0;
  trace::passed(p.w);
  p.save();
}

// ------------------------------------------------------------------------------------------------ a warp's part
// Which tiles of rows and of weights a warp has: up to two of rows and two of weights, or four in groups of two stages.
struct WidePart {
  static constexpr uint32_t kMostRows = 2, kRowStride = 2, kTileStride = 4;
  uint32_t first_rows, first_tile, row_tiles, tiles;

  MK_DEVICE WidePart(uint32_t warp, uint32_t padded, uint32_t group) {
    const uint32_t all = padded / 16;
    if (all == 1) {  // each tile a warp
      first_rows = 0, first_tile = warp;
      row_tiles = 1, tiles = warp < group;
    } else if (group <= 2) {
      first_rows = warp % 4, first_tile = warp / 4;
      row_tiles = first_rows < all, tiles = first_tile < group;
    } else {
      first_rows = warp % 2, first_tile = warp / 2;
      row_tiles = first_rows + kRowStride < all ? 2 : 1;
      tiles = first_tile >= group ? 0 : (group - first_tile + kTileStride - 1) / kTileStride;
    }
    if (tiles == 0 || row_tiles == 0) tiles = row_tiles = 0;
  }
  MK_DEVICE uint32_t row_tile(uint32_t i) const { return first_rows + i * kRowStride; }
  MK_DEVICE uint32_t tile(uint32_t j) const { return first_tile + j * kTileStride; }
};

constexpr uint32_t kPartTiles = kWideTiles / WidePart::kTileStride;  // of a warp in one stage

template <uint32_t kRowTiles, uint32_t kTiles>
using WideChains = Chains[kRowTiles][kTiles];

}  // namespace megakernel::dev

#include "megakernel/device/cuda_wide_input.cuh"
#include "megakernel/device/cuda_wide_store.cuh"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ consumer
// What lies where of a slice's unit, for one warp: its rows of the input, its weights in the slice's first stage of them,
// and in the second.
struct WidePlace {
  const uint8_t *input, *weights, *more;
  uint32_t row_bytes, count;  // of a chunk, chunks
};

// One chunk; the same of the warp's second tile of weights in a stage is `tile_bytes` further.
template <bool kHalf, uint32_t kRowTiles, uint32_t kTiles, class D>
MK_DEVICE void multiply_part(D& d, const WidePlace& at, uint32_t c, uint32_t tile_bytes) {
  Quad a[kRowTiles][2], b[kTiles];
#pragma unroll
  for (uint32_t i = 0; i < kRowTiles; ++i) {
    const uint8_t* from = at.input + c * at.row_bytes + i * (WidePart::kRowStride * 1024);
    a[i][0] = *reinterpret_cast<const Quad*>(from), a[i][1] = *reinterpret_cast<const Quad*>(from + 512);
  }
#pragma unroll
  for (uint32_t j = 0; j < kTiles; ++j) {
    b[j] = *reinterpret_cast<const Quad*>((j < kPartTiles ? at.weights : at.more) + c * 512 + j % kPartTiles * tile_bytes);
  }
#pragma unroll
  for (uint32_t i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) {
      multiply<kHalf>(d[i][j][0], a[i][0].x, a[i][0].y, a[i][0].z, a[i][0].w, b[j].x, b[j].y);
      multiply<kHalf>(d[i][j][1], a[i][1].x, a[i][1].y, a[i][1].z, a[i][1].w, b[j].z, b[j].w);
    }
  }
}

// A warp's part of a unit of a slice: most units have four chunks of a share.
template <bool kHalf, uint32_t kRowTiles, uint32_t kTiles, class D>
MK_DEVICE void multiply_unit(D& d, const WidePlace& at) {
  if (at.count == kMaxChunks) {
#pragma unroll
    for (uint32_t c = 0; c < kMaxChunks; ++c) {
      multiply_part<kHalf, kRowTiles, kTiles>(d, at, c, WidePart::kTileStride * kMaxChunks * 512);
    }
    return;
  }
#pragma unroll 1
  for (uint32_t c = 0; c < at.count; ++c) {
    multiply_part<kHalf, kRowTiles, kTiles>(d, at, c, WidePart::kTileStride * at.count * 512);
  }
}

// One slice, and its stages are free again. multiply(WidePlace): a unit of it.
template <bool kDealt, class F>
MK_DEVICE void take_slice(Worker& w, const WideOrder& order, const Slices<kDealt>& slice, const WidePart& part, F multiply) {
  const RingPlace weights = order.weights(), input = order.input(), more = order.more();
  const bool two = slice.more_tiles() > 0;
  w.wait_barrier(&block().full[weights.slot], weights.parity);
  w.wait_barrier(&block().full[input.slot], input.parity);
  if (two) w.wait_barrier(&block().full[more.slot], more.parity);
  trace::ready(w, abi::Role::kConsumer);
  const uint32_t count = slice.count, own = part.first_tile * count * 512 + w.warp_lane() * 16;
  WidePlace at = {block().ring[input.slot] + part.first_rows * 1024 + w.warp_lane() * 16, block().ring[weights.slot] + own,
                  block().ring[more.slot] + own, slice.shape.row_bytes, count};
#pragma unroll 1
  for (uint32_t unit = 0; unit < slice.now; ++unit) {
    multiply(at);
    at.input += count * at.row_bytes;
    at.weights += slice.first_tiles() * count * 512;
    if (kDealt) at.more += slice.more_tiles() * count * 512;
  }
  __syncwarp();
  if (arrives()) {
    barrier_arrive(&block().empty[weights.slot]);
    barrier_arrive(&block().empty[input.slot]);
    if (two) barrier_arrive(&block().empty[more.slot]);
  }
}

template <bool kHalf, uint32_t kFlags>
__device__ __noinline__ void consume_wide() {
  constexpr MatrixFlags flags{kFlags};
  Consumer c;
  c.load();
  Worker& w = c.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const PackedInput packed(w, f, flags.sampled());
  WideStorer<kFlags> out(w, f, packed);
  const WideShape<false> shape(record, f, packed.padded);
  WideOrder order(c.ring);
  Slices<false> at(shape);
  meet_loaders(c);
#pragma unroll 1
  while (!at.done()) {
    const WidePart part(w.warp(), packed.padded, at.group);
    WideSums sums = {};
    do {
      WideChains<WidePart::kMostRows, kPartTiles> d = {};
      do {
        take_slice(w, order, at, part, [&](const WidePlace& place) {
          if (part.row_tiles == 2) {
            if (part.tiles == 2) {
              multiply_unit<kHalf, 2, 2>(d, place);
            } else {
              multiply_unit<kHalf, 2, 1>(d, place);
            }
          } else if (part.tiles == 2) {
            multiply_unit<kHalf, 1, 2>(d, place);
          } else if (part.tiles == 1) {
            multiply_unit<kHalf, 1, 1>(d, place);
          }
        });
        order.next(2);
      } while (at.next_unit());
      add_chains(sums, d);
    } while (at.next_share());
    out.put(part, sums, at.tile);
    at.next_group();
  }
  c.ring = order.end();
  out.end(record);
  meet_loaders(c);
  c.save();
}

// ------------------------------------------------------------------------------------------------ dealt products
// A warp's chains of the group of (share, tile) at `place`; where the next one is. Beside them there is little room for
// registers: so nothing else lives here, and how many they are is known.
template <bool kHalf, uint32_t kRowTiles, uint32_t kTiles>
__device__ __noinline__ uint32_t multiply_dealt(uint32_t place) {
  Consumer c;
  c.load();
  Worker& w = c.w;
  const MatrixFields& f = matrix_fields(w);
  const uint32_t padded = padded_rows(w, false);
  const WideShape<true> shape(*w.record, f, padded);
  Slices<true> at(shape, place);
  const WidePart part(w.warp(), padded, at.group);
  WideOrder order(c.ring);
  WideChains<kRowTiles, kTiles> d = {};
  do {
    take_slice(w, order, at, part, [&](const WidePlace& place) { multiply_unit<kHalf, kRowTiles, kTiles>(d, place); });
    order.next(at.stages());
  } while (at.next_unit());
  PartSums(PackedInput(w, f, false), f).put<kRowTiles, kTiles>(part, at.tile, at.share, d);
  w.state_to_write().ring = order.at;
  __syncwarp();
  return at.place + at.group;
}
// Of a warp that has none: the stages go on.
__device__ __noinline__ uint32_t pass_dealt(uint32_t place) {
  Consumer c;
  c.load();
  Worker& w = c.w;
  const WideShape<true> shape(*w.record, matrix_fields(w), padded_rows(w, false));
  Slices<true> at(shape, place);
  WideOrder order(c.ring);
  do {
    take_slice(w, order, at, WidePart(w.warp(), 0, 0), [](const WidePlace&) {});
    order.next(at.stages());
  } while (at.next_unit());
  w.state_to_write().ring = order.at;
  __syncwarp();
  return at.place + at.group;
}

template <bool kHalf, uint32_t kRowTiles>
MK_DEVICE uint32_t multiply_dealt(uint32_t tiles, uint32_t place) {
  if (tiles == 4) return multiply_dealt<kHalf, kRowTiles, 4>(place);
  if (tiles == 3) return multiply_dealt<kHalf, kRowTiles, 3>(place);
  if (tiles == 2) return multiply_dealt<kHalf, kRowTiles, 2>(place);
  return multiply_dealt<kHalf, kRowTiles, 1>(place);
}

template <bool kHalf>
MK_DEVICE uint32_t multiply_group(uint32_t place) {
  const Loaded w;
  const uint32_t padded = padded_rows(w, false);
  const WideShape<true> shape(*w.record, matrix_fields(w), padded);
  const Slices<true> at(shape, place);
  const WidePart part(w.warp(), padded, at.group);
  if (part.tiles == 0) return pass_dealt(at.place);
  if (part.row_tiles == 2) return multiply_dealt<kHalf, 2>(part.tiles, at.place);
  return multiply_dealt<kHalf, 1>(part.tiles, at.place);
}

template <bool kHalf>
__device__ __noinline__ void consume_dealt() {
  {
    Consumer c;
    c.load();
    meet_loaders(c);
    c.save();
  }
  const auto end = [] { return (own_state().record->tile_begin + own_state().record->tile_count) * kConsumers; };
#pragma unroll 1
  for (uint32_t place = own_state().record->tile_begin * kConsumers; place < end();) place = multiply_group<kHalf>(place);
  Consumer c;
  c.load();
  Worker& w = c.w;
  w.sync();
  if (w.lane() == 0) add_release(counter_of(w, sums_counter(w)), uint64_t(kConsumers * w.record->tile_count) * w.header->rows);
  c.save();
}

// What this worker publishes of the product, when all chains are there.
template <uint32_t kFlags>
__device__ __noinline__ void finish_dealt() {
  Consumer c;
  c.load();
  Worker& w = c.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const PackedInput packed(w, f, false);
  const PartSums parts(packed, f);
  WideStorer<kFlags> out(w, f, packed);
  bool there = false;
#pragma unroll 1
  for (uint32_t tile = 0; tile < record.tile_count; tile += kWideTiles) {
    const WidePart part(w.warp(), packed.padded, tasks::least(kWideTiles, record.tile_count - tile));
    const float own = out.own_factor(part);
#pragma unroll 1
    for (uint32_t j = 0; j < kPartTiles; ++j) {
      const uint32_t at = record.tile_begin + tile + part.tile(j);
      typename WideStorer<kFlags>::Residual residual;
      if (j < part.tiles) out.fetch_residual(part, at, residual);
      if (!there) await_sums(w, (f.n + 7) / 8);
      there = true;
      if (j >= part.tiles) continue;
      TileSums sums;
      parts.add(part, at, sums);
      out.put(part, at, sums, own, residual);
    }
  }
  out.end(record);
  meet_loaders(c);
  c.save();
}

}  // namespace megakernel::dev
