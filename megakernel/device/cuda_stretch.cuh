// What attention computes with a run of a page, whoever has it, and a block of q-rows against all runs of a piece: the way of
// a prompt's rows in wide steps. Part of cuda_pages.cuh.
#pragma once

namespace megakernel::dev {

constexpr float kLog2e = 1.4426950408889634f;

// Scores and weights of q-rows and the tokens of a run; where results go.
template <tasks::AttentionConfig kConfig>
struct PageScores : PageShape<kConfig> {
  using Shape = PageShape<kConfig>;
  using Fields = abi::AttentionFields;
  using Shape::kDim, Shape::kGroup, Shape::kHeads, Shape::kPage, Shape::kPiece, Shape::kKeyBytes, Shape::kUnitBytes;
  using Shape::kChunks, Shape::kValueTiles, Shape::kPartial, Shape::kHalf;
  using Shape::kEight, Shape::kElement, Shape::kOctet, Shape::kTile;
  static constexpr bool kTwoStages = kUnitBytes > kStageBytes;  // of a page: keys, then values
  static constexpr uint32_t kPageStages = kTwoStages ? 2 : 1;
  static constexpr uint32_t kInQuad = 16 / kElement;  // elements
  static constexpr uint32_t kTilesAtOnce = kValueTiles % 8 == 0 ? 8 : 4;  // of values, in registers

  // A page in the ring; offsets from both are those inside the page.
  struct Stage {
    uint8_t *keys, *second;
    MK_DEVICE uint8_t* values() const { return kTwoStages ? second - kKeyBytes : keys; }
  };

  MK_DEVICE static void give_back_pages(Consumer& c, const Item& item, Ring back) {
    __syncwarp();
    const uint32_t count = (item.last_page - item.page + 1) * kPageStages;
    if constexpr (kWarpArrivals == 1) {
      back.skip(c.w.warp_lane());
      if (c.w.warp_lane() < count) barrier_arrive(&block().empty[back.slot]);
    } else {
      for (uint32_t i = 0; i < count; ++i, back.next()) barrier_arrive_warp(&block().empty[back.slot]);
    }
  }

  // Tokens [low, high) of the run that the q-row sees.
  struct Seen {
    uint32_t low, high;
    MK_DEVICE Seen(const Worker& w, const Fields& f, const Item& item, uint32_t m, uint32_t run_start) {
      low = high = 0;
      if (m >= item.group_rows * kGroup) return;
      const uint32_t position = w.header->row[item.group_row + m / kGroup].position;
      const uint32_t from = tasks::first_seen(position, f.window);
      low = from > run_start ? from - run_start : 0;
      high = position >= run_start ? position - run_start + 1 : 0;
    }
  };

  // Of a page, where a run has its keys and its values.
  MK_DEVICE static uint32_t keys_at(uint32_t run_start) { return run_start % kPage / 8 * (kDim * kOctet); }
  MK_DEVICE static uint32_t values_at(uint32_t run_start) { return run_start % kPage / 32 * (kDim * 4 * kOctet); }

  // Queries x keys of a run; of both what the lane has. low(i), high(i): of a chunk, q-rows 0 to 7 and 8 to 15.
  template <class Low, class High>
  MK_DEVICE static void score(Low low, High high, const uint8_t* keys, float (&s)[4][4]) {
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
      const Quad q = low(i), r = high(i);
      Quad b[4];
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) b[j] = Shape::octet(keys + j * (kDim * kOctet) + i * kTile);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) multiply<kHalf>(s[j], q.x, r.x, q.y, r.y, b[j].x, b[j].y);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) multiply<kHalf>(s[j], q.z, r.z, q.w, r.w, b[j].z, b[j].w);
    }
  }
  MK_DEVICE static Quad no_queries(uint32_t) { return {0, 0, 0, 0}; }

  // Scores become weights.
  MK_DEVICE static void soften(const Fields& f, float (&s)[4][4], const Seen& seen, uint32_t t, const uint8_t* exponents,
                               float& top, float& total) {
    scale(f, s, seen, t, exponents, top);
    weights(s, t, exponents, top, total);
  }

  // Scores as they are compared, and the largest.
  MK_DEVICE static void scale(
      const Fields& f, float (&s)[4][4], const Seen& seen, uint32_t t, const uint8_t* exponents, float& top) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      float& v = s[i / 2][i % 2];
      if constexpr (kEight) v *= power(exponents[i / 2 * 8 + t * 2 + i % 2]);
      v *= f.scale;
      if constexpr (kConfig.softcap) v = f.softcap * tanhf(v / f.softcap);
      const uint32_t token = i / 2 * 8 + t * 2 + i % 2;
      if (token < seen.low || token >= seen.high) v = -kInfinity;
      top = max(top, v);
    }
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
  }

  MK_DEVICE static void weights(float (&s)[4][4], uint32_t t, const uint8_t* exponents, float top, float& total) {
    const float base = top == -kInfinity ? 0.0f : top;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      float& v = s[i / 2][i % 2];
      v = exp2_fast((v - base) * kLog2e);
      total += v;
      if constexpr (kEight) {  // the exponents of tokens that weigh nothing may be anything
        v = v == 0.0f ? 0.0f : v * power(exponents[kPage + i / 2 * 8 + t * 2 + i % 2]);
      }
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
  }

  // Weights of a run x kTiles tiles of its values; low, high: of q-rows 0 to 7 and 8 to 15.
  template <uint32_t kTiles>
  MK_DEVICE static void multiply_values(
      const uint32_t (&low)[4], const uint32_t (&high)[4], const uint8_t* values, float (&o)[kTiles][4]) {
    Quad b[kTiles];
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) b[j] = Shape::octet(values + j * kTile);
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) multiply<kHalf>(o[j], low[0], high[0], low[1], high[1], b[j].x, b[j].y);
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) multiply<kHalf>(o[j], low[2], high[2], low[3], high[3], b[j].z, b[j].w);
  }

  // Of the step of that header. What is given packed to the next product is `combine`'s to give.
  MK_DEVICE static bool one_piece(const abi::StepHeader& h, const Fields& f, uint32_t position) {
    return f.output != abi::kNone && tasks::one_piece(position, f.window, kPiece) && !leaves_all(h);
  }

  MK_DEVICE static float* output_at(const Worker& w, const Fields& f, uint32_t row, uint32_t head) {
    return tasks::workspace<float>(w, f.output) + (uint64_t(row) * kHeads + head) * kDim;
  }
  MK_DEVICE static float* partial_at(const Worker& w, const Fields& f, uint32_t row, uint32_t head, uint32_t piece) {
    return tasks::workspace<float>(w, f.partials) + ((uint64_t(row) * kHeads + head) * f.max_pieces + piece) * kPartial;
  }
};

// Where a consumer is in a record of a step with stretches: in shared memory, for what it calls needs all registers.
struct StretchWalk {
  Item item;
  Stretches slot;
  LentQueries lent;
  bool held, taken, whole;  // scratch is held; the loaders have lent something; the item before was no stretch
  bool merged, brings;      // something was merged; the queries are to be brought

  MK_DEVICE static StretchWalk& own() { return *reinterpret_cast<StretchWalk*>(block().walk[threadIdx.x / 32]); }
  MK_DEVICE void put() const {
    __syncwarp();
    if (lane_of_warp() == 0) own() = *this;
    __syncwarp();
  }
  MK_DEVICE void give_scratch(Consumer& c) {
    if (held) c.free_input();
    held = false;
  }
};
static_assert(!kWide || sizeof(StretchWalk) <= kWalkWords * 4);

// An item in a stretch: a consumer takes a pair of blocks of 8 q-rows through all runs, or with others that share its columns,
// with the sums and in the order of a merge.
template <tasks::AttentionConfig kConfig>
struct StretchBlocks : PageScores<kConfig> {
  using Scores = PageScores<kConfig>;
  using Shape = PageShape<kConfig>;
  using Fields = abi::AttentionFields;
  using Shape::kDim, Shape::kGroup, Shape::kPage, Shape::kPiece, Shape::kKeyBytes, Shape::kChunks, Shape::kValueTiles;
  using Shape::kHalf, Shape::kQueryBytes, Shape::kPairRows, Shape::kPairBytes, Shape::kSharers;
  using Shape::kEight, Shape::kOctet, Shape::kTile, Shape::kExponents;
  using Scores::kTwoStages, Scores::kPageStages;
  using Scores::give_back_pages, Scores::keys_at, Scores::values_at, Scores::score, Scores::multiply_values;
  using Scores::one_piece, Scores::output_at, Scores::partial_at;
  static constexpr bool kKeeps = kChunks <= 2;  // queries of a pair in registers
  static constexpr uint32_t kTiles = kValueTiles / kSharers;  // of values, of a consumer
  static constexpr uint32_t kAtOnce = kTiles % 4 == 0 ? 4 : kTiles % 3 == 0 ? 3 : kTiles;
  static_assert(kTiles * kSharers == kValueTiles && kTiles <= 8);

  // The consumers bring the queries, if scratch does not have them.
  MK_DEVICE static void bring_queries() {
    LoadingConsumer own;
    own.w.load();
    const StretchWalk& walk = StretchWalk::own();
    if (!walk.brings) return;
    const Fields& f = fields_of<tasks::Attention<kConfig>>(*own.w.record);
    HeadLoader<kConfig, Item, true, LoadingConsumer>{{}, own, f, walk.item}.put_queries();
    own.w.sync();
    trace::data(own.w, abi::Role::kConsumer);
    own.w.save();
  }

  // All of them are there: so nobody is two phases behind, however early others give back. Each lane looks for one.
  MK_DEVICE static void await_pages(Worker& w, const Item& item, Ring at) {
    const uint32_t count = (item.last_page - item.page + 1) * kPageStages;
    if constexpr (kChaos) w.random = random_delay(w.random);
    at.skip(tasks::least(w.warp_lane(), count - 1));
    const uint32_t address = shared_address(&block().full[at.slot]);
#pragma unroll 1
    while (!__all_sync(0xffffffffu, barrier_try(address, at.parity))) {
      if (*static_cast<volatile uint32_t*>(&block().stop) != 0) end_thread();
    }
    __syncwarp();
  }

  // The q-rows of this consumer's pair.
  struct Pair {
    uint32_t first, count;

    MK_DEVICE Pair(const Worker& w, const Item& item)
        : first(w.warp() / kSharers * kPairRows), count(tasks::least(kPairRows, item.group_rows * kGroup - first)) {}
    MK_DEVICE uint32_t row(const Item& item, uint32_t i) const { return item.group_row + (first + i) / kGroup; }
    MK_DEVICE uint32_t position(const Worker& w, const Item& item, uint32_t i) const {
      return w.header->row[row(item, i)].position;
    }
  };

  // A run as a lane sees it: where it is, and its own two q-rows.
  struct Run {
    const uint8_t *keys, *values;
    uint32_t start;
    bool whole;  // all see all of it
  };

  // This warp's pair against all pieces that the tile has of the stretch, one after the other, and published; and the pages
  // given back. Of a piece all runs are gone through for the largest score, then once more for the sums. Where the warp is
  // comes from shared memory for each piece, so that nothing lives while it computes.
  MK_DEVICE static void attend_pieces() {
    bool more;
#pragma unroll 1
    do {
      Consumer c;
      c.load();
      Worker& w = c.w;
      const StretchWalk& walk = StretchWalk::own();
      const Item item = walk.item;
      const Ring first = c.ring;
      await_pages(w, item, first);
      if (w.warp() / kSharers * kPairRows < item.group_rows * kGroup) {
        attend_runs(w, fields_of<tasks::Attention<kConfig>>(*w.record), item, first.slot);
      }
      give_back_pages(c, item, first);
      c.ring.skip((item.last_page - item.page + 1) * kPageStages);
      c.save_own();
      more = next_piece(w);
    } while (more);
  }
  MK_DEVICE static bool next_piece(const Worker& w) {
    StretchWalk& walk = StretchWalk::own();
    PageItems<kConfig, true> item(*w.header, walk.item, walk.slot, fields_of<tasks::Attention<kConfig>>(*w.record));
    if (item.piece + 1 >= item.piece_end) return false;
    ++item.piece;
    item.set_pages();
    __syncwarp();
    if (w.warp_lane() == 0) walk.item.piece = item.piece, walk.item.page = item.page, walk.item.last_page = item.last_page;
    __syncwarp();
    return true;
  }

  MK_DEVICE static void attend_runs(Worker& w, const Fields& f, const Item& item, uint32_t first_slot) {
    const uint32_t lane = w.warp_lane();
    const Pair pair(w, item);
    const uint8_t* scratch = block().scratch + w.warp() / kSharers * kPairBytes + lane * 16;
    Quad q[kKeeps ? 2 * kChunks : 1];
    if constexpr (kKeeps) {
#pragma unroll
      for (uint32_t i = 0; i < 2 * kChunks; ++i) q[i] = *reinterpret_cast<const Quad*>(scratch + i * 512);
    }
    const auto query = [&](uint32_t i) {
      if constexpr (kKeeps) {
        return q[i];
      } else {
        return *reinterpret_cast<const Quad*>(scratch + i * 512);
      }
    };
    const auto high = [&](uint32_t i) { return query(kChunks + i); };
    // Of the lane's q-rows; looked up where some see a part of a run alone, not kept in registers.
    const auto position = [&](uint32_t h) {
      const Pair own(w, item);
      return own.position(w, item, tasks::least(h * kBlockRows + w.warp_lane() / 4, own.count - 1));
    };
    // All see the tokens in [whole, whole_end).
    const uint32_t low_position = pair.position(w, item, 0), high_position = pair.position(w, item, pair.count - 1);
    const uint32_t whole = tasks::first_seen(high_position, f.window), whole_end = low_position + 1;
    const uint32_t begin = tasks::most(item.page * kPage, tasks::first_seen(low_position, f.window) / kRunTokens * kRunTokens);
    const uint32_t end = tasks::least((item.last_page + 1) * kPage, high_position + 1);
    const uint32_t slot_of_0 = first_slot - item.page * kPageStages;
    const auto run_at = [&](uint32_t start) {
      uint32_t slot = slot_of_0 + start / kPage * kPageStages;
      if (slot >= kStages) slot -= kStages;
      const uint8_t* keys = block().ring[slot];
      const uint8_t* values = keys;
      if constexpr (kTwoStages) values = block().ring[slot + 1 == kStages ? 0 : slot + 1] - kKeyBytes;
      return Run{keys, values, start, start >= whole && start + kRunTokens <= whole_end};
    };
    const auto score_run = [&](const Run& run, float (&s)[4][4]) {
      score(query, high, run.keys + keys_at(run.start) + lane * kOctet, s);
    };
    float top[2] = {-kInfinity, -kInfinity}, total[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (uint32_t start = begin; start < end; start += kRunTokens) {
      const Run run = run_at(start);
      float s[4][4] = {};
      score_run(run, s);
      scale(f, s, run, position, lane % 4, top);
    }
    over_four(top);
    float sums[kTiles][4] = {};
#pragma unroll 1
    for (uint32_t start = begin; start < end; start += kRunTokens) {
      float s[4][4] = {}, run_top[2] = {-kInfinity, -kInfinity};
      const Run run = run_at(start);
      score_run(run, s);
      scale(f, s, run, position, lane % 4, run_top);
      over_four(run_top);
      float factor[2];
      uint32_t p[2][4];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        factor[h] = exp2_fast((run_top[h] - top[h]) * kLog2e);
        total[h] += factor[h] * weights(s, h, run, lane % 4, run_top[h]);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) p[h][j] = pack<kHalf>(s[j][2 * h], s[j][2 * h + 1]);
      }
      add_run(p, run.values + kKeyBytes + values_at(start) + lane * kOctet + w.warp() % kSharers * (kTiles * kTile), factor, sums);
    }
    trace::end(w, abi::Role::kConsumer);
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) publish_row(w, f, item, Pair(w, item), h, sums, top[h], total[h]);
  }

  MK_DEVICE static const uint8_t* exponents(const Run& run, uint32_t t) {
    return run.values + kExponents + run.start % kPage + t * 2;
  }

  // Scores as they are compared, and the largest that the lane has.
  template <class Position>
  MK_DEVICE static void scale(
      const Fields& f, float (&s)[4][4], const Run& run, Position position, uint32_t t, float (&top)[2]) {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        float& v = s[j][i];
        if constexpr (kEight) v *= power(exponents(run, t)[j * 8 + i % 2]);
        v *= f.scale;
        if constexpr (kConfig.softcap) v = f.softcap * tanhf(v / f.softcap);
      }
    }
    if (!run.whole) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t last = position(h), first = tasks::first_seen(last, f.window);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
          const uint32_t token = run.start + i / 2 * 8 + t * 2 + i % 2;
          if (token < first || token > last) s[i / 2][2 * h + i % 2] = -kInfinity;
        }
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], s[j][i]);
    }
  }

  // The largest of the four lanes of a q-row.
  MK_DEVICE static void over_four(float (&top)[2]) {
#pragma unroll
    for (uint32_t d = 1; d < 4; d *= 2) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], d));
    }
  }

  // Scores of one of the two q-rows become weights; their sum. As PageScores::weights.
  MK_DEVICE static float weights(float (&s)[4][4], uint32_t h, const Run& run, uint32_t t, float top) {
    const float base = top == -kInfinity ? 0.0f : top;
    float total = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      float& v = s[i / 2][2 * h + i % 2];
      v = exp2_fast((v - base) * kLog2e);
      total += v;
      if constexpr (kEight) v = v == 0.0f ? 0.0f : v * power(exponents(run, t)[kPage + i / 2 * 8 + i % 2]);
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    return total;
  }

  // Weights of a run x the consumer's tiles of its values, times the factor of each q-row.
  MK_DEVICE static void add_run(const uint32_t (&p)[2][4], const uint8_t* values, const float (&factor)[2], float (&sums)[kTiles][4]) {
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; tile += kAtOnce) {
      float o[kAtOnce][4] = {};
      multiply_values(p[0], p[1], values + tile * kTile, o);
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          if (factor[i / 2] > 0.0f) sums[tile + j][i] += factor[i / 2] * o[j][i];
        }
      }
    }
  }

  // The consumer's columns of one of the lane's q-rows.
  MK_DEVICE static void publish_row(Worker& w, const Fields& f, const Item& item, const Pair& pair, uint32_t h,
                                    const float (&sums)[kTiles][4], float top, float total) {
    const uint32_t i = h * kBlockRows + w.warp_lane() / 4, t = w.warp_lane() % 4, sharer = w.warp() % kSharers;
    if (i >= pair.count) return;
    const uint32_t row = pair.row(item, i), position = pair.position(w, item, i);
    const uint32_t head = item.head * kGroup + (pair.first + i) % kGroup;
    if (position / kPiece < item.piece || tasks::first_seen(position, f.window) / kPiece > item.piece) return;
    const bool whole = one_piece(*w.header, f, position);
    float* partial = partial_at(w, f, row, head, item.piece);
    float* out = (whole ? output_at(w, f, row, head) : partial) + sharer * kTiles * 8 + t * 2;
#pragma unroll
    for (uint32_t n = 0; n < kTiles; ++n) {
      const float x = sums[n][2 * h], y = sums[n][2 * h + 1];
      publish_two(out + n * 8, whole ? __fdividef(x, total) : x, whole ? __fdividef(y, total) : y);
    }
    if (!whole && sharer == 0 && t == 0) {
      publish_two(partial + kDim, top, total);
    }
  }
};

}  // namespace megakernel::dev
