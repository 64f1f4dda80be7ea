"""The tiny model of the trainer's tests."""

from tests.trainer.conftest import tiny_config, tiny_model, vlm

__all__ = ["tiny_config", "tiny_model", "vlm"]
