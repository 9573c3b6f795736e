"""Decode with torch and NCCL on several GPUs: one rank of it. Started by bench.tp.

A plain tensor-parallel decoder (heads and MLP columns split, two all-reduces a layer, the vocabulary split and joined),
bf16, batch 1, static cache, a whole step in a CUDA graph with its NCCL calls. Weights and cache are random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

from bench import ending

WARM = 10


class Decoder:
    """One rank's part of a Llama or Qwen3 shape."""

    def __init__(self, c: dict[str, Any], rank: int, world: int, room: int, device: str = "cuda") -> None:
        import torch

        self.torch, self.world = torch, world
        self.dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        self.heads, self.kv = c["num_attention_heads"] // world, c["num_key_value_heads"] // world
        hidden, inner, vocab = c["hidden_size"], c["intermediate_size"] // world, c["vocab_size"] // world
        self.eps, self.qk_norm = c["rms_norm_eps"], c["model_type"] == "qwen3"

        def matrix(n: int, k: int) -> Any:
            return torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0, 0.02)

        def ones(n: int) -> Any:
            return torch.ones(n, dtype=torch.bfloat16, device=device)

        torch.manual_seed(0)
        self.table = matrix(c["vocab_size"], hidden)
        torch.manual_seed(1 + rank)
        width = (self.heads + 2 * self.kv) * self.dim
        self.layers = [
            (ones(hidden), matrix(width, hidden), matrix(hidden, self.heads * self.dim), ones(hidden),
             matrix(2 * inner, hidden), matrix(hidden, inner), ones(self.dim), ones(self.dim))
            for _ in range(c["num_hidden_layers"])
        ]  # fmt: skip
        self.norm, self.head = ones(hidden), matrix(vocab, hidden)
        shape = (c["num_hidden_layers"], 2, 1, self.kv, room, self.dim)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.token = torch.ones(1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        angle = torch.arange(room, device=device)[:, None] * 10000.0 ** (
            -torch.arange(0, self.dim, 2, device=device) / self.dim
        )
        self.cos, self.sin = (f(torch.cat([angle, angle], 1)).to(torch.bfloat16) for f in (torch.cos, torch.sin))
        self.places = torch.arange(room, device=device)
        self.parts = [torch.empty(1, vocab, dtype=torch.bfloat16, device=device) for _ in range(world)]

    def rms(self, x: Any, gamma: Any) -> Any:
        return self.torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, self.eps)

    def rotated(self, x: Any) -> Any:
        a, b = x.chunk(2, -1)
        turned = self.torch.cat([-b, a], -1)
        return x * self.cos[self.position] + turned * self.sin[self.position]

    def step(self) -> None:
        torch, dist, f = self.torch, self.torch.distributed, self.torch.nn.functional
        x = self.table[self.token]
        seen = (self.places <= self.position)[None, None, None, :]
        for layer, (g1, qkv, o, g2, up, down, gq, gk) in enumerate(self.layers):
            q, k, v = (self.rms(x, g1) @ qkv.T).view(1, -1, self.dim).split([self.heads, self.kv, self.kv], 1)
            if self.qk_norm:
                q, k = self.rms(q, gq), self.rms(k, gk)
            keys, values = self.cache[layer]
            keys.index_copy_(2, self.position, self.rotated(k).view(1, self.kv, 1, self.dim))
            values.index_copy_(2, self.position, v.view(1, self.kv, 1, self.dim))
            query = self.rotated(q).view(1, self.heads, 1, self.dim)
            mixed = f.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
            part = mixed.reshape(1, -1) @ o.T
            dist.all_reduce(part)
            x = x + part
            gate, other = (self.rms(x, g2) @ up.T).chunk(2, -1)
            part = (f.silu(gate) * other) @ down.T
            dist.all_reduce(part)
            x = x + part
        dist.all_gather(self.parts, self.rms(x, self.norm) @ self.head.T)
        self.token.copy_(torch.cat(self.parts, -1).argmax(-1))
        self.position.add_(1)


def main(shape: str, world: int, context: int, steps: int, store: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from megakernel.architectures import shape_config

    ending.nvidia_gpus(world, "bench.tp_torch")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    with torch.inference_mode():
        decoder = Decoder(dict(shape_config(shape)), rank, world, -(-(context + steps + 64) // 64) * 64)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                decoder.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.step()
        decoder.position.fill_(context)
        marks = []
        for _ in range(steps + WARM):
            graph.replay()
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            marks.append(mark)
        torch.cuda.synchronize()
        gaps = [a.elapsed_time(b) * 1e3 for a, b in zip(marks[WARM:], marks[WARM + 1 :])]
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        row = {"shape": shape, "tp": world, "context": context, "us": statistics.median(gaps), "least_us": min(gaps),
               "steps": len(gaps),
               "program": f"torch {torch.__version__}, NCCL {version}"}  # fmt: skip
        print(json.dumps(row), flush=True)
    os._exit(0)  # a barrier or the end of the process group hangs while a graph with NCCL's kernels is alive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.tp_torch", description=__doc__)
    for name in ("shape", "world", "context", "steps", "store", "rank"):
        parser.add_argument(name, type=str if name in ("shape", "store") else int)
    ending.run(lambda: main(**vars(parser.parse_args())))
