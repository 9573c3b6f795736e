// What attention works on: the items of a worker, and eight elements of a head. Part of cuda_pages.cuh.
#pragma once

namespace megakernel::dev {

template <tasks::AttentionConfig kConfig>
struct PageItems {
  static constexpr uint32_t kPage = kConfig.page_tokens, kPiece = kConfig.piece_tokens, kPiecePages = kPiece / kPage;
  const abi::StepHeader& h;
  const abi::AttentionFields& f;
  uint32_t tile, end, share;  // share: of the tile among those of its head
  uint32_t head, group_row, group_rows, piece, piece_end, count, page, last_page;  // count: items so far, modulo splits

  MK_DEVICE PageItems(const abi::StepHeader& header, const abi::Record& record, const abi::AttentionFields& fields)
      : h(header), f(fields), tile(record.tile_begin), end(record.tile_begin + record.tile_count) {
    begin_tile();
  }

  MK_DEVICE bool next() {
    while (tile < end) {
      piece += f.splits;
      while (piece >= piece_end) {
        if (!next_group()) break;
      }
      if (piece < piece_end) {
        set_pages();
        return true;
      }
      ++tile;
      begin_tile();
    }
    return false;
  }

 private:
  MK_DEVICE void begin_tile() {
    head = tile / f.splits;
    share = tile - head * f.splits;
    count = head % f.splits;
    group_row = group_rows = piece = piece_end = 0;
  }

  MK_DEVICE bool next_group() {
    group_row += group_rows;
    group_rows = 0;
    piece = piece_end;  // not an item
    if (group_row >= h.rows) return false;
    group_rows = 1;
    while (group_row + group_rows < h.rows && h.row[group_row + group_rows].slot == h.row[group_row].slot) ++group_rows;
    const uint32_t first = tasks::first_seen(h.row[group_row].position, f.window) / kPiece;
    piece_end = h.row[group_row + group_rows - 1].position / kPiece + 1;
    piece = first + (share >= count ? share - count : share + f.splits - count);
    count += piece_end - first;
    if (count >= f.splits) count %= f.splits;
    return true;
  }

  MK_DEVICE void set_pages() {
    page = tasks::most(piece * kPiecePages, tasks::first_seen(h.row[group_row].position, f.window) / kPage);
    last_page = tasks::least((piece + 1) * kPiecePages - 1, h.row[group_row + group_rows - 1].position / kPage);
  }
};

struct Eight {
  float v[8];

  MK_DEVICE void zero() {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 0.0f;
  }
  MK_DEVICE void load_fixed(const float* p) {
    set(load_constant_quad(p), load_constant_quad(p + 4));
  }
  MK_DEVICE void set(const Quad& a, const Quad& b) {
    v[0] = as_float(a.x), v[1] = as_float(a.y), v[2] = as_float(a.z), v[3] = as_float(a.w);
    v[4] = as_float(b.x), v[5] = as_float(b.y), v[6] = as_float(b.z), v[7] = as_float(b.w);
  }
  MK_DEVICE float squares() const {
    float s = v[0] * v[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) s = fmaf(v[i], v[i], s);
    return s;
  }
  MK_DEVICE void scale(float factor, const Eight& gamma) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = v[i] * factor * gamma.v[i];
  }
  template <bool kHalf>
  MK_DEVICE Quad packed() const {
    return {pack<kHalf>(v[0], v[1]), pack<kHalf>(v[2], v[3]), pack<kHalf>(v[4], v[5]), pack<kHalf>(v[6], v[7])};
  }
};

// (x, y) -> (x cos - y sin, y cos + x sin)
MK_DEVICE void rotate(float& x, float& y, float cos, float sin) {
  const float a = x * cos - y * sin, b = y * cos + x * sin;
  x = a;
  y = b;
}

// Eights that other workers publish, `kCount` of a lane, `stride` floats apart: asked for now, waited for later.
template <uint32_t kCount>
struct Pending {
  Quad q[kCount][2];
  const float* p;
  uint32_t stride;

  MK_DEVICE void ask(const float* from, uint32_t apart, bool wanted) {
    p = from, stride = apart;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      q[i][0] = q[i][1] = Quad{0, 0, 0, 0};
      if (wanted) q[i][0] = load_quad(p + i * stride), q[i][1] = load_quad(p + i * stride + 4);
    }
  }
  MK_DEVICE void wait(Worker& w, Eight (&out)[kCount]) {
    w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) missing |= invalid(q[i][0]) || invalid(q[i][1]);
      if (!__any_sync(0xffffffffu, missing)) return true;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
        if (invalid(q[i][0]) || invalid(q[i][1])) {
          q[i][0] = load_quad(p + i * stride), q[i][1] = load_quad(p + i * stride + 4);
        }
      }
      return false;
    }, abi::FaultKind::kValueBudget, 0);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) out[i].set(q[i][0], q[i][1]);
  }
};

}  // namespace megakernel::dev
