"""Tests of jaxrl/rollout/multi_turn.py and of runs in an environment: exact tokens, loss masks,
limits and failures of episodes with several turns."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import EnvConfig, RolloutConfig, SamplingConfig
from jaxrl.config.resolve import resolve
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.packing import gather, pack, pack_samples
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.engine.api import EngineStats, Generated, RequestEngine
from jaxrl.engine.engine import PagedEngine
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.evaluate import evaluate, read
from jaxrl.layout import Layout
from jaxrl.models.files.hf_load import load_model
from jaxrl.report.page import page_data
from jaxrl.report.record import read_record
from jaxrl.rollout.loop import generate
from jaxrl.rollout.multi_turn import EnvironmentRunner, EpisodeLimits
from jaxrl.train import train
from jaxrl.trainer.phases.mini_batches import make_mini_batches, to_sample
from jaxrl.trainer.setup.engines import check_independent_engines
from jaxrl.types import Prompt
from sharding.rules import DECODE, TRAIN
from tests.trainer.phases.test_mini_batches import config, constant_scores
from tests.trainer.test_train import assert_same_weights, metrics

EOS = 2


class Scripted(RequestEngine):
    """An engine that returns scripted turns per sample, two tokens per dispatch."""

    def __init__(self, script):
        self.script = {sample: list(turns) for sample, turns in enumerate(script)}
        self.requests, self.left = [], {}

    def set_version(self, version): ...

    def take_stats(self):
        return EngineStats()

    def submit(self, request):
        self.requests.append(request)
        turn = self.script[request.sample].pop(0)[: request.max_tokens]
        self.left[len(self.requests)] = list(turn)
        return len(self.requests)

    def generate(self, params):
        generated = []
        for slot, left in list(self.left.items()):
            tokens, rest = left[:2], left[2:]
            self.left[slot] = rest
            finish = "" if rest else "stop" if tokens[-1] == EOS else "length"
            if finish:
                del self.left[slot]
            logp = -np.array(tokens, np.float32) / 100
            generated.append(Generated(slot, np.array(tokens, np.int32), logp, logp - 1, finish))
        return generated

    def free(self, slot):
        del self.left[slot]


def run_script(script, pool, renderer, *, answer="", stop=(), **limits):
    """(rollouts, requests) of one prompt; `script` holds the turns of each sample."""
    message = {"role": "user", "content": "hi"}
    prompt = Prompt(5, (message,), renderer.render([message]), answer)
    engine = Scripted([[ids(renderer, turn) for turn in turns] for turns in script])
    limits = {"prompt_len": 99, "max_tokens": 200, "max_turns": 4} | limits
    runner = EnvironmentRunner(
        engine,
        pool,
        renderer,
        (EOS,),
        sampling=SamplingConfig(stop=stop),
        limits=EpisodeLimits(**limits),
    )
    rollouts, found = generate(runner, None, [prompt], n=len(script), seed=3, version=1)
    assert not engine.left and pool.n_free == 3 and found["time/env_s"] >= 0
    return rollouts, engine.requests


def ids(renderer, text):
    """Token ids of a text; a list of ids is returned as it is."""
    return text if isinstance(text, list) else renderer.tokenizer(text)["input_ids"]


REPLY = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"  # of the environment, in chatml


def test_an_episode_has_the_hand_written_tokens_and_masks(echo, renderer):
    ((rollout,), requests) = run_script([["ab<|im_end|>", "d<|im_end|>"]], echo, renderer)
    prompt = renderer.render([{"role": "user", "content": "hi"}])
    between = ids(renderer, REPLY)
    n = len(between)
    assert [len(ids(renderer, text)) for text in ("ab<|im_end|>", "d<|im_end|>")] == [3, 2]
    np.testing.assert_array_equal(requests[0].tokens, prompt)
    np.testing.assert_array_equal(requests[1].tokens, [*prompt, *rollout.tokens[: 3 + n]])
    assert [r.max_tokens for r in requests] == [200, 200 - 3 - n]
    assert rollout.tokens.tolist() == [
        *ids(renderer, "ab"),
        EOS,
        *between,
        *ids(renderer, "d"),
        EOS,
    ]
    assert rollout.loss_mask.tolist() == [True] * 3 + [False] * n + [True] * 2
    np.testing.assert_allclose(
        rollout.logp, np.where(rollout.loss_mask, -rollout.tokens / 100, 0), rtol=1e-6
    )
    np.testing.assert_allclose(
        rollout.behavior_logp, np.where(rollout.loss_mask, rollout.logp - 1, 0), rtol=1e-6
    )
    assert rollout.finish == "stop" and rollout.n_loss_tokens == 5
    assert dataclasses.asdict(dataclasses.replace(rollout.episode, spans=())) == {
        "prompt_messages": ({"role": "user", "content": "hi"},),
        "completion_messages": (
            {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
        ),
        "n_turns": 2, "step_rewards": ((3, 0.5), (3 + n + 2, 1.0)),
        "counts": {"calls": 2.0}, "error": "", "spans": (),
    }  # fmt: skip
    assert rollout.episode.reward == 1.5
    # the packed batch: the mask is 1 exactly if the target is a token of the model
    (micro,) = pack([to_sample(rollout)], shapes=[(1, 128)], align=64, n_ranks=1)
    start = len(prompt) - 1
    want = np.zeros(128)
    want[[start, start + 1, start + 2, start + 3 + n, start + 4 + n]] = 1
    np.testing.assert_array_equal(micro.batch.mask[0], want)
    np.testing.assert_array_equal(
        micro.batch.targets[0][want > 0], [*ids(renderer, "ab"), EOS, *ids(renderer, "d"), EOS]
    )
    np.testing.assert_allclose(
        micro.batch.behavior_logp, micro.batch.rollout_logp - micro.batch.mask, rtol=1e-6
    )
    assert micro.batch.response_len[0, 0] == 5


def test_an_episode_records_its_phases_without_gaps(echo, renderer):
    ((rollout,), _) = run_script([["late<|im_end|>", "d<|im_end|>"]], echo, renderer)
    spans = rollout.episode.spans
    phases = ["queue", "environment", "engine", "environment", "engine", "environment"]
    assert [phase for phase, _, _ in spans] == phases
    assert [start for _, start, _ in spans] == [0.0, *(end for _, _, end in spans[:-1])]
    assert spans[3][2] - spans[3][1] > 0.25  # the environment sleeps 0.3 s
    assert all(start <= end for _, start, end in spans)


def test_completions_are_never_tokenized_again(echo, renderer):
    half = ids(renderer, "\u00e9")[:1]  # the first of two bytes: no text has this token alone
    assert ids(renderer, renderer.decode(half)) != half
    ((rollout,), requests) = run_script([[[*half, EOS], "d<|im_end|>"]], echo, renderer)
    assert rollout.tokens[:2].tolist() == [*half, EOS]
    assert half[0] in requests[1].tokens


def test_a_turn_ended_by_a_stop_string_gets_an_end_of_turn_outside_the_loss(echo, renderer):
    ((rollout,), _) = run_script([["a!b", "d<|im_end|>"]], echo, renderer, stop=("!",))
    n = len(ids(renderer, "<|im_end|>" + REPLY))
    assert rollout.tokens[: 2 + n].tolist() == ids(renderer, "a!<|im_end|>" + REPLY)
    assert rollout.loss_mask.tolist() == [True] * 2 + [False] * n + [True] * 2


def test_an_episode_that_reaches_a_limit_ends_without_a_reply(echo, renderer):
    n = len(ids(renderer, REPLY))
    turns = ["ab<|im_end|>"] * 4
    ((rollout,), requests) = run_script([turns], echo, renderer, max_turns=2)
    assert (rollout.finish, len(requests), len(rollout.tokens)) == ("turns", 2, 6 + n)
    assert rollout.episode.reward == 1.0
    assert [m["role"] for m in rollout.completion_messages] == ["assistant", "user", "assistant"]
    for room, finish, length in ((3 + n, "length", 3), (3 + n + 1, "length", 3 + n + 1)):
        ((rollout,), _) = run_script([turns], echo, renderer, max_tokens=room)
        assert (rollout.finish, len(rollout.tokens)) == (finish, length)
        assert rollout.episode.reward == 0.5  # the environment does not see the truncated turn
    ((rollout,), requests) = run_script([turns], echo, renderer, answer="long")
    assert rollout.finish == "error" and not requests and len(rollout.tokens) == 0
    assert (
        rollout.prompt.tokens.tolist()
        == renderer.render([{"role": "user", "content": "hi"}]).tolist()
    )
    assert rollout.prompt.messages[0]["content"] == "hi"
    assert rollout.prompt_messages[0]["content"] == "x" * 99 and rollout.completion_messages == ()
    assert "data.max_prompt_len is 99" in rollout.episode.error


def test_a_failing_environment_ends_only_its_episode(echo, renderer):
    script = [
        ["a<|im_end|>", text, "d<|im_end|>"]
        for text in ("raise<|im_end|>", "b<|im_end|>", "late<|im_end|>")
    ]
    rollouts, _ = run_script([*script, *script], echo, renderer)  # twice as many as fit in the pool
    assert [r.finish for r in rollouts] == ["error", "stop", "stop"] * 2
    assert (
        rollouts[0].episode.error.startswith("RuntimeError: out of cheese\n  File ")
        and rollouts[0].episode.n_turns == 2
    )
    assert [r.episode.reward for r in rollouts] == [0.5, 2.0, 2.0] * 2


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "gae", "lam": 0.9},
        {"advantage": "gae", "kl_coef": 0.1, "kl_in": "reward"},
        {"advantage": "reinforce_plus_plus", "kl_coef": 0.1, "kl_in": "reward"},
        {"advantage": "grpo", "kl_coef": 0.1},
    ],
    ids=["critic", "critic and KL in the reward", "KL in the reward", "GRPO"],
)
def test_an_overlong_reset_does_not_stop_the_step(echo, renderer, algorithm):
    """Two episodes whose prompt is too long, two that end; the failed ones have no tokens."""
    cfg = resolve(config(**algorithm))
    ended, _ = run_script([["d<|im_end|>"]] * 2, echo, renderer)
    failed, _ = run_script([["d<|im_end|>"]] * 2, echo, renderer, answer="long", prompt_len=64)
    assert [r.finish for r in (*ended, *failed)] == ["stop"] * 2 + ["error"] * 2
    samples = [to_sample(r) for r in (*ended, *failed)]
    samples = [dataclasses.replace(s, values=np.zeros(len(s.tokens), np.float32)) for s in samples]
    packed = pack_samples(samples, cfg, 1)  # as for the values of a critic
    assert [len(v) for v in gather([p.batch.mask for p in packed], packed)] == [2, 2, 0, 0]
    minis, found = make_mini_batches(
        samples,
        np.array([1.0, 0.0, 0.0, 0.0]),
        cfg,
        n_ranks=1,
        kl_reference=constant_scores(-0.5) if cfg.algorithm.kl_coef else None,
    )
    assert sum(p.batch.mask.sum() for mini in minis for p in mini.packed) == 4
    assert all(np.isfinite(value) for value in found.values())


def test_a_step_of_failed_resets_has_nothing_to_train(echo, renderer):
    cfg = resolve(config(advantage="gae", kl_coef=0.1, kl_in="reward"))
    failed, _ = run_script([["d<|im_end|>"]] * 2, echo, renderer, answer="long")
    samples = [dataclasses.replace(to_sample(r), values=np.zeros(0, np.float32)) for r in failed]
    [mini], found = make_mini_batches(
        samples, np.zeros(2), cfg, n_ranks=1, kl_reference=constant_scores(-0.5)
    )
    assert not mini.packed and all(np.isfinite(value) for value in found.values())


def test_a_template_without_an_end_of_turn_is_rejected(tiny_model, tmp_path, echo):
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}|{% endfor %}")
    plain = ChatRenderer(load_tokenizer(tiny_model), template=str(template))
    with pytest.raises(ValueError, match=r"'\|c\|'.*set data\.chat_template"):
        run_script([["ab<|im_end|>"]], echo, plain)
    assert echo.n_free == 3


@pytest.mark.thorough
def test_turns_reuse_kv_pages_without_changing_results(
    tiny_model, renderer, environments, one_device
):
    cfg, params = load_model(tiny_model, rules=DECODE, dtype=jnp.float32)
    messages = ({"role": "user", "content": "What is 1 + 1? " * 5},)
    prompts = [Prompt(i, messages, renderer.render(messages), "") for i in (3, 4)]

    def run(**rollout):
        sizes = RolloutConfig(max_num_seqs=4, max_num_batched_tokens=256, **rollout)
        engine = PagedEngine(
            cfg, sizes, rules=DECODE, dtype=jnp.float32, max_len=256, eos_ids=(EOS,)
        )
        with EnvironmentPool(EnvConfig(name=f"{environments}:Echo")) as pool:
            stop = ("a", "e", "i", "o", "u", "0", "1", "2", "3", "4")
            runner = EnvironmentRunner(
                engine,
                pool,
                renderer,
                (EOS,),
                sampling=SamplingConfig(stop=stop),
                limits=EpisodeLimits(120, 130, 3),
            )
            return generate(runner, params, prompts, n=2, seed=11, version=0)

    rollouts, cached = run()
    plain, uncached = run(prefix_cache=False)
    for a, b in zip(rollouts, plain, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logp, b.logp)
    n_turns = sum(r.episode.n_turns for r in rollouts)
    assert n_turns > len(rollouts)
    # A later turn prefills the reply of the environment, the token before it, and up to 16 tokens
    # of a partly filled page that is too short to copy.
    n_between = sum(int((~r.loss_mask).sum()) for r in rollouts)
    n_later = n_turns - len(rollouts)
    longest = sum(len(p.tokens) for p in prompts) + n_between + n_later * (1 + 16)
    assert cached["rollout/prefill_tokens"] <= longest < uncached["rollout/prefill_tokens"]
    assert cached["rollout/prefix_hit_rate"] > uncached["rollout/prefix_hit_rate"]


@pytest.mark.thorough
def test_a_run_in_an_environment_resumes_bitwise_and_evaluates_as_validated(env_config, tmp_path):
    env_config.log.trajectories, env_config.algorithm.old_logp = 3, "recompute"
    assert train(resolve(env_config))
    uninterrupted = env_config.run_dir
    lines = [line for line in metrics(uninterrupted) if "optim/grad_norm" in line]
    assert len(lines) == 2
    for line in lines:
        # engine and trainer see the same tokens at the same positions in all turns
        assert line["mismatch/logp_diff_max"] < 1e-4
        assert 1 < line["env/turns"] <= 3 and 0 < line["env/own_fraction"] < 1
        assert line["env/failures"] == 0 and line["reward/mean"] > 0
        assert line["reward/environment"] == pytest.approx(line["reward/mean"])
    timed = [json.loads(s) for s in Path(uninterrupted, "metrics.jsonl").read_text().splitlines()]
    assert any("time/env_s" in line for line in timed)
    validated = [line for line in metrics(uninterrupted) if "val/reward" in line][-1]
    assert validated["val/env/turns"] >= 1

    rows = page_data(read_record(Path(uninterrupted)), "")["trajectories"]
    # 3 of each step and of the validations before and after
    assert [(r["step"], r["kind"]) for r in rows] == [
        (step, kind)
        for step, kind in ((0, "val"), (1, "train"), (2, "train"), (2, "val"))
        for _ in "123"
    ]
    for row in rows:
        ((sequence,), trains) = row["sequences"], row["kind"] == "train"
        roles = [turn["role"] for turn in sequence["turns"]]
        assert set(roles[::2]) == {"assistant"} and {*roles[1::2]} <= {"user"}
        assert row["n_turns"] == 3 or row["finish"] == "length"
        assert trains == (row["difference"] is not None) == (sequence["advantage"] is not None)
        assert not trains or row["difference"] < 1e-4
        assert {"queue", "engine", "environment"} == {phase for phase, _, _ in row["spans"]}

    assert evaluate(read([f"--model={uninterrupted}"]))
    summary = json.loads(Path(uninterrupted, "evaluation", "summary.json").read_text())
    assert summary["results"]["all"]["reward"] == pytest.approx(validated["val/reward"], abs=1e-7)

    env_config.run_dir = str(tmp_path / "resumed")
    env_config.total_steps = 1
    assert train(resolve(env_config))
    env_config.total_steps = 2
    assert train(resolve(env_config))
    assert_same_weights(uninterrupted, env_config.run_dir)


@pytest.mark.thorough
def test_turns_of_an_episode_are_trained_with_separate_advantages(env_config):
    """Letters replies "More." to each turn: the later turns of a group answered one state."""
    env_config.algorithm.advantage, env_config.algorithm.gamma = "gigpo", 0.5
    env_config.log.trajectories, env_config.total_steps = 16, 1
    assert train(resolve(env_config))
    rows = page_data(read_record(Path(env_config.run_dir)), "")["trajectories"]
    rows = [row for row in rows if row["kind"] == "train"]
    by_turn = [
        [row["sequences"][0]["advantage"][turn["start"] : turn["end"]] for turn in own]
        for row in rows
        if (own := [t for t in row["sequences"][0]["turns"] if t["role"] == "assistant"])
    ]
    assert len(by_turn) == 16
    assert all(len(set(turn)) == 1 for turns in by_turn for turn in turns)
    assert any(len({turn[0] for turn in turns}) > 1 for turns in by_turn)


@pytest.mark.thorough
def test_environments_that_fail_are_counted_and_rewarded_as_configured(env_config, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "class Bad:\n    def reset(self, prompt):\n        return None\n"
        "    def step(self, completion):\n        raise KeyError('x')\n"
    )
    env_config.total_steps = 1
    env_config.env.name = f"{path}:Bad"
    env_config.data.val = ()
    env_config.reward.error_value, env_config.reward.max_error_fraction = -1.0, 1.0
    env_config.reward.on_error = "value"
    assert train(resolve(env_config))
    (line,) = [line for line in metrics(env_config.run_dir) if "env/failures" in line]
    # truncated episodes never reach the environment
    assert 0 < line["env/failures"] == line["reward/errors"] <= 16
    assert line["reward/mean"] == pytest.approx(-line["env/failures"] / 16)


@pytest.mark.thorough
@pytest.mark.parametrize("on_error", ["exclude", "value"])
@pytest.mark.parametrize("name", ["Flaky", "Missing"])
def test_a_run_with_failed_episodes_trains_on_the_others(env_config, name, on_error):
    """With a critic, a KL in the reward and two updates per step."""
    env_config.env.name = env_config.env.name.replace("Letters", name)
    env_config.reward.on_error = on_error
    env_config.data.val, env_config.reward.max_error_fraction = (), 1.0
    env_config.algorithm.advantage, env_config.algorithm.lam = "gae", 0.9
    env_config.algorithm.kl_in, env_config.algorithm.kl_coef = "reward", 0.1
    env_config.learner.mini_batch_prompts = 2
    assert train(resolve(env_config))
    lines = [line for line in metrics(env_config.run_dir) if "reward/errors" in line]
    text = Path(env_config.run_dir, "samples.jsonl").read_text()
    samples = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 2
    for line in lines:
        step = [s for s in samples if s["step"] == line["step"]]
        n_failed = sum(bool(s["error"]) for s in step)
        assert line["reward/errors"] == n_failed > 0
        valid = [s["reward"] for s in step if on_error == "value" or not s["error"]]
        assert np.isfinite([v for v in line.values() if isinstance(v, float)]).all()
        if name == "Missing":  # no response has tokens
            assert line["perf/n_updates"] == 0 and n_failed == len(step)
        else:
            assert line["perf/n_updates"] > 0 and line["critic/grad_norm"] > 0
        assert ("reward/mean" in line) == bool(valid)
        assert line.get("reward/mean", 0.0) == pytest.approx(np.mean(valid or [0.0]), abs=1e-6)


@pytest.mark.parametrize("partial", [False, True])
def test_an_engine_spanning_processes_rejects_environments_and_partial(
    env_config, monkeypatch, partial
):
    if partial:
        env_config.env.name, env_config.schedule.mode = "", "partial"
        env_config.reward.functions = ("math",)
    cfg = resolve(env_config)
    check_independent_engines(cfg, Layout(TRAIN, None, {}, jnp.dtype("float32")))
    monkeypatch.setattr("sharding.hosts.n_processes", lambda: 2)
    check_independent_engines(cfg, Layout(TRAIN, None, {}, jnp.dtype("float32"), per_process=True))
    with pytest.raises(ValueError, match=r"lock-step; set config\.rollout\.engines='process'"):
        check_independent_engines(cfg, Layout(TRAIN, None, {}, jnp.dtype("float32")))


@pytest.mark.slow
def test_the_reward_of_an_environment_rises(env_config):
    env_config.total_steps = 40
    env_config.learner.lr = 3e-3
    env_config.rollout.n = 8
    env_config.rollout.max_num_seqs = 32
    env_config.data.val = ()
    assert train(resolve(env_config))
    rewards = [line["reward/mean"] for line in metrics(env_config.run_dir) if "reward/mean" in line]
    assert np.mean(rewards[-5:]) > 1.3 * np.mean(rewards[:5])
