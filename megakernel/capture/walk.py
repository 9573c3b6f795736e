"""A torch module as a Graph: torch.export, then each operator read as what it means for rows.

Rows are the leading dimensions of the inputs; with an attention the last of them is the sequence. Everything is
float32, whatever the module's own casts are. What no graph operator computes raises CaptureError with its source line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch

from megakernel.architectures import NUMPY_DTYPES
from megakernel.capture.operators import Operators, Value
from megakernel.capture.source import operator_name, source_line, title
from megakernel.capture.values import Constant, Factor, NotSupported, Scores, Tensor, Tokens, View
from megakernel.errors import CaptureError, GraphError
from megakernel.graph import TOKENS, Graph, GraphBuilder, ModelConfig
from megakernel.tasks.task import all_operators

MOST_POSITIONS = 1 << 20
CHECKS = frozenset(("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"))
COMPLETING = frozenset(
    ("mean", "add", "rsqrt", "sqrt", "pow", "mul", "div", "softmax", "_softmax", "matmul", "bmm", "where", "tanh",
     "masked_fill")
)  # fmt: skip
"""Operators that go on with a norm or an attention that others have begun."""

MOVES = frozenset(
    (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t", "unsqueeze", "squeeze",
        "expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "repeat_interleave", "narrow",
        "movedim", "repeat", "flip", "roll",
    )
)  # fmt: skip
"""Operators that move elements and change none."""

SAME = frozenset(
    ("to", "_to_copy", "dropout", "native_dropout", "alias", "contiguous", "clone", "detach", "type_as", "float")
)
"""Operators that leave the values as they are: copies, casts between float types, a dropout of an eval module."""


@dataclass(frozen=True)
class Captured:
    """graph: with weights by the module's own names where they are its parameters. lead: leading dimensions of the
    example. sequence: whether the last of them is a sequence whose rows see each other. sources: node -> source line.
    """

    graph: Graph
    weights: Mapping[str, Tensor]
    lead: torch.Size
    sequence: bool
    inputs: tuple[str, ...]
    sources: Mapping[str, str]

    def read(self, name: str, dtype: str, rows: slice) -> npt.NDArray[Any]:
        """Rows of a weight as "f32", "bf16" or "f16"."""
        return self.weights[name][rows].float().numpy().astype(NUMPY_DTYPES[dtype])


def capture(module: torch.nn.Module, example_inputs: Sequence[Any]) -> Captured:
    """The graph of `module` for inputs like the example's: float rows `[..., cols]` and token ids `[...]`.

    The module is exported as it is called in eval mode. Raises CaptureError.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            exported = torch.export.export(module, tuple(example_inputs)).run_decompositions({})
    except Exception as e:  # torch.export raises many kinds; its own words are the best there are
        raise CaptureError(f"torch.export cannot export {type(module).__name__}: {e}") from e
    finally:
        for part, training in modes.items():
            part.training = training
    return _Capture(type(module).__name__, exported).run()


class _Capture(Operators):
    def __init__(self, name: str, exported: torch.export.ExportedProgram) -> None:
        self.exported = exported
        self.architecture = name
        self.inputs: list[str] = []
        self.returned: torch.fx.Node | None = None  # the output that is being made
        super().__init__(GraphBuilder(_config(name, 1)), _lead(exported))

    # ------------------------------------------------------------------------------------------ the walk
    def run(self) -> Captured:
        values: dict[torch.fx.Node, Value] = {}
        outputs: list[str] = []
        last = {used: node for node in self.exported.graph.nodes for used in node.all_input_nodes}
        for node in self.exported.graph.nodes:
            self.node = node
            try:
                if node.op == "placeholder":
                    values[node] = self._placeholder(node)
                elif node.op == "output":
                    for self.returned in node.args[0]:
                        outputs.append(self._output(values[self.returned]))
                else:
                    values[node] = self._call(node, values)
            except (NotSupported, GraphError) as e:
                raise CaptureError(self._words(_culprit(node, values), e)) from None
            for used in node.all_input_nodes:
                if last[used] is node:
                    del values[used]
        self.b.config = _config(self.architecture, self.vocab)
        graph = self.b.finish(outputs[0], *outputs[1:])
        return Captured(graph, self.weights, self.lead, self.sequence, tuple(self.inputs), self.sources)

    def _words(self, node: torch.fx.Node, error: Exception) -> str:
        if node.op == "output":
            made = self.returned  # what was not needed before is only made here
            if made is None or made.op == "placeholder":
                return f"{self.architecture}: its output: {error}"
            return f"{self.architecture}: its output, of operator {title(made)} at {source_line(made)}: {error}"
        return f"{self.architecture}: operator {title(node)} is not supported at {source_line(node)}: {error}"

    def _placeholder(self, node: torch.fx.Node) -> Value:
        signature = self.exported.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        if node.name in names:
            name = names[node.name]
            data = self.exported.state_dict.get(name)
            return Constant((self.exported.constants[name] if data is None else data).detach(), name)
        if node.name in signature.inputs_to_lifted_tensor_constants:
            name = signature.inputs_to_lifted_tensor_constants[node.name]
            return Constant(self.exported.constants[name].detach(), name)
        example = node.meta["val"]
        if not example.is_floating_point():
            if TOKENS in self.inputs:
                raise NotSupported("a second tensor of token ids")
            self.inputs.append(TOKENS)
            return Tokens(self.lead)
        name = self.b.input(example.shape[-1], node.name)
        self.inputs.append(name)
        return self._made(name, int(example.shape[-1]), self.lead)

    def _call(self, node: torch.fx.Node, values: Mapping[torch.fx.Node, Value]) -> Value:
        args: Any = torch.fx.node.map_arg(node.args, lambda n: values[n])
        kwargs: Any = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
        function: Any = node.target
        if node.target is operator.getitem:
            return args[0][args[1]]
        name = operator_name(node)
        if name in CHECKS:
            return None
        flat = [v for a in (*args, *kwargs.values()) for v in (a if isinstance(a, (list, tuple)) else (a,))]
        live = [v for v in flat if isinstance(v, (View, Factor, Scores, Tokens))]
        if not live:
            return _fold(node, args, kwargs)
        if name in SAME and isinstance(args[0], (View, Scores, Factor)):
            return args[0]
        if name in MOVES and isinstance(args[0], View):
            return _move(args[0], lambda data: function(data.contiguous(), *args[1:], **kwargs))
        if name in all_operators():
            return self._declared(name, node, args, kwargs)
        handler: Callable[..., Value] | None = getattr(self, f"_op_{name}", None)
        if handler is None:
            raise NotSupported("no operator of a graph computes it")
        return handler(*args, **kwargs)

    def _declared(self, name: str, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View:
        """A torch custom operator of the name of one that a task declares: tensors are inputs, the rest attributes."""
        schema: Any = getattr(node.target, "_schema", None)
        labelled = {**dict(zip((a.name for a in schema.arguments), args)), **kwargs}
        tensors = {key: v for key, v in labelled.items() if isinstance(v, (View, Constant))}
        inputs = [
            self._rows(v) if isinstance(v, View) else self._weight(v, tuple(v.data.shape)) for v in tensors.values()
        ]
        attrs = {key: v for key, v in labelled.items() if key not in tensors}
        made = self.b.operator(self._name(), name, *inputs, **attrs)
        return self._made(made, self.b.columns(made), self.lead)

    def _output(self, value: Value) -> str:
        if not isinstance(value, View) or value.shape[:-1] != self.lead:
            shape = list(value.shape) if isinstance(value, View) else type(value).__name__
            raise NotSupported(f"expected rows [{', '.join(map(str, self.lead))}, cols], got {shape}")
        name = self._rows(value)
        if self.b.tensor_kind(name) == "input":
            raise NotSupported("it is an input as it came")
        return name


def _culprit(node: torch.fx.Node, values: Mapping[torch.fx.Node, Value]) -> torch.fx.Node:
    """The operator to name: the first of a norm or an attention that `node` does not complete, else itself."""
    if node.op == "output" or operator_name(node) in COMPLETING:
        return node
    begun = [n for n in node.all_input_nodes if isinstance(values[n], (Factor, Scores))]
    while begun and isinstance(values[begun[0]], (Factor, Scores)):
        node = begun[0]
        begun = [n for n in node.all_input_nodes if n in values]
    return node


def _config(architecture: str, vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture=architecture, vocab=vocab, hidden=1, intermediate=0, layers=1, heads=1, kv_heads=1, head_dim=1,
        max_positions=MOST_POSITIONS, tied=False,
    )  # fmt: skip


def _lead(exported: torch.export.ExportedProgram) -> torch.Size:
    """The leading dimensions that all inputs have."""
    leads = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in exported.graph_signature.user_inputs:
            example = node.meta["val"]
            if not isinstance(example, Tensor) or not example.dim():
                raise CaptureError(f"input {node.name}: expected a tensor of rows, got {example!r}")
            if not example.numel():
                raise CaptureError(f"input {node.name}: give an example that is not empty; got {list(example.shape)}")
            leads[node.name] = torch.Size(example.shape[:-1] if example.is_floating_point() else example.shape)
    if len(set(leads.values())) != 1:
        shown = ", ".join(f"{name} {list(lead)}" for name, lead in leads.items()) or "no input"
        raise CaptureError(f"all inputs must have the same leading dimensions; got {shown}")
    return next(iter(leads.values()))


def _fold(node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
    """An operator of constants, computed now."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(plain(v) for v in value)
        return value.data if isinstance(value, Constant) else value

    def constant(value: Any) -> Any:
        return tuple(constant(v) for v in value) if isinstance(value, (list, tuple)) else Constant(value)

    with torch.no_grad():
        out = node.target(*plain(tuple(args)), **{k: plain(v) for k, v in kwargs.items()})  # type: ignore[operator]
    if (
        operator_name(node) in SAME
        and isinstance(args[0], Constant)
        and args[0].name
        and torch.equal(out, args[0].data)
    ):
        return args[0]
    folded = constant(out)
    if operator_name(node) == "embedding" and isinstance(args[1], Constant):
        ids = args[1].data.reshape(-1)
        if torch.equal(ids, torch.arange(len(ids), device=ids.device)):
            return Constant(out, rows_of=args[0].data)
    if isinstance(folded, Constant) and operator_name(node) in MOVES and isinstance(args[0], Constant):
        return replace(folded, rows_of=args[0].rows_of)
    return folded


def _move(view: View, function: Callable[[Tensor], Any]) -> Value:
    """A view, or several, by an operator that moves elements."""
    first = function(view.terms[0][0])
    if not isinstance(first, (list, tuple)):
        return view.map(function)
    moved = [(function(index), function(coefficient)) for index, coefficient in view.terms]
    return tuple(View(view.base, tuple((i[n], c[n]) for i, c in moved)) for n in range(len(first)))
