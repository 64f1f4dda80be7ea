"""Several adapters of one base model in a server, and the checkpoints of a run that trains one."""

import concurrent.futures

import httpx2 as httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxrl.config.keys import LoRAConfig, SamplingConfig
from jaxrl.models.config import LoRA
from jaxrl.models.files.adapter import save_adapter
from jaxrl.models.files.hf_load import load_model, model_config
from jaxrl.models.lora import add_adapters, combine, merge, split, with_adapters
from jaxrl.serve.__main__ import read
from jaxrl.serve.model import open_model
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.serve.serve_cases import KEY, arguments, direct, serving, wait_until
from tests.serve.test_checkpoint_watcher import new_run, save

GREEDY = SamplingConfig(temperature=0.0)
PROMPT = "What is the sum?"
BODY = dict(prompt=PROMPT, max_tokens=20, temperature=0, logprobs=0)
IDS = {"extra_body": {"return_token_ids": True}}
LORAS = {
    "math": LoRA(4, 8.0, targets=("q_proj", "up_proj", "embed_tokens", "lm_head")),
    "code": LoRA(2, 4.0, targets=("o_proj",), dora=True),
}


def adapted(folder, lora, seed):
    """The served model with an adapter of random numbers."""
    with jax.set_mesh(make_mesh()):
        base = load_model(folder, rules=TRAIN)[1]
        model = add_adapters(base, lora, seed=seed, rules=TRAIN, dtype=jnp.float32)
        trained, frozen = split(model)
        rng = np.random.default_rng(seed)

        def values(leaf):
            return jax.device_put(rng.normal(0, 0.3, leaf.shape).astype(np.float32), leaf.sharding)

        return combine(jax.tree.map(values, trained), frozen)


@pytest.fixture(scope="module")
def models(model_folder):
    """The model with each adapter, by name."""
    return {n: adapted(model_folder, lora, i) for i, (n, lora) in enumerate(LORAS.items())}


@pytest.fixture(scope="module")
def expected(model_folder, models):
    """(tokens, logps) of the prompt from an engine with merged weights, by model name."""
    model, found = open_model(read(arguments(model_folder))[1], max_len=1024), {}
    with jax.set_mesh(model.mesh):
        every = {"tiny": model.params} | {name: merge(m) for name, m in models.items()}
    for name, params in every.items():
        model.engine.release()
        [(tokens, logps, _)] = direct(
            model, [PROMPT], params=params, max_tokens=20, sampling=GREEDY
        )
        found[name] = tokens, logps
    return found


@pytest.fixture(scope="module")
def served(model_folder, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    with jax.set_mesh(make_mesh()):
        save_adapter(folder / "math", models["math"], base="tiny")
        save_adapter(folder / "run" / "adapter", models["code"], base="tiny")
    given = [f"--adapter=math={folder / 'math'}", f"--adapter=code={folder / 'run'}"]
    with serving(arguments(model_folder, *given)) as served:
        yield served


@pytest.mark.thorough
def test_concurrent_requests_choose_base_or_adapter_by_the_model_name(served, expected):
    names = ["tiny", "math", "code", "math"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(served.client.completions.create, model=name, **BODY, **IDS)
            for name in names
        ]
        answers = [future.result() for future in futures]
    for name, answer in zip(names, answers, strict=True):
        tokens, logps = expected[name]
        choice = answer.choices[0]
        assert answer.model == name and choice.token_ids == tokens
        np.testing.assert_allclose(choice.logprobs.token_logprobs, logps, atol=2e-4)
    assert len({tuple(expected[name][0]) for name in names}) == 3


@pytest.mark.thorough
def test_prompt_logprobs_and_streams_are_those_of_the_adapter(served, expected):
    found = {}
    for name in ("tiny", "math"):
        ids = served.client.completions.create(model=name, **BODY, **IDS).choices[0].token_ids
        body = BODY | dict(prompt=PROMPT, echo=True, max_tokens=1)
        scored = served.client.completions.create(model=name, **body).choices[0].logprobs
        found[name] = scored.token_logprobs[1:-1]
        stream = served.client.completions.create(model=name, **BODY, **IDS, stream=True)
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {name}
        assert [t for chunk in chunks for t in chunk.choices[0].token_ids] == ids
    assert np.abs(np.subtract(found["tiny"], found["math"])).max() > 0.1


@pytest.mark.thorough
def test_models_are_listed_and_unknown_names_are_refused(served):
    listed = {model.id: model.parent for model in served.client.models.list()}
    assert listed == {"tiny": None, "math": "tiny", "code": "tiny"}
    assert served.client.models.retrieve("code").id == "code"
    with pytest.raises(openai.NotFoundError, match="'maths' is not served here; use 'tiny', 'm"):
        served.client.completions.create(model="maths", **BODY)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        served.client.models.retrieve("maths")
    answer = httpx.post(
        f"{served.base}/v1/responses",
        json={"model": "math", "input": "hi", "max_output_tokens": 2},
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert answer.json()["model"] == "math"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--adapter=math"], "--adapter=math must be NAME=PATH"),
        (["--adapter=a=x", "--adapter=a=y"], "two adapters of the name a"),
        (["--adapter=tiny=x"], "has the name of the base model; set --name"),
    ],
)
def test_invalid_adapters_are_refused(model_folder, capsys, options, words):
    with pytest.raises(SystemExit):
        read(arguments(model_folder, *options))
    assert words in capsys.readouterr().err


def test_adapters_next_to_a_checkpoint_are_refused(model_folder, tmp_path, capsys):
    run_folder = new_run(tmp_path / "run", model_folder)
    with pytest.raises(SystemExit):
        read(arguments(run_folder, "--follow", "--adapter=a=x"))
    assert "--adapter needs a model folder as --model" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_run_that_trains_adapters_is_followed(model_folder, tmp_path):
    cfg = LoRAConfig(rank=4, alpha=8.0, target_modules=("q_proj", "up_proj"))
    lora = with_adapters(cfg, model_config(model_folder)).lora
    steps = {step: adapted(model_folder, lora, step) for step in (10, 20)}
    run_folder = new_run(tmp_path / "run", model_folder, lora=cfg)
    model = open_model(read(arguments(model_folder))[1], max_len=1024)

    def expected(step):
        model.engine.release()
        with jax.set_mesh(model.mesh):
            params = merge(steps[step]) if step else model.params
        return direct(model, [PROMPT], params=params, max_tokens=20, sampling=GREEDY)[0]

    with serving(arguments(run_folder, "--follow")) as served:
        base = served.service.engine._params.embed
        for step in (0, 10, 20):
            if step:
                save(run_folder, step, split(steps[step])[0])
                wait_until(lambda step=step: served.service.engine.step == step)
            answer = served.client.completions.create(model="tiny", **BODY, **IDS)
            tokens, logps, _ = expected(step)
            assert answer.choices[0].token_ids == tokens
            np.testing.assert_allclose(answer.choices[0].logprobs.token_logprobs, logps, atol=2e-4)
        assert served.service.engine._params.embed is base and not base.is_deleted()
    with serving(arguments(run_folder, "--step=10")) as served:
        answer = served.client.completions.create(model="tiny", **BODY, **IDS)
        assert answer.choices[0].token_ids == expected(10)[0]
        assert answer.system_fingerprint == "step-10"
