// The input of a wide product: packed by the loaders, unless it is given, and brought by them. Part of cuda_wide.cuh.
//
// Loaders and consumers meet twice in a product, at the barriers of the scratch that other inputs go through. When the input is
// packed, as far as this worker packs it (at once, if it is given), the consumers say that they are at this product: their
// state has the place of its first stage, and all stages before that were given back. When all is brought the loaders stay
// until the consumers have taken it, so that no copy is on its way when they wait for something else; and they ask for values
// of the next product only then, because what all workers ask for again and again is in the way of what they copy.
#pragma once

namespace megakernel::dev {

// ------------------------------------------------------------------------------------------------ consumers
// At the begin and at the end of a product.
MK_DEVICE void meet_loaders(Consumer& c) {
  c.take_input();
  c.free_input();
}

// ------------------------------------------------------------------------------------------------ loaders
// What the norm of each row comes to, where consumers find it when they take the last slice before their sums are whole.
MK_DEVICE float* row_factors() { return reinterpret_cast<float*>(block().scratch); }
MK_DEVICE void put_factors(const PackedInput& from, const MatrixFields& f, uint32_t rows) {
#pragma unroll 1
  for (uint32_t row = lane_of_warp(); row < rows; row += 32) {
    const Quad a = load_quad(from.squares(row)), b = load_quad(from.squares(row) + 4);
    const float low = as_float(a.x) + as_float(a.y) + as_float(a.z) + as_float(a.w);
    row_factors()[row] =
        rsqrtf((low + as_float(b.x) + as_float(b.y) + as_float(b.z) + as_float(b.w)) * (1.0f / float(f.k)) + f.eps);
  }
  __syncwarp();
}

// One loader: the worker's slices of the packed input. It alone looks at the counter: more of them would be in the way of
// those who count.
template <bool kDealt, bool kNorm>
MK_DEVICE void bring_slices(Worker& w, const PackedInput& from, const MatrixFields& f, uint32_t rows) {
  Block& b = block();
  const uint64_t keep = keeping_policy();
  WideOrder order(b.state[0].ring);
  bool first = kNorm;
#pragma unroll 1
  for (Slices<kDealt> at(*w.record, f, from.padded); !at.done(); order.next(at.stages), at.next()) {
    const RingPlace to = order.stage(1);
    w.watch_barrier(&b.empty[to.slot], to.parity ^ 1);
    if (first && (kDealt ? at.ends_all() : at.ends_group())) {
      put_factors(from, f, rows);
      first = false;
    }
    set_copying(to.slot, to.parity);
    __syncwarp();
    copy_to_shared(b.ring[to.slot], from.chunk(at.chunk()), at.now * at.count * at.row_bytes(), &b.full[to.slot], keep);
  }
}

// All four loaders: the worker's part of the (row, share) of a product's input.
template <bool kHalf, bool kNorm>
__device__ __noinline__ void pack_rows(MatrixFlags flags) {
  Loader l;
  l.load();
  Worker& w = l.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const PackedInput to(w, f, flags.sampled());
  const uint32_t rows = matrix_rows(w, flags.sampled());
  const Parts parts(record, f, flags.epilogue() == tasks::Epilogue::kGlu, rows);
  wait_counters(w, record);
  l.begin();
  const uint32_t packed = pack_parts<kHalf, kNorm, true>(w, f, to, parts, flags.sampled());
  __syncwarp();
  if (w.warp_lane() == 0 && packed > 0) add_release(counter_of(w, packed_counter(w)), packed);
  l.end();
  l.save();
}

// given: by the node before, in the place of its float32 values.
template <bool kSampled, bool kDealt, bool kNorm>
__device__ __noinline__ void bring_input(bool given) {
  Loader l;
  l.load();
  Worker& w = l.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  PackedInput from(w, f, kSampled);
  if (given) {
    from.base = tasks::workspace<uint8_t>(w, f.input) - PackedInput::kSquareBytes;
    wait_counters(w, record);
    l.begin();
    l.end();
  }
  w.wait_barrier(&block().input_empty, l.parity ^ 1);  // the consumers are here
  if (Loader::index() == kLoaders - 1) {  // the one with the fewest parts to pack
    const uint32_t counter = packed_counter(w);
    const uint64_t rows = kSampled ? w.header->wide_sampled : w.header->wide_rows;
    w.wait(counter_of(w, counter), rows * (given ? f.k : kConsumers), abi::FaultKind::kWaitBudget, counter);
    fence_global_for_copies();
    bring_slices<kDealt, kNorm>(w, from, f, matrix_rows(w, kSampled));
  }
  __syncwarp();
  barrier_arrive_warp(&block().input_full);
  l.parity ^= 1;
  w.watch_barrier(&block().input_empty, l.parity ^ 1);  // all was taken
  l.save();
}

}  // namespace megakernel::dev
