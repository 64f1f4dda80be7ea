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
    check_same_tokenizer(tokenizer, tokenizer_folder, "ref.path", 267)
    with pytest.raises(ValueError, match=r"ref\.path: .* has 266 embedding rows, .* up to 266"):
        check_same_tokenizer(tokenizer, tokenizer_folder, "ref.path", 266)
    folder = shutil.copytree(tokenizer_folder, tmp_path / "c")
    text = (folder / "tokenizer.json").read_text().replace("<|im_start|>", "<|other|>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"differs .* in 2 tokens .*'<\|im_start\|>'"):
        check_same_tokenizer(tokenizer, folder, "ref.path", 267)


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
