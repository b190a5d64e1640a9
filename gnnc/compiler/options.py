"""The options of ``gnnc.compile``, checked: what is wrong with one is said before anything is captured."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Module

from gnnc.errors import GnncError, PrecisionError, UnsupportedError
from gnnc.passes.base import Pass, Property, established_by
from gnnc.precision import AUTO, BUILT, FP8, Precision
from gnnc.target import Target

_NEEDED = (Property.NORMALIZED, Property.LOWERED)
"""Properties of a graph that a program is built from."""


def built(precision: Precision) -> Precision:
    """Return the precision; UnsupportedError where this version has no kernels for it."""
    if precision.name not in BUILT:
        raise UnsupportedError(
            f"precision {precision.name!r} is known but not built in this version: use fp32, fp16, "
            "bf16, fp8, int8 or auto"
        )
    return precision


def default_precision(target: Target) -> Precision:
    """Return int8, or fp32 where int8 is slower than that on the machine of a target."""
    return Precision.parse("fp32" if "int8" in target.slower else "int8")


_DISTRIBUTED = ("DistributedDataParallel", "FullyShardedDataParallel")


def refuse_untraceable(model: Module) -> None:
    """Refuse modules of TorchScript, whose code no trace can read, and those that exchange gradients.

    Raises:
        UnsupportedError: names the module.
    """
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__name__ in _DISTRIBUTED and kind.__module__.startswith("torch."):
            place = f"its module {path!r} is" if path else "it is"
            raise UnsupportedError(
                f"[{type(model).__name__}] {place} a {kind.__name__}, which exchanges gradients between "
                "processes around each call: compile the model inside, and wrap the compiled one, "
                f"{kind.__name__}(gnnc.compile(model))"
            )
        if isinstance(module, torch.jit.ScriptModule):
            place = f"its module {path!r}" if path else "it"
            raise UnsupportedError(
                f"[{type(model).__name__}] {place} was made by torch.jit.script or torch.jit.trace, which "
                "gnnc.compile cannot trace again: compile the original module"
            )


def overrides_of(overrides: Any) -> dict[str, Precision]:
    """Return the precisions by glob; GnncError where a key or the whole is of another kind."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise GnncError(
            f"overrides must be a dict from module path to precision, got {type(overrides).__name__}; "
            "write {'conv1': 'fp32'}"
        )
    precisions: dict[str, Precision] = {}
    for glob, name in (overrides or {}).items():
        if not isinstance(glob, str):
            raise GnncError(f"overrides: a key is the path of a module, or a glob of paths, got {glob!r}")
        precisions[glob] = built(Precision.parse(name))
        if precisions[glob] == AUTO:
            raise UnsupportedError(
                f"overrides: {glob!r}: auto chooses for a whole model: use precision='auto', and overrides "
                "for the layers that are to have a fixed precision"
            )
    return precisions


def refuse_unmatched(overrides: Iterable[str], model: Module) -> None:
    """Refuse globs that match no module.

    Raises:
        PrecisionError: with the paths that there are.
    """
    names = [name for name, _ in model.named_modules()]
    for glob in overrides:
        if not any(fnmatchcase(name, glob) for name in names):
            known = ", ".join(repr(name) for name in names[1:9])
            raise PrecisionError(f"overrides: {glob!r} matches no module; this model has {known}")


def check_precisions(precisions: Iterable[Precision], target: Target) -> None:
    """Refuse precisions that the backend has no kernels for.

    Raises:
        UnsupportedError: a precision is neither ``auto`` nor one of the target's.
    """
    for precision in precisions:
        if precision == FP8 and precision.name not in target.supported:
            raise UnsupportedError(
                f"precision 'fp8' is not built for backend {target.name!r}: it needs the FP8 instructions of "
                "sm_89 and newer GPUs (Ada, Hopper, Blackwell), which CPUs and older GPUs lack: use int8, "
                "with as few bytes, or bf16. Features in torch.float8_e4m3fn are taken in every precision"
            )
        if precision != AUTO and precision.name not in target.supported:
            raise UnsupportedError(
                f"precision {precision.name!r} is not built for backend {target.name!r}: use one of "
                f"{', '.join(sorted(target.supported))}"
            )


def passes_of(pipeline: Any) -> tuple[Pass, ...]:
    """Return the passes of a pipeline.

    Raises:
        GnncError: an element is no pass, or no pass establishes a property that programs need.
    """
    passes = tuple(pipeline) if isinstance(pipeline, Iterable) else (pipeline,)
    for step in passes:
        runs = callable(getattr(step, "run", None)) or callable(getattr(step, "run_parts", None))
        if not (runs and hasattr(step, "name")):
            raise GnncError(
                f"pipeline: {step!r} is no pass: a pass has a name and run(gm, ctx); see docs/add-a-pass.md"
            )
    lacking = [prop for prop in _NEEDED if not any(prop in established_by(step) for step in passes)]
    if lacking:
        names = " or ".join(sorted(prop.name for prop in lacking))
        raise GnncError(
            f"pipeline: no pass establishes {names}, and nothing runs without it: take "
            "gnnc.passes.PIPELINE and add to it or leave out others; gnnc.passes.run_pass runs a single one"
        )
    return passes


def refuse_unbuilt(qat: bool) -> None:
    """Refuse options of later versions."""
    if qat:
        raise UnsupportedError(
            "qat=True is not built in this version: train the original model, then compile it"
        )


def graph_mode(value: Any) -> Any:
    """Return whether calls replay a CUDA graph: ``auto`` or a bool; GnncError for other values."""
    if value not in ("auto", True, False):
        raise GnncError(f"cuda_graph must be 'auto', True or False, got {value!r}")
    return value


def budget(value: float) -> float:
    """Return the error budget; GnncError where it is no number between 0 and 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise GnncError(f"error_budget must be a number between 0 and 1, got {value!r}")
    return float(value)


def checks_scales(value: str | None) -> bool:
    """Return whether scales are checked; GnncError where the option means nothing."""
    if value not in ("scale", "off", None):
        raise GnncError(f"check_finite must be 'scale', 'off' or None, got {value!r}")
    return value == "scale"
