"""Labels, and the constraints that operations of a network place on its symmetries."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Floats, Ints, distinct_columns, rising

UNSET = -1  # the tag of a parameter's position until the first operation determines it


def counted(reason: str, atom: Ints, what: str = "") -> str:
    """Add the number of fixed units to a reason."""
    units = len(rising(atom))
    of_what = f"the {what}{'s' * (units != 1)} of " if what else ""
    return f"{reason} (fixes {of_what}{units} unit{'s' * (units != 1)} here)"


@dataclass(frozen=True, eq=False)
class Label:
    """The units and scales that act on the elements of a tensor.

    Attributes:
        axes: The tensor's axes that index the label, in order; () if one unit fills the whole tensor.
        atom: For each position on these axes, its unit, which permutations move.
        tag: A number that distinguishes several positions of one unit (after flattening: the place in the image).
        scale: The variable that rescales the position.
    """

    axes: tuple[int, ...]
    atom: Ints
    tag: Ints
    scale: Ints

    @property
    def size(self) -> int:
        """The number of positions."""
        return self.atom.size

    @property
    def parts(self) -> tuple[Ints, Ints, Ints]:
        """The arrays of atoms, tags and scales."""
        return self.atom, self.tag, self.scale

    def on(self, axes: tuple[int, ...]) -> "Label":
        """Return the same label on other axes of the same sizes."""
        return Label(axes, self.atom, self.tag, self.scale)

    def moved(self, axes: tuple[int, ...], function: Callable[[Ints], Ints]) -> "Label":
        """Return a label on other axes, with positions moved by a function of arrays."""
        return Label(axes, *(np.asarray(function(part)) for part in self.parts))

    def at(self, where: Any) -> "Label":
        """Select positions by an index or a mask; the result has no axes."""
        return self.moved((), lambda part: part[where])

    def scaled_by(self, scale: Ints) -> "Label":
        """Return the same units with other scales."""
        return Label(self.axes, self.atom, self.tag, scale)

    def take(self, index: Ints) -> "Label":
        """Select positions of a label on one axis by an index array; the result has the axes 0, 1, ... of the index."""
        return self.moved(tuple(range(index.ndim)), lambda part: part[index])


@dataclass
class Sighting:
    """An occurrence of labels: on an axis of a parameter (`tensor`), or in a value of the graph.

    Attributes:
        label: One entry per position.
        tensor: The name of the parameter, buffer or named value; None for unnamed values.
    """

    label: Label
    tensor: str | None = None


@dataclass(frozen=True, eq=False)
class HalfPeriod:
    """Half a period of the functions that read a bias.

    Attributes:
        size: Half a period, as an offset of the bias; NaN if readers differ.
        standing: The scale variables of the bias. Shape (size of the bias,).
        flip: The sign variables that represent the sign change. Shape (size of the bias,).
        reflects: Whether half a period is added with each sign change of the bias.
    """

    size: float
    standing: Ints
    flip: Ints
    reflects: bool = False


@dataclass
class Constraints:
    """Variables and constraints. A `scale` variable represents one log-magnitude and one sign."""

    atoms: int = 0
    scales: int = 0
    tags: dict[tuple[int, int], int] = field(default_factory=dict)
    merges: list[tuple[Ints, Ints]] = field(default_factory=list)
    contracted: list[tuple[Ints, Ints]] = field(default_factory=list)
    turned: list[tuple[Ints, Ints]] = field(default_factory=list)
    planes: list[tuple[Ints, Ints]] = field(default_factory=list)
    magnitude_equations: list[tuple[Ints, Floats]] = field(default_factory=list)
    sign_equations: list[tuple[Ints, Floats]] = field(default_factory=list)
    fixed_atoms: list[Ints] = field(default_factory=list)
    fixed_magnitudes: list[Ints] = field(default_factory=list)
    fixed_signs: list[Ints] = field(default_factory=list)
    restricted: list[Ints] = field(default_factory=list)
    held: list[Ints] = field(default_factory=list)
    normed: list[Ints] = field(default_factory=list)
    paired: list[Ints] = field(default_factory=list)  # units over which scalar products sum
    centred: list[Ints] = field(default_factory=list)
    gained: list[Ints] = field(default_factory=list)
    divided: list[Ints] = field(default_factory=list)
    blocks: list[tuple[Ints, Ints]] = field(default_factory=list)
    shared_gains: list[tuple[Ints, Ints]] = field(default_factory=list)
    copies: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)
    occurrences: list[Sighting] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    explained: list[tuple[int, int, str]] = field(default_factory=list)
    unread: list[tuple[Ints, str]] = field(default_factory=list)
    half_periods: dict[str, HalfPeriod] = field(default_factory=dict)
    common: list[Ints] = field(default_factory=list)  # scales of products that many units share

    def __post_init__(self) -> None:
        self._pending = np.zeros(0, np.int64)
        self.first: Callable[[Ints], Ints] = lambda atom: atom  # that moves with each unit, as an earlier walk found
        self.apart = 0  # how many units were combined at different positions
        self.where: Callable[[], str] | None = None

    def fresh_scales(self, shape: tuple[int, ...]) -> Ints:
        """Return new scale variables of the given shape."""
        size = int(np.prod(shape))
        self.scales += size
        return np.arange(self.scales - size, self.scales).reshape(shape)

    def scales_like(self, *scales: Ints) -> Ints:
        """Return new variables, one for each combination of variables at a position."""
        unique, inverse = distinct_columns(*scales)
        return self.fresh_scales((unique.shape[1],))[inverse].reshape(scales[0].shape)

    def product(self, *factors: tuple[Ints, float]) -> Ints:
        """Return new variables, one per combination, equal to the product of the given variables to their powers."""
        scale = self.scales_like(*(factor for factor, _ in factors))
        self.equate([(scale, 1.0), *((factor, -power) for factor, power in factors)])
        return scale

    def fresh(self, axes: tuple[int, ...], shape: tuple[int, ...], *, tag: int = 0) -> Label:
        """Return new units with new scales."""
        size = int(np.prod(shape))
        self.atoms += size
        if self.atoms > len(self._pending):
            self._pending = np.r_[self._pending, np.full(max(self.atoms, 4096), UNSET)]
        atom = np.arange(self.atoms - size, self.atoms).reshape(shape)
        return Label(axes, atom, np.full(shape, tag), self.fresh_scales(shape))

    def copied(self, label: Label, number: Ints) -> Label:
        """Return copies of a label's units with the same scales; equal positions with equal numbers are one copy."""
        label = self.resolve(label)
        unique, inverse = distinct_columns(label.atom, number)
        atom = self.fresh((), (unique.shape[1],)).atom
        self.copies.append((atom, unique[0], unique[1]))
        return Label(label.axes, atom[inverse].reshape(label.atom.shape), label.tag, label.scale)

    def copied_from(self, atom: Ints) -> Ints:
        """Return the original units of copies; other units are returned unchanged."""
        found: Ints = atom.copy()
        for copies, of, _ in reversed(self.copies):  # in reverse order of creation; copies have consecutive numbers
            if len(copies):
                own = (found >= copies[0]) & (found <= copies[-1])
                found[own] = of[found[own] - copies[0]]
        return found

    def resolve(self, label: Label) -> Label:
        """Return a label with all tags set; a position without a tag becomes its unit's only position."""
        unset = label.tag == UNSET
        if not unset.any():
            return label
        atoms = label.atom[unset]
        self._pending[atoms] = np.where(self._pending[atoms] == UNSET, 0, self._pending[atoms])
        tag = np.array(label.tag)
        tag[unset] = self._pending[atoms]
        return Label(label.axes, label.atom, tag, label.scale)

    def pending(self, label: Label, other: int = 0) -> Label:
        """Return a parameter's label with the tags known so far, and another tag elsewhere."""
        known = self._pending[label.atom]
        tag = np.where(label.tag == UNSET, np.where(known == UNSET, other, known), label.tag)
        return Label(label.axes, label.atom, tag, label.scale)

    def derive_tags(self, tag: Ints, coordinate: Ints) -> Ints:
        """Return tags that combine existing tags with coordinates."""
        pairs, inverse = distinct_columns(tag, coordinate)
        new = np.array([self.tags.setdefault((int(t), int(c)), len(self.tags) + 1) for t, c in pairs.T], np.int64)
        return new[inverse].reshape(tag.shape)

    def spread(self, label: Label, axis: int, size: int) -> Label:
        """Return the label of a unit that fills a whole tensor, spread along an axis."""
        tag = np.full(size, self.resolve(label).tag if size > 1 else label.tag)
        if size > 1:
            tag = self.derive_tags(tag, np.arange(size))
        return Label((axis,), np.full(size, label.atom), tag, np.full(size, label.scale))

    def same_units(self, one: Label, two: Label, *, contracted: bool = False) -> Label:
        """Require that two labels of equal shape move together; return the first one with its tags set.

        Args:
            one: A label.
            two: A label.
            contracted: Whether they are the two sides of a sum of products, rather than values of one kind.
        """
        one, two = self._agree(one, two)
        if (one.tag != two.tag).any():
            one, two = self._without_copies(one, two), self._without_copies(two, one)
        apart = one.tag != two.tag
        if apart.any():
            self.apart += int(apart.sum())
            met, why = np.r_[one.atom[apart], two.atom[apart]], "combines units at different positions"
            self.fix_units(met, counted(why, one.atom[apart], "place"))
        different = (one.atom != two.atom) & ~apart  # fixed units remain different ones, each with its own members
        if different.any():
            pair = one.atom[different], two.atom[different]
            (self.contracted if contracted else self.merges).append(pair)
        return one

    def _without_copies(self, label: Label, other: Label) -> Label:
        """Return the units of which a label holds equal copies at places that another label tells apart.

        Such as keys that all samples share, beside the queries of each sample and head on one axis.
        """
        units = self.copied_from(label.atom)
        if (units == label.atom).all() or distinct_columns(units, other.atom)[0].shape[1] > len(rising(units)):
            return label
        return Label(label.axes, units, other.tag, label.scale)

    def _agree(self, one: Label, two: Label) -> tuple[Label, Label]:
        for label, other in ((one, two), (two, one)):
            unset = label.tag == UNSET
            if unset.any():
                atoms = label.atom[unset]
                free = self._pending[atoms] == UNSET
                known = other.tag[unset]
                known = np.where(known == UNSET, self._pending[other.atom[unset]], known)
                self._pending[atoms[free]] = known[free]
        return self.resolve(one), self.resolve(two)

    def united(self) -> Ints:
        """Return for each unit the first one that must move with it."""
        pairs = [np.zeros((2, 0), np.int64), *(np.reshape(pair, (2, -1)) for pair in (*self.merges, *self.contracted))]
        one, two = np.hstack(pairs)
        graph = sparse.csr_matrix((np.ones(len(one)), (one, two)), (self.atoms, self.atoms))
        _, label = sparse.csgraph.connected_components(graph, False)
        first: Ints = np.unique(label, return_index=True)[1][label]
        return first

    def equate(self, terms: list[tuple[Ints, float]], *, signs: bool = True, magnitudes: bool = True) -> None:
        """Require that the sum of coefficient x log-scale is 0, and that the product of signs to these powers is 1."""
        variables = np.stack([variable.ravel() for variable, _ in terms], axis=1)
        coefficients = np.array([coefficient for _, coefficient in terms], float)
        if magnitudes:
            self.magnitude_equations.append((variables, coefficients))
        if signs:
            odd = np.mod(np.rint(coefficients), 2) == 1
            if odd.any():
                self.sign_equations.append((variables[:, odd], np.ones(int(odd.sum()))))

    def fix_units(self, atom: Ints, note: str | None = None) -> None:
        """Fix the positions of units."""
        self.fixed_atoms.append(rising(atom))
        if note and atom.size:
            self.notes[f"{self.where()}: {note}" if self.where else note] = None

    def fix_scales(self, scale: Ints, *, magnitudes: bool = True, signs: bool = True) -> None:
        """Fix variables to 1: their magnitudes, their signs, or both."""
        if magnitudes:
            self.fixed_magnitudes.append(scale.ravel())
        if signs:
            self.fixed_signs.append(scale.ravel())

    def fix_product(self, scales: Sequence[Ints]) -> None:
        """Fix the products of scales on separate axes of a value, along each of which the scales are equal."""
        if len(scales) < 2:
            for scale in scales:
                self.fix_scales(scale)
            return
        flat = [scale.ravel() for scale in scales]
        for scale in flat:
            self.equate([(scale[1:], 1.0), (scale[:-1], -1.0)])
        self.equate([(scale[:1], 1.0) for scale in flat])

    @contextlib.contextmanager
    def explain(self, note: str) -> Iterator[None]:
        """Explain scales fixed inside the block; the note is shown if no other constraint fixes them."""
        first = len(self.fixed_magnitudes)
        yield
        self.explained.append((first, len(self.fixed_magnitudes), note))

    def restrict(self, label: Label) -> None:
        """Record that an operation on these units commutes with no mixture of them."""
        self.restricted.append(label.atom.ravel())
        self.held.append(label.atom.ravel())

    @contextlib.contextmanager
    def unrestricted(self) -> Iterator[None]:
        """Withdraw constraints on mixtures of units made inside the block."""
        lists = (self.restricted, self.held)
        before = [len(own) for own in lists]
        yield
        for own, length in zip(lists, before, strict=True):
            del own[length:]

    @contextlib.contextmanager
    def between_planes(self) -> Iterator[None]:
        """Treat units merged inside the block as coordinates of one rotary pair, without further constraints."""
        notes, lists = dict(self.notes), (self.merges, self.held, self.fixed_atoms)
        before = [len(own) for own in lists]
        yield
        self.turned += self.merges[before[0] :]
        for own, length in zip(lists, before, strict=True):
            del own[length:]  # type: ignore[attr-defined]
        self.notes = notes

    def keep_norm(self, label: Label) -> None:
        """Record that an operation reads the norm of these units, so that only orthogonal mixtures are allowed."""
        self.normed.append(label.atom.ravel())

    def keep_ones(self, label: Label) -> None:
        """Record that an operation reads the mean of these units, so that mixtures must fix the vector of ones."""
        self.centred.append(label.atom.ravel())

    def number_of(self, label: Label) -> Label:
        """Return the label of a number computed from all units of a label, which then share one scale."""
        number = self.fresh((), ())
        whole = np.full(label.scale.shape, int(number.scale))
        self.equate([(whole, 1.0), (label.scale, -1.0)])
        return number

    def fix(self, label: Label) -> None:
        """Require that the group does not act on a label."""
        self.fix_units(label.atom)
        self.fix_scales(label.scale)
        self.restrict(label)

    def block(self, parents: Ints, members: Ints, *, gains: bool = False) -> None:
        """Require that units with the same parent stay together.

        Args:
            parents: The parents.
            members: The units, of equal shape.
            gains: Whether the parents are gains that multiply several units each (shared by heads).
        """
        (self.shared_gains if gains else self.blocks).append((parents.ravel(), members.ravel()))
