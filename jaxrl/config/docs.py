"""The keys of a run as text: --config.help, and docs/reference/config.md.

python -m jaxrl.config.docs > docs/reference/config.md
"""

from jaxrl.config import RunConfig
from jaxrl.config.schema import Key, keys

USAGE = (
    "usage: python -m jaxrl.train --config=FILE.py[:ARGUMENT] [--config.KEY=VALUE ...]; "
    "--config.help lists the keys"
)

INTRODUCTION = """\
# Configuration

*Printed from `jaxrl/config/keys.py` by `python -m jaxrl.config.docs > docs/reference/config.md`.*

A run is described by one Python file with a function `get_config()`. It takes `default_config()`, sets what differs and
returns it:

```python
from jaxrl.config import default_config


def get_config():
    config = default_config()
    config.model.path = "checkpoints/my-model"
    config.data.train = ("train.parquet",)
    return config
```

Every key can be changed on the command line. The value takes the type of the key; a key that does not exist is an error
that names the nearest one.

```
python -m jaxrl.train --config=my_run.py --config.rollout.n=16 --config.learner.lr=1e-6 --config.resume=True
python -m jaxrl.train --config=my_run.py --config.data.train=a.parquet,b.parquet      # a tuple: items between commas
python -m jaxrl.train --config=my_run.py "--config.data.train=('a.parquet', 'b.parquet')"  # or a Python literal
python -m jaxrl.train --config=my_run.py "--config.data.train=task:addition?digits=1,2"    # one item: it has a '?'
python -m jaxrl.train --config=my_run.py --config.data.val=()                         # the empty tuple
python -m jaxrl.train --config=my_run.py:large                                        # get_config("large")
python -m jaxrl.train --config.help                                                   # this list
```

Before any device work the whole configuration is checked; all problems are reported together, each with the values and
what to set instead. Numbers that are part of the algorithm (prompts per step, mini-batch) are global; numbers that are
about speed and memory (token budget, sequences decoded together) are per data-parallel rank. Lengths are in tokens,
`*_s` in seconds. [keys.md](keys.md) has the names that verl and OpenRLHF give to these.
"""

HEADINGS = {
    "": "The run",
    "model": "model",
    "distributed": "distributed: several processes, one a host",
    "mesh": "mesh: how the devices are laid out",
    "score": "score: logprobs before the updates, where they lie otherwise",
    "ref": "ref: logprobs of the reference model, where it lies otherwise",
    "data": "data",
    "rollout": "rollout: the engine that generates",
    "rollout.sampling": "rollout.sampling: how training responses are drawn",
    "algorithm": "algorithm",
    "learner": "learner: the update",
    "critic": "critic: of algorithm.advantage = gae",
    "critic.mesh": "critic.mesh: where the critic lies otherwise",
    "preference": "preference: jaxrl.dpo and jaxrl.reward_model",
    "reward": "reward",
    "env": "env: what the model acts in, over several turns",
    "reward_model": "reward_model: a model that scores responses",
    "reward_model.mesh": "reward_model.mesh: where it lies otherwise",
    "eval": "eval: validation",
    "eval.sampling": "eval.sampling: how validation responses are drawn",
    "checkpoint": "checkpoint",
    "log": "log",
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
    """The keys by section; a section's own keys come before those of the sections inside it."""
    found: dict[str, list[Key]] = {section: [] for section in HEADINGS}
    for name, spec in keys(RunConfig).items():
        found[name.rpartition(".")[0]].append(spec)
    return found


def default(spec: Key) -> str:
    """The default as it is written on the command line."""
    if isinstance(spec.default, tuple):
        return ",".join(map(str, spec.default)) or "()"
    return str(spec.default) if spec.default != "" else "''"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(markdown(), end="")
