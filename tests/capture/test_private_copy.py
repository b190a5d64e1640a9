"""References among modules are those of the copy, and a trace changes nothing in the model itself."""

import enum
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import gnnc
from gnnc.capture.private_copy import private_copy

WIDTH = 4


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Pair(NamedTuple):
    layer: Any
    factor: float


class Helper:
    """Object that holds a module, as user code has it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = ["last"]

    def __call__(self, x: Tensor) -> Tensor:
        return getattr(self.model, self.names[0])(x)


class Kind(enum.Enum):
    LAST = "last"


class Held(Base):
    """Model that applies what it holds in its attribute ``held``, which ``apply`` finds in there."""

    def __init__(self, make: Callable[[Base], Any], apply: Callable[[Any], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "held", make(self))
        self.find = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.find(self.held)(self.first(x).relu())


def applied(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def closure(model: Base) -> Callable[[Tensor], Tensor]:
    last = model.last

    def run(x: Tensor) -> Tensor:
        return last(x)

    return run


def wrapped(model: Base) -> Callable[[Tensor], Tensor]:
    @functools.wraps(model.last.forward)
    def run(x: Tensor, *, layer: nn.Module = model.last) -> Tensor:
        return layer(x)

    return run


HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "module": (lambda m: m.last, lambda held: held),
    "model itself": (lambda m: m, lambda held: held.last),
    "bound method": (lambda m: m.last.forward, lambda held: held),
    "list": (lambda m: [m.last], lambda held: held[0]),
    "tuple": (lambda m: (1, (m.last,)), lambda held: held[1][0]),
    "named tuple": (lambda m: Pair(m.last, 2.0), lambda held: held.layer),
    "dict": (lambda m: {"a": {"b": m.last}}, lambda held: held["a"]["b"]),
    "dict by module": (lambda m: {m.last: m.last}, lambda held: next(iter(held))),
    "ordered dict": (lambda m: OrderedDict(a=m.last), lambda held: held["a"]),
    "default dict": (lambda m: defaultdict(list, a=[m.last]), lambda held: held["a"][0]),
    "set": (lambda m: {m.last}, lambda held: next(iter(held))),
    "deque": (lambda m: deque([m.last], maxlen=2), lambda held: held[0]),
    "partial": (lambda m: functools.partial(m.last), lambda held: held),
    "partial of arguments": (
        lambda m: functools.partial(lambda layer, x: layer(x), m.last),
        lambda held: held,
    ),
    "closure": (closure, lambda held: held),
    "wrapped function": (wrapped, lambda held: held),
    "default argument": (lambda m: lambda x, layer=m.last: layer(x), lambda held: held),
    "weak reference": (lambda m: weakref.ref(m.last), lambda held: held()),
    "object": (Helper, lambda held: held),
    "cycle": (lambda m: [m, {"me": m}], lambda held: held[1]["me"].last),
}


@pytest.mark.parametrize("form", HELD)
def test_what_holds_a_module_holds_its_copy(form: str) -> None:
    model = Held(*HELD[form]).eval()
    copy: Any = private_copy(model)
    assert type(copy) is Held
    assert all(one is not other for one, other in zip(model.modules(), copy.modules(), strict=True))
    with torch.no_grad():
        copy.last._parameters["weight"] = nn.Parameter(torch.zeros(3, WIDTH))
        copy.last._parameters["bias"] = nn.Parameter(torch.full((3,), 7.0))
        assert torch.equal(copy(torch.randn(2, WIDTH)), torch.full((2, 3), 7.0))


@pytest.mark.first(2)
@torch.no_grad()
@pytest.mark.parametrize("form", HELD)
def test_weights_are_read_at_each_call(form: str) -> None:
    model, x = Held(*HELD[form]).eval(), torch.randn(5, WIDTH)
    compiled = gnnc.compile(model, "fp32", backend="reference")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    model.last.weight = nn.Parameter(torch.randn(3, WIDTH))
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


def test_the_copy_shares_tensors_names_and_all_other_values() -> None:
    model = Base()
    model.register_buffer("scale", torch.ones(3), persistent=False)
    model.add_module("again", model.last)
    model.constant = torch.ones(2)
    model.kind, model.settings = Kind.LAST, {"a": [1, 2]}
    copy = private_copy(model)
    assert [name for name, _ in copy.named_modules(remove_duplicate=False)] == [
        name for name, _ in model.named_modules(remove_duplicate=False)
    ]
    assert copy.again is copy.last
    assert copy.kind is Kind.LAST
    assert copy.constant is model.constant
    assert copy.settings == model.settings
    assert copy.settings["a"] is not model.settings["a"]
    assert copy.state_dict().keys() == model.state_dict().keys()
    pairs = zip(model.parameters(), copy.parameters(), strict=True)
    assert all(one is other for one, other in pairs)


def test_writes_into_the_copy_leave_the_model() -> None:
    model = Base()
    model.log, model.cache = [], {}
    before = dict(vars(model))
    copy: Any = private_copy(model)
    copy.log.append(1)
    copy.cache["a"] = 1
    copy.extra = 1
    copy.last = nn.Identity()
    copy.register_forward_hook(lambda *_: None)
    assert vars(model) == before
    assert not model.log and not model.cache and not model._forward_hooks


def test_hooks_are_those_of_the_copy() -> None:
    model = Base()
    model.first.register_forward_hook(lambda layer, args, out, model=model: out + model.last.bias.sum())
    copy: Any = private_copy(model)
    (hook,) = copy.first._forward_hooks.values()
    assert hook.__defaults__[0] is copy


def renormed(model: Base) -> nn.Module:
    parametrizations.weight_norm(model.last)
    return model


def pruned(model: Base) -> nn.Module:
    prune.l1_unstructured(model.last, "weight", 0.3)
    return model


def of_fx(model: Base) -> nn.Module:
    return torch.fx.symbolic_trace(model)


def with_slots(model: Base) -> nn.Module:
    class Slotted(Base):
        __slots__ = ("factor",)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    slotted = Slotted()
    slotted.factor = 2.0
    return slotted


def replaced_forward(model: Base) -> nn.Module:
    forward = model.forward
    model.forward = lambda x: forward(x) * 2
    return model


def method_of_another(model: Base) -> nn.Module:
    model.forward = types.MethodType(lambda self, x: self.last(self.first(x)), model)
    return model


def compiled_inside(model: Base) -> nn.Module:
    return nn.Sequential(gnnc.compile(model, "fp32", backend="reference"), nn.ReLU())


@pytest.mark.first(2)
@torch.no_grad()
@pytest.mark.parametrize(
    "change", [renormed, pruned, of_fx, with_slots, replaced_forward, method_of_another, compiled_inside]
)
def test_models_of_unusual_make_are_captured(change: Callable[[Base], nn.Module]) -> None:
    model, x = change(Base()).eval(), torch.randn(5, WIDTH)
    compiled = gnnc.compile(model, "fp32", backend="reference")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


GLOBAL = Base().eval()


class ThroughGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = GLOBAL

    def forward(self, x: Tensor) -> Tensor:
        return GLOBAL.last(self.base.first(x)) + self.base.last.bias


@torch.no_grad()
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_a_global_reaches_are_read_at_each_call(frozen: bool) -> None:
    model, x = ThroughGlobal().requires_grad_(not frozen), torch.randn(5, WIDTH)
    compiled = gnnc.compile(model, "fp32", backend="reference")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    GLOBAL.last.weight = nn.Parameter(torch.randn(3, WIDTH), requires_grad=not frozen)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


def test_a_module_that_is_also_a_container_is_refused() -> None:
    class Both(nn.Module, dict):
        __hash__ = nn.Module.__hash__  # pyright: ignore[reportAssignmentType]

    with pytest.raises(gnnc.CaptureError, match="container as an attribute"):
        private_copy(Both())


class Rows(list):
    """A list of the user's class, with an attribute."""

    def append(self, item: Any) -> None:
        raise AssertionError("a copy is made without methods of the user's")


class Table(dict):
    """A dict of the user's class, with slots."""

    __slots__ = ("owner",)


class Ordered(OrderedDict):
    """An ordered dict of the user's class."""


class Ends(deque):
    """A deque of the user's class."""


@pytest.mark.parametrize("kind", [Rows, Table, Ordered, Ends, type("Groups", (defaultdict,), {})])
def test_containers_of_the_users_classes_are_copied(kind: Any) -> None:
    model = Base()
    table = isinstance(kind(), dict)
    model.held = held = kind()
    held.update(k=model.last) if table else held.extend([model.last])
    held.owner = model
    copy = private_copy(model)
    assert type(copy.held) is kind
    assert copy.held is not held
    assert list(copy.held.values() if table else copy.held) == [copy.last]
    assert copy.held.owner is copy
    assert getattr(copy.held, "maxlen", None) == getattr(held, "maxlen", None)
