// What the loaders do for attention: queries, and keys and values of this step's rows, from the workspace into scratch,
// normed, rotated, rounded. A head is in one warp, four elements a lane, or eight. Part of cuda_pages.cuh.
#pragma once

namespace megakernel::dev {

// Consecutive items of one head and row group share what was loaded, if one block takes all their q-rows.
struct LoadedHeads {
  uint32_t head = ~0u, group_row = ~0u;

  // 0 if the block is there already; else it is to be loaded, and counts as there. A number, as predicates are few.
  template <class Items>
  MK_DEVICE uint32_t missing(const Items& item, uint32_t q_rows) {
    const uint32_t other = (head ^ item.head) | (group_row ^ item.group_row) | (q_rows > kBlockRows ? ~0u : 0);
    head = item.head, group_row = item.group_row;
    return other;
  }
};

// The stretch whose queries are in scratch.
struct LentQueries {
  uint16_t head = 0xffff, group_row = 0xffff;

  // Whether they are the item's; from now on they are.
  MK_DEVICE bool known(const Item& item) {
    const bool same = head == item.head && group_row == item.group_row;
    head = item.head, group_row = item.group_row;
    return same;
  }
};

// A consumer that does as the loaders do.
struct LoadingConsumer {
  static constexpr uint32_t kWarps = kConsumers;
  Worker w;

  MK_DEVICE static uint32_t index() { return threadIdx.x / 32; }
};

// kStretch: of queries of an item in a stretch, which the consumers bring. Role: Loader or LoadingConsumer.
template <tasks::AttentionConfig kConfig, class Items, bool kStretch = false, class Role = Loader>
struct HeadLoader : PageShape<kConfig> {
  using Shape = PageShape<kConfig>;
  using Fields = abi::AttentionFields;
  using Shape::kDim, Shape::kGroup, Shape::kHeads, Shape::kKvHeads, Shape::kPage, Shape::kPiece, Shape::kHalfRotary;
  MK_DEVICE static constexpr uint32_t lanes(uint32_t parts) { return parts <= 4 ? 4 : parts <= 8 ? 8 : parts <= 16 ? 16 : 32; }
  // Elements of a lane: four where the heads of one row are loaded at once all the same.
  static constexpr uint32_t kOneRow = (kGroup < kBlockRows ? kGroup : kBlockRows) + 2;
  static constexpr uint32_t kFewest = kDim <= 128 && kOneRow * lanes(kDim / 4) <= kLoaders * 32 ? 4 : 8;
  // Of a stretch eight, if that changes neither the order in which squares are added nor who turns with whom.
  static constexpr bool kWhole = !kConfig.q_norm && (kConfig.interleaved || kHalfRotary % 8 == 0);
  static constexpr uint32_t kEach = kStretch && kWhole ? 8 : kFewest;
  static constexpr uint32_t kParts = kDim / kEach, kLanes = lanes(kParts);       // of a head
  static constexpr uint32_t kAtOnce = Role::kWarps * 32 / kLanes;                // heads, of a stretch as many shares of rows
  static constexpr uint32_t kTurn = kHalfRotary / kEach;  // lanes between the halves of a rotation
  // Of a stretch a lane takes up to four heads of a row: they turn by the same angles.
  static constexpr uint32_t kShare = kGroup < 4 ? kGroup : 4, kShares = (kGroup + kShare - 1) / kShare;
  static_assert(kConfig.interleaved || kHalfRotary % kEach == 0, "a lane's elements turn with those of one other lane");

  using Elements = Part<kEach>;
  enum class Kind { kQuery, kKey, kValue, kNone };
  static constexpr uint32_t kFreshFrom = Shape::kQueryBytes;

  // What a lane has.
  struct Head {
    Kind kind = Kind::kNone;
    uint32_t place = 0, position = 0, page = 0;  // place: q-row of the block or stretch, or row of the fresh ones
    const float* from = nullptr;
    Elements cos, sin, gamma;
  };

  // The elements of a head that other workers publish, as words that may not be there yet.
  struct Words {
    Quad q[Elements::kQuads];

    MK_DEVICE void fetch(const Head& h) {
#pragma unroll
      for (uint32_t j = 0; j < Elements::kQuads; ++j) q[j] = load_quad(h.from + 4 * j);
    }
  };

  Role& l;
  const Fields& f;
  const Items& item;
  const uint32_t i = l.w.warp_lane() % kLanes;  // which part

  // Head `n` of the block: its q-rows, then a key and a value for each fresh row.
  MK_DEVICE Head find(uint32_t base, uint32_t n) const {
    Worker& w = l.w;
    Head h;
    h.cos.zero(), h.sin.zero(), h.gamma.zero();
    const uint32_t queries = tasks::least(kBlockRows, item.group_rows * kGroup - base);
    const typename Shape::Fresh fresh(base, item.group_rows);
    if (n >= queries + 2 * (fresh.end - fresh.first) || i >= kParts) return h;
    const bool query = n < queries;
    const uint32_t other = n - queries, m = base + n;
    const uint32_t r = item.group_row + (query ? m / kGroup : fresh.first + other / 2);
    const abi::Row& row = w.header->row[r];
    h.position = row.position;
    if (!query) {  // only the tile with the item that it belongs to takes it
      const uint32_t piece = row.position / kPiece;
      if (piece < item.piece || (piece - item.piece) % f.splits != 0) return h;
      h.page = page_index(row);
    }
    h.kind = query ? Kind::kQuery : other % 2 == 0 ? Kind::kKey : Kind::kValue;
    h.place = query ? n : other / 2;
    complete(h, r, query ? m : other);
    return h;
  }

  // The rest of a head of row `r` of the step. m: of a query its q-row, else odd of a value.
  MK_DEVICE void complete(Head& h, uint32_t r, uint32_t m) const {
    Worker& w = l.w;
    const bool query = h.kind == Kind::kQuery;
    const uint32_t head = query ? item.head * kGroup + m % kGroup : kHeads + item.head + m % 2 * kKvHeads;
    h.from = tasks::workspace<const float>(w, f.qkv) + uint64_t(r) * Shape::kColumns + head * kDim + i * kEach;
    if (normed(h.kind)) h.gamma.load_fixed(tasks::weights<float>(w, query ? f.q_gamma : f.k_gamma) + i * kEach);
    if (h.kind != Kind::kValue) angles(h);
  }
  MK_DEVICE uint32_t page_index(const abi::Row& row) const {
    return load_word(reinterpret_cast<const uint32_t*>(l.w.args.page_table) + uint64_t(row.slot) * l.w.args.pages_per_slot +
                     row.position / kPage);
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
      for (uint32_t j = 0; j < kEach / 2; ++j) {
        const uint32_t at = i * (kEach / 2) + j;
        if (at < kHalfRotary) h.cos.v[j] = load_constant(cos + at), h.sin.v[j] = load_constant(sin + at);
      }
    } else if (i < 2 * kTurn) {
      h.cos.load_fixed(cos + i % kTurn * kEach);
      h.sin.load_fixed(sin + i % kTurn * kEach);
    }
  }

  // Share `n` of the stretch's queries: its first one.
  MK_DEVICE Head find_share(uint32_t n) const {
    Head h;
    h.cos.zero(), h.sin.zero(), h.gamma.zero();
    if (n >= item.group_rows * kShares || i >= kParts) return h;
    const uint32_t r = n / kShares, m = r * kGroup + n % kShares * kShare;
    h.position = l.w.header->row[item.group_row + r].position;
    h.kind = Kind::kQuery;
    h.place = m;
    complete(h, item.group_row + r, m);
    return h;
  }

  // The queries of a stretch.
  MK_DEVICE void put_queries() {
#pragma unroll 1
    for (uint32_t base = 0; base < item.group_rows * kShares; base += kAtOnce) {
      Head h[kShare];
      Words words[kShare];
      h[0] = find_share(base + Role::index() * (32 / kLanes) + l.w.warp_lane() / kLanes);
#pragma unroll
      for (uint32_t j = 0; j < kShare; ++j) {
        h[j] = h[0];
        h[j].place += j, h[j].from += j * kDim;
        if (kGroup % kShare != 0 && h[0].place % kGroup + j >= kGroup) h[j].kind = Kind::kNone;
        words[j] = ask(h[j]);
      }
      wait<kShare>(h, words);
#pragma unroll
      for (uint32_t j = 0; j < kShare; ++j) {
        Elements x;
        prepare(h[j], words[j], x);
        put(h[j], bits_of(x));
      }
    }
  }

  // Of the tile's rows of the step head `n`: a key or a value.
  MK_DEVICE Head find_own(uint32_t share, uint32_t n) const {
    Head h;
    h.cos.zero(), h.sin.zero(), h.gamma.zero();
    const uint32_t r = share + n / 2 * f.splits;
    if (r >= l.w.header->rows || i >= kParts || !Shape::in_stretch(*l.w.header, r)) return h;
    const abi::Row& row = l.w.header->row[r];
    h.position = row.position;
    h.page = page_index(row);
    h.kind = n % 2 == 0 ? Kind::kKey : Kind::kValue;
    complete(h, r, n);
    return h;
  }

  // Keys and values of rows in stretches into their pages, before these are copied: a tile of the head has every splits-th
  // row. Returns of how many rows, in stretches or not, the warp has done a key or a value.
  MK_DEVICE uint32_t store_own(uint32_t share) {
    const uint32_t rows = l.w.header->rows, heads = share < rows ? (rows - share + f.splits - 1) / f.splits * 2 : 0;
    uint32_t done = 0;
#pragma unroll 1
    for (uint32_t n = Role::index() * (32 / kLanes); n < heads; n += kAtOnce) {
      const Head one[1] = {find_own(share, n + l.w.warp_lane() / kLanes)};
      Words words[1] = {ask(one[0])};
      wait<1>(one, words);
      Elements x;
      prepare(one[0], words[0], x);
      store(one[0], x, Shape::kEight ? exponent_of(x) : 0);
      done += tasks::least(32 / kLanes, heads - n);
    }
    return done;
  }

  MK_DEVICE void run(uint32_t base) {
    const typename Shape::Fresh fresh(base, item.group_rows);
    const uint32_t heads = tasks::least(kBlockRows, item.group_rows * kGroup - base) + 2 * (fresh.end - fresh.first);
    const uint32_t own = Role::index() * (32 / kLanes) + l.w.warp_lane() / kLanes;
    bool begun = false;
#pragma unroll 1
    for (uint32_t n = 0; n == 0 || n < heads; n += kAtOnce) {
      const Head h = find(base, n + own);
      if (!begun) l.begin();
      begun = true;
      const Head one[1] = {h};
      Words words[1] = {ask(h)};
      wait<1>(one, words);
      Elements x;
      prepare(h, words[0], x);
      if (!Shape::kEight || h.kind == Kind::kQuery) put(h, bits_of(x));
      const uint32_t exponent = Shape::kEight ? exponent_of(x) : 0;
      if constexpr (Shape::kEight) put_codes(h, x, exponent);
      if (n + kAtOnce >= heads) l.end();
      store(h, x, exponent);
    }
  }

  MK_DEVICE void prepare(const Head& h, const Words& words, Elements& x) const {
    x.set(words.q);
    norm(h, x);
    turn(h, x);
  }

  MK_DEVICE Words ask(const Head& h) const {
    Words words;
#pragma unroll
    for (Quad& v : words.q) v = Quad{0, 0, 0, 0};
    if (h.kind != Kind::kNone) words.fetch(h);
    return words;
  }
  template <uint32_t kCount>
  MK_DEVICE void wait(const Head (&h)[kCount], Words (&words)[kCount]) {
    l.w.spin([&] {
      bool missing = false;
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) {
        uint32_t all = worst(words[i].q[0]);
        if constexpr (Elements::kQuads > 1) all = larger(all, worst(words[i].q[1]));
        if (all == kInvalid) words[i].fetch(h[i]);
        missing |= all == kInvalid;
      }
      return !__any_sync(0xffffffffu, missing);
    }, abi::FaultKind::kValueBudget, 0);
    if constexpr (__is_same(Role, Loader)) trace::ready_now(l.w, abi::Role::kLoader);
  }

  MK_DEVICE void norm(const Head& h, Elements& x) const {
    if constexpr (kConfig.q_norm || kConfig.k_norm) {
      float s = x.squares();
#pragma unroll
      for (uint32_t d = kLanes / 2; d > 0; d /= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
      if (normed(h.kind)) x.scale(rsqrtf(s * (1.0f / float(kDim)) + f.eps), h.gamma);
    }
  }

  MK_DEVICE void turn(const Head& h, Elements& x) const {
    if constexpr (kHalfRotary == 0) return;
    const bool wanted = h.kind == Kind::kQuery || h.kind == Kind::kKey;
    if constexpr (kConfig.interleaved) {
#pragma unroll
      for (uint32_t j = 0; j < kEach / 2; ++j) {
        if (wanted && i * (kEach / 2) + j < kHalfRotary) rotate(x.v[2 * j], x.v[2 * j + 1], h.cos.v[j], h.sin.v[j]);
      }
    } else {
      const bool low = i < kTurn, turned = wanted && i < 2 * kTurn;
      const uint32_t lane = l.w.warp_lane(), partner = turned ? (low ? lane + kTurn : lane - kTurn) : lane;
#pragma unroll
      for (uint32_t j = 0; j < kEach; ++j) {
        const float other = __shfl_sync(0xffffffffu, x.v[j], partner);
        const float turning = other * h.sin.v[j];  // rounded first, see `rotate`
        if (turned) x.v[j] = fmaf(x.v[j], h.cos.v[j], low ? -turning : turning);
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- 8-bit keys and values
  // Of the head of which this lane has a part; lanes without one have zeros.
  MK_DEVICE static uint32_t exponent_of(const Elements& x) {
    uint32_t top = 0;
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) top = larger(top, as_bits(x.v[j]) & 0x7fffffff);
#pragma unroll
    for (uint32_t d = kLanes / 2; d > 0; d /= 2) top = larger(top, __shfl_xor_sync(0xffffffffu, top, d));
    return power_of(top);
  }
  MK_DEVICE static Codes<kEach> codes_of(const Elements& x, float inverse) {
    Codes<kEach> codes{};
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) codes.word[j / 4] |= uint32_t(to_f8(x.v[j], inverse)) << j % 4 * 8;
    return codes;
  }
  // To the fresh ones: key, value, their exponents.
  MK_DEVICE void put_codes(const Head& h, const Elements& x, uint32_t exponent) const {
    if (h.kind == Kind::kNone || h.kind == Kind::kQuery) return;
    const uint32_t value = h.kind == Kind::kValue;
    uint8_t* fresh = block().scratch + kFreshFrom + h.place * Shape::kFreshBytes;
    *reinterpret_cast<Codes<kEach>*>(fresh + value * kDim + i * kEach) = codes_of(x, inverse_power(exponent));
    if (i == 0) fresh[2 * kDim + value] = uint8_t(exponent);
  }
  // A key or a value into its page, for the steps to come; in this one only those of stretches are read there.
  MK_DEVICE void store(const Head& h, const Elements& x, uint32_t exponent) const {
    if constexpr (Shape::kEight) {
      put_page(h, codes_of(x, inverse_power(exponent)), exponent);
    } else {
      put_page(h, bits_of(x));
    }
  }
  MK_DEVICE void put_page(const Head& h, const Codes<kEach>& codes, uint32_t exponent) const {
    if (!stored(h)) return;
    const uint32_t token = h.position % kPage, value = h.kind == Kind::kValue;
    char* page = page_of(h);
    if (i == 0) page[Shape::kExponents + value * kPage + token] = char(exponent);
    if (value) {
      Shape::put_value(page, token, i * kEach, codes.word);
    } else {
      *reinterpret_cast<Codes<kEach>*>(page + Shape::key_at(token, i * kEach)) = codes;
    }
  }
  MK_DEVICE static bool stored(const Head& h) { return h.kind == Kind::kKey || h.kind == Kind::kValue; }
  MK_DEVICE char* page_of(const Head& h) const {
    char* pool = reinterpret_cast<char*>(l.w.args.kv + f.layer * l.w.args.kv_layer_stride);
    return pool + (uint64_t(h.page) * kKvHeads + item.head) * Shape::kUnitBytes;
  }

  // ---------------------------------------------------------------------------------------------- 16-bit ones, and queries
  // The elements of a lane, rounded.
  struct alignas(kEach * 2) Bits {
    uint32_t word[kEach / 2];
  };
  MK_DEVICE static Bits bits_of(const Elements& x) {
    Bits bits;
#pragma unroll
    for (uint32_t j = 0; j < kEach / 2; ++j) bits.word[j] = pack<Shape::kHalf>(x.v[2 * j], x.v[2 * j + 1]);
    return bits;
  }

  // A query into the A operand; a key or a value to the fresh ones.
  MK_DEVICE void put(const Head& h, const Bits& bits) const {
    if (h.kind == Kind::kNone) return;
    const uint32_t octet = i * kEach / 8, within = i * kEach % 8 * 2;
    const uint32_t block_at = kStretch ? h.place / kBlockRows * Shape::kQueryBytes : 0;
    const uint32_t place = kStretch ? h.place % kBlockRows : h.place;
    const uint32_t query = block_at + octet / 4 * 512 + (place * 4 + octet % 4) * 16 + within;
    const uint32_t fresh = kFreshFrom + h.place * Shape::kFreshBytes + (h.kind == Kind::kValue) * kDim * 2 + i * kEach * 2;
    *reinterpret_cast<Bits*>(block().scratch + (h.kind == Kind::kQuery ? query : fresh)) = bits;
  }

  MK_DEVICE void put_page(const Head& h, const Bits& bits) const {
    if (!stored(h)) return;
    const uint32_t token = h.position % kPage;
    char* page = page_of(h);
    if (h.kind == Kind::kKey) {
      *reinterpret_cast<Bits*>(page + Shape::key_at(token, i * kEach)) = bits;
      return;
    }
    Shape::put_value(page, token, i * kEach, bits.word);
  }
};

}  // namespace megakernel::dev
