"""Functional forms of ATen's ops: the op that returns what another writes to its first operand."""

import torch

from gnnc.torch_private import OpOverload, schema


def returning(write: OpOverload) -> OpOverload | None:
    """Return ``aten::add`` for ``aten::add_``: the op with the same arguments and no write."""
    namespace, name = schema(write).name.split("::")
    parameters = schema(write).arguments
    written = [parameter.name for parameter in parameters if parameter.alias_info is not None]
    odd = {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}.intersection(write.tags)
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if odd or packet is None or not name.endswith("_") or written != [parameters[0].name]:
        return None
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    alike = [op for op in overloads if _signature(op) == _signature(write) and not schema(op).is_mutable]
    return alike[0] if alike else None


def _signature(op: OpOverload) -> list[tuple[str, str]]:
    return [(parameter.name, str(parameter.type)) for parameter in schema(op).arguments]
