"""AMD GPUs as their documents describe them: what the planner and the cost model know of each part.

None means that no public document gives the number. Where it comes from stands beside it:

[specs]  ROCm documentation, "AMD GPU specifications": compute units, XCDs, LDS, L2 and L3 (Infinity Cache)
[page]   AMD's product page or data sheet of the part: memory bandwidth
[cdna3]  AMD CDNA 3 white paper: peak bandwidth of the Infinity Cache
[rdna3]  AMD's page of the RX 7900 XTX: effective bandwidth with the Infinity Cache
[llvm]   LLVM, AMDGPU back end: largest LDS of a workgroup
[ces]    AMD at CES 2026: memory of the MI455X
"""

from __future__ import annotations

from dataclasses import dataclass, fields

KB, MB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Part:
    """One device as a program sees it: a card, or one of the two dies of an MI250.

    `groups`: XCDs, each with an L2 of `l2_bytes`. `lds_bytes`: of a workgroup. `cache_bytes`: Infinity Cache, 0 where
    there is none. `memory_gbps`, `cache_gbps`: peak rates, GB/s."""

    name: str
    target: str
    units: int | None
    groups: int | None
    lds_bytes: int
    l2_bytes: int | None
    cache_bytes: int | None
    cache_gbps: float | None
    memory_gbps: float

    def unpublished(self) -> tuple[str, ...]:
        """Names of what no document gives."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is None)


PARTS: tuple[Part, ...] = (
    # [specs] 104 units, 8 MB of L2, no L3; [page] 1,638 GB/s
    Part("MI210", "gfx90a", 104, 1, 64 * KB, 8 * MB, 0, 0.0, 1638.4),
    # [specs] 104 units and 8 MB of L2 on each of two dies; [page] 3,277 GB/s for both
    Part("MI250 (one die)", "gfx90a", 104, 1, 64 * KB, 8 * MB, 0, 0.0, 1638.4),
    # [specs] 304 units, 38 on each of 8 XCDs, 4 MB of L2 each, 256 MB of L3; [page] 5,300 GB/s; [cdna3] 17.2 TB/s
    Part("MI300X", "gfx942", 304, 8, 64 * KB, 4 * MB, 256 * MB, 17200.0, 5300.0),
    # [specs] 256 units, 32 on each of 8 XCDs, 4 MB of L2 each, 256 MB of L3; [page] 8,000 GB/s
    Part("MI355X", "gfx950", 256, 8, 160 * KB, 4 * MB, 256 * MB, None, 8000.0),
    # [specs] 96 units, 6 MB of L2, 96 MB of L3; [page] 960 GB/s; [rdna3] 3,500 GB/s
    Part("RX 7900 XTX", "gfx1100", 96, 1, 64 * KB, 6 * MB, 96 * MB, 3500.0, 960.0),
    # [llvm] 320 KB; [ces] 19,600 GB/s. Units, XCDs and caches are in no document that we know.
    Part("MI455X", "gfx1250", None, None, 320 * KB, None, None, None, 19600.0),
)


def part_of(target: str) -> Part:
    """The part whose figures the target of that name has: the first in the table."""
    return next(p for p in PARTS if p.target == target)
