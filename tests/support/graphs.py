"""Graphs of the tests, the demo and the benchmarks: real ones from files, and generated ones.

Cora comes with the tests. The other real graphs are read from ``../shared/data`` beside the
repository, or from the folder that ``GNNC_DATA`` names.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "tests" / "data"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a published graph, and the skew of its degrees.

    Attributes:
        nodes: number of nodes.
        edges: number of directed edges.
        features: width of a node's features.
        classes: number of classes.
        skew: s of ``dst = perm[floor(N * u^s)]``, fitted to the largest degree.
    """

    nodes: int
    edges: int
    features: int
    classes: int
    skew: float


SHAPES = {
    "cora": Shape(2_708, 10_556, 1_433, 7, 1.5),
    "pubmed": Shape(19_717, 88_648, 500, 3, 1.7),
    "arxiv": Shape(169_343, 2_332_486, 128, 40, 2.32),
    "reddit": Shape(232_965, 114_615_892, 602, 41, 1.44),
    "products": Shape(2_449_029, 123_718_280, 100, 47, 1.66),
}
_BLOCK = 2048
_LOCAL = 0.8


def data_folder() -> Path | None:
    """Return the folder of the real graphs, or None where there is none."""
    candidates = [os.environ.get("GNNC_DATA"), ROOT.parent / "shared" / "data"]
    return next((Path(c) for c in candidates if c and (Path(c) / "cora.npz").exists()), None)


def find(name: str) -> Path | None:
    """Return the file of the real graph ``name``, or None where it is not on this machine."""
    folders = [BUNDLED, data_folder()]
    paths = [folder / f"{name}.npz" for folder in folders if folder is not None]
    return next((path for path in paths if path.exists()), None)


def load(name: str, *, standardize: bool = False) -> dict[str, Tensor | int]:
    """Return the arrays of the real graph ``name`` as tensors; features are dense float32.

    Args:
        name: file name without ending, such as ``cora``.
        standardize: give each feature column mean 0 and variance 1; else rows are divided by
            their sum, the usual recipe for sparse word features.

    Raises:
        FileNotFoundError: the graph is not on this machine; the message says where to put it.
    """
    path = find(name)
    if path is None:
        raise FileNotFoundError(f"{name}.npz: put it into ../shared/data or set GNNC_DATA to its folder")
    arrays = dict(np.load(path, allow_pickle=False))
    data: dict[str, Tensor | int] = {
        key: torch.from_numpy(value)
        for key, value in arrays.items()
        if not key.startswith("x_") and value.ndim
    }
    data |= {key: int(value) for key, value in arrays.items() if value.ndim == 0}
    data["edge_index"] = torch.from_numpy(arrays["edge_index"]).long()
    if "x_indptr" in arrays:
        data["x"] = _scaled(_dense(arrays), standardize)
    return data


def _dense(arrays: dict[str, np.ndarray]) -> Tensor:
    x = np.zeros(arrays["x_shape"], np.float32)
    rows = np.repeat(np.arange(len(x)), np.diff(arrays["x_indptr"]))
    x[rows, arrays["x_indices"]] = arrays["x_data"]
    return torch.from_numpy(x)


def _scaled(x: Tensor, standardize: bool) -> Tensor:
    if standardize:
        return (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    return x / x.sum(1, keepdim=True).clamp(min=1e-12)


def generate(shape: Shape | str, *, seed: int = 0, symmetrize: bool = False, device: str = "cpu") -> Tensor:
    """Return the ``edge_index`` (int64 ``[2, E]``) of a graph with skewed degrees and locality.

    Destinations follow ``perm[floor(N * u^s)]`` with u uniform; a source is, with probability 0.8,
    a random node of its destination's block of 2048 consecutive ids, else any node.

    Args:
        shape: sizes, or a key of ``SHAPES``.
        seed: of the generator.
        symmetrize: draw half of the edges and add each one's reverse.
        device: where it is drawn; each kind of device has random numbers of its own.
    """
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    generator = torch.Generator(device).manual_seed(seed)
    count = shape.edges // 2 if symmetrize else shape.edges

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    perm = torch.randperm(shape.nodes, generator=generator, device=device)
    dst = perm[(uniform() ** shape.skew * shape.nodes).long().clamp(max=shape.nodes - 1)]
    block = dst // _BLOCK * _BLOCK
    size = (shape.nodes - block).clamp(max=_BLOCK)
    near = block + (uniform() * size).long()
    far = (uniform() * shape.nodes).long().clamp(max=shape.nodes - 1)
    src = torch.where(uniform() < _LOCAL, near, far)
    if symmetrize:
        src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    return torch.stack([src, dst])
