// The largest logit of several ranks. Each worker of the head sends its own to every peer's window, three words a row: value,
// column, how many tiles it saw; each with the step's stamp, as one store. Of one rank nothing of this is called.
#pragma once

namespace megakernel::dev {

// Columns of this rank's part of the logits.
MK_DEVICE uint32_t part_vocab(const Worker& w) {
  if constexpr (abi::kRanks == 1) return w.args.vocab;
  return tasks::link(w)->part_cols;
}

MK_DEVICE uint32_t step_stamp(const Worker& w) { return uint32_t(w.step) | 0x80000000u; }

// What `worker` of `rank` says of a sampled row, in a window.
MK_DEVICE uint64_t* largest_at(const Worker& w, uint64_t window, uint32_t rank, uint32_t row, uint32_t worker) {
  const uint64_t index = (uint64_t(rank) * w.args.max_rows + row) * w.args.workers + worker;
  return tasks::at<uint64_t>(window + tasks::link(w)->best) + index * (abi::kBestBytes / sizeof(uint64_t));
}

MK_DEVICE void put_word_system(uint64_t* p, uint32_t stamp, uint32_t word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(uint64_t(stamp) << 32 | word) : "memory");
}

// By the lane of a row.
MK_DEVICE void send_largest(const Worker& w, uint32_t row, uint64_t key, uint32_t tiles) {
  const abi::Link& l = *tasks::link(w);
  const uint32_t stamp = step_stamp(w);
  for (uint32_t i = 1; i < abi::kRanks; ++i) {
    uint64_t* out = largest_at(w, l.window[(l.rank + i) % abi::kRanks], l.rank, row, w.id);
    put_word_system(out, stamp, uint32_t(key >> 32));
    put_word_system(out + 1, stamp, uint32_t(key));
    put_word_system(out + 2, stamp, tiles);
  }
}

// A key of a rank's own columns as one of the whole vocabulary: the smaller column is still the larger key.
MK_DEVICE uint64_t of_whole(const Worker& w, uint64_t key, uint32_t rank) {
  const uint32_t part = part_vocab(w);
  const uint32_t first = rank + 1 == abi::kRanks ? w.args.vocab - part : rank * part;
  return key >= Largest::kNotFinite ? key : key - first;  // its low half is 0xffffffff - column
}

// The largest of row `s`, by a whole warp; `own` is that of this rank.
MK_DEVICE uint64_t largest_of_ranks(Worker& w, uint32_t s, uint64_t own) {
  const abi::Link& l = *tasks::link(w);
  const uint32_t stamp = step_stamp(w), tiles = (l.part_cols + 7) / 8;
  uint64_t best = of_whole(w, own, l.rank);
  for (uint32_t k = 0; k < abi::kRanks; ++k) {
    if (k == l.rank) continue;
    uint64_t found = 0;
    w.spin([&] {
      uint32_t seen = 0;
      found = 0;
      for (uint32_t i = w.warp_lane(); i < w.args.workers; i += 32) {
        const uint64_t* p = largest_at(w, l.window[l.rank], k, s, i);
        const uint64_t value = load_system(p), column = load_system(p + 1), count = load_system(p + 2);
        if (uint32_t(value >> 32) != stamp || uint32_t(column >> 32) != stamp || uint32_t(count >> 32) != stamp) continue;
        seen += uint32_t(count);
        const uint64_t key = value << 32 | uint32_t(column);
        if (key > found) found = key;
      }
      return __reduce_add_sync(0xffffffffu, seen) == tiles;
    }, abi::FaultKind::kPeerBudget, s);
    found = of_whole(w, Largest::of_warp(found), k);
    if (found > best) best = found;
  }
  return best;
}

}  // namespace megakernel::dev
