// Small tasks whose inputs or outputs are values that say whether they are valid.
#pragma once

namespace megakernel::dev {

// Rows of a table (see tasks/embedding.py).
template <tasks::EmbeddingConfig kConfig>
struct Core<tasks::Embedding<kConfig>> {
  using Fields = abi::EmbeddingFields;
  static constexpr bool kProduces = false, kStores = false, kNeedsHeader = false;

  static __device__ __noinline__ ConsumerState consume(ConsumerState state) {
    Consumer c;
    c.set(state);
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<tasks::Embedding<kConfig>>(record);
    wait_counters(w, record);
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t width = tasks::least(f.cols - first, record.tile_count * f.tile_cols);
    float* out = tasks::workspace<float>(w, f.output) + first;
    const char* table = tasks::weights<char>(w, f.table);
    const uint64_t row_bytes = uint64_t(f.cols) * bytes_of(kConfig.dtype);
    const bool whole = kConfig.dtype != DType::kF32 && !kConfig.positions && f.cols % 8 == 0 && f.tile_cols % 8 == 0;
#pragma unroll 1
    for (uint32_t r = 0; r < w.header->rows; ++r) {
      const char* row = table + uint32_t(w.header->row[r].token) * row_bytes;
      if (whole) {  // 8 columns of a lane in one go
        for (uint32_t i = w.lane() * 8; i < width; i += w.lanes() * 8) {
          publish_eight(out + uint64_t(r) * f.cols + i, load_constant_quad(row + (first + i) * 2), f.scale);
        }
        continue;
      }
#pragma unroll 1
      for (uint32_t i = w.lane(); i < width; i += w.lanes()) {
        float v = load_as<kConfig.dtype>(row, first + i, All{}) * f.scale;
        if constexpr (kConfig.positions) {
          const char* at = tasks::weights<char>(w, f.positions) + w.header->row[r].position * row_bytes;
          v += load_as<kConfig.dtype>(at, first + i, All{});
        }
        publish(out + uint64_t(r) * f.cols + i, v);
      }
    }
#pragma unroll 1
    for (uint32_t r = 0; r < w.last->rows; ++r) {
#pragma unroll 1
      for (uint32_t i = w.lane(); i < width; i += w.lanes()) clear(before(w, out + uint64_t(r) * f.cols + i));
    }
    if (record.signal == abi::kNone) return c.state();
    w.sync();
    if (w.lane() == 0) signal_counter(w, record);
    return c.state();
  }

  MK_DEVICE static void publish_eight(float* out, const Quad& bits, float scale) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float low = kConfig.dtype == DType::kF16 ? half_to_float(uint16_t(words[i])) : as_float(words[i] << 16);
      const float high = kConfig.dtype == DType::kF16 ? half_to_float(uint16_t(words[i] >> 16)) : as_float(words[i] & 0xffff0000u);
      publish(out + 2 * i, low * scale);
      publish(out + 2 * i + 1, high * scale);
    }
  }
};

// Pieces of attention into its output (see tasks/combine.py). Consumer w adds pieces w, w + 8, ...; then the consumers in
// order: a fixed order for each row.
template <tasks::CombineConfig kConfig>
struct Core<tasks::Combine<kConfig>> {
  using Fields = abi::CombineFields;
  static constexpr bool kProduces = false, kStores = false, kNeedsHeader = false;
  static constexpr uint32_t kDim = kConfig.head_dim, kStride = kDim + 2;
  static constexpr uint32_t kParts = (kStride + 31) / 32;  // floats of a piece in one lane
  static constexpr uint32_t kAtOnce = 4;                   // pieces of a warp on their way

  static __device__ __noinline__ ConsumerState consume(ConsumerState state) {
    Consumer c;
    c.set(state);
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<tasks::Combine<kConfig>>(record);
    wait_counters(w, record);
    const uint32_t first = record.tile_begin, last = record.tile_begin + record.tile_count;
    uint32_t turn = 0;
    for (uint32_t r = 0; r < w.header->rows; ++r) {
      const uint32_t position = w.header->row[r].position;
      const uint32_t low = tasks::first_seen(position, f.window) / kConfig.piece_tokens;
      const uint32_t high = position / kConfig.piece_tokens;
      for (uint32_t h = first; h < last; ++h) {
        if (high - low >= kConsumers) {
          together(w, f, r, h, low, high);
        } else if (turn++ % kConsumers == w.warp()) {
          alone(w, f, r, h, low, high);
        }
      }
    }
    float* out = tasks::workspace<float>(w, f.output);
    for (uint32_t r = 0; r < w.last->rows; ++r) {
      for (uint32_t i = first * kDim + w.lane(); i < last * kDim; i += w.lanes()) {
        clear(before(w, out + uint64_t(r) * kConfig.heads * kDim + i));
      }
    }
    if (record.signal == abi::kNone) return c.state();
    w.sync();
    if (w.lane() == 0) signal_counter(w, record);
    return c.state();
  }

  MK_DEVICE static const float* pieces_of(const Worker& w, const Fields& f, uint32_t r, uint32_t h) {
    return tasks::workspace<const float>(w, f.partials) + (uint64_t(r) * kConfig.heads + h) * f.max_pieces * kStride;
  }
  MK_DEVICE static float* out_of(const Worker& w, const Fields& f, uint32_t r, uint32_t h) {
    return tasks::workspace<float>(w, f.output) + (uint64_t(r) * kConfig.heads + h) * kDim;
  }

  // At most 8 pieces: one warp does what 8 would, each with one piece.
  MK_DEVICE static void alone(Worker& w, const Fields& f, uint32_t r, uint32_t h, uint32_t low, uint32_t high) {
    float piece[kConsumers][kParts];
    // Element i is piece j with j % 8 == i, as in `together`.
    const uint32_t base = low / kConsumers * kConsumers;
    uint32_t index[kConsumers];
#pragma unroll
    for (uint32_t i = 0; i < kConsumers; ++i) index[i] = base + i >= low ? base + i : base + i + kConsumers;
    await_pieces(w, pieces_of(w, f, r, h), index, high, piece);
    float top = -kInfinity, total = 0.0f, sum[kParts] = {};
    float tops[kConsumers];
#pragma unroll
    for (uint32_t i = 0; i < kConsumers; ++i) {
      tops[i] = __shfl_sync(0xffffffffu, piece[i][kDim / 32], kDim % 32);
      if (index[i] <= high) top = max(top, tops[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kConsumers; ++i) {
      const float own = __shfl_sync(0xffffffffu, piece[i][(kDim + 1) / 32], (kDim + 1) % 32);
      if (index[i] > high) continue;
      const float factor = exp2_fast((tops[i] - top) * kLog2e);
      total += factor * own;
#pragma unroll
      for (uint32_t k = 0; k < kParts; ++k) sum[k] += factor * piece[i][k];
    }
    float* out = out_of(w, f, r, h);
#pragma unroll
    for (uint32_t k = 0; k < kParts; ++k) {
      const uint32_t d = w.warp_lane() + k * 32;
      if (d < kDim) publish(out + d, sum[k] / total);
    }
  }

  // A sum of pieces relative to the largest of their tops. Element i of a lane is the (lane + 32 i)-th float of a piece.
  struct Sum {
    float top = -kInfinity, total = 0.0f, v[kParts] = {};

    MK_DEVICE void add(float piece_top, float piece_total, const float (&piece)[kParts]) {
      const float high = max(top, piece_top);
      const float mine = exp2_fast((top - high) * kLog2e), other = exp2_fast((piece_top - high) * kLog2e);
      total = total * mine + other * piece_total;
#pragma unroll
      for (uint32_t i = 0; i < kParts; ++i) v[i] = v[i] * mine + other * piece[i];
      top = high;
    }
  };

  MK_DEVICE static void together(Worker& w, const Fields& f, uint32_t r, uint32_t h, uint32_t low, uint32_t high) {
    const float* pieces = pieces_of(w, f, r, h);
    Sum sum;
    for (uint32_t j = low + (w.warp() + kConsumers - low % kConsumers) % kConsumers; j <= high; j += kConsumers * kAtOnce) {
      float piece[kAtOnce][kParts];
      uint32_t index[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) index[i] = j + i * kConsumers;
      await_pieces(w, pieces, index, high, piece);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const float top = __shfl_sync(0xffffffffu, piece[i][kDim / 32], kDim % 32);
        const float total = __shfl_sync(0xffffffffu, piece[i][(kDim + 1) / 32], (kDim + 1) % 32);
        if (index[i] <= high) sum.add(top, total, piece[i]);
      }
    }
    w.sync();  // scratch is free
    auto* memory = reinterpret_cast<float*>(block().scratch);  // [kConsumers][kStride]
    float* own = memory + w.warp() * kStride;
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) {
      const uint32_t d = w.warp_lane() + i * 32;
      if (d < kDim) own[d] = sum.v[i];
    }
    if (w.warp_lane() == 0) own[kDim] = sum.top, own[kDim + 1] = sum.total;
    w.sync();
    float* out = out_of(w, f, r, h);
    for (uint32_t d = w.lane(); d < kDim; d += w.lanes()) publish(out + d, merged(memory, d));
    w.sync();
  }

  MK_DEVICE static float merged(const float* memory, uint32_t d) {
    float top = -kInfinity, total = 0.0f, sum = 0.0f;
    for (uint32_t i = 0; i < kConsumers; ++i) top = max(top, memory[i * kStride + kDim]);
    for (uint32_t i = 0; i < kConsumers; ++i) {
      if (memory[i * kStride + kDim] == -kInfinity) continue;
      const float factor = exp2_fast((memory[i * kStride + kDim] - top) * kLog2e);
      total += factor * memory[i * kStride + kDim + 1];
      sum += factor * memory[i * kStride + d];
    }
    return sum / total;
  }

  // Pieces `index[i]`, zeros for those beyond `high`.
  template <uint32_t kCount>
  MK_DEVICE static void await_pieces(
      Worker& w, const float* pieces, const uint32_t (&index)[kCount], uint32_t high, float (&out)[kCount][kParts]) {
    uint32_t bits[kCount][kParts];
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
#pragma unroll
      for (uint32_t k = 0; k < kParts; ++k) {
        const bool wanted = index[i] <= high && w.warp_lane() + k * 32 < kStride;
        bits[i][k] = wanted ? load_word(pieces + uint64_t(index[i]) * kStride + w.warp_lane() + k * 32) : 0;
      }
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
#pragma unroll
        for (uint32_t k = 0; k < kParts; ++k) missing |= bits[i][k] == kInvalid;
      }
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
#pragma unroll
        for (uint32_t k = 0; k < kParts; ++k) {
          if (bits[i][k] == kInvalid) bits[i][k] = load_word(pieces + uint64_t(index[i]) * kStride + w.warp_lane() + k * 32);
        }
      }
      return false;
    }, abi::FaultKind::kValueBudget, high);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
#pragma unroll
      for (uint32_t k = 0; k < kParts; ++k) out[i][k] = as_float(bits[i][k]);
    }
  }
};

}  // namespace megakernel::dev
