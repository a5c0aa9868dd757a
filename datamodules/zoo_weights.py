"""The weights of the networks of a zoo, as data."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from lightning_sym.datamodules.tensors import Pair, TensorDataModule
from lightning_sym.zoo_weights import FORMS, ZooDataset


class ZooWeightsDataModule(TensorDataModule):
    """The networks of a zoo as data for learning on weights: vectors of weights, and a metric of each network.

    An input has shape ``[2, P]``: the ``P`` weights of a network, unchanged and in canonical form. The module computes
    canonical forms once (10 ms for a small network). The target is a metric in the zoo's manifest, of shape ``[1]``.
    Splits, batches and their order are those of :class:`TensorDataModule`. For other forms of the weights, use
    :class:`lightning_sym.zoo_weights.ZooDataset`.

    Args:
        zoo: Folder of the zoo.
        target: Split and name of the metric, for example ``"test/accuracy"``.
        batch_size: See :class:`TensorDataModule`.
        eval_batch_size: See there.
        val_fraction: See there.
        test_fraction: See there.
        max_samples: See there.
        data_seed: See there.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.

    Attributes:
        zoo: As given.
        target: As given.

    Raises:
        FileNotFoundError: If there is no such zoo.
        ValueError: If a member lacks the metric, or as :class:`TensorDataModule`.
    """

    location_arguments: ClassVar[tuple[str, ...]] = (*TensorDataModule.location_arguments, "zoo")

    def __init__(
        self,
        zoo: str,
        target: str = "test/accuracy",
        batch_size: int = 32,
        eval_batch_size: int = 500,
        val_fraction: float = 0.15,
        test_fraction: float = 0.25,
        max_samples: int | None = None,
        data_seed: int = 0,
        allow: Sequence[str] | None = None,
    ) -> None:
        self.zoo, self.target, self._allow = str(zoo), target, tuple(allow or ())
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            max_samples=max_samples,
            data_seed=data_seed,
        )
        self.num_classes = 1

    # The command line asks for sizes before it trains a zoo that a recipe requires.

    @property
    def in_channels(self) -> int:
        """Number of forms of the weights."""
        return len(FORMS)

    @property
    def image_size(self) -> tuple[int, int]:
        """Number of weights as a height, and a width of 1; a height of 1 if there is no zoo yet."""
        return super().image_size if Path(self.zoo).is_dir() else (1, 1)

    def load(self) -> tuple[Pair, Pair | None, Pair | None]:
        """Return the weights and the metrics of all networks; test and validation data are held out."""
        forms = [ZooDataset(self.zoo, self.target, form=form, flat=True, allow=self._allow) for form in FORMS]
        inputs = torch.stack([torch.stack([own[index][0] for own in forms]) for index in range(len(forms[0]))])
        return (inputs, forms[0].targets), None, None
