# Does a layer need positions, or is a convolution enough?
# Have: images with sides that are powers of two, and labels
# Get: the share of the convolution in each block, and its type
import torch
from pytorch_lightning import Trainer

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.datamodules import TensorDataModule
from lightning_sym.networks import RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask

labels = torch.arange(240) % 4
images = torch.randn(240, 1, 8, 8)
images[torch.arange(240), 0, 2 * labels, :4] += 3  # the class is a row: where it is matters
data = TensorDataModule((images, labels), standardize=True)
learner = MarginalLikelihood(burn_in=2, every_n_epochs=2, samples=1)
trainer = Trainer(max_epochs=6, callbacks=[learner], default_root_dir="runs/images")
trainer.fit(EquivarianceTask(RelaxedNetwork(["ffc", "conv"], width=2, grid=8, in_channels=1, num_classes=4)), data)
print(learner.layer_types())
print({path: values["relative"] for path, values in learner.records[-1]["paths"].items() if "conv" in path})
