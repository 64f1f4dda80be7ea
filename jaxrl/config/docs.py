"""The keys of a run as text: --config.help, and docs/reference/config.md.

python -m jaxrl.config.docs > docs/reference/config.md
"""

from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import Key, keys

USAGE = (
    "usage: python -m jaxrl.train --config=FILE.py[:ARGUMENT] [--config.KEY=VALUE ...]; "
    "--config.help lists the keys"
)

INTRODUCTION = """\
# Configuration

Every key of a run with its default, its type and its meaning. This page is generated from
`jaxrl/config/keys/` by `python -m jaxrl.config.docs > docs/reference/config.md`.

A run is described by a Python file with a function `get_config()`. It starts from
`default_config()`, changes what it needs and returns it:

```python
from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.model.path = "checkpoints/my-model"
    config.data.train = ("train.parquet",)
    return config
```

The command line can change every key. A value is converted to the type of its key; an unknown key
is an error that suggests the closest known one.

```
python -m jaxrl.train --config=my_run.py --config.rollout.n=16 --config.resume=True
# a tuple: items between commas, or a Python literal; () is empty
python -m jaxrl.train --config=my_run.py --config.data.train=a.parquet,b.parquet
python -m jaxrl.train --config=my_run.py "--config.data.train=('a.parquet', 'b.parquet')"
# one item: a text with a '?' is not split at its commas
python -m jaxrl.train --config=my_run.py "--config.data.train=task:addition?digits=1,2"
# a name in a mapping
python -m jaxrl.train --config=my_run.py --config.data.template_kwargs.enable_thinking=False
# get_config("large")
python -m jaxrl.train --config=my_run.py:large
# the list of all keys
python -m jaxrl.train --config.help
```

All values and combinations of keys are checked before any device work, and their errors are
reported together, each with the values and what to set instead. A key on the command line that does
not exist ends the program with its own message. What depends on the models, the data, the rewards
and the devices is checked next, before the first step, and ends with its first error.

Sizes that belong to the algorithm (prompts per step, mini-batch) are global. Sizes that affect only
speed and memory (token budget, concurrent sequences) are per data-parallel rank. Lengths are in
tokens, `*_s` in seconds. [keys.md](keys.md) lists the matching keys of verl, OpenRLHF and TRL.
"""

HEADINGS = {
    "": "The run",
    "model": "model",
    "lora": "lora: low-rank adapters",
    "distributed": "distributed: several processes, one per host",
    "mesh": "mesh: how devices shard the model and the batch",
    "score": "score: mesh for scoring before the updates, if it differs",
    "ref": "ref: mesh for scoring by the reference model, if it differs",
    "data": "data",
    "rollout": "rollout: the generation engine",
    "rollout.sampling": "rollout.sampling: sampling of training responses",
    "schedule": "schedule: how generation and training alternate",
    "algorithm": "algorithm",
    "learner": "learner: the update",
    "critic": "critic: for algorithm.advantage = gae",
    "critic.mesh": "critic.mesh: mesh of the critic, if it differs",
    "preference": "preference: jaxrl.dpo and jaxrl.reward_model",
    "reward": "reward: reward functions",
    "env": "env: environments for multi-turn rollouts",
    "reward_model": "reward_model: a model that scores responses",
    "reward_model.mesh": "reward_model.mesh: mesh of the reward model, if it differs",
    "eval": "eval: validation",
    "eval.sampling": "eval.sampling: sampling of validation responses",
    "checkpoint": "checkpoint",
    "log": "log",
    "profile": "profile",
}


def help_text() -> str:
    """Every key with its default, type, allowed values and meaning."""
    lines = [USAGE, "", "Every key, with its default. Tuples as a,b or as ('a', 'b'); () is empty."]
    for section, specs in sections().items():
        lines += ["", HEADINGS[section]]
        for spec in specs:
            allowed = f", {spec.range}" if spec.range else ""
            lines += [f"  --config.{spec.name}={default(spec)}  ({spec.type_name}{allowed})"]
            lines += [f"      {spec.doc}"]
    return "\n".join(lines)


def markdown() -> str:
    """The page docs/reference/config.md."""
    parts = [INTRODUCTION]
    for section, specs in sections().items():
        parts += [
            f"\n## {HEADINGS[section]}\n\n| key | default | type | meaning |\n|---|---|---|---|\n"
        ]
        for spec in specs:
            allowed = f": {spec.range}" if spec.range else ""
            cells = (f"`{spec.name}`", f"`{default(spec)}`", spec.type_name + allowed, spec.doc)
            parts += ["| " + " | ".join(_escaped(cell) for cell in cells) + " |\n"]
    return "".join(parts)


def sections() -> dict[str, list[Key]]:
    """The keys of each section; nested sections follow the section that contains them."""
    found: dict[str, list[Key]] = {section: [] for section in HEADINGS}
    for name, spec in keys(RunConfig).items():
        found[name.rpartition(".")[0]].append(spec)
    return found


def default(spec: Key) -> str:
    """The default as written on the command line."""
    if isinstance(spec.default, tuple):
        return ",".join(map(str, spec.default)) or "()"
    return str(spec.default) if spec.default != "" else "''"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(markdown(), end="")
