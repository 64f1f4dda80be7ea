"""Tests of jaxrl/migrate/openrlhf.py."""

import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.config.other_frameworks import table
from jaxrl.config.schema import keys
from jaxrl.migrate import openrlhf
from jaxrl.migrate.config_file import check
from jaxrl.migrate.migration import REFUSED, Migration

PPO = "--actor.model_name_or_path m --data.prompt_dataset org/prompts"


def migrate(program: str, arguments: str) -> Migration:
    words = ["python3", "-m", f"openrlhf.cli.{program}", *arguments.split()]
    assert openrlhf.is_command(words)
    return openrlhf.translate(*openrlhf.command(words), {})


def refused(found: Migration) -> list[str]:
    return [note.setting for note in found.notes if note.kind == REFUSED]


def test_earlier_and_present_names_give_the_same_config():
    present = (
        f"{PPO} --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8"
        " --rollout.batch_size 128 --train.batch_size 256 --actor.eps_clip_low_high 0.2 0.28"
        " --actor.adam.lr 5e-7 --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3"
        " --reward.remote_url http://localhost:5000 --actor.lr_warmup_ratio 0"
    )
    earlier = (
        "--pretrain m --prompt_data org/prompts --advantage_estimator group_norm"
        " --n_samples_per_prompt 8 --rollout_batch_size 128 --train_batch_size 256"
        " --eps_clip_low_high 0.2 0.28 --actor_learning_rate 5e-7 --init_kl_coef 1e-3 --use_kl_loss"
        " --kl_estimator k3 --remote_rm_url http://localhost:5000 --lr_warmup_ratio 0"
    )
    found = migrate("train_ppo_ray", present)
    config = found.config
    assert config == migrate("train_ppo_ray", earlier).config and not refused(found)
    assert config["algorithm.advantage"] == "grpo" and config["rollout.n"] == 8
    assert config["learner.mini_batch_prompts"] == 32  # 256 samples in groups of 8
    assert (config["algorithm.clip_low"], config["algorithm.clip_high"]) == (0.2, 0.28)
    assert (config["algorithm.kl_in"], config["algorithm.kl"]) == ("loss", "k3")
    assert config["data.train"] == ("hf:org/prompts",)
    assert config["reward.functions"] == ("remote?url=http://localhost:5000",)
    assert check(config, None, 1)[0] == []


def test_a_critic_and_a_reward_model_are_carried_over():
    found = migrate("train_ppo_ray", f"{PPO} --reward.model_name_or_path r --critic.adam.lr 9e-6")
    assert found.config["algorithm.advantage"] == "gae" and found.config["critic.lr"] == 9e-6
    assert found.config["reward_model.path"] == "r" and found.config["reward.functions"] == ()
    assert check(found.config, None, 1)[0] == []


@pytest.mark.parametrize(
    ("program", "module", "arguments", "key", "value"),
    [
        ("train_sft", "jaxrl.sft", "--data.max_len 4096", "data.max_prompt_len", 2048),
        ("train_dpo", "jaxrl.dpo", "--model.beta 0.2", "preference.beta", 0.2),
        ("train_dpo", "jaxrl.dpo", "--model.ipo_enable", "preference.loss", "ipo"),
        ("train_rm", "jaxrl.reward_model", "--adam.lr 1e-5", "learner.lr", 1e-5),
        ("train_sft", "jaxrl.sft", "--ds.lora.rank 8", "lora.rank", 8),
    ],
)
def test_offline_programs_are_known(program, module, arguments, key, value):
    given = f"--model.model_name_or_path m --data.dataset d.jsonl {arguments}"
    found = migrate(program, given)
    assert found.program == module and found.config[key] == value and not refused(found)
    assert check(found.config, None, 1)[0] == []


@pytest.mark.parametrize(
    "arguments",
    ["--train.agent_func_path a.py", "--train.async_enable"],
)
def test_what_needs_other_work_is_refused(arguments):
    name = arguments.split()[0].lstrip("-")
    assert any(
        setting.startswith(name)
        for setting in refused(migrate("train_ppo_ray", f"{PPO} {arguments}"))
    )


def test_images_are_read_if_prompts_may_have_any():
    images = "--data.image_key pictures --data.max_images_per_prompt"
    found = migrate("train_ppo_ray", f"{PPO} {images} 2")
    assert found.config["data.images"] is True and not refused(found)
    assert "images:pictures" in found.config["data.columns"]
    config = migrate("train_ppo_ray", f"{PPO} {images} 0").config
    assert "data.images" not in config and "images:pictures" not in config["data.columns"]


def test_a_run_without_data_is_refused():
    assert "data.prompt_dataset" in refused(
        migrate("train_ppo_ray", "--actor.model_name_or_path m --reward.remote_url http://x")
    )


def test_the_translation_and_the_table_agree():
    rows = [row for row in table() if row.framework == "OpenRLHF"]
    answers = {name.lstrip("-"): row.ours for row in rows for name in row.names}
    renamed = openrlhf.TRAINING | openrlhf.REINFORCEMENT | openrlhf.CRITIC
    known = keys(RunConfig)
    for theirs, ours in renamed.items():
        assert theirs not in answers or ours in answers[theirs], theirs
        assert ours in known


CORRECTION = "--algo.advantage.is_correction_"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"correction": None}),
        (
            f"{CORRECTION}level token {CORRECTION}mode clip {CORRECTION}threshold 0.5 2",
            {"correction": "token_tis", "correction_floor": 0.5, "correction_high": 2.0},
        ),
        (
            f"{CORRECTION}level token {CORRECTION}threshold 4",
            {"correction": "icepop", "correction_low": 0.0, "correction_high": 4.0},
        ),
        (
            f"{CORRECTION}level seq",
            {
                "correction": "token_tis",
                "rejection": "seq_mean_k1",
                "rejection_low": 0.5,
                "rejection_high": 5.0,
                "rejection_scope": "policy_loss",  # the denominator counts rejected tokens
            },
        ),
        (
            f"{CORRECTION}level token --actor.policy_loss_type gspo",
            {"correction": None, "old_logp": "rollout"},
        ),
        (f"{CORRECTION}enable", {"correction": "token_tis", "correction_floor": 0.5}),
    ],
)
def test_corrections_of_openrlhf_are_those_of_its_loss(arguments, expected):
    needed = "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8"
    found = migrate("train_ppo_ray", f"{PPO} {needed} {arguments}")
    assert {name: found.config.get(f"algorithm.{name}") for name in expected} == expected
    assert check(found.config | {"reward.functions": ("math",)}, None, 1)[0] == []


def test_a_gate_that_is_no_ratio_is_refused():
    given = f"{CORRECTION}level seq {CORRECTION}gating binary_kl {CORRECTION}threshold 0.01"
    found = refused(migrate("train_ppo_ray", f"{PPO} {given}"))
    assert [name.partition("=")[0] for name in found] == ["algo.advantage.is_correction_gating"]


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--actor.loss_agg_mode seq-mean-token-mean", "aggregation", "seq_mean_token_mean"),
        ("--algo.kl.use_loss --algo.kl.unbiased_gradient", "kl", "k1+"),
        ("--algo.dynamic_filtering_enable", "dynamic_sampling_range", (0.0, 1.0)),
    ],
)
def test_settings_of_the_loss_keep_their_meaning(arguments, key, value):
    assert migrate("train_ppo_ray", f"{PPO} {arguments}").config[f"algorithm.{key}"] == value


def test_prompts_are_rendered_only_if_openrlhf_renders_them():
    assert migrate("train_ppo_ray", PPO).config["data.rendered_prompts"] is True
    given = migrate("train_ppo_ray", f"{PPO} --data.apply_chat_template")
    assert "data.rendered_prompts" not in given.config


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("train_ppo_ray", "--actor.optim muon"),
        ("train_ppo_ray", "--algo.advantage.no_std_norm"),
        ("train_dpo", "--model.nll_loss_coef 0.1"),
        ("train_sft", "--model.pretrain_mode_enable"),
    ],
)
def test_settings_that_change_the_numbers_and_are_not_here_are_refused(program, arguments):
    data = "" if program == "train_ppo_ray" else "--data.dataset d.jsonl"
    name = arguments.split()[0].lstrip("-")
    found = refused(migrate(program, f"{PPO} {data} {arguments}"))
    assert any(setting.startswith(name) for setting in found)
