"""What a task is, on the Python side: its fields, the regions it reads and writes, its cost, its cases.

A task is one kind of tile computation. `tasks/x.py` declares it and `tasks/x.cuh` computes it; both halves are
found by scanning this folder and a missing half is an error. A lowered node (`TaskNode`) is a task over `tiles`
tiles; a record in a queue is a contiguous range of those tiles.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

from megakernel.errors import LoweringError
from megakernel.settings import read_settings
from megakernel.tasks.struct import Struct

TASKS_FOLDER = Path(__file__).parent


@dataclass(frozen=True, order=True)
class Region:
    """Half-open interval `[start, stop)` of a tensor's columns, for all rows of the step."""

    tensor: str
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        return self.tensor == other.tensor and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Cost:
    """Work of some tiles at one row: bytes streamed from weights or KV, other bytes, floating-point operations, bytes
    sent to other devices."""

    stream_bytes: float = 0.0
    other_bytes: float = 0.0
    flops: float = 0.0
    link_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.stream_bytes + other.stream_bytes, self.other_bytes + other.other_bytes, self.flops + other.flops,
            self.link_bytes + other.link_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """Compile-time choices and tunables of a task: becomes one named template argument.

    Fields are int, bool, float or Enum."""

    def cpp(self) -> str:
        """C++ designated initialiser, e.g. `{.tile_n = 32, .epilogue = Epilogue::kResidual}`."""
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, enum.Enum):
                words = "".join(w.capitalize() for w in value.name.split("_"))
                text = f"{type(value).__name__}::k{words}"
            elif isinstance(value, bool):
                text = "true" if value else "false"
            elif isinstance(value, int):
                text = str(value)
            elif isinstance(value, float):
                text = f"{value!r}f"
            else:
                raise LoweringError(f"variant field {f.name} has type {type(value).__name__}")
            parts.append(f".{f.name} = {text}")
        return "{" + ", ".join(parts) + "}"


class DType(enum.Enum):
    """Element types of weights and KV pages. F8: of pages alone, see f8.py."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F8 = "f8"

    @property
    def bytes(self) -> int:
        return {DType.F32: 4, DType.F8: 1}.get(self, 2)


WEIGHT_TYPES = (DType.F32, DType.BF16, DType.F16)


@dataclass(frozen=True)
class TaskNode:
    """A node after lowering.

    `tensors`: role -> workspace tensor name ("input", "output", "residual", ...).
    `weights`: role -> name of a packed weight ("weight", "gamma", "bias", ...).
    `sizes`: integers that regions, cost and fields are computed from ("n", "k", "tile_n", ...).
    `scalars`: floats for the record ("eps", "scale", ...).
    """

    name: str
    task: type[Task]
    variant: Variant
    tiles: int
    tensors: Mapping[str, str]
    weights: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    layer: int = -1


@dataclass(frozen=True)
class Addresses:
    """Where the memory plan put things: byte offsets into the weights segment and into the workspace."""

    weight: Callable[[str], int]
    tensor: Callable[[str], int]


@dataclass(frozen=True)
class Exchange:
    """What the ranks' devices hand to each other at one place of a step. Every rank sends, every rank receives all.

    number: 0, 1, ... start, stop: bytes of every window that it takes. stamped: each element says by itself that it is
    of this exchange, so that a tile waits only for the elements that it reads; else it waits for all that is sent.
    """

    number: int
    start: int
    stop: int
    stamped: bool = False


class Task(ABC):
    """Base of every task. Subclasses are never instantiated; they are namespaces of pure functions."""

    name: ClassVar[str]  # file stem of both halves
    body: ClassVar[str]  # C++ template in namespace megakernel::tasks, parameter: the variant
    config: ClassVar[str]  # C++ type of the variant
    fields: ClassVar[Struct]  # the record's payload
    awaits_values: ClassVar[bool] = False  # its device half can wait for such elements, see `by_value`
    idles: ClassVar[bool] = False  # a device may leave its records out of a step in which they have nothing to do
    repeats: ClassVar[bool] = False  # what a worker finds out about a tile holds for the same tile in the next layer

    @staticmethod
    @abstractmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Regions of workspace tensors that tiles `[first, first + count)` read. Weights and KV pages not included."""

    @staticmethod
    @abstractmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Regions those tiles write. Two tiles never write the same column of a tensor."""

    @staticmethod
    def may_write(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Regions that a later node writes, as far as these tiles have not done so in its place."""
        return ()

    @staticmethod
    def may_await(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Regions that a device with edges by value may wait for instead of the counters of those tiles."""
        return ()

    @staticmethod
    @abstractmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        """Work of those tiles for one row with `context` tokens in the cache."""

    @staticmethod
    @abstractmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        """Values of `fields`."""

    @staticmethod
    def first_tiles(node: TaskNode) -> tuple[int, ...]:
        """Tiles that have work in every step, of a task whose others have some only in long contexts, or that a step of
        one row gives some, of a task whose others have none there."""
        return ()

    @staticmethod
    def by_value(node: TaskNode) -> bool:
        """Whether the elements that this node writes may say by themselves whether they have been written: each is a
        float, written once a step."""
        return False

    @staticmethod
    def sends(node: TaskNode) -> Exchange | None:
        """The exchange whose part of this rank the node writes to all peers, each tile its own."""
        return None

    @staticmethod
    def receives(node: TaskNode) -> Exchange | None:
        """The exchange of which every tile of the node waits for what the peers send."""
        return None


class Place(Protocol):
    """What a task's own operator may ask of the builder."""

    def tensor(self, name: str, cols: int) -> str:
        """A workspace tensor f32 [rows, cols] of that name."""
        ...

    def cols(self, name: str) -> int:
        """Columns of a workspace tensor, or elements of a weight vector."""
        ...

    def vector(self, name: str, weight: str) -> str:
        """A weight vector of the graph, packed as f32 under a name of its own."""
        ...

    def tile(self, cols: int) -> int:
        """Columns of a tile, so that the workers get even shares."""
        ...


@dataclass(frozen=True)
class Operator:
    """A graph operator that one task computes, declared beside the task as `OPERATOR`.

    name: as in the graph, and of the torch custom operator that captures as it. columns(inputs, attrs): columns of the
    output from the inputs' shapes; raises GraphError. interpret(torch, inputs, attrs): the formula on float32 tensors.
    lower(name, inputs, output, attrs, place): the task node. demo(builder, cols, fused): a graph's output with the
    operator, or with others in its place: the two are compared and timed against each other by `python -m bench.task`.
    """

    name: str
    columns: Callable[[Sequence[Any], Mapping[str, Any]], int]
    interpret: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
    lower: Callable[[str, Sequence[str], str, Mapping[str, Any], Place], TaskNode]
    demo: Callable[[Any, int, bool], str]


def task_folders() -> tuple[Path, ...]:
    """Where tasks are looked for: the package's folder and those of MEGAKERNEL_TASKS."""
    return (TASKS_FOLDER, *read_settings().task_folders)


def _modules(folder: Path) -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules([str(folder)]):
        if folder == TASKS_FOLDER:
            if info.name not in ("record", "task"):
                yield importlib.import_module(f"megakernel.tasks.{info.name}")
        elif (folder / f"{info.name}.cuh").exists():
            yield _of_file(folder / f"{info.name}.py")


def _of_file(path: Path) -> ModuleType:
    name = f"megakernel_task_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _tasks_of(module: ModuleType) -> list[type[Task]]:
    return [
        v for v in vars(module).values()
        if issubclass(type(v), type)  # `Array = NDArray[Any]` says that it is a type in Python 3.10
        and issubclass(v, Task) and v is not Task and v.__module__ == module.__name__
    ]  # fmt: skip


def tile_columns(node: TaskNode, first: int, count: int) -> tuple[int, int]:
    """Columns of tiles `[first, first + count)` of a node whose tiles share out its `cols` by `tile_cols`."""
    width, cols = node.sizes["tile_cols"], node.sizes["cols"]
    return min(cols, first * width), min(cols, (first + count) * width)


@lru_cache(maxsize=1)
def all_tasks() -> dict[str, type[Task]]:
    """Every task by name. Raises LoweringError for a half that has no other half, and for a name that comes twice."""
    found: dict[str, type[Task]] = {}
    for folder in task_folders():
        stems = set()
        for module in _modules(folder):
            path = Path(module.__file__ or "")
            for task in _tasks_of(module):
                if task.name in found:
                    raise LoweringError(f"{path}: there is a task {task.name!r} already; give it another name")
                found[task.name] = task
                stems.add(path.stem)
                if not path.with_suffix(".cuh").exists():
                    raise LoweringError(f"{path} has no device half {path.stem}.cuh")
        for half in folder.glob("*.cuh"):
            if half.stem != "task" and half.stem not in stems:
                raise LoweringError(f"{half} has no Python half {half.stem}.py")
    return dict(sorted(found.items()))


@lru_cache(maxsize=1)
def all_operators() -> dict[str, Operator]:
    """The operators that tasks declare for themselves, by name."""
    modules = {task.__module__: sys.modules[task.__module__] for task in all_tasks().values()}
    own = [m.OPERATOR for m in modules.values() if isinstance(getattr(m, "OPERATOR", None), Operator)]
    return {operator.name: operator for operator in own}


def device_half(task: type[Task]) -> Path:
    """The file that computes a task."""
    return Path(sys.modules[task.__module__].__file__ or "").with_suffix(".cuh")


def all_fields() -> tuple[Struct, ...]:
    """The payload structures of all tasks, in name order: part of the ABI."""
    return tuple(t.fields for t in all_tasks().values())
