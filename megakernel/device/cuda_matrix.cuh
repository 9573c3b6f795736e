// Rows of packed weights times activations, on the matrix cores (see tasks/matmul.py for the formula).
//
// A unit of the packed weights is 8 rows x k_unit columns in operand order (see kOperandBytes) and fills a stage. The 8
// consumers share the columns of every unit: warp w takes the w-th eighth of its 32-column chunks. Tiles go in blocks of 4, units of a block
// k-major, so a fragment of the input serves 4 tiles. An output is the sum over warps, in order, of two chains that run
// over the warp's chunks in order: whatever the rows of the step, the tiles of the record or the number of workers.
//
// The input of one row comes from the loaders, through scratch; that of several rows through the room (cuda_room.cuh), or
// where there is none, each consumer fetches it from other workers itself.
#pragma once

namespace megakernel::dev {

constexpr uint32_t kBlockTiles = 4;
constexpr uint32_t kLookStages = 6;  // whose arrival consumers look at before the input is there
constexpr uint32_t kMaxChunks = 4;  // 32-column chunks of a unit in one warp

// Memory for partial sums: of each row and warp the kBlockTiles * 8 outputs, then the sum of squares.
// `rows` is that of the step, for every task of the step, so that no two of its uses overlap.
struct Sums {
  static constexpr uint32_t kOutputs = kBlockTiles * 8;

  // Rows that the sums of a step have room for. In a wide one only products with one sampled row have sums.
  MK_DEVICE static uint32_t room(const abi::StepHeader& h) {
    if constexpr (kWide) {
      if (h.rows > kNarrowRows) return 1;
    }
    return h.rows;
  }
  MK_DEVICE static constexpr uint32_t bytes(uint32_t rows) { return (kConsumers * rows * kOutputs + kConsumers * rows) * 4; }
  // Two, so that the storer reads one while the consumers fill the other; but what is left for inputs is at least what a
  // full step leaves.
  MK_DEVICE static constexpr uint32_t slots(uint32_t rows) { return 2 * bytes(rows) <= bytes(kTileRows) ? 2 : 1; }
  MK_DEVICE static uint32_t slot(uint32_t turn, uint32_t rows) { return turn & (slots(rows) - 1); }
  MK_DEVICE static float* at(uint32_t rows, uint32_t slot) {
    return reinterpret_cast<float*>(block().scratch + kScratchBytes - (slot + 1) * bytes(rows));
  }
  // Scratch below is free for inputs and merges.
  MK_DEVICE static constexpr uint32_t below(uint32_t rows) { return kScratchBytes - slots(rows) * bytes(rows); }
};
static_assert(Sums::kOutputs == 32, "one output a lane");

constexpr uint32_t least_below() {
  uint32_t out = kScratchBytes;
  for (uint32_t rows = 1; rows <= kTileRows; ++rows) out = Sums::below(rows) < out ? Sums::below(rows) : out;
  return out;
}

using MatrixFields = abi::MatmulFields;

// Of the variants of the task, what its code asks, the consumers' at run time; one word.
struct MatrixFlags {
  uint32_t bits;

  static constexpr MatrixFlags of(bool norm, bool sampled, bool bias, bool softcap, tasks::Epilogue epilogue,
                                  tasks::Activation activation) {
    return {uint32_t(norm) | uint32_t(sampled) << 1 | uint32_t(bias) << 2 | uint32_t(softcap) << 3 |
            uint32_t(epilogue) << 8 | uint32_t(activation) << 16};
  }
  // Of steps of several rows: it gives its output packed, its input is given so; half: in that type.
  constexpr MatrixFlags handing(bool gives, bool given, bool half) const {
    return {bits | uint32_t(gives) << 4 | uint32_t(given) << 5 | uint32_t(half) << 6};
  }
  // Of wide steps: chunks of a unit of the product that it gives its output to, or 0; half: in that type.
  constexpr MatrixFlags giving_wide(uint32_t chunks, bool half) const {
    return {bits | uint32_t(chunks > 0 && half) << 6 | chunks << 24};
  }
  MK_DEVICE constexpr bool norm() const { return bits & 1; }
  MK_DEVICE constexpr bool sampled() const { return bits & 2; }
  MK_DEVICE constexpr bool bias() const { return bits & 4; }
  MK_DEVICE constexpr bool softcap() const { return bits & 8; }
  MK_DEVICE constexpr bool gives() const { return bits & 16; }
  MK_DEVICE constexpr bool given() const { return bits & 32; }
  MK_DEVICE constexpr bool half() const { return bits & 64; }
  MK_DEVICE constexpr tasks::Epilogue epilogue() const { return tasks::Epilogue(bits >> 8 & 0xff); }
  MK_DEVICE constexpr tasks::Activation activation() const { return tasks::Activation(bits >> 16 & 0xff); }
  MK_DEVICE constexpr uint32_t wide_chunks() const { return bits >> 24; }
};

MK_DEVICE const MatrixFields& matrix_fields(const Worker& w) {
  return *reinterpret_cast<const MatrixFields*>(w.record->payload);
}
// 8 rows of an operand of 16 columns are 256 bytes, in rows of 32 whose halves change places from the fifth on. Lane 4 g + t
// has of row g the columns 4 t to 4 t + 3. Where they are; and those of the two operands of a chunk, in x, y and in z, w.
constexpr uint32_t kOperandBytes = 256;
MK_DEVICE uint32_t operand_at(uint32_t row, uint32_t group) { return row * 32 + (group * 8 ^ row / 4 * 16); }
MK_DEVICE uint32_t operand_at(uint32_t lane) { return operand_at(lane / 4, lane % 4); }
MK_DEVICE Quad operands(const uint8_t* p) {
  const Two a = *reinterpret_cast<const Two*>(p), b = *reinterpret_cast<const Two*>(p + kOperandBytes);
  return {a.x, a.y, b.x, b.y};
}

MK_DEVICE uint32_t matrix_rows(const Worker& w, bool sampled) { return sampled ? w.header->sampled : w.header->rows; }
// Sampled rows that there is room for.
MK_DEVICE uint32_t sampled_room(const Worker& w) {
  if constexpr (kWide) return tasks::least(w.args.max_rows, tasks::most(kTileRows, w.args.max_slots));
  return w.args.max_rows;
}
MK_DEVICE const float* input_row(const Worker& w, const MatrixFields& f, bool sampled, uint32_t r) {
  const uint32_t row = sampled ? w.header->sample_row[r] : r;
  return tasks::workspace<const float>(w, f.input) + uint64_t(row) * f.k;
}

// ------------------------------------------------------------------------------------------------ producer
__device__ __noinline__ void produce_rows() {
  Producer p;
  p.load();
  const abi::Record& record = *p.w.record;
  const MatrixFields& f = matrix_fields(p.w);
  const uint32_t bytes = f.k_unit * 16, units = f.units, count = record.tile_count;
  const uint32_t tile_bytes = bytes * units;
  // In the order block, unit, tile; one place that copies. What is done for each stage is what the memory rests when it
  // has none on its way, so within a block places are 32 bits.
  const char* block = tasks::weights<char>(p.w, f.weight) + record.tile_begin * uint64_t(tile_bytes);
  uint32_t left = count, unit = 0, tile = 0, row = 0, from = 0;
#pragma unroll 1
  while (left > 0) {
    p.put(block + from, bytes);
    from += tile_bytes;
    if (++tile < kBlockTiles && tile < left) continue;
    tile = 0;
    row += bytes;
    if (++unit == units) {
      unit = 0;
      left -= tasks::least(kBlockTiles, left);
      block += kBlockTiles * uint64_t(tile_bytes);
      row = 0;
    }
    from = row;
  }
  trace::passed(p.w);
  p.save();
}

}  // namespace megakernel::dev

#include "megakernel/device/cuda_input.cuh"
#include "megakernel/device/cuda_store.cuh"

#include "megakernel/device/cuda_consume.cuh"

#include "megakernel/device/cuda_wide.cuh"

namespace megakernel::dev {

template <tasks::MatmulConfig kConfig>
struct Core<tasks::Matmul<kConfig>> {
  static_assert(kConfig.dtype != DType::kF32, "matrix cores take 16-bit weights");
  static_assert(kConfig.tile_n == 8, "a tile is 8 rows of the weights");
  static_assert(!kConfig.dealt || (kWide && !kConfig.sampled && kConfig.epilogue != tasks::Epilogue::kGlu));
  static constexpr bool kHalf = kConfig.dtype == DType::kF16;
  static constexpr bool kProduces = true, kStores = true, kLoads = true, kNeedsHeader = kConfig.sampled;
  static constexpr MatrixFlags kFlags = MatrixFlags::of(
      kConfig.norm, kConfig.sampled, kConfig.bias, kConfig.softcap, kConfig.epilogue, kConfig.activation);
  static constexpr MatrixFlags kAnnounced = kFlags.handing(kConfig.gives, kConfig.given, kConfig.gives && kHalf);
  static constexpr uint32_t kWideChunks = kGivesWide ? kConfig.gives_wide : 0;
  static constexpr MatrixFlags kWideFlags = kFlags.giving_wide(kWideChunks, kHalf);
  static constexpr bool kGivenWide = kGivesWide && kConfig.given_wide;

  // A wide step brings weights in another order.
  MK_DEVICE static bool needs_header() requires(kWide)
  {
    return kConfig.sampled || may_be_wide();
  }
  MK_DEVICE static bool wide() {
    if constexpr (!kWide) return false;
    const abi::StepHeader& header = block().header[own_state().step & 1];
    return header.rows > kNarrowRows && (!kConfig.sampled || header.sampled > 1);
  }

  MK_DEVICE static void produce() {
    if constexpr (kWide) {
      if (needs_header() && wide()) {
        return produce_wide<kConfig.sampled, kConfig.dealt>();
      }
    }
    if (!kConfig.sampled || block().header[block().state[threadIdx.x / 32].step & 1].sampled > 0) produce_rows();
  }
  // As many rounds at once as the input has, and registers allow: with a norm gamma takes some too.
  static constexpr uint32_t kMostRounds = kConfig.norm ? 2 : 4;
  static constexpr uint32_t kRounds = kConfig.rounds > 0 && kConfig.rounds < kMostRounds ? kConfig.rounds : kMostRounds;

  MK_DEVICE static void load() { load_row<kHalf, kConfig.norm, kRounds, kConfig.even>(kFlags.sampled()); }
  MK_DEVICE static void consume() {
    if (in_scratch()) {
      consume_row<kHalf, kConfig.even>(kFlags);
    } else if (rows() > 0) {
      several::consume_rows<kHalf>(kFlags);
    }
  }
  MK_DEVICE static void store() { store_rows<kFlags.bits>(); }

  // In steps that were announced to have several rows.
  MK_DEVICE static void load_several() {
    if constexpr (kWide) {
      if (wide()) {
        if constexpr (!kGivenWide) pack_rows<kHalf, kConfig.norm>(kFlags);
        return bring_input<kConfig.sampled, kConfig.dealt, kConfig.norm>(kGivenWide);
      }
    }
    if (!input_in_room(kConfig.sampled)) return load();
    if constexpr (!kConfig.given) several::pack_input<kHalf, kConfig.norm>(kAnnounced);
    several::bring_rows<kConfig.given>(kAnnounced);
  }
  // The products of a wide step are left to the caller, work_in_pause.
  MK_DEVICE static void consume_several() {
    if constexpr (kWide) {
      if (wide()) return begin_products<kConfig.sampled, kConfig.dealt>();
    }
    if (!input_in_room(kConfig.sampled)) return consume();
    if (rows() > 8) return several::consume_tile<kHalf, kAnnounced.bits>();
    if constexpr (kConfig.epilogue == tasks::Epilogue::kResidual && !kConfig.sampled) {
      return several::consume_few_adding<kHalf, kAnnounced.bits>();
    }
    several::consume_few<kHalf>(kFlags);
    if constexpr (!kConfig.sampled) several::store_last_rows<kAnnounced.bits>();
  }
  MK_DEVICE static void resume() requires(kWide)
  {
    if constexpr (!kConfig.dealt) return put_products<kWideFlags.bits>();
    put_chains();
    if (!paused()) finish_dealt<kWideFlags.bits>();
  }
  MK_DEVICE static void store_several() {
    if constexpr (kWide) {
      if (wide()) return clear_wide<kAnnounced.giving_wide(kWideChunks, kHalf).bits>();
    }
    several::store_announced<kAnnounced.bits>();
  }

 private:
  MK_DEVICE static const abi::StepHeader& header() { return block().header[own_state().step & 1]; }
  MK_DEVICE static uint32_t rows() { return kConfig.sampled ? header().sampled : header().rows; }
  MK_DEVICE static bool in_scratch() {
    const auto& f = *reinterpret_cast<const MatrixFields*>(own_state().record->payload);
    return RowStash(f).fits(f, rows(), Sums::room(header()));
  }
};

// What products leave to the function that runs a worker's consumers. All weights of a program are of one type.
template <class T>
constexpr bool kOfHalf = false;
template <tasks::MatmulConfig kConfig>
constexpr bool kOfHalf<tasks::Matmul<kConfig>> = Core<tasks::Matmul<kConfig>>::kHalf;

template <class... T>
MK_DEVICE void work_in_pause(TaskList<T...>) {
  multiply_in_pause<(kOfHalf<T> || ...)>();
}

}  // namespace megakernel::dev
