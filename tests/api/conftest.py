from tests.serve.conftest import model_folder, tokenizer_folder

__all__ = ["model_folder", "tokenizer_folder"]
