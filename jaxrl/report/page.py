"""The report page: text and tables; page.js draws the charts and the table of samples."""

import base64
import html
import json
from pathlib import Path
from typing import Any

from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import to_dict
from jaxrl.report.charts import chart_data
from jaxrl.report.document import document, fill
from jaxrl.report.record import (
    MAX_SAMPLE_CHARS,
    MAX_STEP,
    Record,
    as_float,
    cut,
    flatten,
    read_record,
    step_of,
    thin_samples,
)
from jaxrl.report.trajectories import trajectory_rows
from jaxrl.tracking.first_samples import MarkedText
from jaxrl.tracking.samples import IMAGE_NAME

MAX_NAME_CHARS = 300
MAX_VALUE_CHARS = 10_000  # of a config value

FIELDS = (
    *("step", "kind", "prompt_id", "source", "prompt", "completion", "answer", "reward", "finish"),
    *("error", "images"),
)
MAX_PICTURE_BYTES = 8_000_000  # of all images in a page together
MAX_PART_CHARS = 20_000  # of a part of a first sample


def write_report(run_dir: str | Path) -> Path:
    """Writes run_dir/report.html from the files in the folder and returns its path.

    The page embeds its data, style and script, and needs no network. If the run has no metrics yet,
    the page says so. Raises ValueError if `run_dir` is not a folder.
    """
    run_dir = Path(run_dir)
    record = read_record(run_dir)
    out = run_dir / "report.html"
    out.write_text(render(record, run_dir.resolve().name), encoding="utf-8")
    return out


def render(record: Record, folder: str, *, live: bool = False) -> str:
    """The page of a run; a live one asks its server for newer data."""
    shown = page_data(record, folder, live=live)
    main = fill(
        "page.html",
        CARDS="".join(card(*one) for one in shown["cards"]),
        NOTICE=html.escape(shown["notice"]),
        HIDE_NOTICE="" if shown["notice"] else " hidden",
        CONFIG=config_table(record.config),
        LEARNED=first_samples(record),
    )
    scripts = ("charts.js", "samples.js", "trajectories.js", "page.js", *("watch.js",) * live)
    return document(shown["title"], shown["subtitle"], main, data=shown, scripts=scripts)


def page_data(record: Record, folder: str, *, live: bool = False) -> dict[str, Any]:
    """The data of the page, except the configuration."""
    charts, empty = chart_data(record)
    return {
        "title": cut(str(record.config.get("name", folder)), MAX_NAME_CHARS),
        "subtitle": subtitle(record),
        "cards": headlines(record),
        "notice": notice(record, empty, live=live),
        "n_keys": len(record.config),
        "charts": charts,
        "samples": sample_rows(record),
        "pictures": pictures(record, live=live),
        "fields": FIELDS,
        "trajectories": trajectory_rows(record.samples),
    }


def sample_rows(record: Record) -> list[list[Any]]:
    """One list per sample, in the order of FIELDS."""
    samples = thin_samples(record.samples)
    limit = max(MAX_SAMPLE_CHARS // max(2 * len(samples), 1), 500)

    return [[sample_field(sample, name, limit) for name in FIELDS] for sample in samples]


def pictures(record: Record, *, live: bool) -> dict[str, str]:
    """Address of each image of the samples: its data, or its file if a server has the run folder.

    Images beyond MAX_PICTURE_BYTES, and those that are not in the run folder, are left out.
    """
    samples, found, n_bytes = thin_samples(record.samples), {}, 0
    for name in dict.fromkeys(name for sample in samples for name in image_names(sample)):
        path = (record.run_dir or Path()) / name
        if not path.is_file():
            continue
        n_bytes += 0 if live else path.stat().st_size
        if n_bytes > MAX_PICTURE_BYTES:
            break
        data = "" if live else base64.b64encode(path.read_bytes()).decode()
        found[name] = name if live else f"data:image/jpeg;base64,{data}"
    return found


def image_names(sample: dict[str, Any]) -> list[str]:
    """The files of a sample's images, below the run folder."""
    names = sample.get("images")
    names = names if isinstance(names, list) else []
    return [name for name in names if isinstance(name, str) and IMAGE_NAME.fullmatch(name)]


def sample_field(sample: dict[str, Any], name: str, limit: int) -> Any:
    """A field of a sample as the script expects it: a number, or text of at most `limit`.

    `images` is a list of names.
    """
    if name == "images":
        return image_names(sample)
    value = sample.get(name, "")
    if name == "step":
        return step_of(sample)
    if name == "reward":
        return as_float(value)
    if value is None or (name == "prompt_id" and type(value) is int and abs(value) <= MAX_STEP):
        return value
    return cut(value if isinstance(value, str) else json.dumps(value), limit)


def first_samples(record: Record) -> str:
    """The first training sequences as HTML, with the learned text marked; "" without any."""
    if not record.first_samples:
        return ""

    def block(prompt_id: int, parts: list[MarkedText]) -> str:
        texts = ((html.escape(cut(text, MAX_PART_CHARS)), learned) for text, learned in parts)
        marked = "".join(f"<mark>{text}</mark>" if learned else text for text, learned in texts)
        title = html.escape(f"Row {prompt_id}")
        return f'<details open><summary>{title}</summary><pre class="text">{marked}</pre></details>'

    blocks = "".join(block(*sample) for sample in record.first_samples)
    return fill("learned.html", BLOCKS=blocks)


def subtitle(record: Record) -> str:
    config = record.config
    model = str(config.get("model.path", "")).removeprefix("package:").rstrip("/").split("/")[-1]
    sources = config.get("data.train", ())
    sources = sources if isinstance(sources, list) else [sources] if sources else []
    tasks = ", ".join(map(short_source, sources))
    algorithm = str(config.get("algorithm.advantage", "")).upper()
    steps = f"{record.last_step} steps" if record.series else "no steps yet"
    parts = (cut(part, MAX_NAME_CHARS) for part in (model, tasks, algorithm, steps) if part)
    return " · ".join(parts)


def short_source(source: Any) -> str:
    """ "task:addition?digits=1" -> "addition"; "/a/b/gsm8k.parquet" -> "gsm8k.parquet"."""
    return str(source).split("?")[0].split("/")[-1].split(":")[-1]


def headlines(record: Record) -> list[tuple[str, str, str]]:
    """(label, value, note) of the numbers at the top of the page."""
    many = max(record.last_step // 20, 1)
    cards = [
        change(
            record, "val/reward", "Validation accuracy", "held-out prompts, before and after", 1
        ),
        change(record, "val/nll", "Validation loss", "nats per token, before and after", 1),
        change(record, "val/accuracy", "Preference accuracy", "held-out pairs", 1),
        change(
            record,
            "reward/mean",
            "Training reward",
            f"mean of the first and the last {many} steps",
            many,
        )
        if many > 1
        else change(record, "reward/mean", "Training reward", "first and last step", 1),
        change(record, "rollout/response_len", "Response length", "tokens, first and last", many),
    ]
    speed = record.last("perf/tokens_per_s", len(record.series.get("perf/tokens_per_s", ())))
    if speed is not None:
        cards.append(("Throughput", f"{speed:,.0f}", "tokens per second, whole step"))
    seconds = record.total(("time/step_s", "time/val_s", "time/save_checkpoint_s"))
    if seconds:
        validation = record.total(("time/val_s",))
        cards.append(("Time", clock(seconds), f"{clock(validation)} of it validation"))
    if errors := record.total(("reward/errors",)):
        cards.append(("Reward errors", f"{errors:,.0f}", "responses without a value"))
    return [one for one in cards if one is not None]


def change(
    record: Record, metric: str, label: str, small: str, mean_of: int
) -> tuple[str, str, str] | None:
    before, after = record.first(metric, mean_of), record.last(metric, mean_of)
    if before is None or after is None:
        return None
    if len(record.series[metric]) == 1:
        return label, number(after), f"at step {record.series[metric][0][0]}"
    return label, f"{number(before)} → {number(after)}", small


def number(value: float) -> str:
    return (
        f"{value:.3f}"
        if abs(value) < 10
        else f"{value:,.1f}"
        if abs(value) < 1000
        else f"{value:,.0f}"
    )


def clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {whole % 60:02} s"


def card(label: str, value: str, small: str) -> str:
    label, value, small = map(html.escape, (label, value, small))
    value = value.replace("→", '<span class="arrow">→</span>')
    return f'<div class="card"><h3>{label}</h3><p>{value}</p><small>{small}</small></div>'


def notice(record: Record, empty: list[str], *, live: bool) -> str:
    """A note about metrics that are missing; "" if none is."""
    if not record.series:
        words = (
            "There are no metrics in this run folder yet. They appear in metrics.jsonl after the "
            "first validation or step, with 'jsonl' in config.log.loggers. "
        )
        words += (
            "This page waits for them."
            if live
            else "Then write this report again with python -m jaxrl.report RUN_DIR."
        )
    elif empty:
        words = f"Not logged in this run: {', '.join(empty)}."
    else:
        return ""
    return words


def config_table(config: dict[str, Any]) -> str:
    """All config keys; those that differ from the defaults come first."""
    if not config:
        return '<p class="notice">There is no config.json in this run folder.</p>'
    defaults = flatten(json.loads(json.dumps(to_dict(RunConfig()))))
    changed = {key: value for key, value in config.items() if defaults.get(key) != value}
    same = {key: value for key, value in config.items() if key not in changed}

    def rows(values: dict[str, Any]) -> str:
        texts = {key: cut(shown(value), MAX_VALUE_CHARS) for key, value in values.items()}
        cells = (
            f"<tr><td>{html.escape(key)}</td><td>{html.escape(text)}</td></tr>"
            for key, text in texts.items()
        )
        return f"<table>{''.join(cells)}</table>"

    return (
        f"<details><summary>Configuration: {len(changed)} keys set</summary>{rows(changed)}"
        f"<details><summary>{len(same)} defaults</summary>{rows(same)}</details></details>"
    )


def shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else json.dumps(value).strip('"')
