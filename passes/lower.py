"""Lower: choose the kernel that will run each node and each fused submodule."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx import Node

from gnnc.ir.nodes import outputs_of, result_index
from gnnc.ir.op import op_of
from gnnc.ir.parts import STRUCTURE, Parts
from gnnc.passes.base import Context, Property
from gnnc.passes.rewrite.compared_extrema import compared_extrema
from gnnc.passes.rewrite.edge_matrices import edge_matrices
from gnnc.target import ChosenKernel, KernelChoice, Lowering


@dataclass(frozen=True, slots=True)
class Lower:
    """Choose a kernel for each node; a fused submodule that no kernel takes is inlined.

    ``node.meta["choice"]`` holds the backend's choice, ``node.meta["kernel"]`` the name of its kernel.
    Kernels that declined are noted for ``explain()``. A maximum of a body, and the bodies that compare values
    with it, run in kernels that compute the same bits, which all of them have in the end: op by op.
    """

    name: ClassVar[str] = "lower"
    establishes: ClassVar[frozenset[Property]] = frozenset({Property.LOWERED})

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with a kernel chosen for every node that computes something."""
        lowering = ctx.target.lowering
        if lowering is None:
            ctx.note(None, "not lowered: the pipeline runs without a backend")
            return parts
        for part, gm in parts:
            if part != STRUCTURE:
                _lower(gm, lowering, ctx)
        _compute_alike(parts, lowering, ctx)
        if parts.structure is not None:
            _lower_structure(parts.structure, lowering, ctx)
        for node, text in edge_matrices(parts):
            ctx.note(node, text)
        return parts


def _lower(gm: fx.GraphModule, lowering: Lowering, ctx: Context) -> None:
    for node in list(gm.graph.nodes):
        if node.op == "call_module":
            _lower_fused(gm, node, lowering, ctx)
    for node in gm.graph.nodes:
        if "choice" not in node.meta and lowering.needs_launch(node):
            choice = lowering.choose(node)
            if choice.kernel is None:
                lowering.refuse(node, choice.declined)
            _record(node, choice, choice.kernel, ctx)


def _lower_fused(gm: fx.GraphModule, node: Node, lowering: Lowering, ctx: Context) -> None:
    choice = lowering.choose(node)
    if choice.kernel is not None:
        _record(node, choice, choice.kernel, ctx)
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.declined)
    declined = f" ({reasons})" if reasons else ""
    ctx.note(node, f"taken apart, no kernel runs it as a whole{declined}", "declined")
    inline(gm, node)


def _compute_alike(parts: Parts, lowering: Lowering, ctx: Context) -> None:
    """Run the bodies of an extremum and of its comparisons in kernels that compute the same bits."""
    apart = True
    while apart:
        pairs = [sides for pair in compared_extrema(parts) for sides in (pair, pair[::-1])]
        apart = any([_moved_to(node, other, lowering, ctx) for node, other in pairs])
        if not apart and (joint := next((node for node, other in pairs if _is_joint(node, other)), None)):
            _take_apart(joint, lowering, ctx)
            apart = True


def _moved_to(node: Node, other: Node, lowering: Lowering, ctx: Context) -> bool:
    """Run a node in a later kernel if that computes the same bits as another node's, and its own does not."""
    present, wanted = node.meta["choice"], other.meta["choice"].kernel.arithmetic
    if present.kernel.arithmetic == wanted:
        return False
    later = lowering.choose_later(node, present, wanted)
    if later.kernel is None:
        return False
    _record(node, later, later.kernel, ctx)
    reason = f"no kernel takes {other.name} likewise, and their values are compared bit by bit"
    ctx.note(node, f"kernel {present.kernel.name} is not used: {reason}", "declined")
    return True


def _is_joint(node: Node, other: Node) -> bool:
    """Return whether several bodies run in a kernel that computes other bits than that of another node."""
    present, wanted = (each.meta["choice"].kernel.arithmetic for each in (node, other))
    return node.op == "call_module" and present != wanted


def _take_apart(call: Node, lowering: Lowering, ctx: Context) -> None:
    """Run the ops of a submodule in kernels of their own."""
    ctx.note(call, "taken apart: a maximum is compared with values that another kernel computes", "declined")
    gm = call.graph.owning_module
    assert gm is not None
    inline(gm, call)
    _lower(gm, lowering, ctx)


def _lower_structure(structure: fx.GraphModule, lowering: Lowering, ctx: Context) -> None:
    """Choose a kernel for each primitive of the structure graph; ATen ops run in PyTorch."""
    for node in structure.graph.nodes:
        if op_of(node) is not None:
            choice = lowering.choose_structure(node)
            if choice.kernel is None:
                lowering.refuse(node, choice.declined)
            _record(node, choice, choice.kernel, ctx)


def _record(node: Node, choice: KernelChoice, kernel: ChosenKernel, ctx: Context) -> None:
    node.meta["choice"] = choice
    node.meta["kernel"] = kernel.name
    for name, reason in choice.declined:
        ctx.note(node, f"kernel {name} declined: {reason}", "declined")


def inline(gm: fx.GraphModule, call: Node) -> None:
    """Replace a call of a fused submodule by the nodes of its graph, in place."""
    inner: Any = gm.get_submodule(str(call.target))
    copies: dict[Node, Node] = dict(
        zip(inner.graph.find_nodes(op="placeholder"), call.args, strict=True)  # type: ignore[arg-type]
    )
    with gm.graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = gm.graph.node_copy(node, copies.__getitem__)
    results = outputs_of(inner.graph)
    if isinstance(results, Node):
        call.replace_all_uses_with(copies[results])
    else:
        for user in list(call.users):
            user.replace_all_uses_with(copies[results[result_index(user)]])
            gm.graph.erase_node(user)
    gm.graph.erase_node(call)
    gm.delete_submodule(str(call.target))
