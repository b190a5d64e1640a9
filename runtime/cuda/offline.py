"""CUDA programs that are compiled without a device, and cannot run."""

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from gnnc.errors import BackendError
from gnnc.runtime.cuda.driver.kernel_set import KernelSet
from gnnc.runtime.cuda.driver.nvrtc import CompiledCode
from gnnc.runtime.cuda.emitter import CudaEmitter
from gnnc.runtime.cuda.graphs.recording import Recording, obstacle, recording
from gnnc.runtime.program.device import Device
from gnnc.runtime.program.executable import Executable, Timing
from gnnc.runtime.program.launches import Expr
from gnnc.runtime.program.memory import OutputPool


@dataclass(frozen=True, slots=True)
class OfflineBuild:
    """Kernels of a program, compiled for several architectures.

    Attributes:
        kernel_set: the kernels.
        recording: the recording form of the program; None where it is not launches alone.
        obstacle: reason why the program is not recorded; None where it is.
        code: the compiled code of each kernel, by architecture and C++ name.
    """

    kernel_set: KernelSet
    recording: Recording | None
    obstacle: str | None
    code: dict[str, dict[str, CompiledCode]]


class OfflineDevice(Device):
    """CUDA devices of several architectures, of which this machine need not have one."""

    def __init__(self, architectures: tuple[str, ...]) -> None:
        self._architectures = architectures

    def emitter(self, graph_module: GraphModule, check_finite: bool) -> CudaEmitter:
        """Return an emitter of CUDA programs."""
        return CudaEmitter(graph_module, check_finite=check_finite, offline=True)

    def finish(self, emitter: CudaEmitter, results: list[Expr]) -> OfflineBuild:
        """Compile the kernels for every architecture."""
        kernel_set = emitter.kernel_set
        recorded = recording(emitter, results)
        code = {name: kernel_set.compile(name) for name in self._architectures} if kernel_set.names else {}
        return OfflineBuild(kernel_set, recorded, obstacle(emitter), code)


class OfflineExecutable(Executable):
    """A program that is compiled for architectures without a device, and cannot run.

    Attributes:
        kernel_set: the kernels.
        recording: the recording form of the program; None where it is not launches alone.
        code: the compiled code of each kernel, by architecture and C++ name.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        pool: OutputPool | None = None,
        *,
        check_finite: bool = True,
        cuda_graph: bool | str = "auto",
        architectures: tuple[str, ...],
    ) -> None:
        super().__init__(graph_module, pool, check_finite=check_finite, device=OfflineDevice(architectures))
        built: OfflineBuild = self.built
        self.kernel_set, self.recording, self.code = built.kernel_set, built.recording, built.code

    @property
    def launches(self) -> str:
        """Say whether calls could be replayed as a CUDA graph, and why not."""
        if self.recording is None:
            return f"kernels are launched one by one: {self.built.obstacle}"
        return "each call can be replayed as one CUDA graph"

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Refuse to run.

        Raises:
            BackendError: always; the message says how to run the model.
        """
        raise BackendError(
            "backend 'cuda-offline' compiles for a device that is not here: compile with backend='cuda' on a "
            "machine that has one to run the model"
        )

    def profile(self, *values: Any) -> tuple[tuple[Any, ...], list[Timing]]:
        """Refuse to run."""
        return self(*values), []
