"""Train and eval mode of a network and its parts."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network in eval mode, and every part back in the mode that it was in, also after an error."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
