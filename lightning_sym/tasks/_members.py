"""Helpers of tasks on the members of a zoo: pairs, example inputs, and checks of the data."""

import shlex
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations
from typing import Any, Literal

from lightning_sym._text import other_settings
from lightning_sym.networks import Network, build
from lightning_sym.symmetry import Symmetry, trace_symmetry
from lightning_sym.tasks.population import PopulationTask
from lightning_sym.zoo import ModelZoo
from lightning_sym.zoo import example_input as example_input

Pair = tuple[int, int]


class ZooUserTask(PopulationTask):
    """A task on the networks of zoos, which are known once these are open.

    All networks see the same batches, and several processes share out the data.

    Attributes:
        zoo: Folder of the zoo; a subclass sets it.
        allow: Packages that an architecture may name; a subclass sets it.
    """

    own_batches = False
    places_members = False
    zoo: str
    allow: tuple[str, ...]
    _built = False
    _opened: ModelZoo | None = None

    @abstractmethod
    def build(self) -> None:
        """Open zoos and prepare for :meth:`make_population` and :attr:`numbers`; called once."""

    @property
    @abstractmethod
    def zoos(self) -> dict[str, tuple[ModelZoo, int]]:
        """The zoos that networks come from, each with the number of one member; data are checked against these."""

    def setup(self, stage: str) -> None:
        """Build the networks, on every process.

        Raises:
            FileNotFoundError: If there is no zoo.
            ValueError: If members, sites or data do not fit, or the trainer would tie networks together.
        """
        super().setup(stage)
        self._prepare()
        for zoo, number in self.zoos.values():
            check_data(zoo, number, self.data, trial=bool(self.trainer.fast_dev_run))  # type: ignore[attr-defined]

    @property
    def data(self) -> Any:
        """The datamodule of the run; None without one."""
        return getattr(self._trainer, "datamodule", None)

    @property
    def model_zoo(self) -> ModelZoo:
        """The zoo, opened when it is first asked for."""
        if self._opened is None:
            self._opened = ModelZoo.open(self.zoo, allow=self.allow)
        return self._opened

    def _prepare(self) -> None:
        if not self._built:
            self.build()
            self._built = True

    def configure_model(self) -> None:
        """Make the population, of the networks that ``setup`` has built."""
        self._prepare()
        super().configure_model()


class PairTask(ZooUserTask):
    """A task on pairs of the members of one zoo.

    Args:
        zoo: Folder of the zoo.
        pairs: ``"all"``, or lists of two members' numbers.
        allow: As for :meth:`ModelZoo.open`.
        settings: Arguments of :class:`PopulationTask`.

    Attributes:
        pairs: The pairs; before ``setup`` they are known only if they were given.
    """

    def __init__(
        self, zoo: str, pairs: Literal["all"] | list[list[int]], allow: Sequence[str] | None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.zoo = str(zoo)
        self.pairs: list[Pair] = [] if pairs == "all" else check_pairs(pairs)
        self.allow = tuple(allow or ())
        self._members: dict[int, Network] = {}

    def open_pairs(self, what: str) -> None:
        """Open the zoo and load the members of all pairs.

        Args:
            what: The experiment, for the message if the zoo has fewer than two members.
        """
        zoo = self.model_zoo
        require_two(zoo, what)
        self.pairs = self.pairs or list(combinations(zoo.numbers, 2))
        numbers = sorted(set(chain.from_iterable(self.pairs)))
        require_members(zoo, numbers)
        self._members = {number: zoo.load(number) for number in numbers}

    @property
    def zoos(self) -> dict[str, tuple[ModelZoo, int]]:
        """The zoo, with the number of one member; after ``setup``."""
        return {"zoo": (self.model_zoo, self.pairs[0][0])}

    def member(self, number: int) -> Network:
        """Return a member of the zoo, in evaluation mode; it is shared, so do not change it."""
        return self._members[number]

    @cached_property
    def symmetry(self) -> Symmetry:
        """The symmetry of the networks; traced when it is first asked for."""
        number = self.pairs[0][0]
        first = self.member(number)
        example = example_input(self.model_zoo, number, first, self.data)
        return trace_symmetry(first, example, exchange=not self.by_activations)

    @property
    def by_activations(self) -> bool:
        """Whether the task compares activations: values inside modules that elements exchange have no names."""
        return False


def given_network(network: object, allow: Sequence[str] | None) -> Network:
    """Return the network that a task was given, or that its checkpoint describes.

    Args:
        network: A network, or a network's architecture.
        allow: Packages whose modules an architecture may name, see :func:`lightning_sym.networks.build`.

    Raises:
        TypeError: If it is neither.
        ValueError: If the architecture names something else.
    """
    if isinstance(network, Mapping):  # from a checkpoint, by way of load_from_checkpoint
        network = build(network, allow or ())
    if not isinstance(network, Network):
        raise TypeError(
            f"network must be a lightning_sym Network, got {type(network).__name__}; wrap any other module: "
            "Network.wrap(functools.partial(YourModule, ...))."
        )
    return network


def check_pairs(pairs: object, *, same: bool = False) -> list[Pair]:
    """Return pairs of members' numbers as tuples.

    Args:
        pairs: Pairs of the user.
        same: Whether a member may be paired with itself, as with numbers of different zoos.

    Raises:
        ValueError: If they are not pairs of two different members, each pair once.
    """
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not pairs:
        raise ValueError(f'pairs must be "all" or a list of pairs of members, as [[0, 1], [0, 2]], got {pairs!r}.')
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(type(number) is int for number in pair):
            raise ValueError(f"pairs must be lists of two members' numbers, as [[0, 1], [0, 2]], got {pair!r}.")
        if pair[0] == pair[1] and not same:
            raise ValueError(f"pairs must be of two different members, got {list(pair)}.")
    found = [(int(a), int(b)) for a, b in pairs]
    if len(set(found)) < len(found):
        raise ValueError(f"pairs must be different, got {[list(pair) for pair in found]}.")
    return found


def pair_name(pair: Pair) -> str:
    """Return for example ``0-1``."""
    return f"{pair[0]}-{pair[1]}"


def require_two(zoo: ModelZoo, what: str) -> None:
    """Check that a zoo has two members.

    Args:
        zoo: The zoo.
        what: Name of the experiment for the message: ``"Matching"``.

    Raises:
        ValueError: If it has one.
    """
    if len(zoo) < 2:
        raise ValueError(
            f"{what} needs two members or more, and the zoo at {zoo.path} has only member {zoo.numbers[0]}; train "
            f"further ones into it (--model.seed {zoo.numbers[0] + 1} and --zoo_dir {shlex.quote(str(zoo.path))})."
        )


def require_members(zoo: ModelZoo, numbers: Iterable[int]) -> None:
    """Check that a zoo has the members that pairs name.

    Raises:
        ValueError: If there is none of a number.
    """
    for number in numbers:
        try:
            zoo.member(number)
        except ValueError as error:
            raise ValueError(
                f"{str(error).removesuffix('.')}; pairs, of the command line or of the recipe, names it: say "
                "--model.pairs all, or pairs of these."
            ) from None


def check_data(zoo: ModelZoo, number: int, data: Any, *, trial: bool) -> None:
    """Check that networks and data fit, and warn if the members were trained on other data.

    Args:
        zoo: The zoo.
        number: Number of one of its members.
        data: The datamodule; nothing is checked without an identity.
        trial: This is a trial run, which uses a part of the data.

    Raises:
        ValueError: If input shapes or numbers of classes differ.
    """
    identity = getattr(data, "identity", None)
    if not callable(identity):
        return
    mine, theirs = identity(), zoo.member(number).data
    for name in ("input_shape", "num_classes"):
        if name in theirs and theirs[name] != mine[name]:
            raise ValueError(
                f"The members of the zoo at {zoo.path} were trained with {name} {theirs[name]}, and the data have "
                f"{mine[name]}; use the data that they were trained on, as {theirs.get('class_path')}."
            )
    if not trial and any(name in theirs and theirs[name] != mine[name] for name in ("fingerprint", "mean", "std")):
        warnings.warn(
            f"The members of the zoo at {zoo.path} were trained on other data (or another split) than those used "
            f"here{other_settings(theirs, mine)}, so that train and test may not be what their names say.",
            stacklevel=2,
        )
