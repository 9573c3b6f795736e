"""Torch modules written by hand, as people write them, and their example inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-5, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.ones(size) - offset)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


def tables(length: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """[length, dim / 2]"""
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, theta: float = 10000.0) -> Tensor:
    cos, sin = (torch.cat((t, t), -1) for t in tables(x.shape[-2], x.shape[-1], theta))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rotate_pairs(x: Tensor, theta: float = 500.0) -> Tensor:
    cos, sin = tables(x.shape[-2], x.shape[-1], theta)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotate_part(x: Tensor) -> Tensor:
    part = x.shape[-1] // 2
    return torch.cat((rotate_halves(x[..., :part]), x[..., part:]), dim=-1)


def rotate_scaled(x: Tensor) -> Tensor:
    """Frequencies of no round base."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * torch.tensor([0.9 / (i + 1.7) for i in range(half)])
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """A decoder block. attend: "written" (softmax of q k^T), "sdpa", "window", "capped"."""

    def __init__(
        self, size: int = 64, heads: int = 4, kv_heads: int = 2, dim: int = 16, attend: str = "sdpa",
        rotate: Callable[[Tensor], Tensor] = rotate_halves, qk_norm: bool = False, offset: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.attend, self.rotate = heads, kv_heads, dim, attend, rotate
        self.first, self.second = RMSNorm(size, offset=offset), RMSNorm(size, offset=offset)
        self.q = nn.Linear(size, heads * dim, bias=False)
        self.k = nn.Linear(size, kv_heads * dim, bias=qk_norm)
        self.v = nn.Linear(size, kv_heads * dim, bias=False)
        self.o = nn.Linear(heads * dim, size, bias=False)
        self.norms = nn.ModuleList([RMSNorm(dim), RMSNorm(dim)] if qk_norm else [nn.Identity(), nn.Identity()])
        self.gate, self.up, self.down = nn.Linear(size, 90), nn.Linear(size, 90, bias=False), nn.Linear(90, size)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.first(x)
        q = self.norms[0](self.q(h).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.norms[1](self.k(h).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v(h).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = self.rotate(q), self.rotate(k)
        mixed = self.mix(q, k, v).transpose(1, 2).reshape(b, t, -1)
        x = x + self.o(mixed)
        h = self.second(x)
        return x + self.down(f.silu(self.gate(h)) * self.up(h))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t, group = q.shape[-2], self.heads // self.kv_heads
        if self.attend == "sdpa":
            return f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        k, v = k.repeat_interleave(group, dim=1), v[:, :, None].expand(-1, -1, group, -1, -1).reshape(q.shape)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.dim)
        if self.attend == "capped":
            scores = 3.0 * torch.tanh(scores / 3.0)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        if self.attend == "window":
            hidden = hidden | torch.ones(t, t, dtype=torch.bool).tril(-5)
            return f.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v
        added = torch.zeros(t, t).masked_fill(hidden, torch.finfo(torch.float32).min)
        return f.softmax(scores + added, dim=-1) @ v


class Learned(nn.Module):
    """GPT-2's kind of block: layer norms, one linear for q, k and v, GELU."""

    def __init__(self, size: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(size), nn.LayerNorm(size)])
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU("tanh"), nn.Dropout(0.1), nn.Linear(4 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        b, t, size = x.shape
        qkv = self.qkv(self.norms[0](x)).reshape(b, t, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(b, t, size))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    """Token ids to logits."""

    def __init__(self, vocab: int = 71, size: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocab, size), nn.Embedding(40, size)
        self.blocks = nn.ModuleList(Learned(size) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, vocab, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Gated(nn.Module):
    """One linear for gate and up, and a scaled residual."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(40, 2 * 56, bias=False), nn.Linear(56, 40, bias=False)
        self.scale = nn.Parameter(torch.rand(40) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).split(56, dim=-1)
        return x + 0.5 * (self.down(gate * torch.sigmoid(gate) * up) * self.scale)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(77, 1e-3), nn.RMSNorm(77, 1e-6), RMSNorm(77, offset=1.0)])

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = x + norm(x) * 0.25
        return x


class Two(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.a(x) + y
        return z, self.b(f.relu(self.a(x)))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "block": (Block, ((2, 5, 64),)),
    "block_written": (lambda: Block(attend="written", rotate=rotate_pairs, qk_norm=True), ((2, 6, 64),)),
    "block_window": (lambda: Block(attend="window", rotate=rotate_part, heads=6, dim=24, offset=1.0), ((1, 9, 64),)),
    "block_capped": (lambda: Block(attend="capped", rotate=rotate_scaled, kv_heads=4), ((2, 7, 64),)),
    "learned": (Learned, ((2, 4, 48),)),
    "mlp": (lambda: nn.Sequential(nn.Linear(33, 70), nn.ReLU(), nn.Linear(70, 11, bias=False)), ((3, 33),)),
    "gated": (Gated, ((3, 5, 40),)),
    "chain": (Chain, ((4, 77),)),
    "two": (Two, ((2, 24), (2, 40))),
}
"""Name -> a module and the shapes of its example inputs."""


def made(name: str) -> tuple[Any, tuple[Tensor, ...]]:
    """A module with every parameter drawn, and example inputs."""
    build, shapes = MODULES[name]
    module, generator = build().eval(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for label, p in module.named_parameters():
            spread = 0.2 if p.ndim < 2 else p.shape[1] ** -0.5
            drawn = torch.randn(p.shape, generator=generator) * spread
            p.copy_(drawn + (1 if p.ndim < 2 and "bias" not in label else 0))
    return module, tuple(torch.randn(shape, generator=generator) for shape in shapes)
