"""Weights up to symmetry: distances to orbits, representatives, the quotient."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lightning_sym._distributed import on_device_of
from lightning_sym._linear_algebra import best_scales
from lightning_sym.landscape.planes import trainable, weight_tensors, weight_vector
from lightning_sym.networks.modes import in_precision
from lightning_sym.symmetry import Call, canonicalize, trace_symmetry, weight_matching
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.group.gathered import Rung
from lightning_sym.symmetry.proof import double, outputs_of
from lightning_sym.symmetry.tracing.graph.capture import copied

# Quartics (pairs of units) that are solved at once.
_PAIRS = 2**18
# Units are collinear if their incoming weights differ in direction by less than this.
_COLLINEAR = 1e-9
# Units have no effect if their outgoing weights, after merging, are smaller than this fraction of all units'.
_NOTHING = 1e-12
_FREE = ("scales", "signs")


def canonical_vectors(
    network: nn.Module, vectors: Tensor, example_input: Any, *, symmetry: Symmetry | None = None, merge: bool = True
) -> Tensor:
    r"""Return one representative of each weight vector's orbit, the same for all members of an orbit.

    See docs/theory/equivalence.md, 6.3.

    Scales are balanced (:math:`\alpha_i = \sqrt{\|v_i\| / \|w_i\|}` for a hidden ReLU unit with incoming weights and
    bias :math:`w_i` and outgoing weights :math:`v_i`), signs fixed and units sorted by
    :func:`lightning_sym.symmetry.canonicalize`. The function stays, and a second pass changes nothing, up to rounding.

    In networks with one hidden layer of ReLUs (or similar), a unit that is dead (:math:`w_i = 0` or :math:`v_i = 0`)
    has no balanced form, and units whose :math:`w_i` are positive multiples of one another can share their outgoing
    weights in many ways. With ``merge`` these are dealt with first: the outgoing weights of collinear units are moved
    to the first of them, and dead units become 0. The representative is then the same for more than an orbit; for the
    two-unit network it is the same for the whole class (docs/theory/equivalence.md, 5.3).

    Args:
        network: The architecture, with buffers; its own weights do not matter.
        vectors: Shape ``[n, P]``.
        example_input: As for :func:`lightning_sym.symmetry.trace_symmetry`.
        symmetry: Symmetry of the architecture, if it has been traced already.
        merge: Whether to merge collinear units and delete dead ones, where there is one hidden layer. Deeper networks
            are not merged, and the scales of their dead units are kept.

    Returns:
        Shape ``[n, P]``, float64.

    Raises:
        ValueError: If the shapes do not fit, a weight is not finite, or merging would change the example's output.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> vectors = torch.randn(2, 13, dtype=torch.float64)
        >>> once = canonical_vectors(network, vectors, torch.randn(1, 2))
        >>> torch.allclose(canonical_vectors(network, once, torch.randn(1, 2)), once, rtol=0, atol=1e-12)
        True
    """
    exact, symmetry = _prepared(network, example_input, symmetry)
    vectors = _checked(vectors, len(weight_vector(exact))).to(weight_vector(exact))
    layers = _hidden_units(symmetry, exact) if merge else None
    if layers is not None and all(layer.scaled for layer in layers):
        arguments = on_device_of(exact, double(example_input if isinstance(example_input, tuple) else (example_input,)))
        vectors = torch.stack([_merged(vector, layers, exact, arguments) for vector in vectors])
    with unchecked():  # copies of one network
        return torch.stack(
            [
                weight_vector(canonicalize(symmetry, _loaded(exact, vector), inplace=True, check=False).network)
                for vector in vectors
            ]
        )


@dataclass(frozen=True, eq=False)
class OrbitDistances:
    """Distances of weight vectors to the orbit of a target.

    Attributes:
        distances: Shape ``[n]``, float64, in weight space.
        plain: Distances to the target itself, for comparison. Shape ``[n]``, float64.
        kind: ``"exact"``: the infimum over the group. ``"upper bound"``: the distance to a member that was found.
    """

    distances: Tensor
    plain: Tensor
    kind: Literal["exact", "upper bound"]


def orbit_distances(
    network: nn.Module,
    vectors: Tensor,
    target: Tensor,
    example_input: Any,
    *,
    symmetry: Symmetry | None = None,
) -> OrbitDistances:
    r"""Return :math:`\inf_g |\theta - g\theta^*|`, the distance of weights from the orbit of a target.

    **Exact** where every parameter belongs to at most one hidden unit (one hidden layer, dense or convolutional, or
    several side by side), for ReLU and similar: with incoming weights and bias :math:`w_i` and outgoing weights
    :math:`v_i`, a pair of units costs (docs/theory/equivalence.md, 6.2)

    .. math:: k(i, j) = \inf_{\alpha > 0} \|w_i - \alpha w^*_j\|^2 + \|v_i - v^*_j / \alpha\|^2 ,

    least at a positive root of
    :math:`\|w^*\|^2 \alpha^4 - \langle w, w^* \rangle \alpha^3 + \langle v, v^* \rangle \alpha - \|v^*\|^2`.
    It has one or three positive roots, all evaluated; the best pairing is a linear assignment. If :math:`w^* = 0` or
    :math:`v^* = 0` the infimum may be approached only as :math:`\alpha` tends to infinity or 0; its value is taken, so
    that the distance is that to the closure of the orbit. Odd activations (tanh) have a sign instead of
    :math:`\alpha`; others (GELU) neither. Parameters outside the hidden layer count unchanged.

    **Upper bound** otherwise: the distance to the result of :func:`lightning_sym.symmetry.weight_matching` with
    ``refine``, or to the target itself if that is nearer.

    A small J with a large distance means a symmetry beyond the group (docs/theory/equivalence.md, 5.3).

    Args:
        network: The architecture, with buffers; its own weights do not matter.
        vectors: :math:`\theta`, shape ``[n, P]``.
        target: :math:`\theta^*`, shape ``[P]``.
        example_input: As for :func:`lightning_sym.symmetry.trace_symmetry`.
        symmetry: Symmetry of the architecture, if it has been traced already.

    Returns:
        The distances and their kind.

    Raises:
        ValueError: If the shapes do not fit, or a weight is not finite.

    Note:
        Scales are free here; :func:`lightning_sym.symmetry.orbit_distance` bounds the distance of balanced networks.
        Exact: ``O(H^2)`` quartics and ``O(H^3)`` for the assignment, per vector and layer of H units. Distances near 0
        are right to about 1e-15 times the norm of the weights; only if two units differ by less than about 1e-8 may
        they be paired wrongly, at a price of that size.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
        >>> symmetry = trace_symmetry(network, torch.randn(1, 2))
        >>> other = weight_vector(symmetry.act(symmetry.sample(), network))
        >>> found = orbit_distances(network, other[None], weight_vector(network), torch.randn(1, 2))
        >>> found.kind, bool(found.distances[0] < 1e-12)
        ('exact', True)
    """
    exact, symmetry = _prepared(network, example_input, symmetry)
    own = weight_vector(exact)
    vectors, target = _checked(vectors, len(own)).to(own), _checked(target[None], len(own))[0].to(own)
    plain = (vectors - target).norm(dim=1)
    layers = _hidden_units(symmetry, exact)
    if layers is not None:
        outside = torch.ones(len(own), dtype=torch.bool)
        for layer in layers:
            outside[layer.entries.flatten()] = False
        squares = (vectors - target)[:, outside].square().sum(1)
        for layer in layers:
            squares = squares + layer.distances(vectors, target)
        return OrbitDistances(squares.sqrt(), plain, "exact")
    reference = _loaded(exact, target)
    distances = []
    for vector, identity in zip(vectors, plain.tolist(), strict=True):
        with unchecked():  # copies of one network
            start = _loaded(exact, vector)
            match = weight_matching(symmetry, start, reference, refine=True)
        distances.append(min(match.distance_after, identity))
    return OrbitDistances(torch.tensor(distances, dtype=torch.float64), plain, "upper bound")


def _prepared(network: nn.Module, example_input: Any, symmetry: Symmetry | None) -> tuple[nn.Module, Symmetry]:
    """Return a copy in float64 on the CPU, and its symmetry."""
    exact = in_precision(copied(network).to("cpu"), torch.float64).eval()
    if symmetry is None:
        symmetry = trace_symmetry(exact, on_device_of(exact, double(example_input)))
    symmetry.require(exact)
    return exact, symmetry


def _checked(vectors: Tensor, size: int) -> Tensor:
    if vectors.ndim != 2 or vectors.shape[1] != size:
        raise ValueError(
            f"weight vectors must have {size} entries, as weight_vector makes them, got shape {list(vectors.shape)}."
        )
    if not bool(torch.isfinite(vectors).all()):
        raise ValueError("a weight vector holds values that are not finite; leave such vectors out.")
    return vectors.detach()


def _loaded(network: nn.Module, vector: Tensor) -> nn.Module:
    """Return a copy of a network with other trainable parameters."""
    result = copied(network)
    nn.utils.vector_to_parameters(vector.clone(), trainable(result).values())
    return result


@dataclass(frozen=True, eq=False)
class _Layer:
    """Hidden units that share no entry of the weight vector.

    Attributes:
        entries: Which entries of the weight vector belong to each unit, in one order for all. Shape [H, E].
        incoming: Which of these a scale multiplies; it divides the others. Shape [E], bool.
        flips: Their factors under a free sign, -1 or 1. Shape [E].
        scaled: Whether each unit has a free scale.
        signed: Whether each unit has a free sign.
    """

    entries: Tensor
    incoming: Tensor
    flips: Tensor
    scaled: bool
    signed: bool

    def distances(self, vectors: Tensor, target: Tensor) -> Tensor:
        """Return the least squared distances [n] over permutations, signs and scales of the target's units."""
        chunk = max(1, _PAIRS // len(self.entries) ** 2)
        return torch.cat(
            [self._chunk(part[:, self.entries], target[self.entries]) for part in torch.split(vectors, chunk)]
        )

    def _chunk(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """Return the least squared distances of units [n, H, E] to those of the target [H, E]."""
        cost, scale = self._pairs(ours, theirs)
        flip = torch.zeros_like(cost, dtype=torch.bool)
        if self.signed:
            flipped, scale_flipped = self._pairs(ours, theirs * self.flips)
            flip = flipped < cost
            cost, scale = torch.where(flip, flipped, cost), torch.where(flip, scale_flipped, scale)
        squares = []
        for mine, table, scales, flips in zip(ours, cost, scale, flip, strict=True):
            one, two = (torch.from_numpy(index) for index in linear_sum_assignment(table.numpy()))
            chosen = scales[one, two][:, None]
            factor = torch.where(self.incoming, chosen, 1 / chosen)
            factor = torch.where(flips[one, two][:, None], self.flips * factor, factor)
            # An infinite factor multiplies zeros only. Differences are recomputed, as the costs cancel near 0.
            moved = torch.where(theirs[two] == 0, 0.0, factor * theirs[two])
            squares.append(float((mine[one] - moved).square().sum()))
        return torch.tensor(squares, dtype=torch.float64)

    def _pairs(self, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Return for all pairs of units the least squared distance and the scale that gives it, both [n, H, H]."""
        inner = [
            torch.einsum("nie,je->nij", ours[..., part], theirs[:, part]) for part in (self.incoming, ~self.incoming)
        ]
        squares = [theirs[:, part].square().sum(1).expand_as(inner[0]) for part in (self.incoming, ~self.incoming)]
        fixed = ours.square().sum(2)[:, :, None]
        if not self.scaled:
            return fixed - 2 * (inner[0] + inner[1]) + squares[0] + squares[1], torch.ones_like(inner[0])
        values, scales = best_scales(inner[0], squares[0], inner[1], squares[1])
        return values + fixed, scales


def _hidden_units(symmetry: Symmetry, network: nn.Module) -> list[_Layer] | None:
    """Return the layers of hidden units, if every entry of the weight vector belongs to at most one unit."""
    structure = symmetry.structure
    continuous = any(own.dimension for own in symmetry.factors if own.rung < Rung.EACH)
    if continuous or structure.blocks or structure.absorbed:
        return None
    if any(len(slot.axes) != 1 for slot in structure.slots):
        return None
    # Each scale and each sign must be that of one unit, and nothing be moved by two of them.
    if any(sum(g.size * getattr(g, kind) for g in symmetry.groups) != getattr(symmetry, kind) for kind in _FREE):
        return None
    if not all(own.acts_apart for own in symmetry.factors):
        return None
    own = weight_vector(network)
    numbers = weight_tensors(network, torch.arange(len(own)))
    mirror = symmetry.identity()
    mirror.sign.fill_(-1.0)
    mirrored = symmetry.act_on(mirror, weight_tensors(network, torch.ones_like(own)))
    flips = torch.cat([tensor.flatten() for tensor in mirrored.values()])
    layers: list[_Layer] = []
    for group in symmetry.groups:
        alike = group.size == 1 or (group.movable and int(group.cells.max()) == 0)
        simple = max(group.scales, group.signs) <= 1 and all(o.tensor in numbers for o in group.occurrences)
        if not alike or not simple:
            return None
        places = [numbers[o.tensor].movedim(o.axis, 0)[o.positions].flatten(1) for o in group.occurrences]
        counts = torch.tensor([place.shape[1] for place in places])
        exponents = torch.tensor([o.exponent for o in group.occurrences]).repeat_interleave(counts)
        entries = torch.cat(places, 1)
        if not bool((exponents.abs() == group.scales).all()) or not bool((flips[entries] == flips[entries[0]]).all()):
            return None
        layers.append(_Layer(entries, exponents >= 0, flips[entries[0]], group.scales == 1, group.signs == 1))
    every = [entry for layer in layers for entry in layer.entries.flatten().tolist()]
    return layers if len(set(every)) == len(every) else None


def _merged(vector: Tensor, layers: list[_Layer], network: nn.Module, arguments: tuple[Any, ...]) -> Tensor:
    """Move the outgoing weights of collinear units to the first of them, and set units without effect to 0."""
    given, vector = vector, vector.clone()
    for layer in layers:
        incoming, outgoing = vector[layer.entries[:, layer.incoming]], vector[layer.entries[:, ~layer.incoming]]
        norms = incoming.norm(dim=1)
        # Units with incoming weights 0 are apart from all others, and from one another.
        directions = incoming / torch.where(norms > 0, norms, 1.0)[:, None]
        apart = torch.cdist(directions, directions, compute_mode="donot_use_mm_for_euclid_dist")
        alike = (apart < _COLLINEAR) & (norms > 0) & (norms > 0)[:, None]
        first = torch.where(alike.any(1), alike.int().argmax(1), torch.arange(len(norms)))
        amounts = outgoing * norms[:, None]
        sums = torch.zeros_like(amounts).index_add_(0, first, amounts)
        alive = sums.norm(dim=1) > _NOTHING * amounts.norm(dim=1).sum()
        vector[layer.entries[:, layer.incoming]] = incoming * alive[:, None]
        vector[layer.entries[:, ~layer.incoming]] = torch.where(
            alive[:, None], sums / torch.where(alive, norms, 1.0)[:, None], 0.0
        )
    if not torch.equal(vector, given):
        with torch.no_grad():
            before, after = (outputs_of(_loaded(network, weights), Call(arguments)) for weights in (given, vector))
        if not all(torch.allclose(*pair, rtol=1e-7, atol=1e-9) for pair in zip(before, after, strict=True)):
            raise ValueError(
                "merging collinear units changed the outputs on the example: units do not add up in this network; pass "
                "merge=False."
            )
    return vector
