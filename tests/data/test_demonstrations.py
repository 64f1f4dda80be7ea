"""Tests of jaxrl/data/demonstrations.py and jaxrl/data/chat/turns.py: which tokens are learned."""

import json

import numpy as np
import pytest

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.turns import render_turns
from jaxrl.data.demonstrations import conversation, demonstration_maker, to_sample
from jaxrl.data.items import load_items
from jaxrl.data.packing import pack

STOP = (2,)
QUESTION = {"role": "user", "content": "1 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 3."}
QUESTION_2 = {"role": "user", "content": "And 3 + 4?"}
ANSWER_2 = {"role": "assistant", "content": "7, à peu près."}


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def load(tmp_path, renderer, *rows, **data):
    maker = demonstration_maker(renderer, DataConfig(**data), stop=STOP)
    return load_items([write(tmp_path, *rows)], maker)


def test_assistant_turns_and_their_stop_tokens_are_learned(renderer):
    [(tokens, loss_mask)] = render_turns(renderer, [QUESTION, ANSWER, QUESTION_2, ANSWER_2], STOP)
    assert renderer.decode(tokens, skip_special=False) == (
        "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>\n"
        "<|im_start|>user\nAnd 3 + 4?<|im_end|>\n<|im_start|>assistant\n7, à peu près.<|im_end|>"
    )
    assert renderer.decode(tokens[loss_mask], skip_special=False) == (
        "It is 3.<|im_end|>7, à peu près.<|im_end|>"
    )


def test_the_prompt_of_an_answer_is_what_the_model_sees_in_training(renderer, tmp_path):
    [one] = load(tmp_path, renderer, {"question": "1 + 2?", "answer": "It is 3."})
    np.testing.assert_array_equal(one.prompt_tokens, renderer.render([QUESTION]))
    assert renderer.decode(one.tokens, skip_special=False) == "It is 3.<|im_end|>"
    assert one.loss_mask.all() and one.n_loss_tokens == len(one.tokens)


def test_all_tokens_of_plain_text_are_learned_and_the_log_says_so(renderer, tmp_path, caplog):
    [one] = load(tmp_path, renderer, {"text": "It is 3."})
    sequence = np.concatenate([one.prompt_tokens, one.tokens])
    assert renderer.decode(sequence, skip_special=False) == "It is 3.<|im_end|>"
    assert one.loss_mask.all() and len(one.prompt_tokens) == 1  # the first has no predecessor
    assert "text has no turns, so all of its tokens are learned" in caplog.text
    rendered = {"text": "<|im_start|>user\n1?<|im_end|>"}
    with pytest.raises(ValueError, match=r"jsonl:1: .* set data\.special_tokens=token"):
        load(tmp_path, renderer, rendered)
    reading = ChatRenderer(renderer.tokenizer, template="chatml", special_tokens="token")
    [one] = load(tmp_path, reading, rendered)
    sequence = np.concatenate([one.prompt_tokens, one.tokens])
    assert renderer.decode(sequence, skip_special=False) == rendered["text"]
    with pytest.raises(ValueError, match="text is empty"):
        load(tmp_path, renderer, {"text": " "})


def test_text_next_to_a_conversation_is_not_read(renderer, tmp_path):
    rows = [{"question": "1 + 2?", "answer": "It is 3.", "text": "other"}]
    rows.append({"messages": [QUESTION, ANSWER], "text": "other"})
    for one in load(tmp_path, renderer, *rows):
        assert renderer.decode(one.tokens) == "It is 3."


# As DeepSeek-R1-Distill's: the generation prompt opens the reasoning, finished turns lose it.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A>"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "learned", "before"),
    [
        ("<think>\n1 and 2</think>3", "1 and 2</think>3<|im_end|>", "<U>1 + 2?<A><think>\n"),
        ("3", "3<|im_end|>", "<U>1 + 2?<A>"),
    ],
)
def test_a_turn_continues_a_generation_prompt_that_opens_its_reasoning(
    tokenizer, tmp_path, content, learned, before
):
    (tmp_path / "r1.jinja").write_text(R1)
    renderer = ChatRenderer(tokenizer, template=str(tmp_path / "r1.jinja"))
    answer = {"role": "assistant", "content": content}
    [(tokens, mask)] = render_turns(renderer, [QUESTION, answer], STOP)
    assert renderer.decode(tokens[mask], skip_special=False) == learned
    assert renderer.decode(tokens[~mask], skip_special=False) == before


# As Hermes' and Qwen's: tools in the system turn, calls and results in tags.
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>"
    "\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL_ROW = {
    "messages": [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c1"},
        ANSWER,
    ],
    "tools": json.dumps([TOOL]),
}


def test_tool_calls_are_learned_and_tools_and_results_are_read(tokenizer, tmp_path):
    (tmp_path / "hermes.jinja").write_text(HERMES)
    renderer = ChatRenderer(tokenizer, template=str(tmp_path / "hermes.jinja"))
    [one] = load(tmp_path, renderer, TOOL_ROW)
    learned = renderer.decode(one.tokens[one.loss_mask], skip_special=False)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert learned == f"{call}It is 3.<|im_end|>"
    prompt = renderer.decode(one.prompt_tokens, skip_special=False)
    assert prompt.startswith("<|im_start|>system\n{") and '"name": "add"' in prompt
    assert "<|im_start|>tool\n3<|im_end|>" in renderer.decode(one.tokens, skip_special=False)


def test_a_template_without_tool_calls_and_malformed_ones_are_errors(renderer, tmp_path):
    with pytest.raises(ValueError, match=r"leaves out tools .'add' is not in the rendered text"):
        load(tmp_path, renderer, TOOL_ROW)
    with pytest.raises(ValueError, match=r"leaves out tool calls .'add'"):
        load(tmp_path, renderer, TOOL_ROW | {"tools": None})
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: tools is 'add', not a list"):
        load(tmp_path, renderer, TOOL_ROW | {"tools": "add"})
    bad = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "text"}}}}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .* 'add' are no valid JSON schema: prop"):
        load(tmp_path, renderer, TOOL_ROW | {"tools": json.dumps([bad])})
    bad = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the tool call .* is not of the form"):
        load(tmp_path, renderer, {"messages": [QUESTION, bad]})


def test_turns_that_the_template_rewrites_become_separate_sequences(tokenizer, tmp_path):
    """Like Qwen3's, this template drops reasoning from all answers except the last."""
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}Q:{{ m.content }}\n{% else %}A:"
        "{{ m.content if loop.last else m.content.split('|')[-1] }}<|im_end|>{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    renderer = ChatRenderer(tokenizer, template=str(path))
    first, last = ({"role": "assistant", "content": f"hm|{n}"} for n in (3, 7))
    shown = [
        (renderer.decode(t[~mask]), renderer.decode(t[mask], skip_special=False))
        for t, mask in render_turns(renderer, [QUESTION, first, QUESTION_2, last], STOP)
    ]
    assert shown == [
        ("Q:1 + 2?\nA:", "hm|3<|im_end|>"),
        ("Q:1 + 2?\nA:3Q:And 3 + 4?\nA:", "hm|7<|im_end|>"),
    ]


@pytest.mark.parametrize(
    "template, complaint",
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no end-of-sequence token"),
        (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}"
            "{% if add_generation_prompt %}A:{% endif %}",
            r"turn 1 \('It is 3.'\): .* does not render it as a continuation",
        ),
    ],
)
def test_a_template_without_learnable_turns_is_an_error(tokenizer, tmp_path, template, complaint):
    path = tmp_path / "t.jinja"
    path.write_text(template)
    with pytest.raises(ValueError, match=rf"{complaint}.*set data\.chat_template"):
        render_turns(ChatRenderer(tokenizer, template=str(path)), [QUESTION, ANSWER], STOP)


def test_tokens_of_other_roles_are_in_the_sequence_but_not_in_the_loss(renderer, tmp_path):
    [one] = load(tmp_path, renderer, {"messages": [QUESTION, ANSWER, QUESTION_2, ANSWER_2]})
    [packed] = pack([to_sample(one)], shapes=((1, 128),), align=4, n_ranks=1)
    batch = packed.batch
    assert batch.mask.sum() == one.n_loss_tokens < len(one.tokens)
    learned = renderer.decode(batch.targets[batch.mask > 0], skip_special=False)
    assert learned == "It is 3.<|im_end|>7, à peu près.<|im_end|>"
    assert set(batch.response_len[batch.segments > 0]) == {one.n_loss_tokens}
    full = np.concatenate([one.prompt_tokens, one.tokens])
    np.testing.assert_array_equal(batch.targets[batch.segments > 0], full[1:])


@pytest.mark.parametrize(
    "row, complaint",
    [
        ({"messages": [QUESTION]}, "no assistant turn to learn"),
        ({"question": "1?", "text": "2"}, "has the columns question, text; required are messages"),
        ({"messages": [{"role": "user"}]}, "neither a string nor a list of messages"),
    ],
)
def test_a_row_without_anything_to_learn_is_an_error_with_its_place(row, complaint):
    with pytest.raises(ValueError, match=rf"f:3.*{complaint}"):
        conversation(row, "f:3")


def test_overlong_demonstrations_are_dropped_rejected_or_truncated(renderer, tmp_path, caplog):
    rows = [{"question": "1?", "answer": "2" * n} for n in (5, 90)]
    size = dict(max_prompt_len=40, max_response_len=20)
    assert len(load(tmp_path, renderer, *rows, **size)) == 1
    assert caplog.messages == [
        "1 of 2 demonstrations are longer than data.max_prompt_len + data.max_response_len = 60 "
        "tokens and were dropped"
    ]
    with pytest.raises(ValueError, match=r"all 1 demonstrations of .* = 60 tokens"):
        load(tmp_path, renderer, rows[1], **size)
    size["filter_overlong_prompts"] = False
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 has 1\d\d tokens"):
        load(tmp_path, renderer, *rows, **size)
    cut = load(tmp_path, renderer, *rows, **size, truncation="right")[1]
    assert len(cut.prompt_tokens) + len(cut.tokens) == 60


SHAREGPT = [{"from": "human", "value": "1 + 2?"}, {"from": "gpt", "value": "It is 3."}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "completion": [ANSWER]},  # TRL
        {"input": "1 + 2?", "output": "It is 3."},  # OpenRLHF
        {"conversations": SHAREGPT},
        {"instruction": "1 + 2?", "input": "", "output": "It is 3."},  # Alpaca
    ],
)
def test_usual_column_names_are_read(row, renderer, tmp_path):
    [one] = load(tmp_path, renderer, row)
    np.testing.assert_array_equal(one.prompt_tokens, renderer.render([QUESTION]))
    assert renderer.decode(one.tokens, skip_special=False) == "It is 3.<|im_end|>"


def test_the_context_of_an_instruction_follows_it():
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    assert conversation(row, "f:1")[0][0]["content"] == "Add.\n1, 2"


def test_only_the_completion_is_learned_if_the_prompt_has_assistant_turns(renderer, tmp_path):
    row = {"prompt": [QUESTION, ANSWER, QUESTION_2], "completion": [ANSWER_2]}
    [one] = load(tmp_path, renderer, row)
    np.testing.assert_array_equal(one.prompt_tokens, renderer.render(row["prompt"]))
    assert renderer.decode(one.tokens[one.loss_mask]) == "7, à peu près."


def test_columns_are_read_under_the_names_of_the_mapping(renderer, tmp_path):
    row = {"messages": [QUESTION_2, ANSWER_2], "q": "1 + 2?", "a": "It is 3."}
    maker_columns = ("prompt:q", "completion:a")
    [one] = load(tmp_path, renderer, row, columns=maker_columns)
    assert renderer.decode(one.tokens) == "It is 3."
