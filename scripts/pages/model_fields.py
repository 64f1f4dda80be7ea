"""The page of the entries of config.json, by model family.

python -m scripts.pages.model_fields > docs/reference/model_fields.md
"""

from collections.abc import Iterable

from jaxrl.models.families.entries import NEUTRAL, NEUTRAL_AT, Entries
from jaxrl.models.families.gemma3 import IMAGE_ENTRIES
from jaxrl.models.files.hf_config import FAMILIES
from jaxrl.models.vision.towers import TOWERS

INTRODUCTION = """\
# Fields of model configs

After this page you know what each field of a model's `config.json` does. This page is generated
from `jaxrl/models/families/` by
`python -m scripts.pages.model_fields > docs/reference/model_fields.md`.

Every field is read, neutral or refused. A field that no table below names is refused, unless it is
`null`, `false`, 0 or empty: it may change the numbers of the model. The error names the field and
its value; remove the field if you know that it has no effect. A field that is read is refused at
values that are not supported, for example `partial_rotary_factor` of `llama`.

`quantization_config` and `compression_config` say how the files store matrices in few bits
([formats](models.md#weights-in-few-bits)); other methods, and entries of them that are not known,
are refused. Further errors name code of the model folder (`auto_map` with a model class) and
`architectures` other than the language models and sequence classifiers of the `model_type`.

The numbers of every field that is read are compared with those of transformers, on configs that
are drawn for every family (`tests/cases/test_model_configs.py`).
"""


def markdown() -> str:
    """The page docs/reference/model_fields.md."""
    shared = frozenset.intersection(*(module.ENTRIES.read for module in FAMILIES.values()))
    parts = [INTRODUCTION, "\n## Read\n\n| `model_type` | fields |\n|---|---|\n"]
    parts += [row("all", names(shared))]
    for family, module in FAMILIES.items():
        parts += [row(model_type(family), names(module.ENTRIES.read - shared))]
    parts += [row("`gemma3` (image and text), top level", names(IMAGE_ENTRIES.read))]
    parts += ["\n## Neutral at any value\n\n| what they are for | fields |\n|---|---|\n"]
    parts += [row(reason, names(fields)) for reason, fields in NEUTRAL.items()]
    parts += ["\n## Neutral in one family\n\n| `model_type` | fields |\n|---|---|\n"]
    for family, module in FAMILIES.items():
        if found := one_family(module.ENTRIES):
            parts += [row(model_type(family), found)]
    parts += [row("`gemma3` (image and text), top level", names(IMAGE_ENTRIES.neutral))]
    parts += ["\n## Neutral at one value, refused at others\n\n| field | value |\n|---|---|\n"]
    parts += [row(f"`{name}`", values(known)) for name, known in NEUTRAL_AT.items()]
    parts += ["\n`attention_bias` and `mlp_bias` are read in the families that list them above.\n"]
    parts += ["\n## `vision_config`, of the [tower](models.md#vision-towers)\n\n"]
    parts += ["| `model_type` of the model | read | neutral |\n|---|---|---|\n"]
    for module in dict.fromkeys(TOWERS.values()):
        types = (name for name, one in TOWERS.items() if one is module)
        parts += [row(names(types), names(module.ENTRIES.read), one_family(module.ENTRIES))]
    return "".join(parts)


def model_type(family: str) -> str:
    return "`gemma3_text`" if family == "gemma3" else f"`{family}`"


def one_family(entries: Entries) -> str:
    """The neutral entries of a family, with the value if it matters."""
    fixed = [f"`{name}` at {values(known)}" for name, known in entries.neutral_at.items()]
    return ", ".join([*filter(None, [names(entries.neutral)]), *fixed])


def names(found: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(found))


def values(known: Iterable[object]) -> str:
    return ", ".join(f"`{str(value).lower()}`" for value in known)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
