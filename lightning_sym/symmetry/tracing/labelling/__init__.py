"""Labels: the rules of operations, which turn a graph in normal form into constraints. `walk` is the start."""
