"""Families of networks that tracing once got wrong or refused: the group, fresh inputs, and a saved state.

The cases state the whole group, derived by hand; test_silence.py has the nullity of their Jacobians.
"""

import functools
import io
from typing import Any

import pytest
import torch
from helpers import one_in
from symmetry_family_cases import CASES, Case, Group, difference, evaluate
from torch import Tensor, nn

from lightning_sym.symmetry import Symmetry, trace_symmetry

# Shifts besides those in front of batch norms, which the cases state.
SHIFTS = {
    f"{family}: {name}": count
    for count, families in {
        1: {"tables": "softmax_of_weights_of_steps"},
        2: {
            "tables": "half_of_a_weight_and_all_of_it",
            "writes": "copy_of_what_is_written_later clone_with_zeros",
            "shared": "linear_behind_which_two_norms_stand norm_behind_two_layers norm_of_the_input_and_of_units "
            "linear_with_and_without_its_norm two_norms_in_front_of_tanh bias_of_two_weights "
            "weight_of_a_grouped_and_of_a_plain_convolution bias_with_and_without_a_norm one_gain_for_two_paths "
            "gain_and_its_square",
            "copies": "one_key_for_all_queries one_key_broadcast_to_all_queries",
        },
        4: {
            "tables": "mask_of_zeros_and_ones mask_of_truth_values relative_scores_gathered_behind_the_product "
            "mask_of_minus_infinity",
            "constants": "fixed_mask_of_minus_infinity fixed_linear_bias fixed_slopes_that_tell_heads_apart rotary "
            "rotary_tables_in_a_submodule",
            "writes": "scores_masked_with_the_least_number",
            "copies": "keys_repeated_by_expanding keys_repeated_by_an_index keys_repeated_by_interleaving "
            "queries_grouped_on_an_axis keys_grouped_by_torch slopes_that_tell_queries_apart "
            "rotary_with_grouped_queries",
        },
        5: {"tables": "relative_embedding relative_table relative_table_by_a_buffer_of_indices"},
        6: {"tables": "relative_table_of_two_heads tokens_and_positions", "constants": "sinusoids_on_an_embedding"},
        8: {
            "tables": "parameter_cut_to_length embedding_weight_cut_to_length embedding_of_arange "
            "functional_embedding_of_arange embedding_of_a_buffer_of_positions buffer_cut_to_length narrow "
            "second_axis_cut transposed_table cut_from_the_end cut_with_an_offset split_at_the_length "
            "reversed_table row_of_the_last_step mean_of_the_rows_of_a_cut_table every_second_row "
            "rows_that_nothing_reads table_with_a_class_token class_row_by_itself image_table_cut_to_size "
            "rows_and_columns cropped_by_negative_padding gathered relative_keys relative_logits_cut_to_length "
            "second_half_for_long_inputs recurrence_of_any_length added_into_a_copy_of_the_table",
            "constants": "sinusoids_that_are_saved layer_behind_sinusoids",
            "writes": "recurrent_steps_into_empty steps_that_read_the_buffer slice_of_ones slice_of_a_filled_tensor",
            "shared": "linear_stream_of_tied_blocks",
        },
        9: {"tables": "weights_of_rows_plus_a_mask weights_of_rows_masked_with_minus_infinity"},
        10: {"shared": "convolution_with_and_without_its_norm"},
        12: {"tables": "table_behind_a_perceptron"},
        14: {"tables": "table_behind_a_linear_layer", "shared": "layer_norm_of_two_layers"},
        15: {"shared": "layer_norm_used_twice_in_series"},
        16: {"shared": "gated_recurrence"},
        18: {"shared": "weight_of_a_linear_layer_and_of_a_convolution"},
        24: {"writes": "view_of_what_is_written_later"},
    }.items()
    for family, names in families.items()
    for name in names.split()
}

SEVERAL = [name for name, case in CASES.items() if case.more]


@functools.cache
def traced(name: str) -> tuple[Case, nn.Module, Symmetry]:
    torch.manual_seed(0)
    case = CASES[name]
    network = case.make().double()
    more = {"more_examples": [make(2) for make in case.more]} if case.more else {}
    return case, network, trace_symmetry(network, case.example(2), **more)


def size(symmetry: Symmetry) -> Group:
    dimension = symmetry.dimension + symmetry.buffer_dimension
    return Group(symmetry.log10_permutations, symmetry.scales, symmetry.signs, symmetry.shifts, dimension)


@pytest.mark.parametrize("name", one_in(6, CASES))
def test_traced_group_is_the_whole_group_and_keeps_the_function_in_a_fresh_network(name: str) -> None:
    case, network, symmetry = traced(name)
    further = SHIFTS.get(name, 0)
    found = size(symmetry) + Group(0, 0, 0, -further, -further)
    assert case.accepts(found), (found, case.whole, symmetry.notes)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    inputs = case.all_inputs()
    expected = [evaluate(network, x) for x in inputs]
    for _ in range(3):
        state = symmetry.act(symmetry.sample(generator), network).state_dict()
        if symmetry.dimension:
            assert any(not torch.equal(value, state[key]) for key, value in network.state_dict().items())
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        fresh = case.make().double()
        fresh.load_state_dict(torch.load(file, weights_only=True))
        for x, old in zip(inputs, expected, strict=True):
            assert difference(evaluate(fresh, x), old) < case.tolerance


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SEVERAL)
def test_order_of_the_examples_does_not_matter(name: str) -> None:
    case, network, symmetry = traced(name)
    (other,) = case.more
    for seed in range(3):  # of the numbers in the examples, which do not matter either
        torch.manual_seed(seed)
        swapped = trace_symmetry(network, other(3), more_examples=[case.example(1), other(2)])
        assert size(swapped) == size(symmetry)


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
@pytest.mark.few(4, "tables: a_head_for_each_step")
@pytest.mark.parametrize("name", SEVERAL)
def test_one_example_for_two_branches_is_never_more_than_its_branch(name: str) -> None:
    """Each example alone gives a group that is right for inputs of its own size."""
    case = CASES[name]
    torch.manual_seed(0)
    network = case.make().double()
    for make in (case.example, *case.more):
        symmetry = trace_symmetry(network, make(2))
        inputs = make(3)
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), network)
        assert difference(evaluate(moved, inputs), evaluate(network, inputs)) < case.tolerance


@pytest.mark.parametrize("more", [torch.randn(2, 5, 5), [3], ["x"], 7])
def test_more_examples_are_a_list_of_inputs(more: Any) -> None:
    """A tensor in place of a list would be taken for one example per sample."""
    _, network, _ = traced("tables: parameter_cut_to_length")
    with pytest.raises(TypeError, match="example"):
        trace_symmetry(network, torch.randn(2, 5, 5, dtype=torch.float64), more_examples=more)


class KeysBesideOneThatHeadsShare(nn.Module):
    """Attention whose keys are joined with coordinates that all heads share, as compressed keys and turned ones.

    Args:
        way: How they are joined.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q, self.kv = nn.Linear(5, 8, bias=False), nn.Linear(5, 8, bias=False)
        self.r, self.o = nn.Linear(5, 2, bias=False), nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend. Shape (n, length, 5)."""
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 4)).transpose(1, 2).split([2, 2], -1)
        r = self.r(x)[:, None].expand(-1, 2, -1, -1)
        if self.way == "memory":
            key = torch.empty_like(q)
            key[..., :2].copy_(k)
            key[..., 2:].copy_(r)
        else:
            key = torch.cat([k, r] if self.way == "behind" else [r, k], -1)
        return self.o(nn.functional.scaled_dot_product_attention(q, key, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", ["memory", "behind", "in front"])
def test_keys_joined_with_one_that_heads_share_leave_the_values_their_matrices(way: str) -> None:
    network = KeysBesideOneThatHeadsShare(way).double()
    symmetry = trace_symmetry(network, torch.randn(2, 6, 5, dtype=torch.float64))
    assert sorted(len(cell) for cell in symmetry.structure.dense) == [2, 2]
    assert symmetry.dimension == 12
