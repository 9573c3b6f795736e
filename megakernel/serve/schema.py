"""What each endpoint takes, as pydantic models: the OpenAPI description is made of them.

A field that is not here is refused by name: one that OpenAI or vLLM know (UNSUPPORTED) with the reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from megakernel.tasks.record import MAX_TOP

UNSUPPORTED = {
    "audio": "this server makes text only",
    "function_call": "use tools and tool_choice",
    "functions": "use tools and tool_choice",
    "guided_choice": "use response_format",
    "guided_grammar": "use response_format",
    "guided_json": "use response_format",
    "guided_regex": "use response_format",
    "structured_outputs": "use response_format",
    "chat_template": "the checkpoint's own template is used",
    "documents": "put them into the messages",
    "cache_salt": "not implemented",
    "continue_final_message": "not implemented; give the text to /v1/completions",
    "logits_processors": "only in Python: a processor of LLM.generate",
    "min_tokens_to_keep": "not implemented",
    "reasoning": "use chat_template_kwargs",
    "return_tokens_as_token_ids": "use return_token_ids",
    "structural_tag": "use tools or response_format",
    "min_tokens": "not implemented",
    "bad_words": "not implemented",
    "allowed_token_ids": "not implemented",
    "length_penalty": "there is no beam search",
    "use_beam_search": "there is no beam search",
    "prediction": "not implemented",
    "priority": "requests start in the order in which they came",
    "prompt_logprobs": "only logits of generated tokens leave the kernel",
    "prompt_embeds": "only text and token ids are taken",
    "reasoning_effort": "use chat_template_kwargs",
    "suffix": "not implemented",
    "truncate_prompt_tokens": "shorten the prompt",
    "verbosity": "not implemented",
    "web_search_options": "this server searches nothing",
}
IGNORED = "Accepted and not used: it changes no token."
# What each field of more than one form may be: the description, and what a value of no form is told.
STOP = "a text, or a list of at most 16 texts"
CONTENT = "a text, or a list of parts {type: text, text: ...}"
TOOL_CHOICE = "none, auto, required, or {type: function, function: {name: ...}}"
PROMPT = "a text, a list of texts, a list of token ids, or a list of such lists"
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(max_length=1 << 24)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
MOST_FIELDS = 256  # of one object
# fail_fast: a list is checked until its first wrong item. To tell of millions would hold up other requests.
MOST_PROMPTS = 65536
MOST_BIASES = 16384


def _few_biases(data: Any) -> Any:
    """Counted first: every wrong one would be told."""
    if isinstance(data, dict) and len(data) > MOST_BIASES:
        raise ValueError(f"expected at most {MOST_BIASES} tokens, got {len(data)}")
    return data


class Body(BaseModel):
    """Types are exact (no "1" for 1), unknown fields are refused, null means the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MOST_FIELDS:
            raise ValueError(f"expected at most {MOST_FIELDS} fields, got {len(data)}")
        return {k: v for k, v in data.items() if v is not None}


class StreamOptions(Body):
    include_usage: bool = False


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Text = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text


class ToolCall(Body):
    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    """`content` may be left out of an assistant's message that has tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)] | None, Field(description=CONTENT)
    ] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: expected a text or text parts")
        return self


class NamedSchema(Body):
    name: Annotated[str, Field(max_length=256)] = ""
    description: Text = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = False


class ResponseFormat(Body):
    """`grammar` is llguidance's dialect of Lark."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: NamedSchema | None = None
    grammar: Text | None = None
    regex: Text | None = None


class Sampled(Body):
    """What both kinds of completion share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Probability | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Annotated[
        Text | Annotated[list[Annotated[Text, Field(min_length=1)]], Field(fail_fast=True, max_length=16)] | None,
        Field(description=STOP),
    ] = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] = []
    include_stop_str_in_output: Literal[False] = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    skip_special_tokens: Literal[True] = True
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100.0, le=100.0)]],
        Field(max_length=MOST_BIASES),
        BeforeValidator(_few_biases),
    ] = {}
    response_format: ResponseFormat | None = None
    user: Annotated[str, Field(max_length=4096, description=IGNORED)] | None = None

    @model_validator(mode="after")
    def options_only_when_streaming(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected only with stream true")
        return self


class ChatRequest(Sampled):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=65536)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=1024)] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | None, Field(description=TOOL_CHOICE)] = (
        None
    )
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)] | None = None
    metadata: Annotated[dict[str, Any], Field(description=IGNORED)] | None = None
    store: Annotated[bool, Field(description=IGNORED)] | None = None
    service_tier: Annotated[str, Field(max_length=64, description=IGNORED)] | None = None
    safety_identifier: Annotated[str, Field(max_length=4096, description=IGNORED)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=4096, description=IGNORED)] | None = None

    @model_validator(mode="after")
    def top_only_with_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected only with logprobs true")
        return self


Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


class CompletionRequest(Sampled):
    """/v1/completions."""

    prompt: Annotated[
        Text
        | Ids
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)],
        Field(description=PROMPT),
    ]
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def possible(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of: expected the same as n; choices are not ranked here")
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs: not supported with echo; only logits of generated tokens leave the kernel")
        return self


class TokenizeRequest(Body):
    """/tokenize: a prompt, or messages by the chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=65536)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=1024)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @model_validator(mode="after")
    def one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: expected either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """/detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 22)]


REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
