"""Facts about ATen ops that several stages use, by name.

A name with an overload (``view.default``) is matched by ``nodes.aten_name``, one without (``view``) by
``nodes.op_name``, which serves every overload.
"""

VIEWS = frozenset(
    """
    view.default reshape.default _unsafe_view.default unsqueeze.default squeeze.default squeeze.dim
    squeeze.dims flatten.using_ints alias.default detach.default
    """.split()
)
"""Ops that return the same elements in the same order, in another shape: a backend gives them no memory."""

ROW_VIEWS = VIEWS - {"squeeze.default"} | {"clone.default", "contiguous.default"}
"""Ops that a row program skips where they keep the rows: the accumulator has no strides to copy."""

RENAMINGS = frozenset("view reshape unsqueeze squeeze t transpose alias detach".split())
"""Ops that texts look through to the op that made a value.

Not ``VIEWS``: a transpose moves elements, so that a kernel may not look through it, but a weight stays
the same weight. Printed programs and predicted times of ``_unsafe_view`` and ``flatten`` would change.
"""

FREE = RENAMINGS | {"getitem", "sym_size", "select", "slice", "expand"}
"""Ops that take no time: they pick, size or view a value."""

TRANSCENDENTAL = frozenset(
    "elu exp sigmoid tanh gelu silu log softplus _softmax _log_softmax softmax log_softmax".split()
)
"""Elementwise ops whose time is that of an exponential or a logarithm."""

UNTAGGED_POINTWISE = frozenset("leaky_relu hardswish _prelu_kernel".split())
"""Pointwise ops that torch does not tag as such, some of them before version 2.13 only."""
