"""Tests of jaxrl/data/chat/turns.py on the grammar of the chat templates that models have."""

import datetime
import functools

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.template import template_names
from jaxrl.data.chat.turns import render_turns
from jaxrl.tool_calls.calls import ToolCall
from tests.data.families import DEEPSEEK, FAMILIES, TEMPLATES, vocabulary

Q1, A1 = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "It is 3."}
Q2, A2 = {"role": "user", "content": "And 3 + 4?"}, {"role": "assistant", "content": "7"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def make():
    """make(family, ...) -> (renderer, stop tokens)."""
    tokens = vocabulary()

    def make(family, template="", **options):
        bos, *ends = FAMILIES[family]
        names = {"eos_token": ends[0]} | ({"bos_token": bos} if bos else {})
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **names)
        path = template or str(TEMPLATES / f"{family}.jinja")
        stop = tuple(tokens.token_to_id(end) for end in ends)
        return ChatRenderer(tokenizer, template=path, **options), stop

    return make


def texts(renderer, sequences):
    """(text before the first learned token, learned text) of each sequence."""
    return [
        (
            renderer.decode(tokens[: mask.argmax()], skip_special=False),
            renderer.decode(tokens[mask], skip_special=False),
        )
        for tokens, mask in sequences
    ]


def test_every_family_has_a_template():
    assert sorted(FAMILIES) == sorted(path.stem for path in TEMPLATES.iterdir())


@pytest.mark.parametrize(
    "family, first, second",
    [
        ("deepseek_v3", f"It is 3.{DEEPSEEK[1]}", f"7{DEEPSEEK[1]}"),
        ("gemma2", "It is 3.<end_of_turn>", "7<end_of_turn>"),
        ("gemma3", "It is 3.<end_of_turn>", "7<end_of_turn>"),
        ("glm4", "\nIt is 3.<|user|>", "\n7<|user|>"),  # the next role ends a turn
        ("granite3", "It is 3.<|end_of_text|>", "7<|end_of_text|>"),
        ("llama2", " It is 3. </s>", " 7 </s>"),
        ("llama3_1", "It is 3.<|eot_id|>", "7<|eot_id|>"),
        ("llama3_2", "It is 3.<|eot_id|>", "7<|eot_id|>"),
        ("llama3_3", "It is 3.<|eot_id|>", "7<|eot_id|>"),
        ("mistral_nemo", "It is 3.</s>", "7</s>"),
        ("mistral_v0_1", "It is 3.</s>", "7</s>"),
        ("mistral_v0_3", " It is 3.</s>", " 7</s>"),
        ("mixtral", " It is 3.</s>", " 7</s>"),
        ("olmo2", "It is 3.<|endoftext|>", "7<|endoftext|>"),
        ("phi3", "It is 3.<|end|>", "7<|end|>"),  # a finished conversation has <|endoftext|> too
        ("phi4", "It is 3.<|im_end|>", "7<|im_end|>"),
        ("qwen2_5", "It is 3.<|im_end|>", "7<|im_end|>"),
        ("smollm2", "It is 3.<|im_end|>", "7<|im_end|>"),
        ("smollm3", "It is 3.<|im_end|>", "7<|im_end|>"),  # has {% generation %} blocks
        ("yi", "It is 3.<|im_end|>", "7<|im_end|>"),
    ],
)
def test_a_conversation_is_one_sequence_with_all_answers_learned(make, family, first, second):
    renderer, stop = make(family)
    [(tokens, mask)] = render_turns(renderer, [Q1, A1, Q2, A2], stop)
    assert renderer.decode(tokens[mask], skip_special=False) == first + second
    prompt = renderer.render([Q1, A1, Q2])  # what the model sees before its second answer
    np.testing.assert_array_equal(tokens[: len(prompt)], prompt)
    assert renderer.decode(tokens[len(prompt) :], skip_special=False) == second


@pytest.mark.parametrize("family", ["qwq", "r1_distill", "r1_distill_january"])
def test_answers_without_reasoning_follow_the_role_in_families_that_open_it(make, family):
    renderer, stop = make(family)
    end = FAMILIES[family][1]
    [(tokens, mask)] = render_turns(renderer, [Q1, A1, Q2, A2], stop)
    assert renderer.decode(tokens[mask], skip_special=False) == f"It is 3.{end}7{end}"
    full = renderer.text([Q1, A1, Q2, A2], generation_prompt=False).rstrip("\n")
    assert renderer.decode(tokens, skip_special=False) == full


def thought(answer, *, opened=True):
    return {"role": "assistant", "content": f"{'<think>' * opened}\nadd\n</think>\n\n{answer}"}


THOUGHTS = [thought("3"), thought("7")]
FIELDS = [
    {"role": "assistant", "content": answer, "reasoning_content": "add"} for answer in ("3", "7")
]
ANALYSIS = "<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    "family, answers, learned",
    [
        ("qwen3", THOUGHTS, "<think>\nadd\n</think>\n\n{}<|im_end|>"),
        ("qwen3", FIELDS, "<think>\nadd\n</think>\n\n{}<|im_end|>"),
        ("qwen3", [A1 | {"content": "3"}, A2], "<think>\n\n</think>\n\n{}<|im_end|>"),
        ("qwq", THOUGHTS, "add\n</think>\n\n{}<|im_end|>"),
        ("r1_distill", THOUGHTS, "add\n</think>\n\n{}" + DEEPSEEK[1]),
        ("r1_distill_january", THOUGHTS, "<think>\nadd\n</think>\n\n{}" + DEEPSEEK[1]),
        ("harmony", FIELDS, ANALYSIS + "{}<|return|>"),
        ("harmony", [A1 | {"content": "3"}, A2], "<|channel|>final<|message|>{}<|return|>"),
    ],
)
def test_a_template_that_drops_earlier_reasoning_gives_one_sequence_per_turn(
    make, family, answers, learned
):
    renderer, stop = make(family)
    messages = [Q1, answers[0], Q2, answers[1]]
    first, second = texts(renderer, render_turns(renderer, messages, stop))
    assert first == (renderer.text(messages[:1]), learned.format("3"))
    assert second == (renderer.text(messages[:3]), learned.format("7"))
    assert "add" not in second[0]


def test_reasoning_that_the_generation_prompt_opens_may_lack_its_opening_tag(make):
    for family in ("r1_distill", "qwq"):
        renderer, stop = make(family)
        [with_tag] = render_turns(renderer, [Q1, thought("3")], stop)
        [without] = render_turns(
            renderer, [Q1, {"role": "assistant", "content": "add\n</think>\n\n3"}], stop
        )
        np.testing.assert_array_equal(with_tag[0], without[0])


def test_reasoning_continues_a_generation_prompt_that_opens_it_and_a_template_that_keeps_it(
    make, tmp_path
):
    """Qwen3's models that always think: the last turn keeps its reasoning."""
    source = (TEMPLATES / "qwen3.jinja").read_text()
    opened = source.replace(r"{{ '<|im_start|>assistant\n' }}", "HEADER", 1)
    opened = opened.replace(
        r"{{ '<|im_start|>assistant\n' }}", r"{{ '<|im_start|>assistant\n<think>\n' }}"
    )
    path = tmp_path / "t.jinja"
    path.write_text(opened.replace("HEADER", r"{{ '<|im_start|>assistant\n' }}"))
    renderer, stop = make("qwen3", str(path))
    for answer in (THOUGHTS[0], FIELDS[0]):
        [found] = texts(renderer, render_turns(renderer, [Q1, answer], stop))
        assert found == (renderer.text([Q1]), "add\n</think>\n\n3<|im_end|>")
    assert renderer.text([Q1]).endswith("assistant\n<think>\n")


def test_reasoning_that_stays_in_the_conversation_is_one_sequence(make):
    renderer, stop = make("smollm3")
    [(tokens, mask)] = render_turns(renderer, [Q1, THOUGHTS[0], Q2, THOUGHTS[1]], stop)
    learned = renderer.decode(tokens[mask], skip_special=False)
    assert learned == "".join(f"{m['content']}<|im_end|>" for m in THOUGHTS)


def test_a_system_prompt_that_moves_to_the_last_question_gives_one_sequence_per_turn(make):
    renderer, stop = make("mistral_v0_3", system_prompt="Be brief.")
    first, second = texts(renderer, render_turns(renderer, [Q1, A1, Q2, A2], stop))
    assert first == ("<s>[INST] Be brief.\n\n1 + 2?[/INST]", " It is 3.</s>")
    assert second[0] == "<s>[INST] 1 + 2?[/INST] It is 3.</s>[INST] Be brief.\n\nAnd 3 + 4?[/INST]"


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"}


@pytest.mark.parametrize(
    "family, learned",
    [
        (
            "qwen2_5",
            '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
            "It is 3.<|im_end|>",
        ),
        ("llama3_1", '{"name": "add", "parameters": {"a": 1}}<|eot_id|>It is 3.<|eot_id|>'),
        (
            "mistral_v0_3",
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s> It is 3.</s>',
        ),
        (  # arguments as text: the template concatenates them
            "deepseek_v3",
            '<｜tool▁call▁begin｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
            f"{DEEPSEEK[1]}It is 3.{DEEPSEEK[1]}",
        ),
        ("glm4", 'add\n{"a": 1}<|observation|>\nIt is 3.<|user|>'),
    ],
)
def test_tool_calls_are_learned_and_their_results_are_not(make, family, learned):
    renderer, stop = make(family)
    tools = [TOOL] if family in ("qwen2_5", "mistral_v0_3") else []
    [(tokens, mask)] = render_turns(renderer, [Q1, CALL, RESULT, A1], stop, tools)
    assert renderer.decode(tokens[mask], skip_special=False) == learned
    np.testing.assert_array_equal(tokens[: mask.argmax()], renderer.render_all([[Q1]], [tools])[0])


def test_reasoning_around_tool_calls_of_one_question_is_one_sequence(make):
    """Qwen3 keeps the reasoning since the last question, and drops that of earlier questions."""
    renderer, stop = make("qwen3")
    messages = [Q1, CALL | {"reasoning_content": "call"}, RESULT, FIELDS[0], Q2, FIELDS[1]]
    first, second = texts(renderer, render_turns(renderer, messages, stop))
    assert first[0] == renderer.text([Q1])
    assert first[1].startswith("<think>\ncall\n</think>") and first[1].endswith("\n\n3<|im_end|>")
    assert second == (renderer.text(messages[:5]), "<think>\nadd\n</think>\n\n7<|im_end|>")


@pytest.mark.parametrize(
    "family, options, answer, complaint",
    [
        (
            "qwen3",
            {"arguments": {"enable_thinking": False}},
            THOUGHTS[0],
            r"turn 1 \(.*\): the chat template does not render it as a continuation of its "
            r"generation prompt, .*</think>.*data\.template_kwargs",
        ),
        (
            "llama3_1",
            {},
            CALL | {"content": "Let me add."},
            r"turn 1 \('Let me add\.'\): the chat template leaves out a part of its text, 'Let me",
        ),
        ("qwen2_5", {}, FIELDS[0], r"turn 1 \('3'\): .* leaves out a part of its text, 'add'"),
        ("r1_distill", {}, FIELDS[0], r"turn 1 \('3'\): .* leaves out a part of its text, 'add'"),
        ("mistral_v0_1", {}, RESULT, r"turn 2 .* roles .* \(roles must alternate"),
    ],
    ids=lambda value: value if isinstance(value, str) and value in FAMILIES else "",
)
def test_a_turn_that_cannot_be_masked_is_named_with_the_reason(
    make, family, options, answer, complaint
):
    renderer, stop = make(family, **options)
    messages = [Q1, answer] if answer["role"] == "assistant" else [Q1, answer, A1]
    with pytest.raises(ValueError, match=complaint):
        render_turns(renderer, messages, stop)


@pytest.mark.parametrize(
    "name, family, learned",
    [
        ("chatml", "yi", "7<|im_end|>"),
        ("gemma", "gemma2", "7<end_of_turn>"),
        ("llama3", "llama3_1", "7<|eot_id|>"),
        ("mistral", "mistral_v0_3", " 7</s>"),
        ("plain", "olmo2", " 7<|endoftext|>"),
        ("think", "yi", "so</think>7<|im_end|>"),
    ],
)
def test_built_in_templates_give_one_sequence_and_continue_their_prompts(
    make, name, family, learned
):
    renderer, stop = make(family, name, system_prompt="Be brief.")
    answer = {"role": "assistant", "content": "<think>so</think>7" if name == "think" else "7"}
    [(tokens, mask)] = render_turns(renderer, [Q1, answer, Q2, answer], stop)
    assert renderer.decode(tokens[mask], skip_special=False) == learned * 2
    prompt, reply = renderer.render([Q1]), renderer.render_reply([Q2], stop=stop, ended=True)
    seen = [*prompt, *tokens[mask][: mask.sum() // 2], *reply]
    np.testing.assert_array_equal(seen, renderer.render([Q1, answer, Q2]))
    text = renderer.text([Q1])
    assert text.count("Be brief.") == 1 and text.index("Be brief.") < text.index("1 + 2?")
    assert name in template_names()


MARKED = (
    "{% for m in messages %}{% if m.role == 'user' %}Q:{{ m.content }}\n{% else %}A:"
    "{{ m.content.split('|')[0] }}|{% generation %}{{ m.content.split('|')[1] }}{% endgeneration %}"
    "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def test_only_text_in_generation_blocks_and_the_end_of_the_turn_is_learned(make, tmp_path):
    (tmp_path / "t.jinja").write_text(MARKED)
    renderer, stop = make("yi", str(tmp_path / "t.jinja"))
    answers = [{"role": "assistant", "content": f"so|{n}"} for n in "37"]
    [(tokens, mask)] = render_turns(renderer, [Q1, answers[0], Q2, answers[1]], stop)
    assert renderer.decode(tokens[mask], skip_special=False) == "3<|im_end|>7<|im_end|>"
    # blocks decide where a turn does not continue its generation prompt
    (tmp_path / "t.jinja").write_text(MARKED.replace("prompt %}A:", "prompt %}B:"))
    renderer, stop = make("yi", str(tmp_path / "t.jinja"))
    [(again, mask)] = render_turns(renderer, [Q1, answers[0], Q2, answers[1]], stop)
    np.testing.assert_array_equal(again, tokens)
    assert renderer.decode(tokens[mask], skip_special=False) == "3<|im_end|>7<|im_end|>"
    (tmp_path / "t.jinja").write_text(MARKED.replace("{% else %}", "{% elif 0 %}", 1))
    renderer, stop = make("yi", str(tmp_path / "t.jinja"))
    with pytest.raises(ValueError, match=r"turn 1 .* leaves out a part of its text, 'so\|3'"):
        render_turns(renderer, [Q1, answers[0]], stop)


OPENED = {"qwq", "r1_distill"}  # the generation prompt opens the reasoning


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - OPENED))
def test_a_reply_continues_the_tokens_that_the_model_generated(make, family):
    """The tokens of two turns in an environment are those of the rendered conversation."""
    has_system = not family.startswith(("gemma2", "mi"))  # Mistral's rejects or moves it
    renderer, stop = make(family, system_prompt="Be brief." if has_system else "")
    messages = [Q1, A2, Q2]
    prompt = renderer.render(messages[:1])
    [(tokens, _)] = render_turns(renderer, messages[:2], stop)
    generated = tokens[len(prompt) :]
    reply = renderer.render_reply([Q2], stop=stop, ended=True)
    seen = renderer.decode(np.concatenate([prompt, generated, reply]), skip_special=False)
    if family == "qwen3":  # the model sees what it generated; the template drops the reasoning
        seen = seen.replace("<think>\n\n</think>\n\n", "")
    if family == "harmony":  # the template ends a turn with another token once others follow
        assert seen.count("<|return|>") == 1
        seen = seen.replace("<|return|>", "<|end|>")
    assert seen == renderer.text(messages)


@pytest.mark.parametrize("family", ["qwen3", "qwq", "r1_distill", "r1_distill_january"])
def test_a_reply_keeps_the_reasoning_that_the_template_would_drop(make, family):
    renderer, stop = make(family)
    [(tokens, _)] = render_turns(renderer, [Q1, THOUGHTS[0]], stop)
    reply = renderer.render_reply([Q2], stop=stop, ended=True)
    seen = renderer.decode(np.concatenate([tokens, reply]), skip_special=False)
    assert "add\n</think>\n\n3" in seen and "add" not in renderer.text([Q1, THOUGHTS[0], Q2])
    opening = "<think>\n" if family in OPENED else ""
    assert seen.endswith(opening) and seen.count("And 3 + 4?") == 1


def test_replies_of_harmony_follow_a_final_message_and_a_call(make):
    """Its template ends the last turn with <|return|>, and earlier ones with <|end|>."""
    renderer, stop = make("harmony")
    reply = functools.partial(renderer.render_reply, stop=stop)
    question = "<|start|>user<|message|>And 3 + 4?<|end|><|start|>assistant"
    tokens = reply([Q2], ended=True), reply([Q2], ended=False)
    texts = [renderer.decode(t, skip_special=False) for t in tokens]
    assert texts == [question, f"<|end|>{question}"]
    call = ToolCall("add", {"a": 1}, "call00000")
    tokens = reply([{"role": "tool", "content": "3"}], ended=True, calls=[call])
    assert renderer.decode(tokens, skip_special=False) == (
        '<|start|>functions.tool to=assistant<|channel|>commentary<|message|>"3"<|end|>'
        "<|start|>assistant"
    )


def test_a_system_prompt_is_not_repeated_in_a_reply(make):
    renderer, stop = make("mistral_v0_3", system_prompt="Be brief.")
    reply = renderer.render_reply([Q2], stop=stop, ended=True)
    assert renderer.decode(reply, skip_special=False) == "[INST] And 3 + 4?[/INST]"


@pytest.mark.parametrize(
    "family, arguments, found",
    [
        ("qwen3", {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ("smollm3", {"enable_thinking": False}, "Reasoning Mode: /no_think\n"),
        ("granite3", {"thinking": True}, "Write your thoughts first."),
        ("harmony", {"reasoning_effort": "high"}, "Reasoning: high<|end|>"),
        ("llama3_1", {"date_string": "1 May 2025"}, "Today Date: 1 May 2025\n"),
        ("llama3_2", {}, "Today Date: 29 Feb 2024\n"),
        ("smollm3", {}, "Today Date: 29 February 2024\n"),
        ("granite3", {}, "Today's Date: February 29, 2024."),
        ("harmony", {}, "Current date: 2024-02-29\n"),
    ],
)
def test_arguments_and_the_date_of_the_families(make, family, arguments, found):
    renderer, _ = make(family, arguments=arguments, today=datetime.date(2024, 2, 29))
    assert found in renderer.text([Q1])
