"""The tiny model of the trainer's tests."""

from tests.trainer.conftest import tiny_config, tiny_model

__all__ = ["tiny_config", "tiny_model"]
