"""Tests of jaxrl/migrate/trl.py."""

import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.config.other_frameworks import table
from jaxrl.config.schema import keys
from jaxrl.migrate import trl
from jaxrl.migrate.config_file import check
from jaxrl.migrate.migration import REFUSED, Migration
from jaxrl.migrate.settings import yaml_file
from jaxrl.migrate.trl_names import ONLINE, RENAMED
from jaxrl.migrate.trl_script import script

SHARED = "model_name_or_path: m\ndataset_name: org/data\nnum_processes: 8\n"


def migrate(kind: str, text: str) -> Migration:
    return trl.translate(yaml_file(SHARED + text, {}), kind, {})


def refused(found: Migration) -> list[str]:
    return [
        n.setting for n in found.notes if n.kind == REFUSED and "reward.functions" not in n.ours
    ]


def test_completions_of_all_devices_become_prompts():
    found = migrate(
        "grpo",
        "num_generations: 8\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\n"
        "steps_per_generation: 8\nbeta: 0.04\nmax_completion_length: 1024\nmax_steps: 100\n",
    )
    config = found.config
    assert config["data.prompts_per_step"] == 32  # 4 x 8 x 8 completions in groups of 8
    assert config["learner.mini_batch_prompts"] == 16  # 4 x 8 x 4
    assert config["total_steps"] == 50  # two updates each
    assert (config["algorithm.kl"], config["algorithm.kl_coef"]) == ("k3_unbiased", 0.04)
    assert config["data.train"] == ("hf:org/data?split=train",) and not refused(found)
    assert check(config | {"reward.functions": ("math",)}, None, 1)[0] == []


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("loss_type: grpo", "algorithm.aggregation", "seq_mean_token_mean"),
        ("loss_type: dapo", "algorithm.aggregation", "token_mean"),
        ("loss_type: cispo\nepsilon_high: 5.0", "algorithm.clip_high", 4.0),
        ("loss_type: sapo", "algorithm.policy_loss", "sapo"),
        ("importance_sampling_level: sequence\nloss_type: grpo", "algorithm.policy_loss", "gspo"),
        ("delta: 1.5", "algorithm.clip_dual", 1.5),
        ("scale_rewards: none", "algorithm.norm_adv_by_std", False),
        ("beta: 0.1\nsync_ref_model: true", "algorithm.ref_refresh_rate", 0.6),
        ("top_entropy_quantile: 0.2", "algorithm.top_entropy", 0.2),
        ("scale_rewards: batch", "algorithm.advantage", "grpo_batch_std"),
        ("multi_objective_aggregation: normalize_then_sum", "algorithm.advantage", "gdpo"),
        ("loss_type: vespo\nvespo_k_neg: 4.0", "algorithm.vespo_k_negative", 4.0),
        ("loss_type: vespo\nuse_vllm: true", "algorithm.old_logp", "rollout"),
        (
            "loss_type: luspo\nimportance_sampling_level: sequence",
            "algorithm.aggregation",
            "seq_mean_token_sum",
        ),
        ("use_vllm: true", "algorithm.correction", "seq_icepop"),
        ("use_peft: true\nlora_r: 4", "lora.rank", 4),
        ("use_peft: true", "lora.target_modules", ("q_proj", "v_proj")),
        ("router_aux_loss_coef: 0.01", "learner.router_aux_coef", 0.01),
    ],
)
def test_objectives_of_grpo_are_those_of_the_table(text, key, value):
    assert migrate("grpo", text + "\n").config[key] == value


@pytest.mark.parametrize(
    ("kind", "text", "dtype", "shuffle"),
    [
        ("grpo", "dtype: float32", None, None),  # of the weights; bf16 is on
        ("sft", "bf16: false", "float32", True),
        ("sft", "dtype: bfloat16\nshuffle_dataset: false", None, True),  # the sampler is random
        ("sft", "train_sampling_strategy: sequential", None, False),
        ("kto", "bf16: true", None, False),
    ],
)
def test_the_dtype_is_that_of_computation_and_the_order_that_of_the_sampler(
    kind, text, dtype, shuffle
):
    config = migrate(kind, text + "\n").config
    assert config.get("model.dtype") == dtype and config.get("data.shuffle") == shuffle


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("rloo", "normalize_advantages: true"),
        ("grpo", "importance_sampling_level: sequence\nloss_type: sapo"),
        ("grpo", "loss_type: luspo"),  # with the ratio of tokens, TRL's default
        ("sft", "loss_type: dft"),
        ("dpo", "label_smoothing: 0.1"),
        ("dpo", "loss_type: sft"),
        ("sft", "fp16: true"),
    ],
)
def test_settings_that_change_the_numbers_and_are_not_here_are_refused(kind, text):
    (setting,) = refused(migrate(kind, text + "\n"))
    assert setting == text.partition("\n")[0].replace(": true", "=True").replace(": ", "=")


def test_reward_functions_and_unknown_losses_are_refused():
    found = migrate("grpo", "reward_funcs: [accuracy_reward]\nloss_type: mine\n")
    names = {n.setting.partition("=")[0]: n.ours for n in found.notes if n.kind == REFUSED}
    assert names == {"reward_funcs": ("reward.functions",), "loss_type": ("algorithm.policy_loss",)}


@pytest.mark.parametrize(
    ("kind", "module", "text", "key", "value"),
    [
        ("sft", "jaxrl.sft", "max_length: 2048", "data.max_response_len", 1024),
        ("sft", "jaxrl.sft", "gradient_accumulation_steps: 2", "data.prompts_per_step", 128),
        ("dpo", "jaxrl.dpo", "loss_type: ipo", "preference.ipo_reduction", "mean"),
        ("dpo", "jaxrl.dpo", "ld_alpha: 0.5", "preference.ld_alpha", 0.5),
        ("dpo", "jaxrl.dpo", "f_divergence_type: js_divergence", "preference.f_divergence", "js"),
        (
            "dpo",
            "jaxrl.dpo",
            "loss_type: robust\nlabel_smoothing: 0.1",
            "preference.label_smoothing",
            0.1,
        ),
        (
            "dpo",
            "jaxrl.dpo",
            "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]",
            "preference.loss_weights",
            (0.8, 0.2, 1.0),
        ),
        (
            "kto",
            "jaxrl.dpo",
            "loss_type: apo_zero_unpaired",
            "preference.loss",
            "apo_zero_unpaired",
        ),
        ("cpo", "jaxrl.dpo", "cpo_alpha: 0.5", "preference.cpo_alpha", 0.5),
        ("cpo", "jaxrl.dpo", "loss_type: hinge", "preference.loss", "cpo_hinge"),
        ("cpo", "jaxrl.dpo", "alpha: 0.3", "preference.alphapo_alpha", 0.3),
        ("cpo", "jaxrl.dpo", "loss_type: alphapo\nalpha: 0.3", "preference.loss", "simpo"),
        ("dpo", "jaxrl.dpo", "use_weighting: true", "preference.weighted", True),
        (
            "cpo",
            "jaxrl.dpo",
            "loss_type: simpo\ncpo_alpha: 0.0\nbeta: 2.0",
            "preference.loss",
            "simpo",
        ),
        ("cpo", "jaxrl.dpo", "loss_type: simpo", "preference.more_losses", ("sft",)),
        ("orpo", "jaxrl.dpo", "beta: 0.2", "preference.loss", "orpo"),
        (
            "reward",
            "jaxrl.reward_model",
            "center_rewards_coefficient: 0.01",
            "preference.center_coef",
            0.01,
        ),
        ("prm", "jaxrl.reward_model", "max_length: 64", "reward_model.objective", "steps"),
        (
            "prm",
            "jaxrl.reward_model",
            'step_separator: "\\n\\n"',
            "reward_model.step_separator",
            "\n\n",
        ),
        ("kto", "jaxrl.dpo", "desirable_weight: 2.0", "preference.chosen_weight", 2.0),
        ("reward", "jaxrl.reward_model", "learning_rate: 1e-5", "learner.lr", 1e-5),
        ("rloo", "jaxrl.train", "beta: 0.1", "algorithm.kl_in", "reward"),
    ],
)
def test_every_trainer_is_known(kind, module, text, key, value):
    found = migrate(kind, text + "\n")
    assert found.program == module and found.config[key] == value and not refused(found)
    assert check(found.config | {"reward.functions": ("math",)}, None, 1)[0] == []


def test_process_reward_models_of_trl_are_translated_or_named():
    found = migrate("prm", "max_length: 64\nmax_completion_length: 32\n")
    config = found.config
    assert config["data.max_prompt_len"] + config["data.max_response_len"] == 64
    assert (config["reward_model.step_separator"], config["learner.lr"]) == ("\n", 1e-5)
    assert any("max_completion_length" in n.setting for n in found.notes) and not refused(found)
    last = migrate("prm", "train_on_last_step_only: true\n")
    assert refused(last) == ["train_on_last_step_only=True"]
    _, kind = script("args = PRMConfig(step_separator='#')\n")
    assert kind == "prm"


def test_the_literal_arguments_of_a_script_are_read():
    settings, kind = script(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "MODEL = 'me/model'\n"
        "data = load_dataset('org/data', split='train[:10%]')\n"
        "args = GRPOConfig(learning_rate=1e-5, num_generations=4, output_dir=folder())\n"
        "peft = LoraConfig(r=8, lora_alpha=16, target_modules=['q_proj'])\n"
        "trainer = GRPOTrainer(model=MODEL, args=args, reward_funcs=[score], train_dataset=data)\n"
    )
    assert kind == "grpo" and settings.unresolved.keys() == {"output_dir"}
    values = settings.values
    assert (values["model_name_or_path"], values["dataset_name"]) == ("me/model", "org/data")
    assert (values["learning_rate"], values["num_generations"]) == (1e-5, 4)
    assert (values["lora_r"], values["use_peft"]) == (8, True)
    assert values["dataset_train_split"] == "train[:10%]"


def test_adapters_of_a_script_have_the_defaults_of_peft():
    settings, kind = script("args = SFTConfig(max_length=512)\npeft = LoraConfig(lora_alpha=4)\n")
    config = trl.translate(settings.below(yaml_file(SHARED, {})), kind, {}).config
    assert (config["lora.rank"], config["lora.alpha"]) == (8, 4)


def test_a_script_that_reads_its_arguments_from_the_command_line_says_so():
    with pytest.raises(ValueError, match="it reads them from the command line"):
        script("from trl import TrlParser\nargs = TrlParser((A,)).parse_args_and_config()\n")


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("trl grpo --model_name_or_path m --learning_rate 1e-5", "grpo"),
        ("accelerate launch --num_processes 4 trl/scripts/sft.py --learning_rate 1e-5", "sft"),
        ("trl dpo --config c.yaml --learning_rate 1e-5", "dpo"),
        ("python examples/scripts/prm.py --learning_rate 1e-5", "prm"),
        ("python examples/reward_modeling.py --learning_rate 1e-5", "reward"),
    ],
)
def test_commands_of_trl_are_known(command, kind, tmp_path):
    (tmp_path / "c.yaml").write_text("model_name_or_path: m\nlearning_rate: 1.0\nbeta: 0.3\n")
    words = command.split()
    assert trl.is_command(words) and trl.kind_of(words) == kind
    settings, _ = trl.command(words, tmp_path, {})
    assert settings.values["learning_rate"] == 1e-5
    assert ("num_processes" in settings.values) == (kind == "sft")
    assert settings.values.get("beta") == (0.3 if kind == "dpo" else None)


def test_other_commands_are_not_those_of_trl():
    for words in (["python", "train.py"], ["ray", "start"], ["python3", "-m", "verl.trainer.x"]):
        assert not trl.is_command(words)


def test_the_translation_and_the_table_agree():
    answers = {name: row.ours for row in table() if row.framework == "TRL" for name in row.names}
    known = keys(RunConfig)
    for theirs, ours in (RENAMED | ONLINE).items():
        assert theirs not in answers or ours in answers[theirs], theirs
        assert ours in known
