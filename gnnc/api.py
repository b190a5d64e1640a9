"""The public face: ``compile`` and the module that it returns."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from gnnc.capture.hooks import global_hooks, hook_tables
from gnnc.capture.sparse_components import forget_components
from gnnc.capture.trace_lock import TRACES
from gnnc.compiler.dispatch import Dispatch, device_of
from gnnc.compiler.measure import profile, tune
from gnnc.compiler.model_proxy import ModelProxy
from gnnc.compiler.options import (
    budget,
    built,
    check_precisions,
    checks_scales,
    default_precision,
    graph_mode,
    overrides_of,
    passes_of,
    refuse_unbuilt,
    refuse_unmatched,
    refuse_untraceable,
)
from gnnc.compiler.program import Options, Program, precision_remarks
from gnnc.compiler.transforms import refuse_trace
from gnnc.errors import GnncError, UnsupportedError
from gnnc.passes.base import Pass, Property, first_with
from gnnc.passes.pipeline import PIPELINE
from gnnc.passes.quantization.saved_plan import Plan
from gnnc.paths import writing
from gnnc.precision import Precision
from gnnc.report import text
from gnnc.runtime.backend import get_backend
from gnnc.torch_private import GLOBAL_FORWARD_HOOKS


def compile(  # noqa: A001  the name is the public contract
    model: torch.nn.Module,
    precision: str | Precision | None = None,
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
        model: a PyTorch Geometric or plain PyTorch message-passing model with float32 parameters; of a
            compiled model, the model that it was compiled from.
        precision: precision of weights and activations: ``fp32``, ``fp16`` (on the CPU by
            rounding alone), ``bf16``, ``int8``, ``fp8`` (on GPUs of sm_89 and newer), or ``auto``: the
            precision of each op that is predicted fastest within ``error_budget``; the other known names
            raise UnsupportedError. Without it ``int8``, or ``fp32`` where that is faster: on CPUs without
            AVX-512 VNNI. ``explain()`` says so.
        example_inputs: a tuple of representative arguments. With it, the model is captured at once, and
            scales are computed from these arguments (static). Without it, the first call captures the model,
            and each call computes its scales (dynamic). The compiled model stores the tuple: a copy, or a
            model that has changed, is captured with it again, and changed weights get new scales from it.
        overrides: module-path glob to precision, for layers that differ.
        error_budget: relative L2 error of the output on ``example_inputs`` that ``auto`` may spend, in
            training also of the gradient of all weights together. Without them nothing can be measured: it
            weighs ops by their receptive-field gain, and trains in ``bf16`` or ``fp32``.
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
        UnsupportedError: a known option that this version does not have, or a module of TorchScript or DDP.
        BackendError: the backend is unknown or cannot run here.
    """
    if not isinstance(model, torch.nn.Module):
        raise GnncError(
            f"gnnc.compile takes a torch.nn.Module, got {type(model).__name__}; wrap a function in a module "
            "whose forward calls it"
        )
    refuse_unbuilt(qat)
    if isinstance(model, CompiledModel):
        model = model.model
    refuse_untraceable(model)
    if example_inputs is not None and not isinstance(example_inputs, tuple | list):
        raise GnncError(
            f"example_inputs must be a tuple of the model's arguments, got {type(example_inputs).__name__}; "
            "for one argument write (x,)"
        )
    chosen_backend = get_backend(backend, device_of(model))
    target = chosen_backend.target
    options = Options(
        precision=built(default_precision(target) if precision is None else Precision.parse(precision)),
        is_default=precision is None,
        overrides=overrides_of(overrides),
        error_budget=budget(error_budget),
        backend=chosen_backend,
        requested=backend,
        check_finite=checks_scales(check_finite),
        cuda_graph=graph_mode(cuda_graph),
        pipeline=passes_of(pipeline),
        plan=None if plan is None else Plan.load(plan),
    )
    if backend != "auto" or device_of(model) is not None:  # else the tensors of a call decide
        check_precisions((options.precision, *options.overrides.values()), options.backend.target)
    refuse_unmatched(options.overrides, model)
    compiled = CompiledModel(model, options, example_inputs)
    if example_inputs is not None:
        compiled._dispatch.capture_examples()
    return compiled


class CompiledModel(ModelProxy):
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
        super().__init__(model)
        self.options = options
        self._example_inputs = None if example_inputs is None else tuple(example_inputs)
        self._dispatch = Dispatch(model, options, self._example_inputs)
        self._eager_methods: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model, as ``forward`` does, and the hooks that are registered on it.

        Hooks on all modules (``register_module_forward_hook``) run within the program, for the model and
        its layers.

        Raises:
            UnsupportedError: there are hooks on all modules, and others on the compiled model.
        """
        if not any(GLOBAL_FORWARD_HOOKS) or not global_hooks():
            return super().__call__(*args, **kwargs)
        if any(hook_tables(vars(self))):
            raise UnsupportedError(
                f"[{type(self.model).__name__}] hooks on all modules run within the compiled model, "
                "and hooks on the compiled model after it, in another order than in eager: register the "
                "latter on the model that was compiled"
            )
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model.

        Args:
            *args: as the model takes them; floating tensors float32, node ids int64 or int32.
            **kwargs: keyword arguments of the model's forward, with the same dtypes.

        Returns:
            What the model returns, in the same dtypes.

        Raises:
            UnsupportedError: gradients are wanted that a compiled model does not have.
            GraphError: a graph argument is not a valid graph.
            InputError: another argument is missing or of the wrong shape, dtype or device.
            CaptureError: the model cannot be traced.
            PrecisionError: a scale is not finite.
        """
        if TRACES.tracer is not None and TRACES.traces_here():  # within a model that is being captured
            return self.model(*args, **kwargs)
        return self._dispatch(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if inspect.ismethod(value) and value.__self__ is self.model and name not in self._eager_methods:
            self._eager_methods.append(name)
        return value

    def __prepare_scriptable__(self) -> Any:  # torch.jit.script asks for it
        refuse_trace(type(self.model).__name__, "torch.jit.script")

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledModel":
        copied = CompiledModel(copy.deepcopy(self.model, memo), self.options, self._example_inputs)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        return CompiledModel, (self.model, self.options, self._example_inputs)

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
        """The lowered graph that computes gradients, or None where the last captured call wanted none.

        Raises GnncError where nothing is captured yet.
        """
        return self._captured().parts.backward

    @property
    def stages(self) -> tuple[tuple[str, GraphModule], ...]:
        """(pass name, graph after it, each runs), captured first; GnncError where nothing is captured yet."""
        return self._captured().stages

    def __str__(self) -> str:
        if self._dispatch.last is None:
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

        Raises GnncError where nothing is captured yet and no other method than forward was used.
        """
        if self._dispatch.last is None and self._eager_methods:
            return text.uncaptured_text(type(self.model).__name__, self._eager_methods)
        return text.explain_text(self._report())

    def profile(self, *args: Any, **kwargs: Any) -> str:
        """Run the model a few times, measure every op, and return ``summary()`` with the times.

        "floor / time" is the part of a time that the op's compulsory bytes (each operand and result once)
        need at the device's copy bandwidth; a dash where they come from a cache, faster than that.
        """
        self(*args, **kwargs)
        profile(*self._dispatch.program_of(args, kwargs))
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
        self(*args, **kwargs)
        program, tensors = self._dispatch.program_of(args, kwargs)
        with self._dispatch.lock:  # one at a time: another would disturb what this one measures
            tune(type(self.model).__name__, program, tensors)
        return self.explain()

    def clear_cache(self) -> None:
        """Drop cached structures with measured cuts, idle memory and temporaries; programs stay compiled."""
        self._dispatch.clear()
        forget_components()

    def save_plan(self, path: str | Path) -> None:
        """Write the chosen precisions as JSON: ``{"layers": {layer: {op: precision}}}``.

        ``gnnc.compile(model, plan=path)`` reads it back. Raises GnncError where nothing is captured yet,
        InputError where the file cannot be written.
        """
        program = self._captured()
        assigned = first_with(Property.ASSIGNED, program.snapshots) or program.parts.forward
        with writing("save_plan", path) as file:
            file.write_text(Plan.of(assigned).to_json(), encoding="utf-8")

    def to_networkx(self) -> Any:
        """Return the lowered graph as a ``networkx.DiGraph``; GnncError where nothing is captured yet."""
        from gnnc.report import drawing  # matplotlib takes half a second to import

        return drawing.to_networkx(self._captured().parts)

    def draw(self, path: str | Path) -> None:
        """Draw the lowered graph to an SVG or PNG file; GnncError where nothing is captured yet."""
        from gnnc.report import drawing

        drawing.draw(path, self._captured().parts)

    def _report(self) -> text.ProgramReport:
        program = self._captured()
        knowledge = program.knowledge()
        options = self.options.with_backend(program.backend)
        return text.ProgramReport(
            model=type(self.model).__name__,
            precision=str(options.precision),
            backend=program.backend.name,
            parts=program.parts,
            notes=program.notes,
            captures=self._dispatch.captures,
            measured=program.timings,
            floors=program.floors,
            predicted=knowledge.predicted,
            gains=knowledge.gains,
            choices=knowledge.choices,
            chosen=[*knowledge.chosen, *precision_remarks(options)],
            eager=self._eager_methods,
            gradient_errors=program.gradient_errors,
            launches=program.executable.launches,
            cuts=None if program.tuned is None else list(map(str, program.tuned)),
        )

    def _captured(self) -> Program:
        if self._dispatch.last is None:
            raise GnncError(
                f"[{type(self.model).__name__}] nothing is captured yet: call the compiled model once, or "
                "pass example_inputs to gnnc.compile"
            )
        return self._dispatch.last
