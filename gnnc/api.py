"""The public face: ``compile`` and the module that it returns."""

import copy
import dataclasses
import inspect
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule

from gnnc.capture.arguments import Call, flatten_call
from gnnc.capture.model_snapshot import Watch, autocast_mode
from gnnc.capture.pyg_data import to_dicts
from gnnc.capture.sparse_components import forget_components
from gnnc.capture.trace_lock import CLOCK, LOCK
from gnnc.capture.validate import describe_arguments, is_graph_name, missing_arguments, validate
from gnnc.compiler import dump
from gnnc.compiler.build import build_program, uncollected
from gnnc.compiler.fast_path import FastPath, fast_path_of
from gnnc.compiler.measure import profile, tune
from gnnc.compiler.options import (
    budget,
    built,
    check_precisions,
    checks_scales,
    overrides_of,
    passes_of,
    refuse_unbuilt,
    refuse_unmatched,
)
from gnnc.compiler.program import Options, Program, find
from gnnc.errors import CaptureError, GnncError, GraphError, InputError, UnsupportedError
from gnnc.passes.base import Pass, Property, first_with
from gnnc.passes.pipeline import PIPELINE
from gnnc.passes.quantization.saved_plan import Plan
from gnnc.precision import Precision
from gnnc.report import text
from gnnc.runtime.backend import get_backend
from gnnc.runtime.program.memory import OutputPool
from gnnc.torch_private import non_persistent_buffers, pytree

_REMEMBERED_FORMS = 256
_INTEGERS_MEET = re.compile(
    r"have the same dtype, but got.*\b(?:long|int|short|char|byte|bool)\b", re.IGNORECASE
)
"""What torch says of a product of integers and floats."""


def compile(  # noqa: A001  the name is the public contract
    model: torch.nn.Module,
    precision: str | Precision = "int8",
    *,
    example_inputs: Sequence[Any] | None = None,
    overrides: Mapping[str, str | Precision] | None = None,
    error_budget: float = 0.02,
    backend: str = "auto",
    cuda_graph: bool | str = "auto",
    qat: bool = False,
    check_finite: str | None = "scale",
    pipeline: Sequence[Pass] = PIPELINE,
    plan: str | Path | None = None,
) -> "CompiledModel":
    """Compile a graph neural network to low precision.

    Args:
        model: a PyTorch Geometric or plain PyTorch message-passing model with float32 parameters.
        precision: what weights and activations are narrowed to: ``fp32``, ``fp16`` (on CUDA), ``bf16`` or
            ``int8``, or ``auto``: the precision of each op that is predicted fastest within
            ``error_budget``; the other known names raise UnsupportedError.
        example_inputs: a tuple of representative arguments. The model is then captured at once and
            scales are taken from them (static); without it capture waits for the first call and
            scales are taken at each call (dynamic). They are kept: a copy, or a model that has changed,
            is captured with them again.
        overrides: module-path glob to precision, for layers that differ.
        error_budget: relative L2 error of the output on ``example_inputs`` that ``auto`` may spend.
            Without them nothing can be measured: it weighs ops by their receptive-field gain.
        backend: ``auto`` (CUDA or the CPU, by the device of the model, or of the inputs of a model without
            parameters), ``cpu``, ``cuda``, ``reference``, or ``cuda-offline``, which compiles and cannot run.
        cuda_graph: ``auto`` or a bool: whether calls replay a CUDA graph; without meaning on the CPU.
        qat: train with quantization in the loop; not in this version.
        check_finite: ``scale`` raises PrecisionError when a scale is NaN or infinite, ``off`` or
            None lets it through.
        pipeline: the passes that run.
        plan: file that ``save_plan`` wrote: precisions by layer and op. ``overrides`` win over it, and
            it wins over ``precision``, which layers that it does not name take.

    Returns:
        A module with the model's signature, parameters and state dict.

    Raises:
        GnncError: ``model`` is not a module, or an option means nothing.
        PrecisionError: unknown precision, or an override that matches nothing.
        UnsupportedError: a known option that this version does not have.
        BackendError: the backend is unknown or cannot run here.
    """
    if not isinstance(model, torch.nn.Module):
        raise GnncError(
            f"gnnc.compile takes a torch.nn.Module, got {type(model).__name__}; wrap a function in a module "
            "whose forward calls it"
        )
    refuse_unbuilt(qat, cuda_graph)
    if isinstance(model, CompiledModel):
        model = model.model
    if example_inputs is not None and not isinstance(example_inputs, tuple | list):
        raise GnncError(
            f"example_inputs must be a tuple of the model's arguments, got {type(example_inputs).__name__}; "
            "for one argument write (x,)"
        )
    options = Options(
        precision=built(Precision.parse(precision)),
        overrides=overrides_of(overrides),
        error_budget=budget(error_budget),
        backend=get_backend(backend, device_of(model)),
        requested=backend,
        check_finite=checks_scales(check_finite),
        cuda_graph=cuda_graph,
        pipeline=passes_of(pipeline),
        plan=None if plan is None else Plan.load(plan),
    )
    if backend != "auto" or device_of(model) is not None:  # else the tensors of a call decide
        check_precisions((options.precision, *options.overrides.values()), options.backend.target)
    compiled = CompiledModel(model, options, example_inputs)
    compiled.check_overrides()
    if example_inputs is not None:
        compiled.capture_examples()
    return compiled


class CompiledModel(torch.nn.Module):
    """A model compiled by ``gnnc.compile``; called as the model is called.

    Parameters, buffers and submodules *are* the model's: training it, loading a state dict into
    it, or moving it is seen at the next call, and ``state_dict()`` has the model's own keys.

    Attributes:
        model: the model that was compiled.
        options: the validated options.
    """

    def __init__(
        self, model: torch.nn.Module, options: Options, example_inputs: Sequence[Any] | None = None
    ) -> None:
        object.__setattr__(self, "model", model)
        super().__init__()
        vars(self).update(
            _parameters=model._parameters,
            _buffers=model._buffers,
            _modules=model._modules,
            _non_persistent_buffers_set=non_persistent_buffers(model),
        )
        self.options = options
        self._example_inputs = None if example_inputs is None else tuple(example_inputs)
        self._forget()

    # Calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model.

        Args:
            *args: as the model takes them; floating tensors float32, node ids int64 or int32.
            **kwargs: likewise.

        Returns:
            What the model returns, in the same dtypes.

        Raises:
            UnsupportedError: gradients are needed.
            GraphError: a graph argument is not a valid graph.
            InputError: another argument is missing or of the wrong shape, dtype or device.
            CaptureError: the model cannot be traced.
            PrecisionError: a scale is not finite.
        """
        if CLOCK.ticks & 1 and CLOCK.traces_here():  # within a model that is being captured
            return self.model(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse_gradients(args, kwargs)
        self._notice_changes()
        fast_path = self._fast_path
        if fast_path is not None and not kwargs and fast_path.serves(args, self._watch.modes):
            return fast_path.run(args)
        tensors: list[Tensor] = []
        form = self._form(args, kwargs, tensors)
        programs = self._by_form.get(form, ()) if form is not None else ()
        for program in programs:
            if program.captured.guards.sizes_fit(tensors):
                if form is not None and not kwargs and program is programs[0]:
                    self._fast_path = fast_path_of(program, form, args, tensors)
                return program.run(tensors)
        return self._slow_call(args, kwargs, form, tensors)

    def _notice_changes(self) -> None:
        """Drop all programs if the model's code is not what they were traced from."""
        try:
            changed = self._watch.has_changed()
        except RuntimeError:  # another thread began to trace, and puts stand-ins into the model's tables
            changed = True
        if not changed:
            return
        with self._lock, LOCK:
            if self._watch.has_changed():
                self._programs.clear()
                self._by_form.clear()
                self._fast_path = None
                self._all_modules = tuple(self.model.modules())
                self._watch = Watch(self.model)
                if self._captures:
                    self._reason = "a layer, a hook, a constant, or which weights are one tensor has changed"

    def _form(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[Any, ...] | None:
        """Collect the tensors, and return all else but their sizes; None for calls of an unusual form."""
        parts: list[Any] = [self._watch.modes, autocast_mode()]
        if not describe_arguments(args, parts, tensors):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not describe_arguments((value,), parts, tensors):
                return None
        return tuple(parts)

    def _slow_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], form: Any, tensors: list[Tensor]
    ) -> Any:
        args, kwargs = to_dicts((args, kwargs))
        call = self._flattened(args, kwargs)
        program = self._program_for(call, args, kwargs)
        try:
            result = program.run(call.tensors)
        except RuntimeError as error:
            raise self._dtype_error(call, error) from error
        if form is not None and list(map(id, tensors)) == list(map(id, call.tensors)):
            self._remember(form, self._structural_key(call), program)
        return result

    def _dtype_error(self, call: Call, error: RuntimeError) -> RuntimeError:
        """What to raise for an error of a run: a trace does not see that integers meet float weights."""
        if not _INTEGERS_MEET.search(str(error)):
            return error
        whole = [
            name
            for name, tensor in zip(call.names, call.tensors, strict=True)
            if not tensor.is_floating_point() and not is_graph_name(name)
        ]
        if not whole:
            return error
        return InputError(
            f"[{type(self.model).__name__}] {error}: {', '.join(whole)} holds integers where the model "
            f"computes with float32; pass {whole[0]}.float()"
        )

    def _remember(self, form: Any, key: Any, program: Program) -> None:
        """Let later calls of this form find its programs at once."""
        with self._lock:
            programs = self._programs.get(key, [])
            if not any(known is program for known in programs):  # the model has changed meanwhile
                return
            if len(self._by_form) >= _REMEMBERED_FORMS:
                self._by_form.clear()
            self._by_form[form] = programs

    def _program_for(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        key = self._structural_key(call)
        program, _ = find(self._programs.get(key, ()), call)
        if program is not None:
            return program
        with self._lock:
            if key not in self._programs:
                self._try_examples(key)
            program, failure = find(self._programs.get(key, ()), call)
            if program is None:
                program = self._capture(key, call, args, kwargs, failure, examples=False)
        return program

    def _try_examples(self, key: Any) -> None:
        """Capture with ``example_inputs``, where the model is now, if they are a call of this key."""
        if self._example_inputs is None or any(autocast_mode()):  # examples run in FP32 alone
            return
        try:
            with LOCK:
                device = device_of(self.model)
            args = _moved(to_dicts(self._example_inputs), device)
            call = self._flattened(args, {})
            if self._structural_key(call) == key:
                self._capture_static(key, call, args)
        except (CaptureError, GraphError, InputError) as error:
            # The model has changed since: the call may run all the same.
            self._reason = f"example_inputs do not run any more: {error}"

    def _flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        with LOCK:
            call = flatten_call(self.model, args, kwargs)
            device = device_of(self.model)
        requested = self.options.requested
        types = () if requested == "auto" else self.options.backend.device_types
        validate(type(self.model).__name__, call, device, requested, types)
        return call

    def _capture_static(self, key: Any, call: Call, args: tuple[Any, ...]) -> None:
        self._capture(key, call, args, {}, None, examples=True)

    def _structural_key(self, call: Call) -> Any:
        modes = tuple(module.training for module in self._all_modules)
        return call.key, tuple((t.dtype, t.dim(), t.device) for t in call.tensors), modes, autocast_mode()

    def _capture(
        self,
        key: Any,
        call: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        failure: str | None,
        *,
        examples: bool,
    ) -> Program:
        try:
            options, known = self._options_for(call), self._programs.get(key, ())
            with uncollected(unless=examples):  # programs that are tried on them hold memory
                program = build_program(
                    self.model, args, kwargs, options, self._pool, use_examples=examples, known=known
                )
        except CaptureError as error:
            self._explain_arguments(call, failure, error)
        again = failure or "another structure of arguments, constants or mode"
        first = "example_inputs" if examples else "the first call"
        self._captures.append(self._reason or (again if self._captures else first))
        self._reason = None
        self._last = program
        dump.dump(type(self.model).__name__, program.snapshots)
        self._programs.setdefault(key, []).append(program)
        return program

    def _options_for(self, call: Call) -> Options:
        """Return the options with the backend of the model's device, or of the call's where it has none."""
        device = device_of(self.model) or next((t.device for t in call.tensors), None)
        options = dataclasses.replace(self.options, backend=get_backend(self.options.requested, device))
        check_precisions((options.precision, *options.overrides.values()), options.backend.target)
        return options

    def _explain_arguments(self, call: Call, failure: str | None, error: CaptureError) -> NoReturn:
        """Blame the arguments where they, not the model, are why tracing failed."""
        parameters = inspect.signature(self.model.forward).parameters.values()
        required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
        missing = missing_arguments(call, required)
        owner = type(self.model).__name__
        failure = failure or self._any_failure(call)
        if missing:
            raise InputError(f"[{owner}] {missing[0]} is None, but the model needs it: {error}") from error
        if failure is not None:
            raise InputError(
                f"[{owner}] {failure}; and these arguments do not run either: {error}"
            ) from error
        raise error

    def _any_failure(self, call: Call) -> str | None:
        """What tells these arguments from those of a program of the same structure."""
        alike = [p for p in self._all_programs() if p.captured.call.names == call.names]
        return alike[-1].captured.guards.failure(call.tensors) if alike else None

    def _refuse_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = pytree.tree_leaves(to_dicts((args, kwargs)))
        with LOCK:
            tensors = (*self.model.parameters(), *(t for t in inputs if isinstance(t, Tensor)))
        if any(tensor.requires_grad for tensor in tensors):
            raise UnsupportedError(
                f"[{type(self.model).__name__}] this call would need gradients, and this version compiles "
                "inference only: call it under torch.no_grad() or torch.inference_mode(), or use "
                "requires_grad_(False) on the model and its inputs; train the original model"
            )

    # Being the model

    @property
    def training(self) -> bool:
        """The model's own flag."""
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "options" in vars(self):
            self.model.training = mode

    def train(self, mode: bool = True) -> "CompiledModel":
        """Set the model's mode; returns self."""
        self.model.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "CompiledModel":
        self.model._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own state dict."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model; takes what the model's method takes."""
        return self.model.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledModel":
        copied = CompiledModel(copy.deepcopy(self.model, memo), self.options, self._example_inputs)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        return CompiledModel, (self.model, self.options, self._example_inputs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.model.forward)

    # Looking inside

    @property
    def graph_module(self) -> GraphModule:
        """The lowered graph that runs at every call; GnncError where nothing is captured yet."""
        return self._captured().parts.forward

    @property
    def structure_graph_module(self) -> GraphModule | None:
        """The graph that runs once per distinct graph, or None where nothing depends on it alone.

        Raises GnncError where nothing is captured yet.
        """
        return self._captured().parts.structure

    @property
    def backward_graph_module(self) -> GraphModule | None:
        """None: this version compiles inference only; GnncError where nothing is captured yet."""
        return self._captured().parts.backward

    @property
    def stages(self) -> tuple[tuple[str, GraphModule], ...]:
        """(pass name, graph after it, each runs), captured first; GnncError where nothing is captured yet."""
        return self._captured().stages

    def __str__(self) -> str:
        if self._last is None:
            name = type(self.model).__name__
            return f"CompiledModel({name}, not captured yet: call it once or pass example_inputs)"
        return text.program_text(self._report())

    def __repr__(self) -> str:
        return str(self)

    def summary(self) -> str:
        """Return a table of every op: layer, bits, error, bytes, flops, times.

        Raises GnncError where nothing is captured yet.
        """
        return text.summary_text(self._report(), self._captured().examples())

    def explain(self) -> str:
        """Return what stayed FP32 or ATen and why, which kernels declined, and re-captures.

        Raises GnncError where nothing is captured yet.
        """
        return text.explain_text(self._report())

    def profile(self, *args: Any, **kwargs: Any) -> str:
        """Run the model a few times, measure every op, and return ``summary()`` with the times.

        "of floor" is the part of a time that the op's compulsory bytes (each operand and result once)
        need at the device's copy bandwidth; above 1 where they come from a cache.
        """
        profile(*self._called(args, kwargs))
        return self.summary()

    def tune(self, *args: Any, **kwargs: Any) -> str:
        """Measure how CUDA kernels should cut the graph of these inputs; return ``explain()``, which says it.

        Where another cut is faster than the cost model's, calls take it for as long as the structure of the
        graph is cached: until the graph is freed or changed, or ``clear_cache()``. Floats may then be added
        up in another order. CUDA graphs of your own are to be captured afterwards.

        Raises:
            UnsupportedError: the backend is not CUDA, or a CUDA graph of your own has captured a call; and
                what a call raises.
        """
        program, tensors = self._called(args, kwargs)
        with self._lock:  # one at a time: another would disturb what this one measures
            tune(type(self.model).__name__, program, tensors)
        return self.explain()

    def clear_cache(self) -> None:
        """Drop cached structures with measured cuts, idle memory and temporaries; programs stay compiled."""
        for program in self._all_programs():
            program.clear()
        self._pool.clear()
        forget_components()

    def save_plan(self, path: str | Path) -> None:
        """Write the chosen precisions as JSON: ``{"layers": {layer: {op: precision}}}``.

        ``gnnc.compile(model, plan=path)`` reads it back. Raises GnncError where nothing is captured yet.
        """
        program = self._captured()
        assigned = first_with(Property.ASSIGNED, program.snapshots) or program.parts.forward
        Path(path).write_text(Plan.of(assigned).to_json())

    def to_networkx(self) -> Any:
        """Return the lowered graph as a ``networkx.DiGraph``; GnncError where nothing is captured yet."""
        from gnnc.report import drawing  # matplotlib takes half a second to import

        return drawing.to_networkx(self._captured().parts)

    def draw(self, path: str | Path) -> None:
        """Draw the lowered graph to an SVG or PNG file; GnncError where nothing is captured yet."""
        from gnnc.report import drawing

        drawing.draw(path, self._captured().parts)

    # Inside

    def check_overrides(self) -> None:
        """Refuse globs that match no module, before anything is traced."""
        refuse_unmatched(self.options.overrides, self.model)

    def capture_examples(self) -> None:
        """Capture with ``example_inputs``; InputError where they are not on the model's device."""
        args = to_dicts(self._example_inputs or ())
        call = self._flattened(args, {})
        with self._lock:
            self._capture_static(self._structural_key(call), call, args)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, tuple[Tensor, ...]]:
        """Make a call; return its program and tensors."""
        self(*args, **kwargs)
        args, kwargs = to_dicts((args, kwargs))
        call = self._flattened(args, kwargs)
        self._last = self._program_for(call, args, kwargs)
        return self._last, call.tensors

    def _forget(self) -> None:
        self._all_modules = tuple(self.model.modules())
        self._watch = Watch(self.model)
        self._reason: str | None = None
        self._programs: dict[Any, list[Program]] = {}
        self._by_form: dict[Any, list[Program]] = {}
        self._fast_path: FastPath | None = None
        self._pool = OutputPool()
        self._lock = threading.RLock()
        self._last: Program | None = None
        self._captures: list[str] = []

    def _all_programs(self) -> list[Program]:
        return [program for programs in self._programs.values() for program in programs]

    def _report(self) -> text.ProgramReport:
        program = self._captured()
        knowledge = program.knowledge()
        return text.ProgramReport(
            model=type(self.model).__name__,
            precision=str(self.options.precision),
            backend=program.backend.name,
            parts=program.parts,
            notes=program.notes,
            captures=self._captures,
            measured=program.timings,
            floors=program.floors,
            predicted=knowledge.predicted,
            gains=knowledge.gains,
            choices=knowledge.choices,
            chosen=knowledge.chosen,
            cuts=None if program.tuned is None else list(map(str, program.tuned)),
        )

    def _captured(self) -> Program:
        if self._last is None:
            raise GnncError(
                f"[{type(self.model).__name__}] nothing is captured yet: call the compiled model once, or "
                "pass example_inputs to gnnc.compile"
            )
        return self._last


def _moved(args: tuple[Any, ...], device: torch.device | None) -> tuple[Any, ...]:
    """Return the arguments with their tensors on ``device``; None: where they are."""
    return args if device is None else pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), args)


def device_of(model: torch.nn.Module) -> torch.device | None:
    """Return the device of a model's first parameter or buffer, or None where it has none."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
