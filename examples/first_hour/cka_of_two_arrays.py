# Compare two arrays of activations from anywhere.
# Have: two tensors with one row per image; the numbers of units may differ
# Get: linear CKA and the similarity up to rotations
import torch

from lightning_sym.similarity import CKA, OrthogonalProcrustes

torch.manual_seed(0)
first = torch.randn(500, 32)
second = first @ torch.linalg.qr(torch.randn(32, 32)).Q + 0.1 * torch.randn(500, 32)
for measure in (CKA("linear"), OrthogonalProcrustes()):
    for one, two in zip(first.split(100), second.split(100), strict=True):  # batch by batch, as a metric
        measure.update(one, two)
    print(type(measure).__name__, measure.compute().item())
