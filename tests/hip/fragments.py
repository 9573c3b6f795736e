"""Which lane holds which element: the operands and results of every matrix instruction that the kernel uses.

Written as the vendor's documents give them, one formula for each table:

- MFMA: chapter "Matrix Arithmetic Instructions" of the ISA references "AMD Instinct MI200", "AMD Instinct MI300" and
  "AMD CDNA 4", dense matrices. With M = N = 16 and one block, element A[i][k] is in lane i + 16 * (k / n), item k % n,
  where a lane holds n = 16 * K / 64 items; B[k][j] in lane j + 16 * (k / n), item k % n; D[i][j] in lane
  j + 16 * (i / 4), item i % 4.
- WMMA of RDNA 3: section "Wave Matrix Multiply Accumulate (WMMA)" of the ISA reference "RDNA3". A[i][k] is in lanes i
  and i + 16, item k; B[k][j] likewise in lanes j and j + 16; D[i][j] in lane j + 16 * (i % 2), item i / 2.
- WMMA of gfx1250: no public document. As LLVM's and Triton's code for it has it: A[i][k] is in lane
  i + 16 * (k / 8 % 2), item k % 8 + 8 * (k / 16); D[i][j] in lane j + 16 * (i / 8), item i % 8.

The tool "AMD matrix instruction calculator" of ROCm prints the first two kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Holders = tuple[tuple[int, int], ...]  # (lane, item), more than one where lanes hold the same


@dataclass(frozen=True)
class Instruction:
    """Of 16 rows, 16 columns and depth `k`. `operand(i, k)`: of A, and of B with its column for i."""

    mnemonic: str
    wave: int
    k: int
    operand: Callable[[int, int], Holders]
    result: Callable[[int, int], tuple[int, int]]


INSTRUCTIONS = {
    "Mfma16x16x16": Instruction(
        "v_mfma_f32_16x16x16_bf16", 64, 16, lambda i, k: ((i + 16 * (k // 4), k % 4),),
        lambda i, j: (j + 16 * (i // 4), i % 4),
    ),
    "Mfma16x16x32": Instruction(
        "v_mfma_f32_16x16x32_bf16", 64, 32, lambda i, k: ((i + 16 * (k // 8), k % 8),),
        lambda i, j: (j + 16 * (i // 4), i % 4),
    ),
    "Wmma16x16x16": Instruction(
        "v_wmma_f32_16x16x16_bf16", 32, 16, lambda i, k: ((i, k), (i + 16, k)), lambda i, j: (j + 16 * (i % 2), i // 2),
    ),
    "Wmma16x16x32": Instruction(
        "v_wmma_f32_16x16x32_bf16", 32, 32, lambda i, k: ((i + 16 * (k // 8 % 2), k % 8 + 8 * (k // 16)),),
        lambda i, j: (j + 16 * (i // 8), i % 8),
    ),
}  # fmt: skip
OF_TARGET = {
    "gfx90a": "Mfma16x16x16", "gfx942": "Mfma16x16x16", "gfx950": "Mfma16x16x32", "gfx1100": "Wmma16x16x16",
    "gfx1250": "Wmma16x16x32",
}  # fmt: skip
