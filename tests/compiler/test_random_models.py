"""Random models of PyG's layers, norms and hand-written layers equal eager in every precision.

`python tests/fuzz_models.py --seed 0 --count 2000 --jobs 16` runs many more.
"""

import pytest
from check_random_model import BOUNDS, check_seed
from slow import slow_after


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", slow_after(3, range(40)))
def test_random_models_equal_eager(seed: int) -> None:
    check_seed(seed, list(BOUNDS), graphs=1)
