// Inputs of products, packed once for all workers and published by value: by whoever publishes the values (giving), or by
// the loaders of the workers of the product that reads them, a part each. Part of cuda_room.cuh.
#pragma once

namespace megakernel::dev {

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

// ------------------------------------------------------------------------------------------------ giving
// Of a pair of lanes one column each, by the first of them.
template <bool kHalf>
MK_DEVICE void give_pair(uint32_t* to, float x, bool first) {
  const float next = __shfl_down_sync(0xffffffffu, x, 1);
  if (first) store_word(to, pack<kHalf>(x, next));
}

// Of eight lanes the sum of squares, by the first of them.
MK_DEVICE void give_square(float* to, float v, bool first) {
  float all[8];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) all[i] = __shfl_sync(0xffffffffu, v, i, 8);
  if (first) publish(to, sum_of_squares(all));
}

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
    give_pair<flags.half()>(pair_of(row), v * gamma, first);
    if (!flags.norm() && normed) give_square(square + row * row_squares, v, third);
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
    const auto missing = [&](uint32_t i) { return octet[i].missing(); };
    await_all<kRounds>(w, missing, [&](uint32_t i) { fetch(octet[i], x, column[i]); }, row);
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

}  // namespace megakernel::dev
