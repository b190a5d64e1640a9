"""Capture, pipeline, structure program and executable, put together to one compiled program."""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from gnnc.calibrate.calibration import rates_for
from gnnc.calibrate.timing import timer_of
from gnnc.capture.export import Captured
from gnnc.capture.value_guards import Number, guessed
from gnnc.compiler.auto import run_auto
from gnnc.compiler.call_function import CallWriter, owner_of
from gnnc.compiler.gradient_errors import GradientErrors, gradient_errors
from gnnc.compiler.index_checks import Bounds, bounds_by_type
from gnnc.compiler.narrow_inputs import capture_call
from gnnc.compiler.program import Options, Program
from gnnc.compiler.static_scales import ScaledWeights
from gnnc.compiler.training import refusing_own_gradients, want_gradients
from gnnc.errors import InputError, UnsupportedError, VerifyError
from gnnc.ir.graph import fake_mode_of, placeholders
from gnnc.ir.parts import GRADIENTS, Parts
from gnnc.ir.source import Source, source_of
from gnnc.passes.base import Context, Stage, assigned_at, run_passes, run_until_assigned
from gnnc.passes.edges.index_bounds import IndexBound, index_bounds
from gnnc.passes.quantize import SCALED_FROM, STATIC_SCALE
from gnnc.passes.rewrite.boundary import drop_structure
from gnnc.precision import AUTO, FP32
from gnnc.runtime.backend import Backend
from gnnc.runtime.program.differentiated import DifferentiatedGraph
from gnnc.runtime.program.executable import Executable
from gnnc.runtime.program.features import FeaturesProgram
from gnnc.runtime.program.memory import OutputPool
from gnnc.runtime.program.training import TrainingExecutable
from gnnc.runtime.structure.runner import StructureRunner
from gnnc.target import Target
from gnnc.tensor_state import storage_fault


def build_program(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    pool: OutputPool,
    *,
    use_examples: bool,
    known: Sequence[Program] = (),
    guesses: Mapping[str, Number] | None = None,
    captured: Captured | None = None,
    trains: bool = False,
) -> Program:
    """Capture a call and compile it.

    Args:
        model: the model, in the mode to capture.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        options: the options of ``gnnc.compile``.
        pool: memory for outputs.
        use_examples: the arguments are representative: take static scales from them.
        known: programs of such calls, none of which serves this one.
        guesses: numbers that forward may compute and ask about, by their symbols.
        captured: the capture of a call like this one, with the tensors of this one; None: capture it.
        trains: whether the program computes the gradients that the call wants.

    Raises:
        GnncError: the model cannot be traced, or a request cannot be served.
    """
    start = time.perf_counter()
    with _for_training(type(model).__name__) if trains else contextlib.nullcontext():
        captured = captured or capture_call(
            model, args, kwargs, [p.captured for p in known], guesses, with_gradients=trains
        )
    _check_weights(captured)
    if use_examples:  # passes run the graph on them, before the program's own bounds are known
        Bounds(captured.guards.inputs, index_bounds(captured.graph_module)).check(captured.call.tensors)
    traced = time.perf_counter()
    context = _context(model, captured, options, use_examples)
    if trains:
        want_gradients(model, captured)
    # Passes run nodes again for the shapes of their results: without autograd, and with the guessed numbers.
    with torch.no_grad(), guessed(guesses or {}), _own_saved_tensors():
        first = Parts(forward=captured.graph_module)
        later, context = _run_passes(first, options, context)
        stages = [("capture", first), *later]
        _check_symbols(captured)
        lowered = _lower(type(model).__name__, captured, options, stages, context, pool)
    scaled_weights = _scaled_weights(model, captured, stages)
    drop_structure(lowered.parts.forward, context)
    captured = dataclasses.replace(captured, call=dataclasses.replace(captured.call, tensors=()))
    program = _program(model, captured, options.backend, stages, context, lowered, scaled_weights)
    program.seconds = {"capture": traced - start, "compile": time.perf_counter() - traced}
    return program


def _context(model: torch.nn.Module, captured: Captured, options: Options, use_examples: bool) -> Context:
    """Return the context of the passes, with a note for each attribute that is not written back."""
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
    return context


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """The executables of the last stage's graphs, and the bounds of the indices that they read."""

    parts: Parts
    executable: Executable | TrainingExecutable
    runner: StructureRunner | None
    features: FeaturesProgram | None
    bounds: Bounds
    gradient_errors: GradientErrors | None


def _lower(
    owner: str,
    captured: Captured,
    options: Options,
    stages: Sequence[Stage],
    context: Context,
    pool: OutputPool,
) -> _Lowered:
    """Lower the graphs of the last stage for the backend."""
    backend, (_, parts) = options.backend, stages[-1]
    runner = None if parts.structure is None else backend.structure_program(parts.structure)
    make = partial(
        backend.executable, pool=pool, check_finite=options.check_finite, cuda_graph=options.cuda_graph
    )
    errors = _gradient_errors(stages, options, context, make)
    features = _features_program(parts.features, backend, make)
    if parts.backward is None:
        executable = make(parts.forward)
    else:
        executable = TrainingExecutable(owner, parts, make, _differentiated(owner, options, stages))
    found = _index_bounds(stages)
    bounds = Bounds(captured.guards.inputs, [*found, *bounds_by_type(captured.call.names, found)])
    if runner is not None and parts.structure is not None:
        bounds.leave_to(runner, parts.structure)
    return _Lowered(parts, executable, runner, features, bounds, errors)


def _program(
    model: torch.nn.Module,
    captured: Captured,
    backend: Backend,
    stages: Sequence[Stage],
    context: Context,
    lowered: _Lowered,
    scaled_weights: ScaledWeights | None,
) -> Program:
    """Return the program, with the generated functions of its calls."""
    executable, runner = lowered.executable, lowered.runner
    writer = CallWriter(model, captured, lowered.parts, lowered.bounds, lowered.features)
    bind = partial(writer.compile, finish=False)
    return Program(
        captured=captured,
        backend=backend,
        snapshots=tuple(stages),
        context=context,
        executable=executable,
        runner=runner,
        features=lowered.features,
        bounds=lowered.bounds,
        run=executable.whole(writer.compile(executable, runner)),
        bind=bind,
        profiled=executable.whole(bind(executable.profile, runner)),
        scaled_weights=scaled_weights,
        gradient_errors=lowered.gradient_errors,
    )


@contextlib.contextmanager
def _for_training(owner: str) -> Iterator[None]:
    """Trace, within the block, a forward whose gradients are wanted."""
    with refusing_own_gradients(owner), _own_saved_tensors():
        yield


def _own_saved_tensors() -> torch.autograd.graph.saved_tensors_hooks:
    """Return a block in which hooks on saved tensors, as checkpointing has around a call, are not called."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _differentiated(owner: str, options: Options, stages: Sequence[Stage]) -> DifferentiatedGraph | None:
    """Return what computes gradients of gradients; None where the program is not FP32 alone."""
    if any(precision != FP32 for precision in (options.precision, *options.overrides.values())):
        return None
    if options.plan is not None:
        return None
    undifferentiated = [p.forward for _, p in stages if GRADIENTS not in p.forward.meta]
    return DifferentiatedGraph(owner, undifferentiated[-1], stages[-1][1].forward)


def _target(backend: Backend) -> Target:
    """Return the backend's target with the services that only the driver can give."""
    return dataclasses.replace(
        backend.target, lowering=backend, rates=partial(rates_for, backend), timer=timer_of(backend)
    )


def _run_passes(parts: Parts, options: Options, context: Context) -> tuple[list[Stage], Context]:
    if options.precision == AUTO:
        return run_auto(parts, options.pipeline, context, check_finite=options.check_finite)
    before, rest = run_until_assigned(parts, options.pipeline, context)
    start = before[-1][1] if before else parts
    return before + run_passes(start, rest, context), context


def _gradient_errors(
    stages: Sequence[Stage], options: Options, context: Context, make: Any
) -> GradientErrors | None:
    """Return the errors of gradients on the examples, which are let go; None where there are none."""
    if context.step is None:
        return None
    _, before = stages[assigned_at(options.pipeline) or 0]  # the first stage is of no pass
    errors = gradient_errors(before.forward, stages, context, make)
    context.step = None
    return errors


def _features_program(
    graph: GraphModule | None, backend: Backend, make: Callable[[GraphModule], Callable[..., tuple[Any, ...]]]
) -> FeaturesProgram | None:
    if graph is None:
        return None
    hooks = None if backend.structure_hooks is None else backend.structure_hooks()
    executable = make(graph)
    check = executable.check if isinstance(executable, Executable) else None
    return FeaturesProgram(executable, hooks, check)


def _index_bounds(stages: Sequence[Stage]) -> Sequence[IndexBound]:
    metas = (parts.forward.meta for _, parts in stages)
    return next((meta["index_bounds"] for meta in metas if "index_bounds" in meta), ())


def _scaled_weights(
    model: torch.nn.Module, captured: Captured, stages: Sequence[Stage]
) -> ScaledWeights | None:
    """Return the weights that static scales of a program depend on, or None where it has no such scale."""
    _, parts = stages[-1]
    if not any(STATIC_SCALE in node.meta for node in placeholders(parts.forward)):
        return None
    sources = next(p.forward.meta[SCALED_FROM] for _, p in stages if SCALED_FROM in p.forward.meta)
    if parts.structure is not None and any(source.kind == "structure" for source in sources):
        sources |= {source for node in placeholders(parts.structure) if (source := source_of(node))}
    written = {Source("buffer", name) for name in captured.mutations}
    weights = {source for source in sources - written if source.kind in ("parameter", "buffer")}
    constants = [
        node.meta["value"]
        for node in placeholders(captured.graph_module)
        if source_of(node) in sources and isinstance(node.meta.get("value"), torch.Tensor)
    ]
    return ScaledWeights(model, sorted(weights, key=str), constants)


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


def example_values(model: torch.nn.Module, captured: Captured) -> tuple[Any, ...]:
    """Return the values of the captured graph's placeholders: arguments, weights, constants."""
    tensors = dict(zip(captured.call.names, captured.call.tensors, strict=True))
    values = []
    for node in placeholders(captured.graph_module):
        source = source_of(node)
        assert source is not None
        if source.kind == "input":
            values.append(tensors[source.name].detach())
        elif source.kind == "constant":
            values.append(node.meta["value"])
        else:
            owner, name = owner_of(model, source)
            value = getattr(owner, name)
            if (fault := storage_fault(value)) is not None:
                raise InputError(f"{source.kind} {source.name!r}: {fault}; compile while it has its memory")
            values.append(value.detach())
    return tuple(values)


@contextlib.contextmanager
def uncollected(*, unless: bool = False) -> Iterator[None]:
    """Turn Python's garbage collector off for a build; one that was off before stays off.

    The first export of a process allocates tens of thousands of objects, which stay. The collector takes that
    growth for a reason to traverse all that the process holds, torch and sympy included: a fifth of the time
    from ``gnnc.compile`` to the first result, for next to nothing that it finds.

    Args:
        unless: the build may leave large tensors in cycles of references, so the collector stays on.
    """
    if unless or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
