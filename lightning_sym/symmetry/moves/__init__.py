"""Named reparametrizations, each with its group element (docs/theory/transformers.md, 6)."""
