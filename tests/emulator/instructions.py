"""Each instruction of PTX as C++ for ``machine.h``."""

import re
from collections.abc import Callable

from emulator.names import TYPES, Names, PtxError, label, operands, parts, register

Translation = Callable[[list[str], list[str], Names], str]
"""Function of the parts of an instruction's name after the first, and of its operands."""

_PLAIN: dict[str, tuple[str, tuple[str, ...]]] = {
    "abs": ("std::abs({0})", ()),
    "and": ("{0} & {1}", ()),
    "brev": ("reversed_bits({0})", ()),
    "copysign": ("std::copysign({1}, {0})", ()),
    "div": ("divided({0}, {1})", ("rn", "full", "approx")),
    "ex2": ("flushed(std::exp2({0}))", ("approx", "ftz")),
    "lg2": ("std::log2({0})", ("approx",)),
    "neg": ("-{0}", ()),
    "or": ("{0} | {1}", ()),
    "prmt": ("permuted_bytes({0}, {1}, {2})", ()),
    "rem": ("{0} - divided({0}, {1}) * {1}", ()),
    "rsqrt": ("1 / std::sqrt({0})", ("approx",)),
    "sqrt": ("std::sqrt({0})", ("rn", "approx")),
    "xor": ("{0} ^ {1}", ()),
}
"""An expression of the operands, all of the type that the name ends with, and what may stand before that."""

_ROUNDED = {"rni": "std::nearbyint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_JOINED = {"and": "&&", "or": "||", "xor": "!="}
_FOLDS = {"and": "bits_and", "or": "bits_or", "xor": "bits_xor"}
_AFTER = {
    "add": "v + {0}",
    "inc": "v >= {0} ? 0 : v + 1",
    "min": "std::min(v, {0})",
    "max": "std::max(v, {0})",
    "exch": "{0}",
    "cas": "v == {0} ? {1} : v",
    "or": "v | {0}",
    "and": "v & {0}",
}
"""Value that an atomic leaves in the place of v."""
_SPACES = ("shared", "global", "local", "param", "const")
_SCOPES = ("relaxed", "release", "acquire", "acq_rel", "gpu", "cta", "sys")


def translated(statement: str, names: Names) -> str:
    """Return the C++ of an instruction.

    Raises:
        PtxError: it is not known.
    """
    guard = re.match(r"@(!?)([%\w]+)\s+(.*)", statement)
    if guard:
        return f"if ({guard[1]}{register(guard[2])}) {{ {translated(guard[3], names)} }}"
    name, _, rest = statement.partition(" ")
    first, *modifiers = name.split(".")
    if first in _PLAIN:
        form, allowed = _PLAIN[first]
        return _plain(modifiers, operands(rest), names, form, *allowed)
    function: Translation | None = globals().get(f"_{first}_")
    if function is None:
        raise PtxError("an unknown instruction")
    return function(modifiers, operands(rest), names)


def _kind(modifiers: list[str]) -> str:
    if modifiers[-1] not in TYPES:
        raise PtxError(f"an unknown type {modifiers[-1]}")
    return TYPES[modifiers[-1]]


def _only(modifiers: list[str], *allowed: str) -> None:
    unknown = set(modifiers) - set(allowed)
    if unknown:
        raise PtxError(f"unknown modifiers {sorted(unknown)}")


def _plain(modifiers: list[str], given: list[str], names: Names, form: str, *allowed: str) -> str:
    _only(modifiers[:-1], *allowed)
    c = _kind(modifiers)
    values = [names.value(operand, c) for operand in given[1:]]
    return names.put(given[0], f"static_cast<{c}>({form.format(*values, c=c)})")


def _values(given: list[str], kinds: tuple[str, ...], names: Names) -> str:
    return ", ".join(names.value(operand, kind) for operand, kind in zip(given, kinds, strict=True))


# Arithmetic


def _arithmetic(modifiers: list[str], given: list[str], names: Names, sign: str) -> str:
    if modifiers[-1] in ("f16x2", "bf16x2", "f16", "bf16"):
        return _halves(modifiers, given, names, f"wide({{0}}) {sign} wide({{1}})")
    if modifiers[-1] in ("f32", "f64"):
        return _plain(modifiers, given, names, f"{{0}} {sign} {{1}}", "rn")
    return _plain(
        [*modifiers[:-1], f"u{modifiers[-1][1:]}"], given, names, f"{{0}} {sign} {{1}}"
    )  # wraps around


def _halves(modifiers: list[str], given: list[str], names: Names, form: str) -> str:
    """Translate an instruction on a float of 16 bits, or on two."""
    _only(modifiers[:-1], "rn")
    c, is_pair = TYPES[modifiers[-1].removesuffix("x2")], modifiers[-1].endswith("x2")
    if not is_pair:
        values = [names.value(operand, c) for operand in given[1:]]
        return names.put(given[0], f"narrow<{c}>({form.format(*values)}).bits")
    words = [names.value(operand, "uint32_t") for operand in given[1:]]
    low, high = (form.format(*(f"as<{c}>({word} >> {by})" for word in words)) for by in (0, 16))
    return names.put(given[0], f"packed(narrow<{c}>({low}).bits, narrow<{c}>({high}).bits)")


def _add_(modifiers: list[str], given: list[str], names: Names) -> str:
    if modifiers[0] == "rz":
        return _plain(modifiers, given, names, "sum_toward_zero({0}, {1})", "rz")
    return _arithmetic(modifiers, given, names, "+")


def _sub_(modifiers: list[str], given: list[str], names: Names) -> str:
    return _arithmetic(modifiers, given, names, "-")


def _mul_(modifiers: list[str], given: list[str], names: Names) -> str:
    if modifiers[0] == "wide":
        return names.put(given[0], _wide_product(modifiers, given[1:], names))
    if modifiers[0] == "hi":
        return _plain(modifiers, given, names, "high_product<{c}>({0}, {1})", "hi")
    if modifiers[0] == "rz":
        return _plain(modifiers, given, names, "product_toward_zero({0}, {1})", "rz")
    return _arithmetic([m for m in modifiers if m != "lo"], given, names, "*")


def _wide_product(modifiers: list[str], given: list[str], names: Names) -> str:
    c, wider = _kind(modifiers), TYPES[f"{modifiers[-1][0]}{2 * int(modifiers[-1][1:])}"]
    a, b = (f"static_cast<{wider}>({names.value(operand, c)})" for operand in given[:2])
    return f"static_cast<{wider}>({a} * {b})"


def _mad_(modifiers: list[str], given: list[str], names: Names) -> str:
    if modifiers[0] == "wide":
        wider = TYPES[f"u{2 * int(modifiers[-1][1:])}"]
        product = f"static_cast<{wider}>({_wide_product(modifiers, given[1:], names)})"
        return names.put(given[0], f"{product} + {names.value(given[3], wider)}")
    return _plain([*modifiers[:-1], f"u{modifiers[-1][1:]}"], given, names, "{0} * {1} + {2}", "lo")


def _fma_(modifiers: list[str], given: list[str], names: Names) -> str:
    if modifiers[-1] in ("f16x2", "bf16x2", "f16", "bf16"):
        exact = "std::fma(double(wide({0})), double(wide({1})), double(wide({2})))"
        return _halves(modifiers, given, names, f"static_cast<float>({exact})")
    if modifiers[0] == "rm":
        return _plain(modifiers, given, names, "fused_downward({0}, {1}, {2})", "rm")
    return _plain(modifiers, given, names, "std::fma({0}, {1}, {2})", "rn")


def _rcp_(modifiers: list[str], given: list[str], names: Names) -> str:
    form = "flushed(1 / flushed({0}))" if "ftz" in modifiers else "1 / {0}"
    return _plain(modifiers, given, names, form, "rn", "approx", "ftz")


def _min_(modifiers: list[str], given: list[str], names: Names) -> str:
    return _extreme(modifiers, given, names, "smaller")


def _max_(modifiers: list[str], given: list[str], names: Names) -> str:
    return _extreme(modifiers, given, names, "larger")


def _extreme(modifiers: list[str], given: list[str], names: Names, function: str) -> str:
    function = f"{function}_or_nan" if "NaN" in modifiers else function
    if modifiers[-1] in ("f16x2", "bf16x2", "f16", "bf16"):
        kinds = [m for m in modifiers if m != "NaN"]
        return _halves(kinds, given, names, f"{function}(wide({{0}}), wide({{1}}))")
    return _plain(modifiers, given, names, f"{function}({{0}}, {{1}})", "NaN")


def _not_(modifiers: list[str], given: list[str], names: Names) -> str:
    return _plain(modifiers, given, names, "!{0}" if modifiers == ["pred"] else "~{0}")


def _shl_(modifiers: list[str], given: list[str], names: Names) -> str:
    values = _values(given[1:], (_kind(modifiers), "uint32_t"), names)
    return names.put(given[0], f"shifted_left({values})")


def _shr_(modifiers: list[str], given: list[str], names: Names) -> str:
    values = _values(given[1:], (_kind(modifiers), "uint32_t"), names)
    return names.put(given[0], f"shifted_right({values})")


def _shf_(modifiers: list[str], given: list[str], names: Names) -> str:
    _only(modifiers, "l", "r", "wrap", "b32")
    low, high, by = (names.value(operand, "uint32_t") for operand in given[1:])
    both = f"(static_cast<uint64_t>({high}) << 32 | {low})"
    word = f"({both} << ({by} & 31)) >> 32" if "l" in modifiers else f"{both} >> ({by} & 31)"
    return names.put(given[0], f"static_cast<uint32_t>({word})")


def _bfi_(modifiers: list[str], given: list[str], names: Names) -> str:
    c = _kind(modifiers)
    values = _values(given[1:], (c, c, "uint32_t", "uint32_t"), names)
    return names.put(given[0], f"inserted_bits<{c}>({values})")


def _bfind_(modifiers: list[str], given: list[str], names: Names) -> str:
    """The leading zeros, with all bits set where there is no other."""
    _only(modifiers, "shiftamt", "u32")
    value = names.value(given[1], "uint32_t")
    return names.put(given[0], f"{value} == 0 ? 0xffffffffu : leading_zeros({value})")


def _popc_(modifiers: list[str], given: list[str], names: Names) -> str:
    count = f"__builtin_popcountll({names.value(given[1], _kind(modifiers))})"
    return names.put(given[0], f"static_cast<uint32_t>({count})")


def _clz_(modifiers: list[str], given: list[str], names: Names) -> str:
    return names.put(given[0], f"leading_zeros({names.value(given[1], _kind(modifiers))})")


def _dp2a_(modifiers: list[str], given: list[str], names: Names) -> str:
    a, b = TYPES[modifiers[1]], TYPES[modifiers[2]]
    values = _values(given[1:], ("uint32_t", "uint32_t", "int32_t"), names)
    return names.put(given[0], f"dot_two<{a}, {b}>({values}, {0 if modifiers[0] == 'lo' else 2})")


def _dp4a_(modifiers: list[str], given: list[str], names: Names) -> str:
    a, b = (TYPES[modifier] for modifier in modifiers)
    values = _values(given[1:], ("uint32_t", "uint32_t", "int32_t"), names)
    return names.put(given[0], f"dot_four<{a}, {b}>({values})")


# Comparison, choice, conversion


def _setp_(modifiers: list[str], given: list[str], names: Names) -> str:
    compare, c = modifiers[0], _kind(modifiers)
    a, b = (names.value(operand, c) for operand in given[1:3])
    if c in ("half_t", "bfloat_t"):
        a, b = f"wide({a})", f"wide({b})"
    is_float = modifiers[-1] in ("f16", "bf16", "f32", "f64")
    if is_float and compare in ("num", "nan"):
        test = f"{'!' if compare == 'num' else ''}(std::isnan({a}) || std::isnan({b}))"
    elif is_float and compare[-1] == "u" and compare[:-1] in _COMPARED:
        test = f"(std::isnan({a}) || std::isnan({b}) || {a} {_COMPARED[compare[:-1]]} {b})"
    elif is_float and compare == "ne":
        test = f"({a} < {b} || {a} > {b})"  # of numbers
    elif compare in _COMPARED:
        test = f"({a} {_COMPARED[compare]} {b})"
    else:
        raise PtxError(f"an unknown comparison {compare}")
    if len(modifiers) > 2:
        _only(modifiers[1:-1], *_JOINED)
        test = f"{test} {_JOINED[modifiers[1]]} {names.value(given[3], 'bool')}"
    if "|" in given[0]:
        raise PtxError("two results of a comparison")
    return names.put(given[0], test)


def _selp_(modifiers: list[str], given: list[str], names: Names) -> str:
    c = _kind(modifiers)
    a, b = (names.value(operand, c) for operand in given[1:3])
    return names.put(given[0], f"{names.value(given[3], 'bool')} ? {a} : {b}")


def _mov_(modifiers: list[str], given: list[str], names: Names) -> str:
    (to, source), c, at = given, _kind(modifiers), 0
    words = []
    if to.startswith("{"):
        for name in parts(to):
            bits = names.bits_of(name)
            words.append(names.put(name, f"as<uint{bits}_t>(all >> {at})"))
            at += bits
        return f"{{ const auto all = {names.value(source, c)}; {' '.join(words)} }}"
    if source.startswith("{"):
        for name in parts(source):
            bits = names.bits_of(name)
            words.append(f"static_cast<{c}>({names.value(name, f'uint{bits}_t')}) << {at}")
            at += bits
        return names.put(to, " | ".join(words))
    return names.put(to, names.value(source, c))


def _cvta_(modifiers: list[str], given: list[str], names: Names) -> str:
    value = names.value(given[1], "uint64_t")
    if "shared" in modifiers:
        sign = "-" if "to" in modifiers else "+"
        value = f"{value} {sign} reinterpret_cast<uint64_t>(t.block->shared())"
    return names.put(given[0], value)


def _cvt_(modifiers: list[str], given: list[str], names: Names) -> str:
    *how, to, source = modifiers
    if "e4m3x2" in (to, source) or "e5m2x2" in (to, source):
        return _cvt_of_bytes(how, to, source, given, names)
    if to == "tf32":
        _only(how, "rna")
        return names.put(given[0], f"nearest_tf32({names.value(given[1], 'float')})")
    _only(how, "rn", "rz", "sat", "ftz", *_ROUNDED)
    if to in ("f16x2", "bf16x2"):
        high, low = (
            f"narrow<{TYPES[to[:-2]]}>({names.value(operand, 'float')}).bits" for operand in given[1:]
        )
        return names.put(given[0], f"packed({low}, {high})")
    c, value = TYPES[to], names.value(given[1], TYPES[source])
    is_float = source in ("f16", "bf16", "f32", "f64")
    if source in ("f16", "bf16"):
        value = f"wide({value})"
    for function in (_ROUNDED[word] for word in how if word in _ROUNDED):
        value = f"{function}({value})"
    if to in ("f16", "bf16"):
        return names.put(given[0], f"narrow<{c}>(static_cast<float>({value})).bits")
    if is_float and "int" in c:
        value = f"clamped<{c}>({value})"
    elif "sat" in how:
        value = f"std::fmin(std::fmax({value}, 0.0f), 1.0f)" if is_float else f"saturated<{c}>({value})"
    return names.put(given[0], f"static_cast<{c}>({value})")


def _cvt_of_bytes(how: list[str], to: str, source: str, given: list[str], names: Names) -> str:
    """Return the C++ that converts two FP32 to floats of 8 bits, the first to the upper byte, or back."""
    if source == "f32":
        _only(how, "rn", "satfinite")
        high, low = (
            f"narrow<{TYPES[to[:-2]]}>({names.value(operand, 'float')}).bits" for operand in given[1:]
        )
        return names.put(given[0], f"static_cast<uint16_t>({high} << 8 | {low})")
    if to != "f16x2":
        raise PtxError("an unknown conversion of floats of 8 bits")
    _only(how, "rn")
    low, high = (
        f"narrow<half_t>(wide(as<{TYPES[source[:-2]]}>(static_cast<uint16_t>(pair >> {at})))).bits"
        for at in (0, 8)
    )
    put = names.put(given[0], f"packed({low}, {high})")
    return f"{{ const auto pair = {names.value(given[1], 'uint16_t')}; {put} }}"


# Memory


def _space(modifiers: list[str]) -> str:
    return next((word for word in modifiers if word in _SPACES), "generic")


def _ld_(modifiers: list[str], given: list[str], names: Names) -> str:
    _only(modifiers[:-1], *_SCOPES, *_SPACES, "volatile", "cg", "ca", "nc", "v2", "v4")
    c, pointer = _kind(modifiers), names.pointer(given[1], _space(modifiers))
    is_known = "param" in modifiers or "const" in modifiers
    call = f"load_known<{{}}>({pointer})" if is_known else f"load<{{}}>(t, {pointer})"
    if not given[0].startswith("{"):
        return names.put(given[0], call.format(c))
    to = parts(given[0])
    puts = " ".join(names.put(name, f"all.v[{i}]") for i, name in enumerate(to))
    return f"{{ const auto all = {call.format(f'Vector<{c}, {len(to)}>')}; {puts} }}"


def _st_(modifiers: list[str], given: list[str], names: Names) -> str:
    _only(modifiers[:-1], *_SCOPES, *_SPACES, "volatile", "cg", "cs", "wb", "v2", "v4")
    c, pointer = _kind(modifiers), names.pointer(given[0], _space(modifiers))
    if not given[1].startswith("{"):
        return f"store<{c}>(t, {pointer}, {names.value(given[1], c)});"
    values = [names.value(name, c) for name in parts(given[1])]
    return f"store(t, {pointer}, Vector<{c}, {len(values)}>{{{{{', '.join(values)}}}}});"


def _atomic(modifiers: list[str], given: list[str], names: Names) -> str:
    _only(modifiers[:-1], *_SCOPES, *_AFTER, "global", "shared")
    c, pointer = _kind(modifiers), names.pointer(given[0], _space(modifiers))
    form = next((form for name, form in _AFTER.items() if name in modifiers), None)
    if form is None:
        raise PtxError("an unknown atomic")
    after = form.format(*(names.value(operand, c) for operand in given[1:]))
    return f"replaced<{c}>(t, {pointer}, [&]({c} v) {{ return static_cast<{c}>({after}); }})"


def _atom_(modifiers: list[str], given: list[str], names: Names) -> str:
    value = _atomic(modifiers, given[1:], names)
    return f"{value};" if given[0] == "_" else names.put(given[0], value)


def _red_(modifiers: list[str], given: list[str], names: Names) -> str:
    return f"{_atomic(modifiers, given, names)};"


def _cp_(modifiers: list[str], given: list[str], names: Names) -> str:
    if modifiers == ["async", "wait_all"]:
        return "wait_for_copies(t);"
    if modifiers == ["async", "commit_group"]:
        return "++t.groups;"
    if modifiers == ["async", "wait_group"]:
        return f"wait_for_groups(t, {given[0]});"
    _only(modifiers, "async", "cg", "ca", "shared", "global")
    to, source, size = names.pointer(given[0], "shared"), names.pointer(given[1], "global"), given[2]
    read = names.value(given[3], "int32_t") if len(given) > 3 else size
    return f"start_copy(t, {to}, {source}, {size}, {read});"


def _prefetch_(modifiers: list[str], given: list[str], names: Names) -> str:
    return ""


def _membar_(modifiers: list[str], given: list[str], names: Names) -> str:
    return ""  # threads run one at a time


def _fence_(modifiers: list[str], given: list[str], names: Names) -> str:
    return ""


def _griddepcontrol_(modifiers: list[str], given: list[str], names: Names) -> str:
    _only(modifiers, "wait")
    return ""  # so do kernels


# Threads


def _bra_(modifiers: list[str], given: list[str], names: Names) -> str:
    return f"goto {label(given[0])};"


def _ret_(modifiers: list[str], given: list[str], names: Names) -> str:
    return "return;"


def _exit_(modifiers: list[str], given: list[str], names: Names) -> str:
    return "return;"


def _trap_(modifiers: list[str], given: list[str], names: Names) -> str:
    return 'fail("a kernel trapped");'


def _bar_(modifiers: list[str], given: list[str], names: Names) -> str:
    if modifiers == ["warp", "sync"]:
        return f"together<SyncWarp>(t, {names.value(given[0], 'uint32_t')}, {{}});"
    if modifiers != ["sync"] or given != ["0"]:
        raise PtxError("an unknown barrier")
    return "barrier(t);"


def _shfl_(modifiers: list[str], given: list[str], names: Names) -> str:
    _only(modifiers, "sync", "idx", "up", "down", "bfly", "b32")
    to, _, there = given[0].partition("|")
    value, by, clamp, members = (names.value(operand, "uint32_t") for operand in given[1:])
    call = f"together<Shfl<Shuffle::{modifiers[1]}>>(t, {members}, {{{value}, {by}, {clamp}}})"
    second = names.put(there, "out.there") if there else ""
    return f"{{ const auto out = {call}; {names.put(to, 'out.value')} {second} }}"


def _vote_(modifiers: list[str], given: list[str], names: Names) -> str:
    value, members = names.value(given[1], "bool"), names.value(given[2], "uint32_t")
    call = f"together<Voting<Vote::{modifiers[1]}>>(t, {members}, {value})"
    return names.put(given[0], call if modifiers[1] == "ballot" else f"static_cast<bool>({call})")


def _redux_(modifiers: list[str], given: list[str], names: Names) -> str:
    c, fold = _kind(modifiers), _FOLDS.get(modifiers[1], modifiers[1])
    value, members = names.value(given[1], c), names.value(given[2], "uint32_t")
    return names.put(given[0], f"together<Redux<Fold::{fold}, {c}>>(t, {members}, {value})")


def _match_(modifiers: list[str], given: list[str], names: Names) -> str:
    _only(modifiers, "any", "sync", "b32", "b64")
    value, members = names.value(given[1], _kind(modifiers)), names.value(given[2], "uint32_t")
    return names.put(given[0], f"together<MatchAny>(t, {members}, static_cast<uint64_t>({value}))")


def _mma_(modifiers: list[str], given: list[str], names: Names) -> str:
    shape = re.fullmatch(r"m16n8k(\d+)", modifiers[2])
    if modifiers[:2] != ["sync", "aligned"] or shape is None or modifiers[3:5] != ["row", "col"]:
        raise PtxError("an unknown product of matrices")
    total = _kind(modifiers)
    kinds = ("uint32_t", "uint32_t", total)
    a, b, c = (
        ", ".join(names.value(name, kind) for name in parts(words))
        for words, kind in zip(given[1:], kinds, strict=True)
    )
    op = f"Mma<{TYPES[modifiers[6]]}, {total}, {shape[1]}, {TYPES[modifiers[7]]}>"
    puts = " ".join(names.put(name, f"out.d[{i}]") for i, name in enumerate(parts(given[0])))
    return f"{{ const auto out = together<{op}>(t, ~0u, {{{{{a}}}, {{{b}}}, {{{c}}}}}); {puts} }}"


def _ldmatrix_(modifiers: list[str], given: list[str], names: Names) -> str:
    _only(modifiers, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "b16")
    to = parts(given[0])
    puts = " ".join(names.put(name, f"out.word[{i}]") for i, name in enumerate(to))
    operation = f"LoadMatrix<{len(to)}, {'true' if 'trans' in modifiers else 'false'}>"
    call = f"together<{operation}>(t, ~0u, {names.pointer(given[1], 'shared')})"
    return f"{{ const auto out = {call}; {puts} }}"
