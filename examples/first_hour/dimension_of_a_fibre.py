# How many directions in weight space do not change the function?
# Have: the network in my_networks.py
# Get: their number, the dimension of the orbit, and reasons for the difference
import torch
from my_networks import Plain

from lightning_sym.symmetry import local_dimension, trace_symmetry

torch.manual_seed(0)
network = Plain(width=2).double()
symmetry = trace_symmetry(network, torch.randn(2, 1, 8, 8, dtype=torch.float64))
print(local_dimension(symmetry, network, torch.randn(200, 1, 8, 8, dtype=torch.float64)))
