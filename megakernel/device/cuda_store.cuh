// What the storer does with a matrix product: adds the warps' sums, runs the epilogue, publishes. Part of cuda_matrix.cuh.
#pragma once

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ the largest logit
// Behind the logits, of each sampled row and worker: the largest of the worker's logits with its column as one number in
// that order, and how many tiles it saw. All ones are not valid yet.
struct Largest {
  static constexpr uint64_t kNotFinite = 0xfffffffe00000000u;  // more than any number

  MK_DEVICE static uint64_t key(float v, uint32_t column) {
    if (!(v - v == 0.0f)) return kNotFinite;
    return uint64_t(uint32_t(rank_of(v)) ^ 0x80000000u) << 32 | (0xffffffffu - column);
  }
  MK_DEVICE static uint32_t column(uint64_t key) { return 0xffffffffu - uint32_t(key); }
  MK_DEVICE static uint64_t of_warp(uint64_t key) {
    const uint32_t high = __reduce_max_sync(0xffffffffu, uint32_t(key >> 32));
    return uint64_t(high) << 32 | __reduce_max_sync(0xffffffffu, uint32_t(key >> 32) == high ? uint32_t(key) : 0);
  }
  MK_DEVICE static uint64_t* at(const Worker& w, uint32_t logits, uint32_t row, uint32_t worker) {
    uint64_t* base = tasks::workspace<uint64_t>(w, logits + sampled_room(w) * w.args.vocab * 4);
    return base + 2 * (row * w.args.workers + worker);
  }
};

}  // namespace megakernel::dev

#include "megakernel/device/cuda_largest.cuh"

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ storer
__device__ __noinline__ float activate(tasks::Activation kind, float v) {
  if (kind == tasks::Activation::kGeluTanh) return tasks::activate<tasks::Activation::kGeluTanh>(v);
  if (kind == tasks::Activation::kGelu) return tasks::activate<tasks::Activation::kGelu>(v);
  return tasks::activate<tasks::Activation::kRelu>(v);
}

// The epilogue of an output.
template <uint32_t kFlags>
MK_DEVICE float finish_output(const MatrixFields& f, float v, float up, float residual) {
  constexpr MatrixFlags flags{kFlags};
  if constexpr (flags.epilogue() == tasks::Epilogue::kGlu || flags.epilogue() == tasks::Epilogue::kActivate) {
    v = flags.activation() == tasks::Activation::kSilu ? __fdividef(v, 1.0f + __expf(-v)) : activate(flags.activation(), v);
    v *= up;
  }
  if constexpr (flags.softcap()) v = f.softcap * tanhf(v / f.softcap);
  return v + residual;
}
// The same where the up of a gate is kUp lanes further on.
template <uint32_t kFlags, uint32_t kUp>
MK_DEVICE float finish_output(const MatrixFields& f, float v, float residual) {
  const bool glu = MatrixFlags{kFlags}.epilogue() == tasks::Epilogue::kGlu;
  return finish_output<kFlags>(f, v, glu ? __shfl_down_sync(0xffffffffu, v, kUp) : 1.0f, residual);
}

// Where a lane's output goes on the peers; of a product that sends nothing, nothing.
template <bool kSends>
struct PeerParts {
  MK_DEVICE PeerParts(const Worker&, const MatrixFields&, uint32_t) {}
  MK_DEVICE void put(uint64_t, float) const {}
};
template <>
struct PeerParts<true> {
  uint64_t* part[abi::kRanks];
  uint32_t stamp;

  MK_DEVICE PeerParts(const Worker& w, const MatrixFields& f, uint32_t column) {
    const abi::Link& l = *tasks::link(w);
    stamp = tasks::stamp_of(w, f.residual, l.exchanges);
#pragma unroll
    for (uint32_t i = 1; i < abi::kRanks; ++i) part[i] = tasks::sent_at(w, l, i, f.gamma, f.n) + column;
  }
  MK_DEVICE void put(uint64_t index, float v) const {
#pragma unroll
    for (uint32_t i = 1; i < abi::kRanks; ++i) put_stamped(part[i] + index, v, stamp);
  }
};

// The largest logit of each row that its consumer has found, in scratch behind the squares.
MK_DEVICE unsigned long long* own_best() {
  return reinterpret_cast<unsigned long long*>(block().scratch + kTileRows * kConsumers * 4);
}
MK_DEVICE void begin_best(const Worker& w) {
  if (w.warp_lane() < kTileRows / kConsumers) own_best()[w.warp() + w.warp_lane() * kConsumers] = 0;
  __syncwarp();
}

// What becomes of a block's sums. Lane = output of it: tile lane / 8, row lane % 8 of its weights.
template <uint32_t kFlags>
struct BlockSums {
  static constexpr MatrixFlags flags{kFlags};
  const MatrixFields& f;
  const uint32_t rows;
  const uint32_t n = f.n;
  const float inverse_k = 1.0f / float(f.k), eps = f.eps, scale = f.scale;

  // Of the shares of a row, behind the sums.
  MK_DEVICE const float* squares(const float* sums, uint32_t r) const {
    return sums + kConsumers * (Sums::kOutputs * rows + r);
  }

  // The norm's factor of a row.
  MK_DEVICE float factor(const float* shares) const {
    if constexpr (!flags.norm()) return 1.0f;
    const auto* squares = reinterpret_cast<const float4*>(shares);
    const float4 a = squares[0], b = squares[1];
    return rsqrtf((a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w) * inverse_k + eps);
  }

  // The warps' sums, in order, and the norm's factor.
  MK_DEVICE static float total(const float* sums, uint32_t r, uint32_t lane, float factor) {
    float part[kConsumers];
#pragma unroll
    for (uint32_t i = 0; i < kConsumers; ++i) part[i] = sums[(r * kConsumers + i) * Sums::kOutputs + lane];
    float v = part[0];
#pragma unroll
    for (uint32_t i = 1; i < kConsumers; ++i) v += part[i];
    return flags.norm() ? v * factor : v;
  }
  MK_DEVICE float total(const float* sums, uint32_t r, uint32_t lane) const {
    return total(sums, r, lane, factor(squares(sums, r)));
  }

  MK_DEVICE float finish(float v, float residual) const { return finish_output<kFlags, 4>(f, v, residual); }

  MK_DEVICE void put(float* p, float v) const {
    if (flags.sampled()) {
      *p = v;
    } else {
      publish(p, v);
    }
  }
};

// What can be known before the sums come is.
template <uint32_t kFlags>
struct RowStorer : BlockSums<kFlags> {
  using BlockSums<kFlags>::flags, BlockSums<kFlags>::f, BlockSums<kFlags>::rows, BlockSums<kFlags>::n;
  using BlockSums<kFlags>::scale, BlockSums<kFlags>::total, BlockSums<kFlags>::finish, BlockSums<kFlags>::put;
  Storer& s;
  uint64_t best = 0;  // of row `lane`, see Largest
  [[no_unique_address]] trace::Once once;

  // kSeveral: some rows at a time.
  template <bool kSeveral>
  MK_DEVICE void block_of(uint32_t tile, uint32_t tiles) {
    Worker& w = s.w;
    constexpr bool residual = flags.epilogue() == tasks::Epilogue::kResidual, sampled = flags.sampled();
    constexpr uint32_t width = flags.epilogue() == tasks::Epilogue::kGlu ? 4 : 8;
    const uint32_t lane = w.warp_lane(), mine = tile + lane / 8, within = lane % 8;
    const uint32_t column = mine * width + within;
    const bool active = lane / 8 < tiles && within < width && column < n;
    const float* old = tasks::workspace<const float>(w, f.residual) + column;
    float* out = tasks::workspace<float>(w, f.output) + column;
    float* past = before(w, out);
    const PeerParts<flags.epilogue() == tasks::Epilogue::kSend> peers(w, f, column);
    float bias = 0.0f, before_it = 0.0f;
    if (flags.bias() && lane / 8 < tiles) bias = load_constant(tasks::weights<float>(w, f.bias) + mine * 8 + within);
    Before several;
    const Giver<kSeveral ? kFlags : 0> giver(w, f, column, active);
    if constexpr (kSeveral) {
      if (residual) several.fetch(w, old, n, active ? rows : 0);
    } else {
      if (residual && active) before_it = await(w, old);
    }
    const uint32_t room = Sums::room(*w.header), slot = Sums::slot(s.sums_slot, room), past_rows = w.last->rows;
    const float* sums = Sums::at(room, slot);
    w.wait_barrier(&block().sums_full[slot], s.sums_parity >> slot & 1);
    trace::ready(w, abi::Role::kStorer, once);
    auto put_row = [&](uint32_t r, float v) {
      trace::end(w, abi::Role::kStorer);
      giver.put(r, v);
      if (active) peers.put(uint64_t(r) * n, v);
      if (active) put(out + uint64_t(r) * n, v);
      if (sampled) {
        const uint64_t largest = Largest::of_warp(active ? Largest::key(v, column) : 0);
        if (lane == r && largest > best) best = largest;
      }
    };
    if constexpr (kSeveral) {
#pragma unroll 1
      for (uint32_t base = 0; base < rows; base += Before::kRows) {
        if (residual && base > 0) several.fetch(w, old + uint64_t(base) * n, n, active ? rows - base : 0);
        float v[Before::kRows];
#pragma unroll
        for (uint32_t i = 0; i < Before::kRows; ++i) {
          if (base + i < rows) v[i] = finish((total(sums, base + i, lane) + bias) * scale, residual ? several.value[i] : 0.0f);
        }
#pragma unroll
        for (uint32_t i = 0; i < Before::kRows; ++i) {
          if (base + i < rows) put_row(base + i, v[i]);
        }
      }
    } else {
#pragma unroll 1
      for (uint32_t r = 0; r < rows; ++r) {
        if (r > 0 && residual && active) before_it = await(w, old + uint64_t(r) * n);
        put_row(r, finish((total(sums, r, lane) + bias) * scale, before_it));
      }
    }
    __syncwarp();
    barrier_arrive_warp(&block().sums_empty[slot]);
    s.sums_parity ^= 1u << slot;
    ++s.sums_slot;
    if (sampled || !active) return;
    giver.clear_last(w);
#pragma unroll 1
    for (uint32_t r = 0; r < past_rows; ++r) clear(past + uint64_t(r) * n);
  }

  // A block that the consumers store: the storer says that its sums are read, and clears.
  MK_DEVICE void leave_block(uint32_t tile, uint32_t tiles) {
    Worker& w = s.w;
    constexpr uint32_t width = flags.epilogue() == tasks::Epilogue::kGlu ? 4 : 8;
    const uint32_t lane = w.warp_lane(), within = lane % 8, column = (tile + lane / 8) * width + within;
    const uint32_t slot = Sums::slot(s.sums_slot, Sums::room(*w.header)), parity = own_room().parity;
    w.wait_barrier(&block().sums_read[slot], parity >> slot & 1);
    __syncwarp();
    own_room().parity = uint16_t(parity ^ 1u << slot);
    trace::ready(w, abi::Role::kStorer, once);
    trace::end(w, abi::Role::kStorer);
    __syncwarp();
    barrier_arrive_warp(&block().sums_empty[slot]);
    s.sums_parity ^= 1u << slot;
    ++s.sums_slot;
    if (flags.sampled() || lane / 8 >= tiles || within >= width || column >= n) return;
    Giver<kFlags>(w, f, column, true).clear_last(w);
    float* past = before(w, tasks::workspace<float>(w, f.output) + column);
#pragma unroll 1
    for (uint32_t r = 0; r < w.last->rows; ++r) clear(past + uint64_t(r) * n);
  }

  // What is added to the outputs of some rows, all on its way at once.
  struct Before {
    static constexpr uint32_t kRows = 4;
    float value[kRows];

    MK_DEVICE void fetch(Worker& w, const float* p, uint32_t stride, uint32_t rows) {
      uint32_t v[kRows];
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) v[i] = i < rows ? load_word(p + uint64_t(i) * stride) : 0;
      const auto missing = [&](uint32_t i) { return v[i] == kInvalid; };
      await_all<kRows>(w, missing, [&](uint32_t i) { v[i] = load_word(p + uint64_t(i) * stride); }, 0);
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) value[i] = as_float(v[i]);
    }
  };

  MK_DEVICE void put_best(uint32_t tiles) const {
    const Worker& w = s.w;
    const uint32_t lane = w.warp_lane();
    uint64_t* out = Largest::at(w, f.output, lane, w.id);
    if (lane < rows) {
      store_long(out, best);
      store_long(out + 1, tiles);
      if constexpr (abi::kRanks > 1) send_largest(w, lane, best, tiles);
    }
    if constexpr (kWide) {
      clear_best(w, f);
    } else if (lane < w.last->sampled) {
      store_long(before(w, out), ~uint64_t(0));
      store_long(before(w, out) + 1, ~uint64_t(0));
    }
  }

  MK_DEVICE static void clear_best(const Worker& w, const MatrixFields& f) {
    for (uint32_t r = w.warp_lane(); r < w.last->sampled; r += 32) {
      uint64_t* out = before(w, Largest::at(w, f.output, r, w.id));
      store_long(out, ~uint64_t(0));
      store_long(out + 1, ~uint64_t(0));
    }
  }
};

// A block that the consumers store, each of them every eighth row. All but the sums is asked for before they come. Of
// sampled rows the largest so far is kept. kMany: there are more than 8 rows.
template <uint32_t kFlags, bool kMany>
struct OwnRows {
  static constexpr MatrixFlags flags{kFlags};
  static constexpr uint32_t kOwn = kMany ? kTileRows / kConsumers : 1;
  static constexpr bool kResidual = flags.epilogue() == tasks::Epilogue::kResidual;
  Worker& w;
  const MatrixFields& f;
  const uint32_t rows;
  // Of the first row; registers are short, so nothing is kept that is known again at once.
  uint32_t column = abi::kNone;  // of a lane that has none
  float* out;
  uint32_t* pair;  // these two where the output is given
  float* square;
  uint32_t residual[kOwn];
  float bias, gamma;

  MK_DEVICE uint32_t row(uint32_t i) const { return w.warp() + i * kConsumers; }
  // Of more than 8 rows each has a first.
  MK_DEVICE bool has(uint32_t i) const { return (kMany && i == 0) || row(i) < rows; }
  MK_DEVICE uint32_t present(uint32_t i) const { return has(i) ? row(i) : row(0); }

  MK_DEVICE void ask(uint32_t tile, uint32_t tiles) {
    constexpr uint32_t width = flags.epilogue() == tasks::Epilogue::kGlu ? 4 : 8;
    const uint32_t lane = w.warp_lane(), mine = tile + lane / 8, within = lane % 8;
    column = mine * width + within;
    out = tasks::workspace<float>(w, f.output) + uint64_t(row(0)) * f.n + column;
    if (flags.bias()) bias = lane / 8 < tiles ? load_constant(tasks::weights<float>(w, f.bias) + mine * 8 + within) : 0.0f;
    if constexpr (flags.gives()) {
      const GivenRows to(w, f.output, f.n);
      pair = to.pair(row(0), column), square = to.squares(row(0)) + column / 8;
    }
    if (lane / 8 >= tiles || within >= width || column >= f.n) column = abi::kNone;
    gamma = 1.0f;
    if (normed() && active()) gamma = load_constant(tasks::weights<float>(w, f.gamma) + column);
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
      residual[i] = 0;
      if (kResidual && active() && has(i)) residual[i] = load_word(added_to(i));
    }
  }

  // factor: of the norm, of each row.
  template <class Factor>
  MK_DEVICE void store(uint32_t slot, uint32_t parity, Factor factor) {
    if constexpr (kResidual) {
      const auto missing = [&](uint32_t i) { return residual[i] == kInvalid; };
      await_all<kOwn>(w, missing, [&](uint32_t i) { residual[i] = load_word(added_to(i)); }, 0);
    }
    const BlockSums<kFlags> block_sums{f, rows};
    const float* sums = Sums::at(Sums::room(*w.header), slot);
    w.wait_barrier(&block().sums_full[slot], parity);
    if (has(0)) put(block_sums, sums, factor);
    __syncwarp();
    barrier_arrive_warp(&block().sums_read[slot]);
  }

 private:
  MK_DEVICE bool active() const { return column != abi::kNone; }
  MK_DEVICE bool normed() const { return flags.gives() && !flags.norm() && f.gamma != abi::kNone64; }
  MK_DEVICE const float* added_to(uint32_t i) const {
    return tasks::workspace<const float>(w, f.residual) + uint64_t(row(i)) * f.n + column;
  }

  template <class Factor>
  MK_DEVICE void put(const BlockSums<kFlags>& from, const float* sums, Factor factor) const {
    const uint32_t lane = w.warp_lane(), chunks = (from.n + 31) / 32;
    const bool squares = normed();
    float v[kOwn];
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
      const float sum = from.total(sums, present(i), lane, factor(from, sums, present(i)));
      v[i] = from.finish((sum + (flags.bias() ? bias : 0.0f)) * from.scale, kResidual ? as_float(residual[i]) : 0.0f);
    }
    if constexpr (flags.gives()) {
#pragma unroll
      for (uint32_t i = 0; i < kOwn; ++i) {
        if (has(i)) give_pair<flags.half()>(pair + i * chunks * 128, v[i] * gamma, column % 2 == 0);
      }
#pragma unroll
      for (uint32_t i = 0; i < kOwn; ++i) {
        if (squares && has(i)) give_square(square + i * kConsumers * chunks * 4, v[i], column % 8 == 0);
      }
    }
    const PeerParts<flags.epilogue() == tasks::Epilogue::kSend> peers(w, f, column);
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
      if (!has(i)) break;
      if (active()) peers.put(uint64_t(row(i)) * from.n, v[i]);
      if (active()) from.put(out + uint64_t(i * kConsumers) * from.n, v[i]);
      if constexpr (flags.sampled()) {
        const uint64_t largest = Largest::of_warp(active() ? Largest::key(v[i], column) : 0);
        if (lane == 0 && largest > own_best()[row(i)]) own_best()[row(i)] = largest;
      }
    }
  }
};

template <uint32_t kFlags, bool kSeveral>
MK_DEVICE void store_blocks(Storer& s) {
  constexpr MatrixFlags flags{kFlags};
  const abi::Record& record = *s.w.record;
  RowStorer<kFlags> out{{matrix_fields(s.w), matrix_rows(s.w, flags.sampled())}, s};
  const bool in_room = kSeveral && Room::takes(*s.w.header, out.f, out.rows);
#pragma unroll 1
  for (uint32_t first = 0; first < record.tile_count && out.rows > 0; first += kBlockTiles) {
    const uint32_t tile = record.tile_begin + first, left = record.tile_count - first;
    if (kSeveral && in_room && consumers_store(out.rows, out.f.units, flags.sampled(), left <= kBlockTiles)) {
      out.leave_block(tile, tasks::least(kBlockTiles, left));
    } else {
      out.template block_of<kSeveral>(tile, tasks::least(kBlockTiles, left));
    }
  }
  if (flags.sampled()) trace::end(s.w, abi::Role::kStorer);
  if (flags.sampled() && kSeveral && in_room && out.rows > 8) {
    RowStorer<kFlags>::clear_best(s.w, out.f);
  } else if (flags.sampled()) {
    out.put_best(record.tile_count);
  }
  __syncwarp();
  if (s.w.warp_lane() == 0) signal_counter(s.w, record);
}

template <uint32_t kFlags>
__device__ __noinline__ void store_rows() {
  Storer s;
  s.load();
  store_blocks<kFlags, false>(s);
  s.save();
}

}  // namespace megakernel::dev

namespace megakernel::several {
using namespace dev;

// In a step that was announced to have several rows. What a step of them left is cleared in such a step: one that has several
// rows announces several.
template <uint32_t kFlags>
__device__ __noinline__ void store_announced() {
  constexpr MatrixFlags flags{kFlags};
  Storer s;
  s.load();
  store_blocks<kFlags, true>(s);
  clear_parts(s.w, matrix_fields(s.w), flags);
  s.save();
}

// By the consumers, of at most 8 rows: see consumers_store.
template <uint32_t kFlags>
__device__ __noinline__ void store_own_rows(uint32_t tile, uint32_t tiles, uint32_t slot, uint32_t parity) {
  Worker w;
  w.load();
  OwnRows<kFlags, false> own{w, matrix_fields(w), w.header->rows};
  own.ask(tile, tiles);
  own.store(slot, parity, [](const auto& from, const float* sums, uint32_t r) { return from.factor(from.squares(sums, r)); });
}

// The last block of the record at work.
struct LastBlock {
  uint32_t tile, tiles;

  MK_DEVICE explicit LastBlock(const abi::Record& record) {
    const uint32_t first = (record.tile_count - 1) / kBlockTiles * kBlockTiles;
    tile = record.tile_begin + first, tiles = record.tile_count - first;
  }
};

// Where its sums are when a consumer has put its own.
struct LastSums {
  uint32_t slot, parity;

  MK_DEVICE LastSums() {
    const RoleState& s = own_state();
    slot = Sums::slot(s.sums_slot - 1, Sums::room(block().header[s.step & 1]));
    parity = (s.sums_parity >> slot & 1) ^ 1;
  }
};

template <uint32_t kFlags>
MK_DEVICE void store_last_rows() {
  const LastBlock last(*own_state().record);
  const LastSums sums;
  store_own_rows<kFlags>(last.tile, last.tiles, sums.slot, sums.parity);
}

// What each consumer has found in its rows of the logits.
template <uint32_t kFlags>
__device__ __noinline__ void end_best() {
  Worker w;
  w.load();
  const MatrixFields& f = matrix_fields(w);
  const uint32_t row = w.warp() + w.warp_lane() * kConsumers;
  if (w.warp_lane() >= kTileRows / kConsumers || row >= w.header->sampled) return;
  const uint64_t best = own_best()[row];
  uint64_t* out = Largest::at(w, f.output, row, w.id);
  store_long(out, best);
  store_long(out + 1, w.record->tile_count);
  if constexpr (abi::kRanks > 1) send_largest(w, row, best, w.record->tile_count);
}

}  // namespace megakernel::several
