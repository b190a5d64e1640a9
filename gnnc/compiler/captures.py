"""Record of captures: each is logged with its reason, and many for one cause are a warning."""

import logging
import re
import warnings
from collections import Counter

from gnnc.capture.arguments import Call, Leaf

_LOGGER = logging.getLogger("gnnc")
_MANY = 8
"""Captures for one cause that are a warning."""
_NUMBERS = re.compile(r"\b(s?\d+)\b")
_ADVICE = (
    ("static scale", "compile without example_inputs: scales are then computed at each call"),
    ("takes it for a number", "write the loop over it with ops on whole tensors, or pad it to one size"),
    ("asks about sizes", "let forward not decide by sizes, or pad them to the same side of its question"),
    ("as a constant", "pass it as a tensor, or with few values"),
    ("has changed", "pass what changes as an argument of forward"),
    ("structure", "give every call the same arguments: fields of Data, keys of dicts, lengths of lists"),
    ("", "give every call this size, or a tensor in which it is the first dimension"),
)
"""Advice by a part of the reason; the first that is found."""


class CaptureLog:
    """Record of the captures of one model.

    Attributes:
        reasons: the reason of each capture, in order.

    Args:
        owner: class name of the model, for messages.
    """

    def __init__(self, owner: str) -> None:
        self.reasons: list[str] = []
        self._owner = owner
        self._causes: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        """Note a capture; the first is no re-capture."""
        self.reasons.append(reason)
        if len(self.reasons) == 1:
            return
        _LOGGER.info("[%s] captured again: %s", self._owner, reason)
        cause = _NUMBERS.sub("#", reason.partition(" as a constant")[0].partition(" is ")[0])
        self._causes[cause] += 1
        if self._causes[cause] == _MANY:
            advice = next(text for part, text in _ADVICE if part in reason)
            warnings.warn(
                f"[{self._owner}] captured again {_MANY} times for one cause, which takes longer than a call "
                f"in eager; the last: {reason}. Way out: {advice}",
                stacklevel=2,
            )


def difference(call: Call, other: Call) -> str:
    """Return the first difference between two calls of different keys, as a reason."""
    names, others = [leaf.name for leaf in call.leaves], [leaf.name for leaf in other.leaves]
    if names != others:
        missing = [name for name in others if name not in names]
        added = [name for name in names if name not in others]
        parts = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(added)}"] * bool(added)
        return f"another structure of arguments: {' and '.join(parts) or 'in another order'}"
    for leaf, known in zip(call.leaves, other.leaves, strict=True):
        if leaf.key != known.key:
            return f"{leaf.name} has {_text(leaf)} as a constant, it had {_text(known)}"
    return "another structure of arguments, dtype, device or mode"


def _text(leaf: Leaf) -> str:
    return repr(leaf.value) if leaf.kind == "constant" else f"no {leaf.kind}"
