"""Tests of jaxrl/environments/verifiers.py and jaxrl/data/sources/verifiers_tasks.py.

The module here has the interface of verifiers.v1 in 0.4.0, as far as it is used.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import types
from typing import Any

import pytest

from jaxrl.config.keys import EnvConfig
from jaxrl.data.sources.rows import number_rows
from jaxrl.environments.agent import agent_turn
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.environments.verifiers import VerifiersAgent


@dataclasses.dataclass
class AgentConfig:
    harness: dict[str, Any] | None = None
    runtime: dict[str, Any] | None = None


@dataclasses.dataclass
class Config:
    """Iterates over (name, value) as a pydantic model does."""

    taskset: dict[str, Any]
    player: AgentConfig

    def __iter__(self):
        return iter(vars(self).items())


def resolve_env_config(raw):
    if raw["taskset"]["id"] == "missing":
        raise ModuleNotFoundError("taskset 'missing' not found")
    config = Config(raw["taskset"], AgentConfig(**raw.get("player", {})))
    if raw["taskset"]["id"] == "pair":
        config.referee = AgentConfig()  # type: ignore[attr-defined]
    return config


@dataclasses.dataclass
class Task:
    place: int

    @property
    def data(self):
        text = f"What is {self.place} + 1?"
        return types.SimpleNamespace(idx=self.place, prompt_text=text, answer=str(self.place + 1))

    @property
    def hash(self):
        return f"hash {self.place}"


class Taskset:
    def __init__(self, config):
        self.bounded = not config["endless"]

    def __iter__(self):
        return map(Task, range(5) if self.bounded else itertools.count())


class Environment:
    """Episodes whose reward is the place of the task; that of task 4 fails."""

    def __init__(self, config):
        self.config, self.live = config, False
        self.taskset = Taskset({"endless": False} | config.taskset)

    @contextlib.asynccontextmanager
    async def serving(self):
        self.live = True
        yield
        self.live = False

    def slots(self, task):
        return [task]

    async def run_slot(self, task, context):
        assert self.live and context.model == "policy"
        assert context.client == ("http://x/v1", "OPENAI_API_KEY")
        error = types.SimpleNamespace(type="HarnessError", message="it fell\n  at once\nOSError\n")
        failed = task.place == 4
        metrics = {"turns": 2.0, "unknown": None, "infinite": float("inf"), "reward": 9.0}
        trace = types.SimpleNamespace(
            reward=float(task.place), metrics=metrics, errors=[error] if failed else []
        )
        return types.SimpleNamespace(ok=not failed, errors=[], traces=[trace])


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("verifiers.v1")
    module.__dict__.update(
        AgentConfig=AgentConfig,
        resolve_env_config=resolve_env_config,
        load_environment=Environment,
        ModelContext=types.SimpleNamespace,
        EvalClientConfig=lambda *, base_url, api_key_var: (base_url, api_key_var),
    )
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", module)


def play(agent, row):
    task = {"messages": [], "answer": "", "extra": row["extra_info"], "seed": 1}
    return asyncio.run(agent("http://x/v1", "key", task))


def rows_of(source):
    return [row.columns for row in number_rows([source], ())]


def test_an_episode_plays_the_task_of_its_row(package):
    rows = rows_of("verifiers:sums?limit=3")
    assert [row["prompt"] for row in rows] == [f"What is {i} + 1?" for i in range(3)]
    assert rows[2]["answer"] == "3" and rows[2]["data_source"] == "verifiers/sums"
    result = play(VerifiersAgent("sums"), rows[2])
    assert result == {"reward": 2.0, "turns": 2.0}
    assert agent_turn(result).reward == 2.0


def test_options_choose_the_harness_and_the_taskset(package):
    agent = VerifiersAgent("sums?harness=bash&runtime=docker&digits=3")
    assert agent._env.config.player == AgentConfig({"id": "bash"}, {"type": "docker"})
    assert agent._env.config.taskset == {"id": "sums", "digits": 3}
    default = VerifiersAgent("sums")._env.config.player
    assert default == AgentConfig({"id": "null"}, {"type": "subprocess"})


def test_tasks_of_an_endless_taskset_are_read_up_to_the_limit(package):
    source = "sums?endless=true&limit=7"
    rows = rows_of(f"verifiers:{source}")
    assert len(rows) == 7
    assert play(VerifiersAgent("sums?endless=true"), rows[6])["reward"] == 6.0


def test_an_episode_that_fails_has_the_reason(package):
    [row] = [row for row in rows_of("verifiers:sums") if row["answer"] == "5"]
    with pytest.raises(RuntimeError, match=r"^verifiers: HarnessError: it fell \.\.\. OSError$"):
        play(VerifiersAgent("sums"), row)


@pytest.mark.parametrize(
    "extra",
    [{}, {"verifiers": {"place": 1, "hash": "x"}}, {"verifiers": {"place": 99, "hash": ""}}],
)
def test_a_row_of_another_taskset_is_an_error(package, extra):
    with pytest.raises(ValueError, match=r"set data\.train and data.val to 'verifiers:ID'"):
        play(VerifiersAgent("sums"), {"extra_info": extra})


@pytest.mark.parametrize(
    "spec, words",
    [
        ("missing", "taskset 'missing' not found.*install the package"),
        ("pair", r"has 2 agents \(player, referee\), and the policy plays one"),
    ],
)
def test_a_taskset_that_cannot_be_played_is_refused(package, spec, words):
    for call in (VerifiersAgent, lambda spec: rows_of(f"verifiers:{spec}")):
        with pytest.raises(ValueError, match=words):
            call(spec)


def test_a_limit_is_a_number(package):
    with pytest.raises(ValueError, match="write limit=500"):
        rows_of("verifiers:sums?limit=few")


def test_a_missing_package_is_named_before_the_first_episode():
    with pytest.raises(
        ImportError, match=r"needs verifiers 0\.4 or later.*uv pip install verifiers"
    ):
        rows_of("verifiers:sums")
    with pytest.raises(
        ValueError, match=r"needs verifiers 0\.4 or later.*uv pip install verifiers"
    ):
        EnvironmentPool(EnvConfig(verifiers="sums", workers=1))
