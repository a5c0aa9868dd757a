"""What may be added to a network's values: the affine part of its symmetry, docs/theory/translations.md."""
