"""The normal form of captured networks: one spelling for each function. `normalise` is the start."""
