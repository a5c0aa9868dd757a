"""Stitching, rotation, similarity and dissection: the symmetries of deep learning models."""

from published.core import Result

RESULTS: tuple[Result, ...] = ()
