"""Task folders of Harbor (https://harborframework.com): "harbor:FOLDER?image=host".

A task is a folder with task.toml, instruction.md, tests/test.sh and environment/Dockerfile, as
harbor 0.26 reads it. FOLDER is a task or has tasks. There are no containers: a task runs with the
programs of this machine, so what needs more than these is refused by name.
"""

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl.config.plugins import options

# What may be set without an effect here: descriptions, sizes of a container and other limits
_IGNORED = {
    "": {"version", "schema_version", "source", "task", "metadata", "solution"},
    "agent": {"timeout_sec"},  # env.episode_timeout_s
    "environment": {"build_timeout_sec", "cpus", "memory_mb", "storage_mb", "docker_image"},
    "verifier": set(),
}
_READ = {
    "": {"agent", "environment", "verifier"},
    "agent": {"user", "network_mode"},
    "environment": {"workdir", "env", "network_mode", "allow_internet", "gpus", "os"},
    "verifier": {"timeout_sec", "env", "user", "network_mode", "environment_mode"},
}
_ALLOWED = {  # values of these keys that need no container
    "user": (None, "root", 0),
    "network_mode": (None, "public", "no-network"),
    "allow_internet": (None, True, False),
    "environment_mode": (None, "shared"),
    "gpus": (None, 0),
    "os": (None, "linux"),
}
_VERIFIER_S = 600.0  # Harbor's default
_WORKDIR = "/app"


@dataclasses.dataclass(frozen=True)
class HarborTask:
    """A task that this machine can run."""

    folder: Path
    instruction: str
    workdir: str
    copies: tuple[tuple[str, str], ...]  # (below environment/, path in the task's root)
    env: dict[str, str]
    verifier_env: dict[str, str]
    verifier_s: float
    network: bool  # of the agent
    verifier_network: bool


def harbor_rows(source: str) -> list[dict[str, Any]]:
    """The tasks of a "harbor:" source as rows, sorted by their folder's name.

    extra_info has the folder for env.agent="harbor". Raises ValueError for a folder without a task,
    and for a task that cannot run here.
    """
    spec = source.removeprefix("harbor:")
    folder, given = Path(spec.partition("?")[0]), options(spec)
    if unknown := sorted(set(given) - {"image"}):
        raise ValueError(f"unknown option {unknown[0]} in {source!r}; it has image=host")
    tasks = [folder] if (folder / "task.toml").exists() else _folders(folder)
    if not tasks:
        raise ValueError(f"{folder} has no task: a folder with task.toml and instruction.md")
    if given.get("image") != "host":
        raise ValueError(
            f"{source!r}: tasks of Harbor run in containers, and here they run with the programs "
            f"of this machine instead; write 'harbor:{folder}?image=host' to accept that"
        )
    return [
        {
            "prompt": read_task(task).instruction,
            "answer": "",
            "data_source": f"harbor/{task.resolve().name}",
            "extra_info": {"harbor": str(task.resolve())},
        }
        for task in tasks
    ]


def _folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/task.toml"))


def read_task(folder: Path) -> HarborTask:
    """Reads a task. Raises ValueError with the name of what is unknown or cannot run here."""
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; a task of Harbor needs it")
    try:
        config = tomllib.loads((folder / "task.toml").read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder}/task.toml: {error}") from error
    sections = {"": config} | {name: config.get(name, {}) for name in _READ[""]}
    for name, section in sections.items():
        _check(folder, name, section)
    environment, verifier = sections["environment"], sections["verifier"]
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise ValueError(f"{folder} needs the services of docker-compose.yaml, and runs in none")
    workdir, copies, image_env = _read_dockerfile(folder)
    baseline = environment.get("network_mode") or (
        "no-network" if environment.get("allow_internet") is False else "public"
    )
    return HarborTask(
        folder=folder,
        instruction=(folder / "instruction.md").read_text().strip(),
        workdir=environment.get("workdir") or workdir,
        copies=tuple(copies),
        env=image_env | _strings(folder, "environment.env", environment.get("env", {})),
        verifier_env=_strings(folder, "verifier.env", verifier.get("env", {})),
        verifier_s=float(verifier.get("timeout_sec", _VERIFIER_S)),
        network=(sections["agent"].get("network_mode") or baseline) == "public",
        verifier_network=(verifier.get("network_mode") or baseline) == "public",
    )


def _check(folder: Path, name: str, section: Any) -> None:
    """Raises ValueError for a key of a section that is unknown or asks for what is not here."""
    where = f"{folder}/task.toml: [{name}]" if name else f"{folder}/task.toml"
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} is {section!r:.80}, and must be a table")
    for key, value in section.items():
        if key in _IGNORED[name]:
            continue
        if key not in _READ[name]:
            if value not in ([], {}, "", None):
                raise ValueError(f"{where} has {key}={value!r:.80}, which is not supported here")
        elif key in _ALLOWED and value not in _ALLOWED[key]:
            raise ValueError(
                f"{where} has {key}={value!r}, which needs a container; only "
                f"{', '.join(repr(v) for v in _ALLOWED[key][1:])} can run here"
            )


def _strings(folder: Path, name: str, values: Any) -> dict[str, str]:
    """Environment variables. Raises ValueError for one whose value is that of the host's."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{folder}/task.toml: {name} is {values!r:.80}, and must be a table")
    for key, value in values.items():
        if not isinstance(value, str) or "${" in value:
            raise ValueError(
                f"{folder}/task.toml: {name}.{key}={value!r:.80} is no plain text; variables of "
                "the host are not passed on"
            )
    return dict(values)


def _read_dockerfile(folder: Path) -> tuple[str, list[tuple[str, str]], dict[str, str]]:
    """(working folder, copies, variables) of environment/Dockerfile, if there is one.

    FROM, WORKDIR, ENV and COPY of files are followed, with the machine's programs as the image.
    Raises ValueError for another instruction.
    """
    workdir, copies, env = _WORKDIR, [], {}
    path = folder / "environment" / "Dockerfile"
    for word, rest in _instructions(path.read_text() if path.is_file() else ""):
        words = shlex.split(rest)
        match word, words:
            case "FROM", [_]:
                pass
            case "WORKDIR", [given]:
                workdir = str(Path(workdir, given))
            case "ENV", [*pairs] if pairs and all("=" in pair for pair in pairs):
                env |= dict(pair.split("=", 1) for pair in pairs)
            case "COPY", [*sources, target] if sources and not rest.startswith(("-", "[")):
                copies += [
                    (one, str(Path(workdir, target)) + "/" * _is_folder(target, sources))
                    for one in sources
                ]
            case _:
                raise ValueError(
                    f"{path} has {word} {rest[:80]}, and no image is built here; tasks with FROM, "
                    "WORKDIR, ENV NAME=VALUE and COPY alone can run"
                )
    return workdir, copies, env


def _is_folder(target: str, sources: list[str]) -> bool:
    return target.endswith(("/", ".")) or len(sources) > 1


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """(instruction, rest of the line), without comments and with continued lines joined."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()
