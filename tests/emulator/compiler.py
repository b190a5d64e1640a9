"""Compiles CUDA C++ for this machine: NVRTC makes PTX of it, ``ptx`` C++ of that, and g++ a library."""

import atexit
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from emulator.ptx import Kernel, translate
from gnnc.errors import BackendError
from gnnc.runtime.cuda.driver import nvrtc as compiler
from gnnc.runtime.cuda.driver.nvrtc import CompiledCode

CAPABILITY = (9, 0)
"""Compute capability of the device that is emulated."""
_FOLDER = Path(__file__).parent
_MADE_BY = ("compiler.py", "ptx.py", "names.py", "instructions.py", "machine.h")
_GXX = (
    *("g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w"),
    "-fPIC",
)
"""C++17: the standard headers of C++20 take twice the time to read."""


@cache
def architecture() -> str:
    """Return the name under which code for the emulator is cached; another one for each version of it."""
    code = b"".join((_FOLDER / name).read_bytes() for name in _MADE_BY)
    return f"emulated-{hashlib.sha256(code).hexdigest()[:16]}"


def compile_source(source: str, names: tuple[str, ...], architecture: str) -> CompiledCode:
    """Stand for ``build._compile``: the machine code is a library.

    Raises:
        BackendError: NVRTC refuses the source.
        PtxError: its PTX has something that is not translated.
    """
    text, symbols = ptx_of(source, names)
    code, kernels = translate(text)
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        file.write_text(code + _bounds(kernels))
        folders = (f"-I{_compiled_header()}", f"-I{_FOLDER}")
        subprocess.run([*_GXX, "-shared", *folders, "-o", str(library), str(file)], check=True)
        return CompiledCode(library.read_bytes(), symbols, {})


@cache
def _compiled_header() -> str:
    """Compile ``machine.h`` once a process, for all kernels; return the folder, which g++ searches first."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    compiled = Path(folder, "machine.h.gch")
    subprocess.run([*_GXX, "-x", "c++-header", str(_FOLDER / "machine.h"), "-o", str(compiled)], check=True)
    return folder


def _bounds(kernels: list[Kernel]) -> str:
    """Declare the launch bound of each kernel."""
    return "".join(f'extern "C" const int threads_{k.symbol} = {k.threads};\n' for k in kernels)


def ptx_of(source: str, names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Compile to PTX, as ``build`` compiles to machine code; return it with the kernels' symbols."""
    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    for name in names:
        _done(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    folders = [compiler.headers_folder(), compiler.toolkit_headers()]
    major, minor = CAPABILITY
    options = [
        f"--std={compiler._OPTIONS['std']}",
        f"--fmad={str(compiler._OPTIONS['fma']).lower()}",
        f"--gpu-architecture=compute_{major}{minor}",
        *(f"-I{f}" for f in folders),
    ]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
    if int(status):
        log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BackendError(f"NVRTC refused a kernel\n{log.decode()}")
    text = b" " * _done(nvrtc.nvrtcGetPTXSize(program))
    nvrtc.nvrtcGetPTX(program, text)
    symbols = {name: _done(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in names}
    return text.decode().rstrip("\0"), symbols


def _done(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise BackendError(f"NVRTC failed: {result[0]}")
    return result[1] if len(result) > 1 else None
