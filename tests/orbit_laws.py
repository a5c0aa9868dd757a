"""Laws that the symmetry of any network obeys, for the tests of each kind of symmetry."""

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym.symmetry import (
    Element,
    OrbitTangents,
    Symmetry,
    canonicalize,
    local_dimension,
    orbit_tangents,
    weight_matching,
)


def drawn(symmetry: Symmetry, seed: int = 0, **options: Any) -> Element:
    return symmetry.sample(torch.Generator().manual_seed(seed), **options)


def assert_same_weights(one: nn.Module, two: nn.Module, tolerance: float) -> None:
    """Compare two networks' tensors; a tolerance of 0 asks for the same bits."""
    state = two.state_dict()
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(
            tensor, state[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_a_group_acts(symmetry: Symmetry, network: nn.Module, tolerance: float, *inputs: Tensor) -> None:
    """Products and inverses act as such, and on inputs that are given the outputs stay."""
    one, two = drawn(symmetry, 0), drawn(symmetry, 1)
    moved = symmetry.act(one, network)
    both = symmetry.act(two, moved)
    assert_same_weights(symmetry.act(symmetry.compose(two, one), network), both, tolerance)
    assert_same_weights(symmetry.act(symmetry.inverse(one), moved), network, tolerance)
    with torch.no_grad():
        for x in inputs:
            torch.testing.assert_close(both(x), network(x), rtol=tolerance, atol=tolerance)


def assert_dimension_is_the_nullity(symmetry: Symmetry, network: nn.Module, x: Tensor, gap: float, **how: Any) -> None:
    found = local_dimension(symmetry, network, x, **how)
    assert found.gap > gap
    assert found.nullity == symmetry.dimension


def assert_tangents_change_no_output(
    symmetry: Symmetry, network: nn.Module, x: Tensor, tolerance: float
) -> OrbitTangents:
    """The derivative of the outputs along each tangent is 0."""
    found = orbit_tangents(symmetry, network)
    weights = {key: value.detach() for key, value in network.named_parameters()}
    for column in torch.from_numpy(found.vectors.toarray()).T:
        parts = column.split([weights[key].numel() for key in found.names])
        tangent = {key: part.view_as(weights[key]) for key, part in zip(found.names, parts, strict=True)}
        _, change = torch.func.jvp(lambda w: torch.func.functional_call(network, w, (x,)), (weights,), (tangent,))
        assert float(change.abs().max()) <= tolerance
    return found


def assert_members_have_one_form(
    symmetry: Symmetry, network: nn.Module, tolerance: float, seeds: Collection[int] = (1,), **options: Any
) -> nn.Module:
    """Each member of the orbit has the network's canonical form, which is returned."""
    form = canonicalize(symmetry, network).network
    for seed in seeds:
        member = symmetry.act(drawn(symmetry, seed, **options), network)
        assert_same_weights(canonicalize(symmetry, member).network, form, tolerance)
    return form


def assert_matching_undoes(symmetry: Symmetry, network: nn.Module, member: nn.Module, tolerance: float) -> None:
    match = weight_matching(symmetry, network, member)
    size = float(torch.cat([own.detach().flatten() for own in network.parameters()]).norm())
    assert match.distance_before > 0.01 * size
    assert match.distance_after <= tolerance * size


def module_outputs(network: nn.Module, x: Tensor, names: Collection[str]) -> dict[str, Tensor]:
    """Return what modules of a network put out when they are called first, by their names."""
    found: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, _inputs: Any, out: Tensor) -> None:
        found.setdefault(name, out.clone())

    hooks = [network.get_submodule(name).register_forward_hook(functools.partial(keep, name)) for name in names]
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return found


def assert_values_move(
    symmetry: Symmetry, element: Element, network: nn.Module, x: Tensor, names: Collection[str], tolerance: float
) -> None:
    """What an element does to values follows from what it does to weights."""
    after = module_outputs(symmetry.act(element, network), x, names)
    for name, value in module_outputs(network, x, names).items():
        told = symmetry.on_activations(element, name, network).apply(value)
        torch.testing.assert_close(
            told, after[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
