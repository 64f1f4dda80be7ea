"""Tests of jaxrl/data/chat.py. `render_turns` is also tested in test_demonstrations.py,
`render_reply` in tests/trainer/test_multi_turn.py."""

import shutil

import numpy as np
import pytest

from jaxrl.data.chat import ChatRenderer
from jaxrl.data.tokenizer import load_tokenizer

USER = {"role": "user", "content": "What is 1 + 2?"}


def test_chatml_renders_roles_and_the_generation_prompt(renderer):
    tokens = renderer.render([USER])
    assert tokens.dtype == np.int32
    assert renderer.decode(tokens, skip_special=False) == (
        "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.decode(tokens) == "user\nWhat is 1 + 2?\nassistant\n"


def test_render_all_equals_render(renderer):
    conversations = [[{"role": "user", "content": f"{i} + {i}?"}] for i in range(1100)]
    for one, many in zip(
        conversations[::99], renderer.render_all(conversations)[::99], strict=True
    ):
        np.testing.assert_array_equal(renderer.render(one), many)


def test_the_system_prompt_is_added_only_to_conversations_without_one(tokenizer):
    renderer = ChatRenderer(tokenizer, template="chatml", system_prompt="Be brief.")
    assert renderer.text([USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    other = renderer.text([{"role": "system", "content": "Rhyme."}, USER])
    assert "Rhyme." in other and "Be brief." not in other


def test_a_template_file_replaces_the_checkpoints_template(tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert ChatRenderer(tokenizer, template=str(path)).text([USER]) == "[What is 1 + 2?]"


def test_the_checkpoints_template_is_the_default(tokenizer_folder, tmp_path):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "with_template")
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0]['content'] }} A:")
    assert ChatRenderer(load_tokenizer(folder)).text([USER]) == "Q: What is 1 + 2? A:"


def test_a_missing_template_says_what_to_set(tokenizer):
    with pytest.raises(ValueError, match=r"no chat template; set data\.chat_template"):
        ChatRenderer(tokenizer)
    with pytest.raises(FileNotFoundError, match="neither a file nor one of chatml"):
        ChatRenderer(tokenizer, template="nowhere.jinja")


def test_a_conversation_that_the_template_rejects_is_reported_by_its_roles(tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ raise_exception('only one turn') }}")
    with pytest.raises(ValueError, match=r"roles \['user'\] \(only one turn\)"):
        ChatRenderer(tokenizer, template=str(path)).render([USER])


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
        "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import os %}",
        "{{ '%s'.format.__self__.__class__.__init__.__globals__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages).x }}",
        "{{ (1).__class__('9' * 5000) }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_template_is_an_error(hostile, tokenizer, tmp_path):
    (tmp_path / "hostile.jinja").write_text(hostile)
    renderer = ChatRenderer(tokenizer, template=str(tmp_path / "hostile.jinja"))
    with pytest.raises(ValueError, match="the chat template rejects a conversation"):
        renderer.text([USER])
