// What the loaders do for attention: queries, and keys and values of this step's rows, from the workspace into scratch,
// normed, rotated, rounded. A head is in as many lanes as it has eights of elements. Part of cuda_pages.cuh.
#pragma once

namespace megakernel::dev {

// Consecutive items of one head and row group share what was loaded, if one block takes all their q-rows.
struct LoadedHeads {
  uint32_t head = ~0u, group_row = ~0u;

  // Whether the block is there already; else it is to be loaded, and counts as there.
  template <class Items>
  MK_DEVICE bool known(const Items& item, uint32_t q_rows) {
    const bool same = q_rows <= kBlockRows && head == item.head && group_row == item.group_row;
    head = item.head, group_row = item.group_row;
    return same;
  }
};

template <tasks::AttentionConfig kConfig>
struct HeadLoader : PageShape<kConfig> {
  using Shape = PageShape<kConfig>;
  using Fields = abi::AttentionFields;
  using Items = PageItems<kConfig>;
  using Shape::kDim, Shape::kGroup, Shape::kHeads, Shape::kKvHeads, Shape::kPage, Shape::kPiece, Shape::kHalfRotary;
  static constexpr uint32_t kEights = kDim / 8;
  static constexpr uint32_t kLanes = kEights <= 4 ? 4 : kEights <= 8 ? 8 : kEights <= 16 ? 16 : 32;  // of a head
  static constexpr uint32_t kAtOnce = kLoaders * 32 / kLanes;                                         // heads
  static constexpr uint32_t kTurn = kHalfRotary / 8;  // lanes between the halves of a rotation
  static_assert(kConfig.interleaved || kHalfRotary % 8 == 0, "a lane's elements turn with those of one other lane");

  enum class Kind { kQuery, kKey, kValue, kNone };

  // What a lane has.
  struct Head {
    Kind kind = Kind::kNone;
    uint32_t place = 0, position = 0, page = 0;  // place: q-row of the block, or row of the fresh ones
    const float* from = nullptr;
    Eight cos, sin, gamma;
  };

  Loader& l;
  const Fields& f;
  const Items& item;
  const uint32_t i = l.w.warp_lane() % kLanes;  // which eight

  // Head `n` of the block: its q-rows, then a key and a value for each fresh row.
  MK_DEVICE Head find(uint32_t base, uint32_t n) const {
    Worker& w = l.w;
    Head h;
    h.cos.zero(), h.sin.zero(), h.gamma.zero();
    const uint32_t queries = tasks::least(kBlockRows, item.group_rows * kGroup - base);
    const typename Shape::Fresh fresh(base, item.group_rows);
    if (n >= queries + 2 * (fresh.end - fresh.first) || i >= kEights) return h;
    const bool query = n < queries;
    const uint32_t other = n - queries, m = base + n;
    const uint32_t r = item.group_row + (query ? m / kGroup : fresh.first + other / 2);
    const abi::Row& row = w.header->row[r];
    h.position = row.position;
    if (!query) {  // only the tile with the item that it belongs to takes it
      const uint32_t piece = row.position / kPiece;
      if (piece < item.piece || (piece - item.piece) % f.splits != 0) return h;
      h.page = load_word(reinterpret_cast<const uint32_t*>(w.args.page_table) + uint64_t(row.slot) * w.args.pages_per_slot +
                         row.position / kPage);
    }
    h.kind = query ? Kind::kQuery : other % 2 == 0 ? Kind::kKey : Kind::kValue;
    h.place = query ? n : other / 2;
    const uint32_t head = query ? item.head * kGroup + m % kGroup : kHeads + item.head + other % 2 * kKvHeads;
    h.from = tasks::workspace<const float>(w, f.qkv) + uint64_t(r) * Shape::kColumns + head * kDim + i * 8;
    if (normed(h.kind)) h.gamma.load_fixed(tasks::weights<float>(w, query ? f.q_gamma : f.k_gamma) + i * 8);
    if (h.kind != Kind::kValue) angles(h);
    return h;
  }

  MK_DEVICE static bool normed(Kind kind) {
    return (kConfig.q_norm && kind == Kind::kQuery) || (kConfig.k_norm && kind == Kind::kKey);
  }

  MK_DEVICE void angles(Head& h) const {
    if constexpr (kHalfRotary == 0) return;
    const float* cos = tasks::weights<float>(l.w, f.cos) + uint64_t(h.position) * kHalfRotary;
    const float* sin = tasks::weights<float>(l.w, f.cos + f.sin) + uint64_t(h.position) * kHalfRotary;
    if constexpr (kConfig.interleaved) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (i * 4 + j < kHalfRotary) h.cos.v[j] = load_constant(cos + i * 4 + j), h.sin.v[j] = load_constant(sin + i * 4 + j);
      }
    } else if (i < 2 * kTurn) {
      h.cos.load_fixed(cos + i % kTurn * 8);
      h.sin.load_fixed(sin + i % kTurn * 8);
    }
  }

  MK_DEVICE void run(uint32_t base) {
    const typename Shape::Fresh fresh(base, item.group_rows);
    const uint32_t heads = tasks::least(kBlockRows, item.group_rows * kGroup - base) + 2 * (fresh.end - fresh.first);
    const uint32_t own = Loader::index() * (32 / kLanes) + l.w.warp_lane() / kLanes;
    bool begun = false;
#pragma unroll 1
    for (uint32_t n = 0; n == 0 || n < heads; n += kAtOnce) {
      const Head h = find(base, n + own);
      if (!begun) l.begin();
      begun = true;
      Eight x = wait(h);
      norm(h, x);
      turn(h, x);
      put(h, x);
    }
    l.end();
  }

  // The eight elements of a head that other workers publish.
  MK_DEVICE Eight wait(const Head& h) {
    Quad q[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    if (h.kind != Kind::kNone) q[0] = load_quad(h.from), q[1] = load_quad(h.from + 4);
    l.w.spin([&] {
      const bool missing = invalid(q[0]) || invalid(q[1]);
      if (missing) q[0] = load_quad(h.from), q[1] = load_quad(h.from + 4);
      return !__any_sync(0xffffffffu, missing);
    }, abi::FaultKind::kValueBudget, 0);
    trace::ready_now(l.w, abi::Role::kLoader);
    Eight x;
    x.set(q[0], q[1]);
    return x;
  }

  MK_DEVICE void norm(const Head& h, Eight& x) const {
    if constexpr (kConfig.q_norm || kConfig.k_norm) {
      float s = x.squares();
#pragma unroll
      for (uint32_t d = kLanes / 2; d > 0; d /= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
      if (normed(h.kind)) x.scale(rsqrtf(s * (1.0f / float(kDim)) + f.eps), h.gamma);
    }
  }

  MK_DEVICE void turn(const Head& h, Eight& x) const {
    if constexpr (kHalfRotary == 0) return;
    const bool wanted = h.kind == Kind::kQuery || h.kind == Kind::kKey;
    if constexpr (kConfig.interleaved) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (wanted && i * 4 + j < kHalfRotary) rotate(x.v[2 * j], x.v[2 * j + 1], h.cos.v[j], h.sin.v[j]);
      }
    } else {
      const bool low = i < kTurn, turned = wanted && i < 2 * kTurn;
      const uint32_t lane = l.w.warp_lane(), partner = turned ? (low ? lane + kTurn : lane - kTurn) : lane;
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) {
        const float other = __shfl_sync(0xffffffffu, x.v[j], partner);
        if (turned) x.v[j] = low ? x.v[j] * h.cos.v[j] - other * h.sin.v[j] : x.v[j] * h.cos.v[j] + other * h.sin.v[j];
      }
    }
  }

  // A query into the A operand; a key or a value to the fresh ones, and into its page.
  MK_DEVICE void put(const Head& h, const Eight& x) const {
    if (h.kind == Kind::kNone) return;
    const Quad bits = x.template packed<Shape::kHalf>();
    uint8_t* scratch = block().scratch;
    if (h.kind == Kind::kQuery) {
      *reinterpret_cast<Quad*>(scratch + i / 4 * 512 + (h.place * 4 + i % 4) * 16) = bits;
      return;
    }
    const bool value = h.kind == Kind::kValue;
    const uint32_t token = h.position % kPage;
    *reinterpret_cast<Quad*>(scratch + Shape::kQueryBytes + h.place * Shape::kFreshBytes + value * kDim * 2 + i * 16) = bits;
    char* pool = reinterpret_cast<char*>(l.w.args.kv + f.layer * l.w.args.kv_layer_stride);
    char* page = pool + (uint64_t(h.page) * kKvHeads + item.head) * Shape::kUnitBytes;
    if (!value) {
      *reinterpret_cast<Quad*>(page + Shape::key_at(token, i * 8)) = bits;
      return;
    }
    Shape::put_value(page, token, i * 8, bits);
  }
};

}  // namespace megakernel::dev
