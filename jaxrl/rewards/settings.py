"""How the pool calls each reward function: limits, batches, and options that keys set."""

from pathlib import Path
from typing import Any

from jaxrl.config.keys import JudgeConfig, RewardConfig
from jaxrl.config.plugins import options
from jaxrl.rewards.calls import CallSettings
from jaxrl.rewards.functions import POOL_OPTIONS, is_judge, judges_pairs, pool_option
from jaxrl.rewards.model_judge.verdicts import longest_s

FOLDER = "judge"  # of the run folder, for verdicts


def call_settings(cfg: RewardConfig, run_folder: Path | None) -> list[CallSettings]:
    """The settings of each of cfg.functions; options after its '?' replace those of keys.

    Raises ValueError for a pool option that is no positive number.
    """
    return [_settings(spec, cfg, run_folder) for spec in cfg.functions]


def _settings(spec: str, cfg: RewardConfig, run_folder: Path | None) -> CallSettings:
    defaults, keywords = POOL_OPTIONS | {"timeout_s": cfg.timeout_s}, {}
    if is_judge(spec) or judges_pairs(spec):
        more = pair_options(cfg.judge) if judges_pairs(spec) else {}
        keywords = judge_options(cfg.judge, run_folder) | more | options(spec)
        defaults["concurrency"] = keywords["requests"]
        defaults["timeout_s"] = longest_s(keywords["attempts"], keywords["request_s"])
    found = {name: pool_option(spec, name, float(default)) for name, default in defaults.items()}
    given = options(spec)
    return CallSettings(
        found["timeout_s"],
        int(found["concurrency"]),
        int(found["batch_size"]),
        {name: value for name, value in keywords.items() if name not in given},
    )


def judge_options(cfg: JudgeConfig, run_folder: Path | None) -> dict[str, Any]:
    """The keyword arguments of the rewards judge and judge_pairs that the keys set."""
    keeps = cfg.cache and cfg.weights != "policy"  # whose verdicts change with its weights
    cache = str(run_folder.absolute() / FOLDER) if keeps and run_folder is not None else ""
    return {
        "url": cfg.url,
        "model": cfg.model,
        "rubric": cfg.rubric,
        "reference": cfg.reference,
        "thinking": cfg.thinking,
        "explain": cfg.explain,
        "temperature": cfg.temperature,
        "max_tokens": cfg.max_verdict_len,
        "request_s": cfg.timeout_s,
        "attempts": cfg.attempts,
        "requests": cfg.concurrency,
        "api_key_env": cfg.api_key_env,
        "cache": cache,
        "cache_name": cfg.weights if cfg.is_local else "",  # a run's own endpoint has a random URL
        "prompt_price": cfg.prompt_price,
        "completion_price": cfg.completion_price,
    }


def pair_options(cfg: JudgeConfig) -> dict[str, Any]:
    """The keyword arguments of judge_pairs alone."""
    return {"opponents": cfg.opponents, "against": cfg.against, "swap": cfg.swap}
