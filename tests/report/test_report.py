"""The report: one self-contained file that no completion can break.

Tests of jaxrl/report: __main__.py, charts.py, curve.py, page.py and record.py, and of web/.
"""

import html.parser
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.config.saved import to_json
from jaxrl.report import write_report
from jaxrl.report.__main__ import main
from jaxrl.report.charts import MAX_LINES, chart_data
from jaxrl.report.curve import write_curve_svg
from jaxrl.report.page import FIELDS, MAX_PICTURE_BYTES, page_data
from jaxrl.report.record import cut, read_record, thin, thin_samples
from jaxrl.tracking.first_samples import write_first_samples

HOSTILE = "</script><script>alert(1)</script><b>\u2028 & 'quoted'"


def sample(step, kind="train", reward=0.0, **changes):
    fields = {
        "step": step,
        "kind": kind,
        "prompt_id": 7,
        "sample": 0,
        "source": "addition",
        "prompt": "What is 27 + 58?",
        "completion": "84",
        "answer": "85",
        "reward": reward,
        "finish": "stop",
        "error": "",
    }
    return fields | changes


def write_run(folder, metrics, samples=(), config=None):
    folder.mkdir(exist_ok=True)
    for name, lines in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (folder / "config.json").write_text(to_json(config))
    return folder


@pytest.fixture
def run(tmp_path):
    steps = [
        {
            "step": step,
            "time": 1.0,
            "reward/mean": step / 10,
            "loss/kl": "NaN" if step == 2 else 0.1,
            "time/gen_s": 2.0,
            "time/update_actor_s": 3.0,
            "time/step_s": 5.5,
        }
        for step in (1, 2, 3)
    ]
    before, after = ({"step": s, "time": 1.0, "val/reward": v} for s, v in ((0, 0.0), (3, 0.75)))
    samples = [sample(0, "val"), sample(1, completion=HOSTILE), sample(3, "val", reward=1.0)]
    config = RunConfig(name="my <run>", total_steps=3)
    return write_run(tmp_path / "run", [before, *steps, after], samples, config)


class Page(html.parser.HTMLParser):
    """Elements with their attributes, and the text of the script elements."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.words = [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.elements[-1:] and self.elements[-1][0] == "script":
            self.scripts[-1] += data
        else:
            self.words += data


def page_of(folder) -> tuple[str, Page]:
    text = write_report(folder).read_text()
    return text, Page(text)


def data_of(page: Page) -> dict:
    return json.loads(page.scripts[0])


def test_the_page_holds_the_numbers_of_the_run(run):
    _, page = page_of(run)
    assert "0.000 → 0.750" in page.words  # validation before and after
    assert "0.100 → 0.300" in page.words  # training reward, first and last step
    assert "my <run>" in page.words
    charts = {chart["title"]: chart for chart in data_of(page)["charts"]}
    assert charts["Reward"]["lines"][0]["points"] == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert charts["Validation accuracy"]["lines"][0]["points"] == [[0, 0.0], [3, 0.75]]
    assert charts["KL"]["lines"][0]["points"][1] == [2, None]  # NaN is a gap


def test_step_time_is_split_into_phases_and_other(run):
    charts, _ = chart_data(read_record(run))
    time = next(chart for chart in charts if chart["title"] == "Time per phase")
    parts = {line["label"]: [v for _, v in line["points"]] for line in time["lines"]}
    # 5.5 s per step - 2 s rollout - 3 s update = 0.5 s
    assert parts == {"rollout": [2.0] * 3, "update": [3.0] * 3, "other": [0.5] * 3}


def test_the_page_names_metrics_that_were_not_logged(run):
    _, page = page_of(run)
    assert "Not logged in this run:" in page.words
    assert "Clip fraction" in page.words


def test_the_page_needs_no_network(run):
    text, page = page_of(run)
    for tag, attrs in page.elements:
        assert tag not in ("link", "iframe", "img", "base")
        assert not {"src", "href", "srcset", "action"} & set(attrs), (tag, attrs)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|sendBeacon", text)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_a_completion_cannot_end_the_script_or_become_markup(run):
    text, page = page_of(run)
    assert len(page.scripts) == 2
    assert "alert(1)</script>" not in text
    assert "<b>" not in text
    data = data_of(page)
    completions = [row[data["fields"].index("completion")] for row in data["samples"]]
    assert HOSTILE in completions
    assert "innerHTML" not in page.scripts[1]


def test_the_first_samples_are_shown_with_what_is_learned_marked(run):
    parts = [["<|im_start|>user\n2?", False], [HOSTILE, True], ["\n", False], ["4", True]]
    write_first_samples(run, [(3, [(text, learned) for text, learned in parts])])
    with (run / "first_samples.jsonl").open("a") as file:
        file.write('{"prompt_id": 4, "parts": [["x"]]}\n{"par')  # damaged lines are skipped
    text, page = page_of(run)
    assert [tag for tag, _ in page.elements].count("mark") == 2 and "What is learned" in page.words
    assert page.words.count("Row ") == 1 and "<|im_start|>user" in page.words
    assert HOSTILE in page.words and "<mark>4</mark>" in text
    assert len(page.scripts) == 2


def test_a_run_without_first_samples_has_no_such_section(run):
    assert "What is learned" not in page_of(run)[0]


def test_markup_in_the_config_is_shown_as_text(tmp_path):
    run = write_run(
        tmp_path / "x", [{"step": 1, "reward/mean": 1.0}], config=RunConfig(name=HOSTILE)
    )
    _, page = page_of(run)
    assert len(page.scripts) == 2
    assert "alert(1)" in page.words


def test_all_elements_are_closed(run):
    text, _ = page_of(run)
    opened = []
    void = {"meta", "input", "br"}

    class Closing(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in void:
                opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Closing().feed(text)
    assert opened == []


@pytest.mark.skipif(not shutil.which("node"), reason="needs node to parse the script")
def test_the_script_parses(run, tmp_path):
    _, page = page_of(run)
    script = tmp_path / "page.js"
    script.write_text(page.scripts[1])
    subprocess.run(["node", "--check", script], check=True)


def test_a_run_without_metrics_says_so(tmp_path):
    _, page = page_of(write_run(tmp_path / "new", []))
    assert "There are no metrics in this run folder yet" in page.words
    assert "There is no config.json" in page.words
    assert data_of(page)["charts"] == data_of(page)["samples"] == data_of(page)["cards"] == []


def test_truncated_lines_are_skipped(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')
    assert read_record(run).last_step == 3


def test_the_later_line_of_a_repeated_step_counts(tmp_path):
    run = write_run(tmp_path / "x", [{"step": 1, "a": 1.0}, {"step": 1, "a": 2.0}])
    assert read_record(run).series == {"a": [(1, 2.0)]}


def test_the_page_of_a_long_run_has_a_few_megabytes(tmp_path):
    metrics = [{"step": s, "reward/mean": s / 5000} for s in range(1, 5001)]
    samples = [sample(s, completion="x" * 5000) for s in range(1, 5001) for _ in range(2)]
    text, page = page_of(write_run(tmp_path / "long", metrics, samples))
    assert len(text) < 8_000_000
    data = data_of(page)
    points = data["charts"][0]["lines"][0]["points"]
    assert 400 <= len(points) <= 800
    assert points[-1][0] == 5000
    assert len(data["samples"]) == 3000
    assert {row[0] for row in data["samples"]} >= {1, 5000}
    assert "characters left out" in data["samples"][0][5]


def test_thinned_points_are_means_of_their_neighbours():
    points = [(1, 1.0), (2, 3.0), (3, math.nan), (4, 5.0), (5, 7.0)]
    assert thin(points, 3) == [(2, 2.0), (4, 5.0), (5, 7.0)]
    assert thin(points, 3, largest=True) == [(2, 3.0), (4, 5.0), (5, 7.0)]


def test_thinned_samples_keep_first_and_last_validation_and_every_training_step():
    samples = [
        sample(s, kind) for s in range(0, 101, 10) for kind in ["val"] * 20 + ["train"] * 200
    ]
    kept = thin_samples(samples, 400)
    assert len(kept) == 400
    counts = {
        (kind, s): sum(k["kind"] == kind and k["step"] == s for k in kept)
        for kind in ("val", "train")
        for s in range(0, 101, 10)
    }
    assert counts["val", 0] == counts["val", 100] == 20
    assert min(counts.values()) >= 5
    assert kept == [s for s in samples if any(s is k for k in kept)]  # in the original order


def test_the_middle_of_a_long_text_is_left_out():
    assert cut("abcdefghij", 4) == "ab\n[... 6 characters left out ...]\nij"
    assert cut("abcd", 4) == "abcd"


def test_the_curve_is_an_svg_of_reward_and_validation(run, tmp_path):
    root = ET.parse(write_curve_svg(run, tmp_path / "curve.svg")).getroot()
    assert root.tag.endswith("svg")
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == 2  # two validations
    words = " ".join(e.text or "" for e in root.iter() if e.tag.endswith("text"))
    assert "training reward" in words
    assert "my <run>" in words
    first, last = (float(c.get("cy")) for c in circles)
    assert last < first  # higher accuracy is drawn higher


def test_a_curve_of_one_step_is_drawn(tmp_path):
    run = write_run(tmp_path / "one", [{"step": 1, "reward/mean": 0.5}])
    ET.parse(write_curve_svg(run, tmp_path / "curve.svg"))


def test_a_curve_without_data_raises_with_the_remedy(tmp_path):
    run = write_run(tmp_path / "none", [{"step": 1, "reward/mean": "NaN"}])
    with pytest.raises(ValueError, match="train at least one step"):
        write_curve_svg(run, tmp_path / "curve.svg")


def test_the_command_prints_the_files_it_writes(run, tmp_path, capsys):
    assert main([str(run), "--curve", str(tmp_path / "c.svg")]) == 0
    assert capsys.readouterr().out.split() == [str(run / "report.html"), str(tmp_path / "c.svg")]


def test_the_command_rejects_a_missing_folder(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "is not a folder; pass a run folder" in capsys.readouterr().err


DEEP = "[" * 5000 + "]" * 5000
STEPS = ["-1", '"7"', "[1]", "1e999", "NaN", "null", "true", "1.5", "1" * 400, DEEP]


@pytest.mark.parametrize("step", STEPS, ids=lambda text: text[:8])
def test_lines_with_a_step_that_is_none_are_left_out(tmp_path, step):
    run = write_run(tmp_path / "x", [{"step": 1, "reward/mean": 0.5}], [sample(1)])
    for name, rest in (("metrics", '"reward/mean": 9.0'), ("samples", '"completion": "x"')):
        with open(run / f"{name}.jsonl", "a") as file:
            file.write(f'{{"step": {step}, {rest}}}\n')
    record = read_record(run)
    assert record.series["reward/mean"] == [(1, 0.5)]
    assert [one["step"] for one in record.samples] == [1]
    page_of(run)


@pytest.mark.parametrize("value", ["1" * 400, "-" + "1" * 400, "1e999", DEEP, "[]", "true"])
def test_metrics_that_are_no_number_are_left_out(tmp_path, value):
    run = write_run(tmp_path / "x", [{"step": 1, "reward/mean": 0.5}])
    with open(run / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": 2, "reward/mean": {value}}}\n')
    assert read_record(run).series["reward/mean"] == [(1, 0.5)]


def test_fields_of_samples_are_text_or_numbers_of_bounded_size(tmp_path):
    odd = {"prompt": {"a": [HOSTILE]}, "completion": ["x" * 10_000_000], "answer": 5, "kind": 7}
    line = {"step": 1, "reward": "NaN", "prompt_id": 10**40} | odd
    run = write_run(tmp_path / "x", [{"step": 1, "reward/mean": 0.5}], [line])
    shown = dict(zip(FIELDS, page_data(read_record(run), "x")["samples"][0], strict=True))
    assert shown["prompt"] == json.dumps(odd["prompt"]) and shown["answer"] == "5"
    assert len(shown["completion"]) < 4_000_000 and math.isnan(shown["reward"])
    assert shown["kind"] == "7" and shown["prompt_id"] == "1" + "0" * 40
    assert HOSTILE not in page_of(run)[0]


@pytest.mark.parametrize(
    "text", ["[]", "5", DEEP, '{"data": {"train": 5}, "name": [1]}', '{"a": 1e999}', "\xff"]
)
def test_a_config_that_is_none_does_not_stop_the_report(tmp_path, text):
    run = write_run(tmp_path / "x", [{"step": 1, "reward/mean": 0.5}])
    (run / "config.json").write_text(text, encoding="latin-1")
    page_of(run)


def test_a_run_with_many_rewards_draws_a_bounded_number_of_lines(tmp_path):
    metrics = {"step": 1, "reward/mean": 0.5} | {f"reward/r{i}": 0.5 for i in range(5000)}
    charts, _ = chart_data(read_record(write_run(tmp_path / "x", [metrics])))
    assert len(charts[0]["lines"]) <= MAX_LINES + 1


def test_images_of_samples_are_in_the_page_and_only_those_of_the_run_folder(tmp_path):
    names = [f"images/{digit * 16}.jpg" for digit in "0123"]
    hostile = ["../config.json", "images/../metrics.jsonl", 7, "images/0.jpg"]
    records = [sample(1, images=[*names, *hostile]), sample(1, images="x"), sample(2)]
    write_run(tmp_path / "run", [{"step": 1, "time": 1.0, "reward/mean": 0.5}], records)
    (tmp_path / "run" / "images").mkdir()
    for name, size in zip(names, (3, 5, MAX_PICTURE_BYTES), strict=False):  # not the last one
        (tmp_path / "run" / name).write_bytes(b"x" * size)
    page = page_data(read_record(tmp_path / "run"), "run")
    assert page["pictures"] == {
        names[0]: "data:image/jpeg;base64,eHh4",
        names[1]: "data:image/jpeg;base64,eHh4eHg=",
    }
    at = FIELDS.index("images")
    assert [row[at] for row in page["samples"]] == [names, [], []]
    live = page_data(read_record(tmp_path / "run"), "run", live=True)["pictures"]
    assert live == {name: name for name in names[:3]}
