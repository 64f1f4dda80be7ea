"""Episodes in processes of their own, and the environments that come along."""

import textwrap
import time
from pathlib import Path

import pytest

from jaxrl.config.keys import EnvConfig
from jaxrl.environments.api import Turn
from jaxrl.environments.calculator import Calculator, evaluate
from jaxrl.environments.guess_number import GuessNumber
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.environments.retry import Retry

HAZARDS = """
import os
import subprocess
import sys
import time


class Obey:
    def __init__(self, *, first="hello"):
        self.first, self.n = first, 0

    def reset(self, prompt):
        if prompt["answer"] == "raise":
            raise KeyError("x")
        if prompt["answer"] == "hang":
            time.sleep(1000)
        return {"own": None, "text": "go", "wrong": 5}.get(
            prompt["answer"], [{"role": "system", "content": self.first}]
        )

    def step(self, said):
        self.n += 1
        if said == "raise":
            raise RuntimeError("out of cheese")
        if said == "exit":
            os._exit(3)
        if said == "sys.exit":
            sys.exit("bye")
        if said == "hang in C":
            9 ** 9 ** 9
        if said == "spawn":
            child = subprocess.Popen(["sleep", "1000"])
            return f"{os.getpid()} {child.pid}", 0.0, False
        if said == "jax":
            return str("jax" in sys.modules), 0.0, False
        return {
            "nan": ("x", float("nan"), False),
            "reward": ("x", "good", False),
            "done": ("x", 1.0, 1),
            "observation": (5, 1.0, False),
            "counts": ("x", 1.0, False, {"calls": float("inf")}),
            "two": ("x", 1.0),
        }.get(said, (f"{said} {self.n}", 0.5, said == "end", {"calls": 1}))
"""
WRONG = {
    "raise": "RuntimeError: out of cheese",
    "exit": "process died",
    "sys.exit": "SystemExit: bye",
    "hang in C": "no answer within 1 s",
    "nan": "reward nan",
    "reward": "reward 'good'",
    "done": "done=1",
    "observation": "TypeError: step returned 5",
    "counts": "counts {'calls': inf}",
    "two": "return (observation, reward, done)",
}


@pytest.fixture(scope="module")
def hazards(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "hazards.py"
    path.write_text(HAZARDS)
    return str(path)


@pytest.fixture
def pool(hazards):
    with EnvironmentPool(
        EnvConfig(name=f"{hazards}:Obey?first=yo", timeout_s=1.0, workers=16)
    ) as pool:
        yield pool


def prompt(answer=""):
    return {"messages": [], "answer": answer, "source": "s", "extra": {}, "seed": 7}


def answers(pool, n):
    """{episode: Turn} of the next `n` answers."""
    found, deadline = {}, time.monotonic() + 20
    while len(found) < n and time.monotonic() < deadline:
        found |= dict(pool.collect(0.1))
    assert len(found) == n
    return found


def opened(pool, n):
    episodes = [pool.start(prompt()) for _ in range(n)]
    first = answers(pool, n)
    assert all(turn == Turn([{"role": "system", "content": "yo"}]) for turn in first.values())
    return episodes


def test_episodes_keep_their_own_state(pool):
    a, b = opened(pool, 2)
    for said, turns in (("go", 1), ("on", 2)):
        pool.step(a, said)
        assert answers(pool, 1)[a] == Turn(
            [{"role": "user", "content": f"{said} {turns}"}], 0.5, False, {"calls": 1.0}
        )
    pool.step(b, "end")
    assert answers(pool, 1)[b] == Turn([], 0.5, True, {"calls": 1.0})


def test_whatever_goes_wrong_ends_its_own_episode_only(pool):
    episodes = dict(zip(opened(pool, len(WRONG) + 1), [*WRONG, "fine"], strict=True))
    for number, said in episodes.items():
        pool.step(number, said)
    for number, turn in answers(pool, len(episodes)).items():
        said = episodes[number]
        if said == "fine":
            assert turn.messages == [{"role": "user", "content": "fine 1"}] and not turn.error
        else:
            assert WRONG[said] in turn.error
    assert pool.n_free == 16 - 1


def test_a_reset_may_fail_too(pool):
    episodes = {
        pool.start(prompt(said)): said for said in ("raise", "hang", "own", "text", "wrong")
    }
    found = {episodes[number]: turn for number, turn in answers(pool, 5).items()}
    assert "KeyError" in found["raise"].error and "within 1 s" in found["hang"].error
    assert found["own"] == Turn(None)
    assert found["text"].messages == [{"role": "user", "content": "go"}]
    assert "reset returned 5" in found["wrong"].error


def test_an_ended_episode_leaves_no_process_and_none_has_jax(pool):
    (number,) = opened(pool, 1)
    pool.step(number, "jax")
    assert answers(pool, 1)[number].messages[0]["content"] == "False"
    pool.step(number, "spawn")
    pids = [int(pid) for pid in answers(pool, 1)[number].messages[0]["content"].split()]
    assert all(map(is_alive, pids))
    pool.end(number)
    wait_until_gone(pids)
    opened(pool, 1)  # goes on


def test_the_process_that_makes_episodes_is_replaced(pool):
    (old,) = opened(pool, 1)
    pool._process.kill()
    pool._process.wait()
    (new,) = opened(pool, 1)
    pool.end(old)
    pool.step(new, "go")
    assert answers(pool, 1)[new].messages


def test_closing_ends_everything(hazards):
    with EnvironmentPool(EnvConfig(name=f"{hazards}:Obey?first=yo")) as pool:
        (number,) = opened(pool, 1)
        pool.step(number, "spawn")
        pids = [int(pid) for pid in answers(pool, 1)[number].messages[0]["content"].split()]
        pids.append(pool._process.pid)
    wait_until_gone(pids)


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids):
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {pids}"
        time.sleep(0.02)


def test_what_cannot_be_imported_is_said_at_once(hazards, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos._exit(4)")
    for name, words in {
        "calculate": r"env\.name has the unknown name 'calculate'; set it to one of calculator, guess",
        f"{hazards}:Obeys": "has no function or class 'Obeys'; set one that it has: Obey",
        "nowhere.module:Env": r"cannot be imported \(ModuleNotFoundError",
        f"{broken}:Env": "ended the process that imports it",
        "calculator?call=1": r"cannot be created \(TypeError.*'call'.*change its options",
    }.items():
        with pytest.raises(ValueError, match=words):
            EnvironmentPool(EnvConfig(name=name))


@pytest.mark.parametrize(
    ("text", "value"),
    [("12 * 34", "408"), ("-(1 + 2.5) / 2", "-1.75"), ("7 // 2 % 2", "1"), ("1/3", "0.3333333333")],
)
def test_the_calculator_works_out(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "2 ** 9",
        "__import__('os')",
        "a + 1",
        "1 /",
        "1/0",
        "'a' * 9",
        "True + 1",
        "1+" * 150 + "1",
        "(" * 99,
    ],
)
def test_the_calculator_survives_what_is_no_arithmetic(text):
    environment = Calculator()
    environment.reset(prompt("3"))
    observation, reward, done, counts = environment.step(f"<calc>{text}</calc>")
    assert observation.startswith("<result>error: ") and (reward, done, counts) == (
        0,
        False,
        {"calls": 1},
    )


def test_a_calculator_episode():
    environment = Calculator(call_reward=0.25)
    first = environment.reset(
        prompt("408") | {"messages": [{"role": "user", "content": "12 * 34?"}]}
    )
    assert [m["role"] for m in first] == ["system", "user"] and "<calc>" in first[0]["content"]
    assert environment.step("Well: <calc>12 * 34</calc>") == (
        "<result>408</result>", 0.25, False, {"calls": 1},
    )  # fmt: skip
    assert environment.step("Again: <calc>12 * 34</calc>")[1] == 0  # only the first call pays
    assert environment.step("It is 408.") == ("", 1.0, True)
    assert environment.step("It is 409.") == ("", 0.0, True)


def test_the_calculator_shows_examples_that_are_right():
    question = {"role": "user", "content": "12 * 34?"}
    first = Calculator(examples=3).reset(prompt("408") | {"messages": [question]})
    assert [m["role"] for m in first] == ["system", *["user", "assistant"] * 6, "user"]
    assert first[-1] == question
    for asked, call, told, said in zip(*(iter(first[1:-1]),) * 4, strict=True):
        game = Calculator()
        game.reset(prompt(said["content"]) | {"messages": [asked]})
        assert game.step(call["content"])[0] == told["content"]
        assert game.step(said["content"])[1:] == (1.0, True)


def test_the_game_that_is_shown_is_played_by_the_rules():
    first = GuessNumber(most=18, example=True).reset(prompt("6"))
    assert first[0] == first[-1] and first[-2]["content"] == "Right."
    game = GuessNumber(most=18)
    game.reset(prompt("6"))
    said, told = first[1:-1:2], first[2:-1:2]
    steps = [game.step(message["content"]) for message in said]
    assert [step[0] for step in steps[:-1]] == [message["content"] for message in told[:-1]]
    assert steps[-1][1:3] == (1.0 - 0.1 * (len(said) - 1), True)


def test_a_game_of_guesses():
    game = GuessNumber(tries=3)
    game.reset(prompt("7"))
    assert game.step("5") == ("Higher. Your next guess?", 0.0, False)
    assert game.step("It is 9!") == ("Lower. Your next guess?", 0.0, False)
    assert game.step("7")[:3] == ("", 0.8, True)
    game.reset(prompt("7"))
    assert [game.step(said)[2] for said in ("x", "8", "6")] == [False, False, True]
    drawn = []
    for seed in (1, 1, 2, 3, 4):
        game.reset(prompt() | {"seed": seed})
        drawn.append(game.number)
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1 and all(0 <= n <= 10 for n in drawn)


def test_another_try_after_a_wrong_answer():
    retry = Retry(reward="last_number", tries=3, per_try=0.25)
    assert retry.reset(prompt("12")) is None
    assert retry.step("It is 11.") == ("That is not right. Try again.", 0.0, False, {"retries": 1})
    assert retry.step("It is 12.") == ("", 0.75, True)
    retry.reset(prompt("12"))
    assert [retry.step("13")[1:3] for _ in range(3)] == [(0.0, False), (0.0, False), (0.0, True)]


def test_a_reasoning_gym_question_in_several_tries():
    gym = pytest.importorskip("reasoning_gym")
    entry = next(iter(gym.create_dataset("chain_sum", size=1, seed=1)))
    origin = {"reasoning_gym": {"name": "chain_sum", "entry": entry}}
    retry = Retry(reward="reasoning_gym")
    retry.reset(prompt(entry["answer"]) | {"extra": origin})
    assert retry.step("<answer>no</answer>")[2] is False
    assert retry.step(f"<answer>{entry['answer']}</answer>") == ("", 1.0, True)


def test_a_game_of_gymnasium(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    from jaxrl.environments.gymnasium import TextGame

    (tmp_path / "corridor.py").write_text(
        textwrap.dedent("""
        import gymnasium
        class Corridor(gymnasium.Env):
            action_space = gymnasium.spaces.Discrete(2)
            observation_space = gymnasium.spaces.Discrete(4)
            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                self.place = int(self.np_random.integers(1, 3))
                return self.place, {}
            def step(self, action):
                self.place += 2 * action - 1
                return self.place, float(self.place == 3), self.place in (0, 3), False, {}
        gymnasium.register("Corridor-v0", Corridor)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    game = TextGame("Corridor-v0", imports="corridor")
    rules = {"role": "user", "content": "1 is right, 0 is left."}
    starts = [game.reset(prompt() | {"messages": [rules], "seed": seed}) for seed in range(9)]
    assert all(start[0] == rules for start in starts)
    assert {start[1]["content"] for start in starts} == {"1", "2"}
    game.reset(prompt() | {"seed": next(s for s in range(9) if starts[s][1]["content"] == "1")})
    assert game.step("what?") == (
        "That is no action. Write a number from 0 to 1.",
        0.0,
        False,
        {"invalid": 1},
    )
    assert game.step("I take 1") == ("2", 0.0, False)
    assert game.step("7")[3] == {"invalid": 1}
    assert game.step("1") == ("3", 1.0, True)
    with pytest.raises(ValueError, match="which text cannot express"):
        TextGame("Pendulum-v1")
