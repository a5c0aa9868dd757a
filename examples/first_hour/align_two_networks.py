# Align two networks in memory, and follow the line between them.
# Have: first.pt and second.pt, and their class in my_networks.py
# Get: the loss barrier before and after matching
import torch
from my_networks import Plain

from lightning_sym.connectivity import barrier
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.symmetry import trace_symmetry, weight_matching

first, second = Plain(), Plain()
for network, file in ((first, "first.pt"), (second, "second.pt")):
    network.load_state_dict(torch.load(file))
match = weight_matching(trace_symmetry(first, torch.randn(2, 1, 8, 8)), first, second)
print(match)
for other in (second, match.network):
    print(barrier(first, other, DigitsDataModule().val_dataloader(), points=5).loss_barrier)
