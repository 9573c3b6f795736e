"""What the server may be told. A value; the command line and tests make it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megakernel.errors import SettingsError

WEB_STEPS = 16  # of a launch on a processor, where --web and nothing else says: a recording begins and ends with one
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3", "mistral")


@dataclass(frozen=True)
class ServeOptions:
    """Raises SettingsError naming option, expected and got.

    max_queue: requests that may wait beside those in slots; one more is refused with 429.
    request_timeout_s: from arrival to the last byte; past it a request is cancelled.
    drain_timeout_s: how long running requests may go on after SIGTERM.
    allowed_origins: web pages that may call the server, besides pages of this machine; "*" is all.
    tool_call_parser: the form of tool calls; "auto": by the chat template, "none": they stay in the text.
    log_requests: write what users send to the log; off, nothing that a user typed is logged.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ()  # default: the checkpoint's
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 256
    max_choices: int = 16
    max_body_bytes: int = 8 << 20
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    web: bool = False
    tool_call_parser: str = "auto"
    log_requests: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535), ("max_queue", 0, 1 << 20), ("max_choices", 1, 128), ("max_body_bytes", 1024, 1 << 32),
            ("request_timeout_s", 0.001, 1e9), ("drain_timeout_s", 0, 1e9),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingsError(f"{name}: expected {low:,} to {high:,}, got {value}")
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            raise SettingsError(
                f"tool_call_parser: expected one of {', '.join(TOOL_CALL_PARSERS)}, got {self.tool_call_parser!r}"
            )
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise SettingsError("api_keys: expected ASCII texts without blanks around them, got one that is not")
