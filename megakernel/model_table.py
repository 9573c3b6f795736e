"""The architectures and what was checked of each: one table for the command line and for docs/models.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megakernel.architectures import known_models, shape_config, shape_names

MEASURED = Path(__file__).parent.parent / "bench" / "models_h200.jsonl"  # rows of bench/models.py
CHECKS: dict[str, str] = {
    "logits": "float32 logits of a prompt and 64 decoded tokens equal transformers' on the CPU device, relative error "
    "at most 2e-5, for tiny random checkpoints that hold every kind of layer",
    "gguf": "a GGUF file of the same weights, as llama.cpp's converter writes it, is the same model",
    "random": "random configurations (heads, head_dim, sizes, windows, rope, norms) equal transformers",
}


@dataclass(frozen=True)
class ModelRow:
    """architecture: as in config.json. file: of models/. about: what it is. shapes: published ones by name."""

    architecture: str
    file: str
    about: str
    checks: tuple[str, ...]
    shapes: tuple[str, ...]


def model_rows() -> tuple[ModelRow, ...]:
    """A row for each architecture, by name."""
    shapes = {name: str(shape_config(name)["architectures"][0]) for name in shape_names()}
    rows = []
    for name, model in known_models().items():
        module = str(model.__name__)  # type: ignore[attr-defined]
        about = (model.__doc__ or "").split("\n")[0].rstrip(".")
        own = tuple(shape for shape, architecture in shapes.items() if architecture == name)
        rows.append(ModelRow(name, f"models/{module.rpartition('.')[2]}.py", about, tuple(model.CHECKED), own))
    return tuple(rows)


def models_page() -> str:
    """docs/models.md."""
    lines = [
        "# Models",
        "",
        "Made by `python -m megakernel.model_table`; `megakernel models` prints the same. A config with a field that",
        "is not understood and may change the result is refused, and so is a checkpoint with a tensor nobody reads.",
        "",
        "| architecture | what it is | checked | published shapes |",
        "|---|---|---|---|",
    ]
    for row in model_rows():
        about = row.about.replace("|", "\\|")
        lines.append(
            f"| [{row.architecture}](../{row.file}) | {about} | {', '.join(row.checks)} | {', '.join(row.shapes)} |"
        )
    lines += ["", "What is checked, by tests in `tests/models/`:", ""]
    lines += [f"- **{name}**: {text}." for name, text in CHECKS.items()]
    lines += [
        "",
        "`tests/models/test_mutations.py` breaks each part of a model (rope base, epsilon, window, soft cap, norm,",
        "bias, scale, tied head, end tokens, ...) and prints the error that the comparison then shows.",
        "",
        *measured_lines(),
        "## Where the rotation is not transformers'",
        "",
        "Phi-3's longrope has two tables, a short and a long one. A program has one of them for every token of every",
        "sequence: the short one when its `max_context` is at most `original_max_position_embeddings`, else the long",
        "one. transformers chooses anew for every call, by the last position in it, and its `generate` computes the",
        "whole cache again with the long table when a text grows past that number. So:",
        "",
        "| `max_context` of the program | text of at most that many tokens | longer text |",
        "|---|---|---|",
        "| at most `original_max_position_embeddings` | as transformers | refused: it does not fit |",
        "| more | the long table, where transformers has the short one | as transformers |",
        "",
        "Keys in the cache are rotated once, with the table of their program, so a text never mixes the two. For short",
        "texts build with `max_context` at that number (4,096 for the published models).",
        "",
    ]
    return "\n".join(lines)


def measured_lines() -> list[str]:
    """Errors and step times of published shapes on a GPU, as measured."""
    lines = [
        "## Published shapes on an H200",
        "",
        "Random weights of the real shapes, bf16, one sequence, 2026-11-30; `python -m bench.device_session models`.",
        "Errors: of the logits of 9 tokens behind a prompt of 24, 2-norm relative to float32 with the same weights, of",
        "the kernel and of torch in bfloat16. Times: medians of 60 steps, and their ratio to what a plain read of",
        "the step's bytes takes (4,556 GB/s).",
        "",
        "| shape | error | torch bf16 | us at 32 tokens | times the floor | us at 512 | times the floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for raw in map(json.loads, MEASURED.read_text().splitlines()):
        times = " | ".join(f"{us:,.0f} | {us / floor:.2f}" for us, floor in zip(raw["us"], raw["floor_us"]))
        lines.append(f"| {raw['name']} | {raw['error']:.1e} | {raw['torch_error']:.1e} | {times} |")
    return [*lines, ""]


if __name__ == "__main__":
    print(models_page(), end="")
