// Element types, the same on every device.
#pragma once

namespace megakernel {

enum class DType { kF32, kBf16, kF16 };

namespace dev {

constexpr uint32_t bytes_of(DType type) { return type == DType::kF32 ? 4 : 2; }
constexpr float kInfinity = __builtin_huge_valf();

}  // namespace dev
}  // namespace megakernel
