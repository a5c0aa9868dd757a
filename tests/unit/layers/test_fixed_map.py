import copy

import pytest
import torch
from helpers import assert_refused

from lightning_sym.stitching import FixedMap, Port

MATRIX = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]])


@pytest.mark.parametrize(("shape", "axis"), [((4, 3), 1), ((4, 3, 2, 5), 1), ((4, 6, 3), -1)])
def test_the_matrix_acts_along_the_axis(shape, axis):
    x = torch.randn(shape)
    expected = torch.tensordot(MATRIX, x, dims=([1], [axis])).movedim(0, axis)
    torch.testing.assert_close(FixedMap(Port(3, 2, axis=axis), MATRIX)(x), expected)


def test_nothing_is_trained_and_the_matrix_is_kept():
    given = MATRIX.clone()
    fixed = FixedMap(Port(3, 2), given)
    given.zero_()
    assert list(fixed.parameters()) == []
    assert fixed.dimension() == 0
    fixed.project()
    for mode in ("soft", "hard"):
        fixed.mode = mode
        assert torch.equal(fixed.matrix(), MATRIX)
    other = FixedMap(Port(3, 2), torch.ones(2, 3))
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(copy.deepcopy(other).double().matrix(), MATRIX.double())


@pytest.mark.parametrize("matrix", [MATRIX.T, MATRIX.long(), MATRIX / 0, MATRIX[None]])
def test_other_matrices_are_refused(matrix):
    assert_refused(lambda: FixedMap(Port(3, 2), matrix), says="FixedMap must have finite floating numbers and shape")
