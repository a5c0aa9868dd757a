"""A zoo of regressors: networks that predict the right half of a digit from its left half.

A loss and the targets turn a zoo into regressors; the rest is as for classifiers.

    python examples/pixel_regression.py --epochs 30

The members are written to a zoo, from which they can be stitched or matched like others. The picture
``halves.png`` shows digits of the test split next to every member's prediction.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from pytorch_lightning import Trainer
from torch import Tensor
from torch.nn import functional as F

from lightning_sym.callbacks import ZooExport
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask


class RightHalves(ZooTask):
    """Predict the 32 pixels on the right of a digit from those on the left."""

    def evaluation_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return digits without their right halves, and the right halves: ``[..., 1, 8, 8]`` and ``[..., 32]``."""
        images, _ = batch
        left = images.clone()
        left[..., 4:] = 0
        return left, images[..., 4:].flatten(-3)


def train(folder: Path, members: int = 8, epochs: int = 30, **data: int) -> tuple[RightHalves, DigitsDataModule]:
    """Train the regressors and write them to ``folder/zoo``."""
    network = MultiLayerPerceptron(widths=[64, 64], image_size=8, num_classes=32)
    task = RightHalves(network, members=members, execution="vmap", loss=F.mse_loss)
    digits = DigitsDataModule(**data)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[ZooExport(str(folder / "zoo"), overwrite=True)],
        logger=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(task, digits)
    return task, digits


def picture(task: RightHalves, digits: DigitsDataModule, count: int = 6) -> Figure:
    """Draw digits of the test split, and every member's prediction from their left halves."""
    images = digits.normalize(digits.split_tensors("test").images[:count])
    left, _ = task.evaluation_batch((images, torch.zeros(count)))
    with torch.no_grad():
        painted = task.eval()(left).unflatten(-1, (1, 8, 4))
    rows = [images, *(torch.cat([images[..., :4], one], dim=-1) for one in painted)]
    figure = Figure(figsize=(count, len(rows)))
    for axes, image in zip(figure.subplots(len(rows), count).flat, torch.cat(rows)[:, 0], strict=True):
        axes.imshow(image.numpy(), cmap="gray")
        axes.set_axis_off()
    return figure


def main() -> None:
    """Train, print every member's mean squared error, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/pixel-regression"))
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    task, digits = train(options.folder, options.members, options.epochs)
    for number, loss in zip(task.numbers, task.history["val/loss"][-1], strict=True):
        print(f"member {number}: mean squared error {loss:.3f} on validation digits, of normalised pixels")
    picture(task, digits).savefig(options.folder / "halves.png", dpi=150)
    print(options.folder / "halves.png")


if __name__ == "__main__":
    main()
