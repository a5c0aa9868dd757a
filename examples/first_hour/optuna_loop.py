# Search for a width and a learning rate.
# Have: Optuna
# Get: the best of four trials, each the mean of two networks
from functools import partial

import optuna
import torch
from pytorch_lightning import Trainer

from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask

data, quiet = DigitsDataModule(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def loss(trial: optuna.Trial) -> float:
    network = MultiLayerPerceptron([trial.suggest_int("width", 8, 64, log=True)], image_size=8)
    adam = partial(torch.optim.Adam, lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    trainer = Trainer(max_epochs=2, **quiet)
    trainer.fit(ZooTask(network, members=2, execution="vmap", optimizer=adam), data)
    return float(trainer.callback_metrics["val/loss"])


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(loss, n_trials=4)
print(study.best_params, study.best_value)
