"""The diabetes regression data of scikit-learn: disease progression from ten measurements."""

import torch

from lightning_sym.datamodules.tensors import Pair, TensorDataModule


class DiabetesDataModule(TensorDataModule):
    """442 patients with diabetes, installed with scikit-learn: ten measurements and the progression after a year.

    Inputs are age, sex, body mass index, blood pressure and six blood serum measurements. The target is a measure of
    progression, standardised, so that predicting the mean has a squared error of 1. The arguments are those of
    :class:`~lightning_sym.datamodules.TensorDataModule` (not ``train``, ``val`` and ``test``); with ``standardize``
    inputs have mean 0 and standard deviation 1.

    References:
        Efron, Hastie, Johnstone, Tibshirani (2004), "Least angle regression", Annals of Statistics 32(2).
    """

    def load(self) -> tuple[Pair, Pair | None, Pair | None]:
        """Return all patients; test and validation data are held out."""
        from sklearn.datasets import load_diabetes  # slow to import, so only when the data are read

        inputs, progression = (torch.from_numpy(part) for part in load_diabetes(return_X_y=True))
        return (inputs, (progression - progression.mean()) / progression.std(correction=0)), None, None
