"""Solve the constraints of all operations for the group: scales, units, refinement, blocks, replicas, streams."""
