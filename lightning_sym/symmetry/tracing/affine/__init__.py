"""What may be added to the values of a network: the affine part of its symmetry, see docs/theory/intertwiners.md, 3.6."""
