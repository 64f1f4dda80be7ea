"""A trained model: its statistics on a dataset, and its responses to prompts."""

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.arguments.evaluate import base_config
from jaxrl.config.command_line import config_of
from jaxrl.config.keys import EnvConfig, RewardConfig, RewardModelConfig
from jaxrl.config.resolve import resolve_evaluation
from jaxrl.config.saved import read_run_config
from jaxrl.evaluate import evaluate as run_program
from jaxrl.json_text import Message, parse_json
from jaxrl.notebook.run_folder import RunFolder
from jaxrl.notebook.training import OwnRewards, in_this_process, with_own_rewards
from jaxrl.trainer.export import export_checkpoint
from jaxrl.trainer.setup.opening import open_evaluation

ChatPrompt = str | Sequence[Message]  # a string is one user message


def evaluate(
    model: RunFolder | str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    reward: OwnRewards | None = None,
) -> dict[str, Any]:
    """Mean reward and pass@k with standard errors, by data source: as `python -m jaxrl.evaluate`.

    A run gives its data.val and its rewards; `overrides` sets other keys, such as data.val, eval.n,
    eval.k and run_dir, where summary.json and samples.jsonl are written. `reward` is as in `train`.
    Raises the errors of `train`, and KeyboardInterrupt.
    """
    keys, own = with_own_rewards(overrides or {}, reward)
    with tempfile.TemporaryDirectory(prefix="jaxrl-evaluate-") as folder:
        config = _model_config(model, keys, Path(folder))
        cfg = resolve_evaluation(config)
        with in_this_process():
            completed = run_program(cfg, own)
    if not completed:
        raise KeyboardInterrupt
    return parse_json((cfg.run_path / "summary.json").read_text())["results"]


def generate(
    model: RunFolder | str | Path,
    prompts: ChatPrompt | Sequence[ChatPrompt],
    *,
    n: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 256,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> list[list[str]]:
    """`n` responses per prompt, in the order of the prompts.

    Loads the model for the call, so pass all prompts at once. It is a run, whose chat template and
    system prompt are used, or what `model.path` takes. Of a run without an export it is the last
    checkpoint. Raises the errors of `train`.
    """
    conversations = [prompts] if isinstance(prompts, str) else list(prompts)
    if conversations and isinstance(conversations[0], Mapping):
        conversations = [conversations]
    if not conversations:
        return []
    keys = {
        "data.max_response_len": max_tokens,
        "data.filter_overlong_prompts": False,
        "eval.n": n,
        "eval.k": (1,),
        "eval.sampling.temperature": float(temperature),
        "seed": seed,
        **(overrides or {}),
    }
    with tempfile.TemporaryDirectory(prefix="jaxrl-generate-") as folder:
        config = _prompts_config(model, conversations, keys, Path(folder))
        cfg = dataclasses.replace(
            resolve_evaluation(config),
            reward=RewardConfig(functions=()),
            reward_model=RewardModelConfig(),
            env=EnvConfig(),
        )
        with in_this_process(), open_evaluation(cfg) as opened:
            rollouts, _ = opened.engines.sample(
                opened.params,
                opened.prompts,
                n=n,
                sampling=cfg.eval.sampling,
                seed=cfg.seed,
                version=0,
                name="generation",
            )
    texts = [rollout.text for rollout in rollouts]
    return [texts[i : i + n] for i in range(0, len(texts), n)]


def _prompts_config(
    model: RunFolder | str | Path,
    conversations: Sequence[Any],
    keys: Mapping[str, Any],
    folder: Path,
) -> ConfigDict:
    """The config of an evaluation of these prompts, whose files are in `folder`."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in conversations))
    files = {"data.val": (str(file),), "data.val_max_samples": 0, "run_dir": str(folder / "run")}
    return _model_config(model, {"reward.functions": ("format",), **keys, **files}, folder)


def _model_config(
    model: RunFolder | str | Path, keys: Mapping[str, Any], folder: Path
) -> ConfigDict:
    """The config of the run, or the defaults, with the model and with keys set.

    Of a run that has written no export, the last checkpoint is exported to `folder`.
    """
    path = str(model.run_dir if isinstance(model, RunFolder) else model)
    run, source = Path(path).expanduser(), path
    if read_run_config(run) is not None and not (run / "hf").is_dir():
        source = str(folder / "model")
        export_checkpoint(run, "last", folder / "model")
    return config_of(base_config(path), {"model.path": source, **keys})
