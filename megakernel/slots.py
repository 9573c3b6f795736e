"""Which request holds which slot of the kernel. Only the engine's driver thread uses this.

A request gets a slot and every page it can need; the kernel hears of it through the mailbox; its events come back
through the token ring, and with the last of them slot and pages are free again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import InvalidRequest, MegakernelError
from megakernel.kv_cache import Lease, PageAllocator
from megakernel.kv_tensors import Kv, read_kv
from megakernel.request import Request, Token
from megakernel.runtime import Runtime
from megakernel.tasks.record import MAX_STOPS, SLOT, CommandKind, EventKind, Finish, SlotStatus

REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CANCELLED: "cancelled"}


@dataclass
class Occupant:
    """A request in a slot, until the kernel says that the slot is free."""

    request: Request
    lease: Lease
    made: list[int] = field(default_factory=list)  # tokens that the kernel gave out, also those nobody wants any more
    known: int = 0  # tokens at the start of the sequence whose keys and values are in its pages
    cancel_posted: bool = False
    gate: int = 0  # of a request with a processor: the position that the next OPEN lets it sample; 0 when posted

    def computed(self) -> tuple[int, ...]:
        """The tokens that are in its pages."""
        return (*self.request.prompt_ids, *self.made)[: self.known]


class Slots:
    """The slots of one runtime and the pages of their requests. `tokens`: how many the kernel gave out."""

    def __init__(self, runtime: Runtime, pages: PageAllocator) -> None:
        self.tokens = 0
        self._runtime = runtime
        self._pages = pages
        self._held: list[Occupant | None] = [None] * runtime.manifest.max_slots

    def __bool__(self) -> bool:
        return any(self._held)

    def __iter__(self) -> Iterator[Occupant]:
        return (occupant for occupant in self._held if occupant)

    def free(self) -> int | None:
        """A slot for the next request. Where the kernel computes prompts in slot order, one behind every prompt that it
        has not computed yet: else a sequence in a late slot could be overtaken for ever."""
        first = 0
        if not self._runtime.manifest.paced:
            prompts = [i for i, o in enumerate(self._held) if o and not o.made and not o.request.done]
            first = max(prompts, default=-1) + 1
        return next((i for i in range(first, len(self._held)) if self._held[i] is None), None)

    def start(self, request: Request, slot: int) -> bool:
        """Give `slot` to a request and tell the kernel; False when the mailbox is full."""
        runtime = self._runtime
        bias = request.next_bias(runtime.manifest.vocab) if request.biased else None
        if request.done:  # by its processor
            return True
        lease = self._pages.reserve(request.number, request.limit, request.reusable)
        if lease.copy is not None:
            runtime.copy_page(*lease.copy)
        runtime.set_prompt(slot, request.prompt_ids)
        runtime.set_pages(slot, lease.pages)
        if request.embeddings is not None:
            runtime.set_inputs(slot, [at for at, i in enumerate(request.prompt_ids) if i < 0], request.embeddings)
        if bias is not None:
            runtime.set_bias(slot, bias)
        state = self._first_state(request, lease.reused, bias is not None)
        command = {"kind": CommandKind.ADMIT, "slot": slot, "request": request.number, "state": state}
        if not runtime.post(command):
            self._pages.release(lease, request.prompt_ids[: lease.reused])
            return False
        self._held[slot] = Occupant(request, lease, known=lease.reused)
        request.admitted(slot)
        return True

    @staticmethod
    def _first_state(request: Request, position: int, biased: bool) -> npt.NDArray[Any]:
        stops = request.stops[:MAX_STOPS]
        state = np.zeros((), SLOT.dtype)
        state["status"], state["request"] = SlotStatus.ACTIVE, request.number
        state["position"], state["prompt_length"] = position, len(request.prompt_ids)
        state["limit"] = request.limit
        state["stop_count"], state["stop"][: len(stops)] = len(stops), stops
        for name, value in request.params.fields().items():
            state["sampling"][name] = value
        if biased:
            state["sampling"]["biased"] = state["sampling"]["logprobs"] = 1  # no short cut to the largest logit
            state["gate"] = len(request.prompt_ids) if request.processor else 0
        return state

    def post_changes(self) -> None:
        """Tell the kernel about gates, and about requests that ended on the host."""
        for slot, occupant in enumerate(self._held):
            if occupant and occupant.request.done and not occupant.cancel_posted:
                command = {"kind": CommandKind.CANCEL, "slot": slot, "request": occupant.request.number}
                occupant.cancel_posted = self._runtime.post(command)
            elif occupant and occupant.gate and not occupant.request.done:
                state = np.zeros((), SLOT.dtype)
                state["gate"] = occupant.gate
                command = {"kind": CommandKind.OPEN, "slot": slot, "request": occupant.request.number}
                if self._runtime.post({**command, "state": state}):
                    occupant.gate = 0

    def dispatch(self) -> None:
        """Hand every new event of the ring to its request; free the slots that ended."""
        for event in self._runtime.events():
            slot = int(event["slot"])
            occupant = self._held[slot] if slot < len(self._held) else None
            if occupant is None or occupant.request.number != int(event["request"]):
                raise MegakernelError(f"the kernel sent an event of slot {slot}, request {event['request']}: unknown")
            finish = Finish(int(event["finish"]))
            retired = int(event["kind"]) == EventKind.RETIRED
            occupant.known = int(event["position"])  # its step has ended, so what comes before is in the pages
            if retired:
                occupant.request.end("cancelled")
            else:
                self._take_token(slot, occupant, event, finish)
            if retired or finish is not Finish.NONE:
                self._pages.release(occupant.lease, occupant.computed())
                self._held[slot] = None

    def _take_token(self, slot: int, occupant: Occupant, event: Any, finish: Finish) -> None:
        request = occupant.request
        self.tokens += 1
        if not occupant.made:
            occupant.lease = self._pages.publish(occupant.lease, request.prompt_ids)
        occupant.made.append(int(event["token"]))
        self._deliver(occupant, event, finish)
        if request.processor is not None and not request.done:
            self._open_gate(occupant, int(event["position"]) + 1)

    def _open_gate(self, occupant: Occupant, position: int) -> None:
        """Let a gated slot sample its next token, with the bias that the processor wants there."""
        bias = occupant.request.next_bias(self._runtime.manifest.vocab)
        if bias is not None and not occupant.request.done:
            assert occupant.request.slot is not None
            self._runtime.set_bias(occupant.request.slot, bias)
            occupant.gate = position  # posted by post_changes

    def _deliver(self, occupant: Occupant, event: Any, finish: Finish) -> None:
        request, token = occupant.request, int(event["token"])
        reason = REASONS.get(finish)
        if reason is None and token in request.stops[MAX_STOPS:]:
            reason = "stop"  # the slot is retired by the next post_changes
        wanted = request.params.logprobs
        top: tuple[tuple[int, float], ...] = ()
        if wanted:
            count = int(event["top_count"])
            top = tuple(zip(event["top_token"][:count].tolist(), event["top_logprob"][:count].tolist()))
        logprob = float(event["logprob"]) if wanted is not None else None
        hidden = self._hidden(request, event) if request.wants_hidden else None
        if reason is not None and request.keeps_kv and not request.done:
            request.kv = self._read_kv(occupant)
        request.put(Token(token, logprob, top, int(event["time_ns"]), hidden), reason)

    def _hidden(self, request: Request, event: Any) -> npt.NDArray[np.float32]:
        """What the head read for the token of an event; with the first, that of the whole prompt."""
        slot, position = int(event["slot"]), int(event["position"])
        if request.prompt_hidden is None:
            request.prompt_hidden = self._runtime.hidden(slot, 0, len(request.prompt_ids))
        return self._runtime.hidden(slot, position - 1, position).reshape(-1)

    def kv(self, which: int | Request) -> Kv:
        """See `Engine.kv`."""
        slot = which.slot if isinstance(which, Request) else which
        known = isinstance(slot, Integral) and 0 <= slot < len(self._held)
        occupant = self._held[int(slot)] if slot is not None and known else None
        if isinstance(which, Request):
            if occupant is None or occupant.request is not which:
                raise InvalidRequest(
                    f"kv: request {which.number} holds no slot: it waits for one, or has ended and given its pages "
                    "back; ask while it runs, or submit it with keep_kv=True and read its `kv` at the end"
                )
        elif occupant is None:
            raise InvalidRequest(f"kv: no request holds slot {slot!r:.40}; there are slots 0 to {len(self._held) - 1}")
        return self._read_kv(occupant)

    def _read_kv(self, occupant: Occupant) -> Kv:
        return read_kv(self._runtime, occupant.lease.pages, occupant.computed())

    def fail(self, error: BaseException) -> None:
        """Fail the requests in slots; they hold these until the kernel retires them."""
        for occupant in self:
            occupant.request.fail(error)

    def clear(self, error: BaseException) -> None:
        """After a fault: fail the requests and forget slots, pages and prefixes."""
        self.fail(error)
        self._held = [None] * len(self._held)
        self._pages.release_all()
