"""The tiny Llama of the engine tests."""

from tests.engine.conftest import llama

__all__ = ["llama"]
