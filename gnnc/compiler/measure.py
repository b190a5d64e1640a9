"""What ``CompiledModel.tune`` does with a program: cuts of its graph by measurement."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gnnc.compiler.program import Program
from gnnc.errors import UnsupportedError


def tune(owner: str, program: Program, tensors: Sequence[Tensor]) -> None:
    """Cut the graph of a call as is measured to be fastest, for as long as its structure is cached.

    Args:
        owner: the model's class name, for messages.
        program: serves the call; notes what was measured.
        tensors: of the call.

    Raises:
        UnsupportedError: the program is not for CUDA, or a CUDA graph of the caller's holds its addresses.
    """
    from gnnc.runtime.cuda.executable import CudaExecutable  # programs for the CPU need none of it

    executable, runner = program.executable, program.runner
    if not isinstance(executable, CudaExecutable):
        raise UnsupportedError(
            f"[{owner}] tune measures how CUDA kernels cut a graph, and this program is for backend "
            f"{program.backend.name!r}: call it as it is, or move the model and its inputs with .cuda()"
        )
    if executable.was_captured:
        raise UnsupportedError(
            f"[{owner}] a CUDA graph that you captured reads memory that tune would free: tune before you "
            "capture, or drop that CUDA graph and call clear_cache() first"
        )
    shares: list[Callable[[], None]] = []

    def structure(*values: Any) -> tuple[Any, ...]:
        assert runner is not None
        outputs, share = runner.rebuild(*values)
        shares.append(share)
        return outputs

    program.tuned = executable.whole(program.bind(executable.tune, structure))(tensors)
    for share in shares:
        share()
