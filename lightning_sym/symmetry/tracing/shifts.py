"""Free shifts: vectors that may be added to biases, as running means behind them take them off.

See docs/theory/intertwiners.md, 2.3: c.
"""

from torch import fx

from lightning_sym.symmetry.tracing.capture import Capture


class Shifts:
    """Collects, over all walks through a network, which biases go into which batch norms and nowhere else.

    A shift is added to everything that it touches: one layer in front of two norms shifts both running means, one norm
    behind two layers needs both biases. It is free only if nothing else sees any of them.
    """

    def __init__(self) -> None:
        self._links: list[tuple[str, str]] = []
        self._seen: set[str] = set()
        self._added: dict[str, set[fx.Node]] = {}
        self._taken: dict[str, set[fx.Node]] = {}
        self._norms: set[fx.Node] = set()

    def add(self, bias: str, node: fx.Node) -> None:
        """Say that an operation adds a bias to what comes out of it."""
        self._added.setdefault(bias, set()).add(node)

    def take(self, bias: str | None, mean: str, node: fx.Node) -> None:
        """Say that a batch norm takes a running mean off what comes right out of an operation with that bias."""
        self._taken.setdefault(mean, set()).add(node)
        self._norms.add(node)
        if bias is None:
            self._seen.add(mean)
        else:
            self._links.append((bias, mean))

    def check(self, capture: Capture) -> None:
        """Look, at the end of a walk, for operations that see a bias or a mean in another way."""
        for node, state in capture.states.items():
            for uses in (self._added, self._taken):
                if state in uses and set(node.users) != uses[state]:
                    self._seen.add(state)
            if any(user not in self._norms for made in self._added.get(state, ()) for user in made.users):
                self._seen.add(state)
        self._added, self._taken, self._norms = {}, {}, set()

    def free(self) -> list[tuple[str, ...]]:
        """Return what each free shift is added to: biases first, then running means."""
        groups: list[set[str]] = []
        for link in self._links:
            met = [group for group in groups if group & set(link)]
            groups = [group for group in groups if not group & set(link)] + [set(link).union(*met)]
        names = list(dict.fromkeys([bias for bias, _ in self._links] + [mean for _, mean in self._links]))
        free = [group for group in groups if not group & self._seen]
        return sorted(
            (tuple(n for n in names if n in group) for group in free), key=lambda group: names.index(group[0])
        )
