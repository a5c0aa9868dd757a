"""Matching: the point of one network's orbit that is nearest to another network, by weights or by activations."""
