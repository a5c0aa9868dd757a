"""Settings of tasks that are out of range, or do not go together, are refused by the constructor, by name."""

import math

import pytest
import torch
from helpers import refused
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import (
    EquivalenceTask,
    EquivarianceTask,
    MatchingTask,
    PopulationTask,
    RotationTask,
    StitchingTask,
    ZooTask,
)

NETWORK = MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False)


class Whole(torch.optim.SGD):
    """An optimizer that is not known to act entry by entry."""


def together(optimizer=Whole, **settings):
    return ZooTask(NETWORK, optimizer=lambda parameters: optimizer(parameters, lr=0.1), **settings)


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(PopulationTask, **bad) for bad in ({"members": 0}, {"seed": -1}, {"execution": "pmap"})),
        *(refused(PopulationTask, **bad) for bad in ({"keep": "first"}, {"lr_scheduler_interval": "day"})),
        refused(PopulationTask, weight_decay_on="biases"),
        refused(together, optimizer=torch.optim.LBFGS, says="LBFGS searches along one direction for all members"),
        refused(together, execution="vmap", says="Whole may look at a tensor as a whole"),
        refused(ZooTask, NETWORK, channels_last=True, execution="vmap", says='works with execution="loop" only'),
        refused(ZooTask, NETWORK, lr_scheduler=ReduceLROnPlateau, says="ReduceLROnPlateau waits for one metric"),
        refused(ZooTask, NETWORK, loss=mse_loss, label_smoothing=0.1, says="is of the cross-entropy"),
        *(refused(ZooTask, NETWORK, **bad) for bad in ({"mixup": -1.0}, {"cutmix": math.inf})),
        refused(ZooTask, NETWORK, mixup=1.0, mixing_epochs=0, says="mixing_epochs must be an integer >= 1"),
        refused(ZooTask, NETWORK, mixup=0.001, says="mixup must be 0 or at least 0.01"),
        refused(ZooTask, NETWORK, mixing_epochs=3, says="is the end of mixup or cutmix"),
        refused(ZooTask, NETWORK, cutmix=1.0, loss=mse_loss, says="there is a loss of its own; drop one"),
        refused(ZooTask, NETWORK, mixup=1.0, prior_precision=1.0, says="there is a prior, of the original data"),
        refused(
            ZooTask, NETWORK, loss=mse_loss, prior_precision=1.0, says="With loss mse_loss the loss is no log like"
        ),
        *(refused(EquivalenceTask, NETWORK, **bad) for bad in ({"members": 0}, {"points": 0}, {"seed": -1})),
        *(refused(EquivalenceTask, NETWORK, **bad) for bad in ({"tolerance": 0.0}, {"held_out": math.nan})),
        *(refused(EquivalenceTask, NETWORK, **bad) for bad in ({"round_steps": 0}, {"execution": "fast"})),
        refused(EquivalenceTask, NETWORK, milestones=[0.0], says="milestones[0] must be a number > 0"),
        refused(EquivalenceTask, NETWORK, max_rounds=2, says="needs round_steps"),
        refused(EquivalenceTask, NETWORK, member=1, says="member 1 is of a zoo"),
        refused(EquivalenceTask, NETWORK, zoo="somewhere", teacher=3, says="both name"),
        refused(EquivalenceTask, None, says="Give network"),
        *(refused(EquivalenceTask, NETWORK, teacher=teacher, says="seed >= 0") for teacher in (-1, 3.5)),
        refused(EquivalenceTask, NETWORK, optimizer=torch.optim.LBFGS, says="LBFGS"),
        *(refused(EquivarianceTask, NETWORK, **bad) for bad in ({"precision": 0.0}, {"noise": -1.0})),
        *(refused(EquivarianceTask, NETWORK, **bad) for bad in ({"temperature": math.inf}, {"likelihood": "poisson"})),
        refused(EquivarianceTask, NETWORK, prior_step="exact"),
        refused(EquivarianceTask, NETWORK, optimizer=torch.optim.AdamW, says="AdamW decays weights"),
        refused(EquivarianceTask(NETWORK).prior.strength, "linear1.weight", says="which start() counts"),
        *(refused(MatchingTask, "zoo", methods=methods) for methods in ([], ["weights", "weights"])),
        *(refused(MatchingTask, "zoo", **bad) for bad in ({"restarts": 0}, {"pairs": []})),
        *(refused(RotationTask, "zoo", members=members) for members in ([], "some", [0, 0])),
        *(refused(RotationTask, "zoo", **bad) for bad in ({"sites": []}, {"sites": "activation1"}, {"kinds": []})),
        refused(RotationTask, "zoo", sites=["a", "a"], says="sites must be a list of different names"),
        *(refused(RotationTask, "zoo", **bad) for bad in ({"kinds": "all"}, {"repeats": 0}, {"scale": -1.0})),
        *(refused(RotationTask, "zoo", **bad) for bad in ({"scale": math.inf}, {"seed": -1})),
        refused(RotationTask, "zoo", weight_decay_on="biases"),
        refused(RotationTask, "zoo", optimizer=torch.optim.LBFGS, says="LBFGS searches along one direction"),
        *(refused(StitchingTask, "zoo", **bad) for bad in ({"pairs": []}, {"pairs": "some"}, {"pairs": 0})),
        refused(StitchingTask, "zoo", pairs=[[0, 1, 2]], says="pairs must be lists of two members' numbers"),
        refused(StitchingTask, "zoo", pairs=[[1, 1]], says="pairs must be of two different members, got [1, 1]"),
        refused(StitchingTask, "zoo", pairs=[[0, 1], [0, 1]], says="pairs must be different"),
        *(refused(StitchingTask, "zoo", **bad) for bad in ({"ports": "some"}, {"batch_norm": "train"}, {"seed": -1})),
        *(refused(StitchingTask, "zoo", **bad) for bad in ({"init": "zeros"}, {"head_start": 1.5}, {"maps": []})),
        refused(StitchingTask, "zoo", head_start=math.nan),
        refused(StitchingTask, "zoo", maps="full"),
        refused(StitchingTask, "zoo", maps=["full", "full"], says="maps must be different, got 'full' twice"),
        refused(StitchingTask, "zoo", maps=["rank(0)"], says="rank needs an integer >= 1"),
        refused(StitchingTask, "zoo", optimizer=torch.optim.LBFGS, says="LBFGS searches along one direction"),
        refused(StitchingTask, "zoo", lr_scheduler=ReduceLROnPlateau, says="ReduceLROnPlateau waits for one metric"),
    ],
)
def test_settings_out_of_range_are_refused(refusal):
    refusal()


def test_optimizers_of_unknown_kind_are_fine_in_a_loop():
    assert together(execution="loop").describe()["optimizer_name"] == "Whole"
