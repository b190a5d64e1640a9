"""Correction of a study by the measured launch times of the programs that were tried."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torch.fx import GraphModule, Node

from gnnc.cost import model
from gnnc.ir import describe
from gnnc.passes.quantization.number_formats import Option, assigned_options
from gnnc.passes.search.study import OpChoices, Study


@dataclass(frozen=True, slots=True)
class Observed:
    """Measured launch times of a lowered program, by primitive.

    Attributes:
        options: the option that each primitive ran in, by name.
        excess: by name of a primitive, measured minus predicted seconds of its launch and of the launches
            before it that only convert a tensor to its format.
    """

    options: Mapping[str, Option]
    excess: Mapping[str, float]


def observed(
    assigned: GraphModule, lowered: GraphModule, predicted: Mapping[str, float], took: Mapping[str, float]
) -> Observed:
    """Return the measured launch times of a program by primitive.

    Args:
        assigned: the graph after ``assign``.
        lowered: the same graph after ``lower``.
        predicted: predicted seconds of the launches, by node.
        took: measured seconds of the launches, by node.
    """
    excess: dict[str, float] = {}
    for launch, name in _owners(model.launches(describe.inline(lowered))):
        if launch.name in took:
            beyond = took[launch.name] - predicted.get(launch.name, 0.0)
            excess[name] = excess.get(name, 0.0) + beyond
    return Observed(assigned_options(assigned), excess)


def _owners(launches: Sequence[model.Launch]) -> Iterator[tuple[model.Launch, str]]:
    """Yield each launch with the primitive that it serves: its last, or that of a launch that reads it."""
    owner: dict[Node, str] = {}
    for launch in reversed(launches):
        names = [describe.assigned_name(node) for node in launch.primitives]
        names += [owner[user] for node in launch.nodes for user in node.users if user in owner]
        if names:
            name = names[len(launch.primitives) - 1] if launch.primitives else names[0]
            owner |= dict.fromkeys(launch.nodes, name)
            yield launch, name


def corrected(study: Study, runs: Sequence[Observed]) -> Study:
    """Return the study with the times of ops as measured.

    An option that no program ran is corrected like the other options of its precision.
    """
    return replace(study, ops=tuple(_corrected(op, runs) for op in study.ops))


def _corrected(op: OpChoices, runs: Sequence[Observed]) -> OpChoices:
    name = op.node.name
    excesses = [(run.options[name], run.excess[name]) for run in runs if name in run.excess]

    def excess(option: Option) -> float:
        same = [seconds for other, seconds in excesses if other == option]
        alike = [seconds for other, seconds in excesses if other.precision == option.precision]
        return fmean(same or alike or [0.0])

    seconds = tuple(s + excess(o) for o, s in zip(op.options, op.seconds, strict=True))
    return replace(op, seconds=seconds)
