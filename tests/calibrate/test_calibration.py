"""Calibration: what it measures, the fit, and the file that keeps it."""

import dataclasses
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnc
from gnnc import api
from gnnc.calibrate import calibration
from gnnc.calibrate.calibration import Sample, calibrate, fit, rates_for, stored_rates
from gnnc.calibrate.probes import CPU, PROBES, Probe
from gnnc.compiler import dispatch
from gnnc.cost.model import ALONE, KNOTS, Rates, Term
from gnnc.environment import cache_folder
from gnnc.runtime import cuda
from gnnc.runtime.backend import Backend, get_backend
from gnnc.target import Target


def samples(rates: dict[str, float], amounts: list[dict[str, float]]) -> list[Sample]:
    return [
        Sample("gemm", [Term(n, a) for n, a in given.items()], sum(rates[n] * a for n, a in given.items()))
        for given in amounts
    ]


RATES = {"launch": 5e-6, "dot.fp32": 2e-11, "row": 3e-9}
AMOUNTS = [{"launch": 1, "dot.fp32": d, "row": r} for d in (1e4, 1e6, 1e8) for r in (10, 1e3, 1e5)]


def test_the_fit_finds_the_rates_that_made_the_times() -> None:
    assert fit(samples(RATES, AMOUNTS))["gemm"] == pytest.approx(RATES, rel=1e-3)


def test_a_disturbed_sample_pulls_little() -> None:
    given = samples(RATES, AMOUNTS)
    given[4].seconds *= 20
    assert fit(given)["gemm"] == pytest.approx(RATES, rel=0.1)


def test_a_byte_costs_no_less_and_at_most_twice_as_much_in_eight_times_the_memory() -> None:
    """One disturbed sample alone reaches the largest memory: it does not decide what that costs."""
    given = [
        Sample("spmm", [Term("row", 1e3), Term("read", 1e6, held)], 1e-3 * factor)
        for held, factor in ((KNOTS[0], 1.0), (KNOTS[1], 1.5), (KNOTS[2], 1.2), (KNOTS[3], 40.0))
    ]
    given += [Sample("spmm", [Term("row", 1e6)], 1e-6)] * 2
    table = fit(given)["spmm"]
    costs = [table[f"read@{k}"] for k in range(len(KNOTS))]
    assert all(a * (1 - 1e-6) <= b <= 2 * a * (1 + 1e-6) for a, b in itertools.pairwise(costs)), costs
    assert costs[0] == pytest.approx(1e-9, rel=1e-3)


def test_rates_are_never_negative_and_there_is_always_a_rest() -> None:
    given = samples(RATES, AMOUNTS)
    given[0].seconds = 1e-9
    families = fit(given)
    assert all(rate >= 0 for table in families.values() for rate in table.values())
    assert ALONE in families


def test_they_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path))
    runs = []
    made = Rates({ALONE: {"launch": 1.0}}, "reference", "a machine", 1.5)
    monkeypatch.setattr(calibration, "calibrate", lambda backend: runs.append(1) or made)
    backend = get_backend("reference")
    assert stored_rates(backend) is None
    assert rates_for(backend) == rates_for(backend) == made
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["machine"] == "a machine"
    calibration._known.clear()  # as in another process
    assert stored_rates(backend) == made and len(runs) == 1


@pytest.mark.parametrize(
    ("shares", "taken"),
    [
        ((0.01, 0.0), [0.01] * 4),
        ((0.5, 0.02), [0.5, 0.02, 0.02, 0.02]),
        ((0.5, 0.6, 0.4, 0.0), [0.5, 0.5, 0.4, 0.4]),
    ],
)
def test_rates_of_a_busy_machine_are_measured_again_by_later_processes(
    shares: tuple[float, ...], taken: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path))
    measured = iter(shares)
    monkeypatch.setattr(
        calibration, "calibrate", lambda backend: Rates({}, "reference", "", 1.0, next(measured))
    )
    backend, found = get_backend("reference"), []
    for _ in range(4):
        calibration._known.clear(), calibration._measured_here.clear()  # as in another process
        found.append(rates_for(backend).waited)
        assert rates_for(backend).waited == found[-1], "one measurement a process"
    assert found == taken


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell")
def test_a_thread_that_shares_its_processor_waits() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("threads cannot be bound to a processor here")
    allowed = os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for process in (0, other.pid):
            os.sched_setaffinity(process, {min(allowed)})
        before, end = calibration.scheduled(), time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass
        share = calibration._waited_share(before, calibration.scheduled())
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
    assert share > calibration.MOST_WAITING
    assert calibration._waited_share((5, 5), (9, 5)) == 0.0


def test_a_damaged_file_is_measured_again_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path))
    backend = get_backend("reference")
    path = calibration._path(calibration._key(backend))
    assert path is not None
    path.write_text("{")
    with pytest.warns(UserWarning, match="is damaged"):
        assert stored_rates(backend) is None


def test_a_folder_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GNNC_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="rates cannot be kept"):
        calibration._store("key", Rates({}))


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNC_CACHE", "/here")
    assert cache_folder() == Path("/here")
    monkeypatch.setenv("GNNC_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.delenv("GNNC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/gnnc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "gnnc"


def test_the_key_tells_backends_and_threads_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {calibration._key(get_backend(name)) for name in ("cpu", "reference")}
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    keys |= {calibration._key(get_backend(name)) for name in ("cpu", "reference")}
    assert len(keys) == 4


def test_the_key_of_a_gpu_goes_by_its_name_and_not_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(gpu: str) -> str:
        backend = get_backend("reference")
        return calibration._key(
            dataclasses.replace(
                backend,
                target=Target("cuda"),
                description=f"{gpu}, NVRTC 13.0",
                device=torch.device("cuda", 0),
            )
        )

    first, other = key("NVIDIA H200"), key("NVIDIA A100")
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert first == key("NVIDIA H200") != other


GPUS = tuple(torch.device("cuda", index) for index in range(3))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of this machine's GPUs, of which the first is the current one."""
    names = ["NVIDIA A100", "NVIDIA H200", "NVIDIA H200"]
    monkeypatch.setattr(cuda, "load", lambda: "NVRTC 13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[torch.device(device).index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9 if torch.device(d).index else 8, 0))
    return names


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_rates_are_filed_under_the_gpu_that_the_model_is_on(name: str, gpus: list[str]) -> None:
    first, other, like_other = (get_backend(name, gpu) for gpu in GPUS)
    assert first.description == "CUDA kernels, NVIDIA A100, NVRTC 13.0"
    assert other.description == calibration._machine(other) == "CUDA kernels, NVIDIA H200, NVRTC 13.0"
    assert calibration._key(first) != calibration._key(other) == calibration._key(like_other)
    assert [backend.device for backend in (first, other, like_other)] == list(GPUS)


@pytest.mark.parametrize("device", [None, CPU, torch.device("cuda"), torch.device("cuda", 7)])
def test_a_model_on_none_of_the_gpus_is_for_the_current_one(
    device: torch.device | None, gpus: list[str]
) -> None:
    assert get_backend("cuda", device) == get_backend("cuda", GPUS[0])


def test_a_pickled_backend_is_for_the_same_gpu_or_the_current_one_of_a_machine_without_it(
    gpus: list[str],
) -> None:
    kept = pickle.dumps(get_backend("cuda", GPUS[1]))
    assert pickle.loads(kept) == get_backend("cuda", GPUS[1]) != get_backend("cuda", GPUS[0])
    del gpus[1:]
    assert pickle.loads(kept) == get_backend("cuda", GPUS[0])


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_a_model_that_moves_is_compiled_for_the_gpu_that_it_is_on(
    backend: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Backend] = []

    class Made(gnnc.GnncError):
        """The program's options are known."""

    def build(model: Any, args: Any, kwargs: Any, options: Any, *rest: Any, **more: Any) -> None:
        made.append(options.backend)
        raise Made

    monkeypatch.setattr(dispatch, "build_program", build)
    monkeypatch.setattr(dispatch, "validate", lambda *given: None)
    for module in (api, dispatch):
        monkeypatch.setattr(module, "device_of", lambda model: GPUS[1])
    compiled = gnnc.compile(torch.nn.Linear(2, 2), backend=backend)
    assert compiled.options.backend.device == GPUS[1]
    for gpu in (GPUS[1], GPUS[0]):
        monkeypatch.setattr(dispatch, "device_of", lambda model, gpu=gpu: gpu)
        with torch.no_grad(), pytest.raises(Made):
            compiled(torch.ones(1, 2))
    assert [each.device for each in made] == [GPUS[1], GPUS[0]]


def test_a_gpu_is_measured_by_tensors_on_it(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By another backend's kernels here, on the CPU."""
    places: list[torch.device] = []
    build, values_of = Probe.build, calibration.values_of

    def built(probe: Probe, device: torch.device = CPU) -> Any:
        places.append(device)
        return build(probe)

    def values(probe: Probe, nodes: int, edges: int, device: torch.device) -> Any:
        places.append(device)
        return values_of(probe, nodes, edges)

    monkeypatch.setattr(Probe, "build", built)
    monkeypatch.setattr(calibration, "values_of", values)
    monkeypatch.setattr(calibration, "_CUDA", dataclasses.replace(calibration._CUDA, graphs=((50, 200),)))
    monkeypatch.setattr(calibration, "_LEAST_RUNS", 1)
    monkeypatch.setattr(calibration, "PROBES", PROBES[:1])
    gpu = get_backend("cuda", GPUS[1])
    backend = dataclasses.replace(
        get_backend("reference"),
        target=Target("reference", frozenset({"fp32"})),
        device=gpu.device,
        description=gpu.description,
    )
    assert calibrate(backend, seconds=0).machine == "CUDA kernels, NVIDIA H200, NVRTC 13.0"
    assert set(places) == {CPU, GPUS[1]}  # which options there are is asked of a graph on the CPU
    assert places.count(GPUS[1]) == 2


def test_threads_that_need_the_same_rates_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    begun = threading.Event()
    made = Rates({ALONE: {"launch": 1.0}})

    def measure(backend: Backend) -> Rates:
        runs.append(threading.get_ident())
        begun.set()
        time.sleep(0.3)  # the other thread asks meanwhile
        return made

    monkeypatch.setattr(calibration, "calibrate", measure)
    backend, found = get_backend("reference"), []
    threads = [threading.Thread(target=lambda: found.append(rates_for(backend))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert found == [made, made] and len(runs) == 1


def test_a_backend_that_cannot_run_is_not_measured() -> None:
    offline = dataclasses.replace(get_backend("reference"), target=Target("cuda-offline"), is_runnable=False)
    assert stored_rates(offline) is None
    with pytest.raises(gnnc.UnsupportedError, match="backend 'cuda-offline' only compiles"):
        rates_for(offline)


def test_a_machine_that_was_busy_can_be_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(Rates({ALONE: {"launch": seconds}}) for seconds in (1.0, 2.0))
    monkeypatch.setattr(calibration, "calibrate", lambda backend: next(made))
    backend = get_backend("reference")
    first, again = rates_for(backend), rates_for(backend, again=True)
    assert first.families[ALONE]["launch"] == 1.0
    assert again.families[ALONE]["launch"] == 2.0 and rates_for(backend) == again


def test_what_is_as_fast_is_measured_once() -> None:
    families = {"spmm": {"gather.bf16@1": 2.0, "edge.int8.row": 3.0}}
    assert calibration._with_alike(families, {"fp16": "bf16"}) == {
        "spmm": {"gather.bf16@1": 2.0, "edge.int8.row": 3.0, "gather.fp16@1": 2.0}
    }


@pytest.mark.slow
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    graphs = ((500, 4000), (2000, 20000))
    monkeypatch.setattr(calibration, "_CPU", dataclasses.replace(calibration._CPU, graphs=graphs))
    run = calibration._Trial.run
    monkeypatch.setattr(calibration._Trial, "run", lambda trial: (runs.append(1), run(trial)))
    start = time.perf_counter()
    rates = calibrate(get_backend("cpu"), seconds=4)
    assert time.perf_counter() - start < 60, "ten seconds on a machine that does nothing else"
    assert len(runs) > 3 * len(graphs)
    assert {"gemm", "spmm", "attention", "sddmm", "edge_softmax", ALONE} <= rates.families.keys()
    assert {"dot.fp32", "dot.bf16", "dot.int8"} <= rates.families["gemm"].keys()
    modes = {name.split("@")[0] for name in rates.families["spmm"] if name.startswith("gather")}
    assert modes == {f"gather.{m}" for m in ("fp32", "bf16", "int8.tensor", "int8.row_pow2", "int8.row")}


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_runs(probe) -> None:
    graph_module, values = probe.build()
    assert [n.name for n in graph_module.graph.find_nodes(op="placeholder")] == list(probe.names)
    assert all(bool(out.isfinite().all()) for out in graph_module(*values))


@pytest.mark.slow
def test_python_m_gnnc_shows_the_rates(tmp_path: Path) -> None:
    """In a process of its own, which finds rates in the cache."""
    code = (
        "from gnnc import __main__\nfrom gnnc.calibrate import calibration\n"
        "from gnnc.cost.model import Rates\n"
        "calibration.calibrate = lambda b: Rates({'gemm': {'dot.int8': 2e-12}}, 'cpu', 'this one', 3.0)\n"
        "__main__.main()\n"
    )
    env = {"GNNC_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr
    assert "speed of backend cpu: this one; measured in 3.0 s" in run.stdout
    assert "dot.int8" in run.stdout and "0.002" in run.stdout
