"""Writes tests/migrate/verl_examples.json: what verl's examples set, and what is refused.

    python scripts/make_migrate_fixtures.py VERL.git

VERL.git is the git directory of a clone of verl. The file has keys and values only: for each script
of examples/, the module that it runs and its settings, as indices into a list of all of them. A
value that only a run would give has the name of its variable, as ${NAME}.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from jaxrl.migrate.__main__ import migrate
from jaxrl.migrate.migration import REFUSED
from jaxrl.migrate.shell import evaluate
from jaxrl.migrate.shell_expansion import shown
from jaxrl.migrate.verl import is_command, module_of

ENVIRONMENT = {"HOME": "/home/me", "PWD": "/home/me/verl"}
OUTPUT = Path(__file__).parents[1] / "tests" / "migrate" / "verl_examples.json"


def git(folder: str, *arguments: str) -> str:
    command = ["git", "--git-dir", folder, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def example(name: str, text: str) -> tuple[str, list[str], list[str]]:
    """The module, the settings, and the names that a migration refuses."""
    runs = [r for r in evaluate(text, environment=ENVIRONMENT).runs if is_command(r.words)]
    module = module_of(runs[0].words) if runs else ""
    words = [w for w in runs[0].words if re.match(r"[+~]*[\w.@/-]+=", w)] if runs else []
    try:
        notes = migrate(text, path=Path(name), environment=ENVIRONMENT).notes
    except ValueError:
        return module, [shown(word) for word in words], ["the script"]
    refused = [note.setting.partition("=")[0] for note in notes if note.kind == REFUSED]
    return module, [shown(word) for word in words], refused


def main(folder: str) -> None:
    names = git(folder, "ls-tree", "-r", "--name-only", "HEAD", "examples").splitlines()
    known: dict[str, int] = {}
    scripts = {}
    for name in sorted(name for name in names if name.endswith(".sh")):
        module, words, refused = example(name, git(folder, "show", f"HEAD:{name}"))
        indices = [known.setdefault(word, len(known)) for word in words]
        scripts[name.removeprefix("examples/")] = [module, indices, refused]
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in scripts.items()]
    settings = json.dumps(list(known), indent=0, ensure_ascii=False)
    OUTPUT.write_text(
        f'{{"commit": "{git(folder, "rev-parse", "HEAD").strip()}",\n"settings": {settings},\n'
        f'"scripts": {{\n{",\n".join(lines)}\n}}}}\n'
    )


if __name__ == "__main__":
    main(sys.argv[1])
