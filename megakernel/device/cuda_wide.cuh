// Products of wide steps, of more than kNarrowRows rows, with the bits of narrow ones. Part of cuda_matrix.cuh.
//
// An output is the sum over the eight shares of the columns, in order, of two chains over a share's chunks. In a narrow
// step each warp has a share and all rows. Here each warp has some of the rows and some of the tiles and goes through
// the shares itself, one after the other, so that the chains of one share at a time are all that it keeps. Hence the
// order of the stages: of a group of tiles, for each share, for as many units as fit, the share's chunks of them, of the
// input and of all tiles of the group (a slice). Each byte of the weights comes once a step.
//
// The input is packed once: by the node before the product, where it can be given (builder/giving.py); else by the loaders of
// all workers that have tiles of the product: each packs some (row, share), behind the product's output and the room of narrow
// steps. When all have said so on a counter the loaders copy slices of it into their rings. The producer brings the weights
// alone, so it waits for nothing but room.
//
// A worker with two tiles would bring a long input for little. So a product may be dealt by shares (builder/dealing.py): a
// worker multiplies as many (share, tile) as its own tiles have, but most of one share, publishes the sums of each for all
// rows, and adds up those of its own tiles when all have said on a counter that theirs are there: the same sums in the same
// order. The weights that it multiplies are other workers' tiles, which nobody has to be asked for.
#pragma once

#include "megakernel/device/cuda_wide_order.cuh"

namespace megakernel::dev {

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

__device__ __noinline__ void produce_dealt() {
  Producer p;
  p.load();
  Block& b = block();
  const MatrixFields& f = matrix_fields(p.w);
  const uint32_t unit_bytes = f.k_unit * 16, lane = p.w.warp_lane();
  const uint64_t tile_bytes = uint64_t(unit_bytes) * f.units;
  DealtOrder order(p.head);
#pragma unroll 1
  for (DealtSlices at(*p.w.record, f, padded_rows(p.w, false)); !at.done(); at.next_group()) {
    const char* group = tasks::weights<char>(p.w, f.weight) + at.tile * tile_bytes + at.first * 512;
    const auto piece = [&](uint32_t from, uint32_t tiles) {
      const uint32_t unit = lane / tiles;
      return group + (from + lane - unit * tiles) * tile_bytes + unit * unit_bytes;
    };
    const auto put = [&](const RingPlace& to, const char* from, uint32_t tiles) {
      p.w.watch_barrier<true>(&b.empty[to.slot], to.parity ^ 1);
      set_copying(to.slot, to.parity);
      copy_pieces(b.ring[to.slot], from + at.unit * unit_bytes, at.count * 512, at.now * tiles, &b.full[to.slot], p.policy);
    };
    const uint32_t first = at.first_tiles(), more = at.more_tiles(), stages = at.stages();
    const char* first_from = piece(0, first);
    const char* more_from = more > 0 ? piece(first, more) : nullptr;
    do {
      put(order.stage(0), first_from, first);
      if (more > 0) put(order.stage(2), more_from, more);
      order.next(stages);
    } while (at.next_unit());
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
  MK_DEVICE WidePart(uint32_t row_tile, uint32_t tile) : first_rows(row_tile), first_tile(tile), row_tiles(1), tiles(1) {}
  MK_DEVICE uint32_t row_tile(uint32_t i) const { return first_rows + i * kRowStride; }
  MK_DEVICE uint32_t tile(uint32_t j) const { return first_tile + j * kTileStride; }
};

using WideChains = Chains[WidePart::kMost][WidePart::kMost];

}  // namespace megakernel::dev

#include "megakernel/device/cuda_wide_input.cuh"
#include "megakernel/device/cuda_wide_store.cuh"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ consumer
// One chunk of a tile of rows and one of weights; a: the operands of chain 0 and of chain 1.
template <bool kHalf>
MK_DEVICE void multiply_tile(Chains& d, const Quad (&a)[2], const Quad& b) {
  multiply<kHalf>(d[0], a[0].x, a[0].y, a[0].z, a[0].w, b.x, b.y);
  multiply<kHalf>(d[1], a[1].x, a[1].y, a[1].z, a[1].w, b.z, b.w);
}

// The operands of a chunk; those of the warp's second tile of weights are `tile_bytes` further.
template <uint32_t kRowTiles, uint32_t kTiles>
struct ChunkOperands {
  Quad a[kRowTiles][2], b[kTiles];

  MK_DEVICE void load(const uint8_t* input, const uint8_t* weights, uint32_t tile_bytes) {
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) b[j] = load_shared(weights + j * tile_bytes);
#pragma unroll
    for (uint32_t i = 0; i < kRowTiles; ++i) {
      a[i][0] = load_shared(input + i * (WidePart::kRowStride * 1024));
      a[i][1] = load_shared(input + i * (WidePart::kRowStride * 1024) + 512);
    }
  }
  template <bool kHalf>
  MK_DEVICE void multiply(WideChains& d) const {
#pragma unroll
    for (uint32_t i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < kTiles; ++j) multiply_tile<kHalf>(d[i][j], a[i], b[j]);
    }
  }
};

// A warp's part of a unit of a slice: most units have four chunks of a share. Operands of the next chunk are on their way
// while one is multiplied: a product that waits for its own takes as long as five that do not.
template <bool kHalf, uint32_t kRowTiles, uint32_t kTiles>
MK_DEVICE void multiply_unit(WideChains& d, const uint8_t* input, const uint8_t* weights, uint32_t row_bytes, uint32_t count) {
  if (count == kMaxChunks) {
    constexpr uint32_t kTileBytes = WidePart::kTileStride * kMaxChunks * 512;
    ChunkOperands<kRowTiles, kTiles> of[2];
    of[0].load(input, weights, kTileBytes);
#pragma unroll
    for (uint32_t c = 0; c < kMaxChunks; ++c) {
      input += row_bytes;
      if (c + 1 < kMaxChunks) of[(c + 1) % 2].load(input, weights + (c + 1) * 512, kTileBytes);
      of[c % 2].template multiply<kHalf>(d);
    }
    return;
  }
#pragma unroll 1
  for (uint32_t c = 0; c < count; ++c) {
    ChunkOperands<kRowTiles, kTiles> of;
    of.load(input + c * row_bytes, weights + c * 512, WidePart::kTileStride * count * 512);
    of.template multiply<kHalf>(d);
  }
}

// One slice, and its stages are free again.
template <bool kHalf, class At>
MK_DEVICE void take_slice(Consumer& c, const WideOrder& order, const At& at, const WidePart& part, WideChains& d) {
  Worker& w = c.w;
  w.wait_barrier(&block().full[order.weights.slot], order.weights.parity);
  w.wait_barrier(&block().full[order.input.slot], order.input.parity);
  trace::ready(w, abi::Role::kConsumer);
  const uint8_t* input = block().ring[order.input.slot] + part.first_rows * 1024 + w.warp_lane() * 16;
  const uint8_t* weights = block().ring[order.weights.slot] + part.first_tile * at.count * 512 + w.warp_lane() * 16;
  const uint32_t row_bytes = at.row_bytes();
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

// ------------------------------------------------------------------------------------------------ dealt products
using DealtChains = Chains[WidePart::kMost][2 * WidePart::kMost];

// The same as multiply_unit of four tiles of weights, the third and fourth out of `more`. Of three the fourth is whatever is
// in its place. One chunk at a time: there are registers for no more.
template <bool kHalf, uint32_t kRowTiles>
MK_DEVICE void multiply_four(DealtChains& d, const uint8_t* input, const uint8_t* weights, const uint8_t* more,
                             uint32_t row_bytes, uint32_t count) {
#pragma unroll 1
  for (uint32_t c = 0; c < count; ++c) {
    Quad a[kRowTiles][2];
#pragma unroll
    for (uint32_t i = 0; i < kRowTiles; ++i) {
      const uint8_t* from = input + i * (WidePart::kRowStride * 1024);
      a[i][0] = *reinterpret_cast<const Quad*>(from), a[i][1] = *reinterpret_cast<const Quad*>(from + 512);
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const Quad b = *reinterpret_cast<const Quad*>((j < 2 ? weights : more) + j % 2 * (WidePart::kTileStride * count * 512));
#pragma unroll
      for (uint32_t i = 0; i < kRowTiles; ++i) multiply_tile<kHalf>(d[i][j], a[i], b);
    }
    input += row_bytes, weights += 512, more += 512;
  }
}

// Of up to two tiles; of one the second is the first once more.
template <bool kHalf>
MK_DEVICE void multiply_two_dealt(DealtChains& d, const uint8_t* input, const uint8_t* weights, const WidePart& part,
                                  uint32_t row_bytes, uint32_t count) {
  const uint32_t second = part.tiles == 2 ? WidePart::kTileStride * count * 512 : 0;
#pragma unroll 1
  for (uint32_t c = 0; c < count; ++c, input += row_bytes, weights += 512) {
    const Quad b[2] = {*reinterpret_cast<const Quad*>(weights), *reinterpret_cast<const Quad*>(weights + second)};
#pragma unroll
    for (uint32_t i = 0; i < WidePart::kMost; ++i) {
      if (i >= part.row_tiles) break;
      const uint8_t* from = input + i * (WidePart::kRowStride * 1024);
      const Quad a[2] = {*reinterpret_cast<const Quad*>(from), *reinterpret_cast<const Quad*>(from + 512)};
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) multiply_tile<kHalf>(d[i][j], a, b[j]);
    }
  }
}

template <bool kHalf>
MK_DEVICE void take_dealt(Worker& w, const DealtOrder& order, const DealtSlices& at, const WidePart& part, DealtChains& d) {
  Block& b = block();
  const RingPlace first = order.stage(0), rows = order.stage(1), others = order.stage(2);
  w.wait_barrier(&b.full[first.slot], first.parity);
  w.wait_barrier(&b.full[rows.slot], rows.parity);
  if (at.more_tiles() > 0) w.wait_barrier(&b.full[others.slot], others.parity);
  trace::ready(w, abi::Role::kConsumer);
  const uint32_t own = part.first_tile * at.count * 512 + w.warp_lane() * 16;
  const uint8_t* input = b.ring[rows.slot] + part.first_rows * 1024 + w.warp_lane() * 16;
  const uint8_t *weights = b.ring[first.slot] + own, *more = b.ring[others.slot] + own;
#pragma unroll 1
  for (uint32_t unit = 0; unit < at.now; ++unit) {
    if (part.tiles > 2) {
      if (part.row_tiles == 2) {
        multiply_four<kHalf, 2>(d, input, weights, more, at.row_bytes(), at.count);
      } else {
        multiply_four<kHalf, 1>(d, input, weights, more, at.row_bytes(), at.count);
      }
    } else if (part.tiles > 0) {
      multiply_two_dealt<kHalf>(d, input, weights, part, at.row_bytes(), at.count);
    }
    input += at.count * at.row_bytes();
    weights += at.first_tiles() * at.count * 512;
    more += at.more_tiles() * at.count * 512;
  }
  __syncwarp();
  if (arrives()) {
    barrier_arrive(&b.empty[first.slot]);
    barrier_arrive(&b.empty[rows.slot]);
    if (at.more_tiles() > 0) barrier_arrive(&b.empty[others.slot]);
  }
}

// The chains of this worker's (share, tile).
template <bool kHalf>
__device__ __noinline__ void consume_dealt() {
  Consumer c;
  c.load();
  Worker& w = c.w;
  const MatrixFields& f = matrix_fields(w);
  const uint32_t padded = padded_rows(w, false);
  DealtOrder order(c.ring);
  meet_loaders(c);
#pragma unroll 1
  for (DealtSlices at(*w.record, f, padded); !at.done(); at.next_group()) {
    WidePart part(w.warp(), padded, at.group);
    if (at.group > kWideTiles) part.tiles = (at.group - part.first_tile + WidePart::kTileStride - 1) / WidePart::kTileStride;
    DealtChains d = {};
    do {
      take_dealt<kHalf>(w, order, at, part, d);
      order.next(at.stages());
    } while (at.next_unit());
    PartSums(PackedInput(w, f, false), f).put(part, at.tile, at.share, d);
  }
  c.ring = order.end();
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
  await_sums(w, (f.n + 7) / 8);
#pragma unroll 1
  for (uint32_t tile = 0; tile < record.tile_count; tile += kWideTiles) {
    const WidePart part(w.warp(), packed.padded, tasks::least(kWideTiles, record.tile_count - tile));
#pragma unroll 1
    for (uint32_t n = 0; n < part.tiles * part.row_tiles; ++n) {  // one by one: most warps have one
      const uint32_t j = n / part.row_tiles;
      const WidePart one(part.row_tile(n - j * part.row_tiles), part.tile(j));
      WideSums sums;
      parts.add(one, record.tile_begin + tile, sums);
      out.put(one, sums, record.tile_begin + tile);
    }
  }
  out.end(record);
  meet_loaders(c);
  c.save();
}

}  // namespace megakernel::dev
