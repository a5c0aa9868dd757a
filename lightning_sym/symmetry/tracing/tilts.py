"""What a layer norm's bias and the layers that read the norm may change together, without any bias behind them.

See docs/theory/transformers.md, 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tilt:
    r"""Maps :math:`D (I + t 1^T) D^{-1}` of what a layer norm with gain D and a bias puts out.

    As the normalised values sum to zero, only the norm's bias changes; what reads it undoes the map. Of a stream that
    layer norms read, and linear layers as it is, the map acts on what these layers sum over, and its inverse on what
    writes: norms do not see multiples of ones. What writes may have a gain behind it.

    Attributes:
        size: The number of entries of t.
        moved: What the map acts on, and along which axis: the norm's bias, or the layers that read a stream.
        gains: By tensor or value, the gain between whose diagonals D the map acts there: the norm's, or that behind
            what writes into a stream; where there is none, D is 1.
        readers: The weights on which the inverse acts, transposed, and along which axis: those that read the norm, or
            all that writes into a stream.
        seen: Values inside the network, on whose last axis the map acts: by name, their axes.
        written: Values on whose last axis the inverse acts, transposed.
        of_stream: Whether it is one of a stream. Its determinant is positive; in rotated streams the sign of all units
            does what a negative one would.
    """

    size: int
    moved: tuple[tuple[str, int], ...]
    gains: Mapping[str, str]
    readers: tuple[tuple[str, int], ...]
    seen: tuple[tuple[str, int], ...] = ()
    written: tuple[tuple[str, int], ...] = ()
    of_stream: bool = False


@dataclass(frozen=True)
class Leaning:
    """A stream that only layer norms and linear layers read.

    Attributes:
        readers: The linear layers' weights, and the axis over which each sums.
        writers: Weights, biases and tables that write, and the axis of the stream's units.
        seen: Named values on the stream, and that axis.
        gains: By writer or named value, the gain behind it, if any.
    """

    readers: tuple[tuple[str, int], ...]
    writers: tuple[tuple[str, int], ...]
    seen: tuple[tuple[str, int], ...]
    gains: Mapping[str, str] = field(default_factory=dict)

    def is_like(self, other: "Leaning") -> bool:
        """Whether another walk saw the same stream."""
        gains = all(self.gains.get(name) == other.gains.get(name) for name, _ in self.writers)
        return gains and {*self.readers} == {*other.readers} and {*self.writers} == {*other.writers}


@dataclass
class Normed:
    """What a walk through a network saw of layer norms of one gain and one bias.

    Attributes:
        readers: The weights of linear layers that read them, and the axis over which each sums.
        alone: Whether nothing else reads them.
        seen: Named values that hold what they put out: the value's last axis.
    """

    readers: dict[tuple[str, int], None]
    alone: bool
    seen: dict[tuple[str, int], None]

    def met(self, other: "Normed") -> "Normed":
        """Return what two walks saw together."""
        return Normed(self.readers | other.readers, self.alone and other.alone, self.seen | other.seen)
