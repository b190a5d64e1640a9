"""Random models against eager: `python tests/fuzz_models.py --seed 0 --count 2000`.

A model and its graphs are made from a number alone, so `--seed N --count 1` runs one again. A model counts as
run if eager runs it on one of its graphs. Every failure is printed; the exit status is 1 if there was one.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent / "support"))

from check_random_model import BOUNDS, Mismatch, check_seed

from gnnc.errors import GnncError


def main() -> int:
    """Check the models of a range of seeds; return 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="number of the first model")
    parser.add_argument("--count", type=int, default=100, help="how many models")
    parser.add_argument("--precisions", nargs="+", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--every", type=int, default=0, help="print where the run is after so many models")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so much CPU time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ran = graphs = failed = 0
    number = options.seed
    for number in range(options.seed, options.seed + options.count):
        if time.process_time() > options.seconds:
            break
        if options.every and number % options.every == 0:
            print(f"at seed {number}: {ran} models, {failed} failed, {time.process_time():.0f} s", flush=True)
        try:
            done = check_seed(number, options.precisions)
            ran += bool(done)
            graphs += len(done)
        except (Mismatch, GnncError) as error:
            failed += 1
            print(f"FAILED {type(error).__name__}: seed {number}: {' '.join(str(error).split())}", flush=True)
        except Exception as error:
            failed += 1
            text = " ".join(str(error).split())[:400]
            print(f"FAILED raw {type(error).__name__}: seed {number}: {text}", flush=True)
    seconds = time.process_time()
    print(
        f"seeds {options.seed} to {number}: {ran} models on {graphs} graphs, {failed} failed, {seconds:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
