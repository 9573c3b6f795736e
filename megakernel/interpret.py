"""The reference: a Graph run operator by operator in torch float32, whole sequences or step by step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megakernel.errors import GraphError, InvalidRequest, MissingExtra
from megakernel.graph import INPUT, LOGITS, TOKENS, Graph, Node, Tensor
from megakernel.tasks.task import all_operators

if TYPE_CHECKING:
    import torch

QUERY_BLOCK = 512  # rows of scores made at a time, so that long sequences fit in memory


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as e:
        raise MissingExtra("the reference interpreter needs torch: pip install 'megakernel-decode[torch]'") from e


class Interpreter:
    """Runs one sequence. `step` continues where the last one ended: keys and values are kept between steps.

    weights: checkpoint tensor name -> numpy array or torch tensor of any float dtype; each is asked for once and kept
    as float32, or with `forget` asked for again in every step and kept only until its last use. device: torch's.
    dtype: "float32", or "bfloat16" for what a torch module in that type computes: its products and sums are rounded to
    it, norms, rotations and softmax are computed in float32. exchange: of the graph of one rank of several, gives an
    all_reduce's or all_gather's output for this rank's part.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Callable[[str], Any],
        *,
        device: str = "cpu",
        dtype: str = "float32",
        forget: bool = False,
        exchange: Callable[[Node, Any], Any] | None = None,
    ) -> None:
        self._exchange = exchange
        self._torch = _torch()
        self._device, self._dtype, self._forget = device, getattr(self._torch, dtype), forget
        self.graph = graph
        self.position = 0
        self._read = weights
        self._stored: dict[str, torch.Tensor] = {}
        self._cache: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
        self._last_read = {
            t.source.tensor: i
            for i, node in enumerate(graph.nodes)
            for t in map(graph.tensor, node.inputs)
            if t.source is not None
        }

    def reset(self) -> None:
        """Forget the sequence; the next step starts at position 0."""
        self.position = 0
        self._cache.clear()

    def step(
        self,
        tokens: Sequence[int] | torch.Tensor | Mapping[str, torch.Tensor],
        keep: Literal["all"] | Iterable[str] = ("logits",),
    ) -> dict[str, torch.Tensor]:
        """Run the next tokens of the sequence; the kept activations, float32 `[len(tokens), cols]`.

        A graph that begins with floats takes them, `[rows, cols]`, in place of tokens; one with several inputs takes
        all of them by name, tokens as "tokens". The outputs are always kept.

        Raises InvalidRequest for no token, a token outside the vocabulary or a sequence past the model's limit, and
        GraphError for a name in `keep` that the graph lacks or a weight of the wrong shape.
        """
        values = self._begin(tokens)
        count = len(next(iter(values.values())))
        wanted = None if keep == "all" else (set(keep) - {LOGITS}) | set(self.graph.outputs)
        for name in wanted or ():
            self.graph.tensor(name)
        with self._torch.inference_mode():
            for i, node in enumerate(self.graph.nodes):
                values[node.output] = self._run(node, [self._value(name, values) for name in node.inputs])
                self._drop(i, node)
                for name in node.inputs:
                    if wanted is not None and name not in wanted and self._last_use[name] == i:
                        values.pop(name, None)
        self.position += count
        return {name: value for name, value in values.items() if wanted is None or name in wanted}

    def _drop(self, index: int, node: Node) -> None:
        """Forget the weights that no later node reads."""
        for source in (self.graph.tensor(name).source for name in node.inputs) if self._forget else ():
            if source is not None and self._last_read[source.tensor] == index:
                self._stored.pop(source.tensor, None)

    def _begin(self, given: Any) -> dict[str, torch.Tensor]:
        """The values that no node makes, by name."""
        if not isinstance(given, Mapping):
            given = {INPUT if INPUT in self.graph.tensors else TOKENS: given}
        values: dict[str, torch.Tensor] = {}
        for name, data in given.items():
            if self.graph.tensor(name).kind == "input":
                values[name] = self._torch.as_tensor(data, dtype=self._dtype, device=self._device)
            else:
                values[name] = self._torch.as_tensor(data, dtype=self._torch.int64, device=self._device).reshape(-1)
                self._check(values[name])
        return values

    def _check(self, ids: torch.Tensor) -> None:
        config = self.graph.config
        if len(ids) == 0:
            raise InvalidRequest("the interpreter was given no token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.vocab:
            raise InvalidRequest(f"token ids {low} to {high}: the vocabulary is 0 to {config.vocab - 1}")
        if self.position + len(ids) > config.max_positions:
            raise InvalidRequest(f"{self.position + len(ids)} tokens: the model's limit is {config.max_positions}")

    def _value(self, name: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if name in values:
            return values[name]
        tensor = self.graph.tensor(name)
        source = tensor.source
        if source is None:
            raise GraphError(f"tensor {name!r} is used before it is made")
        if not source.tensor:
            nothing: torch.Tensor = self._torch.zeros(tensor.shape, dtype=self._dtype, device=self._device)
            return nothing
        if source.tensor not in self._stored:
            self._stored[source.tensor] = self._weight(self._read(source.tensor))
        whole = self._stored[source.tensor]
        rows = whole.T if source.transposed else whole
        part = rows[source.start : source.stop]
        if source.stride:
            part = self._torch.cat([rows[first:last] for first, last in source.ranges()])
        if source.stop_col:
            part = part[:, source.first_col : source.stop_col]
        if tuple(part.shape) != tensor.shape or not self._covers(tensor, whole):
            got = tuple(whole.shape)
            raise GraphError(f"weight {source.tensor!r}: expected {tensor.shape} from row {source.start}, got {got}")
        return part

    @staticmethod
    def _covers(tensor: Tensor, whole: torch.Tensor) -> bool:
        """A weight that is not a slice must be the whole checkpoint tensor."""
        return tensor.source is None or tensor.name != tensor.source.tensor or tuple(whole.shape) == tensor.shape

    def _weight(self, data: Any) -> Any:
        if not isinstance(data, self._torch.Tensor):
            array = np.ascontiguousarray(np.asarray(data), dtype=np.float32)
            data = self._torch.from_numpy(array if array.flags.writeable else array.copy())
        return data.detach().to(self._device, self._dtype)

    def _run(self, node: Node, inputs: list[torch.Tensor]) -> torch.Tensor:
        library, a, x = self._torch, node.attrs, inputs[0]
        out: torch.Tensor
        if node.op == "embedding":
            out = inputs[1][x] * a["scale"]
            if len(inputs) > 2:
                out = out + inputs[2][self.position : self.position + len(x)]
        elif node.op == "rms_norm":
            out = _rms_norm(library, x, inputs[1], a)
        elif node.op == "layer_norm":
            out = library.nn.functional.layer_norm(x, x.shape[-1:], *inputs[1:], eps=a["eps"])
        elif node.op == "linear":
            out = library.nn.functional.linear(x, *inputs[1:])
        elif node.op == "rope":
            out = self._rope(x, a)
        elif node.op == "attention":
            out = self._attention(node, *inputs)
        elif node.op == "glu":
            out = _activation(library, a["activation"], x) * inputs[1]
        elif node.op == "activation":
            out = _activation(library, a["activation"], x)
        elif node.op == "add":
            out = x + inputs[1]
        elif node.op == "scale":
            out = x * float(a["factor"])
        elif node.op == "softcap":
            out = library.tanh(x / a["limit"]) * a["limit"]
        elif node.op in ("all_reduce", "all_gather") and self._exchange is not None:
            out = self._exchange(node, x)
        elif node.op in all_operators():
            out = all_operators()[node.op].interpret(library, inputs, a)
        else:
            raise GraphError(f"node {node.name}: the interpreter has no operator {node.op!r}")
        return out

    def _rope(self, x: torch.Tensor, a: Mapping[str, Any]) -> torch.Tensor:
        spec = a["spec"]
        tables = spec.at(np.arange(len(x)) + self.position)
        cos, sin = (self._torch.from_numpy(t)[:, None, :].to(x.device) for t in tables)
        heads = x.reshape(len(x), a["heads"], a["head_dim"]).to(self._torch.float32, copy=True)
        part = heads[..., : spec.rotary_dim]
        if spec.interleaved:
            first, second = part[..., 0::2], part[..., 1::2]
        else:
            first, second = part[..., : spec.rotary_dim // 2], part[..., spec.rotary_dim // 2 :]
        turned = first * cos - second * sin, second * cos + first * sin
        first[...], second[...] = turned
        return heads.reshape(x.shape).to(x.dtype)

    def _attention(self, node: Node, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[rows, heads * head_dim]; keys are those of the cache and then this step's own."""
        a = node.attrs
        rows, group = len(q), a["heads"] // a["kv_heads"]
        k, v = (t.reshape(rows, a["kv_heads"], a["head_dim"]).transpose(0, 1) for t in (k, v))
        if node.name in self._cache:
            k, v = (self._torch.cat(pair, 1) for pair in zip(self._cache[node.name], (k, v)))
        self._cache[node.name] = k, v
        query = q.reshape(rows, a["kv_heads"], group, a["head_dim"]).permute(1, 2, 0, 3)
        out: torch.Tensor = self._torch.empty_like(query)
        for begin in range(0, rows, QUERY_BLOCK):
            block = query[:, :, begin : begin + QUERY_BLOCK]
            out[:, :, begin : begin + QUERY_BLOCK] = self._attend(block, k[:, None], v[:, None], begin, a)
        return out.permute(2, 0, 1, 3).reshape(rows, -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int, a: Mapping[str, Any]
    ) -> torch.Tensor:
        """Rows from `begin` on of this step against all keys."""
        library = self._torch
        scores = (q @ k.transpose(-1, -2)) * a["scale"]
        if a["softcap"] is not None:
            scores = library.tanh(scores / a["softcap"]) * a["softcap"]
        row = library.arange(q.shape[2], device=q.device)[:, None] + (self.position + begin)
        column = library.arange(k.shape[2], device=q.device)[None, :]
        hidden = column > row
        if a["window"] is not None:
            hidden = hidden | (column <= row - a["window"])
        chances = library.softmax(scores.masked_fill(hidden, float("-inf")), -1, dtype=library.float32)
        out: torch.Tensor = chances.to(v.dtype) @ v
        return out


def _rms_norm(torch: Any, x: Any, gamma: Any, a: Mapping[str, Any]) -> Any:
    parts = x.reshape(len(x), -1, a["group"] or x.shape[1]).float()
    scaled = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + a["eps"])
    return (scaled * (gamma.float() + a["offset"])).reshape(x.shape).to(x.dtype)


def _activation(torch: Any, name: str, x: Any) -> Any:
    f = torch.nn.functional
    if name == "gelu_tanh":
        return f.gelu(x, approximate="tanh")
    return {"silu": f.silu, "gelu": f.gelu, "relu": f.relu}[name](x)
