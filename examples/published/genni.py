"""The figures of GENNI beside the honest ones: searches, planes and the pieces of an equivalence class."""

from published.core import Result

RESULTS: tuple[Result, ...] = ()
