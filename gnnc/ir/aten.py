"""Facts about ATen ops that several stages use, by name.

A name with an overload (``view.default``) is matched by ``nodes.aten_name``, one without (``view``) by
``nodes.op_name``, which serves every overload.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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

PRODUCTS = frozenset(
    """
    mm bmm addmm addmv addbmm baddbmm mv dot convolution _convolution conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d linear matmul einsum lstm gru rnn_tanh rnn_relu
    scaled_dot_product_attention _scaled_dot_product_attention_math
    """.split()
)
"""Ops that multiply matrices: ops of a model that count, where no primitive takes their place."""

UNTAGGED_POINTWISE = frozenset("leaky_relu hardswish _prelu_kernel".split())
"""Pointwise ops that torch does not tag as such, some of them before version 2.13 only."""

SHAPE_ONLY = frozenset(
    """
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full
    new_empty new_empty_strided sym_size sym_numel sym_stride
    """.split()
)
"""Ops whose result does not depend on the values of their tensors, only on shape, dtype and device."""


@dataclass(frozen=True, slots=True)
class ExactReads:
    """The operands of an op that must not be rounded: a small change of them may change the result a lot.

    Attributes:
        outcome: the kind of result, for people.
        operands: their names in the schema; none: every tensor operand.
        result: the only one of several results that a small change may change a lot, or None for all:
            the largest elements hardly change with their operand, but their indices do.
    """

    outcome: str
    operands: tuple[str, ...] = ()
    result: int | None = None


_COMPARISON = ExactReads("a comparison")
_SELECTION = ExactReads("a selection")
_INDICES = ExactReads("a selection", result=1)
_ABSOLUTE = ExactReads("a function of the absolute size of its argument")

EXACT_READS: Mapping[str, ExactReads] = {
    **dict.fromkeys(
        "eq ne lt le gt ge equal isclose isin logical_not logical_and logical_or".split(), _COMPARISON
    ),
    **dict.fromkeys("logical_xor any all nonzero count_nonzero sign sgn signbit".split(), _COMPARISON),
    **dict.fromkeys("hardshrink threshold bucketize searchsorted histc".split(), _COMPARISON),
    "atan2": ExactReads("a function with a jump"),
    "heaviside": ExactReads("a comparison", ("self",)),
    "copysign": ExactReads("a comparison", ("other",)),
    **dict.fromkeys("argmax argmin argsort mode multinomial bernoulli".split(), _SELECTION),
    **dict.fromkeys("_unique _unique2 unique_dim unique_consecutive".split(), _SELECTION),
    **dict.fromkeys("max.dim min.dim median.dim nanmedian.dim sort.default sort.stable".split(), _INDICES),
    **dict.fromkeys("topk.default kthvalue.default cummax.default cummin.default".split(), _INDICES),
    "max_pool2d_with_indices.default": _INDICES,
    **dict.fromkeys("sin cos tan sinc exp exp2 expm1 sinh cosh special_i0 i0".split(), _ABSOLUTE),
    **dict.fromkeys("floor ceil round trunc fix frac fmod remainder floor_divide".split(), _ABSOLUTE),
    **dict.fromkeys(("div.Tensor_mode", "div.Scalar_mode"), _ABSOLUTE),
    "pow.Scalar": ExactReads(_ABSOLUTE.outcome, ("exponent",)),
    "pow.Tensor_Tensor": ExactReads(_ABSOLUTE.outcome, ("exponent",)),
    "float_power.Scalar": ExactReads(_ABSOLUTE.outcome, ("exponent",)),
    "float_power.Tensor_Tensor": ExactReads(_ABSOLUTE.outcome, ("exponent",)),
    "polar": ExactReads(_ABSOLUTE.outcome, ("angle",)),
    "ldexp": ExactReads(_ABSOLUTE.outcome, ("other",)),
    "item": ExactReads("a number that Python reads"),
    "_local_scalar_dense": ExactReads("a number that Python reads"),
}
"""Ops that make much of a small change of their operands, by name with or without an overload."""

EXPONENTIALS = frozenset("exp exp2 expm1".split())
"""Exponentials, which hardly change with an argument that is never positive."""

NONNEGATIVE = frozenset(
    "relu abs square sqrt exp sigmoid softplus linalg_vector_norm softmax _softmax var std".split()
)
"""Ops whose result is never negative."""

TO_INTEGER = ExactReads("a conversion to integers")
"""Reads of a cast from floats to integers or bools, which is one of the casts of ``CASTS``."""

CASTS = frozenset("_to_copy to type".split())
"""Ops that change the dtype."""
