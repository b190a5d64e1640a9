"""Dispatch: finds the program of a call, or captures and compiles one."""

import dataclasses
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx.proxy import TraceError

from gnnc.capture.arguments import Call, flatten_call
from gnnc.capture.lazy_layers import has_lazy_layers
from gnnc.capture.model_snapshot import ModelSnapshot, autocast_mode
from gnnc.capture.pyg_data import to_dicts
from gnnc.capture.read_fields import Reads
from gnnc.capture.sparse_state import describe_held, held_matrices, sparse_holdings
from gnnc.capture.trace_lock import TRACES
from gnnc.capture.validate import (
    describe_arguments,
    is_graph_name,
    missing_arguments,
    refuse_foreign_tensors,
    unusual_graph,
    validate,
)
from gnnc.capture.value_guards import Number, OtherValues
from gnnc.compiler import dump
from gnnc.compiler.build import build_program, uncollected
from gnnc.compiler.call_key import CallKey, key_of, reason_of
from gnnc.compiler.captures import CaptureLog
from gnnc.compiler.fast_path import FastPath, fast_path_of
from gnnc.compiler.guessed_values import with_checked_guesses
from gnnc.compiler.options import check_precisions
from gnnc.compiler.program import Options, Program, find
from gnnc.compiler.training import (
    Wanted,
    refuse_backward_hooks,
    refuse_held_tensor,
    tensors_of,
    wanted_gradients,
    wanted_weights,
)
from gnnc.compiler.transforms import may_be_transformed, refuse_trace, refuse_transforms
from gnnc.errors import CaptureError, GnncError, GraphError, InputError, UnsupportedError
from gnnc.locks import renew_at_fork
from gnnc.runtime.backend import get_backend
from gnnc.runtime.program.checks import OutOfRange
from gnnc.runtime.program.memory import OutputPool
from gnnc.torch_private import pytree

_MOST_FORMS = 256
"""Forms of calls that are remembered with their programs."""
_MOST_RETAKEN = 8
"""Times that static scales are taken again for other weights; it takes much of a second each time."""
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a pass or a lowering on a captured graph whose like no test has."""
_MOST_BY_VALUES = 8
"""Programs of one form of calls that differ by the values that the model asks about."""
_INTEGERS_MEET = re.compile(
    r"have the same dtype, but got.*\b(?:long|int|short|char|byte|bool)\b", re.IGNORECASE
)
"""Pattern of torch's message about a product of integers and floats."""


class Dispatch:
    """Dispatcher of the calls of one model: maps the form of a call to compiled programs.

    A call is looked up in three steps, cheapest first: the fast path knows the call before it; programs are
    remembered by the form of the arguments; otherwise the arguments are flattened and validated, and a
    program is captured if none serves them.

    Attributes:
        options: the validated options of ``gnnc.compile``.
        last: the program that was captured or measured last, which reports describe; None before the first.
        captures: the reason of each capture, in order.
        snapshot: the state of the model's code that all programs were traced from.
        fast_path: the program of the last call, with all that shows that the next call is like it; or None.
        lock: held while a program is captured or measured.

    Args:
        model: the model to trace.
        options: the validated options of ``gnnc.compile``.
        examples: ``example_inputs``, or None.
    """

    def __init__(self, model: torch.nn.Module, options: Options, examples: Sequence[Any] | None) -> None:
        self.options = options
        self.last: Program | None = None
        self._log = CaptureLog(type(model).__name__)
        self.captures = self._log.reasons
        self.snapshot = ModelSnapshot(model)
        self.fast_path: FastPath | None = None
        self.lock = threading.RLock()
        renew_at_fork(self, "lock", threading.RLock)
        self._model = model
        self._modules = tuple(model.modules())
        self._holdings = sparse_holdings(model)
        self._constants: list[Tensor] = []
        self._examples = examples
        self._reason: str | None = None
        self._retaken = 0
        self._changed_by_trace: str | None = None
        self._programs: dict[Any, list[Program]] = {}
        self._reads: list[Reads | None] = [None]
        self._tried: set[Any] = set()
        self._by_form: dict[Any, list[Program]] = {}
        self._pool = OutputPool()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model on the arguments of a call; see ``CompiledModel.forward``."""
        if torch.compiler.is_dynamo_compiling():
            refuse_trace(type(self._model).__name__, "torch.compile or torch.export")
        if may_be_transformed():
            refuse_transforms(self._model, to_dicts((args, kwargs)), self._constants)
        self._drop_stale_programs()
        try:
            wanted = self._wanted_weights(args, kwargs) if torch.is_grad_enabled() else None
            return self._run(args, kwargs, wanted)
        except OtherValues as other:
            return self._run_for_values(args, kwargs, other)
        except TraceError:
            refuse_trace(type(self._model).__name__, "torch.fx.symbolic_trace")
        except IndexError as error:  # of an ATen op that indexes by an argument
            owner = type(self._model).__name__
            raise InputError(f"[{owner}] an argument does not fit what it indexes: {error}") from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refuse_foreign_tensors(args, kwargs)
            owner = type(self._model).__name__
            raise InputError(
                f"[{owner}] a step of the compiled program does not run on these arguments: {error}. "
                "It takes the way through forward that the arguments of the capture took: call the model "
                "itself (compiled.model) on arguments of this kind, or compile the layers around the step"
            ) from error

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[bool, ...] | None) -> Any:
        fast_path = self.fast_path
        if fast_path is not None and not kwargs and fast_path.serves(args, self.snapshot.modes, wanted):
            return fast_path.run(args)
        tensors: list[Tensor] = []
        form = self._form(args, kwargs, tensors, wanted)
        programs = self._by_form.get(form, ()) if form is not None else ()
        for program in programs:
            if program.captured.guards.sizes_fit(tensors):
                if form is not None and not kwargs and program is programs[0]:
                    self.fast_path = fast_path_of(program, form, args, tensors, wanted)
                return program.run(tensors)
        return self._slow_call(args, kwargs, form, tensors)

    def capture_examples(self) -> None:
        """Capture with ``example_inputs``; InputError where they are not on the model's device.

        The program is of calls that want no gradients: training takes its scales at each call.
        """
        args = to_dicts(self._examples or ())
        call = self._flattened(args, {})
        with self.lock, torch.no_grad():
            self._tried.add(self._structural_key(call))
            self._capture(call, args, {}, None, examples=True)

    def program_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, tuple[Tensor, ...]]:
        """Return the program of a call, captured if there is none, and the flat tensors of the call."""
        args, kwargs = to_dicts((args, kwargs))
        self.last, call = self._program_for(args, kwargs)
        return self.last, call.tensors

    def programs(self) -> list[Program]:
        """Return all programs."""
        return [program for programs in self._programs.values() for program in programs]

    def clear(self) -> None:
        """Drop cached structures, idle memory and temporaries; programs stay."""
        for program in self.programs():
            program.clear()
        self._pool.clear()

    def _drop_stale_programs(self) -> None:
        """Drop all programs if the model's code is not what they were traced from."""
        try:
            changed = self.snapshot.has_changed()
        except RuntimeError:  # another thread changes the model's tables meanwhile
            changed = True
        if not changed:
            return
        with self.lock:
            change = self.snapshot.change()
            if change is not None:
                self._programs.clear()
                self._tried.clear()
                self._reads = [None]
                self._by_form.clear()
                self.fast_path = None
                self._constants.clear()
                self._modules = tuple(self._model.modules())
                self._holdings = sparse_holdings(self._model)
                self.snapshot = ModelSnapshot(self._model)
                if self.captures:
                    self._reason = f"{change} has changed"

    def _form(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        wanted: tuple[bool, ...] | None,
    ) -> tuple[Any, ...] | None:
        """Collect the tensors, and return the form: all else but sizes; None for calls of an unusual form."""
        parts: list[Any] = [self.snapshot.modes, autocast_mode()]
        if not describe_arguments(args, parts, tensors):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not describe_arguments((value,), parts, tensors):
                return None
        if self._holdings:
            describe_held(self._holdings, parts, tensors)
        if wanted is not None:
            parts.append((wanted, tuple([tensor.requires_grad for tensor in tensors])))
        return tuple(parts)

    def _slow_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], form: Any, tensors: list[Tensor]
    ) -> Any:
        args, kwargs = to_dicts((args, kwargs))
        program, call = self._program_for(args, kwargs)
        try:
            result = program.run(call.tensors)
        except RuntimeError as error:
            raise self._dtype_error(call, error) from error
        if form is not None and list(map(id, tensors)) == list(map(id, call.tensors)):
            self._remember(form, self._structural_key(call), program)
        return result

    def _run_for_values(self, args: tuple[Any, ...], kwargs: dict[str, Any], other: OtherValues) -> Any:
        """Run the program whose guesses hold for a call, captured with the numbers of the call if none is."""
        args, kwargs = to_dicts((args, kwargs))
        tried: list[Program] = []
        with self.lock:
            while True:
                for program, call in self._serving(args, kwargs):
                    if program in tried:
                        continue
                    tried.append(program)
                    try:
                        return program.run(call.tensors)
                    except OtherValues as error:
                        other = error
                if len(tried) >= _MOST_BY_VALUES:
                    raise UnsupportedError(
                        f"[{type(self._model).__name__}] forward asks about values of tensors at "
                        f"{other.where}, and none of {_MOST_BY_VALUES} programs has the answers of this "
                        "call: pass the value as an argument, or compute it before the model"
                    )
                reason = f"the model asks about values at {other.where}, and goes another way here"
                whole = self._flattened(args, kwargs)
                self._capture(whole, args, kwargs, reason, examples=False, guesses=other.values)

    def _serving(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Program, Call]]:
        """Return the programs for the sizes of a call, each with the call as it takes it."""
        found: list[tuple[Program, Call]] = []
        for reads in self._reads:
            call = self._flattened(args, kwargs, reads)
            for program in self._programs.get(self._structural_key(call), ()):
                if program.captured.reads == reads and program.captured.guards.failure(call.tensors) is None:
                    found.append((program, call))
        return found

    def _dtype_error(self, call: Call, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for a failed run: tracing misses integers that meet float weights."""
        if not _INTEGERS_MEET.search(str(error)):
            return error
        integers = [
            name
            for name, tensor in zip(call.names, call.tensors, strict=True)
            if not tensor.is_floating_point() and not is_graph_name(name)
        ]
        if not integers:
            return error
        return InputError(
            f"[{type(self._model).__name__}] {error}: {', '.join(integers)} holds integers where the model "
            f"computes with float32; pass {integers[0]}.float()"
        )

    def _remember(self, form: Any, key: Any, program: Program) -> None:
        """Remember the programs of a form, for later calls."""
        with self.lock:
            programs = self._programs.get(key, [])
            if not any(known is program for known in programs):  # the model has changed meanwhile
                return
            if len(self._by_form) >= _MOST_FORMS:
                self._by_form.clear()
            self._by_form[form] = programs

    def _program_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Call]:
        """Return the program of a call, captured if there is none, and the call as the program takes it."""
        found, _ = self._find(args, kwargs)
        if found is not None:
            return found
        whole = self._flattened(args, kwargs)
        with self.lock:
            self._try_examples(self._structural_key(whole))
            found, failure = self._find(args, kwargs)
            if found is not None:
                return found
            program = self._capture(whole, args, kwargs, failure, examples=False)
        return program, self._as_taken(whole, args, kwargs, program)

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Program, Call] | None, str | None]:
        """Return the program of a call, with the call as the program takes it; else None and a broken guard.

        What the call is depends on the fields of PyG graph objects that a program reads.
        """
        failure = None
        for reads in self._reads:
            call = self._flattened(args, kwargs, reads)
            programs = self._programs.get(self._structural_key(call), ())
            program, failed = find([p for p in programs if p.captured.reads == reads], call)
            if program is not None:
                return (program, call), None
            failure = failed or failure
        return None, failure

    def _as_taken(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program) -> Call:
        """Return a call without the fields of PyG graph objects that a program does not read."""
        reads = program.captured.reads
        return call if reads is None else flatten_call(self._model, args, kwargs, reads)

    def _try_examples(self, key: Any) -> None:
        """Capture with ``example_inputs``, where the model is now, if they are a call of this key."""
        if self._examples is None or any(autocast_mode()):  # examples run in FP32 alone
            return
        *_, wanted = key
        if key in self._tried or (wanted is not None and not self.options.trains_on_examples):
            return  # scales of training are taken at each call
        self._tried.add(key)
        try:
            args = _requiring(self._moved_examples(), wanted)
            call = self._flattened(args, {})
            if self._structural_key(call) == key:
                self._capture(call, args, {}, None, examples=True)
        except (CaptureError, GraphError, InputError) as error:
            # The model has changed since: the call may run all the same.
            self._reason = f"example_inputs do not run any more: {error}"

    def _flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any], reads: Reads | None = None) -> Call:
        call = flatten_call(self._model, args, kwargs, reads)
        device = device_of(self._model)
        requested = self.options.requested
        types = () if requested == "auto" else self.options.backend.device_types
        validate(type(self._model).__name__, call, device, requested, types)
        return call

    def _structural_key(self, call: Call) -> CallKey:
        return key_of(call, self._modules)

    def _reason_again(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why no program is for the key of a call."""
        known = [(program, key) for key, programs in self._programs.items() for program in programs]
        calls = [self._as_taken(call, args, kwargs, program) for program, _ in known]
        taken = [(each, self._structural_key(each)) for each in calls]
        return reason_of(taken, [(program.captured.call, key) for program, key in known], self._model)

    def _capture(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        failure: str | None,
        *,
        examples: bool,
        guesses: Mapping[str, Number] | None = None,
    ) -> Program:
        try:
            options, known = self.options_for(call), self._known(args, kwargs)
            lazy = has_lazy_layers(self._model)
            # programs that are tried on examples hold memory
            with TRACES.building(), uncollected(unless=examples):
                program = build_program(
                    self._model,
                    args,
                    kwargs,
                    options,
                    self._pool,
                    use_examples=examples,
                    known=known,
                    guesses=guesses,
                    trains=wanted_gradients(self._modules, call.tensors) is not None,
                )
        except CaptureError as error:
            self._explain_arguments(call, failure, error)
        except torch.OutOfMemoryError:
            raise
        except _BUILD_ERRORS as error:
            raise self._build_error(error) from error
        if lazy:  # they have parameters now
            self.snapshot = ModelSnapshot(self._model)
        self._refuse_own_changes()
        key = self._structural_key(self._as_taken(call, args, kwargs, program))
        program.run = self._checked(program, key)
        first = "example_inputs" if examples else "the first call"
        reason = self._reason or (failure if self.captures else first)
        self._log.add(reason or self._reason_again(call, args, kwargs))
        self._reason = None
        self.last = program
        dump.dump(type(self._model).__name__, program.snapshots)
        reads = program.captured.reads
        self._reads = [reads, *(each for each in self._reads if each != reads)]
        self._programs.setdefault(key, []).append(program)
        self._constants += program.captured.constants
        if torch.is_grad_enabled() and not examples:
            self._refuse_gradients_of_constants()
        if may_be_transformed():
            refuse_transforms(self._model, (), self._constants)
        return program

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Program]:
        """Return the programs of calls that differ from this one in sizes alone."""
        calls = [flatten_call(self._model, args, kwargs, reads) for reads in self._reads]
        programs = [self._programs.get(self._structural_key(call), ()) for call in calls]
        return [
            program
            for reads, alike in zip(self._reads, programs, strict=True)
            for program in alike
            if program.captured.reads == reads
        ]

    def _build_error(self, error: Exception) -> CaptureError:
        """Return the error to raise where a pass or a lowering fails on a captured graph."""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CaptureError(
            f"[{type(self._model).__name__}] was captured, but its graph does not compile "
            f"({type(error).__name__}: {reason}). Way out: compile the submodules around the step that is "
            "unusual, and report the model as a bug of gnnc"
        )

    def _checked(self, program: Program, key: Any) -> Callable[[Sequence[Tensor]], Any]:
        """Return what runs a program, but another one where its static scales do not suit a call."""
        run, weights = with_checked_guesses(self._model, program), program.scaled_weights
        if weights is None:
            return run

        def checked(tensors: Sequence[Tensor]) -> Any:
            if not weights.are_unchanged():
                return self._with_new_scales(program, key).run(tensors)
            try:
                return run(tensors)
            except OutOfRange as error:
                if not weights.have_same_content():  # changed past the version counters
                    return self._with_new_scales(program, key).run(tensors)
                return self._with_scales_of_calls(program, error.text).run(tensors)

        return checked

    def _with_new_scales(self, program: Program, key: Any) -> Program:
        """Return the program with static scales of the present weights, which replaces the other."""
        with self.lock:
            if program.successor is None:
                program.successor = self._take_scales_again(program, key)
                programs = self._programs.get(key, [])
                programs[:] = [program.successor if known is program else known for known in programs]
                self.fast_path, self.last = None, program.successor
            return program.successor

    def _take_scales_again(self, program: Program, key: Any) -> Program:
        changed = "weights have changed since static scales were taken"
        self._retaken += 1
        if self._retaken > _MOST_RETAKEN:
            self._log.add(f"{changed}, {_MOST_RETAKEN} times before: scales are computed at each call")
            return self._recompiled(program, None)
        try:
            call = self._flattened(self._moved_examples(), {}, program.captured.reads)
            taken = self._recompiled(program, call)
        except GnncError as error:
            gone = f"example_inputs do not run any more ({error})"
            self._log.add(f"{changed}, and {gone}: scales are computed at each call")
            return self._recompiled(program, None)
        taken.run = self._checked(taken, key)
        self._log.add(f"{changed}: taken again from example_inputs")
        return taken

    def _with_scales_of_calls(self, program: Program, reason: str) -> Program:
        """Return the program without static scales, for calls that those do not suit."""
        with self.lock:
            if program.dynamic is None:
                program.dynamic = self._recompiled(program, None)
                self._log.add(f"{reason}: scales are computed in such calls")
            return program.dynamic

    def _recompiled(self, program: Program, examples: Call | None) -> Program:
        """Return the program of a capture compiled again, with static scales where there are examples."""
        options = self.options.with_backend(program.backend)
        call = dataclasses.replace(program.captured.call, tensors=examples.tensors if examples else ())
        captured = dataclasses.replace(program.captured, call=call)
        with TRACES.building(), uncollected(unless=examples is not None):
            return build_program(
                self._model, (), {}, options, self._pool, use_examples=examples is not None, captured=captured
            )

    def _moved_examples(self) -> tuple[Any, ...]:
        """Return the example inputs on the device of the model."""
        args, device = to_dicts(self._examples), device_of(self._model)
        return (
            args if device is None else pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), args)
        )

    def _refuse_own_changes(self) -> None:
        """Refuse a forward that changes an object of the model each time that it is traced."""
        change = self.snapshot.change_within()
        if change is not None and change == self._changed_by_trace:
            raise CaptureError(
                f"[{type(self._model).__name__}] forward changes {change} each time, which compiled calls "
                "would not do: return the value, or copy it into a registered buffer (buffer.copy_(value))"
            )
        self._changed_by_trace = change

    def options_for(self, call: Call) -> Options:
        """Return the options with the backend of the model's device, or of the call's where it has none."""
        device = device_of(self._model) or call.device
        options = self.options.with_backend(get_backend(self.options.requested, device))
        check_precisions((options.precision, *options.overrides.values()), options.backend.target)
        return options

    def _explain_arguments(self, call: Call, failure: str | None, error: CaptureError) -> NoReturn:
        """Raise an error about the arguments if they made tracing fail; else raise ``error``."""
        parameters = inspect.signature(self._model.forward).parameters.values()
        required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
        missing = missing_arguments(call, required)
        owner = type(self._model).__name__
        failure = failure or self._any_failure(call)
        if missing:
            raise InputError(f"[{owner}] {missing[0]} is None, but the model needs it: {error}") from error
        unusual = unusual_graph(call)
        if unusual is not None:
            raise GraphError(f"[{owner}] {unusual}; and the model does not run on it: {error}") from error
        if failure is not None:
            raise InputError(
                f"[{owner}] {failure}; and these arguments do not run either: {error}"
            ) from error
        raise error

    def _any_failure(self, call: Call) -> str | None:
        """Return the first guard that keeps these arguments from a program of the same structure, or None."""
        alike = [p for p in self.programs() if p.captured.call.names == call.names]
        return alike[-1].captured.guards.failure(call.tensors) if alike else None

    def _wanted_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, ...] | None:
        """Return which weights want gradients; None: they and the arguments of this call want none.

        Raises:
            UnsupportedError: a constant requires one, or a module has a backward hook.
        """
        self._refuse_gradients_of_constants()
        weights = wanted_weights(self._modules)
        if not any(weights) and not any(leaf.requires_grad for leaf in tensors_of(args, kwargs)):
            return None
        refuse_backward_hooks(type(self._model).__name__, self._modules)
        return weights

    def _refuse_gradients_of_constants(self) -> None:
        owner = type(self._model).__name__
        if any(tensor.requires_grad for tensor in self._constants):
            refuse_held_tensor(owner, "a tensor in an attribute of the model")
        for path, matrix in held_matrices(self._holdings):
            if matrix.requires_grad:
                refuse_held_tensor(owner, f"the sparse matrix {path}")

    def _refuse_foreign_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_flatten_with_path(to_dicts((args, kwargs)))[0]
        named = [
            (f"argument {pytree.keystr(path)}", leaf) for path, leaf in leaves if isinstance(leaf, Tensor)
        ]
        refuse_foreign_tensors(type(self._model).__name__, named)


def _requiring(args: tuple[Any, ...], wanted: Wanted | None) -> tuple[Any, ...]:
    """Return arguments whose tensors require the gradients that a call wants of its own."""
    if wanted is None:
        return args
    flags = iter(wanted[1])
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(next(flags, False)), args)


def device_of(model: torch.nn.Module) -> torch.device | None:
    """Return the device of a model's first parameter or buffer, or None where it has none."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
