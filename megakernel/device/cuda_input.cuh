// The input of a matrix product: rows that other workers publish become operands of the matrix cores. One row is brought by
// the loaders; of several each consumer fetches its own columns itself. Part of cuda_matrix.cuh.
#pragma once

namespace megakernel::dev {

// The chunks of a warp in every unit.
struct Share {
  static constexpr bool kEven = false;
  uint32_t first, count;
  MK_DEVICE Share(uint32_t warp, uint32_t k_unit) {
    const uint32_t chunks = k_unit / 32;
    first = warp * chunks / kConsumers;
    count = (warp + 1) * chunks / kConsumers - first;
  }
};

// The same of units of 1,024 columns.
struct EvenShare {
  static constexpr bool kEven = true;
  static constexpr uint32_t count = kMaxChunks;
  uint32_t first;
  MK_DEVICE EvenShare(uint32_t warp, uint32_t) : first(warp * kMaxChunks) {}
};

// The A operand of a warp's chunks of a unit: rows 0 to 7, and 8 to 15 where there may be so many.
template <bool kHigh>
struct Fragments {
  Quad low[kMaxChunks], high[kHigh ? kMaxChunks : 1];
};

// Eight consecutive columns of a row.
struct Octet {
  Quad v[2];

  MK_DEVICE uint32_t worst() const { return larger(dev::worst(v[0]), dev::worst(v[1])); }
  MK_DEVICE bool missing() const { return worst() == kInvalid; }
  MK_DEVICE void zero() { v[0] = v[1] = Quad{0, 0, 0, 0}; }
  MK_DEVICE void fetch(const float* p) {
    v[0] = load_quad(p);
    v[1] = load_quad(p + 4);
  }
  MK_DEVICE void fetch_fixed(const float* p) {
    v[0] = load_constant_quad(p);
    v[1] = load_constant_quad(p + 4);
  }
  MK_DEVICE void values(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * i] = as_float(v[i].x), x[4 * i + 1] = as_float(v[i].y);
      x[4 * i + 2] = as_float(v[i].z), x[4 * i + 3] = as_float(v[i].w);
    }
  }
};

// Rows whose length is no multiple of 8: an octet may be part padding, and need not be aligned.
__device__ __noinline__ Octet fetch_odd(const float* x, uint32_t column, uint32_t k) {
  uint32_t v[8];
#pragma unroll
  for (uint32_t j = 0; j < 8; ++j) v[j] = column + j < k ? load_word(x + column + j) : 0;
  return {{{v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]}}};
}

MK_DEVICE float sum_of_squares(const float (&x)[8]) {
  float s = x[0] * x[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) s = fmaf(x[i], x[i], s);
  return s;
}

// Of a round of octets, in the order of the chunks, as `ManyRows` adds them; lane % 4 is the octet of a chunk. Behind the
// last come zeros.
MK_DEVICE void add_squares(float& sum, float own) {
#pragma unroll
  for (uint32_t chunk = 0; chunk < 8; ++chunk) {
    sum += __shfl_sync(0xffffffffu, own, chunk * 4 + lane_of_warp() % 4);
  }
}

MK_DEVICE void multiply_gamma(float (&x)[8], const Octet& gamma) {
  float g[8];
  gamma.values(g);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= g[i];
}

// Pairs 0, 2, 1, 3: as `multiply_chunk` wants them.
template <bool kHalf>
MK_DEVICE Quad packed(const float (&x)[8]) {
  return {pack<kHalf>(x[0], x[1]), pack<kHalf>(x[4], x[5]), pack<kHalf>(x[2], x[3]), pack<kHalf>(x[6], x[7])};
}

// One row: the loaders fetch the whole input and put it into scratch, in the type of the weights, times gamma, and in the
// order in which the consumers want it; behind it the sum of squares of each share. The factor of the norm comes in the
// epilogue. Consumer w reads the w-th share.
struct RowStash {
  uint32_t share_bytes;

  MK_DEVICE RowStash(const MatrixFields& f) : share_bytes(f.units * kMaxChunks * 64) {}
  MK_DEVICE uint8_t* share(uint32_t warp) const { return block().scratch + warp * share_bytes; }
  MK_DEVICE float* squares() const { return reinterpret_cast<float*>(share(kConsumers)); }
  // Of `rows` rows of a product in a step of `room` rows.
  MK_DEVICE bool fits(const MatrixFields& f, uint32_t rows, uint32_t room) const {
    return rows == 1 && f.k % 8 == 0 && share_bytes * kConsumers + kConsumers * 4 <= Sums::below(room);
  }
};

// What one loader warp does: its two shares, so many rounds of 32 octets of each at once. `kEven`: k_unit is 1,024, so that
// every share of a unit is 4 chunks. All of this is on the way from one product to the next: it must be short.
template <bool kHalf, bool kNorm, uint32_t kRounds, bool kEven>
struct RowLoader {
  static constexpr uint32_t kShares = kConsumers / kLoaders, kOctets = kShares * kRounds;
  Loader& l;
  const MatrixFields& f;
  const RowStash& stash;
  const float *x, *gamma = nullptr;
  uint32_t first[kShares], count[kShares], total[kShares];  // first chunk, chunks, octets of a share
  uint32_t inverse[kShares];  // of count, times 2^16, rounded up: exact for as many chunks as a share can have
  float squares[kShares] = {};

  MK_DEVICE RowLoader(Loader& loader, const MatrixFields& fields, const RowStash& to, bool sampled)
      : l(loader), f(fields), stash(to), x(input_row(loader.w, fields, sampled, 0)) {
    if constexpr (kNorm) gamma = tasks::weights<float>(loader.w, fields.gamma);
#pragma unroll
    for (uint32_t s = 0; s < kShares; ++s) {
      if constexpr (kEven) {
        first[s] = (Loader::index() * kShares + s) * kMaxChunks, count[s] = kMaxChunks;
      } else {
        const Share share(Loader::index() * kShares + s, f.k_unit);
        first[s] = share.first, count[s] = share.count;
        inverse[s] = count[s] == 4 ? 16384 : count[s] == 3 ? 21846 : count[s] == 2 ? 32768 : 65536;
      }
      total[s] = f.units * count[s] * 4;
    }
  }

  MK_DEVICE void run() {
    const uint32_t most = kEven || total[0] > total[1] ? total[0] : total[1];
    uint32_t base = 0;
#pragma unroll 1
    do {
      fetch(base);  // once where both shares are empty, too: its turn is what a loader waits for there
    } while ((base += 32 * kRounds) < most);
    if constexpr (kNorm) {
#pragma unroll
      for (uint32_t s = 0; s < kShares; ++s) {
        float v = squares[s] + __shfl_xor_sync(0xffffffffu, squares[s], 1);
        v += __shfl_xor_sync(0xffffffffu, v, 2);
        if (l.w.warp_lane() == 0) stash.squares()[Loader::index() * kShares + s] = v;
      }
    }
  }

 private:
  static_assert(kShares == 2);

  // Where octet o of share s begins; k of one that is not there.
  MK_DEVICE uint32_t column_of(uint32_t s, uint32_t o) const {
    const uint32_t q = o / 4, unit = kEven ? q / kMaxChunks : q * inverse[s] >> 16, chunk = q - unit * count[s];
    const uint32_t column = unit * (kEven ? kMaxChunks * kConsumers * 32 : f.k_unit) + (first[s] + chunk) * 32 + o % 4 * 8;
    return o < total[s] && column < f.k ? column : f.k;
  }

  // Octet i of a lane: share i % 2, 32 octets of it in each round. One that is not there is zeros.
  MK_DEVICE void fetch(uint32_t base) {
    Worker& w = l.w;
    Octet octet[kOctets], scale[kNorm ? kOctets : 1];
    uint32_t column[kOctets];
#pragma unroll
    for (uint32_t i = 0; i < kOctets; ++i) {
      column[i] = column_of(i % kShares, base + i / kShares * 32 + w.warp_lane());
      octet[i].zero();
      if constexpr (kNorm) {
        scale[i].zero();
        if (column[i] < f.k) scale[i].fetch_fixed(gamma + column[i]);
      }
    }
    if (base == 0) {
      wait_counters(w, *w.record);
      l.begin();
    }
#pragma unroll
    for (uint32_t i = 0; i < kOctets; ++i) {
      if (column[i] < f.k) octet[i].fetch(x + column[i]);
    }
    w.spin([&] {
      uint32_t all = 0;
#pragma unroll
      for (uint32_t i = 0; i < kOctets; ++i) all = larger(all, octet[i].worst());
      if (!__any_sync(0xffffffffu, all == kInvalid)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kOctets; ++i) {
        if (octet[i].missing()) octet[i].fetch(x + column[i]);
      }
      return false;
    }, abi::FaultKind::kValueBudget, base);
    trace::ready_now(w, abi::Role::kLoader);
#pragma unroll
    for (uint32_t i = 0; i < kOctets; ++i) {
      const uint32_t s = i % kShares, o = base + i / kShares * 32 + w.warp_lane();
      float v[8];
      octet[i].values(v);
      if constexpr (kNorm) {
        add_squares(squares[s], sum_of_squares(v));
        multiply_gamma(v, scale[i]);
      }
      const Quad out = packed<kHalf>(v);
      if (o < total[s]) *reinterpret_cast<Quad*>(stash.share(Loader::index() * kShares + s) + o * 16) = out;
    }
  }
};

template <bool kHalf, bool kNorm, uint32_t kRounds, bool kEven>
__device__ __noinline__ void load_row(bool sampled) {
  Loader l;
  l.load();
  const MatrixFields& f = matrix_fields(l.w);
  const RowStash stash(f);
  if (stash.fits(f, matrix_rows(l.w, sampled), Sums::room(*l.w.header))) {
    RowLoader<kHalf, kNorm, kRounds, kEven>(l, f, stash, sampled).run();
    l.end();
  }
  l.save();
}

// The input of a consumer when there is one row.
template <bool kHalf>
struct OneRow {
  static constexpr bool kHigh = false, kLooks = true;  // kLooks: at stages while it waits
  const uint8_t* stash = nullptr;
  float squares = 0.0f;

  MK_DEVICE OneRow(const Worker&, uint32_t) {}
  MK_DEVICE void restart() {}

  template <class S>
  MK_DEVICE void begin(Consumer& c, const MatrixFields& f, const S&, MatrixFlags flags) {
    const RowStash all(f);
    c.take_input();
    trace::ready_now(c.w, abi::Role::kConsumer);
    stash = all.share(c.w.warp()) + c.w.warp_lane() % 4 * 16;
    if (flags.norm()) squares = all.squares()[c.w.warp()];
  }
  MK_DEVICE void finish(Consumer&) {}
  MK_DEVICE void end(Consumer& c) { c.free_input(); }
  MK_DEVICE void leave(Consumer&, const MatrixFields&) {}

  template <class S>
  MK_DEVICE void fragments(const S& share, uint32_t unit, Fragments<false>& a) const {
    const uint32_t count = S::kEven ? share.count : in_register(share.count);  // looked at again: predicates are few
    const uint8_t* at = stash + unit * count * 64;
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      if constexpr (!S::kEven) a.low[i] = Quad{0, 0, 0, 0};
      if (i < count) a.low[i] = *reinterpret_cast<const Quad*>(at + i * 64);
    }
  }
  template <class S>
  MK_DEVICE void fragments(
      Worker&, const MatrixFields&, const S& share, MatrixFlags, uint32_t unit, Fragments<false>& a) const {
    fragments(share, unit, a);
  }

  MK_DEVICE void put_squares(const Worker& w, float* out, uint32_t) const {
    if (w.warp_lane() == 0) *out = squares;
  }
};

// Any number of rows where there is no room for them: lane / 4 is the row, and each lane fetches its fragments itself, for
// every block again.
template <bool kHalf>
struct ManyRows {
  static constexpr bool kHigh = true, kLooks = false;
  uint32_t rows;
  float squares[2] = {0.0f, 0.0f};

  MK_DEVICE ManyRows(const Worker&, uint32_t n) : rows(n) {}
  MK_DEVICE void begin(Consumer& c, const MatrixFields&, const Share&, MatrixFlags) { wait_counters(c.w, *c.w.record); }
  MK_DEVICE void finish(Consumer&) {}
  MK_DEVICE void end(Consumer&) {}
  MK_DEVICE void leave(Consumer&, const MatrixFields&) {}
  MK_DEVICE void restart() { squares[0] = squares[1] = 0.0f; }

  MK_DEVICE void fragments(
      Worker& w, const MatrixFields& f, const Share& share, MatrixFlags flags, uint32_t unit, Fragments<true>& a) {
    // All of it: what is not known to be written keeps its registers in every function on the way here.
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) a.low[i] = a.high[i] = Quad{0, 0, 0, 0};
#pragma unroll 1
    for (uint32_t h = 0; h < (rows > 8 ? 2u : 1u); ++h) {
      Quad out[kMaxChunks];
      const float s = half(w, f, share, flags, unit, w.warp_lane() / 4 + h * 8, h ? squares[1] : squares[0], out);
      (h ? squares[1] : squares[0]) = s;
#pragma unroll
      for (uint32_t i = 0; i < kMaxChunks; ++i) (h ? a.high[i] : a.low[i]) = out[i];
    }
  }

  MK_DEVICE static void fetch(Octet& octet, const float* x, uint32_t column, uint32_t k) {
    if (k % 8 != 0) {
      octet = fetch_odd(x, column, k);
    } else if (column < k) {
      octet.fetch(x + column);
    }
  }

  MK_DEVICE float half(Worker& w, const MatrixFields& f, const Share& share, MatrixFlags flags, uint32_t unit, uint32_t row,
                       float square, Quad (&out)[kMaxChunks]) {
    const float* x = row < rows ? input_row(w, f, flags.sampled(), row) : nullptr;
    const uint32_t column = unit * f.k_unit + share.first * 32 + w.warp_lane() % 4 * 8, k = f.k;
    Octet octet[kMaxChunks];
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      octet[i].zero();
      if (i < share.count && x) fetch(octet[i], x, column + i * 32, k);
    }
    const auto missing = [&](uint32_t i) { return octet[i].missing(); };
    await_all<kMaxChunks>(w, missing, [&](uint32_t i) { fetch(octet[i], x, column + i * 32, k); }, row);
    trace::ready(w, abi::Role::kConsumer);
#pragma unroll
    for (uint32_t i = 0; i < kMaxChunks; ++i) {
      float v[8];
      octet[i].values(v);
      if (flags.norm() && i < share.count) {
        Octet gamma;
        gamma.zero();
        fetch(gamma, tasks::weights<float>(w, f.gamma), column + i * 32, k);
        square += sum_of_squares(v);
        multiply_gamma(v, gamma);
      }
      out[i] = packed<kHalf>(v);
    }
    return square;
  }

  MK_DEVICE void put_squares(const Worker& w, float* out, uint32_t n) const {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      float s = squares[i] + __shfl_xor_sync(0xffffffffu, squares[i], 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      const uint32_t row = w.warp_lane() / 4 + i * 8;
      if (w.warp_lane() % 4 == 0 && row < n) out[row * kConsumers] = s;
    }
  }
};

}  // namespace megakernel::dev

#include "megakernel/device/cuda_room.cuh"
