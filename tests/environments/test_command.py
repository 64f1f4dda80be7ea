"""Tests of jaxrl/environments/command.py and jaxrl/config/agent_command.py."""

import json
import pathlib
import sys
import time

import pytest

from jaxrl.config.agent_command import command_words
from jaxrl.config.keys import EnvConfig
from jaxrl.environments.command import CommandAgent
from jaxrl.environments.pool import EnvironmentPool

TASK = {
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + $HOME; 'x'"}],
    "answer": "7",
    "seed": 5,
}
SCRIPT = """\
import json, os, pathlib, sys
words = sys.argv[1:]
task = json.load(open(words[3]))
assert os.environ["JAXRL_TASK"] == words[3] and os.listdir(words[5]) == []
pathlib.Path(words[5], "note").write_text("x")
print("at work")
print(json.dumps({"reward": 0.5, "right": task["answer"] == "7", "words": len(words)}))
print(json.dumps(words), file=open(sys.argv[0] + ".words", "w"))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(SCRIPT)
    return path


def run(command, task=TASK):
    return CommandAgent(f"{sys.executable} {command}")("http://127.0.0.1:1/v1", "key", task)


def test_placeholders_are_replaced_in_the_words_and_the_last_line_is_the_result(script):
    command = f"{script} --url={{base_url}} {{api_key}} '{{prompt}}' {{task}} {{seed}} {{folder}}"
    assert run(command + " '{\"a\": {}}'") == {"reward": 0.5, "right": True, "words": 7}
    url, key, prompt, task, seed, folder, rest = json.loads(
        script.with_name("agent.py.words").read_text()
    )
    assert (url, key, seed) == ("--url=http://127.0.0.1:1/v1", "key", "5")
    assert prompt == TASK["messages"][-1]["content"]  # one word, without a shell
    assert rest == '{"a": {}}'  # braces that are no placeholder
    assert task.endswith("task.json") and folder != task


def test_a_placeholder_in_a_prompt_is_text(script):
    messages = [{"role": "user", "content": [{"type": "text", "text": "{api_key}"}]}]
    run(f"{script} a b {{prompt}} {{task}} c {{folder}}", TASK | {"messages": messages})
    assert json.loads(script.with_name("agent.py.words").read_text())[2] == "{api_key}"


def test_the_files_of_an_episode_are_deleted(script):
    agent = CommandAgent(f"{sys.executable} {script} a b c {{task}} d {{folder}}")
    agent("url", "key", TASK)
    words = json.loads(script.with_name("agent.py.words").read_text())
    assert not pathlib.Path(words[3]).exists() and not pathlib.Path(words[5]).exists()


@pytest.mark.parametrize(
    "line",
    ["", "answer: 7", "7", '{"answer": 7}', '{"reward": 1', '["reward"]'],
)
def test_other_output_is_no_reward(tmp_path, line):
    path = tmp_path / "agent.py"
    path.write_text(f"print({line!r})")
    assert run(path) is None


def test_a_failed_program_shows_the_end_of_its_output(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text("print('x' * 100_000)\nraise SystemExit('no connection')")
    with pytest.raises(RuntimeError, match=r"exit status 1: x{100,}\nno connection$") as caught:
        run(path)
    assert len(str(caught.value)) < 2100
    path.write_text("import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match="signal 9"):
        run(path)


@pytest.mark.parametrize(
    "command, message",
    [
        ("agent 'x", "open quote"),
        ("  ", "has no word"),
        ("agent {url}", r"{url}, which is not known; use {base_url}, {api_key}"),
    ],
)
def test_a_command_that_cannot_be_run(command, message):
    with pytest.raises(ValueError, match=message):
        command_words(command)


def test_a_command_has_the_import_path_of_the_user(tmp_path, monkeypatch):
    path = tmp_path / "agent.py"
    path.write_text(
        "import json, os\nnames = os.environ\n"
        "print(json.dumps({'reward': 1, 'path': int(names.get('PYTHONPATH') == 'of the user')}))"
    )
    monkeypatch.setenv("PYTHONPATH", "of the user")
    monkeypatch.syspath_prepend(str(tmp_path))  # a path of the run alone
    with EnvironmentPool(EnvConfig(command=f"{sys.executable} {path}", workers=1)) as pool:
        pool.start(TASK | {"base_url": "http://127.0.0.1:1/v1", "api_key": "key"})
        deadline, found = time.monotonic() + 60, []
        while not found and time.monotonic() < deadline:
            found = pool.collect(0.1)
    [(_, turn)] = found
    assert turn.counts == {"path": 1} and not turn.error


def test_a_missing_program_is_named():
    with pytest.raises(ValueError, match="there is no program 'no-such-agent' on this machine"):
        CommandAgent("no-such-agent --url={base_url}")
