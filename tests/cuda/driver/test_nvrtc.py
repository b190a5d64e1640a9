"""Compiling and its disk cache: no GPU is needed."""

import re
import stat
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

import gnnc
from gnnc.runtime import cuda
from gnnc.runtime.cuda.driver import nvrtc
from gnnc.runtime.cuda.driver.kernel_set import KernelSet

pytestmark = pytest.mark.usefixtures("compiler")
SOURCE = '#include "common/check.cuh"\n'
NAMES = ("gnnc::check_finite",)
IN_A_NEW_PROCESS = f"""
import sys
from gnnc.runtime import cuda
cuda.load_compiler()
cuda.driver.nvrtc.compile_source({SOURCE!r}, {NAMES!r}, "sm_90")
print("cuda.core" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def compilations(monkeypatch):
    """Counts calls of the compiler."""
    calls = []
    original = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *args: calls.append(args) or original(*args))
    return calls


def test_code_is_compiled_once(folder, compilations):
    first = nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    again = nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    assert first == again and len(compilations) == 1
    assert first.cubin[:4] == b"\x7fELF"
    assert first.resources[NAMES[0]].spilled == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


def test_every_kernel_first_waits_for_the_one_before_it():
    """In a graph it is launched earlier (``gnnc.runtime.cuda.graphs.cuda_graph``)."""
    texts = [path.read_text() for path in nvrtc.headers_folder().rglob("*.cuh")]
    kernels = [body for text in texts for body in re.split(r"__global__ void", text)[1:]]
    first = [re.search(r"\) \{\s+(.*)", body) for body in kernels]
    assert len(kernels) > 15
    assert [match[1] for match in first if match] == ["begin_kernel();"] * len(kernels)


@pytest.mark.slow
def test_the_compiler_is_not_imported_for_code_on_disk(folder):
    said = [
        subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in said] == ["True", "False"]


def test_whatever_the_code_depends_on_is_in_the_key(folder, compilations, monkeypatch):
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    nvrtc.compile_source(SOURCE, NAMES, "sm_80")
    nvrtc.compile_source(SOURCE + "// another\n", NAMES, "sm_90")
    monkeypatch.setattr(nvrtc, "_headers_digest", lambda folder: "other headers")
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (13, 99))
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    monkeypatch.setitem(nvrtc._OPTIONS, "fma", True)
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == len(list(folder.iterdir())) == 6


def test_a_damaged_file_is_compiled_again(folder, compilations):
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    file.write_bytes(b"")
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == 3


def test_a_folder_that_others_can_write_to_is_not_trusted(folder, compilations):
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == 2 and not list(folder.iterdir())


def test_nothing_is_read_from_a_folder_that_others_can_write_to(folder, compilations):
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    folder.chmod(0o777)
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    folder.chmod(0o700)
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == 2


@pytest.mark.slow
def test_processes_that_store_the_same_code_leave_one_whole_file(folder, compilations):
    processes = [subprocess.Popen([sys.executable, "-c", IN_A_NEW_PROCESS]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    assert not compilations


def test_threads_that_store_the_same_file_leave_a_whole_one(folder):
    codes = [nvrtc.CompiledCode(bytes([i]) * 2 ** (12 + i), {"f": f"f{i}"}, {}) for i in range(8)]
    file, together = folder / "code.cubin", Barrier(len(codes))
    nvrtc._store(file, codes[0])

    def store_and_load(code):
        together.wait()
        found = []
        for _ in range(20):
            nvrtc._store(file, code)
            found.append(nvrtc._load(file))
        return found

    with ThreadPoolExecutor(len(codes)) as pool:
        found = [each for several in pool.map(store_and_load, codes) for each in several]
    assert all(each in codes for each in found)
    assert list(folder.iterdir()) == [file]


def test_the_cache_can_be_off(monkeypatch, compilations):
    monkeypatch.setenv("GNNC_CACHE", "off")
    assert nvrtc.cache_folder() is None
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    nvrtc.compile_source(SOURCE, NAMES, "sm_90")
    assert len(compilations) == 2


def test_a_source_that_does_not_compile_shows_what_the_compiler_said(folder):
    with pytest.raises(gnnc.BackendError, match="bug of gnnc(.|\n)*nonsense"):
        nvrtc.compile_source("nonsense", ("f",), "sm_90")


def kernel(kernel_set, *structs):
    return kernel_set.launcher(f"gnnc::rowmap<{', '.join(structs)}>", 3)


def test_a_unit_defines_equal_structs_once():
    kernel_set = KernelSet()
    assert kernel_set.struct("Epilogue", "  int a;\n") == kernel_set.struct("Epilogue", "  int a;\n")
    assert kernel_set.struct("Epilogue", "  int a;\n") != kernel_set.struct("Epilogue", "  int b;\n")
    assert kernel(kernel_set, "A") is kernel(kernel_set, "A")
    assert kernel_set.launcher("gnnc::rowmap<A>", 3) is not kernel_set.launcher("gnnc::rowmap<A>", 4)
    assert kernel_set.names == ("gnnc::rowmap<A>",)


def test_a_kernel_is_compiled_from_what_it_is_made_of():
    """So that another program with this kernel finds it on disk."""
    one, other = KernelSet(), KernelSet()
    for kernel_set in (one, other):
        inner = kernel_set.struct("Inner", "  int a;\n")
        outer = kernel_set.struct("Outer", f"  {inner} of;\n")
        if kernel_set is other:
            kernel(kernel_set, kernel_set.struct("Epilogue", "  float c;\n"))
            kernel_set.launcher("gnnc::check_finite", 4)
        kernel(kernel_set, outer)
    (alone,) = one.sources
    text, names = alone
    assert alone in other.sources and names == one.names == (f"gnnc::rowmap<{outer}>",)
    assert text.index(f"struct {inner}") < text.index(f"struct {outer}") and "check" not in text
    assert [len(names) for _, names in other.sources] == [1, 1, 1]
    assert '#include "common/check.cuh"' in other.sources[1][0]


def test_kernels_of_a_header_that_are_no_templates_are_compiled_at_once():
    kernel_set = KernelSet()
    kernel_set.launcher("gnnc::count_near", 11)
    kernel_set.launcher("gnnc::stage_edges", 11)
    kernel_set.require("gnnc::stage_edges", "true", "yes")
    ((_, names),) = kernel_set.sources
    assert names == kernel_set.names


def test_what_the_host_assumes_of_a_kernel_is_checked_where_it_is_compiled(folder):
    kernel_set = KernelSet()
    kernel_set.launcher("gnnc::check_finite", 4)
    kernel_set.launcher("gnnc::count_near", 11)
    kernel_set.require("gnnc::check_finite", "sizeof(CheckArgs) == 1", "so it says")
    assert ["so it says" in text for text, _ in kernel_set.sources] == [True, False]
    with pytest.raises(gnnc.BackendError, match="so it says"):
        kernel_set.compile("sm_90")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_sentence_says_so():
    with pytest.raises(gnnc.BackendError, match=r"(CUDA build of torch|no CUDA device).*use backend='cpu'"):
        gnnc.compile(torch.nn.Linear(2, 2), backend="cuda")
    assert gnnc.compile(torch.nn.Linear(2, 2)).options.backend.name == "cpu"


# Machines that lack something


@pytest.fixture
def unchecked():
    """Nothing has been looked for yet, and nothing that a test finds is remembered."""
    remembered = (cuda.load, cuda.load_compiler, nvrtc.compiler_version, nvrtc.toolkit_headers)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def refusal(function):
    """Return why ``function`` refuses, which is one line."""
    with pytest.raises(gnnc.BackendError) as caught:
        function()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def helps(extra):
    """What every such refusal ends with."""
    return f": install gnnc[{extra}], or move the model to the CPU and use backend='cpu'"


def finds_no_library():
    raise RuntimeError("Failure finding libnvrtc.so\n  in this folder\n  in that folder\n")


@pytest.mark.parametrize(("version", "extra"), [(None, "cuda"), ("12.6", "cuda12"), ("13.0", "cuda")])
def test_without_nvrtc_one_sentence_says_what_to_install(version, extra, unchecked, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(nvrtc, "_package_roots", list)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=finds_no_library))
    said = "the CUDA compiler NVRTC is missing or does not load"
    assert refusal(cuda.load_compiler) == said + helps(extra)
    assert refusal(lambda: gnnc.compile(torch.nn.Linear(2, 2), backend="cuda-offline")) == said + helps(extra)
    assert gnnc.compile(torch.nn.Linear(2, 2), backend="cpu").options.backend.name == "cpu"


@pytest.mark.parametrize(
    ("module", "package"), [("cuda.bindings.nvrtc", "cuda-bindings"), ("cuda.core", "cuda-core")]
)
def test_without_a_package_one_sentence_says_what_to_install(module, package, unchecked, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setitem(sys.modules, module, None)
    said = f"the package {package}, which calls the CUDA compiler NVRTC, is missing"
    assert refusal(cuda.load_compiler) == said + helps("cuda")


@pytest.mark.parametrize(("major", "extra"), [(12, "cuda12"), (13, "cuda")])
def test_without_headers_one_sentence_says_what_to_install(major, extra, unchecked, monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "_package_roots", list)
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (major, 0))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    said = f"the headers of CUDA {major}, cuda_fp16.h among them, are missing"
    assert refusal(cuda.load_compiler) == said + helps(extra)


@pytest.mark.parametrize(
    ("version", "found", "extra"), [("12.8", (13, 0), "cuda12"), ("13.0", (12, 9), "cuda")]
)
def test_nvrtc_of_another_cuda_is_refused(version, found, extra, unchecked, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: found)
    said = f"NVRTC is of CUDA {found[0]} and torch of CUDA {version[:2]}"
    assert refusal(cuda.load) == said + helps(extra)


def test_a_cuda_that_no_extra_is_for_is_named(monkeypatch):
    assert "NVRTC and headers of CUDA 14, or" in str(nvrtc.missing("something is amiss", 14))


def test_the_extras_that_errors_name_exist():
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    assert set(nvrtc.EXTRAS.values()) <= {f"gnnc[{name}]" for name in extras}


def test_an_architecture_newer_than_the_compiler_is_no_bug_of_ours():
    assert "does not compile for sm_999: install a newer" in refusal(lambda: nvrtc._compile("", (), "sm_999"))


# Packages of several CUDAs


@pytest.fixture
def both(tmp_path, monkeypatch):
    """The folders of packages of CUDA 12 and of CUDA 13, as they lie side by side."""
    for include, version in (("cuda_runtime/include", 12080), ("cu13/include", 13000)):
        (tmp_path / include).mkdir(parents=True)
        (tmp_path / include / "cuda_fp16.h").touch()
        (tmp_path / include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    for lib, major in (("cuda_nvrtc/lib", 12), ("cu13/lib", 13)):
        (tmp_path / lib).mkdir(parents=True)
        (tmp_path / lib / f"libnvrtc.so.{major}").touch()
    monkeypatch.setattr(nvrtc, "_package_roots", lambda: [tmp_path])
    return tmp_path


@pytest.mark.parametrize(("version", "folder"), [((12, 8), "cuda_runtime"), ((13, 0), "cu13")])
def test_headers_are_of_the_compilers_cuda(version, folder, both, unchecked, monkeypatch):
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: version)
    assert nvrtc.toolkit_headers() == both / folder / "include"


@pytest.mark.parametrize(
    ("version", "file"),
    [("12.6", "cuda_nvrtc/lib/libnvrtc.so.12"), ("13.0", "cu13/lib/libnvrtc.so.13"), (None, None)],
)
def test_the_compiler_is_of_torchs_cuda(version, file, both, monkeypatch):
    loaded = []
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", loaded.append)
    nvrtc._load_nvrtc()
    assert loaded == ([str(both / file)] if file else [])
