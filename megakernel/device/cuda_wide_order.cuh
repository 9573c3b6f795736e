// The packed input of a wide product, its slices and the order of their stages. Part of cuda_wide.cuh.
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

  // Of columns 2 i and 2 i + 1; beside it is that of the row 8 below. See PackedInput.
  MK_DEVICE uint32_t* pair(uint32_t row, uint32_t column) const {
    const uint32_t unit = column / (kChunks * 32), chunk = column / 32 - unit * kChunks;
    const uint32_t share = ((chunk + 1) * kConsumers - 1) / kChunks, first = share * kChunks / kConsumers;
    const uint32_t count = (share + 1) * kChunks / kConsumers - first;
    uint8_t* operand = base + uint64_t(first * units + unit * count + chunk - first) * (padded * 64) + row / 16 * 1024;
    operand += column % 8 / 4 * 512 + (row % 8 * 4 + column % 32 / 8) * 16 + column % 4 / 2 * 8;
    return reinterpret_cast<uint32_t*>(operand) + row / 8 % 2;
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
  MK_DEVICE uint32_t row_bytes() const { return shape.row_bytes; }
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

// The same of a product that is dealt: of as many (share, tile) of the whole product, in this order, as the record's tiles
// have. A group is of one share, which has chunks; of more than kWideTiles tiles the others have a stage of their own.
struct DealtSlices {
  uint32_t chunks, units, tiles, padded, place, end, most;
  uint32_t tile, group, each, share, unit, now, first, count;

  MK_DEVICE DealtSlices(const abi::Record& record, const MatrixFields& f, uint32_t rows)
      : chunks(f.k_unit / 32), units(f.units), tiles((f.n + 7) / 8), padded(rows), place(record.tile_begin * kConsumers),
        end(place + record.tile_count * kConsumers), most(rows > kTileRows ? 2 * kWideTiles : kWideTiles) {
    begin_group();
  }
  MK_DEVICE uint32_t row_bytes() const { return padded * 64; }
  MK_DEVICE bool done() const { return place >= end; }
  MK_DEVICE uint32_t chunk() const { return first * units + unit * count; }

  // Tiles with weights in the slice's first stage of them, and in its second, behind the input's.
  MK_DEVICE uint32_t first_tiles() const { return tasks::least(group, kWideTiles); }
  MK_DEVICE uint32_t more_tiles() const { return group - first_tiles(); }
  MK_DEVICE uint32_t stages() const { return more_tiles() > 0 ? 3 : 2; }

  // The next slice of the group, if there is one; the next group.
  MK_DEVICE bool next_unit() {
    unit += now;
    now = tasks::least(each, units - unit);
    return now > 0;
  }
  MK_DEVICE void next_group() {
    place += group;
    begin_group();
  }
  MK_DEVICE void next() {
    if (!next_unit()) next_group();
  }

 private:
  MK_DEVICE void begin_group() {
    if (done()) return;
    share = place / tiles;
    tile = place - share * tiles;
    group = tasks::least(most, tasks::least(end - place, tiles - tile));
    first = share * chunks / kConsumers;
    count = (share + 1) * chunks / kConsumers - first;
    each = tasks::least(units, kStageBytes / (tasks::most(row_bytes(), first_tiles() * 512) * count));
    unit = 0;
    now = each;
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

// Of a dealt product: the first weights, the input, the other weights where there are any.
struct DealtOrder {
  RingPlace at;

  MK_DEVICE DealtOrder(const RingPlace& first) : at(first) {}
  MK_DEVICE RingPlace stage(uint32_t i) const {
    const uint32_t slot = at.slot + i;
    return slot < kStages ? RingPlace{slot, at.parity} : RingPlace{slot - kStages, at.parity ^ 1};
  }
  MK_DEVICE void next(uint32_t stages) { at = stage(stages); }
  MK_DEVICE Ring end() const { return {at, kStages}; }
};

}  // namespace megakernel::dev
