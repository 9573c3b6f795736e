// What attention works on: sizes and places, the items of a worker, parts of a head. Part of cuda_pages.cuh.
#pragma once

namespace megakernel::dev {

constexpr uint32_t kRunTokens = 32;
constexpr uint32_t kBlockRows = 8;  // q-rows that go through an item together

template <uint32_t kCount>
struct alignas(kCount) Codes {
  uint32_t word[kCount / 4];
};

// A page of one KV head fills a stage, or its keys one and its values the next. Its keys are the B operand of queries x
// keys (8 tokens by 32 elements, 16 bytes a lane), its values that of weights x values (32 tokens by 8 elements); the order
// of tokens inside is the one in which the first product leaves its result, so that the result is the A operand of the
// second as it stands. Of 8-bit pages a lane has 8 codes where it has 16 bytes of others, which become bfloat16 in registers,
// and the exponents of keys and values are behind both. They are applied in float32, to scores and weights: a lane's 8 of these
// are of the same tokens.
template <tasks::AttentionConfig kConfig>
struct PageShape {
  static constexpr uint32_t kDim = kConfig.head_dim, kGroup = kConfig.group, kKvHeads = kConfig.kv_heads;
  static constexpr uint32_t kHeads = kKvHeads * kGroup, kColumns = (kHeads + 2 * kKvHeads) * kDim;
  static constexpr uint32_t kPage = kConfig.page_tokens, kPiece = kConfig.piece_tokens;
  static constexpr uint32_t kPiecePages = kPiece / kPage, kRuns = kPiece / kRunTokens;
  static constexpr bool kEight = kConfig.kv_dtype == DType::kF8;
  static constexpr uint32_t kElement = bytes_of(kConfig.kv_dtype), kOctet = 8 * kElement;  // kOctet: bytes of a lane
  static constexpr uint32_t kTile = 32 * kOctet;                                           // of a warp
  static constexpr uint32_t kKeyBytes = kDim * kPage * kElement, kExponents = 2 * kKeyBytes;  // kExponents: where they are
  static constexpr uint32_t kUnitBytes = kExponents + (kEight ? 2 * kPage : 0);
  static constexpr uint32_t kChunks = kDim / 32, kValueTiles = kDim / 8;
  static constexpr uint32_t kHalfRotary = kConfig.rotary_dim / 2;
  static constexpr uint32_t kPartial = kDim + 2;
  static constexpr bool kHalf = kConfig.kv_dtype == DType::kF16;
  // Scratch of an item: queries as A operand, keys and values of this step's rows, what is merged.
  static constexpr uint32_t kQueryBytes = kChunks * 512, kFreshBytes = 2 * kDim * kElement + (kEight ? 16 : 0);
  static constexpr uint32_t kFreshRows = (kBlockRows + kGroup - 1) / kGroup, kMergeAt = kQueryBytes + kFreshRows * kFreshBytes;
  // In wide steps the rows of one slot, where they are more than kTogether, are dealt in stretches, each with its own items:
  // pairs of blocks of q-rows, each with kSharers consumers, who take it through all runs of the piece and share the columns
  // of its values. Scratch of such an item: the queries of all pairs.
  static constexpr uint32_t kPairRows = 2 * kBlockRows, kPairBytes = 2 * kQueryBytes;
  static constexpr uint32_t kTogether = kPairRows > kGroup ? kPairRows / kGroup : 1, kWideRoom = Sums::below(1);
  static constexpr uint32_t kSharers = kDim <= 64 ? 1 : kDim <= 128 ? 2 : 4, kMostPairs = kConsumers / kSharers;
  static constexpr uint32_t kFitting = kWideRoom / kPairBytes, kPairs = kFitting < kMostPairs ? kFitting : kMostPairs;
  static constexpr uint32_t kStretchRows = kWide ? kPairs * kPairRows / kGroup : 0;  // at most; none: no stretches

  // Whether a step has stretches.
  MK_DEVICE static bool stretches(const abi::StepHeader& h) {
    if (kStretchRows == 0 || h.rows <= kNarrowRows) return false;
    bool some = false;
    for (uint32_t r = lane_of_warp(); r + kTogether < h.rows; r += 32) some |= h.row[r].slot == h.row[r + kTogether].slot;
    return __any_sync(0xffffffffu, some);
  }
  // Of such a step, whether row r is in a stretch: rows of a slot are consecutive.
  MK_DEVICE static bool in_stretch(const abi::StepHeader& h, uint32_t r) {
    const uint32_t slot = h.row[r].slot, first = r > kTogether ? r - kTogether : 0;
#pragma unroll 1
    for (uint32_t i = r; h.row[i].slot == slot; --i) {
      if (i + kTogether < h.rows && h.row[i + kTogether].slot == slot) return true;
      if (i == first) break;
    }
    return false;
  }

  // Where element `dim` of token `t` of a page is.
  MK_DEVICE static uint32_t key_at(uint32_t t, uint32_t dim) {
    return t / 8 * (kDim * kOctet) + dim / 32 * kTile + (t % 8 * 4 + dim % 32 / 8) * kOctet + dim % 8 * kElement;
  }
  MK_DEVICE static uint32_t value_at(uint32_t t, uint32_t dim) {
    return kKeyBytes + t / 32 * (kDim * 4 * kOctet) + dim / 8 * kTile + (dim % 8 * 4 + t % 8 / 2) * kOctet +
           t % 32 / 8 * (2 * kElement) + t % 2 * kElement;
  }

  // What a lane has of a tile, as 16-bit operands.
  MK_DEVICE static Quad octet(const uint8_t* at) {
    if constexpr (!kEight) return *reinterpret_cast<const Quad*>(at);
    const Codes<8> codes = *reinterpret_cast<const Codes<8>*>(at);
    return {low_codes(codes.word[0]), high_codes(codes.word[0]), low_codes(codes.word[1]), high_codes(codes.word[1])};
  }

  // Elements of a value from an even one on, two a word or four codes: each goes to a place of its own.
  template <uint32_t kWords>
  MK_DEVICE static void put_value(void* page, uint32_t token, uint32_t dim, const uint32_t (&words)[kWords]) {
    char* at = static_cast<char*>(page) + value_at(token, dim);
#pragma unroll
    for (uint32_t j = 0; j < 4 / kElement * kWords; ++j) {
      if constexpr (kEight) {
        at[j * 32] = char(words[j / 4] >> (j % 4 * 8));
      } else {
        *reinterpret_cast<uint16_t*>(at + j * 64) = uint16_t(words[j / 2] >> (j % 2 * 16));
      }
    }
  }

  // Rows of a group whose first q-row is in the block from `base` on: [first, end) of the group.
  struct Fresh {
    uint32_t first, end;
    MK_DEVICE Fresh(uint32_t base, uint32_t rows) : first((base + kGroup - 1) / kGroup) {
      end = tasks::least((base + kBlockRows + kGroup - 1) / kGroup, rows);
    }
  };
};

// Where a walk over the items of a record is.
struct Item {
  uint32_t tile, end, share;  // share: of the tile among those of its head
  uint32_t head, group_row, group_rows, piece, piece_end, count, page, last_page;  // count: items so far, modulo splits
};

// Of a slot whose rows are dealt in stretches: they are [row, end) of the step, `each` to a stretch; 0: all are one group.
// Its items are one sequence, stretch by stretch, of which `passed` belong to stretches before; a tile has those in
// [first_item, end_item), so most of its items have the same queries.
struct Stretches {
  uint32_t row, end, each, passed, first_item, end_item;
};
template <bool kStretches>
struct SlotOf {};
template <>
struct SlotOf<true> {
  Stretches slot;
};

// The items of a record in order. The first `next` goes to the first. kStretches: of a step that has some.
template <tasks::AttentionConfig kConfig, bool kStretches>
struct PageItems : Item, SlotOf<kStretches> {
  using Shape = PageShape<kConfig>;
  static constexpr uint32_t kPage = Shape::kPage, kPiece = Shape::kPiece, kPiecePages = Shape::kPiecePages;
  const abi::StepHeader& h;
  const abi::AttentionFields& f;

  MK_DEVICE PageItems(const abi::StepHeader& header, const abi::Record& record, const abi::AttentionFields& fields)
      : h(header), f(fields) {
    tile = record.tile_begin, end = record.tile_begin + record.tile_count;
    begin_tile();
  }
  MK_DEVICE PageItems(const abi::StepHeader& header, const Item& item, const Stretches& slot, const abi::AttentionFields& fields)
      : Item(item), SlotOf<kStretches>{slot}, h(header), f(fields) {}
  MK_DEVICE bool next() {
    while (tile < end) {
      piece += step();
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
  MK_DEVICE bool in_stretches() const {
    if constexpr (kStretches) return this->slot.each > 0;
    return false;
  }
  MK_DEVICE uint32_t step() const { return in_stretches() ? 1 : f.splits; }

  // Of an item in a stretch, the first page of its slot in which rows of this step are; else none.
  MK_DEVICE uint32_t fresh_page() const {
    if constexpr (kStretches) {
      if (in_stretches()) return h.row[this->slot.row].position / kPage;
    }
    return ~0u;
  }
  // All that this tile has of the stretch counts as taken.
  MK_DEVICE void pass_stretch() { piece = piece_end - 1; }
  MK_DEVICE void set_pages() {
    page = tasks::most(piece * kPiecePages, tasks::first_seen(h.row[group_row].position, f.window) / kPage);
    last_page = tasks::least((piece + 1) * kPiecePages - 1, h.row[group_row + group_rows - 1].position / kPage);
  }

 protected:
  MK_DEVICE void begin_tile() {
    head = tile / f.splits;
    share = tile - head * f.splits;
    count = head % f.splits;
    group_row = group_rows = piece = piece_end = 0;
    if constexpr (kStretches) this->slot = {};
  }

  MK_DEVICE bool next_group() {
    group_row += group_rows;
    group_rows = 0;
    piece = piece_end;  // not an item
    if (group_row >= h.rows) return false;
    if constexpr (kStretches) {
      next_stretch();
    } else {
      group_rows = 1;
      while (group_row + group_rows < h.rows && h.row[group_row + group_rows].slot == h.row[group_row].slot) ++group_rows;
    }
    const uint32_t first = first_piece(group_row);
    piece_end = last_piece(group_row + group_rows) + 1;
    if constexpr (kStretches) {
      if (in_stretches()) {
        begin_stretch(first);
        return true;
      }
    }
    piece = first + place();
    pass(piece_end - first);
    return true;
  }
  MK_DEVICE uint32_t first_piece(uint32_t row) const { return tasks::first_seen(h.row[row].position, f.window) / kPiece; }
  MK_DEVICE uint32_t last_piece(uint32_t end_row) const { return h.row[end_row - 1].position / kPiece; }
  // The first of the items to come that is this tile's; and so many items are passed.
  MK_DEVICE uint32_t place() const { return share >= count ? share - count : share + f.splits - count; }
  MK_DEVICE void pass(uint32_t items) {
    count += items;
    if (count >= f.splits) count %= f.splits;
  }

  MK_DEVICE void next_stretch() {
    Stretches& slot = this->slot;
    if (group_row >= slot.end) {
      group_rows = 1;
      while (in_group(group_rows)) group_rows += in_group(group_rows + 7) ? 8 : 1;
      slot = {group_row, group_row + group_rows, rows_of_stretch(), 0, 0, 0};
      if (in_stretches()) deal();
    }
    group_rows = slot.end - group_row;
    if (in_stretches()) group_rows = tasks::least(slot.each, group_rows);
  }
  // The slot's items to the tiles of the head, each the same number, or one more.
  MK_DEVICE void deal() {
    Stretches& slot = this->slot;
    uint32_t items = 0;
    for (uint32_t r = slot.row; r < slot.end; r += slot.each) {
      items += last_piece(tasks::least(r + slot.each, slot.end)) + 1 - first_piece(r);
    }
    slot.first_item = place() * items / f.splits;
    slot.end_item = (place() + 1) * items / f.splits;
    pass(items);
  }
  // The tile's pieces of the stretch that the group now has.
  MK_DEVICE void begin_stretch(uint32_t first) {
    Stretches& slot = this->slot;
    const uint32_t pieces = piece_end - first;
    piece = first + (slot.first_item > slot.passed ? slot.first_item - slot.passed : 0);
    piece_end = first + (slot.end_item > slot.passed ? tasks::least(slot.end_item - slot.passed, pieces) : 0);
    slot.passed += pieces;
  }
  // Whether the row so far behind the group's first is of its slot.
  MK_DEVICE bool in_group(uint32_t behind) const {
    return group_row + behind < h.rows && h.row[group_row + behind].slot == h.row[group_row].slot;
  }

  // Of the slot whose rows the group now has: so many that each tile of the head gets an item, if there are as many.
  MK_DEVICE uint32_t rows_of_stretch() const {
    if (group_rows <= Shape::kTogether) return 0;
    const uint32_t pieces = last_piece(group_row + group_rows) + 1 - first_piece(group_row);
    const uint32_t rows = (group_rows * pieces + f.splits - 1) / f.splits;
    return tasks::least(tasks::most(rows, (Shape::kPairRows + Shape::kGroup - 1) / Shape::kGroup), Shape::kStretchRows);
  }
};

// Where a walk by lanes is: `count` is the number of the tile's next item among those of the rows that the lanes look at, from
// `row` on, and `piece_end` how many these have, or kUnknown.
template <bool kRounds>
struct RowsAt {
  static constexpr uint32_t row = 0;
  MK_DEVICE bool next_rows(uint32_t) { return false; }
  MK_DEVICE void begin_rows() {}
};
template <>
struct RowsAt<true> {
  uint32_t row;
  MK_DEVICE bool next_rows(uint32_t rows) {
    row += 32;
    return row < rows;
  }
  MK_DEVICE void begin_rows() { row = 0; }
};

// The same items in the same order, in a step without stretches. Each lane looks at a row, so that an item costs the same
// whatever the rows before it; for a single row that is more than a walk.
template <tasks::AttentionConfig kConfig>
struct ItemsByLane : PageItems<kConfig, false>, RowsAt<(abi::kMaxRows > 32)> {
  using Base = PageItems<kConfig, false>;
  using Base::h, Base::f, Base::tile, Base::end, Base::count, Base::piece, Base::piece_end, Base::group_row, Base::group_rows;
  static constexpr uint32_t kUnknown = ~0u, kLanes = abi::kMaxRows > 32 ? 32 : abi::kMaxRows;  // that may have a row

  MK_DEVICE ItemsByLane(const abi::StepHeader& header, const abi::Record& record, const abi::AttentionFields& fields)
      : Base(header, record, fields) {
    begin_rows_of_tile();
  }
  MK_DEVICE bool next() {
#pragma unroll 1
    while (tile < end) {
      if (count < piece_end && find()) return true;
      count -= piece_end;
      piece_end = kUnknown;
      if (this->next_rows(h.rows)) continue;
      if (++tile == end) break;
      Base::begin_tile();
      begin_rows_of_tile();
    }
    return false;
  }

 private:
  MK_DEVICE void begin_rows_of_tile() {
    count = Base::place();
    piece_end = kUnknown;
    this->begin_rows();
  }

  // A row adds to the items of its group those of the pieces that no row before it is in.
  MK_DEVICE bool find() {
    const uint32_t lane = lane_of_warp(), mine = this->row + lane;
    const bool there = mine < h.rows;
    const uint32_t r = there ? mine : 0;
    const auto& own = h.row[r];
    const auto& before = h.row[r > 0 ? r - 1 : 0];
    const uint32_t position = own.position, slot = own.slot, slot_before = before.slot;  // loads side by side
    const uint32_t next_piece = before.position / Base::kPiece + 1;
    const uint32_t first_piece = tasks::first_seen(position, f.window) / Base::kPiece;
    const bool first = there & ((r == 0) | (slot != slot_before));
    const uint32_t begin = first ? first_piece : next_piece, items = there ? position / Base::kPiece + 1 - begin : 0;
    uint32_t sum = items;
#pragma unroll
    for (uint32_t d = 1; d < kLanes; d *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    const uint32_t firsts = __ballot_sync(0xffffffffu, first), beyond = __ballot_sync(0xffffffffu, sum > count);
    piece_end = __shfl_sync(0xffffffffu, sum, kLanes - 1);
    if (count >= piece_end) return false;
    const uint32_t at = __ffs(beyond) - 1, up_to = (2u << at) - 1;
    piece = __shfl_sync(0xffffffffu, begin + count - (sum - items), at);
    const uint32_t later = firsts & ~up_to;
    uint32_t last = later ? this->row + __ffs(later) - 2 : tasks::least(this->row + kLanes, h.rows) - 1;
    group_row = this->row + at;
    if constexpr (kLanes < abi::kMaxRows) {  // the group may have rows that no lane looks at
      const uint32_t of = h.row[group_row].slot;
      while (!later && last + 1 < h.rows && h.row[last + 1].slot == of) ++last;
      while (group_row > 0 && h.row[group_row - 1].slot == of) --group_row;
    } else {
      group_row = 31 - __clz(firsts & up_to);
    }
    group_rows = last + 1 - group_row;
    count += f.splits;
    Base::set_pages();
    return true;
  }
};

// Those of a record; kSeveral: of a step that may have several rows.
template <tasks::AttentionConfig kConfig, bool kSeveral, bool kStretches>
MK_DEVICE auto items_of(const abi::StepHeader& header, const abi::Record& record, const abi::AttentionFields& fields) {
  if constexpr (kSeveral && !kStretches) {
    return ItemsByLane<kConfig>(header, record, fields);
  } else {
    return PageItems<kConfig, kStretches>(header, record, fields);
  }
}

// Consecutive elements of a head: what a lane of the loaders has.
template <uint32_t kCount>
struct Part {
  static constexpr uint32_t kQuads = kCount / 4;
  float v[kCount];

  MK_DEVICE void zero() {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) v[i] = 0.0f;
  }
  MK_DEVICE void load_fixed(const float* p) {
    Quad q[kQuads];
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) q[i] = load_constant_quad(p + 4 * i);
    set(q);
  }
  MK_DEVICE void set(const Quad (&q)[kQuads]) {
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) {
      v[4 * i] = as_float(q[i].x), v[4 * i + 1] = as_float(q[i].y);
      v[4 * i + 2] = as_float(q[i].z), v[4 * i + 3] = as_float(q[i].w);
    }
  }
  MK_DEVICE float squares() const {
    float s = v[0] * v[0];
#pragma unroll
    for (uint32_t i = 1; i < kCount; ++i) s = fmaf(v[i], v[i], s);
    return s;
  }
  MK_DEVICE void scale(float factor, const Part& gamma) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) v[i] = v[i] * factor * gamma.v[i];
  }
};

// (x, y) -> (x cos - y sin, y cos + x sin). Said which product is rounded first: left alone, compilers differ from function
// to function.
MK_DEVICE void rotate(float& x, float& y, float cos, float sin) {
  const float a = fmaf(x, cos, -(y * sin)), b = fmaf(x, sin, y * cos);
  x = a;
  y = b;
}

}  // namespace megakernel::dev
