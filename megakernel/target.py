"""What the compiler knows of a machine: units, memory, rates. A value, never a device handle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from megakernel.errors import TargetError
from megakernel.parts import part_of

MAX_WORKERS = 4096
Backend = Literal["cpu", "cuda", "hip"]


@dataclass(frozen=True)
class Target:
    """A machine to compile for. Rates are for the cost model only; results never depend on them.

    `workers`: resident blocks or threads. `shared_bytes`: shared memory of one block (0: none).
    `stream_gbps`: measured or documented read bandwidth of all workers, GB/s. `hop_us`: publish to seen, microseconds.
    """

    name: str
    backend: Backend
    workers: int
    shared_bytes: int
    stream_gbps: float
    worker_gflops: float
    hop_us: float
    task_us: float
    tile_n: int  # output rows of one matmul tile
    page_tokens: int  # tokens of one KV page
    piece_tokens: int  # tokens that one attention item covers; a multiple of page_tokens
    value_edges: bool  # activations carry their own validity
    vector_bytes: int = 0
    half_only: bool = False  # weights and pages have 16-bit elements
    head_multiple: int = 8  # head_dim is a multiple of this
    page_least: int = 16  # tokens of a page, however large they are
    piece_bytes: int = 0  # most bytes of one KV head's pages of an item, 0: no limit
    rotary_multiple: int = 1  # the halves of a rotation are multiples of this, or its pairs are neighbours
    cluster: int = 1
    groups: int = 1  # of workers that share a cache which others do not see: hierarchical counters, scheduler/relay.py
    signal_us: float = 0.0  # one signal to a counter that many workers signal at once, microseconds
    l2_bytes: int = 0  # second level of cache, of all groups together
    cache_bytes: int = 0  # cache before the memory, shared by all workers; 0: none that helps
    cache_gbps: float = 0.0  # its read bandwidth
    worker_gbps: float = 0.0  # most that one worker can read, however few there are; 0: not known
    source: str = ""  # where the figures come from
    link_gbps: float = 0.0  # what one device sends to all its peers, GB/s, one direction
    link_us: float = 0.0  # a store into a peer's memory to its being seen there, microseconds
    link_source: str = ""  # where these two come from
    stamped_links: bool = False  # elements that go to a peer carry their own validity, else a counter follows them

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise TargetError(f"target {self.name}: groups must be at least 1, got {self.groups}")
        if self.groups > 1 and self.backend == "cuda":
            raise TargetError(f"target {self.name}: its kernel knows one group of workers, got {self.groups}")

    def with_workers(self, workers: int) -> Target:
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MAX_WORKERS:
            raise TargetError(f"workers: expected an integer from 1 to {MAX_WORKERS}, got {workers!r}")
        return replace(self, workers=workers)


# A multiprocessor, or a compute unit of an AMD part, gets at most 64 bytes a cycle from the second level; at 2 GHz.
UNIT_GBPS = 128.0


def _cpu(name: str, vector: int) -> Target:
    return Target(
        name=name, backend="cpu", workers=2, shared_bytes=0, stream_gbps=20.0, worker_gflops=50.0, hop_us=0.3,
        task_us=0.2, tile_n=32, page_tokens=32, piece_tokens=256, value_edges=False, vector_bytes=vector,
        source="order of magnitude of a 2-core server; calibrate for figures", link_gbps=10.0, link_us=1.0,
        link_source="order of magnitude of memory that two kernels share; not measured",
    )  # fmt: skip


# Between devices, one direction. Rates are the vendors' (half of what NVLink is said to carry both ways; PCIe 4.0 and
# 5.0 x16; 7 links of an Infinity Fabric mesh, fewer on gfx90a). Of hops one was measured, between two H200 on NVLink
# (18 links) that did nothing else, by bench/hop.py; 3 us of other NVLinks is one within a GPU and 1 us on top, 5 us a
# guess for PCIe and fabrics.
NVLINK_GBPS = {"sm_80": 300.0, "sm_90a": 450.0, "sm_100a": 900.0}
FABRIC_GBPS = {"gfx90a": 150.0, "gfx942": 448.0, "gfx950": 537.6}
PCIE_GBPS, PCIE5_GBPS = 31.5, 63.0
MEASURED_LINK_US = {"sm_90a": 0.76}
NVLINK_US, OTHER_LINK_US = 3.0, 5.0


def _link(name: str) -> dict[str, Any]:
    rates = {**NVLINK_GBPS, **FABRIC_GBPS}
    kind = "NVLink" if name in NVLINK_GBPS else "Infinity Fabric" if name in FABRIC_GBPS else "PCIe x16"
    return {
        "link_gbps": rates.get(name, PCIE5_GBPS if name in ("sm_120a", "gfx1250") else PCIE_GBPS),
        "link_us": MEASURED_LINK_US.get(name, NVLINK_US if name in NVLINK_GBPS else OTHER_LINK_US),
        "link_source": f"{kind}: rate {'guessed' if name == 'gfx1250' else 'of vendor documents'}, "
        + ("latency measured on two H200" if name in MEASURED_LINK_US else "latency assumed; neither was measured"),
    }  # fmt: skip


def _cuda(name: str, sms: int, shared_kb: int, gbps: float, cluster: int = 1) -> Target:
    return Target(
        name=name, backend="cuda", workers=sms, shared_bytes=shared_kb * 1024, stream_gbps=gbps, worker_gflops=2000.0,
        hop_us=2.0, task_us=0.3, tile_n=8, page_tokens=64, piece_tokens=256, value_edges=True, cluster=cluster,
        worker_gbps=UNIT_GBPS,
        half_only=True, head_multiple=32, page_least=32, piece_bytes=shared_kb * 1024 * 2 // 3, rotary_multiple=32,
        source="vendor documents; sm_90a measured on an H200", stamped_links=True, **_link(name),
    )  # fmt: skip


# One turn at a counter. MI300X: 304 workgroups on one are reported to take 8 us, a hand-over by value less than 1 us.
# MI355X: a barrier of 2,048 workgroups on one counter takes 58.5 us (ROCm/llvm-project, pull request 3464); its hop is
# taken to be the MI300X's. None of it is our measurement. Of the other parts none is known: 3 us a hop is a guess.
SIGNAL_US = {"gfx942": 8.0 / 304, "gfx950": 58.464 / 2048}
XCD_HOP_US, GUESSED_HOP_US = 1.0, 3.0
ASSUMED_UNITS = 256  # of a part whose number is not published


def _hip(name: str) -> Target:
    part = part_of(name)
    several = part.groups is not None and part.groups > 1
    lacks = part.unpublished()
    hop_us, whose = (XCD_HOP_US, "what others report of the MI300X") if several else (GUESSED_HOP_US, "a guess")
    return Target(
        name=name, backend="hip", workers=part.units or ASSUMED_UNITS, shared_bytes=part.lds_bytes,
        stream_gbps=part.memory_gbps, worker_gflops=2000.0, hop_us=hop_us,
        task_us=0.5, tile_n=16, page_tokens=64, piece_tokens=256, value_edges=False, groups=part.groups or 1,
        worker_gbps=UNIT_GBPS, l2_bytes=(part.l2_bytes or 0) * (part.groups or 1), signal_us=SIGNAL_US.get(name, 0.0),
        cache_bytes=part.cache_bytes or 0,
        cache_gbps=part.cache_gbps or 0.0,
        source=f"{part.name}: vendor documents, see parts.py; hops of {hop_us:g} us are {whose}; never run on hardware "
        "by this project"
        + (f"; not published: {', '.join(lacks)}" if lacks else "")
        + ("" if part.units else f", {ASSUMED_UNITS} units assumed"),
        stamped_links=True, **_link(name),
    )  # fmt: skip


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        _cpu("cpu-avx512", 64),
        _cpu("cpu-avx2", 32),
        _cpu("cpu-generic", 16),
        _cuda("sm_80", 108, 163, 1555.0),
        _cuda("sm_86", 82, 99, 936.0),
        _cuda("sm_89", 128, 99, 1008.0),
        _cuda("sm_90a", 132, 227, 4556.0, cluster=8),
        _cuda("sm_100a", 148, 227, 8000.0, cluster=8),
        _cuda("sm_120a", 170, 99, 1792.0),
        _hip("gfx90a"),
        _hip("gfx942"),
        _hip("gfx950"),
        _hip("gfx1100"),
        _hip("gfx1250"),
    )
}


def find_target(name: str) -> Target:
    """The target of that name. Raises TargetError with the known names."""
    if name not in TARGETS:
        raise TargetError(f"unknown target {name!r}; known: {', '.join(TARGETS)}")
    return TARGETS[name]
