// Attention over pages of keys and values. See attention.py for the formulas and for which tile does what.
//
// A page of one KV head is two tiles in the order of dev::tile_index: the keys as a tile of head_dim x page_tokens, the
// values as a tile of page_tokens x head_dim. So the scores and the weighted sum of values are both dot_tile.
// Of 8-bit pages these are tiles of codes, and the exponents of the keys and of the values come behind them: a score is
// multiplied by the power of two of its key, a weight by that of its value, which changes no other bit of either.
#pragma once
#include "megakernel/tasks/task.cuh"

namespace megakernel::tasks {

struct AttentionConfig {
  DType kv_dtype = DType::kF32;
  int head_dim = 64;
  int group = 1;
  int kv_heads = 1;
  int rotary_dim = 64;
  bool interleaved = false;
  int page_tokens = 32;
  int piece_tokens = 256;
  bool q_norm = false;
  bool k_norm = false;
  bool softcap = false;
};

template <AttentionConfig kConfig>
struct Attention {
  using Fields = abi::AttentionFields;
  static constexpr DType kType = kConfig.kv_dtype;
  static constexpr uint32_t kDim = kConfig.head_dim;
  static constexpr uint32_t kGroup = kConfig.group;
  static constexpr uint32_t kHeads = kConfig.kv_heads * kConfig.group;
  static constexpr uint32_t kPage = kConfig.page_tokens;
  static constexpr uint32_t kPiecePages = kConfig.piece_tokens / kConfig.page_tokens;
  static constexpr bool kEight = kType == DType::kF8;
  static constexpr uint32_t kHalfBytes = kDim * kPage * dev::bytes_of(kType);  // keys, or values, of a page
  static constexpr uint32_t kUnitBytes = 2 * kHalfBytes + (kEight ? 2 * kPage : 0);
  static constexpr uint32_t kColumns = (kHeads + 2 * kConfig.kv_heads) * kDim;
  static constexpr uint32_t kTileRows = 16;  // rows that go through a page together

  struct State {
    float* q;       // [rows of the group * kGroup][kDim], normed, rotated, scaled
    float* scores;  // [q-rows of a tile of rows][kPage]
    float* acc;     // [..][kDim]
    float* top;     // [..] largest score so far
    float* total;   // [..] sum of exp(score - top)
    float* fresh;   // [2 * kDim] key and value of one row
  };

  // Pages of the items of a record's tiles, in order. `group_row`, `group_rows`: the rows of the item.
  struct Walk {
    Unit unit;
    uint32_t head, group_row, group_rows, piece, page;

    MK_DEVICE Walk(Worker& w, const abi::Record& record, const Fields& f) : fields(&f) {
      end = record.tile_begin + record.tile_count;
      pool = at<char>(w.args.kv + f.layer * w.args.kv_layer_stride);
      unit.bytes = kUnitBytes;
      unit.tile = record.tile_begin;
      begin_tile();
      last_page = page = 0;
      open = false;
    }

    MK_DEVICE bool next(Worker& w) {
      if (open && page < last_page) {
        ++page;
        ++unit.index;
        unit.load = false;
      } else {
        if (!next_item(w)) return false;
        unit.index = 0;
        unit.load = true;
        open = true;
      }
      unit.store = page == last_page;
      const abi::Row& row = w.header->row[group_row];
      const uint32_t* table = at<const uint32_t>(w.args.page_table) + row.slot * w.args.pages_per_slot;
      unit.address = pool + (uint64_t(table[page]) * kConfig.kv_heads + head) * unit.bytes;
      return true;
    }

   private:
    const Fields* fields;
    char* pool;
    uint32_t end, item, last_page, piece_end;
    bool open;

    MK_DEVICE void begin_tile() {
      head = unit.tile / fields->splits;
      item = head;  // items are dealt from a different tile for each head
      group_row = group_rows = 0;
      piece = piece_end = 0;
    }

    MK_DEVICE bool next_item(Worker& w) {
      while (unit.tile < end) {
        for (;;) {
          if (piece + 1 < piece_end) {
            ++piece;
          } else if (!next_group(w)) {
            break;
          }
          if (item++ % fields->splits == unit.tile % fields->splits) {
            set_pages(w);
            return true;
          }
        }
        ++unit.tile;
        begin_tile();
      }
      return false;
    }

    MK_DEVICE bool next_group(Worker& w) {
      const abi::StepHeader& h = *w.header;
      group_row += group_rows;
      if (group_row >= h.rows) return false;
      group_rows = 1;
      const uint32_t slot = h.row[group_row].slot;
      while (group_row + group_rows < h.rows && h.row[group_row + group_rows].slot == slot) ++group_rows;
      piece = first_seen(h.row[group_row].position, fields->window) / kConfig.piece_tokens;
      piece_end = h.row[group_row + group_rows - 1].position / kConfig.piece_tokens + 1;
      return true;
    }

    MK_DEVICE void set_pages(Worker& w) {
      const abi::StepHeader& h = *w.header;
      page = most(piece * kPiecePages, first_seen(h.row[group_row].position, fields->window) / kPage);
      last_page = least(piece * kPiecePages + kPiecePages - 1, h.row[group_row + group_rows - 1].position / kPage);
    }
  };

  // Queries of the item's rows, and empty sums.
  MK_DEVICE static void load(Worker& w, const Fields& f, State& s, const Walk& at) {
    const uint32_t heads = at.group_rows * kGroup, tile_heads = least(at.group_rows, kTileRows) * kGroup;
    s.q = w.template scratch<float>(uint64_t(heads) * (2 * kDim + 2) + uint64_t(tile_heads) * kPage + 2 * kDim);
    s.acc = s.q + heads * kDim;
    s.scores = s.acc + heads * kDim;
    s.fresh = s.scores + tile_heads * kPage;
    s.top = s.fresh + 2 * kDim;
    s.total = s.top + heads;
    for (uint32_t r = 0; r < at.group_rows; ++r) {
      const float* q = row_of(w, f, at.group_row + r) + at.head * kGroup * kDim;
      for (uint32_t g = 0; g < kGroup; ++g) {
        float* out = s.q + (r * kGroup + g) * kDim;
        prepare<kConfig.q_norm>(w, f, q + g * kDim, f.q_gamma, w.header->row[at.group_row + r].position, out);
        w.for_each(kDim, [&](uint32_t i, auto part) { dev::store(out + i, dev::load(out + i, part) * f.scale, part); });
      }
    }
    w.for_each(heads * kDim, [&](uint32_t i, auto part) { dev::store(s.acc + i, dev::splat(0.0f), part); });
    for (uint32_t h = w.lane(); h < heads; h += w.lanes()) {
      s.top[h] = -dev::kInfinity;
      s.total[h] = 0.0f;
    }
    w.sync();
  }

  MK_DEVICE static void consume(Worker& w, const Fields& f, State& s, const Walk& at, void* stage) {
    char* keys = static_cast<char*>(stage);
    char* values = keys + kHalfBytes;
    append(w, f, s, at, keys, values);
    for (uint32_t first = 0; first < at.group_rows; first += kTileRows) {
      const uint32_t rows = least(kTileRows, at.group_rows - first);
      // Rows of a group are at consecutive positions: the last one sees most.
      if (w.header->row[at.group_row + first + rows - 1].position < at.page * kPage) continue;
      attend(w, f, s, at, keys, values, first, rows);
    }
  }

  MK_DEVICE static void store(Worker& w, const Fields& f, State& s, const Walk& at) {
    for (uint32_t r = 0; r < at.group_rows; ++r) {
      const uint32_t row = at.group_row + r, position = w.header->row[row].position;
      const bool below = position / kConfig.piece_tokens < at.piece;
      const bool above = first_seen(position, f.window) / kConfig.piece_tokens > at.piece;
      if (below || above) continue;
      for (uint32_t g = 0; g < kGroup; ++g) {
        const uint64_t index = uint64_t(row) * kHeads + at.head * kGroup + g;
        float* out = workspace<float>(w, f.partials) + (index * f.max_pieces + at.piece) * (kDim + 2);
        const uint32_t h = r * kGroup + g;
        const float* acc = s.acc + h * kDim;
        w.for_each(kDim, [&](uint32_t i, auto part) { dev::store(out + i, dev::load(acc + i, part), part); });
        if (w.lane() == 0) {
          out[kDim] = s.top[h];
          out[kDim + 1] = s.total[h];
        }
      }
    }
  }

 private:
  MK_DEVICE static const float* row_of(const Worker& w, const Fields& f, uint32_t row) {
    return workspace<const float>(w, f.qkv) + uint64_t(row) * kColumns;
  }

  // One head at one position: norm, then rotation.
  template <bool kNorm>
  MK_DEVICE static void prepare(
      Worker& w, const Fields& f, const float* in, uint64_t gamma_at, uint32_t position, float* out) {
    float factor = 1.0f;
    const float* gamma = nullptr;
    if constexpr (kNorm) {
      gamma = weights<float>(w, gamma_at);
      dev::Vf squares = dev::splat(0.0f);
      w.for_each(kDim, [&](uint32_t i, auto part) {
        const dev::Vf v = dev::load(in + i, part);
        squares += v * v;
      });
      factor = 1.0f / dev::sqrt(w.sum(squares) / float(kDim) + f.eps);
    }
    auto value = [&](uint32_t i) { return kNorm ? in[i] * factor * gamma[i] : in[i]; };
    constexpr uint32_t kHalf = kConfig.rotary_dim / 2;
    if constexpr (kHalf > 0) {
      const float* cos = weights<float>(w, f.cos) + uint64_t(position) * kHalf;
      const float* sin = weights<float>(w, f.cos + f.sin) + uint64_t(position) * kHalf;
      for (uint32_t i = w.lane(); i < kHalf; i += w.lanes()) {
        const uint32_t a = kConfig.interleaved ? 2 * i : i, b = kConfig.interleaved ? 2 * i + 1 : i + kHalf;
        const float x = value(a), y = value(b);
        out[a] = x * cos[i] - y * sin[i];
        out[b] = y * cos[i] + x * sin[i];
      }
    }
    for (uint32_t i = 2 * kHalf + w.lane(); i < kDim; i += w.lanes()) out[i] = value(i);
    w.sync();
  }

  // Keys and values of the item's rows that lie in this page go into it.
  MK_DEVICE static void append(Worker& w, const Fields& f, State& s, const Walk& at, char* keys, char* values) {
    for (uint32_t r = 0; r < at.group_rows; ++r) {
      const uint32_t position = w.header->row[at.group_row + r].position;
      if (position / kPage != at.page) continue;
      const float* k = row_of(w, f, at.group_row + r) + (kHeads + at.head) * kDim;
      const float* v = k + kConfig.kv_heads * kDim;
      prepare<kConfig.k_norm>(w, f, k, f.k_gamma, position, s.fresh);
      const uint32_t t = position % kPage;
      char* page = static_cast<char*>(const_cast<void*>(at.unit.address));
      if constexpr (kEight) {
        const uint32_t key = exponent_of(w, s.fresh), value = exponent_of(w, v);
        put_codes(w, s.fresh, v, t, key, value, keys);
        if (page != keys) put_codes(w, s.fresh, v, t, key, value, page);
      } else {
        put_token(w, s.fresh, v, t, keys, values);
        if (page != keys) put_token(w, s.fresh, v, t, page, page + kHalfBytes);
      }
      w.sync();
    }
  }

  MK_DEVICE static void put_token(Worker& w, const float* k, const float* v, uint32_t t, char* keys, char* values) {
    for (uint32_t i = w.lane(); i < kDim; i += w.lanes()) {
      dev::put<kType>(keys, dev::tile_index<kType, int(kPage)>(i, t), k[i]);
      dev::put<kType>(values, dev::tile_index<kType, int(kDim)>(t, i), v[i]);
      // The sum of values runs over whole pairs of tokens: what a page held before must not be read.
      if (t % 2 == 0) dev::put<kType>(values, dev::tile_index<kType, int(kDim)>(t + 1, i), 0.0f);
    }
  }

  MK_DEVICE static uint32_t exponent_of(Worker& w, const float* v) {
    dev::Vi top = dev::as_vi(dev::splat(0.0f));
    w.for_each(kDim, [&](uint32_t i, auto part) {
      const dev::Vi bits = dev::as_vi(dev::load(v + i, part)) & 0x7fffffff;
      top = dev::select(bits > top, bits, top);
    });
    return dev::power_of(uint32_t(w.max(top)));
  }

  // Codes are finite whatever a page held before, so those of other tokens need no clearing.
  MK_DEVICE static void put_codes(
      Worker& w, const float* k, const float* v, uint32_t t, uint32_t key, uint32_t value, char* page) {
    auto* bytes = reinterpret_cast<uint8_t*>(page);
    const float of_key = dev::inverse_power(key), of_value = dev::inverse_power(value);
    for (uint32_t i = w.lane(); i < kDim; i += w.lanes()) {
      bytes[dev::tile_index<kType, int(kPage)>(i, t)] = dev::to_f8(k[i], of_key);
      bytes[kHalfBytes + dev::tile_index<kType, int(kDim)>(t, i)] = dev::to_f8(v[i], of_value);
    }
    if (w.lane() == 0) {
      bytes[2 * kHalfBytes + t] = uint8_t(key);
      bytes[2 * kHalfBytes + kPage + t] = uint8_t(value);
    }
  }

  // Rows [first, first + rows) of the item against its page.
  MK_DEVICE static void attend(
      Worker& w, const Fields& f, State& s, const Walk& at, const char* keys, const char* values, uint32_t first,
      uint32_t rows) {
    const uint32_t heads = rows * kGroup;
    const uint64_t offset = uint64_t(first) * kGroup * kDim;
    dev::dot_tile<kType, int(kPage)>(w, s.scores, kPage, s.q + offset, kDim, keys, heads, kDim, false);
    w.sync();
    uint32_t tokens = 0;  // of the page that some row sees
    for (uint32_t r = 0; r < rows; ++r) {
      const uint32_t position = w.header->row[at.group_row + first + r].position;
      const uint32_t base = at.page * kPage, seen = first_seen(position, f.window);
      const uint32_t low = seen > base ? least(seen - base, kPage) : 0;
      const uint32_t high = position >= base ? least(position - base + 1, kPage) : 0;
      for (uint32_t g = 0; g < kGroup; ++g) {
        const uint32_t head = r * kGroup + g;
        const auto* exponents = reinterpret_cast<const uint8_t*>(values + kHalfBytes);  // of keys, then of values
        softmax(w, f, s, s.scores + head * kPage, exponents, first * kGroup + head, low, high);
      }
      if (low < high) tokens = most(tokens, high);
    }
    w.sync();
    tokens += kEight ? (4 - tokens % 4) % 4 : tokens % 2;
    dev::dot_tile<kType, int(kDim)>(w, s.acc + offset, kDim, s.scores, kPage, values, heads, tokens, true);
    w.sync();
  }

  // Scores of one head become weights; tokens outside [low, high) of the page weigh nothing.
  MK_DEVICE static void softmax(
      Worker& w, const Fields& f, State& s, float* scores, const uint8_t* exponents, uint32_t h, uint32_t low,
      uint32_t high) {
    if (low >= high) {
      w.for_each(kPage, [&](uint32_t i, auto part) { dev::store(scores + i, dev::splat(0.0f), part); });
      return;
    }
    dev::Vf best = dev::splat(-dev::kInfinity);
    w.for_each(kPage, [&](uint32_t i, auto part) {
      dev::Vf v = dev::load(scores + i, part);
      if constexpr (kEight) v = v * dev::powers(exponents + i, part);
      if constexpr (kConfig.softcap) v = f.softcap * dev::tanh(v / f.softcap);
      const dev::Vi token = dev::iota(i);
      v = dev::select((token >= int32_t(low)) & (token < int32_t(high)), v, dev::splat(-dev::kInfinity));
      dev::store(scores + i, v, part);
      best = dev::max(best, dev::where(part, v, -dev::kInfinity));
    });
    const float before = s.top[h], top = dev::max(before, w.max(best));
    dev::Vf sum = dev::splat(0.0f);
    w.for_each(kPage, [&](uint32_t i, auto part) {
      const dev::Vf p = dev::exp(dev::load(scores + i, part) - top);
      dev::Vf weight = p;
      if constexpr (kEight) {  // the exponents of other tokens may be anything
        const dev::Vi token = dev::iota(i);
        const dev::Vf scaled = p * dev::powers(exponents + kPage + i, part);
        weight = dev::select((token >= int32_t(low)) & (token < int32_t(high)), scaled, dev::splat(0.0f));
      }
      dev::store(scores + i, weight, part);
      sum += dev::where(part, p, 0.0f);
    });
    const float rescale = dev::exp(before - top), page_total = w.sum(sum);
    float* acc = s.acc + h * kDim;
    w.for_each(kDim, [&](uint32_t i, auto part) { dev::store(acc + i, dev::load(acc + i, part) * rescale, part); });
    if (w.lane() == 0) {
      s.total[h] = s.total[h] * rescale + page_total;
      s.top[h] = top;
    }
  }
};

}  // namespace megakernel::tasks
