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
// chunk the rows of the step in 16s, of each row four octets of 8 columns.
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
    *reinterpret_cast<Quad*>(chunk(share.first * units + o / 4) + row * 64 + o % 4 * 16) = v;
  }
  MK_DEVICE void put_square(uint32_t row, uint32_t share, float v) const { squares(row)[share] = v; }
};

MK_DEVICE uint64_t* packed_counter(const Worker& w) { return counter_of(w, w.args.counter_count - 1 - w.record->node); }

// How a record's tiles go in groups, and how many units of a share make a slice: as many as fit a stage.
struct WideShape {
  uint32_t chunks, units, tiles, group, row_bytes;  // row_bytes: of a chunk of the input

  MK_DEVICE WideShape(const abi::Record& record, const MatrixFields& f, uint32_t padded)
      : chunks(f.k_unit / 32), units(f.units), tiles(record.tile_count), row_bytes(padded * 64) {
    const uint32_t groups = (tiles + kWideTiles - 1) / kWideTiles;
    group = (tiles + groups - 1) / groups;
  }
  MK_DEVICE uint32_t slice_units(uint32_t count_of_tiles) const {
    const uint32_t chunk_bytes = tasks::most(row_bytes, count_of_tiles * 512), most = (chunks + kConsumers - 1) / kConsumers;
    return tasks::least(units, kStageBytes / (chunk_bytes * most));
  }
};

// The slices of a record in order: groups of tiles, shares, units.
struct Slices {
  const WideShape& shape;
  uint32_t tile = 0, group, each, share = 0, unit = 0, now, first = 0, count = 0;  // now: units of this slice

  MK_DEVICE Slices(const WideShape& of) : shape(of) { begin_group(); }
  MK_DEVICE bool done() const { return tile >= shape.tiles; }
  MK_DEVICE uint32_t chunk() const { return first * shape.units + unit * count; }  // of the packed input
  MK_DEVICE bool ends_share() const { return unit + now == shape.units; }
  MK_DEVICE bool ends_group() const { return ends_share() && first + count == shape.chunks; }

  MK_DEVICE void next() {
    unit += now;
    if (unit == shape.units) {
      unit = 0;
      if (first + count == shape.chunks) {
        share = 0;
        tile += group;
        begin_group();
        return;
      }
      ++share;
      begin_share();
    }
    now = tasks::least(each, shape.units - unit);
  }

 private:
  MK_DEVICE void begin_group() {
    group = tasks::least(shape.group, shape.tiles - tile);
    each = now = done() ? 1 : shape.slice_units(group);
    begin_share();
  }
  // Of few chunks some shares have none.
  MK_DEVICE void begin_share() {
    do {
      first = share * shape.chunks / kConsumers;
      count = (share + 1) * shape.chunks / kConsumers - first;
    } while (count == 0 && ++share < kConsumers);
  }
};

// Slices and their stages: of each slice the weights, filled by the producer, then the input, filled by a loader. So each
// may be as far ahead as the ring allows. Who fills a stage has waited for one at most a lap before it, and stages are given
// back in this order: so he is never two phases behind.
struct WideOrder {
  Ring weights, input;

  MK_DEVICE WideOrder(Ring ring) : weights(ring), input(ring) { input.next(); }
  MK_DEVICE void next() {
    pass_two(weights);
    pass_two(input);
  }
  MK_DEVICE Ring end() const { return weights; }  // when all are taken

 private:
  MK_DEVICE static void pass_two(Ring& ring) {
    ring.slot += 2;
    if (ring.slot >= ring.end) ring.slot -= ring.end, ring.parity ^= 1;
  }
};

// ------------------------------------------------------------------------------------------------ producer
// Weights, each slice's to a stage, and a stage for the input left out behind each. It counts no copies on their way, the
// ring is bound enough.
template <bool kSampled>
__device__ __noinline__ void produce_wide() {
  Producer p;
  p.load();
  Block& b = block();
  const abi::Record& record = *p.w.record;
  const MatrixFields& f = matrix_fields(p.w);
  const WideShape shape(record, f, padded_rows(p.w, kSampled));
  const uint32_t unit_bytes = f.k_unit * 16, lane = p.w.warp_lane();
  const uint64_t tile_bytes = uint64_t(unit_bytes) * f.units;
  const char* group = tasks::weights<char>(p.w, f.weight) + record.tile_begin * tile_bytes;
  WideOrder order(p.head);
  Slices at(shape);
#pragma unroll 1
  while (!at.done()) {
    // One lane a piece: a tile's part of a unit.
    const uint32_t tiles = at.group, unit = lane / tiles;
    const char* from = group + (lane - unit * tiles) * tile_bytes + unit * unit_bytes;
    group += tiles * tile_bytes;
    for (bool more = true; more;) {
      const Ring& to = order.weights;
      p.w.watch_barrier<true>(&b.empty[to.slot], to.parity ^ 1);
      set_copying(to.slot, to.parity);
      copy_pieces(b.ring[to.slot], from + (at.unit * unit_bytes + at.first * 512), at.count * 512, at.now * tiles,
                  &b.full[to.slot], p.policy);
      more = !at.ends_group();
      order.next();
      at.next();
    }
  }
  p.head = p.tail = order.end();
  p.in_flight = 0;
  trace::passed(p.w);
  p.save();
}

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
  Quad low[kRowTiles], high[kRowTiles], b[kTiles];
#pragma unroll
  for (uint32_t i = 0; i < kRowTiles; ++i) {
    low[i] = *reinterpret_cast<const Quad*>(input + i * (WidePart::kRowStride * 1024));
    high[i] = *reinterpret_cast<const Quad*>(input + i * (WidePart::kRowStride * 1024) + 512);
  }
#pragma unroll
  for (uint32_t j = 0; j < kTiles; ++j) b[j] = *reinterpret_cast<const Quad*>(weights + j * tile_bytes);
#pragma unroll
  for (uint32_t i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) {
      multiply<kHalf>(d[i][j][0], low[i].x, high[i].x, low[i].z, high[i].z, b[j].x, b[j].y);
      multiply<kHalf>(d[i][j][1], low[i].y, high[i].y, low[i].w, high[i].w, b[j].z, b[j].w);
    }
  }
}

// A warp's part of a unit of a slice: most units have four chunks of a share.
template <bool kHalf, uint32_t kRowTiles, uint32_t kTiles>
MK_DEVICE void multiply_unit(WideChains& d, const uint8_t* input, const uint8_t* weights, uint32_t row_bytes, uint32_t count) {
  if (count == kMaxChunks) {
#pragma unroll
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
template <bool kHalf>
MK_DEVICE void take_slice(Consumer& c, const WideOrder& order, const Slices& at, const WidePart& part, WideChains& d) {
  Worker& w = c.w;
  w.wait_barrier(&block().full[order.weights.slot], order.weights.parity);
  w.wait_barrier(&block().full[order.input.slot], order.input.parity);
  trace::ready(w, abi::Role::kConsumer);
  const uint8_t* input = block().ring[order.input.slot] + part.first_rows * 1024 + w.warp_lane() * 16;
  const uint8_t* weights = block().ring[order.weights.slot] + part.first_tile * at.count * 512 + w.warp_lane() * 16;
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
    barrier_arrive(&block().empty[order.weights.slot]);
    barrier_arrive(&block().empty[order.input.slot]);
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
  const WideShape shape(record, f, packed.padded);
  WideOrder order(c.ring);
  Slices at(shape);
  meet_loaders(c);
#pragma unroll 1
  while (!at.done()) {
    const WidePart part(w.warp(), packed.padded, at.group);
    const uint32_t tile = at.tile;
    WideSums sums = {};
    for (bool more = true; more;) {
      WideChains d = {};
      for (bool share = true; share;) {
        take_slice<kHalf>(c, order, at, part, d);
        share = !at.ends_share();
        more = !at.ends_group();
        order.next();
        at.next();
      }
      add_chains(sums, d);
    }
    out.put(part, sums, record.tile_begin + tile);
  }
  c.ring = order.end();
  out.end(record);
  meet_loaders(c);
  c.save();
}

}  // namespace megakernel::dev
