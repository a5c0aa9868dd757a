"""Canonical forms: one representative of each orbit, with fixed norms, signs and permutation."""
