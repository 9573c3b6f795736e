"""The chat page of `--web`: one file, which may load nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

FIXED_RULES = (
    "default-src 'none'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)


@dataclass(frozen=True)
class Page:
    html: bytes
    headers: dict[str, str]


def page() -> Page:
    """The page and a policy that lets only its own script and style run."""
    html = (Path(__file__).parent / "page.html").read_bytes()
    rules = list(FIXED_RULES)
    for tag in ("script", "style"):
        hashes = [
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)
        ]
        rules.append(f"{tag}-src {' '.join(hashes)}")
    return Page(html, {"content-security-policy": "; ".join(rules), "x-content-type-options": "nosniff"})
