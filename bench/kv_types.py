"""What the type of the KV pages costs in accuracy, on this machine's processor: `python -m bench.kv_types [MODEL]`.

Logits of a text at several contexts, float32 weights and arithmetic, against pages of float32: only the rounding of
keys and values differs. Prints a table and, with --json FILE, appends a JSON line for every row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.ending import run
from megakernel.errors import InvalidRequest
from megakernel.llm import LLM

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
LAST = 32  # positions that are compared, up to the context


@dataclass(frozen=True)
class Row:
    """error: 2-norm of the difference of the logits over that of the logits, mean over the last positions; worst: the
    largest of them. loss: mean of -log p of the text's next token, less that with float32 pages. same: share of
    positions with the same most likely token. token_bytes: of a token's keys and values in all layers."""

    kv_dtype: str
    context: int
    error: float
    worst: float
    loss: float
    same: float
    token_bytes: int


def loss(logits: np.ndarray, following: list[int]) -> float:
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    spread = (top + np.log(np.exp(wide - top).sum(-1, keepdims=True)))[:, 0]
    return float((spread - wide[np.arange(len(following)), following]).mean())


def measure(model: str, contexts: list[int], kv_dtypes: list[str]) -> Iterator[Row]:
    """A row for each type and context."""
    known: dict[int, np.ndarray] = {}
    for kv_dtype in ("f32", *kv_dtypes):
        with LLM(
            model, device="cpu", dtype="f32", kv_dtype=kv_dtype, max_slots=1, max_context=max(contexts) + 1
        ) as llm:
            ids, m = ids_of(llm, max(contexts) + 1), llm.program.manifest
            for context in contexts:
                got = llm.logits(ids[:context], max(0, context - LAST))
                want = known.setdefault(context, got)
                if kv_dtype == "f32":
                    continue
                errors = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
                following = ids[context - len(got) + 1 : context + 1]
                yield Row(
                    kv_dtype, context, float(errors.mean()), float(errors.max()),
                    loss(got, following) - loss(want, following), float((got.argmax(-1) == want.argmax(-1)).mean()),
                    m.kv_layers * m.kv_heads * m.kv_unit_bytes // m.page_tokens,
                )  # fmt: skip


def ids_of(llm: LLM, count: int) -> list[int]:
    """The text's first tokens; of a model without a tokenizer random ones."""
    if llm.tokenizer is None:
        return [int(i) for i in np.random.default_rng(1).integers(0, llm.program.manifest.vocab, count)]
    ids = llm.tokenizer.encode(TEXT.read_text())
    if len(ids) < count:
        raise InvalidRequest(f"a context of {count - 1}: the text has {len(ids)} tokens")
    return list(ids[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--kv-dtype", nargs="+", default=["bf16", "f8"])
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    options = parser.parse_args()
    table = Table("pages", "bytes a token", "context", "error", "worst", "loss", "same token", title=options.model)
    for row in measure(options.model, options.context, options.kv_dtype):
        table.add_row(
            row.kv_dtype, f"{row.token_bytes:,}", str(row.context), f"{row.error:.5f}", f"{row.worst:.5f}",
            f"{row.loss:+.5f}", f"{row.same:.0%}",
        )  # fmt: skip
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    Console(width=120).print(table)


if __name__ == "__main__":
    run(main)
