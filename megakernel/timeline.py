"""A timeline: what every worker and role did in each step of a recording, and the graph that it ran; as JSON too.

Times are nanoseconds from the begin of the recording, of one clock for all workers (see `Alignment`). An event is one
record of the schedule as one role of a worker ran it; an event of role CONTROL is a whole step of a worker. Within an
event start <= ready <= first_data <= end <= published; one with the flag CUT was ended by a fault and has published 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megakernel.columns import pack, unpack
from megakernel.errors import TimelineError
from megakernel.tasks.record import NONE, TRACE_EVENT, Role, TraceFlag
from megakernel.tasks.task import all_tasks

Events = npt.NDArray[Any]  # structured, TRACE_EVENT.dtype
Edges = npt.NDArray[Any]  # structured, EDGE

SCHEMA: Final = 2
FORMAT: Final = "megakernel timeline"
TIMES: Final = ("start", "ready", "first_data", "end", "published")
COUNTER, VALUE, PEER = 0, 1, 2  # kinds of an edge
KINDS: Final = ("counter", "value", "peer")
EDGE: Final = np.dtype(
    [
        ("producer", "<u4"), ("producer_first", "<u4"), ("producer_count", "<u4"),
        ("consumer", "<u4"), ("consumer_first", "<u4"), ("consumer_count", "<u4"),
        ("kind", "u1"), ("counter", "<u4"),
    ]
)  # fmt: skip
MOST_NUMBER: Final = 1e30  # in a file; sums of such are still finite
PACKED_FROM: Final = 10_000  # events; a file with fewer has them as lists of numbers
EVENT_COLUMNS: Final = tuple(f.name for f in TRACE_EVENT.fields)


@dataclass(frozen=True)
class TimelineNode:
    """A node of the schedule, its index in `Timeline.nodes` is the `node` of events. Bytes and flops: one step, all
    tiles, one row, at the recording's context; `stream_bytes` are those of weights and KV."""

    name: str
    operator: str  # name without the layer: "attention.qkv"
    task: str
    layer: int  # -1: of none
    tiles: int
    stream_bytes: float
    other_bytes: float
    flops: float
    fields: Mapping[str, int | float] = field(default_factory=dict)  # of its records' payload


@dataclass(frozen=True)
class TimelineFault:
    """The fault that ended the recording. `text` says it in a sentence."""

    kind: str
    node: str
    task: str
    tile: int
    worker: int
    role: str
    step: int
    text: str


@dataclass(frozen=True)
class Alignment:
    """How ticks became nanoseconds. Of each worker: what was added to its clock (ns against worker 0's), and how far it
    was from a straight line against the reference. `worst_hop_ns`: the shortest time from the end of work to the
    end of a wait for it; below zero it bounds the error of the alignment. None: no edge was recorded.

    Of several devices with timers of their own: `timer_offset_ns`, what was taken from each one's (ns against the first
    device's), and `timer_hop_ns`, the hop between that device and the first, which the offset's error cannot exceed;
    None: nothing was seen of it."""

    clock: str
    clock_hz: float
    offset_ns: tuple[float, ...]
    drift_ns: tuple[float, ...]
    worst_hop_ns: float | None = None
    timer_offset_ns: tuple[float, ...] = ()
    timer_hop_ns: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Meta:
    """What ran, where, and how it was recorded."""

    program: str  # name of the program
    model: str  # as it was given: a folder, a file, "demo", a shape
    backend: str  # "cpu", "cuda", "hip"
    device: str  # its description
    target: str
    workers: int
    roles: tuple[str, ...]  # that this backend has, without "control"
    ring_bytes: int  # of one worker, where weights are streamed through a ring; else 0
    alignment: Alignment
    first_step: int  # the kernel's own numbers; 0 and -1 when no step was recorded
    last_step: int
    context: int  # tokens in the cache, mean over the steps
    rows: float  # tokens computed in a step, mean over the steps
    overflow: tuple[int, ...]  # events lost, by worker
    options: Mapping[str, Any]  # that the program was built with: arguments of `make_plan` and "workers"
    fault: TimelineFault | None = None
    schema: int = SCHEMA
    ceiling_gbps: float | None = None  # rate of a plain read of a step's bytes, measured beside the recording


@dataclass(frozen=True)
class Timeline:
    """`events`: sorted by worker, role, start; `edges`: what the kernel waits for, beside the order of each queue.

    An edge says that a record with any tile of [consumer_first, + consumer_count) of node `consumer` starts its work
    after all tiles [producer_first, + producer_count) of node `producer` are published, and by which means: of kind
    COUNTER (`counter` is its number), VALUE (NONE) or PEER: of another device, `counter` is the number of its
    part. A step begins after the last node of the step before it."""

    events: Events
    meta: Meta
    nodes: tuple[TimelineNode, ...]
    edges: Edges

    @cached_property
    def tasks(self) -> Events:
        """Events of records; the rest are steps."""
        out: Events = self.events[self.events["role"] != Role.CONTROL]
        return out

    @cached_property
    def worker_steps(self) -> Events:
        """An event for each worker and step: start and ready around the wait for its header, end after its last record;
        tile_begin is the number of rows, tile_count the longest context of the step."""
        out: Events = self.events[self.events["role"] == Role.CONTROL]
        return out

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Every step that has an event, ascending."""
        return tuple(int(s) for s in np.unique(self.events["step"]))

    @cached_property
    def complete_steps(self) -> tuple[int, ...]:
        """Steps of which no event is missing: not cut by a fault, and every tile of every node is there. Records that
        may be left out of a step do not count, nor do roles that may have nothing to do with one."""
        optional = {task.name for task in all_tasks().values() if task.idles}
        always = np.array([node.task not in optional for node in self.nodes], bool)
        numbers = np.array(self.steps, np.int64)
        ran = np.zeros((len(numbers), len(self.nodes)), np.int64)  # tiles
        ended = self.tasks[np.isin(self.tasks["role"], (Role.WORKER, Role.CONSUMER))]
        np.add.at(ran, (np.searchsorted(numbers, ended["step"].astype(np.int64)), ended["node"]), ended["tile_count"])
        whole = (ran == [node.tiles for node in self.nodes])[:, always].all(1) if len(numbers) else ()
        begun, counts = np.unique(self.worker_steps["step"], return_counts=True)
        workers = dict(zip(begun.tolist(), counts.tolist()))
        cut = set(self.events["step"][(self.events["flags"] & TraceFlag.CUT) != 0].tolist())
        return tuple(
            s for s, full in zip(self.steps, whole) if full and s not in cut and workers.get(s) == self.meta.workers
        )

    def of_steps(self, first: int, last: int) -> Timeline:
        """The part with steps [first, last]. Raises TimelineError when they are not all in the recording."""
        low, high = self.meta.first_step, self.meta.last_step
        if not low <= first <= last <= high:
            raise TimelineError(
                f"steps {first} to {last}: this timeline has steps {low} to {high}; give a range inside it"
            )
        kept = self.events[(self.events["step"] >= first) & (self.events["step"] <= last)]
        return replace(self, events=kept, meta=replace(self.meta, first_step=first, last_step=last))

    def waited_for(self, event: Any) -> str:  # a row of `events`, or its fields by name
        """On what the longest wait of an event was, in words; empty when it did not wait."""
        counter = int(event["longest_wait_counter"])
        if counter == NONE:
            return ""
        if int(event["flags"]) & TraceFlag.BY_VALUE:
            return f"values of {self.nodes[counter].name}" if counter < len(self.nodes) else "values"
        makers = np.unique(self.edges["producer"][self.edges["counter"] == counter])
        names = ", ".join(self.nodes[int(n)].name for n in makers)
        return f"counter {counter}" + (f" of {names}" if names else "")

    # ------------------------------------------------------------------------------------------ files
    def to_json(self) -> str:
        """One JSON object: columns of events and edges, rows of nodes. Columns of many events are packed (columns.py),
        and then the moments after the first are counted from it."""
        return json.dumps(
            {
                "format": FORMAT,
                "schema": SCHEMA,
                "meta": asdict(self.meta),
                "nodes": [asdict(n) for n in self.nodes],
                "edges": {name: self.edges[name].tolist() for name in EDGE.names or ()},
                "events": self._event_columns(),
            }
        )

    def _event_columns(self) -> dict[str, Any]:
        if len(self.events) < PACKED_FROM:
            return {name: self.events[name].tolist() for name in EVENT_COLUMNS}
        start = self.events["start"]
        return {
            name: pack(self.events[name] - start if name in TIMES[1:] else self.events[name]) for name in EVENT_COLUMNS
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON to `path`, all or nothing. Raises TimelineError when it cannot be written."""
        final = Path(path)
        work = final.with_name(f".{final.name}.{os.getpid()}")
        try:
            work.write_text(self.to_json())
            os.replace(work, final)
        except OSError as e:
            work.unlink(missing_ok=True)
            raise TimelineError(f"cannot write the timeline to {final}: {e.strerror or e}; choose another file") from e
        return final

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Timeline:
        """Read a file that `save` wrote. Raises TimelineError for a damaged file and for one of another version."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise TimelineError(f"cannot read the timeline {path}: {e}") from e
        return Timeline.from_json(text, str(path))

    @staticmethod
    def from_json(text: str, where: str = "the timeline") -> Timeline:
        try:
            raw = json.loads(text)
        except RecursionError as e:
            raise TimelineError(f"{where} is not a timeline; expected a file that `megakernel profile` wrote") from e
        except json.JSONDecodeError as e:
            if _ends_early(text, e):
                raise TimelineError(
                    f"{where} is truncated: it ends after {len(text):,} characters inside the JSON; record it again"
                ) from e
            raise TimelineError(f"{where} is not JSON ({e}); expected a file of `megakernel profile --json`") from e
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise TimelineError(f"{where} is not a timeline; expected a file that `megakernel profile` wrote")
        if raw.get("schema") != SCHEMA:
            raise TimelineError(
                f"{where} has schema version {raw.get('schema')}, this version reads {SCHEMA}; record it again"
            )
        try:
            return _decode(raw)
        except (TypeError, KeyError, AttributeError) as e:
            raise TimelineError(f"{where} misses or adds a field ({e}); record it again") from e
        except (ValueError, OverflowError) as e:
            raise TimelineError(f"{where} has a value that none has ({e}); record it again") from e


# ---------------------------------------------------------------------------------------------- roles of a record
def waiters(events: Events) -> npt.NDArray[np.bool_]:
    """Of each event whether its `ready` ends a wait along the record's edges: that of the loader where there is one."""
    mine = np.isin(events["role"], (Role.WORKER, Role.CONSUMER)) & ~_beside(events, Role.LOADER)
    out: npt.NDArray[np.bool_] = (mine | (events["role"] == Role.LOADER)) & ((events["flags"] & TraceFlag.SKIPPED) == 0)
    return out


def publishers(events: Events) -> npt.NDArray[np.bool_]:
    """Of each event whether its `published` is what others wait for: that of the storer where there is one."""
    mine = np.isin(events["role"], (Role.WORKER, Role.CONSUMER)) & ~_beside(events, Role.STORER)
    out: npt.NDArray[np.bool_] = mine | (events["role"] == Role.STORER)
    return out


def looked_along(events: Events, kind: int) -> npt.NDArray[np.bool_]:
    """Of each event that waits whether it looked at edges of this kind. A record that may wait either for counters or
    for values has edges of both; which of them it was is what its longest wait says."""
    by_value = (events["flags"] & TraceFlag.BY_VALUE) != 0
    out: npt.NDArray[np.bool_] = ~by_value if kind == COUNTER else np.ones(len(events), np.bool_)
    if kind == VALUE:
        out = by_value | (events["longest_wait_counter"] == NONE)
    return out


def _beside(events: Events, role: Role) -> npt.NDArray[np.bool_]:
    """Whether this role has an event of the same record, worker and step."""
    there: npt.NDArray[np.bool_] = events["role"] == role
    if not there.any():
        return there
    place = events["worker"].astype(np.uint64) << np.uint64(16) | events["record"].astype(np.uint64) & np.uint64(0xFFFF)
    key = events["step"].astype(np.uint64) << np.uint64(32) | place
    out: npt.NDArray[np.bool_] = np.isin(key, key[there])
    return out


def _ends_early(text: str, error: json.JSONDecodeError) -> bool:
    """Whether what is wrong is that more should follow: a text is as often cut inside a string or a word."""
    rest = text[error.pos :].strip()
    begun = any(word.startswith(rest) for word in ("true", "false", "null", "NaN", "Infinity", "-Infinity"))
    return len(rest) <= 1 or begun or "Unterminated" in error.msg or ("escape" in error.msg and len(rest) < 6)


def _fits(value: object, kind: str) -> bool:
    """Whether a value of a file is what a field of this type holds. Objects are looked at by themselves."""
    if kind.endswith(" | None"):
        return value is None or _fits(value, kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        inner = kind.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, tuple) and all(_fits(v, inner) for v in value)
    if kind == "Mapping[str, int | float]":
        return isinstance(value, dict) and all(_fits(v, "float") for v in value.values())
    if kind in ("int", "float"):
        known = type(value) is int or (kind == "float" and type(value) is float)
        return known and abs(value) < (MOST_NUMBER if kind == "float" else 1 << 63)  # type: ignore[arg-type]
    return isinstance(value, {"str": str, "Mapping[str, Any]": dict}.get(kind, object))


def _made(cls: type[Any], raw: Mapping[str, Any], what: str) -> Any:
    """One of the dataclasses above, of what a file says. Raises TypeError, ValueError."""
    for f in fields(cls):
        if f.name in raw and not _fits(raw[f.name], str(f.type)):
            raise ValueError(f"{what}: {f.name}: expected {f.type}, got {str(raw[f.name])[:40]!r}")
    return cls(**raw)


def _decode(raw: Mapping[str, Any]) -> Timeline:
    meta = dict(raw["meta"])
    alignment = dict(meta["alignment"])
    lists = ("offset_ns", "drift_ns", "timer_offset_ns", "timer_hop_ns")
    alignment |= {name: tuple(alignment[name]) for name in lists if name in alignment}
    meta["alignment"] = _made(Alignment, alignment, "alignment")
    meta["fault"] = _made(TimelineFault, meta["fault"], "fault") if meta["fault"] else None
    meta["roles"], meta["overflow"] = tuple(meta["roles"]), tuple(meta["overflow"])
    missing = {f.name for f in fields(Meta) if f.default is MISSING} - set(meta)
    if missing:
        raise KeyError(f"meta without {', '.join(sorted(missing))}")
    nodes = tuple(_made(TimelineNode, n, f"node {i}") for i, n in enumerate(raw["nodes"]))
    events = _columns(raw["events"], TRACE_EVENT.dtype, "events")
    edges = _columns(raw["edges"], EDGE, "edges")
    for table, column in ((edges, "producer"), (edges, "consumer"), (events, "node")):
        known = table[column][table[column] != NONE]
        if len(known) and int(known.max()) >= len(nodes):
            raise ValueError(f"{column} {int(known.max())} of {len(nodes)} nodes")
    made: Meta = _made(Meta, meta, "meta")
    _check_events(events, made)
    return Timeline(events, made, nodes, edges)


def _check_events(events: Events, meta: Meta) -> None:
    """Raises ValueError for events that no kernel leaves: figures of them would be wrong."""
    if len(meta.overflow) != meta.workers:
        raise ValueError(f"overflow of {len(meta.overflow)} workers, there are {meta.workers}")
    if not len(events):
        return
    if int(events["worker"].max()) >= meta.workers:
        raise ValueError(f"worker {int(events['worker'].max())} of {meta.workers} workers")
    if not np.isin(events["role"], list(Role)).all():
        raise ValueError(f"role {int(events['role'].max())}")
    if int(events["longest_wait"].max()) >= 1 << 63:
        raise ValueError(f"longest_wait {int(events['longest_wait'].max())}")
    cut = (events["flags"] & TraceFlag.CUT) != 0
    for before, after in pairwise(TIMES):
        late = (events[before] > events[after]) & ~(cut & (after == "published"))
        if late.any() or int(events[after].max()) >= 1 << 63:
            at = int(np.flatnonzero(late)[0]) if late.any() else int(events[after].argmax())
            raise ValueError(f"event {at}: {before} {int(events[before][at])}, {after} {int(events[after][at])}")


def _columns(raw: Mapping[str, Any], dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    names = set(dtype.names or ())
    if set(raw) != names:
        raise KeyError(f"{what}: columns {', '.join(sorted(set(raw) ^ names))}")
    whole = {n: unpack(c, dtype[n]) if isinstance(c, str) else np.asarray(c, dtype[n]) for n, c in raw.items()}
    lengths = {len(column) for column in whole.values()}
    if len(lengths) > 1:
        raise ValueError(f"{what}: columns of {sorted(lengths)} rows")
    out = np.zeros(lengths.pop() if lengths else 0, dtype)
    for name in names:
        out[name] = whole[name]
    for name in TIMES[1:]:
        if isinstance(raw.get(name), str):
            out[name] += out["start"]
    return out
