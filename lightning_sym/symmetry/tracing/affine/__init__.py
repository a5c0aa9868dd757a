"""The affine interpreter: translations of a network's weights, docs/theory/intertwiners.md, 3.6."""
