"""llama.cpp on the same weights: a GGUF of the dequantised tensors, and a client of the server in `xllamacpp`.

The server runs in a process of its own (`python -m bench.llama_cpp FILE THREADS CONTEXT`) until its input ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.ending import run
from megakernel.bench import Run

PACKAGE = "xllamacpp"


def installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def write_dequantised(source: Path, dtype: str, output: Path) -> None:
    """Copy a GGUF with its matrices as `dtype` ("f32" or "bf16") and its vectors as f32, which llama.cpp wants."""
    import gguf

    kinds = {"f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = kinds[dtype] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Server:
    """A llama.cpp server; a context manager. Every answer is timed by its own clock, token by token."""

    def __init__(self, model: Path, threads: int, context: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.llama_cpp", str(model), str(threads), str(context)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.address = next((x.split()[1] for x in self._process.stdout if x.startswith("listening")), "")
        if not self.address:
            raise RuntimeError(f"the llama.cpp server did not start with {model}")

    def run(self, prompt: list[int], count: int) -> Run:
        """Greedy, no end token, the prompt computed afresh."""
        body = {
            "prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
            "stream": True, "timings_per_token": True, "return_tokens": True, "samplers": ["temperature"],
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        clock: list[float] = []
        tokens: list[int] = []
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                if event.get("tokens"):
                    tokens += event["tokens"]
                    clock.append(float(event["timings"]["predicted_ms"]) * 1e-3)
        return Run(tuple(b - a for a, b in pairwise(clock)), tuple(tokens[:count]))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(file: str, threads: int, context: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = context
    params.n_gpu_layers = 0
    params.n_parallel = 1
    params.port = 0
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.llama_cpp", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("threads", type=int)
    parser.add_argument("context", type=int)
    run(lambda: serve(**vars(parser.parse_args())))
