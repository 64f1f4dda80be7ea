"""Serving the checkpoints of a run, during and after training: jaxrl/serve/checkpoint_watcher.py.

Every response comes from one version of the weights, and names it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import shutil
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.keys import CheckpointConfig, RunConfig, SamplingConfig
from jaxrl.config.saved import to_json
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_load import load_model, model_config
from jaxrl.models.spec import init_params
from jaxrl.runtime.compilation import CompileWatch
from jaxrl.serve.__main__ import load_first_model, read, serve
from jaxrl.serve.checkpoint_watcher import Checkpoints, first_step
from jaxrl.serve.model import open_model
from jaxrl.serve.response import ActiveResponse
from jaxrl.serve.score import score
from jaxrl.types import TrainState
from sharding import make_mesh
from sharding.rules import DECODE, TRAIN
from tests.models.resized import resized
from tests.serve.serve_cases import arguments, direct, metric, serving, wait_until

ROOT = pathlib.Path(__file__).parents[2]
GREEDY = SamplingConfig(temperature=0.0)
BODY = dict(model="tiny", prompt="What is the sum?", max_tokens=20, temperature=0)
IDS = {"return_token_ids": True}
LONG = {"max_tokens": 900, "extra_body": {"ignore_eos": True} | IDS}


def policy(folder, step, **changes):
    """Weights of a training step: the served model at step 0, else random ones."""
    if step == 0:
        with jax.set_mesh(make_mesh()):
            return load_model(folder, rules=TRAIN)[1]
    cfg = resized(model_config(folder), **changes)
    with jax.set_mesh(make_mesh()):
        params = init_params(jax.random.key(step), decoder_specs(cfg), TRAIN, jnp.float32)
        return jax.tree.map(lambda w: w * 4.0 if w.ndim > 1 else w, params)


def save(run_folder, step, params, **options):
    """Saves a checkpoint as the trainer does: weights and moments."""
    with contextlib.closing(
        Checkpointer(run_folder / "checkpoints", CheckpointConfig(**options))
    ) as checkpoints:
        moments = jax.tree.map(jnp.zeros_like, params)
        checkpoints.save(step, TrainState(params, moments, jnp.int32(step)), {"step": step})


def new_run(run_folder, model_folder, **changes):
    """Creates the folder of a started run."""
    cfg = RunConfig()
    model = dataclasses.replace(cfg.model, path=str(model_folder))
    run_folder.mkdir()
    (run_folder / "config.json").write_text(
        to_json(dataclasses.replace(cfg, model=model, **changes))
    )
    (run_folder / "checkpoints").mkdir()
    return run_folder


@pytest.fixture(scope="module")
def weights(model_folder):
    """Weights by training step."""
    return functools.cache(functools.partial(policy, model_folder))


@pytest.fixture(scope="module")
def run_folder(model_folder, tmp_path_factory):
    return new_run(tmp_path_factory.mktemp("followed") / "run", model_folder)


@pytest.fixture(scope="module")
def followed(run_folder):
    """A server that follows a run, started before its first checkpoint."""
    with serving(arguments(run_folder, "--follow")) as served:
        yield served


@pytest.fixture(scope="module")
def model(model_folder):
    """A second engine, called directly."""
    return open_model(read(arguments(model_folder))[1], max_len=1024)


@pytest.fixture
def expected(model, weights):
    """Tokens and logprobs of an engine that only ever had the weights of one step."""

    def generate(step, prompt=BODY["prompt"], max_tokens=20, **options):
        model.engine.release()
        options = dict(max_tokens=max_tokens, sampling=GREEDY, **options)
        [(tokens, logps, _)] = direct(model, [prompt], params=weights(step), **options)
        return tokens, logps

    return generate


@pytest.fixture
def save_next(followed, run_folder, weights):
    """Saves the next checkpoint and returns its step."""

    def save_one():
        step = int(followed.client.models.retrieve("tiny").step) + 10
        save(run_folder, step, weights(step))
        return step

    return save_one


def wait_for_step(followed, step):
    wait_until(lambda: metric(followed, "jaxrl_weights_step") == step)


def test_a_followed_run_is_served_with_its_newest_weights(followed, expected, save_next):
    first = step = followed.service.engine.step  # 0 until the run saves a checkpoint
    responses = [followed.client.completions.create(**BODY, logprobs=0, extra_body=IDS)]
    followed.service.compiler.join()
    programs = []
    watch = CompileWatch(lambda name, _: programs.append(name))
    for _ in range(2):
        step = save_next()
        wait_for_step(followed, step)
        # the same prompt, whose pages are in the prefix cache
        responses.append(followed.client.completions.create(**BODY, logprobs=0, extra_body=IDS))
    watch.detach()
    ours = ("prefill", "mixed", "decode", "copy_pages")
    assert not [name for name in programs if any(part in name for part in ours)]
    assert followed.client.models.retrieve("tiny").step == step == first + 20
    for i, answer in enumerate(responses):
        tokens, logps = expected(first + 10 * i)
        assert answer.choices[0].token_ids == tokens
        assert answer.choices[0].logprobs.token_logprobs == logps
        assert answer.system_fingerprint == f"step-{first + 10 * i}"
    assert len({answer.choices[0].text for answer in responses}) == 3


def test_old_weights_are_freed_before_new_ones_are_placed(followed, save_next, monkeypatch):
    engine, place, freed, read = followed.service.engine, Checkpoints._place_model, [], []

    def recorded(checkpoints, weights):
        read.append(weakref.ref(weights))
        freed.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(engine._params)))
        return place(checkpoints, weights)

    monkeypatch.setattr(Checkpoints, "_place_model", recorded)
    wait_for_step(followed, save_next())
    assert freed == [True]
    assert [copy() for copy in read] == [None]  # in host memory


@pytest.mark.thorough
def test_a_running_response_finishes_with_the_weights_it_started_with(
    followed, expected, save_next
):
    step = int(metric(followed, "jaxrl_weights_step"))
    stream = followed.client.completions.create(**BODY | LONG, stream=True)
    chunks = [next(stream)]
    newer = save_next()
    wait_until(lambda: followed.service.engine.updating)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(followed.client.completions.create, **BODY, extra_body=IDS)
        chunks += stream
        later = waiting.result()
    tokens = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    assert tokens == expected(step, max_tokens=900, ignore_stop=True)[0]
    assert {chunk.system_fingerprint for chunk in chunks} == {f"step-{step}"}
    assert later.choices[0].token_ids == expected(newer)[0]
    assert later.system_fingerprint == f"step-{newer}"


def test_deferred_requests_can_be_cancelled_and_count_toward_the_limit(
    followed, expected, save_next
):
    stream = followed.client.completions.create(**BODY | LONG, stream=True)
    next(stream)
    step = save_next()
    wait_until(lambda: followed.service.engine.updating)

    def cancel() -> bool:
        """Whether the server knew a request before its client gave it up."""
        with pytest.raises(openai.APITimeoutError):
            followed.client.completions.create(**BODY, timeout=0.1)
        return len(followed.service.engine._accepted) > 0

    wait_until(cancel)
    with pytest.raises(openai.RateLimitError), concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: followed.client.completions.create(**BODY), range(6)))
    stream.close()
    wait_for_step(followed, step)
    answer = followed.client.completions.create(**BODY, extra_body=IDS)
    assert answer.choices[0].token_ids == expected(step)[0]
    wait_until(lambda: len(followed.service.engine._accepted) == 0)


def test_scoring_uses_the_weights_that_generated(followed, run_folder, weights, monkeypatch):
    engine, score_choice = followed.service.engine, ActiveResponse._score
    step = engine.step

    def score_late(response, choice):
        """Saves newer weights before the first choice is scored."""
        if choice.index == 0:
            save(run_folder, step + 10, weights(step + 10))
            wait_until(lambda: engine.updating)
        return score_choice(response, choice)

    weights(step + 10)
    monkeypatch.setattr(ActiveResponse, "_score", score_late)
    answer = followed.client.completions.create(
        **BODY | {"max_tokens": 5}, n=2, logprobs=2, echo=True, extra_body=IDS
    )
    assert answer.system_fingerprint == f"step-{step}"
    for choice in answer.choices:
        tokens = np.array([*choice.prompt_token_ids, *choice.token_ids])
        with jax.set_mesh(make_mesh()):
            known = score(weights(step), tokens, temperature=0.0, rules=DECODE)
        np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], known.logp, atol=1e-5)
        n = len(choice.prompt_token_ids)
        best = [max(top.values()) for top in choice.logprobs.top_logprobs[n:]]
        np.testing.assert_allclose(best, known.top_logp[n - 1 :, 0], atol=1e-5)
    wait_for_step(followed, step + 10)


def truncate(folder, step):
    """Truncates a checkpoint file, as an interrupted copy does."""
    data = max((folder / str(step) / "state").rglob("*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def remove_a_part(folder, step):
    shutil.rmtree(folder / str(step) / "state" / "d")


@pytest.mark.parametrize(
    ("damage", "changes", "message"),
    [
        (truncate, {}, "cannot be read"),
        pytest.param(remove_a_part, {}, "cannot be read", marks=pytest.mark.thorough),
        (None, {"L": 3}, "from another model: params/layers/2/"),
        pytest.param(
            None,
            {"heads": ("vocab", "score")},
            "from another model: params/score is in it but not in",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_an_invalid_checkpoint_is_skipped(
    followed,
    run_folder,
    model_folder,
    save_next,
    expected,
    tmp_path,
    caplog,
    damage,
    changes,
    message,
):
    step, failed = followed.service.engine.step, metric(followed, "jaxrl_weights_failures_total")
    save(tmp_path, step + 5, policy(model_folder, 1, **changes))
    if damage:
        damage(tmp_path / "checkpoints", step + 5)
    (tmp_path / "checkpoints" / str(step + 5)).rename(run_folder / f"checkpoints/{step + 5}")
    wait_until(lambda: metric(followed, "jaxrl_weights_failures_total") == failed + 1)
    assert message in caplog.text and f"still serving step {step}" in caplog.text
    answer = followed.client.completions.create(**BODY, extra_body=IDS)
    assert answer.system_fingerprint == f"step-{step}"
    assert answer.choices[0].token_ids == expected(step)[0]
    newer = save_next()  # the next one is served
    wait_for_step(followed, newer)
    assert metric(followed, "jaxrl_weights_failures_total") == failed + 1


def test_a_checkpoint_that_is_removed_during_the_read_is_skipped(
    followed, run_folder, weights, save_next, monkeypatch, caplog
):
    step, read_checkpoint = followed.service.engine.step, Checkpoints.read

    def read_removed(checkpoints, wanted):
        monkeypatch.undo()
        save(run_folder, step + 20, weights(step + 20), keep=1)  # retention removes the others
        return read_checkpoint(checkpoints, wanted)

    monkeypatch.setattr(Checkpoints, "read", read_removed)
    save_next()
    wait_for_step(followed, step + 20)
    assert f"step {step + 10} is not in" in caplog.text


def test_the_first_checkpoint_may_be_removed_during_the_read(
    model_folder, tmp_path, weights, monkeypatch
):
    folder, read_checkpoint = new_run(tmp_path / "run", model_folder), Checkpoints.read

    def read_removed(checkpoints, wanted):
        monkeypatch.setattr(Checkpoints, "read", read_checkpoint)
        save(folder, 6, weights(6), keep=1)
        return read_checkpoint(checkpoints, wanted)

    save(folder, 3, weights(3))
    monkeypatch.setattr("jaxrl.serve.model.PagedEngine.warmup", lambda *_: 0)
    monkeypatch.setattr(Checkpoints, "read", read_removed)
    options, run = read(arguments(folder, "--follow"))
    model = load_first_model(options, run)
    assert model.step == 6
    for made, want in zip(*map(jax.tree.leaves, (model.params, weights(6))), strict=True):
        np.testing.assert_array_equal(made, want)


def test_a_step_of_a_run_is_served_without_an_export(
    run_folder, model_folder, tmp_path, weights, model, capsys
):
    folder = new_run(tmp_path / "run", model_folder)
    assert serve(*read(arguments(folder))) == 1
    assert (
        "checkpoints has no complete checkpoint; wait for the first one" in capsys.readouterr().err
    )
    for step in (3, 6):
        save(folder, step, weights(step))
    for more, step in ([], 6), (["--step=3"], 3):
        with serving(arguments(folder, *more)) as served:
            answer = served.client.completions.create(**BODY, extra_body=IDS)
            assert served.client.models.retrieve("tiny").step == step
        assert answer.system_fingerprint == f"step-{step}"
        options = dict(max_tokens=20, sampling=GREEDY, params=weights(step))
        model.engine.release()
        assert answer.choices[0].token_ids == direct(model, [BODY["prompt"]], **options)[0][0]
    assert serve(*read(arguments(folder, "--step=4"))) == 1
    assert "set last, best or one of 3, 6" in capsys.readouterr().err
    assert first_step(folder / "checkpoints", "last", follow=False) == 6
    (folder / "hf").mkdir()
    assert read(arguments(folder))[0].checkpoints is None  # the export is served
    assert read(arguments(folder, "--follow"))[0].checkpoints == folder / "checkpoints"


def test_a_run_is_served_with_its_chat_template_and_system_prompt(tmp_path, model_folder):
    data = dataclasses.replace(RunConfig().data, chat_template="chatml", system_prompt="Count.")
    folder = new_run(tmp_path / "run", model_folder, data=data)
    _, run = read(arguments(folder))
    assert (run.data.chat_template, run.data.system_prompt) == ("chatml", "Count.")
    assert run.model.path == str(model_folder)
    _, run = read(arguments(folder, "--config.data.system_prompt=Add."))
    assert (run.data.chat_template, run.data.system_prompt) == ("chatml", "Add.")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--follow"], "need the folder of a started run"),
        (["--step=3"], "need the folder of a started run"),
        (["--follow", "--step=3"], "leave out --step"),
    ],
)
def test_invalid_follow_options_are_rejected(model_folder, more, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        read(arguments(model_folder, *more))
    assert message in f"{stopped.value} {capsys.readouterr().err}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("more", "changes"),
    [
        (["--config.mesh.tensor=2"], {}),
        (["--config.model.dtype=bfloat16"], {"stacked": True}),
        (["--config.rollout.dtype=int8", "--config.model.layers=stacked"], {}),
        (["--config.rollout.dtype=int8"], {"heads": ("vocab", "score")}),
    ],
)
def test_weights_are_placed_in_the_engines_layout_one_module_at_a_time(
    tmp_path, model_folder, more, changes, monkeypatch
):
    """The result is bitwise that of loading the same weights from a model folder."""
    critic = dataclasses.replace(RunConfig().critic, shared="heads" in changes)
    folder = new_run(tmp_path / "run", model_folder, critic=critic)
    monkeypatch.setattr("jaxrl.serve.model.PagedEngine.warmup", lambda *_: 0)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        params = load_model(model_folder, rules=TRAIN, **changes)[1]
    save(folder, 1, params)
    options, run = read(arguments(folder, *more))
    known = open_model(run, max_len=64)
    put, live = jax.device_put, []

    def recorded_put(*array_and_sharding):
        live.append(sum(array.nbytes for array in jax.live_arrays()))
        return put(*array_and_sharding)

    gc.collect()
    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_put", recorded_put)
        opened = open_model(run, max_len=64, checkpoints=options.checkpoints, step=1)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(opened.params))
    assert len(live) > 5 and max(live) - live[0] < total
    assert jax.tree.structure(opened.params) == jax.tree.structure(known.params)
    for made, want in zip(*map(jax.tree.leaves, (opened.params, known.params)), strict=True):
        assert made.dtype == want.dtype and made.sharding == want.sharding
        np.testing.assert_array_equal(made, want)


REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return -len(solution_str) / 100
"""


@pytest.mark.slow
def test_a_run_is_followed_from_start_to_end(tmp_path, model_folder):
    """A server follows a training process; its last response is that of the run's export."""
    (tmp_path / "reward.py").write_text(REWARD)
    folder, keys = (
        tmp_path / "run",
        {
            "run_dir": tmp_path / "run",
            "total_steps": 6,
            "checkpoint.every": 1,
            "checkpoint.keep": 1,
            "model.path": model_folder,
            "mesh.fsdp": 1,
            "data.train": "task:addition?digits=1&size=64&split=train",
            "data.prompts_per_step": 4,
            "data.max_prompt_len": 256,
            "data.max_response_len": 32,
            "rollout.n": 4,
            "rollout.max_num_seqs": 16,
            "learner.token_budget": 512,
            "learner.halvings": 0,
            "learner.lr": 0.01,
            "reward.functions": f"{tmp_path / 'reward.py'}:score",
            "compilation_cache": tmp_path / "xla",
        },
    )
    command = [
        sys.executable,
        "-m",
        "jaxrl.train",
        f"--config={ROOT / 'configs' / 'quickstart.py'}",
    ]
    with subprocess.Popen(
        [*command, *(f"--config.{name}={value}" for name, value in keys.items())],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
    ) as trainer:
        wait_until((folder / "checkpoints").is_dir, timeout_s=120)
        with serving(arguments(folder, "--follow")) as served:
            answers = []
            while trainer.poll() is None or served.service.engine.step != 6:
                answers.append(served.client.completions.create(**BODY, extra_body=IDS))
    assert trainer.returncode == 0
    steps = [int(answer.system_fingerprint.removeprefix("step-")) for answer in answers]
    assert steps == sorted(steps) and len(set(steps)) > 2
    by_step = {(step, answer.choices[0].text) for step, answer in zip(steps, answers, strict=True)}
    assert len(by_step) == len(set(steps))  # one response per version
    assert len({text for _, text in by_step}) > 1
    last = open_model(read(arguments(folder))[1], max_len=1024)  # of hf/
    [(tokens, _, _)] = direct(last, [BODY["prompt"]], max_tokens=20, sampling=GREEDY)
    with serving(arguments(folder, "--step=6")) as served:
        answer = served.client.completions.create(**BODY, extra_body=IDS)
    assert answer.choices[0].token_ids == tokens
