"""Tests of jaxrl/rollout/engines.py."""

import pytest

from jaxrl.config import resolve
from jaxrl.rollout.engines import generating_processes, workers_of_process
from sharding import hosts
from tests.config.runnable import runnable


@pytest.mark.parametrize(
    ("n", "workers", "most", "n_prompts", "expected"),
    [
        (1, 3, 0, 8, [(3, 3)]),
        (2, 4, 0, 8, [(2, 2), (2, 2)]),
        (2, 2, 6, 8, [(1, 3), (1, 3)]),
        (8, 4, 0, 8, [(1, 1)] * 4 + [(0, 0)] * 4),
        (3, 4, 0, 8, [(2, 2), (2, 2), (0, 0)]),
        (2, 3, 0, 8, [(3, 3), (0, 0)]),  # 3 workers cannot be divided by 2
        (2, 2, 5, 8, [(2, 5), (0, 0)]),
        (4, 4, 0, 2, [(2, 2), (2, 2), (0, 0), (0, 0)]),  # a process needs a prompt
    ],
)
def test_workers_are_divided_equally_over_the_first_processes(
    monkeypatch, n, workers, most, n_prompts, expected
):
    cfg = resolve(
        runnable(
            schedule__mode="async",
            schedule__rollout_workers=workers,
            schedule__max_rollout_workers=most,
            data__prompts_per_step=n_prompts,
        )
    )
    monkeypatch.setattr(hosts, "n_processes", lambda: n)
    found, prompts = [], []
    for i in range(n):
        monkeypatch.setattr(hosts, "process_id", lambda i=i: i)
        found.append(workers_of_process(cfg))
        mine = list(range(n_prompts))[hosts.local_slice(n_prompts, generating_processes(cfg))]
        assert bool(mine) == (found[-1][0] > 0)
        prompts += mine
    assert found == expected and prompts == list(range(n_prompts))
