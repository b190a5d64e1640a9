"""Compiles CUDA C++ with NVRTC, once: the machine code is kept on disk.

A key of the disk cache covers everything that the code depends on: the source, every header of
``csrc/cuda``, the compiler's options and version, and the architecture. Files are written beside
their place and renamed, so that a reader sees a whole file or none; the folder is the user's own
(mode 0700), because what lies in it will run.
"""

import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gnnc.environment import cache_folder, cuda_home
from gnnc.errors import BackendError

INSTALL = "install gnnc[cuda] beside a CUDA build of torch"
_NO_COMPILER = f"the package cuda-core is missing: {INSTALL}"
_IMPORTING = threading.Lock()
_OPTIONS = {"std": "c++17", "fma": False, "ptxas_options": "-v"}
_PACKAGE = Path(__file__).parents[2]  # gnnc/, seen from gnnc/runtime/cuda/
_REPORT = re.compile(
    r"properties for (?P<name>\w+)\s+(?:ptxas[ .]+)?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes "
    r"spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes, as the assembler reports it.

    Attributes:
        registers: registers a thread.
        spilled: bytes of registers stored to and loaded from local memory.
        stack: bytes of local memory a thread.
    """

    registers: int
    spilled: int
    stack: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Compiled code.

    Attributes:
        cubin: what the driver loads.
        symbols: C++ name of a kernel to its name in the code.
        resources: C++ name of a kernel to what it takes.
    """

    cubin: bytes
    symbols: dict[str, str]
    resources: dict[str, Resources]


def headers_folder() -> Path:
    """Return the folder of the kernel templates: of the installed package, or of the tree."""
    installed = _PACKAGE / "cuda_include"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc" / "cuda"


@cache
def toolkit_headers() -> Path:
    """Return the folder that holds ``cuda_fp16.h``.

    Raises:
        BackendError: no package or toolkit provides it.
    """
    found = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (found.submodule_search_locations or ())] if found else []
    candidates = [path for root in roots for path in sorted(root.glob("cu*/include"), reverse=True)]
    candidates += [root / "cuda_runtime" / "include" for root in roots]
    candidates += [cuda_home() / "include"]
    for folder in candidates:
        if (folder / "cuda_fp16.h").exists():
            return folder
    raise BackendError(f"cuda_fp16.h is missing (package nvidia-cuda-runtime): {INSTALL}")


@cache
def compiler_version() -> tuple[int, int]:
    """Return the version of NVRTC.

    Raises:
        BackendError: NVRTC or its Python interface is not installed.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        result, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(f"the CUDA compiler NVRTC cannot be used ({error}): {INSTALL}") from None
    if int(result):
        raise BackendError(f"the CUDA compiler NVRTC cannot be used ({result}): {INSTALL}")
    return major, minor


def find_compiler() -> None:
    """Check that there is a package through which to call NVRTC.

    Its import takes a third of a second, which a process that finds its kernels on disk need not wait for.

    Raises:
        BackendError: it is not installed.
    """
    if importlib.util.find_spec("cuda.core") is None:
        raise BackendError(_NO_COMPILER)


@cache
def compiler() -> Any:
    """Return the package through which NVRTC is called.

    Raises:
        BackendError: it is not installed.
    """
    with _IMPORTING:  # a second thread would see a package that is half there
        for name in ("cuda.core", "cuda.core.experimental"):  # its place before and after version 0.5
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            if hasattr(module, "Program"):
                return module
    raise BackendError(_NO_COMPILER)


def compile_source(source: str, names: Iterable[str], architecture: str) -> Machine:
    """Compile a translation unit, or take it from the disk cache.

    Args:
        source: CUDA C++; may include the headers of ``csrc/cuda``.
        names: C++ names of the kernels wanted, template arguments included.
        architecture: such as ``sm_90``.

    Raises:
        BackendError: there is no compiler, or it refuses the source (a bug of gnnc).
    """
    wanted = tuple(names)
    file = _cache_file(source, wanted, architecture)
    machine = _load(file) if file is not None else None
    if machine is None:
        machine = _compile(source, wanted, architecture)
        if file is not None:
            _store(file, machine)
    return machine


def _compile(source: str, names: tuple[str, ...], architecture: str) -> Machine:
    core = compiler()
    folders = [str(headers_folder()), str(toolkit_headers())]
    options = core.ProgramOptions(arch=architecture, include_path=folders, **_OPTIONS)
    log = io.StringIO()
    try:
        code = core.Program(source, "c++", options).compile("cubin", name_expressions=names, logs=log)
    except Exception as error:  # cuda.core has error classes of its own for each version
        raise BackendError(
            f"NVRTC refused a kernel for {architecture}: this is a bug of gnnc, please report it\n{error}\n"
            f"{log.getvalue()}\n{source}"
        ) from error
    symbols = {name: _text(symbol) for name, symbol in code.symbol_mapping.items()}
    found = {
        m["name"]: Resources(int(m["registers"]), int(m["stores"]) + int(m["loads"]), int(m["stack"]))
        for m in _REPORT.finditer(log.getvalue())
    }
    return Machine(
        cubin=bytes(code.code),
        symbols=symbols,
        resources={name: found[symbol] for name, symbol in symbols.items() if symbol in found},
    )


def _text(symbol: Any) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else str(symbol)


# The disk cache


@cache
def _headers_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cache_file(source: str, names: tuple[str, ...], architecture: str) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    headers = _headers_digest(headers_folder())
    key = json.dumps([source, names, architecture, headers, _OPTIONS, compiler_version()])
    return folder / "cuda" / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"


def _load(file: Path) -> Machine | None:
    """Read a cached file; None where there is none, or where it is not whole and the user's own."""
    try:
        if not _is_ours(file.parent):
            return None
        content = file.read_bytes()
    except OSError:
        return None
    digest, _, rest = content.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    head, _, cubin = rest.partition(b"\n")
    table = json.loads(head)
    resources = {name: Resources(*values) for name, values in table["resources"].items()}
    return Machine(cubin, table["symbols"], resources)


def _store(file: Path, machine: Machine) -> None:
    """Keep compiled code, where a folder for it can be had; what cannot be kept is compiled again."""
    table = {
        "symbols": machine.symbols,
        "resources": {n: (r.registers, r.spilled, r.stack) for n, r in machine.resources.items()},
    }
    rest = json.dumps(table).encode() + b"\n" + machine.cubin
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(file.parent):
            return
        descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(descriptor, "wb") as part:
            part.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        os.replace(name, file)
    except OSError:
        return


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put code into the folder."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
