"""The benchmark of batches and prompts, on the processor with a tiny model: its figures are what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench import batch, batch_torch
from bench.device_session import TINY
from megakernel.builder.build import build_graph
from megakernel.request import Token
from megakernel.runtime import Runtime

CONFIG = TINY["tiny-llama"]


@pytest.fixture
def opened() -> Iterator[Callable[[], Runtime]]:
    made: list[Runtime] = []

    def make() -> Runtime:
        made.append(batch.opened(CONFIG, "cpu", 3, 32, 900, []))
        return made[-1]

    yield make
    for run in made:
        run.close()


def test_batches_prompts_and_a_prompt_beside_streams(opened: Callable[[], Runtime]) -> None:
    run = opened()
    two = batch.decode(run, 2, 30, 12)
    assert two["steps"] == 5 and 0 < two["least_us"] <= two["us"] <= two["most_us"]
    assert two["tokens_s"] == pytest.approx(2e6 / two["us"])
    prompt = batch.prefill(run, 70, 7e9)
    assert prompt["steps"] == 3 and prompt["tflops"] == pytest.approx(7 / prompt["ms"])  # 70 rows, 32 a step
    mixed = batch.beside(run, 300, 2, 40.0)
    # Its 300 rows came in steps of at most 30 beside the streams' own, so each of these made 10 tokens or more.
    assert mixed["tokens"] >= 2 * 9 and mixed["p50_ms"] <= mixed["p99_ms"] <= mixed["most_ms"] < mixed["ttft_ms"]


def test_gaps_end_where_they_should() -> None:
    class Told:
        def __init__(self, *ms: int) -> None:
            self.tokens = [Token(0, time_ns=m * 1_000_000) for m in ms]

        def poll(self, _seen: int) -> tuple[list[Token], bool]:
            return self.tokens, True

    parts: Any = [(Told(1, 2, 4, 8, 16), 1, 4), (Told(3, 9, 27), 0, 9)]
    assert batch._gaps_ms(parts, 9_000_000) == [2.0, 4.0, 6.0]


def test_torch_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    graph = build_graph(CONFIG)
    shapes = batch_torch.product_shapes(graph)
    assert shapes == {(256, 256): 6, (128, 256): 6, (544, 256): 6, (256, 544): 3}  # q, o; k, v; gate, up; down
    assert batch_torch.product_flops(graph, 5) == 2 * 5 * (12 * 256 * 192 + 9 * 544 * 256)
    steps = list(batch_torch.decode(CONFIG, "cpu", [1, 3], 30, 8, compiled=False))
    assert [s["batch"] for s in steps] == [1, 3] and all(s["us"] > 0 and s["steps"] == 8 for s in steps)
    (prompt,), (bare,) = batch_torch.prefill(CONFIG, "cpu", [40]), batch_torch.products(CONFIG, "cpu", [40])
    assert prompt["ms"] > 0 and bare["tflops"] == pytest.approx(batch_torch.product_flops(graph, 40) / bare["ms"] / 1e9)
    own = {"prompt": 40, "ms": 2.0, "tflops": bare["tflops"] / 2}
    batch.show([{"batch": 1, "us": 10.0, "tokens_s": 1.0}, {"batch": 8, "us": 15.0, "tokens_s": 2.0}, own, bare])
    told = capsys.readouterr().out
    assert "1.50" in told and "0.50" in told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--batch", "0"], "--batch: expected numbers of at least 1, got 0"),
        (["--steps", "7"], "--steps: expected more than 7, of which 6 are warm, got 7"),
        (["--against", "vllm"], "invalid choice: 'vllm'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told(wrong: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        batch.arguments(wrong)
    assert told in capsys.readouterr().err
