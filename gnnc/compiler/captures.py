"""Record of captures: each is logged with its reason, and many for one cause are a warning."""

import logging
import re
import warnings
from collections import Counter

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
    ("the constant ", "pass it in every call, or in none"),
    ("gradients", "call under torch.no_grad() where no gradient is used, and leave requires_grad as it is"),
    (" mode, it was in ", "switch the whole model between train() and eval(), not modules one by one"),
    ("autocast is ", "make every call inside of the same torch.autocast region, or outside"),
    (", it was on ", "move arguments to the device of the model before the call"),
    (" dimensions, it had ", "give arguments the same dimensions in every call"),
    (", it was ", "convert arguments to one dtype before the call"),
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
