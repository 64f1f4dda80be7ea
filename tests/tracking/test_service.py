"""Tests of jaxrl/tracking/service.py: an outage costs no metrics and little time."""

import signal
import sys
import types

import pytest

from jaxrl.config.keys import LogConfig, RunConfig
from jaxrl.tracking.json_lines import read_lines
from jaxrl.tracking.loggers import make_loggers
from jaxrl.tracking.service import MAX_PAUSE_S, MIN_PAUSE_S, TrackingService


class Tracker:
    """A tracker whose server can be down; every call then takes `timeout_s`."""

    def __init__(self):
        self.up, self.now, self.timeout_s = True, 0.0, 0.0
        self.steps, self.calls, self.rejected, self.closed = [], 0, set(), False

    def start(self):
        self._reach()
        return self

    def metrics(self, step, values):
        self._reach()
        if step in self.rejected:
            raise ValueError(f"the value of step {step} is invalid")
        self.steps.append(step)

    def samples(self, step, records):
        self._reach()

    def text(self, text):
        self._reach()

    def close(self):
        self.closed = True

    def _reach(self):
        self.calls += 1
        if not self.up:
            self.now += self.timeout_s
            raise ConnectionError("no route to host")


@pytest.fixture
def tracker():
    return Tracker()


def service(tracker, folder):
    return TrackingService("mlflow", tracker.start, folder, clock=lambda: tracker.now)


def log(logger, tracker, *steps, seconds=0.0):
    for step in steps:
        tracker.now += seconds
        logger.metrics(step, {"reward/mean": step / 10})


def test_metrics_of_an_outage_are_sent_in_order_when_it_ends(tracker, tmp_path, capsys):
    logger = service(tracker, tmp_path)
    log(logger, tracker, 1, 2)
    tracker.up = False
    log(logger, tracker, 3, 4, 5)
    assert tracker.steps == [1, 2]
    tracker.up, tracker.now = True, tracker.now + MIN_PAUSE_S
    log(logger, tracker, 6)
    assert tracker.steps == [1, 2, 3, 4, 5, 6]
    logger.close()
    assert tracker.closed
    assert capsys.readouterr().out.count("the logger 'mlflow' fails") == 1
    assert not list(tmp_path.iterdir())


def test_a_service_that_is_down_at_the_start_is_started_later(tracker, tmp_path, capsys):
    tracker.up = False
    logger = service(tracker, tmp_path)
    log(logger, tracker, 1)
    tracker.up = True
    log(logger, tracker, 2, 3, seconds=MIN_PAUSE_S)
    assert tracker.steps == [1, 2, 3]
    assert capsys.readouterr().out.count("the logger 'mlflow' does not start") == 1


def test_failing_calls_take_at_most_a_twentieth_of_the_time(tracker, tmp_path):
    tracker.up, tracker.timeout_s = False, 10.0
    logger = service(tracker, tmp_path)
    started = tracker.now
    log(logger, tracker, *range(1, 1001), seconds=5.0)  # 5,000 s of steps
    waited = tracker.now - started - 5000
    assert 0 < waited <= 0.05 * 5000
    assert logger._pause <= MAX_PAUSE_S


def test_metrics_that_never_arrive_are_written_to_a_file(tracker, tmp_path, capsys):
    logger = service(tracker, tmp_path)
    tracker.up = False
    log(logger, tracker, 1, 2)
    logger.close()
    expected = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}]
    assert read_lines(tmp_path / "unsent_mlflow.jsonl") == expected
    assert str(tmp_path / "unsent_mlflow.jsonl") in capsys.readouterr().out


def test_a_record_that_the_service_rejects_does_not_hold_up_the_others(tracker, tmp_path):
    tracker.rejected = {2}
    logger = service(tracker, tmp_path)
    log(logger, tracker, 1, 2, 3, 4, seconds=MIN_PAUSE_S)
    assert sorted(tracker.steps) == [1, 3, 4]


@pytest.mark.parametrize(
    "name, start",
    [("wandb", "init"), ("mlflow", "set_experiment"), ("swanlab", "init"), ("trackio", "init")],
)
def test_a_run_continues_and_keeps_its_metrics_if_a_tracker_is_down(
    tmp_path, monkeypatch, capsys, name, start
):
    def down(*args, **kw):
        raise ConnectionError("no route to host")

    module = types.ModuleType(name)
    setattr(module, start, down)
    monkeypatch.setitem(sys.modules, name, module)
    run = RunConfig(name="r", total_steps=9, log=LogConfig(loggers=(name, "jsonl")))
    logger = make_loggers(run.log, tmp_path, run, None)
    logger.metrics(1, {"a": 1.0})
    logger.samples(1, [{"kind": "train"}])
    logger.close()
    assert [line["a"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1.0]
    assert [line["a"] for line in read_lines(tmp_path / f"unsent_{name}.jsonl")] == [1.0]
    assert capsys.readouterr().out.count("no route to host") == 1


def test_a_tracker_cannot_replace_the_signal_handlers_of_the_run(tracker, tmp_path):
    def start():
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        return tracker

    before = signal.getsignal(signal.SIGTERM)
    TrackingService("clearml", start, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
