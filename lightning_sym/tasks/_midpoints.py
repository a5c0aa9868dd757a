"""Trainable parametrisations for matching: latent networks, coordinates of the group, maps outside of it."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sym.networks import Network
from lightning_sym.orbit.directions import OrbitDirections, kinds_of
from lightning_sym.population import LoopPopulation
from lightning_sym.stitching import sinkhorn
from lightning_sym.symmetry import Element, Symmetry
from lightning_sym.symmetry.matching.soft_maps import SoftMaps
from lightning_sym.symmetry.tracing.graph.capture import copied


class Trained(nn.Module):
    """The trainable parameters of one pair and method.

    Class attributes:
        leaves_group: Whether the second network's function may change.
    """

    leaves_group = False

    @abstractmethod
    def trained(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Compute the current weights of the second network, differentiable by these parameters.

        Args:
            weights: Those of the second network as its element has moved it, by name.
        """

    def settle(self) -> Element | None:
        """Return the element of the next move, if there is one, and take the state after it."""
        return None

    def project(self) -> None:
        """Project the parameters after an optimizer's step."""

    def give(self, network: nn.Module, state: Mapping[str, Tensor] | None = None) -> None:
        """Apply the parameters to the transformed second network, in place, if they change it further.

        Args:
            network: The network.
            state: Other values of the parameters, by name, and further entries; default the current values.
        """

    def unchanged(self) -> dict[str, Tensor]:
        """Return the values of the parameters that change nothing, by name; none if no values do."""
        return {}


class LatentNetwork(Trained):
    """A network that the second one is matched to in every step; it gets the second one's gradient."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = copied(network).requires_grad_()

    def trained(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        latent = dict(self.network.named_parameters())
        return {name: value + latent[name] - latent[name].detach() for name, value in weights.items()}


class Coordinates(Trained):
    """Coordinates of the group near the identity; 0 between steps."""

    def __init__(self, directions: OrbitDirections) -> None:
        super().__init__()
        zeros = {name: nn.Parameter(torch.zeros(shape)) for name, shape in directions.shapes.items()}
        self.values: Mapping[str, Tensor] = nn.ParameterDict(zeros)  # type: ignore[assignment]
        self._directions = directions

    def trained(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        given = (self.values[name] for name in self._directions.shapes)
        return dict(zip(weights, _Along.apply(self._directions, weights, *given), strict=True))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def settle(self) -> Element | None:
        finite = all(bool(own.isfinite().all()) for own in self.values.values())
        element = self._directions.element(self.values) if finite else None
        for own in self.values.values():
            own.zero_()
        return element


class _Along(torch.autograd.Function):
    """Weights with gradients by the coordinates of the group."""

    @staticmethod
    def forward(ctx: Any, directions: OrbitDirections, weights: dict[str, Tensor], *coordinates: Tensor) -> Any:
        ctx.directions, ctx.weights, ctx.like = directions, weights, coordinates
        return tuple(tensor.detach().clone() for tensor in weights.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        found = ctx.directions.pulled_back(ctx.weights, dict(zip(ctx.weights, gradients, strict=True)))
        return None, None, *(own.to(like) for own, like in zip(found.values(), ctx.like, strict=True))


class Maps(Trained):
    """Maps that leave the group; at first they change nothing."""

    leaves_group = True

    def __init__(self, maps: SoftMaps) -> None:
        super().__init__()
        self.values: Mapping[str, Tensor] = nn.ParameterDict(  # type: ignore[assignment]
            {name: nn.Parameter(torch.eye(size)) for name, size in maps.sizes.items()}
        )
        self._maps = maps

    def trained(self, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return self._maps.act(self.values, weights)

    @torch.no_grad()
    def project(self) -> None:
        for name, own in self.values.items():
            if name.startswith("units"):
                own.copy_(sinkhorn(own))

    @torch.no_grad()
    def give(self, network: nn.Module, state: Mapping[str, Tensor] | None = None) -> None:
        weights = dict(network.named_parameters())
        values = {name: own if state is None else state[f"values.{name}"] for name, own in self.values.items()}
        like = next(iter(weights.values()))
        for name, value in self._maps.act({n: own.to(like) for n, own in values.items()}, weights).items():
            weights[name].copy_(value)

    def unchanged(self) -> dict[str, Tensor]:
        return {f"values.{name}": torch.eye(size) for name, size in self._maps.sizes.items()}


class MidpointPopulation(LoopPopulation):
    """Hold pairs of networks as members of a population; each runs a network on the linear path between its pair.

    The registered parameters are those that the method of a pair trains; see :class:`lightning_sym.tasks.MatchingTask`.

    Args:
        symmetry: That of all networks.
        members: The two networks of each member and its training method: ``"straight_through"``, ``"orbit_descent"``
            or ``"soft_maps"``; None if nothing is trained. A member's number is its index here.
        keep_function: Penalty for changes of the second network's function in training: the weight of the squared
            change of its outputs, relative to their squares, in the mean over the batch.

    Attributes:
        started: By number, the second network after the initial element.
        steps: By number, the element that has acted on it since.
        places: By number, the point on the linear path whose network is run, in ``[0, 1]``.
    """

    def __init__(
        self, symmetry: Symmetry, members: Sequence[tuple[Network, Network, str | None]], keep_function: float = 1.0
    ) -> None:
        methods = {method for *_, method in members}
        # Midpoints normalise by batches (matrices between gains would change the function), and have no buffers.
        kinds = [kind for kind in kinds_of(symmetry) if kind in ("scales", "cells", "rotations", "phases")]
        directions = OrbitDirections(symmetry, kinds) if "orbit_descent" in methods else None
        maps = SoftMaps(symmetry) if "soft_maps" in methods else None

        def make(number: int) -> nn.Module:
            first, _, method = members[number]
            if method == "straight_through":
                return LatentNetwork(first)
            if method == "orbit_descent" and directions is not None:
                return Coordinates(directions)
            return Maps(maps) if method == "soft_maps" and maps is not None else nn.Identity()

        super().__init__(make, range(len(members)))
        self.symmetry = symmetry
        self.started: dict[int, nn.Module] = {}
        with torch.device("cpu"):  # where elements are; Lightning makes populations on its own device
            self.steps = dict.fromkeys(self.numbers, symmetry.identity())
        self.places = dict.fromkeys(self.numbers, 0.5)
        self.keep_function = keep_function
        self._changes: dict[int, Tensor] = {}
        runner = _batch_statistics(copied(members[0][0]))
        self._frozen = [(a, b) for a, b, _ in members], runner  # in a tuple: not registered

    def trained(self, number: int) -> Trained:
        """Return the trainable part of a member."""
        found = self._member(number)
        assert isinstance(found, Trained)
        return found

    def latent_network(self, number: int) -> Network:
        """Return the latent network of a member that is trained by ``"straight_through"``."""
        found = self._member(number)
        assert isinstance(found, LatentNetwork)
        return found.network

    @torch.no_grad()
    def settle(self) -> None:
        """Absorb the changes of steps into the elements."""
        for number in self.numbers:
            member = self._member(number)
            element = member.settle() if isinstance(member, Trained) else None
            if element is not None:
                self.steps[number] = self.symmetry.compose(element, self.steps[number])

    def project(self) -> None:
        """Project all parameters after an optimizer's step."""
        for member in self.members.values():
            if isinstance(member, Trained):
                member.project()

    def move_frozen(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the networks that are not registered."""
        pairs, runner = self._frozen
        for network in (runner, *(network for pair in pairs for network in pair)):
            network.to(device=device, dtype=dtype)

    def run_member(self, number: int, prepared: Any) -> Tensor:
        """Compute the logits of the network at a member's place, differentiable by its trainable part."""
        moved: dict[str, Tensor] = dict(self.symmetry.act(self.steps[number], self.started[number]).named_parameters())
        trained = self.trained(number)
        ends = trained.trained(moved)
        if trained.leaves_group and self.keep_function:
            with torch.no_grad():
                before = self.run_between(moved, prepared).flatten(1)
            changes = (self.run_between(ends, prepared).flatten(1) - before).square().sum(1)
            self._changes[number] = self.keep_function * (changes / before.square().sum(1)).mean()
        return self.run_between(self.between(number, ends, self.places[number]), prepared)

    def penalty(self, number: int) -> Tensor | None:
        """Return a member's penalty for the change of its second network's function in the current step."""
        return self._changes.pop(number, None)

    def between(self, number: int, ends: Mapping[str, Tensor], place: float = 0.5) -> dict[str, Tensor]:
        """Return the weights at a place between the first network of a member and other weights."""
        first = self._frozen[0][number][0].named_parameters()
        return {name: (1 - place) * a + place * ends[name] for name, a in first}

    def run_between(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the logits of given weights; batch norms use the batch."""
        runner = self._frozen[1]
        # Copies, as batch norms write their statistics.
        buffers = {name: buffer.clone() for name, buffer in runner.named_buffers()}
        logits: Tensor = functional_call(runner, {**buffers, **weights}, (images,))
        return logits

    def member_state(self, number: int) -> dict[str, Tensor]:
        """Copy the trainable part of a member and the tensors of its element."""
        return super().member_state(number) | element_tensors(self.steps[number])

    def set_member_state(self, number: int, state: Mapping[str, Tensor]) -> None:
        """Give a member other weights and another element."""
        self.steps[number] = element_of(self.symmetry, state)
        super().set_member_state(number, {name: value for name, value in state.items() if not name.startswith(_PREFIX)})


def _batch_statistics(network: Network) -> Network:
    """Return the network in evaluation mode, but with batch norms that use the batch."""
    network.eval()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    return network


_PREFIX = "element."


def element_tensors(element: Element) -> dict[str, Tensor]:
    """Return the tensors of an element by name, for the state of a member."""
    return {f"{_PREFIX}{name}": tensor.clone() for name, tensor in element.tensors().items()}


def element_of(symmetry: Symmetry, state: Mapping[str, Tensor]) -> Element:
    """Restore an element from the state of a member.

    Raises:
        ValueError: If an earlier version wrote them: restart the run, or resume with that version.
    """
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
    return symmetry.factors.of(symmetry.fingerprint, found, check=False)  # a member may have diverged
