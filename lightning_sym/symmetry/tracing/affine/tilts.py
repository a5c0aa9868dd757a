"""Rank-one maps I + t aᵀ of a layer norm's bias and the readers of the norm, if these have no biases.

See docs/theory/transformers.md, 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tilt:
    r"""A family of maps :math:`D (I + t 1^T) D^{-1}` of a layer norm's output, with D the diagonal of its gain.

    The normalised values sum to zero, so only the norm's bias changes, and the readers apply the inverse. Streams read
    by layer norms, and directly by linear layers, have such maps as norms do not read multiples of ones. There the map
    acts on the readers' summed axes, and its inverse on the writers. Writers may have gains.

    Attributes:
        size: The number of entries of t.
        moved: Pairs (name, axis) of tensors for the map: the norm's bias, or the readers of a stream.
        gains: By tensor or value, the gain whose diagonal D conjugates the map there: the norm's gain, or that after a
            writer. Without an entry, D is 1.
        readers: Pairs (name, axis) of weights for the transposed inverse: readers of the norm, or writers of the
            stream.
        seen: Pairs (name, axis) of values inside the network for the map.
        written: Pairs (name, axis) of values for the transposed inverse.
        mixed: Names of values inside the network that the map changes by multiples of ones that depend on the input.
        of_stream: Whether the map belongs to a stream. Its determinant is then positive; in rotated streams the sign of
            all units replaces a negative one.
    """

    size: int
    moved: tuple[tuple[str, int], ...]
    gains: Mapping[str, str]
    readers: tuple[tuple[str, int], ...]
    seen: tuple[tuple[str, int], ...] = ()
    written: tuple[tuple[str, int], ...] = ()
    mixed: tuple[str, ...] = ()
    of_stream: bool = False


@dataclass(frozen=True)
class Leaning:
    """A stream that only layer norms and linear layers read.

    Attributes:
        readers: The linear layers' weights, each with its summed axis.
        writers: The weights, biases and tables that write what linear layers read, and their axis of the units.
        seen: Named values that linear layers read, or sum to these, and this axis.
        gains: By writer or named value, the gain after it, if any.
        mixed: Named values that only norms read, with summands that linear layers read.
    """

    readers: tuple[tuple[str, int], ...]
    writers: tuple[tuple[str, int], ...]
    seen: tuple[tuple[str, int], ...]
    gains: Mapping[str, str] = field(default_factory=dict)
    mixed: tuple[str, ...] = ()

    def is_like(self, other: "Leaning") -> bool:
        """Whether another walk found the same stream."""
        gains = all(self.gains.get(name) == other.gains.get(name) for name, _ in self.writers)
        return gains and {*self.readers} == {*other.readers} and {*self.writers} == {*other.writers}


@dataclass
class Normed:
    """The readers of layer norms with a common gain and bias, as found by a walk.

    Attributes:
        readers: The weights of linear layers that read them, each with its summed axis.
        alone: Whether they have no other readers.
        seen: Named values that contain their output, and the value's last axis.
    """

    readers: dict[tuple[str, int], None]
    alone: bool
    seen: dict[tuple[str, int], None]

    def met(self, other: "Normed") -> "Normed":
        """Combine the results of two walks."""
        return Normed(self.readers | other.readers, self.alone and other.alone, self.seen | other.seen)
