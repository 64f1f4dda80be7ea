"""The page of all keys.

python -m scripts.pages.config > docs/reference/config.md
"""

from jaxrl.config.help import HEADINGS, default, sections

INTRODUCTION = """\
# Configuration

Every key of a run with its default, its type and its meaning. This page is generated from
`jaxrl/config/keys/` by `python -m scripts.pages.config > docs/reference/config.md`.

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


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;").replace("\n", "\\n")


if __name__ == "__main__":
    print(markdown(), end="")
