"""The two lines at the start of a fit: network, members, parameters, data, device and run folder."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelSummary
from torch.nn.parameter import is_lazy

from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports.report import counted
from lightning_sym.tasks.population_interface import PopulationInterface
from lightning_sym.zoo import ModelZoo


class RunSummary(ModelSummary):
    """Print two lines at the start of a fit, in place of Lightning's table of modules.

    Args:
        folder: The run folder, named in the second line.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the lines, on rank 0."""
        if trainer.is_global_zero:
            print(f"  {trained(pl_module)}\n  {_data(trainer)}; {_device(trainer)}; run folder {self._folder}")


def trained(task: Any) -> str:
    """Return the network, the number of members and of parameters that are trained, and the task."""
    own = [one for name, one in task.named_parameters() if name != "nothing"]  # which tasks without training have
    size = sum(one.numel() for one in own if one.requires_grad and not is_lazy(one))
    members = len(getattr(task, "numbers", ()))
    here = len(getattr(task, "population", ()))
    parts = [
        *([_together(task, members)] if members else []),
        f"{size:,} trained parameter{'s' * (size != 1)}{' on this process' * (0 < here < members)}",
    ]
    return f"{_network(task)}: {', '.join(parts)} ({type(task).__name__})"


def _together(task: Any, members: int) -> str:
    """Return the number of members; tasks that train other things, such as pairs or maps, name these otherwise."""
    named = getattr(type(task), "member_title", None) not in (None, PopulationInterface.member_title)
    return f"{members} trained together" if named else counted(members, "member")


def _network(task: Any) -> str:
    """Return the name of the task's network, or of the networks in its zoo; that of the task if it has neither."""
    network, zoo = getattr(task, "network", None), getattr(task, "zoo", None)
    if isinstance(network, torch.nn.Module):
        return architecture_name(network)
    if isinstance(zoo, str):
        architecture = ModelZoo.open(zoo, allow=getattr(task, "allow", None) or ()).architecture
        return str(architecture["class_path"]).rpartition(".")[2]
    return type(task).__name__


def _data(trainer: Trainer) -> str:
    data: Any = getattr(trainer, "datamodule", None)
    if data is None:
        return "data of the task"
    size = f", {len(data.split_tensors('train')[0]):,} for training" if isinstance(data, InMemoryDataModule) else ""
    return f"{type(data).__name__}{size}"


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return name if trainer.world_size == 1 else f"{name} and {trainer.world_size - 1} more"
