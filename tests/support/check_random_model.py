"""The check of a random model: compiled in each precision, it computes what eager computes, within bounds."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from random_models import Model, arguments
from shared_captures import shared_captures
from torch import Tensor, nn

import gnnc
from gnnc.errors import GnncError

BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "int8": 5e-2, "fp8": 6e-2}
"""Relative L2 error of a well-conditioned model."""
STEPS = {"fp32": 2.0**-23, "bf16": 2.0**-8, "int8": 1 / 127, "fp8": 2.0**-4}
"""Step of a precision, relative to the largest value of a row."""
BACKENDS = {"fp8": "reference"}
"""Backend of a precision for which the CPU has no kernels."""
CONDITION = 6.0
"""Error of an ill-conditioned model, in changes of its result when x and its weights are rounded."""

AUTOCAST = 1.5
"""Error of a model in bf16, in errors of eager under autocast: some models have no value in 16 bits."""


class Mismatch(AssertionError):
    """A compiled model does not compute what eager computes."""


class Verdict(NamedTuple):
    """The outcome of one call of a compiled model.

    Attributes:
        precision: precision of the compiled model.
        kind: the kind of graph.
        verdict: "equal", "wrong", "refused" (an error of ours), or "raw" (any other exception).
        detail: the error; "" where the result is equal.
    """

    precision: str
    kind: str
    verdict: str
    detail: str


def check_seed(seed: int, precisions: Sequence[str], graphs: int = 2) -> None:
    """Check the model of a seed in each precision.

    Raises:
        Mismatch: names the precision, the error and its bound.
    """
    for verdict in verdicts(seed, precisions, graphs):
        if verdict.verdict != "equal":
            raise Mismatch(f"seed {seed}, {verdict.precision}, {verdict.kind}: {verdict.detail}")


def verdicts(seed: int, precisions: Sequence[str], graphs: int = 2) -> Iterator[Verdict]:
    """Yield the verdict on each call of the model of a seed that eager runs."""
    model = Model(seed).eval()
    with warnings.catch_warnings(), torch.no_grad(), shared_captures():
        warnings.simplefilter("ignore")
        compiled = {
            p: gnnc.compile(model, p, backend=BACKENDS.get(p, "auto"), check_finite="off") for p in precisions
        }
        for number in range(graphs):
            kind, args = arguments(10 * seed + number, model.features)
            want = eager(model, args)
            if want is not None:
                for precision in precisions:
                    yield Verdict(
                        precision, kind, *verdict_on(compiled[precision], model, args, want, precision)
                    )


def verdict_on(
    compiled: Callable[..., Tensor], model: nn.Module, args: Sequence[Tensor], want: Tensor, precision: str
) -> tuple[str, str]:
    """Return the verdict on a call, and its detail."""
    try:
        compare(repr(model), model, args, compiled(*args), want, precision)
    except Mismatch as error:
        return "wrong", str(error)
    except GnncError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    return "equal", ""


def eager(model: nn.Module, args: Sequence[Tensor]) -> Tensor | None:
    """Return eager's result; None where the model does not run on such arguments.

    A copy of the model runs, so that a layer with ``cached=True`` keeps no graph for the next call.
    """
    try:
        return copy.deepcopy(model)(*args)
    except (ValueError, IndexError, RuntimeError):
        return None


def compare(
    name: str, model: nn.Module, args: Sequence[Tensor], got: Tensor, want: Tensor, precision: str
) -> None:
    """Raise Mismatch where a result is not eager's within the bound of a precision."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Mismatch(f"{name}: {got.dtype} {tuple(got.shape)}, eager {want.dtype} {tuple(want.shape)}")
    finite = want.isfinite()
    if precision == "fp32" and not got[finite].isfinite().all():  # where eager is not, a softmax may be
        raise Mismatch(f"{name}: values are not finite that are in eager")
    if not finite.all():
        return
    error = distance(got, want)
    if error <= BOUNDS[precision]:
        return
    bound = BOUNDS[precision] + CONDITION * sensitivity(model, args, want, STEPS[precision])
    if precision == "bf16":
        bound = max(bound, AUTOCAST * distance_in_autocast(model, args, want))
    if not error <= bound:
        raise Mismatch(f"{name}: error {error:.2g}, bound {bound:.2g}")


def distance(got: Tensor, want: Tensor) -> float:
    """Return the relative L2 error."""
    norm = want.double().norm().clamp(min=1e-9)
    return float((got.double() - want.double()).norm() / norm)


def distance_in_autocast(model: nn.Module, args: Sequence[Tensor], want: Tensor) -> float:
    """Return the relative L2 error of eager under autocast to bf16; 0 where it does not run."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = eager(model, args)
    return 0.0 if got is None else distance(got, want)


def sensitivity(model: nn.Module, args: Sequence[Tensor], want: Tensor, step: float) -> float:
    """Return the largest change of eager's result when the inputs and results of its layers are rounded."""
    changes = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)

        def noisy(rows: Any, generator: torch.Generator = generator) -> Any:
            if not isinstance(rows, Tensor) or not rows.is_floating_point() or rows.dim() < 2:
                return rows
            size = rows.abs().amax(-1, keepdim=True) * step
            return rows + size * (torch.rand(rows.shape, generator=generator) - 0.5)

        other = copy.deepcopy(model)
        for weight in other.parameters():
            weight.copy_(noisy(weight))
        for module in list(other.modules())[1:]:
            if not list(module.children()) or isinstance(module, torch.nn.modules.Module):
                module.register_forward_hook(lambda _m, _a, result, noisy=noisy: noisy(result))
        moved = eager(other, [noisy(args[0]), *args[1:]])
        if moved is not None:
            changes.append(distance(moved, want))
    return max(changes, default=0.0)
