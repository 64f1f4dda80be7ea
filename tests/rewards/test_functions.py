import pytest

from jaxrl.rewards.functions import BUILT_IN, load_reward, metric_names


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_names_load_their_function(name):
    assert load_reward(name).__name__ == name


def test_metrics_are_named_after_the_function_unless_two_share_the_name():
    assert metric_names(("math", "pkg.mod:score", "a.py:shape?x=1")) == ("math", "score", "shape")
    assert metric_names(("exact?pattern=a", "exact?pattern=b")) == (
        "exact?pattern=a",
        "exact?pattern=b",
    )
