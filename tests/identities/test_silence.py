"""A trace without notes has found everything: its dimension is the nullity of the Jacobian at generic weights.

What stays fixed, or moves in ways that depend on the weights, has a note. `SILENT` lists what has none today, and why.
"""

import pytest
import torch
from helpers import one_in
from symmetry_family_cases import CASES, leaves
from torch import Tensor, nn

from lightning_sym.symmetry import trace_symmetry

torch.set_num_threads(1)

# Singular values of the Jacobian, relative to the largest, that count as zero.
ZERO = 1e-10
# Weights at which the nullity is measured: at some, units are dead or always on, which only adds directions.
DRAWS = 100
MOST_PARAMETERS = 200
# Two weights read one value (or multiples of it) and are added up.
READ_TWICE = "two weights read one value and are added up"
SMALL = "too few different inputs for the layer that reads them"
MISSED = "no step says that it held more than it had to"
SILENT = {
    "tables: half_of_a_weight_and_all_of_it": READ_TWICE,
    "copies: units_read_twice": READ_TWICE,
    "shared: weight_stacked_twice": READ_TWICE,
    "shared: weight_of_a_linear_layer_and_of_a_convolution": READ_TWICE,
    "shared: one_gain_for_two_paths": READ_TWICE,
    "shared: gain_and_its_square": READ_TWICE,
    "constants: fixed_embedding": SMALL,
    "shared: embedding_and_its_transpose": SMALL,
    "constants: fixed_basis": MISSED,  # one scale for all units, which belongs to none of them
    "constants: units_masked_by_a_constant": MISSED,
    "shared: weight_used_also_transposed": MISSED,  # one scale for the whole weight
    "tables: sums_of_rows": MISSED,
    "writes: two_layers_interleaved": MISSED,
    "writes: first_step_to_a_token": MISSED,
    "shared: norm_behind_two_layers": MISSED,  # a running mean that two layers share
    "shared: norm_used_twice_in_series": MISSED,
    "shared: norm_of_the_input_and_of_units": MISSED,
    "shared: bias_with_and_without_a_norm": MISSED,
    "shared: linear_stream_of_tied_blocks": MISSED,  # all readers and writers together leave 2 of 8 directions out
}


def rows(network: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Differentiate outputs by all parameters. Shape (outputs, parameters), each row of length 1."""
    parameters = list(network.parameters())
    found = [leaf.flatten() for leaf in leaves(network(*(x.clone() for x in inputs))) if leaf.requires_grad]
    outputs = torch.cat([part[part.isfinite()] for part in found])
    chosen = torch.randperm(len(outputs))[: 2 * sum(parameter.numel() for parameter in parameters)]
    every = torch.eye(len(outputs), dtype=outputs.dtype)[chosen]
    parts = torch.autograd.grad(outputs, parameters, every, is_grads_batched=True, materialize_grads=True)
    whole = zip(parts, parameters, strict=True)  # of those that are not read one zero for all rows
    matrix = torch.cat([part.expand(len(every), *own.shape).flatten(1) for part, own in whole], 1)
    matrix = matrix[matrix.isfinite().all(1)]
    return matrix / torch.linalg.vector_norm(matrix, dim=1, keepdim=True).clamp(min=1e-9)


def nullity(name: str, network: nn.Module) -> int:
    """Return the nullity at random weights, over inputs of every length that the case names."""
    case, count = CASES[name], sum(parameter.numel() for parameter in network.parameters())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_((0.7 if parameter.ndim > 1 else 0.5) * torch.randn_like(parameter) + 0.1)
    given = [case.example(max(count, 40)), *(make(60) for make in (*case.more, *case.fresh))]
    wide = [tuple(2 * x if x.is_floating_point() else x for x in inputs) for inputs in given]
    values = torch.linalg.svdvals(torch.cat([rows(network, inputs) for inputs in wide]))
    return count - int((values > ZERO * values[0]).sum())


def small() -> list[str]:
    """Return the cases whose Jacobian is quick to make."""
    made = ((name, sum(parameter.numel() for parameter in case.make().parameters())) for name, case in CASES.items())
    return [name for name, count in made if count <= MOST_PARAMETERS]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", one_in(3, small()))
def test_without_notes_the_dimension_is_the_nullity(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    network = case.make().double()
    more = {"more_examples": [make(2) for make in case.more]} if case.more else {}
    symmetry = trace_symmetry(network, case.example(2), check=False, **more)
    measured = []
    for seed in range(5 if name in SILENT else DRAWS):
        torch.manual_seed(50 + seed)
        try:
            measured.append(nullity(name, network))
        except (
            RuntimeError,
            IndexError,
            torch.linalg.LinAlgError,
        ) as error:  # writes in place, NaN
            pytest.skip(f"has no Jacobian: {error}")
        assert symmetry.dimension <= measured[-1]
        if symmetry.notes or measured[-1] == symmetry.dimension:
            break
    silent = not symmetry.notes and symmetry.dimension < min(measured)
    assert silent == (name in SILENT), (symmetry.dimension, measured)
