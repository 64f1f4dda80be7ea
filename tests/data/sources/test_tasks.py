import sys

import pytest

from jaxrl.data.sources.tasks import arithmetic, make_questions

TASKS = ("addition", "subtraction", "multiplication", "chain_sum")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("digits", [(1,), (2,), (3,)])
def test_train_and_val_share_no_question(name, digits):
    train = arithmetic(name, digits=digits, size=9000, split="train", seed=1)
    val = arithmetic(name, digits=digits, size=200, split="val", seed=2)
    assert not {q.text for q in train} & {q.text for q in val}
    texts = [q.text for q in val]
    assert len(set(texts)) == len(texts) > 0


def test_a_plus_b_is_in_the_split_of_b_plus_a():
    train = {q.text for q in arithmetic("addition", digits=(2,), size=20000)}
    mirrored = {f"What is {b[:-1]} + {a}?" for a, b in (t[8:].split(" + ") for t in train)}
    val = {q.text for q in arithmetic("addition", digits=(2,), size=20000, split="val")}
    assert not mirrored & val
    assert len(train) + len(val) == 90 * 90  # every pair of 10..99 is in one of them


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right(name):
    for q in arithmetic(name, digits=(1, 2, 3), terms=3, size=60):
        expression = q.text.removeprefix("What is ").removesuffix("?")
        assert str(eval(expression)) == q.answer


def test_digit_counts_are_mixed_evenly_and_name_the_source():
    questions = make_questions("task:addition?digits=1,2&size=101&split=train")
    sources = [q.source for q in questions]
    assert (sources.count("addition/1"), sources.count("addition/2")) == (51, 50)
    assert len(set(sources[:20])) == 2  # shuffled, not one after the other
    assert all(int(q.answer) <= 18 for q in questions if q.source == "addition/1")


def test_questions_depend_only_on_the_seed():
    source = "task:addition?size=50&seed={}"
    assert make_questions(source.format(3)) == make_questions(source.format(3))
    assert make_questions(source.format(3)) != make_questions(source.format(4))


def test_a_small_training_pool_repeats_only_when_used_up():
    texts = [q.text for q in arithmetic("addition", digits=(1,), size=188)]
    pool = len(set(texts))
    assert pool < 100 and all(texts.count(t) in (188 // pool, 188 // pool + 1) for t in texts)


@pytest.mark.parametrize(
    "source, message",
    [
        ("task:division", "unknown task 'division'.*choose one of addition"),
        ("task:addition?digit=2", "unknown option digit.*digits"),
        ("task:addition?digits=two", "digits='two'.*is not an integer"),
        ("task:addition?split=test", "write split=train or split=val"),
        ("task:addition?size=0", "at least one digit"),
    ],
)
def test_a_wrong_task_error_says_what_to_write(source, message):
    with pytest.raises(ValueError, match=message):
        make_questions(source)


def test_missing_reasoning_gym_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="uv pip install 'reasoning-gym"):
        make_questions("reasoning_gym:chain_sum?min_terms=2")


def test_reasoning_gym_options_are_typed_and_entries_reach_the_reward(monkeypatch):
    calls = []

    class Gym:
        @staticmethod
        def create_dataset(name, **settings):
            calls.append((name, settings))
            return [{"question": "q", "answer": 3, "metadata": {"x": 1}}]

    monkeypatch.setitem(sys.modules, "reasoning_gym", Gym)
    [question] = make_questions("reasoning_gym:chain_sum?min_terms=2&p=0.5&flag=true&size=7")
    expected = {"min_terms": 2, "p": 0.5, "flag": True, "size": 7, "seed": 0}
    assert calls == [("chain_sum", expected)]
    assert (question.answer, question.source) == ("3", "reasoning_gym/chain_sum")
    assert question.extra["reasoning_gym"]["entry"]["metadata"] == {"x": 1}
