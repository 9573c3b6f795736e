"""Every task compiles and links for every AMD target, and the instructions are what they must be."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from megakernel.builder.kernel import kernel_source, variants_of
from megakernel.target import find_target
from megakernel.tasks.task import WEIGHT_TYPES, DType, TaskNode, all_tasks
from tests.hip.every_task import every_task
from tests.unit.test_hip_build import AMD, COPY, MATRIX, Built, build_source, check_resources

TOGETHER = 6  # nodes of one kernel: what a compiler needs grows faster than their number


def parts(target: str) -> list[list[TaskNode]]:
    nodes = every_task(find_target(target))
    return [nodes[i : i + TOGETHER] for i in range(0, len(nodes), TOGETHER)]


@pytest.fixture(scope="session")
def made() -> dict[str, list[tuple[list[TaskNode], Built]]]:
    """By target: the nodes of each kernel, and the kernel."""
    keys = [(target, nodes) for target in AMD for nodes in parts(target)]
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda key: build_source(kernel_source(key[1], find_target(key[0]))), keys))
    return {t: [(nodes, b) for (name, nodes), b in zip(keys, built) if name == t] for t in AMD}


def test_no_task_and_no_type_is_left_out() -> None:
    for target in AMD:
        nodes = every_task(find_target(target))
        assert {n.task.name for n in nodes} == set(all_tasks())
        assert len(variants_of(nodes)) == len(nodes), "each node is a form of its own"
        text = "".join(variants_of(nodes))
        for epilogue in ("Store", "Residual", "Glu", "Activate"):
            assert f"Epilogue::k{epilogue}" in text
        for name in ("Matmul", "Attention", "Embedding"):
            types = set(re.findall(rf"{name}<.*?dtype = DType::k(\w+)", "\n".join(variants_of(nodes))))
            assert {t.upper() for t in types} == {t.name for t in (DType if name == "Attention" else WEIGHT_TYPES)}


def test_with_recording_and_delays() -> None:
    """What `megakernel report` and the tests of faults build, of a matmul, which every role has a part in."""

    def one(target: str) -> Built:
        (node,) = (n for n in every_task(find_target(target)) if n.name == "matmul DType.BF16 0")
        return build_source(kernel_source([node], find_target(target), chaos=True, trace=True))

    with ThreadPoolExecutor(2) as pool:
        for target, built in zip(AMD, pool.map(one, AMD)):
            check_resources(target, built)
            assert len(re.findall("s_memrealtime|MSG_RTN_GET_REALTIME", built.assembly)) > 10, "each event has times"


@pytest.mark.parametrize("target", AMD)
def test_resources_and_instructions(made: dict[str, list[tuple[list[TaskNode], Built]]], target: str) -> None:
    for nodes, built in made[target]:
        check_resources(target, built)
        if any(n.task.name == "matmul" for n in nodes):
            assert MATRIX[target] in built.assembly
            assert target not in COPY or re.search(rf"^\s+{COPY[target]}$", built.assembly, re.M)
