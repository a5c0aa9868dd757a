"""The factors of a symmetry group: kinds of changes with one interface. Each kind is a group.

An element is a product of one part per factor. If two factors do not commute, the one that acts later is *outer*. It
maps the inner one into itself: with parts g and n, :math:`g n g^{-1}` is a part of the inner factor again. One formula
composes all kinds (docs/theory/intertwiners.md, 4): with g the outer parts of the first element, part f of ``second
first`` is the product of :math:`g^{-1} f_2 g` and :math:`f_1`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints
from lightning_sym.symmetry.elements import AxisGroup, Tap
from lightning_sym.symmetry.group.element import Element, Part
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung, Wanted
from lightning_sym.symmetry.group.norms import Plan
from lightning_sym.symmetry.group.search import MatrixPlace, Search, Seen
from lightning_sym.symmetry.rearranging import Summand
from lightning_sym.symmetry.solving.structure import Slot, Structure

P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Draw:
    """Options for drawing a random element; see :meth:`Symmetry.sample`.

    Each factor takes the attributes that are about it: discrete ones `permutations` or `signs`, continuous ones
    `mixing` or `shifts`, or `scale` alone. With all of these off and `scale` 0 every part is the identity.

    Attributes:
        generator: Where randomness comes from; None for the global generator.
        scale: Standard deviation of logarithms of magnitudes, and of shifts. At least 0.
        permutations: Whether units are permuted.
        signs: Whether signs change.
        mixing: Whether matrices, rotations, rank-one maps and phases are drawn.
        shifts: Whether shifts are drawn.
        cycles: Whether all units that can move do, in one cycle per cell.
        most: How many units a rotation changes at most; None for all.
        closed: By factor, the numbers of matrices that stay the identity, see :meth:`Factor.closed`; None for those of
            the network that was traced.
    """

    generator: torch.Generator | None
    scale: float = 0.5
    permutations: bool = True
    signs: bool = True
    mixing: bool = True
    shifts: bool = True
    cycles: bool = False
    most: int | None = None
    closed: Mapping[str, frozenset[int]] | None = None

    def keeps(self, factor: str) -> frozenset[int]:
        """Return the numbers of a factor's matrices that remain the identity."""
        return (self.closed or {}).get(factor, frozenset())


# So many independent signs leave nothing to chance: all of them are rarely equal to those of a smaller group.
MANY = 8


def passes(gain: Tensor) -> bool:
    """Return whether matrices pass a gain with diagonal D, so that D A D^-1 exists: no entry is zero or infinite."""
    return bool((gain.isfinite() & (gain != 0)).all())


class Gains(dict[str, Tensor]):
    """The gains around rotations and rank-one maps, by name, in double precision."""

    def learn(self, name: str, tensors: Mapping[str, Tensor], what: str, at: Tensor | None = None) -> None:
        """Keep a gain, before it changes.

        Args:
            name: Its name; if it is not among the tensors, the error comes at its first use.
            tensors: Parameters, by name.
            what: The kind of map between the gains, for the message.
            at: The entries that must not be zero; all if None.

        Raises:
            ValueError: If such an entry is zero.
        """
        if name in self or name not in tensors:
            return
        gain = tensors[name].detach().to("cpu", torch.float64, copy=True).reshape(-1)
        require_passing(gain if at is None else gain[at], name, what)
        self[name] = gain

    def of(self, name: str, what: str) -> Tensor:
        """Return a gain.

        Raises:
            ValueError: If it is not known.
        """
        if name not in self:
            raise ValueError(
                f"a {what} acts after the gain {name}, which is missing; expected the network itself along with its "
                f"tensors, or an element without {what}s: sample(mixing=False)"
            )
        return self[name]


def require_passing(gain: Tensor, name: str, what: str) -> None:
    """Check that matrices pass a gain.

    Args:
        gain: The entries of the gain that are used.
        name: Its name.
        what: The kind of map between the gains.

    Raises:
        ValueError: If an entry is zero or infinite.
    """
    if not passes(gain):
        raise ValueError(
            f"the gain {name} holds a zero, through which no {what} passes; expected gains other than zero, an element "
            f"drawn by a symmetry that was traced at these weights, or one without {what}s: sample(mixing=False)"
        )


class LinearAction(ABC):
    """The action of one part of an element by matrices, on single axes."""

    def learn(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027 (most have no gains)
        """Keep the gains around its maps, if there are any.

        Raises:
            ValueError: If a gain holds a zero.
        """

    @abstractmethod
    def acts_at(self, slot: Slot) -> bool:
        """Return whether it changes entries of a slot."""

    @abstractmethod
    def on_axis(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Return a tensor after the action on one of its axes, as at the slot."""

    def require(self, tap: Tap, slot: Slot) -> None:  # noqa: B027 (most act on every value)
        """Check that it acts on a value inside the network by a matrix.

        Raises:
            ValueError: If it does not.
        """


class Factor(ABC, Generic[P]):
    """One factor of a symmetry group. Subclasses are listed, from the outermost inwards, in `group/kinds.py`.

    Parts act in the reverse order of that list. All factors before a factor map it into itself, and it maps all factors
    after it into themselves. If it does not commute with one of these, the method `carried` of that one has to take it
    into account.

    Canonical forms call :meth:`canonical`. Without it, two points of an orbit may have different canonical forms (with
    a note) and a distance above 0. Matching calls :meth:`best_match`.

    Args:
        group: All factors of the group.

    Attributes:
        name: The name of its part in elements.
        rung: When canonical forms ask it.
        freedom: The option of :func:`weight_matching` that allows it to mix units.
        permutes: Whether its matrices hold the permutations of the units that they mix, so that these are not assigned.
        late: Whether matching asks it when all else has settled: before, assignments can still recognise units.
        by_signs: Whether its form depends on signs: the factors of the last rung are asked again when these are found.
        keeps_norms: Whether its parts change no norm of the weights.
        bounded: Whether lower bounds of distances take it into account, see :meth:`veiled` and :meth:`invariants`.
    """

    name: ClassVar[str]
    rung: ClassVar[Rung] = Rung.EACH
    freedom: ClassVar[str] = "matrices"
    permutes: ClassVar[bool] = False
    late: ClassVar[bool] = False
    by_signs: ClassVar[bool] = False
    keeps_norms: ClassVar[bool] = False
    bounded: ClassVar[bool] = False

    def __init__(self, group: "Factors") -> None:
        self.group, self.structure = group, group.structure

    # The group.

    @abstractmethod
    def identity(self) -> P:
        """Return the part that changes nothing."""

    @abstractmethod
    def is_identity(self, own: P) -> bool:
        """Return whether a part changes nothing."""

    @abstractmethod
    def sample(self, draw: Draw) -> P:
        """Draw a random part."""

    def closed(self, tensors: Mapping[str, Tensor]) -> frozenset[int]:
        """Return the numbers of its matrices that cannot act at some weights, as gains around them hold zeros.

        Permutations carry zeros to all units that a matrix mixes. So a matrix is closed with all of its entries: the
        rest is a group, and its elements act in any order.

        Args:
            tensors: Parameters and buffers, by name.
        """
        return frozenset()

    def unlike(self, own: P, other: P) -> P:
        """Return a random part, changed so that it and another one together leave as little as possible alone."""
        return own

    @property
    def chances(self) -> int:
        """The number of choices with so few outcomes that one random part may equal a part of a smaller group."""
        return 0

    def sample_at(self, seen: Slot, values: "Factor[P]", draw: Draw) -> P:
        """Draw a random part that changes the units that are seen in one place, and no others.

        Args:
            seen: Positions of units in a value inside the network.
            values: This factor of the group on values.
            draw: Options for drawing.
        """
        return self.identity()

    @abstractmethod
    def compose(self, later: P, earlier: P) -> P:
        """Return the product of two parts; `earlier` acts first."""

    @abstractmethod
    def inverse(self, own: P) -> P:
        """Return the inverse of a part."""

    def carried(self, own: P, by: Element, back: Element) -> P:
        """Return :math:`g n g^{-1}` for a part n and the outer parts g of an element.

        By default that is n: right where all outer factors commute with this one. A permutation seldom does; where it
        brings the content of each position from is `self.group.source(by.permutation)`.

        Args:
            own: n.
            by: The element; only its outer parts count.
            back: Its inverse, as far as its outer parts go.
        """
        return own

    # Its size.

    @property
    def dimension(self) -> int:
        """The dimension of its continuous part."""
        return 0

    @property
    def told(self) -> list[str]:
        """The parameters that rules have reported to it, see `Trace.tell`."""
        return [name for factor, name in self.structure.told if factor == self.name]

    @property
    def log_order(self) -> float:
        """Natural logarithm of the order of its discrete part."""
        return 0.0

    def redundant(self, parameters: Collection[str]) -> int:
        """Return the number of its tangents that are combinations of others of the same factor or of scales.

        Args:
            parameters: The names of parameters.
        """
        return 0

    @property
    def acts_apart(self) -> bool:
        """Whether no two of its generators multiply the same position."""
        return self.forms is None or not bool((np.diff(self.forms.indptr) > 1).any())

    @property
    def forms(self) -> sparse.csr_matrix | None:
        """Exponents, if it multiplies units by powers of generators. Shape (positions of all slots, generators)."""
        return None

    def dimension_at(self, offsets: Collection[int]) -> int:
        """Return the dimension of the matrices that act at some slots, given by their offsets."""
        return 0

    def describe(self) -> Iterable[str]:
        """Yield lines that describe it, for `print(symmetry)`."""
        return ()

    # Its action.

    def linear_action(self, own: P, gains: Gains) -> LinearAction | None:
        """Return the action of a part by matrices; None if it has none."""
        return None

    def multipliers(self, own: P) -> Floats | None:
        """Return the multiplier of a part at each position of all slots, before it moves; None for nothing."""
        return None

    def entries(self, own: P, name: str) -> Tensor | None:
        """Return the multipliers of a part for single entries of a tensor, after all additions; None for nothing.

        An optimiser's averages are multiplied by powers of these.

        Args:
            own: The part.
            name: The name of the tensor.

        Returns:
            A tensor that broadcasts to the given one, float64.
        """
        return None

    def added(self, own: P, tensors: Mapping[str, Tensor]) -> Mapping[str, Sequence[Summand]]:
        """Return the additions of a part to tensors before anything else acts, by name; they broadcast to these.

        The additions of all factors are computed from the tensors of the unchanged network, and then summed. An
        optimiser's state does not see them. So this is for numbers that do not depend on additions of other factors to
        the same tensor; multipliers of units belong into :meth:`multipliers`.

        Args:
            own: The part.
            tensors: Parameters and buffers, by name.
        """
        return {}

    def shown(self, own: P, tap: Tap, tensors: Mapping[str, Tensor] | None) -> Tensor | None:
        """Return the addition of a part to a value inside the network before anything else acts; None for nothing.

        Args:
            own: The part.
            tap: The value.
            tensors: The network's parameters before, by name; None where nobody has them.
        """
        return None

    def tangents(self, parameters: Mapping[str, Floats], tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
        """Return the directions along which it moves parameters only.

        Args:
            parameters: By name, float64.
            tensors: Parameters and buffers, by name.

        Returns:
            Shape (numbers of all parameters, directions).
        """
        return sparse.csr_matrix((sum(own.size for own in parameters.values()), 0))

    # Canonical forms.

    def concerned(self, wanted: Wanted) -> bool:
        """Return whether it is asked for its part of a form; by default as its rung says.

        Args:
            wanted: Which form is wanted.
        """
        if self.rung < Rung.EACH:  # continuous
            return wanted.scales is not None and self.dimension > 0
        return {Rung.SIGNS: wanted.signs, Rung.ORDER: wanted.order}.get(self.rung, True)

    def canonical(self, state: Gathered) -> Canonical:
        """Return the part that brings weights to the same place from all of an orbit, as far as this factor can.

        It is asked when its `rung` says. By default it has no form.

        Args:
            state: The weights, and sums gathered from them.
        """
        return Canonical({})

    def left(self, wanted: Wanted, tensors: Mapping[str, Tensor]) -> Iterable[str]:
        """Yield notes on the unchanged parts of a form.

        Args:
            wanted: Which form was wanted.
            tensors: Parameters and buffers, by name.
        """
        return ()

    # Matching.

    def mixes(self, orbit: int) -> bool:
        """Return whether it acts by matrices on the units of an orbit, where they are."""
        return False

    def able(self, orbit: int, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether it does so at some parameters."""
        return self.mixes(orbit)

    def best_match(self, target: Mapping[str, Tensor], current: Mapping[str, Tensor], orbit: int) -> P | None:
        """Return the part that brings parameters nearest to others, of those that change no norm; None if it has none.

        It acts on the units of one orbit, where they are.

        Args:
            target: Parameters of the reference, by name.
            current: Those of the network that is moved, gains included.
            orbit: The number of the orbit.
        """
        return None

    def seen(
        self, groups: Sequence[AxisGroup], values: Structure, networks: Sequence[Mapping[str, Tensor]]
    ) -> Iterable[Seen]:
        """Yield the values that show the units that it mixes, if the best part is to be found by activations.

        Args:
            groups: The axis groups.
            values: The group on values inside the network.
            networks: Parameters of all networks that are compared, by name.
        """
        return ()

    def best_seen(self, products: Mapping[int, Tensor]) -> P:
        """Return the part that brings activations nearest to others.

        Args:
            products: By member, the covariances of the reference's units (rows) and those that are moved.
        """
        return self.identity()

    def pair_gains(self, orbit: int, gained: Callable[[P | None], Tensor]) -> Tensor:
        """Return the gains of replacing a unit of an orbit by another, as :meth:`gains_of_blocks` needs them.

        Args:
            orbit: The number of the orbit.
            gained: Returns the gains of all pairs after a part, or without. The result has shape (units, units).
        """
        return gained(None)

    def gains_of_blocks(self, table: Tensor, places: Ints, mixing: bool) -> Floats:
        """Return the gains of replacing a block by another, with the best mixing of members.

        Args:
            table: The result of :meth:`pair_gains`.
            places: The members' places in the orbit. Shape (blocks, members).
            mixing: Whether they may be mixed.

        Returns:
            Shape (blocks, blocks).
        """
        raise NotImplementedError(f"{self.name} mixes units; expected it to define the gains of blocks")

    def mixing_blocks(self, own: P, table: Tensor, units: Ints, places: Ints, order: Ints) -> P:
        """Return a part that mixes the members of blocks in the best way, before the blocks are permuted.

        Args:
            own: The part.
            table: The result of :meth:`pair_gains`.
            units: Those of the orbit. Shape (units,).
            places: The members' places among these. Shape (blocks, members).
            order: Which block comes to each place. Shape (blocks,).
        """
        return own

    def settled_signs(
        self, orbit: int, target: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> frozenset[int] | None:
        """Return the columns of an orbit's table of signs that are settled; None if its signs are sought as usual.

        Args:
            orbit: The number of the orbit.
            target: Parameters of the reference, by name.
            current: Those of the network that is moved.
        """
        return None

    def improve(self, search: Search) -> bool:
        """Try additional steps; return whether the networks are nearer to each other."""
        return False

    def is_even(self, one: P, two: P) -> bool:
        """Return whether the parts that balance two networks hardly change the proportions of units.

        By default where balancing asks for none, or finds nothing to do.
        """
        idle = self.rung >= Rung.EACH or not self.concerned(Wanted("balanced", order=False))
        return idle or (self.is_identity(one) and self.is_identity(two))

    def rigid(self, own: P) -> P:
        """Return the remainder of a part if no norm may change."""
        return own if self.keeps_norms else self.identity()

    @property
    def hides_units(self) -> bool:
        """Whether units cannot be recognised before it has acted, so that descents may miss the nearest network."""
        return (self.permutes or self.late) and any(map(self.mixes, range(len(self.structure.orbits))))

    def put_in_proportion(self, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor], back: P) -> P | None:
        """Return a part that acts before `back` and fixes norms that the reference determines too weakly, or None.

        Args:
            theirs: Tensors of the reference, by name.
            own: Those of a balanced network, its units in the places of the reference's.
            back: The part that brings a balanced reference back.
        """
        return None

    def refined(self, target: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> P | None:
        """Return the part that brings parameters nearest to others, regardless of norms; None if it has none.

        Args:
            target: Parameters of the reference, by name.
            current: Parameters and buffers of the network that is moved.
        """
        return None

    # Bounds of distances.

    def unbounded(self, networks: Sequence[Mapping[str, Tensor]], balanced: bool) -> tuple[Sequence[str], bool]:
        """Return notes on omissions of bounds of the distance of orbits, and whether no lower bound is known.

        Args:
            networks: Parameters of both, in their compared form, by name.
            balanced: Whether both are balanced.
        """
        if not self.bounded and (self.dimension or self.log_order):
            return [f"no lower bound is known for {self.name} parts"], True
        return (), False

    def invariants(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return the invariants of tensors under all parts, by name: lists of numbers, compared in their order.

        Args:
            tensors: Parameters, by name, float64.
        """
        return {}

    def veiled(self, signs: bool) -> tuple[set[str], set[str]]:
        """Return the tensors that bounds ignore, and those that enter by absolute values only.

        Args:
            signs: Whether signs may change.
        """
        return set(), set()

    # Moves that have a name.

    def brought_to_one(self, rows: Ints, values: Floats) -> tuple[P, Bools] | None:
        """Return a part that scales values to 1, as far as it can, and a mask of these; None if it multiplies nothing.

        Args:
            rows: Positions of the values among those of all slots. Shape (values,).
            values: Not 0. Shape (values,).
        """
        return None

    def taken_off(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> tuple[P, Bools] | None:
        """Return a part that brings tensors to 0 as far as it can, and a mask of entries; None if it adds nothing.

        Args:
            tensors: Parameters and buffers, by name, float64, on the CPU.
            names: The tensors to bring to 0.
        """
        return None

    def centred(self, tensors: Mapping[str, Tensor], names: Collection[str]) -> tuple[P, set[str]] | None:
        """Return a part that removes the mean of the outputs of some tensors, and their names; None if it adds nothing.

        Args:
            tensors: Parameters and buffers, by name, float64, on the CPU.
            names: The tensors that write.
        """
        return None

    def balanced_heads(self, tensors: Mapping[str, Tensor]) -> Canonical | None:
        """Return a part that gives values and outputs, queries and keys of heads equal norms; None if it mixes none.

        Args:
            tensors: Parameters, by name, float64.
        """
        return None

    # Other queries.

    def matrix_places(self) -> Iterable[MatrixPlace]:
        """Yield the places of its matrices; :class:`SoftMaps` may replace these."""
        return ()

    @property
    def gains(self) -> frozenset[str]:
        """The tensors around its maps that it divides by."""
        return frozenset()

    # Coordinates near the identity.

    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its coordinates, which are 0 at the identity, by name."""
        return {}

    def of_orbit(self, orbit: int, name: str) -> Tensor:
        """Return a mask of the entries of coordinates that belong to the units of an orbit.

        Args:
            orbit: The number of the orbit.
            name: The name of the coordinates.
        """
        return torch.zeros(self.coordinates()[name], dtype=torch.bool)

    def at(self, coordinates: Mapping[str, Tensor]) -> P:
        """Return the part at some coordinates: their exponential.

        Args:
            coordinates: By name, of the shapes that :meth:`coordinates` gives, float64.
        """
        return self.identity()

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative of a loss of the moved weights with respect to the coordinates, at 0.

        Args:
            weights: Parameters and buffers, by name, float64.
            gradients: The loss's derivatives by some of them, by name.
        """
        return {}

    def within(self, own: P, budget: float, condition: float) -> P:
        """Return the nearest part with bounded magnitudes.

        Args:
            own: The part.
            budget: Bound of the absolute logarithms of scales and of singular values.
            condition: Bound of the logarithms of condition numbers.
        """
        return own

    def inwards(self, own: P, slopes: Mapping[str, Tensor], budget: float, condition: float) -> Mapping[str, Tensor]:
        """Return derivatives of a loss that falls, without what would lead out of bounds that a part has reached.

        Args:
            own: The part.
            slopes: Derivatives with respect to coordinates, by name.
            budget: See :meth:`within`.
            condition: See :meth:`within`.

        Returns:
            Those of the derivatives that differ, by name.
        """
        return {}

    def dual(self, own: P) -> P:
        """Return the part that acts on weights as a part acts on derivatives; itself, if it is orthogonal."""
        return own

    # Files.

    def check(self, own: P) -> None:
        """Check that a part is one of this factor.

        Raises:
            ValueError: If shapes, types or numbers are not those of a part.
        """
        same = self.identity()
        expected, found = members(same), members(own)
        if isinstance(own, tuple) != isinstance(same, tuple) or len(expected) != len(found):
            raise ValueError(f"{self.name} has {len(found)} tensors; expected {len(expected)}")
        for one, two in zip(expected, found, strict=True):
            fits = two.shape == one.shape or (isinstance(own, tuple) and self._fits(two))
            if not (fits and two.dtype == one.dtype and bool(two.isfinite().all())):
                raise ValueError(
                    f"{self.name} holds a tensor of shape {list(two.shape)} and type {two.dtype}, or numbers that are "
                    f"not finite; expected finite numbers of shape {list(one.shape)} and type {one.dtype}"
                )

    def _fits(self, member: Tensor) -> bool:
        """Return whether a member of a part has another allowed shape than the identity's."""
        return False


def members(part: Part) -> tuple[Tensor, ...]:
    """Return the tensors of a part."""
    return part if isinstance(part, tuple) else (part,)


class Additive(Factor[Tensor]):
    """A factor with vectors as parts, composed by addition."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of entries of a part."""

    def identity(self) -> Tensor:
        """Return zeros."""
        return torch.zeros(self.size, dtype=torch.float64)

    def is_identity(self, own: Tensor) -> bool:
        """Return whether all entries are zero."""
        return not bool(own.any())

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        """Return the sum."""
        return later + earlier

    def inverse(self, own: Tensor) -> Tensor:
        """Return the negative."""
        return -own


_PLANS: "WeakKeyDictionary[Factors, Plan]" = WeakKeyDictionary()  # which no copy and no file takes along


class Factors:
    """All factors of one group, from the outermost, which acts last, to the innermost.

    Args:
        structure: The group, as arrays.
        kinds: The classes of the factors.
        parameters: The names of the parameters among the tensors.
    """

    def __init__(
        self, structure: Structure, kinds: Sequence[type[Factor[Any]]], parameters: frozenset[str] = frozenset()
    ) -> None:
        self.structure, self.parameters = structure, parameters
        self._by_name = {kind.name: kind(self) for kind in kinds}

    def __iter__(self) -> Iterator[Factor[Any]]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Factor[Any]:
        return self._by_name[name]

    def source(self, permutation: Tensor) -> Ints:
        """Return for each position of all slots its source under a permutation of units."""
        structure = self.structure
        source, image = np.arange(structure.magnitudes.shape[0]), structure.comes(permutation.numpy())
        for orbit, (units, columns) in enumerate(zip(structure.orbits, structure.columns, strict=True)):
            if structure.copies_of(orbit) or not np.array_equal(image[units], units):
                source[columns] = structure.arriving(orbit, "columns", image)
        return source

    @property
    def plan(self) -> Plan:
        """The plan for sums over slices, made at the first call."""
        if self not in _PLANS:
            _PLANS[self] = Plan(self.structure, self.parameters)
        return _PLANS[self]

    @property
    def inwards(self) -> list[Factor[Any]]:
        """The factors in the order of their action."""
        return [*self][::-1]

    def identity(self, group: str) -> Element:
        """Return the identity; `group` is the fingerprint of the symmetry."""
        return Element(group, {factor.name: factor.identity() for factor in self})

    def compose(self, second: Element, first: Element) -> Element:
        """Return the product of two elements; `first` acts first."""
        parts, undoing = {}, _Undoing(self, first)
        for factor in self:
            later, earlier = second.parts[factor.name], first.parts[factor.name]
            if not factor.is_identity(later):
                pulled = factor.carried(later, undoing.outside(factor), first)
                earlier = pulled if factor.is_identity(earlier) else factor.compose(pulled, earlier)
            parts[factor.name] = earlier
        return Element(first.group, parts)

    def inverse(self, element: Element) -> Element:
        """Return the inverse of an element."""
        return _Undoing(self, element).outside(None)

    def is_identity(self, element: Element) -> bool:
        """Return whether an element changes nothing."""
        return all(factor.is_identity(element.parts[factor.name]) for factor in self)

    def sample(self, group: str, draw: Draw) -> Element:
        """Draw an element."""
        return Element(group, {factor.name: factor.sample(draw) for factor in self})

    @property
    def chances(self) -> int:
        """The number of choices with few outcomes; see :attr:`Factor.chances`."""
        return sum(factor.chances for factor in self)

    def closed(self, tensors: Mapping[str, Tensor]) -> dict[str, frozenset[int]]:
        """Return the numbers of matrices that cannot act at some weights, by factor; see :meth:`Factor.closed`."""
        found = {factor.name: factor.closed(tensors) for factor in self}
        return {name: numbers for name, numbers in found.items() if numbers}

    def of(self, group: str, tensors: Mapping[str, Tensor], *, check: bool = True) -> Element:
        """Return the element that holds some tensors, as :meth:`Element.tensors` gives them.

        Args:
            group: The fingerprint of the symmetry.
            tensors: The tensors, by name.
            check: Whether to check shapes, types and numbers.

        Raises:
            ValueError: If they are not those of an element.
        """
        left, parts = dict(tensors), dict[str, Part]()
        for factor in self:
            same = factor.identity()
            if isinstance(same, Tensor):
                names = [factor.name]
            else:
                names = [f"{factor.name}.{number}" for number in range(len(same))]
            if missing := [name for name in names if name not in left]:
                raise ValueError(
                    f"there is no {missing[0]} among the tensors of the element; expected those of an element of this "
                    "symmetry, written by this version"
                )
            found = tuple(left.pop(name).detach().cpu() for name in names)
            parts[factor.name] = found[0] if isinstance(same, Tensor) else found
            if check:
                factor.check(parts[factor.name])
        if left:
            raise ValueError(f"no element of this symmetry has {', '.join(sorted(left))}")
        return Element(group, parts)


class _Undoing:
    """The inverse of an element, computed from the outermost part inwards, as far as needed.

    Args:
        factors: Those of the group.
        element: The element.
    """

    def __init__(self, factors: Factors, element: Element) -> None:
        self._element, self._left = element, [*factors.inwards]
        self._found = factors.identity(element.group)

    def outside(self, factor: Factor[Any] | None) -> Element:
        """Return the inverse of the parts outside of a factor; of all for None."""
        while self._left and self._left[-1] is not factor:
            own = self._left.pop()
            part = self._element.parts[own.name]
            if not own.is_identity(part):  # (g n)^-1 = g^-1 (g n^-1 g^-1)
                undone = own.carried(own.inverse(part), self._element, self._found)
                self._found = self._found.replaced(**{own.name: undone})
        return self._found
