"""Check of the guesses that a program was captured with, after the program has failed on a call.

A program whose forward goes another way than that of the call may fail before its numbers are compared with
the guesses, as in a view of padded rows: then the numbers are computed alone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gnnc.capture.export import Captured
from gnnc.capture.value_guards import OtherValues, test_of
from gnnc.compiler.build import example_values
from gnnc.compiler.program import Program
from gnnc.errors import GraphError, InputError
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import ancestors, outputs_of


def with_checked_guesses(model: torch.nn.Module, program: Program) -> Callable[[Sequence[Tensor]], Any]:
    """Return what runs a program, and raises OtherValues for an error where a guess does not hold."""
    captured, run = program.captured, program.run
    if not captured.value_guards:
        return run

    def checked(tensors: Sequence[Tensor]) -> Any:
        try:
            return run(tensors)
        except (RuntimeError, IndexError, GraphError, InputError):
            _refuse_wrong_guesses(model, captured, tensors)
            raise

    return checked


def _refuse_wrong_guesses(model: torch.nn.Module, captured: Captured, tensors: Sequence[Tensor]) -> None:
    values = _numbers(model, captured, tensors)
    for guard in captured.value_guards:
        names = sorted(map(str, guard.condition.free_symbols))
        if values.keys() >= set(names):
            try:
                test_of([guard], names)([values[name] for name in names])
            except OtherValues as other:
                raise OtherValues(values, other.where) from None


@torch.no_grad()
def _numbers(model: torch.nn.Module, captured: Captured, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the numbers that guards are about, by name: those that come before the step that fails."""
    call = dataclasses.replace(captured.call, tensors=tuple(tensors))
    gm, values = captured.graph_module, example_values(model, dataclasses.replace(captured, call=call))
    wanted = dict(zip(outputs_of(gm.graph)[-len(captured.values) :], captured.values, strict=True))
    needed = ancestors(wanted)
    interpreter = fx.Interpreter(gm, garbage_collect_values=False)
    interpreter.env = dict(zip(placeholders(gm), values, strict=True))
    for node in gm.graph.nodes:
        if node in needed and node not in interpreter.env:
            try:
                interpreter.env[node] = interpreter.run_node(node)
            except Exception:  # the step that the program failed at, or another that depends on a guess
                break
    return {name: interpreter.env[node] for node, name in wanted.items() if node in interpreter.env}
