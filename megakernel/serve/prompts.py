"""From request bodies to token ids and sampling parameters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from megakernel.checkpoint import GenerationDefaults, Tokenizer
from megakernel.errors import ApiError, CheckpointError, InvalidRequest
from megakernel.sampling import SamplingParams
from megakernel.serve.schema import ChatRequest, CompletionRequest, Message, Tool
from megakernel.serve.tools import described

SHORT = 4096  # characters that are encoded at once; a longer text goes to another thread
FEW = 64  # messages and tools that are rendered at once
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


def need_tokenizer(tokenizer: Tokenizer | None, field: str) -> Tokenizer:
    if tokenizer is None:
        raise ApiError(400, f"{field}: this model has no tokenizer; give token ids to /v1/completions", param=field)
    return tokenizer


async def encode(tokenizer: Tokenizer, text: str, add_special: bool = True) -> list[int]:
    """Token ids; a long text does not hold up other requests."""
    if len(text) <= SHORT:
        return tokenizer.encode(text, add_special)
    return await asyncio.to_thread(tokenizer.encode, text, add_special)


async def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    values: dict[str, Any],
    add_generation_prompt: bool = True,
) -> str:
    """The conversation by the checkpoint's template. Raises ApiError 400 when the template cannot."""
    if len(messages) + len(tools) <= FEW:
        return _chat_text(tokenizer, messages, tools, values, add_generation_prompt)
    return await asyncio.to_thread(_chat_text, tokenizer, messages, tools, values, add_generation_prompt)


def _chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    values: dict[str, Any],
    add_generation_prompt: bool,
) -> str:
    taken = sorted(TEMPLATE_NAMES & values.keys())
    if taken:
        raise ApiError(400, f"chat_template_kwargs: {taken[0]} cannot be set here", param="chat_template_kwargs")
    plain = [_message(m, f"messages.{i}") for i, m in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(plain, described(tools), add_generation_prompt, **values)
    except (InvalidRequest, CheckpointError) as e:
        said = str(e).split("\n", 1)[0]  # the other lines name files of this machine
        raise ApiError(400, f"messages: {said}", param="messages", code="chat_template_error") from e
    except Exception as e:  # a template is a program that the checkpoint brings: it can raise anything
        raise ApiError(
            400, f"messages: the chat template failed with {type(e).__name__}", param="messages",
            code="chat_template_error",
        ) from e  # fmt: skip


def _message(message: Message, where: str) -> dict[str, Any]:
    """As templates expect it: content a text, arguments of calls an object."""
    made = message.model_dump(exclude_none=True, exclude={"tool_calls", "refusal"})
    if isinstance(message.content, list):
        made["content"] = "\n".join(part.text for part in message.content)
    made.setdefault("content", "")
    if message.role == "developer":
        made["role"] = "system"
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id, "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{where}.tool_calls.{i}.function.arguments"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]  # fmt: skip
    return made


def _arguments(text: str, where: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"{where}: expected a JSON text", param=where) from e


async def completion_prompts(tokenizer: Tokenizer | None, body: CompletionRequest) -> list[list[int]]:
    """Ids of every prompt."""
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    if isinstance(given[0], int):
        return [list(given)]  # ids of one prompt
    out = []
    for item in given:
        if isinstance(item, str):
            out.append(await encode(need_tokenizer(tokenizer, "prompt"), item, body.add_special_tokens))
        else:
            out.append(list(item))
    return out


def room(ids: Sequence[int], asked: int | None, default: int | None, max_context: int, field: str) -> int:
    """How many tokens may follow a prompt. Raises ApiError 400 when prompt and `asked` do not fit the context."""
    left = max_context - len(ids)
    if not ids:
        raise ApiError(400, f"{field}: expected at least one token, got none", param=field)
    if left < (asked or 1):
        wanted = f"{len(ids)} tokens of {field} and {asked or 1} to generate"
        raise ApiError(
            400, f"this model's context is {max_context} tokens; {wanted} were asked for; shorten one of the two",
            param=field, code="context_length_exceeded",
        )  # fmt: skip
    return asked if asked is not None else left if default is None else min(default, left)


def sampling(
    body: ChatRequest | CompletionRequest, defaults: GenerationDefaults, max_tokens: int, choice: int
) -> SamplingParams:
    """Of choice number `choice`. What a request leaves out is the checkpoint's own value, or OpenAI's."""

    def first(*values: Any) -> Any:
        return next(v for v in values if v is not None)

    top_k = first(body.top_k, defaults.top_k, 0)
    logprobs = (body.top_logprobs or 0) if isinstance(body, ChatRequest) else body.logprobs
    if isinstance(body, ChatRequest) and not body.logprobs:
        logprobs = None
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(first(body.temperature, defaults.temperature, 1.0)),
        top_k=max(0, top_k),
        top_p=float(first(body.top_p, defaults.top_p, 1.0)),
        min_p=float(first(body.min_p, defaults.min_p, 0.0)),
        repetition_penalty=float(first(body.repetition_penalty, defaults.repetition_penalty, 1.0)),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=None if body.seed is None else (body.seed + choice) % (1 << 64),
        logprobs=logprobs,
        stop=body.stop or None,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logit_bias={int(number): bias for number, bias in body.logit_bias.items()},
    )
