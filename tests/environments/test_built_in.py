"""Tests of jaxrl/environments: calculator.py, guess_number.py, retry.py and gymnasium.py."""

import textwrap

import pytest

from jaxrl.environments.builtin.calculator import Calculator, evaluate
from jaxrl.environments.builtin.guess_number import GuessNumber
from jaxrl.environments.builtin.gymnasium import TextGame
from jaxrl.environments.builtin.retry import Retry


def prompt(answer=""):
    return {"messages": [], "answer": answer, "source": "s", "extra": {}, "seed": 7}


@pytest.mark.parametrize(
    ("text", "value"),
    [("12 * 34", "408"), ("-(1 + 2.5) / 2", "-1.75"), ("7 // 2 % 2", "1"), ("1/3", "0.3333333333")],
)
def test_the_calculator_evaluates(text, value):
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
def test_other_expressions_are_an_error_in_the_observation(text):
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
    assert (
        environment.step("Again: <calc>12 * 34</calc>")[1] == 0
    )  # only the first call adds reward
    assert environment.step("It is 408.") == ("", 1.0, True)
    assert environment.step("It is 409.") == ("", 0.0, True)


def test_the_examples_of_the_calculator_are_correct():
    question = {"role": "user", "content": "12 * 34?"}
    first = Calculator(examples=3).reset(prompt("408") | {"messages": [question]})
    assert [m["role"] for m in first] == ["system", *["user", "assistant"] * 6, "user"]
    assert first[-1] == question
    for question, call, result, answer in zip(*(iter(first[1:-1]),) * 4, strict=True):
        game = Calculator()
        game.reset(prompt(answer["content"]) | {"messages": [question]})
        assert game.step(call["content"])[0] == result["content"]
        assert game.step(answer["content"])[1:] == (1.0, True)


def test_the_example_game_follows_the_rules():
    first = GuessNumber(most=18, example=True).reset(prompt("6"))
    assert first[0] == first[-1] and first[-2]["content"] == "Right."
    game = GuessNumber(most=18)
    game.reset(prompt("6"))
    guesses, hints = first[1:-1:2], first[2:-1:2]
    steps = [game.step(message["content"]) for message in guesses]
    assert [step[0] for step in steps[:-1]] == [message["content"] for message in hints[:-1]]
    assert steps[-1][1:3] == (1.0 - 0.1 * (len(guesses) - 1), True)


def test_a_guessing_game():
    game = GuessNumber(tries=3)
    game.reset(prompt("7"))
    assert game.step("5") == ("Higher. Your next guess?", 0.0, False)
    assert game.step("It is 9!") == ("Lower. Your next guess?", 0.0, False)
    assert game.step("7")[:3] == ("", 0.8, True)
    game.reset(prompt("7"))
    assert [game.step(guess)[2] for guess in ("x", "8", "6")] == [False, False, True]
    drawn = []
    for seed in (1, 1, 2, 3, 4):
        game.reset(prompt() | {"seed": seed})
        drawn.append(game.number)
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1 and all(0 <= n <= 10 for n in drawn)


def test_retry_after_a_wrong_answer():
    retry = Retry(reward="last_number", tries=3, per_try=0.25)
    assert retry.reset(prompt("12")) is None
    assert retry.step("It is 11.") == ("That is not right. Try again.", 0.0, False, {"retries": 1})
    assert retry.step("It is 12.") == ("", 0.75, True)
    retry.reset(prompt("12"))
    assert [retry.step("13")[1:3] for _ in range(3)] == [(0.0, False), (0.0, False), (0.0, True)]


def test_retry_with_a_reasoning_gym_question():
    gym = pytest.importorskip("reasoning_gym")
    entry = next(iter(gym.create_dataset("chain_sum", size=1, seed=1)))
    origin = {"reasoning_gym": {"name": "chain_sum", "entry": entry}}
    retry = Retry(reward="reasoning_gym")
    retry.reset(prompt(entry["answer"]) | {"extra": origin})
    assert retry.step("<answer>no</answer>")[2] is False
    assert retry.step(f"<answer>{entry['answer']}</answer>") == ("", 1.0, True)


def test_a_gymnasium_game(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
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


def test_a_number_of_thousands_of_digits_is_no_guess():
    game = GuessNumber()
    game.reset({"seed": 1, "answer": "3"})
    assert game.step("9" * 5000) == ("That is no number. Your next guess?", 0.0, False)
    assert game.step("It is 3.")[1:3] == (0.9, True)
