// The input of a wide product, packed by the loaders. Part of cuda_wide.cuh.
#pragma once

namespace megakernel::dev {

// All four loaders: the worker's part of the (row, share) of a product's input.
template <bool kHalf, bool kNorm>
__device__ __noinline__ void pack_rows(MatrixFlags flags) {
  Loader l;
  l.load();
  Worker& w = l.w;
  const abi::Record& record = *w.record;
  const MatrixFields& f = matrix_fields(w);
  const PackedInput to(w, f, flags.sampled());
  const Parts parts(record, f, flags.epilogue() == tasks::Epilogue::kGlu, matrix_rows(w, flags.sampled()));
  wait_counters(w, record);
  if (Loader::index() == 0) store_volatile(&block().asking, 1);
  const uint32_t packed = pack_parts<kHalf, kNorm, true>(w, f, to, parts, flags.sampled());
  __syncwarp();
  if (Loader::index() == 0) store_volatile(&block().asking, 0);
  if (w.warp_lane() == 0 && packed > 0) add_release(packed_counter(w), packed);
  l.save();
}

}  // namespace megakernel::dev
