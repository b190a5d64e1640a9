"""Capture: a call of a model becomes a lifted, functional ATen graph with symbolic sizes.

``torch.export`` traces the model on stand-in tensors with sizes chosen here, never on the caller's tensors,
because the first call may have no edges, one node, or as many nodes as features, and a
trace would take such a coincidence for a rule.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from gnnc.capture.arguments import Call, Leaf, call_forms, flatten_call, rebuild
from gnnc.capture.diagnose import diagnosis
from gnnc.capture.fake_run import failure_on_own_sizes
from gnnc.capture.functionalize import functional
from gnnc.capture.guards import Guards, guards_of
from gnnc.capture.hooks import refuse_registration_hooks
from gnnc.capture.lazy_layers import materialize
from gnnc.capture.printed_text import printed, same_programs
from gnnc.capture.private_copy import private_copy
from gnnc.capture.pyg_data import Container
from gnnc.capture.pyg_patches import exportable
from gnnc.capture.quiet import quiet
from gnnc.capture.read_fields import FieldRecord, Reads
from gnnc.capture.recurrent import RecurrentMode
from gnnc.capture.side_effects import call_alone, global_hooks_checked, run_alone, undone
from gnnc.capture.size_guards import assumed_sizes, at_least_two, in_final_symbols, slices_within, watched
from gnnc.capture.sparse_operand import SparseMode, operand
from gnnc.capture.sparse_results import taken_apart
from gnnc.capture.sparse_state import Hidden
from gnnc.capture.stand_ins import Dimension, StandIns, candidates
from gnnc.capture.symbolic_calls import symbolic_calls
from gnnc.capture.tensor_data import DataMode
from gnnc.capture.torch_globals import confined
from gnnc.capture.trace_lock import TRACES
from gnnc.capture.unregistered_weights import refuse_unregistered, registered_weights
from gnnc.capture.unrolled import Unrolled, Watch, stopped_at_numbers
from gnnc.capture.validate import unusual_graph
from gnnc.capture.value_guards import (
    EqualMode,
    Number,
    ValueGuard,
    add_values,
    asked_symbols,
    guessed,
    keep_symbols,
)
from gnnc.errors import CaptureError
from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.source import Source
from gnnc.torch_private import HigherOrderOperator, LazyGraphModule, pytree, rename

_TO_INTEGER = (round, math.trunc, math.floor, math.ceil)
_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}
_PREFIX = "model."
_MAX_SIZE = 2**40
_Reading = tuple[bool, bool, tuple[torch.Size, ...], tuple[tuple[str, Number], ...]]
"""Way of tracing a call: strictly or not, with symbolic sizes or not, with stand-ins of these shapes, with
guesses of values."""
_TEXT = (
    "[{}] takes what a tensor or a size prints as (repr, str, a format string) for a number or a decision, "
    "at {}: a compiled call would repeat that of the first. Way out: compute it with torch ops, or before "
    "the model; text that is only printed or logged may stay"
)
_NO_WAY = "what the model does depends on sizes in a way that tracing does not reproduce"


@dataclass(frozen=True)
class Captured:
    """A captured call.

    Attributes:
        graph_module: the graph; its placeholders carry ``meta["source"]``. Outputs: the flat
            user outputs (a constant output such as None stays a constant), then one tensor for
            each name in ``mutations``, then a number for each name in ``values``.
        call: the flattened arguments of the traced call; ``call.names`` are the names of the
            flat input tensors, ``call.key`` tells calls apart that need another capture.
        guards: conditions on the flat tensors of later calls.
        out_spec: rebuilds the model's result from the flat user outputs.
        mutations: names of the buffers that the model overwrites (batch norm in train mode).
        unwritten: paths that forward sets in containers among its arguments; compiled calls do not.
        reading: the reading of the sizes that was traced.
        shapes: the shapes of the flat tensors of the traced call, by name.
        reads: the fields of PyG graph objects that forward reads; None: all, or there is no such object.
        unrolled: the dimensions whose sizes forward takes for numbers, as in a loop.
        varying: the dimensions that are known to vary, beside those that always may.
        values: names of the numbers that ``value_guards`` are about.
        value_guards: conditions on numbers that the program computes, for its result to be that of the call.
    """

    graph_module: GraphModule
    call: Call
    guards: Guards
    out_spec: pytree.TreeSpec
    mutations: tuple[str, ...]
    unwritten: tuple[str, ...]
    reading: _Reading
    shapes: Mapping[str, torch.Size]
    reads: Reads | None
    unrolled: frozenset[Dimension]
    varying: frozenset[Dimension]
    values: tuple[str, ...] = ()
    value_guards: tuple[ValueGuard, ...] = ()

    @property
    def constants(self) -> list[torch.Tensor]:
        """Return the tensors that the graph reads and that are neither weights, buffers nor arguments."""
        return [node.meta["value"] for node in placeholders(self.graph_module) if "value" in node.meta]


def capture(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    known: Sequence[Captured] = (),
    guesses: Mapping[str, Number] | None = None,
    *,
    with_gradients: bool = False,
) -> Captured:
    """Trace ``model(*args, **kwargs)`` in its present mode into an ATen graph.

    The model, its buffers, its gradients and the random state are as before afterwards, except that lazy
    layers have parameters.
    Raises CaptureError, which names the line of the model that cannot be traced.

    ``known`` holds captures of the unchanged model for such calls, none of which serves this one: the model
    asks about sizes, or takes some for numbers. The readings that they were traced with are not tried again,
    and sizes that differ from theirs become symbolic. ``guesses`` are values that forward may ask about.
    ``with_gradients`` traces with gradients enabled, as forward may ask.
    """
    call = flatten_call(model, args, kwargs or {})
    refuse_registration_hooks(type(model).__name__)
    materialize(model, args, kwargs or {})
    constants = [leaf.value for leaf in call.leaves if leaf.kind == "constant"]
    copy = private_copy(model)
    plain = torch.inference_mode(False)  # within it, tensors do not count the writes into them
    with TRACES.tracing(), confined(copy), _seed_kept(), undone(copy, constants), exportable(copy), plain:
        with torch.set_grad_enabled(with_gradients), global_hooks_checked(copy):
            entry = _Entry(copy, call)
            entry.guesses = dict(guesses or {})
            varying = _varying(call, known)
            program, guards, reading = _export(entry, call, known, varying)
    graph_module, mutations = _lifted(program, model, call)
    values, value_guards = _with_values(graph_module, entry)
    reads = None if reading[0] else entry.record.reads()
    if reads is not None:
        call = flatten_call(model, args, kwargs or {}, reads)
        guards = _drop_unread(graph_module, guards, call)
    return Captured(
        graph_module=graph_module,
        call=call,
        reads=reads,
        guards=guards,
        out_spec=program.call_spec.out_spec,
        mutations=mutations,
        unwritten=tuple(sorted(entry.unwritten)),
        reading=reading,
        shapes={name: tensor.shape for name, tensor in zip(call.names, call.tensors, strict=True)},
        unrolled=frozenset(entry.unrolled),
        varying=frozenset(varying),
        values=values,
        value_guards=value_guards,
    )


class _Entry(torch.nn.Module):
    """Module that calls the model from flat tensor arguments, with the constants of the call filled in."""

    def __init__(self, model: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.leaves, self.spec = call.leaves, call.spec
        self.forms = call_forms(model)
        self.training = model.training
        self.unwritten: set[str] = set()
        self.held = Hidden(model)
        self.watch = Watch((), ())
        self.record = FieldRecord()
        self.unrolled: set[Dimension] = set()
        self.guesses: dict[str, Number] = {}
        self.guessed: list[ValueGuard] = []
        self.printed: list[str] = []

    def forward(self, *tensors: torch.Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling():  # which would trace what looks for effects, too
            args, kwargs, _ = rebuild(self.leaves, self.spec, self.forms, tensors, _operand)
            return self.model(*args, **kwargs)
        self.watch.learn(tensors)
        args, kwargs, held = rebuild(self.leaves, self.spec, self.forms, tensors, _operand, self.record.watch)
        with self.held.shown(iter(held).__next__):
            return taken_apart(call_alone(self.model, args, kwargs, self.unwritten, self.record))


def _operand(leaf: Leaf, parts: Sequence[torch.Tensor]) -> Any:
    return operand(leaf.value, parts)


def _export(
    entry: _Entry, call: Call, known: Sequence[Captured], varying: Collection[Dimension]
) -> tuple[ExportedProgram, Guards, _Reading]:
    """Export the call; sizes that the model takes for numbers are those of the call.

    Each of them stops a trace when it is first met, so that the loops over it are traced once.
    """
    given = set(getattr(entry.model, "fixed_sizes", ()))
    entry.unrolled = {dimension for each in known for dimension in each.unrolled}
    while True:
        readings = list(candidates(call, given | entry.unrolled, varying))
        try:
            return _export_reading(entry, call, readings, {each.reading for each in known})
        except Unrolled as stop:
            entry.unrolled |= {(call.names[number], dim) for number, dim in stop.dimensions}


def _varying(call: Call, known: Sequence[Captured]) -> set[Dimension]:
    """Return the dimensions that vary: some known capture has them so, or all have another size.

    The width of a floating matrix does not, unless the call has it as another size too, as a square does. All
    ints of a list vary together.
    """
    if not known:
        return set()
    shapes = [tensor.shape for tensor in call.tensors]
    varying = {dimension for each in known for dimension in each.varying}
    for name, tensor in zip(call.names, call.tensors, strict=True):
        for dim, size in enumerate(tensor.shape):
            if any(name not in each.shapes or each.shapes[name][dim] == size for each in known):
                continue
            is_width = tensor.is_floating_point() and tensor.dim() > 1 and dim == tensor.dim() - 1
            if not is_width or sum(list(shape).count(size) for shape in shapes) > 1:
                varying.add((name, dim))
    lists = {name.rpartition("[")[0] for name, _ in varying if name in call.ints} - {""}
    return varying | {(name, 0) for name in call.ints if name.rpartition("[")[0] in lists}


def _export_reading(
    entry: _Entry, call: Call, readings: Sequence[StandIns], known: Collection[_Reading]
) -> tuple[ExportedProgram, Guards, _Reading]:
    """Try every reading of the sizes, non-strict (fast) before strict; exact sizes come last.

    A model that asks about sizes may go another way for this call than for the stand-ins: then
    the exact sizes are traced. No reading is tried where forward fails on the sizes of the call.
    """
    model = entry.model
    if unusual_graph(call) is not None:
        _refuse_failing(entry, call)
    symbolic = [stand_ins for stand_ins in readings if stand_ins.symbolic]
    exact = [stand_ins for stand_ins in readings if not stand_ins.symbolic]
    errors: dict[bool, Exception] = {}  # the first by whether sizes were symbolic
    for group in (symbolic, exact):
        for strict, stand_ins in itertools.product((False, True), group):
            shapes = tuple(tensor.shape for tensor in stand_ins.tensors)
            reading = strict, stand_ins.symbolic, shapes, tuple(sorted(entry.guesses.items()))
            if stand_ins.symbolic and reading in known:
                break  # would be traced as before, and does not serve this call
            try:
                program, guards = _traced(entry, call, stand_ins, strict)
            except (CaptureError, Unrolled):
                raise
            except Exception as error:  # torch.export raises every kind of exception
                if entry.watch.found is not None:
                    raise entry.watch.found from None
                if not errors:
                    _refuse_failing(entry, call)
                errors.setdefault(stand_ins.symbolic, error)
                continue
            if guards.serves([tensor.shape for tensor in call.tensors]):
                if entry.printed:
                    _refuse_read_text(entry, call, stand_ins, program)
                return program, guards, reading
            break  # another reading would ask the same about sizes
    # what a wrong reading of the sizes fails for is not what the model cannot do
    error = errors.get(False) or errors.get(True) or RuntimeError(_NO_WAY)
    raise _failure(model, call, error) from error


def _refuse_failing(entry: _Entry, call: Call) -> None:
    """Raise CaptureError if forward fails on the sizes and dtypes of a call."""
    error = failure_on_own_sizes(entry, call.tensors, _classes(call))
    if error is not None:
        raise _failure(entry.model, call, error) from error


def _failure(model: torch.nn.Module, call: Call, error: Exception) -> CaptureError:
    sparse = [leaf.value for leaf in call.leaves if leaf.kind == "sparse"]
    return CaptureError(diagnosis(model, error, sparse))


def _refuse_read_text(entry: _Entry, call: Call, stand_ins: StandIns, program: ExportedProgram) -> None:
    """Raise CaptureError if a program depends on text that forward makes of tensors or sizes."""
    where = entry.printed[0]
    try:
        again, _ = _traced(entry, call, stand_ins, strict=False, other_text=True)
    except Exception as error:  # forward raises every kind of exception
        raise CaptureError(_TEXT.format(type(entry.model).__name__, where)) from error
    if not same_programs(program, again):
        raise CaptureError(_TEXT.format(type(entry.model).__name__, where))


def _traced(
    entry: _Entry, call: Call, stand_ins: StandIns, strict: bool, *, other_text: bool = False
) -> tuple[ExportedProgram, Guards]:
    hint = Dim.DYNAMIC(min=2, max=_MAX_SIZE) if stand_ins.symbolic else Dim.AUTO
    dims = tuple({dim: hint for dim in dynamic} for dynamic in stand_ins.dynamic)
    modes = contextlib.ExitStack()
    for mode in () if strict else (SparseMode(), RecurrentMode(), DataMode(), EqualMode()):
        modes.enter_context(mode)
    entry.watch = Watch([t.shape for t in stand_ins.tensors], [t.shape for t in call.tensors])
    if strict:  # draws what the stand-ins draw
        modes.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
    if strict and stand_ins.symbolic:
        with quiet():
            run_alone(entry, stand_ins.tensors)
    calls = contextlib.nullcontext() if strict else symbolic_calls(entry.model, _classes(call))
    modes.enter_context(calls)
    answers = modes.enter_context(guessed(entry.guesses))
    text = modes.enter_context(printed(other=other_text))
    with watched() as branches, stopped_at_numbers(entry.watch), modes, quiet():
        program = torch.export.export(
            entry, stand_ins.tensors, dynamic_shapes=(dims,) if dims else None, strict=strict
        )
        env = getattr(fake_mode_of(program.graph_module), "shape_env", None)
        branches += assumed_sizes(env)
        branches += slices_within(program.graph)
        symbols = asked_symbols(program.graph)
        program = functional(program)
        keep_symbols(program.graph, symbols)
    guards = guards_of(program, call, entry.unrolled)
    entry.guessed = answers  # here, since torch.export restores what an attribute was
    entry.printed = [] if strict else text
    if strict:
        branches += at_least_two(guards.symbols)
    return program, dataclasses.replace(guards, branches=tuple(in_final_symbols(branches, env)))


def _classes(call: Call) -> set[type]:
    """Return the classes of PyG's graphs among the arguments."""
    return {leaf.value.kind for leaf in call.leaves if isinstance(leaf.value, Container)}


@contextlib.contextmanager
def _seed_kept() -> Iterator[None]:
    """Undo a ``torch.manual_seed`` of forward; a trace on stand-ins draws no numbers.

    The generators are those of all threads, so that their states are put back in this case alone.
    """
    seed, state = torch.initial_seed(), torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        if torch.initial_seed() != seed:
            torch.set_rng_state(state)
            torch.cuda.set_rng_state_all(on_devices)


def _lifted(
    program: ExportedProgram, model: torch.nn.Module, call: Call
) -> tuple[GraphModule, tuple[str, ...]]:
    """Return the program's graph with sources on its placeholders, user outputs before mutations."""
    graph_module = program.graph_module
    _refuse_subgraphs(graph_module, model)
    _refuse_rounded_numbers(graph_module, model)
    refuse_unregistered(model, _read_weights(program, model), _PREFIX)
    _make_tensors_of_numbers(graph_module)
    _annotate_inputs(program, call)
    for node in graph_module.graph.nodes:
        node.meta["layer"] = _layer(node)
    mutations = _arrange_outputs(program, model)
    _drop_unused(graph_module, call)
    graph_module.graph.set_codegen(CodeGen())
    return LazyGraphModule(graph_module, graph_module.graph), mutations


def _refuse_subgraphs(graph_module: GraphModule, model: torch.nn.Module) -> None:
    """Refuse calls with graphs of their own, such as torch.cond: a program runs straight through."""
    for node in graph_module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise CaptureError(
                f"[{type(model).__name__}] forward calls torch's {node.target.name()}, which runs functions "
                "of its own, and a compiled model runs straight through. Way out: compute both branches and "
                "choose with torch.where, unroll the loop in Python, or compile the submodules around it"
            )


def _refuse_rounded_numbers(graph_module: GraphModule, model: torch.nn.Module) -> None:
    """Refuse ints that forward makes of floats which it reads from tensors, as ``round(t.item())``."""
    for node in graph_module.graph.nodes:
        operand = node.args[0] if node.target in _TO_INTEGER and node.args else None
        value = operand.meta.get("val") if isinstance(operand, Node) else None
        symbols = value.node.expr.free_symbols if isinstance(value, torch.SymFloat) else ()
        if any(symbol.name.startswith("zuf") for symbol in symbols):
            raise CaptureError(
                f"[{type(model).__name__}] forward makes an int ({node.target.__name__}) of a float that it "
                "reads from a tensor. Way out: round the tensor instead (t.round(), t.floor(), t.long()), "
                "and compute with tensors"
            )


def _make_tensors_of_numbers(graph_module: GraphModule) -> None:
    """Write casts of numbers, which torch.vmap leaves behind, as the tensors that they make."""
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten._to_copy.default and isinstance(node.args[0], int | float):
            node.target, node.args = torch.ops.aten.full.default, ([], node.args[0])
            node.kwargs = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}


def _read_weights(program: ExportedProgram, model: torch.nn.Module) -> dict[str, Any]:
    """Let the graph read weights that forward reaches through globals as such; return the other constants.

    torch 2.11 takes a plain tensor in the place of a parameter, as ``functional_call`` gives, for a constant.
    """
    weights = registered_weights(model, program.constants, _PREFIX)
    nodes, specs = placeholders(program.graph_module), program.graph_signature.input_specs
    inputs = {spec.target: (node, spec) for node, spec in zip(nodes, specs, strict=True)}
    for name, path in weights.items():
        (node, spec), registered = inputs[name], inputs.get(_PREFIX + path)
        if registered is None:
            spec.kind, spec.target = _kind_of(model, path), _PREFIX + path
        else:
            node.replace_all_uses_with(registered[0])
    return {name: value for name, value in program.constants.items() if name not in weights}


def _kind_of(model: torch.nn.Module, path: str) -> InputKind:
    owner, _, name = path.rpartition(".")
    is_buffer = name in vars(model.get_submodule(owner))["_buffers"]
    return InputKind.BUFFER if is_buffer else InputKind.PARAMETER


def _drop_unread(graph_module: GraphModule, guards: Guards, call: Call) -> Guards:
    """Drop the inputs of fields that forward does not read; return the guards of the others."""
    names = set(call.names)
    for node in list(graph_module.graph.nodes):
        if node.op == "placeholder" and not node.users:
            source = node.meta["source"]
            if source.kind == "input" and source.name not in names:
                graph_module.graph.erase_node(node)
    graph_module.recompile()
    return dataclasses.replace(guards, inputs=tuple(guard for guard in guards.inputs if guard.name in names))


def _with_values(graph_module: GraphModule, entry: _Entry) -> tuple[tuple[str, ...], tuple[ValueGuard, ...]]:
    """Append the numbers that guessed answers depend on to the outputs; return their names and the guards."""
    nodes, guards = add_values(graph_module.graph, entry.guessed)
    for guard in guards:
        if not nodes.keys() >= set(map(str, guard.condition.free_symbols)):
            raise CaptureError(
                f"[{type(entry.model).__name__}] decides at {guard.where} by a value that no trace keeps: "
                "compute the value before the model, and pass it as an argument"
            )
    output = graph_module.graph.output_node()
    output.args = ((*outputs_of(graph_module.graph), *nodes.values()),)
    graph_module.recompile()
    return tuple(nodes), tuple(guards)


def _annotate_inputs(program: ExportedProgram, call: Call) -> None:
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    names = iter(call.names)
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        kind = _KINDS.get(spec.kind)
        if kind is None:
            raise CaptureError(
                f"the model holds {spec.target!r}, a {spec.kind.name.lower()}, which is no tensor: "
                "make it a parameter, a buffer or an argument"
            )
        if kind == "input":
            node.meta["source"] = Source("input", next(names))
            continue
        target = str(spec.target).removeprefix(_PREFIX)
        node.meta["source"] = Source(kind, target)
        if kind == "constant":
            node.meta["value"] = program.constants[spec.target]
    for node in placeholders:
        _rename(node, node.meta["source"].name)


def _rename(node: Node, path: str) -> None:
    """Name a placeholder after its source: ``conv1.lin.weight`` is ``conv1_lin_weight``."""
    rename(node, re.sub(r"\W+", "_", path).strip("_") or "value")
    node.target = node.name


def _arrange_outputs(program: ExportedProgram, model: torch.nn.Module) -> tuple[str, ...]:
    user: list[Any] = []
    mutated: list[Any] = []
    names: list[str] = []
    for value, spec in zip(outputs_of(program.graph), program.graph_signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            user.append(value)
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            mutated.append(value)
            names.append(str(spec.target).removeprefix(_PREFIX))
        else:
            name = _input_name(program, str(spec.target))
            raise CaptureError(
                f"[{type(model).__name__}] the model writes into its argument {name!r} in place: "
                f"let it work on a clone ({name} = {name}.clone())"
            )
    program.graph.output_node().args = (tuple(user + mutated),)
    return tuple(names)


def _input_name(program: ExportedProgram, placeholder: str) -> str:
    """Return the argument's path of an input of the exported program."""
    inputs = program.graph_signature.user_inputs
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    position = list(inputs).index(placeholder) - len(inputs)
    return nodes[position].meta["source"].name


def _layer(node: Node) -> str:
    """Return the path of the module whose forward made ``node``; "" at the root."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    if path.startswith("_empty_nn_module_stack") or path == "model":
        return ""
    return path.removeprefix(_PREFIX)


def _drop_unused(graph_module: GraphModule, call: Call) -> None:
    """Drop the inputs without users that are no tensors of the caller: weights, and ints that are numbers."""
    ints = {Source("input", name) for name in call.ints}
    for node in list(graph_module.graph.nodes):
        if node.op == "placeholder" and not node.users:
            source = node.meta["source"]
            if source.kind != "input" or source in ints:
                graph_module.graph.erase_node(node)
