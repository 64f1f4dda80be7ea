"""A server of a run's checkpoints, while the run trains and after: an answer is of one version, which is told."""

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

from jaxrl.config.keys import CheckpointConfig, RunConfig, SamplingConfig
from jaxrl.config.saved import to_json
from jaxrl.io.checkpoint.checkpointer import Checkpointer
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_load import load_model, model_config
from jaxrl.models.spec import init_params
from jaxrl.runtime.compile_watch import CompileWatch
from jaxrl.serve.__main__ import first_model, main, read
from jaxrl.serve.checkpoints import Checkpoints
from jaxrl.serve.model import open_model
from jaxrl.serve.response import Answer
from jaxrl.serve.score import score
from jaxrl.types import TrainState
from sharding import make_mesh
from sharding.rules import DECODE, TRAIN
from tests.serve.serve_cases import arguments, direct, meter, serving, wait_until

ROOT = pathlib.Path(__file__).parents[2]
GREEDY = SamplingConfig(temperature=0.0)
ASKED = dict(model="tiny", prompt="What is the sum?", max_tokens=20, temperature=0)
IDS = {"return_token_ids": True}
LONG = {"max_tokens": 900, "extra_body": {"ignore_eos": True} | IDS}


def policy(folder, step, **changes):
    """The weights of a step: those of the model at first, then any numbers, of distributions far from uniform."""
    if step == 0:
        with jax.set_mesh(make_mesh()):
            return load_model(folder, rules=TRAIN)[1]
    cfg = dataclasses.replace(model_config(folder), **changes)
    with jax.set_mesh(make_mesh()):
        params = init_params(jax.random.key(step), decoder_specs(cfg), TRAIN, jnp.float32)
        return jax.tree.map(lambda w: w * 4.0 if w.ndim > 1 else w, params)


def save(run_folder, step, params, **options):
    """As the trainer does, moments beside the weights."""
    with contextlib.closing(
        Checkpointer(run_folder / "checkpoints", CheckpointConfig(**options))
    ) as checkpoints:
        moments = jax.tree.map(jnp.zeros_like, params)
        checkpoints.save(step, TrainState(params, moments, jnp.int32(step)), {"step": step})


def new_run(run_folder, model_folder, **changes):
    """The folder of a run that has begun."""
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
    """Of any step."""
    return functools.cache(functools.partial(policy, model_folder))


@pytest.fixture(scope="module")
def run_folder(model_folder, tmp_path_factory):
    return new_run(tmp_path_factory.mktemp("followed") / "run", model_folder)


@pytest.fixture(scope="module")
def followed(run_folder):
    """A server that was started before the first checkpoint."""
    with serving(arguments(run_folder, "--follow")) as served:
        yield served


@pytest.fixture(scope="module")
def model(model_folder):
    """An engine that is run directly."""
    return open_model(read(arguments(model_folder))[1], max_len=1024)


@pytest.fixture
def alone(model, weights):
    """Tokens and logprobs of an engine that never had other weights than those of a step."""

    def answer(step, prompt=ASKED["prompt"], max_tokens=20, **wanted):
        model.engine.release()
        asked = dict(max_tokens=max_tokens, sampling=GREEDY, **wanted)
        [(tokens, logps, _)] = direct(model, [prompt], params=weights(step), **asked)
        return tokens, logps

    return answer


@pytest.fixture
def latest(followed, run_folder, weights):
    """Saves the next checkpoint; `latest()` is the step that is served then."""

    def save_next():
        step = int(followed.client.models.retrieve("tiny").step) + 10
        save(run_folder, step, weights(step))
        return step

    return save_next


def serves(followed, step):
    wait_until(lambda: meter(followed, "jaxrl_weights_step") == step)


def test_a_followed_run_answers_with_its_newest_weights(followed, alone, latest):
    first = step = followed.service.engine.step  # 0 as long as the run has saved nothing
    said = [followed.client.completions.create(**ASKED, logprobs=0, extra_body=IDS)]
    programs = []
    watch = CompileWatch(lambda name, _: programs.append(name))
    for _ in range(2):
        step = latest()
        serves(followed, step)
        # the same prompt, whose pages were kept
        said.append(followed.client.completions.create(**ASKED, logprobs=0, extra_body=IDS))
    watch.detach()
    ours = ("prefill", "mixed", "decode", "copy_pages")
    assert not [name for name in programs if any(part in name for part in ours)]
    assert followed.client.models.retrieve("tiny").step == step == first + 20
    for i, answer in enumerate(said):
        tokens, logps = alone(first + 10 * i)
        assert answer.choices[0].token_ids == tokens
        assert answer.choices[0].logprobs.token_logprobs == logps
        assert answer.system_fingerprint == f"step-{first + 10 * i}"
    assert len({answer.choices[0].text for answer in said}) == 3


def test_old_weights_are_freed_before_new_ones_come(followed, latest, monkeypatch):
    engine, place, freed, read = followed.service.engine, Checkpoints.place, [], []

    def looked(checkpoints, weights):
        read.append(weakref.ref(weights))
        freed.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(engine._params)))
        return place(checkpoints, weights)

    monkeypatch.setattr(Checkpoints, "place", looked)
    serves(followed, latest())
    assert freed == [True]
    assert [copy() for copy in read] == [None]  # in host memory


def test_what_is_under_way_ends_with_the_weights_it_began_with(followed, alone, latest):
    step = int(meter(followed, "jaxrl_weights_step"))
    stream = followed.client.completions.create(**ASKED | LONG, stream=True)
    chunks = [next(stream)]
    newer = latest()
    wait_until(lambda: followed.service.engine.updating)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(followed.client.completions.create, **ASKED, extra_body=IDS)
        chunks += stream
        later = waiting.result()
    tokens = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    assert tokens == alone(step, max_tokens=900, ignore_stop=True)[0]
    assert {chunk.system_fingerprint for chunk in chunks} == {f"step-{step}"}
    assert later.choices[0].token_ids == alone(newer)[0]
    assert later.system_fingerprint == f"step-{newer}"


def test_those_that_wait_for_new_weights_can_be_cancelled_and_are_counted(followed, alone, latest):
    stream = followed.client.completions.create(**ASKED | LONG, stream=True)
    next(stream)
    step = latest()
    wait_until(lambda: followed.service.engine.updating)
    with pytest.raises(openai.APITimeoutError):
        followed.client.completions.create(**ASKED, timeout=0.1)
    wait_until(lambda: followed.service.engine._n_jobs == 1)
    with pytest.raises(openai.RateLimitError), concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: followed.client.completions.create(**ASKED), range(6)))
    stream.close()
    serves(followed, step)
    answer = followed.client.completions.create(**ASKED, extra_body=IDS)
    assert answer.choices[0].token_ids == alone(step)[0]
    wait_until(lambda: followed.service.engine._n_jobs == 0)


def test_scores_are_of_the_weights_that_answered(followed, run_folder, weights, monkeypatch):
    engine, ask_to_score = followed.service.engine, Answer._score
    step = engine.step

    def late(answer, choice):
        """There are newer weights before the first response is scored."""
        if choice.index == 0:
            save(run_folder, step + 10, weights(step + 10))
            wait_until(lambda: engine.updating)
        return ask_to_score(answer, choice)

    weights(step + 10)
    monkeypatch.setattr(Answer, "_score", late)
    answer = followed.client.completions.create(
        **ASKED | {"max_tokens": 5}, n=2, logprobs=2, echo=True, extra_body=IDS
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
    serves(followed, step + 10)


def broken(folder, step):
    """As a copy that was cut short leaves it."""
    data = max((folder / str(step) / "state").rglob("*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def without_a_part(folder, step):
    shutil.rmtree(folder / str(step) / "state" / "d")


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        (broken, {}, "cannot be read"),
        (without_a_part, {}, "cannot be read"),
        (None, {"L": 3}, "of another model: params/layers/2/"),
        (None, {"heads": ("vocab", "score")}, "of another model: params/score is in it but not in"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_left_out(
    followed, run_folder, model_folder, latest, alone, tmp_path, caplog, spoil, changes, said
):
    step, failed = followed.service.engine.step, meter(followed, "jaxrl_weights_failures_total")
    save(tmp_path, step + 5, policy(model_folder, 1, **changes))
    if spoil:
        spoil(tmp_path / "checkpoints", step + 5)
    (tmp_path / "checkpoints" / str(step + 5)).rename(run_folder / f"checkpoints/{step + 5}")
    wait_until(lambda: meter(followed, "jaxrl_weights_failures_total") == failed + 1)
    assert said in caplog.text and f"step {step} is served on" in caplog.text
    answer = followed.client.completions.create(**ASKED, extra_body=IDS)
    assert answer.system_fingerprint == f"step-{step}"
    assert answer.choices[0].token_ids == alone(step)[0]
    newer = latest()  # the next one is served
    serves(followed, newer)
    assert meter(followed, "jaxrl_weights_failures_total") == failed + 1


def test_a_checkpoint_that_is_removed_while_it_is_read_is_left_out(
    followed, run_folder, weights, latest, monkeypatch, caplog
):
    step, read_checkpoint = followed.service.engine.step, Checkpoints.read

    def read_removed(checkpoints, wanted):
        monkeypatch.undo()
        save(run_folder, step + 20, weights(step + 20), keep=1)  # retention removes the others
        return read_checkpoint(checkpoints, wanted)

    monkeypatch.setattr(Checkpoints, "read", read_removed)
    latest()
    serves(followed, step + 20)
    assert f"step {step + 10} is not in" in caplog.text


def test_a_run_may_remove_the_checkpoint_that_is_read_first(
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
    model = first_model(options, run)
    assert model.step == 6
    for made, want in zip(*map(jax.tree.leaves, (model.params, weights(6))), strict=True):
        np.testing.assert_array_equal(made, want)


def test_a_step_of_a_run_is_served_without_its_export(
    run_folder, model_folder, tmp_path, weights, model, capsys
):
    folder = new_run(tmp_path / "run", model_folder)
    assert main(arguments(folder)) == 1
    assert (
        "checkpoints has no complete checkpoint; wait for the first one" in capsys.readouterr().err
    )
    for step in (3, 6):
        save(folder, step, weights(step))
    for more, step in ([], 6), (["--step=3"], 3):
        with serving(arguments(folder, *more)) as served:
            answer = served.client.completions.create(**ASKED, extra_body=IDS)
            assert served.client.models.retrieve("tiny").step == step
        assert answer.system_fingerprint == f"step-{step}"
        asked = dict(max_tokens=20, sampling=GREEDY, params=weights(step))
        model.engine.release()
        assert answer.choices[0].token_ids == direct(model, [ASKED["prompt"]], **asked)[0][0]
    assert main(arguments(folder, "--step=4")) == 1
    assert "step 4 is not in" in capsys.readouterr().err
    (folder / "hf").mkdir()
    assert read(arguments(folder))[0].checkpoints is None  # the export is served
    assert read(arguments(folder, "--follow"))[0].checkpoints == folder / "checkpoints"


def test_a_run_is_served_with_its_own_prompts(tmp_path, model_folder):
    data = dataclasses.replace(RunConfig().data, chat_template="chatml", system_prompt="Count.")
    folder = new_run(tmp_path / "run", model_folder, data=data)
    _, run = read(arguments(folder))
    assert (run.data.chat_template, run.data.system_prompt) == ("chatml", "Count.")
    assert run.model.path == str(model_folder)
    _, run = read(arguments(folder, "--config.data.system_prompt=Add."))
    assert (run.data.chat_template, run.data.system_prompt) == ("chatml", "Add.")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--follow"], "are for the folder of a run that has begun"),
        (["--step=3"], "are for the folder of a run that has begun"),
        (["--follow", "--step=3"], "leave out --step"),
    ],
)
def test_what_cannot_be_followed_is_said(model_folder, more, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        read(arguments(model_folder, *more))
    assert said in f"{stopped.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("more", "changes"),
    [
        (["--config.mesh.tensor=2"], {}),
        (["--config.model.dtype=bfloat16"], {"stacked": True}),
        (["--config.rollout.dtype=int8", "--config.model.layers=stacked"], {}),
        (["--config.rollout.dtype=int8"], {"heads": ("vocab", "score")}),
    ],
)
def test_weights_are_placed_as_the_engine_reads_them_one_after_the_other(
    tmp_path, model_folder, more, changes, monkeypatch
):
    """Bitwise those of a model of the same numbers, loaded from its folder."""
    critic = dataclasses.replace(RunConfig().critic, shared="heads" in changes)
    folder = new_run(tmp_path / "run", model_folder, critic=critic)
    monkeypatch.setattr("jaxrl.serve.model.PagedEngine.warmup", lambda *_: 0)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        params = load_model(model_folder, rules=TRAIN, **changes)[1]
    save(folder, 1, params)
    options, run = read(arguments(folder, *more))
    known = open_model(run, max_len=64)
    put, live = jax.device_put, []

    def put_beside(*array_and_sharding):
        live.append(sum(array.nbytes for array in jax.live_arrays()))
        return put(*array_and_sharding)

    gc.collect()
    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_put", put_beside)
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
def test_a_run_is_followed_from_its_beginning_to_its_end(tmp_path, model_folder):
    """A process trains, a server beside it answers; the last answer is that of the run's export."""
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
                answers.append(served.client.completions.create(**ASKED, extra_body=IDS))
    assert trainer.returncode == 0
    steps = [int(answer.system_fingerprint.removeprefix("step-")) for answer in answers]
    assert steps == sorted(steps) and len(set(steps)) > 2
    by_step = {(step, answer.choices[0].text) for step, answer in zip(steps, answers, strict=True)}
    assert len(by_step) == len(set(steps))  # a version has one answer
    assert len({text for _, text in by_step}) > 1
    last = open_model(read(arguments(folder))[1], max_len=1024)  # of hf/
    [(tokens, _, _)] = direct(last, [ASKED["prompt"]], max_tokens=20, sampling=GREEDY)
    with serving(arguments(folder, "--step=6")) as served:
        answer = served.client.completions.create(**ASKED, extra_body=IDS)
    assert answer.choices[0].token_ids == tokens
