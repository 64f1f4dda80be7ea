"""Updates of a step: their metrics, and what follows if one is not finite."""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import Packed, empty_batch
from jaxrl.learner.coefficients import initial_coefficients
from jaxrl.runtime.call_queue import CallQueue
from jaxrl.trainer.core import Core
from jaxrl.trainer.phases.mini_batches import MiniBatch
from jaxrl.trainer.phases.update import (
    NonFiniteError,
    average_updates,
    update,
    with_first_mismatch,
)

UPDATES = [
    {"loss/total": 1.0, "mismatch/logp_diff_mean": 0.25, "mismatch/logp_diff_max": 0.5},
    {"loss/total": 2.0, "mismatch/logp_diff_mean": 0.75, "mismatch/logp_diff_max": 1.5},
]


def test_metrics_are_averaged_over_updates_and_maxima_are_kept():
    want = {"loss/total": 1.5, "mismatch/logp_diff_mean": 0.5, "mismatch/logp_diff_max": 1.5}
    assert average_updates(UPDATES) == want
    assert average_updates([]) == {}


def test_a_policy_that_has_moved_does_not_enter_the_mismatch():
    """Later updates compare the engine with the current policy if its start is not scored."""
    want = {"loss/total": 1.5, "mismatch/logp_diff_mean": 0.25, "mismatch/logp_diff_max": 0.5}
    assert average_updates(with_first_mismatch(UPDATES)) == want
    assert average_updates(with_first_mismatch(UPDATES[:1])) == UPDATES[0]


class FakeUpdate:
    """Updates whose state is their number, of which one is not finite."""

    def __init__(self, nonfinite: int):
        self._nonfinite = nonfinite

    def calls(self, params):
        return CallQueue()

    def dispatch(self, state, batches, calls, on_metrics, *, on_micro_batch, **rest):
        for i in range(len(batches)):
            calls.make_room()
            calls.add(functools.partial(on_micro_batch, i))
        calls.make_room()
        bad = float(state.params == self._nonfinite)
        loss = float("nan") if bad else 1.0
        calls.add(functools.partial(on_metrics, {"optim/nonfinite": bad, "loss/total": loss}))
        return SimpleNamespace(params=state.params + 1)


def core_of(folder, nonfinite: int):
    """A core with the fake update, whose progress bar counts in `advanced`."""
    core = object.__new__(Core)
    nothing, core.advanced = lambda *args, **kwargs: contextlib.nullcontext(), []
    bar = SimpleNamespace(advance=core.advanced.append)
    progress = SimpleNamespace(phase=lambda *args, **kwargs: contextlib.nullcontext(bar))
    core.cfg = RunConfig(run_dir=str(folder))
    core.clock = SimpleNamespace(timed=nothing, step=4, step_restartable=True)
    core.no_compile, core.session = nothing, SimpleNamespace(progress=progress)
    core.learner = SimpleNamespace(update=FakeUpdate(nonfinite))
    core.coefs, core.state = initial_coefficients(core.cfg), SimpleNamespace(params=0)
    return core


def mini_batches(n: int, n_micro: int) -> list[MiniBatch]:
    """Mini-batches whose first token is their number."""
    found = []
    for number in range(n):
        batch = empty_batch(1, 8)
        batch.tokens[0, 0] = number
        found.append(MiniBatch([Packed(batch, spans=())] * n_micro))
    return found


@pytest.mark.parametrize("n_micro", [1, 3])
@pytest.mark.parametrize("nonfinite", [0, 1, 2])
def test_a_nonfinite_update_is_the_last_one_and_its_batch_is_saved(tmp_path, nonfinite, n_micro):
    core = core_of(tmp_path, nonfinite)
    with pytest.raises(NonFiniteError, match="step 5: loss/total not finite"):
        update(core, mini_batches(3, n_micro))
    with np.load(tmp_path / "nonfinite_step_5.npz") as saved:
        assert saved["0/tokens"][0, 0] == nonfinite
    # The state of a step that it leaves unchanged can be saved.
    assert core.clock.step_restartable == (nonfinite == 0)
    assert core.state.params == nonfinite + 1  # no later one was applied


def test_all_metrics_are_read_and_progress_is_complete_at_the_end_of_the_phase(tmp_path):
    core = core_of(tmp_path, nonfinite=-1)
    metrics = update(core, mini_batches(3, 2))
    assert metrics == {"optim/nonfinite": 0.0, "loss/total": 1.0, "perf/n_updates": 3.0}
    assert core.advanced == [1] * 6 and not core.clock.step_restartable
