"""Tests of scripts/migrate_config.py on settings of verl's own examples."""

import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jaxrl.config.keys import RunConfig
from jaxrl.config.other_frameworks import table
from jaxrl.config.schema import build, keys
from scripts.migrate_config import (
    IMPLIED,
    RENAMED,
    config_file,
    main,
    migrate,
    overrides,
    value_of,
)

FOLDER = Path(__file__).parent / "verl"


def load(text: str) -> ConfigDict:
    found: dict = {}
    exec(text, found)
    return found["get_config"]()


EXPECTED = {
    "grpo.sh": {
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "dual_clip",
        "algorithm.kl_in": "loss",
        "algorithm.kl": "k3",
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_clamp": 10.0,
        "algorithm.drop_flat_groups": False,
        "data.prompts_per_step": 1024,
        "learner.mini_batch_prompts": 256,
        "learner.token_budget": 16 * (512 + 1024),  # 16 sequences of verl
        "learner.lr": 1e-6,
        "learner.offload": ("reference",),
        "rollout.n": 5,
        "rollout.tensor": 2,
        "eval.every": 5,
        "reward.functions": ("by_source",),
    },
    "dapo.yaml": {
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.clip_dual": 10.0,
        "algorithm.aggregation": "token_mean",
        "algorithm.dynamic_sampling": True,
        "algorithm.dynamic_sampling_batches": 10,
        "algorithm.kl_coef": 0.0,
        "learner.token_budget": 22528 * 4,  # per data-parallel rank of 4 GPUs
        "learner.warmup_steps": 10 * 16,  # 512 / 32 updates in a step
        "mesh.sequence": 4,
        "reward.overlong_buffer": 4096,
        "eval.sampling.temperature": 1.0,
        "eval.sampling.top_p": 0.7,
        "data.filter_overlong_prompts": False,
    },
    "gspo.yaml": {
        "algorithm.policy_loss": "gspo",
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.clip_low": 0.0003,
        "algorithm.clip_high": 0.0004,
        "mesh.expert": 8,
        "mesh.tensor": 4,
        "total_steps": 300,
    },
    "rloo.yaml": {
        "algorithm.advantage": "rloo",
        "algorithm.kl_in": "reward",
        "algorithm.kl": "k1",
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_target": 0.0,
    },
    "remax.yaml": {
        "algorithm.advantage": "remax",
        "algorithm.kl_in": "reward",
        "algorithm.kl_target": 0.05,
        "rollout.n": 1,
        "total_epochs": 10,
    },
    "ppo.yaml": {
        "algorithm.advantage": "gae",
        "rollout.n": 1,
        "critic.lr": 2e-5,
        "critic.value_clip": 0.3,
        "learner.warmup_steps": 10 * 4,  # a tenth of 100 steps of 1024 / 256 updates
        "reward_model.path": "my/reward-model",
        "reward.functions": ("rewards/gsm8k.py:score",),
        "data.prompts_per_step": 1024,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_of_verl_becomes_a_config_that_means_the_same(name, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert main([str(FOLDER / name)]) == 0
    config = load(capsys.readouterr().out)
    assert {key: value_of(config, key) for key in EXPECTED[name]} == EXPECTED[name]
    _, errors = build(RunConfig, config.to_dict())
    assert errors == []


def test_rollout_corrections_keep_their_names_and_invert_their_ratio():
    section = "algorithm.rollout_correction."
    found = migrate(
        {
            section + "rollout_is": "sequence",
            section + "rollout_is_threshold": 3,
            section + "rollout_rs": "seq_mean_k1",
            section + "rollout_rs_threshold": "0.5_1.25",
        }
    )
    names = ("correction", "correction_high", "rejection", "rejection_low", "rejection_high")
    values = [found.config[f"algorithm.{name}"] for name in names]
    # verl bounds engine / trainer to 0.5 .. 1.25, so trainer / engine is in 1 / 1.25 .. 1 / 0.5
    assert values == ["seq_tis", 3.0, "seq_mean_k1", 0.8, 2.0] and not found.missing
    found = migrate({section + "rollout_rs": "seq_max_k3", section + "rollout_rs_threshold": 0.02})
    assert found.config["algorithm.rejection_max"] == 0.02


def test_profiled_steps_and_trackers_are_translated():
    given = {"global_profiler.steps": [3, 4], "trainer.logger": ["console", "swanlab"]}
    config = migrate(given).config
    assert config["profile.steps"] == (3, 4) and "swanlab" in config["log.loggers"]


def test_a_critic_keeps_its_own_aggregation():
    given = {"algorithm.adv_estimator": "gae", "critic.loss_agg_mode": "seq-mean-token-sum"}
    assert migrate(given).config["critic.aggregation"] == "seq_mean_token_sum"
    assert "critic.aggregation" not in migrate(given | {"algorithm.adv_estimator": "grpo"}).config
    given["critic.loss_agg_mode"] = "${actor_rollout_ref.actor.loss_agg_mode}"
    assert "critic.aggregation" not in migrate(given).config


def test_adapters_are_translated_with_their_rank():
    model = "actor_rollout_ref.model."
    given = {model + "lora_rank": 32, model + "lora_alpha": 64, model + "target_modules": "q_proj"}
    config = migrate(given).config
    assert (config["lora.rank"], config["lora.alpha"]) == (32, 64)
    assert config["lora.target_modules"] == ("q_proj",)
    assert "lora.alpha" not in migrate({model + "lora_rank": 0, model + "lora_alpha": 64}).config
    assert load(config_file(config, "adapters")).lora.rank == 32


def test_verls_8_bit_adamw_is_the_dtype_of_the_moments():
    found = migrate({"actor_rollout_ref.actor.optim.optimizer": "AdamW8bit"})
    assert found.config["learner.moment_dtype"] == "int8" and not found.missing


def test_keys_without_a_counterpart_are_listed(capsys):
    main([str(FOLDER / "remax.yaml"), "trainer.logger=rl_insight", "data.sampler.class_name=Mine"])
    listed = capsys.readouterr().err
    assert "no counterpart: trainer.logger=['rl_insight']: jaxrl has console" in listed
    assert "no counterpart: data.sampler.class_name=Mine" in listed


def test_an_unknown_choice_is_listed_and_the_default_is_kept():
    found = migrate({"algorithm.adv_estimator": "mine"})
    assert found.config["algorithm.advantage"] == "grpo"
    assert any(
        line.startswith("algorithm.adv_estimator=mine: jaxrl has gae") for line in found.missing
    )


def test_verl_without_any_key_keeps_the_defaults_of_verl():
    config = load(config_file(migrate({}).config, "nothing"))
    assert config.algorithm.advantage == "gae" and config.rollout.n == 1
    assert config.data.prompts_per_step == 1024 and config.learner.mini_batch_prompts == 256


def test_a_launch_script_gives_its_overrides_and_nothing_else():
    words = [
        "python3",
        "-m",
        "verl.trainer.main_ppo",
        "+data.seed=3",
        "A=b",
        "trainer.logger=[console]",
    ]
    assert overrides(words) == {"data.seed": 3, "trainer.logger": ["console"]}


def test_a_file_that_is_no_config_of_verl_is_an_error(tmp_path, capsys):
    (tmp_path / "other.yaml").write_text("a: 1\n")
    assert main([str(tmp_path / "other.yaml")]) == 1
    assert "has no key of verl such as data.train_files" in capsys.readouterr().err


def test_sapo_is_a_mean_over_responses_whatever_the_mode_is():
    mode = "actor_rollout_ref.actor.policy_loss.loss_mode"
    config = migrate({mode: "sapo"}).config
    assert config["algorithm.policy_loss"] == "sapo"
    assert config["algorithm.aggregation"] == "seq_mean_token_mean"


def test_every_verl_key_of_the_table_is_translated():
    known = migrate({}).read
    patterns = [*IMPLIED, *UNSUPPORTED]
    names = [name for row in table() if row.framework == "verl" for name in row.names]
    unknown = [n for n in names if n not in known and not any(re.fullmatch(p, n) for p in patterns)]
    assert unknown == []


def test_the_script_and_the_table_agree():
    answers = {name: row.ours for row in table() if row.framework == "verl" for name in row.names}
    for theirs, ours in RENAMED.items():
        assert theirs not in answers or ours in answers[theirs], theirs


# Rows that say "not yet", or name a feature that is set up in another way here.
UNSUPPORTED = (
    r"actor_rollout_ref\.actor\.megatron\.virtual_pipeline_model_parallel_size",
    r"actor_rollout_ref\.rollout\.multi_turn\..*",
    r"async_training\..*",
)


@pytest.mark.parametrize(
    ("granularity", "method", "n_layers", "remat"),
    [
        ("full", "block", 8, "full?first=8"),
        ("full", "uniform", 4, "full?group=4"),
        ("selective", None, None, "dots"),
    ],
)
def test_recomputation_of_megatron_is_translated(granularity, method, n_layers, remat):
    prefix = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_"
    values = {"granularity": granularity, "method": method, "num_layers": n_layers}
    found = migrate({prefix + name: value for name, value in values.items()})
    assert found.config["learner.remat"] == remat


def test_a_virtual_pipeline_of_megatron_has_no_counterpart():
    name = "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size"
    assert f"{name}=2" in migrate({name: 2}).missing
    assert not any(name in line for line in migrate({name: None}).missing)


def test_arguments_of_the_chat_template_are_translated():
    found = migrate({"data.apply_chat_template_kwargs.enable_thinking": False})
    text = config_file(found.config, "verl.yaml")
    assert 'config.data.template_kwargs = {"enable_thinking": False}' in text
    assert load(text).data.template_kwargs.enable_thinking is False
    assert not any("chat_template" in line for line in found.missing)


def test_every_translated_key_exists():
    assert set(RENAMED.values()) <= set(keys(RunConfig))
    everything = migrate({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"})
    assert set(everything.config) <= set(keys(RunConfig))


def test_column_keys_of_verl_become_a_mapping():
    given = {"data.prompt_key": "question", "data.val_max_samples": -1}
    config = migrate(given).config
    assert config["data.columns"] == ("prompt:question",)
    assert "data.val_max_samples" not in config
    assert "data.columns" not in migrate({"data.prompt_key": "prompt"}).config
