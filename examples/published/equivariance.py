"""Layer-wise equivariances learned by the evidence."""

from published.core import Result

RESULTS: tuple[Result, ...] = ()
