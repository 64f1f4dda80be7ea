"""A tiny Llama for the tests of the engine."""

import pytest

from tests.engine.engine_cases import FAMILIES, make_params


@pytest.fixture
def llama(one_device):
    cfg = FAMILIES["llama"]
    return cfg, make_params(cfg)
