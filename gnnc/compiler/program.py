"""One compiled call of a model: capture, pipeline, structure cache and executable put together."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.calibrate.calibration import rates_for, stored_rates
from gnnc.calibrate.timing import timer_of
from gnnc.capture.arguments import Call
from gnnc.capture.export import Captured, capture
from gnnc.capture.trace_lock import CLOCK, LOCK
from gnnc.compiler.auto import predicted_times, run_auto
from gnnc.compiler.index_checks import Bounds, bounds_by_type
from gnnc.errors import CaptureError, InputError, UnsupportedError, VerifyError
from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.parts import Parts
from gnnc.ir.source import Source, source_of
from gnnc.passes.base import Context, Pass, Stage, run_passes
from gnnc.passes.edges.index_bounds import IndexBound, index_bounds
from gnnc.passes.quantization.saved_plan import Plan
from gnnc.passes.rewrite.boundary import drop_structure, whole_examples
from gnnc.passes.search.choice import Choice
from gnnc.passes.search.choice import report as choice_report
from gnnc.passes.search.study import OpChoices
from gnnc.precision import AUTO, Precision
from gnnc.report.summary import Chosen
from gnnc.runtime.backend import Backend
from gnnc.runtime.program.executable import Executable
from gnnc.runtime.program.launches import expr, variable
from gnnc.runtime.program.memory import OutputPool
from gnnc.runtime.program.sizes import Sizes
from gnnc.runtime.structure.runner import StructureRunner
from gnnc.target import Target
from gnnc.torch_private import pytree


@dataclass(frozen=True)
class Options:
    """What the user asked of ``gnnc.compile``, validated.

    Attributes:
        precision: precision of the whole model.
        overrides: module-path glob to precision.
        error_budget: relative L2 error allowed on the output.
        backend: the backend to lower for.
        requested: the name of the backend as the user gave it; ``auto`` goes by the model's device.
        check_finite: whether a non-finite scale is an error.
        cuda_graph: whether calls on a CUDA device launch a CUDA graph: a bool or ``auto``.
        pipeline: the passes.
        plan: precisions by layer and op, or None.
    """

    precision: Precision
    overrides: Mapping[str, Precision]
    error_budget: float
    backend: Backend
    requested: str
    check_finite: bool
    cuda_graph: bool | str
    pipeline: tuple[Pass, ...]
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the cost model and ``auto`` know of a program.

    Attributes:
        predicted: seconds of each launch, by node; empty where this machine was never measured.
        gains: receptive-field gain, by name of the primitive before it was quantized.
        choices: option, sensitivity and next best of each primitive, by the same name.
        chosen: what is to be said of the choice.
    """

    predicted: Mapping[str, float]
    gains: Mapping[str, float]
    choices: Mapping[str, Chosen]
    chosen: Sequence[str]


@dataclass
class Program:
    """A model compiled for one structure of arguments.

    Attributes:
        captured: the traced call; the tensors of its arguments are the caller's alone again.
        backend: the backend that it is lowered for.
        snapshots: (pass name, graphs after it), the captured graph first.
        context: what the passes noted.
        executable: the lowered compute graph.
        run: takes the flat tensors of a call, returns the model's result.
        bind: takes what runs the lowered graph and what computes the structure, returns what ``run`` is, but
            that its result is that of the former.
        timings: measured seconds by node name, from ``profile``.
        floors: seconds that the compulsory bytes of each node take at copy bandwidth, likewise.
        tuned: what ``tune`` measured of cuts of the graph, to be printed; None: nothing was.
        seconds: how long compiling took, by phase.
    """

    captured: Captured
    backend: Backend
    snapshots: tuple[Stage, ...]
    context: Context
    executable: Executable
    runner: StructureRunner | None
    bounds: Bounds
    run: Callable[[Sequence[Tensor]], Any]
    bind: Callable[..., Callable[[Sequence[Tensor]], Any]]
    profiled: Callable[[Sequence[Tensor]], list[Any]]
    timings: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    tuned: Sequence[Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> Parts:
        """The lowered graphs."""
        return self.snapshots[-1][1]

    @property
    def stages(self) -> tuple[tuple[str, GraphModule], ...]:
        """(pass name, forward graph after it), the captured graph first."""
        return tuple((name, parts.forward) for name, parts in self.snapshots)

    @property
    def notes(self) -> list[Any]:
        """Remarks of the passes."""
        return self.context.notes

    def examples(self) -> tuple[Any, ...] | None:
        """Return the arguments of the lowered graph on the example inputs; the structure is computed anew."""
        return whole_examples(self.parts, self.context)

    def knowledge(self) -> Knowledge:
        """Return what ``summary()`` and ``explain()`` tell beside the graph itself."""
        rates = stored_rates(self.backend)
        values = self.context.examples
        predicted = {} if rates is None else predicted_times(self.parts.forward, values, rates)
        choice: Choice | None = self.context.choice
        if choice is None:
            return Knowledge(predicted, {}, {}, ())
        gains = {node.name: gain for node, gain in choice.study.gains.items()}
        chosen = zip(choice.study.ops, choice.solution.chosen, strict=True)
        choices = {op.node.name: _chosen(choice, op, o) for op, o in chosen}
        return Knowledge(predicted, gains, choices, choice_report(choice))

    def clear(self) -> None:
        """Drop cached structures, cuts that were measured for them, and kept memory."""
        self.tuned = None
        self.executable.clear()
        self.bounds.clear()
        if self.runner is not None:
            self.runner.clear()


def _chosen(choice: Choice, op: OpChoices, number: int) -> Chosen:
    other = choice.alternative(op.node.name)
    return Chosen(
        str(op.options[number]),
        op.error(number) if choice.study.measured else None,
        None if other is None else (str(other[0]), *other[1:]),
    )


def build_program(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    pool: OutputPool,
    *,
    use_examples: bool,
    known: Sequence[Program] = (),
) -> Program:
    """Capture a call and compile it.

    Args:
        model: the model, in the mode to capture.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        options: what was asked of ``gnnc.compile``.
        pool: memory for outputs.
        use_examples: the arguments are representative: take static scales from them.
        known: programs of such calls, none of which serves this one.

    Raises:
        GnncError: the model cannot be traced, or a request cannot be served.
    """
    start = time.perf_counter()
    captured = capture_call(model, args, kwargs, [each.captured for each in known])
    _check_weights(captured)
    if use_examples:  # passes run the graph on them, before the program's own bounds are known
        Bounds(captured.guards.inputs, index_bounds(captured.graph_module)).check(captured.call.tensors)
    traced = time.perf_counter()
    context = Context(
        precision=options.precision,
        overrides=dict(options.overrides),
        target=_target(options.backend),
        error_budget=options.error_budget,
        plan=options.plan,
        examples=example_values(model, captured) if use_examples else None,
        current_pass="capture",
    )
    for path in captured.unwritten:
        context.note(None, f"forward sets {path}; compiled calls leave the caller's as it is")
    with torch.no_grad():
        parts = Parts(forward=captured.graph_module)
        stages = [("capture", parts)]
        later, context = _run_passes(parts, options, context)
        stages += later
        parts = stages[-1][1]
        _check_symbols(captured)
        runner = _structure_runner(options.backend, parts.structure)
        executable = options.backend.executable(
            parts.forward, pool, check_finite=options.check_finite, cuda_graph=options.cuda_graph
        )
        found = _index_bounds(stages)
        found = [*found, *bounds_by_type(captured.call.names, found)]
        bounds = Bounds(captured.guards.inputs, found)
        if runner is not None and parts.structure is not None:
            bounds.leave_to(runner, parts.structure)
    drop_structure(parts.forward, context)
    captured = dataclasses.replace(captured, call=dataclasses.replace(captured.call, tensors=()))
    binder = _Binder(model, captured, parts, bounds)
    bind = partial(binder.compile, finish=False)
    program = Program(
        captured=captured,
        backend=options.backend,
        snapshots=tuple(stages),
        context=context,
        executable=executable,
        runner=runner,
        bounds=bounds,
        run=executable.whole(binder.compile(executable, runner)),
        bind=bind,
        profiled=executable.whole(bind(executable.profile, runner)),
    )
    program.seconds = {"capture": traced - start, "compile": time.perf_counter() - traced}
    return program


def _target(backend: Backend) -> Target:
    """Return the backend's target with the services that only the driver can give."""
    return dataclasses.replace(
        backend.target, lowering=backend, rates=partial(rates_for, backend), timer=timer_of(backend)
    )


def _run_passes(parts: Parts, options: Options, context: Context) -> tuple[list[Stage], Context]:
    if options.precision == AUTO:
        return run_auto(parts, options.pipeline, context, check_finite=options.check_finite)
    return run_passes(parts, options.pipeline, context), context


def _structure_runner(backend: Backend, structure: GraphModule | None) -> StructureRunner | None:
    return None if structure is None else backend.structure_program(structure)


def _index_bounds(stages: Sequence[Stage]) -> Sequence[IndexBound]:
    metas = (parts.forward.meta for _, parts in stages)
    return next((meta["index_bounds"] for meta in metas if "index_bounds" in meta), ())


def capture_call(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], known: Sequence[Captured] = ()
) -> Captured:
    """Trace a call, see ``capture``; node ids may be int32."""
    wide_args, wide_kwargs = pytree.tree_map(_widen, (tuple(args), dict(kwargs)))
    captured = capture(model, wide_args, wide_kwargs, known)
    narrow = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not any(t.dtype == torch.int32 for t in narrow):
        return captured
    return _accept_int32(captured, model, args, kwargs)


def _check_weights(captured: Captured) -> None:
    for node in placeholders(captured.graph_module):
        value, source = node.meta["val"], source_of(node)
        if source is None or source.kind not in ("parameter", "buffer"):
            continue
        if value.is_floating_point() and value.dtype != torch.float32:
            raise UnsupportedError(
                f"{source.kind} {source.name!r} is {value.dtype}: a compiled model keeps float32 weights and "
                "lowers the precision itself; convert the model with .float()"
            )


def _check_symbols(captured: Captured) -> None:
    """Refuse a program in which a size that calls may choose has silently become a number."""
    env = getattr(fake_mode_of(captured.graph_module), "shape_env", None)
    fixed = dict(getattr(env, "replacements", {}))
    for guard in captured.guards.inputs:
        shape: tuple[Any, ...] = guard.shape
        for dim, size in enumerate(shape):
            symbols = getattr(size, "free_symbols", ())
            if any(symbol in fixed and fixed[symbol].is_number for symbol in symbols):
                raise VerifyError(
                    f"dimension {dim} of {guard.name} is free in the captured graph, but a pass fixed it to "
                    f"{size.subs(fixed)}: this is a bug of gnnc, please report it"
                )


def _widen(value: Any) -> Any:
    is_int32 = isinstance(value, Tensor) and value.dtype == torch.int32
    return value.long() if is_int32 else value


def _accept_int32(
    captured: Captured, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Captured:
    """Convert int32 inputs inside the graph, where the structure cache still knows the caller's tensor."""
    from gnnc.capture.arguments import flatten_call

    call = flatten_call(model, args, kwargs)
    guards = list(captured.guards.inputs)
    inputs = [n for n in placeholders(captured.graph_module) if _kind(n) == "input"]
    for index, (node, tensor) in enumerate(zip(inputs, call.tensors, strict=True)):
        if tensor.dtype == torch.int32:
            guards[index] = dataclasses.replace(guards[index], dtype=torch.int32)
            _convert(captured.graph_module, node)
    captured.graph_module.recompile()
    return dataclasses.replace(
        captured, call=call, guards=dataclasses.replace(captured.guards, inputs=tuple(guards))
    )


def _convert(graph_module: GraphModule, node: Node) -> None:
    wide = node.meta["val"]
    later = next(n for n in graph_module.graph.nodes if n.op != "placeholder")
    with graph_module.graph.inserting_before(later):
        cast = graph_module.graph.call_function(
            torch.ops.aten._to_copy.default, (node,), {"dtype": torch.int64}
        )
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    cast.meta = {"val": wide, "layer": ""}
    with wide.fake_mode:
        node.meta["val"] = wide.to(torch.int32)


def _kind(node: Node) -> str:
    source = source_of(node)
    assert source is not None
    return source.kind


def example_values(model: torch.nn.Module, captured: Captured) -> tuple[Any, ...]:
    """Return the values of the captured graph's placeholders: arguments, weights, constants."""
    tensors = iter(captured.call.tensors)
    values = []
    for node in placeholders(captured.graph_module):
        source = source_of(node)
        assert source is not None
        if source.kind == "input":
            values.append(next(tensors).detach())
        elif source.kind == "constant":
            values.append(node.meta["value"])
        else:
            owner, name = _owner(model, source)
            with LOCK:
                values.append(getattr(owner, name).detach())
    return tuple(values)


def _owner(model: torch.nn.Module, source: Source) -> tuple[torch.nn.Module, str]:
    path, _, name = source.name.rpartition(".")
    return model.get_submodule(path), name


class _Binder:
    """Writes the function that gathers a program's values and hands them to the executable."""

    def __init__(
        self,
        model: torch.nn.Module,
        captured: Captured,
        parts: Parts,
        bounds: Bounds,
    ) -> None:
        self._model = model
        self._bounds = bounds
        self._captured = captured
        self._compute = parts.forward
        self._structure = parts.structure
        self._sizes = Sizes(inline=True)
        self._scope: dict[str, Any] = {}
        self._weights: list[tuple[str, str, str]] = []
        self._inputs = {name: f"x{i}" for i, name in enumerate(captured.call.names)}
        self._learn_inputs()

    def compile(
        self, execute: Callable[..., Any], runner: Callable[..., Any] | None, *, finish: bool = True
    ) -> Callable[[Sequence[Tensor]], Any]:
        """Return ``run(tensors)``."""
        self._weights = []
        lines = [f"{', '.join(self._inputs.values())}, = tensors"] if self._inputs else []
        if self._bounds:
            lines.append("check_bounds(tensors)")
        if self._structure is not None and runner is not None:
            values = [self._value(node) for node in placeholders(self._structure)]
            lines.append(f"s = structure({', '.join(values)})")
            self._learn_structure()
        arguments = [self._value(node) for node in placeholders(self._compute)]
        lines = self._fetch_weights() + lines
        outputs = f"execute({', '.join(arguments)})"
        finisher = self._finisher() if finish else None
        if finisher is not None:
            outputs = f"finish({outputs})"
        elif finish:
            outputs += "[0]"
        lines.append(f"return {outputs}")
        source = "def run(tensors):\n" + "".join(f"    {line}\n" for line in lines)
        scope = {
            **self._scope,
            "execute": execute,
            "structure": runner,
            "finish": finisher,
            "check_bounds": self._bounds.check,
            "weight_error": weight_error,
            "clock": CLOCK,
        }
        exec(compile(source, "<gnnc call>", "exec"), scope)
        return scope["run"]

    def _learn_inputs(self) -> None:
        for node in placeholders(self._captured.graph_module):
            source = source_of(node)
            if source is not None and source.kind == "input" and source.name in self._inputs:
                self._sizes.learn(variable(self._inputs[source.name]), node.meta["val"])

    def _structure_results(self) -> list[Node]:
        assert self._structure is not None
        return list(self._structure.graph.output_node().args[0])  # type: ignore[arg-type]

    def _learn_structure(self) -> None:
        by_name = {n.name: i for i, n in enumerate(self._structure_results())}
        for node in placeholders(self._compute):
            source = source_of(node)
            if source is not None and source.kind == "structure":
                self._sizes.learn(expr("s[{}]", by_name[source.name]), node.meta["val"])

    def _value(self, node: Node) -> str:
        source = source_of(node)
        assert source is not None
        if source.kind == "input":
            return self._inputs[source.name]
        if source.kind == "constant":
            return self._bind(f"c{len(self._scope)}", node.meta["value"])
        if source.kind == "size":
            return self._size(node, source)
        if source.kind == "structure":
            names = [n.name for n in self._structure_results()]
            return f"s[{names.index(source.name)}]"
        return self._weight(source, node)

    def _size(self, node: Node, source: Source) -> str:
        found = self._sizes.find(node.meta["val"])
        if found is None:
            raise CaptureError(f"size {source.name} cannot be read off the arguments of a call")
        return found.text

    def _bind(self, name: str, value: Any) -> str:
        self._scope[name] = value
        return name

    def _weight(self, source: Source, node: Node) -> str:
        owner, name = _owner(self._model, source)
        table = owner._parameters if source.kind == "parameter" else owner._buffers
        variable = f"w{len(self._weights)}"
        dictionary = self._bind(f"d{variable}", table)
        shape = self._bind(f"shape_{variable}", torch.Size(node.meta["val"].shape))
        device = node.meta["val"].device
        differs = f"{variable}.shape != {shape} or {elsewhere(variable, device)}"
        self._weights.append((variable, f"{dictionary}.get({name!r})", differs))
        self._scope[f"dtype_{variable}"] = node.meta["val"].dtype
        self._scope[f"device_{variable}"] = device
        self._scope[f"name_{variable}"] = f"{source.kind} {source.name!r}"
        return variable

    def _fetch_weights(self) -> list[str]:
        """Read the weights, again where a trace put stand-ins in their place meanwhile."""
        if not self._weights:
            return []
        lines = ["while True:", "    ticks = clock.ticks"]
        lines += [f"    {variable} = {text}" for variable, text, _ in self._weights]
        lines.append("    if (ticks == clock.ticks and not ticks & 1) or clock.settle(): break")
        lines += [
            f"if {variable} is None or {variable}.dtype is not dtype_{variable} or {differs}:"
            f" weight_error(name_{variable}, {variable}, shape_{variable}, dtype_{variable},"
            f" device_{variable})"
            for variable, _, differs in self._weights
        ]
        return lines

    def _finisher(self) -> Callable[[tuple[Any, ...]], Any] | None:
        """What makes the model's result of the outputs; None where it is the only one of them."""
        spec, names = self._captured.out_spec, self._captured.mutations
        count = len(self._compute.graph.output_node().args[0]) - len(names)  # type: ignore[arg-type]
        if not names and count == 1 and spec.is_leaf():
            return None
        buffers = [_owner(self._model, Source("buffer", name)) for name in names]

        def finish(outputs: tuple[Any, ...]) -> Any:
            for (owner, name), value in zip(buffers, outputs[count:], strict=True):
                owner._buffers[name].copy_(value)
            return pytree.tree_unflatten(list(outputs[:count]), spec)

        return finish


def elsewhere(variable: str, device: torch.device) -> str:
    """Return text that says whether a tensor is on another device than ``device_<variable>``.

    A GPU's number compares in a third of the time; of tensors on the CPU it does not tell them from others.
    """
    if device.type == "cuda" and device.index is not None:
        return f"{variable}.get_device() != {device.index}"
    return f"{variable}.device != device_{variable}"


def weight_error(
    name: str, value: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a parameter or buffer that is no longer what was compiled.

    Args:
        name: its kind and path.
        value: what there is now.
        shape: what it had when compiled.
        dtype: likewise.
        device: likewise, and where the inputs are.

    Raises:
        UnsupportedError: its dtype is not the compiled one.
        InputError: it is missing, has another shape or is elsewhere.
    """
    if value is not None and value.dtype != dtype:
        raise UnsupportedError(
            f"{name} is {value.dtype} now, it was {dtype} when compiled: a compiled model keeps "
            "float32 weights and lowers the precision itself; move it back with .float()"
        )
    if value is not None and value.shape == shape and value.device != device:
        raise InputError(
            f"the inputs are on {device}, but {name} is on {value.device}: pass x.to({str(value.device)!r}) "
            f"and so on, or move the model back with .to({str(device)!r})"
        )
    now = "missing" if value is None else f"of shape {tuple(value.shape)}"
    raise InputError(f"{name} is {now}, it had shape {tuple(shape)} when compiled: compile the model again")


def find(programs: Sequence[Program], call: Call) -> tuple[Program | None, str | None]:
    """Return the program whose guards these tensors satisfy, and the last guard that failed."""
    failure = None
    for program in programs:
        failure = program.captured.guards.failure(call.tensors)
        if failure is None:
            return program, None
    return None, failure
