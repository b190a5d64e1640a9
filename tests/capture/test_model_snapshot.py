"""Changes of a model between two calls: each is seen by the next call, whose values are those of eager."""

import argparse
import array
import collections
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gnnc
from gnnc.capture.model_snapshot import ModelSnapshot

X = torch.linspace(-1, 1, 24).reshape(3, 8)
GAIN = 1.0
SETTINGS = {"gain": [1.0]}


class Holder:
    """A plain object, with a method."""

    def __init__(self, k: Any) -> None:
        self.k = k

    def get(self) -> Any:
        return self.k

    __call__ = get


HELD = Holder(1.0)


class Other(Holder):
    """Like it, with another method."""

    def get(self) -> Any:
        return 3.0


class Slots:
    __slots__ = ("__private", "k", "unset")

    def __init__(self, k: float) -> None:
        self.k = self.__private = k

    def private(self, *values: float) -> float:
        (self.__private,) = values or (self.__private,)
        return self.__private


class Special:
    """An object that Python's operators read, by methods that no code names."""

    def __init__(self) -> None:
        self.table = {"k": 1.0}

    def __getitem__(self, _: int) -> float:
        return self.table["k"]

    def __len__(self) -> int:
        return int(self.table["k"])

    def __mul__(self, other: float) -> float:
        return self.table["k"] * other

    def __bool__(self) -> bool:
        return self.table["k"] > 2

    def __contains__(self, other: float) -> bool:
        return self.table["k"] == other

    def __float__(self) -> float:
        return self.table["k"]

    def __enter__(self) -> float:
        return self.table["k"]

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, _: str) -> float:
        return self.table["k"]


def entered(value: Any) -> float:
    with value as k:
        return k


READS_OF_SPECIAL = {
    "getitem": lambda v: v[0],
    "len": len,
    "mul": lambda v: v * 2,
    "bool": lambda v: 3.0 if v else 1.0,
    "contains": lambda v: 3.0 if 3.0 in v else 1.0,
    "float": float,
    "with": entered,
    "getattr": lambda v: v.whatever,
}


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


@dataclasses.dataclass
class Settings:
    k: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    k: Any


class Kind(enum.Enum):
    ONE = 1.0
    THREE = 3.0


class Scaled(nn.Module):
    """A layer whose result depends on an attribute."""

    def __init__(self, held: Any, read: Callable[[Any], Any] = float) -> None:
        super().__init__()
        self.layer, self.held, self.read = nn.Linear(8, 4), held, read

    def forward(self, x):
        return self.layer(x) * self.read(self.held)


def helper() -> float:
    return 1.0


class OfModule(nn.Module):
    """A layer whose code reads variables of its module, and attributes of its class."""

    factor = 1.0
    table = {"k": 1.0}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.scaled(self.layer(x)) * GAIN * SETTINGS["gain"][0] * helper()

    def scaled(self, x):
        return x * self.factor * self.table["k"]


def same(compiled: gnnc.CompiledModel) -> bool:
    with torch.no_grad():
        return torch.allclose(compiled(X), compiled.model(X), rtol=1e-5, atol=1e-6)


def check(model: nn.Module, change: Callable[[], Any], captures: int = 2) -> None:
    """Compare calls before and after a change with eager."""
    compiled = gnnc.compile(model.eval(), "fp32", backend="reference")
    assert same(compiled) and same(compiled)
    assert len(compiled._dispatch.captures) == 1
    with torch.no_grad():
        before = model(X)
        change()
        if captures == 2:
            assert not torch.equal(before, model(X)), "the change must matter"
    assert same(compiled) and same(compiled)
    assert len(compiled._dispatch.captures) == captures


REPLACED: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "bool": (True, False, float),
    "negative zero": (0.0, -0.0, lambda v: torch.atan2(torch.tensor(v), torch.tensor(-1.0))),
    "complex": (1 + 0j, 3 + 0j, lambda v: v.real),
    "bytes": (b"\1", b"\3", lambda v: v[0]),
    "range": (range(1), range(3), len),
    "slice": (slice(0, 1), slice(0, 3), lambda v: v.stop),
    "set": ({1.0}, {3.0}, max),
    "frozenset": (frozenset({1.0}), frozenset({3.0}), max),
    "tuple": ((1.0, (1.0,)), (1.0, (3.0,)), lambda v: v[1][0]),
    "named tuple": (collections.namedtuple("N", "k")(1.0), collections.namedtuple("N", "k")(3.0), sum),
    "ordered dict": (collections.OrderedDict(k=1.0), collections.OrderedDict(k=3.0), lambda v: v["k"]),
    "default dict": (
        collections.defaultdict(float, k=1.0),
        collections.defaultdict(float),
        lambda v: v["k"] + 1,
    ),
    "counter": (collections.Counter(k=1), collections.Counter(k=3), lambda v: v["k"]),
    "mapping proxy": (types.MappingProxyType({"k": 1}), types.MappingProxyType({"k": 3}), lambda v: v["k"]),
    "dict of attributes": (AttributeDict(k=1.0), AttributeDict(k=3.0), lambda v: v.k),
    "enum": (Kind.ONE, Kind.THREE, lambda v: v.value),
    "int enum": (enum.IntEnum("I", "A B").A, enum.IntEnum("I", "A B").B, float),
    "namespace": (types.SimpleNamespace(k=1.0), types.SimpleNamespace(k=3.0), lambda v: v.k),
    "arguments": (argparse.Namespace(k=1.0), argparse.Namespace(k=3.0), lambda v: v.k),
    "dataclass": (Settings(1.0), Settings(3.0), lambda v: v.k),
    "frozen dataclass": (Frozen(1.0), Frozen(3.0), lambda v: v.k),
    "plain object": (Holder(1.0), Holder(3.0), lambda v: v.k),
    "callable object": (Holder(1.0), Holder(3.0), lambda v: v()),
    "bound method": (Holder(1.0).get, Holder(3.0).get, lambda v: v()),
    "method of a dict": ({"k": 1.0}.get, {"k": 3.0}.get, lambda v: v("k")),
    "slots": (Slots(1.0), Slots(3.0), lambda v: v.k),
    "partial": (functools.partial(pow, 1.0), functools.partial(pow, 3.0), lambda v: v(1)),
    "lambda": (lambda: 1.0, lambda: 3.0, lambda v: v()),
    "class": (Holder, Other, lambda v: v(1.0).get()),
    "type": (int, float, lambda v: 1.0 if v is int else 3.0),
    "numpy array": (np.array([1.0]), np.array([3.0]), lambda v: float(v[0])),
    "numpy number": (np.float32(1), np.float32(3), float),
    "numpy dtype": (
        np.array([1]),
        np.array([1], dtype=np.float32),
        lambda v: 1.0 if v.dtype.kind == "i" else 3.0,
    ),
    "dates": (np.array(["2020"], "M8[Y]"), np.array(["2023"], "M8[Y]"), lambda v: float(v.astype(int)[0])),
    "large array": (np.zeros(10**4), np.ones(10**4), lambda v: float(v[-1])),
    "dtype": (torch.float32, torch.float64, lambda v: 1.0 if v is torch.float32 else 3.0),
    "size": (torch.Size([1]), torch.Size([3]), lambda v: v[0]),
    "module of Python": (
        types.ModuleType("a"),
        types.ModuleType("b"),
        lambda v: ord(v.__name__),
    ),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", REPLACED)
def test_another_object_in_an_attribute_is_seen(kind):
    first, second, read = REPLACED[kind]
    for held, other, reader in (
        (first, second, read),
        ([first], [second], lambda v: read(v[0])),
        (Holder({"k": first}), Holder({"k": second}), lambda v: read(v.k["k"])),
    ):
        model = Scaled(held, reader)
        snapshot = ModelSnapshot(model)
        assert not snapshot.has_changed()
        model.held = other
        assert snapshot.has_changed()
    model = Scaled(first, read)
    check(model, lambda: setattr(model, "held", second))


INSIDE: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute of a namespace": (types.SimpleNamespace(k=1.0), lambda v: v.k, lambda v: setattr(v, "k", 3.0)),
    "attribute of a dataclass": (Settings(1.0), lambda v: v.k, lambda v: setattr(v, "k", 3.0)),
    "attribute of an object": (Holder(1.0), lambda v: v.get(), lambda v: setattr(v, "k", 3.0)),
    "attribute behind a bound method": (
        Holder(1.0).get,
        lambda v: v(),
        lambda v: setattr(v.__self__, "k", 3.0),
    ),
    "attribute that is deleted": (
        Holder(1.0),
        lambda v: 1.0 if hasattr(v, "k") else 3.0,
        lambda v: delattr(v, "k"),
    ),
    "attributes that change names": (
        Holder(1.0),
        lambda v: 1.0 if hasattr(v, "k") else 3.0,
        lambda v: vars(v).update(z=vars(v).pop("k")),
    ),
    "slot": (Slots(1.0), lambda v: v.k, lambda v: setattr(v, "k", 3.0)),
    "private slot": (Slots(1.0), lambda v: v.private(), lambda v: v.private(3.0)),
    "slot without a value": (
        Slots(1.0),
        lambda v: 3.0 if hasattr(v, "unset") else 1.0,
        lambda v: setattr(v, "unset", 1),
    ),
    "element of a list": ([1.0], lambda v: v[0], lambda v: v.__setitem__(0, 3.0)),
    "element that is appended": ([1.0], sum, lambda v: v.append(3.0)),
    "element of an empty list": ([], lambda v: 1.0 + len(v), lambda v: v.append(3.0)),
    "element of a dict": ({"k": 1.0}, lambda v: v["k"], lambda v: v.update(k=3.0)),
    "key of a dict": ({"a": 3.0}, lambda v: v.get("k", 1.0), lambda v: v.update(k=v.pop("a"))),
    "order of a dict": (
        collections.OrderedDict(a=1.0, b=3.0),
        lambda v: next(iter(v.values())),
        lambda v: v.move_to_end("a"),
    ),
    "dict behind a proxy": (
        (table := {"k": 1.0}, types.MappingProxyType(table)),
        lambda v: v[1]["k"],
        lambda v: v[0].update(k=3.0),
    ),
    "list in a dict": ({"k": [1.0]}, lambda v: v["k"][0], lambda v: v["k"].__setitem__(0, 3.0)),
    "dict in a tuple": (({"k": 1.0},), lambda v: v[0]["k"], lambda v: v[0].update(k=3.0)),
    "object in a dict": ({"k": Holder(1.0)}, lambda v: v["k"].k, lambda v: setattr(v["k"], "k", 3.0)),
    "element of a set": ({1.0}, max, lambda v: v.add(3.0)),
    "element of a deque": (collections.deque([1.0]), lambda v: v[0], lambda v: v.appendleft(3.0)),
    "number of a numpy array": (np.array([1.0]), lambda v: float(v[0]), lambda v: v.__setitem__(0, 3.0)),
    "byte of a bytearray": (bytearray(b"\1"), lambda v: v[0], lambda v: v.__setitem__(0, 3)),
    "number of an array": (array.array("d", [1.0]), lambda v: v[0], lambda v: v.__setitem__(0, 3.0)),
    "class of an object": (Holder(1.0), lambda v: v.get(), lambda v: setattr(v, "__class__", Other)),
    "layer in a list": ([nn.Hardtanh()], lambda v: v[0].max_val, lambda v: setattr(v[0], "max_val", 3.0)),
    "keyword of a partial": (
        functools.partial(dict, k=1.0),
        lambda v: v()["k"],
        lambda v: v.keywords.update(k=3.0),
    ),
    "chain of dicts": (
        collections.ChainMap({"k": 1.0}, {}),
        lambda v: v["k"],
        lambda v: v.maps[0].update(k=3.0),
    ),
    "user dict": (collections.UserDict(k=1.0), lambda v: v["k"], lambda v: v.update(k=3.0)),
    "user list": (collections.UserList([1.0]), sum, lambda v: v.append(3.0)),
    "bytes behind a view": (memoryview(bytearray(b"\1")), lambda v: v[0], lambda v: v.__setitem__(0, 3)),
    "object in an array": (
        np.array([[1.0], 2], object),
        lambda v: v[0][0],
        lambda v: v[0].__setitem__(0, 3.0),
    ),
    "object that is referred to weakly": (
        weakref.WeakValueDictionary(k=HELD),
        lambda v: v["k"].k,
        lambda v: setattr(v["k"], "k", 3.0),
    ),
    "value of a weak key": (
        weakref.WeakKeyDictionary({HELD: 1.0}),
        lambda v: v[HELD],
        lambda v: v.update({HELD: 3.0}),
    ),
} | {
    f"special method {name}": (Special(), read, lambda v: v.table.update(k=3.0))
    for name, read in READS_OF_SPECIAL.items()
}


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", INSIDE)
def test_a_change_within_an_object_is_seen(kind):
    held, read, change = INSIDE[kind]
    check(Scaled(held, read), lambda: change(held))


def test_objects_that_hold_the_same_are_the_same() -> None:
    for make in (
        lambda: types.SimpleNamespace(k=[1.0]),
        lambda: {"k": Holder(1.0)},
        lambda: lambda v: v,
        lambda: functools.partial(print, Frozen([1])),
        lambda: {1, 2},
    ):
        model = Scaled(make(), lambda v: v.k)
        snapshot = ModelSnapshot(model)
        model.held = make()
        assert not snapshot.has_changed() and not snapshot.has_changed()


def test_objects_that_hold_themselves_end() -> None:
    held = Holder([])
    held.k.append(held)
    model = Scaled(held, lambda v: v.k)
    snapshot = ModelSnapshot(model)
    held.k.append(1)
    assert snapshot.change() == "self.held.k[1]"


# functions


def test_variables_around_a_function_are_seen() -> None:
    k = 1.0

    def read(_: Any) -> float:
        return k

    def change() -> None:
        nonlocal k
        k = 3.0

    check(Scaled(None, read), change)


def test_defaults_and_code_of_a_function_are_seen() -> None:
    def read(_: Any, k: float = 1.0, *, other: float = 1.0) -> float:
        return k * other

    check(Scaled(None, read), lambda: setattr(read, "__defaults__", (3.0,)))
    check(Scaled(None, read), lambda: read.__kwdefaults__.update(other=3.0))
    check(Scaled(None, read), lambda: setattr(read, "__code__", (lambda _: 5.0).__code__))


def test_variables_of_a_module_are_seen(monkeypatch) -> None:
    check(OfModule(), lambda: monkeypatch.setitem(globals(), "GAIN", 3.0))
    check(OfModule(), lambda: SETTINGS.update(gain=[3.0]))
    check(OfModule(), lambda: SETTINGS["gain"].append(SETTINGS["gain"].pop() * 2))
    check(OfModule(), lambda: monkeypatch.setitem(globals(), "helper", lambda: 3.0))
    check(OfModule(), lambda: monkeypatch.setitem(globals(), "unread", 3.0), captures=1)


def test_attributes_of_a_class_are_seen(monkeypatch) -> None:
    check(OfModule(), lambda: monkeypatch.setattr(OfModule, "factor", 3.0))
    check(OfModule(), lambda: monkeypatch.setitem(OfModule.table, "k", 3.0))
    check(OfModule(), lambda: monkeypatch.setattr(OfModule, "scaled", lambda self, x: x * 5))


class Decorated(nn.Module):
    """A layer whose code lies behind decorators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(8, 4), {"k": [1.0]}

    @torch.no_grad()
    def forward(self, x):
        return self.layer(x) * self.factor * self.twice(2.0)

    @property
    def factor(self):
        return self.held["k"][0]

    @staticmethod
    @functools.lru_cache
    def twice(_):
        return GAIN


def test_code_behind_decorators_is_followed(monkeypatch) -> None:
    model = Decorated()
    check(model, lambda: model.held["k"].insert(0, 3.0))

    def change() -> None:
        monkeypatch.setitem(globals(), "GAIN", 3.0)
        Decorated.twice.cache_clear()

    check(model, change)


def test_a_class_of_bases_is_seen_without_versions(monkeypatch):
    monkeypatch.setattr("gnnc.capture.live_views._VERSIONS", False)

    class Derived(OfModule):
        pass

    snapshot = ModelSnapshot(Derived())
    assert not snapshot.has_changed()
    monkeypatch.setattr(OfModule, "factor", 3.0)
    assert snapshot.has_changed()


# forward, classes and tables of layers


class Tripled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 3


class Same(nn.Linear):
    pass


def times(k: float) -> Callable[..., Any]:
    return lambda self, x: F.linear(x, self.weight, self.bias) * k


FORWARDS: dict[str, Callable[[Any, float], Any]] = {
    "function": lambda layer, k: setattr(layer, "forward", lambda x: times(k)(layer, x)),
    "bound method": lambda layer, k: setattr(layer, "forward", types.MethodType(times(k), layer)),
    "partial": lambda layer, k: setattr(layer, "forward", functools.partial(times(k), layer)),
    "method of the class": lambda layer, k: setattr(Same, "forward", times(k)),
    "class": lambda layer, k: setattr(layer, "__class__", Same if k == 2 else Tripled),
    "parameters": lambda layer, k: setattr(
        layer, "_parameters", {name: nn.Parameter(p * k) for name, p in layer._parameters.items()}
    ),
    "attributes": lambda layer, k: setattr(
        layer,
        "__dict__",
        {**vars(layer), "_parameters": {name: nn.Parameter(p * k) for name, p in layer._parameters.items()}},
    ),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("way", FORWARDS)
def test_another_forward_class_or_table_is_seen(way, monkeypatch):
    monkeypatch.setattr(Same, "forward", nn.Linear.forward)
    model = nn.Sequential(Same(8, 4), nn.ReLU())
    FORWARDS[way](model[0], 2)
    check(model, lambda: FORWARDS[way](model[0], 3))


def test_another_forward_of_a_class_of_torch_is_seen(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 4))
    check(model, lambda: monkeypatch.setattr(nn.Linear, "forward", times(3)))


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, held):
        return self.layer(x) * held.get()


class Bound(Holder):
    """Hashable by identity; its method reads another object."""

    def get(self) -> Any:
        return self.k["k"][0]


@torch.no_grad()
def test_a_change_within_an_argument_is_seen():
    compiled = gnnc.compile(Given().eval(), "fp32", backend="reference")
    first, second, deep = Holder(1.0), Holder(3.0), Bound({"k": [1.0]})
    for _ in range(2):
        for held in (first, second, deep):
            torch.testing.assert_close(compiled(X, held), compiled.model(X, held))
    first.k = 3.0
    deep.k["k"][0] = 5.0
    for held in (first, second, deep):
        torch.testing.assert_close(compiled(X, held), compiled.model(X, held))
    assert len(compiled._dispatch.captures) == 4, "objects that hold the same have one program"


# reasons, and changes that forward makes itself


def test_a_capture_names_the_change():
    model = Scaled({"k": [Holder(1.0)]}, lambda v: v["k"][0].k)
    compiled = gnnc.compile(model.eval(), "fp32", backend="reference")
    assert same(compiled)
    model.held["k"][0].k = 3.0
    assert same(compiled)
    model.layer = nn.Linear(8, 4)
    assert same(compiled)
    assert compiled._dispatch.captures[1:] == ["self.held['k'][0].k has changed", "self.layer has changed"]


class Counting(Scaled):
    def forward(self, x):
        self.held.k += 1
        return super().forward(x)


@torch.no_grad()
def test_a_forward_that_changes_an_object_each_time_is_refused():
    compiled = gnnc.compile(Counting(Holder(0), lambda _: 1.0).eval(), "fp32", backend="reference")
    for _ in range(2):
        with pytest.raises(gnnc.CaptureError, match=r"forward sets self\.held\.k, which compiled calls"):
            compiled(X)


# the snapshot alone


@pytest.mark.parametrize("name", ["_ADDRESSES", "_VERSIONS"])
@pytest.mark.parametrize("known", [True, False])
def test_a_python_that_stores_objects_otherwise_sees_the_same(name, known, monkeypatch):
    monkeypatch.setattr(f"gnnc.capture.live_views.{name}", known)
    model = Scaled(2, lambda v: v)
    snapshot = ModelSnapshot(model)
    model.held = 2
    assert not snapshot.has_changed()
    model.held = 2.0
    assert snapshot.has_changed()
    model.held = 2
    assert not snapshot.has_changed()
    monkeypatch.setattr(Scaled, "factor", 3, raising=False)
    assert snapshot.has_changed()
    snapshot = ModelSnapshot(model)
    monkeypatch.setattr(Scaled, "factor", 4)
    assert snapshot.change() == "self (class).factor"


def test_versions_and_addresses_are_known_here():
    from gnnc.capture import live_views

    assert live_views._ADDRESSES and live_views._VERSIONS


def test_what_is_too_large_is_known_by_identity():
    model = Scaled(list(range(5000)))
    snapshot = ModelSnapshot(model)
    model.held = list(range(5000))
    assert snapshot.change() == "self.held"
