"""What bench.batch puts beside the kernel: transformers with torch on the same device, and bare matrix products."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.gpu_programs import Compiled, Torch
from megakernel.builder.build import build_graph
from megakernel.graph import Graph

ROUNDS, WARM_ROUNDS = 5, 2


def decode(
    config: Mapping[str, Any], device: str, batches: Sequence[int], context: int, steps: int, compiled: bool
) -> Iterator[dict[str, Any]]:
    """A step of `batch` equal streams on a static cache: in a CUDA graph, or compiled (max-autotune); bf16."""
    kind = Compiled if compiled else Torch
    for batch in batches:
        made = kind(config, context, steps, device, batch)
        us = made.run(context).us
        made.close()
        middle = statistics.median(us)
        yield {
            "torch": "compile" if compiled else "graph", "batch": batch, "context": context, "us": middle,
            "least_us": min(us), "most_us": max(us), "tokens_s": batch * 1e6 / middle, "steps": len(us),
        }  # fmt: skip


def prefill(config: Mapping[str, Any], device: str, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """transformers' model with torch's own attention, bf16: milliseconds to the first token of a prompt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in config.items() if k != "transformers_version"}
    factory: Any = AutoModelForCausalLM
    with torch.device(device):
        made = AutoConfig.for_model(**values)
        model = factory.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def first_token(model: Any, ids: Any) -> None:
        model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()

    with torch.inference_mode():
        for length in lengths:
            ids = torch.randint(0, config["vocab_size"], (1, length), device=device)
            times = _times(device, first_token, model, ids)
            yield {"torch": "sdpa", "prompt": length, "ms": statistics.median(times), "least_ms": min(times)}


def product_shapes(graph: Graph) -> Counter[tuple[int, int]]:
    """The matrices [outputs, inputs] that every row of a prompt meets, and how many of each: all but the head's."""
    matrices = [graph.tensor(node.inputs[1]).shape for node in graph.nodes if node.op == "linear" and node.layer >= 0]
    return Counter((rows, cols) for rows, cols in matrices)


def product_flops(graph: Graph, rows: int) -> float:
    return sum(2.0 * rows * outputs * inputs * count for (outputs, inputs), count in product_shapes(graph).items())


def products(config: Mapping[str, Any], device: str, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """torch's bf16 products (cuBLAS on a GPU) of every matrix of the layers with `rows` rows: milliseconds together."""
    import torch

    graph = build_graph(config)
    with torch.inference_mode():
        for rows in lengths:
            ms = 0.0
            for (outputs, inputs), count in product_shapes(graph).items():
                x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
                w = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
                ms += count * statistics.median(_times(device, torch.nn.functional.linear, x, w))
            yield {"torch": "products", "prompt": rows, "ms": ms, "tflops": product_flops(graph, rows) / ms / 1e9}


def _times(device: str, function: Callable[..., Any], *given: Any) -> list[float]:
    """Milliseconds of each round after the warm ones, by the host's clock, to the end of the device's work."""
    import torch

    finish: Callable[[], Any] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    times = []
    for _ in range(ROUNDS + WARM_ROUNDS):
        finish()
        began = time.perf_counter()
        function(*given)
        finish()
        times.append((time.perf_counter() - began) * 1e3)
    return times[WARM_ROUNDS:]
