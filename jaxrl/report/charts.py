"""The charts of a report and the metrics that each of them shows."""

import dataclasses
from typing import Any

from jaxrl.config.choices import GIVEN_PARTS
from jaxrl.report.record import Points, Record, thin

PHASES = {
    "time/gen_s": "rollout",
    "time/reward_s": "reward",
    "time/old_log_prob_s": "old logprobs",
    "time/ref_s": "reference",
    "time/values_s": "values",
    "time/adv_s": "experience",
    "time/update_critic_s": "critic update",
    "time/update_actor_s": "update",
    "time/save_checkpoint_s": "save",
}
MAX_LINES = 40  # of a chart


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart; `lines` maps metrics to legends."""

    title: str
    note: str
    lines: dict[str, str]
    unit: str = ""  # "fraction": the axis is 0 to 1; "s", ...
    kind: str = "line"  # "line" | "dots" (few points, each marked) | "stack"
    scale: str = "linear"  # "linear" | "log"


def all_charts(record: Record) -> list[Chart]:
    """All charts in page order, including those whose metrics were not logged."""
    offline = any(name in record.series for name in ("loss/nll", "preference/loss"))
    return [*(offline_charts(record) if offline else rl_charts(record)), *update_charts()]


def offline_charts(record: Record) -> list[Chart]:
    """Charts of an offline run: SFT, DPO or reward modelling."""
    preference_charts = [
        Chart(
            "Preference accuracy",
            "pairs whose chosen response has the larger reward",
            {"preference/accuracy": "training", "val/accuracy": "held out"},
            unit="fraction",
        ),
        Chart(
            "Rewards of responses",
            "β log π / π_ref",
            {"preference/reward_chosen": "chosen", "preference/reward_rejected": "rejected"},
        ),
    ]
    return [
        Chart(
            "Loss",
            "nats per token (SFT) or per pair",
            {"loss/nll": "training", "preference/loss": "training"}
            | {"val/nll": "held out", "val/loss": "held out"},
        ),
        *(preference_charts if "preference/loss" in record.series else []),
        Chart("Entropy", "nats per token", {"loss/entropy": "entropy"}),
    ]


def rl_charts(record: Record) -> list[Chart]:
    """Charts of a run with rollouts."""
    rewards = [name for name in record.series if name.startswith("reward/")]
    others = ("reward/mean", "reward/std", "reward/errors", "reward/dropped_groups")
    parts = [name for name in rewards if name not in others]
    parts = parts if len(parts) > 1 else []  # one function is the reward itself
    per_source = [n for n in record.series if n.startswith("val/") and n.count("/") == 2]
    per_source = [n for n in per_source if n.endswith("/reward")]
    return [
        Chart("Reward", "mean over samples", {"reward/mean": "reward"} | legend(parts, "reward/")),
        Chart(
            "Validation accuracy",
            "held-out prompts",
            {"val/reward": "all"} | legend(per_source, "val/", "/reward"),
            unit=unit_of(record, "val/reward"),
            kind="dots",
        ),
        Chart(
            "Response length",
            "tokens",
            {"rollout/response_len": "training", "val/response_len": "validation"},
        ),
        Chart(
            "Truncated responses",
            "at the length limit",
            {"rollout/truncated_fraction": "training", "val/truncated_fraction": "validation"},
            unit="fraction",
        ),
        *policy_charts(record),
    ]


def policy_charts(record: Record) -> list[Chart]:
    """Charts of a run with rollouts: policy loss, critic, rollout-trainer mismatch."""
    kinds = tuple(f"loss/{tokens}" for tokens in GIVEN_PARTS)
    parts = [n for n in record.series if n.startswith(kinds)]
    parts = [n for n in parts if not n.endswith(("_tokens", "_weight"))]
    return [
        Chart(
            "KL",
            "nats per token",
            {
                "loss/kl": "to the reference policy",
                "reward/kl": "to the reference policy, in the reward",
                "loss/approx_kl": "to the sampling policy",
            },
        ),
        Chart("Entropy", "nats per token", {"loss/entropy": "entropy"}),
        Chart("Cross-entropy of parts", "nats per token", legend(parts, "loss/")),
        Chart("Clip fraction", "tokens whose ratio was clipped", {"loss/clip_fraction": "clipped"}),
        *(value_charts() if "critic/loss" in record.series else []),
        Chart(
            "Rollout-trainer mismatch",
            "difference of a token's logprob",
            {
                "mismatch/logp_diff_max": "largest",
                "mismatch/logp_diff_mean": "mean",
                "mismatch/kl": "KL",
            },
            scale="log",
        ),
    ]


def value_charts() -> list[Chart]:
    """Charts of the critic."""
    return [
        Chart("Value loss", "half the squared error of a value", {"critic/loss": "loss"}),
        Chart(
            "Values",
            "means over tokens",
            {"critic/value_mean": "values", "critic/return_mean": "returns"},
        ),
        Chart(
            "Explained variance",
            "of the returns, by the values before the update",
            {"critic/explained_variance": "explained"},
        ),
    ]


def update_charts() -> list[Chart]:
    """Charts of every run: optimizer, time and throughput."""
    return [
        Chart(
            "Gradient norm",
            "before clipping",
            {"optim/grad_norm": "norm", "critic/grad_norm": "of the critic"},
        ),
        Chart("Learning rate", "at the end of the step", {"optim/lr": "rate"}),
        Chart(
            "Time per phase",
            "seconds of a step",
            PHASES | {"other": "other"},
            unit="s",
            kind="stack",
        ),
        Chart(
            "Throughput",
            "tokens per second",
            {"rollout/tokens_per_s": "generated", "perf/tokens_per_s": "whole step"},
        ),
        Chart(
            "Cache and batch",
            "fraction in use",
            {
                "rollout/cache_utilization": "KV pages in use",
                "rollout/prefix_hit_rate": "prefix cache hits",
                "perf/padding_fraction": "padding of packed rows",
            },
            unit="fraction",
        ),
    ]


def legend(names: list[str], prefix: str, suffix: str = "") -> dict[str, str]:
    """The first MAX_LINES metrics with their legends."""
    return {name: name.removeprefix(prefix).removesuffix(suffix) for name in names[:MAX_LINES]}


def unit_of(record: Record, metric: str) -> str:
    """ "fraction" if all values are between 0 and 1, else ""."""
    values = [v for _, v in record.series.get(metric, ())]
    return "fraction" if all(0 <= v <= 1 for v in values) else ""


def other_time(record: Record) -> Points:
    """Seconds of each step that belong to no phase."""
    phases = {
        name: dict(record.series.get(name, ()))
        for name in PHASES
        if name != "time/save_checkpoint_s"
    }
    return [
        (step, max(whole - sum(phase.get(step, 0.0) for phase in phases.values()), 0.0))
        for step, whole in record.series.get("time/step_s", ())
    ]


def chart_data(record: Record) -> tuple[list[dict[str, Any]], list[str]]:
    """(charts with data in the format of page.js, titles of the charts without data)."""
    charts, empty = [], []
    series = record.series | {"other": other_time(record)}
    for chart in all_charts(record):
        points = {name: series[name] for name in chart.lines if series.get(name)}
        if chart.kind == "stack":
            points = on_common_steps(points)
        lines = [
            {"label": chart.lines[name], "points": thin(of, largest=name.endswith("_max"))}
            for name, of in points.items()
        ]
        if lines:
            charts.append(
                dataclasses.asdict(chart) | {"lines": lines, "legend": len(chart.lines) > 1}
            )
        else:
            empty.append(chart.title)
    return charts, empty


def on_common_steps(lines: dict[str, Points]) -> dict[str, Points]:
    """Lines with the steps of the longest one, for stacking; missing values are 0."""
    lines = {name: points for name, points in lines.items() if any(v > 0 for _, v in points)}
    if not lines:
        return {}
    steps = [step for step, _ in max(lines.values(), key=len)]
    values = {name: dict(points) for name, points in lines.items()}
    return {name: [(s, by_step.get(s, 0.0)) for s in steps] for name, by_step in values.items()}
