"""The affine interpreter: translations of a network's weights, docs/theory/translations.md."""
