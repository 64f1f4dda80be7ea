"""python -m jaxrl.evaluate --model=runs/quickstart: reward and pass@k with standard errors."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.config.arguments.evaluate import read
from jaxrl.config.keys import RunConfig
from jaxrl.runtime.start import begin_loading, end_loading

if __name__ == "__main__":  # answers a mistyped argument before the imports that take seconds
    CONFIG = read(sys.argv[1:])
    begin_loading()

from jaxrl.rewards.model_judge.calibration import calibrate
from jaxrl.rewards.worker_thread import OwnFunctions
from jaxrl.runtime.signals import Interrupted, stop_on_signals
from jaxrl.tracking.json_lines import JsonLines, json_safe
from jaxrl.tracking.sample_images import write_images
from jaxrl.trainer.core import sampling_seed
from jaxrl.trainer.evaluation import by_source, statistics
from jaxrl.trainer.loop import exit_status
from jaxrl.trainer.phases.rewards import (
    RewardErrors,
    RewardsFailed,
    images_of,
    sample_records,
)
from jaxrl.trainer.phases.sampling import score
from jaxrl.trainer.phases.trajectories import trajectories
from jaxrl.trainer.setup.opening import open_evaluation
from jaxrl.types import ScoredRollout
from sharding import hosts


def evaluate(cfg: RunConfig, own_rewards: OwnFunctions | None = None) -> bool:
    """Samples and rewards the prompts of data.val, and writes the statistics and the samples.

    `own_rewards` is as in `open_evaluation`. Returns False if it was interrupted. Then it writes no
    file. Raises RewardsFailed, after writing the files, if too many rewards failed.
    """
    if cfg.eval.judge_labels:
        return evaluate_judge(cfg)
    start = time.monotonic()
    try:
        with open_evaluation(cfg, own_rewards) as opened, stop_on_signals(opened.engines.stop):
            end_loading()
            engines = opened.engines
            rollouts, speed = engines.sample(
                opened.params,
                opened.prompts,
                n=cfg.eval.n,
                sampling=cfg.eval.sampling,
                seed=sampling_seed(cfg.seed, 0, validation=True),
                version=0,
                name="evaluation",
            )
            with engines.progress.waiting("rewards"):
                scored = score(opened.rewards.score, opened.reward_model, rollouts, engines.stop)
            summary = summarize(scored, cfg) | {
                "tokens_per_s": speed["rollout/tokens_per_s"],
                "seconds": time.monotonic() - start,
            }
            if hosts.is_main_process():
                n = cfg.log.trajectories
                found = trajectories(scored, {}, engines.renderer, n) if n else {}
                write(cfg.run_path, summary, scored, found)
                print(table(summary))
                engines.progress.status(f"summary.json and samples.jsonl in {cfg.run_path}")
            RewardErrors(cfg.reward.max_error_fraction).check(scored, "evaluation")
    except Interrupted as signal:
        print(f"{signal}: no results were written", file=sys.stderr)
        return False
    return True


def evaluate_judge(cfg: RunConfig) -> bool:
    """Compares a judge with the labels of eval.judge_labels, and writes calibration.json.

    Raises RewardsFailed, after writing the file, if the judge failed for too many responses.
    """
    folder = cfg.run_path
    folder.mkdir(parents=True, exist_ok=True)
    found = calibrate(cfg.reward, cfg.eval.judge_labels, folder)
    (folder / "calibration.json").write_text(json.dumps(json_safe(found), indent=2) + "\n")
    print(agreement_table(found["results"]))
    errors = [one["error"] for one in found["verdicts"] if one["error"]]
    n, most = len(found["verdicts"]), cfg.reward.max_error_fraction
    print(f"{n} responses, {len(errors)} without a verdict; {folder / 'calibration.json'}")
    if len(errors) > most * n:
        raise RewardsFailed(
            f"the judge failed for {len(errors)} of {n} responses, more than "
            f"config.reward.max_error_fraction={most:g} allows. First error: {errors[0]}"
        )
    return True


def agreement_table(results: dict[str, dict[str, float]]) -> str:
    """One line per criterion, and one for the score."""
    titles = ("agreement", "kappa", "spearman", "bias")
    width = max([9, *map(len, results)])
    lines = [f"{'criterion':<{width}}{'n':>7}" + "".join(f"{title:>11}" for title in titles)]
    for name, found in results.items():
        cells = [f"{found[title]:.3f}" if title in found else "" for title in titles]
        lines.append(
            f"{name:<{width}}{found['n']:>7.0f}" + "".join(f"{cell:>11}" for cell in cells)
        )
    return "\n".join(lines)


def summarize(rollouts: Sequence[ScoredRollout], cfg: RunConfig) -> dict:
    """The content of summary.json: settings, and statistics of all data and of each source."""
    groups = {"all": rollouts, **by_source(rollouts)}
    return {
        "model": cfg.model.path,
        "data": list(cfg.data.val),
        "rewards": list(cfg.reward.functions),
        "reward_model": cfg.reward_model.path,
        "n": cfg.eval.n,
        "seed": cfg.seed,
        "sampling": dataclasses.asdict(cfg.eval.sampling),
        "max_response_len": cfg.data.max_response_len,
        "results": {
            source: {"prompts": len(group) // cfg.eval.n} | statistics(group, cfg.eval)
            for source, group in groups.items()
        },
    }


def write(
    folder: Path,
    summary: dict[str, Any],
    rollouts: Sequence[ScoredRollout],
    found: dict[int, dict[str, Any]],
) -> None:
    """Writes summary.json and samples.jsonl; `found` are trajectories by index of the sample."""
    samples = JsonLines(folder / "samples.jsonl", resume_step=None)
    samples.write(*sample_records(rollouts, kind="evaluation", trajectories=found))
    samples.close()
    write_images(folder, images_of(rollouts))
    (folder / "summary.json").write_text(json.dumps(json_safe(summary), indent=2) + "\n")


def table(summary: dict) -> str:
    """One line per data source: means with half the width of their 95% confidence interval."""
    results = summary["results"]
    if len(results) == 2:  # one source, the same as "all"
        results = {"all": results["all"]}
    ks = [name for name in results["all"] if name.startswith("pass_at_") and "stderr" not in name]
    titles = ("reward", *ks)
    width = max(8, *map(len, results))
    lines = [
        f"{'source':<{width}}{'prompts':>9}"
        + "".join(f"{title:>16}" for title in titles)
        + f"{'length':>9}{'cut off':>9}{'errors':>8}"
    ]
    for source, found in results.items():
        cells = "".join(f"{interval(found, name):>16}" for name in titles)
        lines.append(
            f"{source:<{width}}{found['prompts']:>9}{cells}{found['response_len']:>9.1f}"
            f"{found['truncated_fraction']:>9.3f}{found['errors']:>8.0f}"
        )
    return "\n".join(lines)


def interval(found: dict, name: str) -> str:
    """The 95% confidence interval as text, "0.431 ± 0.052": the mean ± 1.96 standard errors."""
    error = found.get(f"{name}_stderr")
    return f"{found[name]:.3f}" + (f" ± {1.96 * error:.3f}" if error is not None else "")


if __name__ == "__main__":
    sys.exit(exit_status(evaluate, CONFIG))
