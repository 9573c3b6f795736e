// What the producer does for attention: pages of keys and values, each as one stage or two. Part of cuda_pages.cuh.
//
// Pages hold earlier steps' tokens, so they are copied ahead like weights; but those with rows of this step that are dealt in
// stretches wait for the loaders of all workers, which store the keys and values of these rows first.
#pragma once

namespace megakernel::dev {

template <tasks::AttentionConfig kConfig>
struct PageCopies : StretchBlocks<kConfig> {
  using Shape = PageShape<kConfig>;
  using Fields = abi::AttentionFields;
  using Shape::kKvHeads, Shape::kKeyBytes, Shape::kUnitBytes;
  using PageScores<kConfig>::kTwoStages;

  template <bool kStretches>
  MK_DEVICE static void produce_as() {
    Producer p;
    p.load();
    Worker& w = p.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<tasks::Attention<kConfig>>(record);
    const char* pool = reinterpret_cast<const char*>(w.args.kv + f.layer * w.args.kv_layer_stride);
    KnownPages& known = block().known_pages;
    if (known.step == w.step && known.tile == record.tile_begin && known.window == f.window) {
      bool there = !kStretches;
#pragma unroll 1
      for (uint32_t i = 0; i < known.count; ++i) {
        if (!there && known.fresh >> i & 1) await_stored(p), there = true;
        put_page(p, pool, known.page[i], known.head);
      }
    } else {
      fence_global_for_copies();
      find_pages(p, record, known, pool, items_of<kConfig, true, kStretches>(*w.header, record, f));
    }
    trace::passed(w, known.count > 0);
    p.save();
  }

  // Until the loaders of all workers have stored the keys and values of this step's rows that are in stretches. Of what it
  // waits for its own worker has done its part before it wants a page of this record.
  MK_DEVICE static void await_stored(Producer& p) {
    const uint32_t counter = packed_counter(p.w);
    const uint64_t target = stored_in(p.w.header->wide_rows), *at = counter_of(p.w, counter);
    Patience patience;
#pragma unroll 1
    for (;;) {
      const uint64_t value = load_acquire(at);
      if (value >= target) break;
      if (!patience.over()) continue;
      drain_copies();
      give_up(abi::FaultKind::kWaitBudget, counter, value, target);
    }
    fence_global_for_copies();
  }
  // What the counter of a node has when the keys and values of so many rows are stored.
  MK_DEVICE static uint64_t stored_in(uint64_t rows) { return rows * (2 * kKvHeads); }

  MK_DEVICE static void put_page(Producer& p, const char* pool, uint32_t page, uint32_t head) {
    const char* unit = pool + (uint64_t(page) * kKvHeads + head) * kUnitBytes;
    p.put(unit, kTwoStages ? kKeyBytes : kUnitBytes);
    if constexpr (kTwoStages) p.put(unit + kKeyBytes, kUnitBytes - kKeyBytes);
  }

  // The pages of all items, which become known, unless there are too many or they are of several heads.
  template <class Items>
  MK_DEVICE static void find_pages(Producer& p, const abi::Record& record, KnownPages& known, const char* pool, Items items) {
    Worker& w = p.w;
    const uint32_t head = items.head;
    uint32_t count = 0, fresh = 0;
    bool there = false;
    __syncwarp();  // all have seen what was known
#pragma unroll 1
    while (items.next()) {
      const uint32_t pages = items.last_page - items.page + 1;
      const uint32_t* table = reinterpret_cast<const uint32_t*>(w.args.page_table) +
                              uint64_t(w.header->row[items.group_row].slot) * w.args.pages_per_slot + items.page;
      const uint32_t mine = w.warp_lane() < pages ? load_word(table + w.warp_lane()) : 0;
      if (w.warp_lane() < pages && count + pages <= KnownPages::kMost) known.page[count + w.warp_lane()] = mine;
      const uint32_t fresh_page = items.fresh_page();
#pragma unroll 1
      for (uint32_t i = 0; i < pages; ++i, ++count) {
        if (items.page + i >= fresh_page) {
          if (!there) await_stored(p);
          there = true;
          if (count < KnownPages::kMost) fresh |= 1u << count;
        }
        put_page(p, pool, __shfl_sync(0xffffffffu, mine, i), items.head);
      }
    }
    known.step = record.tile_count == 1 && count <= KnownPages::kMost ? w.step : 0;
    known.tile = record.tile_begin, known.window = items.f.window, known.head = head, known.count = count, known.fresh = fresh;
    __syncwarp();
  }
};

}  // namespace megakernel::dev
