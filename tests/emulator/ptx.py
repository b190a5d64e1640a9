"""Translates PTX, as NVRTC makes it of the kernels, into C++ for ``machine.h``.

A register is a variable, a scope of PTX a scope of C++, a label a label; a statement that threads of a
warp make together is a call in which a thread waits for the others. What is not known here is an error.
"""

import re
from dataclasses import dataclass

from emulator.instructions import translated
from emulator.names import Names, PtxError, label

_ENTRY = re.compile(r"\.entry\s+(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)(?P<notes>[^{]*)\{")


@dataclass(frozen=True)
class Kernel:
    """A kernel of a module.

    Attributes:
        symbol: its name.
        threads: its launch bound, 0 where it has none.
    """

    symbol: str
    threads: int


def translate(ptx: str) -> tuple[str, list[Kernel]]:
    """Return C++ that defines a function ``launch_<symbol>`` for each kernel of a module, and the kernels.

    Raises:
        PtxError: something is not translated.
    """
    module = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
    functions, kernels, globals_ = [], [], {}
    for head in _ENTRY.finditer(module):
        body = module[head.end() : _closing(module, head.end())]
        names = Names(module, body, _offsets(head["parameters"]))
        functions.append(_function(head["name"], names))
        globals_ |= names.globals
        bound = re.search(r"\.maxntid\s+(\d+)", head["notes"])
        kernels.append(Kernel(head["name"], int(bound[1]) if bound else 0))
    lines = ['#include "machine.h"', "using namespace machine;", *globals_.values(), *functions]
    return "\n".join(lines), kernels


def _closing(text: str, at: int) -> int:
    """Return where the brace closes that was opened before ``at``."""
    depth = 1
    while True:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1


def _offsets(parameters: str) -> dict[str, int]:
    """Return where each parameter begins: every one is a whole number of eight bytes."""
    offsets, at = {}, 0
    for parameter in filter(None, map(str.strip, parameters.split(","))):
        found = re.search(r"([\w$]+)(?:\[(\d+)\])?$", parameter)
        assert found is not None
        offsets[found[1]] = at
        at += -(-int(found[2] or 8) // 8) * 8
    return offsets


def _function(name: str, names: Names) -> str:
    """Return the C++ of a kernel, and of what launches it."""
    lines = [_line(statement, names) for statement in _statements(names.body)]
    return f"""
static void run_{name}(Thread& t, const char* parameters) {{
{chr(10).join(lines)}
}}
extern "C" const char* launch_{name}(
    const char* parameters, int blocks, int threads, size_t shared, uint64_t seed,
    const Range* tensors, int tensor_count) {{
  static std::string error;
  error = launch(&run_{name}, parameters, blocks, threads, {names.shared_bytes} + shared, seed,
                 tensors, tensor_count);
  return error.empty() ? nullptr : error.c_str();
}}
"""


def _statements(text: str) -> list[str]:
    """Cut a body into statements, labels (with their colon) and braces of scopes."""
    out, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text[at] in "{}":
            out.append(text[at])
            at += 1
        else:
            mark = re.match(r"[\w$]+:", text[at:])
            end = at + mark.end() if mark else text.index(";", at) + 1
            out.append(" ".join(text[at:end].rstrip(";").split()))
            at = end
    return out


def _line(statement: str, names: Names) -> str:
    if statement == "{":
        names.enter()
        return "{"
    if statement == "}":
        names.leave()
        return "}"
    if statement.endswith(":"):
        return f"{label(statement)};"
    directive = statement.split()[0]
    try:
        if directive in (".loc", ".pragma"):
            return ""
        if directive == ".reg":
            return names.declare_registers(statement)
        if directive in (".shared", ".local"):
            return names.declare_memory(statement)
        return translated(statement, names)
    except PtxError as error:
        raise PtxError(f"{error}: {statement}") from None
