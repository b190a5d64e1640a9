"""A study corrected by the times that launches of tried programs took."""

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
    """What timing a lowered program showed.

    Attributes:
        options: what it ran each primitive in, by name.
        excess: by name of a primitive, seconds that its launch took beyond their prediction, and launches
            before it that only bring a tensor into its format.
    """

    options: Mapping[str, Option]
    excess: Mapping[str, float]


def observed(
    assigned: GraphModule, lowered: GraphModule, predicted: Mapping[str, float], took: Mapping[str, float]
) -> Observed:
    """Return what the times of a program's launches show.

    Args:
        assigned: the graph as ``assign`` left it.
        lowered: what became of it.
        predicted: seconds of its launches, by node.
        took: the same as measured.
    """
    excess: dict[str, float] = {}
    for launch, name in _owners(model.launches(describe.inline(lowered))):
        if launch.name in took:
            more = took[launch.name] - predicted.get(launch.name, 0.0)
            excess[name] = excess.get(name, 0.0) + more
    return Observed(assigned_options(assigned), excess)


def _owners(launches: Sequence[model.Launch]) -> Iterator[tuple[model.Launch, str]]:
    """The primitive that each launch is there for: its last one, or that of a launch that reads it."""
    owner: dict[Node, str] = {}
    for launch in reversed(launches):
        names = [describe.assigned_name(node) for node in launch.primitives]
        names += [owner[user] for node in launch.nodes for user in node.users if user in owner]
        if names:
            name = names[len(launch.primitives) - 1] if launch.primitives else names[0]
            owner |= dict.fromkeys(launch.nodes, name)
            yield launch, name


def corrected(study: Study, seen: Sequence[Observed]) -> Study:
    """Return the study with times of ops as they were seen.

    An option that no program had is corrected as others of its precision were.
    """
    return replace(study, ops=tuple(_corrected(op, seen) for op in study.ops))


def _corrected(op: OpChoices, seen: Sequence[Observed]) -> OpChoices:
    name = op.node.name
    known = [(each.options[name], each.excess[name]) for each in seen if name in each.excess]

    def excess(option: Option) -> float:
        same = [seconds for other, seconds in known if other == option]
        alike = [seconds for other, seconds in known if other.precision == option.precision]
        return fmean(same or alike or [0.0])

    seconds = tuple(s + excess(o) for o, s in zip(op.options, op.seconds, strict=True))
    return replace(op, seconds=seconds)
