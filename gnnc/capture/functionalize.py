"""Functionalization: a traced program without writes into tensors.

``run_decompositions`` removes writes by tracing the program twice more, which takes longer than the
export did. Graph networks nearly always write into a tensor that they have just made, or into a row or slice
of one, as in ``x.new_zeros(n).scatter_add_(...)`` and ``out[t] = h``. Where no other view of the tensor is
read afterwards, such a write becomes the op that returns its result, and every other call stays. A program
with another write, or with a call that would mean something else below autograd, is traced again.
"""

import operator
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node, map_arg

from gnnc.capture.batch_norms import (
    buffers_of,
    expand_batch_norms,
    normalizes,
    return_buffers,
    statistics_of,
)
from gnnc.capture.view_writes import scattered, views_below
from gnnc.errors import CaptureError
from gnnc.ir.functional_op import returning
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, first_operand, result_index, unpack
from gnnc.torch_private import (
    DispatchKey,
    HigherOrderOperator,
    OpOverload,
    enable_python_dispatcher,
    is_autocast_enabled,
    pytree,
    schema,
    storage_id,
)

aten = torch.ops.aten

_OF_SIZES = ("_operator", "math", "torch")
"""Modules of the functions that compute with sizes."""
_KNOWN = (
    aten.contiguous.default,
    aten.dropout.default,
    aten.expand_as.default,
    aten.flatten.using_ints,
    aten.reshape.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
)
"""Composites that may return their argument, or a view of it, and that passes know."""
_OWN_PARTS = (aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default)
"""Splits into parts that may each be written into, as their callers promise to leave the whole alone."""
_VIEWS = (
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
)
"""Views in which no element of the memory stands twice."""
_FOR_EVER = 2**62
"""Last use of memory that must not be written any more."""


class _Rewrite(NamedTuple):
    """Op that returns what a write leaves, its value, the maker of the memory, and the views between."""

    op: OpOverload
    value: torch.Tensor
    maker: Node
    views: list[Node]


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return the program without writes: itself, changed, where no write needs another trace."""
    _refuse_max_norm(program.graph)
    _detach_blocks(program.graph_module)
    if torch.is_grad_enabled():
        _refuse_detached_writes(program.graph)
    _expand_dropouts(program.graph)
    _spell_views(program.graph)
    buffers = buffers_of(program)
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if is_autocast_enabled() or not all(_stays(node, buffers) for node in calls):
        return _traced_again(program)
    written = _replace_writes(program.graph, buffers)
    if written is None:
        return _traced_again(program)
    written |= expand_batch_norms(program.graph, buffers)
    return_buffers(program, written)
    program.graph.eliminate_dead_code()
    return program


def _detach_blocks(graph_module: GraphModule) -> None:
    """Detach the operands and results of blocks under ``torch.no_grad()``, which a trace puts in line."""
    for node in list(graph_module.graph.nodes):
        if not _is_grad_block(node) or node.args[0]:
            continue
        _detach_operands(node, getattr(graph_module, node.args[1].target))
        for result in list(node.users):
            if isinstance(result.meta.get("val"), torch.Tensor):
                _detach(result, result.meta)
    graph_module.recompile()


def _detach_operands(block: Node, body: GraphModule) -> None:
    """Detach the operands of a block, so that what it writes into them has no gradient.

    Raises:
        CaptureError: it writes into a tensor that has a gradient, which in eager knows nothing of the write.
    """
    written = {_memory_of(_written_tensor(node)) for node in body.graph.nodes if _is_write(node)}
    for given, operand in zip(placeholders(body), block.args[2:], strict=True):
        if not isinstance(operand, Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
            continue
        if given in written and torch.is_grad_enabled():
            _refuse_write(operand, "under torch.no_grad()")
        _detach(given, operand.meta)
    body.recompile()


def _detach(node: Node, meta: dict[str, Any]) -> None:
    """Let all readers of a node read its ``detach()``, which has a copy of ``meta``."""
    with node.graph.inserting_after(node):
        detached = node.graph.call_function(aten.detach.default, (node,))
    detached.meta = dict(meta)
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)


def _refuse_max_norm(graph: Graph) -> None:
    """Refuse embeddings that write the rows that they read into their weight."""
    for node in graph.find_nodes(op="call_function", target=aten.embedding_renorm_.default):
        raise CaptureError(
            f"an embedding with max_norm ({_spelled(_memory_of(node))}) writes its weight in forward, and no "
            "compiled call writes a parameter: limit the norms in an optimizer step "
            "(torch.renorm(weight, 2, 0, max_norm) under torch.no_grad()) in place of max_norm"
        )


def _refuse_detached_writes(graph: Graph) -> None:
    """Refuse writes through ``detach()`` into tensors that have gradients."""
    for write in filter(_is_write, graph.nodes):
        for node in _to_memory(_written_tensor(write)):
            if node.target is aten.detach.default:
                _refuse_write(first_operand(node), "through detach() or .data")


def _refuse_write(tensor: Node, how: str) -> None:
    """Raise CaptureError if a tensor that is written without autograd's knowledge may have a gradient."""
    if not _may_have_gradient(tensor):
        return
    raise CaptureError(
        f"forward writes {how} into a tensor that has a gradient ({_spelled(tensor)}), and in training that "
        "gradient would not be the one of the written values: compute a new tensor in place of the write, or "
        "write after the training step"
    )


def _memory_of(node: Node) -> Node:
    """Return the node that made the memory of a tensor, behind views and writes."""
    *_, memory = _to_memory(node)
    return memory


def _to_memory(node: Node) -> Iterator[Node]:
    """Yield a tensor, the views and writes that it comes from, and last the node that made its memory."""
    yield node
    while node.op == "call_function" and (_is_write(node) or _may_alias(node)):
        node = first_operand(node)
        yield node


def _may_have_gradient(node: Node) -> bool:
    """Return whether a value is computed from a parameter that trains, or from floats of the caller."""
    seen, rest = set(), [node]
    while rest:
        current = rest.pop()
        if current in seen or current.target is aten.detach.default:
            continue
        seen.add(current)
        if current.op == "placeholder" and _trains(current):
            return True
        rest += current.all_input_nodes
    return False


def _spelled(node: Node) -> str:
    """Return the name of a parameter, or the op that computes a value."""
    if node.op == "placeholder":
        return node.name.removeprefix("p_model_")
    return f"the result of {node.target}"


def _trains(placeholder: Node) -> bool:
    """Return whether a placeholder is a parameter that trains, or floats of the caller."""
    value, name = placeholder.meta.get("val"), placeholder.name
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    if name.startswith("p_"):
        return value.requires_grad
    return not name.startswith(("b_", "c_"))  # buffers and constants


def _expand_dropouts(graph: Graph) -> None:
    """Replace dropouts in train mode by the ops that a decomposition makes of them."""
    for node in graph.find_nodes(op="call_function", target=aten.dropout.default):
        if _is_dropout_off(node):
            continue
        x, p, value = first_operand(node), argument(node, "p"), node.meta["val"]
        with graph.inserting_before(node):
            with value.fake_mode, enable_python_dispatcher():
                mask = torch.empty_like(value, dtype=torch.bool)
            both = graph.call_function(aten.native_dropout.default, (x, p, True))
            both.meta = node.meta | {"val": (value, mask)}
            result = graph.call_function(operator.getitem, (both, 0))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _is_dropout_off(node: Node) -> bool:
    """Return whether a node is a dropout that drops nothing: eager returns its operand, a trace a clone."""
    if node.target is not aten.dropout.default:
        return False
    p, train = unpack(node, "p", "train")
    return p == 0 or train is False


def _traced_again(program: ExportedProgram) -> ExportedProgram:
    """Return the program as another trace makes it; dropouts that drop nothing are their operands.

    A composite whose result is a view here, though its schema does not say so (``einsum("ij->ji", y)``,
    ``meshgrid``), is traced through: kept as one op it would hide the view from the writes around it.
    """
    for node in program.graph.find_nodes(op="call_function", target=aten.dropout.default):
        if _is_dropout_off(node):
            node.replace_all_uses_with(first_operand(node))
            program.graph.erase_node(node)
    hidden = {node.target for node in program.graph.nodes if _is_hidden_view(node)}
    known = torch.export.default_decompositions() if hidden else {}
    return program.run_decompositions({op: known[op] for op in hidden})


def _is_hidden_view(node: Node) -> bool:
    """Return whether a composite whose schema promises new memory returns memory of its arguments."""
    op = node.target
    return isinstance(op, OpOverload) and _is_composite(op) and not _says_alias(op) and _shares_memory(node)


def _is_composite(op: OpOverload) -> bool:
    return op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _spell_views(graph: Graph) -> None:
    """Write ``tensor_split`` and ``unflatten`` of known sizes as the ops that a decomposition makes."""
    for node in graph.find_nodes(op="call_function", target=aten.tensor_split.sections):
        sections, dim = unpack(node, "sections", "dim")
        size = first_operand(node).meta["val"].shape[dim]
        if isinstance(size, int) and isinstance(sections, int):
            sizes = [size // sections + (place < size % sections) for place in range(sections)]
            node.target, node.args = aten.split_with_sizes.default, (first_operand(node), sizes, dim)
            node.kwargs = {}
    for node in graph.find_nodes(op="call_function", target=aten.unflatten.int):
        shape = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
        if shape.count(-1) < 2 and 0 not in shape:
            node.target, node.args, node.kwargs = aten.view.default, (first_operand(node), shape), {}


def _is_grad_block(node: Node) -> bool:
    target = node.target
    return isinstance(target, HigherOrderOperator) and target.name() == "wrap_with_set_grad_enabled"


def without_writes(graph: Graph) -> bool:
    """Replace writes into tensors that a graph makes by ops that return the results.

    Returns:
        Whether no write is left; where one would be, the graph stays as it is.
    """
    return _replace_writes(graph, frozenset()) is not None


def _replace_writes(graph: Graph, buffers: Set[Node]) -> dict[Node, Node] | None:
    """Do the same; return the last values of the ``buffers`` that are written, None where a write is left."""
    rewrites = _rewrites(graph, buffers)
    if rewrites is None:
        return None
    written: dict[Node, Node] = {}
    for write, rewrite in rewrites.items():
        whole = _rewrite(write, rewrite)
        if rewrite.maker in buffers:
            written[rewrite.maker] = whole
    return written


def _rewrites(graph: Graph, buffers: Set[Node]) -> dict[Node, _Rewrite] | None:
    """Return how every write is replaced; None where a write has no op without one."""
    found: dict[Node, _Rewrite] = {}
    uses = _LastUses(graph)
    # the call that made the memory of a tensor, or its buffer, for each tensor that is all of its memory
    makers: dict[Node, Node] = {buffer: buffer for buffer in buffers}
    looks: dict[Node, int] = {}  # where other tensors over the memory of a call are read for the last time
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is aten.detach_.default:
            found[node] = _Rewrite(aten.detach.default, node.meta["val"], node, [])
        if _is_write(node):
            rewrite = _without_write(node)
            views = [] if rewrite is None else views_below(_written_tensor(node), makers)
            maker = None if rewrite is None else makers.get(_whole(node, views))
            if rewrite is None or maker is None or looks.get(maker, -1) > uses.order[node]:
                return None
            found[node] = _Rewrite(*rewrite, maker, views)
            if views:
                looks[maker] = max(looks[maker], uses.last(node))
            else:
                makers[node] = maker
        elif _is_own_part(node):
            makers[node] = node
        elif normalizes(node, buffers):
            statistics = statistics_of(node)
            if not statistics.isdisjoint(rewrite.maker for rewrite in found.values()):
                return None
            looks |= dict.fromkeys(statistics, _FOR_EVER)
            makers[node] = node
        elif (source := _viewed_here_alone(node)) in makers and makers[source] not in looks.keys() | buffers:
            makers[node] = makers[source]
        elif _may_alias(node):
            for tensor in node.all_input_nodes:
                if (maker := makers.get(tensor)) is not None:
                    looks[maker] = max(looks.get(maker, -1), uses.last(node))
        else:
            makers[node] = node
    return found


class _LastUses:
    """Last use of each tensor of a graph, through its views, too; results of writes have uses of their own.

    Attributes:
        order: the place of each node.
    """

    def __init__(self, graph: Graph) -> None:
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self._last: dict[Node, int] = {}
        for node in reversed(graph.nodes):
            self._last[node] = max([self.order[node], *map(self._through, node.users)])

    def last(self, node: Node) -> int:
        """Return the place of the last node that reads the memory of ``node`` through it."""
        return self._last[node]

    def _through(self, user: Node) -> int:
        is_alias = user.op != "output" and not _is_write(user) and _may_alias(user)
        return self._last[user] if is_alias else self.order[user]


def _stays(node: Node, buffers: Set[Node]) -> bool:
    """Return whether a call may stay: another trace would keep it, or passes know it as it is."""
    op = node.target
    if not isinstance(op, OpOverload):
        return getattr(op, "__module__", None) in _OF_SIZES
    if op is aten.native_batch_norm.default:  # its schema hides that it writes
        return False
    if op is aten.batch_norm.default:  # passes know it outside of train mode
        return argument(node, "training") is False or normalizes(node, buffers)
    return op in _KNOWN or not _is_composite(op) or not (_says_alias(op) or _drops_out(node))


def _drops_out(node: Node) -> bool:
    """Return whether attention or a recurrent layer draws masks, which passes know of dropout alone."""
    rates = (argument(node, name, 0.0) for name in ("dropout_p", "dropout"))
    return any(rates) and argument(node, "train", True)


def _is_write(node: Node) -> bool:
    """Return whether a call changes values; ``detach_`` changes only the autograd state."""
    op = node.target
    return isinstance(op, OpOverload) and schema(op).is_mutable and op is not aten.detach_.default


def _written_tensor(write: Node) -> Node:
    """Return the tensor that a write changes: every ATen op in place takes it first."""
    return first_operand(write)


def _whole(write: Node, views: Sequence[Node]) -> Node:
    """Return the tensor that a write changes through views, if any."""
    return first_operand(views[-1]) if views else _written_tensor(write)


def _says_alias(op: OpOverload) -> bool:
    """Return whether results of an op may be its arguments, or views of them, for some sizes."""
    tagged = torch.Tag.maybe_aliasing_or_mutating in op.tags
    return tagged or any(result.alias_info is not None for result in schema(op).returns)


def _may_alias(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or _says_alias(node.target) or _is_dropout_off(node):
        return True
    return _shares_memory(node)


def _shares_memory(node: Node) -> bool:
    taken = {place for argument in node.all_input_nodes for place in _storages(argument)}
    return not taken.isdisjoint(_storages(node))


def _viewed_here_alone(node: Node) -> Node | None:
    """Return the tensor that a node is a view of, if nothing else reads it; None for any other node."""
    if not (node.target in _VIEWS or _is_dropout_off(node)) or set(first_operand(node).users) != {node}:
        return None
    return first_operand(node)


def _is_own_part(node: Node) -> bool:
    """Return whether a node is a part of a tensor that nothing else reads, whole or in part."""
    if node.target is not operator.getitem:
        return False
    split = first_operand(node)
    if split.target not in _OWN_PARTS or len(first_operand(split).users) > 1:
        return False
    return len({result_index(part) for part in split.users}) == len(split.users)


def _storages(node: Node) -> list[int]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return [storage_id(value) for value in values if isinstance(value, torch.Tensor)]


def _without_write(node: Node) -> tuple[OpOverload, torch.Tensor] | None:
    """Return the op that returns what ``node`` writes, and its value; None if no dtype fits."""
    assert isinstance(node.target, OpOverload)
    op = returning(node.target)
    written = node.meta.get("val")
    if op is None or not isinstance(written, torch.Tensor):
        return None
    if _storages(node) != _storages(_written_tensor(node)):  # then aliases cannot be told by storages either
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    # Without the dispatcher, a decomposition in C++ would fix symbolic sizes to their examples.
    with written.fake_mode, enable_python_dispatcher():  # pyright: ignore[reportAttributeAccessIssue]
        value = op(*args, **kwargs)
    return (op, value) if value.dtype == written.dtype else None


def _rewrite(write: Node, rewrite: _Rewrite) -> Node:
    """Replace the write by calls without one; return the whole tensor, which later readers read."""
    with write.graph.inserting_before(write):
        call = write.graph.call_function(rewrite.op, write.args, write.kwargs)
        call.meta = write.meta | {"val": rewrite.value}
        whole = scattered(call, rewrite.views)
    before = _whole(write, rewrite.views)
    before.replace_all_uses_with(whole, delete_user_cb=lambda user: write < user)
    write.replace_all_uses_with(call)
    write.graph.erase_node(write)
    return whole
