"""Decode speed on this machine's processor, one sequence: `python -m bench.cpu` or `make bench`.

In one process and in alternation: this kernel, llama.cpp and transformers on the same weights in the same format, a
plain matrix-vector loop over the same bytes, and a plain read of them. Medians of the times between tokens. Prints a
table and, with --json FILE, appends a JSON line for every row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import llama_cpp
from bench.ending import run
from bench.plain import Plain
from megakernel.bench import Contender, Row, compare
from megakernel.checkpoint import fetch_demo
from megakernel.llm import LLM
from megakernel.settings import read_settings

REST_S = 0.3  # between contenders: idle threads of the one before stop spinning


def processor() -> str:
    """Name of the processor and how many cores this process may use."""
    name = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def measure(model: Path, dtype: str, contexts: tuple[int, ...], tokens: int, rounds: int) -> Iterator[Row]:
    """A row for each contender and context, all on the weights of one GGUF file."""
    with ExitStack() as stack:

        def others(llm: LLM) -> Mapping[str, Contender]:
            m = llm.program.manifest
            found: dict[str, Contender] = {}
            if llama_cpp.installed():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                llama_cpp.write_dequantised(model, dtype, folder / "model.gguf")
                server = llama_cpp.Server(folder / "model.gguf", m.workers, max(contexts) + tokens + 64)
                found["llama.cpp"] = stack.enter_context(server).run
            return {**found, **Plain(m).contenders()}

        def rest(_stage: str, _done: int, total: int) -> None:
            if not total:
                time.sleep(REST_S)

        yield from compare(
            str(model), device="cpu", dtype=dtype, contexts=contexts, tokens=tokens, rounds=rounds, also=others,
            progress=rest,
        )  # fmt: skip


def ratios(rows: list[Row], dtype: str, context: int) -> str:
    """The figures that matter, in one sentence."""
    time_of = {r.program: r.us_per_token for r in rows if r.dtype == dtype and r.context == context}
    own = time_of.pop("megakernel")
    said = ", ".join(f"{other / own:.2f} x {name}" for name, other in time_of.items())
    return f"{dtype}, context {context}: speed is {said}"


def show(rows: list[Row]) -> None:
    console = Console(width=120)
    table = Table("dtype", "context", "program", "us a token", "tokens/s", "GB/s", "tokens hash", title=processor())
    for r in rows:
        table.add_row(
            r.dtype, str(r.context), r.program, f"{r.us_per_token:,.0f}", f"{r.tokens_per_s:.1f}", f"{r.gbps:.1f}",
            "" if r.program.startswith("plain") else r.tokens_hash,
        )  # fmt: skip
    console.print(table)
    for dtype, context in dict.fromkeys((r.dtype, r.context) for r in rows):
        console.print(ratios(rows, dtype, context))
    for row in rows:
        if row.note:
            console.print(f"{row.program}: {row.note}")
    if not llama_cpp.installed():
        console.print(f"llama.cpp is left out: pip install --no-deps {llama_cpp.PACKAGE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the demo model")
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--context", nargs="+", type=int, default=[32])
    parser.add_argument("--tokens", type=int, default=64, help="timed in each run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of every contender, in alternation")
    parser.add_argument("--json", type=Path, help="append a JSON line for every row to this file")
    asked = parser.parse_args()
    model = asked.model or fetch_demo(read_settings().cache)
    rows: list[Row] = []
    for dtype in asked.dtype:
        rows += measure(model, dtype, tuple(asked.context), asked.tokens, asked.rounds)
    show(rows)
    if asked.json:
        facts = {"machine": processor(), "model": model.name, "load": os.getloadavg()[0]}
        with asked.json.open("a") as file:
            file.writelines(json.dumps(facts | asdict(r)) + "\n" for r in rows)


if __name__ == "__main__":
    run(main)
