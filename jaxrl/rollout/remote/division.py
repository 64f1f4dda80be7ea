"""How the rollout workers of a run are divided over its training processes.

    process 0 --- workers 0, 1     prompts 0 .. B/2 - 1 of each step
    process 1 --- workers 2, 3     prompts B/2 .. B - 1
    process 2                      has none: 4 workers cannot be divided by 3

A worker belongs to one process, which sends it requests and weights.
"""

import math

from jaxrl.config.keys import RunConfig
from sharding import hosts


def generating_processes(cfg: RunConfig) -> int:
    """The number of processes that generate: the first ones of the run.

    With rollout workers these are as many as can have equal numbers of them.
    """
    n = hosts.n_processes()
    if not cfg.schedule.rollout_workers:
        return n
    common = math.gcd(*cfg.schedule.n_workers)
    most = min(n, common, cfg.data.prompts_per_step)
    return next(k for k in range(most, 0, -1) if common % k == 0)


def workers_of_process(cfg: RunConfig) -> tuple[int, int]:
    """(rollout workers of this process to begin with, the most that it uses)."""
    n_processes = generating_processes(cfg)
    if hosts.process_id() >= n_processes:
        return 0, 0
    n_workers, most = cfg.schedule.n_workers
    return n_workers // n_processes, most // n_processes
