import json
import shutil

import numpy as np
import pytest

from jaxrl.data.chat import ChatRenderer, check_tokenizer, load_tokenizer, stop_ids

USER = {"role": "user", "content": "What is 1 + 2?"}


def test_chatml_renders_roles_and_the_header_of_the_answer(renderer):
    tokens = renderer.render([USER])
    assert tokens.dtype == np.int32
    assert renderer.decode(tokens, skip_special=False) == (
        "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.decode(tokens) == "user\nWhat is 1 + 2?\nassistant\n"


def test_rendering_many_gives_what_rendering_one_gives(renderer):
    conversations = [[{"role": "user", "content": f"{i} + {i}?"}] for i in range(1100)]
    for one, many in zip(
        conversations[::99], renderer.render_all(conversations)[::99], strict=True
    ):
        np.testing.assert_array_equal(renderer.render(one), many)


def test_system_prompt_is_added_only_where_there_is_none(tokenizer):
    renderer = ChatRenderer(tokenizer, template="chatml", system_prompt="Be brief.")
    assert renderer.text([USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    own = renderer.text([{"role": "system", "content": "Rhyme."}, USER])
    assert "Rhyme." in own and "Be brief." not in own


def test_template_of_a_file_replaces_the_checkpoints(tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert ChatRenderer(tokenizer, template=str(path)).text([USER]) == "[What is 1 + 2?]"


def test_template_of_the_checkpoint_is_used(tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "with_template")
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0]['content'] }} A:")
    assert ChatRenderer(load_tokenizer(folder)).text([USER]) == "Q: What is 1 + 2? A:"


def test_missing_template_says_what_to_set(tokenizer):
    with pytest.raises(ValueError, match=r"no chat template; set data\.chat_template"):
        ChatRenderer(tokenizer)
    with pytest.raises(FileNotFoundError, match="neither a file nor one of chatml"):
        ChatRenderer(tokenizer, template="nowhere.jinja")


def test_template_that_refuses_a_conversation_names_its_roles(tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ raise_exception('only one turn') }}")
    with pytest.raises(ValueError, match=r"roles \['user'\] \(only one turn\)"):
        ChatRenderer(tokenizer, template=str(path)).render([USER])


def test_missing_folder_and_missing_tokenizer_are_told_apart(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a folder; set model\.path"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer_file_is_a_clear_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_tokenizer_of_another_model_is_refused(tokenizer):
    check_tokenizer(tokenizer, 267)
    with pytest.raises(ValueError, match=r"token ids up to 266 .* only 266 embedding rows"):
        check_tokenizer(tokenizer, 266)


@pytest.mark.parametrize("eos, expected", [(0, (0, 2)), ([0, 1], (0, 1, 2)), (None, (2,))])
def test_stop_ids_join_tokenizer_and_generation_config(tokenizer_folder, tmp_path, eos, expected):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "c")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert stop_ids(folder, load_tokenizer(folder)) == expected


def test_stop_ids_fall_back_to_the_model_config(tokenizer_folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert stop_ids(tmp_path, load_tokenizer(tokenizer_folder)) == (1, 2)


def test_no_stop_id_at_all_is_an_error(tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "c")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no response could end"):
        stop_ids(folder, load_tokenizer(folder))
