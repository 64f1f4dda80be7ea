"""Tests of jaxrl/data/chat/encoding.py and template.py. test_turns.py has more on replies."""

import datetime
import shutil

import numpy as np
import pytest

from jaxrl.data.chat.encoding import ChatRenderer
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


THINKING = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}A:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}{{ effort if effort is defined }}"
)


def from_source(tokenizer, tmp_path, source, **options):
    (tmp_path / "t.jinja").write_text(source)
    return ChatRenderer(tokenizer, template=str(tmp_path / "t.jinja"), **options)


def test_arguments_reach_the_template(tokenizer, tmp_path):
    renderer = from_source(tokenizer, tmp_path, THINKING, arguments={"enable_thinking": False})
    assert renderer.text([USER]) == "[What is 1 + 2?]A:<think></think>"
    changed = renderer.with_arguments({"enable_thinking": True, "effort": "low"})
    assert changed.text([USER]) == "[What is 1 + 2?]A:low"
    assert changed.with_arguments({"enable_thinking": False}).text([USER]).endswith("</think>low")
    assert renderer.text([USER]) == "[What is 1 + 2?]A:<think></think>"  # unchanged


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"enable_thinkng": False}, "did you mean enable_thinking. It reads: effort, enable_th"),
        ({"messages": []}, "no argument 'messages'"),
        ({"eos_token": "x"}, "no argument 'eos_token'"),
        ({"tokenize": True}, "no argument 'tokenize'"),
    ],
)
def test_an_argument_that_the_template_does_not_read_is_an_error(
    tokenizer, tmp_path, arguments, message
):
    with pytest.raises(ValueError, match=message):
        from_source(tokenizer, tmp_path, THINKING + "{{ eos_token }}", arguments=arguments)
    with pytest.raises(ValueError, match=r"has no argument .* It reads: none"):
        ChatRenderer(tokenizer, template="chatml").with_arguments(arguments)


DATED = (
    "{%- macro header() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}"
    "{% if strftime_now is defined %}{{ header() }}, {{ strftime_now('%B %-d') }}{% endif %}"
)


def test_the_date_of_a_template_can_be_fixed(tokenizer, tmp_path):
    day = datetime.date(2024, 7, 6)
    renderer = from_source(tokenizer, tmp_path, DATED, today=day)
    assert renderer.text([USER]) == "06 Jul 2024, July 6"
    assert renderer.template == DATED  # what an export contains
    indented = "\n  {% if 1 %}\n {{ strftime_now('%F') }}{% endif %}"
    renderer = from_source(tokenizer, tmp_path, indented, today=day)
    assert renderer.text([USER]) == "\n 2024-07-06"  # white space is as without a fixed date
