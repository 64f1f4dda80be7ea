import json
import shutil

import pytest

from jaxrl.data.tokenizer import (
    check_same_tokenizer,
    check_tokenizer,
    load_tokenizer,
    padding_id,
    stop_ids,
)


def test_a_missing_folder_and_a_missing_tokenizer_have_separate_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a folder; set model\.path"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_a_clear_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_more_ids_than_embedding_rows_is_an_error(tokenizer):
    check_tokenizer(tokenizer, 267)
    with pytest.raises(ValueError, match=r"token ids up to 266 .* only 266 embedding rows"):
        check_tokenizer(tokenizer, 266)


def test_a_model_with_other_token_ids_is_an_error(tokenizer, tokenizer_folder, tmp_path):
    check_same_tokenizer(tokenizer, tokenizer, "critic.path", 267)
    with pytest.raises(ValueError, match=r"critic\.path: .* has 266 embedding rows, .* up to 266"):
        check_same_tokenizer(tokenizer, tokenizer, "critic.path", 266)
    folder = shutil.copytree(tokenizer_folder, tmp_path / "c")
    text = (folder / "tokenizer.json").read_text().replace("<|im_start|>", "<|other|>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"differs .* in 2 tokens .*'<\|im_start\|>'"):
        check_same_tokenizer(tokenizer, load_tokenizer(folder), "critic.path", 267)


@pytest.mark.parametrize("eos, expected", [(0, (0, 2)), ([0, 1], (0, 1, 2)), (None, (2,))])
def test_stop_ids_join_tokenizer_and_generation_config(tokenizer_folder, tmp_path, eos, expected):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "c")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert stop_ids(folder, load_tokenizer(folder)) == expected


def test_stop_ids_fall_back_to_the_model_config(tokenizer_folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert stop_ids(tmp_path, load_tokenizer(tokenizer_folder)) == (1, 2)


def test_no_stop_id_is_an_error(tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "c")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no completion could end"):
        stop_ids(folder, load_tokenizer(folder))


def test_the_padding_token_does_not_end_a_completion(tokenizer_folder, tokenizer):
    assert padding_id(tokenizer_folder, tokenizer) == 0  # <|endoftext|>; 2 is the stop token


CODE = """
import pathlib
pathlib.Path(RAN).touch()
from transformers import PreTrainedTokenizerFast

class Custom(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder_with_code(tokenizer_folder, tmp_path, monkeypatch):
    """A folder whose tokenizer is a Python class in the folder; its import makes a file `ran`."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder = shutil.copytree(tokenizer_folder, tmp_path / "code")
    ran = tmp_path / "ran"
    code = CODE.replace("RAN", repr(str(ran)))
    (folder / "custom.py").write_text(code)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, ran


def test_code_in_a_model_folder_is_refused_without_a_question(folder_with_code, monkeypatch):
    folder, ran = folder_with_code
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    with pytest.raises(
        ValueError, match=r"Python code .*set config\.model\.trust_remote_code=True"
    ):
        load_tokenizer(folder)
    assert not ran.exists()


def test_code_in_a_model_folder_runs_with_trust_remote_code(folder_with_code):
    folder, ran = folder_with_code
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    assert type(tokenizer).__name__ == "Custom" and ran.exists()


@pytest.mark.parametrize("text", ["[1]", "{", '{"eos_token_id": {}}', '{"eos_token_id": [[1]]}'])
def test_a_malformed_generation_config_is_named(text, tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        stop_ids(tmp_path, tokenizer)
