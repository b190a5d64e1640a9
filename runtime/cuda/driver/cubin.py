"""Reader of cubins: finds the kernels that wait for their predecessor before they read any memory.

The compiler may move loads of memory that it takes for constant; a kernel that loaded before it waited
would read values that the kernel before it has yet to write. So the wait is looked up in the code that
will run. The encoding of instructions is not documented: on an architecture where no wait is found,
kernels are launched in order.
"""

import struct

_WAIT = 0x82E  # ACQBULK, of griddepcontrol.wait
_READS = frozenset({0x980, 0x981, 0xFAE})  # LD, LDG, LDGSTS
_TEXT = ".text."


def waiting_kernels(cubin: bytes) -> frozenset[str]:
    """Return the symbols of the kernels that wait (``gnnc::begin_kernel``) before they read memory."""
    return frozenset(symbol for symbol, code in kernels(cubin).items() if _waits_first(code))


def kernels(cubin: bytes) -> dict[str, bytes]:
    """Return the machine code of each kernel of a cubin (64-bit ELF), by its symbol."""
    table, size, count, names = (
        struct.unpack_from("<Q", cubin, 40)[0],
        *struct.unpack_from("<HHH", cubin, 58),
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for name, _, _, _, offset, length, *_ in headers:
        section = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        if section.startswith(_TEXT):
            found[section.removeprefix(_TEXT)] = cubin[offset : offset + length]
    return found


def _waits_first(code: bytes) -> bool:
    """Return whether a kernel waits before its first load."""
    for low, _ in struct.iter_unpack("<QQ", code):
        operation = low & 0xFFF
        if operation == _WAIT:
            return True
        if operation in _READS:
            return False
    return False
