"""Tests of the table of other frameworks against the keys that their packages define: keys/."""

import ast
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.config.other_frameworks import counterpart, table
from jaxrl.config.schema import keys, unknown_key
from jaxrl.migrate import openrlhf, trl, verl
from jaxrl.migrate.migration import REFUSED, Migration
from jaxrl.migrate.settings import Settings, typed

FOLDER = Path(__file__).parent / "keys"
PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "migrating.md"
FRAMEWORKS = {
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "trl": "TRL",
    "prime_rl": "prime-rl",
    "tunix": "Tunix",
}
KEYS = keys(RunConfig)
# Names, places, layout and memory; none of them changes a number.
WITHOUT_NUMBERS = re.compile(
    r"name|run_dir|log\..*|data\.val|rollout\.(tensor|max_num_seqs|release_kv)"
    r"|critic\.(path|token_budget|mesh\..*)"
)


class Line(NamedTuple):
    name: str
    default: str  # Python source; "" if the package has none
    programs: tuple[str, ...]


@functools.cache
def lines(file: str) -> tuple[Line, ...]:
    rows = (line.split("\t") for line in (FOLDER / f"{file}.tsv").read_text().splitlines()[1:])
    return tuple(Line(name, default, tuple(programs.split())) for name, default, programs in rows)


@pytest.mark.parametrize("file", FRAMEWORKS)
def test_every_key_of_a_package_has_a_row(file):
    names = dict.fromkeys(line.name for line in lines(file))
    assert len(names) > 100
    assert [name for name in names if counterpart(FRAMEWORKS[file], name) is None] == []


def test_no_pattern_answers_a_mistyped_key():
    frameworks = dict.fromkeys(FRAMEWORKS.values())
    for name in KEYS:
        rows = [counterpart(framework, name + "x") for framework in frameworks]
        assert rows == [None] * len(rows), name


GUIDES = (  # keys that guides of verl, OpenRLHF and DAPO name for speed and memory
    "actor_rollout_ref.model.use_shm",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "critic.forward_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.disable_log_stats",
    "actor_rollout_ref.rollout.max_model_len",
    "algo.advantage.is_correction_enable",
    "train.async_queue_size",
    "train.colocate_actor_ref",
    "train.colocate_critic_reward",
    "ds.deepcompile",
    "train_prompt_bsz",
)


@pytest.mark.parametrize("name", GUIDES)
def test_a_key_of_the_tuning_guides_is_answered_by_its_name_and_by_its_last_part(name):
    for given in (name, name.rsplit(".", 1)[-1]):
        message = unknown_key(given, KEYS)
        assert " here" in message and "--config.help" not in message, message
        assert "did you mean" not in message


def test_the_page_names_only_what_the_packages_have():
    page = PAGE.read_text()
    known = {line.name for line in lines("openrlhf")}
    flags = set(re.findall(r"`--((?!config)[a-z][\w.]*)`", page))
    assert len(flags) > 15 and flags <= known
    known = {line.name for line in lines("trl")}
    section = page.partition("## A GRPO config of TRL")[2].partition("## ")[0]
    assert set(re.findall(r"`([a-z]\w*)=", section)) <= known
    known = {line.name for line in lines("verl")}
    script = re.search(r"```text\npython3 -m verl.*?```", page, re.DOTALL)
    assert script and set(re.findall(r"([a-z][\w.]+)=", script[0])) <= known


@functools.cache
def defaults(file: str, *programs: str) -> dict[str, Any]:
    """The defaults of a program, as a config of it would write them."""
    found: dict[str, Any] = {}
    for program in programs:
        given: dict[str, Any] = {}
        for line in lines(file):
            if program in line.programs:
                try:
                    value = ast.literal_eval(line.default)
                except (ValueError, SyntaxError):
                    continue  # an expression, or none
                given.setdefault(line.name, typed(value))
        found |= given
    return {
        k: v for k, v in found.items() if not (isinstance(v, str) and ("${" in v or v == "???"))
    }


def settings(values: dict[str, Any]) -> Settings:
    found = Settings()
    for name, value in values.items():
        found.put(name, value)
    return found


MODEL = {"actor_rollout_ref.model.path": "m", "data.train_files": "t.parquet"}
TEXT_ONLY = {"data.image_key": "", "data.video_key": "", "data.audio_key": ""}
ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
VERL = {
    "ppo": ((), "verl.trainer.main_ppo", {}),
    "ppo_megatron": ((), "verl.trainer.main_ppo", {}),
    "ppo_veomni": ((), "verl.trainer.main_ppo", {"model_engine": "veomni"}),
    "ppo_torchtitan": ((), "verl.trainer.main_ppo", {"model_engine": "torchtitan"}),
    "fully_async": (("ppo",), ASYNC, {"actor_rollout_ref.rollout.n": 8}),
}


@pytest.mark.parametrize(
    ("program", "estimator"), [("ppo", "gae"), *((program, "grpo") for program in VERL)]
)
def test_defaults_of_verl_that_are_not_given_are_those_of_the_package(program, estimator):
    bases, module, further = VERL[program]
    needed = MODEL | further | {"algorithm.adv_estimator": estimator}
    given = defaults("verl", *bases, program) | TEXT_ONLY | needed
    agree(*(verl.translate(settings(s), module, {}) for s in (needed, given)))


def test_defaults_of_verls_supervised_fine_tuning_are_those_of_the_package():
    needed = {"model.path": "m", "data.train_files": "t.parquet"}
    both = (needed, defaults("verl", "sft") | needed)
    agree(*(verl.translate(settings(s), "verl.trainer.sft_trainer", {}) for s in both))


@pytest.mark.parametrize("program", ["ppo", "sft", "dpo", "rm"])
def test_defaults_of_openrlhf_are_those_of_the_package(program):
    model = "actor" if program == "ppo" else "model"
    data = "data.prompt_dataset" if program == "ppo" else "data.dataset"
    needed = {f"{model}.model_name_or_path": "m", data: "d", "reward.remote_url": "http://x"}
    name = "train_ppo_ray" if program == "ppo" else f"train_{program}"
    found = []
    for given in (needed, defaults("openrlhf", program) | needed):
        words = ["python", "-m", f"openrlhf.cli.{name}"]
        command, module = openrlhf.command(words)
        names = {k: openrlhf.OFFLINE.get(k, k) if program != "ppo" else k for k in given}
        for theirs, value in given.items():
            command.put(names[theirs], value)
        found.append(openrlhf.translate(command, module, {}))
    agree(*found)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "sft", "dpo", "kto", "reward"])
def test_defaults_of_trl_are_those_of_the_package(kind):
    needed = {"model_name_or_path": "m", "dataset_name": "d", "num_processes": 8}
    needed |= {"reward_funcs": "f"} if kind in ("grpo", "rloo") else {}
    given = {k: v for k, v in defaults("trl", "all", kind).items() if v is not None} | needed
    agree(*(trl.translate(settings(s), kind, {}) for s in (needed, given)))


def agree(absent: Migration, given: Migration) -> None:
    """Both configs mean the same, and every default that is given has a reason or is read."""
    for name, spec in KEYS.items():
        if not WITHOUT_NUMBERS.fullmatch(name):
            values = [plain(found.config.get(name, spec.default)) for found in (absent, given)]
            assert values[0] == values[1], name
    refusals = [{n.setting for n in found.notes if n.kind == REFUSED} for found in (absent, given)]
    assert refusals[1] <= refusals[0]
    assert [n.setting for n in given.notes if n.reason == "jaxrl has no key for it"] == []


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def test_the_table_has_every_framework_of_the_lists():
    frameworks = {row.framework.partition(",")[0] for row in table()}
    assert frameworks == {*FRAMEWORKS.values(), "other names"}
