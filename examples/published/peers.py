"""Figures of ours beside those of packages of others, of the same networks and data."""

from published.core import Result

RESULTS: tuple[Result, ...] = ()
