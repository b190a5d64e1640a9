"""``python -m gnnc``: versions, what this machine can run, and how fast; ``--measure`` measures it again.

Of several GPUs it is the first; ``CUDA_VISIBLE_DEVICES`` names another.
"""

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from tabulate import tabulate

from gnnc.calibrate.calibration import MOST_WAITING, rates_for
from gnnc.cost.model import KNOTS
from gnnc.errors import BackendError
from gnnc.runtime.backend import backend_names, get_backend

_PACKAGES = ("gnnc", "torch", "torch_geometric", "numpy")


def main() -> None:
    """Print the versions, a table of backends, and how fast each is here."""
    parser = argparse.ArgumentParser(prog="python -m gnnc", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure this machine's speed again")
    again = parser.parse_args().measure
    print(describe_machine())
    for name in backend_names():
        if name not in ("auto", "reference") and _runs_here(name):
            print()
            print(describe_speed(name, again=again))


def describe_machine() -> str:
    """Return the versions and a table of backends with their kernels and precisions."""
    versions = [(name, _version(name)) for name in _PACKAGES]
    versions += [("python", platform.python_version()), ("threads", str(torch.get_num_threads()))]
    backends = [_backend_row(name) for name in backend_names() if name != "auto"]
    return "\n\n".join(
        (
            tabulate(versions, tablefmt="plain", disable_numparse=True),
            tabulate(backends, ("backend", "precisions", "runs on"), disable_numparse=True),
        )
    )


def describe_speed(backend: str, *, again: bool = False) -> str:
    """Return the rates that ``auto`` weighs, measured now if this machine never was, or ``again``."""
    rates = rates_for(get_backend(backend), again=again)
    title = f"speed of backend {rates.backend}: {rates.machine}; measured in {rates.measured_in:.1f} s"
    rows = [
        (family, term, f"{seconds * 1e9:.4g}" if seconds else "-")
        for family, table in rates.families.items()
        for term, seconds in table.items()
    ]
    knots = ", ".join(f"@{k} {knot / 2**20:g} MiB" for k, knot in enumerate(KNOTS))
    note = f"a byte costs what it does where the memory touched is {knots}"
    busy = f"the machine was busy: {rates.waited:.0%} of the time was waiting; a later process measures again"
    notes = (note,) if rates.waited <= MOST_WAITING else (note, busy)
    return "\n".join((title, *notes, tabulate(rows, ("kernels", "term", "ns"), disable_numparse=True)))


def _runs_here(backend: str) -> bool:
    try:
        return get_backend(backend).is_runnable
    except BackendError:
        return False  # the table of backends has the reason


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "used from its source folder, not installed"


def _backend_row(name: str) -> tuple[str, str, str]:
    try:
        backend = get_backend(name)
    except BackendError as error:
        return name, "-", f"not available: {error}"
    return name, ", ".join(sorted(backend.target.precisions)), backend.description


if __name__ == "__main__":
    main()
