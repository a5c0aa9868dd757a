"""The command line: parser, run folders, requirements between recipes, messages."""

from lightning_sym.cli.main import main

__all__ = ["main"]
