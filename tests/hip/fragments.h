// What a kernel's fragments are, for a test: included after hip_matrix.h. A lane's items are numbered as it holds them.
#pragma once

using megakernel::dev::Matrix;

#define FRAGMENTS_EXPORT extern "C" __attribute__((visibility("default")))

// {columns of a step, octets of a lane, items of a result}
FRAGMENTS_EXPORT void mk_shape(uint32_t* out) { out[0] = Matrix::kStep, out[1] = Matrix::kOctets, out[2] = Matrix::kOut; }
FRAGMENTS_EXPORT uint32_t mk_octet(uint32_t lane, uint32_t i) { return Matrix::octet_of(lane, i); }
FRAGMENTS_EXPORT uint32_t mk_row(uint32_t lane, uint32_t i) { return Matrix::row_of(lane, i); }
FRAGMENTS_EXPORT uint32_t mk_tile_index(uint32_t c, uint32_t j, uint32_t wide) {
  return wide ? megakernel::dev::tile_index<megakernel::DType::kF32, 16>(c, j)
              : megakernel::dev::tile_index<megakernel::DType::kBf16, 16>(c, j);
}

// What the emulator takes for the instruction's tables: {lane, element}.
template <class Shape>
void places(uint32_t i, uint32_t k, uint32_t* operand, uint32_t* result) {
  const emulator::Place a = Shape::operand(i, k % Shape::kDepth), d = Shape::result(i, k % 16);
  operand[0] = a.lane, operand[1] = a.element, result[0] = d.lane, result[1] = d.element;
}
FRAGMENTS_EXPORT void mk_places(uint32_t i, uint32_t k, uint32_t* operand, uint32_t* result) {
  places<emulator::FRAGMENTS_OF>(i, k, operand, result);
}
