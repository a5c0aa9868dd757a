"""Named reparametrizations, each with its group element (docs/theory/intertwiners.md, 6)."""
