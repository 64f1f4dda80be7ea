import pytest

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.functions import BUILT_IN, check_start, load_reward, metric_names
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.sandbox import landlock


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_names_load_their_function(name):
    assert load_reward(name).__name__ == name


def test_metrics_are_named_after_the_function_unless_two_share_the_name():
    assert metric_names(("math", "pkg.mod:score", "a.py:shape?x=1")) == ("math", "score", "shape")
    assert metric_names(("exact?pattern=a", "exact?pattern=b")) == (
        "exact?pattern=a",
        "exact?pattern=b",
    )


def test_the_code_reward_needs_landlock_unless_it_is_marked_unsafe(monkeypatch, caplog):
    check_start("code?test_s=2", {})
    monkeypatch.setattr(landlock, "version", lambda: 0)
    check_start("math", {})
    for start in (
        lambda name: check_start(name, {}),
        lambda name: RewardPool(RewardConfig(functions=(name,))),
    ):
        with pytest.raises(ValueError, match=r"no Landlock .* code\?unsafe=true"):
            start("code?test_s=2")
    assert not caplog.records
    check_start("code?test_s=2&unsafe=true", {})
    assert "no Landlock" in caplog.text
