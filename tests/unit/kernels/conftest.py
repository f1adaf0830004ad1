"""On a machine with a GPU the kernels' tests run there, as part of the acceptance run."""

import pytest
import torch

KERNEL_TESTS = (
    "test_attention_autotune",
    "test_attention_functions",
    "test_attention_op",
    "test_attention_schedule",
    "test_attention_triton",
    "test_interpreter",
)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if item.path.stem in KERNEL_TESTS:
                item.add_marker("gpu")
