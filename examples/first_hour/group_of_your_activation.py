# Which symmetries does your own activation have?
# Have: a function of numbers
# Get: its group, measured, and the dimension of a network with it
import torch
from torch import nn

from lightning_sym.symmetry import intertwiner_group, trace_symmetry


class SignedSquare(nn.Module):
    def forward(self, x):
        return x * x.abs()


print(intertwiner_group(SignedSquare()))
network = nn.Sequential(nn.Linear(5, 8), SignedSquare(), nn.Linear(8, 3))
symmetry = trace_symmetry(network, torch.randn(2, 5))
print(symmetry.dimension, "scales and", symmetry.signs, "signs of 8 units")
