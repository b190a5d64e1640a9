"""The integer program against every choice there is."""

import itertools
import random

import pytest
import torch
from fixed_rates import FIXED
from gnn_graphs import MODELS, arguments

from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import FULL, Option, has_low_form, options_of
from gnnc.passes.search.solver import rank_correlation, solve
from gnnc.passes.search.study import OpChoices, Store, Study, study

OPTIONS = (FULL, Option.parse("bf16"), Option.parse("int8"))


def brute_force(known: Study, budget: float) -> float | None:
    """The least time of all choices within the budget."""
    everything = itertools.product(*(range(len(op.options)) for op in known.ops))
    good = [c for c in everything if all(e <= budget for e in known.error(c))]
    return min(map(known.seconds, good), default=None)


def node() -> torch.fx.Node:
    return torch.fx.Graph().call_function(torch.ops.gnnc.gemm.default, ())


def random_study(seed: int, ops: int = 5, outputs: int = 2) -> Study:
    draw = random.Random(seed)
    choices = []
    for _ in range(ops):
        errors = [(0.0,) * 2 * outputs] + [
            tuple(draw.uniform(0, 0.02) for _ in range(2 * outputs)) for _ in OPTIONS[1:]
        ]
        seconds = [draw.uniform(1e-5, 1e-3) for _ in OPTIONS]
        choices.append(OpChoices(node(), OPTIONS, tuple(errors), tuple(seconds)))
    stores = [
        Store(tuple({(draw.randrange(ops), draw.randrange(3)) for _ in range(3)}), draw.uniform(0, 5e-4))
        for _ in range(4)
    ]
    return Study(tuple(choices), tuple(stores), outputs)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("budget", [0.004, 0.015, 0.04])
def test_it_is_as_fast_as_the_best_of_all_choices(seed: int, budget: float) -> None:
    known = random_study(seed)
    found = solve(known, budget)
    assert found.feasible and all(e <= budget * (1 + 1e-6) for e in known.error(found.chosen))
    assert found.seconds == pytest.approx(brute_force(known, budget), rel=1e-6)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
def test_models_too(name: str) -> None:
    gm = MODELS[name]()
    ctx = Context(examples=arguments(gm))
    allowed = {n: options_of(n, ctx) for n in gm.graph.nodes if has_low_form(n)}
    allowed = dict(list(allowed.items())[:6])
    known = study(gm, ctx, allowed, FIXED)
    for budget in (0.002, 0.008, 0.1):
        assert solve(known, budget).seconds == pytest.approx(brute_force(known, budget), rel=1e-6)


def test_it_is_deterministic_and_takes_the_earlier_of_equals() -> None:
    known = random_study(3)
    assert len({solve(known, 0.01).chosen for _ in range(3)}) == 1
    flat = OpChoices(node(), OPTIONS, ((0.0, 0.0),) * 3, (1e-4,) * 3)
    assert solve(Study((flat, flat), (), 1), 0.01).chosen == (0, 0)


def test_a_budget_that_overrides_break_is_said_to_be() -> None:
    forced = OpChoices(node(), OPTIONS[1:], ((0.05, 0.05), (0.2, 0.2)), (2e-4, 1e-4))
    found = solve(Study((forced,), (), 1), 0.01)
    assert not found.feasible and found.chosen == (0,)
    assert found.binding == "no choice of precisions meets the budget"


def test_the_constraint_that_binds_is_named() -> None:
    op = OpChoices(node(), OPTIONS, ((0.0, 0.0), (0.002, 0.002), (0.02, 0.02)), (3e-4, 2e-4, 1e-4))
    found = solve(Study((op,), (), 1), 0.01)
    assert found.chosen == (1,)
    assert "the error budget binds" in found.binding
    assert "the root gemm in int8 would save 0.100 ms, and take the error to 0.02" in found.binding
    assert solve(Study((op,), (), 1), 0.1).binding.startswith("nothing binds, predicted error 0.02")


def test_values_that_may_grow_count_too() -> None:
    op = OpChoices(node(), OPTIONS, ((0.0, 0.0), (0.002, 0.002), (0.002, 0.3)), (3e-4, 2e-4, 1e-4))
    assert solve(Study((op,), (), 1), 0.01).chosen == (1,)
    assert solve(Study((op,), (), 1), 0.01, grown=0.5).chosen == (2,)


def test_an_option_that_is_not_finite_is_never_taken() -> None:
    inf = float("inf")
    op = OpChoices(node(), OPTIONS, ((0.0, 0.0), (0.001, 0.001), (inf, inf)), (3e-4, 2e-4, 1e-4))
    assert solve(Study((op,), (), 1), 0.5).chosen == (1,)


def test_a_store_that_two_readers_share_is_paid_once() -> None:
    own = ((0.0, 0.0), (0.0, 0.0))
    pair = tuple(OpChoices(node(), OPTIONS[:2], own, (2e-4, 1e-4)) for _ in range(2))
    shared = Store(((0, 1), (1, 1)), 1.5e-4)
    known = Study(pair, (shared,), 1)
    # Alone, changing the format costs more than it saves; together it is paid once.
    assert known.seconds((0, 1)) > known.seconds((0, 0)) > known.seconds((1, 1))
    assert solve(known, 0.1).chosen == (1, 1)


def test_rank_correlation_of_hand_computed_cases() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1.0)
    # ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15) = 0.6
    assert rank_correlation([1, 2, 3, 4], [5, 4, 9, 8]) == pytest.approx(0.6)
    assert rank_correlation([1, 1], [1, 2]) is None
    assert rank_correlation([1], [1]) is None
