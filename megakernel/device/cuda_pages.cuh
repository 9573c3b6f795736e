// Queries against pages of keys and values, on the matrix cores (see tasks/attention.py for the formula and the items).
//
// A piece is at most 8 runs of 32 tokens: consumer w takes the w-th run, whatever the page holds, and the 8 results are
// merged in order. So a row's result depends on nothing but its own tokens. Queries and this step's keys and values come
// from the loaders; a row whose context is one piece goes straight to the output, others leave partials to `combine`.
#pragma once

#include "megakernel/device/cuda_items.cuh"

#include "megakernel/device/cuda_heads.cuh"

namespace megakernel::several {

// The same in a step in which rows of a slot are dealt in stretches.
template <class C>
__device__ __noinline__ void produce_stretches() {
  C::template produce_as<true>();
}
template <class C>
__device__ __noinline__ void load_stretches() {
  C::template load_as<true, true>();
}
template <class C>
__device__ __noinline__ bool next_stretch() {
  return C::next_stretch();
}
template <class C>
__device__ __noinline__ void bring_queries() {
  C::bring_queries();
}
template <class C>
__device__ __noinline__ void attend_stretch() {
  C::attend_pieces();
}
template <class C>
__device__ __noinline__ void consume_stretches() {
  C::begin_stretches();
  while (next_stretch<C>()) {
    bring_queries<C>();
    attend_stretch<C>();
  }
}
template <class C>
__device__ __noinline__ void clear_stretches() {
  C::template clear_as<true, true, true>();
}
// The same in another step of several rows, and of more of them.
template <class C>
__device__ __noinline__ void clear_rows() {
  C::template clear_as<true, false, false>();
}
template <class C>
__device__ __noinline__ void clear_many() {
  C::template clear_as<true, false, true>();
}

}  // namespace megakernel::several

#include "megakernel/device/cuda_stretch.cuh"

#include "megakernel/device/cuda_page_copies.cuh"

namespace megakernel::dev {

template <tasks::AttentionConfig kConfig>
struct Core<tasks::Attention<kConfig>> : PageCopies<kConfig> {
  using Task = tasks::Attention<kConfig>;
  using Shape = PageShape<kConfig>;
  using Fields = abi::AttentionFields;
  using Shape::kDim, Shape::kGroup, Shape::kHeads, Shape::kKvHeads, Shape::kPage, Shape::kPiece, Shape::kPiecePages;
  using Shape::kRuns, Shape::kKeyBytes, Shape::kUnitBytes, Shape::kChunks, Shape::kValueTiles, Shape::kPartial;
  using Shape::kHalf, Shape::kMergeAt, Shape::kQueryBytes, Shape::kFreshBytes, Shape::kStretchRows;
  using Shape::kEight, Shape::kElement, Shape::kOctet, Shape::kTile, Shape::kExponents;
  using Scores = PageScores<kConfig>;
  using typename Scores::Stage, typename Scores::Seen;
  using Scores::kTwoStages, Scores::kPageStages, Scores::kInQuad, Scores::kTilesAtOnce;
  using Scores::give_back_pages, Scores::keys_at, Scores::values_at, Scores::score, Scores::soften;
  using Scores::one_piece, Scores::output_at, Scores::partial_at;
  using Copies = PageCopies<kConfig>;
  using Copies::stored_in;
  static constexpr bool kProduces = true, kStores = false, kLoads = true, kNeedsHeader = true;
  static constexpr uint32_t kTopBytes = kBlockRows * kConsumers * sizeof(float2);
  static_assert(kConfig.kv_dtype != DType::kF32, "matrix cores take keys and values of 16 bits or less");
  static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is a multiple of 32");
  static_assert(kPage % kRunTokens == 0 && kPiece % kPage == 0 && kRuns <= kConsumers, "a run is in one page");
  static_assert(kUnitBytes - (kTwoStages ? kKeyBytes : 0) <= kStageBytes, "a page, or its values with the exponents, in a stage");
  static_assert(kPiecePages * kPageStages <= (kRooms ? kRowStages : kStages), "an item's pages are in the ring together");
  static_assert(kMergeAt + kTopBytes + kBlockRows * kConsumers * 32 <= least_below(),
                "one tile of values can be merged, whatever the rows of the step");

  // ---------------------------------------------------------------------------------------------- producer
  MK_DEVICE static void produce() {
    if constexpr (kStretchRows > 0) {
      if (Shape::stretches(block().header[own_state().step & 1])) return several::produce_stretches<Core>();
    }
    produce_groups();
  }
  static __device__ __noinline__ void produce_groups() { Copies::template produce_as<false>(); }

  // ---------------------------------------------------------------------------------------------- loaders
  static __device__ __noinline__ void load() { load_as<false>(); }
  MK_DEVICE static void load_several() {
    if constexpr (kStretchRows > 0) {
      const abi::StepHeader& h = block().header[own_state().step & 1];
      if (Shape::stretches(h)) return several::load_stretches<Core>();
      if (is_wide(h)) count_all();
    }
    several::load<Core>();
  }
  // A step without stretches stores nothing that anybody waits for.
  MK_DEVICE static void count_all() {
    const Loaded w;
    if (w.record->tile_begin != 0 || threadIdx.x != kLoaderWarp * 32) return;
    add_release(counter_of(w, packed_counter(w)), stored_in(w.header->rows));
  }

  // kSeveral: of several rows a worker has several items. So that one is loaded while what comes of the other is published,
  // the consumers give scratch back as soon as they have met, and get it for themselves once more at the end.
  template <bool kSeveral, bool kStretches = false>
  MK_DEVICE static void load_as() {
    Loader l;
    l.load();
    Worker& w = l.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<Task>(record);
    wait_counters(w, record);
    auto item = items_of<kConfig, kSeveral, kStretches>(*w.header, record, f);
    LoadedHeads loaded;
    // The consumers have scratch for stretches; the item before was none; what is this worker's to store is stored.
    bool any = false, lent = false, whole = false, stored = !kStretches;
#pragma unroll 1
    for (;;) {
      const bool more = item.next(), stretch = more && item.in_stretches();
      if constexpr (kStretches) {
        if (stretch) {
          item.pass_stretch();
          if (whole) lend(l);  // what is merged of it lies where a stretch has its queries: until all have published it
          if (!lent) lend(l);
        }
        lent = stretch, whole = more && !stretch;
        if (!stored) store_own(l, f, lent);
        stored = true;
      }
      if (!more) break;
      any = true;
      if (stretch) continue;
      const uint32_t rows = item.group_rows * kGroup;
      if (!kSeveral && loaded.missing(item, rows) == 0) continue;
#pragma unroll 1
      for (uint32_t base = 0; base < rows; base += kBlockRows) HeadLoader<kConfig, decltype(item)>{{}, l, f, item}.run(base);
    }
    if (kSeveral || !any) lend(l);
    l.save();
  }
  MK_DEVICE static void lend(Loader& l) {
    l.begin();
    l.end();
  }

  // Keys and values of rows that are dealt in stretches, those that are this worker's to store: into their pages, for the
  // producers of all workers. lent: the consumers have scratch, and so what they wait for; else see Loader::begin.
  MK_DEVICE static void store_own(Loader& l, const Fields& f, bool lent) {
    Worker& w = l.w;
    if (!lent) w.wait_barrier(&block().input_empty, l.parity ^ 1);
    if (Loader::index() == 0) store_volatile(&block().asking, 1);
    uint32_t done = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < w.record->tile_count; ++i) {
      const uint32_t tile = w.record->tile_begin + i;
      Item item;
      item.head = tile / f.splits;
      done += HeadLoader<kConfig, Item>{{}, l, f, item}.store_own(tile % f.splits);
    }
    __syncwarp();
    if (w.warp_lane() == 0 && done > 0) add_release(counter_of(w, packed_counter(w)), done);
    if (Loader::index() == 0) store_volatile(&block().asking, 0);
  }

  // ---------------------------------------------------------------------------------------------- consumers
  static __device__ __noinline__ void consume() { run<false>(); }
  MK_DEVICE static void consume_several() {
    if constexpr (kStretchRows > 0) {
      if (Shape::stretches(block().header[own_state().step & 1])) return several::consume_stretches<Core>();
    }
    several::consume<Core>();
  }

  template <bool kSeveral>
  MK_DEVICE static void run() {
    Consumer c;
    c.load();
    if constexpr (!kSeveral) c.ring.end = kStages;  // it is
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<Task>(record);
    auto item = items_of<kConfig, kSeveral, false>(*w.header, record, f);
    LoadedHeads loaded;
    uint32_t merges = 0;  // of what the loaders have lent
    bool taken = false;   // they have lent something
#pragma unroll 1
    while (item.next()) take_item<kSeveral>(c, f, item, loaded, merges, taken);
    if (kSeveral || !taken) c.take_input();
    end_record(c);
    c.save();
  }

  // All but the items of stretches.
  template <bool kSeveral>
  MK_DEVICE static void take_item(Consumer& c, const Fields& f, const Item& item, LoadedHeads& loaded, uint32_t& merges, bool& taken) {
    Worker& w = c.w;
    const uint32_t rows = item.group_rows * kGroup, run_start = item.piece * kPiece + w.warp() * kRunTokens;
    const uint32_t my_page = run_start / kPage;
    const bool mine = w.warp() < kRuns && my_page >= item.page && my_page <= item.last_page;
    const uint32_t missing = kSeveral ? 1 : loaded.missing(item, rows);
    const Ring first = c.ring;
    const Stage stage = take_pages(c, item, mine ? my_page : ~0u);  // all that can be done before the input is there
#pragma unroll 1
    for (uint32_t base = 0; base < rows; base += kBlockRows) {
      if ((missing | base) != 0) {  // of a block that is there `base` is 0
        if (!kSeveral && taken) c.free_input();
        c.take_input();
        if (!taken) trace::ready_now(w, abi::Role::kConsumer);
        taken = true;
        if (!kSeveral) merges = 0;
      }
      trace::data(w, abi::Role::kConsumer);
      if (mine) put_fresh(w, item, base, stage, run_start);
      attend<kSeveral>(c, f, item, base, stage, run_start, merges, first);
      ++merges;
    }
  }

  MK_DEVICE static void end_record(Consumer& c) {
    Worker& w = c.w;
    c.free_input();
    if (w.record->signal == abi::kNone) return;
    w.sync();
    if (w.lane() == 0) signal_counter(w, *w.record);
  }

  // ---------------------------------------------------------------------------------------------- consumers, with stretches
  MK_DEVICE static void begin_stretches() {
    Worker w;
    w.load();
    wait_counters(w, *w.record);
    const PageItems<kConfig, true> items(*w.header, *w.record, fields_of<Task>(*w.record));
    StretchWalk{items, items.slot, {}, false, false, false, false, false}.put();
  }

  // On to the next item of a stretch. False: there is none, and the record is done.
  MK_DEVICE static bool next_stretch() {
    Consumer c;
    c.load();
    Worker& w = c.w;
    StretchWalk walk = StretchWalk::own();
    LoadedHeads loaded;
    const Fields& f = fields_of<Task>(*w.record);
    PageItems<kConfig, true> item(*w.header, walk.item, walk.slot, f);
#pragma unroll 1
    while (item.next()) {
      if (!item.in_stretches()) {
        walk.give_scratch(c);
        walk.lent = {}, walk.whole = true;
        uint32_t merges = walk.merged;
        take_item<true>(c, f, item, loaded, merges, walk.taken);
        walk.merged = true;
        continue;
      }
      if (walk.whole) {
        c.take_input();
        c.free_input();
      }
      walk.whole = false, walk.taken = true;
      walk.item = item, walk.slot = item.slot;
      walk.brings = !walk.lent.known(item);
      if (!walk.held) {
        c.take_input();
      } else if (walk.brings) {
        w.sync();  // all are done with those before
      }
      walk.held = true;
      walk.put();
      c.save_met();
      return true;
    }
    walk.give_scratch(c);
    c.take_input();
    end_record(c);
    c.save_met();
    return false;
  }

  // Whether a warp that has not read all of the product before may still be a whole ring behind the item's pages, with all
  // that the ring may hold of both. In a wide step that product has more stages than are counted here.
  static constexpr uint32_t kShortest = kRooms ? kRowStages : kStages;  // ring
  static constexpr bool kMayLag = kWide || MEGAKERNEL_BEFORE_PAGES + kPiecePages * kPageStages > kShortest;

  // The stages of page `wanted` of the item, or none: nobody waits for a page that is not his. So he does not know that all
  // have given back what was in its stage a lap ago. Where one may not have, the pages are given back after the group has
  // met in the item, and else before.
  MK_DEVICE static Stage take_pages(Consumer& c, const Item& item, uint32_t wanted) {
    Stage stage{};
    const uint32_t count = (item.last_page - item.page + 1) * kPageStages;
    if (wanted != ~0u) {
      Ring at = c.ring;
      at.skip((wanted - item.page) * kPageStages);
      c.w.wait_barrier(&block().full[at.slot], at.parity);
      stage.keys = block().ring[at.slot];
      if constexpr (kTwoStages) {
        at.next();
        c.w.wait_barrier(&block().full[at.slot], at.parity);
        stage.second = block().ring[at.slot];
      }
    }
    c.ring.skip(count);
    return stage;
  }

  // Keys and values of this step that lie in this warp's run, into its page in the ring.
  MK_DEVICE static void put_fresh(Worker& w, const Item& item, uint32_t base, const Stage& stage, uint32_t run_start) {
    const typename Shape::Fresh fresh(base, item.group_rows);
#pragma unroll 1
    for (uint32_t r = fresh.first; r < fresh.end; ++r) {
      const uint32_t position = w.header->row[item.group_row + r].position, token = position % kPage;
      if (position - run_start >= kRunTokens) continue;
      const uint8_t* from = block().scratch + kQueryBytes + (r - fresh.first) * kFreshBytes;
#pragma unroll 1
      for (uint32_t i = w.warp_lane(); i < 2 * kDim / kInQuad; i += 32) {
        const Quad bits = *reinterpret_cast<const Quad*>(from + i * 16);
        if (i < kDim / kInQuad) {
          *reinterpret_cast<Quad*>(stage.keys + Shape::key_at(token, i * kInQuad)) = bits;
        } else {
          const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
          Shape::put_value(stage.values(), token, i * kInQuad - kDim, words);
        }
      }
      if constexpr (kEight) {
        if (const uint32_t lane = w.warp_lane(); lane < 2) {
          stage.values()[kExponents + lane * kPage + token] = from[2 * kDim + lane];
        }
      }
      fence_shared_for_copies();  // before the stage is filled again
    }
    __syncwarp();
  }

  // q-rows [base, base + 8) of the item against this warp's run; then all runs merged and published.
  template <bool kSeveral>
  MK_DEVICE static void attend(Consumer& c, const Fields& f, const Item& item, uint32_t base, const Stage& stage,
                               uint32_t run_start, uint32_t merges, Ring first) {
    Worker& w = c.w;
    const uint32_t lane = w.warp_lane();
    float top = -kInfinity, total = 0.0f;
    uint32_t p[4] = {};
    if (stage.keys) {
      float s[4][4] = {};
      const uint8_t* queries = block().scratch + lane * 16;
      score([&](uint32_t i) { return *reinterpret_cast<const Quad*>(queries + i * 512); }, Scores::no_queries,
            stage.keys + keys_at(run_start) + lane * kOctet, s);
      const uint8_t* exponents = stage.values() + kExponents + run_start % kPage;  // of the keys
      soften(f, s, Seen(w, f, item, base + lane / 4, run_start), lane % 4, exponents, top, total);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) p[j] = pack<kHalf>(s[j][0], s[j][1]);
    }
    merge<kSeveral>(c, f, item, base, top, total, p, stage, run_start, merges, first);
  }

  // Weights x values, and the results of the runs in order, through scratch: all columns at a time where they fit. Where
  // they fit twice, two places take turns and the group meets once an item; not in steps of several rows, whose items may
  // have different sizes.
  template <bool kSeveral>
  MK_DEVICE static void merge(Consumer& c, const Fields& f, const Item& item, uint32_t base, float top, float total,
                              const uint32_t (&p)[4], const Stage& stage, uint32_t run_start, uint32_t merges, Ring first) {
    Worker& w = c.w;
    const uint32_t g = w.warp_lane() / 4, t = w.warp_lane() % 4;
    const uint32_t rows = tasks::least(kBlockRows, item.group_rows * kGroup - base);
    const uint32_t room = Sums::below(Sums::room(*w.header)) - kMergeAt - kTopBytes, tile_bytes = rows * kConsumers * 32;
    const uint32_t all = kTopBytes + kValueTiles * tile_bytes;
    const bool turns = !kSeveral && 2 * all - kTopBytes <= room, whole = kValueTiles * tile_bytes <= room;
    const bool last = base + kBlockRows >= item.group_rows * kGroup;
    uint8_t* scratch = block().scratch + kMergeAt + (turns && merges % 2 ? all : 0);
    auto* tops = reinterpret_cast<float2*>(scratch);              // [q-row][consumer]: top, total
    float* sums = reinterpret_cast<float*>(scratch + kTopBytes);  // [consumer][q-row][column]
    const uint8_t* values = stage.values() + kKeyBytes + values_at(run_start) + w.warp_lane() * kOctet;
    if (!turns && merges > 0) w.sync();
    if (t == 0) tops[g * kConsumers + w.warp()] = make_float2(top, total);
    if (whole) {
      float* out = sums + (w.warp() * rows + g) * kDim + t * 2;
      if (stage.keys) {
#pragma unroll
        for (uint32_t n = 0; n < kValueTiles; n += kTilesAtOnce) weigh<kTilesAtOnce>(p, values + n * kTile, out + n * 8, g < rows);
      }
      if (last && !kMayLag) give_back_pages(c, item, first);
      w.sync();
      if constexpr (kSeveral) c.free_input();
      if (last && kMayLag) give_back_pages(c, item, first);
      publish_merged<kSeveral>(w, f, item, base, rows, tops, sums, 0, kDim);
      return;
    }
    const uint32_t tiles = room / tile_bytes;
#pragma unroll 1
    for (uint32_t tile = 0; tile < kValueTiles; tile += tiles) {
      const uint32_t count = tasks::least(tiles, kValueTiles - tile);
      float* out = sums + (w.warp() * rows + g) * count * 8 + t * 2;
      if (tile > 0) w.sync();
#pragma unroll 1
      for (uint32_t n = 0; n < count && stage.keys; ++n) weigh<1>(p, values + (tile + n) * kTile, out + n * 8, g < rows);
      const bool read = tile + count == kValueTiles && last;
      if (read && !kMayLag) give_back_pages(c, item, first);
      w.sync();
      if (kSeveral && tile == 0) c.free_input();
      if (read && kMayLag) give_back_pages(c, item, first);
      publish_merged<kSeveral>(w, f, item, base, rows, tops, sums, tile * 8, count * 8);
    }
  }

  // kTiles tiles of values, times the weights of this warp's tokens.
  template <uint32_t kTiles>
  MK_DEVICE static void weigh(const uint32_t (&p)[4], const uint8_t* values, float* out, bool wanted) {
    constexpr uint32_t kNone[4] = {};  // q-rows 8 to 15
    float o[kTiles][4] = {};
    Scores::multiply_values(p, kNone, values, o);
#pragma unroll
    for (uint32_t j = 0; j < kTiles; ++j) {
      if (wanted) *reinterpret_cast<float2*>(out + j * 8) = make_float2(o[j][0], o[j][1]);
    }
  }

  // Columns [begin, begin + count) of the block's q-rows, by as many warps for each as there are.
  template <bool kSeveral>
  MK_DEVICE static void publish_merged(Worker& w, const Fields& f, const Item& item, uint32_t base, uint32_t rows,
                                       const float2* tops, const float* sums, uint32_t begin, uint32_t count) {
    const uint32_t places = rows > 4 ? 8 : rows > 2 ? 4 : rows, m = w.warp() % places, part = w.warp() / places;
    trace::end(w, abi::Role::kConsumer);
    if (m >= rows) return;
    const uint32_t q = base + m, row = item.group_row + q / kGroup, position = w.header->row[row].position;
    const uint32_t head = item.head * kGroup + q % kGroup;
    if (position / kPiece < item.piece || tasks::first_seen(position, f.window) / kPiece > item.piece) return;
    float2 ends[kConsumers];
#pragma unroll
    for (uint32_t i = 0; i < kConsumers; i += 2) {
      const float4 two = *reinterpret_cast<const float4*>(tops + m * kConsumers + i);
      ends[i] = make_float2(two.x, two.y), ends[i + 1] = make_float2(two.z, two.w);
    }
    float top = -kInfinity, total = 0.0f, factor[kRuns];
#pragma unroll
    for (uint32_t i = 0; i < kRuns; ++i) top = max(top, ends[i].x);
#pragma unroll
    for (uint32_t i = 0; i < kRuns; ++i) {
      factor[i] = exp2_fast((ends[i].x - top) * kLog2e);
      total += factor[i] * ends[i].y;
    }
    const bool left = kSeveral && leaves_all(*w.header);
    const bool whole = f.output != abi::kNone && tasks::one_piece(position, f.window, kPiece) && !left;
    float* partial = partial_at(w, f, row, head, item.piece);
    float* out = whole ? output_at(w, f, row, head) : partial;
#pragma unroll 1
    for (uint32_t d = part * 32 + w.warp_lane(); d < count; d += kConsumers / places * 32) {
      float sum = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kRuns; ++i) {
        if (factor[i] > 0.0f) sum += factor[i] * sums[(i * rows + m) * count + d];
      }
      publish(out + begin + d, whole ? __fdividef(sum, total) : sum);
    }
    if (!whole && begin == 0 && part == 0 && w.warp_lane() == 0) {
      publish(partial + kDim, top);
      publish(partial + kDim + 1, total);
    }
  }

  // ---------------------------------------------------------------------------------------------- storer
  // Clears what the step before left here. kSeveral: of what is most likely a step of several rows.
  MK_DEVICE static void clear_last() { clear_step<false>(); }
  MK_DEVICE static void clear_last_several() { clear_step<true>(); }
  template <bool kSeveral>
  MK_DEVICE static void clear_step() {
    if constexpr (kStretchRows > 0) {
      const abi::StepHeader& last = block().header[own_state().step & 1 ^ 1];
      if (Shape::stretches(last)) return several::clear_stretches<Core>();
      if (last.rows > kNarrowRows) return several::clear_many<Core>();
    }
    if constexpr (kSeveral) {
      several::clear_rows<Core>();
    } else {
      clear_groups();
    }
  }
  static __device__ __noinline__ void clear_groups() { clear_as<false, false, false>(); }

  // kMany: in fewer instructions for many rows, but more of them for one.
  template <bool kSeveral, bool kStretches, bool kMany>
  MK_DEVICE static void clear_as() {
    Storer s;
    s.load();
    Worker& w = s.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<Task>(record);
    auto item = items_of<kConfig, kSeveral, kStretches>(*w.last, record, f);
#pragma unroll 1
    while (item.next()) {
      const uint32_t rows = item.group_rows * kGroup;
      if constexpr (kMany) {
#pragma unroll 1
        for (uint32_t base = 0; base < rows; base += 32) clear_rows(w, f, item, base, tasks::least(32, rows - base));
      } else {
#pragma unroll 1
        for (uint32_t m = 0; m < rows; ++m) {
          const uint32_t row = item.group_row + m / kGroup, head = item.head * kGroup + m % kGroup;
          const bool whole = one_piece(*w.last, f, w.last->row[row].position);
          float* at = whole ? output_at(w, f, row, head) : partial_at(w, f, row, head, item.piece);
#pragma unroll 1
          for (uint32_t i = w.warp_lane(); i < (whole ? kDim : kPartial); i += 32) clear(before(w, at) + i);
        }
      }
    }
    s.save();
  }

  // `count` q-rows from `base` on, of each of which one lane finds the place. A partial is aligned to 8 bytes, its ends, or its
  // first two columns, are what is left of it in words of 16.
  MK_DEVICE static void clear_rows(Worker& w, const Fields& f, const Item& item, uint32_t base, uint32_t count) {
    constexpr uint32_t kQuads = kDim / 4;
    const uint32_t lane = w.warp_lane(), m = base + tasks::least(lane, count - 1);
    const uint32_t row = item.group_row + m / kGroup, head = item.head * kGroup + m % kGroup;
    const bool whole = one_piece(*w.last, f, w.last->row[row].position);
    float* at = before(w, whole ? output_at(w, f, row, head) : partial_at(w, f, row, head, item.piece));
    const bool between = reinterpret_cast<uint64_t>(at) % 16 != 0;
    if (!whole && lane < count) {
      float* left = at + (between ? 0 : kDim);
      clear(left);
      clear(left + 1);
    }
    const auto quads = reinterpret_cast<uint64_t>(at + (between ? 2 : 0));
#pragma unroll 2
    for (uint32_t i = 0; i < count * kQuads; i += 32) {
      const uint32_t n = i + lane, of = tasks::least(n / kQuads, 31);
      const uint64_t to = __shfl_sync(0xffffffffu, quads, of) + n % kQuads * 16;
      if (n < count * kQuads) store_quad(reinterpret_cast<void*>(to), {kInvalid, kInvalid, kInvalid, kInvalid});
    }
  }
};

}  // namespace megakernel::dev
