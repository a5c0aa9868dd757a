"""From the operations of a network to what its symmetries may do: capture, rules, constraints, structure."""
