"""Response lengths of simulated schedules (jaxrl/planner/schedules/lengths.py)."""

import numpy as np
import pytest

from jaxrl.planner.schedules.lengths import response_lengths


def test_a_lognormal_has_the_given_mean_below_the_limit():
    found = response_lengths("lognormal?mean=14000&sigma=1", 4000, 8, limit=28000)
    assert found.shape == (4000, 8)
    assert found.mean() == pytest.approx(14000, rel=0.03)
    assert found.max() == 28000 and found.min() >= 1


def test_the_samples_of_a_prompt_share_a_part_of_the_variance():
    def share(between: float) -> float:
        spec = f"lognormal?mean=500&sigma=0.5&between={between}"
        logs = np.log(response_lengths(spec, 4000, 8, limit=10**6))
        within = logs.var(axis=1, ddof=1).mean()
        return 1 - within / logs.var()

    assert share(0.0) == pytest.approx(0, abs=0.03)
    assert share(0.5) == pytest.approx(0.5, abs=0.03)
    assert share(1.0) == pytest.approx(1, abs=0.03)


def test_measured_lengths_are_drawn_by_group_or_one_by_one(tmp_path):
    groups, single = tmp_path / "groups.txt", tmp_path / "single.txt"
    groups.write_text("10 20 30\n\n100, 200, 300\n")
    found = response_lengths(str(groups), 50, 3, limit=1000)
    assert {tuple(sorted(row)) for row in found.tolist()} == {(10, 20, 30), (100, 200, 300)}
    single.write_text("10\n20\n")
    assert set(np.unique(response_lengths(str(single), 50, 4, limit=1000))) == {10, 20}
    # the samples of a line that has another number of them are drawn with replacement
    assert response_lengths(str(groups), 5, 8, limit=1000).shape == (5, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no response lengths"),
        ("10 x\n", "line 1: '10 x' is not a list of token counts"),
        ("10\n0\n", "line 2: lengths from 0 to 0"),
        ("2000\n", "set data.max_response_len"),
    ],
)
def test_a_wrong_file_is_rejected_with_its_line(text, message, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        response_lengths(str(path), 5, 2, limit=1000)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lognormal?mu=3", "unknown option mu"),
        ("lognormal?mean=2000", "0 < mean < limit"),
        ("lognormal?mean=100&sigma=0", "sigma > 0"),
    ],
)
def test_a_wrong_distribution_is_rejected(spec, message):
    with pytest.raises(ValueError, match=message):
        response_lengths(spec, 5, 2, limit=1000)
