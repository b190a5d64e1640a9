"""Compiles a benchmark model in a new process: ``python compile_process.py gcn:int8`` prints its times."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

FEATURES, CLASSES = 128, 40


NODES, EDGES = 2_708, 10_556


def problem(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return a benchmark model and the arguments of a small graph, on the device."""
    import models

    torch.manual_seed(0)
    x = torch.randn(NODES, FEATURES, device="cuda")
    edge_index = torch.randint(NODES, (2, EDGES), device="cuda")
    return models.MODELS[name](FEATURES, CLASSES).eval().cuda(), x, edge_index


@torch.no_grad()
def compile_once(case: str) -> dict[str, Any]:
    """Compile ``model:precision`` in this process; return its times."""
    import gnnc

    name, precision = case.split(":")
    model, *arguments = problem(name)
    torch.cuda.synchronize()
    begin, worked = time.perf_counter(), time.process_time()
    compiled = gnnc.compile(model, precision)
    compiled(*arguments)
    torch.cuda.synchronize()
    program = compiled._dispatch.last
    return {
        "seconds": sum(program.seconds.values()),
        **program.seconds,
        "first call": time.perf_counter() - begin,
        "cpu seconds": time.process_time() - worked,
        "kernels": len(program.executable.resources),
    }


def in_a_new_process(case: str, cache: Path) -> dict[str, Any]:
    """Compile a case in a process that finds compiled kernels in ``cache``.

    Raises:
        RuntimeError: it failed; holds what it wrote.
    """
    here = Path(__file__).resolve()
    command = [sys.executable, str(here), case]
    paths = [str(here.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"GNNC_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(compile_once(sys.argv[1])))
