"""The arguments of `jaxrl.evaluate`: short names of keys, and the keys of a run."""

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.command_line import override, print_help, read_args, read_options, stop
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config, resolve_evaluation
from jaxrl.config.saved import read_run_config
from jaxrl.config.schema import to_dict

HELP = """python -m jaxrl.evaluate --model=runs/quickstart --data=test.parquet --n=8 --k=1,4,8

Samples a model on a dataset, scores the responses, and reports mean reward and pass@k.

    --model=PATH       model folder, run folder, .gguf file, hub id or 'package:NAME'
    --data=FILE,...    dataset, as config.data.val: parquet, JSONL, tasks, ...
    --n=N              samples per prompt (default 1)
    --k=K,...          values of k for pass@k (default 1)
    --temperature=T    sampling temperature; 0 = greedy (default 0)
    --limit=N          at most N prompts, evenly spaced; 0 = all (default 0)
    --judge=FILE       compare the judge of the rewards with labelled responses, without a model
    --output=FOLDER    folder of summary.json, samples.jsonl and config.json
                       (default: evaluation/ in the run folder, else runs/evaluation)

Each option sets one configuration key. Other keys are set as --config.reward.functions=math, and
--config=FILE.py gives a whole configuration. By default, a run folder provides the configuration of
its run, including data and rewards. docs/how_to/evaluation.md explains the statistics.
"""
OPTION_KEYS = {
    "model": "model.path",
    "data": "data.val",
    "n": "eval.n",
    "k": "eval.k",
    "temperature": "eval.sampling.temperature",
    "limit": "data.val_max_samples",
    "judge": "eval.judge_labels",
    "output": "run_dir",
}


def read(argv: Sequence[str]) -> RunConfig:
    """The configuration of the evaluation. Exits with a message if the arguments are invalid."""
    if "-h" in argv or "--help" in argv:
        print_help(HELP)
    short = [arg for arg in argv if not arg.lstrip("-").startswith("config")]
    options = read_options(short, tuple(OPTION_KEYS))
    try:
        base = base_config(options.get("model", ""))
        config, _ = read_args([arg for arg in argv if arg not in short], base)
        for name, text in options.items():
            override(config, OPTION_KEYS[name], text)
        return resolve_evaluation(config)
    except ValueError as error:
        stop(str(error))


def base_config(model: str) -> ConfigDict:
    """The configuration of the run if `model` is a run folder, else the defaults."""
    config, folder = default_config(), Path(model).expanduser()
    config.run_dir = "runs/evaluation"
    if model and (run := read_run_config(folder)):
        changes = {"run_dir": str(folder / "evaluation"), "resume": False}
        changes["distributed"] = to_dict(RunConfig().distributed)
        config.update(to_dict(run) | changes)
    return config
