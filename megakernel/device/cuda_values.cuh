// Small tasks whose inputs or outputs are values that say whether they are valid.
#pragma once

namespace megakernel::dev {

// Rows of a table (see tasks/embedding.py).
template <tasks::EmbeddingConfig kConfig>
struct Core<tasks::Embedding<kConfig>> {
  using Fields = abi::EmbeddingFields;
  static constexpr bool kProduces = false, kStores = false, kLoads = false, kNeedsHeader = false;

  static __device__ __noinline__ void consume() { run<false>(); }
  MK_DEVICE static void consume_several() { several::consume<Core>(); }

  template <bool kSeveral>
  MK_DEVICE static void run() {
    Consumer c;
    c.load();
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<tasks::Embedding<kConfig>>(record);
    wait_counters(w, record);
    trace::ready(w, abi::Role::kConsumer);
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t width = tasks::least(f.cols - first, record.tile_count * f.tile_cols);
    float* out = tasks::workspace<float>(w, f.output) + first;
    const char* table = tasks::weights<char>(w, f.table);
    const uint64_t row_bytes = uint64_t(f.cols) * bytes_of(kConfig.dtype);
    trace::end(w, abi::Role::kConsumer);
    const bool whole = kConfig.dtype != DType::kF32 && !kConfig.positions && f.cols % 8 == 0 && f.tile_cols % 8 == 0;
    // Of many rows all octets are dealt to the lanes: a row is a trip to memory.
    const bool dealt = kSeveral && !kConfig.inputs && whole;
    const uint32_t octets = width / 8;
#pragma unroll 1
    for (uint32_t i = w.lane(); dealt && i < w.header->rows * octets; i += w.lanes()) {
      const uint32_t r = i / octets, column = i % octets * 8;
      const Quad bits = load_constant_quad(table + uint32_t(w.header->row[r].token) * row_bytes + (first + column) * 2);
      publish_eight(out + uint64_t(r) * f.cols + column, bits, f.scale);
      if (kConfig.gives && gives(*w.header)) give_eight(w, f, r, first + column, bits);
    }
#pragma unroll 1
    for (uint32_t r = 0; !dealt && r < w.header->rows; ++r) {
      if constexpr (kConfig.inputs) {
        if (w.header->row[r].token < 0) {
          publish_given(w, f, w.header->row[r], first, width, out + uint64_t(r) * f.cols);
          continue;
        }
      }
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
    if (kSeveral && kConfig.gives && gives(*w.last)) clear_given();
    if (record.signal != abi::kNone) {
      w.sync();
      if (w.lane() == 0) signal_counter(w, record);
    }
    c.save();
  }

  MK_DEVICE static void publish_given(
      Worker& w, const Fields& f, const abi::Row& row, uint32_t first, uint32_t width, float* out) {
    const float* given = tasks::Embedding<kConfig>::given(w, row, f.cols) + first;
#pragma unroll 1
    for (uint32_t i = w.lane(); i < width; i += w.lanes()) {
      float v = load(given + i, All{});
      if constexpr (kConfig.positions) {
        const char* at = tasks::weights<char>(w, f.positions) + row.position * uint64_t(f.cols) * bytes_of(kConfig.dtype);
        v += load_as<kConfig.dtype>(at, first + i, All{});
      }
      publish(out + i, v);
    }
  }

  MK_DEVICE static void eight(float (&v)[8], const Quad& bits, float scale) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float low = kConfig.dtype == DType::kF16 ? half_to_float(uint16_t(words[i])) : as_float(words[i] << 16);
      const float high = kConfig.dtype == DType::kF16 ? half_to_float(uint16_t(words[i] >> 16)) : as_float(words[i] & 0xffff0000u);
      v[2 * i] = low * scale, v[2 * i + 1] = high * scale;
    }
  }
  MK_DEVICE static void publish_eight(float* out, const Quad& bits, float scale) {
    float v[8];
    eight(v, bits, scale);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) publish(out + i, v[i]);
  }

  // The same eight for the product that reads them.
  MK_DEVICE static void give_eight(const Worker& w, const Fields& f, uint32_t row, uint32_t column, Quad bits) {
    const GivenRows to(w, f.output, f.cols);
    float v[8];
    eight(v, bits, f.scale);
    if (f.gamma != abi::kNone64) {
      publish(to.squares(row) + column / 8, sum_of_squares(v));
      Octet gamma;
      gamma.fetch_fixed(tasks::weights<float>(w, f.gamma) + column);
      multiply_gamma(v, gamma);
    }
    store_quad(to.octet(row, column), packed<kConfig.dtype == DType::kF16>(v));
  }
  static __device__ __noinline__ void clear_given() {
    const Loaded w;
    const Fields& f = fields_of<tasks::Embedding<kConfig>>(*w.record);
    const uint32_t first = w.record->tile_begin * f.tile_cols;
    const uint32_t width = tasks::least(f.cols - first, w.record->tile_count * f.tile_cols);
    const GivenRows past(w, f.output, f.cols);
#pragma unroll 1
    for (uint32_t r = 0; r < w.last->rows; ++r) {
#pragma unroll 1
      for (uint32_t i = first + w.lane() * 8; i < first + width; i += w.lanes() * 8) {
        store_quad(before(w, past.octet(r, i)), {kInvalid, kInvalid, kInvalid, kInvalid});
        if (f.gamma != abi::kNone64) clear(before(w, past.squares(r) + i / 8));
      }
    }
  }
};

// Pieces of attention into its output (see tasks/combine.py). Up to 8 pieces are added in order by one warp. Of more,
// consumer w adds pieces w, w + 8, ...; then the consumers in order. Either way a fixed order for each row.
template <tasks::CombineConfig kConfig>
struct Core<tasks::Combine<kConfig>> {
  using Fields = abi::CombineFields;
  static constexpr bool kProduces = false, kStores = false, kLoads = true, kNeedsHeader = false;
  static constexpr uint32_t kDim = kConfig.head_dim, kStride = kDim + 2, kShares = kConfig.shares;
  static constexpr uint32_t kPairs = (kDim + 63) / 64;  // pairs of elements of a piece in one lane
  static constexpr uint32_t kAtOnce = 4;                // pieces of a warp on their way
  static constexpr uint32_t kWideChunks = kGivesWide ? kConfig.gives_wide : 0;
  using Given = GivenInput<kWideChunks>;
  static_assert((kShares & (kShares - 1)) == 0);

  // A sum of pieces relative to the largest of their tops: this lane's elements, 64 i + 2 lane and the next.
  struct Sum {
    float top = -kInfinity, total = 0.0f;
    float2 v[kPairs] = {};

    MK_DEVICE void add(float piece_top, float piece_total, const float2 (&piece)[kPairs]) {
      const float high = max(top, piece_top);
      const float mine = exp2_fast((top - high) * kLog2e), other = exp2_fast((piece_top - high) * kLog2e);
      total = total * mine + other * piece_total;
#pragma unroll
      for (uint32_t i = 0; i < kPairs; ++i) {
        v[i].x = v[i].x * mine + other * piece[i].x;
        v[i].y = v[i].y * mine + other * piece[i].y;
      }
      top = high;
    }
  };

  // Whether some row has so many pieces that all warps add them. Where there may be many rows, each lane looks at its own.
  template <bool kLanes>
  MK_DEVICE static bool many_pieces(const abi::StepHeader& header, const Fields& f) {
    bool found = false;
#pragma unroll 1
    for (uint32_t r = kLanes ? lane_of_warp() : 0; r < header.rows; r += kLanes ? 32 : 1) {
      const uint32_t position = header.row[r].position;
      if (position / kConfig.piece_tokens - tasks::first_seen(position, f.window) / kConfig.piece_tokens < kConsumers) continue;
      if (!kLanes) return true;
      found = true;
    }
    return kLanes && __any_sync(0xffffffffu, found);
  }

  MK_DEVICE static void load() { lend_scratch_to_many<false>(); }
  MK_DEVICE static void load_several() { lend_scratch_to_many<(kShares > 1)>(); }
  template <bool kLanes>
  MK_DEVICE static void lend_scratch_to_many() {
    const RoleState& state = own_state();
    const Fields& f = fields_of<tasks::Combine<kConfig>>(*state.record);
    if (many_pieces<kLanes>(block().header[state.step & 1], f)) lend_scratch();
  }

  static __device__ __noinline__ void consume() { run<false>(); }
  MK_DEVICE static void consume_several() { several::consume<Core>(); }

  template <bool kSeveral>
  MK_DEVICE static void run() {
    Consumer c;
    c.load();
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<tasks::Combine<kConfig>>(record);
    wait_counters(w, record);
    constexpr bool kMany = kShares > 1 && (kSeveral || !kRooms);  // rows
    const bool scratch = many_pieces<kMany>(*w.header, f);
    if (scratch) c.take_input();
    const uint32_t first = record.tile_begin, count = record.tile_count;
    const uint32_t turns = (kMany ? (w.header->rows + kShares - 1) / kShares : w.header->rows) * count;
    const bool own = kMany && !scratch;  // each warp goes to its own at once
#pragma unroll 1
    for (uint32_t i = own ? w.warp() : 0; i < turns; i += own ? kConsumers : 1) {
      const uint32_t tile = first + i % count, r = kMany ? i / count * kShares + tile % kShares : i / count;
      if (kMany ? r < w.header->rows : tile % kShares == 0) row_head<kSeveral>(w, f, r, tile / kShares, i);
    }
    if (scratch) c.free_input();
    if (kSeveral && gives_wide(*w.header)) count_given(w, record);
    if (record.signal != abi::kNone) {
      w.sync();
      if (w.lane() == 0) signal_counter(w, record);
    }
    c.save();
  }

  // Of the step of that header.
  MK_DEVICE static bool one_piece(const abi::StepHeader& h, const Fields& f, const abi::Row& row) {
    return f.direct && tasks::one_piece(row.position, f.window, kConfig.piece_tokens) && !leaves_all(h);
  }

  // Whether one of the record's tiles has the row.
  MK_DEVICE static bool takes(const abi::Record& record, uint32_t r) {
    return kShares == 1 || (r - record.tile_begin) % kShares < record.tile_count;
  }

  // Attention writes and clears rows of one piece itself.
  MK_DEVICE static bool idles(const Worker& w, const abi::Record& record) {
    const Fields& f = fields_of<tasks::Combine<kConfig>>(record);
#pragma unroll 1
    for (const abi::StepHeader* h : {w.header, w.last}) {
#pragma unroll 1
      for (uint32_t r = 0; r < h->rows; ++r) {
        if (takes(record, r) && !one_piece(*h, f, h->row[r])) return false;
      }
    }
    return record.signal == abi::kNone;
  }

  // Clears the output of the step before.
  static __device__ __noinline__ void clear_last() {
    Storer s;
    s.load();
    Worker& w = s.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<tasks::Combine<kConfig>>(record);
    uint32_t tile = record.tile_begin;
    do {
      const uint32_t first = tile / kShares * kDim, columns = (kShares > 1 ? 1 : record.tile_count) * kDim;
      float* out = tasks::workspace<float>(w, f.output) + first;
#pragma unroll 1
      for (uint32_t r = tile % kShares; r < Given::rows(*w.last); r += kShares) {
        if (one_piece(*w.last, f, w.last->row[r])) continue;
#pragma unroll 1
        for (uint32_t i = w.warp_lane(); i < columns; i += 32) clear(before(w, out + r * kConfig.heads * kDim + i));
        if (!kConfig.gives || !gives(*w.last)) continue;
#pragma unroll 1
        for (uint32_t i = w.warp_lane() * 2; i < columns; i += 64) {
          store_word(before(w, given_pair(w, f, r, first + i)), kInvalid);
        }
      }
    } while (kShares > 1 && ++tile < record.tile_begin + record.tile_count);
    s.save();
  }

  template <bool kSeveral>
  MK_DEVICE static void row_head(Worker& w, const Fields& f, uint32_t r, uint32_t h, uint32_t turn) {
    const uint32_t position = w.header->row[r].position;
    const uint32_t low = tasks::first_seen(position, f.window) / kConfig.piece_tokens;
    const uint32_t high = position / kConfig.piece_tokens;
    if (f.direct && tasks::one_piece(position, f.window, kConfig.piece_tokens) && !(kSeveral && leaves_all(*w.header))) return;
    const bool together = high - low >= kConsumers;
    if (!together && turn % kConsumers != w.warp()) return;
    const uint64_t index = uint64_t(r) * kConfig.heads + h;
    const float* pieces = tasks::workspace<const float>(w, f.partials) + index * f.max_pieces * kStride;
    float* out = tasks::workspace<float>(w, f.output) + index * kDim;
    const uint32_t step = together ? kConsumers : 1;
    uint32_t j = together ? low + (w.warp() + kConsumers - low % kConsumers) % kConsumers : low;
    Sum sum;
#pragma unroll 1
    for (; j <= high; j += step * kAtOnce) add_pieces(w, pieces, j, step, high, sum);
    trace::end(w, abi::Role::kConsumer);
    if (together) {
      merge<kSeveral>(w, sum, out, f, r, h);
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
      const uint32_t d = i * 64 + w.warp_lane() * 2;
      if (d >= kDim) continue;
      const float low = __fdividef(sum.v[i].x, sum.total), high = __fdividef(sum.v[i].y, sum.total);
      if (kSeveral && gives_wide(*w.header)) {
        put_wide(w, f, r, h * kDim + d, low, high);
        continue;
      }
      publish(out + d, low);
      publish(out + d + 1, high);
      if (kSeveral && kConfig.gives && gives(*w.header)) store_word(given_pair(w, f, r, h * kDim + d), pack<kConfig.half>(low, high));
    }
  }

  // In wide steps: two columns alone; and how many these were.
  MK_DEVICE static bool gives_wide(const abi::StepHeader& h) { return kWideChunks > 0 && is_wide(h); }
  MK_DEVICE static void put_wide(const Worker& w, const Fields& f, uint32_t r, uint32_t column, float low, float high) {
    store_word(Given(w, f.output, kConfig.heads * kDim).pair(r, column), pack<kConfig.half>(low, high));
  }
  MK_DEVICE static void count_given(Worker& w, const abi::Record& record) {
    w.sync();
    uint32_t count = 0;  // (row, head)
    for (uint32_t i = 0; i < record.tile_count; ++i) {
      count += (w.header->rows + kShares - 1 - (record.tile_begin + i) % kShares) / kShares;
    }
    if (w.lane() == 0) Given::count(w, uint64_t(count) * kDim);
  }

  // Two columns of the output, packed for the product that reads it.
  MK_DEVICE static uint32_t* given_pair(const Worker& w, const Fields& f, uint32_t r, uint32_t column) {
    return GivenRows(w, f.output, kConfig.heads * kDim).pair(r, column);
  }

  MK_DEVICE static bool missing(float2 v) { return as_bits(v.x) == kInvalid || as_bits(v.y) == kInvalid; }

  // Pieces j, j + step, ... as many as come at once and are not beyond `high`.
  MK_DEVICE static void add_pieces(Worker& w, const float* pieces, uint32_t j, uint32_t step, uint32_t high, Sum& sum) {
    float2 value[kAtOnce][kPairs], ends[kAtOnce];  // ends: top and total
    pieces += uint64_t(j) * kStride + w.warp_lane() * 2;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      ends[i] = make_float2(0.0f, 0.0f);
#pragma unroll
      for (uint32_t k = 0; k < kPairs; ++k) value[i][k] = ends[i];
      if (j + i * step <= high) ask(w, pieces + i * step * kStride, ends[i], value[i]);
    }
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) missing |= lacks(ends[i], value[i]);
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (lacks(ends[i], value[i])) ask(w, pieces + i * step * kStride, ends[i], value[i]);
      }
      return false;
    }, abi::FaultKind::kValueBudget, j);
    trace::ready_now(w, abi::Role::kConsumer);
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (j + i * step <= high) sum.add(ends[i].x, ends[i].y, value[i]);
    }
  }

  // A piece, from this lane's first pair on.
  MK_DEVICE static void ask(const Worker& w, const float* piece, float2& ends, float2 (&value)[kPairs]) {
    ends = load_two(piece - w.warp_lane() * 2 + kDim);
#pragma unroll
    for (uint32_t k = 0; k < kPairs; ++k) {
      if (k * 64 + w.warp_lane() * 2 < kDim) value[k] = load_two(piece + k * 64);
    }
  }
  MK_DEVICE static bool lacks(const float2& ends, const float2 (&value)[kPairs]) {
    bool out = missing(ends);
#pragma unroll
    for (uint32_t k = 0; k < kPairs; ++k) out = out || missing(value[k]);
    return out;
  }

  template <bool kSeveral>
  MK_DEVICE static void merge(Worker& w, const Sum& sum, float* out, const Fields& f, uint32_t r, uint32_t h) {
    auto* memory = reinterpret_cast<float*>(block().scratch);  // [kConsumers][kStride]
    w.sync();                                                  // it is free
    float* own = memory + w.warp() * kStride;
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
      const uint32_t d = i * 64 + w.warp_lane() * 2;
      if (d < kDim) *reinterpret_cast<float2*>(own + d) = sum.v[i];
    }
    if (w.warp_lane() == 0) *reinterpret_cast<float2*>(own + kDim) = make_float2(sum.top, sum.total);
    w.sync();
#pragma unroll 1
    for (uint32_t d = w.lane(); d < kDim; d += w.lanes()) {
      float top = -kInfinity, total = 0.0f, v = 0.0f;
#pragma unroll 1
      for (uint32_t i = 0; i < kConsumers; ++i) top = max(top, memory[i * kStride + kDim]);
#pragma unroll 1
      for (uint32_t i = 0; i < kConsumers; ++i) {
        const float factor = exp2_fast((memory[i * kStride + kDim] - top) * kLog2e);
        total += factor * memory[i * kStride + kDim + 1];
        v += factor * memory[i * kStride + d];
      }
      const float own = __fdividef(v, total);
      if (kSeveral && gives_wide(*w.header)) {
        const float next = __shfl_down_sync(0xffffffffu, own, 1);
        if (d % 2 == 0) put_wide(w, f, r, h * kDim + d, own, next);
        continue;
      }
      publish(out + d, own);
      if (kSeveral && kConfig.gives && gives(*w.header)) {  // all lanes of a warp are here, as kDim is a multiple of 32
        const float next = __shfl_down_sync(0xffffffffu, own, 1);
        if (d % 2 == 0) store_word(given_pair(w, f, r, h * kDim + d), pack<kConfig.half>(own, next));
      }
    }
    w.sync();
  }
};

}  // namespace megakernel::dev
