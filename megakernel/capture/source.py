"""What an exported operator is called and which line of the module it comes from."""

from __future__ import annotations

import torch


def source_line(node: torch.fx.Node) -> str:
    """Where an exported node comes from, and the line's text: the innermost frame outside torch."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.lstrip().startswith("File ")]
    if not frames:
        return "an unknown line"
    own = [i for i in frames if "/torch/" not in lines[i]] or frames
    text = lines[own[-1] + 1].strip() if own[-1] + 1 < len(lines) else ""
    return f"{lines[own[-1]].strip()}: {text}"


def operator_name(node: torch.fx.Node) -> str:
    """`aten.add.Tensor` -> "add"."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def title(node: torch.fx.Node) -> str:
    """`aten.add.Tensor`."""
    return (
        str(node.target) if not callable(node.target) or hasattr(node.target, "overloadpacket") else operator_name(node)
    )
