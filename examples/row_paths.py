"""A relaxed network with a path that mixes channels in another way in every row, and the rule of its curvature.

    python examples/row_paths.py

trains it for two epochs on small digits and prints the type that its layer chose. In a recipe, run in this folder,
give ``class_path: row_paths.RowNetwork`` as ``model.init_args.network``.
"""

import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.curvature import Rule, register_layer
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.layers import CircularConv, ResidualPathways
from lightning_sym.networks import Network
from lightning_sym.tasks import EquivarianceTask


class ByRow(nn.Module):
    """Mixes channels in another way in every row: equivariant to shifts along rows, not across them.

    Args:
        in_channels: Channels of the input, >= 1.
        out_channels: Channels of the output, >= 1.
        height: Rows of the image, >= 1.
    """

    def __init__(self, in_channels: int, out_channels: int, height: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(height, out_channels, in_channels) / in_channels**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the channels. Shapes ``[N, I, H, W]`` and ``[N, O, H, W]``."""
        return torch.einsum("hoi,nihw->nohw", self.mix, x)


@register_layer(ByRow)
class ByRowRule(Rule):
    """Curvature of the mixing matrices, a block for each row."""

    blocks_first = ("mix",)  # a block for each row: its axis comes before those of a matrix

    def inputs(self, module: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """Order the inputs as ``[rows, N, places, I]``."""
        return {"mix": x.permute(2, 0, 3, 1)}

    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Order the gradients, ``[V, N, O, H, W]``, as ``[rows, V, N, places, O]``."""
        return {"mix": g.permute(3, 0, 1, 4, 2)}


class RowNetwork(Network):
    """One block with two kinds of paths, for square images.

    Args:
        width: Channels of the block, >= 1.
        in_channels: Channels of the images, >= 1.
        image_size: Side of the images, >= 1.
        num_classes: Number of classes, >= 2.
    """

    def __init__(self, width: int = 8, in_channels: int = 1, image_size: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        paths = {"conv": CircularConv(in_channels, width), "row": ByRow(in_channels, width, image_size)}
        self.block = ResidualPathways(paths)
        self.activation = nn.ReLU()
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(width * image_size**2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits. Shapes ``[N, C, H, H]`` and ``[N, num_classes]``."""
        logits: Tensor = self.classifier(self.flatten(self.activation(self.block(x))))
        return logits


def main(max_samples: int = 256) -> None:
    """Train on some of the digits and print the type of the layer.

    Args:
        max_samples: Number of training images, >= 1.
    """
    rows = MarginalLikelihood(burn_in=1, every_n_epochs=1)
    trainer = Trainer(max_epochs=2, callbacks=[rows], default_root_dir="runs/rows")
    trainer.fit(EquivarianceTask(RowNetwork()), DigitsDataModule(max_samples=max_samples))
    print(rows.layer_types())


if __name__ == "__main__":
    main()
