# Learn one prior precision per layer of your LightningModule, without a validation set.
# Have: a LightningModule
# Get: the log evidence after each epoch, and the precision of each layer
import torch
from my_networks import Plain
from pytorch_lightning import LightningModule, Trainer
from torch.nn.functional import cross_entropy

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.curvature import GaussianPrior
from lightning_sym.datamodules import DigitsDataModule


class Mine(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = Plain()
        self.prior = GaussianPrior(self.network, precision=0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_fit_start(self):
        self.prior.start(self.trainer.optimizers, self.trainer.datamodule)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.network(batch[0]), batch[1])


evidence = MarginalLikelihood(burn_in=1, every_n_epochs=1)
trainer = Trainer(max_epochs=3, callbacks=[evidence], default_root_dir="runs/mine", enable_checkpointing=False)
trainer.fit(Mine(), DigitsDataModule(max_samples=256))
print([record["log_marginal_likelihood"] for record in evidence.records])
print({path: values["precision"] for path, values in evidence.records[-1]["paths"].items()})
