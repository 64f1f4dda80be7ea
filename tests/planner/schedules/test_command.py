"""`python -m jaxrl.plan --schedule=...` (jaxrl/planner/options.py and schedules/report.py)."""

import json
import pathlib

import pytest

from jaxrl.json_text import parse_json
from jaxrl.plan import main, read

ROOT = pathlib.Path(__file__).parents[3]
QUICKSTART = (
    f"--config={ROOT / 'configs' / 'quickstart.py'}",
    "--config.mesh.fsdp=2",
    "--config.model.layers=stacked",
    "--config.learner.halvings=0",
    f"--plan={ROOT / 'docs' / 'plans' / 'quickstart.cpu-2.json'}",
)


def printed(capsys, *options: str) -> str:
    assert main(read([*QUICKSTART, *options])) == 0
    return capsys.readouterr().out


def test_a_saved_plan_is_simulated_without_compiling(tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("2 2 2 2 2 2 2 16\n4 4 4 4 4 4 4 8\n")
    text = printed(capsys, "--schedule=async", f"--lengths={lengths}")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in row] for row in rows[1:]] == [
        ["sync", "2"],
        ["async", "1 + 1"],
    ]
    assert "best: " in text and "peak rates" in text
    partial = printed(capsys, "--schedule=partial", f"--lengths={lengths}")
    assert "| partial  | 2 " in partial


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule=later", "--lengths=x"], "set one of sync, partial, async"),
        (["--schedule=async"], "--lengths is missing"),
        (["--lengths=x"], "set --schedule=async as well"),
        (["--schedule=sync", "--lengths=x", "--max-staleness=1"], "sync has no staleness"),
        (["--schedule=async", "--lengths=x", "--max-staleness=0.5"], "0 or more whole steps"),
        (["--schedule=partial", "--lengths=x", "--rollout-devices=1"], "is for --schedule=async"),
        (["--schedule=async", "--lengths=x", "--rollout-devices=two"], "=two is not a number"),
        (["--schedule=async", "--lengths=missing.txt"], "No such file"),
        (
            ["--schedule=async", "--lengths=lognormal?mean=8", "--rollout-devices=2"],
            "2 rollout devices of 2 leave 0 for training",
        ),
        (
            [
                "--schedule=async",
                "--lengths=lognormal?mean=8",
                "--config.schedule.mode=async",
                "--config.schedule.rollout_devices=1",
            ],
            "plan runs on all devices",
        ),
        (
            ["--schedule=sync", "--lengths=lognormal?mean=8", "--config.rollout.n=4"],
            "config.rollout.n: 8 in the file, 4 here",
        ),
        (
            [
                "--schedule=sync",
                "--lengths=lognormal?mean=8",
                "--config.mesh.fsdp=1",
                "--config.mesh.tensor=2",
            ],
            "config.mesh.tensor: 'not set' in the file, 2 here",
        ),
    ],
)
def test_options_that_cannot_be_simulated_are_rejected(options, message):
    with pytest.raises(SystemExit, match=message):
        main(read([*QUICKSTART, *options]))


def test_a_plan_that_does_not_name_its_config_is_rejected(tmp_path):
    plan = parse_json((ROOT / "docs" / "plans" / "quickstart.cpu-2.json").read_text())
    del plan["config"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    options = [*QUICKSTART[:-1], f"--plan={file}", "--schedule=sync", "--lengths=lognormal?mean=8"]
    with pytest.raises(SystemExit, match="does not say for which config it is; write it again"):
        main(read(options))
