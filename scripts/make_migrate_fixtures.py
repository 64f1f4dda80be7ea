"""Writes tests/migrate/verl_examples.json and verl_recipes.json: what scripts of verl set, and what
is refused.

    python scripts/make_migrate_fixtures.py VERL.git VERL-RECIPE.git RLINF.git

The arguments are git directories of clones of verl, verl-recipe and RLinf. The files have keys and
values only: for each script, the module that it runs and its settings, as indices into a list of
all of them. A value that only a run would give has the name of its variable, as ${NAME}. The first
file has verl's examples/, the second the recipes and the script of RLinf's comparison with verl.
"""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from jaxrl.migrate.__main__ import migrate
from jaxrl.migrate.migration import REFUSED
from jaxrl.migrate.shell import evaluate
from jaxrl.migrate.shell_expansion import shown
from jaxrl.migrate.verl import is_command, module_of

ENVIRONMENT = {"HOME": "/home/me", "PWD": "/home/me/verl"}
FOLDER = Path(__file__).parents[1] / "tests" / "migrate"
COMPARISON = "docs/source-en/rst_source/resources/blog/compare_with_verl.rst"


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


def scripts(folder: str, *paths: str) -> dict[str, str]:
    """{name: text} of the launch scripts below the paths."""
    names = git(folder, "ls-tree", "-r", "--name-only", "HEAD", *paths).splitlines()
    return {n: git(folder, "show", f"HEAD:{n}") for n in sorted(names) if n.endswith(".sh")}


def code_block(text: str, content: str) -> str:
    """The code block of a reStructuredText page that has `content`."""
    blocks = re.findall(r"\.\. code-block:: bash\n\n((?: {4}.*\n|\n)+)", text)
    return textwrap.dedent(next(block for block in blocks if content in block))


def write(name: str, texts: dict[str, str], commits: dict[str, str]) -> None:
    known: dict[str, int] = {}
    rows = {}
    for script, text in texts.items():
        module, words, refused = example(script, text)
        rows[script] = [module, [known.setdefault(word, len(known)) for word in words], refused]
    lines = [f"{json.dumps(script)}: {json.dumps(row)}" for script, row in rows.items()]
    settings = json.dumps(list(known), indent=0, ensure_ascii=False)
    (FOLDER / name).write_text(
        f'{{"commits": {json.dumps(commits)},\n"settings": {settings},\n'
        f'"scripts": {{\n{",\n".join(lines)}\n}}}}\n'
    )


def main(verl: str, recipes: str, rlinf: str) -> None:
    commits = {
        name: git(folder, "rev-parse", "HEAD").strip()
        for name, folder in (("verl", verl), ("verl-recipe", recipes), ("RLinf", rlinf))
    }
    examples = {n.removeprefix("examples/"): t for n, t in scripts(verl, "examples").items()}
    write("verl_examples.json", examples, {"verl": commits.pop("verl")})
    comparison = code_block(git(rlinf, "show", f"HEAD:{COMPARISON}"), "verl.trainer.main_ppo")
    texts = scripts(recipes) | {"RLinf/compare_with_verl.rst": comparison}
    write("verl_recipes.json", texts, commits)


if __name__ == "__main__":
    main(*sys.argv[1:])
