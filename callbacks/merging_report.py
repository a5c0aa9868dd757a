"""Merged fine-tunes, unaligned and aligned: the tables and the pictures."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn

from lightning_sym._checks import check_seeds
from lightning_sym._distributed import summed
from lightning_sym._random import generator
from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.merging import align
from lightning_sym.merging.methods import merge_method, merge_tensors
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.merged_tasks import (
    ALIGNED,
    ALONE,
    ONE_MOVED,
    ONE_PARENT,
    OTHER_SEED,
    PARENT,
    PARENT_OWN,
    PARENT_TASK,
    PLAIN,
    TUNED,
    TUNED_OWN,
    TWO_SEEDS,
    MergedAccuracy,
    merged_task_results,
)
from lightning_sym.reports.report import counted
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.tasks import FineTuneTask

METHODS: Mapping[str, Mapping[str, Any]] = {
    "linear": {},
    "slerp": {},
    "karcher": {},
    "task_arithmetic": {"lambda": 0.5},
    "ties": {"density": 0.5},
    "dare_ties": {"density": 0.5, "normalize": True},
    "model_stock": {},
}


class MergingReport(RunReport):
    """Merge the networks of a :class:`lightning_sym.tasks.FineTuneTask` and report their accuracies on all tasks.

    At the end of the fit, the report merges networks by each method, unaligned and aligned to the first of them
    (:func:`lightning_sym.merging.align`), for each parent:

    - ``one parent``: its fine-tunes; the parent is the base.
    - ``one moved``: the same, with a random element of the symmetry applied to the first fine-tune.
    - ``two seeds``: the parent and the next one of the zoo, without a base.
    - ``vector of other seed``: the difference of a fine-tune of the next parent from that parent, added to the
      parent; aligned, both networks are changed by the element that aligns the parents.

    Methods are used where they apply: those with a base not for ``two seeds``, those for two models only there. The
    score of a merged network is its mean accuracy on the tasks of the merged networks, on test data. The tables also
    have its accuracy on the parents' task, which is that of the unchanged data. Statistics of batch norms are averages.
    Processes share the images.

    On rank 0, in ``results``: ``summary.csv`` and ``.json`` (scores by setting and method, means over parents),
    ``accuracies.csv`` and ``.json`` (each parent and task), ``merging.png`` and ``tasks.png`` (in TensorBoard under
    ``figures/MergingReport``). Logged are ``merging/<setting>/<method>/aligned`` and, as details,
    ``.../plain``; a table is printed.

    Args:
        methods: Settings of each method by its name, as for :func:`lightning_sym.merging.methods.merge_tensors`; of
            settings of each model one number for all. Default: ``linear``, ``slerp``, ``karcher``, ``task_arithmetic``
            (lambda 0.5), ``ties`` and ``dare_ties`` (density 0.5, normalised) and ``model_stock``.
        seed: Seed of random elements and masks.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If there is no such method, or it has no such setting.
    """

    needs = (
        *("tasks", "task_of", "task_batch", "parent_of", "parent", "symmetry", "zoo", "network", "numbers"),
        *("kept_states", "evaluation_batch"),
    )
    example = "FineTuneTask"

    def __init__(
        self, methods: dict[str, dict[str, Any]] | None = None, seed: int = 0, dirpath: str | None = None
    ) -> None:
        self.methods = {name: dict(settings) for name, settings in (METHODS if methods is None else methods).items()}
        for name, settings in self.methods.items():
            method = merge_method(name)
            if unknown := sorted(settings.keys() - method.per_model.keys() - method.shared.keys()):
                raise ValueError(
                    f"methods: {name} has no setting {unknown[0]}; it has "
                    f"{', '.join([*method.per_model, *method.shared]) or 'none'}."
                )
        check_seeds(seed=seed)
        self.seed = seed
        super().__init__(dirpath)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data.

        Raises:
            TypeError: If the task lacks a required attribute, or the data are not of ``lightning_sym.datamodules``.
            ValueError: If networks are no classifiers.
        """
        super().setup(trainer, pl_module, stage)
        if self.active and not pl_module.classifies:
            raise ValueError(
                "MergingReport reports accuracies, but the loss of the task is no cross-entropy; leave out loss."
            )

    def measure(self, trainer: Trainer, task: FineTuneTask, data: InMemoryDataModule) -> list[MergedAccuracy]:
        """Merge networks and evaluate them."""
        states = task.kept_states()
        families = {parent: _family(task, parent, states) for parent in sorted({task.parent_of(n) for n in states})}
        batches, parents, names = _batches(trainer, task, data), list(families), [PARENT_TASK, *map(_name, task.tasks)]
        found, counts, device = [], [], trainer.strategy.root_device
        with self.progress(trainer, "merging") as progress, torch.no_grad():
            for done, parent in enumerate(parents, 1):
                following = families[parents[done % len(parents)]] if len(parents) > 1 else None
                for about, network in self._merged(task, parent, families[parent], following):
                    found.append(about)
                    counts.append(_correct(copied(network).to(device), batches))
                progress(done, len(parents))
        # Sums over processes that share the images.
        total = int(summed(torch.tensor(sum(len(labels) for _, labels in batches[0]), device=device)))
        right = summed(torch.tensor(counts, device=device)).tolist()
        return [
            MergedAccuracy(**about, accuracy={name: count / total for name, count in zip(names, row, strict=True)})
            for about, row in zip(found, right, strict=True)
        ]

    def report(self, trainer: Trainer, task: FineTuneTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the tables and the figures."""
        parents = sorted({one.parent for one in measured})
        about = {
            "architecture": task.network.architecture,
            "zoo": task.zoo,
            "seeds": {"parents": parents, "members": task.numbers, "seed": self.seed},
            "tasks": task.tasks,
            "methods": self.methods,
            **self.source(data),
        }
        title = f"{architecture_name(task.network)}, {counted(len(parents), 'parent')}"
        return merged_task_results(measured, title=title, about=about)

    def _merged(
        self, task: FineTuneTask, parent: int, family: "_Family", following: "_Family | None"
    ) -> Iterator[tuple[dict[str, Any], nn.Module]]:
        """Yield networks, with a description of each."""
        symmetry, base, tuned = task.symmetry, family[0], dict(family[1])
        names = list(map(_name, task.tasks))

        def entry(setting: str, method: str, how: str, tasks: Sequence[str], network: nn.Module) -> Any:
            about = {"setting": setting, "method": method, "align": how, "parent": parent, "tasks": tasks}
            return about, network

        yield entry(ALONE, PARENT, ALONE, names, base)
        yield entry(ALONE, PARENT_OWN, ALONE, [PARENT_TASK], base)
        for name, network in tuned.items():
            yield entry(ALONE, TUNED, ALONE, names, network)
            yield entry(ALONE, TUNED_OWN, ALONE, [name], network)

        first, *others = tuned.values()
        element = symmetry.sample(generator=generator("merging", self.seed, parent))
        families = {ONE_PARENT: [first, *others], ONE_MOVED: [symmetry.act(element, first), *others]}
        for setting, networks in families.items():
            aligned = align(symmetry, [base, *networks], seed=self.seed).networks[1:]
            for how, own in ((PLAIN, networks), (ALIGNED, aligned)):
                for method in self._applicable(len(own), based=True):
                    yield entry(setting, method, how, list(tuned), self._merge(method, own, base))
        if following is None:
            return
        other, carried = following
        found = align(symmetry, [base, other], seed=self.seed)
        for how, moved in ((PLAIN, other), (ALIGNED, found.networks[1])):
            for method in self._applicable(2, based=False):
                yield entry(TWO_SEEDS, method, how, [PARENT_TASK], self._merge(method, [base, moved]))
            for name, network in carried.items():
                if how == ALIGNED:
                    network = symmetry.act(found.elements[1], network)
                states = [_state(base), _state(network), _state(moved)]
                added = dict(merge_tensors("linear", states, weight=[1.0, 1.0, -1.0]))
                added |= {key: buffer for key, buffer in base.named_buffers() if key in added}
                yield entry(OTHER_SEED, "task_arithmetic", how, [name], _with_state(base, added))

    def _applicable(self, count: int, *, based: bool) -> list[str]:
        """Return the methods for so many networks, with or without a base."""
        known = {name: merge_method(name) for name in self.methods}
        return [
            name
            for name, method in known.items()
            if method.fewest <= count <= (method.most or count) and (based or method.base != "needed")
        ]

    def _merge(self, name: str, networks: Sequence[nn.Module], base: nn.Module | None = None) -> nn.Module:
        """Return a merged network."""
        method, settings = merge_method(name), dict(self.methods[name])
        if "lambda" in settings:
            settings["lambda_"] = settings.pop("lambda")
        states = [_state(network) for network in networks]
        origin = None if base is None or method.base == "unused" else _state(base)
        merged = dict(merge_tensors(method, states, base=origin, seed=self.seed, **settings))
        for key, buffer in networks[0].named_buffers():
            if key in merged and buffer.is_floating_point():  # variances may not be sums of differences
                merged[key] = merge_tensors("linear", [own[key] for own in states])
        return _with_state(networks[0], merged)


_Family = tuple[nn.Module, dict[str, nn.Module]]  # a parent, and its fine-tunes by task


def _name(task: Any) -> str:
    return f"task {task}"


def _family(task: FineTuneTask, parent: int, states: Mapping[int, Mapping[str, Tensor]]) -> _Family:
    own = {number: state for number, state in states.items() if task.parent_of(number) == parent}
    dtype = next(tensor.dtype for state in own.values() for tensor in state.values() if tensor.is_floating_point())
    base = task.parent(parent).to(dtype).eval()
    return base, {_name(task.task_of(number)): _with_state(base, state) for number, state in own.items()}


def _state(network: nn.Module) -> dict[str, Tensor]:
    return network.state_dict()


def _with_state(network: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    found = copied(network)
    found.load_state_dict(state)
    return found


_Batches = list[tuple[Tensor, Tensor]]


def _batches(trainer: Trainer, task: FineTuneTask, data: InMemoryDataModule) -> list[_Batches]:
    """Return this process's share of the test data: first unchanged, then in the form of each task."""
    convert = trainer.strategy.precision_plugin.convert_input
    plain = [task.evaluation_batch(convert(batch)) for batch in data.test_dataloader()]
    return [plain, *([task.task_batch(one, *batch) for batch in plain] for one in task.tasks)]


def _correct(network: nn.Module, batches: Sequence[_Batches]) -> list[int]:
    """Return the numbers of correctly classified inputs, by task."""
    network.eval()
    return [sum(int((network(inputs).argmax(-1) == labels).sum()) for inputs, labels in own) for own in batches]
