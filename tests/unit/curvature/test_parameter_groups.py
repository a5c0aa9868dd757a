"""Which parameters share a precision, in networks whose blocks have several paths."""

import pytest

from lightning_sym.curvature import parameter_groups
from lightning_sym.layers import parameter_paths
from lightning_sym.networks import RelaxedNetwork


@pytest.mark.parametrize(
    "paths", [["conv"], ["ffc", "conv"], ["ffc", "conv", "gconv"], ["sfc", "sconv", "conv"], ["conv", "gconv"]]
)
def test_every_path_of_every_block_has_a_precision_of_its_own(paths):
    """Also where a pool follows the sum of several convolutional paths."""
    network = RelaxedNetwork(paths=paths, width=2, grid=8, in_channels=1)
    groups = parameter_groups(network)
    blocks = 4
    expected = {f"{block}.{path}" for block, path in parameter_paths(network).values()}
    assert len(expected) == blocks * len(paths)
    assert set(groups.names) == expected | {"hidden", "classifier"}
    for name, (block, path) in parameter_paths(network).items():
        if name in groups.paths:  # anchor positions have no curvature
            assert groups.paths[name] == groups.precisions[name] == f"{block}.{path}"
            assert groups.layers[groups.paths[name]] == block
    tensors = parameter_groups(network, "per_tensor")
    assert tensors.paths == groups.paths
    assert all(name == precision for name, precision in tensors.precisions.items())
