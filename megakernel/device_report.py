"""One file about a device: what it is, whether it computes right, how fast, a recorded timeline of each model, and the
tests' results, to be sent back.

A part that fails does not stop the others: its error, with a fault's whole text, stands in its place. The environment
is not read, but errors, tests and attached files may name paths: look the file over before you send it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from megakernel import bench, profile
from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program, make_plan
from megakernel.builder.shard import check_ranks
from megakernel.checkpoint import GenerationDefaults
from megakernel.device.device import Device
from megakernel.devices import find_device, list_devices, open_device
from megakernel.errors import InvalidRequest, MegakernelError
from megakernel.llm import LLM
from megakernel.opening import load, workers_of_rank
from megakernel.origin import Origin, open_origin
from megakernel.probe import forced_logits
from megakernel.report import analysis
from megakernel.scheduler.simulate import share_of_hops, simulate
from megakernel.settings import Settings
from megakernel.target import Target
from megakernel.tasks.task import WEIGHT_TYPES

FORMAT = "megakernel device report 1"
PACKAGES = (
    "megakernel-decode", "numpy", "torch", "transformers", "hip-python", "rocm-bindings-hip", "cuda-core",
    "cuda-bindings", "ziglang", "pytest",
)  # fmt: skip
LARGEST_ATTACHMENT = 64 << 20
CHECKED: Mapping[str, Any] = {  # small, with several tiles of every matrix and more than one page of keys
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 544,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1003,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
TOKENS, LAST_PROMPT = 96, 80
RECORDED_STEPS = 2  # of a timeline: a few megabytes of text on a device of 304 workers


@dataclass(frozen=True)
class Wanted:
    """What to collect. `tests`: a JUnit file of pytest; `attach`: texts to put in whole; `tp`: devices from `device` on
    that compute the check and run each model together. Raises InvalidRequest, LoweringError."""

    device: str
    models: tuple[str, ...] = ()
    dtype: str = "bf16"
    contexts: tuple[int, ...] = (32, 512, 4096)
    tokens: int = 64
    rounds: int = 3
    tests: Path | None = None
    attach: tuple[Path, ...] = ()
    tp: int = 1

    def __post_init__(self) -> None:
        """Found now, not after a minute of building."""
        known = [d.value for d in WEIGHT_TYPES]
        if self.dtype not in known:
            raise InvalidRequest(f"--dtype {self.dtype}: expected one of {', '.join(known)}")
        check_ranks(self.tp)
        for option, value, least in (
            ("--tokens", self.tokens, 2), ("--rounds", self.rounds, 1), *(("--context", c, 1) for c in self.contexts),
        ):  # fmt: skip
            if value < least:
                raise InvalidRequest(f"{option} {value}: expected at least {least}")
        if not self.contexts:
            raise InvalidRequest("--context: expected at least one")


def collect(wanted: Wanted, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole report; of a device that cannot be used, why not. Raises InvalidRequest for a file that cannot be read
    and an unknown device."""
    tests, attached = read_tests(wanted.tests), [_attachment(p) for p in wanted.attach]
    device = find_device(wanted.device)
    usable = device.availability().usable
    parts: dict[str, Callable[[], Any]] = {
        "device": lambda: _device(open_device(wanted.device)),
        "devices": _devices,
    }
    if usable:
        parts["check"] = lambda: check(device, settings, wanted.tp)
        for m in wanted.models:
            parts[f"time {m}"] = lambda m=m: _time(m, device, wanted, settings)  # type: ignore[misc]
            parts[f"timeline {m}"] = lambda m=m: _timeline(m, device, wanted)  # type: ignore[misc]
    out: dict[str, Any] = {"format": FORMAT, "made": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    out |= {"system": system(), "tests": tests, "attached": attached}
    for name, part in parts.items():
        say(name)
        out[name] = _guarded(part)
    out["failed"] = [name for name in parts if isinstance(out[name], dict) and "error" in out[name]]
    return out


def _guarded(part: Callable[[], Any]) -> Any:
    """What a part gives, or its error: the reader of the report cannot ask again."""
    try:
        return part()
    except MegakernelError as e:
        return {"error": type(e).__name__, "message": str(e)}
    except Exception as e:  # anything at all that hardware or a driver can do, with where it came from
        frames = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(e.__traceback__)]
        return {"error": type(e).__name__, "message": str(e), "where": frames[-8:]}


# ------------------------------------------------------------------------------------------ what is there
def system() -> dict[str, Any]:
    """Operating system, processor, Python, the packages that matter and the commit of this one."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
        "packages": versions, "commit": commit(Path(__file__).parent),
        "rocm": _first_line(Path("/opt/rocm/.info/version")),
    }  # fmt: skip


def commit(package: Path) -> str | None:
    """Of the clone that `package` is part of, with "-dirty" where files were changed; None where it is in no clone."""
    git = ("git", "-C", str(package))
    try:  # a folder inside of another repository, such as a virtual environment's, is not that repository's
        subprocess.run(
            [*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=60, check=True
        )
        line = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _device(device: Device) -> dict[str, Any]:
    target = device.target
    return {
        "name": device.name, "description": device.availability().description, "target": asdict(target),
        "compiler": device.compiler_id(target).split(" /")[0],
    }  # fmt: skip


def _devices() -> list[dict[str, Any]]:
    found = [(d, d.availability()) for d in list_devices()]
    return [{"name": d.name, "usable": s.usable, "what": s.description or s.reason} for d, s in found]


# ------------------------------------------------------------------------------------------ is it right
def check(device: Device, settings: Settings, tp: int = 1) -> dict[str, Any]:
    """Logits of a small random model against one CPU device, twice, and what was compiled and observed for them."""
    config = {**CHECKED, **({"num_attention_heads": 2 * tp, "num_key_value_heads": tp} if tp > 1 else {})}
    config["intermediate_size"] = -(-CHECKED["intermediate_size"] // tp) * tp
    first, again, facts, code = _logits(device, settings, config, tp)
    expected, _, _, _ = _logits(open_device("cpu"), settings, config, 1)
    error = np.linalg.norm(first - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return {
        "compared with": "the CPU device", "devices": tp, "tokens": TOKENS,
        "largest relative error": float(error.max()),
        "same token": float((first.argmax(1) == expected.argmax(1)).mean()),
        "same bits twice": bool((first.view(np.uint32) == again.view(np.uint32)).all()),
        "finite": bool(np.isfinite(first).all()), "last launch": facts, "code": code,
    }  # fmt: skip


def _logits(
    device: Device, settings: Settings, config: Mapping[str, Any], tp: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], Any, Any]:
    program = build_program(
        config, _target(device, tp, settings), device, cache=settings.cache, dtype="bf16", max_slots=1, max_context=256,
        tp=tp,
    )  # fmt: skip
    weights = random_weights(build_graph(config), seed=1, dtype="bf16")
    ids = [int(i) for i in np.random.default_rng(0).integers(0, config["vocab_size"], TOKENS)]
    origin = Origin("check", config, weights.read, None, GenerationDefaults())
    run = load(program, device, origin, settings)
    try:
        first = forced_logits(run, ids, LAST_PROMPT)
        run.reset()
        again = forced_logits(run, ids, LAST_PROMPT)
        return first, again, dict(run.facts()), dict(device.code_report(program.binary))
    finally:
        run.close()


def _target(device: Device, tp: int, settings: Settings) -> Target:
    return workers_of_rank(device.target, tp, None, settings)


# ------------------------------------------------------------------------------------------ is it fast
def _time(model: str, device: Device, wanted: Wanted, settings: Settings) -> dict[str, Any]:
    """Measured times beside what the cost model predicted of them."""
    rows = bench.compare(
        model, device=device.name, dtype=wanted.dtype, contexts=wanted.contexts, tokens=wanted.tokens,
        rounds=wanted.rounds, against=["none"], tp=wanted.tp,
    )  # fmt: skip
    measured = [asdict(row) for row in rows]
    return {"measured": measured, "predicted": _predicted(model, device, wanted, settings)}


def _predicted(model: str, device: Device, wanted: Wanted, settings: Settings) -> list[dict[str, Any]]:
    config = open_origin(model, dtype=wanted.dtype, cache=settings.cache).config
    longest = max(wanted.contexts) + wanted.tokens + 1
    goal = _target(device, wanted.tp, settings)
    made = make_plan(config, goal, dtype=wanted.dtype, max_slots=1, max_context=longest, tp=wanted.tp)
    return [
        {
            "context": c, "us_per_token": simulate(made.schedule, goal, c).makespan_us,
            "share of hops": share_of_hops(made.schedule, goal, c), "figures": goal.source,
        }
        for c in wanted.contexts
    ]  # fmt: skip


def _timeline(model: str, device: Device, wanted: Wanted) -> dict[str, Any]:
    """What every worker did in a few steps: `timeline` is the text of a timeline.json for `megakernel profile`. A
    fault ends it and is an error beside what was recorded until then."""
    context = min(wanted.contexts)
    with LLM(
        model, device=device.name, dtype=wanted.dtype, max_slots=1, trace=True,
        max_context=profile.room(RECORDED_STEPS, context), tp=wanted.tp,
    ) as llm:  # fmt: skip
        made = profile.record(llm, RECORDED_STEPS, context)
    fault = made.meta.fault
    failed = {} if fault is None else {"error": "DeviceFault", "message": fault.text}
    return failed | {"context": context, "summary": analysis.summary(made), "timeline": made.to_json()}


# ------------------------------------------------------------------------------------------ what others wrote
def read_tests(path: Path | None) -> dict[str, Any] | None:
    """Counts, and each test that failed or was skipped with its reason, of a JUnit file. Raises InvalidRequest."""
    if path is None:
        return None
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as e:
        raise InvalidRequest(f"--tests {path}: expected the file of pytest --junitxml ({e})") from e
    failed: dict[str, str] = {}
    skipped: dict[str, int] = {}
    count, seconds = 0, 0.0
    for case in root.iter("testcase"):
        count, seconds = count + 1, seconds + float(case.get("time", "0"))
        for found in case:
            if found.tag in ("failure", "error"):
                text = found.text or found.get("message") or ""
                failed[f"{case.get('classname')}::{case.get('name')}"] = text[-4000:]
            elif found.tag == "skipped":
                reason = found.get("message", "")
                skipped[reason] = skipped.get(reason, 0) + 1
    return {"run": count, "seconds": seconds, "failed": failed, "skipped": skipped}


def _attachment(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > LARGEST_ATTACHMENT:
            raise InvalidRequest(f"--attach {path}: {path.stat().st_size:,} bytes; at most {LARGEST_ATTACHMENT:,}")
        return {"name": path.name, "text": path.read_text()}
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"--attach {path}: expected a text file ({e})") from e


def summary(report: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """A few lines for the person who made it."""
    rows = [(n, f"failed: {report[n]['message']}") for n in report["failed"]]
    found = report.get("check")
    if found and "error" not in found:
        rows.append(("check", f"relative error {found['largest relative error']:.1e} against the CPU device"))
    for name, value in report.items():
        if name.startswith("time ") and "measured" in value:
            said = ", ".join(f"{r['us_per_token']:,.0f} us at {r['context']}" for r in value["measured"])
            rows.append((name, said))
        if name.startswith("timeline ") and "step_us" in value.get("summary", ()):
            told = value["summary"]
            rows.append((name, f"{told['steps']} steps of {told['step_us']:,.0f} us, {told['events']:,} events"))
    tests = report["tests"]
    rows.append(("tests", f"{tests['run']} run, {len(tests['failed'])} failed" if tests else "not given"))
    return rows
