// Element types, the same on every device.
#pragma once

// Of a pointer to memory that all workers share: a compiler that knows it makes better loads than of any pointer.
#if defined(__AMDGCN__)
#define MK_MEMORY __attribute__((address_space(1)))
#else
#define MK_MEMORY
#endif

namespace megakernel {

enum class DType { kF32, kBf16, kF16, kF8 };

namespace dev {

constexpr uint32_t bytes_of(DType type) { return type == DType::kF32 ? 4 : type == DType::kF8 ? 1 : 2; }
constexpr float kInfinity = __builtin_huge_valf();

// The budget of a wait for another device: longer than that of the others, so that the fault at the root comes first.
constexpr uint64_t peer_budget_ns(uint64_t spin_budget_ns) { return spin_budget_ns + spin_budget_ns / 2; }

}  // namespace dev
}  // namespace megakernel
