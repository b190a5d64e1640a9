"""Names in the statements of a kernel: registers, variables, parameters, and how C++ says them."""

import re
from dataclasses import dataclass, field

TYPES = {
    **{f"{kind}{bits}": f"uint{bits}_t" for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    **{"f32": "float", "f64": "double", "f16": "half_t", "bf16": "bfloat_t", "pred": "bool"},
    **{"e4m3": "e4m3_t", "e5m2": "e5m2_t", "tf32": "tf32_t"},
}
_REGISTERS = {"f32": "float", "f64": "double", "pred": "bool"}
_SPECIAL = {
    "%tid.x": "static_cast<uint32_t>(t.index)",
    "%tid.z": "0u",
    "%ctaid.x": "static_cast<uint32_t>(t.block->index)",
    "%ntid.x": "static_cast<uint32_t>(t.block->grid->threads)",
    "%nctaid.x": "static_cast<uint32_t>(t.block->grid->blocks)",
    "%laneid": "static_cast<uint32_t>(t.lane())",
}
"""Blocks and threads have one dimension."""
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")
_VARIABLE = re.compile(r"\.(?:shared|local)(?: \.align (\d+))? \.[a-z]+(\d+) ([\w$]+)(?:\[(\d+)\])?$")


class PtxError(Exception):
    """Something that is not translated."""


def operands(text: str) -> list[str]:
    """Cut at the commas that are in no braces or brackets."""
    out, depth, current = [], 0, ""
    for letter in text:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += letter
    return [*out, current.strip()] if current.strip() else out


def parts(text: str) -> list[str]:
    """Return the registers of a vector, ``{%r1, %r2}``."""
    return operands(text.strip("{} "))


def register(name: str) -> str:
    """Return the C++ variable of a register."""
    return "r_" + re.sub(r"\W", "_", name.lstrip("%"))


def label(name: str) -> str:
    """Return a name without a dollar."""
    return name.replace("$", "L")


@dataclass
class Names:
    """Names of one kernel.

    Attributes:
        module: the text of the PTX, for variables outside of the kernel.
        body: that of the kernel.
        offset: where each parameter begins.
        shared_bytes: of static shared memory.
        globals: C++ declarations of the module's variables that the kernel uses.
    """

    module: str
    body: str
    offset: dict[str, int]
    shared_bytes: int = 0
    globals: dict[str, str] = field(default_factory=dict)
    _types: list[dict[str, str]] = field(default_factory=lambda: [{}])  # of registers, by scope
    _shared: dict[str, int] = field(default_factory=dict)  # where each variable begins
    _local: set[str] = field(default_factory=set)

    def enter(self) -> None:
        """Begin a scope."""
        self._types.append({})

    def leave(self) -> None:
        """End it."""
        self._types.pop()

    # Declarations

    def declare_registers(self, statement: str) -> str:
        """Return the C++ for ``.reg``: variables of the registers that are used."""
        _, kind, names = statement.split(None, 2)
        kind = kind.removeprefix(".")
        c = _REGISTERS.get(kind) or f"uint{re.sub(r'[a-z]', '', kind)}_t"
        used = []
        for name in map(str.strip, names.split(",")):
            numbered = re.fullmatch(r"(.*)<(\d+)>", name)
            here = [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name]
            self._types[-1] |= dict.fromkeys(here, c)
            used += [r for r in here if not numbered or re.search(re.escape(r) + r"\b", self.body)]
        return f"{c} {', '.join(map(register, used))};" if used else ""

    def declare_memory(self, statement: str) -> str:
        """Give a variable of the block or of the thread its place; return the C++ for it."""
        found = _VARIABLE.match(statement)
        if found is None:
            raise PtxError("an unknown variable")
        align, size = int(found[1] or 8), int(found[4] or 1) * int(found[2]) // 8
        if statement.startswith(".local"):
            self._local.add(found[3])
            return f"alignas(16) char {label(found[3])}[{size}];"
        begin = -(-self.shared_bytes // align) * align
        self._shared[found[3]] = begin
        self.shared_bytes = begin + size
        return ""

    # Operands

    def type_of(self, name: str) -> str:
        """Return the C++ type of a register."""
        for scope in reversed(self._types):
            if name in scope:
                return scope[name]
        raise PtxError(f"no register {name}")

    def bits_of(self, name: str) -> int:
        """Return the bits of a register."""
        kind = self.type_of(name)
        return {"float": 32, "double": 64}.get(kind) or int(re.sub(r"\D", "", kind))

    def _is_register(self, text: str) -> bool:
        return any(text in scope for scope in self._types)

    def value(self, text: str, c: str) -> str:
        """Return the C++ for an operand, as a C++ type."""
        if text.startswith("!"):
            return f"!{self.value(text[1:], c)}"
        if self._is_register(text):
            return f"as<{c}>({register(text)})"
        if text in _SPECIAL:
            return f"as<{c}>({_SPECIAL[text]})"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"as<{c}>(0x{text[2:]}u)"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return f"as<{c}>(0x{text[2:]}ull)"
        if _NUMBER.fullmatch(text):
            number = int(text.rstrip("U"), 0)
            return f"as<{c}>(static_cast<uint64_t>({number}{'ull' if number > 2**63 - 1 else 'll'}))"
        return f"as<{c}>({self._place(text)})"

    def put(self, name: str, value: str) -> str:
        """Return the C++ that gives a register a value; ``_`` is none."""
        return ";" if name == "_" else f"put({register(name)}, {value});"

    def pointer(self, text: str, space: str) -> str:
        """Return the C++ pointer that an operand in brackets stands for."""
        base, _, offset = text.strip("[] ").partition("+")
        if not self._is_register(base):
            where = self._place(base)
        elif self.type_of(base) == "uint32_t":
            where = f"static_cast<uint64_t>({register(base)})"
        else:
            where = register(base)
        where = f"{where} + static_cast<uint64_t>({int(offset or 0)}ll)"
        if space == "shared":
            return f"t.block->shared() + static_cast<uint32_t>({where})"
        return f"reinterpret_cast<char*>({where})"

    def _place(self, name: str) -> str:
        """Return where a variable is: of shared memory the offset, else the address."""
        if name in self._shared:
            return f"static_cast<uint64_t>({self._shared[name]})"
        if name in self._local:
            return f"reinterpret_cast<uint64_t>(&{label(name)}[0])"
        if name in self.offset:
            return f"reinterpret_cast<uint64_t>(parameters + {self.offset[name]})"
        if re.search(rf"\.extern \.shared [^;]*\b{re.escape(name)}\[\]", self.module):
            # Dynamic shared memory, behind the static one, which is declared before any statement.
            self.shared_bytes = -(-self.shared_bytes // 16) * 16
            return f"static_cast<uint64_t>({self.shared_bytes})"
        return f"reinterpret_cast<uint64_t>({self._global(name)})"

    def _global(self, name: str) -> str:
        pattern = rf"\.(?:global|const)[^;]*?\.(\w+)\s+{re.escape(name)}(?:\[(\d+)\])?(?:\s*=\s*([^;]*))?;"
        found = re.search(pattern, self.module)
        if found is None:
            raise PtxError(f"{name} is declared nowhere")
        values = (found[3] or "").strip("{} \n")
        self.globals[name] = f"alignas(16) static {TYPES[found[1]]} g_{name}[{found[2] or 1}] = {{{values}}};"
        return f"reinterpret_cast<char*>(g_{name})"
