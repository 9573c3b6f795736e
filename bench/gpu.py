"""Decode latency on a GPU: this kernel beside transformers in a CUDA graph, torch.compile and a plain read.

    python -m bench.gpu --shape llama-3.2-1b --context 32 --context 512 --against graph --against compile --against read

Everything runs in one process and in alternation: each round, every program decodes `--steps` tokens at every context.
Weights are random, of the published shape, made on the device; a program's tokens are its own, and their hash shows
whether its rounds agree. Medians over all steps of all rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.ending import run
from bench.gpu_programs import PROGRAMS, Kernel, Program, Steps
from megakernel.architectures import shape_config
from megakernel.bench import step_bytes
from megakernel.errors import InvalidRequest
from megakernel.show import errors, table

SHAPES = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "smollm2-135m")
CONTEXTS = (32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PEERS = Path(__file__).parent / "peers.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One program at one context. `us`: median of `steps` times between tokens; `floor_us`: the step's bytes at the
    rate of the plain read, 0 when none was measured. A plain read has a buffer of its own."""

    shape: str
    program: str
    context: int
    us: float
    least_us: float
    most_us: float
    steps: int
    bytes_per_step: int
    gbps: float
    floor_us: float
    of_floor: float
    launches_per_token: float | None
    tokens_hash: str
    note: str = ""


def compare(
    config: Mapping[str, Any], shape: str, contexts: Sequence[int], programs: Sequence[str], *,
    device: str = "cuda", steps: int = 100, rounds: int = 3, say: Say = lambda _text: None, **options: Any,
) -> Iterator[Row]:  # fmt: skip
    """Rows of one shape, a context at a time; those that the model has not are left out, and `say` says so. Raises
    InvalidRequest when none is left."""
    most = int(config.get("max_position_embeddings", 1 << 30))
    wanted = [c for c in contexts if c + steps < most]
    left_out = [str(c) for c in contexts if c not in wanted]
    if not wanted or min(wanted) < 1 or steps < 2 or rounds < 1:
        raise InvalidRequest(
            f"bench.gpu: {shape} allows contexts of 1 to {most - steps - 1} at {steps} steps, got {list(contexts)}; "
            f"expected steps of at least 2 and rounds of at least 1, got {steps} and {rounds}"
        )
    if left_out:
        say(f"{shape}: its {most} positions are too few for contexts {', '.join(left_out)}, which are left out")
    running: dict[str, Program] = {}
    try:
        for name in ("megakernel", *programs):
            began = time.perf_counter()
            made = PROGRAMS[name](config, max(wanted), steps, device, **(options if name == "megakernel" else {}))
            running[name] = made
            say(f"{shape}: {name} is ready after {time.perf_counter() - began:.1f} s")
        for context in wanted:
            runs: dict[str, list[Steps]] = {name: [] for name in running}
            for _ in range(rounds):
                for name, program in running.items():
                    runs[name].append(program.run(context))
                    say(f"{shape}: {name} at {context}: {statistics.median(runs[name][-1].us):.1f} us")
            kernel = running["megakernel"]
            assert isinstance(kernel, Kernel)
            read = step_bytes(kernel.manifest, context)
            yield from _rows(shape, context, read, runs)
    finally:
        for program in running.values():
            program.close()


def _rows(shape: str, context: int, read: int, runs: Mapping[str, Sequence[Steps]]) -> Iterator[Row]:
    plain = [statistics.median(s.us) / s.bytes_read for s in runs.get("read", ())]  # microseconds a byte
    floor = min(plain) * read if plain else 0.0
    for name, many in runs.items():
        us = [u for s in many for u in s.us]
        middle = statistics.median(us)
        digest = hashlib.sha256(repr(many[0].tokens).encode()).hexdigest()[:12]
        same = all(s.tokens == many[0].tokens for s in many)
        moved = many[0].bytes_read or read
        of_floor = middle / floor if floor and name != "read" else 0.0
        yield Row(
            shape, name, context, middle, min(us), max(us), len(us), moved, moved / middle / 1e3, floor,
            of_floor, many[0].launches_per_token, digest if many[0].tokens else "",
            "" if same else "its rounds gave different tokens",
        )  # fmt: skip


def peers(shape: str) -> dict[str, dict[str, float]]:
    """Latencies of other programs on the same kind of machine, by program and context."""
    known = json.loads(PEERS.read_text(encoding="utf-8")).get(shape, {})
    return {name: value for name, value in known.items() if isinstance(value, dict)}


def show(rows: Sequence[Row]) -> None:
    columns = ("program", "context", "us a token", "least", "most", "GB/s", "of the floor", "launches", "tokens")
    for shape in dict.fromkeys(r.shape for r in rows):
        mine = [r for r in rows if r.shape == shape]
        lines: list[tuple[object, ...]] = [
            (r.program, r.context, f"{r.us:,.1f}", f"{r.least_us:,.1f}", f"{r.most_us:,.1f}", f"{r.gbps:,.0f}",
             f"{r.of_floor:.3f}" if r.of_floor else "", "" if r.launches_per_token is None else
             f"{r.launches_per_token:.4f}", r.tokens_hash + (f" {r.note}" if r.note else ""))
            for r in mine
        ]  # fmt: skip
        for name, times in peers(shape).items():
            lines += [(f"{name} (recorded)", context, f"{us:,.0f}", *[""] * 6) for context, us in times.items()]
        table(columns, lines, title=f"{shape}, batch 1, bf16")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Latency against context, a picture for each shape: PATH with the shape's name before its ending."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    for shape in dict.fromkeys(r.shape for r in rows):
        figure, axes = pyplot.subplots(figsize=(8, 5))
        mine = [r for r in rows if r.shape == shape]
        for name in dict.fromkeys(r.program for r in mine):
            points = [(r.context, r.us) for r in mine if r.program == name]
            axes.plot(*zip(*points), marker="o", label=name)
        for name, times in peers(shape).items():
            numbers = {int(c): us for c, us in times.items() if c.isdigit()}
            axes.plot(list(numbers), list(numbers.values()), marker="x", linestyle=":", label=f"{name} (recorded)")
        axes.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel="microseconds a token", title=shape)
        axes.legend(fontsize=8)
        figure.savefig(path.with_name(f"{path.stem}-{shape}{path.suffix}"))
        pyplot.close(figure)


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Published shape; may be given again. Default: six.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens in the cache; may be given again.")] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="graph, compile, read, or none; may be given again. Default: all three.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Tokens of a round.")] = 100,
    rounds: Annotated[int, typer.Option(help="Rounds of every program.")] = 3,
    json_lines: Annotated[
        Path | None, typer.Option("--json", help="Append the rows to this file, one JSON object a line.")
    ] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw latency against context into this .svg.")] = None,
) -> None:
    """Time decoding at batch 1 on a GPU."""
    programs = [p for p in (against or ("graph", "compile", "read")) if p != "none"]
    unknown = sorted(set(programs) - set(PROGRAMS))
    if unknown:
        raise InvalidRequest(f"--against: unknown {', '.join(unknown)}; known: {', '.join(PROGRAMS)}, none")
    for option, path in (("--json", json_lines), ("--plot", picture)):
        if path and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
            raise InvalidRequest(f"{option} {path}: expected a file in a folder that can be written")
    rows: list[Row] = []
    for name in shape or SHAPES:
        for row in compare(
            shape_config(name), name, context or CONTEXTS, programs, steps=steps, rounds=rounds,
            say=lambda text: errors.print(text, highlight=False),
        ):  # fmt: skip
            rows.append(row)
            if json_lines:
                with json_lines.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(row)) + "\n")
    show(rows)
    if picture:
        plot(rows, picture)


if __name__ == "__main__":
    run(lambda: typer.run(main))
