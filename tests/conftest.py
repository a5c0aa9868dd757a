"""For all tests: one thread, and no pictures on a screen."""

import matplotlib as mpl
import pytest
import torch

mpl.use("agg")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
