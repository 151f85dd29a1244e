import gc

import pytest
import torch


def pytest_collection_finish():
    """What is imported by now stays: tests that collect garbage need not look through it, a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Thousands of tiny operations: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
