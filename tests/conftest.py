"""For all tests: one thread, and no pictures on a screen."""

from pathlib import Path

import matplotlib as mpl
import pytest
import torch

mpl.use("agg")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def matching_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zoo of three perceptrons on 300 digits: member 1 is member 0 in another order and scale; 2 is by itself."""
    from lightning_sym.datamodules import DigitsDataModule
    from lightning_sym.networks import MultiLayerPerceptron
    from lightning_sym.symmetry.trace import trace_symmetry
    from lightning_sym.zoo import rebuild_manifest, write_member

    path = tmp_path_factory.mktemp("matching") / "zoo"
    data = DigitsDataModule(max_samples=300)
    images, labels = data.split_tensors("train")
    images = data.normalize(images)

    def trained(seed: int) -> MultiLayerPerceptron:
        network = MultiLayerPerceptron(widths=(12, 10), image_size=8).fresh(seed)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
        return network.eval()

    first, third = trained(0), trained(2)
    symmetry = trace_symmetry(first, images[:2])
    second = symmetry.act(symmetry.sample(torch.Generator().manual_seed(1), scale=0.3), first)
    for number, network in enumerate((first, second, third)):
        state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
        write_member(path, number, state, architecture=first.architecture, data=data.identity())
    rebuild_manifest(path)
    return path
