// A norm whose result is stored, from values to values (see tasks/norm.py for the formulas). Every worker with a tile sums the
// whole row again: a sum that went round would be a hand-off more.
#pragma once

namespace megakernel::dev {

template <tasks::NormConfig kConfig>
struct Core<tasks::Norm<kConfig>> {
  using Fields = abi::NormFields;
  static constexpr bool kProduces = false, kStores = false, kLoads = false, kNeedsHeader = false;
  static constexpr uint32_t kAtOnce = 4;  // times four columns of a lane on their way
  static constexpr bool kNormed = kConfig.norming != tasks::Norming::kNone;
  static constexpr bool kCentred = kConfig.norming == tasks::Norming::kLayer;

  // What is subtracted from the columns of a part, and then multiplied with them.
  struct Moments {
    float mean = 0.0f, factor = 1.0f;
  };

  static __device__ __noinline__ void consume() {
    Consumer c;
    c.load();
    Worker& w = c.w;
    const abi::Record& record = *w.record;
    const Fields& f = fields_of<tasks::Norm<kConfig>>(record);
    wait_counters(w, record);
    const uint32_t first = record.tile_begin * f.tile_cols;
    const uint32_t last = tasks::least(f.cols, first + record.tile_count * f.tile_cols);
#pragma unroll 1
    for (uint32_t r = 0; r < w.header->rows; ++r) row(w, f, r, first, last);
    float* out = tasks::workspace<float>(w, f.output);
#pragma unroll 1
    for (uint32_t r = 0; r < w.last->rows; ++r) {
#pragma unroll 1
      for (uint32_t j = first + w.lane(); j < last; j += w.lanes()) clear(before(w, out + uint64_t(r) * f.cols + j));
    }
    if (record.signal != abi::kNone) {
      w.sync();
      if (w.lane() == 0) signal_counter(w, record);
    }
    c.save();
  }

 private:
  // Columns [first, last) of a row. What else a lane's first column takes is asked for before the row is there.
  MK_DEVICE static void row(Worker& w, const Fields& f, uint32_t r, uint32_t first, uint32_t last) {
    const float* x = tasks::workspace<const float>(w, f.input) + uint64_t(r) * f.cols;
    float* out = tasks::workspace<float>(w, f.output) + uint64_t(r) * f.cols;
    const float* added = kConfig.residual ? tasks::workspace<const float>(w, f.residual) + uint64_t(r) * f.cols : nullptr;
    uint32_t j = first + w.lane();
    Column own;
    if (j < last) own.ask(w, f, x, added, j);
    Moments low, high;
    if constexpr (kNormed) {
#pragma unroll 1
      for (uint32_t begin = 0, end = f.split; begin < f.normed; begin = end, end = f.normed) {
        if (first >= end || last <= begin) continue;
        const Moments m = moments(w, x + begin, end - begin, f.eps);
        begin == 0 ? low = m : high = m;
      }
    }
    trace::ready_now(w, abi::Role::kConsumer);
    trace::end(w, abi::Role::kConsumer);
#pragma unroll 1
    while (j < last) {
      publish(out + j, own.value(w, f, x, added, j, j < f.split ? low : high));
      j += w.lanes();
      if (j < last) own.ask(w, f, x, added, j);
    }
  }

  // One column and what goes with it.
  struct Column {
    uint32_t x, added;
    float gamma, beta;

    MK_DEVICE void ask(Worker& w, const Fields& f, const float* row, const float* residual, uint32_t j) {
      x = load_word(row + j);
      if constexpr (kConfig.residual) added = load_word(residual + j);
      gamma = 1.0f, beta = 0.0f;
      if constexpr (kNormed) {
        if (j < f.normed) gamma = load_constant(tasks::weights<float>(w, f.gamma) + j);
      }
      if constexpr (kNormed && kConfig.beta) {
        if (j < f.normed) beta = load_constant(tasks::weights<float>(w, f.beta) + j);
      }
    }
    MK_DEVICE float value(Worker& w, const Fields& f, const float* row, const float* residual, uint32_t j, Moments m) {
      w.spin([&] {
        if (x == kInvalid) x = load_word(row + j);
        if constexpr (kConfig.residual) {
          if (added == kInvalid) added = load_word(residual + j);
          if (added == kInvalid) return false;
        }
        return x != kInvalid;
      }, abi::FaultKind::kValueBudget, j);
      float y = as_float(x);
      if constexpr (kNormed) {
        if (j < f.normed) y = (y - m.mean) * m.factor * gamma;
        if constexpr (kConfig.beta) y += beta;
      }
      y *= f.scale;
      if constexpr (kConfig.residual) y += as_float(added);
      return y;
    }
  };

  MK_DEVICE static Moments moments(Worker& w, const float* x, uint32_t count, float eps) {
    Moments m;
    if constexpr (kCentred) m.mean = __fdividef(w.sum(add<false>(w, x, count, 0.0f)), float(count));
    m.factor = rsqrtf(__fdividef(w.sum(add<true>(w, x, count, m.mean)), float(count)) + eps);
    return m;
  }

  // This lane's part of the sum of the columns, or of the squares of their distance from `mean`.
  template <bool kSquares>
  MK_DEVICE static float add(Worker& w, const float* x, uint32_t count, float mean) {
    const bool aligned = count % 4 == 0 && reinterpret_cast<uint64_t>(x) % 16 == 0;
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t base = w.lane() * 4; base < count; base += kAtOnce * w.lanes() * 4) {
      Quad v[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) v[i] = four(x, base + i * w.lanes() * 4, count, aligned);
      w.spin([&] {
        bool missing = false;
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          if (!invalid(v[i])) continue;
          v[i] = four(x, base + i * w.lanes() * 4, count, aligned);
          missing |= invalid(v[i]);
        }
        return !missing;
      }, abi::FaultKind::kValueBudget, base);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t j = base + i * w.lanes() * 4, words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          const float d = j + k < count ? as_float(words[k]) - mean : 0.0f;
          sum = kSquares ? fmaf(d, d, sum) : sum + d;
        }
      }
    }
    return sum;
  }

  // Columns j to j + 3; zeros from `count` on.
  MK_DEVICE static Quad four(const float* x, uint32_t j, uint32_t count, bool aligned) {
    if (j >= count) return {0, 0, 0, 0};
    if (aligned) return load_quad(x + j);
    return {load_word(x + j), j + 1 < count ? load_word(x + j + 1) : 0, j + 2 < count ? load_word(x + j + 2) : 0,
            j + 3 < count ? load_word(x + j + 3) : 0};
  }
};

}  // namespace megakernel::dev
