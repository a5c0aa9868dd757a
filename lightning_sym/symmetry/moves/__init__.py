"""Moves along the orbit that have a name, each with the element that does it; see docs/theory/transformers.md, 6."""
