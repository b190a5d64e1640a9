"""Compiles CUDA C++ with NVRTC, and caches the machine code on disk.

A key of the disk cache covers everything that the code depends on: the source, every header of
``csrc/cuda``, the compiler's options and version, and the architecture. Files are written under a
temporary name and renamed, so that a reader sees a whole file or none; the folder is private to the
user (mode 0700), because the code in it will run.
"""

import ctypes
import hashlib
import importlib
import importlib.util
import io
import json
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gnnc.environment import cache_folder, cuda_home
from gnnc.errors import BackendError
from gnnc.locks import renew_at_fork
from gnnc.private_files import read_private, write_private

EXTRAS = {12: "gnnc[cuda12]", 13: "gnnc[cuda]"}
"""The extra that installs NVRTC, its interface and the headers, by major version of CUDA."""
_NEWEST = max(EXTRAS)
_IMPORTING = threading.Lock()
renew_at_fork(sys.modules[__name__], "_IMPORTING", threading.Lock)
_OPTIONS = {"std": "c++17", "fma": False, "minimal": True, "ptxas_options": "-v"}
_CACHING_VERSION = 12, 9
"""First version of NVRTC with a cache of its own, which returns code without the assembler's report."""
_PACKAGE = Path(__file__).parents[3]  # gnnc/, seen from gnnc/runtime/cuda/driver/
_HEADERS_VERSION = re.compile(r"#define CUDART_VERSION +(\d+)")
_REPORT = re.compile(
    r"properties for (?P<name>\w+)\s+(?:ptxas[ .]+)?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes "
    r"spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers and memory of one kernel, as the assembler reports them.

    Attributes:
        registers: registers a thread.
        spilled: bytes of registers stored to and loaded from local memory.
        stack: bytes of local memory a thread.
    """

    registers: int
    spilled: int
    stack: int


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """Machine code of one source, compiled for one architecture.

    Attributes:
        cubin: the file that the driver loads.
        symbols: name of each kernel in the cubin, by C++ name.
        resources: registers and memory of each kernel, by C++ name.
    """

    cubin: bytes
    symbols: dict[str, str]
    resources: dict[str, Resources]


def resources_of(code: Mapping[str, CompiledCode]) -> dict[str, Resources]:
    """Return the registers and memory of each kernel that the assembler reported.

    Args:
        code: the compiled code of each kernel, by C++ name.
    """
    return {name: part.resources[name] for name, part in code.items() if name in part.resources}


def headers_folder() -> Path:
    """Return the folder of the kernel templates, in the installed package or in the source tree."""
    installed = _PACKAGE / "cuda_include"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc" / "cuda"


def missing(what: str, major: int | None = None) -> BackendError:
    """Return the error of a machine that cannot compile kernels, with the package to install.

    Args:
        what: the cause, the first half of the sentence.
        major: major version of the CUDA to install; by default torch's, or the newest.
    """
    major = major or torch_major() or _NEWEST
    package = EXTRAS.get(major, f"cuda-core and the cuda-bindings, NVRTC and headers of CUDA {major}")
    return BackendError(f"{what}: install {package}, or move the model to the CPU and use backend='cpu'")


def torch_major() -> int | None:
    """Return the major version of the CUDA that torch was built for; None for a build without CUDA."""
    version = torch.version.cuda
    return int(version.split(".")[0]) if version else None


@cache
def toolkit_headers() -> Path:
    """Return the folder with ``cuda_fp16.h`` of the same CUDA as NVRTC.

    Raises:
        BackendError: no package or toolkit provides it.
    """
    major = compiler_version()[0]
    candidates = [root / f"cu{major}" / "include" for root in _package_roots()]
    candidates += [root / "cuda_runtime" / "include" for root in _package_roots()]  # wheels of CUDA 12
    candidates += [cuda_home() / "include"]
    for folder in candidates:
        if (folder / "cuda_fp16.h").exists() and _headers_major(folder) == major:
            return folder
    raise missing(f"the headers of CUDA {major}, cuda_fp16.h among them, are missing", major)


def _package_roots() -> list[Path]:
    """Return the folders that NVIDIA's packages install into."""
    found = importlib.util.find_spec("nvidia")
    return [Path(root) for root in (found.submodule_search_locations or ())] if found else []


def _headers_major(folder: Path) -> int | None:
    try:
        found = _HEADERS_VERSION.search((folder / "cuda_runtime_api.h").read_text(errors="replace"))
    except OSError:
        return None
    return int(found[1]) // 1000 if found else None


@cache
def compiler_version() -> tuple[int, int]:
    """Return the version of NVRTC.

    Raises:
        BackendError: NVRTC or its Python interface is not installed.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise missing("the package cuda-bindings, which calls the CUDA compiler NVRTC, is missing") from error
    _load_nvrtc()
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except (OSError, RuntimeError) as error:  # which name every folder looked in
        raise missing("the CUDA compiler NVRTC is missing or does not load") from error
    if int(result):
        raise missing(f"the CUDA compiler NVRTC does not tell its version ({result})")
    return major, minor


def _load_nvrtc() -> None:
    """Load the NVRTC of torch's CUDA; cuda-bindings would take the newest installed one otherwise."""
    major = torch_major()
    folders = [root / name / "lib" for root in _package_roots() for name in (f"cu{major}", "cuda_nvrtc")]
    for file in (folder / f"libnvrtc.so.{major}" for folder in folders):
        if file.exists():
            with suppress(OSError):  # cuda-bindings say why
                ctypes.CDLL(str(file))
            return


def find_compiler() -> None:
    """Check that the package cuda-core, which calls NVRTC, is installed, without importing it.

    The import takes a third of a second, which a process that finds its kernels on disk does not need.

    Raises:
        BackendError: the package is not installed.
    """
    try:
        found = importlib.util.find_spec("cuda.core")
    except ImportError:  # there is no package cuda either
        found = None
    if found is None:
        raise _no_core()


def _no_core() -> BackendError:
    return missing("the package cuda-core, which calls the CUDA compiler NVRTC, is missing")


@cache
def compiler() -> Any:
    """Return the package cuda-core, which calls NVRTC.

    Raises:
        BackendError: the package is not installed.
    """
    with _IMPORTING:  # a second thread would see a package that is half there
        for name in ("cuda.core", "cuda.core.experimental"):  # its place before and after version 0.5
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            if hasattr(module, "Program"):
                return module
    raise _no_core()


def compile_source(source: str, names: Iterable[str], architecture: str) -> CompiledCode:
    """Compile a source, or load its code from the disk cache.

    Args:
        source: CUDA C++; may include the headers of ``csrc/cuda``.
        names: C++ names of the kernels to compile, template arguments included.
        architecture: such as ``sm_90``.

    Raises:
        BackendError: no compiler is installed, or it does not know the architecture, or it refuses the
            source (a bug of gnnc).
    """
    wanted = tuple(names)
    file = _cache_file(source, wanted, architecture)
    code = _load(file) if file is not None else None
    if code is None:
        code = _compile(source, wanted, architecture)
        if file is not None:
            _store(file, code)
    return code


def _compile(source: str, names: tuple[str, ...], architecture: str) -> CompiledCode:
    core = compiler()
    _check_architecture(architecture)
    folders = [str(headers_folder()), str(toolkit_headers())]
    options = core.ProgramOptions(arch=architecture, include_path=folders, **_OPTIONS, **_no_cache(core))
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
    return CompiledCode(
        cubin=bytes(code.code),
        symbols=symbols,
        resources={name: found[symbol] for name, symbol in symbols.items() if symbol in found},
    )


def _no_cache(core: Any) -> dict[str, bool]:
    """Return the option that turns off NVRTC's own cache, for versions that have the cache and the option."""
    known = "no_cache" in core.ProgramOptions.__dataclass_fields__
    return {"no_cache": True} if known and compiler_version() >= _CACHING_VERSION else {}


def _check_architecture(architecture: str) -> None:
    """Raise BackendError where NVRTC is older than the architecture."""
    result, known = importlib.import_module("cuda.bindings.nvrtc").nvrtcGetSupportedArchs()
    number = int(re.sub(r"\D", "", architecture))
    if int(result) or number in known:
        return
    version = ".".join(map(str, compiler_version()))
    raise BackendError(
        f"NVRTC {version} does not compile for {architecture}: install a newer one, or move the model to the "
        "CPU and use backend='cpu'"
    )


def _text(symbol: Any) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else str(symbol)


# The disk cache


@cache
def _headers_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cache_file(source: str, names: tuple[str, ...], architecture: str) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    headers = _headers_digest(headers_folder())
    key = json.dumps([source, names, architecture, headers, _OPTIONS, compiler_version()])
    return folder / "cuda" / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"


def _load(file: Path) -> CompiledCode | None:
    """Read compiled code from a file; None where it is missing, damaged, or not in a private folder."""
    try:
        content = read_private(file)
    except OSError:
        return None
    digest, _, rest = content.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    head, _, cubin = rest.partition(b"\n")
    table = json.loads(head)
    resources = {name: Resources(*values) for name, values in table["resources"].items()}
    return CompiledCode(cubin, table["symbols"], resources)


def _store(file: Path, code: CompiledCode) -> None:
    """Write compiled code to a file; without a private folder nothing is written."""
    table = {
        "symbols": code.symbols,
        "resources": {n: (r.registers, r.spilled, r.stack) for n, r in code.resources.items()},
    }
    rest = json.dumps(table).encode() + b"\n" + code.cubin
    try:
        write_private(file, hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
    except OSError:
        return
