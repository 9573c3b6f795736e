// The packed input of a wide product, its slices and the order of their stages. Part of cuda_wide.cuh.
#pragma once

namespace megakernel::dev {

static_assert(abi::kMaxRows <= 64, "four tiles of 16 rows");

// ------------------------------------------------------------------------------------------------ what and where
// Of a step that the producer is at: whether it has to know its rows.
MK_DEVICE bool may_be_wide() {
  if constexpr (kWide) return block().header[own_state().step & 1 ^ 1].widens == 2;
  return false;
}

MK_DEVICE uint32_t padded_rows(const Worker& w, bool sampled) { return (matrix_rows(w, sampled) + 15) / 16 * 16; }

// The packed input of a product, behind its output: of each row the squares of its shares, then the slices, of each
// chunk the rows of the step by eights. Of eight rows the two operands, of chain 0 and of chain 1.
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
    uint8_t* to = chunk(share.first * units + o / 4) + row / 8 * (2 * kOperandBytes) + operand_at(row % 8, o % 4);
    *reinterpret_cast<Two*>(to) = {v.x, v.z};
    *reinterpret_cast<Two*>(to + kOperandBytes) = {v.y, v.w};
  }
  MK_DEVICE void put_square(uint32_t row, uint32_t share, float v) const { squares(row)[share] = v; }
};

// Counters of a product beside those of the schedule: of its packed input, and of the sums of one that is dealt.
MK_DEVICE uint32_t packed_counter(const Worker& w) { return w.args.counter_count - 1 - 2 * w.record->node; }
MK_DEVICE uint32_t sums_counter(const Worker& w) { return packed_counter(w) - 1; }

// ------------------------------------------------------------------------------------------------ given inputs
// Of some products the node before them stores the input packed, in the place of its float32 values, which nobody else
// reads; and instead of the loaders its workers add to the product's counter, together columns times rows (builder/giving.py).
// Of fewer than 8 rows the packed form would take more than the values.
constexpr bool kGivesWide = kWide && kNarrowRows >= 7;

MK_DEVICE bool is_wide(const abi::StepHeader& h) { return kWide && h.rows > kNarrowRows; }

// Whether attention leaves all rows of the step of that header to `combine`, for which it may be to give them.
MK_DEVICE bool leaves_all(const abi::StepHeader& h) { return gives(h) || (kGivesWide && is_wide(h)); }

// A tensor whose reader has units of kChunks chunks.
template <uint32_t kChunks>
struct GivenInput {
  uint8_t* base;
  uint32_t units, padded;

  MK_DEVICE GivenInput(const Worker& w, uint32_t tensor, uint32_t columns)
      : base(tasks::workspace<uint8_t>(w, tensor)), units(columns / (kChunks * 32)), padded(padded_rows(w, false)) {}

  // Of columns 2 i and 2 i + 1; beside it are the other two of four. See PackedInput.
  MK_DEVICE uint32_t* pair(uint32_t row, uint32_t column) const {
    const uint32_t unit = column / (kChunks * 32), chunk = column / 32 - unit * kChunks;
    const uint32_t share = ((chunk + 1) * kConsumers - 1) / kChunks, first = share * kChunks / kConsumers;
    const uint32_t count = (share + 1) * kChunks / kConsumers - first;
    uint8_t* operand = base + uint64_t(first * units + unit * count + chunk - first) * (padded * 64);
    operand += (row / 8 * 2 + column % 8 / 4) * kOperandBytes + operand_at(row % 8, column % 32 / 8);
    return reinterpret_cast<uint32_t*>(operand) + column % 4 / 2;
  }

  // By one lane, when the group has met.
  MK_DEVICE static void count(const Worker& w, uint64_t columns) {
    if (columns > 0) add_release(counter_of(w, packed_counter(w) - 2), columns);
  }
  // Rows of float32 in whose place it was in the step of that header.
  MK_DEVICE static uint32_t rows(const abi::StepHeader& h) { return is_wide(h) ? (h.rows + 15) / 16 * 8 : h.rows; }
};
template <>
struct GivenInput<0> {  // of what gives nothing
  MK_DEVICE GivenInput(const Worker&, uint32_t, uint32_t) {}
  MK_DEVICE uint32_t* pair(uint32_t, uint32_t) const { return nullptr; }
  MK_DEVICE static void count(const Worker&, uint64_t) {}
  MK_DEVICE static uint32_t rows(const abi::StepHeader& h) { return h.rows; }
};

// The slices of a product in the order in which they are multiplied. Of a group of tiles, for each share, as many units of it
// as fit a stage at a time. Either half of a group is four warps' own. Where a record has more tiles than fit a stage the second
// half has a stage of its own, behind the input's. A product that is dealt has as many (share, tile) of the whole product, in
// this order, as the record has tiles: there a group is of one share.
//
// Of few tiles it would be a waste to halve them. There four warps take the first half of the shares and four the second, and
// their slices come by turns (`by_turns`). Each stage has to be filled for the same four warps in each lap: nobody else waits
// for it, and who has not seen a phase end could take the one before for the next.
struct Slice {
  uint32_t chunks, units, tiles, padded, stages, each, end;  // of the product; each: units of a slice, at most
  uint32_t place = 0, tile = 0, group = 0, share = 0, shares_end = 0, first = 0, count = 0, unit = 0, now = 0, by_turns = 0;

  static constexpr uint32_t kTurnTiles = 4, kTurnShares = kConsumers / 2;  // at most; of four warps

  // Of a chunk of the input.
  MK_DEVICE uint32_t row_bytes() const { return padded * 64; }
  // Of either half; with weights in the first stage of a slice, and in its third.
  MK_DEVICE uint32_t half(uint32_t i) const { return i == 0 ? (group + 1) / 2 : group / 2; }
  MK_DEVICE uint32_t first_tiles() const { return stages == 3 ? half(0) : group; }

  // Of few chunks some shares have none.
  MK_DEVICE static uint32_t first_of(uint32_t share, uint32_t chunks) { return share * chunks / kConsumers; }
  MK_DEVICE void begin_share() {
    for (;; ++share) {
      first = first_of(share, chunks);
      count = first_of(share + 1, chunks) - first;
      if (count > 0) break;
    }
    unit = 0;
    now = each;
  }
};

template <bool kDealt>
struct Slices : Slice {
  static constexpr uint32_t kMost = 2 * kGroupTiles;  // tiles of a group

  MK_DEVICE Slices(const abi::Record& record, const MatrixFields& f, uint32_t rows) {
    chunks = f.k_unit / 32, units = f.units, padded = rows;
    tiles = kDealt ? (f.n + 7) / 8 : record.tile_count;
    stages = record.tile_count * (kDealt ? kConsumers : 1) > kGroupTiles ? 3 : 2;
    const uint32_t most = (chunks + kConsumers - 1) / kConsumers, together = stages == 3 ? kGroupTiles : record.tile_count;
    each = tasks::least(units, kStageBytes / (tasks::most(row_bytes(), together * 512) * most));
    by_turns = !kDealt && kStages % 4 == 0 && tiles <= kTurnTiles && chunks % kConsumers == 0;
    if constexpr (kDealt) place = record.tile_begin * kConsumers;
    end = kDealt ? place + record.tile_count * kConsumers : tiles;
    begin_group();
  }
  MK_DEVICE explicit Slices(const Slice& at) : Slice(at) {}

  MK_DEVICE bool done() const { return place >= end; }
  MK_DEVICE uint32_t chunk() const { return first * units + unit * count; }  // of the packed input
  MK_DEVICE bool ends_group() const { return unit + now == units && (kDealt || first + count == chunks); }
  MK_DEVICE bool ends_all() const { return ends_group() && place + group >= end; }

  MK_DEVICE void next_group() {
    place += group;
    begin_group();
  }
  MK_DEVICE void next() {
    if (by_turns && share < kTurnShares) return turn(share + kTurnShares);
    if (by_turns) turn(share - kTurnShares);
    unit += now;
    now = tasks::least(each, units - unit);
    if (now > 0) return;
    if (kDealt || share + 1 == (by_turns ? kTurnShares : kConsumers)) return next_group();
    ++share;
    begin_share();
  }

 private:
  MK_DEVICE void turn(uint32_t to) {
    share = to;
    first = first_of(share, chunks);
  }
  MK_DEVICE void begin_group() {
    if (done()) return;
    if constexpr (kDealt) {
      share = place / tiles;
      tile = place - share * tiles;
      group = tasks::least(kMost, tasks::least(end - place, tiles - tile));
      shares_end = share + 1;
    } else {
      const uint32_t groups = (tiles + kMost - 1) / kMost;
      share = 0, tile = place;
      group = tasks::least((tiles + groups - 1) / groups, tiles - tile);
      shares_end = kConsumers;
    }
    begin_share();
  }
};

// The stages of a slice: the first weights, filled by the producer, the input, filled by a loader, and the other weights where
// they have a stage. So each may be as far ahead as the ring allows. Who fills a stage has waited for one at most a lap before
// it, and stages are given back in this order: so he is never two phases behind.
struct WideOrder {
  RingPlace at;

  MK_DEVICE WideOrder(const RingPlace& first) : at(first) {}
  MK_DEVICE RingPlace stage(uint32_t i) const {
    const uint32_t slot = at.slot + i;
    return slot < kStages ? RingPlace{slot, at.parity} : RingPlace{slot - kStages, at.parity ^ 1};
  }
  MK_DEVICE void next(uint32_t stages) { at = stage(stages); }
  MK_DEVICE Ring end() const { return {at, kStages}; }
};

}  // namespace megakernel::dev
