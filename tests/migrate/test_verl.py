"""Tests of jaxrl/migrate/verl.py on settings of verl's own examples."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.config.other_frameworks import table
from jaxrl.config.schema import keys
from jaxrl.migrate import verl_names
from jaxrl.migrate.__main__ import main
from jaxrl.migrate.config_file import check, text
from jaxrl.migrate.migration import DIFFERS, REFUSED, Migration
from jaxrl.migrate.settings import Settings, hydra
from jaxrl.migrate.shell_expansion import mark
from jaxrl.migrate.verl import translate

FOLDER = Path(__file__).parent
EXAMPLES, RECIPES = (
    json.loads((FOLDER / f"verl_{name}.json").read_text()) for name in ("examples", "recipes")
)
MODULE = "verl.trainer.main_ppo"
NEEDED = {"actor_rollout_ref.model.path": "me/model", "data.train_files": "train.parquet"}
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def migrate(given: dict, module: str = MODULE) -> Migration:
    settings = Settings()
    for name, value in given.items():
        settings.put(name, value)
    return translate(settings, module, {})


def notes(found: Migration, kind: str) -> dict[str, str]:
    """{name: reason} of the notes of a kind."""
    return {n.setting.partition("=")[0]: n.reason for n in found.notes if n.kind == kind}


def load(source: str) -> Any:
    namespace: dict = {}
    exec(source, namespace)
    return namespace["get_config"]()


def value_of(config: Any, name: str):
    value = config
    for part in name.split("."):
        value = value[part]
    return value


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
        "mesh.fsdp": 8,  # 32 devices, of which 4 share a sequence
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
        "rollout.tensor": 4,
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
        "reward.functions": (),
        "data.prompts_per_step": 1024,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_of_verl_becomes_a_config_that_means_the_same(name, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert main([str(FOLDER / "verl" / name)]) == 0
    config = load(capsys.readouterr().out)
    assert {key: value_of(config, key) for key in EXPECTED[name]} == EXPECTED[name]


# Settings whose value is that of a key here, whatever else a script sets.
SAME = {
    "actor_rollout_ref.model.path": "model.path",
    "model.path": "model.path",
    "data.max_prompt_length": "data.max_prompt_len",
    "data.max_response_length": "data.max_response_len",
    ROLLOUT + "n": "rollout.n",
    ACTOR + "optim.lr": "learner.lr",
    "optim.lr": "learner.lr",
    ACTOR + "entropy_coeff": "algorithm.entropy_coef",
    "trainer.experiment_name": "name",
}
ADVANTAGES = {"grpo", "gae", "rloo", "gpg", "remax", "reinforce_plus_plus", "distill"}
ADVANTAGES |= {"optimal_token_baseline"}


@pytest.mark.parametrize("name", EXAMPLES["scripts"])
def test_a_script_of_verl_gives_a_config_that_checks_or_a_named_refusal(name):
    check_script(name, EXAMPLES)


@pytest.mark.parametrize("folder", sorted({name.split("/")[0] for name in RECIPES["scripts"]}))
def test_a_recipe_of_verl_gives_a_config_that_checks_or_a_named_refusal(folder):
    for name in RECIPES["scripts"]:
        if name.startswith(folder):
            check_script(name, RECIPES)


def check_script(name: str, scripts: dict) -> None:
    module, indices, refused = scripts["scripts"][name]
    words = [scripts["settings"][i] for i in indices]
    if refused == ["the script"]:
        return  # it does not train
    settings = hydra(re.sub(r"\$\{([^}]+)\}", lambda m: mark(m[1]), word) for word in words)
    given, unknown = dict(settings.values), set(settings.unresolved)
    settings.words.clear()
    found = translate(settings, module, {})
    assert sorted(notes(found, REFUSED)) == sorted(refused)
    for theirs, ours in SAME.items():
        if theirs in given and given[theirs] is not None:
            assert found.config[ours] == given[theirs], theirs
    if "data.train_files" in given:
        listed = given["data.train_files"]
        assert list(found.config["data.train"]) == ([listed] if isinstance(listed, str) else listed)
    named = {note.setting.partition("=")[0] for note in found.notes} | found._read.keys()
    assert set(given) | unknown <= named, "every setting is carried over or named"
    if not refused:
        errors, _ = check(found.config, found.n_devices, found.n_processes)
        assert not errors or name.startswith("rollout_correction/")
        if found.program == "jaxrl.train":
            assert found.config["algorithm.advantage"] in ADVANTAGES


def test_the_script_of_rlinf_keeps_both_data_files_and_retool_keeps_grpo():
    def found(name: str) -> Migration:
        module, indices, _ = RECIPES["scripts"][name]
        return translate(hydra(RECIPES["settings"][i] for i in indices), module, {})

    config = found("RLinf/compare_with_verl.rst").config
    assert config["data.train"] == ("/path/to/dataset/boba.parquet",)
    assert config["data.val"] == ("/path/to/dataset/test_mini.parquet",)
    assert (config["mesh.sequence"], config["learner.token_budget"]) == (4, 120320)  # 4 x 30000 up
    assert config["rollout.sampling.top_k"] == 0 and config["algorithm.kl_coef"] == 0.001
    retool = found("retool/run_qwen2_7b_dapo.sh")
    assert retool.config["algorithm.advantage"] == "grpo"
    section = "actor_rollout_ref.rollout.multi_turn."
    assert {"data.custom_cls.path", section + "enable"} == set(notes(retool, REFUSED))


def test_a_program_that_is_not_one_of_verls_trainers_is_refused_until_the_loss_is_given(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m recipe.spin.main_spin data.train_files=a.parquet "
        "actor_rollout_ref.model.path=me/model algorithm.adv_estimator=grpo "
        "actor_rollout_ref.rollout.n=4"
    )
    assert main([str(script)]) == 1
    assert main([str(script), "--config.algorithm.policy_loss=dual_clip"]) == 0
    for module in ("verl.trainer.main_ppo", "verl/trainer/main_ppo.py", "recipe.dapo.main_dapo"):
        assert not notes(migrate(NEEDED, module), REFUSED)


def test_a_model_that_the_reward_function_asks_is_not_a_reward_model_here():
    given = NEEDED | {"reward_model.enable": True, "reward_model.model.path": "me/scores"}
    config = migrate(given).config
    assert (config["reward_model.path"], config["reward.functions"]) == ("me/scores", ())
    found = migrate(given | {"custom_reward_function.path": "mine.py"})
    assert list(notes(found, REFUSED)) == ["reward_model.model.path"]
    assert found.config["reward.functions"] == ("mine.py:compute_score",)
    assert "reward_model.path" not in found.config


def test_the_examples_are_all_there_and_most_of_them_train_here():
    outcomes = [row[2] for row in EXAMPLES["scripts"].values()]
    assert len(outcomes) == 109 and sum(not refused for refused in outcomes) >= 70
    outcomes = [row[2] for row in RECIPES["scripts"].values()]
    assert len(outcomes) == 117 and sum(not refused for refused in outcomes) >= 53


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
    assert values == ["seq_tis", 3.0, "seq_mean_k1", 0.8, 2.0]
    found = migrate({section + "rollout_rs": "seq_max_k3", section + "rollout_rs_threshold": 0.02})
    assert found.config["algorithm.rejection_max"] == 0.02


def test_several_rejections_have_a_threshold_each_or_one_for_all():
    name = "algorithm.rollout_correction.rollout_rs"
    found = migrate({name: "seq_max_k2, token_k1", name + "_threshold": "2.5,0.5_1.25"})
    assert found.config["algorithm.rejection"] == "seq_max_k2"
    assert found.config["algorithm.rejection_max"] == 2.5
    assert found.config["algorithm.more_rejections"] == ("token_k1?low=0.8&high=2.0",)
    found = migrate({name: "token_k3,seq_max_k3", name + "_threshold": 0.5})
    assert found.config["algorithm.rejection_max"] == 0.5
    assert found.config["algorithm.more_rejections"] == ("seq_max_k3?max=0.5",)
    found = migrate({name: "token_k2,seq_max_k2", name + "_threshold": 2.0000001})
    assert found.config["algorithm.more_rejections"] == ("seq_max_k2?max=2.0000001",)
    assert migrate({name: ""}).config["algorithm.rejection"] == "none"
    found = migrate({name: "token_k1,token_k2,token_k3", name + "_threshold": "1,2"})
    assert name + "_threshold" in notes(found, REFUSED)
    found = migrate({name: "token_k1,token_k9", name + "_threshold": 2})
    assert "token_k9 is not known" in notes(found, REFUSED)[name]


def test_two_bounds_of_importance_weights_mask_what_is_outside():
    section = "algorithm.rollout_correction.rollout_is"
    config = migrate({section: "token", section + "_threshold": "0.5_4.0"}).config
    names = ("correction", "correction_low", "correction_high")
    assert [config[f"algorithm.{name}"] for name in names] == ["icepop", 0.5, 4.0]


def test_a_value_of_another_kind_is_refused_by_name():
    found = migrate(NEEDED | {"data.train_batch_size": "many", "trainer.save_freq": "often"})
    assert notes(found, REFUSED) == {"data.train_batch_size": "a number is expected"}
    assert notes(found, "needs a decision") == {"trainer.save_freq": "a number is expected"}
    with pytest.raises(ValueError, match=r"cannot be used .* data.train_batch_size=0"):
        migrate(NEEDED | {"data.train_batch_size": 0})


def test_profiled_steps_and_trackers_are_translated():
    given = {"global_profiler.steps": [3, 4], "trainer.logger": ["console", "swanlab"]}
    config = migrate(given).config
    assert config["profile.steps"] == (3, 4) and "swanlab" in config["log.loggers"]


def test_a_critic_keeps_its_own_aggregation():
    given = {"algorithm.adv_estimator": "gae", "critic.loss_agg_mode": "seq-mean-token-sum"}
    assert migrate(given).config["critic.aggregation"] == "seq_mean_token_sum"
    assert "critic.aggregation" not in migrate(given | {"algorithm.adv_estimator": "grpo"}).config


def test_adapters_are_translated_with_their_rank():
    model = "actor_rollout_ref.model."
    given = {model + "lora_rank": 32, model + "lora_alpha": 64, model + "target_modules": "q_proj"}
    config = migrate(given).config
    assert (config["lora.rank"], config["lora.alpha"]) == (32, 64)
    assert config["lora.target_modules"] == ("q_proj",)
    assert "lora.alpha" not in migrate({model + "lora_rank": 0, model + "lora_alpha": 64}).config
    newer = migrate({model + "lora.rank": 8, model + "lora.alpha": 16}).config
    assert (newer["lora.rank"], newer["lora.alpha"]) == (8, 16)
    assert load(text(config, "adapters", "jaxrl.train", [])).lora.rank == 32


def test_verls_8_bit_adamw_is_the_dtype_of_the_moments():
    found = migrate({ACTOR + "optim.optimizer": "AdamW8bit"})
    assert found.config["learner.moment_dtype"] == "int8"


def test_keys_without_a_counterpart_are_listed(capsys):
    arguments = ["trainer.logger=rl_insight", "data.sampler.class_name=Mine"]
    assert main([str(FOLDER / "verl" / "remax.yaml"), *arguments]) == 0
    listed = capsys.readouterr().err
    assert (
        "no counterpart: trainer.logger=rl_insight: ['rl_insight'] left out: jaxrl has c" in listed
    )
    assert "no counterpart: data.sampler.class_name=Mine: write the rows to a file" in listed


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("algorithm.adv_estimator", "mine", "algorithm.advantage"),
        (ACTOR + "policy_loss.loss_mode", "mine", "algorithm.policy_loss"),
        ("algorithm.adv_estimator", "gdpo", "algorithm.advantage"),
        (ACTOR + "loss_agg_mode", "mine", "algorithm.aggregation"),
        (ACTOR + "optim.lr_scheduler_type", "wsd", "learner.lr_schedule"),
        (ROLLOUT + "multi_turn.enable", True, "env.name"),
        ("distillation.enabled", True, "algorithm.advantage"),
        ("algorithm.use_pf_ppo", True, ""),
        ("trainer.val_only", True, ""),
        (ROLLOUT + "ignore_eos", True, ""),
        ("data.video_key", "videos", ""),
    ],
)
def test_what_no_config_can_mean_is_refused_unless_the_key_is_given(name, value, ours, capsys):
    found = migrate(NEEDED | {name: value})
    (note,) = [note for note in found.notes if note.kind == REFUSED]
    assert note.setting == f"{name}={value}" and (ours in note.ours or not ours)


def test_images_are_read_from_the_column_that_the_run_names():
    name = "data.mm_processor_kwargs.max_pixels"
    grpo = NEEDED | {"algorithm.adv_estimator": "grpo"}
    found = migrate(grpo | {"data.image_key": "pictures", name: 4096})
    assert found.config["data.images"] is True and not notes(found, REFUSED)
    assert found.config["data.columns"] == ("images:pictures",)
    assert found.config["data.image_kwargs.max_pixels"] == 4096
    tower = ACTOR + "freeze_vision_tower"
    assert found.config["model.freeze_vision"] == "none" and not notes(found, DIFFERS)
    for name, value, reason in (
        ("actor_rollout_ref.model.lora_rank", 8, "no names of it"),
        ("algorithm.adv_estimator", "gae", "a separate critic"),
    ):
        other = migrate(grpo | {"data.image_key": "images", name: value})
        assert reason in notes(other, DIFFERS)[tower]
        assert "model.freeze_vision" not in other.config
    staged = {"data.image_key": "images", ACTOR + "megatron.pipeline_model_parallel_size": 2}
    assert migrate(grpo | staged).config["model.freeze_vision"] == "none"
    frozen = migrate(NEEDED | {"data.image_key": "images", tower: True})
    assert "data.columns" not in frozen.config and not notes(frozen, DIFFERS)
    assert "model.freeze_vision" not in frozen.config
    assert "data.images" not in migrate(NEEDED | {"data.image_key": None}).config


def test_verl_without_any_key_keeps_the_defaults_of_verl():
    config = load(text(migrate(NEEDED).config, "nothing", "jaxrl.train", []))
    assert config.algorithm.advantage == "gae" and config.rollout.n == 1
    assert config.data.prompts_per_step == 1024 and config.learner.mini_batch_prompts == 256


def test_sapo_is_a_mean_over_responses_whatever_the_mode_is():
    config = migrate({ACTOR + "policy_loss.loss_mode": "sapo"}).config
    assert config["algorithm.policy_loss"] == "sapo"
    assert config["algorithm.aggregation"] == "seq_mean_token_mean"


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_bounds_its_divergence_and_truncates_its_ratio_as_verl_does(name):
    config = migrate({ACTOR + "policy_loss.loss_mode": name, ACTOR + "clip_ratio_low": 0.15}).config
    assert config["algorithm.policy_loss"] == name
    assert (config["algorithm.clip_low"], config["algorithm.clip_high"]) == (0.15, 0.2)
    assert config["algorithm.ratio_max"] == 3.0  # verl's default of clip_ratio_c
    given = {ACTOR + "policy_loss.loss_mode": name, ACTOR + "clip_ratio_c": 20.0}
    assert migrate(given).config["algorithm.ratio_max"] == 20.0


def test_a_sum_over_tokens_keeps_its_name():
    config = migrate({ACTOR + "loss_agg_mode": "token-sum"}).config
    assert config["algorithm.aggregation"] == "token_sum"


def test_dro_keeps_its_beta():
    given = {ACTOR + "policy_loss.loss_mode": "dro", ACTOR + "policy_loss.dro_beta": 0.1}
    assert migrate(given).config["algorithm.log_ratio_penalty"] == 0.1


def test_the_translation_and_the_table_agree():
    answers = {name: row.ours for row in table() if row.framework == "verl" for name in row.names}
    known = keys(RunConfig)
    for theirs, ours in (verl_names.RENAMED | verl_names.CRITIC | verl_names.EPISODES).items():
        assert theirs not in answers or ours in answers[theirs], theirs
        assert ours in known


@pytest.mark.parametrize(
    ("granularity", "method", "n_layers", "remat"),
    [
        ("full", "block", 8, "full?first=8"),
        ("full", "uniform", 4, "full?group=4"),
        ("selective", None, None, "dots"),
    ],
)
def test_recomputation_of_megatron_is_translated(granularity, method, n_layers, remat):
    prefix = ACTOR + "megatron.override_transformer_config.recompute_"
    values = {"granularity": granularity, "method": method, "num_layers": n_layers}
    found = migrate({prefix + name: value for name, value in values.items()})
    assert found.config["learner.remat"] == remat


@pytest.mark.parametrize(("mode", "ours"), [("R2", "R2"), ("R3", "R3"), ("disabled", None)])
def test_router_replay_is_translated(mode, ours):
    flag = {"actor_rollout_ref.rollout.enable_rollout_routing_replay": mode == "R3"}
    found = migrate({ACTOR + "megatron.router_replay.mode": mode} | flag)
    assert found.config.get("learner.router_replay") == ours
    assert (found.config.get("algorithm.old_logp") == "recompute") == (mode == "R2")


def test_a_virtual_pipeline_of_megatron_has_no_counterpart():
    name = ACTOR + "megatron.virtual_pipeline_model_parallel_size"
    assert name in notes(migrate({name: 2}), "no counterpart")
    assert name not in notes(migrate({name: None}), "no counterpart")


def test_arguments_of_the_chat_template_are_translated():
    found = migrate({"data.apply_chat_template_kwargs.enable_thinking": False})
    source = text(found.config, "verl.yaml", "jaxrl.train", [])
    assert 'config.data.template_kwargs = {"enable_thinking": False}' in source
    assert load(source).data.template_kwargs.enable_thinking is False


def test_column_keys_of_verl_become_a_mapping():
    given = {"data.prompt_key": "question", "data.val_max_samples": -1}
    config = migrate(given).config
    assert config["data.columns"] == ("prompt:question",)
    assert "data.val_max_samples" not in config
    assert "data.columns" not in migrate({"data.prompt_key": "prompt"}).config


def test_all_tokens_are_no_top_k():
    for k in (-1, 0, 1_000_000):
        assert migrate({ROLLOUT + "top_k": k}).config["rollout.sampling.top_k"] == 0
    assert migrate({ROLLOUT + "top_k": 50}).config["rollout.sampling.top_k"] == 50


def test_what_is_carried_in_part_says_what_differs():
    section = ACTOR + "fsdp_config."
    found = migrate(NEEDED | {section + "param_offload": True, section + "optimizer_offload": True})
    assert found.config["learner.offload"] == ("optimizer",)
    assert "rollout.release_kv" in notes(found, "differs")[section + "param_offload"]


def test_supervised_fine_tuning_is_a_run_of_sft():
    given = {
        "model.path": "me/model",
        "data.train_files": "chats.parquet",
        "data.train_batch_size": 64,
        "data.max_length": 2048,
        "data.messages_key": "turns",
        "optim.lr": 1e-5,
        "model.lora_rank": 16,
        "engine.ulysses_sequence_parallel_size": 2,
        "trainer.save_freq": "after_each_epoch",
        "trainer.total_epochs": 2,
    }
    found = migrate(given, "verl.trainer.sft_trainer")
    assert found.program == "jaxrl.sft" and not notes(found, REFUSED)
    config = found.config
    assert config["data.max_prompt_len"] + config["data.max_response_len"] == 2048
    assert config["data.columns"] == ("messages:turns",) and config["mesh.sequence"] == 2
    assert (config["data.prompts_per_step"], config["learner.lr"]) == (64, 1e-5)
    assert (config["lora.rank"], config["total_epochs"]) == (16, 2)
    assert notes(found, "needs a decision") == {
        "trainer.save_freq": "set checkpoint.every to the steps of an epoch"
    }
    assert check(config, None, 1)[0] == []


def test_a_fully_asynchronous_run_keeps_its_prompts_between_two_transfers():
    given = NEEDED | {
        "algorithm.adv_estimator": "grpo",
        ACTOR + "ppo_mini_batch_size": 32,
        ROLLOUT + "n": 8,
        "async_training.staleness_threshold": 0.5,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 1,
        "rollout.total_rollout_steps": 51200,
        "rollout.n_gpus_per_node": 4,
        "trainer.n_gpus_per_node": 4,
    }
    found = migrate(given, "verl.experimental.fully_async_policy.fully_async_main")
    config = found.config
    assert config["data.prompts_per_step"] == 128  # 4 x 1 x 32
    assert config["learner.mini_batch_prompts"] == 32
    assert config["total_steps"] == 400  # 51200 / 128
    assert (config["schedule.mode"], config["schedule.max_staleness"]) == ("async", 1)
    assert config["schedule.rollout_devices"] == 4 and config["algorithm.old_logp"] == "rollout"
    assert check(config, found.n_devices, found.n_processes)[0] == []


def test_one_step_off_is_asynchronous_with_a_staleness_of_one():
    devices = {"rollout.n_gpus_per_node": 2, "trainer.n_gpus_per_node": 6}
    given = NEEDED | devices | {"algorithm.adv_estimator": "grpo", ROLLOUT + "n": 4}
    found = migrate(given, "verl.experimental.one_step_off_policy.main_ppo")
    assert found.config["schedule.mode"] == "async" and found.config["schedule.max_staleness"] == 1
    assert found.config["schedule.rollout_devices"] == 2 and found.n_devices == 8


MODELS = "distillation.teacher_models."
DISTILLED = NEEDED | {
    "distillation.enabled": True,
    "distillation.distillation_loss.loss_mode": "k1",
    "distillation.distillation_loss.use_task_rewards": False,
    "distillation.distillation_loss.use_policy_gradient": True,
    "algorithm.adv_estimator": "grpo",
}
SEVERAL = {
    "distillation.teacher_key": "data_source",
    MODELS + "gsm8k.key": "openai/gsm8k",
    MODELS + "gsm8k.model_path": "me/small",
    MODELS + "math.key": "me/math",
    MODELS + "math.model_path": "me/large",
}


@pytest.mark.parametrize(
    "teachers, wanted, differing",
    [
        (
            {MODELS + "one.model_path": "me/teacher"},
            {"algorithm.advantage": "distill", "algorithm.teacher": "me/teacher"},
            set(),
        ),
        (
            SEVERAL,
            {
                "algorithm.teacher": "me/small",
                "algorithm.more_teachers": ("me/large?source=me/math",),
            },
            {MODELS + "gsm8k.key"},
        ),
    ],
    ids=["one", "several by their keys"],
)
def test_distillation_from_teachers_is_translated(teachers, wanted, differing):
    found = migrate(DISTILLED | teachers)
    assert found.config | wanted == found.config
    assert differing <= set(notes(found, "differs"))
    assert check(found.config, None, 1)[0] == [] and not notes(found, REFUSED)


@pytest.mark.parametrize(
    "teachers",
    [
        SEVERAL | {"distillation.teacher_key": "ability"},
        {key: value for key, value in SEVERAL.items() if key != MODELS + "math.key"},
    ],
    ids=["by a column", "without a key"],
)
def test_several_teachers_that_no_data_source_chooses_are_refused(teachers):
    assert "distillation.teacher_key" in notes(migrate(DISTILLED | teachers), REFUSED)


def test_arguments_of_a_reward_function_become_its_options():
    section = "custom_reward_function."
    given = {section + "path": "mine.py", section + "reward_kwargs.scale": 2.0}
    functions = migrate(NEEDED | given).config["reward.functions"]
    assert functions == ("mine.py:compute_score?scale=2.0",)


def test_another_divisor_of_the_sum_over_a_response_is_refused():
    given = NEEDED | {ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm"}
    assert not notes(migrate(given), REFUSED)
    name = ACTOR + "loss_scale_factor"
    assert list(notes(migrate(given | {name: 1000}), REFUSED)) == [name]
    assert not notes(migrate(given | {name: 512}), REFUSED)  # data.max_response_length


def test_what_the_critic_shares_with_the_policy_is_named_if_it_differs():
    given = NEEDED | {"critic.grad_clip": 0.5, ACTOR + "grad_clip": 1.0}
    assert "critic.grad_clip" in notes(migrate(given), "differs")
    assert "critic.grad_clip" not in notes(migrate(given | {ACTOR + "grad_clip": 0.5}), "differs")


def test_engines_of_verl_have_their_own_default_schedule():
    given = NEEDED | {"algorithm.adv_estimator": "grpo"}
    assert "learner.lr_schedule" not in migrate(given).config
    assert migrate(given | {"model_engine": "veomni"}).config["learner.lr_schedule"] == "cosine"
