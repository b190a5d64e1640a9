"""Forms of training: loops as users of PyG write them, in eager and compiled, from equal states and seeds."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnnc

STEPS, NODES, FEATURES, HIDDEN, CLASSES = 20, 60, 8, 8, 3
DOCS = Path(__file__).parents[2] / "docs" / "training-forms.md"

Compile = Callable[[nn.Module], Any]
"""Function that compiles a model, or returns it as it is."""

Loop = Callable[[Compile], Iterator[float]]
"""Function that builds a model, trains it, and yields the loss of every step."""


@dataclass(frozen=True)
class Form:
    """A way to train.

    Attributes:
        loop: builds, compiles and trains the model.
        error: pattern of the error that the compiled model raises, or "" where it trains.
        tolerance: how far a loss may be from that of eager.
        methods: methods other than forward that the loop calls: in eager, and named by ``explain()``.
    """

    loop: Loop
    error: str = ""
    tolerance: float = 1e-4
    methods: Sequence[str] = ()


def check(form: Form) -> None:
    """Check that the compiled losses are those of eager, or that the named error is raised."""
    eager = _losses(form.loop, lambda model: model)
    assert len(eager) == STEPS and sum(eager[-5:]) < sum(eager[:5]), "eager itself does not learn"
    compiled: list[gnnc.CompiledModel] = []

    def compile_it(model: nn.Module) -> gnnc.CompiledModel:
        compiled.append(gnnc.compile(model, "fp32"))
        return compiled[-1]

    if form.error:
        with pytest.raises(gnnc.GnncError, match=form.error):
            _losses(form.loop, compile_it)
        return
    found = _losses(form.loop, compile_it)
    for name in form.methods:
        assert any(f"  {name}: only forward is compiled" in model.explain() for model in compiled), name
    assert form.methods or (compiled and all(map(_trained, compiled)))
    assert found == pytest.approx(eager, abs=form.tolerance)


def _trained(model: gnnc.CompiledModel) -> bool:
    return any(program.parts.backward is not None for program in model._dispatch.programs())


def _losses(loop: Loop, compile_it: Compile) -> list[float]:
    torch.manual_seed(0)
    random.seed(0)  # PyG's negative_sampling
    return list(loop(compile_it))


def descend(
    model: nn.Module, loss: Callable[..., Tensor], lr: float = 0.01, over: list[Any] | None = None
) -> Iterator[float]:
    """Train with Adam; yield the loss of each step.

    Args:
        model: the module whose parameters are trained; put into train mode.
        loss: returns the loss of a step; takes a batch where there are batches.
        lr: the learning rate.
        over: batches, taken in turn.
    """
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss() if over is None else loss(over[step % len(over)])
        value.backward()
        optimizer.step()
        yield value.item()


def documented(section: str) -> dict[str, str]:
    """Return the forms that a section of the page lists, with their outcomes."""
    page = DOCS.read_text()
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found is not None, f"{DOCS.name} has no section {section!r}"
    rows = re.findall(r"^\| `([^`]+)` \|[^|]*\| (.*?) \|$", found[1], re.M)
    return dict(rows)


def check_documented(section: str, forms: dict[str, Form]) -> None:
    """Check that a section of the page lists these forms, with their errors."""
    rows = documented(section)
    assert list(rows) == list(forms)
    for name, form in forms.items():
        assert bool(form.error) != (rows[name] == "trains"), name


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def graph(nodes: int = NODES, edges: int = 4 * NODES, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, edge_index (directed, repeated edges, lone nodes) and classes that depend on both."""
    generator = _generator(seed)
    x = torch.randn(nodes, FEATURES, generator=generator)
    edge_index = torch.randint(max(nodes - 2, 1), (2, edges), generator=generator)
    mean = torch.zeros(nodes, FEATURES).index_add(0, edge_index[1], x[edge_index[0]])
    return x, edge_index, (x + mean)[:, :CLASSES].argmax(1)


X, EDGES, Y = graph()
TRAIN = torch.arange(NODES) % 2 == 0
WEIGHT = torch.rand(EDGES.shape[1], generator=_generator(1)) + 0.1
ATTRIBUTES = torch.randn(EDGES.shape[1], 4, generator=_generator(2))
TYPES = torch.randint(3, (EDGES.shape[1],), generator=_generator(3))


def mlp(width: int, out: int, norm: bool = False) -> nn.Sequential:
    """Return a perceptron of two layers."""
    between = nn.BatchNorm1d(HIDDEN) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(width, HIDDEN), between, nn.ReLU(), nn.Linear(HIDDEN, out))
