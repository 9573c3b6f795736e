"""The command `megakernel`. Every command takes --json: one JSON object a line on standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megakernel import bench as benchmarks
from megakernel import device_report
from megakernel import profile as profiles
from megakernel.builder.build import Plan, make_plan, plan_source
from megakernel.checkpoint import fetch_demo
from megakernel.devices import list_devices
from megakernel.errors import InvalidRequest, MegakernelError
from megakernel.llm import LLM, Prompt
from megakernel.model_table import CHECKS, model_rows
from megakernel.opening import build, planned_target, save_ranks, target_and_compiler, workers_of_rank
from megakernel.origin import open_origin
from megakernel.output import Output
from megakernel.report import analysis
from megakernel.report.commands import calibrate_command, show_comparison
from megakernel.sampling import SamplingParams
from megakernel.scheduler.calibration import Calibration
from megakernel.scheduler.simulate import Simulation, share_of_hops, simulate
from megakernel.serve import server_modules
from megakernel.settings import read_settings
from megakernel.show import INTERRUPTED, Stages, emit, errors, reported, size, table
from megakernel.target import Target
from megakernel.tasks.record import MAX_ROWS
from megakernel.timeline import Timeline

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Compile a transformer into one persistent kernel and decode with it.",
)  # fmt: skip

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help='A Hugging Face folder, a .gguf file, "demo", or a published shape such as llama-3.2-1b, which gets '
        "seeded random weights.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
DeviceName = Annotated[str, typer.Option("--device", help="Device to run on; `megakernel devices` lists them.")]
TargetName = Annotated[
    str | None, typer.Option("--target", help="Target to build for, such as sm_90a; default: the device's own.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="Type of weights: f32, bf16 or f16.")]
KvDtype = Annotated[
    str | None, typer.Option("--kv-dtype", help="Type of the KV cache, also f8; default: that of weights.")
]
Slots = Annotated[int, typer.Option("--max-slots", help="Sequences at once.")]
Context = Annotated[
    int | None, typer.Option("--max-context", help="Tokens of prompt and output; default 4096 or the model's limit.")
]
Rows = Annotated[
    int | None,
    typer.Option("--max-rows", help=f"Tokens that one step computes, 1 to {MAX_ROWS}; default: by the cost model."),
]
Workers = Annotated[int | None, typer.Option("--workers", help="Resident workers; default: all of the target's.")]
Tp = Annotated[
    int, typer.Option("--tp", help="Devices that run the model together: GPUs from --device on, or parts of the CPU.")
]
TpProcesses = Annotated[bool, typer.Option("--tp-processes", help="Each of them but the first in its own process.")]
Policy = Annotated[str, typer.Option("--policy", help="How tasks are placed: balanced, critical_path, round_robin.")]


@app.command()
@reported
def devices(as_json: Json = False) -> None:
    """List the devices, each with whether it can be used and why not."""
    rows = []
    for device in list_devices():
        state = device.availability()
        target = device.target if state.usable else None
        if as_json:
            emit({
                "device": device.name, "usable": state.usable, "reason": state.reason,
                "description": state.description, "target": asdict(target) if target else None,
            })  # fmt: skip
        found = f"{target.name}, {target.workers} workers" if target else ""
        rows.append((device.name, "yes" if state.usable else "no", found, state.description or state.reason))
    if not as_json:
        table(("device", "usable", "target", "what, or why not"), rows)


@app.command()
@reported
def models(as_json: Json = False) -> None:
    """List the architectures, what was checked of each, and the published shapes."""
    rows = model_rows()
    if as_json:
        for row in rows:
            emit(asdict(row))
        return
    table(
        ("architecture", "checked", "published shapes"),
        [(row.architecture, ", ".join(row.checks), ", ".join(row.shapes)) for row in rows],
    )
    for name, text in CHECKS.items():
        typer.echo(f"{name}: {text}")


@app.command("build")
@reported
def build_command(
    model: Model,
    target: TargetName = None,
    device: Annotated[str | None, typer.Option(help="Build for this device instead of a named target.")] = None,
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = None,
    max_slots: Slots = 8,
    max_context: Context = None,
    max_rows: Rows = None,
    workers: Workers = None,
    policy: Policy = "balanced",
    paced: Annotated[bool, typer.Option(help="Steps can keep to a bound, as with --max-step-ms of serve.")] = False,
    tp: Tp = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Save the program to this new folder; with --tp a folder for each rank in it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build the program of a model: plan, verify, compile, cache; with --output save it."""
    settings = read_settings()
    with Stages(as_json) as progress:
        where, goal = target_and_compiler(target, device, workers, settings)
        goal = workers_of_rank(goal, tp, workers, settings)
        origin = open_origin(model, dtype=dtype, cache=settings.cache, progress=progress)
        try:
            program = build(
                origin, goal, where, settings, progress, dtype=dtype, kv_dtype=kv_dtype, max_slots=max_slots,
                max_context=max_context, max_rows=max_rows, policy=policy, paced=paced, tp=tp,
            )  # fmt: skip
            code = dict(where.code_report(program.binary))
            beside = {"report.json": json.dumps(code, indent=1) + "\n"} if code else {}
            saved = save_ranks(program, origin.config, goal, output, beside) if output else None
        finally:
            origin.close()
    m = program.manifest
    facts: dict[str, Any] = {
        "name": m.name, "target": m.target, "workers": m.workers, "dtype": m.dtype, "kv_dtype": m.kv_dtype,
        "nodes": len(m.nodes), "records": m.workers * m.queue_length, "counters": m.counter_count,
        "weights_bytes": m.weights_bytes, "stream_bytes": m.stream_bytes, "workspace_bytes": m.workspace_bytes,
        "max_slots": m.max_slots, "max_context": m.max_context, "tp": m.ranks, "window_bytes": m.window_bytes,
        "binary": str(program.binary),
        "saved": str(saved) if saved else None,
    }  # fmt: skip
    if as_json:
        emit(facts | ({"code": code} if code else {}))
    else:
        if code:
            table(("code object", ""), [(k, json.dumps(v) if isinstance(v, dict) else v) for k, v in code.items()])
        table(("", m.name), [(k, size(v) if k.endswith("_bytes") else v) for k, v in facts.items() if v is not None])


@app.command()
@reported
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="The text; - or nothing reads standard input.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="Prompt as token ids, 1,2,3, instead of a text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message in the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message before it; with --chat.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest; 0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest with this total probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens less likely than this times the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Of tokens in prompt or output; 1: off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Of tokens in the output, -2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Of tokens in the output, for each time, -2 to 2.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of sampling (default: drawn) and of a shape's weights.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be given again.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Report this many log-probabilities (with --json).")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")] = False,
    device: DeviceName = "cpu",
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = None,
    max_context: Context = None,
    workers: Workers = None,
    steps_per_launch: Annotated[int | None, typer.Option(help="Most steps of one launch.")] = None,
    tp: Tp = 1,
    tp_processes: TpProcesses = False,
    as_json: Json = False,
) -> None:
    """Generate text, printed as it comes. With --json a line for each token; the last line has everything."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seed=seed, stop=stop, logprobs=logprobs, ignore_eos=ignore_eos,
    )  # fmt: skip
    if system is not None and not chat:
        raise InvalidRequest("--system: expected --chat beside it; without it the prompt is taken as it is")
    given = _prompt(prompt, token_ids, chat)
    with Stages(as_json) as progress:
        llm = LLM(
            model, device=device, dtype=dtype, kv_dtype=kv_dtype, max_slots=1, max_context=max_context,
            workers=workers, seed=seed or 0, steps_per_launch=steps_per_launch, tp=tp, tp_processes=tp_processes,
            progress=progress,
        )  # fmt: skip
    with llm:
        if chat:
            messages = [{"role": "system", "content": system}] if system else []
            given = llm.chat_prompt([*messages, {"role": "user", "content": given}])
        _print_stream(llm, llm.generate(given, params, stream=True), as_json)


@app.command("schedule")
@reported
def schedule_command(
    model: Model,
    target: TargetName = None,
    device: Annotated[str | None, typer.Option(help="Plan for this device instead of a named target.")] = None,
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = None,
    max_slots: Slots = 8,
    max_context: Context = None,
    max_rows: Rows = None,
    workers: Workers = None,
    policy: Policy = "balanced",
    tp: Tp = 1,
    context: Annotated[int, typer.Option(help="Tokens in the cache, for the simulated times.")] = 512,
    worker: Annotated[int | None, typer.Option(help="Print this worker's whole queue.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Figures that `calibrate` fitted to a timeline.")] = None,
    as_json: Json = False,
) -> None:
    """Show the queues, their waits, and what `simulate` says of a step. Needs no compiler."""
    if context < 0:
        raise InvalidRequest(f"--context: expected 0 or more tokens, got {context}")
    settings = read_settings()
    goal = workers_of_rank(planned_target(target, device, workers, settings), tp, workers, settings)
    made = make_plan(
        open_origin(model, dtype=dtype, cache=settings.cache).config, goal, dtype=dtype, kv_dtype=kv_dtype,
        max_slots=max_slots, max_context=max_context, max_rows=max_rows, policy=policy, tp=tp,
    )  # fmt: skip
    figures = Calibration.load(calibration) if calibration else Calibration()
    figures.check_target(goal.name)
    goal = replace(goal, source=figures.source or goal.source)
    ordered = made.counted or made.schedule  # an edge by value is a hop too
    said = simulate(ordered, goal, context, figures)
    hops = share_of_hops(ordered, goal, context, figures)
    if worker is not None and not 0 <= worker < made.schedule.workers:
        raise InvalidRequest(f"--worker: expected 0 to {made.schedule.workers - 1}, got {worker}")
    entries = [
        {
            "worker": w, "index": i, "node": made.schedule.nodes[e.node].name, "first": e.first, "count": e.count,
            "waits": [[wait.counter, wait.count] for wait in e.waits], "signal": e.signal,
        }
        for w, queue in enumerate(made.schedule.queues)
        if worker is None or w == worker
        for i, e in enumerate(queue)
    ]  # fmt: skip
    if as_json:
        for entry in entries:
            emit(entry)
        emit(
            json.loads(said.to_json(spans=False))
            | {"predicted": True, "share_of_hops": hops, "relays": len(made.schedule.relays), "figures": goal.source}
            | ({"tp": tp, "exchanges": len(made.lowered.exchanges), "link_figures": goal.link_source} if tp > 1 else {})
        )
        return
    if worker is not None:
        rows = [
            (i, made.schedule.nodes[e.node].name, f"{e.first}+{e.count}",
             " ".join(f"{w.counter}>={w.count}" for w in e.waits), "" if e.signal is None else e.signal)
            for i, e in enumerate(made.schedule.queues[worker])
        ]  # fmt: skip
        table(("", "node", "tiles", "waits for counter >= count x step", "signals"), rows, f"queue of worker {worker}")
    _print_simulation(said, hops, len(entries), made, goal)


@app.command()
@reported
def source(
    model: Model,
    target: TargetName = None,
    device: Annotated[str | None, typer.Option(help="For this device instead of a named target.")] = None,
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = None,
    workers: Workers = None,
    tp: Tp = 1,
    header: Annotated[bool, typer.Option("--header", help="Print the generated header of structures instead.")] = False,
    as_json: Json = False,
) -> None:
    """Print the generated source of a model's kernel. Needs no compiler."""
    settings = read_settings()
    goal = planned_target(target, device, workers, settings)
    config = open_origin(model, dtype=dtype, cache=settings.cache).config
    made = plan_source(make_plan(config, goal, dtype=dtype, kv_dtype=kv_dtype, tp=tp))
    text = "\n".join(made.headers.values()) if header else made.text
    if as_json:
        emit({"target": goal.name, "lines": len(text.splitlines()), "source": text})
    else:
        sys.stdout.write(text)


@app.command()
@reported
def bench(
    model: Model,
    device: DeviceName = "cpu",
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens in the cache; may be given again.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens timed in each run.")] = 64,
    rounds: Annotated[int, typer.Option(help="Runs of every contender, in alternation.")] = 3,
    workers: Workers = None,
    against: Annotated[
        list[str] | None, typer.Option(help="transformers (the default when it is installed), or none.")
    ] = None,
    tp: Tp = 1,
    tp_processes: TpProcesses = False,
    as_json: Json = False,
) -> None:
    """Time decoding at batch 1, beside a plain read of the same bytes and other programs that are installed."""
    with Stages(as_json) as progress:
        rows = []
        for row in benchmarks.compare(
            model, device=device, dtype=dtype, kv_dtype=kv_dtype, contexts=tuple(context or (32, 512)),
            tokens=tokens, rounds=rounds, workers=workers, against=against, tp=tp, tp_processes=tp_processes,
            progress=progress,
        ):  # fmt: skip
            rows.append(row)
            if as_json:  # at once: the next may take long, and who stops it has this one
                emit(asdict(row))
    if as_json:
        return
    table(
        ("program", "context", "us a token", "tokens/s", "GB/s", "of plain read", "launches a token", "tokens hash"),
        [
            (r.program, r.context, f"{r.us_per_token:,.0f}", f"{r.tokens_per_s:.1f}", f"{r.gbps:.2f}",
             f"{r.of_plain_read:.2f}" if r.of_plain_read else "",
             f"{r.launches_per_token:.3f}" if r.launches_per_token else "", r.tokens_hash)
            for r in rows
        ],
    )  # fmt: skip
    for row in rows:
        if row.note:
            errors.print(f"{row.program}: {row.note}", markup=False)


@app.command("bisect")
@reported
def bisect_command(
    model: Model,
    device: DeviceName = "cpu",
    dtype: Dtype = "bf16",
    tokens: Annotated[int, typer.Option(help="Random tokens of the prompt.")] = 8,
    token_ids: Annotated[str | None, typer.Option(help="The prompt as ids, 1,2,3, in place of random ones.")] = None,
    workers: Workers = None,
    limit: Annotated[
        float | None, typer.Option(help="Relative error above which a tensor is bad; by default that of the dtype.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random tokens, and of a shape's random weights.")] = 0,
    tp: Tp = 1,
    every: Annotated[bool, typer.Option("--all", help="Show every tensor, not only the bad ones.")] = False,
    as_json: Json = False,
) -> None:
    """Run a step on the device, compare every tensor with the interpreter, and name the first bad task.

    With --tp those of every device with its part of the model. Ends with 1 when one is bad. Needs the extra [torch]."""
    from megakernel.bisect import bisect

    prompt = _ids(token_ids) if token_ids is not None else tokens
    with Stages(as_json) as progress:
        found = bisect(
            model, device=device, dtype=dtype, tokens=prompt, workers=workers, limit=limit, seed=seed, tp=tp,
            progress=progress,
        )  # fmt: skip
    bad = [f for f in found if f.bad]
    shown = found if every else bad
    if as_json:
        for f in shown:
            emit({**asdict(f), "bad": f.bad})
        emit({
            "tensors": len(found), "bad": len(bad), "first_bad": bad[0].node if bad else None,
            "first_bad_rank": bad[0].rank if bad else None,
        })  # fmt: skip
    elif shown:
        ranks = ("rank",) if tp > 1 else ()
        table(
            (*ranks, "node", "task", "error", "limit", "row", "column", "got", "expected", "tile", "worker"),
            [
                (*(f.rank for _ in ranks), f.node, f.task, f"{f.error:.1e}{' BAD' if f.bad else ''}", f"{f.limit:.0e}",
                 f.row, f.column, f"{f.got:.6g}", f"{f.expected:.6g}", f.tile if f.tile >= 0 else "",
                 f.worker if f.worker >= 0 else "")
                for f in shown
            ],
        )  # fmt: skip
    if bad:
        b = bad[0]
        where = f" on rank {b.rank} ({b.device})" if tp > 1 else ""
        errors.print(f"the first bad task is {b.task} of {b.node}{where}; {len(bad)} of {len(found)} tensors are bad")
        raise typer.Exit(1)
    errors.print(f"all {len(found)} tensors agree; the largest error is {max(f.error for f in found):.1e}")


@app.command("profile")
@reported
def profile_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A model as for `generate`, or timeline.json of an earlier profile."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Record nothing: say what changed from one timeline.json to another."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps to record.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens in the cache before them.")] = 32,
    step_range: Annotated[
        str | None,
        typer.Option("--range", help="Only steps FIRST:LAST of what was recorded, the kernel's numbers."),
    ] = None,
    device: DeviceName = "cpu",
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = None,
    workers: Workers = None,
    policy: Policy = "balanced",
    tp: Tp = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the files; default: profile-NAME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Record what every worker and role does in some decode steps: a timeline as JSON, a Perfetto trace, a page."""
    if (model is None) == (compare is None):
        raise InvalidRequest("profile: expected either MODEL or --compare A B")
    if compare is not None:
        return show_comparison(*compare, as_json)
    assert model is not None
    profiles.check_folder(output or Path("."))
    if step_range is not None:
        profiles.steps_in(step_range)
    stopped = False
    with Stages(as_json) as progress:
        if model.endswith(".json"):
            timeline = Timeline.load(model)
        else:
            with LLM(
                model, device=device, dtype=dtype, kv_dtype=kv_dtype, max_slots=1, workers=workers, policy=policy,
                max_context=profiles.room(steps, context), trace=True, tp=tp, progress=progress,
            ) as llm:  # fmt: skip
                profiles.check_range(llm, step_range, steps, context)
                timeline = profiles.record(llm, steps, context)
            stopped = timeline.meta.fault is None and len(timeline.steps) < steps and not any(timeline.meta.overflow)
            if not stopped:  # who pressed Ctrl-C does not wait for more to be measured
                timeline = profiles.with_ceiling(timeline)
        timeline = profiles.part(timeline, step_range)
        made = profiles.write(timeline, output or Path(f"profile-{timeline.meta.program}"))
    facts = profiles.summary(made)
    if as_json:
        emit(facts | {"analysis": analysis.summary(timeline)})
    else:
        _print_profile(facts)
    if stopped:
        errors.print(f"stopped: {len(timeline.steps)} of {steps} steps were recorded")
        raise typer.Exit(INTERRUPTED)
    if timeline.meta.fault is not None:
        raise MegakernelError(f"the recording ended with a fault: {timeline.meta.fault.text}")


@app.command()
@reported
def report(
    device: DeviceName = "cpu",
    model: Annotated[
        list[str] | None, typer.Option(help="Model to time; may be given again. Default: llama-3.2-1b.")
    ] = None,
    dtype: Dtype = "bf16",
    context: Annotated[list[int] | None, typer.Option(help="Tokens in the cache; may be given again.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens timed in each run.")] = 64,
    rounds: Annotated[int, typer.Option(help="Runs of each context.")] = 3,
    tests: Annotated[Path | None, typer.Option(help="Results of pytest --junitxml to put in.")] = None,
    attach: Annotated[list[Path] | None, typer.Option(help="Another text to put in whole.")] = None,
    tp: Tp = 1,
    output: Annotated[Path, typer.Option("--output", "-o", help="The new file to write.")] = Path("report.json"),
    as_json: Json = False,
) -> None:
    """Collect all about a device into one file to send: versions, correctness, times, timelines, test results."""
    wanted = device_report.Wanted(
        device, tuple(model or ("llama-3.2-1b",)), dtype, tuple(context or (32, 512, 4096)), tokens, rounds, tests,
        tuple(attach or ()), tp,
    )  # fmt: skip
    if output.exists():
        raise InvalidRequest(f"--output {output} exists; give a new file or remove it")
    if not os.access(output.absolute().parent, os.W_OK):
        raise InvalidRequest(f"--output {output}: expected a file in a folder that can be written")
    with Stages(as_json) as progress:
        made = device_report.collect(wanted, read_settings(), lambda stage: progress(stage, 0, 0))
    output.write_text(json.dumps(made, indent=1) + "\n")
    if as_json:
        emit({"path": str(output), "failed": made["failed"], **dict(device_report.summary(made))})
    else:
        table(("", str(output)), device_report.summary(made))
    if made["failed"]:
        raise typer.Exit(1)


@app.command()
@reported
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; default: only this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests use; may be given again. Default: the checkpoint's.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that requests must have; MEGAKERNEL_API_KEY is not seen by `ps`.")
    ] = None,
    device: DeviceName = "cpu",
    dtype: Dtype = "bf16",
    kv_dtype: KvDtype = None,
    max_slots: Annotated[int, typer.Option("--max-slots", "--max-num-seqs", help="Sequences at once.")] = 16,
    max_context: Annotated[
        int | None, typer.Option("--max-context", "--max-model-len", help="Tokens of prompt and output together.")
    ] = None,
    max_rows: Rows = None,
    kv_pages: Annotated[int | None, typer.Option(help="KV pages; default: every slot's full context.")] = None,
    share_prefixes: Annotated[bool, typer.Option(help="Sequences with a common prefix share its KV pages.")] = True,
    max_step_ms: Annotated[
        float | None, typer.Option(help="Longest that parts of prompts may make running sequences wait in a step.")
    ] = None,
    workers: Workers = None,
    policy: Policy = "balanced",
    seed: Annotated[int, typer.Option(help="Of a published shape's random weights.")] = 0,
    steps_per_launch: Annotated[int | None, typer.Option(help="Most steps of one launch.")] = None,
    tp: Tp = 1,
    tp_processes: TpProcesses = False,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait; one more is refused with 429.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request.")] = 8 << 20,
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests may go on after SIGTERM.")] = 30.0,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Web page that may call, besides pages of this machine; * is all.")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve a chat page at /; the kernel is one that can record its timeline.")
    ] = False,
    tool_call_parser: Annotated[
        str, typer.Option(help="Form of tool calls: auto (by the chat template), none, hermes, llama3, mistral.")
    ] = "auto",
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log what users send.")] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    serving, options = server_modules()
    settings = read_settings()
    keys = (*(api_key or ()), *((settings.api_key,) if settings.api_key else ()))
    chosen = options.ServeOptions(
        host=host, port=port, model_names=tuple(served_model_name or ()), api_keys=keys, max_queue=max_queue,
        max_body_bytes=max_body_bytes, request_timeout_s=request_timeout, drain_timeout_s=drain_timeout,
        allowed_origins=tuple(allowed_origin or ()), web=web, log_requests=log_requests,
        tool_call_parser=tool_call_parser,
    )  # fmt: skip

    def open_model() -> LLM:
        shown = options.WEB_STEPS if web and device.startswith("cpu") else None
        with Stages(False) as progress:
            return LLM(
                model, device=device, dtype=dtype, kv_dtype=kv_dtype, max_slots=max_slots, max_context=max_context,
                max_rows=max_rows, workers=workers, policy=policy, seed=seed, kv_pages=kv_pages,
                share_prefixes=share_prefixes, max_step_ms=max_step_ms, steps_per_launch=steps_per_launch or shown,
                tp=tp, tp_processes=tp_processes, settings=settings, progress=progress, trace=web,
            )  # fmt: skip

    serving.run(open_model, chosen, lambda text: errors.print(f"listening on {text}", highlight=False))


app.command("calibrate")(calibrate_command)


@app.command("fetch-demo")
@reported
def fetch_demo_command(as_json: Json = False) -> None:
    """Fetch the demo model (98 MB) into the cache folder; does nothing when it is there."""
    with Stages(as_json) as progress:
        path = fetch_demo(read_settings().cache, progress)
    if as_json:
        emit({"path": str(path), "bytes": path.stat().st_size})
    else:
        sys.stdout.write(f"{path}\n")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as e:
        raise InvalidRequest(f"--token-ids: expected integers such as 1,2,3, got {text!r}") from e


def _prompt(text: str | None, token_ids: str | None, chat: bool) -> Prompt:
    if token_ids is not None:
        if text is not None or chat:
            raise InvalidRequest("--token-ids: expected no text and no --chat beside it")
        return _ids(token_ids)
    if text is None or text == "-":
        if sys.stdin.isatty():
            raise InvalidRequest("prompt: expected a text, --token-ids, or text on standard input")
        return sys.stdin.read().rstrip("\n")
    return text


def _print_stream(llm: LLM, outputs: Iterator[Output], as_json: bool) -> None:
    last: Output | None = None
    for last in outputs:
        if as_json:
            line: dict[str, Any] = {"token_id": last.token_ids[-1] if last.token_ids else None, "text": last.delta}
            if last.logprobs:
                line |= {"logprob": last.logprobs[-1].logprob, "top": [list(t) for t in last.logprobs[-1].top]}
            emit(line)
        else:
            sys.stdout.write(last.delta if llm.tokenizer else f"{last.token_ids[-1]} ")
            sys.stdout.flush()
    assert last is not None and last.timings is not None
    llm.close()  # so that the counts below are final
    stats = llm.stats()
    if as_json:
        emit({
            "prompt_token_ids": last.prompt_token_ids, "token_ids": last.token_ids, "text": last.text,
            "finish_reason": last.finish_reason, "timings": asdict(last.timings), "steps": stats.steps,
            "launches": stats.launches, "launches_per_token": stats.launches_per_token,
        })  # fmt: skip
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    launches = "1 launch" if stats.launches == 1 else f"{stats.launches} launches"
    errors.print(
        f"{len(last.token_ids)} tokens, {last.timings.tokens_per_s:.1f} tokens/s, first token after "
        f"{last.timings.first_token_s:.3f} s, {launches}; {last.finish_reason}", highlight=False,
    )  # fmt: skip


def _print_profile(facts: dict[str, Any]) -> None:
    table(("", facts["program"]), [(k, v) for k, v in facts.items() if v is not None and k != "operators"])
    if facts["operators"]:
        table(
            ("operator", "records", "work, us a step", "waits for others", "waits for data"),
            [
                (r["operator"], r["records"], *(f"{r[k]:,.1f}" for k in ("work_us", "wait_us", "data_us")))
                for r in facts["operators"]
            ],
            "mean of a worker",
        )  # fmt: skip


def _print_simulation(said: Simulation, hops: float, entries: int, made: Plan, target: Target) -> None:
    schedule, ranks = made.schedule, made.lowered.ranks
    table(
        ("predicted step, not measured", f"{said.target}, {said.policy}, context {said.context}"),
        [
            ("figures", target.source), ("entries shown", entries),
            *([("each of", f"{ranks} devices, {len(made.lowered.exchanges)} exchanges a step"),
               ("between them", target.link_source)] if ranks > 1 else []),
            ("counters", f"{schedule.counters}, {len(schedule.relays)} of them of one of {target.groups} groups"),
            ("time", f"{said.makespan_us:,.1f} us"),
            ("share of hops", f"{hops:.0%}, {hops * said.makespan_us:,.1f} us"),
            ("floor (bytes at full rate)", f"{said.floor_us:,.1f} us, {said.efficiency:.0%} of the time"),
            ("bytes", size(said.stream_bytes)),
            ("idle, least and most", f"{min(said.idle_us):,.1f} and {max(said.idle_us):,.1f} us"),
            ("critical path", f"{len(said.critical_path)} entries"),
        ],
    )  # fmt: skip


def main() -> None:
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    app()
