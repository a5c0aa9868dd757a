"""Curves of low loss, their tangents, the functions along them, and pruning."""

from published.core import Result

RESULTS: tuple[Result, ...] = ()
