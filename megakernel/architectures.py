"""Which models there are: the files of models/, the published shapes, and random weights for any graph."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import math
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Protocol, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

import megakernel.models
from megakernel.errors import GraphError, LoweringError, UnknownArchitecture, UnsupportedConfig
from megakernel.graph import Graph

Array = npt.NDArray[Any]

SHARED_MODULES = frozenset({"blocks", "fields"})
"""Files of models/ that are no architecture."""

NUMPY_DTYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}

BLOCK_ELEMENTS = 1 << 20  # random weights are made in whole rows of about this many elements, each with its own seed


class Model(Protocol):
    """A file of models/."""

    ARCHITECTURES: tuple[str, ...]
    CHECKED: tuple[str, ...]  # keys of `megakernel.model_table.CHECKS`; a test holds them against what tests run

    @staticmethod
    def build(config: Mapping[str, Any]) -> Graph:
        """The graph of a config.json. Raises UnsupportedConfig."""
        ...


@lru_cache(maxsize=1)
def known_models() -> dict[str, Model]:
    """Architecture name -> its file. Raises GraphError for a file without ARCHITECTURES or build, or a name twice."""
    found: dict[str, Model] = {}
    for info in pkgutil.iter_modules(megakernel.models.__path__):
        if info.name in SHARED_MODULES:
            continue
        module = importlib.import_module(f"megakernel.models.{info.name}")
        names = getattr(module, "ARCHITECTURES", None)
        if not names or not callable(getattr(module, "build", None)):
            raise GraphError(f"models/{info.name}.py: expected ARCHITECTURES = (name, ...) and build(config)")
        for name in names:
            if name in found:
                raise GraphError(f"models/{info.name}.py: architecture {name} is claimed by another file too")
            found[name] = cast(Model, module)
    return dict(sorted(found.items()))


def find_model(config: Mapping[str, Any]) -> Model:
    """The file of models/ for a config's `architectures`. Raises UnknownArchitecture with the known ones."""
    models = known_models()
    names = config.get("architectures")
    names = [names] if isinstance(names, str) else names or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
        raise UnsupportedConfig(f"config, field architectures: expected a list of names, got {names!r:.80}")
    for name in names:
        if name in models:
            return models[name]
    got = ", ".join(map(str, names)) or f"none (model_type {config.get('model_type')!r})"
    near = [n for name in names for n in difflib.get_close_matches(str(name), models, 1)]
    hint = f"; nearest: {near[0]}{_difference(models[near[0]], near[0], config)}" if near else ""
    raise UnknownArchitecture(f"config names architecture {got}; known: {', '.join(models)}{hint}")


def _difference(model: Model, name: str, config: Mapping[str, Any]) -> str:
    """What keeps the config from being one of that architecture, in words."""
    try:
        model.build({**config, "architectures": [name]})
    except (UnsupportedConfig, GraphError) as e:
        return f", which it is not: {e}"
    return ", whose fields all of its own are; rename it there only if its code is the same"


@lru_cache(maxsize=1)
def _shapes() -> dict[str, dict[str, Any]]:
    text = (Path(__file__).parent / "data" / "archs.json").read_text(encoding="utf-8")
    return {name.lower(): config for name, config in json.loads(text).items()}


def shape_names() -> tuple[str, ...]:
    """The published shapes, lower case, such as "llama-3.2-1b"."""
    return tuple(_shapes())


def shape_config(name: str) -> dict[str, Any]:
    """The config of a published model by name in any case. Raises UnknownArchitecture with the known names."""
    return {key: value for key, value in _shape(name).items() if key != "params"}


def shape_parameters(name: str) -> int:
    """How many parameters the published model has, a tied head counted once."""
    return int(_shape(name)["params"])


def _shape(name: str) -> dict[str, Any]:
    shapes = _shapes()
    if name.lower() not in shapes:
        near = difflib.get_close_matches(name.lower(), shapes, 1)
        hint = f"; nearest: {near[0]}" if near else ""
        raise UnknownArchitecture(f"no published shape {name!r}; known: {', '.join(shapes)}{hint}")
    return dict(shapes[name.lower()])


def parameter_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor that the graph reads and its shape, in order of first use."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in graph.weights:
        assert weight.source is not None
        shapes[weight.source.tensor] = graph.tensor(weight.source.tensor).shape
    return shapes


class RandomWeights:
    """Seeded weights for a graph. The value of an element depends on seed, tensor name and place only.

    Matrices are normal with deviation 1 / sqrt(columns), so that activations keep their size; norm weights are near
    the value that leaves their input as it is; biases are small. Values are those of `dtype` ("f32", "bf16", "f16"),
    whatever dtype they are read as.
    """

    def __init__(self, graph: Graph, seed: int = 0, dtype: str = "f32") -> None:
        self._shapes = parameter_shapes(graph)
        self._centres = _norm_centres(graph)
        self._seed = seed
        if dtype not in NUMPY_DTYPES:
            raise LoweringError(f"unknown dtype {dtype!r}; known: {', '.join(NUMPY_DTYPES)}")
        self._dtype = np.dtype(NUMPY_DTYPES[dtype])

    def __call__(self, name: str) -> Array:
        """The whole tensor in the weights' own dtype."""
        return self._rows(name, 0, self._shape(name)[0])

    def read(self, name: str, dtype: str = "f32", rows: slice | None = None) -> Array:
        """Rows of a tensor as "f32", "bf16" or "f16"; the signature of a checkpoint's `read`."""
        first, last, step = (rows or slice(None)).indices(self._shape(name)[0])
        if step != 1:
            raise GraphError(f"tensor {name}: rows are read in steps of 1, got {step}")
        return self._rows(name, first, max(first, last)).astype(NUMPY_DTYPES[dtype], copy=False)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise GraphError(f"the graph has no weight {name!r}")
        return self._shapes[name]

    def _rows(self, name: str, first: int, last: int) -> Array:
        shape = self._shape(name)
        cols = shape[1] if len(shape) == 2 else 1
        step = max(1, BLOCK_ELEMENTS // cols)
        out = np.empty((last - first, cols), self._dtype)
        for block in range(first // step, -(-last // step)):
            begin, end = block * step, min(shape[0], (block + 1) * step)
            low, high = max(first, begin), min(last, end)
            values = self._block(name, block, (end - begin, cols))
            out[low - first : high - first] = values[low - begin : high - begin]
        return out if len(shape) == 2 else out[:, 0]

    def _block(self, name: str, block: int, size: tuple[int, int]) -> Array:
        digest = hashlib.sha256(f"{self._seed}:{name}:{block}".encode()).digest()
        count = size[0] * size[1]
        bits = np.random.SFC64(int.from_bytes(digest[:16], "little")).random_raw(-(-count // 4))
        index = np.asarray(bits, dtype="<u8").view("<u2")[:count]
        if len(self._shapes[name]) == 2:
            table = _quantiles(1 / math.sqrt(size[1]), 0.0, self._dtype)
        else:
            table = _quantiles(0.05, self._centres.get(name, 0.0), self._dtype)
        return np.take(table, index, mode="clip").reshape(size)


@lru_cache(maxsize=32)
def _quantiles(deviation: float, centre: float, dtype: np.dtype[Any]) -> Array:
    """The normal distribution as 65536 equally likely values: 16 random bits pick one, which is fast."""
    normal = NormalDist(centre, deviation)
    return np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)]).astype(dtype)


def _norm_centres(graph: Graph) -> dict[str, float]:
    """Norm weight -> the value that leaves its input as it is: 1 minus the norm's offset."""
    return {
        node.inputs[1]: 1.0 - float(node.attrs.get("offset", 0.0))
        for node in graph.nodes
        if node.op in ("rms_norm", "layer_norm")
    }


def random_weights(graph: Graph, seed: int = 0, dtype: str = "f32") -> RandomWeights:
    """Seeded weights of every tensor of the graph: a callable by name, and `read` for parts."""
    return RandomWeights(graph, seed, dtype)
