"""The commands that read timelines: `megakernel calibrate TRACE` and `megakernel profile --compare A B`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megakernel.report.compare import Change, compare
from megakernel.report.fit import calibrate, predict
from megakernel.scheduler.calibration import Calibration
from megakernel.show import emit, reported, table
from megakernel.timeline import Timeline

SHOWN = 8  # operators of a calibration


@reported
def calibrate_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON file that `megakernel profile` wrote.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures here; `schedule --calibration` reads it.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Fit nothing: say how near the figures in this file come to the trace."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Fit the cost model of `schedule` to a recorded timeline, and show predicted beside measured times."""
    timeline = Timeline.load(trace)
    said = predict(timeline, Calibration.load(check) if check else None)
    figures = None if check else calibrate(timeline)
    saved = figures.save(output) if figures and output else None
    if as_json:
        emit({
            "calibration": json.loads(figures.to_json()) if figures else None, "saved": str(saved) if saved else None,
            "prediction": asdict(said) | {"error": said.error},
        })  # fmt: skip
        return
    fitted = "with these figures" if check else "fitted to every other step"
    table(
        ("step", said.target, "error"),
        [
            (f"measured, median of {said.steps} steps", f"{said.measured_us:,.1f} us", ""),
            (f"simulated, {fitted}", f"{said.predicted_us:,.1f} us", f"{said.error:+.1%}"),
            ("simulated, the target's own figures", f"{said.target_us:,.1f} us",
             f"{said.target_us / said.measured_us - 1:+.1%}"),
        ],
    )  # fmt: skip
    table(
        ("operators that differ most", "measured us", "simulated us", "difference"),
        [(o.operator, f"{o.measured_us:,.1f}", f"{o.predicted_us:,.1f}", f"{o.difference_us:+,.1f}")
         for o in said.operators[:SHOWN]],
    )  # fmt: skip
    if saved:
        typer.echo(f"{saved}: megakernel schedule MODEL --calibration {saved}")


def show_comparison(a: Path, b: Path, as_json: bool) -> None:
    """What `megakernel profile --compare A B` prints. Raises TimelineError for files that are no timelines."""
    made = compare(Timeline.load(a), Timeline.load(b), names_of(a, b))
    if as_json:
        emit(json.loads(made.to_json()))
        return
    table(
        ("", "", f"{made.a} us", f"{made.b} us", "change us", f"{made.confidence:.0%} interval", "changed"),
        [_row(c) for c in made.changes],
        f"medians of {made.steps[0]} and {made.steps[1]} steps",
    )
    for note in made.notes:
        typer.echo(note)


def names_of(a: Path, b: Path) -> tuple[str, str]:
    """As much of the ends of two paths as tells them apart: what `profile` writes has one name in every folder."""
    for count in range(1, 1 + max(len(a.parts), len(b.parts))):
        left, right = (str(Path(*p.parts[-count:])) for p in (a, b))
        if left != right:
            return left, right
    return f"{a} (A)", f"{b} (B)"


def _row(c: Change) -> tuple[str, ...]:
    def number(value: float | None, sign: str = "") -> str:
        return "" if value is None else f"{value:{sign},.2f}"

    interval = "" if c.low is None else f"{number(c.low, '+')} to {number(c.high, '+')}"
    changed = "" if not c.judged else "yes" if c.changed else "no"
    return c.kind, c.name, number(c.a_us), number(c.b_us), number(c.difference_us, "+"), interval, changed
