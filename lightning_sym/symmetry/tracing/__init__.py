"""Derive the symmetry group of a network from its operations: capture, rules, constraints, structure."""
