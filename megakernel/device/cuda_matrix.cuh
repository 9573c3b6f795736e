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
  MK_DEVICE static uint32_t slot(uint32_t turn, uint32_t rows) { return turn & (slots(rows) - 1); }
  MK_DEVICE static float* at(uint32_t rows, uint32_t slot) {
    return reinterpret_cast<float*>(block().scratch + kScratchBytes - (slot + 1) * bytes(rows));
  }
  // Scratch below is free for inputs and merges.
  MK_DEVICE static uint32_t below(uint32_t rows) { return kScratchBytes - slots(rows) * bytes(rows); }
};
static_assert(Sums::kOutputs == 32, "one output a lane");

using MatrixFields = abi::MatmulFields;

// Of the variants of the task, what its code asks at run time; one word.
struct MatrixFlags {
  uint32_t bits;

  static constexpr MatrixFlags of(bool norm, bool sampled, bool bias, bool softcap, tasks::Epilogue epilogue,
                                  tasks::Activation activation) {
    return {uint32_t(norm) | uint32_t(sampled) << 1 | uint32_t(bias) << 2 | uint32_t(softcap) << 3 |
            uint32_t(epilogue) << 8 | uint32_t(activation) << 16};
  }
  MK_DEVICE bool norm() const { return bits & 1; }
  MK_DEVICE bool sampled() const { return bits & 2; }
  MK_DEVICE bool bias() const { return bits & 4; }
  MK_DEVICE bool softcap() const { return bits & 8; }
  MK_DEVICE tasks::Epilogue epilogue() const { return tasks::Epilogue(bits >> 8 & 0xff); }
  MK_DEVICE tasks::Activation activation() const { return tasks::Activation(bits >> 16); }
};

MK_DEVICE const MatrixFields& matrix_fields(const Worker& w) {
  return *reinterpret_cast<const MatrixFields*>(w.record->payload);
}
MK_DEVICE uint32_t matrix_rows(const Worker& w, bool sampled) { return sampled ? w.header->sampled : w.header->rows; }
MK_DEVICE const float* input_row(const Worker& w, const MatrixFields& f, bool sampled, uint32_t r) {
  const uint32_t row = sampled ? w.header->sample_row[r] : r;
  return tasks::workspace<const float>(w, f.input) + uint64_t(row) * f.k;
}

// ------------------------------------------------------------------------------------------------ producer
__device__ __noinline__ void produce_rows() {
  Producer p;
  p.load();
  const abi::Record& record = *p.w.record;
  const MatrixFields& f = matrix_fields(p.w);
  const uint32_t bytes = f.k_unit * 16, units = f.units, count = record.tile_count;
  const uint64_t tile_bytes = uint64_t(bytes) * units;
  const char* from = tasks::weights<char>(p.w, f.weight) + record.tile_begin * tile_bytes;
  // In the order block, unit, tile.
  uint32_t first = 0, unit = 0, tile = 0, tiles = tasks::least(kBlockTiles, count);
#pragma unroll 1
  while (first < count) {
    p.put(from + (first + tile) * tile_bytes + uint64_t(unit) * bytes, bytes);
    if (++tile < tiles) continue;
    tile = 0;
    if (++unit < units) continue;
    unit = 0;
    first += kBlockTiles;
    tiles = tasks::least(kBlockTiles, count - first);
  }
  p.save();
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

// The A operand of a warp's chunks of a unit: rows 0 to 7, and 8 to 15 where there may be so many.
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

MK_DEVICE void multiply_gamma(float (&x)[8], const Octet& gamma) {
  float g[8];
  gamma.values(g);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= g[i];
}

// Pairs 0, 2, 1, 3: as `multiply_chunk` wants them.
template <bool kHalf>
MK_DEVICE Quad packed(const float (&x)[8]) {
  return {pack<kHalf>(x[0], x[1]), pack<kHalf>(x[4], x[5]), pack<kHalf>(x[2], x[3]), pack<kHalf>(x[6], x[7])};
}

// One row: the warp's columns of the whole input are fetched in one go and kept in shared memory, in the type of the
// weights, times gamma. The factor of the norm comes in the epilogue.
template <bool kHalf>
struct OneRow {
  static constexpr bool kHigh = false;
  uint8_t* stash;
  float squares = 0.0f;

  // Of a warp, in a step of so many rows.
  MK_DEVICE static uint32_t stash_bytes(uint32_t rows) { return Sums::below(rows) / kConsumers / 64 * 64; }

  MK_DEVICE OneRow(const Worker& w, uint32_t) : stash(block().scratch + w.warp() * stash_bytes(w.header->rows)) {}
  MK_DEVICE void restart() {}

  MK_DEVICE void begin(Worker& w, const MatrixFields& f, const Share& share, MatrixFlags flags) {
    const float* x = input_row(w, f, flags.sampled(), 0);
    const uint32_t total = f.units * share.count * 4;  // octets
    if (flags.norm()) {
      const float* gamma = tasks::weights<float>(w, f.gamma);
#pragma unroll 1
      for (uint32_t base = 0; base < total; base += 64) fetch<2, true>(w, f, share, x, gamma, base, total);
    } else {
#pragma unroll 1
      for (uint32_t base = 0; base < total; base += 128) fetch<4, false>(w, f, share, x, nullptr, base, total);
    }
    __syncwarp();
  }

  // kOctets of a lane, on their way together.
  template <uint32_t kOctets, bool kNorm>
  MK_DEVICE void fetch(Worker& w, const MatrixFields& f, const Share& share, const float* x, const float* gamma,
                       uint32_t base, uint32_t total) {
    Octet octet[kOctets], scale[kNorm ? kOctets : 1];
    const float* from[kOctets];
    const uint32_t k = f.k, k_unit = f.k_unit;
#pragma unroll
    for (uint32_t i = 0; i < kOctets; ++i) {
      const uint32_t o = base + i * 32 + w.warp_lane(), q = o / 4;
      const uint32_t unit = share.count == kMaxChunks ? q / kMaxChunks : q / share.count, chunk = q - unit * share.count;
      const uint32_t column = o < total ? unit * k_unit + (share.first + chunk) * 32 + o % 4 * 8 : k;
      from[i] = x + column;
      octet[i].zero();
      if (kNorm) scale[kNorm ? i : 0].zero();
      if (column < k) {
        octet[i].fetch(from[i]);
        if constexpr (kNorm) scale[i].fetch_fixed(gamma + column);
      }
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kOctets; ++i) {
        if (octet[i].missing()) {
          missing = true;
          octet[i].fetch(from[i]);
        }
      }
      return !__any_sync(0xffffffffu, missing);
    }, abi::FaultKind::kValueBudget, base);
#pragma unroll
    for (uint32_t i = 0; i < kOctets; ++i) {
      const uint32_t o = base + i * 32 + w.warp_lane();
      float v[8];
      octet[i].values(v);
      if constexpr (kNorm) {
        add_squares(w, sum_of_squares(v), int32_t(total - (base + i * 32)));
        multiply_gamma(v, scale[i]);
      }
      const Quad out = packed<kHalf>(v);
      if (o < total) *reinterpret_cast<Quad*>(stash + o * 16) = out;
    }
  }

  // In the order of the chunks, as `ManyRows` adds them; lane % 4 is the octet of a chunk.
  MK_DEVICE void add_squares(const Worker& w, float own, int32_t left) {
    if (left <= 0) return;
#pragma unroll
    for (int32_t chunk = 0; chunk < 8; ++chunk) {
      const float s = __shfl_sync(0xffffffffu, own, chunk * 4 + w.warp_lane() % 4);
      if (chunk * 4 < left) squares += s;
    }
  }

  MK_DEVICE void fragments(
      Worker& w, const MatrixFields&, const Share& share, MatrixFlags, uint32_t unit, Fragments<false>& a) {
    const uint8_t* at = stash + unit * share.count * 64 + w.warp_lane() % 4 * 16;
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      a.low[i] = Quad{0, 0, 0, 0};
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
template <bool kHalf>
struct ManyRows {
  static constexpr bool kHigh = true;
  uint32_t rows;
  float squares[2] = {0.0f, 0.0f};

  MK_DEVICE ManyRows(const Worker&, uint32_t n) : rows(n) {}
  MK_DEVICE void begin(Worker&, const MatrixFields&, const Share&, MatrixFlags) {}
  MK_DEVICE void restart() { squares[0] = squares[1] = 0.0f; }

  MK_DEVICE void fragments(
      Worker& w, const MatrixFields& f, const Share& share, MatrixFlags flags, uint32_t unit, Fragments<true>& a) {
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) a.high[i] = Quad{0, 0, 0, 0};
#pragma unroll 1
    for (uint32_t h = 0; h < (rows > 8 ? 2u : 1u); ++h) {
      Quad out[kMaxChunks];
      const float s = half(w, f, share, flags, unit, w.warp_lane() / 4 + h * 8, h ? squares[1] : squares[0], out);
      (h ? squares[1] : squares[0]) = s;
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) (h ? a.high[i] : a.low[i]) = out[i];
    }
  }

  MK_DEVICE static void fetch(Octet& octet, const float* x, uint32_t column, uint32_t k) {
    if (k % 8 != 0) {
      octet = fetch_odd(x, column, k);
    } else if (column < k) {
      octet.fetch(x + column);
    }
  }

  MK_DEVICE float half(Worker& w, const MatrixFields& f, const Share& share, MatrixFlags flags, uint32_t unit, uint32_t row,
                       float square, Quad (&out)[kMaxChunks]) {
    const float* x = row < rows ? input_row(w, f, flags.sampled(), row) : nullptr;
    const uint32_t column = unit * f.k_unit + share.first * 32 + w.warp_lane() % 4 * 8, k = f.k;
    Octet octet[kMaxChunks];
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      octet[i].zero();
      if (i < share.count && x) fetch(octet[i], x, column + i * 32, k);
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) missing |= octet[i].missing();
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) {
        if (octet[i].missing()) fetch(octet[i], x, column + i * 32, k);
      }
      return false;
    }, abi::FaultKind::kValueBudget, row);
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      float v[8];
      octet[i].values(v);
      if (flags.norm() && i < share.count) {
        Octet gamma;
        gamma.zero();
        fetch(gamma, tasks::weights<float>(w, f.gamma), column + i * 32, k);
        square += sum_of_squares(v);
        multiply_gamma(v, gamma);
      }
      out[i] = packed<kHalf>(v);
    }
    return square;
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
// Rows of the input are the 16 rows of the A operand, a tile the 8 columns of the B operand. Chains 0 and 1 take turns over
// steps of 16 columns. Beyond a warp's share stand zeros times weights of the share.
//
// With at most 8 rows the A operand is the eight columns of a row as they lie in registers: pairs 0 and 1 of the row in
// rows 0 to 7, pairs 2 and 3 in rows 8 to 15. Chain 0 multiplies with pairs 0 and 1 of the weights and counts in rows 0
// to 7, chain 1 with pairs 2 and 3 and counts in rows 8 to 15; the other halves of the results mean nothing.
using Chains = float[2][4];

template <bool kHalf, bool kHigh>
MK_DEVICE void multiply_chunk(Chains& d, const Fragments<kHigh>& x, uint32_t i, const Quad& b) {
  const Quad& low = x.low[i];
  if constexpr (kHigh) {
    const Quad& high = x.high[i];
    multiply<kHalf>(d[0], low.x, high.x, low.z, high.z, b.x, b.y);
    multiply<kHalf>(d[1], low.y, high.y, low.w, high.w, b.z, b.w);
  } else {
    multiply<kHalf>(d[0], low.x, low.y, low.z, low.w, b.x, b.y);
    multiply<kHalf>(d[1], low.x, low.y, low.z, low.w, b.z, b.w);
  }
}

// Columns 2 t and 2 t + 1 of row g, or g + 8.
template <bool kHigh>
MK_DEVICE float2 chains_sum(const Chains& d, uint32_t high) {
  const uint32_t first = kHigh ? high * 2 : 0, second = kHigh ? high * 2 : 2;
  return make_float2(d[0][first] + d[1][second], d[0][first + 1] + d[1][second + 1]);
}

// This warp's weights out of the next stage, which is free again as soon as they are in registers.
MK_DEVICE void take_tile(Consumer& c, Quad (&b)[kMaxChunks], const uint32_t (&offset)[kMaxChunks]) {
  const uint8_t* stage = c.take();
#pragma unroll
  for (uint32_t i = 0; i < kMaxChunks; ++i) b[i] = *reinterpret_cast<const Quad*>(stage + offset[i]);
  c.give_back();
}

// Partial sums of a block to the storer. Lane 4 g + t has rows g and g + 8, rows 2 t and 2 t + 1 of each tile's weights.
template <class Input>
MK_DEVICE void hand_over(Consumer& c, const Input& input, const Chains (&d)[kBlockTiles], uint32_t rows, bool norm) {
  Worker& w = c.w;
  const uint32_t room = w.header->rows, slot = Sums::slot(c.sums_slot, room);
  const uint32_t group = w.warp_lane() / 4, pair = w.warp_lane() % 4 * 2;
  w.wait_barrier(&block().sums_empty[slot], (c.sums_parity >> slot & 1) ^ 1);
  float* sums = Sums::at(room, slot);
  float* out = sums + w.warp() * rows * Sums::kOutputs + pair;
#pragma unroll
  for (uint32_t h = 0; h < (Input::kHigh ? 2 : 1); ++h) {
    if (group + h * 8 >= rows) continue;
    auto* at = reinterpret_cast<float2*>(out + (group + h * 8) * Sums::kOutputs);
#pragma unroll
    for (uint32_t t = 0; t < kBlockTiles; ++t) {
      at[t * 4] = chains_sum<Input::kHigh>(d[t], h);
    }
  }
  if (norm) input.put_squares(w, sums + (kConsumers * Sums::kOutputs + w.warp()) * rows, rows);
  __syncwarp();
  if (w.warp_lane() == 0) barrier_arrive(&block().sums_full[slot]);
  c.sums_parity ^= 1u << slot;
  ++c.sums_slot;
}

// The loop over a unit of 4 tiles is all that a warp runs for most of a step: it must be short.
template <bool kHalf, template <bool> class Input>
MK_DEVICE void consume_blocks(MatrixFlags flags) {
  constexpr bool kHigh = Input<kHalf>::kHigh;
  const uint64_t entered = Worker::cycles();
  uint64_t handed = 0, input_cycles = Worker::cycles();
  Consumer c;
  c.load();
  Worker& w = c.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const uint32_t rows = matrix_rows(w, flags.sampled()), units = f.units;
  const Share share(w.warp(), f.k_unit);
  uint32_t offset[kMaxChunks];
#pragma unroll
  for (uint32_t i = 0; i < kMaxChunks; ++i) offset[i] = (share.first + (i < share.count ? i : 0)) * 512 + w.warp_lane() * 16;
  Input<kHalf> input(w, rows);
  Quad b[2][kMaxChunks];
  take_tile(c, b[0], offset);  // one tile ahead of the product, all the time
  if (w.warp() == 0) w.trace(1);
  wait_counters(w, record);
  input.begin(w, f, share, flags);
  if (w.warp() == 0) w.trace(2);
  input_cycles = Worker::cycles() - input_cycles;
#pragma unroll 1
  for (uint32_t left = record.tile_count; left > 0;) {
    const uint32_t tiles = tasks::least(kBlockTiles, left);
    left -= tiles;
    Chains d[kBlockTiles] = {};
    input.restart();
#pragma unroll 1
    for (uint32_t unit = 1; unit <= units; ++unit) {
      Fragments<kHigh> x;
      input.fragments(w, f, share, flags, unit - 1, x);
#pragma unroll
      for (uint32_t t = 0; t < kBlockTiles; ++t) {
        const bool last = t + 1 == tiles;
        if (!last || unit < units || left > 0) take_tile(c, b[(t + 1) % 2], offset);
#pragma unroll
        for (uint32_t i = 0; i < kMaxChunks; ++i) multiply_chunk<kHalf>(d[t], x, i, b[t % 2][i]);
        if (!last) continue;
        if (t % 2 == 0) {  // the next unit begins with b[0]
#pragma unroll
          for (uint32_t i = 0; i < kMaxChunks; ++i) b[0][i] = b[1][i];
        }
        break;
      }
    }
    const uint64_t began = Worker::cycles();
    hand_over(c, input, d, rows, flags.norm());
    handed += Worker::cycles() - began;
  }
  if (w.warp() == 0) {
    w.trace(10, handed);
    w.trace(11, Worker::cycles() - entered);
    w.trace(12, input_cycles);
  }
  c.save();
}

// One row in a step is what must be fast.
template <bool kHalf>
__device__ __noinline__ void consume_row(MatrixFlags flags) {
  consume_blocks<kHalf, OneRow>(flags);
}
template <bool kHalf>
__device__ __noinline__ void consume_rows(MatrixFlags flags) {
  consume_blocks<kHalf, ManyRows>(flags);
}

template <bool kHalf>
__device__ __noinline__ void consume_matrix(MatrixFlags flags) {
  const RoleState& state = block().state[threadIdx.x / 32];
  const auto& f = *reinterpret_cast<const MatrixFields*>(state.record->payload);
  const abi::StepHeader& header = block().header[state.step & 1];
  const uint32_t rows = flags.sampled() ? header.sampled : header.rows;
  if (rows == 0) return;
  if (rows == 1 && f.units * kMaxChunks * 64 <= OneRow<kHalf>::stash_bytes(header.rows) && f.k % 8 == 0) {
    consume_row<kHalf>(flags);
  } else {
    consume_rows<kHalf>(flags);
  }
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

// ------------------------------------------------------------------------------------------------ storer
__device__ __noinline__ float activate(tasks::Activation kind, float v) {
  if (kind == tasks::Activation::kGeluTanh) return tasks::activate<tasks::Activation::kGeluTanh>(v);
  if (kind == tasks::Activation::kGelu) return tasks::activate<tasks::Activation::kGelu>(v);
  return tasks::activate<tasks::Activation::kRelu>(v);
}

// Lane = output of a block: tile lane / 8, row lane % 8 of its weights. What can be known before the sums come is.
struct RowStorer {
  Storer& s;
  const MatrixFields& f;
  const MatrixFlags flags;
  const uint32_t rows;
  const uint32_t n = f.n;
  const float inverse_k = 1.0f / float(f.k), eps = f.eps, scale = f.scale;
  uint64_t best = 0;  // of row `lane`, see Largest

  MK_DEVICE void block_of(uint32_t tile, uint32_t tiles) {
    Worker& w = s.w;
    const bool residual = flags.epilogue() == tasks::Epilogue::kResidual, sampled = flags.sampled();
    const uint32_t width = flags.epilogue() == tasks::Epilogue::kGlu ? 4 : 8;
    const uint32_t lane = w.warp_lane(), mine = tile + lane / 8, within = lane % 8;
    const uint32_t column = mine * width + within;
    const bool active = lane / 8 < tiles && within < width && column < n;
    const float* old = tasks::workspace<const float>(w, f.residual) + column;
    float* out = tasks::workspace<float>(w, f.output) + column;
    float* past = before(w, out);
    float bias = 0.0f, before_it = 0.0f;
    if (flags.bias() && lane / 8 < tiles) bias = load_constant(tasks::weights<float>(w, f.bias) + mine * 8 + within);
    if (residual && active) before_it = await(w, old);
    const uint32_t room = w.header->rows, slot = Sums::slot(s.sums_slot, room), past_rows = w.last->rows;
    const float* sums = Sums::at(room, slot);
    w.wait_barrier(&block().sums_full[slot], s.sums_parity >> slot & 1);
#pragma unroll 1
    for (uint32_t r = 0; r < rows; ++r) {
      if (r > 0 && residual && active) before_it = await(w, old + uint64_t(r) * n);
      const float v = finish((total(sums, r, lane) + bias) * scale, before_it);
      if (active) put(out + uint64_t(r) * n, v);
      if (sampled) {
        const uint64_t largest = Largest::of_warp(active ? Largest::key(v, column) : 0);
        if (lane == r && largest > best) best = largest;
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&block().sums_empty[slot]);
    s.sums_parity ^= 1u << slot;
    ++s.sums_slot;
    if (sampled || !active) return;
#pragma unroll 1
    for (uint32_t r = 0; r < past_rows; ++r) clear(past + uint64_t(r) * n);
  }

  // The warps' sums, in order, and the norm's factor.
  MK_DEVICE float total(const float* sums, uint32_t r, uint32_t lane) const {
    float part[kConsumers], square[kConsumers];
#pragma unroll
    for (uint32_t i = 0; i < kConsumers; ++i) {
      part[i] = sums[(i * rows + r) * Sums::kOutputs + lane];
      square[i] = sums[(kConsumers * Sums::kOutputs + i) * rows + r];
    }
    float v = part[0], squares = square[0];
#pragma unroll
    for (uint32_t i = 1; i < kConsumers; ++i) v += part[i], squares += square[i];
    return flags.norm() ? v * rsqrtf(squares * inverse_k + eps) : v;
  }

  MK_DEVICE float finish(float v, float residual) const {
    if (flags.epilogue() == tasks::Epilogue::kGlu || flags.epilogue() == tasks::Epilogue::kActivate) {
      const float up = __shfl_down_sync(0xffffffffu, v, 4);
      v = flags.activation() == tasks::Activation::kSilu ? __fdividef(v, 1.0f + __expf(-v)) : activate(flags.activation(), v);
      if (flags.epilogue() == tasks::Epilogue::kGlu) v *= up;
    }
    if (flags.softcap()) v = f.softcap * tanhf(v / f.softcap);
    return v + residual;
  }

  MK_DEVICE void put(float* p, float v) const {
    if (flags.sampled()) {
      *p = v;
    } else {
      publish(p, v);
    }
  }

  MK_DEVICE void put_best(uint32_t tiles) const {
    const Worker& w = s.w;
    const uint32_t lane = w.warp_lane();
    uint64_t* out = Largest::at(w, f.output, lane, w.id);
    if (lane < rows) {
      store_long(out, best);
      store_word(out + 1, tiles);
    }
    if (lane < w.last->sampled) {
      store_long(before(w, out), ~uint64_t(0));
      store_word(before(w, out) + 1, kInvalid);
    }
  }
};

__device__ __noinline__ void store_rows(MatrixFlags flags) {
  Storer s;
  s.load();
  const abi::Record& record = *s.w.record;
  RowStorer out{s, matrix_fields(s.w), flags, matrix_rows(s.w, flags.sampled())};
#pragma unroll 1
  for (uint32_t first = 0; first < record.tile_count && out.rows > 0; first += kBlockTiles) {
    out.block_of(record.tile_begin + first, tasks::least(kBlockTiles, record.tile_count - first));
  }
  if (flags.sampled()) out.put_best(record.tile_count);
  __syncwarp();
  if (s.w.warp_lane() == 0) signal_counter(s.w, record);
  s.save();
}

template <tasks::MatmulConfig kConfig>
struct Core<tasks::Matmul<kConfig>> {
  static_assert(kConfig.dtype != DType::kF32, "matrix cores take 16-bit weights");
  static_assert(kConfig.tile_n == 8, "a tile is 8 rows of the weights");
  static constexpr bool kHalf = kConfig.dtype == DType::kF16;
  static constexpr bool kProduces = true, kStores = true, kNeedsHeader = kConfig.sampled;
  static constexpr MatrixFlags kFlags = MatrixFlags::of(
      kConfig.norm, kConfig.sampled, kConfig.bias, kConfig.softcap, kConfig.epilogue, kConfig.activation);

  MK_DEVICE static void produce() {
    if (!kConfig.sampled || block().header[block().state[threadIdx.x / 32].step & 1].sampled > 0) produce_rows();
  }
  MK_DEVICE static void consume() { consume_matrix<kHalf>(kFlags); }
  MK_DEVICE static void store() { store_rows(kFlags); }
};

}  // namespace megakernel::dev
