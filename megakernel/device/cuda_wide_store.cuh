// What consumers do with the sums of a wide product: the epilogue of cuda_store.cuh, by each warp for its own tiles.
// Part of cuda_wide.cuh.
#pragma once

namespace megakernel::dev {

// Of a dealt product what the chains of each (tile, share, tile of rows) come to, as lanes have it. Behind the packed input,
// so each step has its own copy, and nothing has to be cleared.
struct PartSums {
  uint8_t* base;
  uint32_t row_tiles;

  MK_DEVICE PartSums(const PackedInput& packed, const MatrixFields& f)
      : base(packed.chunk(f.k_unit / 32 * f.units) + lane_of_warp() * 16), row_tiles(packed.padded / 16) {}
  MK_DEVICE uint8_t* at(uint32_t tile, uint32_t share, uint32_t row_tile) const {
    return base + uint64_t((tile * kConsumers + share) * row_tiles + row_tile) * 512;
  }

  template <class Sums>
  MK_DEVICE void put(uint32_t row_tile, uint32_t first_tile, uint32_t tiles, uint32_t share, const Sums& sums) const {
#pragma unroll
    for (uint32_t j = 0; j < kGroupTiles; ++j) {
      if (j >= tiles) break;
      float v[4];
      sums.load(j, v);
      auto* to = reinterpret_cast<Quad*>(at(first_tile + j, share, row_tile));
      *to = {as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])};
    }
  }

  // Added in the order of the shares.
  MK_DEVICE void add(uint32_t tile, uint32_t row_tile, float (&out)[4]) const {
    Quad v[kConsumers];
#pragma unroll
    for (uint32_t s = 0; s < kConsumers; ++s) v[s] = load_quad(at(tile, s, row_tile));
    out[0] = out[1] = out[2] = out[3] = 0.0f;
#pragma unroll
    for (uint32_t s = 0; s < kConsumers; ++s) {
      out[0] += as_float(v[s].x), out[1] += as_float(v[s].y), out[2] += as_float(v[s].z), out[3] += as_float(v[s].w);
    }
  }
};

// Of one tile.
struct AddedSums {
  static constexpr bool kFar = true;  // not in shared memory
  const PartSums& parts;
  uint32_t tile, row_tile;
  MK_DEVICE void load(uint32_t, float (&out)[4]) const { parts.add(tile, row_tile, out); }
};

// By the group of consumers: until all workers of the product have put theirs. One warp looks, more would be in the way of
// those who count.
MK_DEVICE void await_sums(Worker& w, uint32_t tiles) {
  if (w.warp() == 0) {
    const uint32_t counter = sums_counter(w);
    w.wait(counter_of(w, counter), kConsumers * tiles * w.header->wide_rows, abi::FaultKind::kWaitBudget, counter);
  }
  w.sync();
}

// The largest of each sampled row, see Largest; where sums of narrow products would be.
MK_DEVICE unsigned long long* largest_of_rows() {
  static_assert(Sums::bytes(1) >= abi::kMaxRows * 8);
  return reinterpret_cast<unsigned long long*>(block().scratch + kScratchBytes) - abi::kMaxRows;
}
// The group meets behind the first tiles, before any is larger.
MK_DEVICE void begin_largest(const Worker& w) {
  if (w.lane() < w.header->sampled) largest_of_rows()[w.lane()] = 0;
}

// Lane 4 g + t has rows g and g + 8 of a tile of rows, rows 2 t and 2 t + 1 of a tile's weights.
template <uint32_t kFlags>
struct WideStorer {
  static constexpr MatrixFlags flags{kFlags};
  static constexpr uint32_t kWidth = flags.epilogue() == tasks::Epilogue::kGlu ? 4 : 8;
  static constexpr bool kResidual = flags.epilogue() == tasks::Epilogue::kResidual;
  static constexpr bool kGives = flags.wide_chunks() > 0;
  using Given = GivenInput<flags.wide_chunks()>;
  Worker& w;
  const MatrixFields& f;
  const uint32_t rows;

  MK_DEVICE WideStorer(Worker& worker, const MatrixFields& fields)
      : w(worker), f(fields), rows(matrix_rows(worker, flags.sampled())) {}

  // A warp's tile of rows and some tiles of weights, one after the other: what is executed once a product takes as long to
  // fetch. What some are added to is asked for at once.
  template <class Sums>
  MK_DEVICE void put(uint32_t row_tile, uint32_t first_tile, uint32_t tiles, const Sums& sums) {
    const uint32_t row = row_tile * 16 + w.warp_lane() / 4;
    const Given to(w, f.output, f.n);
    float factor[2] = {1.0f, 1.0f};
    if constexpr (flags.norm()) factor[0] = row_factors()[row], factor[1] = row_factors()[row + 8];
    [[maybe_unused]] unsigned long long largest[2] = {0, 0};
    constexpr uint32_t kAtOnce = kResidual && !Sums::kFar ? 2 : 1;
#pragma unroll 1
    for (uint32_t from = 0; from < tiles; from += kAtOnce) {
      float v[4];
      if constexpr (Sums::kFar) sums.load(from, v);  // asked for beside what it is added to
      [[maybe_unused]] float residual[kAtOnce][4];
      if constexpr (kResidual) {
        fetch_residual(row, (first_tile + from) * kWidth + w.warp_lane() % 4 * 2, tiles - from, residual);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (from + i >= tiles) break;
        if constexpr (!Sums::kFar) sums.load(from + i, v);
        put_tile(to, row, first_tile + from + i, v, factor, residual[i], largest);
      }
    }
    if constexpr (flags.sampled()) keep_largest(row, largest[0]), keep_largest(row + 8, largest[1]);
  }

  MK_DEVICE void end(const abi::Record& record) {
    if constexpr (flags.sampled()) {
      w.sync();
      const uint32_t row = w.lane();
      if (row < rows) {
        uint64_t* out = Largest::at(w, f.output, row, w.id);
        store_long(out, largest_of_rows()[row]);
        store_long(out + 1, record.tile_count);
        if constexpr (abi::kRanks > 1) send_largest(w, row, largest_of_rows()[row], record.tile_count);
      }
    }
    if (!kGives && record.signal == abi::kNone) return;
    w.sync();
    if (w.lane() != 0) return;
    if constexpr (kGives) Given::count(w, uint64_t(record.tile_count * kWidth) * rows);
    signal_counter(w, record);
  }

 private:
  // Rows `row` and `row` + 8, two columns each.
  MK_DEVICE void put_tile(const Given& to, uint32_t row, uint32_t tile, const float (&sum)[4], const float (&factor)[2],
                          const float (&residual)[4], unsigned long long (&largest)[2]) {
    const uint32_t pair = w.warp_lane() % 4 * 2;
    float v[4], bias[2] = {0.0f, 0.0f};
    if constexpr (flags.bias()) {
      const float* p = tasks::weights<float>(w, f.bias) + tile * 8 + pair;
      bias[0] = load_constant(p), bias[1] = load_constant(p + 1);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) v[i] = ((flags.norm() ? sum[i] * factor[i / 2] : sum[i]) + bias[i % 2]) * f.scale;
    if constexpr (flags.epilogue() == tasks::Epilogue::kGlu) {
      // Lanes t and t + 2 of four have gates and ups of both rows, and make the outputs of one each.
      const bool up = pair >= kWidth;
      float out[2];
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const float other = __shfl_xor_sync(0xffffffffu, up ? v[e] : v[2 + e], 2);
        out[e] = finish_output<kFlags>(f, up ? other : v[e], up ? v[2 + e] : other, 0.0f);
      }
      put_two(to, up ? row + 8 : row, tile * kWidth + pair % kWidth, out, largest[0]);
    } else {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        float out[2];
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          out[e] = finish_output<kFlags>(f, v[h * 2 + e], 1.0f, kResidual ? residual[h * 2 + e] : 0.0f);
        }
        put_two(to, row + h * 8, tile * kWidth + pair, out, largest[h]);
      }
    }
  }

  // Two columns of a row.
  MK_DEVICE void put_two(const Given& to, uint32_t row, uint32_t column, const float (&v)[2], unsigned long long& largest) {
    if constexpr (kGives) {  // rows that are none are read by nobody
      store_word(to.pair(row, column), pack<flags.half()>(v[0], v[1]));
      return;
    }
    if (row >= rows) return;
    float* out = tasks::workspace<float>(w, f.output) + uint64_t(row) * f.n + column;
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      if (column + e >= f.n) break;
      if constexpr (flags.sampled()) {
        out[e] = v[e];
        if (Largest::key(v[e], column + e) > largest) largest = Largest::key(v[e], column + e);
      } else {
        publish(out + e, v[e]);
      }
    }
  }

  // Of up to kMost tiles, two columns of rows `row` and `row` + 8 each.
  template <uint32_t kMost>
  MK_DEVICE void fetch_residual(uint32_t row, uint32_t column, uint32_t tiles, float (&out)[kMost][4]) {
    uint32_t v[kMost][4];
    const float* from = tasks::workspace<const float>(w, f.residual) + uint64_t(row) * f.n + column;
    const auto ask = [&](uint32_t i, uint32_t k) {
      const uint32_t at = i * kWidth + k % 2;
      const bool there = i < tiles && row + k / 2 * 8 < rows && column + at < f.n;
      return there ? load_word(from + uint64_t(k / 2 * 8) * f.n + at) : 0;
    };
#pragma unroll
    for (uint32_t i = 0; i < 4 * kMost; ++i) v[i / 4][i % 4] = ask(i / 4, i % 4);
    const auto missing = [&](uint32_t i) { return v[i / 4][i % 4] == kInvalid; };
    await_all<4 * kMost>(w, missing, [&](uint32_t i) { v[i / 4][i % 4] = ask(i / 4, i % 4); }, 0);
#pragma unroll
    for (uint32_t i = 0; i < 4 * kMost; ++i) out[i / 4][i % 4] = as_float(v[i / 4][i % 4]);
  }

  MK_DEVICE void keep_largest(uint32_t row, unsigned long long largest) const {
#pragma unroll
    for (uint32_t d = 1; d < 4; d *= 2) {
      const unsigned long long other = __shfl_xor_sync(0xffffffffu, largest, d);
      if (other > largest) largest = other;
    }
    if (w.warp_lane() % 4 == 0 && row < rows) atomicMax(largest_of_rows() + row, largest);
  }
};

// The storer of a wide product clears what the step before left.
template <uint32_t kFlags>
__device__ __noinline__ void clear_wide() {
  constexpr MatrixFlags flags{kFlags};
  Storer s;
  s.load();
  Worker& w = s.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  if constexpr (flags.sampled()) {
    RowStorer<kFlags>::clear_best(w, f);
  } else {
    constexpr uint32_t width = flags.epilogue() == tasks::Epilogue::kGlu ? 4 : 8;
    float* past = before(w, tasks::workspace<float>(w, f.output));
    const uint32_t first = record.tile_begin * width, end = tasks::least(f.n, first + record.tile_count * width);
    const uint32_t past_rows = GivenInput<flags.wide_chunks()>::rows(*w.last);
#pragma unroll 1
    for (uint32_t r = 0; r < past_rows; ++r) {
#pragma unroll 1
      for (uint32_t i = first + w.warp_lane(); i < end; i += 32) clear(past + uint64_t(r) * f.n + i);
    }
    if constexpr (flags.gives()) {
#pragma unroll 1
      for (uint32_t i = first + w.warp_lane(); i < end; i += 32) Giver<kFlags>(w, f, i, true).clear_last(w);
    }
  }
  clear_parts(w, f, flags);
  s.save();
}

}  // namespace megakernel::dev
