"""python -m jaxrl.migrate run_qwen2-7b.sh --output=my_run.py: a run of verl, OpenRLHF or TRL as a
config of jaxrl.

Reads a launch script (without running it), a YAML file or, of TRL, a Python script. Standard error
names every setting that is not carried over, with the reason. The exit status is 1, and nothing is
written, while the model, the data or the algorithm are not known or have no counterpart.

    --set NAME=VALUE      a variable of the script, in place of its assignments; NAME=VALUE before
                          the command gives one that the script reads from the environment
    KEY=VALUE, ~KEY       a further setting of the other framework, or one less
    --config.KEY=VALUE    a key of jaxrl, which overrides what was migrated
    -- ARGUMENTS          the script's own arguments, $1, $2, ...
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.command_line import OVERRIDE, override
from jaxrl.config.resolve import default_config
from jaxrl.migrate import openrlhf, trl, verl
from jaxrl.migrate.config_file import check, text
from jaxrl.migrate.migration import DECIDE, KINDS, REFUSED, UNNEEDED, Migration, Note
from jaxrl.migrate.settings import Settings, hydra, yaml_file
from jaxrl.migrate.shell import Invocation, evaluate
from jaxrl.migrate.trl_script import script

FRAMEWORKS = {"verl": verl, "openrlhf": openrlhf, "trl": trl}


def main(argv: Sequence[str]) -> int:
    options, overrides = _options(argv)
    given = dict(item.partition("=")[::2] for item in options.set)
    path = pathlib.Path(options.file)
    try:
        found = migrate(
            path.read_text(),
            path=path,
            framework=options.framework,
            further=options.settings,
            given=given,
            arguments=options.arguments,
            environment=os.environ,
        )
        ours = _overrides(overrides)
    except (OSError, ValueError, SyntaxError) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        return 1
    return report(found, ours, path.name, options.output)


def parser() -> argparse.ArgumentParser:
    """The parser of all arguments but --config.KEY=VALUE."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.migrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="launch script, YAML file, or Python script of TRL")
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings of the framework"
    )
    parser.add_argument("--from", dest="framework", choices=FRAMEWORKS, help="found if not given")
    parser.add_argument("--output", help="config file to write; standard output if not given")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return parser


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the arguments --config.KEY=VALUE."""
    own, arguments = list(argv), None
    if "--" in own:
        at = own.index("--")
        own, arguments = own[:at], own[at + 1 :]
    overrides = [word for word in own if OVERRIDE.fullmatch(word)]
    options = parser().parse_intermixed_args([word for word in own if word not in overrides])
    options.arguments = arguments
    return options, overrides


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """{key here: value} of the arguments --config.KEY=VALUE."""
    config, names = default_config(), []
    for word in words:
        match = OVERRIDE.fullmatch(word)
        assert match is not None
        override(config, match[2], "true" if match[3] is None else match[3])
        names.append(match[2])
    values: dict[str, Any] = {}
    for name in names:
        value: Any = config
        for part in name.split("."):
            value = value[part]
        values[name] = value.to_dict() if isinstance(value, ConfigDict) else value
    return values


def migrate(
    source: str,
    *,
    path: pathlib.Path,
    framework: str | None = None,
    further: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str],
) -> Migration:
    """The migration of a file. Raises ValueError for a file without a run that is known."""
    reasons: Mapping[str, str] = {}
    if path.suffix in (".yaml", ".yml"):
        settings = yaml_file(source, environment)
        framework = framework or _framework_of(settings)
        if framework == "openrlhf":
            raise ValueError("OpenRLHF has no YAML files; give the launch script")
        program = _program_of(settings, framework)
    elif path.suffix == ".py":
        if framework not in (None, "trl") or "trl" not in source:
            raise ValueError("a Python script is read for TRL only; give a launch script or a YAML")
        framework = "trl"
        settings, program = script(source)
    else:
        evaluation = evaluate(source, environment=environment, given=given, arguments=arguments)
        reasons = evaluation.reasons
        framework, run = _training_run(evaluation.runs, framework, reasons)
        words = run.words
        if framework == "openrlhf":
            settings, program = openrlhf.command(words)
        else:
            settings, program = FRAMEWORKS[framework].command(words, path.parent, environment)
    added = hydra(further)
    for name in added.deleted:
        for known in (settings.values, settings.unresolved):
            known.pop(name, None)
    added.deleted = []
    return FRAMEWORKS[framework].translate(settings.below(added), program, reasons)


def _training_run(
    runs: Sequence[Invocation], framework: str | None, reasons: Mapping[str, str]
) -> tuple[str, Invocation]:
    """The command that trains, and its framework. Raises ValueError if it is not the only one."""
    names = [framework] if framework else list(FRAMEWORKS)
    found = [
        (name, run) for run in runs for name in names if FRAMEWORKS[name].is_command(run.words)
    ]
    found = list({run.words: (name, run) for name, run in found[::-1]}.values())[::-1]
    if not found:
        raise ValueError(
            f"no command of {' or '.join(names)} is in it, such as python3 -m "
            "verl.trainer.main_ppo, python3 -m openrlhf.cli.train_sft or trl grpo"
        )
    if len(found) > 1:
        lines = ", ".join(str(run.line) for _, run in found)
        names = {name for _, run in found for name in run.depends_on}
        choice = "".join(f"; {name} decides between them: --set {name}=VALUE" for name in names)
        raise ValueError(
            f"it has {len(found)} commands that train, on lines {lines}{choice}; leave only one in "
            "a copy of the script"
        )
    return found[0]


def _framework_of(settings: Settings) -> str:
    names = {*settings.values, *settings.unresolved}
    if any(name.startswith(("actor_rollout_ref.", "data.train_files")) for name in names):
        return "verl"
    if "model_name_or_path" in names:
        return "trl"
    raise ValueError(
        "it has no key of verl such as data.train_files and none of TRL such as "
        "model_name_or_path; give --from and a config or launch script"
    )


def _program_of(settings: Settings, framework: str) -> str:
    """Which of TRL's trainers a YAML file is for: that of a key which only it has."""
    if framework != "trl":
        return ""
    names = {*settings.values, *settings.unresolved}
    if names & {"num_generations", "max_completion_length", "reward_funcs"}:
        return "grpo"
    if (kind := settings.values.get("trainer")) in trl.PROGRAMS:
        return str(kind)
    raise ValueError(
        "the file does not say which trainer it is for; add trainer=grpo, sft, dpo, kto, rloo or "
        "reward to it, or give the command: trl sft --config FILE in a launch script"
    )


def report(found: Migration, ours: Mapping[str, Any], source: str, output: str | None) -> int:
    """Writes the config and, to standard error, what is not carried over; the exit status."""
    notes = [n for n in found.notes if n.kind != REFUSED or not set(n.ours) & set(ours)]
    config = found.config | dict(ours)
    errors, warned = check(config, found.n_devices, found.n_processes)
    named = {name for note in notes if note.kind == REFUSED for name in note.ours}
    errors = [line for line in errors if not any(name in line for name in named)]
    for kind in KINDS:
        for line in _lines(kind, notes):
            print(line, file=sys.stderr)
    for line in warned:
        print(f"warning: {line}", file=sys.stderr)
    refused = [note for note in notes if note.kind == REFUSED]
    for line in errors:
        print(f"error: {line} (--config.KEY=VALUE overrides a key)", file=sys.stderr)
    if refused or errors:
        n = len(refused) + len(errors)
        print(f"no config is written: {n} error{'s' * (n > 1)} above", file=sys.stderr)
        return 1
    command = f"python -m {found.program} --config={output or 'my_run.py'}"
    content = text(config, source, command, _pending(notes))
    if output is None:
        print(content, end="")
    else:
        pathlib.Path(output).write_text(content)
    print(f"the config passes jaxrl's checks; run it: {command}", file=sys.stderr)
    return 0


def _lines(kind: str, notes: Sequence[Note]) -> list[str]:
    """The notes of a kind; settings share a line if they share the reason."""
    chosen = [note for note in notes if note.kind == kind]
    groups: dict[str, list[str]] = {}
    for note in chosen:
        groups.setdefault(note.reason + _how(note), []).append(note.setting)
    if kind == UNNEEDED:
        return [f"{kind} ({reason}): {', '.join(names)}" for reason, names in groups.items()]
    return [f"{kind}: {', '.join(names)}: {reason}" for reason, names in groups.items()]


def _how(note: Note) -> str:
    return f" (--config.{' or --config.'.join(note.ours)}=VALUE)" if note.ours else ""


def _pending(notes: Sequence[Note]) -> list[str]:
    """A comment of the config file on decisions that its reader must make."""
    return [f"{n.setting}: {n.reason}" for n in notes if n.kind == DECIDE]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
