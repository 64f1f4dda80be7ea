"""Tests of jaxrl/runtime/signals.py; several processes are tested in tests/runtime/hosts."""

import os
import signal

import pytest

from jaxrl.runtime.signals import Interrupted, StopFlag, stop_on_signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_sets_the_flag_and_restores_the_handlers(name, capfd):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    stop = StopFlag()
    with stop_on_signals(stop):
        stop.check()
        stop.check_local()
        os.kill(os.getpid(), signal.Signals[name])
        assert f"{name}: the run stops as soon as it can save; send it" in capfd.readouterr().err
        with pytest.raises(Interrupted, match=name):
            stop.check()
        with pytest.raises(Interrupted, match=name):
            stop.check_local()
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_handlers_are_restored_without_a_signal():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals(StopFlag()):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
