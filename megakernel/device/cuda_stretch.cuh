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

  // Queries x keys of a run; of both what the lane has. queries(i): of a chunk.
  template <class Queries>
  MK_DEVICE static void score(Queries queries, const uint8_t* keys, float (&s)[4][4]) {
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
      const Quad q = queries(i);
      Quad b[4];
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) b[j] = Shape::octet(keys + j * (kDim * kOctet) + i * kTile);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) multiply<kHalf>(s[j], q.x, 0, q.y, 0, b[j].x, b[j].y);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) multiply<kHalf>(s[j], q.z, 0, q.w, 0, b[j].z, b[j].w);
    }
  }

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

  // Weights of a run x kTiles tiles of its values.
  template <uint32_t kTiles>
  MK_DEVICE static void multiply_values(const uint32_t (&p)[4], const uint8_t* values, float (&o)[kTiles][4]) {
    Quad b[kTiles];
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) b[j] = Shape::octet(values + j * kTile);
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) multiply<kHalf>(o[j], p[0], 0, p[1], 0, b[j].x, b[j].y);
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) multiply<kHalf>(o[j], p[2], 0, p[3], 0, b[j].z, b[j].w);
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

// An item in a stretch: each consumer takes a block of 8 q-rows through all runs, with the sums and in the order of a merge.
template <tasks::AttentionConfig kConfig>
struct StretchBlocks : PageScores<kConfig> {
  using Scores = PageScores<kConfig>;
  using Shape = PageShape<kConfig>;
  using Fields = abi::AttentionFields;
  using Shape::kDim, Shape::kGroup, Shape::kPage, Shape::kPiece, Shape::kKeyBytes, Shape::kChunks, Shape::kValueTiles;
  using Shape::kHalf, Shape::kQueryBytes, Shape::kFreshBytes, Shape::kFreshAt, Shape::kFreshAtOnce;
  using Shape::kEight, Shape::kOctet, Shape::kTile, Shape::kExponents;
  using typename Scores::Seen;
  using Scores::kTwoStages, Scores::kPageStages, Scores::kInQuad, Scores::kTilesAtOnce;
  using Scores::give_back_pages, Scores::keys_at, Scores::values_at, Scores::score, Scores::scale, Scores::weights;
  using Scores::one_piece, Scores::output_at, Scores::partial_at;
  static constexpr bool kKeeps = kChunks <= 4;  // queries of a block in registers

  MK_DEVICE static void take_stretch(Consumer& c, const Fields& f, const PageItems<kConfig, true>& item) {
    Worker& w = c.w;
    const Ring first = c.ring;
    await_pages(c, item);
    const FreshRows all = item.fresh();
#pragma unroll 1
    for (uint32_t done = 0;;) {
      const FreshRows fresh = {all.first + done, tasks::least(all.count - done, kFreshAtOnce)};
      c.take_input();
      trace::data(w, abi::Role::kConsumer);
      put_fresh(w, item, fresh, first);
      done += fresh.count;
      if (done == all.count) break;
      c.free_input();
    }
    if (all.count > 0) w.sync();  // the pages are whole
    if (w.warp() * kBlockRows < item.group_rows * kGroup) {
      attend_block(c, f, item, first);
    } else {
      c.free_input();
    }
    give_back_pages(c, item, first);
  }

  // All of them are there: so nobody is two phases behind, however early others give back.
  MK_DEVICE static void await_pages(Consumer& c, const Item& item) {
    const uint32_t count = (item.last_page - item.page + 1) * kPageStages;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i, c.ring.next()) c.w.wait_barrier(&block().full[c.ring.slot], c.ring.parity);
  }

  // Where the keys, or the values, of a page of the item begin as offsets inside a page say.
  MK_DEVICE static uint8_t* page_at(const Item& item, Ring first, uint32_t page, bool values) {
    first.skip((page - item.page) * kPageStages + (kTwoStages && values));
    return block().ring[first.slot] - (kTwoStages && values ? kKeyBytes : 0);
  }

  // What the loaders have lent of fresh rows, into the pages in the ring, by all lanes of the group.
  MK_DEVICE static void put_fresh(Worker& w, const Item& item, const FreshRows& fresh, const Ring& first) {
    constexpr uint32_t kKeyQuads = kDim / kInQuad;
    const uint32_t position = w.header->row[fresh.first].position;
#pragma unroll 1
    for (uint32_t n = w.lane(); n < fresh.count * 2 * kKeyQuads; n += w.lanes()) {
      const uint32_t r = n / (2 * kKeyQuads), i = n % (2 * kKeyQuads), token = (position + r) % kPage;
      const uint8_t* from = block().scratch + kFreshAt + r * kFreshBytes;
      const Quad bits = *reinterpret_cast<const Quad*>(from + i * 16);
      const bool value = i >= kKeyQuads;
      uint8_t* page = page_at(item, first, (position + r) / kPage, value);
      if (value) {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
        Shape::put_value(page, token, (i - kKeyQuads) * kInQuad, words);
      } else {
        *reinterpret_cast<Quad*>(page + Shape::key_at(token, i * kInQuad)) = bits;
      }
      if constexpr (kEight) {
        if (i < 2) {
          uint8_t* values = page_at(item, first, (position + r) / kPage, true);
          values[kExponents + i * kPage + token] = from[2 * kDim + i];
        }
      }
    }
    fence_shared_for_copies();  // before the stages are filled again
    __syncwarp();
  }

  // This warp's block against the whole piece, and published. All runs are gone through for the largest score, then once more
  // for each kTilesAtOnce tiles of values: so the sums of these are all that it keeps.
  MK_DEVICE static void attend_block(Consumer& c, const Fields& f, const Item& item, const Ring& first) {
    Worker& w = c.w;
    const uint32_t lane = w.warp_lane(), m = w.warp() * kBlockRows + lane / 4;
    const uint8_t* scratch = block().scratch + w.warp() * kQueryBytes + lane * 16;
    Quad q[kKeeps ? kChunks : 1];
    if constexpr (kKeeps) {
      uint32_t read = 0;
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) q[i] = *reinterpret_cast<const Quad*>(scratch + i * 512), read |= q[i].x;
      c.free_input(read);
    }
    const auto queries = [&](uint32_t i) { return kKeeps ? q[i] : *reinterpret_cast<const Quad*>(scratch + i * 512); };
    float top = -kInfinity, total = 0.0f;
#pragma unroll 1
    for (int32_t tile = -int32_t(kTilesAtOnce); tile < int32_t(kValueTiles); tile += kTilesAtOnce) {
      float sums[kTilesAtOnce][2] = {};
      uint32_t read = 0;
      total = 0.0f;
#pragma unroll 1
      for (uint32_t page = item.page; page <= item.last_page; ++page) {
        const uint8_t* values = page_at(item, first, page, true);
        const uint8_t* keys = kTwoStages ? page_at(item, first, page, false) : values;
#pragma unroll 1
        for (uint32_t run_start = page * kPage; run_start < (page + 1) * kPage; run_start += kRunTokens) {
          const Seen seen(w, f, item, m, run_start);
          if (!__any_sync(0xffffffffu, seen.low < tasks::least(seen.high, kRunTokens))) continue;
          uint32_t t = lane % 4;
          asm volatile("" : "+r"(t));  // what follows from it is made again in each run, not kept in registers
          float s[4][4] = {}, run_top = -kInfinity, run_total = 0.0f;
          score(queries, keys + keys_at(run_start) + lane * kOctet, s);
          const uint8_t* exponents = values + kExponents + run_start % kPage;
          scale(f, s, seen, t, exponents, run_top);
          if (tile < 0) {
            top = max(top, run_top);
            continue;
          }
          weights(s, t, exponents, run_top, run_total);
          const float factor = exp2_fast((run_top - top) * kLog2e);
          total += factor * run_total;
          uint32_t p[4];
#pragma unroll
          for (uint32_t j = 0; j < 4; ++j) p[j] = pack<kHalf>(s[j][0], s[j][1]);
          read |= p[0];
          add_run(p, values + kKeyBytes + values_at(run_start) + lane * kOctet + tile * kTile, factor, sums);
        }
      }
      if (!kKeeps && tile + kTilesAtOnce == kValueTiles) c.free_input(read);
      if (tile >= 0) publish_block(w, f, item, m, tile, sums, top, total);
    }
  }

  // Weights of a run x kTilesAtOnce tiles of its values, times the factor of its row.
  MK_DEVICE static void add_run(const uint32_t (&p)[4], const uint8_t* values, float factor, float (&sums)[kTilesAtOnce][2]) {
    float o[kTilesAtOnce][4] = {};
    Scores::multiply_values(p, values, o);
#pragma unroll
    for (uint32_t j = 0; j < kTilesAtOnce; ++j) {
      if (factor > 0.0f) sums[j][0] += factor * o[j][0], sums[j][1] += factor * o[j][1];
    }
  }

  // Columns from tile `tile` on of the lane's q-row, which is the m-th of the item.
  MK_DEVICE static void publish_block(Worker& w, const Fields& f, const Item& item, uint32_t m, uint32_t tile,
                                      const float (&sums)[kTilesAtOnce][2], float top, float total) {
    if (tile == 0) trace::end(w, abi::Role::kConsumer);
    if (m >= item.group_rows * kGroup) return;
    const uint32_t row = item.group_row + m / kGroup, position = w.header->row[row].position;
    const uint32_t head = item.head * kGroup + m % kGroup, t = w.warp_lane() % 4;
    if (position / kPiece < item.piece || tasks::first_seen(position, f.window) / kPiece > item.piece) return;
    const bool whole = one_piece(*w.header, f, position);
    float* partial = partial_at(w, f, row, head, item.piece);
    float* out = (whole ? output_at(w, f, row, head) : partial) + tile * 8 + t * 2;
#pragma unroll
    for (uint32_t n = 0; n < kTilesAtOnce; ++n) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) publish(out + n * 8 + j, whole ? __fdividef(sums[n][j], total) : sums[n][j]);
    }
    if (!whole && tile == 0 && t == 0) {
      publish(partial + kDim, top);
      publish(partial + kDim + 1, total);
    }
  }
};

}  // namespace megakernel::dev
