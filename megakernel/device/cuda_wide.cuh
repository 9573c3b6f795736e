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

constexpr uint32_t kWideTiles = 8;  // of a group
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
// many (share, tile) out of all, share by share.
template <bool kDealt>
struct WideShape {
  uint32_t chunks, units, row_bytes;  // row_bytes: of a chunk of the input
  uint32_t tiles, begin, end, group;  // tiles: of the product

  MK_DEVICE WideShape(const abi::Record& record, const MatrixFields& f, uint32_t padded)
      : chunks(f.k_unit / 32), units(f.units), row_bytes(padded * 64), tiles((f.n + 7) / 8), begin(record.tile_begin),
        end(record.tile_begin + record.tile_count) {
    if constexpr (kDealt) begin *= kConsumers, end *= kConsumers;
    const uint32_t groups = (end - begin + kWideTiles - 1) / kWideTiles;
    group = (end - begin + groups - 1) / groups;
  }
  // Of a slice: as many as fit a stage, of the input and of the weights.
  MK_DEVICE uint32_t slice_units(uint32_t count_of_tiles) const {
    const uint32_t chunk_bytes = tasks::most(row_bytes, count_of_tiles * 512), most = (chunks + kConsumers - 1) / kConsumers;
    return tasks::least(units, kStageBytes / (chunk_bytes * most));
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

// Slices and their stages: of each slice the weights, filled by the producer, then the input, filled by a loader. So each
// may be as far ahead as the ring allows. Who fills a stage has waited for one at most a lap before it, and stages are given
// back in this order: so he is never two phases behind.
struct WideOrder {
  RingPlace at;

  MK_DEVICE WideOrder(const RingPlace& first) : at(first) {}
  MK_DEVICE RingPlace weights() const { return at; }
  MK_DEVICE RingPlace input() const { return later(1); }
  MK_DEVICE void next() { at = later(2); }
  MK_DEVICE Ring end() const { return {at, kStages}; }  // when all are taken

 private:
  MK_DEVICE RingPlace later(uint32_t stages) const {
    const uint32_t slot = at.slot + stages;
    return slot < kStages ? RingPlace{slot, at.parity} : RingPlace{slot - kStages, at.parity ^ 1};
  }
};

// ------------------------------------------------------------------------------------------------ a warp's part
// Which tiles of rows and of weights a warp has: up to two of either.
struct WidePart {
  static constexpr uint32_t kMost = 2, kRowStride = 2, kTileStride = 4;
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
      tiles = first_tile >= group ? 0 : group > first_tile + kTileStride ? 2 : 1;
    }
    if (tiles == 0 || row_tiles == 0) tiles = row_tiles = 0;
  }
  MK_DEVICE uint32_t row_tile(uint32_t i) const { return first_rows + i * kRowStride; }
  MK_DEVICE uint32_t tile(uint32_t j) const { return first_tile + j * kTileStride; }
};

using WideChains = Chains[WidePart::kMost][WidePart::kMost];

}  // namespace megakernel::dev

#include "megakernel/device/cuda_wide_input.cuh"
#include "megakernel/device/cuda_wide_store.cuh"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ consumer
// One chunk; the same of the warp's second tile of weights is `tile_bytes` further.
template <bool kHalf, uint32_t kRowTiles, uint32_t kTiles>
MK_DEVICE void multiply_part(WideChains& d, const uint8_t* input, const uint8_t* weights, uint32_t tile_bytes) {
  Quad a[kRowTiles][2], b[kTiles];
#pragma unroll
  for (uint32_t i = 0; i < kRowTiles; ++i) {
    const uint8_t* from = input + i * (WidePart::kRowStride * 1024);
    a[i][0] = *reinterpret_cast<const Quad*>(from), a[i][1] = *reinterpret_cast<const Quad*>(from + 512);
  }
#pragma unroll
  for (uint32_t j = 0; j < kTiles; ++j) b[j] = *reinterpret_cast<const Quad*>(weights + j * tile_bytes);
#pragma unroll
  for (uint32_t i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) {
      multiply<kHalf>(d[i][j][0], a[i][0].x, a[i][0].y, a[i][0].z, a[i][0].w, b[j].x, b[j].y);
      multiply<kHalf>(d[i][j][1], a[i][1].x, a[i][1].y, a[i][1].z, a[i][1].w, b[j].z, b[j].w);
    }
  }
}

// A warp's part of a unit of a slice: most units have four chunks of a share. Two at a time: with more on their way what
// lives through the product would not stay in registers.
template <bool kHalf, uint32_t kRowTiles, uint32_t kTiles>
MK_DEVICE void multiply_unit(WideChains& d, const uint8_t* input, const uint8_t* weights, uint32_t row_bytes, uint32_t count) {
  if (count == kMaxChunks) {
#pragma unroll 2
    for (uint32_t c = 0; c < kMaxChunks; ++c) {
      multiply_part<kHalf, kRowTiles, kTiles>(
          d, input + c * row_bytes, weights + c * 512, WidePart::kTileStride * kMaxChunks * 512);
    }
    return;
  }
#pragma unroll 1
  for (uint32_t c = 0; c < count; ++c) {
    multiply_part<kHalf, kRowTiles, kTiles>(d, input + c * row_bytes, weights + c * 512, WidePart::kTileStride * count * 512);
  }
}

// One slice, and its stages are free again.
template <bool kHalf, bool kDealt>
MK_DEVICE void take_slice(
    Worker& w, const WideOrder& order, const Slices<kDealt>& at, const WidePart& part, WideChains& d) {
  const RingPlace own = order.weights(), rows = order.input();
  w.wait_barrier(&block().full[own.slot], own.parity);
  w.wait_barrier(&block().full[rows.slot], rows.parity);
  trace::ready(w, abi::Role::kConsumer);
  const uint8_t* input = block().ring[rows.slot] + part.first_rows * 1024 + w.warp_lane() * 16;
  const uint8_t* weights = block().ring[own.slot] + part.first_tile * at.count * 512 + w.warp_lane() * 16;
  const uint32_t row_bytes = at.shape.row_bytes;
#pragma unroll 1
  for (uint32_t unit = 0; unit < at.now; ++unit) {
    if (part.row_tiles == 2) {
      if (part.tiles == 2) {
        multiply_unit<kHalf, 2, 2>(d, input, weights, row_bytes, at.count);
      } else {
        multiply_unit<kHalf, 2, 1>(d, input, weights, row_bytes, at.count);
      }
    } else if (part.tiles == 2) {
      multiply_unit<kHalf, 1, 2>(d, input, weights, row_bytes, at.count);
    } else if (part.tiles == 1) {
      multiply_unit<kHalf, 1, 1>(d, input, weights, row_bytes, at.count);
    }
    input += at.count * row_bytes;
    weights += at.group * at.count * 512;
  }
  __syncwarp();
  if (arrives()) {
    barrier_arrive(&block().empty[own.slot]);
    barrier_arrive(&block().empty[rows.slot]);
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
  out.begin();
  const WideShape<false> shape(record, f, packed.padded);
  WideOrder order(c.ring);
  meet_loaders(c);
#pragma unroll 1
  for (Slices<false> at(shape); !at.done(); at.next_group()) {
    const WidePart part(w.warp(), packed.padded, at.group);
    WideSums sums = {};
    do {
      WideChains d = {};
      do {
        take_slice<kHalf>(w, order, at, part, d);
        order.next();
      } while (at.next_unit());
      add_chains(sums, d);
    } while (at.next_share());
    out.put(part, sums, at.tile);
  }
  c.ring = order.end();
  out.end(record);
  meet_loaders(c);
  c.save();
}

// ------------------------------------------------------------------------------------------------ dealt products
// The chains of this worker's (share, tile).
template <bool kHalf>
__device__ __noinline__ void consume_dealt() {
  Consumer c;
  c.load();
  Worker& w = c.w;
  const MatrixFields& f = matrix_fields(w);
  const uint32_t padded = padded_rows(w, false);
  const WideShape<true> shape(*w.record, f, padded);
  WideOrder order(c.ring);
  meet_loaders(c);
#pragma unroll 1
  for (Slices<true> at(shape); !at.done(); at.next_group()) {
    const WidePart part(w.warp(), padded, at.group);
    WideChains d = {};
    do {
      take_slice<kHalf>(w, order, at, part, d);
      order.next();
    } while (at.next_unit());
    PartSums(PackedInput(w, f, false), f).put(part, at.tile, at.share, d);
  }
  c.ring = order.end();
  w.sync();
  if (w.lane() == 0) add_release(counter_of(w, sums_counter(w)), uint64_t(shape.end - shape.begin) * w.header->rows);
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
    for (uint32_t n = 0; n < WidePart::kMost * WidePart::kMost; ++n) {
      const uint32_t j = n / WidePart::kMost, i = n % WidePart::kMost;
      const uint32_t at = record.tile_begin + tile + part.tile(j);
      const bool own_part = j < part.tiles && i < part.row_tiles;
      typename WideStorer<kFlags>::Residual residual[1];
      if (own_part) out.fetch_residual(part, i, at, residual);
      if (!there) await_sums(w, (f.n + 7) / 8);
      there = true;
      if (own_part) out.put(part, i, at, parts.sum(at, part.row_tile(i)), own, residual[0]);
    }
  }
  out.end(record);
  meet_loaders(c);
  c.save();
}

// ------------------------------------------------------------------------------------------------ producer
// Weights, each slice's to a stage, and a stage for the input left out behind each. It counts no copies on their way, the ring is bound enough.
template <bool kSampled, bool kDealt>
__device__ __noinline__ void produce_wide() {
  Producer p;
  p.load();
  Block& b = block();
  const MatrixFields& f = matrix_fields(p.w);
  const WideShape<kDealt> shape(*p.w.record, f, padded_rows(p.w, kSampled));
  const uint32_t unit_bytes = f.k_unit * 16, lane = p.w.warp_lane();
  const uint64_t tile_bytes = uint64_t(unit_bytes) * f.units;
  const char* weights = tasks::weights<char>(p.w, f.weight);
  WideOrder order(p.head);
  Slices<kDealt> at(shape);
#pragma unroll 1
  while (!at.done()) {
    // One lane a piece: a tile's part of a unit.
    const uint32_t tiles = at.group, unit = lane / tiles;
    const char* from = weights + (at.tile + lane - unit * tiles) * tile_bytes + unit * unit_bytes;
    do {
      const RingPlace to = order.weights();
      p.w.watch_barrier<true>(&b.empty[to.slot], to.parity ^ 1);
      set_copying(to.slot, to.parity);
      copy_pieces(b.ring[to.slot], from + (at.unit * unit_bytes + at.first * 512), at.count * 512, at.now * tiles,
                  &b.full[to.slot], p.policy);
      order.next();
    } while (at.next_unit() || at.next_share());
    at.next_group();
  }
  p.head = p.tail = order.end();
  p.in_flight = 0;
  trace::passed(p.w);
  p.save();
}

}  // namespace megakernel::dev
