"""PyG's own test-suite as a judge: `python tests/peers/pyg.py CHECKOUT/test/nn`.

PyG's tests run as they are. Each outermost call of a module in them is repeated in eval mode without
gradients: by eager, and compiled in each precision. Every call gets one verdict:

    equal   the compiled result is eager's, within the bound of the precision
    named   the compiled call raised an error of gnnc.errors
    wrong   another value, shape, dtype or structure than eager's
    raw     any other exception, or no end within the time limit
    unstable  another result, as eager's is when the last bits of the weights change: a choice among ties

Calls that eager cannot repeat (it fails in eval mode, or draws random numbers) are not counted.
"""

import argparse
import copy
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import Aggregation

import gnnc
from gnnc.capture.sparse_components import is_sparse
from gnnc.errors import GnncError
from gnnc.torch_private import pytree

BOUNDS = {"fp32": 1e-4, "bf16": 3e-2, "int8": 5e-2}
"""Relative L2 error below which a result is equal."""
VERDICTS = ("equal", "named", "wrong", "raw", "unstable")


@dataclass(frozen=True)
class Verdict:
    """The verdict on one call in one precision."""

    test: str
    call: str
    precision: str
    verdict: str
    detail: str
    seconds: float


class TooSlow(BaseException):
    """A call did not end within the time limit; no handler of exceptions may keep it."""


class Judge:
    """A pytest plugin that judges the module calls of each test.

    Attributes:
        verdicts: all verdicts so far.

    Args:
        precisions: the precisions to compile in.
        most: calls of one test function that are judged, over all of its parameters.
        limit: CPU seconds that one compiled call may take.
        log: file that gets one JSON line for each verdict, or None.
    """

    def __init__(self, precisions: list[str], most: int, limit: int, log: Path | None) -> None:
        self.verdicts: list[Verdict] = []
        self._precisions, self._most, self._limit, self._log = precisions, most, limit, log
        self._test = ""
        self._seen: set[Any] = set()
        self._judged: Counter[str] = Counter()
        self._calls = {owner: owner.__call__ for owner in (nn.Module, Aggregation)}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Watch the calls of one test."""
        self._test = item.nodeid
        self._seen.clear()
        self._watch()
        try:
            return (yield)
        finally:
            self._restore()

    def _watch(self) -> None:
        for owner, original in self._calls.items():
            owner.__call__ = self._watched(original)

    def _restore(self) -> None:
        for owner, original in self._calls.items():
            owner.__call__ = original

    def _watched(self, original: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._restore()
            try:
                result = original(module, *args, **kwargs)
                if self._is_of_interest(module, args, kwargs):
                    self._judge(module, args, kwargs)
                return result
            finally:
                self._watch()

        return call

    def _is_of_interest(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Return whether a call is of a module outside torch.nn, and not like one before it in this test."""
        name = type(module).__module__
        if isinstance(module, torch.jit.ScriptModule) or name.startswith(("torch.nn", "gnnc")):
            return False
        key = id(module), repr(module), module.training, described(args, kwargs)
        function = self._test.split("[")[0]
        if key in self._seen or self._judged[function] >= self._most:
            return False
        self._seen.add(key)
        self._judged[function] += 1
        return True

    def _judge(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = f"{type(module).__name__}({described(args, kwargs)})"
        with torch.random.fork_rng(), torch.no_grad():
            try:
                repeated = [repeat(module, args, kwargs) for _ in range(2)]
            except Exception:
                return
            want = repeated[0]
            if difference(repeated[1], want, 1e-6):
                return
            for precision in self._precisions:
                start = time.process_time()
                verdict, detail = self._compiled(precision, module, args, kwargs, want)
                seconds = round(time.process_time() - start, 2)
                self._add(Verdict(self._test, name, precision, verdict, detail, seconds))

    def _compiled(
        self, precision: str, module: nn.Module, args: Any, kwargs: Any, want: Any
    ) -> tuple[str, str]:
        try:
            with time_limit(self._limit):
                model, args, kwargs = copied(module, args, kwargs)
                compiled = gnnc.compile(model.eval(), precision, check_finite="off")
                got = compiled(*args, **kwargs)
        except GnncError as error:
            return "named", f"{type(error).__name__}: {error}"
        except (Exception, TooSlow) as error:
            return "raw", f"{type(error).__name__}: {error}"
        found = difference(got, want, BOUNDS[precision])
        if found and is_unstable(module, args, kwargs, want):
            return "unstable", found
        return ("wrong", found) if found else ("equal", "")

    def _add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")


def repeat(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return eager's result on copies of the module and of its arguments."""
    model, args, kwargs = copied(module, args, kwargs)
    return model.eval()(*args, **kwargs)


def is_unstable(module: nn.Module, args: Any, kwargs: Any, want: Any) -> bool:
    """Return whether eager's own result changes with the last bits of the weights, as a choice among ties."""
    for seed in range(8):
        model, moved_args, moved_kwargs = copied(module, args, kwargs)
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            noise = torch.rand(weight.shape, generator=generator) - 0.5
            weight.data.mul_(1 + 1e-6 * noise)
        if difference(model.eval()(*moved_args, **moved_kwargs), want, 1e-4):
            return True
    return False


def copied(*values: Any) -> tuple[Any, ...]:
    """Return deep copies; torch cannot copy some sparse tensors by itself."""
    sparse = [leaf for leaf in pytree.tree_leaves(values) if is_sparse(leaf)]
    return copy.deepcopy(values, {id(matrix): matrix.clone() for matrix in sparse})


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TooSlow in the block after ``seconds`` of CPU time."""

    def interrupt(*_: Any) -> None:
        raise TooSlow(f"not done after {seconds} s of CPU")

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def described(*values: Any) -> str:
    """Return the arguments as text: shapes and dtypes of tensors, all else by its type or value."""

    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            layout = "" if value.layout == torch.strided else f"{value.layout} ".removeprefix("torch.")
            return f"{layout}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        text = repr(value) if value is None or isinstance(value, bool | int | float | str) else ""
        return text or type(value).__name__

    return ", ".join(one(leaf) for leaf in pytree.tree_leaves(values))[:200]


def difference(got: Any, want: Any, bound: float) -> str:
    """Return how two results differ, or "" where they agree within ``bound``."""
    left, left_spec = pytree.tree_flatten(got)
    right, right_spec = pytree.tree_flatten(want)
    if left_spec != right_spec:
        return f"structure {left_spec}, eager {right_spec}"
    for a, b in zip(left, right, strict=True):
        if found := leaf_difference(a, b, bound):
            return found
    return ""


def leaf_difference(a: Any, b: Any, bound: float) -> str:
    """Return how two leaves differ, or ""."""
    if type(a) is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return f"{type(a).__name__}, eager {type(b).__name__}"
    if not isinstance(b, Tensor):
        return "" if isinstance(b, nn.Module) or same(a, b) else f"{a}, eager {b}"
    a, b = (t.to_dense() if t.layout != torch.strided else t for t in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)}, eager {b.dtype} {list(b.shape)}"
    if not b.is_floating_point():
        return "" if torch.equal(a, b) else f"{int((a != b).sum())} of {b.numel()} elements differ"
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return "other elements are not finite"
    error = float((a[finite] - b[finite]).norm() / b[finite].norm().clamp(min=1e-6))
    return "" if error < bound else f"relative error {error:.2g}"


def same(a: Any, b: Any) -> bool:
    """Return whether two values that are no tensors are equal; True for objects that cannot say."""
    try:
        return bool(a == b) or type(a).__eq__ is object.__eq__
    except Exception:
        return True


def table(verdicts: list[Verdict], precisions: list[str]) -> str:
    """Return the counts of verdicts by precision, and the calls that are not equal with their first lines."""
    lines = [f"{'':8}{'calls':>8}" + "".join(f"{name:>9}" for name in VERDICTS) + f"{'CPU s':>8}"]
    for precision in precisions:
        own = [v for v in verdicts if v.precision == precision]
        counts = Counter(v.verdict for v in own)
        numbers = "".join(f"{counts[name]:9}" for name in VERDICTS)
        lines.append(f"{precision:8}{len(own):8}{numbers}{sum(v.seconds for v in own):8.0f}")
    for v in sorted(verdicts, key=lambda v: (VERDICTS.index(v.verdict), v.precision, v.test)):
        if v.verdict != "equal":
            first = " ".join(v.detail.split())[:300]
            lines += [f"\n{v.verdict} {v.precision} {v.test}", f"    {v.call}", f"    {first}"]
    return "\n".join(lines)


def main() -> int:
    """Judge the tests of a checkout; return 1 where a verdict is wrong or raw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("paths", nargs="+", help="files or folders of PyG's tests, in a checkout")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int8"], choices=sorted(BOUNDS))
    parser.add_argument("--most", type=int, default=6, help="calls judged of one test function")
    parser.add_argument("--limit", type=int, default=120, help="CPU seconds that a compiled call may take")
    parser.add_argument("--log", type=Path, help="file that gets one JSON line for each verdict")
    parser.add_argument("-k", default="", help="tests to run, as for pytest")
    options = parser.parse_args()
    torch.set_num_threads(1)
    judge = Judge(options.precisions, options.most, options.limit, options.log)
    plain = ["-q", "--no-header", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=ignore"]
    pytest.main([*options.paths, *plain, "--import-mode=importlib", "--tb=no", "-k", options.k], [judge])
    print(table(judge.verdicts, options.precisions))
    return int(any(v.verdict in ("wrong", "raw") for v in judge.verdicts))


if __name__ == "__main__":
    sys.exit(main())
