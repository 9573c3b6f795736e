// Products of four warps together. Part of cuda_wide.cuh.
//
// 64 rows of activations are A, 16 of each warp, tiles of 8 weight rows side by side are B: both in shared memory, by eights
// of rows in operands of 16 columns (see operand_at). Compute capability 9.0a has one instruction for it, which reads them
// there; elsewhere each warp multiplies by itself. Both count in the same order, so the bits are the same.
#pragma once

namespace megakernel::dev {

constexpr uint32_t kGroupWarps = 4, kGroupTiles = 8;  // tiles of weights: at most

// What a warp has of them: how many tiles there are, whether it has rows.
struct GroupPart {
  uint32_t tiles;
  bool mine;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// An operand as the instruction is told of it: where, how far it is from eight rows to the next, that rows of 32 bytes have
// changed halves.
struct GroupOperand {
  uint32_t low, high;

  MK_DEVICE GroupOperand(uint32_t address, uint32_t stride) : low(address >> 4 | 1u << 16), high(stride >> 4 | 3u << 30) {}
  MK_DEVICE GroupOperand(const GroupOperand& first, uint32_t bytes) : low(first.low + (bytes >> 4)), high(first.high) {}
};
MK_DEVICE void begin_group() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MK_DEVICE void await_group() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define MK_TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define MK_GROUP(n, type, places, a, b, on)                                                                          \
  "{\n.reg .pred on;\n.reg .b64 rows, tiles;\nsetp.ne.u32 on, " on ", 0;\n"                                        \
  "mov.b64 rows, {" a "};\nmov.b64 tiles, {" b "};\n"                                                              \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" places "}, rows, tiles, on, 1, 1, 0, 0;\n}"
#define MK_OPERANDS "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(adds)
#define MK_MULTIPLY(type)                                                                                           \
  if constexpr (kTiles == 2) {                                                                                      \
    asm volatile(MK_GROUP("16", type, "%0,%1,%2,%3,%4,%5,%6,%7", "%8, %9", "%10, %11", "%12")                       \
                 : MK_TILE(0), MK_TILE(1) : MK_OPERANDS);                                                           \
  } else if constexpr (kTiles == 4) {                                                                               \
    asm volatile(MK_GROUP("32", type, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16, %17",          \
                          "%18, %19", "%20")                                                                        \
                 : MK_TILE(0), MK_TILE(1), MK_TILE(2), MK_TILE(3) : MK_OPERANDS);                                   \
  } else {                                                                                                          \
    asm volatile(MK_GROUP("64", type,                                                                               \
                          "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
                          "%24,%25,%26,%27,%28,%29,%30,%31", "%32, %33", "%34, %35", "%36")                         \
                 : MK_TILE(0), MK_TILE(1), MK_TILE(2), MK_TILE(3), MK_TILE(4), MK_TILE(5), MK_TILE(6), MK_TILE(7)   \
                 : MK_OPERANDS);                                                                                    \
  }

// d += a b, or d = a b if `adds` is 0, of up to kTiles tiles, when await_group has returned. Of rows and tiles that are not
// there whatever comes out. Of a warp's 16 rows lane 4 g + t has g and g + 8, of each tile outputs 2 t and 2 t + 1.
template <bool kHalf, uint32_t kTiles, uint32_t kMost>
MK_DEVICE void multiply_group(float (&d)[kMost][4], const GroupOperand& a, const GroupOperand& b, uint32_t adds,
                              const GroupPart&) {
  static_assert(kTiles == 2 || kTiles == 4 || kTiles == 8);
  if constexpr (kHalf) {
    MK_MULTIPLY("f16")
  } else {
    MK_MULTIPLY("bf16")
  }
}
#undef MK_TILE
#undef MK_GROUP
#undef MK_OPERANDS
#undef MK_MULTIPLY
#else
struct GroupOperand {
  uint32_t first, stride;

  MK_DEVICE GroupOperand(uint32_t address, uint32_t bytes) : first(address), stride(bytes) {}
  MK_DEVICE GroupOperand(const GroupOperand& other, uint32_t bytes) : first(other.first + bytes), stride(other.stride) {}
  MK_DEVICE Two of(uint32_t eight) const {
    return *at_shared<const Two>(first + eight * stride + operand_at(lane_of_warp()));
  }
};
MK_DEVICE void begin_group() {}
MK_DEVICE void await_group() {}

template <bool kHalf, uint32_t kTiles, uint32_t kMost>
MK_DEVICE void multiply_group(float (&d)[kMost][4], const GroupOperand& a, const GroupOperand& b, uint32_t adds,
                              const GroupPart& part) {
  if (!part.mine) return;
  const uint32_t warp = threadIdx.x / 32 % kGroupWarps;
  const Two low = a.of(warp * 2), high = a.of(warp * 2 + 1);
#pragma unroll
  for (uint32_t j = 0; j < kTiles; ++j) {
    if (j >= part.tiles) break;
    if (adds == 0) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
    const Two v = b.of(j);
    multiply<kHalf>(d[j], low.x, high.x, low.y, high.y, v.x, v.y);
  }
}
#endif

}  // namespace megakernel::dev
