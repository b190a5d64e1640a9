"""Validation of the arguments of a call, before anything is traced or read."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnc.capture.arguments import Call, can_be_size, carrier
from gnnc.capture.edge_index import plain
from gnnc.errors import InputError, UnsupportedError
from gnnc.quantized_tensor import QuantizedTensor
from gnnc.tensor_state import storage_fault
from gnnc.torch_private import has_no_storage, has_own_dispatch, is_functorch_tensor

_EDGE_INDEX = re.compile(
    r"(^|[._\['])(edge_index|edge_label_index|adj_t?)($|[._\]'\d])|_edge_index$|edge_index_"
)
_BATCH = re.compile(r"(^|[._])batch($|[._\]])")
_INDEX_DTYPES = (torch.int64, torch.int32)
_FLOATS = (torch.float32, torch.float8_e4m3fn)


def is_graph_name(name: str) -> bool:
    """Return whether an argument is by its name an edge list or a batch vector."""
    return bool(_EDGE_INDEX.search(name) or _BATCH.search(name))


def validate(
    owner: str,
    call: Call,
    device: torch.device | None = None,
    backend: str = "auto",
    device_types: Collection[str] = (),
) -> None:
    """Refuse arguments that no compiled model can take.

    Args:
        owner: the model's class name, for messages.
        call: the flattened arguments.
        device: device of the model; None where it has no parameters.
        backend: name of the backend that was asked for.
        device_types: types of the devices that it runs on; empty: on any.

    Raises:
        InputError: a floating argument is not float32, or an argument is on another device than the
            model, or on one that the backend does not run on, or its storage was freed or shortened.
        UnsupportedError: an argument is a tensor without values that a kernel can read.
    """
    refuse_foreign_tensors(owner, zip(call.names, call.tensors, strict=True))
    device = device or call.device
    ints = call.ints
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if name in ints:
            continue
        _check_dtype(owner, name, tensor)
        _check_storage(owner, name, tensor)
        if tensor.device != device:
            raise InputError(
                f"[{owner}] {name} is on {tensor.device}, but the model is on {device}: pass "
                f"{name}.to({str(device)!r})"
            )
    _check_backend(owner, device, backend, device_types)


def refuse_foreign_tensors(owner: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors without values of their own: fake, wrapped or nested.

    Raises:
        UnsupportedError: names the tensor and its kind.
    """
    for name, tensor in named:
        kind = _foreign_kind(tensor)
        if kind is not None:
            raise UnsupportedError(
                f"[{owner}] {name} is {kind}, which the kernels of a compiled model cannot read: pass a "
                "dense torch.Tensor with the same values, or call the original model (compiled.model)"
            )


def _foreign_kind(tensor: Tensor) -> str | None:
    """Return the name of a kind of tensor that no kernel reads; None for all others."""
    if _runs_its_ops(tensor):
        return f"a {type(tensor).__name__}"
    if is_functorch_tensor(tensor):
        return "a tensor of a torch.func transform (vmap, grad, jvp)"
    if tensor.is_nested:
        return "a nested tensor"
    return "a tensor of zeros without memory" if has_no_storage(tensor) else None


def _runs_its_ops(tensor: Tensor) -> bool:
    """Return whether a tensor's class runs its ops in a way of its own; PyG's run them as torch does."""
    return has_own_dispatch(tensor) and not type(tensor).__module__.startswith("torch_geometric.")


def unusual_graph(call: Call) -> str | None:
    """Return, of a call that does not run, what is unusual about an edge list or batch vector; else None.

    A name says only what an argument may be: a model is free to take edges as ``[E, 2]``.
    """
    sparse = {name for leaf in call.leaves if leaf.kind == "sparse" for name in leaf.tensor_names}
    pairs = zip(call.names, call.tensors, strict=True)
    named = sorted(pairs, key=lambda pair: not _EDGE_INDEX.search(pair[0]))
    for name, tensor in named:
        is_edges, is_batch = bool(_EDGE_INDEX.search(name)), bool(_BATCH.search(name))
        if name in sparse or name in call.ints or not (is_edges or is_batch):
            continue
        if tensor.dtype not in _INDEX_DTYPES:
            return (
                f"{name} has dtype {tensor.dtype}: node ids must be int64 or int32; "
                f"convert it with {name}.long()"
            )
        if is_edges and (tensor.dim() != 2 or tensor.shape[0] != 2):
            return (
                f"{name} has shape {tuple(tensor.shape)}: an edge list is [2, number of edges], "
                "sources in row 0 and destinations in row 1"
            )
        if is_batch and tensor.dim() != 1:
            return f"{name} has shape {tuple(tensor.shape)}: expected [number of nodes]"
    return None


def _check_backend(
    owner: str, device: torch.device | None, backend: str, device_types: Collection[str]
) -> None:
    if device is None or not device_types or device.type in device_types:
        return
    raise InputError(
        f"[{owner}] the model and its inputs are on {device}, where backend {backend!r} does not run: "
        f"move both with .to({min(device_types)!r}), or use backend='auto'"
    )


def _check_dtype(owner: str, name: str, tensor: Tensor) -> None:
    if tensor.is_quantized:
        raise InputError(f"[{owner}] {name} is a quantized tensor: pass {name}.dequantize()")
    if tensor.is_complex():
        parts = "a compiled model takes float32; pass real and imaginary parts"
        raise InputError(f"[{owner}] {name} has dtype {tensor.dtype}: {parts}")
    if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
        raise InputError(
            f"[{owner}] {name} has dtype {tensor.dtype}: a compiled model takes float32 and lowers the "
            f"precision itself; pass {name}.float() (and keep the model in float32: model.float()). Features "
            "may also be torch.float8_e4m3fn or a gnnc.QuantizedTensor"
        )
    if tensor.dtype == torch.float8_e4m3fn and tensor.requires_grad:
        raise InputError(f"[{owner}] {name} is FP8 and requires a gradient: pass {name}.detach()")


def _check_storage(owner: str, name: str, tensor: Tensor) -> None:
    if type(tensor) is Tensor and (fault := storage_fault(tensor)) is not None:
        raise InputError(f"[{owner}] {name}: {fault}; pass a tensor that has its memory")


def describe_arguments(values: Iterable[Any], parts: list[Any], tensors: list[Tensor]) -> bool:
    """Describe arguments cheaply, to recognize a call like an earlier one.

    Args:
        values: arguments: dense and quantized tensors, ints, plain constants, and tuples and lists of them.
        parts: receives all but sizes that distinguishes programs: structure, constants, ranks, dtypes and
            devices.
        tensors: receives the tensors, in order.

    Returns:
        True if all arguments are of these kinds.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return False
            if type(value) is not Tensor:
                value = plain(value)
                if _runs_its_ops(value):
                    return False
            parts.append(value.device)
            parts.append(value.ndim)
            parts.append(value.dtype)
            tensors.append(value)
        elif type(value) is QuantizedTensor:
            parts += QuantizedTensor, value.device, value.values.ndim
            tensors += value.values, value.scale
        elif can_be_size(value):
            parts.append(int)
            tensors.append(carrier(value))
        elif value is None or type(value) in (bool, int, float, str):
            parts.append((type(value), value))
        elif type(value) in (tuple, list):
            parts.append((type(value), len(value)))
            if not describe_arguments(value, parts, tensors):
                return False
        else:
            return False
    return True


def missing_arguments(call: Call, required: Sequence[str]) -> list[str]:
    """Return the required arguments that were given as None."""
    return [
        leaf.name
        for leaf in call.leaves
        if leaf.name in required and leaf.kind == "constant" and leaf.value is None
    ]
