import pytest

from scripts.make_tiny_vlm import write_tiny_vlm
from tests.serve.conftest import model_folder, tokenizer_folder

__all__ = ["model_folder", "tokenizer_folder"]


@pytest.fixture(scope="session")
def vlm(tmp_path_factory):
    """Folder of a Qwen3-VL with two layers and deepstack features."""
    folder = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(folder, width=32, n_layers=2)
    return folder
