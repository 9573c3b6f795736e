// The end of a step. A row that wants its largest logit and nothing else needs no pass over the logits: the workers that
// made them have each found their largest.
#pragma once

namespace megakernel::dev {

MK_DEVICE bool wants_largest_only(const Worker& w, uint32_t sampled) {
  const abi::Row& row = w.header->row[w.header->sample_row[sampled]];
  const abi::Sampling& o = tasks::at<const abi::SlotState>(w.args.slots)[row.slot].sampling;
  return (o.temperature == 0.0f) & (o.repetition_penalty == 1.0f) & (o.presence_penalty == 0.0f) &
         (o.frequency_penalty == 0.0f) & (o.logprobs == 0) & (o.top_logprobs == 0) & (o.biased == 0);  // asked for at once
}

}  // namespace megakernel::dev

// Functions lie in memory in the order of their names. What runs once a step is in a namespace that comes after those of what
// runs in every layer, which so lies together.
namespace megakernel::seldom {
using namespace dev;

template <tasks::SampleConfig kConfig>
struct SampleCore {
  using Task = tasks::Sample<kConfig>;
  static constexpr bool kProduces = false, kStores = false, kLoads = true, kNeedsHeader = false;

  MK_DEVICE static void load() { lend_scratch(); }

  static __device__ __noinline__ void consume() {
    Consumer c;
    c.load();
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    c.take_input();
    const uint32_t end = tasks::least(record.tile_begin + record.tile_count, w.header->sampled);
    bool waited = false;
#pragma unroll 1
    for (uint32_t s = record.tile_begin; s < end; ++s) {
      if (wants_largest_only(w, s)) continue;  // `advance` finds it
      if (!waited) wait_counters(w, record);
      waited = true;
      trace::ready(w, abi::Role::kConsumer);
      abi::Record one = record;
      one.tile_begin = s;
      one.tile_count = 1;
      Task::execute(w, one, fields_of<Task>(record));
      w.sync();
      if (block().failed) end_thread();
    }
    if (record.signal != abi::kNone) {
      w.sync();
      if (w.lane() == 0) signal_counter(w, record);
    }
    c.free_input();
    c.save();
  }
};

template <tasks::AdvanceConfig kConfig>
struct AdvanceCore {
  using Task = tasks::Advance<kConfig>;
  using Fields = abi::AdvanceFields;
  static constexpr bool kProduces = false, kStores = false, kLoads = true, kNeedsHeader = false;
  static constexpr uint32_t kAtOnce = 6;  // words of workers that a lane asks for at once

  MK_DEVICE static void load() { lend_scratch(); }

  static __device__ __noinline__ void consume() {
    Consumer c;
    c.load();
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<Task>(record);
    c.take_input();
    const uint32_t sampled = w.header->sampled;
    uint64_t posted = 0;
    if (w.lane() == 0) posted = load_system(&tasks::at<abi::Mailbox>(w.args.mailbox)->posted);  // it is far: ask now
    if (!take_all(w, f, sampled)) wait_counters(w, record);
    trace::ready_now(w, abi::Role::kConsumer);
    if (w.lane() == 0) block().posted = posted;
    w.sync();
    if (block().failed) end_thread();
    Task::execute(w, record, f);
    w.sync();
    c.free_input();
    c.save();
  }

  // Each lane looks at the wishes of a row, then each warp takes every eighth. Whether these were all.
  MK_DEVICE static bool take_all(Worker& w, const Fields& f, uint32_t sampled) {
    bool all = true;
#pragma unroll 1
    for (uint32_t base = 0; base < sampled; base += 32) {
      const uint32_t own = base + w.warp_lane();
      const uint32_t quick =
          __ballot_sync(0xffffffffu, own < sampled && f.logits != abi::kNone && wants_largest_only(w, own));
      const uint32_t count = tasks::least(32, sampled - base);
      all = all && quick == 0xffffffffu >> (32 - count);
#pragma unroll 1
      for (uint32_t i = w.warp(); i < count; i += kConsumers) {
        if (quick >> i & 1) take_largest(w, f, base + i);
      }
    }
    return all;
  }

  // Waits until the workers' shares are all of the vocabulary.
  MK_DEVICE static void take_largest(Worker& w, const Fields& f, uint32_t s) {
    const uint32_t tiles = (part_vocab(w) + 7) / 8;
    uint64_t best = 0;
    w.spin([&] {
      uint32_t seen = 0;
      best = 0;
#pragma unroll 1
      for (uint32_t first = w.warp_lane(); first < w.args.workers; first += 32 * kAtOnce) {
        const uint64_t* at = Largest::at(w, f.logits, s, first);
        Pair v[kAtOnce];
#pragma unroll
        for (uint32_t k = 0; k < kAtOnce; ++k) v[k] = first + 32 * k < w.args.workers ? load_pair(at + 64 * k) : Pair{0, 0};
#pragma unroll
        for (uint32_t k = 0; k < kAtOnce; ++k) {
          if (uint32_t(v[k].x >> 32) == kInvalid || uint32_t(v[k].y >> 32) == kInvalid) continue;  // no key begins so
          seen += uint32_t(v[k].y);
          if (v[k].x > best) best = v[k].x;
        }
      }
      return __reduce_add_sync(0xffffffffu, seen) == tiles;
    }, abi::FaultKind::kValueBudget, s);
    best = Largest::of_warp(best);
    if constexpr (abi::kRanks > 1) best = largest_of_ranks(w, s, best);
    if (w.warp_lane() != 0) return;
    const abi::Row& row = w.header->row[w.header->sample_row[s]];
    if (best >= Largest::kNotFinite) return w.fault(abi::FaultKind::kNanLogits, s, abi::kNone, row.slot, row.position);
    abi::SampleResult& out = tasks::workspace<abi::SampleResult>(w, f.result)[s];
    out.token = int32_t(Largest::column(best));
    out.logprob = 0.0f;
    out.top_count = 0;
  }
};

}  // namespace megakernel::seldom

namespace megakernel::dev {

template <tasks::SampleConfig kConfig>
struct Core<tasks::Sample<kConfig>> : seldom::SampleCore<kConfig> {};
template <tasks::AdvanceConfig kConfig>
struct Core<tasks::Advance<kConfig>> : seldom::AdvanceCore<kConfig> {};

}  // namespace megakernel::dev
