"""The list of all factors. A new kind of symmetry is one class and one entry here."""

from lightning_sym.symmetry.group.diagonal import Scale, Sign
from lightning_sym.symmetry.group.factor import Factors
from lightning_sym.symmetry.group.gained import GainedMatrix
from lightning_sym.symmetry.group.half_turn import HalfTurn
from lightning_sym.symmetry.group.matrix import Matrix
from lightning_sym.symmetry.group.permutation import Permutation
from lightning_sym.symmetry.group.phase import Phase
from lightning_sym.symmetry.group.rotation import Rotations
from lightning_sym.symmetry.group.shift import Shift
from lightning_sym.symmetry.group.tilt import Tilts
from lightning_sym.symmetry.solving.structure import Structure

# From the outermost, which acts last, to the innermost: each factor carries the later entries into themselves.
KINDS = (Permutation, Scale, Sign, Matrix, GainedMatrix, Rotations, Phase, HalfTurn, Tilts, Shift)


def factors_of(structure: Structure, parameters: frozenset[str] = frozenset()) -> Factors:
    """Return the factors of a group.

    Args:
        structure: The group.
        parameters: The names of the parameters among the tensors.
    """
    return Factors(structure, KINDS, parameters)
