"""Tests of jaxrl/environments/agents/harbor.py, harbor_root.py and jaxrl/data/sources/harbor.py.

The task folder has the form of harbor 0.26, and its commands run in real namespaces.
"""

import contextlib
import json

import pytest

from jaxrl.data.sources.harbor import harbor_rows, read_task
from jaxrl.data.sources.rows import number_rows
from jaxrl.environments.agents import harbor
from jaxrl.environments.agents.client import ModelClient
from jaxrl.environments.agents.harbor import HarborAgent, check_namespaces
from jaxrl.environments.agents.harbor_root import TIMED_OUT, TaskRoot

CONFIG = """
schema_version = "1.4"
[task]
name = "example/sum"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
env = { RIGHT = "7" }
[environment]
cpus = 1
allow_internet = false
"""
DOCKERFILE = """
# the numbers
FROM debian:stable-slim
WORKDIR /work
ENV UNIT=apples \\
    LIMIT=9
COPY numbers.txt /work/
"""
TEST = """#!/bin/bash
[ "$(cat sum.txt)" = "$RIGHT" ] && right=1 || right=0
echo "{\\"reward\\": $right, \\"files\\": $(ls | wc -l)}" > /logs/verifier/reward.json
"""


def has_namespaces():
    with contextlib.suppress(ValueError):
        check_namespaces()
        return True
    return False


needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="no namespaces of users here")


@pytest.fixture
def folder(tmp_path):
    """The folder of a task, in a folder of tasks."""
    task = tmp_path / "tasks" / "sum"
    for name, text in {
        "task.toml": CONFIG,
        "instruction.md": "Write the sum of numbers.txt to sum.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/numbers.txt": "3\n4\n",
        "tests/test.sh": TEST,
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return task


@pytest.fixture
def root(folder, tmp_path):
    (tmp_path / "episode").mkdir()
    return TaskRoot(read_task(folder), tmp_path / "episode")


def test_a_folder_of_tasks_is_a_data_source(folder):
    [row] = number_rows([f"harbor:{folder.parent}?image=host"], ())
    assert row.columns == {
        "prompt": "Write the sum of numbers.txt to sum.txt.",
        "answer": "",
        "data_source": "harbor/sum",
        "extra_info": {"harbor": str(folder)},
    }
    assert harbor_rows(f"harbor:{folder}?image=host") == [row.columns]
    with pytest.raises(ValueError, match=r"write 'harbor:.*\?image=host' to accept"):
        harbor_rows(f"harbor:{folder.parent}")
    with pytest.raises(ValueError, match="has no task"):
        harbor_rows(f"harbor:{folder / 'tests'}?image=host")


@needs_namespaces
def test_commands_run_in_the_folders_of_the_task_alone(root, folder):
    assert root.run("pwd; cat numbers.txt; echo $UNIT $LIMIT $RIGHT", 30.0) == (
        0,
        "/work\n3\n4\napples 9\n",
    )
    status, output = root.run(f"ls {folder}; ls /home; echo x > /usr/x; ls /tests; exit 3", 30.0)
    assert status == 3 and output.count("No such file") == 3 and "Read-only" in output
    assert root.run("cat < /dev/tcp/127.0.0.1/1", 30.0)[1].count("unreachable") == 2
    assert root.run("sleep 100 & sleep 100", 0.5)[0] == TIMED_OUT


@needs_namespaces
def test_the_verifier_scores_what_the_commands_left(root, tmp_path):
    assert root.verify() == {"reward": 0, "files": 1}
    root.run("echo $((3 + 4)) > sum.txt", 30.0)
    assert root.verify() == {"reward": 1, "files": 2}
    # links to files of this machine in the place of the tests and rewards are not followed
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    root.run(f"rm -r /tests /logs sum.txt; ln -s {outside} /tests; ln -s {outside} /logs", 30.0)
    assert root.verify()["reward"] == 0 and [p.name for p in outside.iterdir()] == ["kept"]


@needs_namespaces
def test_rewards_are_read_as_harbor_does(root, folder):
    script, rewards = folder / "tests" / "test.sh", "/logs/verifier/reward.txt"
    root.run("mkdir -p /logs/agent /logs/verifier; echo 5 > /logs/agent/note", 30.0)
    root.run("echo 9 > /logs/verifier/reward.json", 30.0)
    script.write_text(f"#!/bin/bash -e\ncp /logs/agent/note {rewards}\nfalse\nrm {rewards}")
    assert root.verify() == {"reward": 5}  # -e ends the script, and the first reward is stale
    script.write_text(f"echo .5 > {rewards}")
    assert root.verify() == {"reward": 0.5}
    script.write_text("""echo '{"reward": true, "n": 2}' > /logs/verifier/reward.json""")
    assert root.verify() == {"reward": 1, "n": 2}


@needs_namespaces
@pytest.mark.parametrize("text", ["", "good", "[1]", '{"reward": "1"}', '{"reward": true}', "NaN"])
def test_a_verifier_without_numbers_is_an_error(root, folder, text):
    (folder / "tests" / "test.sh").write_text(f"echo -n '{text}' > /logs/verifier/reward.txt")
    with pytest.raises(RuntimeError, match=r"wrote no valid reward\.json or reward\.txt"):
        root.verify()


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("cpus = 1", "gpus = 1", r"\[environment\] has gpus=1, which needs a container"),
        ("cpus = 1", "turbo = 1", r"has turbo=1, which is not supported here"),
        ("cpus = 1", "env = {A = '${KEY}'}", r"environment\.env\.A=.* is no plain text"),
        ("timeout_sec = 60.0", "environment_mode = 'separate'", "environment_mode='separate'"),
        ("[agent]", "[[steps]]\nname = 'one'\n[agent]", "has steps="),
        ("[agent]", "[agent]\nuser = 'me'", r"\[agent\] has user='me'"),
        ("cpus = 1", "cpus = ", r"task\.toml: "),
        ("COPY", "RUN make\nCOPY", "has RUN make, and no image is built here"),
        ("COPY", "COPY --from=x", "has COPY --from=x"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(folder, old, new, words):
    for path in (folder / "task.toml", folder / "environment" / "Dockerfile"):
        path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=words):
        read_task(folder)


class Model(ModelClient):
    """A model with these turns, each a list of calls; None: the context is full."""

    def __init__(self, turns):
        self.turns, self.bodies = list(turns), []

    def turn(self, dialect, body):
        assert dialect == "chat/completions"
        self.bodies.append(json.loads(json.dumps(body)))
        calls = self.turns.pop(0)
        if calls is None:
            return None
        named = [{"name": n, "arguments": a} for n, a in calls]
        tool_calls = [{"id": f"c{i}", "function": call} for i, call in enumerate(named)]
        message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}


def play(monkeypatch, folder, turns):
    model = Model(turns)
    monkeypatch.setattr(harbor, "ModelClient", lambda base_url, api_key: model)
    task = {"messages": [{"role": "user", "content": "?"}], "extra": {"harbor": str(folder)}}
    return HarborAgent(output_chars=10)("url", "key", task), model.bodies[-1]["messages"]


@needs_namespaces
def test_an_episode_calls_the_shell_and_is_verified(root, folder, monkeypatch):
    write = json.dumps({"command": "echo 7 > sum.txt; seq 1 99"})
    calls = [("bash", write), ("bash", '{"command": 1}'), ("bash", "{"), ("python", "{}")]
    numbers, messages = play(monkeypatch, folder, [calls, []])
    assert numbers == {"reward": 1, "files": 2, "calls": 4}
    results = [message["content"] for message in messages[2:]]
    assert results[0] == "1\n2\n3\n[...]\n8\n99\n"
    assert results[1].startswith("error: call bash") and results[2].startswith("error:")
    assert play(monkeypatch, folder, [calls[:1], None])[0]["reward"] == 1
    with pytest.raises(ValueError, match=r"needs rows of data\.train='harbor:FOLDER'"):
        HarborAgent()("url", "key", {"messages": [], "extra": {}})
