// Matmul with fused prologue and epilogue. See matmul.py for the formulas and the order of the packed weights.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

enum class Epilogue { kStore, kResidual, kGlu, kActivate, kSend };
enum class Activation { kSilu, kGeluTanh, kGelu, kRelu };

struct MatmulConfig {
  DType dtype = DType::kF32;
  int tile_n = 32;
  bool norm = false;
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;
  bool bias = false;
  bool sampled = false;
  bool softcap = false;
  int rounds = 0;
  bool even = false;
  bool gives = false;
  bool given = false;
  bool dealt = false;
  int gives_wide = 0;
  bool given_wide = false;
};

template <Activation kActivation>
MK_DEVICE dev::Vf activate(dev::Vf x) {
  if constexpr (kActivation == Activation::kSilu) return x / (1.0f + dev::exp(-x));
  if constexpr (kActivation == Activation::kGeluTanh) {  // 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u))
    return x / (1.0f + dev::exp(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
  }
  if constexpr (kActivation == Activation::kRelu) return dev::select(x < 0.0f, dev::splat(0.0f), x);
  return 0.5f * x * (1.0f + dev::erf(x * 0.70710678118654752f));
}

template <MatmulConfig kConfig>
struct Matmul {
  using Fields = abi::MatmulFields;
  static constexpr int kTile = kConfig.tile_n;
  static constexpr int kOut = kConfig.epilogue == Epilogue::kGlu ? kTile / 2 : kTile;

  struct State {
    const float* x;   // normed input [rows][stride]
    uint32_t stride;  // at least k_unit * units
    uint32_t rows;
    float* sums;  // [rows][kTile] of the tile at work
  };

  struct Walk {
    Unit unit;
    const char* next_address;
    uint32_t end, units;

    MK_DEVICE Walk(Worker& w, const abi::Record& record, const Fields& f) {
      unit.bytes = f.k_unit * kTile * dev::bytes_of(kConfig.dtype);
      unit.tile = record.tile_begin;
      unit.index = ~0u;
      units = f.units;
      end = record.tile_begin + record.tile_count;
      unit.load = false;
      unit.store = false;
      next_address = weights<char>(w, f.weight) + uint64_t(unit.tile) * units * unit.bytes;
      started = rows_of(w) == 0 ? 2 : 0;
    }

    MK_DEVICE bool next(Worker&) {
      unit.load = started == 0;
      if (started == 2) return false;
      started = 1;
      if (++unit.index == units) {
        unit.index = 0;
        ++unit.tile;
      }
      if (unit.tile >= end) return false;
      unit.address = next_address;
      unit.store = unit.index + 1 == units;
      next_address += unit.bytes;
      return true;
    }

    uint32_t started;  // 0 before the first unit, 1 after, 2 when the step has no rows for this node
  };

  MK_DEVICE static uint32_t rows_of(const Worker& w) {
    return kConfig.sampled ? w.header->sampled : w.header->rows;
  }

  static constexpr bool kNeedsHeader = kConfig.sampled;  // to know that there is anything to do
  MK_DEVICE static Span span(const Worker& w, const abi::Record& record, const Fields& f) {
    const uint32_t bytes = f.k_unit * kTile * dev::bytes_of(kConfig.dtype);
    const bool none = kConfig.sampled && w.header->sampled == 0;  // a step that runs has rows
    return {weights<char>(w, f.weight) + uint64_t(record.tile_begin) * f.units * bytes, bytes,
            none ? 0 : record.tile_count * f.units};
  }

  // Row r of the input as it is in the workspace.
  MK_DEVICE static const float* input_row(const Worker& w, const Fields& f, uint32_t r) {
    const uint32_t row = kConfig.sampled ? w.header->sample_row[r] : r;
    return workspace<const float>(w, f.input) + uint64_t(row) * f.k;
  }

  MK_DEVICE static void load(Worker& w, const Fields& f, State& s, const Walk&) {
    s.rows = rows_of(w);
    const uint32_t padded = f.k_unit * f.units;
    const bool in_place = !kConfig.norm && !kConfig.sampled && padded == f.k;
    s.stride = padded;
    float* memory = w.template scratch<float>(uint64_t(s.rows) * (kTile + (in_place ? 0 : padded)));
    s.sums = memory;
    if (in_place) {
      s.x = workspace<const float>(w, f.input);
      return;
    }
    float* x = memory + s.rows * kTile;
    s.x = x;
    for (uint32_t r = 0; r < s.rows; ++r) {
      const float* in = input_row(w, f, r);
      float* out = x + uint64_t(r) * padded;
      if constexpr (kConfig.norm) {
        norm(w, in, weights<float>(w, f.gamma), f, out);
      } else {
        w.for_each(f.k, [&](uint32_t i, auto part) { dev::store(out + i, dev::load(in + i, part), part); });
      }
      for (uint32_t i = f.k + w.lane(); i < padded; i += w.lanes()) out[i] = 0.0f;
    }
    w.sync();
  }

  MK_DEVICE static void norm(Worker& w, const float* in, const float* gamma, const Fields& f, float* out) {
    dev::Vf squares = dev::splat(0.0f);
    w.for_each(f.k, [&](uint32_t i, auto part) {
      const dev::Vf v = dev::load(in + i, part);
      squares += v * v;
    });
    const float factor = 1.0f / dev::sqrt(w.sum(squares) / float(f.k) + f.eps);
    w.for_each(f.k, [&](uint32_t i, auto part) {
      dev::store(out + i, dev::load(in + i, part) * factor * dev::load(gamma + i, part), part);
    });
  }

  MK_DEVICE static void consume(Worker& w, const Fields& f, State& s, const Walk& at, void* stage) {
    dev::dot_tile<kConfig.dtype, kTile>(w, s.sums, kTile, s.x + at.unit.index * f.k_unit, s.stride, stage, s.rows,
                                        f.k_unit, at.unit.index != 0);
  }

  MK_DEVICE static void store(Worker& w, const Fields& f, State& s, const Walk& at) {
    const uint32_t first = at.unit.tile * kOut;
    const uint32_t width = least(f.n - first, kOut);
    float* out = workspace<float>(w, f.output) + first;
    const float* bias = kConfig.bias ? weights<float>(w, f.bias) + uint64_t(at.unit.tile) * kTile : nullptr;
    w.for_each(s.rows, width, [&](uint32_t r, uint32_t i, auto part) {
      const float* sums = s.sums + r * kTile;
      const uint64_t to = uint64_t(r) * f.n + i;
      auto value = [&](uint32_t column) {
        dev::Vf y = dev::load(sums + column, part);
        if constexpr (kConfig.bias) y += dev::load(bias + column, part);
        return y * f.scale;
      };
      dev::Vf y = value(i);
      if constexpr (kConfig.epilogue == Epilogue::kGlu) y = activate<kConfig.activation>(y) * value(kOut + i);
      if constexpr (kConfig.epilogue == Epilogue::kActivate) y = activate<kConfig.activation>(y);
      if constexpr (kConfig.softcap) y = f.softcap * dev::tanh(y / f.softcap);
      if constexpr (kConfig.epilogue == Epilogue::kResidual) {
        y += dev::load(workspace<const float>(w, f.residual) + first + to, part);
      }
      dev::store(out + to, y, part);
    });
    if constexpr (kConfig.epilogue == Epilogue::kSend) send(w, f, s.rows, first, width);
  }

  // Each lane its own elements of what the group has stored.
  MK_DEVICE static void send(Worker& w, const Fields& f, uint32_t rows, uint32_t first, uint32_t width) {
    w.sync();
    const abi::Link& l = *link(w);
    const uint32_t stamp = stamp_of(w, f.residual, l.exchanges);
    const float* out = workspace<const float>(w, f.output);
    for (uint32_t i = w.lane(); i < rows * width; i += w.lanes()) {
      const uint64_t index = uint64_t(i / width) * f.n + first + i % width;
      for (uint32_t k = 1; k < abi::kRanks; ++k) {
        dev::put_stamped(sent_at(w, l, k, f.gamma, f.n) + index, out[index], stamp);
      }
    }
  }
};

}  // namespace megakernel::tasks
