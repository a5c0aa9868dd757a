# Make checkpoints by your own training loop.
# Have: the network in my_networks.py
# Get: `first.pt` and `second.pt`, which other scripts read
import torch
from my_networks import Plain
from torch.nn.functional import cross_entropy

from lightning_sym.datamodules import DigitsDataModule

data = DigitsDataModule(batch_size=64)
for seed, name in enumerate(("first.pt", "second.pt")):
    torch.manual_seed(seed)
    network = Plain()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(30):
        for images, labels in data.train_dataloader():
            optimizer.zero_grad()
            cross_entropy(network(images), labels).backward()
            optimizer.step()
    torch.save(network.state_dict(), name)
