"""Private names of torch that gnnc uses, and the versions of torch that each is known to work on.

A new release of torch may move any of them. ``tests/test_torch_private.py`` looks each one up, and refuses
private names of torch in other modules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._dynamo import guards
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, register_backend
from torch._dynamo.source import ConstantSource
from torch._dynamo.variables.builder import SourcelessBuilder
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.export import _trace as export_trace
from torch.fx import Graph, GraphModule, Node
from torch.fx import _symbolic_trace as fx_trace
from torch.fx import config as fx_config
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    statically_known_true,
)
from torch.nn import functional
from torch.nn.modules import module as nn_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "ConstantSource",
    "ConvolutionLayer",
    "DimDynamic",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "LazyGraphModule",
    "OpOverload",
    "PreDispatchModes",
    "PythonPrinter",
    "ShapeEnv",
    "SymNode",
    "SymNodeVariable",
    "enable_python_dispatcher",
    "pytree",
    "register_backend",
    "statically_known_true",
]

_TESTED = ("2.11", "2.13")
KNOWN_TO_WORK: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        "torch._C.DispatchKey",
        "torch._C._cuda_exchangeDevice",
        "torch._C._cuda_getCurrentRawStream",
        "torch._C._cuda_maybeExchangeDevice",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "torch._C._dynamo.guards._empty_strided_cpu",
        "torch._C._dynamo.guards._empty_strided_cuda",
        "torch._C._disabled_torch_dispatch_impl",
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._get_tracing_state",
        "torch._C._is_any_autocast_enabled",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._storage_Use_Count",
        "torch._convert_indices_from_coo_to_csr",
        "torch._dispatch.python.enable_python_dispatcher",
        "torch._dynamo.config",
        "torch._dynamo.register_backend",
        "torch._dynamo.source.ConstantSource",
        "torch._dynamo.variables.tensor.SymNodeVariable",
        "torch._ops.HigherOrderOperator",
        "torch._ops.OpOverload",
        "torch._sparse_sum",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.Tensor._coalesced_",
        "torch.Tensor._indices",
        "torch.Tensor._make_wrapper_subclass",
        "torch.Tensor._is_zerotensor",
        "torch.Tensor._nnz",
        "torch.Tensor._values",
        "torch.UntypedStorage._cdata",
        "torch.autograd.forward_ad._current_level",
        "torch.cuda._sleep",
        "torch.fx.Node._rename",
        "torch.fx._lazy_graph_module._LazyGraphModule",
        "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode",
        "torch.fx.experimental.sym_node.SymNode",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        "torch.fx.experimental.symbolic_shapes.statically_known_true",
        "torch.nn.Module()._forward_pre_hooks",
        "torch.nn.Module()._non_persistent_buffers_set",
        "torch.nn.functional._verify_batch_size",
        "torch.nn.functional._verify_spatial_size",
        "torch.nn.modules.module._global_backward_hooks",
        "torch.nn.modules.module._global_backward_pre_hooks",
        "torch.nn.modules.module._global_buffer_registration_hooks",
        "torch.nn.modules.module._global_forward_hooks",
        "torch.nn.modules.module._global_forward_pre_hooks",
        "torch.nn.modules.module._global_module_registration_hooks",
        "torch.nn.modules.module._global_parameter_registration_hooks",
        "torch.ops.aten.add.Tensor._overloadname",
        "torch.ops.aten.add.Tensor._schema",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch.utils._pytree",
        "torch.utils._sympy.printers.PythonPrinter",
    ),
    _TESTED,
)
KNOWN_TO_WORK |= dict.fromkeys(
    (
        "torch._dynamo.convert_frame",
        "torch._dynamo.convert_frame.compile_lock",
        "torch._dynamo.variables.builder.SourcelessBuilder",
        "torch._dynamo.variables.builder.SourcelessBuilder.create",
        "torch._ops._ModeStackStateForPreDispatch",
        "torch._ops._mode_stack_state_for_pre_dispatch",
        "torch.compiler._is_compiling_flag",
        "torch.compiler._is_exporting_flag",
        "torch.export._trace",
        "torch.export._trace._ignore_backend_decomps",
        "torch.export._trace._override_builtin_ops",
        "torch.export._trace.register_buffer_assignment_hook",
        "torch.fx._symbolic_trace",
        "torch.fx._symbolic_trace.CURRENT_PATCHER",
        "torch.fx._symbolic_trace._is_fx_tracing_flag",
        "torch.fx._symbolic_trace._new_patcher",
        "torch.fx.experimental.proxy_tensor",
        "torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER",
        "torch.fx.traceback.current_meta",
        "torch.fx.traceback.set_current_meta",
        "torch.fx.traceback.should_preserve_node_meta",
        "torch.nn.modules.conv._ConvNd",
    ),
    ("2.13",),
)
"""Versions of torch that the whole suite passed on, by the path of the name."""

DYNAMO_LOCK = (convert_frame, "compile_lock")
"""Lock that a thread holds while Dynamo compiles: the owner and the name, as of all that follow."""
COMPILER_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
"""Flags of ``torch.compiler`` that a trace sets."""
STACK_TRACES_OFF = (fx_config, "do_not_emit_stack_traces")
"""Setting by which the nodes of a trace have no stack traces; torch 2.11 lacks it."""
FAKE_TENSOR_CACHE = (dynamo_config, "fake_tensor_cache_enabled")
"""Setting of fake modes that are made from now on: whether they remember the results of ops."""
FX_FLAG = (fx_trace, "_is_fx_tracing_flag")
"""Flag that a trace sets."""
FX_PATCHER = (fx_trace, "_new_patcher")
"""Context in which a trace patches methods of modules; its value patches them."""
INTERPRETER_META = (fx_traceback, "set_current_meta")
"""Context in which an interpreter runs a node: a trace stores the metadata of it."""
BUILTIN_OVERRIDES = (export_trace, "_override_builtin_ops")
"""Context in which ``max``, ``min`` and ``math.pow`` are those of torch.export."""
LIBRARIES_OFF = (export_trace, "_ignore_backend_decomps")
"""Context in which oneDNN, NNPACK and cuDNN are off in all threads."""
DYNAMO_CONSTANTS = (SourcelessBuilder, "create")
"""Static method that represents a value in Dynamo's trace."""
PRE_DISPATCH_MODES = (torch._ops, "_mode_stack_state_for_pre_dispatch")
"""Modes of torch.export that ops and sizes are traced by: one object for all threads."""
PreDispatchModes = torch._ops._ModeStackStateForPreDispatch
"""Class of that object."""
BUFFER_HOOKS = (nn_module, "_global_buffer_registration_hooks")
"""Table of the hooks that run where any module gets a buffer."""
BUFFER_HOOK_OF_EXPORT = (export_trace, "register_buffer_assignment_hook")
"""Function that adds the hook of torch.export to the table, and returns its handle."""
TRACE_STATE: tuple[tuple[Any, str], ...] = (
    FX_FLAG,
    (fx_trace, "CURRENT_PATCHER"),
    (fx_traceback, "current_meta"),
    (fx_traceback, "should_preserve_node_meta"),
    (proxy_tensor, "_CURRENT_MAKE_FX_TRACER"),
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "__getattr__"),
    *((torch.compiler, flag) for flag in COMPILER_FLAGS),
)
"""Global state that a trace sets and puts back."""
ConvolutionLayer = torch.nn.modules.conv._ConvNd
"""Base class of the convolutions on grids."""

LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
    "torch._export",
    "torch._dynamo",
    "torch._guards",
    "torch._subclasses",
)
"""Loggers that report a failed capture, which gnnc reports itself."""

SIZE_CHECKS = (
    functional._verify_batch_size,  # pyright: ignore[reportAttributeAccessIssue]
    functional._verify_spatial_size,  # pyright: ignore[reportAttributeAccessIssue]
)
"""Functions of torch that refuse sizes of which a norm has no statistics."""
GLOBAL_FORWARD_HOOKS = (nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks)
"""Tables of the hooks that the forward of every module runs."""
GLOBAL_BACKWARD_HOOKS = (nn_module._global_backward_pre_hooks, nn_module._global_backward_hooks)
"""Tables of the hooks that the backward of every module runs."""
GLOBAL_REGISTRATION_HOOKS = (
    nn_module._global_module_registration_hooks,
    nn_module._global_parameter_registration_hooks,
    nn_module._global_buffer_registration_hooks,
)
"""Tables of the hooks that run where a module gets a submodule, a parameter or a buffer."""
TRACING_MODES = (ProxyTorchDispatchMode, FakeTensorMode)
"""Dispatch modes of traces: others only watch the ops of a call."""
LazyGraphModule = _LazyGraphModule
"""A ``GraphModule`` that writes and compiles its Python code only when it is called or its code is read."""
functorch_interpreter = peek_interpreter_stack
"""The innermost transform of ``torch.func`` that the thread runs within, or None."""
is_functorch_tensor = is_functorch_wrapped_tensor
"""Function that tells the tensors of a transform of ``torch.func`` from others."""
jit_tracing_state = torch._C._get_tracing_state
"""The state of ``torch.jit.trace`` where the thread traces, or None."""
dispatch_mode_count = torch._C._len_torch_dispatch_stack
"""Number of dispatch modes that the thread runs within."""
dispatch_modes = _get_current_dispatch_mode_stack
"""The dispatch modes that the thread runs within."""
sparse_sum = torch._sparse_sum  # pyright: ignore[reportPrivateImportUsage]
"""The function behind ``torch.sparse.sum``."""
coo_to_csr = torch._convert_indices_from_coo_to_csr  # pyright: ignore[reportPrivateImportUsage]
"""Sorted row indices to row pointers."""
set_coalesced = Tensor._coalesced_
"""Mark a COO tensor as coalesced, or not."""
raw_indices = Tensor._indices
"""Indices of a COO tensor that need not be coalesced."""
raw_values = Tensor._values
"""Values of a COO tensor that need not be coalesced."""
entry_count = Tensor._nnz
"""Number of stored entries of a sparse tensor."""
make_wrapper_subclass = Tensor._make_wrapper_subclass
"""Create a tensor subclass that has a shape and a dtype, and no storage."""


def proxy_graph() -> Graph | None:
    """Return the graph that ``trace_symbolic`` is writing in this thread, or None."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def trace_symbolic(function: Callable[..., Any], arguments: tuple[Any, ...]) -> GraphModule:
    """Return the graph of a function of fake tensors and symbolic sizes, all of one fake mode."""
    return proxy_tensor.make_fx(function, tracing_mode="symbolic", _error_on_data_dependent_ops=False)(
        *arguments
    )


def trace_sizes(function: Callable[..., Any], arguments: Sequence[Any]) -> Graph:
    """Return the graph of a function of tensors, whose sizes are the numbers that the tensors have."""
    return proxy_tensor.make_fx(function)(*arguments).graph


def schema(op: OpOverload) -> Any:
    """Return the schema of an op: its name, arguments and results."""
    return op._schema


def overload_name(op: OpOverload) -> str:
    """Return the name of an overload, such as ``Tensor`` of ``aten.add.Tensor``."""
    return op._overloadname


def is_composite(op: OpOverload) -> bool:
    """Return whether an op is only a composition of others, which autograd sees through."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def raw_expression(value: Any) -> Any:
    """Return the expression of a symbolic number as it was made, though a symbol has got a value since."""
    return value.node._expr


def rename(node: Node, name: str) -> None:
    """Rename a node of a graph; a number is added where the name is taken."""
    node._rename(name)


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, equal for views of one storage."""
    return tensor.untyped_storage()._cdata


def storage_uses(tensor: Tensor) -> int:
    """Return how many tensors and storage objects hold a tensor's memory, those of this question included."""
    return torch._C._storage_Use_Count(storage_id(tensor))


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks that a module calls before ``forward``."""
    return list(module._forward_pre_hooks.values())


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Return the set of the names of buffers that a state dict leaves out; the module's own, not a copy."""
    return module._non_persistent_buffers_set


def is_autocast_enabled() -> bool:
    """Return whether autocast is on for any kind of device."""
    return torch._C._is_any_autocast_enabled()


def has_no_storage(tensor: Tensor) -> bool:
    """Return whether a tensor is one of torch's zeros without memory."""
    return tensor._is_zerotensor()


def has_own_dispatch(tensor: Tensor) -> bool:
    """Return whether the class of a tensor runs its ops itself, as that of a fake or a masked one does."""
    own = type(tensor).__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
    return own is not torch._C._disabled_torch_dispatch_impl


def forward_ad_level() -> int:
    """Return the level of forward-mode AD; -1 where no tensor has a tangent."""
    return forward_ad._current_level


def raw_stream(index: int) -> int:
    """Return the handle of the current CUDA stream of a device; a tenth of the time of ``current_stream``."""
    return torch._C._cuda_getCurrentRawStream(index)


def exchange_device(index: int) -> int:
    """Make a CUDA device the current one, and return the one that was."""
    return torch._C._cuda_exchangeDevice(index)


def restore_device(index: int) -> None:
    """Make a CUDA device the current one if it has a context, else leave the current one."""
    torch._C._cuda_maybeExchangeDevice(index)


def empty_strided_cpu() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return the function that allocates (shape, stride, dtype) on the CPU, like ``empty_strided_cuda``."""
    return guards._empty_strided_cpu  # pyright: ignore[reportAttributeAccessIssue]


def empty_strided_cuda() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return the function that allocates (shape, stride, dtype) on the current CUDA device.

    Programs of torch.compile allocate with it too: without the dispatcher it takes a third of the time of
    ``torch.empty``.
    """
    return guards._empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue]


def spin(cycles: int) -> None:
    """Launch a kernel that keeps the current CUDA stream busy for a number of clock cycles."""
    torch.cuda._sleep(cycles)
