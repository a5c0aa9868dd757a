# Draw other weights of the same function, and bring both to one form.
# Have: the network in my_networks.py
# Get: the change of the outputs, 0 up to rounding, and the distance of the canonical forms, 0 as well
import torch
from my_networks import Plain

from lightning_sym.symmetry import canonicalize, trace_symmetry

network, images = Plain().double(), torch.randn(100, 1, 8, 8, dtype=torch.float64)
symmetry = trace_symmetry(network, images[:2])
other = symmetry.act(symmetry.sample(), network)
print("weights", (other.conv.weight - network.conv.weight).norm().item())
print("outputs", (other(images) - network(images)).abs().max().item())
forms = [canonicalize(symmetry, one).network.conv.weight for one in (network, other)]
print("forms", (forms[0] - forms[1]).norm().item())
