"""Units: atoms that have to move together form one unit, which occurs at many positions."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_sym.symmetry.arrays import Bools, Ints, rising
from lightning_sym.symmetry.numbering import Hashes, Numbers, components, flat, marked, mix, parts, sum_by
from lightning_sym.symmetry.solving.planes import Places, PlaneFinder
from lightning_sym.symmetry.tracing.labelling.constraints import Constraints, Label, Sighting


@dataclass(frozen=True)
class Positions:
    """All positions of units, place by place.

    Attributes:
        places: The parameters' axes, then the values of the graph.
        parameters: Number of places that are axes of parameters.
        grouped: By weight of a grouped convolution, the label over its first two axes.
        offset: The first position of each place, followed by the number of all positions.
        named: Indices of the places that are named values.
        of_values: The positions of these places.
        where: Index of the place of each position.
        tag: Tag of each position, which distinguishes the positions of one unit.
        atom: Root of the atom at each position.
        copy: Index of the unit's copy at each position, if copies belong to slots; else -1.
        root: A representative for each atom, the same for atoms that have to move together.
        fixed: Mask of the roots that stay in place.
        finder: Finds the units that are rotary pairs.
        asked: Positions of interest to the finder: those of parameters, then those of named values.
        of_planes: The finder's data for these positions.
    """

    places: list[Sighting]
    parameters: int
    grouped: Mapping[str, Label]
    offset: Ints
    named: list[int]
    of_values: Ints
    where: Numbers
    tag: Ints
    atom: Numbers
    copy: Numbers
    root: Ints
    fixed: Bools
    finder: PlaneFinder
    asked: Ints
    of_planes: Places

    @property
    def own(self) -> int:
        """Number of positions of parameters, which come first."""
        return int(self.offset[self.parameters])

    @property
    def standing(self) -> Numbers:
        """The root at each position of parameters."""
        return self.atom[: self.own]

    def marked(self, *atoms: Numbers) -> Bools:
        """Return a mask of the roots of some atoms."""
        return marked(len(self.root), self.root[flat(atoms)])


def merge_units(
    constraints: Constraints, axis_labels: Mapping[str, tuple[Label, ...]], grouped: Mapping[str, Label]
) -> Positions:
    """Merge the atoms that have to move together, and list all their positions.

    Args:
        constraints: The constraints of operations, and all sightings.
        axis_labels: The labels of each parameter or buffer.
        grouped: By weight of a grouped convolution, the label over its first two axes.
    """
    merges = [*constraints.merges, *constraints.contracted, *constraints.turned]
    root = components(constraints.atoms, merges)
    finder = PlaneFinder(constraints, root, list(grouped.values()))
    places = [Sighting(constraints.pending(label), name) for name, labels in axis_labels.items() for label in labels]
    parameters = len(places)
    places += constraints.occurrences
    size = np.array([place.label.size for place in places], np.int64)
    offset = np.r_[0, np.cumsum(size)]
    where = np.repeat(np.arange(len(places), dtype=np.int32), size)  # there are millions of positions
    raw = np.concatenate(
        [np.zeros(0, np.int32), *(place.label.atom.ravel() for place in places)], dtype=np.int32, casting="same_kind"
    )
    tag = flat([place.label.tag for place in places])
    # The two coordinates of a pair are looked up in parameters and named values only.
    named = [index for index in range(parameters, len(places)) if places[index].tensor is not None]
    of_values = flat([np.arange(offset[index], offset[index + 1]) for index in named])
    asked = np.r_[np.arange(offset[parameters]), of_values] if finder.any else np.zeros(0, np.int64)
    same_place = tagged(mix(np.arange(len(places)))[where[asked]], tag[asked])
    if finder.any:
        same_place ^= mix(finder.family[raw[asked]])
    tag, unknown = _told_apart(raw, root, where, tag, offset, merges)
    unnamed = Sighting(Label((), *np.zeros((3, 0), np.int64)))  # other places are needed for their positions only
    places = [
        place if index < parameters or place.tensor is not None else unnamed for index, place in enumerate(places)
    ]
    return Positions(
        places=places,
        parameters=parameters,
        grouped=grouped,
        offset=offset,
        named=named,
        of_values=of_values,
        where=where,
        tag=tag,
        atom=root.astype(np.int32)[raw],
        copy=np.full(len(raw), -1, np.int32),
        root=root,
        fixed=marked(constraints.atoms, root[flat(constraints.fixed_atoms)], unknown),
        finder=finder,
        asked=asked,
        of_planes=Places(raw[asked], same_place),
    )


def place_key(where: Numbers, tag: Ints) -> Hashes:
    """Return a hash of places and tags."""
    return tagged(mix(where), tag)


def tagged(place: Hashes, tag: Ints) -> Hashes:
    """Return a hash of hashed places and tags."""
    return mix(place ^ tag.astype(np.uint64))


def _told_apart(
    raw: Numbers, root: Ints, where: Numbers, tag: Ints, offset: Ints, merges: list[tuple[Ints, Ints]]
) -> tuple[Ints, Ints]:
    """Distinguish the positions of units that occur twice at one place (queries and keys stacked in one weight).

    The two are distinguished by their other positions, as seen before they were merged.

    Args:
        raw: The original atom at each position.
        root: The root of each atom.
        where: Index of the place of each position.
        tag: Tag of each position.
        offset: The first position of each place, followed by the number of all positions.
        merges: Pairs of merged atoms.

    Returns:
        New tags; and the roots of atoms that remain indistinguishable.
    """
    atom, number = root[raw], len(root)
    place = mix(np.arange(len(offset) - 1))  # there are many positions at each

    def twice(tag: Ints) -> Bools:
        result = np.zeros(len(tag), bool)
        for part in parts(offset):
            key = mix(tagged(place[where[part]], tag[part]) ^ atom[part].astype(np.uint64))
            if len(rising(key)) == len(key):  # found in a fraction of the time
                continue
            order = np.argsort(key)
            same = np.flatnonzero(key[order[1:]] == key[order[:-1]])
            result[part][order[same]] = result[part][order[same + 1]] = True
        return result

    again = twice(tag)
    if again.any():
        seen = sum_by(raw, lambda part: tagged(place[where[part]], tag[part]), number)
        one, two = (flat([pair[side] for pair in merges]) for side in (0, 1))
        for _ in range(3):  # colour refinement along merged atoms
            seen = mix(seen) + sum_by(one, mix(seen)[two], number) + sum_by(two, mix(seen)[one] * np.uint64(3), number)
        tag = tag.copy()
        told = np.where(tag[again] == 0, np.uint64(0), mix(tag[again]))
        tag[again] = (mix(seen[raw[again]] ^ told) >> np.uint64(1)).astype(np.int64)
        again = twice(tag)
    return tag, atom[again]
