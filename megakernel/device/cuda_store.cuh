// What the storer does with a matrix product: adds the warps' sums, runs the epilogue, publishes. Part of cuda_matrix.cuh.
#pragma once

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ the largest logit
// Sampled rows that there is room for.
MK_DEVICE uint32_t sampled_room(const Worker& w) {
  if constexpr (kWide) return tasks::least(w.args.max_rows, tasks::most(kTileRows, w.args.max_slots));
  return w.args.max_rows;
}

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

// Lane = output of a block: tile lane / 8, row lane % 8 of its weights. What can be known before the sums come is.
template <uint32_t kFlags>
struct RowStorer {
  static constexpr MatrixFlags flags{kFlags};
  Storer& s;
  const MatrixFields& f;
  const uint32_t rows;
  const uint32_t n = f.n;
  const float inverse_k = 1.0f / float(f.k), eps = f.eps, scale = f.scale;
  uint64_t best = 0;  // of row `lane`, see Largest
  [[no_unique_address]] trace::Once once;

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
    if (residual && active) before_it = await(w, old);
    const uint32_t room = Sums::room(*w.header), slot = Sums::slot(s.sums_slot, room), past_rows = w.last->rows;
    const float* sums = Sums::at(room, slot);
    w.wait_barrier(&block().sums_full[slot], s.sums_parity >> slot & 1);
    trace::ready(w, abi::Role::kStorer, once);
#pragma unroll 1
    for (uint32_t r = 0; r < rows; ++r) {
      if (r > 0 && residual && active) before_it = await(w, old + uint64_t(r) * n);
      const float v = finish((total(sums, r, lane) + bias) * scale, before_it);
      trace::end(w, abi::Role::kStorer);
      if (active) peers.put(uint64_t(r) * n, v);
      if (active) put(out + uint64_t(r) * n, v);
      if (sampled) {
        const uint64_t largest = Largest::of_warp(active ? Largest::key(v, column) : 0);
        if (lane == r && largest > best) best = largest;
      }
    }
    __syncwarp();
    barrier_arrive_warp(&block().sums_empty[slot]);
    s.sums_parity ^= 1u << slot;
    ++s.sums_slot;
    if (sampled || !active) return;
#pragma unroll 1
    for (uint32_t r = 0; r < past_rows; ++r) clear(past + uint64_t(r) * n);
  }

  // The warps' sums, in order, and the norm's factor.
  MK_DEVICE float total(const float* sums, uint32_t r, uint32_t lane) const {
    float part[kConsumers];
#pragma unroll
    for (uint32_t i = 0; i < kConsumers; ++i) part[i] = sums[(r * kConsumers + i) * Sums::kOutputs + lane];
    float factor = 1.0f;
    if constexpr (flags.norm()) {
      const auto* squares = reinterpret_cast<const float4*>(sums + kConsumers * (Sums::kOutputs * rows + r));
      const float4 a = squares[0], b = squares[1];
      factor = rsqrtf((a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w) * inverse_k + eps);
    }
    float v = part[0];
#pragma unroll
    for (uint32_t i = 1; i < kConsumers; ++i) v += part[i];
    return flags.norm() ? v * factor : v;
  }

  MK_DEVICE float finish(float v, float residual) const {
    if constexpr (flags.epilogue() == tasks::Epilogue::kGlu || flags.epilogue() == tasks::Epilogue::kActivate) {
      const float up = flags.epilogue() == tasks::Epilogue::kGlu ? __shfl_down_sync(0xffffffffu, v, 4) : 1.0f;
      v = flags.activation() == tasks::Activation::kSilu ? __fdividef(v, 1.0f + __expf(-v)) : activate(flags.activation(), v);
      v *= up;
    }
    if constexpr (flags.softcap()) v = f.softcap * tanhf(v / f.softcap);
    return v + residual;
  }

  MK_DEVICE void put(float* p, float v) const {
    if (flags.sampled()) {
      *p = v;
    } else {
      publish(p, v);
    }
  }

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

template <uint32_t kFlags>
__device__ __noinline__ void store_rows() {
  constexpr MatrixFlags flags{kFlags};
  Storer s;
  s.load();
  const abi::Record& record = *s.w.record;
  RowStorer<kFlags> out{s, matrix_fields(s.w), matrix_rows(s.w, flags.sampled())};
#pragma unroll 1
  for (uint32_t first = 0; first < record.tile_count && out.rows > 0; first += kBlockTiles) {
    out.block_of(record.tile_begin + first, tasks::least(kBlockTiles, record.tile_count - first));
  }
  if (flags.sampled()) trace::end(s.w, abi::Role::kStorer);
  if (flags.sampled()) out.put_best(record.tile_count);
  __syncwarp();
  if (s.w.warp_lane() == 0) signal_counter(s.w, record);
  s.save();
}

}  // namespace megakernel::dev
