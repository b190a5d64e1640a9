"""Diagnosis of a failed capture: the line of the model that failed, and what its author can do."""

import linecache
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch

from gnnc.torch_private import GuardOnDataDependentSymNode

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_WAYS_OUT = (
    (
        (GuardOnDataDependentSymNode,),
        "the model decides by the values of a tensor: pass the value as an argument (a pooling "
        "takes size=, a layer num_nodes=), or compute it before the model",
    ),
    (
        (NotImplementedError,),
        "compile the part of the model that does not need this, or replace this step",
    ),
)
_ESCAPED = "fake tensor in the exported program"
"""Message of torch about a tensor of ``torch.func`` or ``torch.autograd.grad`` that became a constant."""
_TRANSFORM = re.compile(rf"\bvmap\b|functorch|{_ESCAPED}")
"""Message of torch where it cannot trace ``torch.vmap`` and such."""
_OUTSIDE = (
    (
        re.compile(r"unhashable type: .*Sym(Int|Float|Bool)"),
        "forward hashes values of a tensor, or looks them up in a dict or set of Python",
        "number the values with torch.unique, or run this layer in eager, before the compiled model",
    ),
    (
        re.compile(r"\.numpy\(\) is not supported for tensor subclasses"),
        "forward computes with numpy",
        "write this step with torch ops, or run it before the model",
    ),
    (
        re.compile("Cannot access data pointer of Tensor"),
        "forward reads the memory of a tensor (data_ptr, DLPack, a copy, or an extension in C++)",
        "write this step with torch ops, or register it as one with torch.library",
    ),
    (
        re.compile(r"(could not convert string to|invalid literal for).*'[<(\[]?(FakeTensor|[suz]\w*\d)"),
        "forward reads a number from what a tensor or a size prints as",
        "compute it with torch ops, or before the model",
    ),
    (
        re.compile(r"\.(apply_|map_|map2_) is not supported for tensor subclasses"),
        "forward calls a Python function for each element of a tensor",
        "write this step with torch ops, or run it before the model",
    ),
)
"""Messages about values that leave torch, each with our reason and the way out."""
_WAYS_AROUND = {
    "assert_sorted_index": "this aggregation (lstm, gru, or one that sorts) runs over padded sequences of "
    "neighbors; use mean, max, sum, softmax, std or median, or compile the layers around it",
    "to_dense_batch": "give to_dense_batch its batch_size and max_num_nodes",
    "to_dense_adj": "give to_dense_adj its batch_size and max_num_nodes, or keep the graph sparse",
    "negative_sampling": "sample negative edges before the model, and pass them as an argument",
    "coalesce": "coalesce the edges (to_undirected, coalesce, adjacency products) before the model",
}
_DEFAULT_WAY_OUT = (
    "check that the model runs eagerly on these arguments; compile the submodules around this "
    "line where torch.export cannot trace it"
)


def diagnosis(model: torch.nn.Module, error: BaseException, sparse: Sequence[torch.layout] = ()) -> str:
    """Return the message of a CaptureError: the model, its line, what went wrong, the way out.

    ``sparse`` lists the layouts of sparse adjacencies among the arguments.
    """
    root = _root(error)
    where = _location(error, root)
    reason = _reason(root)
    place = f" at {where}" if where else ""
    way_out = _sparse_way_out(sparse[0]) if sparse else _way_out(root)
    return f"[{type(model).__name__}] cannot be captured{place}: {reason}. Way out: {way_out}"


def _outside(error: BaseException) -> tuple[str, str] | None:
    """Return our reason and the way out for an error about values that leave torch; None for another."""
    return next((ours for pattern, *ours in _OUTSIDE if pattern.search(str(error))), None)


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or gnnc's own words for one that asks to report a bug of torch."""
    if (outside := _outside(error)) is not None:
        return outside[0]
    if _ESCAPED in str(error):
        return "a tensor that torch.func or torch.autograd.grad makes within forward escapes the trace"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _sparse_way_out(layout: torch.layout) -> str:
    name = str(layout).removeprefix("torch.")
    csr = "" if layout == torch.sparse_csr else ", or the adjacency's to_sparse_csr()"
    return f"pass edge_index (and edge weights) instead of the {name} adjacency{csr}"


def _root(error: BaseException) -> BaseException:
    """Return the first error of the chain, if a handler in between failed on values too.

    PyG checks an index again when an aggregation fails: that check is not what the user should read.
    """
    found, current = error, error.__cause__ or error.__context__
    while current is not None:
        if isinstance(current, GuardOnDataDependentSymNode) and _foreign_frames(current):
            found = current
        current = current.__cause__ or current.__context__
    return found


def _way_out(error: BaseException) -> str:
    for _, _, function in reversed(_foreign_frames(error)):
        if function in _WAYS_AROUND:
            return _WAYS_AROUND[function]
    if _TRANSFORM.search(str(error)):
        return "write this step on whole tensors, without torch.vmap, torch.func and torch.autograd.grad"
    if (outside := _outside(error)) is not None:
        return outside[1]
    for kinds, advice in _WAYS_OUT:
        if isinstance(error, kinds):
            return advice
    return _DEFAULT_WAY_OUT


def _location(error: BaseException, root: BaseException) -> str:
    """Return ``file:line in function: `source` `` of the user's frame, and of PyG's frame below it."""
    frames = _foreign_frames(root)
    user = [frame for frame in _foreign_frames(error) if "torch_geometric" not in frame[0]]
    chosen = [*user[-1:], *(frames[-1:] if frames and frames[-1:] != user[-1:] else [])]
    return ", in ".join(_text(*frame) for frame in chosen)


def _foreign_frames(error: BaseException) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of the frames outside torch and gnnc, outermost first."""
    current: BaseException | None = error
    while current is not None:
        frames = [
            (frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in traceback.walk_tb(current.__traceback__)
            if _is_foreign(frame)
        ]
        inside = _below_forward(frames)
        if inside:
            return inside
        current = current.__cause__ or current.__context__
    return []


def _is_foreign(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith((_TORCH, _OURS, "<")) or "torch_geometric" in name


def _below_forward(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Return the frames from the first ``forward`` on; the frames above it called gnnc."""
    for position, (_, _, function) in enumerate(frames):
        if function == "forward":
            return frames[position:]
    return []


def _text(file: str, line: int, function: str) -> str:
    source = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line} in {function}" + (f": `{source}`" if source else "")
