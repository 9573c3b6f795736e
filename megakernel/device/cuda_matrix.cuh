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
__device__ __noinline__ ProducerState produce_rows(ProducerState state) {
  Producer p;
  p.set(state);
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
  return p.state();
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

// The B operand of a warp's chunks of a unit: rows 0 to 7, and 8 to 15 where there may be so many.
template <bool kHigh>
struct Fragments {
  Quad low[kMaxChunks], high[kHigh ? kMaxChunks : 1];
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
  static constexpr bool kHigh = false;
  static constexpr uint32_t kOctets = kNorm ? 2 : 4;  // of a lane, on their way together
  uint8_t* stash;
  float squares = 0.0f;

  // Of a warp, in a step of so many rows.
  MK_DEVICE static uint32_t stash_bytes(uint32_t rows) { return Sums::below(rows) / kConsumers / 64 * 64; }

  MK_DEVICE OneRow(const Worker& w, uint32_t, bool)
      : stash(block().scratch + w.warp() * stash_bytes(w.header->rows)) {}
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

  MK_DEVICE void fragments(Worker& w, const MatrixFields&, const Share& share, bool, uint32_t unit, Fragments<false>& a) {
    const uint8_t* at = stash + unit * share.count * 64 + w.warp_lane() % 4 * 16;
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) a.low[i] = *reinterpret_cast<const Quad*>(at + i * 64);
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
  static constexpr bool kHigh = true;
  uint32_t rows;
  float squares[2] = {0.0f, 0.0f};

  MK_DEVICE ManyRows(const Worker&, uint32_t n, bool) : rows(n) {}
  MK_DEVICE void begin(Worker&, const MatrixFields&, const Share&, bool) {}
  MK_DEVICE void restart() { squares[0] = squares[1] = 0.0f; }

  MK_DEVICE void fragments(Worker& w, const MatrixFields& f, const Share& share, bool sampled, uint32_t unit, Fragments<true>& a) {
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
// Two tiles are the 16 rows of the A operand, rows of the input the 8 columns of the B operand. Chains 0 and 1 take turns
// over steps of 16 columns. What lies beyond a warp's share or a block's tiles is loaded all the same, and not used.
using Chains = float[2][4];

template <bool kHalf>
MK_DEVICE void multiply_pair(Chains& d, const Quad& a, const Quad& b, const Quad& x) {
  multiply<kHalf>(d[0], a.x, b.x, a.y, b.y, x.x, x.y);
  multiply<kHalf>(d[1], a.z, b.z, a.w, b.w, x.z, x.w);
}

// Waits for the block's next stages and takes this warp's weights out of them; the stages are free again at once.
MK_DEVICE void take_weights(Consumer& c, Quad (&out)[kBlockTiles][kMaxChunks], uint32_t tiles, uint32_t offset) {
  auto take = [&](Quad (&tile)[kMaxChunks]) {
    const uint8_t* at = c.take() + offset;
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) tile[i] = *reinterpret_cast<const Quad*>(at + i * 512);
    c.give_back();
  };
  if (tiles == kBlockTiles) {
#pragma unroll
    for (uint32_t t = 0; t < kBlockTiles; ++t) take(out[t]);
  } else {
#pragma unroll
    for (uint32_t t = 0; t < kBlockTiles; ++t) {
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) out[t][i] = Quad{0, 0, 0, 0};
      if (t < tiles) take(out[t]);
    }
  }
}

// Partial sums of a block to the storer. Lane 4 g + t has row g of the weights, rows 2 t and 2 t + 1 of the input.
template <bool kNorm, class Input, uint32_t kSets>
MK_DEVICE void hand_over(Consumer& c, const Input& input, const Chains (&d)[kSets][kBlockTiles / 2], uint32_t tiles,
                         uint32_t rows) {
  Worker& w = c.w;
  const uint32_t room = w.header->rows, slot = c.sums_slot % Sums::slots(room);
  const uint32_t group = w.warp_lane() / 4, pair = w.warp_lane() % 4 * 2;
  w.wait_barrier(&block().sums_empty[slot], (c.sums_parity >> slot & 1) ^ 1);
  float* sums = Sums::at(room, slot);
  float* out = sums + (w.warp() * rows + pair) * Sums::kOutputs + group;
#pragma unroll
  for (uint32_t set = 0; set < kSets; ++set) {
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      if (pair + e + set * 8 >= rows) continue;
      float* at = out + (set * 8 + e) * Sums::kOutputs;
#pragma unroll
      for (uint32_t t = 0; t < kBlockTiles; ++t) {
        const Chains& sum = d[set][t / 2];
        if (t < tiles) at[t * 8] = sum[0][t % 2 * 2 + e] + sum[1][t % 2 * 2 + e];
      }
    }
  }
  if constexpr (kNorm) input.put_squares(w, sums + (kConsumers * Sums::kOutputs + w.warp()) * rows, rows);
  __syncwarp();
  if (w.warp_lane() == 0) barrier_arrive(&block().sums_full[slot]);
  c.sums_parity ^= 1u << slot;
  ++c.sums_slot;
}

template <bool kHalf, bool kNorm, template <bool, bool> class Input>
__device__ __noinline__ ConsumerState consume_rows(ConsumerState state, bool sampled) {
  constexpr uint32_t kSets = Input<kHalf, kNorm>::kHigh ? 2 : 1;
  Consumer c;
  c.set(state);
  Worker& w = c.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const uint32_t rows = matrix_rows(w, sampled), units = f.units, count = record.tile_count;
  const Share share(w.warp(), f.k_unit);
  const uint32_t offset = share.first * 512 + w.warp_lane() * 16;
  Input<kHalf, kNorm> input(w, rows, sampled);
  bool begun = false;
#pragma unroll 1
  for (uint32_t first = 0; first < count; first += kBlockTiles) {
    const uint32_t tiles = tasks::least(kBlockTiles, count - first);
    Chains d[kSets][kBlockTiles / 2] = {};
    input.restart();
#pragma unroll 1
    for (uint32_t unit = 0; unit < units; ++unit) {
      Quad a[kBlockTiles][kMaxChunks];
      take_weights(c, a, tiles, offset);
      if (!begun) {
        if (w.warp() == 0) w.trace(1);
        wait_counters(w, record);
        input.begin(w, f, share, sampled);
        begun = true;
        if (w.warp() == 0) w.trace(2);
      }
      Fragments<Input<kHalf, kNorm>::kHigh> x;
      input.fragments(w, f, share, sampled, unit, x);
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) {
        if (i < share.count) {
          multiply_pair<kHalf>(d[0][0], a[0][i], a[1][i], x.low[i]);
          multiply_pair<kHalf>(d[0][1], a[2][i], a[3][i], x.low[i]);
          if constexpr (kSets == 2) {
            multiply_pair<kHalf>(d[1][0], a[0][i], a[1][i], x.high[i]);
            multiply_pair<kHalf>(d[1][1], a[2][i], a[3][i], x.high[i]);
          }
        }
      }
    }
    hand_over<kNorm>(c, input, d, tiles, rows);
  }
  return c.state();
}

// ------------------------------------------------------------------------------------------------ the largest logit
// Behind the logits, of each sampled row and worker: the largest of the worker's logits with its column as one number in
// that order, and how many tiles it saw. All ones are not valid yet.
struct Largest {
  static constexpr uint64_t kNotFinite = 0xfffffffe00000000u;  // more than any number

  MK_DEVICE static uint64_t key(float v, uint32_t column) {
    if (!(v - v == 0.0f)) return kNotFinite;
    return uint64_t(uint32_t(rank_of(v)) ^ 0x80000000u) << 32 | (0xffffffffu - column);
  }
  MK_DEVICE static uint32_t column(uint64_t key) { return 0xffffffffu - uint32_t(key); }
  MK_DEVICE static uint64_t of_warp(uint64_t key) {
    const uint32_t high = __reduce_max_sync(0xffffffffu, uint32_t(key >> 32));
    return uint64_t(high) << 32 | __reduce_max_sync(0xffffffffu, uint32_t(key >> 32) == high ? uint32_t(key) : 0);
  }
  MK_DEVICE static uint64_t* at(const Worker& w, uint32_t logits, uint32_t row, uint32_t worker) {
    uint64_t* base = tasks::workspace<uint64_t>(w, logits + w.args.max_rows * w.args.vocab * 4);
    return base + 2 * (row * w.args.workers + worker);
  }
};

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

  MK_DEVICE static ProducerState produce(ProducerState p) {
    return kConfig.sampled && block().header[p.w.step & 1].sampled == 0 ? p : produce_rows(p);
  }

  MK_DEVICE static ConsumerState consume(ConsumerState c) {
    const MatrixFields& f = *reinterpret_cast<const MatrixFields*>(c.w.record->payload);
    const abi::StepHeader& header = block().header[c.w.step & 1];
    const uint32_t rows = kConfig.sampled ? header.sampled : header.rows;
    if (rows == 0) return c;
    const bool fits = f.units * kMaxChunks * 64 <= OneRow<kHalf, kConfig.norm>::stash_bytes(header.rows);
    if (rows == 1 && fits && f.k % 8 == 0) return consume_rows<kHalf, kConfig.norm, OneRow>(c, kConfig.sampled);
    return consume_rows<kHalf, kConfig.norm, ManyRows>(c, kConfig.sampled);
  }

  static __device__ __noinline__ StorerState store(StorerState state) {
    Storer s;
    s.set(state);
    Worker& w = s.w;
    const abi::Record& record = *w.record;
    const uint32_t rows = matrix_rows(w, kConfig.sampled);
    uint64_t best = 0;  // of row `lane`
#pragma unroll 1
    for (uint32_t first = 0; first < record.tile_count && rows > 0; first += kBlockTiles) {
      const uint32_t tiles = tasks::least(kBlockTiles, record.tile_count - first);
      store_block(s, matrix_fields(w), record.tile_begin + first, tiles, rows, best);
    }
    if constexpr (kConfig.sampled) put_best(w, matrix_fields(w), rows, best, record.tile_count);
    __syncwarp();
    if (w.warp_lane() == 0) signal_counter(w, record);
    return s.state();
  }

  MK_DEVICE static void put_best(Worker& w, const MatrixFields& f, uint32_t rows, uint64_t best, uint32_t tiles) {
    const uint32_t lane = w.warp_lane();
    if (lane < rows) {
      uint64_t* out = Largest::at(w, f.output, lane, w.id);
      store_long(out, best);
      store_word(out + 1, tiles);
    }
    if (lane < w.last->sampled) {
      uint64_t* old = before(w, Largest::at(w, f.output, lane, w.id));
      store_long(old, ~uint64_t(0));
      store_word(old + 1, kInvalid);
    }
  }

  // Lane = output of the block: tile lane / 8, row lane % 8 of its weights.
  MK_DEVICE static void store_block(
      Storer& s, const MatrixFields& f, uint32_t tile, uint32_t tiles, uint32_t rows, uint64_t& best) {
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
      if constexpr (kConfig.epilogue == tasks::Epilogue::kActivate) v = tasks::activate<kConfig.activation>(v);
      if constexpr (kConfig.softcap) v = f.softcap * tanhf(v / f.softcap);
      if constexpr (kResidual) {
        if (r > 0 && active) residual = await(w, old + uint64_t(r) * f.n);
        v += residual;
      }
      if (active) put_out(out_at(w, f, r, column), v);
      if constexpr (kConfig.sampled) {
        const uint64_t largest = Largest::of_warp(active ? Largest::key(v, column) : 0);
        if (lane == r && largest > best) best = largest;
      }
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
