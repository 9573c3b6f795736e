"""From a model's configuration to a Program: graph, lowering, schedule, verification, kernel."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megakernel.architectures import find_model
from megakernel.builder.cache import compiled, program_entry, writable
from megakernel.builder.kernel import kernel_source, variant_text, variants_of
from megakernel.builder.lower import Limits, Lowered, lower
from megakernel.builder.memory import MemoryPlan, plan
from megakernel.builder.program import FORMAT, Manifest, NodeInfo, Program, WorkspaceTensor
from megakernel.builder.rows import default_rows, row_flops
from megakernel.builder.shard import shard
from megakernel.device.device import Device, KernelSource
from megakernel.errors import CapacityError, LoweringError, ProgramError
from megakernel.graph import LOGITS, Graph
from megakernel.scheduler.assign import find_policies
from megakernel.scheduler.by_value import drop_value_waits, loose_nodes
from megakernel.scheduler.dependencies import schedule
from megakernel.scheduler.encode import encode
from megakernel.scheduler.relay import add_relays
from megakernel.scheduler.schedule import Schedule
from megakernel.scheduler.verify import verify
from megakernel.target import Target
from megakernel.tasks.advance import AdvanceConfig
from megakernel.tasks.attention import unit_bytes
from megakernel.tasks.record import MAX_ROWS, TILE_ROWS, abi_hash, row_capacity
from megakernel.tasks.task import WEIGHT_TYPES, Addresses, DType, TaskNode, all_fields

MOST_ROWS = {"cpu": MAX_ROWS, "cuda": 64, "hip": TILE_ROWS}  # of a step, by backend
Progress = Callable[[str], None]  # name of the stage that begins


@dataclass(frozen=True)
class Plan:
    """Everything of a program but its compiled kernel: what `megakernel schedule` shows."""

    graph: Graph
    lowered: Lowered
    memory: MemoryPlan
    schedule: Schedule
    limits: Limits
    target: Target
    keeps_tensors: bool = False
    rank: int = 0
    counted: Schedule | None = None  # where edges are by value: with the counters that `verify` saw, for `simulate`


def build_graph(config: Mapping[str, Any]) -> Graph:
    """The graph of a checkpoint's configuration. Raises UnknownArchitecture, UnsupportedConfig."""
    graph: Graph = find_model(config).build(config)
    return graph


def make_plan(config: Mapping[str, Any], target: Target, *, tp: int = 1, rank: int = 0, **options: Any) -> Plan:
    """`plan_graph` of a configuration's graph, with the same options; of `tp` devices the plan of that rank."""
    return replace(plan_graph(shard(build_graph(config), rank, tp), target, **options), rank=rank)


def plan_graph(
    graph: Graph,
    target: Target,
    *,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    max_slots: int = 8,
    max_context: int | None = None,
    max_rows: int | None = None,
    policy: str = "balanced",
    keep_tensors: bool = False,
    inputs: bool = False,
    hidden: bool = False,
    paced: bool = False,
) -> Plan:
    """Tasks, memory and a verified schedule of a graph; needs no compiler and no device.

    keep_tensors: no two tensors of a step share memory, so that all can be looked at after it. inputs: a prompt may
    have embeddings instead of tokens. hidden: what the head reads goes out to the host. paced: steps can keep to the
    budget of `max_step_ms`; on the CPU, and with more than 16 rows on CUDA, they can anyway."""
    given = TILE_ROWS if max_rows is None else max_rows
    limits = _limits(graph, target, dtype, kv_dtype, max_slots, max_context, given)
    limits = replace(limits, inputs=inputs, hidden=hidden, paced=paced)
    lowered = lower(graph, target, limits)
    if max_rows is None and (rows := _rows(lowered, limits, target)) != limits.max_rows:
        limits = replace(limits, max_rows=rows)
        lowered = lower(graph, target, limits)
    policies = find_policies()
    if policy not in policies:
        raise LoweringError(f"unknown policy {policy!r}; known: {', '.join(policies)}")
    memory = plan(lowered.nodes, lowered.tensors, reuse=not (target.value_edges or keep_tensors))
    if memory.total >= 1 << 32:
        raise CapacityError(
            f"the workspace takes {memory.total:,} bytes and must stay below 4 GiB; lower max_rows ({limits.max_rows}) "
            f"or max_context ({limits.max_context})"
        )
    placed = policies[policy](lowered.nodes, target, context_of(limits))
    loose = loose_nodes(lowered.nodes) if target.value_edges else frozenset()
    made = schedule(lowered.nodes, placed, policy, alias=memory.at, loose=loose)
    made = add_relays(made, target)
    verify(made, memory.at)
    chosen = drop_value_waits(made) if target.value_edges else made
    return Plan(graph, lowered, memory, chosen, limits, target, keep_tensors or target.value_edges, counted=made)


def plan_source(made: Plan, *, chaos: bool = False, trace: bool = False) -> KernelSource:
    """The kernel source of a plan."""
    capacity = row_capacity(made.limits.max_rows)
    return kernel_source(made.lowered.nodes, made.target, capacity=capacity, chaos=chaos, trace=trace)


def build_program(
    config: Mapping[str, Any],
    target: Target,
    device: Device,
    *,
    cache: Path,
    name: str = "",
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    max_slots: int = 8,
    max_context: int | None = None,
    max_rows: int | None = None,
    policy: str = "balanced",
    keep_tensors: bool = False,
    inputs: bool = False,
    hidden: bool = False,
    paced: bool = False,
    tp: int = 1,
    chaos: bool = False,
    trace: bool = False,
    progress: Progress | None = None,
) -> Program:
    """Build a program for `target` with the compiler of `device` (which need not have its hardware here).

    `config`: Hugging Face keys, as in `Checkpoint.config`. `max_context` defaults to 4096 or the model's own limit if
    that is less, `max_rows` to what the cost model says. `tp`: devices that run the model together; the program is that
    of rank 0, and `rank_program` makes the others of it. `cache`: folder of compiled kernels. Raises LoweringError,
    ScheduleError, BuildError, NoCompiler.
    """
    options: dict[str, Any] = {
        "dtype": dtype, "kv_dtype": kv_dtype, "max_slots": max_slots, "max_context": max_context,
        "max_rows": max_rows, "policy": policy, "keep_tensors": keep_tensors, "inputs": inputs, "hidden": hidden,
        "paced": paced, "tp": tp,
    }  # fmt: skip
    return _built(
        dict(config), lambda: make_plan(config, target, **options), target, device, cache, name, options,
        {"chaos": chaos, "trace": trace}, progress,
    )  # fmt: skip


def rank_program(program: Program, config: Mapping[str, Any], target: Target, rank: int) -> Program:
    """The program of another rank: the same kernel, queues and memory, with other slices of the weights."""
    m = program.manifest
    if rank == m.rank:
        return program
    limits = Limits(
        DType(m.dtype), DType(m.kv_dtype), m.max_slots, m.max_context, m.max_rows, m.input_cols > 0, m.hidden_cols > 0
    )
    lowered = lower(shard(build_graph(config), rank, m.ranks), target, limits)
    places = [(w.name, w.offset, w.bytes) for w in lowered.weights]
    if places != [(w.name, w.offset, w.bytes) for w in m.weights]:
        raise ProgramError(f"program {m.name}: the weights of rank {rank} lie elsewhere than those of rank {m.rank}")
    return replace(program, manifest=replace(m, rank=rank, weights=lowered.weights))


def build_graph_program(
    graph: Graph, target: Target, device: Device, *, cache: Path, name: str = "", chaos: bool = False,
    progress: Progress | None = None, **options: Any,
) -> Program:  # fmt: skip
    """As `build_program`, of a graph; `options` are those of `plan_graph`."""
    return _built(
        json.loads(graph.to_json()), lambda: plan_graph(graph, target, **options), target, device, cache, name, options,
        {"chaos": chaos, "trace": False}, progress,
    )  # fmt: skip


def _built(
    what: object, planned: Callable[[], Plan], target: Target, device: Device, cache: Path, name: str,
    options: Mapping[str, Any], flavour: Mapping[str, bool], progress: Progress | None,
) -> Program:  # fmt: skip
    """The program of `what` (a config or a graph as plain values) from the cache, or planned and compiled."""
    say = progress or (lambda _stage: None)
    entry = program_entry(cache, [what, asdict(target), options, flavour, name, device.compiler_id(target)])
    found = _try_load(entry)
    if found is not None:
        return found
    say("schedule")
    made = planned()
    source = plan_source(made, **flavour)
    say("compile")
    program = assemble(made, source, compiled(source, device, cache), name=name)
    with contextlib.suppress(ProgramError), writable(entry.parent):  # another process may be first
        program.write(entry)
    return program


def assemble(
    made: Plan, source: KernelSource, binary: Path, *, name: str = "", variants: Sequence[str] | None = None
) -> Program:
    """The program of a plan and a compiled kernel. variants: those of the kernel when it has more than the plan's."""
    known = tuple(variants or variants_of(made.lowered.nodes))
    opcodes = {text: i for i, text in enumerate(known)}
    weights = {w.name: w.offset for w in made.lowered.weights}
    at = Addresses(weights.__getitem__, lambda t: made.memory.at[t][0])
    records = encode(made.schedule, lambda n: opcodes[variant_text(n)], at)
    title = name or made.graph.config.architecture
    return Program(_manifest(made, source, title, records.shape[1], known), records, binary, source.text)


def _try_load(entry: Path) -> Program | None:
    """The program of a cache entry, or None; a damaged entry is removed."""
    if not entry.exists():
        return None
    try:
        return Program.load(entry)
    except ProgramError:
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _limits(
    graph: Graph, target: Target, dtype: str, kv_dtype: str | None, slots: int, context: int | None, rows: int
) -> Limits:
    most = graph.config.max_positions
    wanted = min(4096, most) if context is None else context
    for name, value in (("max_context", wanted), ("max_rows", rows), ("max_slots", slots)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise CapacityError(f"{name}: expected an integer, got {value!r}")
    if not 1 <= wanted <= most:
        raise CapacityError(f"max_context {wanted}: the model allows 1 to {most} positions")
    if not 1 <= rows <= MAX_ROWS:
        raise CapacityError(f"max_rows {rows}: a step carries 1 to {MAX_ROWS} rows")
    room = MOST_ROWS[target.backend]
    if rows > room:
        raise LoweringError(
            f"max_rows {rows}: the kernels of target {target.name} have room for {room} rows in a step; give at "
            f"most {room}"
        )
    if slots < 1:
        raise CapacityError(f"max_slots {slots}: at least 1 is needed")
    weights, pages = _dtype("dtype", dtype, target), _dtype("kv_dtype", kv_dtype or dtype, target)
    return Limits(weights, pages, slots, wanted, rows)


def _dtype(option: str, text: str, target: Target) -> DType:
    known = [d.value for d in (DType if option == "kv_dtype" else WEIGHT_TYPES)]
    if text not in known:
        raise LoweringError(f"unknown {option} {text!r}; known: {', '.join(known)}")
    if target.half_only and text == DType.F32.value:
        raise LoweringError(
            f"{option} {text!r}: {target.name} multiplies 16-bit elements; choose bf16 or f16, or the cpu device"
        )
    return DType(text)


def context_of(limits: Limits) -> int:
    """Tokens in the cache that the cost model assumes."""
    return min(512, limits.max_context)


def _rows(lowered: Lowered, limits: Limits, target: Target) -> int:
    """max_rows of a program whose user did not say."""
    row_bytes = plan(lowered.nodes, lowered.tensors, reuse=not target.value_edges).total / limits.max_rows
    flops = row_flops(lowered.nodes, context_of(limits))
    room = MOST_ROWS[target.backend] if target.backend != "cuda" or lowered.ranks == 1 else TILE_ROWS
    return default_rows(target, float(lowered.stream_bytes), flops, row_bytes, room=room, alone=limits.max_slots == 1)


def _manifest(made: Plan, source: KernelSource, name: str, queue_length: int, variants: tuple[str, ...]) -> Manifest:
    low, limits, target = made.lowered, made.limits, made.target
    tensors = tuple(
        WorkspaceTensor(t, made.memory.at[t][0], made.memory.at[t][1], size.rows, size.cols, size.dtype)
        for t, size in low.tensors.items()
    )
    nodes = tuple(_node_info(n) for n in low.nodes)
    return Manifest(
        format=FORMAT,
        abi_hash=abi_hash(all_fields(), row_capacity(limits.max_rows)),
        name=name,
        model=json.loads(json.dumps(asdict(made.graph.config))),  # as it reads back from a file
        rope=tuple(json.loads(json.dumps(low.ropes))),
        target=target.name,
        backend=target.backend,
        workers=target.workers,
        dtype=limits.dtype.value,
        kv_dtype=limits.kv_dtype.value,
        policy=made.schedule.policy,
        max_slots=limits.max_slots,
        max_context=limits.max_context,
        max_rows=limits.max_rows,
        max_pieces=low.max_pieces,
        page_tokens=low.page_tokens,
        pages_per_slot=-(-limits.max_context // low.page_tokens),
        piece_tokens=low.piece_tokens,
        kv_layers=low.kv_layers,
        kv_heads=low.kv_heads,
        head_dim=low.head_dim,
        kv_unit_bytes=unit_bytes(low.page_tokens, low.head_dim, limits.kv_dtype),
        vocab=made.graph.config.vocab,
        weights_bytes=low.weights_bytes,
        stream_bytes=low.stream_bytes,
        workspace_bytes=made.memory.total,
        workspace_copies=2 if target.value_edges else 1,
        keeps_tensors=made.keeps_tensors,
        counter_count=made.schedule.counters + (2 * len(low.nodes) if limits.wide(target) else 0),  # see cuda_wide.cuh
        queue_length=queue_length,
        variants=variants,
        nodes=nodes,
        weights=low.weights,
        tensors=tensors,
        source_hash=source_hash(source),
        chaos=source.chaos,
        trace=source.trace,
        input_cols=made.graph.config.hidden if limits.inputs else sum(t.cols for t in made.graph.inputs),
        hidden_cols=made.graph.config.hidden if limits.hidden else 0,
        output_cols=0 if made.graph.output == LOGITS else sum(low.tensors[t].cols for t in made.graph.outputs),
        ranks=low.ranks,
        rank=made.rank,
        window_bytes=low.window_bytes,
        exchanges=low.exchanges,
        best_offset=low.best_offset,
        part_vocab=low.part_vocab,
        paced=any(isinstance(n.variant, AdvanceConfig) and n.variant.paced for n in low.nodes),
        row_flops=row_flops(low.nodes, context_of(limits)),
    )


def _node_info(node: TaskNode) -> NodeInfo:
    written = node.task.writes(node, 0, node.tiles)
    one = [r for r in node.task.writes(node, 0, 1) if written and r.tensor == written[0].tensor]
    shared = node.tiles == 1 or (one and one[0].stop - one[0].start < written[0].stop - written[0].start)
    names = tuple(dict.fromkeys(r.tensor for r in written))
    cols = one[0].stop - one[0].start if one and shared else 0
    return NodeInfo(node.name, node.task.name, variant_text(node), node.tiles, node.layer, names, cols)


def source_hash(source: KernelSource) -> str:
    """Short digest of the generated text, for comparing programs."""
    return hashlib.sha256(source.text.encode()).hexdigest()[:16]
