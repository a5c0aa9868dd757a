"""Similarity of networks during training to their start, to a reference and to each other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_sym._checks import check_integers
from lightning_sym._random import seeded
from lightning_sym.callbacks._checks import has_members
from lightning_sym.callbacks._monitor import TrainingMonitor
from lightning_sym.reports import RunResults
from lightning_sym.reports.similarity_monitor import SimilarityMeter, monitor_results, monitor_scalars, with_weights
from lightning_sym.similarity.measures import Setting, checked_sites, named_measures
from lightning_sym.zoo import ModelZoo, versions


class SimilarityMonitor(TrainingMonitor):
    """Log the similarity of representations during training, on a fixed set of validation images.

    Works with any LightningModule that holds a network, and with populations such as
    :class:`lightning_sym.tasks.ZooTask`. Values are logged at the start of training, after every ``every_n_epochs``
    epochs (or ``every_n_steps`` optimizer steps) and at the end, for each measure and site:

    - ``similarity/start/<measure>/<site>``: of a network with itself at the start; mean over members;
    - ``similarity/reference/<measure>/<site>``: with the reference, if there is one; mean over members;
    - ``similarity/members/<measure>/<site>``, for a population: between two members; mean over pairs. The first value,
      of untrained networks, is the baseline of later ones.

    Networks with features that are not finite are left out. See :class:`lightning_sym.tasks.SimilarityTask` for
    measures and their settings. Written at the end, on rank 0: ``results/similarity.png`` (in TensorBoard
    ``figures/SimilarityMonitor/similarity``), ``similarity.csv`` and ``.json`` (a row for each point, comparison and
    site).

    Training is bitwise unaffected: the callback measures copies in evaluation mode and draws no random number. With
    several processes, also under ``ddp_members``, all have the weights of all members during the measurement, and
    share the images; values equal those of one process up to rounding. Checkpoints hold the curves and the starting
    weights for a resumed run; without these, "start" is the time when the monitor was added. A point costs a forward
    pass of the images for each site, of each member now and at its start.

    Args:
        measures: Names of measures, or settings by name. Default linear CKA and, if the network can be traced, group:
            Procrustes up to its symmetry.
        sites: Names of modules with outputs to compare; ``"all"``: the outputs of all activation modules.
        reference: A further network to compare with: a zoo's folder, a checkpoint of the same LightningModule, or a
            network. None for no reference.
        reference_member: Index of the member, if the reference is a zoo. >= 0.
        images: Number of images, from the first of the validation set. >= 4.
        every_n_epochs: Epochs between two points. >= 1.
        every_n_steps: Optimizer steps between two points, instead of epochs. None or >= 1.
        members: Members of a population to watch: ``"all"`` or their indices.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for a population.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        prefix: First part of all names instead of ``similarity``; two monitors in one fit need different prefixes.

    Raises:
        ValueError: If an argument is out of range.

    Note:
        Images are those of a datamodule of :mod:`lightning_sym.datamodules`, or of the first validation dataloader. Its
        dataset must be indexable, and its batches must begin with the network's input. The dataset must return the
        same items each time, as a resumed run reads them again.
    """

    shown_first: ClassVar[Mapping[str, str]] = {"similarity": "(start|reference|members)/.*"}

    def __init__(
        self,
        measures: list[str] | dict[str, dict[str, Setting] | None] | None = None,
        sites: Literal["all"] | list[str] = "all",
        reference: str | nn.Module | None = None,
        reference_member: int = 0,
        images: int = 200,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        members: Literal["all"] | list[int] = "all",
        network: str = "network",
        dirpath: str | None = None,
        prefix: str = "similarity",
    ) -> None:
        check_integers(4, images=images)
        check_integers(0, reference_member=reference_member)
        self.measures = None if measures is None else list(named_measures(measures).values())
        self.sites = checked_sites(sites)
        # In a tuple, as a module is not one of the settings that Lightning copies or compares.
        self._reference = (reference,)
        self.reference_member = reference_member
        self.images = images
        super().__init__(every_n_epochs, every_n_steps, members, network, dirpath, prefix)

    def clear(self) -> None:
        """Reset the state of an earlier fit."""
        super().clear()
        self._meter: SimilarityMeter | None = None

    # ---- before the first step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the network and the images, and measure the start.

        Raises:
            FileNotFoundError: If the reference does not exist.
            TypeError: If the validation data yield no images.
            ValueError: If there are no validation images, or network, sites, measures and reference do not match.
        """
        with isolate_rng(), seeded(0):
            network = self.network_of(pl_module)
            inputs = self._inputs(trainer, pl_module)
            reference = self._opened(network)
            self._meter = SimilarityMeter(network, inputs, self.measures, self.sites, reference, pl_module.device)
        self.begin(trainer, pl_module)

    def _inputs(self, trainer: Trainer, pl_module: LightningModule) -> Tensor:
        """Return the inputs of the networks, the same on every rank."""
        data: Any = getattr(trainer, "datamodule", None)
        if callable(getattr(data, "split_tensors", None)):
            images, labels = (tensor[: self.images] for tensor in data.split_tensors("val")[:2])
            batch: Any = (data.normalize(images), labels) if len(images) else ()
        else:
            batch = self._indexed(trainer)
        if len(batch) == 0:
            raise ValueError(
                "SimilarityMonitor compares networks on validation data, but there are none; set val_fraction of the "
                "datamodule, or pass a validation dataloader to the trainer."
            )
        if has_members(pl_module):
            task: Any = pl_module
            batch = task.evaluation_batch(trainer.strategy.batch_to_device(batch, pl_module.device))
        first = batch[0] if isinstance(batch, (tuple, list)) else batch
        if not isinstance(first, Tensor) or first.dim() == 0:
            raise TypeError(
                f"SimilarityMonitor takes the first entry of a validation batch as the network's input, but found a "
                f"{type(first).__name__} in a {type(batch).__name__}; let batches begin with a tensor."
            )
        return first.detach()

    def _indexed(self, trainer: Trainer) -> Any:
        """Return the first images of the first validation dataloader as one batch, independently of its sampler."""
        loaders: Any = trainer.val_dataloaders
        loader = next(iter(loaders), None) if isinstance(loaders, (list, tuple)) else loaders
        if loader is None:
            return ()
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise TypeError(
                "SimilarityMonitor takes the first inputs of a datamodule of lightning_sym.datamodules or of a "
                f"torch DataLoader with an indexable dataset, but the validation data are a {type(loader).__name__}."
            )
        dataset: Any = loader.dataset
        count = min(self.images, len(dataset))
        return loader.collate_fn([dataset[index] for index in range(count)]) if count else ()

    def _opened(self, network: nn.Module) -> nn.Module | None:
        """Return the reference as a network."""
        (reference,) = self._reference
        if reference is None or isinstance(reference, nn.Module):
            return reference
        path = Path(reference)
        if not path.exists():
            raise FileNotFoundError(f"There is no reference {path}; expected a zoo's folder or a checkpoint.")
        return ModelZoo.open(path).load(self.reference_member) if path.is_dir() else self._restored(path, network)

    def _restored(self, path: Path, network: nn.Module) -> nn.Module:
        """Return a copy of the network with its weights from a checkpoint."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        prefix = f"{self.network}." if self.network else ""
        state = {name.replace("_orig_mod.", ""): tensor for name, tensor in saved.get("state_dict", {}).items()}
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        return with_weights(network, own, str(path))

    # ---- points

    @property
    def meter(self) -> SimilarityMeter:
        """The object that measures, available after the start of training."""
        assert self._meter is not None
        return self._meter

    def settings(self, members: list[int]) -> dict[str, Any]:
        """Return the settings that a checkpoint and the resumed run must share."""
        meter = self.meter
        return {
            "members": members,
            "sites": list(meter.sites),
            "measures": {measure.title: dict(measure.description) for measure in meter.measures},
            "links": {name: [list(pair) for pair in pairs] for name, pairs in meter.links(members).items()},
            "images": len(meter.inputs),
        }

    def take_starts(self, trainer: Trainer, pl_module: LightningModule) -> dict[int, Any]:
        """Return the weights of all members."""
        return self.states(trainer, pl_module)

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return all similarities, on every rank."""
        with isolate_rng():
            return {"values": self.meter.values(self.states(trainer, pl_module), self.starts)}

    def scalars(self, point: Mapping[str, Any], *, named: bool) -> dict[str, float]:
        """Return means over members and pairs."""
        measures = [measure.title for measure in self.meter.measures]
        return monitor_scalars(point, measures, self.meter.sites, self.prefix)

    def results(self, network: str, members: list[int]) -> RunResults:
        """Return the curves as a figure and a table."""
        used = self.settings(members) if self._meter is not None else self._saved_as
        assert used is not None
        about = {"network": network, **{name: used[name] for name in ("measures", "images")}, "versions": versions()}
        return monitor_results(
            self.points,
            used["links"],
            list(used["measures"]),
            used["sites"],
            network=network,
            about=about,
            name=self.prefix,
        )
