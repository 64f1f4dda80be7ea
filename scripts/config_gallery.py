"""Prints the page of configs: purpose, hardware, time and command of every file in configs/.

python scripts/config_gallery.py > docs/reference/configs.md
"""

import ast
import re
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
HEAD = """\
# Gallery of configs

After this page you know which file of `configs/` to start from. Each file's docstring has more:
data, mesh, memory and results. The page is the output of
`python scripts/config_gallery.py > docs/reference/configs.md`.
"""
PUBLISHED = """\
## Published benchmarks of other systems

[The accuracy of the planner](../concepts/planner_accuracy.md) compares their plans with the
published figures.
"""
NONE = "not measured yet"


def main() -> None:
    print(page(), end="")


def page() -> str:
    """The page: a section per size of hardware, one of benchmarks, an entry per file."""
    found = [entry(path) for path in sorted(CONFIGS.glob("*.py"))]
    on_cpu = [text for is_small, text in found if is_small]
    others = [text for is_small, text in found if not is_small]
    published = [entry(path)[1] for path in sorted(CONFIGS.glob("bench/*.py"))]
    sections = [HEAD, "## On two CPU cores\n", *on_cpu, "## On TPUs and GPUs\n", *others]
    sections += [PUBLISHED, *published]
    return "\n".join(sections)


def entry(path: Path) -> tuple[bool, str]:
    """(whether it is for CPU, the entry of a config)."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n")]
    indented = [p for p in docstring.split("\n\n") if p.startswith("    ")]
    is_small = "CPU" in paragraphs[0] or "quickstart" in paragraphs[0]
    hardware = "two CPU cores" if is_small else labelled(paragraphs, "Hardware")
    time = labelled(paragraphs, "Minutes and result") or labelled(paragraphs, "Result")
    lines = [
        f"### `configs/{path.relative_to(CONFIGS)}`",
        "",
        f"{paragraphs[0]}",
        "",
        f"- Hardware: {hardware or 'as the first sentence says.'}",
        f"- Time and result: {time or NONE}",
        "",
        "```bash",
        re.sub(r"^ {4}", "", indented[0], flags=re.MULTILINE),
        "```",
        "",
    ]
    return is_small, "\n".join(lines)


def labelled(paragraphs: list[str], label: str) -> str:
    """The paragraph that begins with the label, without it; "" if there is none."""
    start = f"{label}: "
    return next((p.removeprefix(start) for p in paragraphs if p.startswith(start)), "")


if __name__ == "__main__":
    main()
