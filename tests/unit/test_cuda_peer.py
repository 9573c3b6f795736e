"""Several GPUs without one: what is compiled for them, and how the host makes their memory reachable."""

from __future__ import annotations

import ctypes
import re
import subprocess
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megakernel.builder.build import make_plan, plan_source
from megakernel.builder.cache import INCLUDE
from megakernel.builder.kernel import variant_text
from megakernel.device import cuda, cuda_compiler, cuda_peer
from megakernel.device.device import Device
from megakernel.errors import DeviceUnavailable, LoweringError
from megakernel.ranks import rank_devices
from megakernel.scheduler.simulate import simulate
from megakernel.target import TARGETS, find_target
from megakernel.tasks import matmul
from megakernel.tasks.matmul import Matmul
from megakernel.tasks.push import Push, exchange_sizes
from megakernel.tasks.task import Addresses, DType, Exchange
from tests.unit.test_cuda_build import CONFIG, H200, REGISTERS, disassembler, needs_wheels

MULTICAST = re.compile(r"multimem|cuMulticast|MULTICAST|\.multicast::|MULTIMEM")


@cache
def built(tp: int) -> tuple[bytes, str]:
    plan = make_plan(CONFIG, find_target("sm_90a"), max_context=1024, max_slots=4, tp=tp)
    flags = (*cuda_compiler.compile_flags(plan.target, False, False), "--ptxas-options=-v")
    return cuda_compiler.compile_cubin(plan_source(plan), INCLUDE, flags)


@needs_wheels
def test_compiles_within_its_registers_and_stores_at_system_scope(tmp_path: Path) -> None:
    cubin, log = built(2)
    used = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert used and max(used) <= REGISTERS, log
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump: install nvidia-cuda-cuobjdump")
    (tmp_path / "k.cubin").write_bytes(cubin)
    line = [tool, "-sass", str(tmp_path / "k.cubin")]
    code = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert not MULTICAST.search(code)
    assert "STG.E.64.STRONG.SYS" in code and "LDG.E.64.STRONG.SYS" in code


def test_no_source_uses_multicast() -> None:
    folder = Path(cuda.__file__).parent
    for path in sorted(folder.iterdir()):
        if path.suffix in (".py", ".h", ".cuh"):
            assert not MULTICAST.search(path.read_text()), path


def test_elements_carry_stamps_and_edges_of_a_gpu_stay_by_value() -> None:
    """Between GPUs no counter; on each only the logits and what samples them still wait for one."""
    made = make_plan(CONFIG, find_target("sm_90a"), max_context=1024, max_slots=4, tp=2)
    waiting = {made.schedule.nodes[e.node].name for queue in made.schedule.queues for e in queue if e.waits}
    assert waiting == {"logits", "logits.push", "sample", "advance"}
    low = made.lowered  # room for what each worker of each rank finds, behind all buffers
    exchanges = [e for e in (n.task.sends(n) for n in made.schedule.nodes) if e is not None]
    last = max(e.stop for e in exchanges)
    assert low.best_offset >= last and low.window_bytes == low.best_offset + 2 * 16 * 132 * 32
    assert low.part_vocab == 512  # of 1003
    assert len(exchanges) == 5 and all(e.stamped for e in exchanges)


@pytest.mark.parametrize("name", ["sm_90a", "gfx942"])
def test_products_send_what_they_make(name: str) -> None:
    """Where elements are stamped. Only the logits, of which a step needs few rows, have a push of their own."""
    plan = make_plan(CONFIG, find_target(name), max_context=1024, max_slots=4, tp=2)
    sent = {n.name: (n, e) for n in plan.lowered.nodes if (e := n.task.sends(n)) is not None}
    assert len(sent) == len(plan.lowered.exchanges) and [n for n in sent if n.endswith(".push")] == ["logits.push"]
    at = Addresses(lambda weight: 1, lambda tensor: 2)
    for node, exchange in sent.values():
        payload = node.task.payload(node, at)
        if node.task is Matmul:
            assert "kSend" in variant_text(node) and exchange.stamped
            assert (payload["gamma"], payload["residual"]) == (exchange.start, exchange.number)
            assert node.task.cost(node, 0, node.tiles, 0).link_bytes == 8 * node.sizes["n"]
    counted = make_plan(CONFIG, find_target("cpu-generic"), max_context=1024, max_slots=4, tp=2, dtype="f32")
    senders = [n for n in counted.lowered.nodes if n.task.sends(n)]
    assert len(senders) == len(sent) and all(n.task is Push for n in senders)


def test_only_plain_products_send() -> None:
    sizes = exchange_sizes(cols=64, exchange=0, exchanges=1, buffer=256, rows=16, ranks=2, stamped=True)
    options: dict[str, Any] = {
        "n": 64, "k": 64, "input": "x", "output": "y", "weight": "w", "dtype": DType.BF16, "tile_n": 8, "sends": sizes,
    }  # fmt: skip
    assert matmul.node("m", **options).task.sends(matmul.node("m", **options)) == Exchange(
        0, 256, 256 + 2 * 16 * 64 * 8, True
    )
    for more in (
        {"gamma": "g"},
        {"residual": "r"},
        {"sampled": True},
        {"softcap": 3.0},
        {"activation": "relu"},
        {"n": 32},
    ):
        with pytest.raises(LoweringError, match="only a plain store of all rows"):
            matmul.node("m", **{**options, **more})


@pytest.mark.parametrize("name", ["sm_90a", "gfx942"])
def test_a_step_of_more_devices_is_predicted_to_be_shorter(name: str) -> None:
    """The model: bytes shrink with the number of devices, hops do not."""
    config = {**CONFIG, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
              "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "num_hidden_layers": 2}  # fmt: skip
    target = find_target(name)
    steps = {}
    for tp in (1, 2, 4, 8):
        plan = make_plan(config, target, max_context=1024, max_slots=1, max_rows=16, tp=tp)
        assert plan.counted is not None
        said = simulate(plan.counted, target, 512)
        steps[tp] = said.makespan_us
        exchanges = len(plan.lowered.exchanges)
        assert exchanges == (0 if tp == 1 else 5)
        assert said.makespan_us >= said.floor_us + exchanges * target.link_us * 0.5
    assert steps[1] > steps[2] > steps[4] > steps[8] > steps[1] / 8 and steps[2] > 0.5 * steps[1]
    slow = simulate(plan.counted, target.__class__(**{**vars(target), "link_us": 50.0}), 512)
    assert slow.makespan_us > steps[8] + 5 * 40


def test_every_target_says_what_its_links_are() -> None:
    for target in TARGETS.values():
        assert target.link_gbps > 0 and target.link_us > 0 and "measured" in target.link_source, target.name


# ---------------------------------------------------------------------------------------------- the host
class Status(int):
    name = "CUDA_ERROR_SOMETHING"


class FakeDriver(types.SimpleNamespace):
    """What cuda_peer asks of the driver."""

    def __init__(self, can: int = 1, enabled: int = 0, opened: int = 0) -> None:
        super().__init__(can=can, enabled=enabled, opened=opened, calls=[])
        self.CUresult = types.SimpleNamespace(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED=Status(704))
        self.CUipcMem_flags = types.SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)

    def cuDeviceCanAccessPeer(self, own: int, peer: int) -> Any:
        return Status(0), self.can

    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> Any:
        self.calls.append((context, flags))
        return (Status(self.enabled),)

    class CUipcMemHandle:
        def __init__(self) -> None:
            self.data = (ctypes.c_uint8 * 64)()

        def getPtr(self) -> int:
            return ctypes.addressof(self.data)

    def cuIpcGetMemHandle(self, address: int) -> Any:
        handle = self.CUipcMemHandle()
        handle.data[:8] = address.to_bytes(8, "little")
        return Status(0), handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        assert flags == 1
        return Status(self.opened), int.from_bytes(bytes(handle.data[:8]), "little")


def other(index: int) -> cuda.GpuInfo:
    return cuda.GpuInfo(index, "NVIDIA H200", (9, 0), 132, 232448, 141 << 30)


@pytest.mark.parametrize("enabled", [0, 704])
def test_peer_access_within_a_process(enabled: int) -> None:
    d = FakeDriver(enabled=enabled)
    cuda_peer.enable(d, H200, other(1), "context of GPU 1")
    assert d.calls == [("context of GPU 1", 0)]


def test_gpus_that_do_not_reach_each_other_are_named() -> None:
    words = r"GPU 0 \(NVIDIA H200\) cannot reach the memory of GPU 3 \(NVIDIA H200\): they need NVLink.*topo"
    with pytest.raises(DeviceUnavailable, match=words):
        cuda_peer.enable(FakeDriver(can=0), H200, other(3), None)
    with pytest.raises(DeviceUnavailable, match="may not reach the memory of GPU 3"):
        cuda_peer.enable(FakeDriver(enabled=1), H200, other(3), None)


def test_handles_between_processes() -> None:
    d = FakeDriver()
    handle = cuda_peer.handle_of(d, 0x7F0012340000)
    assert len(handle) == cuda_peer.HANDLE_BYTES and cuda_peer.opened(d, "cuda:1", handle) == 0x7F0012340000
    with pytest.raises(DeviceUnavailable, match="cuda:1 cannot open the window of a peer in another process"):
        cuda_peer.opened(FakeDriver(opened=1), "cuda:1", handle)
    with pytest.raises(DeviceUnavailable, match="expected 64 bytes, got 3"):
        cuda_peer.opened(d, "cuda:1", b"abc")


def test_the_handle_of_the_bindings_has_64_bytes() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
    assert ctypes.string_at(handle.getPtr(), 64) == bytes(range(64))


def test_ranks_take_the_gpus_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [cuda.CudaDevice(other(i)) for i in range(3)]
    monkeypatch.setattr(cuda.CudaDevice, "availability", lambda self: types.SimpleNamespace(usable=True))
    known: list[Device] = [*gpus]
    assert rank_devices(gpus[1], 2, lambda: known) == gpus[1:]
    with pytest.raises(DeviceUnavailable, match=r"tp 3: expected 3 devices from cuda:1 on, got 2: cuda:1, cuda:2"):
        rank_devices(gpus[1], 3, lambda: known)
