"""The report as one page that needs nothing else: figures, pictures and the timeline itself, offline.

The page's script draws what `payload` says; it computes nothing but geometry."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megakernel.errors import TimelineError
from megakernel.report.analysis import Analysis, analyse, notes, shown_steps
from megakernel.report.arrivals import WAITING_ROLES
from megakernel.report.breakdown import Share
from megakernel.report.critical import edge_of_hop, hop_name
from megakernel.report.graph import HOPS, Kind
from megakernel.report.hops import histogram
from megakernel.report.lookahead import BEHIND
from megakernel.report.steps import finish, row_names, row_of
from megakernel.tasks.record import NONE, NONE64, Role, TraceFlag
from megakernel.timeline import KINDS, TIMES, Events, Timeline, TimelineNode

MOST_EVENTS = 80_000  # in the picture of one page; about 8 MB
FOLDER = Path(__file__).parent


def write_html(timeline: Timeline, path: str | os.PathLike[str], *, ceiling_gbps: float | None = None) -> Path:
    """Write the page, all or nothing. `ceiling_gbps`: measured read rate, else the target's is the ceiling.

    A timeline without a complete step gives a page with the timeline alone. Raises TimelineError when the file cannot
    be written."""
    text = html(timeline, ceiling_gbps=ceiling_gbps)
    final = Path(path)
    work = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        work.write_text(text, encoding="utf-8")
        os.replace(work, final)
    except OSError as e:
        work.unlink(missing_ok=True)
        raise TimelineError(f"cannot write the report to {final}: {e.strerror or e}; choose another file") from e
    return final


def html(timeline: Timeline, *, ceiling_gbps: float | None = None) -> str:
    data = json.dumps(payload(timeline, ceiling_gbps=ceiling_gbps), separators=(",", ":"), allow_nan=False)
    parts = {
        "style": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "data": data.replace("<", "\\u003c"),  # nothing in it can end the script that holds it
        "charts": (FOLDER / "charts.js").read_text(encoding="utf-8"),
        "timeline": (FOLDER / "timeline.js").read_text(encoding="utf-8"),
    }
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@@{name}@@", part, 1)
    return text


def payload(timeline: Timeline, *, ceiling_gbps: float | None = None) -> dict[str, Any]:
    """All that the page shows, as JSON values. Times are ns."""
    try:
        a: Analysis | None = analyse(timeline, ceiling_gbps=ceiling_gbps)
        note = ""
    except TimelineError as e:
        a, note = None, str(e)
    fault = timeline.meta.fault
    return {
        "title": timeline.meta.program,
        "facts": _facts(timeline),
        "fault": fault.text if fault else "",
        "notes": [n for n in (note, *notes(timeline, a)) if n],
        "analysis": _analysis(timeline, a) if a else None,
        "timeline": _picture(timeline, a),
    }


def _facts(timeline: Timeline) -> list[tuple[str, str]]:
    m = timeline.meta
    drift = max((abs(d) for d in m.alignment.drift_ns), default=0.0)
    hop = "" if m.alignment.worst_hop_ns is None else f"; shortest hop seen {m.alignment.worst_hop_ns:,.0f} ns"
    return [
        ("model", m.model), ("device", m.device), ("target", f"{m.target}, {m.workers} workers"),
        *([
            ("steps", f"{m.first_step} to {m.last_step}, {len(timeline.complete_steps)} complete"),
            ("a step", f"{m.rows:g} rows at {m.context} tokens of context (means)"),
        ] if len(timeline.events) else [("steps", "none")]),
        ("events", f"{len(timeline.events):,}, {sum(m.overflow):,} lost"),
        ("clock", f"{m.alignment.clock}; off a straight line by {drift:,.0f} ns at most{hop}"),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- figures
def _analysis(timeline: Timeline, a: Analysis) -> dict[str, Any]:
    steps, b = len(a.steps), a.breakdown
    return {
        "step": {"number": a.step.number, "length": a.step.length, "steps": steps},
        "figures": _figures(a),
        "breakdown": {
            "rows": b.rows, "length": b.length / steps, "total": b.total / steps, "idle": b.idle / steps,
            "header": b.header / steps, "operators": _shares(b.operators, steps), "layers": _shares(b.layers, steps),
            "workers": _shares(b.by_row, steps),
        },
        "rates": {
            "bin": a.rates.bin_ns, "gbps": a.rates.gbps, "mean": a.rates.mean_gbps, "bytes": a.rates.stream_bytes,
            "ceiling": a.rates.ceiling.gbps, "source": a.rates.ceiling.source, "floor": a.rates.floor_ns,
        },
        "path": {"by": list(a.path_by.items()), "tasks": _path_tasks(timeline, a)},
        "what_if": [vars(w) for w in a.what_if],
        "slack": [vars(s) for s in a.slack],
        "hops": [_hop(h) for h in a.hops],
        "hop_steps": a.hop_steps,
        "imbalance": [vars(i) | {"spread": i.spread} for i in a.imbalance],
        "roofline": {"operators": [vars(r) for r in a.roofline.operators], "gflops": a.roofline.ceiling_gflops},
        "lookahead": {
            "behind": BEHIND, "open": _counts(a.lookahead.open_behind), "lead": _counts(a.lookahead.lead_records),
            "bytes": float(np.median(a.lookahead.lead_bytes)) if a.lookahead.lead_bytes else None,
            "ring": timeline.meta.ring_bytes,
        },
        "prediction": _prediction(a),
    }  # fmt: skip


def _figures(a: Analysis) -> list[tuple[str, str, str]]:
    """(name, value, explanation) of what a reader wants first."""
    lengths = [s.length / 1e3 for s in a.steps]
    hop = sum(ns for name, ns in a.path_by.items() if name in {hop_name(k) for k in HOPS})
    best = max(a.what_if, key=lambda w: (w.kind == "operator", w.saved))
    out = [
        ("typical step", f"{a.step.length / 1e3:,.1f} us",
         f"median of {len(lengths)}; {min(lengths):,.1f} to {max(lengths):,.1f} us"),
        ("read rate", f"{a.rates.mean_gbps:,.1f} GB/s",
         f"{a.rates.stream_bytes / 1e6:,.1f} MB a step; ceiling {a.rates.ceiling.gbps:,.0f} GB/s"),
        ("floor", f"{a.rates.floor_ns / 1e3:,.1f} us", "the step's bytes at the ceiling"),
        ("hops on the critical path", f"{hop / max(1, a.step.length):.0%}", f"{hop / 1e3:,.1f} us"),
        ("operator with most to gain", best.what, f"free, it saves {best.saved / 1e3:,.1f} us of the step"),
    ]  # fmt: skip
    if a.prediction:
        p = a.prediction
        out.append(
            ("simulated", f"{p.predicted_us:,.1f} us", f"{p.error:+.1%} of the measured {p.measured_us:,.1f} us")
        )
    return out


def _shares(shares: tuple[Share, ...], steps: int) -> list[dict[str, Any]]:
    return [
        {"name": s.name, "work": s.work / steps, "data": s.data / steps, "others": s.others / steps} for s in shares
    ]


def _hop(h: Any) -> dict[str, Any]:
    edges, counts = histogram(h.ns)
    return {
        "kind": h.kind, "waits": h.waits, "seen": len(h.ns), "edges": edges, "counts": counts,
        "least": h.quantile(0), "median": h.median, "p90": h.quantile(0.9), "p99": h.quantile(0.99),
        "most": h.quantile(1),
    }  # fmt: skip


def _counts(values: tuple[int, ...]) -> list[tuple[int, int]]:
    found, counts = np.unique(np.array(values, np.int64), return_counts=True)
    return list(zip(found.tolist(), counts.tolist()))


def _prediction(a: Analysis) -> dict[str, Any] | None:
    if a.prediction is None:
        return None
    p = a.prediction
    return {
        "steps": p.steps, "target": p.target, "measured": p.measured_us, "predicted": p.predicted_us,
        "bare": p.target_us, "error": p.error, "operators": [vars(o) for o in p.operators],
    }  # fmt: skip


def _path_tasks(timeline: Timeline, a: Analysis) -> list[dict[str, Any]]:
    """The critical path record by record."""
    out = []
    events = a.graph.arrivals.events
    for event, parts in groupby(a.path, key=lambda p: p.event):
        group = list(parts)
        spent = {kind: sum(p.end - p.begin for p in group if p.kind == kind) for kind in Kind}
        came = next((found for p in group if (found := edge_of_hop(timeline, a.graph, p))), None)
        e = events[event]
        out.append({
            "id": _id(e), "node": int(e["node"]), "worker": int(e["worker"]), "first": int(e["tile_begin"]),
            "count": int(e["tile_count"]), "begin": group[0].begin, "end": group[-1].end,
            "from": _id(events[came["event"]]) if came else None,
            "hop": sum(spent[k] for k in HOPS), "data": spent[Kind.DATA], "work": spent[Kind.WORK] + spent[Kind.HELD],
        })  # fmt: skip
    return out


def _id(event: Any) -> str:
    """Names an event in the picture."""
    return f"{event['step']}.{event['worker']}.{event['role']}.{event['record']}.{event['tile_begin']}"


# ---------------------------------------------------------------------------------------------- the picture
def _picture(timeline: Timeline, a: Analysis | None) -> dict[str, Any]:
    """Events of some following steps in columns, and what the page needs to name them and find what they waited for."""
    steps = shown_steps(timeline, a.step if a else None, MOST_EVENTS)
    events = timeline.tasks[np.isin(timeline.tasks["step"], steps)]
    names = row_names(timeline)
    place = {row: i for i, row in enumerate(names)}
    origin = int(events["start"].min()) if len(events) else 0
    operators = list(dict.fromkeys(n.operator for n in timeline.nodes))
    return {
        "steps": list(steps), "of": list(timeline.steps), "typical": a.step.number if a else None,
        "bounds": [[s.number, s.begin - origin, s.end - origin] for s in (a.steps if a else ()) if s.number in steps],
        "rows": list(names.values()), "operators": operators,
        "nodes": [
            [n.name, operators.index(n.operator), n.task, n.layer, n.tiles, n.stream_bytes, n.flops, _fields(n)]
            for n in timeline.nodes
        ],
        "edges": {c: timeline.edges[c].tolist() for c in timeline.edges.dtype.names or ()}, "kinds": KINDS,
        "waiting": list(WAITING_ROLES), "producer": Role.PRODUCER,
        "flags": {"cut": TraceFlag.CUT, "by_value": TraceFlag.BY_VALUE},
        "events": _columns(events, place, origin, _slack(a)),
    }  # fmt: skip


def _fields(node: TimelineNode) -> dict[str, str]:
    """Of its records' payload, as text: a script's numbers do not hold 64 bits."""
    return {name: "none" if value in (NONE, NONE64) else str(value) for name, value in node.fields.items()}


def _slack(a: Analysis | None) -> Mapping[str, int]:
    return {} if a is None else {_id(e): s for e, s in zip(a.graph.arrivals.events, a.graph.slack)}


def _columns(events: Events, place: Mapping[int, int], origin: int, slack: Mapping[str, int]) -> dict[str, Any]:
    """Base64 of little-endian arrays; `start` is from the origin, later moments are from `start`."""
    times = {c: events[c].astype(np.int64) for c in TIMES}
    counter = events["longest_wait_counter"].astype(np.int64)
    columns: dict[str, Any] = {
        "start": ("f8", times["start"] - origin),
        "length": ("f4", finish(events) - times["start"]),
        "row": ("i4", [place[r] for r in row_of(events).tolist()]),
        "slack": ("f4", [slack.get(_id(e), -1) for e in events] if slack else np.full(len(events), -1)),
        "waited": ("f4", events["longest_wait"]),
        "counter": ("i4", np.where(counter == NONE, -1, counter)),
    }
    columns |= {c: ("f4", np.clip(times[c] - times["start"], 0, None)) for c in TIMES[1:]}
    whole = ("worker", "role", "flags", "record", "node", "tile_begin", "tile_count", "step")
    columns |= {c: ("i4", events[c].astype(np.int64)) for c in whole}
    return {"count": len(events)} | {
        name: [kind, base64.b64encode(np.asarray(column, f"<{kind}").tobytes()).decode()]
        for name, (kind, column) in columns.items()
    }
