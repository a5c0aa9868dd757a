"""Residual blocks of torchvision without an activation after the sum."""

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck


class LinearSumBasicBlock(BasicBlock):  # type: ignore[misc]
    """Two convolutions and a shortcut; returns their sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of branch and shortcut."""
        branch: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return branch + _shortcut(self, x)


class LinearSumBottleneck(Bottleneck):  # type: ignore[misc]
    """Three convolutions and a shortcut; returns their sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of branch and shortcut."""
        inside: Tensor = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        branch: Tensor = self.bn3(self.conv3(inside))
        return branch + _shortcut(self, x)


def _shortcut(block: BasicBlock | Bottleneck, x: Tensor) -> Tensor:
    return x if block.downsample is None else block.downsample(x)


def leave_out_last_activations(network: nn.Module) -> int:
    """Change all residual blocks to return the sum itself; parameters and their names stay as they are.

    Returns:
        Number of changed blocks.
    """
    changed = 0
    for block in network.modules():
        for whole, linear in ((BasicBlock, LinearSumBasicBlock), (Bottleneck, LinearSumBottleneck)):
            if type(block) is whole:
                block.__class__ = linear  # its parts are those of the class that it derives from
                changed += 1
    return changed
