"""A study corrected by the times that launches of tried programs took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torch.fx import GraphModule

from gnnc import cost, describe
from gnnc.passes.options import Option
from gnnc.passes.study import OpChoices, Study


@dataclass(frozen=True, slots=True)
class Observed:
    """What timing a lowered program showed.

    Attributes:
        options: what it ran each primitive in, by name.
        excess: seconds that a launch took beyond its prediction, by name of its last primitive.
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
    options = {
        node.name: Option(node.meta["precision"], node.meta.get("granularity"))
        for node in assigned.graph.nodes
        if "precision" in node.meta
    }
    excess = {}
    for launch in cost.launches(describe.inline(lowered)):
        names = [str(node.meta.get("assigned", node.meta["origin"])) for node in launch.primitives]
        if names and launch.name in took:
            excess[names[-1]] = took[launch.name] - predicted.get(launch.name, 0.0)
    return Observed(options, excess)


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
