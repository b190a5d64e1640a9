"""Tests of every family of CUDA kernels, few, and of what is hard: for sanitizer and emulator."""

FAMILIES = {
    "structure": (
        "formats/test_csr.py::test_csr_is_that_of_the_reference[7-8192-dtype2]",
        "formats/test_csr.py::test_csr_is_that_of_the_reference[65537-8193-dtype0]",
        "formats/test_csr.py::test_csr_is_that_of_the_reference[513-50000-dtype1]",
        "formats/test_csr.py::test_the_transpose_is_that_of_the_reference[5000]",
        "formats/test_csr.py::test_an_id_out_of_range_is_named[src-1099511627776]",
    ),
    "new graphs": (
        "formats/test_run_table.py::test_tables_are_those_of_the_reference[cut1-random]",
        "formats/test_run_table.py::test_tables_are_those_of_the_reference[cut2-chunks]",
        "formats/test_run_table.py::test_tables_are_those_of_the_reference[cut5-star]",
        "formats/test_run_table.py::test_nothing_is_written_by_offsets_that_may_be_anything",
        "formats/test_csr.py::test_every_node_gets_one_edge_to_itself[256-5000-dtype0]",
        "formats/test_csr.py::test_every_node_gets_one_edge_to_itself[65536-5000-dtype0]",
        "formats/test_csr.py::test_a_graph_without_nodes_gets_no_edge[dtype0]",
        "formats/test_csr.py::test_rows_of_offsets_of_any_type_and_stride[700]",
        "formats/test_window_table.py::test_sizes_of_a_new_graph_are_those_of_the_reference"
        "[several node blocks]",
    ),
    "spmm": (
        "kernels/test_spmm.py::test_integer_reductions_are_exact[47-sum]",
        "kernels/test_spmm.py::test_integer_reductions_are_exact[602-max]",
        "kernels/test_spmm.py::test_integer_weights_are_exact[47]",
        "kernels/test_spmm.py::test_integer_rows_with_real_weights[7]",
        "kernels/test_spmm.py::test_integer_rows_with_real_weights[47]",
        "kernels/test_spmm.py::test_integer_rows_with_real_weights[602]",
        "kernels/test_spmm.py::test_float_sums[7-fp32-False]",
        "kernels/test_spmm.py::test_float_sums[16-fp16-True]",
        "kernels/test_spmm.py::test_float_sums[47-fp16-False]",
        "kernels/test_spmm.py::test_float_sums[602-bf16-True]",
        "kernels/test_spmm.py::test_integer_rows_with_weights_a_head[4-16-sum-True]",
        "kernels/test_spmm.py::test_integer_rows_with_weights_a_head[3-7-mean-True]",
        "kernels/test_spmm.py::test_weights_a_head[3-7-dtype1]",
    ),
    "staged": (
        "formats/test_window_table.py::test_words_hold_the_sources[cut1-several node blocks]",
        "kernels/test_spmm.py::test_staged_sums_of_integers_are_exact[16-sum]",
        "kernels/test_spmm.py::test_staged_sums_of_integers_are_exact[47-sum]",
        "kernels/test_spmm.py::test_staged_sums_of_integers_are_exact[128-mean]",
        "kernels/test_spmm.py::test_staged_sums_with_row_scales[64]",
        "kernels/test_spmm.py::test_staged_sums_of_floats[fp16-64-sum]",
        "kernels/test_spmm.py::test_staged_sums_of_floats[fp32-64-sum]",
    ),
    "split rows": (
        "kernels/test_split_rows.py::test_integers[7-spmm]",
        "kernels/test_split_rows.py::test_integers[128-spmm_staged]",
        "kernels/test_split_rows.py::test_integers_of_several_passes_are_64_bits_wide[602]",
        "kernels/test_split_rows.py::test_parts_are_joined_slice_by_slice[dtype0-65-spmm_sliced]",
        "kernels/test_split_rows.py::test_floats[dtype2-64-max]",
        "kernels/test_split_rows.py::test_integers_with_weights_a_head[4-16]",
        "kernels/test_split_rows.py::test_attention[4-16]",
        "kernels/test_split_rows.py::test_attention[2-301]",
        "kernels/test_split_rows.py::test_messages[5-8-mean]",
    ),
    "fp8": (
        "kernels/test_fp8.py::test_every_value_is_widened_as_torch_does[E4m3]",
        "kernels/test_fp8.py::test_values_are_rounded_as_torch_does_and_saturate[E4m3]",
        "kernels/test_fp8.py::test_values_are_rounded_as_torch_does_and_saturate[E5m2]",
        "kernels/test_fp8.py::test_stored_rows_are_those_of_the_reference[47-e4m3]",
        "kernels/test_fp8.py::test_sums_of_rows_are_those_of_the_reference[sum-None-48-e4m3]",
        "kernels/test_fp8.py::test_products_with_a_weight_are_those_of_the_reference[47-e5m2]",
    ),
    "sddmm": (
        "kernels/test_sddmm.py::test_integer_dots_are_exact[random-47]",
        "kernels/test_sddmm.py::test_integer_dots_are_exact[no-edges-47]",
        "kernels/test_sddmm.py::test_float_products[random-47-dtype1-dot]",
        "kernels/test_sddmm.py::test_float_products[star-602-dtype0-add]",
        "kernels/test_sddmm.py::test_dots_a_head[4-16-dtype2]",
        "kernels/test_sddmm.py::test_a_copied_end_may_have_fewer_rows_than_the_other[copy_src]",
        "kernels/test_sddmm.py::test_a_copied_end_may_have_fewer_rows_than_the_other[copy_dst]",
    ),
    "attention": (
        "kernels/test_attention.py::test_attention[random-1.0-4-16-dtype2]",
        "kernels/test_attention.py::test_attention[no-edges-1.0-4-16-dtype2]",
        "kernels/test_attention.py::test_attention[star-1.0-4-16-dtype2]",
        "kernels/test_attention.py::test_attention[random-1.0-1-7-dtype2]",
        "kernels/test_attention.py::test_attention[star-1.0-1-7-dtype2]",
        "kernels/test_attention.py::test_attention[random-1.0-3-47-dtype1]",
        "kernels/test_attention.py::test_attention[star-1.0-3-47-dtype1]",
        "kernels/test_attention.py::test_attention[random-1.0-1-602-dtype0]",
        "kernels/test_attention.py::test_attention[star-1.0-1-602-dtype0]",
        "kernels/test_edge_softmax.py::test_edge_softmax[0.0-3-random]",
        "kernels/test_edge_softmax.py::test_edge_softmax[0.0-47-star]",
        "kernels/test_edge_softmax.py::test_a_hub_is_computed_by_many_warps[1]",
    ),
    "norm columns": ("kernels/test_norm_columns.py::test_batch_norm[True-47]",),
    "gemm": (
        "kernels/test_gemm.py::test_products_equal_the_reference[47-int8]",
        "kernels/test_gemm.py::test_products_equal_the_reference[602-fp16]",
        "kernels/test_gemm.py::test_products_equal_the_reference[1433-bf16]",
    ),
    "computed weights": (
        "kernels/test_gemm.py::test_computed_weights_have_padded_rows[20-fp32]",
        "kernels/test_gemm.py::test_computed_weights_have_padded_rows[47-fp32]",
        "kernels/test_gemm.py::test_computed_weights_have_padded_rows[47-bf16]",
        "kernels/test_gemm.py::test_computed_weights_have_padded_rows[47-int8]",
    ),
    "gradients": (
        "kernels/test_gradients.py::test_gemm_tn[7-47-63-dtype0]",
        "kernels/test_gradients.py::test_gemm_tn[16-130-63-dtype1]",
        "kernels/test_gradients.py::test_qgemm_tn[neither-16-130-63]",
        "kernels/test_gradients.py::test_column_sum[7-5]",
        "kernels/test_gradients.py::test_edge_softmax_backward[3-star]",
        "kernels/test_gradients.py::test_edge_sum[star]",
        "kernels/test_gradient_steps.py::test_power_of_two_behind_a_chain[-140-20]",
        "kernels/test_gradient_steps.py::test_rows_are_multiplied_again_instead_of_stored",
        "kernels/test_stochastic.py::test_bits_are_those_of_the_reference[row_pow2-47]",
        "kernels/test_attention_backward.py::test_gradients_of_the_ends[dtype2-4-16-star]",
    ),
    "tuning": (
        "formats/test_tune.py::test_integers_are_added_up_to_the_same_bits[128]",
        "formats/test_tune.py::test_graphs_of_launches_do_not_go_on_with_freed_tables",
        "formats/test_tune.py::test_a_graph_whose_columns_were_given_back_is_cut_anew[True]",
        "formats/test_tune.py::test_bad_arguments_are_refused_as_by_a_call",
    ),
    "models": (
        "test_models.py::test_cuda_computes_what_eager_and_the_reference_compute[GCN-int8]",
        "test_models.py::test_cuda_computes_what_eager_and_the_reference_compute[GAT-int8]",
        "test_models.py::test_cuda_computes_what_eager_and_the_reference_compute[GATv2-fp32]",
        "test_models.py::test_cuda_computes_what_eager_and_the_reference_compute[GraphSAGE max-fp16]",
    ),
}
"""Tests by kernel family: odd widths, rows of several passes, split rows, epilogues, bodies."""

EMULATED = (
    "new graphs",
    "split rows",
    "fp8",
    "sddmm",
    "attention",
    "computed weights",
    "gradients",
    "tuning",
    "models",
)
"""Families whose tests run on the emulator in `make test-all` without a GPU, but those of ``LONG``."""
LONG = frozenset(
    {
        "kernels/test_split_rows.py::test_integers_of_several_passes_are_64_bits_wide[602]",
        "kernels/test_attention.py::test_attention[random-1.0-3-47-dtype1]",
        "kernels/test_attention.py::test_attention[star-1.0-3-47-dtype1]",
        "kernels/test_attention.py::test_attention[random-1.0-1-602-dtype0]",
        "kernels/test_attention.py::test_attention[star-1.0-1-602-dtype0]",
        "formats/test_tune.py::test_integers_are_added_up_to_the_same_bits[128]",
        "formats/test_tune.py::test_graphs_of_launches_do_not_go_on_with_freed_tables",
        "formats/test_tune.py::test_a_graph_whose_columns_were_given_back_is_cut_anew[True]",
        "formats/test_csr.py::test_every_node_gets_one_edge_to_itself[65536-5000-dtype0]",
        "test_models.py::test_cuda_computes_what_eager_and_the_reference_compute[GATv2-fp32]",
    }
)
"""Tests that take the emulator half a minute each; ``--emulate`` runs them."""
FIRST = frozenset(
    {
        "formats/test_run_table.py::test_tables_are_those_of_the_reference[cut1-random]",
        "kernels/test_split_rows.py::test_integers[7-spmm]",
    }
)
"""Tests that run on the emulator in `make test` too: a format, and sums that cross blocks."""


def emulated() -> set[str]:
    """Return the node ids of the tests that run on the emulator where there is no GPU."""
    return {_node(name) for family in EMULATED for name in FAMILIES[family] if name not in LONG}


def emulated_first() -> set[str]:
    """Return the node ids of those that `make test` runs."""
    return {_node(name) for name in FIRST}


def nodes_of(family: str) -> list[str]:
    """Return the node ids of a family's tests."""
    return [_node(name) for name in FAMILIES[family]]


def _node(name: str) -> str:
    return f"tests/cuda/{name}"
