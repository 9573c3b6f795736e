// Rows of packed weights times activations, on the matrix cores (see tasks/matmul.py for the formula).
//
// A unit of the packed weights is 8 rows x k_unit columns in fragment order and fills a stage. The 8 consumers share the
// columns of every unit: warp w takes the w-th eighth of its 32-column chunks. Tiles go in blocks of 4, units of a block
// k-major, so a fragment of the input serves 4 tiles. An output is the sum over warps, in order, of two chains that run
// over the warp's chunks in order: whatever the rows of the step, the tiles of the record or the number of workers.
//
// Each consumer fetches its own columns of the input from other workers itself, after its first weights have arrived.
#pragma once

namespace megakernel::dev {

constexpr uint32_t kBlockTiles = 4;
constexpr uint32_t kMaxChunks = 4;  // 32-column chunks of a unit in one warp

// Memory for partial sums: of each warp and row the kBlockTiles * 8 outputs, and of each warp and row the sum of squares.
// `rows` is that of the step, for every task of the step, so that no two of its uses overlap.
struct Sums {
  static constexpr uint32_t kOutputs = kBlockTiles * 8;

  MK_DEVICE static uint32_t bytes(uint32_t rows) { return (kConsumers * rows * kOutputs + kConsumers * rows) * 4; }
  MK_DEVICE static uint32_t slots(uint32_t rows) { return 2 * bytes(rows) <= kScratchBytes ? 2 : 1; }
  MK_DEVICE static float* at(uint32_t rows, uint32_t slot) {
    return reinterpret_cast<float*>(block().scratch + kScratchBytes - (slot + 1) * bytes(rows));
  }
  // Scratch below is free for inputs and merges.
  MK_DEVICE static uint32_t below(uint32_t rows) { return kScratchBytes - slots(rows) * bytes(rows); }
};
static_assert(Sums::kOutputs == 32, "one output a lane");

using MatrixFields = abi::MatmulFields;

MK_DEVICE const MatrixFields& matrix_fields(const Worker& w) {
  return *reinterpret_cast<const MatrixFields*>(w.record->payload);
}
MK_DEVICE uint32_t matrix_rows(const Worker& w, bool sampled) { return sampled ? w.header->sampled : w.header->rows; }
MK_DEVICE const float* input_row(const Worker& w, const MatrixFields& f, bool sampled, uint32_t r) {
  const uint32_t row = sampled ? w.header->sample_row[r] : r;
  return tasks::workspace<const float>(w, f.input) + uint64_t(row) * f.k;
}

// ------------------------------------------------------------------------------------------------ producer
__device__ __noinline__ Producer produce_rows(Producer p) {
  const abi::Record& record = *p.w.record;
  const MatrixFields& f = matrix_fields(p.w);
  const uint32_t bytes = f.k_unit * 16, units = f.units, count = record.tile_count;
  const uint64_t tile_bytes = uint64_t(bytes) * units;
  const char* from = tasks::weights<char>(p.w, f.weight) + record.tile_begin * tile_bytes;
  for (uint32_t first = 0; first < count; first += kBlockTiles, from += kBlockTiles * tile_bytes) {
    const uint32_t tiles = tasks::least(kBlockTiles, count - first);
    for (uint32_t unit = 0; unit < units; ++unit) {
      for (uint32_t t = 0; t < tiles; ++t) p.put(from + t * tile_bytes + uint64_t(unit) * bytes, bytes);
    }
  }
  return p;
}

// ------------------------------------------------------------------------------------------------ input
// The chunks of a warp in every unit.
struct Share {
  uint32_t first, count;
  MK_DEVICE Share(uint32_t warp, uint32_t k_unit) {
    const uint32_t chunks = k_unit / 32;
    first = warp * chunks / kConsumers;
    count = (warp + 1) * chunks / kConsumers - first;
  }
};

// The A operand of a warp's chunks of a unit: rows 0 to 7, and 8 to 15.
struct Fragments {
  Quad low[kMaxChunks], high[kMaxChunks];
};

// Eight consecutive columns of a row.
struct Octet {
  Quad v[2];

  MK_DEVICE bool missing() const { return invalid(v[0]) || invalid(v[1]); }
  MK_DEVICE void zero() { v[0] = v[1] = Quad{0, 0, 0, 0}; }
  MK_DEVICE void fetch(const float* p) {
    v[0] = load_quad(p);
    v[1] = load_quad(p + 4);
  }
  MK_DEVICE void fetch_fixed(const float* p) {
    v[0] = load_constant_quad(p);
    v[1] = load_constant_quad(p + 4);
  }
  MK_DEVICE void values(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * i] = as_float(v[i].x), x[4 * i + 1] = as_float(v[i].y);
      x[4 * i + 2] = as_float(v[i].z), x[4 * i + 3] = as_float(v[i].w);
    }
  }
};

// Rows whose length is no multiple of 8: an octet may be part padding, and need not be aligned.
__device__ __noinline__ Octet fetch_odd(const float* x, uint32_t column, uint32_t k) {
  uint32_t v[8];
#pragma unroll
  for (uint32_t j = 0; j < 8; ++j) v[j] = column + j < k ? load_word(x + column + j) : 0;
  return {{{v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]}}};
}

MK_DEVICE float sum_of_squares(const float (&x)[8]) {
  float s = x[0] * x[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) s = fmaf(x[i], x[i], s);
  return s;
}

// In the type of the weights, times gamma; the factor of the norm comes in the epilogue.
template <bool kHalf, bool kNorm>
MK_DEVICE Quad packed(float (&x)[8], const Octet& gamma) {
  if constexpr (kNorm) {
    float g[8];
    gamma.values(g);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= g[i];
  }
  return {pack<kHalf>(x[0], x[1]), pack<kHalf>(x[2], x[3]), pack<kHalf>(x[4], x[5]), pack<kHalf>(x[6], x[7])};
}

// One row: the warp's columns of the whole input are fetched in one go and kept in shared memory.
template <bool kHalf, bool kNorm>
struct OneRow {
  static constexpr uint32_t kOctets = kNorm ? 2 : 4;  // of a lane, on their way together
  uint8_t* stash;
  float squares = 0.0f;

  MK_DEVICE static uint32_t stash_bytes(const Worker& w) { return Sums::below(w.header->rows) / kConsumers / 64 * 64; }

  MK_DEVICE OneRow(const Worker& w, uint32_t, bool) : stash(block().scratch + w.warp() * stash_bytes(w)) {}
  MK_DEVICE void restart() {}

  MK_DEVICE void begin(Worker& w, const MatrixFields& f, const Share& share, bool sampled) {
    const float* x = input_row(w, f, sampled, 0);
    const uint32_t total = f.units * share.count * 4;  // octets
#pragma unroll 1
    for (uint32_t base = 0; base < total; base += 32 * kOctets) fetch(w, f, share, x, base, total);
    __syncwarp();
  }

  MK_DEVICE void fetch(Worker& w, const MatrixFields& f, const Share& share, const float* x, uint32_t base, uint32_t total) {
    Octet octet[kOctets], gamma[kOctets];
    uint32_t column[kOctets];
#pragma unroll
    for (uint32_t i = 0; i < kOctets; ++i) {
      const uint32_t o = base + i * 32 + w.warp_lane(), q = o / 4;
      const uint32_t unit = share.count == kMaxChunks ? q / kMaxChunks : q / share.count, chunk = q - unit * share.count;
      column[i] = o < total ? unit * f.k_unit + (share.first + chunk) * 32 + o % 4 * 8 : f.k;
      octet[i].zero(), gamma[i].zero();
      if (column[i] < f.k) {
        octet[i].fetch(x + column[i]);
        if constexpr (kNorm) gamma[i].fetch_fixed(tasks::weights<float>(w, f.gamma) + column[i]);
      }
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kOctets; ++i) missing |= octet[i].missing();
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kOctets; ++i) {
        if (octet[i].missing()) octet[i].fetch(x + column[i]);
      }
      return false;
    }, abi::FaultKind::kValueBudget, base);
#pragma unroll
    for (uint32_t i = 0; i < kOctets; ++i) {
      const uint32_t o = base + i * 32 + w.warp_lane();
      float v[8];
      octet[i].values(v);
      if constexpr (kNorm) add_squares(w, sum_of_squares(v), int32_t(total - (base + i * 32)));
      const Quad out = packed<kHalf, kNorm>(v, gamma[i]);
      if (o < total) *reinterpret_cast<Quad*>(stash + o * 16) = out;
    }
  }

  // In the order of the chunks, as `ManyRows` adds them; lane % 4 is the octet of a chunk.
  MK_DEVICE void add_squares(const Worker& w, float own, int32_t left) {
#pragma unroll
    for (int32_t chunk = 0; chunk < 8; ++chunk) {
      const float s = __shfl_sync(0xffffffffu, own, chunk * 4 + w.warp_lane() % 4);
      if (chunk * 4 < left) squares += s;
    }
  }

  MK_DEVICE void fragments(Worker& w, const MatrixFields&, const Share& share, bool, uint32_t unit, Fragments& a) {
    const uint8_t* at = stash + unit * share.count * 64 + w.warp_lane() % 4 * 16;
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      a.high[i] = Quad{0, 0, 0, 0};
      if (i < share.count) a.low[i] = *reinterpret_cast<const Quad*>(at + i * 64);
    }
  }

  MK_DEVICE void put_squares(const Worker& w, float* out, uint32_t) const {
    float s = squares + __shfl_xor_sync(0xffffffffu, squares, 1);
    s += __shfl_xor_sync(0xffffffffu, s, 2);
    if (w.warp_lane() == 0) out[0] = s;
  }
};

// Any number of rows: lane / 4 is the row, and each lane fetches its fragments itself, for every block again.
template <bool kHalf, bool kNorm>
struct ManyRows {
  uint32_t rows;
  float squares[2] = {0.0f, 0.0f};

  MK_DEVICE ManyRows(const Worker&, uint32_t n, bool) : rows(n) {}
  MK_DEVICE void begin(Worker&, const MatrixFields&, const Share&, bool) {}
  MK_DEVICE void restart() { squares[0] = squares[1] = 0.0f; }

  MK_DEVICE void fragments(Worker& w, const MatrixFields& f, const Share& share, bool sampled, uint32_t unit, Fragments& a) {
    half(w, f, share, sampled, unit, w.warp_lane() / 4, a.low, squares[0]);
    if (rows > 8) {
      half(w, f, share, sampled, unit, w.warp_lane() / 4 + 8, a.high, squares[1]);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) a.high[i] = Quad{0, 0, 0, 0};
    }
  }

  MK_DEVICE static void fetch(Octet& octet, const float* x, uint32_t column, uint32_t k) {
    if (k % 8 != 0) {
      octet = fetch_odd(x, column, k);
    } else if (column < k) {
      octet.fetch(x + column);
    }
  }

  MK_DEVICE void half(Worker& w, const MatrixFields& f, const Share& share, bool sampled, uint32_t unit, uint32_t row,
                      Quad (&out)[kMaxChunks], float& square) {
    const float* x = row < rows ? input_row(w, f, sampled, row) : nullptr;
    const uint32_t column = unit * f.k_unit + share.first * 32 + w.warp_lane() % 4 * 8;
    Octet octet[kMaxChunks];
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      octet[i].zero();
      if (i < share.count && x) fetch(octet[i], x, column + i * 32, f.k);
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) missing |= octet[i].missing();
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) {
        if (octet[i].missing()) fetch(octet[i], x, column + i * 32, f.k);
      }
      return false;
    }, abi::FaultKind::kValueBudget, row);
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      float v[8];
      Octet gamma;
      octet[i].values(v);
      gamma.zero();
      if constexpr (kNorm) {
        if (i < share.count) {
          square += sum_of_squares(v);
          const float* g = tasks::weights<float>(w, f.gamma);
          fetch(gamma, g, column + i * 32, f.k);
        }
      }
      out[i] = packed<kHalf, kNorm>(v, gamma);
    }
  }

  MK_DEVICE void put_squares(const Worker& w, float* out, uint32_t n) const {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      float s = squares[i] + __shfl_xor_sync(0xffffffffu, squares[i], 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      const uint32_t row = w.warp_lane() / 4 + i * 8;
      if (w.warp_lane() % 4 == 0 && row < n) out[row] = s;
    }
  }
};

// ------------------------------------------------------------------------------------------------ consumer
using Product = float[2][4];  // of one tile: two chains

MK_DEVICE void load_weights(Quad (&b)[kMaxChunks], const uint8_t* stage, const Worker& w, const Share& share) {
  const uint8_t* at = stage + share.first * 512 + w.warp_lane() * 16;
#pragma unroll
  for (uint32_t i = 0; i < kMaxChunks; ++i) {
    if (i < share.count) b[i] = *reinterpret_cast<const Quad*>(at + i * 512);
  }
}

template <bool kHalf>
MK_DEVICE void multiply_chunk(Product& d, const Fragments& a, uint32_t i, const Quad& b) {
  multiply<kHalf>(d[0], a.low[i].x, a.high[i].x, a.low[i].y, a.high[i].y, b.x, b.y);
  multiply<kHalf>(d[1], a.low[i].z, a.high[i].z, a.low[i].w, a.high[i].w, b.z, b.w);
}

// Partial sums of a block to the storer.
template <bool kNorm, class Input>
MK_DEVICE void hand_over(Consumer& c, const Input& input, const Product (&d)[kBlockTiles], uint32_t tiles, uint32_t rows) {
  Worker& w = c.w;
  const uint32_t room = w.header->rows, slot = c.sums_slot % Sums::slots(room);
  const uint32_t group = w.warp_lane() / 4, pair = w.warp_lane() % 4 * 2;
  w.wait_barrier(&block().sums_empty[slot], (c.sums_parity >> slot & 1) ^ 1);
  float* sums = Sums::at(room, slot);
  float* out = sums + w.warp() * rows * Sums::kOutputs + pair;
#pragma unroll
  for (uint32_t t = 0; t < kBlockTiles; ++t) {
    if (t >= tiles) break;
    auto* low = reinterpret_cast<float2*>(out + group * Sums::kOutputs + t * 8);
    auto* high = reinterpret_cast<float2*>(out + (group + 8) * Sums::kOutputs + t * 8);
    if (group < rows) *low = make_float2(d[t][0][0] + d[t][1][0], d[t][0][1] + d[t][1][1]);
    if (group + 8 < rows) *high = make_float2(d[t][0][2] + d[t][1][2], d[t][0][3] + d[t][1][3]);
  }
  if constexpr (kNorm) input.put_squares(w, sums + (kConsumers * Sums::kOutputs + w.warp()) * rows, rows);
  __syncwarp();
  if (w.warp_lane() == 0) barrier_arrive(&block().sums_full[slot]);
  c.sums_parity ^= 1u << slot;
  ++c.sums_slot;
}

template <bool kHalf, bool kNorm, template <bool, bool> class Input>
__device__ __noinline__ Consumer consume_rows(Consumer c, bool sampled) {
  Worker& w = c.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const uint32_t rows = matrix_rows(w, sampled), units = f.units, count = record.tile_count;
  const Share share(w.warp(), f.k_unit);
  Input<kHalf, kNorm> input(w, rows, sampled);
  bool begun = false;
#pragma unroll 1
  for (uint32_t first = 0; first < count; first += kBlockTiles) {
    const uint32_t tiles = tasks::least(kBlockTiles, count - first);
    Product d[kBlockTiles] = {};
    input.restart();
#pragma unroll 1
    for (uint32_t unit = 0; unit < units; ++unit) {
      Fragments a;
#pragma unroll
      for (uint32_t pair = 0; pair < kBlockTiles; pair += 2) {
        if (pair >= tiles) break;
        const bool two = pair + 1 < tiles;
        Quad b[2][kMaxChunks];
        load_weights(b[0], c.take(), w, share);
        c.give_back();
        if (two) {
          load_weights(b[1], c.take(), w, share);
          c.give_back();
        }
        if (pair == 0) {
          if (!begun) {
            wait_counters(w, record);
            input.begin(w, f, share, sampled);
            begun = true;
          }
          input.fragments(w, f, share, sampled, unit, a);
        }
#pragma unroll
        for (uint32_t i = 0; i < kMaxChunks; ++i) {
          if (i >= share.count) break;
          multiply_chunk<kHalf>(d[pair], a, i, b[0][i]);
          if (two) multiply_chunk<kHalf>(d[pair + 1], a, i, b[1][i]);
        }
      }
    }
    hand_over<kNorm>(c, input, d, tiles, rows);
  }
  return c;
}

// ------------------------------------------------------------------------------------------------ storer and core
template <tasks::MatmulConfig kConfig>
struct Core<tasks::Matmul<kConfig>> {
  static_assert(kConfig.dtype != DType::kF32, "matrix cores take 16-bit weights");
  static_assert(kConfig.tile_n == 8, "a tile is 8 rows of the weights");
  static constexpr bool kHalf = kConfig.dtype == DType::kF16;
  static constexpr bool kGlu = kConfig.epilogue == tasks::Epilogue::kGlu;
  static constexpr bool kResidual = kConfig.epilogue == tasks::Epilogue::kResidual;
  static constexpr uint32_t kTileColumns = kGlu ? 4 : 8;
  static constexpr bool kProduces = true, kStores = true, kNeedsHeader = kConfig.sampled;

  MK_DEVICE static Producer produce(Producer p) {
    return kConfig.sampled && p.w.header->sampled == 0 ? p : produce_rows(p);
  }

  MK_DEVICE static Consumer consume(Consumer c) {
    const MatrixFields& f = matrix_fields(c.w);
    const uint32_t rows = matrix_rows(c.w, kConfig.sampled);
    if (rows == 0) return c;
    const bool fits = f.units * kMaxChunks * 64 <= OneRow<kHalf, kConfig.norm>::stash_bytes(c.w);
    if (rows == 1 && fits && f.k % 8 == 0) return consume_rows<kHalf, kConfig.norm, OneRow>(c, kConfig.sampled);
    return consume_rows<kHalf, kConfig.norm, ManyRows>(c, kConfig.sampled);
  }

  static __device__ __noinline__ Storer store(Storer s) {
    Worker& w = s.w;
    const abi::Record& record = *w.record;
    const uint32_t rows = matrix_rows(w, kConfig.sampled);
#pragma unroll 1
    for (uint32_t first = 0; first < record.tile_count && rows > 0; first += kBlockTiles) {
      const uint32_t tiles = tasks::least(kBlockTiles, record.tile_count - first);
      store_block(s, matrix_fields(w), record.tile_begin + first, tiles, rows);
    }
    __syncwarp();
    if (w.warp_lane() == 0) signal_counter(w, record);
    return s;
  }

  // Lane = output of the block: tile lane / 8, row lane % 8 of its weights.
  MK_DEVICE static void store_block(Storer& s, const MatrixFields& f, uint32_t tile, uint32_t tiles, uint32_t rows) {
    Worker& w = s.w;
    const uint32_t lane = w.warp_lane(), mine = tile + lane / 8, within = lane % 8;
    const uint32_t column = mine * kTileColumns + within;
    const bool active = lane / 8 < tiles && within < kTileColumns && column < f.n;
    const float* old = tasks::workspace<const float>(w, f.residual) + column;
    float bias = 0.0f, residual = 0.0f;
    if constexpr (kConfig.bias) {
      if (lane / 8 < tiles) bias = load_constant(tasks::weights<float>(w, f.bias) + mine * 8 + within);
    }
    if (kResidual && active) residual = await(w, old);
    const uint32_t room = w.header->rows, slot = s.sums_slot % Sums::slots(room);
    w.wait_barrier(&block().sums_full[slot], s.sums_parity >> slot & 1);
    const float* sums = Sums::at(room, slot);
#pragma unroll 1
    for (uint32_t r = 0; r < rows; ++r) {
      float v = total(sums, f, rows, r, lane);
      v = (v + bias) * f.scale;
      if constexpr (kGlu) {
        const float up = __shfl_down_sync(0xffffffffu, v, 4);
        v = tasks::activate<kConfig.activation>(v) * up;
      }
      if constexpr (kConfig.softcap) v = f.softcap * tanhf(v / f.softcap);
      if constexpr (kResidual) {
        if (r > 0 && active) residual = await(w, old + uint64_t(r) * f.n);
        v += residual;
      }
      if (active) put_out(out_at(w, f, r, column), v);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&block().sums_empty[slot]);
    s.sums_parity ^= 1u << slot;
    ++s.sums_slot;
    if (kConfig.sampled || !active) return;
#pragma unroll 1
    for (uint32_t r = 0; r < w.last->rows; ++r) clear(before(w, out_at(w, f, r, column)));
  }

  // The warps' sums, in order, and the norm's factor.
  MK_DEVICE static float total(const float* sums, const MatrixFields& f, uint32_t rows, uint32_t r, uint32_t lane) {
    float v = 0.0f, squares = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kConsumers; ++i) {
      v += sums[(i * rows + r) * Sums::kOutputs + lane];
      if constexpr (kConfig.norm) squares += sums[(kConsumers * Sums::kOutputs + i) * rows + r];
    }
    return kConfig.norm ? v * rsqrtf(squares / float(f.k) + f.eps) : v;
  }

  MK_DEVICE static float* out_at(const Worker& w, const MatrixFields& f, uint32_t r, uint32_t column) {
    return tasks::workspace<float>(w, f.output) + uint64_t(r) * f.n + column;
  }

  MK_DEVICE static void put_out(float* p, float v) {
    if constexpr (kConfig.sampled) {
      *p = v;
    } else {
      publish(p, v);
    }
  }
};

}  // namespace megakernel::dev
