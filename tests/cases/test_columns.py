"""Rows as users have them: which columns and message fields become the prompt and what is learned.

A row is read with the right meaning, or refused with its place and the remedy.
"""

import json
import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.config.keys import DataConfig, RunConfig
from jaxrl.config.resolve import default_config, resolve
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.demonstrations import demonstration_maker
from jaxrl.data.items import load_items
from jaxrl.data.preferences import pair_maker
from jaxrl.data.prompts import prompt_maker
from jaxrl.data.streaming import ItemStream
from jaxrl.trainer.offline.objective import with_objective
from jaxrl.trainer.offline.sft import SFT

STOP = (2,)
Q, A = {"role": "user", "content": "17+25?"}, {"role": "assistant", "content": "17+25=42"}
SYSTEM = {"role": "system", "content": "Be brief."}
SHARE_Q, SHARE_A = {"from": "human", "value": "17+25?"}, {"from": "gpt", "value": "42"}
USER = "<|im_start|>user\n{}<|im_end|>\n"
ASKED = USER.format("17+25?") + "<|im_start|>assistant\n"
BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


TOOL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    return ChatRenderer(tokenizer, template=str(path))


@pytest.fixture
def read(renderer, tmp_path):
    """read(maker of a kind, rows...) -> items, from a file of JSON lines."""

    def read(make, *rows, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(**keys)
        kinds = {
            "rl": lambda: prompt_maker(renderer, data, answer_for="math"),
            "sft": lambda: demonstration_maker(renderer, data, stop=STOP),
            "dpo": lambda: pair_maker(renderer, data, stop=STOP),
        }
        return load_items([str(path)], kinds[make]())

    return read


@pytest.fixture
def shown(renderer, read):
    """shown(kind, row) -> texts of the tokens: a prompt, or text before and learned text."""

    def shown(make, row, **keys):
        [item] = read(make, row, **keys)
        if make == "rl":
            return renderer.decode(item.tokens, skip_special=False)
        sides = [item] if make == "sft" else [item.chosen, item.rejected]
        return [
            (
                renderer.decode(one.prompt_tokens, skip_special=False),
                renderer.decode(one.tokens[one.loss_mask], skip_special=False),
            )
            for one in sides
        ]

    return shown


ROW = {"question": "17+25?", "solution": "17+25=42", "answer": "42"}


@pytest.mark.parametrize(
    "row, prompt",
    [
        pytest.param(ROW | {"messages": [Q, A]}, ASKED, id="A1"),
        pytest.param(ROW | {"messages": [SYSTEM, Q, A]}, BRIEF + ASKED, id="A1-system"),
        pytest.param(ROW | {"messages": [SHARE_Q, SHARE_A]}, ASKED, id="A1-sharegpt"),
        pytest.param(
            ROW | {"messages": [Q, A, {"role": "user", "content": "So?"}, A]}, ASKED, id="A1-turns"
        ),
        pytest.param({"messages": [Q, A], "answer": "42"}, ASKED, id="A1-only-messages"),
        pytest.param({"prompt": [Q, A], **ROW}, ASKED, id="A2-with-question"),
        pytest.param(
            {"messages": json.dumps([SYSTEM, Q]), "answer": "42"}, BRIEF + ASKED, id="A3-messages"
        ),
        pytest.param({"prompt": json.dumps([Q]), "answer": "42"}, ASKED, id="A3-prompt"),
        pytest.param(
            {"messages": json.dumps([SYSTEM, Q, A]), "answer": "42"}, BRIEF + ASKED, id="A3-answer"
        ),
        pytest.param(
            {"prompt": '["a", {"b": 1}]', "answer": "1"},
            USER.format('["a", {"b": 1}]') + "<|im_start|>assistant\n",
            id="A3-other-json-is-text",
        ),
        pytest.param({"system": "Be brief.", **ROW}, BRIEF + ASKED, id="A6"),
        pytest.param({"system_prompt": "Be brief.", **ROW}, BRIEF + ASKED, id="A6-openorca"),
        pytest.param({"system": "", **ROW}, ASKED, id="A6-empty"),
        pytest.param(
            {"system": "Be brief.", "prompt": [SYSTEM, Q], "answer": "1"},
            BRIEF + ASKED,
            id="A6-same-twice",
        ),
        pytest.param(
            {"instruction": "17+25?", "input": "", "history": [["Hi", "Yes?"]], "output": "4"}
            | {"system": "Be brief.", "answer": "42"},
            BRIEF + USER.format("Hi") + "<|im_start|>assistant\nYes?<|im_end|>\n" + ASKED,
            id="A8-alpaca",
        ),
    ],
)
def test_a_prompt_is_the_question_with_its_context_and_without_the_answer(shown, row, prompt):
    assert shown("rl", row) == prompt


@pytest.mark.parametrize(
    "kind, row, complaint",
    [
        pytest.param(
            "rl", {"prompt": [Q, A], "answer": "4"}, "prompt has no question at its end", id="A2"
        ),
        pytest.param(
            "rl", {"messages": [A], "answer": "4"}, "messages has no question at its", id="A2-alone"
        ),
        pytest.param(
            "dpo",
            {"prompt": [Q, A], "chosen": "a", "rejected": "b"},
            "the prompt ends with a turn of the assistant, and chosen begins with one",
            id="A2-dpo",
        ),
        pytest.param(
            "sft",
            {"prompt": [Q, A], "completion": "a"},
            "the prompt ends with a turn of the assistant, and completion begins",
            id="A2-sft",
        ),
        pytest.param(
            "rl", {"messages": str([Q]), "answer": "4"}, "not JSON .*json.dumps", id="A3-python"
        ),
        pytest.param("rl", {**ROW, "extra_info": "seven"}, "extra_info is 'seven', not", id="A5"),
        pytest.param("rl", {**ROW, "extra_info": "{'a': 1}"}, "extra_info is text", id="A5-py"),
        pytest.param(
            "rl",
            {"system": "Rhyme.", "prompt": [SYSTEM, Q], "answer": "4"},
            "different system messages",
            id="A6-two",
        ),
        pytest.param(
            "sft", {"messages": [Q, A | {"weight": 0.5}]}, "weight=0.5; only 1 .* and 0", id="A7"
        ),
        pytest.param(
            "sft", {"messages": [Q, A | {"train": False}]}, "no assistant turn whose", id="A7-none"
        ),
        pytest.param(
            "sft",
            {"conversations": [SHARE_Q, {"from": "function_call", "value": "add(1)"}]},
            "function_call 'add\\(1\\)' is not JSON",
            id="A8-call",
        ),
        pytest.param(
            "sft", {"conversations": [SHARE_Q, {"from": "narrator", "value": "x"}, SHARE_A]},
            "the role 'narrator' is none of", id="A8-role",
        ),
        pytest.param(
            "sft",
            {"instruction": "17+25?", "history": ["Hi", "Yes?"], "output": "42"},
            "history has 'Hi'; it is a list of \\[question, answer\\]",
            id="A8-history",
        ),
        pytest.param(
            "dpo",
            {"prompt": "1+1?", "chosen": [Q, A], "rejected": [Q, SHARE_A]},
            "chosen is a conversation with other questions than the prompt",
            id="A10-other-question",
        ),
        pytest.param(
            "sft",
            {"prompt": "17+25?", "completion": [Q, A]},
            "the prompt ends with a turn of the user, and completion begins with one",
            id="A10-sft",
        ),
        pytest.param(
            "dpo",
            {"prompt": [SYSTEM, Q], "chosen": [SYSTEM | {"content": "Rhyme."}, Q, A]}
            | {"rejected": [Q, {"role": "assistant", "content": "43"}]},
            "the prompt and chosen have different system messages",
            id="A10-system",
        ),
    ],
)  # fmt: skip
def test_a_row_that_would_be_misread_is_refused_with_its_place(read, kind, row, complaint):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1.*{complaint}"):
        read(kind, row)


RENDERED = USER.format("2+3?") + "<|im_start|>assistant\n"


def test_a_rendered_prompt_is_used_as_it_is_with_the_key_and_refused_without(shown, read):
    row = {"prompt": RENDERED, "answer": "5"}
    assert shown("rl", row, rendered_prompts=True) == RENDERED
    [prompt] = read("rl", row, rendered_prompts=True)
    assert prompt.tokens[0] == 1 and 2 in prompt.tokens  # the special tokens, not their text
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:1: .*'<\|im_start\|>'.*rendered_prompts=Tru"
    ):
        read("rl", row)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: prompt is not only text"):
        read("rl", {"prompt": [Q], "answer": "5"}, rendered_prompts=True)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .* of turn 0 \(user\)"):
        read("sft", {"prompt": RENDERED, "completion": "5"})


def test_a_rendered_prompt_of_a_template_without_special_tokens_is_refused_too(tokenizer):
    renderer = ChatRenderer(tokenizer, template="plain")
    with pytest.raises(ValueError, match=r"turn 0 .user. ends with 'Assistant:', the generation"):
        renderer.check_text([{"role": "user", "content": "User: 2+3?\n\nAssistant:"}])
    renderer.check_text([{"role": "user", "content": "What does an assistant do?"}])


def test_readers_of_messages_are_refused_with_rendered_prompts():
    config = default_config()
    config.data.train, config.data.rendered_prompts = ("task:addition",), True
    config.data.system_prompt, config.env.name = "Be brief.", "calculator"
    with pytest.raises(
        ValueError, match=r"(?s)data\.system_prompt has no effect.*which env\.name="
    ):
        resolve(config)
    with pytest.raises(ValueError, match=r"data\.rendered_prompts have no effect in offline"):
        with_objective(RunConfig(data=DataConfig(rendered_prompts=True)), SFT)


def test_a_stream_names_what_is_not_read_of_its_first_rows(renderer, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": json.dumps([Q, A]), "context": "x"}) + "\n")
    maker = demonstration_maker(renderer, DataConfig(), stop=STOP)
    [one] = ItemStream([str(path)], maker, shuffle=False, buffer=2, seed=0).take(1)
    assert renderer.decode(one.tokens) == "17+25=42"
    assert "context is not read" in caplog.text


@pytest.mark.parametrize("text", [str, json.dumps], ids=["A5-object", "A5-text"])
def test_extra_info_and_reward_model_are_read_as_objects_or_as_json_text(read, text):
    write = (lambda value: value) if text is str else text
    row = {
        "prompt": "17+25?",
        "extra_info": write({"index": 3}),
        "reward_model": write({"style": "rule", "ground_truth": "42"}),
    }
    [prompt] = read("rl", row)
    assert (prompt.answer, prompt.extra) == ("42", {"index": 3})


def test_the_name_of_a_reward_model_is_no_truth_and_reaches_the_rewards(read):
    [prompt] = read("rl", {**ROW, "reward_model": "judge-7b"})
    assert (prompt.answer, prompt.extra["reward_model"]) == ("42", "judge-7b")


@pytest.mark.parametrize(
    "field",
    [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss_mask": 0}, {"training": False}],
    ids=lambda field: f"A7-{field}",
)
def test_a_turn_that_is_excluded_from_the_loss_is_context(shown, field):
    first = {"role": "assistant", "content": "41"} | field
    turns = [Q, first, {"role": "user", "content": "Sure?"}, A | {name: 1 for name in field}]
    [(before, learned)] = shown("sft", {"system": "Be brief.", "messages": turns})
    assert learned == "17+25=42<|im_end|>"
    assert before.startswith(BRIEF + ASKED + "41<|im_end|>")


CALL = {"name": "add", "arguments": {"a": 17, "b": 25}}


@pytest.mark.parametrize(
    "call",
    [
        {"from": "function_call", "value": json.dumps(CALL)},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
    ],
    ids=["A8-sharegpt", "A8-openai-old", "A8-openai"],
)
def test_calls_of_all_forms_are_learned_and_results_are_not(shown, call):
    result = {"from": "observation", "value": "42"} if "from" in call else None
    result = result or {"role": "function" if "function_call" in call else "tool", "content": "42"}
    last = SHARE_A if "from" in call else A
    row = {"system": "Be brief.", "conversations": [SHARE_Q, call, result, last]}
    [(before, learned)] = shown("sft", row)
    assert before == BRIEF + ASKED
    assert learned == (
        '<call>{"name": "add", "arguments": {"a": 17, "b": 25}}</call><|im_end|>'
        + str(last.get("value", last.get("content")))
        + "<|im_end|>"
    )


def test_alpacas_history_and_system_are_context_of_the_learned_output(shown):
    row = {"instruction": "17+25?", "input": "", "output": "42", "system": "Be brief."}
    for history in ([["Hi", "Yes?"]], json.dumps([["Hi", "Yes?"]])):
        [(before, learned)] = shown("sft", row | {"history": history})
        earlier = USER.format("Hi") + "<|im_start|>assistant\nYes?<|im_end|>\n"
        assert (before, learned) == (BRIEF + earlier + ASKED, "42<|im_end|>")


B = {"role": "assistant", "content": "43"}
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
HI_TEXT = USER.format("Hi") + "<|im_start|>assistant\nYes?<|im_end|>\n"


@pytest.mark.parametrize(
    "row, before",
    [
        pytest.param({"prompt": "17+25?", "chosen": [Q, A], "rejected": [Q, B]}, ASKED, id="same"),
        pytest.param(
            {"prompt": "17+25?", "chosen": [SYSTEM, Q, A], "rejected": [SYSTEM, Q, B]},
            BRIEF + ASKED,
            id="A10-system",
        ),
        pytest.param(
            {"prompt": "17+25?\n", "chosen": [Q, A], "rejected": [Q, B]}, ASKED, id="A10-blank"
        ),
        pytest.param(
            {"prompt": "17+25?", "chosen": [*HI, Q, A], "rejected": [*HI, Q, B]},
            HI_TEXT + ASKED,
            id="A10-last-question",
        ),
        pytest.param(
            {"prompt": HI, "chosen": [Q, A], "rejected": [Q, B]}, HI_TEXT + ASKED, id="continued"
        ),
        pytest.param(
            {"prompt": [SYSTEM, Q], "chosen": [Q, A], "rejected": [Q, B]},
            BRIEF + ASKED,
            id="A10-system-of-the-prompt",
        ),
        pytest.param(
            {"system": "Be brief.", "question": "17+25?", "chosen": "17+25=42", "rejected": "43"},
            BRIEF + ASKED,
            id="A6-dpo",
        ),
        pytest.param(
            {"system": "Be brief.", "chosen": [Q, A], "rejected": [Q, B]},
            BRIEF + ASKED,
            id="A6-conversations",
        ),
        pytest.param(
            {"prompt": "17+25?", "chosen": json.dumps([Q, A]), "rejected": json.dumps([Q, B])},
            ASKED,
            id="A3-dpo",
        ),
        pytest.param(
            {"chosen": [Q | {"content": "17+25? "}, A], "rejected": [Q, B]},
            USER.format("17+25? ") + "<|im_start|>assistant\n",
            id="A10-blank-in-one",
        ),
    ],
)
def test_the_question_of_a_pair_is_there_once_and_the_same_for_both(shown, row, before):
    assert shown("dpo", row) == [(before, "17+25=42<|im_end|>"), (before, "43<|im_end|>")]


def test_columns_and_message_fields_without_a_reader_are_named_once(read, caplog):
    turns = [Q | {"mood": "calm"}, A]
    rows = [{"messages": turns, "id": 1, "context": "x"}] + [
        {"messages": turns, "context": "y"}
    ] * 2
    with caplog.at_level(logging.WARNING):
        read("sft", *rows)
    [line] = caplog.messages
    assert line.startswith("demonstrations are made of the columns messages. Else: ")
    assert "context is not read (first in " in line and "mood in the messages of messages" in line
    assert "id is" not in line and line.count("context") == 1


@pytest.mark.parametrize(
    "kind, row, part",
    [
        ("rl", ROW | {"context": "x"}, "context reaches only the reward functions"),
        ("rl", {"messages": [Q, A], "answer": "4"}, "messages ends with an answer, which is cut"),
        (
            "rl",
            ROW | {"messages": [Q, A]},
            "messages ends with an answer, so question is the prompt",
        ),
        ("rl", {"prompt": [Q | {"weight": 0}], "answer": "4"}, "weight in the messages of prompt"),
        ("dpo", {"prompt": "1?", "chosen": "a", "rejected": "b", "score": 1}, "score is not read"),
        ("sft", {"prompt": [Q], "history": [["a", "b"]], "completion": "c"}, "history is not read"),
        (
            "sft",
            {"messages": [{"role": "critic", "content": "x"}, Q, A]},
            "role critic in the mess",
        ),
        ("sft", {"messages": [Q | {"train": True}, A]}, "train of user turns in the messages"),
    ],
)
def test_what_is_dropped_cut_or_passed_on_is_said(read, caplog, kind, row, part):
    read(kind, row)
    [line] = caplog.messages
    assert part in line


@pytest.mark.parametrize(
    "kind, row",
    [
        ("rl", {**ROW, "index": 1, "level": "x", "data_source": "s", "extra_info": {"a": 1}}),
        ("sft", {"instruction": "1?", "input": "2", "output": "3", "id": 7, "messages": None}),
        ("dpo", {"prompt": "1?", "chosen": "a", "rejected": "b", "margin": 1, "tools": None}),
    ],
)
def test_rows_whose_columns_are_read_or_harmless_are_not_mentioned(read, caplog, kind, row):
    read(kind, row)
    assert not caplog.messages
