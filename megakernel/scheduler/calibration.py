"""Measured figures of a machine for `simulate`, and the file that keeps them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from megakernel.errors import TargetError
from megakernel.tasks.task import TaskNode

FORMAT: Final = "megakernel calibration"
SCHEMA: Final = 1
ABOVE_ZERO: Final = ("stream_gbps", "worker_gflops")


def operator_name(node: str, layer: int) -> str:
    """What a node is in every layer: its name without the layer, "layers.3.glu" is "glu"."""
    return node.removeprefix(f"layers.{layer}.")


@dataclass(frozen=True)
class Calibration:
    """Measured figures that replace those of a target; None and what is not named leave the target's.

    `target`: where they were measured, "" for anywhere. `task_scale`: factor on the streaming or computing time.
    `overhead_us`: what an entry costs beside that and task_us, negative where it costs less. Both by operator (see
    `operator_name`) or, for operators not named, by task. `source`: what they were fitted to, for people.
    """

    target: str = ""
    stream_gbps: float | None = None
    worker_gflops: float | None = None
    hop_us: float | None = None
    signal_us: float | None = None
    task_us: float | None = None
    step_us: float = 0.0
    task_scale: Mapping[str, float] = field(default_factory=dict)
    overhead_us: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def scale(self, node: TaskNode) -> float:
        return _by_name(self.task_scale, node, 1.0)

    def overhead(self, node: TaskNode) -> float:
        return _by_name(self.overhead_us, node, 0.0)

    def check_target(self, target: str) -> None:
        """Raise TargetError when the figures were measured on another target."""
        if self.target and self.target != target:
            raise TargetError(
                f"the calibration was measured on {self.target} ({self.source}), not on {target}; "
                f"calibrate with a trace from {target}"
            )

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "schema": SCHEMA, **asdict(self)}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Raises TargetError when the file cannot be written."""
        try:
            Path(path).write_text(self.to_json() + "\n")
        except OSError as e:
            raise TargetError(f"cannot write the calibration to {path}: {e.strerror or e}; choose another file") from e
        return Path(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Read a file that `save` wrote. Raises TargetError for any other."""
        try:
            raw = json.loads(Path(path).read_text())
        except (OSError, ValueError) as e:
            raise TargetError(
                f"cannot read the calibration {path} ({e}); expected a file that `megakernel calibrate` wrote"
            ) from e
        if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT or raw.pop("schema", None) != SCHEMA:
            raise TargetError(
                f"{path} is no calibration of version {SCHEMA}; write one with `megakernel calibrate TRACE -o FILE`"
            )
        unknown = sorted(set(raw) - {f.name for f in fields(Calibration)})
        wrong = unknown or [name for name, value in raw.items() if not _valid(name, value)]
        if wrong:
            raise TargetError(f"{path}: unknown or impossible value of {', '.join(wrong)}; calibrate again")
        return Calibration(**raw)


def _valid(name: str, value: Any) -> bool:
    if name in ("target", "source"):
        return isinstance(value, str)
    if name in ("task_scale", "overhead_us"):
        return isinstance(value, dict) and all(_number(v) and (v >= 0 or name == "overhead_us") for v in value.values())
    if value is None:
        return name != "step_us"
    return _number(value) and (value > 0 if name in ABOVE_ZERO else value >= 0)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _by_name(values: Mapping[str, float], node: TaskNode, otherwise: float) -> float:
    return values.get(operator_name(node.name, node.layer), values.get(node.task.name, otherwise))
