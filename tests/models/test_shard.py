"""Every family on two devices: the shards' logits on the real kernel are those of the whole graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from megakernel.architectures import find_model, random_weights
from megakernel.builder.build import Plan, assemble, plan_graph
from megakernel.builder.cache import compiled
from megakernel.builder.kernel import kernel_source, variant_text, variants_of
from megakernel.builder.shard import shard
from megakernel.errors import LoweringError
from megakernel.graph import Graph
from megakernel.interpret import Interpreter
from megakernel.probe import forced_logits
from megakernel.ranks import LocalRank, Ranks
from megakernel.runtime import Runtime
from megakernel.settings import read_settings
from megakernel.tasks.task import TaskNode
from tests.models.families import CASES, LIMIT, Array, Case, find, relative_error
from tests.models.quick import QuickDevice

pytestmark = pytest.mark.timeout(300)
RANKS, TOKENS, START = 2, 24, 17
# Heads that two devices share.
EVEN: Mapping[str, Mapping[str, Any]] = {
    "smollm3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "phi3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "gpt2": {"n_head": 4},
}


def graph_of(case: Case) -> Graph:
    config = replace(case, fields={**case.fields, **EVEN.get(case.name, {})}).config()
    name = f"{case.family}LMHeadModel" if case.family == "GPT2" else f"{case.family}ForCausalLM"
    full = {**config.to_dict(), "architectures": [name]}
    return find_model(full).build(full)


@dataclass
class Kernels:
    """One kernel for the shards of all families."""

    device: QuickDevice
    graphs: Mapping[str, Graph]

    def __post_init__(self) -> None:
        nodes: dict[str, TaskNode] = {}
        for graph in self.graphs.values():
            for node in self.plan(shard(graph, 0, RANKS)).lowered.nodes:
                nodes.setdefault(variant_text(node), node)
        kept = tuple(nodes.values())
        self.variants = variants_of(kept)
        self.source = kernel_source(kept, self.device.target)
        self.binary = compiled(self.source, self.device, read_settings().cache)

    def plan(self, graph: Graph, rank: int = 0) -> Plan:
        options: dict[str, Any] = {"dtype": "f32", "max_slots": 1, "max_context": 64, "max_rows": 16}
        return replace(plan_graph(graph, self.device.target, **options), rank=rank)

    def logits(self, name: str, ids: list[int]) -> Array:
        graph = self.graphs[name]
        weights = random_weights(graph, len(name))
        read = lambda tensor, _dtype, rows: np.asarray(weights(tensor))[rows]  # noqa: E731
        programs = [
            assemble(self.plan(shard(graph, r, RANKS), r), self.source, self.binary, variants=self.variants)
            for r in range(RANKS)
        ]
        assert (programs[0].records == programs[1].records).all()
        first = Ranks(programs[0], self.device, read)
        try:
            first.join([LocalRank(Runtime(p, self.device, read), f"rank {p.manifest.rank}") for p in programs[1:]])
            return forced_logits(first, ids, START)
        finally:
            first.close()


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    yield Kernels(QuickDevice(), {case.name: graph_of(case) for case in CASES})


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_shards_compute_what_the_whole_does(kernels: Kernels, name: str) -> None:
    graph = kernels.graphs[name]
    ids = [int(i) for i in np.random.default_rng(1).integers(0, graph.config.vocab, TOKENS)]
    want = Interpreter(graph, random_weights(graph, len(name))).step(ids)["logits"].numpy()[START:]
    assert relative_error(kernels.logits(name, ids), want) < LIMIT


def test_what_is_split_and_what_is_not(kernels: Kernels) -> None:
    """Norms over all heads keep olmo2's attentions whole; its MLPs are split all the same."""
    sums = {
        name: sum(n.op == "all_reduce" for n in shard(graph, 0, RANKS).nodes) / graph.config.layers
        for name, graph in kernels.graphs.items()
    }
    assert sums == {name: 1.0 if name == "olmo2" else 2.0 for name in sums}


def test_the_parts_of_a_matrix_make_up_the_whole(kernels: Kernels) -> None:
    """Nothing is on two ranks, but for a few rows of the head where the vocabulary does not divide."""
    for name, graph in kernels.graphs.items():
        shards = [shard(graph, r, RANKS) for r in range(RANKS)]
        for node in (n for n in graph.nodes if n.op == "linear"):
            whole = graph.tensor(node.inputs[1]).shape
            makers = [g.producer(f"{node.output}.part") or g.producer(node.output) for g in shards]
            sizes = [np.prod(g.tensor(m.inputs[1]).shape) for g, m in zip(shards, makers) if m]
            if name == "olmo2" and node.name.split(".")[-1] in ("q", "k", "v", "attention_output"):
                assert sizes == [np.prod(whole)] * RANKS
            elif node.layer < 0:
                assert np.prod(whole) <= sum(sizes) < 1.5 * np.prod(whole)
            else:
                assert sizes[0] == sizes[1] and sum(sizes) == np.prod(whole), (name, node.name)


def test_columns_that_do_not_divide(kernels: Kernels) -> None:
    """The heads alone would let llama run on 6 devices."""
    with pytest.raises(
        LoweringError, match=r"tp 5: node layers.0.glu has 104 columns; .* divides them; possible are 1"
    ):
        shard(kernels.graphs["olmo2"], 0, 5)
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8, "intermediate_size": 104}
    config = {**find("llama").config().to_dict(), **sizes, "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(LoweringError, match=r"tp 6: node layers.0.glu has 104 columns; .*; possible are 1, 2$"):
        shard(find_model(config).build(config), 0, 6)
