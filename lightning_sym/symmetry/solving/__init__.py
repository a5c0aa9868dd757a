"""From what operations demand to the group that meets it all: scales, units, refinement, blocks, replicas, streams."""
