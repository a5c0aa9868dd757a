"""Running statistics of batch norms measured anew before every evaluation, and put back afterwards."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sym._checks import check_integers
from lightning_sym._distributed import gathered
from lightning_sym.callbacks._checks import checked_datamodule, lacking
from lightning_sym.callbacks._waiting import said_if_long
from lightning_sym.networks.batch_norm import batch_norms, recalibrate_batch_norm

# A module, the name of one of its buffers, and a copy of that buffer.
_Snapshot: TypeAlias = list[tuple[nn.Module, str, Tensor]]


@runtime_checkable
class RecalibrationTargets(Protocol):
    """A task that says which batch norms are measured anew before it is evaluated.

    Without this method all batch norms of the LightningModule are, with the LightningModule called on the images. If
    the method has a parameter ``exact``, it is told whether a pass is taken for each batch norm (and ended there), so
    that many networks are better given one by one than together.
    """

    def recalibration_targets(self) -> Iterable[tuple[nn.Module, Iterable[str] | None]]:
        """Return what to recalibrate, one after the other; asked for before every evaluation, on every rank.

        Returns:
            Pairs: a network that is called with images of shape ``[B, C, H, W]``, and the names of its batch norms
            that are measured (as in :func:`lightning_sym.networks.batch_norm.batch_norms`), or None for all. The
            other batch norms stay in eval mode. The same on all ranks.
        """


class BatchNormRecalibration(Callback):
    """Evaluate with batch norm statistics that are measured anew, on training images without augmentation.

    For networks whose weights are not those that the running statistics were gathered with: stitched, averaged,
    rounded or perturbed. Before every validation (but for the sanity check), test and prediction, during a fit and
    alone, the statistics are measured with :func:`lightning_sym.networks.recalibrate_batch_norm` on
    ``datamodule.curvature_dataloader()``: reset, then the mean over batches, or exactly (``exact``). All ranks get the
    same statistics, from the images of all. Afterwards the old ones are put back bitwise, ``num_batches_tracked``
    included, also after an error; weights, modes and random numbers are left alone.

    What is measured: all batch norms of the LightningModule, which is called with a batch of images; or what its
    method ``recalibration_targets`` returns, see :class:`RecalibrationTargets`. A module without batch norms is left
    as it is, and that is said once. Batches pass the hooks and the precision that evaluation batches pass.

    When: in ``on_validation_epoch_start`` (and ``on_test_...``, ``on_predict_...``), so after ``on_validation_start``
    of the task, which may choose there what will be evaluated. Put back: in ``on_validation_end``, so after
    ``on_validation_epoch_end`` of the task, which still sees what was evaluated. As Lightning calls ModelCheckpoint
    after all other callbacks, **a checkpoint holds the statistics of training** (with ``keep=True`` those measured
    last) and a resumed run goes on as if it had not been interrupted. The callback keeps no state and logs nothing.

    With Lightning's ``WeightAveraging``, use ``keep=True`` and list this callback after it: the averaged weights keep
    the statistics that were measured with them, in their checkpoint too, and the weights in training get their own
    back with the swap. Leave the batch norms' integer counters out of the average, which CUDA refuses to compute:
    ``callbacks=[WeightAveraging(avg_fn=float_average), BatchNormRecalibration(keep=True)]``, with
    :func:`lightning_sym.networks.float_average`.

    Args:
        images: At most so many training images, of all ranks together, spread evenly over the training split (the
            same ones for any number of processes). >= 1; None: all.
        batch_size: Images per batch and process. >= 1; None: the datamodule's ``eval_batch_size``. The larger, the
            better without ``exact``: deeper layers see inputs that were normalised with the statistics of one batch,
            off by several percent at 32 images and below one at 512. A last batch that is smaller is left out, as all
            batches count alike, unless no process has a full one.
        exact: Measure the mean and the population variance over all images, whatever the batches, in one pass for
            each batch norm in place of one for all.
        keep: Leave the statistics that were measured in place, instead of restoring the old ones.

    Raises:
        ValueError: If an argument is out of its range.

    Note:
        With ``fast_dev_run`` one batch per process is used (or its number). ``limit_train_batches`` has no effect.
        ``SyncBatchNorm`` needs as many batches on every process, so surplus ones are left out, but not if ``exact``.

    References:
        Jordan et al. (2023), "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", arXiv:2211.08403.
        Godfrey et al. (2022), "On the Symmetries of Deep Learning Models and their Internal Representations",
        arXiv:2205.14258, appendix D: for permutations in stitched networks, on augmented images there.
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
        """Measure the statistics anew; every call that returns is to be followed by one of :meth:`restore`.

        Args:
            trainer: With a datamodule of :mod:`lightning_sym.datamodules`. To be called on every one of its ranks.
            pl_module: Its task.

        Returns:
            Whether anything was measured: False if there is no batch norm.

        Raises:
            TypeError: If the datamodule is another one, or the task a ``ZooTask``.
            ValueError: If there are no training images, the task can neither be called nor has
                ``recalibration_targets``, or for the reasons that ``recalibrate_batch_norm`` has. All statistics are
                then as they were.
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
            waiting = said_if_long(trainer, "BatchNormRecalibration measures statistics anew")
            with waiting, trainer.precision_plugin.forward_context():
                for network, names in targets:
                    recalibrate_batch_norm(network, batches, exact=self.exact, modules=names)
        except BaseException:
            _write(snapshot)
            raise
        self._kept.append([] if self.keep else snapshot)
        return bool(targets)

    def restore(self, pl_module: LightningModule) -> None:
        """Undo the last :meth:`recalibrate` that was not undone yet; nothing with ``keep=True`` or if there is none.

        Args:
            pl_module: The task that was recalibrated.
        """
        if self._kept:
            _write(self._kept.pop())

    @contextmanager
    def recalibrated(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[bool]:
        """Measure the statistics anew for a block, and restore them after it, also after an error.

        Args:
            trainer: As for :meth:`recalibrate`.
            pl_module: As for :meth:`recalibrate`.

        Yields:
            Whether anything was measured.
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
                or ``keep`` does not go with ``WeightAveraging``.
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
            # It swaps all tensors back in on_validation_epoch_end, and the weights in training would then be given
            # the running averages of the averaged ones.
            raise ValueError(
                f"BatchNormRecalibration(keep=False) cannot put statistics back that {name} has swapped by then; set "
                "keep=True, with which the averaged weights keep the statistics measured for them."
            )
        if self in callbacks and callbacks.index(self) < averaging[-1]:
            raise ValueError(
                f"BatchNormRecalibration stands before {name} and would measure the weights that are not averaged; "
                "list it after that callback."
            )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, but not for the sanity check."""
        if not trainer.sanity_checking:
            self.recalibrate(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore."""
        if not trainer.sanity_checking:
            self.restore(pl_module)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore what an evaluation that failed has left; before ModelCheckpoint may save."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore what is left, for the ways to end that call no other hook."""
        while self._kept:
            self.restore(pl_module)

    # ---- the images

    def _batches(self, trainer: Trainer, pl_module: LightningModule, networks: list[nn.Module]) -> "_Batches":
        """Return this rank's batches."""
        data = checked_datamodule(self, trainer)
        loader = data.curvature_dataloader()
        shares = [int(share) for share in gathered(len(loader.inputs))]
        total = sum(shares)
        if total == 0:
            raise ValueError(
                f"BatchNormRecalibration needs training data, and {type(data).__name__}.curvature_dataloader() has "
                "none; give the training split some, or remove the callback."
            )
        count = total if self.images is None else min(self.images, total)
        chosen = torch.arange(count) * total // count  # among the images of all ranks
        ends = torch.tensor(shares).cumsum(0)
        owners = torch.bucketize(chosen, ends, right=True)
        counts = torch.bincount(owners, minlength=len(shares)).tolist()
        rank = trainer.global_rank if len(shares) > 1 else 0
        mine = chosen[owners == rank] - (int(ends[rank]) - shares[rank])

        size = loader.batch_size if self.batch_size is None else self.batch_size
        # Every rank knows what the others have, so that all decide alike.
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

        return _Batches(torch.split(mine.to(loader.inputs.device), size)[:length], prepared)


@dataclass(frozen=True)
class _Batches:
    """Batches of chosen images, as an evaluation loop would hand them to its step; as often as they are asked for."""

    parts: Sequence[Tensor]
    prepared: Callable[[Tensor], Any]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return map(self.prepared, self.parts)


def _check_task(task: LightningModule) -> None:
    if isinstance(task, RecalibrationTargets):
        return
    if not lacking(task, ("population",)):
        raise TypeError(
            f"BatchNormRecalibration evaluates one network with other statistics, and {type(task).__name__} evaluates "
            "the members of a population with those that it keeps with their weights; remove the callback, or use "
            "recalibrate_batch_norm on a member of the zoo."
        )
    measured = any(isinstance(part, _BatchNorm) and part.running_mean is not None for part in task.modules())
    if measured and type(task).forward is LightningModule.forward:
        raise ValueError(
            f"BatchNormRecalibration calls {type(task).__name__} with inputs, and it has no forward method; define "
            "forward, or recalibration_targets() to say which networks are measured."
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
    """Put copies of buffers back, in place; the module may have moved to another device."""
    with torch.no_grad():
        for module, name, value in snapshot:
            module.get_buffer(name).copy_(value)
