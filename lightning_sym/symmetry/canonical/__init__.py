"""One member for each orbit: norms, scales, signs and the order of units."""
