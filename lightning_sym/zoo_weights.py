"""The networks of a zoo as data: weights as vectors or by name, in canonical form or at random points of their orbits.

Example:
    >>> data = ZooDataset("runs/zoo-digits-mlp-varied/zoo", augmentation="orbit", flat=True)    # doctest: +SKIP
    >>> loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)                 # doctest: +SKIP
    >>> for epoch in range(10):                                                                 # doctest: +SKIP
    ...     data.set_epoch(epoch)
    ...     for vectors, accuracies in loader: ...
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sym._checks import check_seeds, check_words
from lightning_sym._random import generator
from lightning_sym.networks import Network
from lightning_sym.symmetry import Symmetry, canonicalize, trace_symmetry
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.zoo import ModelZoo, example_input

Form = Literal["raw", "canonical"]
FORMS: tuple[Form, ...] = ("raw", "canonical")


class WeightSpace:
    """The weights of the networks of a zoo, as vectors and by name, with the symmetry that acts on them.

    The weights are all parameters and floating buffers, such as running statistics; tied tensors count once.

    Args:
        zoo: The zoo.
        example: Input to trace the symmetry on. Default: of the shape that the zoo records.

    Attributes:
        zoo: The zoo.
        network: One of its networks.
        shapes: Shapes by the names of tensors, in the order of vectors.
        sizes: Numbers of entries of the tensors, in the same order.
        size: Length of a vector, ``P``.
    """

    def __init__(self, zoo: ModelZoo, example: Any = None) -> None:
        self.zoo = zoo
        self.network, self._example = zoo.load(zoo.numbers[0]), example
        buffers = {name: own for name, own in self.network.named_buffers() if own.is_floating_point()}
        kept = self.network.state_dict().keys()
        tensors = {**dict(self.network.named_parameters()), **{n: own for n, own in buffers.items() if n in kept}}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.sizes = [tensor.numel() for tensor in tensors.values()]
        self.size = sum(self.sizes)

    @cached_property
    def symmetry(self) -> Symmetry:
        """The symmetry of the networks, traced and verified at the first use.

        Raises:
            ValueError: If there is no example and the zoo does not record the shape of inputs.
        """
        example = self._example
        if example is None:
            example = example_input(self.zoo, self.zoo.numbers[0], self.network, None)
        return trace_symmetry(self.network, example, nullity=False, exchange=False)

    @property
    def axes(self) -> dict[str, tuple[int, ...]]:
        """The number of the permutation of each axis of each tensor, or a number of its own for other axes.

        As :meth:`lightning_sym.symmetry.PermutationSpec.numbered`, and with the tensors that have no units: the input
        of permutation-equivariant neural functionals (Zhou et al. 2023, arXiv:2302.14040; 2024, arXiv:2402.05232).
        """
        known = self.symmetry.permutation_spec().numbered()
        numbers = iter(range(1 + max((n for own in known.values() for n in own), default=-1), 10**9))
        return {
            name: known[name] if name in known else tuple(next(numbers) for _ in shape)
            for name, shape in self.shapes.items()
        }

    def state(self, number: int) -> dict[str, Tensor]:
        """Return the weights of a member by name.

        Args:
            number: The member's index.
        """
        state = self.zoo.state(number)
        return {name: state[name] for name in self.shapes}

    def vector(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return weights as a vector of shape ``[P]``."""
        return torch.cat([tensors[name].reshape(-1) for name in self.shapes])

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the weights in a vector by name; views of it.

        Args:
            vector: Shape ``[P]``.
        """
        parts = vector.split(self.sizes)  # type: ignore[no-untyped-call]
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def move(self, tensors: Mapping[str, Tensor], random: torch.Generator, scale: float = 0.5) -> dict[str, Tensor]:
        """Return a random point of the orbit of weights: other weights with the same function.

        Args:
            tensors: Weights by name; not changed.
            random: Generator of the random numbers, on the CPU.
            scale: Standard deviation of the logarithms of scales, >= 0.
        """
        moved = self.symmetry.act_on(self.symmetry.sample(random, scale=scale), tensors)
        return {name: moved[name] for name in self.shapes}

    def canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the canonical form of weights; see :func:`lightning_sym.symmetry.canonicalize`.

        Args:
            tensors: Weights by name; not changed.
        """
        network = self._canonical  # one network for all weights, as a symmetry tests each network that it meets
        network.load_state_dict({**network.state_dict(), **tensors})
        state = canonicalize(self.symmetry, network, inplace=True, check=False).network.state_dict()
        return {name: state[name].clone() for name in self.shapes}

    @cached_property
    def _canonical(self) -> Network:
        return copied(self.network)


class ZooDataset(Dataset[tuple[Any, Tensor]]):
    """The networks of a zoo with a metric of each, to learn from weights.

    An item is a pair of weights and target. Weights are tensors by name, or one vector; see :class:`WeightSpace`.
    All weights are held in memory.

    Args:
        zoo: The zoo, or its folder.
        target: Split and name of the metric, with a slash between them: ``"test/accuracy"``.
        form: ``"raw"``, the weights as they are, or ``"canonical"``: the canonical form of each network, computed once.
        augmentation: ``"orbit"``: every access returns a random point of the network's orbit, with the same function.
            The point depends on the seed, the epoch and the member only, in any worker process; see
            :meth:`set_epoch`. None: none.
        flat: Whether weights are vectors.
        scale: Standard deviation of the logarithms of scales of random points, >= 0.
        seed: Seed of random points, >= 0.
        example: Input to trace the symmetry on. Default: of the shape that the zoo records.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.

    Attributes:
        space: :class:`WeightSpace` of the zoo. ``space.axes`` describes the tensors for neural functionals.
        numbers: Indices of the members, in the order of items.
        targets: Metrics of all members. Shape ``[N]``, in the dtype of the weights.

    Raises:
        FileNotFoundError: If there is no such zoo.
        ValueError: If a member lacks the metric, or an argument is out of range.

    References:
        Unterthiner, Keysers, Gelly, Bousquet, Tolstikhin (2020), "Predicting Neural Network Accuracy from Weights",
        arXiv:2002.11448; Navon et al. (2023), "Equivariant Architectures for Learning in Deep Weight Spaces",
        arXiv:2301.12780, for augmentation by permutations.
    """

    def __init__(
        self,
        zoo: ModelZoo | str | Path,
        target: str = "test/accuracy",
        *,
        form: Form = "raw",
        augmentation: Literal["orbit"] | None = None,
        flat: bool = False,
        scale: float = 0.5,
        seed: int = 0,
        example: Any = None,
        allow: Sequence[str] = (),
    ) -> None:
        check_words(("form", form, FORMS))
        if augmentation not in (None, "orbit"):
            raise ValueError(f'augmentation must be "orbit" or None, got {augmentation!r}.')
        if augmentation and form == "canonical":
            raise ValueError(
                'augmentation="orbit" leaves no canonical form; set form to "raw", or augmentation to None.'
            )
        check_seeds(seed=seed)
        if not isinstance(target, str):
            raise ValueError(f'target must be a split and a metric, such as "test/accuracy", got {target!r}.')
        opened = zoo if isinstance(zoo, ModelZoo) else ModelZoo.open(zoo, allow=allow)
        self.space, self.numbers = WeightSpace(opened, example), opened.numbers
        self.form, self.augmentation, self.flat, self.scale, self.seed = form, augmentation, flat, scale, seed
        split, _, name = target.partition("/")
        values = [member.metric(split, name) for member in opened]
        self._weights = [self.space.state(number) for number in self.numbers]
        if form == "canonical":
            self._weights = [self.space.canonical(tensors) for tensors in self._weights]
        self.targets = torch.tensor(values, dtype=next(iter(self._weights[0].values())).dtype)
        # Workers see the epoch of the main process also if they persist.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        if augmentation:
            _ = self.space.symmetry  # traced once, not in every worker

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the random points."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        tensors = self._weights[index]
        if self.augmentation:
            random = generator("orbit", self.seed, int(self._epoch), self.numbers[index])
            tensors = self.space.move(tensors, random, self.scale)
        return self.space.vector(tensors) if self.flat else dict(tensors), self.targets[index]
