"""Timing, memory and the machine's description, for every benchmark alike."""

import ctypes
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def memory_in_new_process(script: str, graph: str, model: str, name: str) -> float:
    """Return the peak MiB that a benchmark measures in a new process, where no pool of another run counts."""
    command = [sys.executable, script, "--graph", graph, "--memory", model, name]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(process.stdout.split()[-1])


def median_ms(call: Callable[[], Any], *, repeats: int = 11, warmup: int = 2) -> dict[str, float]:
    """Return median, least and largest wall-clock milliseconds of ``call``."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def median_ms_in_turns(
    calls: dict[str, Callable[[torch.Tensor], Any]],
    x: torch.Tensor,
    *,
    repeats: int = 11,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """As ``median_ms`` for several calls in turns, so that the machine's noise meets all of them alike.

    Each call gets a new copy of ``x``, made outside the time measured, and finds the caches as another
    call left them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            fresh = x.clone()
            start = clock()
            result = call(fresh)
            elapsed = (clock() - start) * 1e3
            del result, fresh
            if turn >= warmup:
                times[name].append(elapsed)
    return {
        name: {"median": statistics.median(ts), "min": min(ts), "max": max(ts)} for name, ts in times.items()
    }


def rss_mb() -> float:
    """Return this process's resident memory in MiB."""
    return _status("VmRSS")


def peak_rss_mb(call: Callable[[], Any]) -> float:
    """Return the MiB by which resident memory peaked above its start while ``call`` ran (Linux, glibc).

    Memory that was freed before goes back to the system first, or a call could use it unseen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = rss_mb()
    call()
    return _status("VmHWM") - before


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def copy_bandwidth_gbs(megabytes: int = 256) -> float:
    """Return the bytes read plus written per second by a large copy, in GB/s."""
    source = torch.ones(megabytes * 2**20 // 4)
    target = torch.empty_like(source)
    best = median_ms(lambda: target.copy_(source))["min"]
    return 2 * source.numel() * 4 / best / 1e6


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the numbers."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "copy_gbs": round(copy_bandwidth_gbs(), 1),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "commit": commit,
    }
