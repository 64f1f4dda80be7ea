"""Tests of jaxrl/config/other_frameworks.py and scripts/pages/keys.py."""

from pathlib import Path

import pytest

from jaxrl.config.command_line import parse
from jaxrl.config.keys import RunConfig
from jaxrl.config.other_frameworks import NOT_NEEDED, NOT_YET, answer, table
from jaxrl.config.schema import keys, unknown_key
from scripts.pages import keys as keys_page

KEYS = keys(RunConfig)
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "keys.md"


def test_every_row_leads_to_keys_that_exist_or_says_why_not():
    assert len(table()) > 250
    for row in table():
        assert row.names or row.ours
        assert set(row.ours) <= set(KEYS), row
        assert row.ours or row.remark.startswith((NOT_NEEDED, NOT_YET)), row


def test_the_page_is_made_from_the_table():
    assert PAGE.read_text() == keys_page.markdown(), (
        "edit jaxrl/config/other_frameworks.tsv, then run "
        "python -m scripts.pages.keys > docs/reference/keys.md"
    )


def test_every_name_has_an_answer():
    for row in table():
        for name in row.names:
            assert name.lstrip("-") in answer(name), name


@pytest.mark.parametrize(
    "name, message",
    [
        ("actor_rollout_ref.rollout.n", "verl's actor_rollout_ref.rollout.n is rollout.n here"),
        ("rollout.mode", "verl's actor_rollout_ref.rollout.mode is schedule.mode here"),
        ("num_generations", "TRL's num_generations is rollout.n here"),
        ("num-generations", "TRL's num_generations is rollout.n here"),
        ("actor_learning_rate", "OpenRLHF's --actor_learning_rate is learner.lr here"),
        ("actor.adam.lr", "OpenRLHF's --actor.adam.lr is learner.lr here"),
        ("packing_samples", "OpenRLHF's --packing_samples is not needed here: always on"),
        ("optim.lr", "optim.lr is learner.lr here"),
        ("ppo_mini_batch_size", "verl's actor_rollout_ref.actor.ppo_mini_batch_size is learner."),
        ("actor_rollout_ref.nothing", "actor_rollout_ref has other names here; docs/reference/ke"),
        ("max_num_seqs", "did you mean rollout.max_num_seqs or reward.judge.max_num_seqs?"),
        ("rollout.tenser", "did you mean rollout.tensor?"),
        ("learner.opt", "did you mean learner.optimizer?"),
        ("learner.learning_rate", "TRL's learning_rate is learner.lr here"),
        ("data.batch_size", "prime-rl's data.batch_size is data.prompts_per_step here"),
        ("rollout.num_generations", "TRL's num_generations is rollout.n here"),
        ("rollout.max_tokens", "max_tokens is data.max_response_len here"),
        ("temperature", "is rollout.sampling.temperature here"),
        ("kl_coef", "did you mean algorithm.kl_coef?"),
        ("epochs", "epochs is total_epochs here (passes over the data; learner.epochs are"),
        ("qwertyuiop", "--config.help lists the keys"),
    ],
)
def test_a_key_of_another_framework_is_answered_with_the_key_here(name, message):
    assert message in unknown_key(name, KEYS)


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--num_generations=8", "unknown argument --num_generations=8; TRL's num_generations is"),
        ("actor_rollout_ref.rollout.n=8", "verl's actor_rollout_ref.rollout.n is rollout.n here"),
        ("--config.rollout.mode=async", "there is no key rollout.mode; verl's actor_rollout_ref.r"),
        ("--config.lora_rank=8", "there is no key lora_rank; "),
        ("actor_rollout_ref.model.lora_rank=8", "lora_rank is lora.rank here"),
    ],
)
def test_an_argument_of_another_framework_ends_the_program_with_the_answer(argument, message):
    with pytest.raises(SystemExit) as stop:
        parse(["--config=configs/quickstart.py", argument])
    assert message in str(stop.value)
