"""What a layer norm's bias and the layers that read the norm may change together, without any bias behind them.

See docs/theory/intertwiners.md, 2.12.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tilt:
    r"""Maps :math:`D (I + t 1^T) D^{-1}` of what a layer norm with gain D and a bias puts out.

    As the normalised values sum to zero, only the norm's bias changes; what reads it undoes the map.

    Attributes:
        size: The number of entries of t.
        offset: The norm's bias, on which the map acts.
        gain: The norm's gain, whose diagonal D is; None for ones.
        readers: The weights that read the norm, and the axis of each on which the inverse acts.
        seen: Values inside the network, on whose last axis the map acts: by name, their axes.
    """

    size: int
    offset: str
    gain: str | None
    readers: tuple[tuple[str, int], ...]
    seen: tuple[tuple[str, int], ...] = ()


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
