"""Numbers of a running program for checking: logits of a sequence whose tokens the host decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megakernel.builder.program import Manifest
from megakernel.errors import CapacityError
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams, whole_ids
from megakernel.tasks.record import SAMPLING, SLOT, CommandKind, SlotStatus

FORCED = 0xFFFFFFFF  # request number of the sequence; those of the engine are smaller


def forced_logits(runtime: Runtime, token_ids: Sequence[int], start: int = 0) -> npt.NDArray[np.float32]:
    """Logits after token `start` and each one after it, [len(token_ids) - start, vocab]; no request may run.

    The first `start` + 1 tokens are a prompt; then each launch computes one more token in place of the sampled one."""
    m = runtime.manifest
    ids = check_forced(m, token_ids, start)
    _admit(runtime, ids, start)
    out = np.empty((len(ids) - start, m.vocab), np.float32)
    runtime.launch(-(-(start + 1) // m.max_rows))
    for at in range(start, len(ids)):
        if at > start:
            runtime.force_token(0, ids[at])
            runtime.launch(1)
        runtime.finish()
        runtime.events()
        out[at - start] = runtime.tensor("logits")[0]
    return out


def check_forced(m: Manifest, token_ids: Sequence[int], start: int) -> list[int]:
    """The ids as `forced_logits` takes them. Raises CapacityError, InvalidRequest."""
    ids = whole_ids(token_ids, m.vocab, "logits")
    whole = isinstance(start, (int, np.integer)) and not isinstance(start, bool)
    if not whole or not 0 <= start < len(ids) or len(ids) >= m.max_context:
        raise CapacityError(
            f"logits: expected 0 <= start < tokens < {m.max_context} (max_context), got start {start} of {len(ids)}"
        )
    return ids


def _admit(runtime: Runtime, ids: list[int], start: int) -> None:
    runtime.set_pages(0, range(-(-len(ids) // runtime.manifest.page_tokens)))
    runtime.set_prompt(0, ids[: start + 1])
    greedy = np.frombuffer(SAMPLING.pack(SamplingParams().fields(seed=0)), SAMPLING.dtype)[0]
    state = {
        "status": SlotStatus.ACTIVE, "request": FORCED, "prompt_length": start + 1, "limit": len(ids) + 1,
        "sampling": greedy,
    }  # fmt: skip
    packed = np.frombuffer(SLOT.pack(state), SLOT.dtype)[0]
    runtime.post({"kind": CommandKind.ADMIT, "slot": 0, "request": FORCED, "state": packed})
