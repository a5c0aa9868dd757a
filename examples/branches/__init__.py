"""The example of docs/your-paper.md: networks that leave a common training; Frankle et al. (2020)."""
