"""Recalibrate batch norm statistics before every evaluation, and restore them afterwards."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sym._checks import check_integers
from lightning_sym._distributed import gathered
from lightning_sym.callbacks._batches import PreparedBatches
from lightning_sym.callbacks._checks import checked_datamodule, lacking
from lightning_sym.callbacks._waiting import said_if_long
from lightning_sym.networks.batch_norm import batch_norms, recalibrate_batch_norm

# A module, the name of one of its buffers, and a copy of that buffer.
_Snapshot: TypeAlias = list[tuple[nn.Module, str, Tensor]]


@runtime_checkable
class RecalibrationTargets(Protocol):
    """A task that selects the batch norms to recalibrate before its evaluation.

    Without this method all batch norms of the LightningModule are recalibrated, by calling it on images. If the method
    has a parameter ``exact``, it receives whether each batch norm gets a separate pass. Such passes end early, so that
    many networks are better returned one by one than together.
    """

    def recalibration_targets(self) -> Iterable[tuple[nn.Module, Iterable[str] | None]]:
        """Return the networks to recalibrate; called before every evaluation, on every rank.

        Returns:
            Pairs: a network that is called with images of shape ``[B, C, H, W]``, and the names of the batch norms to
            recalibrate (as in :func:`lightning_sym.networks.batch_norm.batch_norms`), or None for all. The
            other batch norms stay in eval mode. The same on all ranks.
        """


class BatchNormRecalibration(Callback):
    """Evaluate with batch norm statistics recomputed on training images without augmentation.

    For networks with weights that differ from those of the running statistics: stitched, averaged, rounded or
    perturbed. The callback acts before every validation (except the sanity check), test and prediction, within a fit or
    alone. It recomputes the statistics with :func:`lightning_sym.networks.recalibrate_batch_norm` on
    ``datamodule.curvature_dataloader()``: as the mean over batches, or exactly (``exact``). All ranks get the same
    statistics, from the images of all. Afterwards the old ones are restored bitwise, ``num_batches_tracked`` included,
    also after an error. Weights, modes and random numbers are unchanged.

    By default all batch norms of the LightningModule are recalibrated, by calling it with batches of images; a method
    ``recalibration_targets`` selects others, see :class:`RecalibrationTargets`. A module without batch norms is
    unchanged, with one message. Batches pass the same hooks and precision as evaluation batches.

    Recalibration happens in ``on_validation_epoch_start`` (and ``on_test_...``, ``on_predict_...``), after the task's
    ``on_validation_start``, which may still change the evaluated network. Restoration happens in ``on_validation_end``,
    after the task's ``on_validation_epoch_end``. As Lightning calls ModelCheckpoint after all other callbacks, **a
    checkpoint holds the statistics of training** (with ``keep=True`` the last recalibrated ones), and a resumed run
    equals an uninterrupted one. The callback has no state and logs no metrics.

    With Lightning's ``WeightAveraging``, use ``keep=True`` and list this callback after it. The averaged weights then
    keep their recalibrated statistics, also in their checkpoint, and the swap restores those of the weights in
    training. Exclude the batch norms' integer counters from the average, which fails on CUDA:
    ``callbacks=[WeightAveraging(avg_fn=float_average), BatchNormRecalibration(keep=True)]``, with
    :func:`lightning_sym.networks.float_average`.

    Args:
        images: Largest number of training images on all ranks together, spread evenly over the training split (the
            same ones for any number of processes). >= 1; None: all.
        batch_size: Images per batch and process. >= 1; None: the datamodule's ``eval_batch_size``. Without ``exact``
            larger batches are better: deeper layers see inputs normalised with the statistics of one batch, which
            deviate by several percent at 32 images and by less than one at 512. A smaller last batch is left out, as
            all batches have the same weight, unless no process has a full one.
        exact: Compute mean and population variance over all images, independently of the batches, with one pass per
            batch norm instead of a single pass.
        keep: Keep the recalibrated statistics instead of restoring the old ones.

    Raises:
        ValueError: If an argument is out of its range.

    Note:
        With ``fast_dev_run`` one batch per process is used (or its number). ``limit_train_batches`` has no effect.
        ``SyncBatchNorm`` needs equally many batches on every process: surplus ones are left out, except with ``exact``.

    References:
        Jordan et al. (2023), "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", arXiv:2211.08403.
        Godfrey et al. (2022), "On the Symmetries of Deep Learning Models and their Internal Representations",
        arXiv:2205.14258, appendix D: for permutations in stitched networks, there on augmented images.
    """

    def __init__(
        self, images: int | None = None, batch_size: int | None = None, exact: bool = False, keep: bool = False
    ) -> None:
        given = {"images": images, "batch_size": batch_size}
        check_integers(**{name: value for name, value in given.items() if value is not None})
        self.images = images
        self.batch_size = batch_size
        self.exact = exact
        self.keep = keep
        self._kept: list[_Snapshot] = []
        self._said = False

    # ---- for other callbacks

    def recalibrate(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Recompute the statistics; follow every call that returns by one of :meth:`restore`.

        Args:
            trainer: Trainer with a datamodule of :mod:`lightning_sym.datamodules`. Call this on all its ranks.
            pl_module: Its task.

        Returns:
            Whether statistics were recomputed: False if there is no batch norm.

        Raises:
            TypeError: If the datamodule is another one, or the task a ``ZooTask``.
            ValueError: If there are no training images, the task can neither be called nor has
                ``recalibration_targets``, or ``recalibrate_batch_norm`` fails. All statistics are then unchanged.
        """
        found = _targets(pl_module, self.exact)
        named = [(network, list(batch_norms(network) if names is None else names)) for network, names in found]
        targets = [(network, names) for network, names in named if names]
        if not targets and not self._said:
            task = type(pl_module).__name__
            rank_zero_info(f"BatchNormRecalibration does nothing: {task} has no batch norm with running statistics.")
            self._said = True
        snapshot = [entry for network, _ in targets for entry in _snapshot(network)]
        try:
            if targets:
                batches = self._batches(trainer, pl_module, [network for network, _ in targets])
            waiting = said_if_long(trainer, "BatchNormRecalibration recomputes statistics")
            with waiting, trainer.precision_plugin.forward_context():
                for network, names in targets:
                    recalibrate_batch_norm(network, batches, exact=self.exact, modules=names)
        except BaseException:
            _write(snapshot)
            raise
        self._kept.append([] if self.keep else snapshot)
        return bool(targets)

    def restore(self, pl_module: LightningModule) -> None:
        """Undo the last :meth:`recalibrate`; no effect with ``keep=True`` or if there is none to undo.

        Args:
            pl_module: The task that was recalibrated.
        """
        if self._kept:
            _write(self._kept.pop())

    @contextmanager
    def recalibrated(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[bool]:
        """Recompute the statistics for a block, and restore them after it, also after an error.

        Args:
            trainer: As for :meth:`recalibrate`.
            pl_module: As for :meth:`recalibrate`.

        Yields:
            Whether statistics were recomputed.
        """
        measured = self.recalibrate(trainer, pl_module)
        try:
            yield measured
        finally:
            self.restore(pl_module)

    # ---- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task, the data and the other callbacks.

        Raises:
            TypeError: If the data are not of ``lightning_sym.datamodules`` or the task is a ``ZooTask``.
            ValueError: If the task can neither be called nor has ``recalibration_targets``, or the order of callbacks
                or ``keep`` is incompatible with ``WeightAveraging``.
        """
        self._said = False
        checked_datamodule(self, trainer)
        _check_task(pl_module)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        averaging = [place for place, callback in enumerate(callbacks) if isinstance(callback, WeightAveraging)]
        if stage != "fit" or not averaging:
            return
        name = type(callbacks[averaging[0]]).__name__
        if not self.keep:
            # It swaps all tensors back in on_validation_epoch_end: restoring would then give the weights in training
            # the running averages of the averaged weights.
            raise ValueError(
                f"BatchNormRecalibration(keep=False) cannot restore statistics that {name} has swapped; set "
                "keep=True, so that the averaged weights keep their recalibrated statistics."
            )
        if self in callbacks and callbacks.index(self) < averaging[-1]:
            raise ValueError(
                f"BatchNormRecalibration precedes {name} and would recalibrate the weights before averaging; "
                "list it after that callback."
            )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Recalibrate, except for the sanity check."""
        if not trainer.sanity_checking:
            self.recalibrate(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the statistics."""
        if not trainer.sanity_checking:
            self.restore(pl_module)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the statistics after a failed evaluation, before ModelCheckpoint may save."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the statistics if the run ended without another hook."""
        while self._kept:
            self.restore(pl_module)

    # ---- the images

    def _batches(self, trainer: Trainer, pl_module: LightningModule, networks: list[nn.Module]) -> PreparedBatches:
        """Return this rank's batches of chosen images, preprocessed as in an evaluation loop."""
        data = checked_datamodule(self, trainer)
        loader = data.curvature_dataloader()
        shares = [int(share) for share in gathered(len(loader.inputs))]
        total = sum(shares)
        if total == 0:
            raise ValueError(
                f"BatchNormRecalibration needs training data, but {type(data).__name__}.curvature_dataloader() has "
                "none; use a training split with samples, or remove the callback."
            )
        count = total if self.images is None else min(self.images, total)
        chosen = torch.arange(count) * total // count  # indices among the images of all ranks
        ends = torch.tensor(shares).cumsum(0)
        owners = torch.bucketize(chosen, ends, right=True)
        counts = torch.bincount(owners, minlength=len(shares)).tolist()
        rank = trainer.global_rank if len(shares) > 1 else 0
        mine = chosen[owners == rank] - (int(ends[rank]) - shares[rank])

        size = loader.batch_size if self.batch_size is None else self.batch_size
        # Every rank knows the shares of the others, so that all decide consistently.
        synchronised = not self.exact and any(
            isinstance(module, nn.SyncBatchNorm) for network in networks for module in network.modules()
        )
        short = self.exact or (min(counts) if synchronised else max(counts)) < size
        lengths = [-(-number // size) if short else number // size for number in counts]
        length = min(lengths) if synchronised else lengths[rank]
        if fast := int(trainer.fast_dev_run):  # type: ignore[attr-defined]
            length = min(length, fast)

        def prepared(part: Tensor) -> Any:
            batch = trainer.precision_plugin.convert_input(
                (loader.normalize(loader.inputs[part]), loader.targets[part])
            )
            return trainer.strategy.batch_to_device(pl_module._on_before_batch_transfer(batch))

        return PreparedBatches(torch.split(mine.to(loader.inputs.device), size)[:length], prepared)


def _check_task(task: LightningModule) -> None:
    if isinstance(task, RecalibrationTargets):
        return
    if not lacking(task, ("population",)):
        raise TypeError(
            f"BatchNormRecalibration evaluates one network with other statistics, but {type(task).__name__} evaluates "
            "the members of a population with the statistics kept with their weights; remove the callback, or use "
            "recalibrate_batch_norm on a member of the zoo."
        )
    measured = any(isinstance(part, _BatchNorm) and part.running_mean is not None for part in task.modules())
    if measured and type(task).forward is LightningModule.forward:
        raise ValueError(
            f"BatchNormRecalibration calls {type(task).__name__} with inputs, but it has no forward method; define "
            "forward, or recalibration_targets() to select the networks."
        )


def _targets(task: LightningModule, exact: bool) -> list[tuple[nn.Module, Iterable[str] | None]]:
    _check_task(task)
    if not isinstance(task, RecalibrationTargets):
        return [(task, None)]
    if "exact" in inspect.signature(task.recalibration_targets).parameters:
        return list(task.recalibration_targets(exact=exact))  # type: ignore[call-arg]
    return list(task.recalibration_targets())


def _snapshot(network: nn.Module) -> _Snapshot:
    return [
        (module, name, buffer.clone())
        for module in batch_norms(network).values()
        for name, buffer in module.named_buffers()
    ]


def _write(snapshot: _Snapshot) -> None:
    """Restore copies of buffers, in place; the module may have moved to another device."""
    with torch.no_grad():
        for module, name, value in snapshot:
            module.get_buffer(name).copy_(value)
