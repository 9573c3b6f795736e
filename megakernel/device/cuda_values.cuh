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

// Pieces of attention into its output (see tasks/combine.py). Up to 8 pieces are added in order. Of more there are 8 chains:
// chain c adds pieces c, c + 8, ...; then the chains in order. Either way a fixed order for each row, whoever adds: one warp,
// or each consumer a chain, where a worker has too few rows and heads for all warps.
template <tasks::CombineConfig kConfig>
struct Core<tasks::Combine<kConfig>> {
  using Fields = abi::CombineFields;
  static constexpr bool kProduces = false, kStores = false, kLoads = true, kNeedsHeader = false;
  static constexpr uint32_t kDim = kConfig.head_dim, kStride = kDim + 2, kShares = kConfig.shares;
  static constexpr uint32_t kPairs = (kDim + 63) / 64;  // pairs of elements of a piece in one lane
  static constexpr uint32_t kAtOnce = 4;                // pieces of a warp on their way
  static constexpr uint32_t kWideChunks = kGivesWide ? kConfig.gives_wide : 0;
  using Given = GivenInput<kWideChunks>;
  static constexpr uint32_t kChains = kConsumers, kRound = 32 / kChains;
  static constexpr uint32_t kFew = 2;  // rows and heads of a worker that are better added by all warps, one after the other
  static_assert((kShares & (kShares - 1)) == 0);

  // A sum of pieces relative to the largest of their tops: this lane's elements, 64 i + 2 lane and the next.
  struct Sum {
    float top = -kInfinity, total = 0.0f;
    float2 v[kPairs] = {};

    MK_DEVICE void add(float piece_top, float piece_total, const float2 (&piece)[kPairs]) {
      const float high = max(top, piece_top);
      const float mine = exp2_fast((top - high) * kLog2e), other = exp2_fast((piece_top - high) * kLog2e);
      total = fmaf(total, mine, other * piece_total);
#pragma unroll
      for (uint32_t i = 0; i < kPairs; ++i) add_piece(v[i], mine, other, piece[i]);
      top = high;
    }
  };

  // Said which product is rounded first: left alone, compilers differ from function to function.
  MK_DEVICE static void add_piece(float2& sum, float mine, float other, float2 piece) {
    sum.x = fmaf(sum.x, mine, other * piece.x);
    sum.y = fmaf(sum.y, mine, other * piece.y);
  }

  // What the consumers take one after the other: rows of the record's tiles. kRows: of a step that may have several.
  template <bool kRows>
  MK_DEVICE static uint32_t turns_of(const abi::StepHeader& header, const abi::Record& record) {
    constexpr uint32_t kEach = kRows ? kShares : 1;
    return (header.rows + kEach - 1) / kEach * record.tile_count;
  }

  struct Pieces {
    uint32_t low, high;
    MK_DEVICE Pieces(const Fields& f, uint32_t position) {
      low = tasks::first_seen(position, f.window) / kConfig.piece_tokens, high = position / kConfig.piece_tokens;
    }
    MK_DEVICE bool many() const { return high - low >= kChains; }
  };

  // Whether some row has many. Where there may be many rows, each lane looks at its own.
  template <bool kLanes>
  MK_DEVICE static bool some_many(const abi::StepHeader& header, const Fields& f) {
    bool found = false;
#pragma unroll 1
    for (uint32_t r = kLanes ? lane_of_warp() : 0; r < header.rows; r += kLanes ? 32 : 1) {
      if (!Pieces(f, header.row[r].position).many()) continue;
      if (!kLanes) return true;
      found = true;
    }
    return kLanes && __any_sync(0xffffffffu, found);
  }

  // In programs with wide steps each warp adds the many pieces of its own rows and heads, where there are enough of these.
  template <bool kSeveral>
  MK_DEVICE static bool alone(const abi::StepHeader& header, const abi::Record& record) {
    return kSeveral && kWide && turns_of<true>(header, record) > kFew;
  }
  // Else all add them, a chain each, for which they want scratch.
  template <bool kSeveral>
  MK_DEVICE static bool together(const abi::StepHeader& header, const abi::Record& record, const Fields& f) {
    return !alone<kSeveral>(header, record) && some_many<(kSeveral && kShares > 1)>(header, f);
  }

  MK_DEVICE static void load() { lend_scratch_to_all<false>(); }
  MK_DEVICE static void load_several() { lend_scratch_to_all<true>(); }
  template <bool kSeveral>
  MK_DEVICE static void lend_scratch_to_all() {
    const RoleState& state = own_state();
    const Fields& f = fields_of<tasks::Combine<kConfig>>(*state.record);
    if (together<kSeveral>(block().header[state.step & 1], *state.record, f)) lend_scratch();
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
    constexpr bool kRows = kSeveral || !kRooms, kDealt = kShares > 1 && kRows;
    const bool all = together<kSeveral>(*w.header, record, f);
    if (all) c.take_input();
    const uint32_t first = record.tile_begin, count = record.tile_count, turns = turns_of<kRows>(*w.header, record);
    const bool own = kRows && !all;  // each warp goes to its own at once
#pragma unroll 1
    for (uint32_t i = own ? w.warp() : 0; i < turns; i += own ? kConsumers : 1) {
      const uint32_t tile = first + i % count, r = kDealt ? i / count * kShares + tile % kShares : i / count;
      if (kDealt ? r >= w.header->rows : tile % kShares != 0) continue;
      row_head<kSeveral>(w, f, r, tile / kShares, all, i % kConsumers == w.warp());
    }
    if (all) c.free_input();
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

  // mine: this warp's, where one adds alone.
  template <bool kSeveral>
  MK_DEVICE static void row_head(Worker& w, const Fields& f, uint32_t r, uint32_t h, bool all, bool mine) {
    const uint32_t position = w.header->row[r].position;
    const Pieces of(f, position);
    if (f.direct && tasks::one_piece(position, f.window, kConfig.piece_tokens) && !(kSeveral && leaves_all(*w.header))) return;
    const uint32_t step = of.many() && all ? kChains : 1;  // 1: one adds alone
    if (step == 1 && !mine) return;
    const Output<kSeveral> out{w, f, r, h};
    if constexpr (kSeveral && kWide) {
      if (of.many() && !all) return add_chains(w, of, out);
    }
    const float* pieces = out.pieces();
    uint32_t j = of.low + (step > 1 ? (w.warp() + kChains - of.low % kChains) % kChains : 0);
    Sum sum;
#pragma unroll 1
    for (; j <= of.high; j += step * kAtOnce) add_pieces(w, pieces, j, step, of.high, sum);
    trace::end(w, abi::Role::kConsumer);
    if (in_register(step) > 1) return merge(w, sum, out);
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
      const uint32_t d = i * 64 + w.warp_lane() * 2;
      if (d < kDim) out.put(d, __fdividef(sum.v[i].x, sum.total), __fdividef(sum.v[i].y, sum.total));
    }
  }

  // Of a row and head.
  template <bool kSeveral>
  struct Output {
    const Worker& w;
    const Fields& f;
    uint32_t r, h;

    MK_DEVICE const float* pieces() const {
      return tasks::workspace<const float>(w, f.partials) + (uint64_t(r) * kConfig.heads + h) * f.max_pieces * kStride;
    }
    MK_DEVICE bool wide() const { return kSeveral && gives_wide(*w.header); }  // it gives the packed form alone
    MK_DEVICE void put(uint32_t d, float v) const {
      if (!wide()) publish(tasks::workspace<float>(w, f.output) + (uint64_t(r) * kConfig.heads + h) * kDim + d, v);
    }
    // Columns d and d + 1, packed.
    MK_DEVICE void give(uint32_t d, float low, float high) const {
      const uint32_t column = h * kDim + d;
      store_word(wide() ? Given(w, f.output, kConfig.heads * kDim).pair(r, column) : given_pair(w, f, r, column),
                 pack<kConfig.half>(low, high));
    }
    MK_DEVICE bool given() const { return wide() || (kSeveral && kConfig.gives && gives(*w.header)); }
    MK_DEVICE void put(uint32_t d, float low, float high) const {
      put(d, low);
      put(d + 1, high);
      if (given()) give(d, low, high);
    }
  };

  // Of wide steps; and how many columns these were.
  MK_DEVICE static bool gives_wide(const abi::StepHeader& h) { return kWideChunks > 0 && is_wide(h); }
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
    const uint32_t last = in_register(high);  // looked at again: predicates are few
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (j + i * step <= last) sum.add(ends[i].x, ends[i].y, value[i]);
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

  // Scratch is free: lent, or read by all before the group met last.
  template <class Out>
  MK_DEVICE static void merge(Worker& w, const Sum& sum, const Out& out) {
    auto* memory = reinterpret_cast<float*>(block().scratch);  // [kChains][kStride]
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
      for (uint32_t i = 0; i < kChains; ++i) top = max(top, memory[i * kStride + kDim]);
#pragma unroll 1
      for (uint32_t i = 0; i < kChains; ++i) {
        const float factor = exp2_fast((memory[i * kStride + kDim] - top) * kLog2e);
        total = fmaf(factor, memory[i * kStride + kDim + 1], total);
        v = fmaf(factor, memory[i * kStride + d], v);
      }
      const float own = __fdividef(v, total);
      out.put(d, own);
      if (out.given()) {  // all lanes of a warp are here, as kDim is a multiple of 32
        const float next = __shfl_down_sync(0xffffffffu, own, 1);
        if (d % 2 == 0) out.give(d, own, next);
      }
    }
    w.sync();
  }

  // A round of one warp: the next piece of each chain, two columns a lane.
  struct Round {
    float2 value[kChains];

    // From the piece of chain 0 on, those of [low, high].
    MK_DEVICE void ask(const float* pieces, uint32_t first, uint32_t low, uint32_t high, bool wanted) {
      if (kDim % 64 == 0 && first >= low && first + kChains - 1 <= high) {
#pragma unroll
        for (uint32_t i = 0; i < kChains; ++i) value[i] = load_two(pieces + i * kStride);
        return;
      }
#pragma unroll
      for (uint32_t i = 0; i < kChains; ++i) {
        value[i] = make_float2(-0.0f, -0.0f);
        if (wanted && first + i - low <= high - low) value[i] = load_two(pieces + i * kStride);
      }
    }
    MK_DEVICE void await(Worker& w, const float* pieces, uint32_t first) {
      const auto lacking = [&](uint32_t i) { return missing(value[i]); };
      await_all<kChains>(w, lacking, [&](uint32_t i) { value[i] = load_two(pieces + i * kStride); }, first);
    }
  };

  // What a lane of one warp has of kRound rounds: lane kChains i + c of chain c in round i.
  struct Factors {
    float top = -kInfinity, total = 0.0f;  // of the chain up to the round
    float mine, other;                     // of the chain so far, and of the piece

    // Of the next rounds. A piece that is not there changes no bit: factors 1 and 0, and -0 wherever it has a value.
    MK_DEVICE void next(bool there, float2 ends) {
      const uint32_t lane = lane_of_warp();
      const float last = __shfl_sync(0xffffffffu, top, (kRound - 1) * kChains + lane % kChains);
      float high = ends.x;
#pragma unroll
      for (uint32_t i = kChains; i < 32; i *= 2) {
        const float earlier = __shfl_sync(0xffffffffu, high, (lane + 32 - i) % 32);
        if (lane >= i) high = max(earlier, high);
      }
      high = max(last, high);
      const float before = __shfl_sync(0xffffffffu, high, (lane + 32 - kChains) % 32), so_far = lane < kChains ? last : before;
      mine = there ? exp2_fast((so_far - high) * kLog2e) : 1.0f;
      other = there ? exp2_fast((ends.x - high) * kLog2e) : 0.0f;
      top = high;
#pragma unroll
      for (uint32_t i = 0; i < kRound; ++i) {
        const float sum = __shfl_sync(0xffffffffu, total, (lane + 32 - kChains) % 32);
        if (lane / kChains == i) total = fmaf(sum, mine, other * ends.y);
      }
    }
    MK_DEVICE void add(float2 (&sum)[kChains], const Round& round, uint32_t lane) const {
#pragma unroll
      for (uint32_t i = 0; i < kChains; ++i) {
        add_piece(sum[i], __shfl_sync(0xffffffffu, mine, lane + i), __shfl_sync(0xffffffffu, other, lane + i), round.value[i]);
      }
    }
  };

  // All chains by one warp, 64 columns at a time. Two rounds are on their way, and the ends of the next four.
  template <class Out>
  MK_DEVICE static void add_chains(Worker& w, const Pieces& of, const Out& out) {
    const uint32_t lane = w.warp_lane(), low = of.low, high = of.high, begin = low / kChains * kChains;
    const float* pieces = out.pieces();
#pragma unroll 1
    for (uint32_t d = lane * 2; d < kPairs * 64; d += 64) {
      const bool wanted = kDim % 64 == 0 || d < kDim;
      const float *at = pieces + uint64_t(begin) * kStride + d, *ends_at = pieces + uint64_t(begin + lane) * kStride + kDim;
      const auto there = [&](uint32_t first) { return first + lane - low <= high - low; };
      float2 sum[kChains] = {}, ends;
      const auto ask_ends = [&](uint32_t first) {
        ends = make_float2(-kInfinity, -0.0f);
        if (there(first)) ends = load_two(ends_at);
      };
      Factors factors;
      Round even, odd;
      ask_ends(begin);
      even.ask(at, begin, low, high, wanted);
      odd.ask(at + kChains * kStride, begin + kChains, low, high, wanted);
#pragma unroll 1
      for (uint32_t piece = begin, from = 0; piece <= high; piece += 2 * kChains, from ^= 2 * kChains) {
        if (from == 0) {
          await_all<1>(w, [&](uint32_t) { return missing(ends); }, [&](uint32_t) { ends = load_two(ends_at); }, piece);
          factors.next(there(piece), ends);
          ends_at += 32 * kStride;
          ask_ends(piece + 32);
        }
        even.await(w, at, piece);
        trace::ready_now(w, abi::Role::kConsumer);
        factors.add(sum, even, from);
        even.ask(at + 2 * kChains * kStride, piece + 2 * kChains, low, high, wanted);
        odd.await(w, at + kChains * kStride, piece + kChains);
        factors.add(sum, odd, from + kChains);
        at += 2 * kChains * kStride;
        odd.ask(at + kChains * kStride, piece + 3 * kChains, low, high, wanted);
      }
      trace::end(w, abi::Role::kConsumer);
      const uint32_t last = (kRound - 1) * kChains + lane % kChains;
      const float chain_top = __shfl_sync(0xffffffffu, factors.top, last);
      const float chain_total = __shfl_sync(0xffffffffu, factors.total, last);
      float top = chain_top, total = 0.0f;
#pragma unroll
      for (uint32_t i = 1; i < kChains; i *= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, i));
      const float factor = exp2_fast((chain_top - top) * kLog2e);
      float2 all = {};
#pragma unroll
      for (uint32_t i = 0; i < kChains; ++i) {
        const float of_chain = __shfl_sync(0xffffffffu, factor, i);
        total = fmaf(of_chain, __shfl_sync(0xffffffffu, chain_total, i), total);
        all.x = fmaf(of_chain, sum[i].x, all.x);
        all.y = fmaf(of_chain, sum[i].y, all.y);
      }
      if (wanted) out.put(d, __fdividef(all.x, total), __fdividef(all.y, total));
    }
  }
};

}  // namespace megakernel::dev
