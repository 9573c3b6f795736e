"""How long a publication takes until it is seen: from a producer's published to a waiting consumer's ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megakernel.report.arrivals import Arrivals
from megakernel.report.steps import Step
from megakernel.timeline import KINDS, Timeline

HEADER = "step header"
WIDE = 20


@dataclass(frozen=True)
class HopSamples:
    """Latencies of one kind of edge in ns, ascending, of consumers that were waiting when the last producer published.

    kind: "counter", "value", "peer" (from one device to another), or "step header" (from the end of a step until a
    worker has the next one's header). `waits`: how many waits there were of that kind, also those that were over before
    they began. Below zero, clocks disagree by at least that much, or a wait by value was over before its last element
    came."""

    kind: str
    waits: int
    ns: tuple[int, ...]

    def quantile(self, q: float) -> float:
        return float(np.quantile(self.ns, q)) if self.ns else 0.0

    @property
    def median(self) -> float:
        return self.quantile(0.5)


def hops(timeline: Timeline, seen: Sequence[Arrivals], steps: Sequence[Step]) -> tuple[HopSamples, ...]:
    """Of the edges of the steps in `seen`, and of the headers of `steps`; kinds with no wait are left out."""
    found: dict[str, list[int]] = {}
    waits: dict[str, int] = {}
    kinds = timeline.edges["kind"].tolist()
    for a in seen:
        starts, readies = a.events["start"].tolist(), a.events["ready"].tolist()
        for arrivals, start, ready in zip(a.of, starts, readies):
            if arrivals:
                kind = KINDS[kinds[arrivals[0].edge]]
                waits[kind] = waits.get(kind, 0) + 1
                if arrivals[0].time > start:
                    found.setdefault(kind, []).append(ready - arrivals[0].time)
    headers = _headers(timeline, steps)
    if headers:
        found[HEADER], waits[HEADER] = headers, len(headers)
    return tuple(HopSamples(k, waits[k], tuple(sorted(found.get(k, ())))) for k in (*KINDS, HEADER) if k in waits)


def _headers(timeline: Timeline, steps: Sequence[Step]) -> list[int]:
    """Steps that follow the one before without a new launch, and workers that were waiting when it ended."""
    ends = {s.number: s.end for s in steps}
    out = []
    for e in timeline.worker_steps:
        end = ends.get(int(e["step"]) - 1)
        if end is not None and int(e["step"]) in ends and int(e["start"]) <= end:
            out.append(int(e["ready"]) - end)
    return out


def histogram(ns: Sequence[int], bins: int = 40) -> tuple[list[float], list[int]]:
    """Edges (bins + 1) and counts up to the 99th percentile; the last bin also has what lies above. Bins are equal, or
    where latencies differ by more than a factor of WIDE and are all above zero, of equal ratio."""
    if not ns:
        return [], []
    values = np.asarray(ns, np.float64)
    low, high = float(values.min()), float(np.quantile(values, 0.99))
    wide = low > 0 and high > WIDE * low
    edges = np.geomspace(low, high, bins + 1) if wide else np.linspace(low, high if high > low else low + 1, bins + 1)
    counts, _ = np.histogram(np.minimum(values, edges[-1]), edges)
    return edges.tolist(), counts.tolist()
