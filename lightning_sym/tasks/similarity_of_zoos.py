"""Similarity of the members of each of several zoos, in one pass over the data; nothing is trained."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_sym._loading import LoadsTrusted
from lightning_sym._tags import details, overview, tag
from lightning_sym.similarity.measures import Setting
from lightning_sym.tasks.similarity import NULLS, Null, SimilarityTask


class SimilarityOfZoosTask(LoadsTrusted, LightningModule):
    """Compare the members of each of several zoos, zoo by zoo, as :class:`SimilarityTask` does for one.

    Zoos may differ in anything, such as width, activation or training. Members of different
    zoos are not compared; for that give :class:`SimilarityTask` an ``other_zoo``. All zoos see the same images.

    Args:
        zoos: Folders of zoos, by their names in tables and figures, in this order.
        pairs: How many pairs of each zoo are drawn, or ``"all"``.
        sites: As for :class:`SimilarityTask`.
        measures: Likewise. The measure ``group`` takes the group of each zoo's own networks.
        split: Likewise.
        nulls: Likewise.
        seed: Likewise.
        allow: Likewise.

    Attributes:
        parts: The comparisons, by the names of the zoos.

    Logged at the end of the epoch: the values of :class:`SimilarityTask`, with the name of the zoo at the end of the
    tag, and ``similarity_mean/<measure>/<zoo>``, the mean over layers.

    Raises:
        ValueError: If there are no zoos, or an argument is out of range.

    Example:
        >>> task = SimilarityOfZoosTask({"cnn": "runs/zoo-mnist5k/zoo", "mlp": "runs/zoo-mnist5k-mlp/zoo"})
        >>> list(task.parts)
        ['cnn', 'mlp']
    """

    def __init__(
        self,
        zoos: dict[str, str],
        pairs: Literal["all"] | int = "all",
        sites: Literal["all"] | list[str] = "all",
        measures: list[str] | dict[str, dict[str, Setting] | None] | None = None,
        split: Literal["train", "val", "test"] = "test",
        nulls: Sequence[Null] = NULLS,
        seed: int = 0,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(zoos, Mapping) or not zoos:
            raise ValueError(f"zoos must be folders of zoos by their names, as {{relu: runs/zoo/zoo}}, got {zoos!r}.")
        self.folders = {str(name): str(folder) for name, folder in zoos.items()}
        for number, folder in enumerate(self.folders.values()):
            part = SimilarityTask(
                folder,
                pairs=pairs,
                sites=sites,
                measures=measures,
                split=split,
                nulls=nulls,
                seed=seed,
                allow=allow,
            )
            self.add_module(f"part{number}", part)  # a child, which Lightning tells its trainer
        self.split, self.seed = split, seed
        self.save_hyperparameters()

    @property
    def parts(self) -> dict[str, SimilarityTask]:
        """The comparisons, by the names of the zoos."""
        found = (part for part in self.children() if isinstance(part, SimilarityTask))
        return dict(zip(self.folders, found, strict=True))

    @property
    def epoch_split(self) -> str:
        """The split that datamodules provide for the epoch, each image once, not augmented."""
        return self.split

    def setup(self, stage: str) -> None:
        """Open the zoos and make the metrics; on every process; see :meth:`SimilarityTask.setup`."""
        for part in self.parts.values():
            part.setup(stage)

    def teardown(self, stage: str) -> None:
        """Give the trainer its settings back."""
        for part in reversed(self.parts.values()):  # the first one found the trainer's own
            part.teardown(stage)

    def configure_optimizers(self) -> Optimizer:
        """Return an optimizer with learning rate 0."""
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_fit_start(self) -> None:
        """Bring the networks to the right device."""
        for part in self.parts.values():
            part.on_fit_start()

    def on_train_epoch_start(self) -> None:
        """Reset all sums."""
        for part in self.parts.values():
            part.on_train_epoch_start()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Add a batch of images, which the networks of all zoos see."""
        return torch.stack([part.training_step(batch, batch_idx) for part in self.parts.values()]).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Do nothing: the epoch measures everything."""

    def on_train_epoch_end(self) -> None:
        """Compute all similarities, log them, and end the fit."""
        trained: dict[str, float] = {}
        nulls: dict[str, float] = {}
        means: dict[str, float] = {}
        for name, part in self.parts.items():
            part.compute_similarities()
            own, null = part.logged()
            trained |= {f"{of}/{tag(name)}": value for of, value in own.items()}
            nulls |= {f"{of}/{tag(name)}": value for of, value in null.items()}
            for measure in part.similarities if own else ():
                of_layers = [value for of, value in own.items() if of.startswith(f"{tag('similarity', measure)}/")]
                means[tag("similarity_mean", measure, name)] = fmean(of_layers)
        for of, value in {**overview(trained, means), **details(nulls)}.items():
            self.log(of, value)
        self.trainer.should_stop = True

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the results of all zoos."""
        found: dict[str, Any] = {}
        for name, part in self.parts.items():
            found[name] = {}
            part.on_save_checkpoint(found[name])
        checkpoint["similarity_of_zoos"] = found

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the results.

        Raises:
            ValueError: If there are none, or they are of other zoos, networks or measures.
        """
        saved = checkpoint.get("similarity_of_zoos", {})
        if list(saved) != list(self.folders):
            raise ValueError(
                f"The checkpoint has similarities of the zoos {list(saved)} and this run has {list(self.folders)}; use "
                "the settings that it was made with, which the config.yaml of its run holds."
            )
        for name, part in self.parts.items():
            part.on_load_checkpoint(saved[name])
