"""Find the first task that computes something wrong: a step on the device, tensor by tensor beside the interpreter.

The program is built so that no two tensors of a step share memory. After the step that ends a prompt every tensor of
the workspace is there, and the first one that is off names the task, and its largest error the tile and the worker. A
task that never ends is a fault, which names itself.

On several devices every rank's tensors are compared with what the interpreter computes of the rank's part of the graph.
What the ranks put together is taken from the whole graph's run: so a rank is not blamed for what another one sent, only
the task that put a wrong part in, and a wrong split shows where the parts meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.build import build_graph
from megakernel.builder.program import Manifest, Program
from megakernel.builder.shard import shard
from megakernel.errors import CapacityError, InvalidRequest
from megakernel.graph import Graph, Node
from megakernel.interpret import Interpreter
from megakernel.opening import build, load, target_of, workers_of_rank
from megakernel.origin import Origin, Progress, open_origin
from megakernel.probe import forced_logits
from megakernel.ranks import LocalRank, Ranks
from megakernel.runtime import Runtime
from megakernel.sampling import whole_ids
from megakernel.settings import Settings, read_settings

Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
TORCH_TYPES: Mapping[str, str] = {"f16": "float16", "bf16": "bfloat16"}
LIMITS: Mapping[str, float] = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}  # relative error, 2-norm of a row
ROUNDING = 4.0  # an error above the limit is a task's fault when it is this many times that of rounding alone


@dataclass(frozen=True)
class Finding:
    """One tensor of the step. `error`: the relative error (2-norm) of the row that is furthest above `limit`; `row`,
    `column`: where the largest single difference is; `got`, `expected` there; `tile` and `worker`: who computes that
    column, -1 where the tiles of the task do not share out the columns. `rank` and `device`: who has the tensor; of one
    device rank 0."""

    rank: int
    device: str
    node: str
    task: str
    tensor: str
    layer: int
    error: float
    limit: float
    row: int
    column: int
    got: float
    expected: float
    tile: int
    worker: int

    @property
    def bad(self) -> bool:
        return not self.error <= self.limit


def bisect(
    model: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "bf16",
    tokens: Sequence[int] | int = 8,
    workers: int | None = None,
    limit: float | None = None,
    seed: int = 0,
    tp: int = 1,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> tuple[Finding, ...]:
    """Every tensor of the step that ends the prompt `tokens` (ids, or how many random ones), in the order of the tasks,
    and of each task those of all ranks.

    limit: relative error above which a tensor is bad; None takes that of `dtype`, or in rows that rounding alone spoils
    (where large sums cancel out) several times that of a reference that rounds what it multiplies. tp: devices that run
    the model together. Raises what opening a model raises, DeviceFault for a task that never ends, MissingExtra without
    torch."""
    from megakernel.devices import open_device

    if limit is not None and not 0 <= limit < math.inf:
        raise InvalidRequest(f"bisect: limit: expected a number of at least 0, got {limit}")
    if seed < 0:
        raise InvalidRequest(f"bisect: seed: expected an integer of at least 0, got {seed}")
    chosen = settings or read_settings()
    where = open_device(device)
    origin = open_origin(model, dtype=dtype, seed=seed, cache=chosen.cache, progress=progress)
    try:
        graph = build_graph(origin.config)
        ids = _prompt(tokens, graph, seed)
        target = workers_of_rank(target_of(where, None, workers, chosen), tp, workers, chosen)
        program = build(
            origin, target, where, chosen, progress, dtype=dtype, max_slots=1,
            max_context=min(graph.config.max_positions, len(ids) + 1), keep_tensors=True, tp=tp,
        )  # fmt: skip
        runtime = load(program, where, origin, chosen, progress=progress)
        try:
            return compare(runtime, graph, origin, ids, limit)
        finally:
            runtime.close()
    finally:
        origin.close()


def _prompt(tokens: Sequence[int] | int, graph: Graph, seed: int) -> list[int]:
    room = graph.config.max_positions - 1
    wanted = tokens if isinstance(tokens, int) else len(tokens)
    if not 1 <= wanted <= room:
        raise CapacityError(f"bisect: expected 1 to {room} tokens, got {wanted}")
    if not isinstance(tokens, int):
        return whole_ids(tokens, graph.config.vocab, "bisect")
    return [int(i) for i in np.random.default_rng(seed).integers(0, graph.config.vocab, tokens)]


def compare(
    runtime: Runtime, graph: Graph, origin: Origin, ids: Sequence[int], limit: float | None = None
) -> tuple[Finding, ...]:
    """The findings of one prompt on an open runtime, whose program keeps its tensors and which runs nothing else.
    `graph`: of the whole model. `limit` as of `bisect`."""
    m = runtime.manifest
    if not m.keeps_tensors:
        raise InvalidRequest(f"program {m.name} reuses the memory of its tensors; build it with keep_tensors")
    forced_logits(runtime, ids, len(ids) - 1)
    read = partial(_whole, origin, m.dtype)
    whole = graph.interpret(read, ids, keep="all")
    first = (len(ids) - 1) // m.max_rows * m.max_rows  # of the tokens in the last step
    written = [(n, t) for n, info in enumerate(m.nodes) for t in info.writes if m.tensor(t).dtype == "f32"]

    def all_of(rounded: Mapping[str, Any] | None) -> tuple[Finding, ...]:
        """What is found; with the tensors of a reference that rounds, rows may be as far off as it allows for."""
        found: list[tuple[int, Finding]] = []
        for part in _parts(runtime):
            expected = _expected(graph, part, read, whole, ids)
            like = None if rounded is None else _expected(graph, part, read, rounded, ids)
            for node, tensor in written:
                if tensor not in expected:
                    continue
                rows = slice(-1 if tensor.removesuffix(".part") == graph.output else first, None)
                want = expected[tensor][rows]
                got = part.tensor(tensor)[: len(want), : want.shape[1]]
                limits = np.full(len(want), LIMITS[m.dtype] if limit is None else limit)
                if like is not None:
                    limits = np.maximum(limits, ROUNDING * _errors(like[tensor][rows], want))
                found.append((node, _finding(runtime.program, part, node, tensor, got, want, limits)))
        return tuple(f for _, f in sorted(found, key=lambda pair: pair[0]))  # stable: of a node the ranks in order

    findings = all_of(None)
    if limit is not None or m.dtype == "f32" or not any(f.bad for f in findings):
        return findings
    return all_of(_Rounded(graph, read, m.dtype).step(ids, keep="all"))


class _Rounded(Interpreter):
    """The reference, but what products and attention multiply is rounded to the type of the weights, as tasks do."""

    def __init__(self, graph: Graph, weights: Callable[[str], Any], dtype: str) -> None:
        super().__init__(graph, weights)
        self._kind = getattr(self._torch, TORCH_TYPES[dtype])

    def _run(self, node: Node, inputs: list[Any]) -> Any:
        if node.op in ("linear", "attention"):
            inputs = [x.to(self._kind).to(x.dtype) for x in inputs]
        return super()._run(node, inputs)


@dataclass(frozen=True)
class _Part:
    """One device's share of a runtime."""

    rank: int
    device: str
    manifest: Manifest
    tensor: Callable[[str], npt.NDArray[Any]]


def _parts(runtime: Runtime) -> Iterator[_Part]:
    yield _Part(0, runtime.device.name, runtime.manifest, runtime.tensor)
    for rank, other in enumerate(runtime.others if isinstance(runtime, Ranks) else (), 1):
        assert isinstance(other, LocalRank), other.name
        yield _Part(rank, other.runtime.device.name, other.runtime.manifest, other.runtime.tensor)


def _whole(origin: Origin, dtype: str, name: str) -> Any:
    return origin.read(name, dtype, slice(None))


def _expected(
    graph: Graph, part: _Part, read: Callable[[str], Any], whole: Mapping[str, Any], ids: Sequence[int]
) -> dict[str, Array]:
    """The tensors that a rank should have. What the ranks put together is that of the whole graph."""
    mine = shard(graph, part.rank, part.manifest.ranks)
    made: Mapping[str, Any] = whole
    if mine is not graph:
        made = Interpreter(mine, read, exchange=lambda node, _part: whole[node.output]).step(ids, keep="all")
    values = {name: np.asarray(value, np.float32) for name, value in made.items()}
    return values | _projections(mine, values, part.manifest)


def _projections(graph: Graph, values: Mapping[str, Array], manifest: Manifest) -> dict[str, Array]:
    """Queries, keys and values of an attention, which the tasks keep side by side in one tensor; padded outputs."""
    out = {}
    for node in graph.nodes:
        if node.op != "attention":
            continue
        linears = [_linear(graph, name) for name in node.inputs]
        joined = np.concatenate([values[n.output] for n in linears], axis=1)
        whole = [graph.producer(n) for n in node.inputs[:2]]
        out[f"{node.name}.projected"] = joined
        out[f"{node.name}.qkv"] = joined
        normed = [_whole_norm(graph, n) for n in whole if n is not None]
        if any(normed):
            parts = [values[n.output] for n in normed if n is not None]
            out[f"{node.name}.qkv"] = np.concatenate([*parts, values[linears[2].output]], axis=1)
    out = {name: _ordered(value, name, manifest) for name, value in out.items()}
    for node in graph.nodes:
        if node.op == "attention" and node.attrs["head_dim"] != manifest.head_dim:
            heads = values[node.output].reshape(-1, node.attrs["heads"], node.attrs["head_dim"])
            blank = manifest.head_dim - node.attrs["head_dim"]
            out[node.output] = np.pad(heads, ((0, 0), (0, 0), (0, blank))).reshape(len(heads), -1)
    return out


def _linear(graph: Graph, name: str) -> Node:
    node = graph.producer(name)
    while node is not None and node.op != "linear":
        node = graph.producer(node.inputs[0])
    assert node is not None, name
    return node


def _whole_norm(graph: Graph, node: Node) -> Node | None:
    """The norm over all heads between a projection and its attention."""
    at: Node | None = node
    while at is not None and at.op != "linear":
        if at.op == "rms_norm" and not at.attrs["group"]:
            return at
        at = graph.producer(at.inputs[0])
    return None


def _ordered(value: Array, tensor: str, manifest: Manifest) -> Array:
    """The columns in the order in which the packed weights have their rows."""
    names = (f"{tensor}.weight", f"{tensor.removesuffix('.qkv')}.projected.weight")
    packed = next((w for w in manifest.weights if w.name in names), None)
    if packed is None or not any(p.head for p in packed.parts):
        return value
    columns, at = [], 0
    for part in packed.parts:
        size = part.stop - part.start
        where = part.source_rows(0, part.rows(size))
        columns.append(np.where(where >= 0, at + where, -1))
        at += size
    order = np.concatenate(columns)
    return np.where(order >= 0, value[:, order], np.float32(0))


def _errors(got: Array, want: Array) -> Array:
    """Relative error of each row, 2-norm; infinite where it is no number."""
    with np.errstate(all="ignore"):
        errors = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    found: Array = np.nan_to_num(errors, nan=np.inf)
    return found


def _finding(
    program: Program, part: _Part, node: int, tensor: str, got: Array, want: Array, limits: Doubles
) -> Finding:
    info = program.manifest.nodes[node]
    errors = _errors(got, want)
    worst = int((errors - limits).argmax())
    off = np.where(np.isfinite(got), np.abs(got - want), np.inf)
    row, column = (int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
    tile = column // info.tile_cols if info.tile_cols else -1
    return Finding(
        part.rank, part.device, info.name, info.task, tensor, info.layer, float(errors[worst]), float(limits[worst]),
        row, column, float(got[row, column]), float(want[row, column]), tile, _worker(program, node, tile),
    )  # fmt: skip


def _worker(program: Program, node: int, tile: int) -> int:
    records: Any = program.records
    first = records["tile_begin"].astype(np.int64)
    mine = (records["node"] == node) & (records["opcode"] != 0xFFFF)
    mine &= (first <= tile) & (tile < first + records["tile_count"])
    return int(np.nonzero(mine.any(axis=1))[0][0]) if tile >= 0 and mine.any() else -1
