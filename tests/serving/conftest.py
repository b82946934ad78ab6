"""A folder and a checkpoint for each module of tests of the server."""

import pytest
from served import model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def checkpoint(folder):
    return model(folder / "qwen")
