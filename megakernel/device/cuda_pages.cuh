// Queries against pages of keys and values, on the matrix cores (see tasks/attention.py for the formula and the items).
//
// A page of one KV head fills a stage, or its keys one and its values the next. Its keys are the B operand of queries x keys (8 tokens by 32 elements, 16 bytes a
// lane), its values that of weights x values (32 tokens by 8 elements); the order of tokens inside is the one in which
// the first product leaves its result, so that the result is the A operand of the second as it stands.
//
// A piece is at most 8 runs of 32 tokens: consumer w takes the w-th run, whatever the page holds, and the 8 results are
// merged in order. So a row's result depends on nothing but its own tokens.
#pragma once

#include "megakernel/device/cuda_items.cuh"

namespace megakernel::dev {

constexpr uint32_t kRunTokens = 32;
constexpr float kLog2e = 1.4426950408889634f;

template <tasks::AttentionConfig kConfig>
struct Core<tasks::Attention<kConfig>> {
  using Task = tasks::Attention<kConfig>;
  using Fields = abi::AttentionFields;
  using Items = PageItems<kConfig>;
  static constexpr bool kProduces = true, kStores = false, kNeedsHeader = true;
  static constexpr bool kHalf = kConfig.kv_dtype == DType::kF16;
  static constexpr uint32_t kDim = kConfig.head_dim, kGroup = kConfig.group, kKvHeads = kConfig.kv_heads;
  static constexpr uint32_t kHeads = kKvHeads * kGroup, kColumns = (kHeads + 2 * kKvHeads) * kDim;
  static constexpr uint32_t kPage = kConfig.page_tokens, kPiece = kConfig.piece_tokens;
  static constexpr uint32_t kPiecePages = kPiece / kPage, kRuns = kPiece / kRunTokens;
  static constexpr uint32_t kKeyBytes = kDim * kPage * 2, kUnitBytes = 2 * kKeyBytes;
  static constexpr uint32_t kChunks = kDim / 32, kValueTiles = kDim / 8;
  static constexpr uint32_t kHalfRotary = kConfig.rotary_dim / 2;
  static constexpr uint32_t kPartial = kDim + 2;
  static constexpr bool kTwoStages = kUnitBytes > kStageBytes;  // of a page: keys, then values
  static constexpr uint32_t kPageStages = kTwoStages ? 2 : 1;
  static_assert(kConfig.kv_dtype != DType::kF32, "matrix cores take 16-bit keys and values");
  static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is a multiple of 32");
  static_assert(kPage % kRunTokens == 0 && kPiece % kPage == 0 && kRuns <= kConsumers, "a run is in one page");
  static_assert(kKeyBytes <= kStageBytes && kPiecePages * kPageStages <= kStages, "an item's pages are in the ring together");
  static_assert(kConfig.interleaved || kHalfRotary % 32 == 0, "the two halves of a rotation are in one lane");

  // A page in the ring; offsets from both are those inside the page.
  struct Stage {
    uint8_t *keys, *second;
    MK_DEVICE uint8_t* values() const { return kTwoStages ? second - kKeyBytes : keys; }
  };

  // Where element `dim` of token `t` of a page is.
  MK_DEVICE static uint32_t key_at(uint32_t t, uint32_t dim) {
    return t / 8 * (kDim * 16) + dim / 32 * 512 + (t % 8 * 4 + dim % 32 / 8) * 16 + dim % 8 * 2;
  }
  MK_DEVICE static uint32_t value_at(uint32_t t, uint32_t dim) {
    return kKeyBytes + t / 32 * (kDim * 64) + dim / 8 * 512 + (dim % 8 * 4 + t % 8 / 2) * 16 + t % 32 / 8 * 4 + t % 2 * 2;
  }

  // ---------------------------------------------------------------------------------------------- producer
  static __device__ __noinline__ void produce() {
    Producer p;
    p.load();
    Worker& w = p.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<Task>(record);
    fence_global_for_copies();
    const char* pool = reinterpret_cast<const char*>(w.args.kv + f.layer * w.args.kv_layer_stride);
    Items items(*w.header, record, f);
    while (items.next()) {
      const uint32_t pages = items.last_page - items.page + 1;
      const uint32_t* table = reinterpret_cast<const uint32_t*>(w.args.page_table) +
                              uint64_t(w.header->row[items.group_row].slot) * w.args.pages_per_slot + items.page;
      const uint32_t mine = w.warp_lane() < pages ? load_word(table + w.warp_lane()) : 0;
      for (uint32_t i = 0; i < pages; ++i) {
        const uint64_t page = __shfl_sync(0xffffffffu, mine, i);
        const char* unit = pool + (page * kKvHeads + items.head) * kUnitBytes;
        p.put(unit, kUnitBytes / kPageStages);
        if constexpr (kTwoStages) p.put(unit + kKeyBytes, kKeyBytes);
      }
    }
    p.save();
  }

  // ---------------------------------------------------------------------------------------------- one head at a position
  MK_DEVICE static const float* row_of(const Worker& w, const Fields& f, uint32_t row) {
    return tasks::workspace<const float>(w, f.qkv) + uint64_t(row) * kColumns;
  }

  // Lane 4 g + t holds elements [32 c + 8 t, + 8) of q-row `m`, c = 0 .. kChunks - 1: normed, rotated, rounded.
  MK_DEVICE static void load_query(Worker& w, const Fields& f, const Items& item, uint32_t m, Quad (&out)[kChunks]) {
    const uint32_t rows = item.group_rows * kGroup, t = w.warp_lane() % 4;
    const bool wanted = m < rows;
    const uint32_t row = item.group_row + (wanted ? m / kGroup : 0);
    const uint32_t position = w.header->row[row].position;
    Pending<kChunks> asked;
    asked.ask(row_of(w, f, row) + (item.head * kGroup + m % kGroup) * kDim + t * 8, 32, wanted);
    Eight x[kChunks];
    if constexpr (kHalfRotary > 0 && !kConfig.interleaved) {
      constexpr uint32_t kTurned = kHalfRotary / 32;
      Eight cos[kTurned], sin[kTurned];
#pragma unroll
      for (uint32_t i = 0; i < kTurned; ++i) {
        const uint64_t at = uint64_t(position) * kHalfRotary + i * 32 + t * 8;
        cos[i].load_fixed(tasks::weights<float>(w, f.cos) + at);
        sin[i].load_fixed(tasks::weights<float>(w, f.sin) + at);
      }
      asked.wait(w, x);
      norm_query(w, f, x);
#pragma unroll
      for (uint32_t i = 0; i < kTurned; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) rotate(x[i].v[j], x[i + kTurned].v[j], cos[i].v[j], sin[i].v[j]);
      }
    } else {
      asked.wait(w, x);
      norm_query(w, f, x);
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) rotate_pairs(w, f, position, i * 32 + t * 8, x[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) out[i] = x[i].template packed<kHalf>();
  }

  MK_DEVICE static void norm_query(Worker& w, const Fields& f, Eight (&x)[kChunks]) {
    if constexpr (kConfig.q_norm) {
      float s = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) s += x[i].squares();
      s += __shfl_xor_sync(0xffffffffu, s, 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      const float factor = rsqrtf(s / float(kDim) + f.eps);
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) {
        Eight gamma;
        gamma.load_fixed(tasks::weights<float>(w, f.q_gamma) + i * 32 + w.warp_lane() % 4 * 8);
        x[i].scale(factor, gamma);
      }
    }
  }

  // Interleaved pairs of the eight elements from `dim` on.
  MK_DEVICE static void rotate_pairs(Worker& w, const Fields& f, uint32_t position, uint32_t dim, Eight& x) {
    if constexpr (kHalfRotary > 0) {
      const uint64_t at = uint64_t(position) * kHalfRotary;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t i = dim / 2 + j;
        if (i < kHalfRotary) {
          rotate(x.v[2 * j], x.v[2 * j + 1], load_constant(tasks::weights<float>(w, f.cos) + at + i),
                 load_constant(tasks::weights<float>(w, f.sin) + at + i));
        }
      }
    }
  }

  // The key and the value of one row of this step: asked for early, put into their page late. Lane i < kDim / 8 holds
  // the i-th eight elements.
  struct Fresh {
    Pending<2> asked;
    Eight cos, sin;
    uint32_t page;  // of the pool

    MK_DEVICE static constexpr uint32_t turn() { return kHalfRotary / 8; }

    MK_DEVICE void ask(Worker& w, const Fields& f, const Items& item, uint32_t r) {
      const abi::Row& row = w.header->row[r];
      const uint32_t i = w.warp_lane(), position = row.position;
      const bool mine = i < kDim / 8;
      const float* k = row_of(w, f, r) + (kHeads + item.head) * kDim + (mine ? i * 8 : 0);
      asked.ask(k, kKvHeads * kDim, mine);
      page = load_word(reinterpret_cast<const uint32_t*>(w.args.page_table) + uint64_t(row.slot) * w.args.pages_per_slot +
                       position / kPage);
      cos.zero(), sin.zero();
      if constexpr (kHalfRotary > 0 && !kConfig.interleaved) {
        if (i < 2 * turn()) {
          const uint64_t at = uint64_t(position) * kHalfRotary + i % turn() * 8;
          cos.load_fixed(tasks::weights<float>(w, f.cos) + at);
          sin.load_fixed(tasks::weights<float>(w, f.sin) + at);
        }
      }
    }

    MK_DEVICE void put(Worker& w, const Fields& f, const Items& item, uint32_t r, const Stage& stage, char* pool) {
      const uint32_t i = w.warp_lane(), position = w.header->row[r].position, token = position % kPage;
      Eight kv[2];
      asked.wait(w, kv);
      if constexpr (kConfig.k_norm) {
        float s = kv[0].squares();
#pragma unroll
        for (int d = 16; d > 0; d /= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
        Eight gamma;
        gamma.zero();
        if (i < kDim / 8) gamma.load_fixed(tasks::weights<float>(w, f.k_gamma) + i * 8);
        kv[0].scale(rsqrtf(s / float(kDim) + f.eps), gamma);
      }
      turn_key(w, f, position, kv[0]);
      if (i < kDim / 8) {
        uint8_t* global = reinterpret_cast<uint8_t*>(pool + (uint64_t(page) * kKvHeads + item.head) * kUnitBytes);
        store_token(stage, global, token, i * 8, kv);
        fence_shared_for_copies();  // before the stage is filled again
      }
      __syncwarp();
    }

    MK_DEVICE static void store_token(const Stage& stage, uint8_t* global, uint32_t token, uint32_t dim, const Eight (&kv)[2]) {
      const Quad key = kv[0].template packed<kHalf>(), value = kv[1].template packed<kHalf>();
      *reinterpret_cast<Quad*>(stage.keys + key_at(token, dim)) = key;
      *reinterpret_cast<Quad*>(global + key_at(token, dim)) = key;
      const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) {
        const auto half = uint16_t(words[j / 2] >> (j % 2 * 16));
        *reinterpret_cast<uint16_t*>(stage.values() + value_at(token, dim + j)) = half;
        *reinterpret_cast<uint16_t*>(global + value_at(token, dim + j)) = half;
      }
    }

    MK_DEVICE void turn_key(Worker& w, const Fields& f, uint32_t position, Eight& x) {
      const uint32_t i = w.warp_lane();
      if constexpr (kConfig.interleaved) {
        if (i < kDim / 8) rotate_pairs(w, f, position, i * 8, x);
      } else if constexpr (kHalfRotary > 0) {
        const bool low = i < turn(), turned = i < 2 * turn();
        const uint32_t partner = turned ? (low ? i + turn() : i - turn()) : i;
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) {
          const float other = __shfl_sync(0xffffffffu, x.v[j], partner);
          if (turned) x.v[j] = low ? x.v[j] * cos.v[j] - other * sin.v[j] : x.v[j] * cos.v[j] + other * sin.v[j];
        }
      }
    }
  };

  // ---------------------------------------------------------------------------------------------- consumer
  static __device__ __noinline__ void consume() {
    Consumer c;
    c.load();
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<Task>(record);
    w.sync();  // scratch is free
    wait_counters(w, record);
    char* pool = reinterpret_cast<char*>(w.args.kv + f.layer * w.args.kv_layer_stride);
    Held held;
#pragma unroll 1
    for (uint32_t past = 0; past < 2; ++past) {  // this step's items; then what the step before wrote is cleared
      Items item(past ? *w.last : *w.header, record, f);
#pragma unroll 1
      while (item.next()) {
        if (past) {
          clear_item(w, f, item);
        } else {
          run_item(c, f, item, pool, held);
        }
      }
    }
    w.sync();  // scratch is free for the next record
    if (w.lane() == 0) signal_counter(w, record);
    c.save();
  }

  // The queries of the last item, when they are all of its q-rows, and which half of scratch merges next.
  struct Held {
    Quad q[kChunks] = {};
    uint32_t head = ~0u, group_row = ~0u, half = 0;
  };

  MK_DEVICE static void run_item(Consumer& c, const Fields& f, const Items& item, char* pool, Held& held) {
    Worker& w = c.w;
    const uint32_t run_start = item.piece * kPiece + w.warp() * kRunTokens, my_page = run_start / kPage;
    const bool mine = w.warp() < kRuns && my_page >= item.page && my_page <= item.last_page;
    // The rows of the group whose positions are in this run.
    const uint32_t from = w.header->row[item.group_row].position, rows = item.group_rows * kGroup;
    const uint32_t low = tasks::most(run_start, from), high = tasks::least(run_start + kRunTokens, from + item.group_rows);
    const uint32_t row = item.group_row + low - from, end = mine && low < high ? row + high - low : row;
    const bool known = held.head == item.head && held.group_row == item.group_row;
    const Ring first = c.ring;
    Stage stage{};
    Fresh fresh;
#pragma unroll 1
    for (uint32_t base = 0; base < rows; base += 8) {
      const uint32_t begin = base == 0 ? row : end;
      // One place for each of what may be asked for, however often it is done.
#pragma unroll 1
      for (uint32_t r = begin;; ++r) {
        if (r < end) fresh.ask(w, f, item, r);
        if (r == begin && mine && (base > 0 || !known)) load_query(w, f, item, base + w.warp_lane() / 4, held.q);
        if (r == begin && base == 0) stage = take_pages(c, item, mine ? my_page : ~0u);
        if (r >= end) break;
        fresh.put(w, f, item, r, stage, pool);
      }
      trace::ready(w, abi::Role::kConsumer);
      trace::data(w, abi::Role::kConsumer);
      attend(w, f, item, base, stage, run_start, held);
    }
    held.head = mine && rows <= 8 ? item.head : ~0u;
    held.group_row = item.group_row;
    __syncwarp();
    Ring back = first;
#pragma unroll 1
    for (uint32_t page = item.page; page <= item.last_page; ++page, back.next()) {
      c.give_back(back.slot);
      if constexpr (kTwoStages) back.next(), c.give_back(back.slot);
    }
  }

  // Waits for all pages of the item; the stages of `wanted`, or none.
  MK_DEVICE static Stage take_pages(Consumer& c, const Items& item, uint32_t wanted) {
    Stage stage{};
#pragma unroll 1
    for (uint32_t page = item.page; page <= item.last_page; ++page) {
      uint8_t* at = c.take();
      if (page == wanted) stage.keys = at;
      c.ring.next();
      if constexpr (kTwoStages) {
        at = c.take();
        if (page == wanted) stage.second = at;
        c.ring.next();
      }
    }
    return stage;
  }

  // Tokens [low, high) of the run that the q-row sees.
  struct Seen {
    uint32_t low, high;
    MK_DEVICE Seen(const Worker& w, const Fields& f, const Items& item, uint32_t m, uint32_t run_start) {
      low = high = 0;
      if (m >= item.group_rows * kGroup) return;
      const uint32_t position = w.header->row[item.group_row + m / kGroup].position;
      const uint32_t from = tasks::first_seen(position, f.window);
      low = from > run_start ? from - run_start : 0;
      high = position >= run_start ? position - run_start + 1 : 0;
    }
  };

  // q-rows [base, base + 8) of the item against this warp's run; then all runs merged and published.
  MK_DEVICE static void attend(Worker& w, const Fields& f, const Items& item, uint32_t base, const Stage& stage,
                               uint32_t run_start, Held& held) {
    const Quad (&q)[kChunks] = held.q;
    const uint32_t lane = w.warp_lane(), t = lane % 4;
    float top = -kInfinity, total = 0.0f;
    float o[kValueTiles][4] = {};
    if (stage.keys) {
      float s[4][4] = {};
      const uint8_t* keys = stage.keys + run_start % kPage / 8 * (kDim * 16) + lane * 16;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
#pragma unroll
        for (uint32_t i = 0; i < kChunks; ++i) {
          const Quad b = *reinterpret_cast<const Quad*>(keys + j * (kDim * 16) + i * 512);
          multiply<kHalf>(s[j], q[i].x, 0, q[i].y, 0, b.x, b.y);
          multiply<kHalf>(s[j], q[i].z, 0, q[i].w, 0, b.z, b.w);
        }
      }
      soften(f, s, Seen(w, f, item, base + lane / 4, run_start), t, top, total);
      uint32_t p[4];
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) p[j] = pack<kHalf>(s[j][0], s[j][1]);
      const uint8_t* values = stage.values() + kKeyBytes + run_start % kPage / 32 * (kDim * 64) + lane * 16;
#pragma unroll
      for (uint32_t n = 0; n < kValueTiles; ++n) {
        const Quad b = *reinterpret_cast<const Quad*>(values + n * 512);
        multiply<kHalf>(o[n], p[0], 0, p[1], 0, b.x, b.y);
        multiply<kHalf>(o[n], p[2], 0, p[3], 0, b.z, b.w);
      }
    }
    merge(w, f, item, base, top, total, o, held.half);
  }

  // Scores become weights.
  MK_DEVICE static void soften(const Fields& f, float (&s)[4][4], const Seen& seen, uint32_t t, float& top, float& total) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      float& v = s[i / 2][i % 2];
      v *= f.scale;
      if constexpr (kConfig.softcap) v = f.softcap * tanhf(v / f.softcap);
      const uint32_t token = i / 2 * 8 + t * 2 + i % 2;
      if (token < seen.low || token >= seen.high) v = -kInfinity;
      top = max(top, v);
    }
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float base = top == -kInfinity ? 0.0f : top;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      float& v = s[i / 2][i % 2];
      v = exp2_fast((v - base) * kLog2e);
      total += v;
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
  }

  // Results of the runs, in order. Rows go through scratch as many at a time as fit; where all fit in half of it, the
  // halves take turns and the group meets once instead of twice.
  MK_DEVICE static void merge(Worker& w, const Fields& f, const Items& item, uint32_t base, float top, float total,
                              const float (&o)[kValueTiles][4], uint32_t& half) {
    constexpr uint32_t kTopBytes = kConsumers * 8 * sizeof(float2), kRowBytes = kConsumers * kDim * 4;
    const uint32_t g = w.warp_lane() / 4, t = w.warp_lane() % 4;
    const uint32_t rows = tasks::least(8, item.group_rows * kGroup - base);
    const uint32_t space = Sums::below(w.header->rows), half_space = space / 2 / 16 * 16;
    const bool turns = kTopBytes + rows * kRowBytes <= half_space;
    const uint32_t room = turns ? rows : (space - kTopBytes) / kRowBytes;
    uint8_t* scratch = block().scratch + (turns && half ? half_space : 0);
    half ^= 1;
    auto* tops = reinterpret_cast<float2*>(scratch);  // [kConsumers][8]: top, total
    float* sums = reinterpret_cast<float*>(scratch + kTopBytes);
    if (!turns) w.sync();
    if (t == 0) tops[w.warp() * 8 + g] = make_float2(top, total);
#pragma unroll 1
    for (uint32_t first = 0; first < rows; first += room) {
      const uint32_t count = tasks::least(room, rows - first);
      if (g - first < count) {
        float* out = sums + (w.warp() * count + g - first) * kDim + t * 2;
#pragma unroll
        for (uint32_t n = 0; n < kValueTiles; ++n) *reinterpret_cast<float2*>(out + n * 8) = make_float2(o[n][0], o[n][1]);
      }
      w.sync();
#pragma unroll 1
      for (uint32_t i = w.lane(); i < count * kDim; i += w.lanes()) {
        publish_merged(w, f, item, base + first + i / kDim, tops + first + i / kDim, sums + i, count * kDim, i % kDim);
      }
      if (!turns) w.sync();
    }
  }

  MK_DEVICE static void publish_merged(Worker& w, const Fields& f, const Items& item, uint32_t m, const float2* tops,
                                       const float* sums, uint32_t stride, uint32_t dim) {
    const uint32_t row = item.group_row + m / kGroup, position = w.header->row[row].position;
    if (position / kPiece < item.piece || tasks::first_seen(position, f.window) / kPiece > item.piece) return;
    float top = -kInfinity, total = 0.0f, sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kRuns; ++i) top = max(top, tops[i * 8].x);
#pragma unroll 2
    for (uint32_t i = 0; i < kRuns; ++i) {
      const float2 part = tops[i * 8];
      if (part.x == -kInfinity) continue;
      const float factor = exp2_fast((part.x - top) * kLog2e);
      total += factor * part.y;
      sum += factor * sums[i * stride];
    }
    float* out = partial_at(w, f, row, item.head * kGroup + m % kGroup, item.piece);
    publish(out + dim, sum);
    if (dim == 0) {
      publish(out + kDim, top);
      publish(out + kDim + 1, total);
    }
  }

  MK_DEVICE static float* partial_at(const Worker& w, const Fields& f, uint32_t row, uint32_t head, uint32_t piece) {
    return tasks::workspace<float>(w, f.partials) + ((uint64_t(row) * kHeads + head) * f.max_pieces + piece) * kPartial;
  }

  MK_DEVICE static void clear_item(Worker& w, const Fields& f, const Items& item) {
#pragma unroll 1
    for (uint32_t m = w.warp(); m < item.group_rows * kGroup; m += kConsumers) {
      float* at = before(w, partial_at(w, f, item.group_row + m / kGroup, item.head * kGroup + m % kGroup, item.piece));
#pragma unroll 1
      for (uint32_t i = w.warp_lane(); i < kPartial; i += 32) clear(at + i);
    }
  }
};

}  // namespace megakernel::dev
