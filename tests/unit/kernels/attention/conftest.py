"""Makes the kernels' tests part of the GPU acceptance run on a machine with a GPU."""

import pytest
import torch

OPERATOR_TESTS = ("test_autograd_functions", "test_op")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == "triton" or item.path.stem in OPERATOR_TESTS:
                item.add_marker("gpu")
