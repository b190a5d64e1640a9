"""ATen ops on the CPU whose last bits depend on the number of threads.

ATen divides its work among threads by element counts. It sums whole tensors and long products thread by
thread, and it computes the elements behind the last whole vector of a thread's part by other code, which for
some functions rounds in another way. `tests/compiler/test_thread_bits.py` measures these ops.
"""

from math import prod

import torch
from torch.fx import Node

from gnnc.ir.aten import PRODUCTS
from gnnc.ir.nodes import argument, op_name

_FUNCTIONS = frozenset(
    """
    exp2 sinh cosh atanh sigmoid gelu selu celu elu silu softplus mish pow float_power logaddexp logaddexp2
    atan2 log_sigmoid log_sigmoid_forward logit glu
    """.split()
)
"""Functions that round the elements behind the last whole vector in another way."""

_SUMS = frozenset(
    """
    sum mean prod norm linalg_vector_norm linalg_norm linalg_matrix_norm logsumexp var std var_mean std_mean
    nansum nanmean mse_loss l1_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss poisson_nll_loss margin_ranking_loss hinge_embedding_loss
    cosine_embedding_loss triplet_margin_loss
    """.split()
)
"""Reductions that add up one result in parts, one for each thread."""

_OF_PRODUCTS = frozenset(
    """
    vdot inner tensordot linalg_vecdot linalg_multi_dot chain_matmul matrix_power linalg_matrix_power cdist
    _cdist_forward _euclidean_dist _scaled_dot_product_flash_attention_for_cpu
    """.split()
)
"""Ops that call a product of matrices or vectors, beside the products that count as ops of a model."""

_SOFTMAXES = frozenset("softmax _softmax log_softmax _log_softmax".split())
_ACCUMULATING = frozenset("index_put _index_put_impl _unsafe_index_put put".split())
_RECURRENT = frozenset("gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell".split())
_EXACT_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)
"""Exponents for which ``pow`` multiplies, divides or takes a root."""


def depends_on_threads(node: Node) -> bool:
    """Return whether the last bits of an ATen op on the CPU may depend on the number of threads."""
    name = op_name(node)
    if not str(node.target).startswith("aten.") or not _is_floating(node):
        return False
    if name == "pow":
        return argument(node, "exponent", None) not in _EXACT_POWERS
    if name in _SUMS:
        return _is_single(node)
    if name in _SOFTMAXES:
        rank = node.args[0].meta["val"].dim() if isinstance(node.args[0], Node) else 0
        return argument(node, "dim") not in (-1, rank - 1)
    if name in _ACCUMULATING:
        return bool(argument(node, "accumulate", False))
    if "batch_norm" in name:
        return "with_update" in name or bool(argument(node, "training", False))
    return name in _FUNCTIONS | PRODUCTS | _OF_PRODUCTS | _RECURRENT


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    return isinstance(first, torch.Tensor) and first.is_floating_point()


def _is_single(node: Node) -> bool:
    """Return whether a result has one element, whatever the sizes of the call."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    return all(isinstance(size, int) for size in first.shape) and prod(first.shape) == 1
