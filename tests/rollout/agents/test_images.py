"""Images in the requests of agents: all three dialects, with the clients of their vendors."""

import json

import numpy as np
import pytest

from jaxrl.config.keys import AlgorithmConfig, DataConfig, EnvConfig, SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.mrope import mrope_positions
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.images.references import IMAGE
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.http.errors import RequestError
from jaxrl.rollout.agents.chat import parse_chat
from jaxrl.rollout.agents.endpoint import AgentEndpoint
from jaxrl.rollout.agents.episode import AgentLimits
from jaxrl.rollout.agents.runner import AgentRunner, Agents
from jaxrl.rollout.agents.turn import TurnReader
from jaxrl.rollout.loop import generate
from jaxrl.rollout.request_images import EpisodeImages
from jaxrl.trainer.phases.mini_batches import to_samples
from jaxrl.types import Prompt
from tests.trainer.test_image_episodes import RED, NoFeatures
from tests.trainer.test_multi_turn import EOS, Scripted, ids

AGENT = r'''
import base64
import contextlib
import io
import json

from PIL import Image

with contextlib.suppress(ImportError):  # once for all episodes
    import anthropic
with contextlib.suppress(ImportError):
    import openai


def url(red):
    file = io.BytesIO()
    Image.new("RGB", (32, 16), (red, 0, 0)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat(base_url, api_key, task):
    """A second picture, then the first turn again with another picture."""
    client, messages = openai.OpenAI(max_retries=0), list(task["messages"])
    create = client.chat.completions.create
    first = create(model="m", messages=messages).choices[0].message
    image = {"type": "image_url", "image_url": {"url": url(50)}}
    result = {"role": "user", "content": [image, {"type": "text", "text": "c"}]}
    messages += [{"role": "assistant", "content": first.content}, result]
    assert create(model="m", messages=messages).choices[0].message.content == "d"
    other = {"type": "image_url", "image_url": {"url": url(90)}}
    messages[-1] = {"role": "user", "content": [other, {"type": "text", "text": "c"}]}
    more = [{"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]
    assert create(model="m", messages=messages + more).choices[0].message.content == "f"
    for broken in ("http://a/b.png", "/etc/passwd", "data:image/png;base64,aGVsbG8="):
        part = {"type": "image_url", "image_url": {"url": broken}}
        try:
            create(model="m", messages=[{"role": "user", "content": [part]}])
        except openai.BadRequestError as error:
            assert "image" in str(error), error
        else:
            raise AssertionError(broken)
    return 1.0


def claude(base_url, api_key, task):
    """The picture of the task and one in the result of a tool, through Anthropic's client."""
    client = anthropic.Anthropic(max_retries=0)

    def block(text):
        kind, _, data = text.removeprefix("data:").partition(";base64,")
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}

    parts = task["messages"][0]["content"]
    blocks = [block(p["image_url"]["url"]) if p["type"] == "image_url" else p for p in parts]
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = dict(model="claude", max_tokens=100, tools=tools)
    messages = [{"role": "user", "content": blocks}]
    first = client.messages.create(messages=messages, **body)
    [call] = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [block(url(50))]}
    messages += [{"role": "assistant", "content": first.content}]
    messages += [{"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model="claude", messages=messages, tools=tools)
    second = client.messages.create(messages=messages, **body)
    assert second.content[0].text == "d" and second.usage.input_tokens == counted.input_tokens
    return 1.0


def codex(base_url, api_key, task):
    """The same pictures through OpenAI's Responses API."""
    client = openai.OpenAI(max_retries=0)

    def part(one):
        if one["type"] == "text":
            return {"type": "input_text", "text": one["text"]}
        return {"type": "input_image", "image_url": one["image_url"]["url"], "detail": "auto"}

    items = [{"role": "user", "content": [part(one) for one in task["messages"][0]["content"]]}]
    first = client.responses.create(model="gpt", input=items)
    items += [item.model_dump(exclude_none=True) for item in first.output]
    image = {"type": "input_image", "image_url": url(50), "detail": "auto"}
    items.append({"role": "user", "content": [image]})
    assert client.responses.create(model="gpt", input=items).output_text == "d"
    return 1.0


def agent(base_url, api_key, task):
    return globals()[task["answer"]](base_url, api_key, task)
'''
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif -%}
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else -%}
{{ part.text }}{% endif %}{% endfor %}{% endif -%}
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def reader(vlm):
    return ImageReader(vlm, load_tokenizer(vlm), DataConfig(images=True))


@pytest.fixture(scope="module")
def renderer(vlm, reader, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "images.jinja"
    path.write_text(TEMPLATE)
    return ChatRenderer(load_tokenizer(vlm), template=str(path), images=reader.placeholders)


@pytest.fixture(scope="module")
def agents(reader, tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "picture_agents.py"
    path.write_text(AGENT)
    cfg = EnvConfig(agent=f"{path}:agent", workers=1, timeout_s=60.0)
    with EnvironmentPool(cfg) as pool, AgentEndpoint(reader) as endpoint:
        yield Agents(pool, endpoint)


def play(agents, reader, renderer, name, script):
    """(rollout, requests of the engine) of an agent with a picture in its prompt."""
    message = {"role": "user", "content": f"{IMAGE}What?"}
    placed = renderer.place_images(renderer.render([message]), reader.read_references([RED], "row"))
    engine, encoder = Scripted([[[*ids(renderer, text), EOS] for text in script]]), NoFeatures()
    runner = AgentRunner(
        engine,
        agents,
        TurnReader(renderer, (EOS,)),
        sampling=SamplingConfig(),
        limits=AgentLimits(context_len=600, max_turns=4, timeout_s=0.0, needs_reward=True),
        images=EpisodeImages(reader, encoder),
    )
    prompt = Prompt(0, (message,), answer=name, **placed.fields)
    [rollout], _ = generate(runner, None, [prompt], n=1, seed=0, version=0)
    assert not rollout.episode.error, rollout.episode.error
    return rollout, engine.requests


@pytest.mark.parametrize(
    ("name", "package", "script"),
    [
        pytest.param("claude", "anthropic", [CALL, "d"], marks=pytest.mark.thorough),
        pytest.param("codex", "openai", ["ab", "d"], marks=pytest.mark.thorough),
        ("chat", "openai", ["ab", "d", "f"]),
    ],
)
def test_a_turn_continues_the_sampled_tokens_with_all_images(
    agents, reader, renderer, name, package, script
):
    pytest.importorskip(package)
    rollout, requests = play(agents, reader, renderer, name, script)
    token, first = reader.placeholders.token, requests[0]
    n = len(first.tokens)
    assert requests[1].tokens[:n].tolist() == first.tokens.tolist()
    sampled = [*ids(renderer, script[0]), EOS]
    assert requests[1].tokens[n : n + len(sampled)].tolist() == sampled
    # 24 x 16 pixels of the prompt, then 32 x 16: patches of 4 x 4, of which 2 x 2 are a token
    assert [len(image.rows) for image in requests[1].images] == [6, 8]
    for sample in to_samples(rollout, AlgorithmConfig()):
        sequence = np.concatenate([sample.prompt_tokens, sample.tokens])
        grids = [placed.image.grid for placed in sample.images]
        expected, _ = mrope_positions(sequence, grids, image_token=token, merge=2)
        np.testing.assert_array_equal(sample.axis_positions, expected)


def test_another_image_in_the_history_begins_a_branch(agents, reader, renderer):
    pytest.importorskip("openai")
    rollout, requests = play(agents, reader, renderer, "chat", ["ab", "d", "f"])
    # the third request has the first turn in common with the conversation, not its last message
    [other] = rollout.branches
    assert rollout.n_loss_tokens + other.n_loss_tokens == len("ab" + "d" + "f") + 3
    found = [[p.image.digest for p in one.images] for one in (other, rollout)]
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
    assert [image.digest for image in requests[2].images] == found[1]
    assert rollout.episode.counts["rejected"] == 3


def test_a_run_that_reads_text_refuses_images():
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    with pytest.raises(RequestError, match=r"data\.images=True"):
        parse_chat(body)
