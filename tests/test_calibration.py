"""Calibration: what it measures, the fit, and the file that keeps it."""

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gnnc
from gnnc import calibration
from gnnc.calibration import Sample, calibrate, fit, rates_for, stored_rates
from gnnc.cost import ALONE, KNOTS, Rates, Term
from gnnc.environment import cache_folder
from gnnc.probes import PROBES
from gnnc.runtime.backend import get_backend


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
        return calibration._key(dataclasses.replace(backend, name="cuda", description=f"{gpu}, NVRTC 13.0"))

    first, other = key("NVIDIA H200"), key("NVIDIA A100")
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert first == key("NVIDIA H200") != other


def test_a_backend_that_cannot_run_is_not_measured() -> None:
    offline = dataclasses.replace(get_backend("reference"), name="cuda-offline")
    assert stored_rates(offline) is None
    with pytest.raises(gnnc.UnsupportedError, match="backend 'cuda-offline' is not measured in this version"):
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


def test_python_m_gnnc_shows_the_rates(tmp_path: Path) -> None:
    """In a process of its own, which finds rates in the cache."""
    code = (
        "from gnnc import calibration, __main__\n"
        "from gnnc.cost import Rates\n"
        "calibration.calibrate = lambda b: Rates({'gemm': {'dot.int8': 2e-12}}, 'cpu', 'this one', 3.0)\n"
        "__main__.main()\n"
    )
    env = {"GNNC_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr
    assert "speed of backend cpu: this one; measured in 3.0 s" in run.stdout
    assert "dot.int8" in run.stdout and "0.002" in run.stdout
