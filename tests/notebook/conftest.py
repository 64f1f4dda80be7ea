"""Fixtures: the tiny model and its config."""

from tests.trainer.conftest import tiny_config, tiny_model  # noqa: F401
