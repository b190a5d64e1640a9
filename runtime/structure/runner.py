"""Run a structure graph, each part of it only when the inputs of that part have changed."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gnnc.errors import GraphError
from gnnc.ir.nodes import op_name, outputs_of, unpack
from gnnc.ir.op import op_of
from gnnc.ir.source import source_of
from gnnc.runtime.registry import Choice
from gnnc.runtime.structure.cache import DEFAULT_BYTE_BUDGET, Entry, StructureCache
from gnnc.runtime.structure.hooks import BuildHooks
from gnnc.runtime.structure.kernels import PartEmitter, choice_of
from gnnc.tensor_state import state_of_object

Deps = frozenset[Node]
_Check = tuple[tuple[int, ...], Callable[..., None]]  # slots of the arguments, and the function

_READS_NO_ROWS = frozenset({"csr", "csr_with_loops", "ne"})
"""Ops that do not use ids as addresses, so that ids out of range do no harm."""


@dataclass(frozen=True, slots=True)
class Group:
    """Part of the structure graph whose nodes depend on the same tensors.

    Attributes:
        module: computes the part; takes the values in ``operands``, returns a tuple.
        operands: slots (see ``StructureRunner``) of the module's arguments.
        key: slots of the inputs and sizes that the part depends on, directly or not.
        checks: slots of ids and of their limit that a sort of the part checks before their use as addresses.
    """

    module: GraphModule
    operands: tuple[int, ...]
    key: tuple[int, ...]
    checks: frozenset[tuple[int, ...]] = frozenset()


class StructureRunner:
    """Runner of a structure graph with one cache entry for each *group* and distinct graph.

    A node's dependency set is the set of tensor inputs that reach it. Nodes with one set form a
    group, keyed by those tensors and by the plain sizes the group uses; groups run in order of
    set inclusion, the later ones on the (cached) results of the earlier. So with an ``edge_index``
    that stays and an ``edge_weight`` that is new at every call, sorting and degree counting
    (set ``{edge_index}``) run once, and only the normalization (set ``{edge_index, edge_weight}``)
    runs again. A group whose results only one other group needs, and which holds nothing
    expensive, is computed inside that group. Nodes that depend on sizes alone are computed in
    every group that uses them: they cost less than a look-up.

    Values are held in slots: first the graph's placeholders in order, then the groups' results.

    Args:
        structure: a graph whose placeholders are of the kinds input, size or constant, and whose
            output is a flat tuple.
        choose: returns the kernel of a node, or None to compute it as the graph says.
        hooks: callbacks of the device that the kernels run on, or None.
        byte_budget: see ``StructureCache``.
    """

    def __init__(
        self,
        structure: GraphModule,
        choose: Callable[[Node], Choice | None] = choice_of,
        hooks: BuildHooks | None = None,
        byte_budget: int = DEFAULT_BYTE_BUDGET,
    ) -> None:
        self.groups, outputs = _split(structure, choose)
        self._pick = _picker(outputs)
        self._keyed = tuple(sorted({slot for group in self.groups for slot in group.key}))
        self._last: _LastCall | None = None
        self._before: dict[int, list[_Check]] = {}
        self._afterwards: dict[int, list[_Check]] = {}
        self._hooks = hooks
        tables_of = None if hooks is None else hooks.tables_of
        self.cache = StructureCache(byte_budget, max(len(self.groups), 1), tables_of)

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Return the structure graph's outputs for the values of its placeholders."""
        last = self._last
        slots = last.slots_for(values, self.cache) if last is not None else None
        if slots is None:
            slots = self._look_up(values)
        outputs = self._pick(slots)
        if self._hooks is not None:
            self._hooks.after_call(outputs)
        return outputs

    def rebuild(self, *values: Any) -> tuple[tuple[Any, ...], Callable[[], None]]:
        """Drop the cached results for these values, and compute new ones, which are not shared yet.

        Returns:
            The structure graph's outputs, in new tensors; and a function that inserts them into the cache.
        """
        inserts: list[Callable[[], None]] = []
        self._last = None  # it finds dropped entries for as long as somebody holds them

        def rebuilt(key: tuple[Any, ...], build: Callable[[], Any]) -> Entry:
            entry, insert = self.cache.rebuild(key, build)
            inserts.append(insert)
            return entry

        def share() -> None:
            for insert in inserts:
                insert()
            self._last = None

        slots, _ = self._compute(values, rebuilt)
        return self._pick(slots), share

    def _look_up(self, values: tuple[Any, ...]) -> list[Any]:
        slots, entries = self._compute(values, self.cache.entry)
        self._last = _LastCall.of(values, self._keyed, entries)
        return slots

    def _compute(
        self, values: tuple[Any, ...], entry_of: Callable[..., Entry]
    ) -> tuple[list[Any], list[Entry]]:
        """Return all slots and the entries of the groups; ``entry_of`` takes a key and a build function."""
        slots, entries = list(values), []
        for number, group in enumerate(self.groups):
            key = (number, *[slots[slot] for slot in group.key])
            entries.append(entry_of(key, lambda: self._build(number, slots)))  # noqa: B023
            slots.extend(entries[-1].outputs)
        return slots, entries

    def check_inputs(self, needs: tuple[int, ...], check: Callable[..., None], *, sorts: bool) -> bool:
        """Call ``check`` with placeholders when the first group that depends on them is built.

        Args:
            needs: slots of the placeholders that ``check`` takes.
            check: raises a GraphError where the group must not be built.
            sorts: whether the group detects the same error; ``check`` is then called after it, to raise the
                error in the caller's terms.

        Returns:
            True if there is such a group, and it is built again whenever one of the placeholders changes.
        """
        number = next((n for n, group in enumerate(self.groups) if needs[0] in group.key), None)
        if number is None or not set(needs) <= set(self.groups[number].key):
            return False
        checks = self._afterwards if sorts or needs in self.groups[number].checks else self._before
        checks.setdefault(number, []).append((needs, check))
        return True

    def _build(self, number: int, slots: list[Any]) -> tuple[Any, ...]:
        if self._hooks is not None:
            self._hooks.before_build([slots[slot] for slot in self.groups[number].operands])
        for needs, check in self._before.get(number, ()):
            check(*[slots[slot] for slot in needs])
        try:
            results = _call(self.groups[number], slots)
        except GraphError:
            for needs, check in self._afterwards.get(number, ()):
                check(*[slots[slot] for slot in needs])
            raise
        if self._hooks is not None:
            self._hooks.after_build(results)
        return results

    def clear(self) -> None:
        """Drop every cached structure."""
        self._last = None
        self.cache.clear()


@dataclass(frozen=True, slots=True)
class _LastCall:
    """Record of the last call: a call with the same, unchanged tensors finds its results without keys.

    References to results are weak: the cache owns them.

    Attributes:
        tensors: slot, reference and state of each tensor, see ``StructureCache``.
        others: slot and value of every input and size that is not a tensor.
        entries: references to the results, group by group.
    """

    tensors: tuple[tuple[int, weakref.ref[Tensor], tuple[Any, ...]], ...]
    others: tuple[tuple[int, Any], ...]
    entries: tuple[weakref.ref[Entry], ...]

    @staticmethod
    def of(values: tuple[Any, ...], keyed: tuple[int, ...], entries: list[Entry]) -> "_LastCall | None":
        """Return the record of a call; None where a tensor carries no version."""
        if any(entry.copies for entry in entries):
            return None
        tensors = [slot for slot in keyed if isinstance(values[slot], Tensor)]
        return _LastCall(
            tuple([(slot, weakref.ref(values[slot]), state_of_object(values[slot])) for slot in tensors]),
            tuple([(slot, values[slot]) for slot in keyed if slot not in tensors]),
            tuple(map(weakref.ref, entries)),
        )

    def slots_for(self, values: tuple[Any, ...], cache: StructureCache) -> list[Any] | None:
        """Return the slots of a call with these values; None if an argument differs or a result is freed."""
        for slot, ref, seen in self.tensors:
            value = values[slot]
            if ref() is not value or state_of_object(value) != seen:
                return None
        for slot, other in self.others:
            if values[slot] != other:
                return None
        slots = list(values)
        for ref in self.entries:
            entry = ref()
            if entry is None:
                return None
            cache.touch(entry)
            slots.extend(entry.outputs)
        return slots


def _picker(outputs: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return the function that picks the values of some slots."""
    if len(outputs) > 1:
        return itemgetter(*outputs)
    return lambda slots: tuple([slots[slot] for slot in outputs])


def _call(group: Group, slots: list[Any]) -> tuple[Any, ...]:
    # a call of the module itself would look for hooks, which it has none of
    return group.module.forward(*[slots[slot] for slot in group.operands])


def _is_size(node: Node) -> bool:
    source = source_of(node)
    return source is not None and source.kind == "size"


def _dependencies(graph: Graph) -> tuple[dict[Node, Deps], dict[Node, Deps]]:
    """Return for every node the tensor inputs, and the plain sizes, that reach it."""
    tensors: dict[Node, Deps] = {}
    sizes: dict[Node, Deps] = {}
    for node in graph.nodes:
        tensors[node] = frozenset().union(*(tensors[arg] for arg in node.all_input_nodes))
        sizes[node] = frozenset().union(*(sizes[arg] for arg in node.all_input_nodes))
        if node.op == "placeholder":
            (sizes if _is_size(node) else tensors)[node] = frozenset({node})
    return tensors, sizes


def _is_expensive(nodes: list[Node]) -> bool:
    return any(op is not None and op.cached_alone for op in map(op_of, nodes))


def _partition(graph: Graph, deps: dict[Node, Deps]) -> list[list[Node]]:
    """Return the groups' nodes, in an order in which they can run."""
    members: dict[Deps, list[Node]] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and deps[node]:
            members.setdefault(deps[node], []).append(node)
    for key in sorted(members, key=len):
        host = _only_consumer(key, members)
        if host is not None and not _is_expensive(members[key]):
            members[host] += members.pop(key)
    position = {node: index for index, node in enumerate(graph.nodes)}
    groups = [sorted(nodes, key=position.__getitem__) for nodes in members.values()]
    return sorted(groups, key=lambda nodes: max(len(deps[node]) for node in nodes))


def _only_consumer(key: Deps, members: dict[Deps, list[Node]]) -> Deps | None:
    home = {node: group for group, nodes in members.items() for node in nodes}
    consumers = {home.get(user, frozenset()) for node in members[key] for user in node.users}
    consumers.discard(key)
    if len(consumers) != 1:
        return None
    (host,) = consumers
    return host or None


def _split(
    structure: GraphModule, choose: Callable[[Node], Choice | None]
) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    graph = structure.graph
    tensors, sizes = _dependencies(graph)
    slots = {node: slot for slot, node in enumerate(graph.find_nodes(op="placeholder"))}
    count, groups = len(slots), []
    parts = _partition(graph, tensors)
    loose = [n for n in outputs_of(graph) if n.op != "placeholder" and not tensors[n]]
    for nodes in [*([loose] if loose else []), *parts]:
        results = _results(nodes)
        part = _emit(structure, _with_sizes(nodes, tensors), results, choose)
        keys = frozenset().union(*(tensors[n] | sizes[n] for n in nodes))
        groups.append(
            Group(
                GraphModule(structure, part.graph),
                tuple(slots[node] for node in part.operands),
                tuple(sorted(slots[node] for node in keys)),
                frozenset(_checks(nodes, slots)),
            )
        )
        for node in results:
            slots[node] = count
            count += 1
    return tuple(groups), tuple(slots[node] for node in outputs_of(graph))


def _results(nodes: list[Node]) -> list[Node]:
    """Return the nodes whose values are needed outside the group."""
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def _emit(
    structure: GraphModule,
    computed: set[Node],
    results: list[Node],
    choose: Callable[[Node], Choice | None],
) -> PartEmitter:
    """Return the graph that computes a group's results with the kernels that are chosen."""
    emitter = PartEmitter()
    for node in structure.graph.nodes:
        if node in computed:
            choice = choose(node)
            if choice is None or choice.kernel is None:
                emitter.copy(node)
            else:
                choice.kernel.implementation.emit(choice.plan, node, emitter)
    emitter.finish(results)
    return emitter


def _checks(nodes: list[Node], slots: dict[Node, int]) -> Iterator[tuple[int, ...]]:
    """Yield the slots of ids and of their limit that a sort checks before a group uses ids as addresses.

    Other groups that use the ids come later.
    """
    inside = set(nodes)
    for sort in nodes:
        if op_name(sort) != "csr_with_loops":
            continue
        *ends, limit = unpack(sort, "src", "dst", "num_nodes")
        readers = {user for end in ends for user in end.users if user in inside}
        if not inside.issuperset(ends) or any(op_name(user) not in _READS_NO_ROWS for user in readers):
            continue
        (edge_index,) = {end.all_input_nodes[0] for end in ends}
        check = slots.get(edge_index), slots.get(limit)
        if None not in check and inside.intersection(edge_index.users) == set(ends):
            yield check  # type: ignore[misc]


def _with_sizes(nodes: list[Node], deps: dict[Node, Deps]) -> set[Node]:
    """Return ``nodes`` and every node that they need and that depends on sizes alone."""
    computed, pending = set(nodes), list(nodes)
    while pending:
        for arg in pending.pop().all_input_nodes:
            if arg.op != "placeholder" and not deps[arg] and arg not in computed:
                computed.add(arg)
                pending.append(arg)
    return computed
