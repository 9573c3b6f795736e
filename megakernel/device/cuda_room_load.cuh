// What loaders do about the input of a product in a step of several rows. Part of cuda_room.cuh.
#pragma once

namespace megakernel::dev {

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

  // Until the consumers have left the places of stages that stay: before their values come.
  MK_DEVICE void reserve(uint32_t stages) {
#pragma unroll 1
    for (uint32_t slot = 0; slot < stages; ++slot) l.w.wait_barrier(&block().room_empty[slot], (parity >> slot & 1) ^ 1);
    parity ^= (1u << stages) - 1;
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
    uint32_t unit = own / halves;  // less than all, as the input does not fit the room
#pragma unroll 1
    for (uint32_t stage = own; own < kRoomStages && stage < stages; stage += kRoomStages) {
      l.w.wait_barrier(&block().room_empty[own], (parity >> own & 1) ^ 1);
      parity ^= 1u << own;
      fill(stage, unit, stage + kRoomStages >= stages);
      // What passes through is hardly waited for any more: weights need not be held back.
      if (own == 0) store_volatile(&block().asking, 0);
      unit += kRoomStages / halves;
      if (unit >= units) unit -= units;
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
  // Whether there is this lane's row.
  MK_DEVICE bool has_row(uint32_t stage) const { return half_of(stage) * 8 + l.w.warp_lane() / 4 < rows; }
  MK_DEVICE const uint8_t* source(uint32_t stage, uint32_t unit) const {
    return (half_of(stage) ? high : low) + unit * chunks * 512;
  }
  // Of a stage that stays.
  MK_DEVICE const uint8_t* source(uint32_t stage) const { return source(stage, stage >> (halves - 1)); }
  MK_DEVICE uint8_t* place(uint32_t stage) const {
    return block().ring[kRowStages + stage % kRoomStages] + first * 512 + l.w.warp_lane() * 16;
  }

  // f(bytes from the first) of so many chunks, mostly eights of them.
  template <class F>
  MK_DEVICE static void each_chunk(uint32_t count, F f) {
    uint32_t i = 0;
#pragma unroll 1
    for (; i + 8 <= count; i += 8) {
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) f(i * 512 + j * 512);
    }
#pragma unroll 1
    for (; i < count; ++i) f(i * 512);
  }

  // Asks for chunks, by lanes that have a row.
  MK_DEVICE static void ask(uint8_t* to, const uint8_t* p, uint32_t count, bool there) {
    if (there) each_chunk(count, [&](uint32_t at) { copy_quad(to + at, p + at); });
    commit_quads();
  }

  // Until all that was asked for is valid. What is not is asked for again.
  MK_DEVICE void await_valid(uint8_t* to, const uint8_t* p, uint32_t count, bool there, uint32_t stage) {
    l.w.spin([&] {
      uint32_t all = 0;
      if (there) each_chunk(count, [&](uint32_t at) { all = larger(all, worst(*reinterpret_cast<const Quad*>(to + at))); });
      if (!__any_sync(0xffffffffu, all == kInvalid)) return true;
#pragma unroll 1
      for (uint32_t i = 0; i < count; ++i) {
        if (there && invalid(*reinterpret_cast<const Quad*>(to + i * 512))) copy_quad(to + i * 512, p + i * 512);
      }
      commit_quads();
      await_quads<0>();
      return false;
    }, abi::FaultKind::kValueBudget, stage);
    trace::ready_now(l.w, abi::Role::kLoader);
  }

  // A whole stage. last: of this warp's place, which is part of the ring again then.
  MK_DEVICE void fill(uint32_t stage, uint32_t unit, bool last) {
    const uint8_t* p = source(stage, unit) - first * 512;
    uint8_t* to = place(stage) - first * 512;
    ask(to, p, chunks, has_row(stage));
    await_quads<0>();
    await_valid(to, p, chunks, has_row(stage), stage);
    if (last) fence_shared_for_copies();
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < kLoaders; ++i) barrier_arrive_warp(&block().room_full[stage % kRoomStages]);
  }

  // This warp's chunks of a unit.
  MK_DEVICE uint32_t own_chunks() const { return chunks > first ? tasks::least(kChunks, chunks - first) : 0; }

  MK_DEVICE void begin(uint32_t stage) { ask(place(stage), source(stage), own_chunks(), has_row(stage)); }

  // `later`: stages that were asked for after it.
  MK_DEVICE void await(uint32_t stage, uint32_t later) {
    static_assert(kRoomStages <= 4);
    if (later == 0) await_quads<0>();
    if (later == 1) await_quads<1>();
    if (later == 2) await_quads<2>();
    if (later == 3) await_quads<3>();
    await_valid(place(stage), source(stage), own_chunks(), has_row(stage), stage);
    __syncwarp();
    barrier_arrive_warp(&block().room_full[stage % kRoomStages]);
  }
};

// Two lanes a row, of each loader a quarter of the rows: all of them say that the input is there.
MK_DEVICE void bring_squares(Worker& w, const PackedRows& packed, uint32_t rows) {
  static_assert(kLoaders * 4 == kTileRows);
  Quad v{0, 0, 0, 0};
  const float* p = packed.squares(0) + w.warp_lane() * 4;
  const uint32_t row = w.warp_lane() / 2;
  const bool there = row < rows && row / 4 == Loader::index();
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
    await_all<2 * kMaxChunks>(w, [&](uint32_t i) { return invalid(v[i]); }, fetch, unit);
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
    if (room.stays) loader.reserve(stages);
    loader.probe(given, flags.sampled());
    if (room.stays) loader.run(stages);
    if (flags.norm()) add_given_squares(l.w, f, given, rows, flags.sampled());
    end_input(l, loader, room.stays ? 0 : stages);
  } else {
    const PackedRows packed(l.w, f, flags.sampled());
    l.begin();
    RoomLoader loader(l, f, packed, rows, false);
    if (room.stays) loader.reserve(stages);
    loader.probe(packed, false);
    if (room.stays) loader.run(stages);
    if (flags.norm()) bring_squares(l.w, packed, rows);
    end_input(l, loader, room.stays ? 0 : stages);
  }
  l.save();
}

}  // namespace megakernel::several
