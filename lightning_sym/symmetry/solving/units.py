"""Units: atoms that have to move together are one, which stands at many positions."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_sym.symmetry.solving.planes import Places, PlaneFinder
from lightning_sym.symmetry.tracing.constraints import Constraints, Label, Sighting
from lightning_sym.symmetry.tracing.numbering import Hashes, Ints, Numbers, components, flat, marked, mix, parts, sum_by


@dataclass(frozen=True)
class Positions:
    """Every position at which units are seen, place by place.

    Attributes:
        places: The parameters' axes, then the values of the graph.
        parameters: How many of the places are axes of parameters.
        grouped: By weight of a grouped convolution, the label over its two first axes.
        offset: Where the positions of each place begin, and where the last ones end.
        named: The places that are values with a name.
        of_values: The positions of these.
        where: For each position, the number of its place.
        tag: For each position, which of its unit's several positions this is.
        atom: For each position, the root of the atom that stands there.
        copy: For each position, which of its unit's copies stands there, if copies belong to slots; else -1.
        root: For each atom one that stands for all which have to move together.
        fixed: For each root, whether it stays where it is.
        finder: Finds the units that are planes.
        asked: The positions that it asks about: of parameters, and then of values with a name.
        of_planes: What it knows of these.
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
    fixed: NDArray[np.bool_]
    finder: PlaneFinder
    asked: Ints
    of_planes: Places

    @property
    def own(self) -> int:
        """How many positions are those of parameters, which come first."""
        return int(self.offset[self.parameters])

    @property
    def standing(self) -> Numbers:
        """The roots that stand in parameters, position by position."""
        return self.atom[: self.own]

    def marked(self, *atoms: Numbers) -> NDArray[np.bool_]:
        """Return a mask of roots that holds at those of some atoms."""
        return marked(len(self.root), self.root[flat(atoms)])


def merge_units(
    constraints: Constraints, axis_labels: Mapping[str, tuple[Label, ...]], grouped: Mapping[str, Label]
) -> Positions:
    """Merge the atoms that have to move together, and list every position at which they stand.

    Args:
        constraints: All demands, and what was seen.
        axis_labels: By parameter or buffer, its labels.
        grouped: By weight of a grouped convolution, the label over its two first axes.
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
    # What two coordinates of a plane have in common is asked of parameters and of named values only.
    named = [index for index in range(parameters, len(places)) if places[index].tensor is not None]
    of_values = flat([np.arange(offset[index], offset[index + 1]) for index in named])
    asked = np.r_[np.arange(offset[parameters]), of_values] if finder.any else np.zeros(0, np.int64)
    same_place = place_key(where[asked], tag[asked])
    if finder.any:
        same_place ^= mix(finder.family[raw[asked]])
    tag, unknown = _told_apart(raw, root, where, tag, offset, merges)
    unnamed = Sighting(Label((), *np.zeros((3, 0), np.int64)))  # of the others the positions are all that counts
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
    """Identify a place and a tag."""
    return mix(mix(where) ^ tag.astype(np.uint64))


def _told_apart(
    raw: Numbers, root: Ints, where: Numbers, tag: Ints, offset: Ints, merges: list[tuple[Ints, Ints]]
) -> tuple[Ints, Ints]:
    """Tell the positions of a unit apart that stands twice at one place (queries and keys stacked in one weight).

    They differ by where else each of the two was seen before they were found to be one unit.

    Args:
        raw: For each position, the atom that stood there.
        root: For each atom, the one with which it was merged.
        where: For each position, the number of its place.
        tag: For each position, its tag.
        offset: Where the positions of each place begin, and where the last ones end.
        merges: What was merged.

    Returns:
        New tags; and the atoms of which nobody knows which is which.
    """
    atom, number = root[raw], len(root)

    def twice(tag: Ints) -> NDArray[np.bool_]:
        result = np.zeros(len(tag), bool)
        for part in parts(offset):
            key = mix(place_key(where[part], tag[part]) ^ atom[part].astype(np.uint64))
            order = np.argsort(key)
            same = np.flatnonzero(key[order[1:]] == key[order[:-1]])
            result[part][order[same]] = result[part][order[same + 1]] = True
        return result

    again = twice(tag)
    if again.any():
        seen = sum_by(raw, lambda part: place_key(where[part], tag[part]), number)
        one, two = (flat([pair[side] for pair in merges]) for side in (0, 1))
        for _ in range(3):  # what it was merged with counts, too: colour refinement
            seen = mix(seen) + sum_by(one, mix(seen)[two], number) + sum_by(two, mix(seen)[one] * np.uint64(3), number)
        tag = tag.copy()
        told = np.where(tag[again] == 0, np.uint64(0), mix(tag[again]))
        tag[again] = (mix(seen[raw[again]] ^ told) >> np.uint64(1)).astype(np.int64)
        again = twice(tag)
    return tag, atom[again]
