"""Tests of every family of CUDA kernels, few, and of what is hard: for sanitizer and emulator."""

FAMILIES = {
    "structure": (
        "structure.py::test_csr_is_that_of_the_reference[7-8192-dtype2]",
        "structure.py::test_csr_is_that_of_the_reference[65537-8193-dtype0]",
        "structure.py::test_csr_is_that_of_the_reference[513-50000-dtype1]",
        "structure.py::test_the_transpose_is_that_of_the_reference[5000]",
        "structure.py::test_an_id_out_of_range_is_named[src-1099511627776]",
    ),
    "new graphs": (
        "runs.py::test_tables_are_those_of_the_reference[cut1-random]",
        "runs.py::test_tables_are_those_of_the_reference[cut2-chunks]",
        "runs.py::test_tables_are_those_of_the_reference[cut5-star]",
        "runs.py::test_nothing_is_written_by_offsets_that_may_be_anything",
        "structure.py::test_every_node_gets_one_edge_to_itself[5000-dtype0]",
        "structure.py::test_rows_of_offsets_of_any_type_and_stride[700]",
        "staged.py::test_sizes_of_a_new_graph_are_those_of_the_reference[several stretches]",
    ),
    "spmm": (
        "spmm.py::test_integer_reductions_are_exact[47-sum]",
        "spmm.py::test_integer_reductions_are_exact[602-max]",
        "spmm.py::test_integer_weights_are_exact[47]",
        "spmm.py::test_integer_rows_with_real_weights[7]",
        "spmm.py::test_integer_rows_with_real_weights[47]",
        "spmm.py::test_integer_rows_with_real_weights[602]",
        "spmm.py::test_float_sums[7-fp32-False]",
        "spmm.py::test_float_sums[16-fp16-True]",
        "spmm.py::test_float_sums[47-fp16-False]",
        "spmm.py::test_float_sums[602-bf16-True]",
        "spmm.py::test_integer_rows_with_weights_a_head[4-16-sum-True]",
        "spmm.py::test_integer_rows_with_weights_a_head[3-7-mean-True]",
        "spmm.py::test_weights_a_head[3-7-dtype1]",
    ),
    "staged": (
        "staged.py::test_words_hold_the_sources[cut1-several stretches]",
        "spmm.py::test_staged_sums_of_integers_are_exact[16-sum]",
        "spmm.py::test_staged_sums_of_integers_are_exact[47-sum]",
        "spmm.py::test_staged_sums_of_integers_are_exact[128-mean]",
        "spmm.py::test_staged_sums_with_row_scales[64]",
        "spmm.py::test_staged_sums_of_floats[fp16-64-sum]",
        "spmm.py::test_staged_sums_of_floats[fp32-64-sum]",
    ),
    "split rows": (
        "split_rows.py::test_integers[7-spmm]",
        "split_rows.py::test_integers[128-spmm_staged]",
        "split_rows.py::test_integers_of_several_passes_are_64_bits_wide[602]",
        "split_rows.py::test_parts_are_joined_slice_by_slice[dtype0-65-spmm_sliced]",
        "split_rows.py::test_floats[dtype2-64-max]",
        "split_rows.py::test_integers_with_weights_a_head[4-16]",
        "split_rows.py::test_attention[4-16]",
        "split_rows.py::test_attention[2-301]",
        "split_rows.py::test_messages[5-8-mean]",
    ),
    "sddmm": (
        "sddmm.py::test_integer_dots_are_exact[47]",
        "sddmm.py::test_float_products[47-dtype1-dot]",
        "sddmm.py::test_float_products[602-dtype0-add]",
        "sddmm.py::test_dots_a_head[4-16-dtype2]",
    ),
    "attention": (
        "attention.py::test_attention[1.0-4-16-dtype2]",
        "attention.py::test_attention[1.0-1-7-dtype2]",
        "attention.py::test_attention[1.0-3-47-dtype1]",
        "attention.py::test_attention[1.0-1-602-dtype0]",
    ),
    "norm columns": ("norm_columns.py::test_batch_norm[True-47]",),
    "gemm": (
        "gemm.py::test_products_equal_the_reference[47-int8]",
        "gemm.py::test_products_equal_the_reference[602-fp16]",
        "gemm.py::test_products_equal_the_reference[1433-bf16]",
    ),
    "tuning": (
        "tuning.py::test_integers_are_added_up_to_the_same_bits[128]",
        "tuning.py::test_graphs_of_launches_do_not_go_on_with_freed_tables",
        "tuning.py::test_a_graph_whose_columns_were_given_back_is_cut_anew[True]",
        "tuning.py::test_bad_arguments_are_refused_as_by_a_call",
    ),
    "models": (
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GCN-int8]",
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GAT-int8]",
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GATv2-fp32]",
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GraphSAGE max-fp16]",
    ),
}
"""Tests by kernel family: odd widths, rows of several passes, split rows, epilogues, bodies."""

EMULATED = ("new graphs", "split rows", "sddmm", "attention", "tuning", "models")
"""Families whose tests run on the emulator in every run of the suite without a GPU, but those of ``LONG``."""
LONG = frozenset(
    {
        "split_rows.py::test_integers_of_several_passes_are_64_bits_wide[602]",
        "attention.py::test_attention[1.0-3-47-dtype1]",
        "attention.py::test_attention[1.0-1-602-dtype0]",
        "tuning.py::test_integers_are_added_up_to_the_same_bits[128]",
        "tuning.py::test_graphs_of_launches_do_not_go_on_with_freed_tables",
        "models.py::test_cuda_computes_what_eager_and_the_reference_compute[GATv2-fp32]",
    }
)
"""Tests that take the emulator half a minute each; ``--emulate`` runs them."""


def emulated() -> set[str]:
    """Return the node ids of the tests that run on the emulator in every run without a GPU."""
    return {_node(name) for family in EMULATED for name in FAMILIES[family] if name not in LONG}


def nodes_of(family: str) -> list[str]:
    """Return the node ids of a family's tests."""
    return [_node(name) for name in FAMILIES[family]]


def _node(name: str) -> str:
    return f"tests/cuda/test_{name}"
