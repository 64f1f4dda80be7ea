"""Tests of jaxrl/config/command_line.py and jaxrl/config/help.py."""

import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from jaxrl.config import RunConfig, default_config, resolve
from jaxrl.config.command_line import config_of, override, parse, read_args
from jaxrl.config.saved import to_json
from jaxrl.config.schema import keys

KEYS = keys(RunConfig)
ROOT = pathlib.Path(__file__).parents[2]


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
        (["--config.data.template_kwargs.a=false"], "data.template_kwargs", {"a": False}),
        (["--config.data.template_kwargs.a", "two"], "data.template_kwargs", {"a": "two"}),
        (
            ["--config.data.template_kwargs.b=7", "--config.data.template_kwargs={'a': 1}"],
            "data.template_kwargs",
            {"a": 1},
        ),
    ],
    ids=str,
)
def test_an_override_has_the_type_of_its_key(config_file, words, key, value):
    found = parsed(config_file(), *words)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_the_command_line_accepts_the_default_of_every_key():
    config = default_config()
    for name, spec in KEYS.items():
        override(config, name, repr(spec.default) if spec.type is not str else spec.default)
    assert config == default_config()


@pytest.mark.parametrize(
    "override_, message",
    [
        ("--config.rollout.max_num_seq=3", "did you mean rollout.max_num_seqs?"),
        (
            "--config.max_num_seqs=3",
            "did you mean rollout.max_num_seqs or reward.judge.max_num_seqs?",
        ),
        ("--config.learner.n=3", "did you mean rollout.n or eval.n?"),
        ("--config.qwertyuiop=3", "no key qwertyuiop; --config.help lists the keys"),
        ("--config.rollout=3", "rollout is a section; set one of its keys"),
        ("--config.rollout.n=many", "rollout.n='many' is of type str; set an int"),
        ("--config.rollout.n=1.5", "rollout.n=1.5 is of type float; set an int"),
        (f"--config.learner.lr={'9' * 400}", "99 is too large for a float"),
        ("--config.learner.lr=fast", "learner.lr='fast' is of type str; set a float"),
        ("--config.resume=maybe", "resume='maybe' is of type str; set a bool"),
        ("--config.learner.buckets=a,b", "learner.buckets=('a', 'b')"),
        ("--config.data.template_kwargs=3", "data.template_kwargs=3 is of type int; set a mapping"),
        ("--config.data.template_kwargs.a.b=3", "no key data.template_kwargs.a.b"),
        ("--config.data.template_kwargs.a", "set --config.data.template_kwargs.a=False"),
        ("--config.data.today=tomorrow", "data.today='tomorrow' is not a date; write YYYY-MM-DD"),
        ("--config.rollout.n", "--config.rollout.n has no value"),
        ("--config.rollout.n=1", "set rollout.n to 2 or more"),
        ("--rollout.n=4", "unknown argument --rollout.n=4; did you mean --config.rollout.n?"),
    ],
)
def test_a_wrong_override_stops_with_a_suggestion(config_file, override_, message):
    assert message in stopped(config_file(), override_)


def test_two_config_files_and_a_missing_one_stop(config_file, monkeypatch, tmp_path):
    path = config_file()
    assert f"--config is given twice, the first time as {path}" in stopped(path, f"--config={path}")
    monkeypatch.chdir(tmp_path)
    assert "no config file my_rnu.py; configs/ has" in stopped("my_rnu.py")


def test_an_unknown_key_in_a_config_file_gets_a_suggestion(config_file):
    message = stopped(config_file("config.rollout.max_num_seq = 3"))
    assert "mine.py, line 7" in message
    assert "did you mean rollout.max_num_seqs?" in message


def test_all_errors_of_a_config_file_and_of_the_arguments_are_reported_at_once(config_file):
    path = config_file(
        "config.learner.learning_rate = 1e-5",
        "config.data.val = 'val.jsonl'",
        "config.rollout.n = 8",
        "config.trainer.logger = 'wandb'",  # no such section
    )
    arguments = ("--config.qwerty", "3", "--config.learner.lr=fast", "--azerty=1", "--config.foo=2")
    message = stopped(path, *arguments)
    assert message.count("\n  - ") == 5 and "mine.py has 3 wrong lines" in message
    for line in (
        "line 7: there is no key learner.learning_rate; TRL's learning_rate is learner.lr here",
        "line 8: data.val='val.jsonl' is of type str; set a tuple of str such as ('val.jsonl',)",
        "line 10: there is no key trainer.logger; verl's trainer.logger is log.loggers here",
        "there is no key qwerty;",
        "learner.lr='fast' is of type str",
        "there is no key foo;",
        "unknown argument --azerty=1;",
    ):
        assert line in message
    assert "argument 3" not in message


def test_wrong_keys_of_a_section_with_a_name_of_its_own_are_among_all_errors(config_file):
    message = stopped(
        config_file(
            "c = config.learner",
            "c.larning_rate = 1",
            "c.lr = 'fast'",
            "data = config.data",
            "data.trian = ('a.jsonl',)",
            "c = config.rollout",
            "c.n, other = 8, 'c.lr'",
            "c.samplng.top_p = 0.5",
            "config.qwerty = 1",
            "c = 3",
        )
    )
    assert "mine.py has 5 wrong lines" in message
    for line in (
        "line 8: there is no key learner.larning_rate;",
        "line 9: learner.lr='fast' is of type str",
        "line 11: there is no key data.trian;",
        "line 14: there is no key rollout.samplng.top_p;",
        "line 15: there is no key qwerty;",
    ):
        assert line in message


def test_a_text_of_a_variable_in_place_of_a_tuple_is_explained(config_file):
    message = stopped(config_file("file = 'a.jsonl'", "config.data.train = file"))
    assert "line 8: a value of another type for data.train; set a tuple of str such as" in message


def test_a_wrong_type_in_a_config_file_stops_with_its_line(config_file):
    message = stopped(config_file("config.rollout.n = 'many'"))
    assert "mine.py, line 7: rollout.n='many' is of type str; set an int" in message


def test_text_after_a_colon_is_the_argument_of_get_config(config_file):
    path = config_file("config.name = argument")
    assert parsed(f"{path}:second").name == "second"


def test_a_config_file_sets_names_in_a_mapping(config_file):
    line = "config.data.template_kwargs.enable_thinking = False"
    assert parsed(config_file(line)).data.template_kwargs == {"enable_thinking": False}
    override_ = "--config.data.template_kwargs.enable_thinking=low"  # of another type
    found = parsed(config_file(line), override_)
    assert found.data.template_kwargs == {"enable_thinking": "low"}


def test_shipped_configs_load_next_to_a_package_of_the_user_with_their_name(tmp_path):
    """A run starts in the user's folder, which Python searches first."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()
    code = (
        "from jaxrl.config.config_file import load_config, shipped_file\n"
        "for path in shipped_file('configs').glob('*.py'): load_config(f'configs/{path.name}')\n"
        "print(load_config('configs/quickstart_lora.py').lora.rank)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "16\n", done.stderr


CONFIG = "--config=configs/quickstart.py"
PROGRAMS = {
    "train": [CONFIG],
    "sft": [CONFIG],
    "dpo": [CONFIG],
    "reward_model": [CONFIG],
    "evaluate": ["--model=somewhere"],
    "serve": ["--model=somewhere"],
    "plan": [CONFIG, "--topology=cpu:8"],
    "report": ["somewhere"],
    "launch": [CONFIG, "--num-hosts=2"],
    "convert": ["somewhere", "elsewhere"],
}


@pytest.mark.parametrize(
    "argument", ["--config.rollout.nn=3", "--nn=3", "--help", "--schedule=later"]
)
def test_the_command_line_of_every_program_is_answered_before_jax_is_imported(argument):
    code = (
        "import contextlib, runpy, sys\n"
        f"for program, arguments in {PROGRAMS}.items():\n"
        f"    sys.argv = [program, *arguments, {argument!r}]\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        runpy.run_module(f'jaxrl.{program}', run_name='__main__')\n"
        "    assert not {'jax', 'numpy', 'transformers'} & sys.modules.keys(), program\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["sharding.py", "sharding/__init__.py"])
def test_a_module_of_the_user_that_hides_ours_is_named(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    hidden = tmp_path / name.removesuffix("/__init__.py")
    command = [sys.executable, "-m", "jaxrl.convert", "somewhere", "elsewhere"]
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {hidden} hides jaxrl's package sharding")
    assert "Traceback" not in done.stderr


def test_the_help_of_the_planner_has_its_options_and_no_keys():
    command = [sys.executable, "-m", "jaxrl.plan", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "--topology=NAME" in done.stdout
    assert "algorithm.advantage" not in done.stdout


def test_help_ends_quietly_if_its_reader_has_ended():
    command = [sys.executable, "-m", "jaxrl.train", "--config.help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_a_missing_config_file_is_one_message():
    assert "no config file configs/nowhere.py" in stopped("configs/nowhere.py")
    with pytest.raises(SystemExit, match="no config file is given"):
        parse([])


def test_a_file_without_get_config_stops_with_a_remedy(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "define one that returns" in stopped(str(tmp_path / "empty.py"))


def test_get_config_must_return_a_config(tmp_path):
    (tmp_path / "none.py").write_text("def get_config():\n    pass\n")
    assert "returned a NoneType" in stopped(str(tmp_path / "none.py"))


def test_additional_arguments_of_an_entry_point_are_returned(config_file):
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


def test_every_key_has_a_help_text():
    assert all(spec.doc for spec in KEYS.values())


def test_a_call_takes_values_or_texts_for_keys_and_leaves_the_config_as_it_is(config_file):
    given = default_config()
    config = config_of(given, {"rollout.n": 16, "learner.lr": "1e-5", "data.train": ["a", "b"]})
    assert (config.rollout.n, config.learner.lr, config.data.train) == (16, 1e-5, ("a", "b"))
    assert given == default_config()
    config = config_of(given, {"data.template_kwargs": {"enable_thinking": False}})
    assert config.data.template_kwargs.to_dict() == {"enable_thinking": False}
    with pytest.raises(
        ValueError, match=r"(?s)rollout\.n=1\.5 is of type float.*no key rollout\.m"
    ):
        config_of(config_file(), {"rollout.n": 1.5, "rollout.m": 2})
    with pytest.raises(ValueError, match="the config is a dict; give the path of a config file"):
        config_of({"total_steps": 1}, {})


def test_a_config_is_named_by_its_file_its_name_or_the_config_of_a_run(config_file, tmp_path):
    assert config_of("quickstart", {}).name == "quickstart"
    assert config_of(pathlib.Path(config_file("config.name = argument")), {}).name == ""
    run = resolve(config_of("quickstart", {"total_steps": 5}))
    assert resolve(config_of(run, {})) == run
    saved = tmp_path / "config.json"
    saved.write_text(to_json(run))
    assert resolve(config_of(saved, {})) == run == parse([f"--config={saved}"])
    saved.write_text("[]")
    with pytest.raises(ValueError, match="is not an object"):
        config_of(saved, {})
