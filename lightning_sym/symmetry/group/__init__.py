"""The symmetry group of a network: factors, elements and their action."""
