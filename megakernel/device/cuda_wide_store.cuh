// What consumers do with the sums of a wide product: the epilogue of cuda_store.cuh, by each warp for its own tiles.
// Part of cuda_wide.cuh.
#pragma once

namespace megakernel::dev {

using WideSums = float[WidePart::kMost][WidePart::kMost][4];

// One share's chains, which begin anew.
MK_DEVICE void add_chains(WideSums& sums, const WideChains& d) {
#pragma unroll
  for (uint32_t i = 0; i < WidePart::kMost; ++i) {
#pragma unroll
    for (uint32_t j = 0; j < WidePart::kMost; ++j) {
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) sums[i][j][e] += d[i][j][0][e] + d[i][j][1][e];
    }
  }
}

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

  template <uint32_t kTiles>
  MK_DEVICE void put(
      const WidePart& part, uint32_t first_tile, uint32_t share, const Chains (&d)[WidePart::kMost][kTiles]) const {
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) {
      if (j >= part.tiles) break;
#pragma unroll
      for (uint32_t i = 0; i < WidePart::kMost; ++i) {
        if (i >= part.row_tiles) break;
        const auto sum = [&](uint32_t e) { return as_bits(d[i][j][0][e] + d[i][j][1][e]); };
        *reinterpret_cast<Quad*>(at(first_tile + part.tile(j), share, part.row_tile(i))) = {sum(0), sum(1), sum(2), sum(3)};
      }
    }
  }

  // Added in the order of the shares, as `add_chains` does.
  MK_DEVICE void add(const WidePart& part, uint32_t first_tile, WideSums& sums) const {
#pragma unroll
    for (uint32_t j = 0; j < WidePart::kMost; ++j) {
      if (j >= part.tiles) break;
#pragma unroll
      for (uint32_t i = 0; i < WidePart::kMost; ++i) {
        if (i >= part.row_tiles) break;
        Quad v[kConsumers];
#pragma unroll
        for (uint32_t s = 0; s < kConsumers; ++s) v[s] = load_quad(at(first_tile + part.tile(j), s, part.row_tile(i)));
        float(&out)[4] = sums[i][j];
        out[0] = out[1] = out[2] = out[3] = 0.0f;
#pragma unroll
        for (uint32_t s = 0; s < kConsumers; ++s) {
          out[0] += as_float(v[s].x), out[1] += as_float(v[s].y), out[2] += as_float(v[s].z), out[3] += as_float(v[s].w);
        }
      }
    }
  }
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

// Lane 4 g + t has rows g and g + 8 of a tile of rows, rows 2 t and 2 t + 1 of a tile's weights.
template <uint32_t kFlags>
struct WideStorer {
  static constexpr MatrixFlags flags{kFlags};
  static constexpr uint32_t kWidth = flags.epilogue() == tasks::Epilogue::kGlu ? 4 : 8;
  static constexpr bool kResidual = flags.epilogue() == tasks::Epilogue::kResidual;
  static constexpr bool kGives = flags.wide_chunks() > 0;
  Worker& w;
  const MatrixFields& f;
  const PackedInput& packed;
  const uint32_t rows;
  const float inverse_k, scale;

  MK_DEVICE WideStorer(Worker& worker, const MatrixFields& fields, const PackedInput& input)
      : w(worker), f(fields), packed(input), rows(matrix_rows(worker, flags.sampled())), inverse_k(1.0f / float(fields.k)),
        scale(fields.scale) {
    if constexpr (flags.sampled()) {
      if (w.lane() < rows) best()[w.lane()] = 0;
      w.sync();
    }
  }

  // The largest of each sampled row, see Largest; where sums of narrow products would be.
  MK_DEVICE static unsigned long long* best() {
    static_assert(Sums::bytes(1) >= abi::kMaxRows * 8);
    return reinterpret_cast<unsigned long long*>(block().scratch + kScratchBytes) - abi::kMaxRows;
  }

  MK_DEVICE void put(const WidePart& part, const WideSums& sums, uint32_t first_tile) {
    if (part.tiles == 0) return;
    const uint32_t g = w.warp_lane() / 4, pair = w.warp_lane() % 4 * 2;
    const float own = factor(part.row_tile(w.warp_lane() / 16) * 16 + w.warp_lane() % 16);
#pragma unroll
    for (uint32_t j = 0; j < WidePart::kMost; ++j) {
      if (j >= part.tiles) break;
      const uint32_t tile = first_tile + part.tile(j), column = tile * kWidth + pair;
      float bias[2] = {0.0f, 0.0f};
      if constexpr (flags.bias()) {
        const float* p = tasks::weights<float>(w, f.bias) + tile * 8 + pair;
        bias[0] = load_constant(p), bias[1] = load_constant(p + 1);
      }
      [[maybe_unused]] uint32_t *given, word[2];  // of rows g and g + 8
      if constexpr (kGives) given = GivenInput<flags.wide_chunks()>(w, f.output, f.n).pair(g, column);
      float residual[4][2];
      if constexpr (kResidual) fetch_residual(part, column, residual);
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        const uint32_t i = k / 2, h = k % 2;
        if (i >= part.row_tiles) break;
        const uint32_t row = part.row_tile(i) * 16 + h * 8 + g;
        const float scaled = flags.norm() ? __shfl_sync(0xffffffffu, own, i * 16 + h * 8 + g) : 1.0f;
        const auto value = [&](uint32_t e) {
          return finish((total(sums[i][j][h * 2 + e], scaled) + bias[e]) * scale, kResidual ? residual[k][e] : 0.0f);
        };
        if constexpr (kGives) {  // rows that are none are read by nobody
          word[h] = pack<flags.half()>(value(0), value(1));
          if (h == 1 && pair < kWidth) store_long(given + part.row_tile(i) * 256, uint64_t(word[1]) << 32 | word[0]);
          continue;
        }
        unsigned long long largest = 0;
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          const float v = value(e);
          const bool active = pair + e < kWidth && column + e < f.n && row < rows;
          float* out = tasks::workspace<float>(w, f.output) + uint64_t(row) * f.n + column + e;
          if (active && flags.sampled()) *out = v;
          if (active && !flags.sampled()) publish(out, v);
          if (active && flags.sampled() && Largest::key(v, column + e) > largest) largest = Largest::key(v, column + e);
        }
        if constexpr (flags.sampled()) keep_largest(row, largest);
      }
    }
  }

  MK_DEVICE void end(const abi::Record& record) {
    if constexpr (flags.sampled()) {
      w.sync();
      const uint32_t row = w.lane();
      if (row < rows) {
        uint64_t* out = Largest::at(w, f.output, row, w.id);
        store_long(out, best()[row]);
        store_long(out + 1, record.tile_count);
        if constexpr (abi::kRanks > 1) send_largest(w, row, best()[row], record.tile_count);
      }
    }
    if (!kGives && record.signal == abi::kNone) return;
    w.sync();
    if (w.lane() != 0) return;
    if constexpr (kGives) GivenInput<flags.wide_chunks()>::count(w, uint64_t(record.tile_count * kWidth) * rows);
    signal_counter(w, record);
  }

 private:
  // Of the norm of a row.
  MK_DEVICE float factor(uint32_t row) const {
    if constexpr (!flags.norm()) return 1.0f;
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (row < rows) {
      const Quad low = load_quad(packed.squares(row)), high = load_quad(packed.squares(row) + 4);
      a = make_float4(as_float(low.x), as_float(low.y), as_float(low.z), as_float(low.w));
      b = make_float4(as_float(high.x), as_float(high.y), as_float(high.z), as_float(high.w));
    }
    return rsqrtf((a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w) * inverse_k + f.eps);
  }
  MK_DEVICE static float total(float v, float factor) { return flags.norm() ? v * factor : v; }

  MK_DEVICE float finish(float v, float residual) const { return finish_output<kFlags, 2>(f, v, residual); }

  // Of the rows of a lane, two columns each.
  MK_DEVICE void fetch_residual(const WidePart& part, uint32_t column, float (&out)[4][2]) {
    uint32_t v[4][2];
    const float* from = tasks::workspace<const float>(w, f.residual) + column;
    auto ask = [&](uint32_t k, uint32_t e) {
      const uint32_t row = part.row_tile(k / 2) * 16 + k % 2 * 8 + w.warp_lane() / 4;
      return k / 2 < part.row_tiles && row < rows && column + e < f.n ? load_word(from + uint64_t(row) * f.n + e) : 0;
    };
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i / 2][i % 2] = ask(i / 2, i % 2);
    const auto missing = [&](uint32_t i) { return v[i / 2][i % 2] == kInvalid; };
    await_all<8>(w, missing, [&](uint32_t i) { v[i / 2][i % 2] = ask(i / 2, i % 2); }, 0);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) out[i / 2][i % 2] = as_float(v[i / 2][i % 2]);
  }

  MK_DEVICE void keep_largest(uint32_t row, unsigned long long largest) const {
#pragma unroll
    for (uint32_t d = 1; d < 4; d *= 2) {
      const unsigned long long other = __shfl_xor_sync(0xffffffffu, largest, d);
      if (other > largest) largest = other;
    }
    if (w.warp_lane() % 4 == 0 && row < rows) atomicMax(best() + row, largest);
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
