"""Torch modules as megakernels on the CPU device, against torch in float32."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from megakernel import from_module  # noqa: E402
from megakernel.builder.build import Plan, assemble, plan_graph  # noqa: E402
from megakernel.builder.cache import compiled  # noqa: E402
from megakernel.builder.kernel import kernel_source, variant_text  # noqa: E402
from megakernel.capture import Captured, capture  # noqa: E402
from megakernel.errors import CaptureError, InvalidRequest  # noqa: E402
from megakernel.module import CompiledModule, compile_module  # noqa: E402
from megakernel.runtime import Runtime  # noqa: E402
from megakernel.settings import read_settings  # noqa: E402
from tests.models.quick import QuickDevice  # noqa: E402
from tests.modules.written import MODULES, Language, Learned, RMSNorm, made  # noqa: E402

LIMIT = 3e-6  # relative error in the norm of a whole output
CONTEXT = 64


class Shared:
    """One kernel with the task variants of all the modules of `written`."""

    def __init__(self) -> None:
        self.device = QuickDevice()
        self.modules = {name: made(name) for name in MODULES} | {"language": language()}
        self.captured = {name: capture(module, example) for name, (module, example) in self.modules.items()}
        self.plans = {name: self.plan(c) for name, c in self.captured.items()}
        nodes = {variant_text(n): n for plan in self.plans.values() for n in plan.lowered.nodes}
        self.source = kernel_source(tuple(nodes.values()), self.device.target)
        self.binary = compiled(self.source, self.device, read_settings().cache)
        self.variants = tuple(nodes)

    def plan(self, captured: Captured) -> Plan:
        sizes = {"max_slots": 3, "max_context": CONTEXT, "max_rows": 16}
        return plan_graph(captured.graph, self.device.target, dtype="f32", **sizes)

    def open(self, name: str) -> CompiledModule:
        program = assemble(self.plans[name], self.source, self.binary, variants=self.variants)
        return CompiledModule(self.captured[name], Runtime(program, self.device, self.captured[name].read))


@pytest.fixture(scope="module")
def shared() -> Shared:
    return Shared()


def language() -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(1)
    return Language().eval(), (torch.randint(0, 71, (1, 4)),)


def error(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def resized(example: Any, lead: tuple[int, ...], seed: int) -> Any:
    return torch.randn((*lead, example.shape[-1]), generator=torch.Generator().manual_seed(seed))


def outputs(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_equals_torch(shared: Shared, name: str) -> None:
    """For the shape of the example and others: one row, many sequences, sequences longer than a step's rows."""
    module, example = shared.modules[name]
    with shared.open(name) as kernel:
        rank = example[0].dim() - 1
        leads = {1: ((1,), (2,), (131,)), 2: ((2, 5), (1, 1), (6, 33), (1, 64))}[rank]
        for seed, lead in enumerate(leads):
            inputs = tuple(resized(e, lead, seed) for e in example)
            with torch.no_grad():
                want = outputs(module(*inputs))
            got = outputs(kernel(*inputs))
            assert [g.shape for g in got] == [w.shape for w in want]
            assert max(error(g, w) for g, w in zip(got, want)) <= LIMIT, lead


def test_the_gate_can_go_red(shared: Shared) -> None:
    module, example = made("block")
    with shared.open("block") as kernel, torch.no_grad():
        got = kernel(*example)
        assert error(got, module(*example)) <= LIMIT
        module.second.eps = 3e-3
        assert error(got, module(*example)) > 100 * LIMIT


def test_tokens_to_logits(shared: Shared) -> None:
    module, _ = shared.modules["language"]
    ids = torch.randint(0, 71, (3, 30), generator=torch.Generator().manual_seed(0))
    with shared.open("language") as kernel, torch.no_grad():
        assert error(kernel(ids), module(ids)) <= LIMIT
        with pytest.raises(InvalidRequest, match="whole numbers from 0 to 70"):
            kernel(ids + 1000)


def test_the_same_bits_alone_and_in_a_batch_and_on_any_workers() -> None:
    module, example = made("block_written")
    x = resized(example[0], (5, 37), 3)
    found = []
    for workers, slots in ((1, 1), (3, 5)):
        with from_module(
            module, example, device=QuickDevice(), max_context=40, workers=workers, max_slots=slots
        ) as kernel:
            found.append(kernel(x.numpy()))
            alone = kernel(x[2:3].numpy())
            assert isinstance(alone, np.ndarray) and alone.tobytes() == found[-1][2:3].tobytes()
    assert all(f.tobytes() == found[0].tobytes() for f in found)


def test_the_graph_is_the_one_meant(shared: Shared) -> None:
    nodes = shared.captured["block_written"].graph.nodes
    ops = [node.op for node in nodes]
    assert sorted(set(ops)) == ["add", "attention", "glu", "linear", "rms_norm", "rope"] and ops.count("linear") == 7
    attention = next(n for n in shared.captured["block_window"].graph.nodes if n.op == "attention")
    assert attention.attrs["window"] == 5
    rope = next(n for n in nodes if n.op == "rope")
    assert rope.attrs["spec"].theta == 500.0 and rope.attrs["spec"].interleaved


def test_weights_in_bf16() -> None:
    module, example = made("gated")
    with from_module(module, example, device=QuickDevice(), dtype="bf16") as kernel, torch.no_grad():
        assert 1e-4 < error(kernel(*example), module(*example)) < 2e-2


# ---------------------------------------------------------------------------------------------- what is refused
class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.a(x)).square()  # the first unsupported line
        return torch.cumsum(self.b(y), -1)


class Bidirectional(nn.Module):
    def forward(self, x: Any) -> Any:
        heads = x.view(*x.shape[:2], 4, 16).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)  # sees the future


class Activated(nn.Module):
    def forward(self, x: Any) -> Any:
        return nn.functional.silu(x)  # of no linear


class Cumulative(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.cumsum(x, -1)  # never


class Shifted(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.flip(-1)  # columns in another order


@pytest.mark.parametrize(
    ("module", "operator", "line"),
    [
        (Cumulative(), "aten.cumsum.default", "torch.cumsum(x, -1)  # never"),
        (Bidirectional(), "aten.scaled_dot_product_attention.default", "# sees the future"),
        (Activated(), "aten.silu.default", "# of no linear"),
    ],
)
def test_an_unsupported_operator_is_named_with_its_line(module: nn.Module, operator: str, line: str) -> None:
    example = torch.randn(2, 3, 64)
    with pytest.raises(CaptureError) as caught:
        compile_module(module, (example,), target="cpu-generic")
    words = str(caught.value)
    assert operator in words and line in words, words
    number = next(i for i, text in enumerate(open(__file__), 1) if line in text)  # noqa: SIM115
    assert re.search(rf'{re.escape(__file__)}", line {number}\b', words), words


def test_the_first_of_two_is_named() -> None:
    with pytest.raises(CaptureError, match="the first unsupported line"):
        compile_module(Squared(), (torch.randn(2, 16),), target="cpu-generic")


def test_an_output_that_is_no_row() -> None:
    with pytest.raises(CaptureError, match="its elements are not whole rows in order"):
        capture(Shifted(), (torch.randn(2, 16),))
    with pytest.raises(CaptureError, match="the same leading dimensions; got"):
        capture(made("two")[0], (torch.randn(2, 24), torch.randn(1, 40)))


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda x: (x, x), "expected 1 inputs"),
        (lambda x: (x[0],), "expected 2 leading dimensions"),
        (lambda x: (x[..., :63],), "with 64 columns; got"),
        (lambda x: (torch.full_like(x, float("nan")),), "holds NaN"),
        (lambda x: (torch.randn(1, 65, 64),), "a sequence of 65 rows: max_context is 64"),
    ],
)
def test_inputs_that_do_not_fit(shared: Shared, give: Callable[[Any], Any], words: str) -> None:
    _, example = shared.modules["block"]
    with shared.open("block") as kernel, pytest.raises(InvalidRequest, match=re.escape(words)):
        kernel(*give(example[0]))


def test_no_rows(shared: Shared) -> None:
    with shared.open("chain") as kernel:
        assert kernel(torch.zeros(0, 77)).shape == (0, 77)


def test_the_module_is_left_as_it_was() -> None:
    module, example = made("learned")
    module.train()
    module.norms[0].eval()
    capture(module, example)
    assert module.training and module.mlp[2].training and not module.norms[0].training


def test_a_module_compiles_for_cuda() -> None:
    from megakernel.device import cuda_compiler
    from megakernel.errors import NoCompiler

    try:
        cuda_compiler.open_nvrtc()
    except NoCompiler:
        pytest.skip("the [cuda] wheels are not installed")
    program = compile_module(Learned(96), (torch.randn(2, 3, 96),), target="sm_90a")
    assert program.binary.read_bytes()[:4] == b"\x7fELF"
    assert {n.task for n in program.manifest.nodes} >= {"input", "output", "advance", "norm"}
    chain = compile_module(nn.Sequential(RMSNorm(64), RMSNorm(64)), (torch.randn(2, 64),), target="sm_90a")
    assert chain.manifest.input_cols == chain.manifest.output_cols == 64


@pytest.mark.parametrize("last", [torch.neg, torch.sigmoid, lambda x: x * -2.0])
def test_an_output_that_no_operator_makes_is_named_with_its_line(last: Any) -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return last(self.a(x))  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"its output, of operator aten\.(neg|sigmoid|mul).*test_from_module.py"):
        from_module(Last(), (torch.randn(3, 8),))


def test_an_empty_example_is_refused() -> None:
    for shape in ((0, 8), (3, 0)):
        with pytest.raises(CaptureError, match="an example that is not empty"):
            from_module(torch.nn.Linear(shape[1], 8), (torch.randn(shape),))
