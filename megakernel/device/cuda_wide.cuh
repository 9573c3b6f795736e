// Products of wide steps, of more than kNarrowRows rows, with the bits of narrow ones. Part of cuda_matrix.cuh.
//
// An output is the sum over the eight shares of the columns, in order, of two chains over a share's chunks. In a narrow
// step each warp has a share and all rows. Here four warps together have 64 rows and half of the tiles of a group, and go
// through the shares one after the other, so that the chains of one share at a time are all that they keep. Hence the order
// of the stages: of a group of tiles, for each share, for as many units as fit, the share's chunks of them, of the input and
// of all tiles of the group (a slice). Each byte of the weights comes once a step.
//
// The input is packed once: by the node before the product, where it can be given (builder/giving.py); else by the loaders of
// all workers that have tiles of the product: each packs some (row, share), behind the product's output and the room of narrow
// steps. When all have said so on a counter the loaders copy slices of it into their rings. The producer brings the weights
// alone, so it waits for nothing but room.
//
// The products themselves are in the kernel, not in a function that it calls, where the compiler would wait for each of them: a
// task pauses, its caller multiplies a group of tiles (multiply_in_pause) and leaves the sums in the stages of the group's last
// slice, and the task goes on with them.
//
// A worker with two tiles would bring a long input for little. So a product may be dealt by shares (builder/dealing.py): a
// worker multiplies as many (share, tile) as its own tiles have, but most of one share, publishes the sums of each for all
// rows, and adds up those of its own tiles when all have said on a counter that theirs are there: the same sums in the same
// order. The weights that it multiplies are other workers' tiles, which nobody has to be asked for.
#pragma once

#include "megakernel/device/cuda_group.cuh"
#include "megakernel/device/cuda_wide_order.cuh"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ producer
// Weights, each slice's to one stage or two; the stage for the input is left out. It counts no copies on their way, the ring is
// bound enough.
template <bool kSampled, bool kDealt>
__device__ __noinline__ void produce_wide() {
  Producer p;
  p.load();
  Block& b = block();
  const abi::Record& record = *p.w.record;
  const MatrixFields& f = matrix_fields(p.w);
  const uint32_t unit_bytes = f.k_unit * 16, lane = p.w.warp_lane();
  const uint64_t tile_bytes = uint64_t(unit_bytes) * f.units;
  const char* all = tasks::weights<char>(p.w, f.weight) + (kDealt ? 0 : record.tile_begin * tile_bytes);
  WideOrder order(p.head);
  Slices<kDealt> at(record, f, padded_rows(p.w, kSampled));
#pragma unroll 1
  while (!at.done()) {
    // One lane a piece: a tile's part of a unit.
    const auto piece = [&](uint32_t from, uint32_t tiles) {
      const uint32_t unit = lane / tiles;
      return all + (at.tile + from + lane - unit * tiles) * tile_bytes + unit * unit_bytes;
    };
    const auto put = [&](const RingPlace& to, const char* from, uint32_t tiles) {
      p.w.watch_barrier<true>(&b.empty[to.slot], to.parity ^ 1);
      set_copying(to.slot, to.parity);
      copy_pieces(b.ring[to.slot], from + (at.unit * unit_bytes + at.first * 512), at.count * 512, at.now * tiles,
                  &b.full[to.slot], p.policy);
    };
    const uint32_t first = at.first_tiles(), more = at.half(1);
    const char* first_from = piece(0, first);
    const char* more_from = at.stages == 3 && more > 0 ? piece(first, more) : nullptr;
    for (bool goes_on = true; goes_on;) {
      put(order.stage(0), first_from, first);
      if (at.stages == 3) put(order.stage(2), more_from, more);
      goes_on = !at.ends_group();
      order.next(at.stages);
      at.next();
    }
  }
  p.head = p.tail = order.end();
  p.in_flight = 0;
  trace::passed(p.w);
  p.save();
}

using WideSums = float[kGroupTiles][4];  // of a warp: of 16 rows and the tiles of one half of a group; of a share or of all

template <uint32_t kMost>
MK_DEVICE void clear(float (&sums)[kMost][4]) {
#pragma unroll
  for (uint32_t j = 0; j < kMost; ++j) {
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) sums[j][e] = 0.0f;
  }
}

}  // namespace megakernel::dev

#include "megakernel/device/cuda_wide_input.cuh"
#include "megakernel/device/cuda_wide_store.cuh"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ consumer
// Where a consumer is between two pauses: in shared memory.
struct WideWalk {
  RingPlace next, last;  // the first stages of the next slice, and of the one whose stages have the sums
  Slice at;              // the first of the group

  MK_DEVICE static WideWalk& own() { return *reinterpret_cast<WideWalk*>(block_again().walk[thread_again() / 32]); }
  MK_DEVICE void put() const {
    __syncwarp();
    if (lane_of_warp() == 0) own() = *this;
    __syncwarp();
  }

  // Of the group, in all lanes. Read where it is used: registers are few.
  MK_DEVICE static uint32_t group_has(uint32_t Slice::*field) { return of_first_lane(load_volatile(&(own().at.*field))); }

  MK_DEVICE static uint32_t half() { return thread_again() / 32 / kGroupWarps; }
  MK_DEVICE static uint32_t row_tile() { return thread_again() / 32 % kGroupWarps; }

  // A tile's sums, 16 bytes of each lane of four warps, in a stage of the last slices.
  MK_DEVICE uint8_t* sums(uint32_t stage, uint32_t tile) const {
    const uint32_t lane = thread_again() % (kGroupWarps * 32);
    return block_again().ring[WideOrder(last).stage(stage).slot] + tile * kTileStride + lane * 16;
  }
  static constexpr uint32_t kTileStride = kGroupWarps * 512;
};
static_assert(!kWide || sizeof(WideWalk) <= kWalkWords * 4);
static_assert(kGroupTiles * WideWalk::kTileStride == kStageBytes);

// The stages of slices, as all lanes know them; each waits for one, beside the others, and gives it back.
struct SliceReader {
  uint32_t slot, parity;
  const uint32_t stages, mine, full;  // full: shared address

  MK_DEVICE SliceReader(const RingPlace& first, uint32_t count)
      : slot(of_first_lane(first.slot)), parity(of_first_lane(first.parity)), stages(count),
        mine(tasks::least(thread_again() % 32, count - 1)), full(shared_address(&block_again().full[0])) {}
  MK_DEVICE static uint32_t wrapped(uint32_t s) { return s < kStages ? s : s - kStages; }
  MK_DEVICE uint32_t stage(uint32_t i) const {
    static_assert(__builtin_offsetof(Block, ring) == 0);
    return full - uint32_t(__builtin_offsetof(Block, full)) + wrapped(slot + i) * kStageBytes;
  }
  MK_DEVICE uint32_t barrier() const { return full + wrapped(slot + mine) * 8; }

  MK_DEVICE void await() const {
    if constexpr (kChaos) {
      Worker w;
      w.load();
      w.random = random_delay(w.random);
      w.save();
    }
    const uint32_t waits = slot + mine < kStages ? parity : parity ^ 1;
#pragma unroll 1
    while (!__all_sync(0xffffffffu, barrier_try(barrier(), waits))) {
      if (*static_cast<volatile uint32_t*>(&block_again().stop) != 0) end_thread();
    }
  }
  // times: for how many warps.
  MK_DEVICE void give_back(uint32_t times = 1) const {
    constexpr uint32_t kEmpty = kStages * 8;
    static_assert(__builtin_offsetof(Block, empty) - __builtin_offsetof(Block, full) == kEmpty);
    __syncwarp();
    if constexpr (kWarpArrivals == 1) {
      if (thread_again() % 32 < stages) barrier_arrive_at(barrier() + kEmpty, times);
    } else {
#pragma unroll 1
      for (uint32_t i = 0; i < stages; ++i) barrier_arrive_at(full + wrapped(slot + i) * 8 + kEmpty, times);
    }
  }
  MK_DEVICE void next(uint32_t slices = 1) {
    slot += stages * slices;
    if (slot >= kStages) slot -= kStages, parity ^= 1;
  }
};

// Worker::sync, where nothing of a worker is in registers.
MK_DEVICE void meet_in_pause() {
  const auto parity = []() -> uint32_t& { return block_again().state[thread_again() / 32].group_parity; };
  const auto first = [] { return thread_again() % 32 == 0; };
  __syncwarp();
  if (kWarpArrivals > 1 || first()) barrier_arrive(&block_again().group);
  const uint32_t waits = parity();  // no arrival overtakes a load
  barrier_wait(shared_address(&block_again().group), waits, shared_address(&block_again().stop));
  if (first()) parity() = waits ^ 1;
  __syncwarp();
}

MK_DEVICE void put_sums(uint32_t stage, uint32_t tile, const float (&sum)[4]) {
  auto* to = reinterpret_cast<Quad*>(WideWalk::own().sums(stage, tile));
  *to = {as_bits(sum[0]), as_bits(sum[1]), as_bits(sum[2]), as_bits(sum[3])};
}

// A slice of up to kTiles tiles: of each chunk an operand of rows and one of weights for either chain. adds: to what d has.
template <bool kHalf, uint32_t kTiles, uint32_t kMost>
MK_DEVICE void multiply_slice(float (&d)[2][kMost][4], GroupOperand a, GroupOperand b, uint32_t row_bytes, uint32_t unit_bytes,
                              uint32_t count, uint32_t units, uint32_t adds, const GroupPart& part) {
  const auto chunk = [&](uint32_t c, uint32_t on) {
    multiply_group<kHalf, kTiles>(d[0], GroupOperand(a, c * row_bytes), GroupOperand(b, c * 512), on, part);
    multiply_group<kHalf, kTiles>(
        d[1], GroupOperand(a, c * row_bytes + kOperandBytes), GroupOperand(b, c * 512 + kOperandBytes), on, part);
  };
#pragma unroll 1
  for (; units > 0; --units) {
    if (count == kMaxChunks) {
      begin_group();
#pragma unroll
      for (uint32_t c = 0; c < kMaxChunks; ++c) chunk(c, c == 0 ? adds : 1);
      await_group();
    } else {
#pragma unroll 1
      for (uint32_t c = 0; c < count; ++c) {
        begin_group();
        chunk(c, c == 0 ? adds : 1);
        await_group();
      }
    }
    adds = 1;
    a = GroupOperand(a, count * row_bytes), b = GroupOperand(b, unit_bytes);
  }
}

template <uint32_t kMost>
MK_DEVICE void add_chains(float (&sums)[kMost][4], const float (&d)[2][kMost][4]) {
#pragma unroll
  for (uint32_t j = 0; j < kMost; ++j) {
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) sums[j][e] += d[0][j][e] + d[1][j][e];
  }
}

// A group of tiles, or of a dealt product the tiles of one share; but its last slice is not given back: its stages get the
// sums. All that branches depend on is known to be the same in all lanes, or products would wait for one another.
template <bool kHalf>
MK_DEVICE void multiply_group_of_tiles() {
  const auto own = WideWalk::group_has;
  const uint32_t tiles = (own(&Slice::group) + 1 - of_first_lane(WideWalk::half())) / 2;
  const uint32_t each = own(&Slice::each), row_bytes = own(&Slice::padded) * 64;
  const GroupPart part = {tiles, WideWalk::row_tile() * 1024 < row_bytes};
  SliceReader from(WideWalk::own().next, own(&Slice::stages));
  WideSums sums, d[2];
  clear(sums), clear(d[0]), clear(d[1]);
  bool last;
  uint32_t share = own(&Slice::share);
#pragma unroll 1
  do {
    const uint32_t chunks = own(&Slice::chunks), count = Slice::first_of(share + 1, chunks) - Slice::first_of(share, chunks);
    const bool apart = from.stages == 3, second = of_first_lane(WideWalk::half()) > 0;
    const uint32_t group = own(&Slice::group), unit_bytes = (apart ? tiles : group) * count * 512;
    const uint32_t weights_stage = apart && second ? 2 : 0, skipped = !apart && second ? (group - tiles) * count * 512 : 0;
    uint32_t left = count > 0 ? own(&Slice::units) : 0, adds = 0;
    last = ++share == own(&Slice::shares_end);
#pragma unroll 1
    while (left > 0) {
      const uint32_t now = tasks::least(each, left);
      left -= now;
      from.await();
      const GroupOperand rows(from.stage(1), 2 * kOperandBytes), weights(from.stage(weights_stage) + skipped, count * 512);
      if (tiles > 2) {
        multiply_slice<kHalf, 8>(d, rows, weights, row_bytes, unit_bytes, count, now, adds, part);
      } else if (tiles > 0) {
        multiply_slice<kHalf, 2>(d, rows, weights, row_bytes, unit_bytes, count, now, adds, part);
      }
      adds = 1;
      if (left == 0 && last) break;
      from.give_back();
      from.next();
    }
    if (count > 0) add_chains(sums, d);
  } while (!last);
  if (thread_again() % 32 == 0) {
    WideWalk& walk = WideWalk::own();
    walk.last = {from.slot, from.parity};
    from.next();
    walk.next = {from.slot, from.parity};
  }
  meet_in_pause();  // all are through the slice
#pragma unroll
  for (uint32_t j = 0; j < kGroupTiles; ++j) put_sums(WideWalk::half(), j, sums[j]);
}

// The same of few tiles, four warps the first half of the shares, four the second. These add theirs up later: each sum is put.
template <bool kHalf>
MK_DEVICE void multiply_by_turns() {
  constexpr uint32_t kTiles = Slice::kTurnTiles, kShares = Slice::kTurnShares;
  const auto own = WideWalk::group_has;
  const uint32_t tiles = own(&Slice::group), each = own(&Slice::each), units = own(&Slice::units);
  const uint32_t row_bytes = own(&Slice::padded) * 64;
  const uint32_t second = of_first_lane(WideWalk::half()), count = own(&Slice::chunks) / kConsumers;
  const GroupPart part = {tiles, WideWalk::row_tile() * 1024 < row_bytes};
  SliceReader from(WideWalk::own().next, 2);
  if (second > 0) from.next();
  float sums[kShares][kTiles][4], d[2][kTiles][4];
#pragma unroll
  for (uint32_t s = 0; s < kShares; ++s) clear(sums[s]);
  clear(d[0]), clear(d[1]);
  bool last = false;
#pragma unroll 1
  for (uint32_t share = 0; !last; ++share) {
    uint32_t left = units, adds = 0;
    last = share + 1 == kShares;
#pragma unroll 1
    for (;;) {
      const uint32_t now = tasks::least(each, left);
      left -= now;
      from.await();
      multiply_slice<kHalf, kTiles>(d, GroupOperand(from.stage(1), 2 * kOperandBytes), GroupOperand(from.stage(0), count * 512),
                                    row_bytes, tiles * count * 512, count, now, adds, part);
      adds = 1;
      if (left == 0 && last) break;
      from.give_back(2);
      from.next(2);
      if (left == 0) break;
    }
    const uint32_t into = in_register(second > 0 ? 1u << share : 1u);  // a bit: an array with an index would be in memory
#pragma unroll
    for (uint32_t s = 0; s < kShares; ++s) {
      if (into >> s & 1) add_chains(sums[s], d);
    }
  }
  if (thread_again() % 32 == 0) {
    WideWalk& walk = WideWalk::own();
    walk.last = {SliceReader::wrapped(from.slot + (second > 0 ? kStages - 2 : 0)), 0};  // the first of both last slices
    from.next(second > 0 ? 1 : 2);
    walk.next = {from.slot, from.parity};
  }
  meet_in_pause();
#pragma unroll
  for (uint32_t s = 0; s < kShares; ++s) {
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) {
      if (s == 0 || second > 0) put_sums(second > 0 ? 2 + s / 2 : 0, s % 2 * kTiles + j, sums[s][j]);
    }
  }
  meet_in_pause();  // lanes of either half read those of the other
}

// Where a timeline is recorded: the first slice is there.
MK_DEVICE void mark_ready() {
  SliceReader(WideWalk::own().next, WideWalk::group_has(&Slice::stages)).await();
  Worker w;
  w.load();
  trace::ready(w, abi::Role::kConsumer);
}

template <bool kHalf>
MK_DEVICE void multiply_in_pause() {
  if constexpr (trace::kOn) mark_ready();
  if (WideWalk::group_has(&Slice::by_turns) != 0) return multiply_by_turns<kHalf>();
  multiply_group_of_tiles<kHalf>();
}

template <bool kSampled, bool kDealt>
__device__ __noinline__ void begin_products() {
  Consumer c;
  c.load();
  if constexpr (kSampled) begin_largest(c.w);
  meet_loaders(c);
  WideWalk{c.ring, c.ring, Slices<kDealt>(*c.w.record, matrix_fields(c.w), padded_rows(c.w, kSampled))}.put();
  set_paused(true);
  c.save_but_ring();
}

// ------------------------------------------------------------------------------------------------ what comes of them
// The sums of a group as a warp has left them.
template <bool kDealt>
struct GroupSums {
  static constexpr bool kFar = false;
  const WideWalk walk;
  const uint32_t row_tile, tile, tiles;  // tile: the first
  const bool mine;

  MK_DEVICE GroupSums()
      : walk(WideWalk::own()), row_tile(WideWalk::row_tile()),
        tile(walk.at.tile + (WideWalk::half() > 0 ? walk.at.half(0) : 0)), tiles(walk.at.half(WideWalk::half())),
        mine(row_tile * 16 < walk.at.padded) {}
  MK_DEVICE void load(uint32_t j, float (&out)[4]) const {
    const auto at = [&](uint32_t stage, uint32_t i) { return *reinterpret_cast<const Quad*>(walk.sums(stage, i)); };
    const bool turns = !kDealt && walk.at.by_turns != 0;
    const uint32_t i = turns ? tile - walk.at.tile + j : j;
    const Quad v = at(turns ? 0 : WideWalk::half(), i);
    out[0] = as_float(v.x), out[1] = as_float(v.y), out[2] = as_float(v.z), out[3] = as_float(v.w);
    if (!turns) return;
    Quad more[Slice::kTurnShares];
#pragma unroll
    for (uint32_t s = 0; s < Slice::kTurnShares; ++s) more[s] = at(2 + s / 2, s % 2 * Slice::kTurnTiles + i);
#pragma unroll
    for (const Quad& m : more) {
      out[0] += as_float(m.x), out[1] += as_float(m.y), out[2] += as_float(m.z), out[3] += as_float(m.w);
    }
  }
  // They were read; whether another group comes.
  MK_DEVICE bool next() const {
    fence_shared_for_copies();
    SliceReader(walk.last, walk.at.by_turns != 0 ? 4 : walk.at.stages).give_back();
    Slices<kDealt> at(walk.at);
    at.next_group();
    if (at.done()) {
      set_paused(false);
      return false;
    }
    WideWalk{walk.next, walk.next, at}.put();
    return true;
  }
};

template <uint32_t kFlags>
__device__ __noinline__ void put_products() {
  Consumer c;
  c.load();
  const GroupSums<false> sums;
  WideStorer<kFlags> out(c.w, matrix_fields(c.w));
  if (sums.mine) out.put(sums.row_tile, c.w.record->tile_begin + sums.tile, sums.tiles, sums);
  if (sums.next()) return c.save_but_ring();
  c.ring = {sums.walk.next, kStages};
  out.end(*c.w.record);
  meet_loaders(c);
  c.save();
}

// ------------------------------------------------------------------------------------------------ dealt products
// The sums of this worker's (share, tile).
__device__ __noinline__ void put_chains() {
  Consumer c;
  c.load();
  Worker& w = c.w;
  const GroupSums<true> sums;
  if (sums.mine) {
    const MatrixFields& f = matrix_fields(w);
    PartSums(PackedInput(w, f, false), f).put(sums.row_tile, sums.tile, sums.tiles, sums.walk.at.share, sums);
  }
  if (sums.next()) return c.save_but_ring();
  c.ring = {sums.walk.next, kStages};
  w.sync();
  if (w.lane() == 0) add_release(counter_of(w, sums_counter(w)), uint64_t(kConsumers * w.record->tile_count) * w.header->rows);
  c.save();
}

// What this worker publishes of the product, when all chains are there. Each (tile, 16 rows) a warp.
template <uint32_t kFlags>
__device__ __noinline__ void finish_dealt() {
  Consumer c;
  c.load();
  Worker& w = c.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const PackedInput packed(w, f, false);
  const PartSums parts(packed, f);
  WideStorer<kFlags> out(w, f);
  await_sums(w, (f.n + 7) / 8);
  const uint32_t row_tiles = packed.padded / 16;
#pragma unroll 1
  for (uint32_t n = w.warp(); n < record.tile_count * row_tiles; n += kConsumers) {
    const uint32_t i = n / row_tiles, tile = record.tile_begin + i, row_tile = n - i * row_tiles;
    out.put(row_tile, tile, 1, AddedSums{parts, tile, row_tile});
  }
  out.end(record);
  meet_loaders(c);
  c.save();
}

}  // namespace megakernel::dev
