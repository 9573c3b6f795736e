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

template <tasks::MatmulConfig kConfig>
struct Core<tasks::Matmul<kConfig>> {
  using Task = tasks::Matmul<kConfig>;
  using Fields = abi::MatmulFields;
  static_assert(kConfig.dtype != DType::kF32, "matrix cores take 16-bit weights");
  static_assert(kConfig.tile_n == 8, "a tile is 8 rows of the weights");
  static constexpr bool kHalf = kConfig.dtype == DType::kF16;
  static constexpr bool kProduces = true, kStores = true, kNeedsHeader = kConfig.sampled;

  // ---------------------------------------------------------------------------------------------- producer
  MK_DEVICE static void produce(Producer& p, const abi::Record& record, const Fields& f) {
    if (kConfig.sampled && p.w.header->sampled == 0) return;
    const uint32_t bytes = f.k_unit * 16;
    const uint64_t tile_bytes = uint64_t(bytes) * f.units;
    const char* block = tasks::weights<char>(p.w, f.weight) + record.tile_begin * tile_bytes;
    for (uint32_t first = 0; first < record.tile_count; first += kBlockTiles, block += kBlockTiles * tile_bytes) {
      const uint32_t tiles = tasks::least(kBlockTiles, record.tile_count - first);
      for (uint32_t unit = 0; unit < f.units; ++unit) {
        for (uint32_t t = 0; t < tiles; ++t) p.put(block + t * tile_bytes + uint64_t(unit) * bytes, bytes);
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- consumer
  // The chunks of this warp in every unit.
  struct Share {
    uint32_t first, count;
    MK_DEVICE Share(const Worker& w, const Fields& f) {
      const uint32_t chunks = f.k_unit / 32;
      first = w.warp() * chunks / kConsumers;
      count = (w.warp() + 1) * chunks / kConsumers - first;
    }
  };

  // The A operand of up to 4 chunks: rows 0 to 7, and rows 8 to 15 where a step may have so many.
  template <bool kHigh>
  struct Fragments {
    Quad low[kMaxChunks];
    Quad high[kHigh ? kMaxChunks : 1];
  };

  MK_DEVICE static uint32_t rows_of(const Worker& w) { return kConfig.sampled ? w.header->sampled : w.header->rows; }

  MK_DEVICE static const float* input_row(const Worker& w, const Fields& f, uint32_t r) {
    const uint32_t row = kConfig.sampled ? w.header->sample_row[r] : r;
    return tasks::workspace<const float>(w, f.input) + uint64_t(row) * f.k;
  }

  MK_DEVICE static void consume(Consumer& c, const abi::Record& record, const Fields& f) {
    const uint32_t rows = rows_of(c.w);
    if (rows == 0) return;
    const bool fits = f.units * kMaxChunks * 64 <= stash_bytes(c.w);
    if (rows == 1 && fits && f.k % 8 == 0) {
      run<One>(c, record, f, 1);
    } else {
      run<Several>(c, record, f, rows);
    }
  }

  MK_DEVICE static uint32_t stash_bytes(const Worker& w) {
    return Sums::below(w.header->rows) / kConsumers / 64 * 64;
  }

  // Eight consecutive columns of a row and what the norm needs of them.
  struct Octet {
    Quad v[2];

    MK_DEVICE bool missing() const { return invalid(v[0]) || invalid(v[1]); }
    MK_DEVICE void fetch(const float* p) {
      v[0] = load_quad(p);
      v[1] = load_quad(p + 4);
    }
    MK_DEVICE static float square_sum(const float (&x)[8]) {
      float s = x[0] * x[0];
#pragma unroll
      for (int i = 1; i < 8; ++i) s = fmaf(x[i], x[i], s);
      return s;
    }
    MK_DEVICE void values(float (&x)[8]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[4 * i] = as_float(v[i].x), x[4 * i + 1] = as_float(v[i].y);
        x[4 * i + 2] = as_float(v[i].z), x[4 * i + 3] = as_float(v[i].w);
      }
    }
    // In the type of the weights, times gamma; the factor of the norm comes in the epilogue.
    MK_DEVICE static Quad packed(float (&x)[8], const float* gamma) {
      if constexpr (kConfig.norm) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= gamma[i];
      }
      return {pack<kHalf>(x[0], x[1]), pack<kHalf>(x[2], x[3]), pack<kHalf>(x[4], x[5]), pack<kHalf>(x[6], x[7])};
    }
  };

  MK_DEVICE static void load_gamma(float (&gamma)[8], const float* p) {
    const Quad a = load_constant_quad(p), b = load_constant_quad(p + 4);
    gamma[0] = as_float(a.x), gamma[1] = as_float(a.y), gamma[2] = as_float(a.z), gamma[3] = as_float(a.w);
    gamma[4] = as_float(b.x), gamma[5] = as_float(b.y), gamma[6] = as_float(b.z), gamma[7] = as_float(b.w);
  }

  // One row: the warp's columns of the whole input are fetched in one go and kept in shared memory.
  struct One {
    static constexpr bool kHigh = false;
    static constexpr uint32_t kOctets = kConfig.norm ? 2 : 4;  // of a lane in flight
    uint8_t* stash;
    float squares = 0.0f;

    MK_DEVICE One(Worker& w, const Fields&, uint32_t) : stash(block().scratch + w.warp() * stash_bytes(w)) {}

    MK_DEVICE void begin(Worker& w, const Fields& f, const Share& share) {
      const float* x = input_row(w, f, 0);
      const uint32_t total = f.units * share.count * 4;  // octets
      for (uint32_t base = 0; base < total; base += 32 * kOctets) fetch(w, f, share, x, base, total);
      __syncwarp();
    }

    MK_DEVICE void fetch(Worker& w, const Fields& f, const Share& share, const float* x, uint32_t base, uint32_t total) {
      Octet octet[kOctets];
      float gamma[kConfig.norm ? kOctets : 1][8];
      uint32_t column[kOctets];
#pragma unroll
      for (uint32_t i = 0; i < kOctets; ++i) {
        const uint32_t o = base + i * 32 + w.warp_lane(), q = o / 4;
        const uint32_t unit = q / share.count, chunk = q - unit * share.count;
        column[i] = o < total ? unit * f.k_unit + (share.first + chunk) * 32 + o % 4 * 8 : f.k;
        if (column[i] < f.k) {
          octet[i].fetch(x + column[i]);
          if constexpr (kConfig.norm) load_gamma(gamma[i], tasks::weights<float>(w, f.gamma) + column[i]);
        } else {
          octet[i].v[0] = octet[i].v[1] = Quad{0, 0, 0, 0};
          if constexpr (kConfig.norm) {
#pragma unroll
            for (int j = 0; j < 8; ++j) gamma[i][j] = 0.0f;
          }
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
      }, abi::FaultKind::kValueBudget, abi::kNone, total);
#pragma unroll
      for (uint32_t i = 0; i < kOctets; ++i) {
        const uint32_t o = base + i * 32 + w.warp_lane();
        float v[8];
        octet[i].values(v);
        if constexpr (kConfig.norm) add_squares(w, Octet::square_sum(v), total - (base + i * 32));
        const Quad packed = Octet::packed(v, gamma[kConfig.norm ? i : 0]);
        if (o < total) *reinterpret_cast<Quad*>(stash + o * 16) = packed;
      }
    }

    // In the order of the chunks, as `Several` adds them; lane % 4 is the octet of a chunk.
    MK_DEVICE void add_squares(const Worker& w, float own, int32_t left) {
#pragma unroll
      for (int32_t chunk = 0; chunk < 8; ++chunk) {
        const float s = __shfl_sync(0xffffffffu, own, chunk * 4 + w.warp_lane() % 4);
        if (chunk * 4 < left) squares += s;
      }
    }

    MK_DEVICE void fragments(
        Worker& w, const Fields&, const Share& share, uint32_t unit, Fragments<false>& a) {
      const uint8_t* at = stash + unit * share.count * 64 + w.warp_lane() % 4 * 16;
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) {
        if (i < share.count) a.low[i] = *reinterpret_cast<const Quad*>(at + i * 64);
      }
    }

    MK_DEVICE void put_squares(const Worker& w, float* out, uint32_t) const {
      float s = squares + __shfl_xor_sync(0xffffffffu, squares, 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      if (w.warp_lane() == 0) out[0] = s;
    }
    MK_DEVICE void restart() {}
  };

  // Two rows or more: lane / 4 is the row, and each lane fetches its fragments itself, for every block again.
  struct Several {
    static constexpr bool kHigh = true;
    uint32_t rows;
    float squares[2] = {0.0f, 0.0f};

    MK_DEVICE Several(Worker&, const Fields&, uint32_t n) : rows(n) {}
    MK_DEVICE void begin(Worker&, const Fields&, const Share&) {}
    MK_DEVICE void restart() { squares[0] = squares[1] = 0.0f; }

    MK_DEVICE void fragments(
        Worker& w, const Fields& f, const Share& share, uint32_t unit, Fragments<kHigh>& a) {
      half(w, f, share, unit, w.warp_lane() / 4, a.low, squares[0]);
      half(w, f, share, unit, w.warp_lane() / 4 + 8, a.high, squares[1]);
    }

    template <uint32_t kCount>
    MK_DEVICE void half(Worker& w, const Fields& f, const Share& share, uint32_t unit, uint32_t row, Quad (&out)[kCount],
                        float& square) {
      const float* x = row < rows ? input_row(w, f, row) : nullptr;
      const uint32_t column = unit * f.k_unit + share.first * 32 + w.warp_lane() % 4 * 8;
      Octet octet[kCount];
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
        octet[i].v[0] = octet[i].v[1] = Quad{0, 0, 0, 0};
        if (i < share.count && x) fetch(octet[i], x, column + i * 32, f.k);
      }
      w.spin([&] {
        bool missing = false;
#pragma unroll
        for (uint32_t i = 0; i < kCount; ++i) missing |= octet[i].missing();
        if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
        for (uint32_t i = 0; i < kCount; ++i) {
          if (octet[i].missing()) fetch(octet[i], x, column + i * 32, f.k);
        }
        return false;
      }, abi::FaultKind::kValueBudget, abi::kNone, row);
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
        float v[8], gamma[8];
        octet[i].values(v);
        if constexpr (kConfig.norm) {
          if (i < share.count) square += Octet::square_sum(v);
          const float* g = tasks::weights<float>(w, f.gamma) + column + i * 32;
#pragma unroll
          for (uint32_t j = 0; j < 8; ++j) gamma[j] = i < share.count && column + i * 32 + j < f.k ? load_constant(g + j) : 0.0f;
        }
        out[i] = Octet::packed(v, gamma);
      }
    }

    // Rows of any length: an octet may be part padding, and need not be aligned.
    MK_DEVICE static void fetch(Octet& octet, const float* x, uint32_t column, uint32_t k) {
      if (k % 8 == 0) {
        if (column < k) octet.fetch(x + column);
        return;
      }
      uint32_t v[8];
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) v[j] = column + j < k ? load_word(x + column + j) : 0;
      octet.v[0] = {v[0], v[1], v[2], v[3]};
      octet.v[1] = {v[4], v[5], v[6], v[7]};
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

  MK_DEVICE static void load_weights(Quad (&b)[kMaxChunks], const uint8_t* stage, const Worker& w, const Share& share) {
    const uint8_t* at = stage + share.first * 512 + w.warp_lane() * 16;
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      if (i < share.count) b[i] = *reinterpret_cast<const Quad*>(at + i * 512);
    }
  }

  template <bool kHigh>
  MK_DEVICE static void multiply_chunk(float (&d)[2][4], const Fragments<kHigh>& a, uint32_t i, const Quad& b) {
    if constexpr (kHigh) {
      multiply<kHalf>(d[0], a.low[i].x, a.high[i].x, a.low[i].y, a.high[i].y, b.x, b.y);
      multiply<kHalf>(d[1], a.low[i].z, a.high[i].z, a.low[i].w, a.high[i].w, b.z, b.w);
    } else {
      multiply<kHalf>(d[0], a.low[i].x, 0, a.low[i].y, 0, b.x, b.y);
      multiply<kHalf>(d[1], a.low[i].z, 0, a.low[i].w, 0, b.z, b.w);
    }
  }

  template <class Input>
  MK_DEVICE static void run(Consumer& c, const abi::Record& record, const Fields& f, uint32_t rows) {
    Worker& w = c.w;
    const Share share(w, f);
    Input input(w, f, rows);
    bool begun = false;
    for (uint32_t first = 0; first < record.tile_count; first += kBlockTiles) {
      const uint32_t tiles = tasks::least(kBlockTiles, record.tile_count - first);
      float d[kBlockTiles][2][4] = {};
      input.restart();
      for (uint32_t unit = 0; unit < f.units; ++unit) {
        Fragments<Input::kHigh> a;
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
          if (!begun) {
            wait_counters(w, record);
            input.begin(w, f, share);
            begun = true;
          }
          if (pair == 0) input.fragments(w, f, share, unit, a);
#pragma unroll
          for (uint32_t i = 0; i < kMaxChunks; ++i) {
            if (i >= share.count) break;
            multiply_chunk(d[pair], a, i, b[0][i]);
            if (two) multiply_chunk(d[pair + 1], a, i, b[1][i]);
          }
        }
      }
      hand_over(c, input, d, tiles, rows);
    }
  }

  // Partial sums to the storer.
  template <class Input>
  MK_DEVICE static void hand_over(Consumer& c, const Input& input, const float (&d)[kBlockTiles][2][4], uint32_t tiles,
                                  uint32_t rows) {
    Worker& w = c.w;
    const uint32_t room = w.header->rows, slot = c.sums_slot % Sums::slots(room);
    const uint32_t group = w.warp_lane() / 4, pair = w.warp_lane() % 4 * 2;
    w.wait_barrier(&block().sums_empty[slot], (c.sums_parity >> slot & 1) ^ 1);
    float* sums = Sums::at(room, slot);
    float* out = sums + w.warp() * rows * Sums::kOutputs + pair;
#pragma unroll
    for (uint32_t t = 0; t < kBlockTiles; ++t) {
      if (t >= tiles) break;
      if (group < rows) {
        *reinterpret_cast<float2*>(out + group * Sums::kOutputs + t * 8) =
            make_float2(d[t][0][0] + d[t][1][0], d[t][0][1] + d[t][1][1]);
      }
      if (Input::kHigh && group + 8 < rows) {
        *reinterpret_cast<float2*>(out + (group + 8) * Sums::kOutputs + t * 8) =
            make_float2(d[t][0][2] + d[t][1][2], d[t][0][3] + d[t][1][3]);
      }
    }
    if constexpr (kConfig.norm) {
      input.put_squares(w, sums + (kConsumers * Sums::kOutputs + w.warp()) * rows, rows);
    }
    __syncwarp();
    if (w.warp_lane() == 0) barrier_arrive(&block().sums_full[slot]);
    c.sums_parity ^= 1u << slot;
    ++c.sums_slot;
  }

  // ---------------------------------------------------------------------------------------------- storer
  MK_DEVICE static void store(Storer& s, const abi::Record& record, const Fields& f) {
    Worker& w = s.w;
    const uint32_t rows = rows_of(w);
    for (uint32_t first = 0; first < record.tile_count && rows > 0; first += kBlockTiles) {
      const uint32_t tiles = tasks::least(kBlockTiles, record.tile_count - first);
      store_block(s, f, record.tile_begin + first, tiles, rows);
    }
    __syncwarp();
    if (w.warp_lane() == 0) signal_counter(w, record);
  }

  // Lane = output of the block: tile lane / 8, row lane % 8 of its weights.
  MK_DEVICE static void store_block(Storer& s, const Fields& f, uint32_t tile, uint32_t tiles, uint32_t rows) {
    Worker& w = s.w;
    constexpr bool kGlu = kConfig.epilogue == tasks::Epilogue::kGlu;
    constexpr uint32_t kWidth = kGlu ? 4 : 8;
    const uint32_t lane = w.warp_lane(), mine = tile + lane / 8, within = lane % 8;
    const uint32_t column = mine * kWidth + within;
    const bool active = lane / 8 < tiles && within < kWidth && column < f.n;
    float bias = 0.0f, residual = 0.0f;
    if constexpr (kConfig.bias) {
      if (lane / 8 < tiles) bias = load_constant(tasks::weights<float>(w, f.bias) + mine * 8 + within);
    }
    if constexpr (kConfig.epilogue == tasks::Epilogue::kResidual) {
      if (active) residual = await(w, tasks::workspace<const float>(w, f.residual) + column);
    }
    const uint32_t room = w.header->rows, slot = s.sums_slot % Sums::slots(room);
    w.wait_barrier(&block().sums_full[slot], s.sums_parity >> slot & 1);
    const float* sums = Sums::at(room, slot);
    for (uint32_t r = 0; r < rows; ++r) {
      float v = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kConsumers; ++i) v += sums[(i * rows + r) * Sums::kOutputs + lane];
      if constexpr (kConfig.norm) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < kConsumers; ++i) squares += sums[(kConsumers * Sums::kOutputs + i) * rows + r];
        v *= rsqrtf(squares / float(f.k) + f.eps);
      }
      v = (v + bias) * f.scale;
      if constexpr (kGlu) {
        const float up = __shfl_down_sync(0xffffffffu, v, 4);
        v = tasks::activate<kConfig.activation>(v) * up;
      }
      if constexpr (kConfig.softcap) v = f.softcap * tanhf(v / f.softcap);
      if constexpr (kConfig.epilogue == tasks::Epilogue::kResidual) {
        if (r > 0 && active) residual = await(w, tasks::workspace<const float>(w, f.residual) + uint64_t(r) * f.n + column);
        v += residual;
      }
      if (active) put_out(w, f, r, column, v);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&block().sums_empty[slot]);
    s.sums_parity ^= 1u << slot;
    ++s.sums_slot;
    if constexpr (!kConfig.sampled) {
      if (active) {
        for (uint32_t r = 0; r < w.last->rows; ++r) clear(before(w, out_at(w, f, r, column)));
      }
    }
  }

  MK_DEVICE static float* out_at(const Worker& w, const Fields& f, uint32_t r, uint32_t column) {
    return tasks::workspace<float>(w, f.output) + uint64_t(r) * f.n + column;
  }

  MK_DEVICE static void put_out(Worker& w, const Fields& f, uint32_t r, uint32_t column, float v) {
    if constexpr (kConfig.sampled) {
      *out_at(w, f, r, column) = v;
    } else {
      publish(out_at(w, f, r, column), v);
    }
  }
};

}  // namespace megakernel::dev
