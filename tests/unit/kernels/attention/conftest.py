"""On a machine with a GPU the kernels' tests run there, as part of the acceptance run."""

import pytest
import torch

OPERATOR_TESTS = ("test_autograd_functions", "test_op")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == "triton" or item.path.stem in OPERATOR_TESTS:
                item.add_marker("gpu")
