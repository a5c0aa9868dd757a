# Estimate a learning coefficient by any loss and any batches.
# Have: a module and a loss that is a mean over samples
# Get: the estimate with its interval; 4 is half the number of weights of this regular model
import torch
from torch import nn
from torch.nn.functional import mse_loss

from lightning_sym.landscape import learning_coefficient

torch.manual_seed(0)
network = nn.Linear(4, 2, bias=False).double()
x = torch.randn(200, 4, dtype=torch.float64)
found = learning_coefficient(network, [(x, network(x).detach())], mse_loss, steps=1000)
print(found.estimate, found.interval(), found.refusal)
