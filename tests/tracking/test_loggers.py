"""Tests of jaxrl/tracking: loggers.py, packages.py, tensorboard.py, trackers.py, json_lines.py
and console.py."""

import errno
import io
import json
import math
import os
import resource
import struct
import sys
import types

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from jaxrl.config.keys import LogConfig, RunConfig
from jaxrl.tracking.console import ConsoleLogger, compact, representative_samples
from jaxrl.tracking.json_lines import JsonlLogger, read_lines
from jaxrl.tracking.loggers import Fanout, check_loggers, make_loggers
from jaxrl.tracking.tensorboard import TensorBoardLogger
from jaxrl.tracking.trackers import TRACKERS

SAMPLE = {
    "kind": "train",
    "prompt_id": 3,
    "sample": 0,
    "source": "addition",
    "prompt": "What is 27 + 58?",
    "completion": "85",
    "answer": "85",
    "reward": 1.0,
    "finish": "stop",
    "error": "",
}


def make(tmp_path, *names, resume_step=None, **cfg):
    run = RunConfig(name="r", total_steps=9, log=LogConfig(loggers=names, **cfg))
    return make_loggers(run.log, tmp_path, run, resume_step)


def without_times(lines):
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def test_the_record_of_a_resumed_run_equals_that_of_an_uninterrupted_run(tmp_path):
    def log(folder, steps, resume_step):
        logger = make(folder, "jsonl", resume_step=resume_step)
        for step in steps:
            logger.metrics(step, {"reward/mean": step / 10})
            logger.samples(step, [SAMPLE | {"reward": float(step)}])
        logger.close()

    log(tmp_path / "uninterrupted", range(1, 6), None)
    log(tmp_path / "resumed", range(1, 4), None)
    with open(tmp_path / "resumed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "reward/me')  # killed here; the last checkpoint is of step 2
    log(tmp_path / "resumed", range(3, 6), 2)
    for name in ("metrics.jsonl", "samples.jsonl"):
        one, other = (read_lines(tmp_path / run / name) for run in ("uninterrupted", "resumed"))
        assert without_times(one) == without_times(other)
        assert [line["step"] for line in one] == [1, 2, 3, 4, 5]


def test_a_new_run_in_an_old_folder_starts_an_empty_record(tmp_path):
    for resume_step, expected in ((None, [0, 1]), (None, [0, 1]), (0, [0, 0, 1])):
        logger = make(tmp_path, "jsonl", resume_step=resume_step)
        for step in (0, 1):
            logger.metrics(step, {"a": 1.0})
        logger.close()
        assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == expected


def test_lines_are_on_disk_immediately_and_strict_json(tmp_path):
    logger = make(tmp_path, "jsonl")
    logger.metrics(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads(text, parse_constant=refuse)
    assert math.isnan(float(line["a"]))
    assert [float(line[name]) for name in "bcd"] == [math.inf, -math.inf, 0.1]
    logger.close()


def test_lines_that_do_not_fit_on_a_full_disk_are_written_later(tmp_path, capsys):
    logger = make(tmp_path, "jsonl", "console")
    logger.metrics(1, {"reward/mean": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))  # as if the disk were full
    try:
        for step in (2, 3):
            logger.metrics(step, {"reward/mean": 1.0, "loss/kl": 0.5})
        size = len((tmp_path / "metrics.jsonl").read_bytes())
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n"), size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logger.metrics(4, {"reward/mean": 1.0})
    logger.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    out = capsys.readouterr().out
    assert out.count("the logger 'jsonl' fails") == 1
    assert "File too large" in out


class Broken:
    def __init__(self):
        self.calls = 0

    def _fail(self, *arguments):
        self.calls += 1
        raise ConnectionError("the server is down")

    metrics = samples = text = close = _fail


def test_a_failing_logger_is_reported_once_and_stops_nothing(tmp_path, capsys):
    broken, good = Broken(), JsonlLogger(tmp_path, None)
    logger = Fanout({"wandb": broken, "jsonl": good})
    for step in (1, 2):
        logger.metrics(step, {"a": 1.0})
        logger.samples(step, [SAMPLE])
    logger.text("words")
    logger.close()
    assert broken.calls == 6
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2
    assert capsys.readouterr().out.count("the server is down") == 1


def test_the_error_about_an_unknown_logger_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"config\.log\.loggers has \['wandbb'\]; .*wandb, mlflow"):
        make(tmp_path, "wandbb")


@pytest.mark.parametrize("name", TRACKERS)
def test_the_error_about_a_missing_package_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"uv pip install .*{name}"):
        make(tmp_path, name)
    with pytest.raises(ValueError, match=f"uv pip install .*{name}"):  # before any device work
        check_loggers(LogConfig(loggers=(name,)))


def read_events(folder) -> list[Event]:
    """All events of a folder: records of [length u64, crc u32, event, crc u32]."""
    events = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name.rsplit(".", 1)[-1]):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[12 + length + 4 :]
    return events


def scalars(events) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def test_tensorboard_events_hold_the_metrics_and_samples(tmp_path):
    logger = make(tmp_path, "tensorboard", samples=1)
    logger.metrics(1, {"reward/mean": 0.5, "loss/kl": math.nan})
    logger.samples(1, [SAMPLE, SAMPLE])
    events = read_events(tmp_path / "tensorboard")
    assert scalars(events) == [(1, "reward/mean", 0.5)]
    texts = [v for event in events for v in event.summary.value if v.HasField("tensor")]
    assert [text.tag for text in texts] == ["train/sample_0/text_summary"]
    assert b"27 + 58" in texts[0].tensor.string_val[0]
    logger.close()


def test_tensorboard_hides_events_after_the_resumed_step(tmp_path):
    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        logger = make(tmp_path, "tensorboard", resume_step=resume_step)
        for step in steps:
            logger.metrics(step, {"a": float(step)})
        logger.close()
    events = read_events(tmp_path / "tensorboard")
    starts = [event.step for event in events if event.HasField("session_log")]
    assert starts == [3]  # TensorBoard drops what it read of steps >= 3 before this event
    assert [step for step, _, _ in scalars(events)] == [1, 2, 3, 3, 4]


class FullDisk:
    """A logger whose writes fail with an error number until `free` is set."""

    def __init__(self, number):
        self.number, self.free, self.n_calls = number, False, 0

    def metrics(self, step, values):
        self.n_calls += 1
        if not self.free:
            raise OSError(self.number, os.strerror(self.number))

    def samples(self, step, records):
        self.metrics(step, {})

    def text(self, text):
        self.metrics(0, {})

    def close(self):
        self.metrics(0, {})


@pytest.mark.parametrize("numbers", [(errno.ENOSPC,) * 3, (errno.EDQUOT,) * 3])
def test_a_full_disk_is_one_message_for_all_loggers(capsys, numbers):
    disks = {f"logger {i}": FullDisk(number) for i, number in enumerate(numbers)}
    logger = Fanout(disks)
    for step in range(3):
        logger.metrics(step, {"a": 1.0})
        logger.samples(step, [{"prompt": "x"}])
    logger.close()
    out = capsys.readouterr().out
    assert out.count("warning") == 1 and "the disk is full; the run continues" in out
    assert [disk.n_calls for disk in disks.values()] == [7] * 3


def test_another_error_after_a_full_disk_is_still_reported(capsys):
    logger = Fanout({"a": FullDisk(errno.ENOSPC), "b": FullDisk(errno.EIO)})
    logger.metrics(1, {})
    assert "the logger 'b' fails" in capsys.readouterr().out


def test_tensorboard_continues_in_a_new_file_after_a_full_disk(tmp_path):
    logger = TensorBoardLogger(LogConfig(), tmp_path, None)
    logger.metrics(1, {"a": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80, hard))
    try:
        with pytest.raises(OSError):
            logger.metrics(2, {"a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logger.metrics(3, {"a": 3.0})
    logger.close()
    last = sorted((tmp_path / "tensorboard").iterdir(), key=lambda p: p.name.rsplit(".", 1)[-1])[-1]
    last.rename(tmp_path / "tensorboard" / "last")
    (tmp_path / "one").mkdir()
    (tmp_path / "tensorboard" / "last").rename(tmp_path / "one" / "last")
    assert scalars(read_events(tmp_path / "one")) == [(3, "a", 3.0)]


def fake_wandb(calls):
    run = types.SimpleNamespace(
        id="abc",
        summary={},
        define_metric=lambda name, step_metric: calls.append(("axis", name, step_metric)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda: calls.append(("finish",)),
    )
    module = types.ModuleType("wandb")
    module.init = lambda **kw: calls.append(("init", kw)) or run
    module.Table = lambda columns, data: (columns, data)
    return module


def test_wandb_gets_config_metrics_and_samples_and_resumes_its_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls))
    logger = make(tmp_path, "wandb", project="p")
    logger.metrics(1, {"reward/mean": 0.5})
    logger.samples(1, [SAMPLE])
    logger.close()
    init = calls[0][1]
    assert (init["project"], init["name"], init["id"]) == ("p", "r", None)
    assert init["config"]["rollout.n"] == 8
    assert ("log", {"step": 1, "reward/mean": 0.5}) in calls
    columns, rows = next(
        c[1]["samples/train"] for c in calls if c[0] == "log" and "samples/train" in c[1]
    )
    assert dict(zip(columns, rows[0], strict=True))["completion"] == "85"
    assert calls[-1] == ("finish",)
    make(tmp_path, "wandb", resume_step=1)
    assert [c[1]["id"] for c in calls if c[0] == "init"] == [None, "abc"]


def test_mlflow_gets_params_metrics_and_samples_and_resumes_its_run(tmp_path, monkeypatch):
    calls = []
    module = types.ModuleType("mlflow")

    def record(name, result=None):
        return lambda *args, **kw: calls.append((name, args, kw)) or result

    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="id7"))
    for name in ("set_experiment", "log_params", "log_metrics", "log_text", "end_run"):
        setattr(module, name, record(name))
    module.start_run = record("start_run", run)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    logger = make(tmp_path, "mlflow", project="p")
    logger.metrics(2, {"reward/mean": 0.5})
    logger.samples(2, [SAMPLE])
    logger.close()
    made = {name: (args, kw) for name, args, kw in calls}
    assert made["set_experiment"] == (("p",), {})
    assert made["end_run"] == ((), {})
    assert made["start_run"][1] == {"run_id": None, "run_name": "r"}
    assert made["log_params"][0][0]["rollout.n"] == "8"
    assert made["log_metrics"] == (({"reward/mean": 0.5},), {"step": 2})
    assert "27 + 58" in made["log_text"][0][0]
    calls.clear()
    make(tmp_path, "mlflow", resume_step=2)
    assert [c[0] for c in calls] == ["set_experiment", "end_run", "start_run"]
    assert calls[2][2]["run_id"] == "id7"


def module(name, **members):
    found = types.ModuleType(name)
    vars(found).update(members)
    return found


def fake_swanlab(calls):
    run = types.SimpleNamespace(
        id="s1", log=lambda values, step: calls.append((step, values)), finish=lambda: None
    )
    return module("swanlab", init=lambda **kw: calls.append(kw) or run, Text=lambda t: ("text", t))


def test_swanlab_gets_finite_metrics_and_samples_and_resumes_its_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "swanlab", fake_swanlab(calls))
    logger = make(tmp_path, "swanlab", project="p")
    logger.metrics(2, {"reward/mean": 0.5, "loss/kl": math.nan})
    logger.samples(2, [SAMPLE])
    logger.close()
    make(tmp_path, "swanlab", resume_step=2)
    first, metrics, samples, second = calls
    assert (first["project"], first["name"], first["id"], first["resume"]) == ("p", "r", None, None)
    assert metrics == (2, {"reward/mean": 0.5})
    assert "27 + 58" in samples[1]["samples/train"][1]
    assert (second["id"], second["resume"]) == ("s1", "allow")


def fake_clearml(calls):
    logger = types.SimpleNamespace(
        report_scalar=lambda *args, iteration: calls.append((*args, iteration)),
        report_text=lambda text, print_console: calls.append(text),
    )
    task = types.SimpleNamespace(
        id="c1", set_parameters=calls.append, get_logger=lambda: logger, close=lambda: None
    )
    static = types.SimpleNamespace(
        init=lambda **kw: calls.append(kw) or task, set_random_seed=lambda seed: None
    )
    return module("clearml", Task=static)


def test_clearml_gets_finite_scalars_by_group_and_resumes_its_task(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "clearml", fake_clearml(calls))
    logger = make(tmp_path, "clearml", project="p")
    logger.metrics(2, {"reward/mean": 0.5, "loss/kl": math.nan, "val/a/reward": 1.0})
    logger.samples(2, [SAMPLE])
    make(tmp_path, "clearml", resume_step=2)
    first, parameters, mean, val, samples, second, _ = calls
    assert (first["task_name"], first["reuse_last_task_id"]) == ("r", False)
    assert parameters["rollout.n"] == "8"
    assert (mean, val) == (("reward", "mean", 0.5, 2), ("val", "a/reward", 1.0, 2))
    assert "27 + 58" in samples
    # an offset of 0: ClearML would otherwise number the steps of a resumed task again from its last
    assert (second["reuse_last_task_id"], second["continue_last_task"]) == ("c1", 0)


def fake_trackio(calls):
    def init(**kw):
        calls.append(kw)
        log = lambda values, step: calls.append((step, values))  # noqa: E731
        return types.SimpleNamespace(name=kw["name"], log=log, finish=lambda: None)

    return module("trackio", init=init, Table=lambda columns, data: (columns, data))


def test_trackio_resumes_the_run_of_this_folder_and_no_other_of_the_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "trackio", fake_trackio(calls))
    logger = make(tmp_path / "a", "trackio", project="p")
    logger.metrics(2, {"reward/mean": 0.5})
    logger.samples(2, [SAMPLE])
    make(tmp_path / "b", "trackio", project="p")
    make(tmp_path / "a", "trackio", project="p", resume_step=2)
    first, metrics, samples, other, resumed = calls
    assert metrics == (2, {"reward/mean": 0.5})
    columns, rows = samples[1]["samples/train"]
    assert dict(zip(columns, rows[0], strict=True))["completion"] == "85"
    assert first["name"].startswith("r-") and other["name"] != first["name"] == resumed["name"]
    assert [kw["resume"] for kw in (first, other, resumed)] == ["never", "never", "allow"]


@pytest.fixture
def page():
    return Console(file=io.StringIO(), width=120)


def test_the_console_shows_one_line_per_step_under_a_header(page):
    console = ConsoleLogger(LogConfig(), 10, page)
    for step in (1, 2):
        console.metrics(
            step,
            {
                "reward/mean": 0.25 * step,
                "rollout/response_len": 9.06,
                "loss/kl": math.nan,
                "optim/lr": 1e-5,
                "time/step_s": 30.0,
            },
        )
    header, one, two = page.file.getvalue().splitlines()
    assert header.split()[:3] == ["step", "reward", "len"]
    assert " ".join(one.split()) == "1/10 0.250 9.1 nan - - - - 1e-05 - 30.0 4:30"
    assert two.split()[:2] == ["2/10", "0.500"]
    assert len(header) == len(one)


def test_the_console_shows_validation_in_a_separate_line(page):
    ConsoleLogger(LogConfig(), 10, page).metrics(
        4, {"val/addition/reward": 0.5, "val/reward": 0.75, "time/val_s": 3.0}
    )
    shown = " ".join(page.file.getvalue().split())
    assert shown == "validation after step 4: reward 0.750 addition/reward 0.500 (3.0 s)"


def test_the_console_shows_samples_every_few_steps_without_control_characters(page):
    console = ConsoleLogger(LogConfig(samples_every=5, samples=1), 10, page)
    hostile = SAMPLE | {"completion": "\x1b[2J[red]85[/red]\x07"}
    console.samples(4, [hostile])
    assert page.file.getvalue() == ""
    console.samples(5, [SAMPLE | {"reward": 0.5}, hostile])
    shown = page.file.getvalue()
    assert "[red]85[/red]" in shown
    assert "27 + 58" in shown
    assert "reward 1" in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_the_best_and_the_worst_sample_are_shown_first():
    records = [{"reward": r} for r in (0.5, 0.0, 1.0, 0.5)]
    assert [r["reward"] for r in representative_samples(records, 3)] == [1.0, 0.0, 0.5]
    assert representative_samples(records[:1], 3) == records[:1]


@pytest.mark.parametrize(
    "value, shown",
    [
        (0.4312, "0.431"),
        (0.0, "0.000"),
        (9.06, "9.06"),
        (412.3, "412"),
        (1e-5, "1e-05"),
        (-2e-4, "-2e-04"),
        (math.inf, "inf"),
        (123456.0, "1e+05"),
    ],
)
def test_numbers_are_short(value, shown):
    assert compact(value) == shown
