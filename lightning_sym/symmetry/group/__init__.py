"""The group of a symmetry: its factors, its elements, and what these do."""
