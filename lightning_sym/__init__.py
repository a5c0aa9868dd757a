"""Experiments on the symmetries of neural networks, as PyTorch Lightning recipes.

Import the parts by name, for example ``from lightning_sym.networks import MyrtleCNN``; importing the package
itself loads no heavy dependency.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lightning_sym")
except PackageNotFoundError:  # a source tree without installation
    __version__ = "0+unknown"

__all__ = ["__version__"]
