"""Experiments on the symmetries of neural networks, as PyTorch Lightning recipes.

The parts are imported by name, for example ``from lightning_sym.networks import MyrtleCNN``; importing the package
itself loads nothing heavy.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lightning_sym")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
