"""Tests of episodes with tool calls: exact tokens of the results in every format of calls."""

import json

import pytest

from jaxrl.config.keys import EnvConfig, RunConfig, SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.rollout.loop import generate
from jaxrl.rollout.multi_turn import EnvironmentRunner, EpisodeLimits
from jaxrl.tool_calls.calls import MalformedCall, ToolCall
from jaxrl.tool_calls.formats import tool_format
from jaxrl.trainer.phases.rewards import episode_means
from jaxrl.trainer.setup.engines import episode_tool_format
from jaxrl.types import Prompt, Reward, ScoredRollout
from tests.trainer.test_multi_turn import EOS, Scripted, ids

# The grammar of each family, with the end-of-turn token of the test's tokenizer.
END = "<|im_end|>"
LLAMA3 = """
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call per turn") }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + "}<|im_end|>" }}
{%- elif m.role == "tool" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (m.content | tojson) + "<|im_end|>" }}
{%- else %}
{{- "<|start_header_id|>" + m.role + "<|end_header_id|>\\n\\n" }}
{%- if loop.first and tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{{- m.content + "<|im_end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""
MISTRAL = """
{%- for m in messages %}
{%- if m.role == "user" %}
{%- if tools and loop.last %}{{ "[AVAILABLE_TOOLS] " + (tools | tojson) }}{% endif %}
{{- "[INST] " + m.content + "[/INST]" }}
{%- elif m.tool_calls %}
{{- "[TOOL_CALLS] [" }}
{%- for c in m.tool_calls %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + ("" if loop.last else ", ") }}
{%- endfor %}
{{- "]<|im_end|>" }}
{%- elif m.role == "tool" %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}{{ m.content + "<|im_end|>" }}
{%- endif %}
{%- endfor %}
"""
DEEPSEEK = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == "user" %}{{ "<｜User｜>" + m.content }}
{%- elif m.tool_calls %}
{{- "<｜Assistant｜><｜tool▁calls▁begin｜>" }}
{%- for c in m.tool_calls %}
{{- "<｜tool▁call▁begin｜>" + c.type + "<｜tool▁sep｜>" + c.function.name + "\\n```json\\n" }}
{{- (c.function.arguments | tojson) + "\\n```<｜tool▁call▁end｜>" }}
{%- endfor %}
{{- "<｜tool▁calls▁end｜><|im_end|>" }}
{%- elif m.role == "tool" %}
{{- "<｜tool▁output▁begin｜>" + m.content + "<｜tool▁output▁end｜>" }}
{%- else %}{{ "<｜Assistant｜>" + m.content + "<|im_end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != "tool" %}{{ "<｜Assistant｜>" }}{% endif %}
"""
TEMPLATES = {"llama3": LLAMA3, "mistral": MISTRAL, "deepseek": DEEPSEEK}
SUM = '{"expression": "1 + 2"}'
TURNS = {  # one call, and what is between it and the next turn
    "hermes": (
        f'<tool_call>{{"name": "calculate", "arguments": {SUM}}}</tool_call>',
        "\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": (
        f'{{"name": "calculate", "parameters": {SUM}}}',
        '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|im_end|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "calculate", "arguments": {SUM}}}]',
        '[TOOL_RESULTS] {"content": "3", "call_id": "call00000"}[/TOOL_RESULTS]',
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculate\n"
        f"```json\n{SUM}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁output▁begin｜>3<｜tool▁output▁end｜>",
    ),
}
ANSWER = "It is 3.<|im_end|>"


@pytest.fixture(scope="module")
def pool():
    with EnvironmentPool(EnvConfig(name="calculator_tool?call_reward=0.25", workers=3)) as pool:
        yield pool


@pytest.fixture(scope="module")
def renderers(tiny_model, tmp_path_factory):
    """By format; every byte is a token."""
    folder, tokenizer = tmp_path_factory.mktemp("templates"), load_tokenizer(tiny_model)
    found = {"hermes": ChatRenderer(tokenizer, template="chatml_tools")}
    for name, text in TEMPLATES.items():
        path = folder / f"{name}.jinja"
        path.write_text(text.strip())
        found[name] = ChatRenderer(tokenizer, template=str(path))
    return found


def run(script, pool, renderer):
    """(rollouts, requests) of one prompt; `script` holds the turns of each sample."""
    message = {"role": "user", "content": "1 + 2?"}
    prompt = Prompt(5, (message,), renderer.render([message]), "3")
    engine = Scripted([[ids(renderer, turn) for turn in turns] for turns in script])
    runner = EnvironmentRunner(
        engine,
        pool,
        renderer,
        (EOS,),
        sampling=SamplingConfig(stop=("!",)),
        limits=EpisodeLimits(prompt_len=2000, max_tokens=2000, max_turns=4),
        tool_format=tool_format(renderer.template),
    )
    rollouts, _ = generate(runner, None, [prompt], n=len(script), seed=3, version=1)
    return rollouts, engine.requests


@pytest.mark.parametrize("name", TURNS)
def test_the_result_of_a_call_follows_the_tokens_of_the_model(pool, renderers, name):
    renderer, (call, between) = renderers[name], TURNS[name]
    ((rollout,), requests) = run([[call + END, ANSWER]], pool, renderer)
    assert tool_format(renderer.template).name == name
    prompt = renderer.decode(requests[0].tokens, skip_special=False)
    assert '"expression"' in prompt  # of the tool's schema
    n, between_ids = len(ids(renderer, call)) + 1, ids(renderer, between)
    assert rollout.tokens.tolist() == ids(renderer, call + END + between + ANSWER)
    assert requests[1].tokens.tolist() == [
        *requests[0].tokens,
        *ids(renderer, call + END + between),
    ]
    n_answer = len(ids(renderer, ANSWER))
    mask = [True] * n + [False] * len(between_ids) + [True] * n_answer
    assert rollout.loss_mask.tolist() == mask
    assert (rollout.finish, rollout.episode.reward, rollout.episode.n_turns) == ("stop", 1.25, 2)
    function = {"name": "calculate", "arguments": json.loads(SUM)}
    asked = {"id": "call00000", "type": "function", "function": function}
    assert rollout.completion_messages == (
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "content": "3", "tool_call_id": "call00000", "name": "calculate"},
        {"role": "assistant", "content": "It is 3."},
    )


def test_parallel_calls_have_one_result_each_in_one_observation(pool, renderers):
    call = TURNS["hermes"][0]
    other = call.replace("1 + 2", "3 * 4")
    ((rollout,), _) = run([[f"{call}\n{other}{END}", ANSWER]], pool, renderers["hermes"])
    results = "<tool_response>3</tool_response>\n<tool_response>12</tool_response><|im_end|>"
    text = renderers["hermes"].decode(rollout.tokens, skip_special=False)
    assert f"</tool_call>{END}\n<|im_start|>user\n{results}\n<|im_start|>assistant" in text
    assert rollout.episode.counts["calls"] == 2.0


def test_a_malformed_call_is_answered_with_the_reason_and_counted(pool, renderers):
    bad = '<tool_call>{"name": "calculate", "arguments": {</tool_call>'
    unknown = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'
    script = [[bad + END, ANSWER], [unknown + END, ANSWER], [ANSWER]]
    rollouts, _ = run(script, pool, renderers["hermes"])
    texts = [r.completion_messages[1]["content"] for r in rollouts[:2]]
    assert texts[0].startswith("error: malformed tool call: not valid JSON")
    assert texts[1] == "error: there is no tool 'fly'; the tools are calculate"
    assert rollouts[0].completion_messages[0]["content"] == bad  # as the model wrote it
    assert f"<tool_response>{texts[0]}</tool_response>" in rollouts[0].text
    assert [r.episode.reward for r in rollouts] == [1.0] * 3
    found = episode_means([ScoredRollout(r, Reward(0.0)) for r in rollouts])
    assert found["calls"] == pytest.approx(2 / 3)
    assert found["malformed_calls"] == found["unknown_tools"] == pytest.approx(1 / 3)


def test_a_call_ended_by_a_stop_string_gets_an_end_of_turn_outside_the_loss(pool, renderers):
    call, between = TURNS["hermes"]
    ((rollout,), _) = run([[call + "!", ANSWER]], pool, renderers["hermes"])
    n = len(ids(renderers["hermes"], call)) + 1
    expected = ids(renderers["hermes"], call + "!" + END + between + ANSWER)
    assert rollout.tokens.tolist() == expected
    assert rollout.loss_mask[: n + 1].tolist() == [True] * n + [False]


def test_a_template_that_rejects_several_calls_still_renders_their_results(renderers):
    calls = [ToolCall("f", {}, "call00000"), MalformedCall("{", "no", "call00001")]
    messages = [
        {"role": "tool", "content": str(i), "tool_call_id": c.id} for i, c in enumerate(calls)
    ]
    tokens = renderers["llama3"].render_reply(messages, stop=(EOS,), ended=True, calls=calls)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    results = [header.format("ipython") + f'"{i}"{END}' for i in range(2)]
    expected = "".join(results) + header.format("assistant")
    assert renderers["llama3"].decode(tokens, skip_special=False) == expected


def test_tools_without_a_place_in_the_template_are_refused_at_the_start(
    pool, renderers, tiny_model
):
    cfg = RunConfig(env=EnvConfig(name="calculator_tool"))
    assert episode_tool_format(cfg, pool, renderers["mistral"]).name == "mistral"
    plain = ChatRenderer(load_tokenizer(tiny_model), template="chatml")
    with pytest.raises(ValueError, match=r"has the tools calculate: .* no known format"):
        episode_tool_format(cfg, pool, plain)
    named = RunConfig(env=EnvConfig(name="calculator_tool", tool_format="hermes"))
    with pytest.raises(ValueError, match=r"leaves out tools .'calculate'"):
        episode_tool_format(named, pool, plain)
    assert episode_tool_format(cfg, None, plain) is None
