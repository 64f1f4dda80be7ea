"""Shell completion: the scripts of bash and zsh, and the continuations that they request.

    eval "$(jaxrl completion bash)"        # in ~/.bashrc
    eval "$(jaxrl completion zsh)"         # in ~/.zshrc, after compinit
    jaxrl completion zsh > FOLDER/_jaxrl   # or this, in a folder of fpath

The scripts call `jaxrl completion words WORD ...` with the words of the command line. If there is
no continuation, the shell completes the name of a file.
"""

import glob
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.cli.commands import COMMANDS, EntryPoint
from jaxrl.cli.main import COMPLETION
from jaxrl.config.config_file import shipped_file
from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import keys

BASH = r"""
_jaxrl() {
  local line="${COMP_LINE:0:COMP_POINT}" words word head
  read -ra words <<< "$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  word="${words[-1]}"
  mapfile -t COMPREPLY < <("$1" completion words "${words[@]:1}" 2>/dev/null)
  # Bash breaks words at these characters and replaces the last part only.
  head=""
  [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && head="${word%"${word##*=}"}"
  [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && head="${word%"${word##*[:=]}"}"
  COMPREPLY=("${COMPREPLY[@]#"$head"}")
  [[ ${COMPREPLY[0]-} == *[=./] ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o default -F _jaxrl jaxrl
"""
ZSH = r"""
#compdef jaxrl
_jaxrl() {
  local -a found unfinished
  found=(${(f)"$("${words[1]}" completion words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if (( ! $#found )); then
    compset -P '*='
    _files
    return
  fi
  unfinished=(${(M)found:#*[=./]})
  found=(${found:#*[=./]})
  compadd -Q -S '' -a unfinished
  compadd -Q -a found
}
# A file _jaxrl in fpath is loaded by the first completion, which it has to answer.
if [[ $funcstack[1] == _jaxrl ]]; then
  _jaxrl "$@"
else
  compdef _jaxrl jaxrl
fi
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}
OPTION = re.compile(r"--[a-z][a-z-]*")
LISTED_OPTION = re.compile(rf"^ +({OPTION.pattern})", re.MULTILINE)


def run(words: Sequence[str]) -> int:
    """Prints a script, or the continuations of the last word; returns the exit status."""
    if words and words[0] == "words":
        print("\n".join(continuations(words[1:])))
    elif len(words) == 1 and words[0] in SCRIPTS:
        print(SCRIPTS[words[0]].strip())
    else:
        print('usage: eval "$(jaxrl completion bash)", or zsh', file=sys.stderr)
        return 1
    return 0


def continuations(words: Sequence[str]) -> list[str]:
    """Whole words, or parts of them up to ".", "=" or "/", that begin with the last of `words`.

    `words` are those of the command line after `jaxrl`.
    """
    *before, word = words or [""]
    if not before:
        found = ["--help", "--version"] if word.startswith("-") else [*COMMANDS, COMPLETION]
    elif before[0] == COMPLETION:
        found = [*SCRIPTS]
    elif before[0] in COMMANDS:
        found = arguments(COMMANDS[before[0]], before[-1], word)
    else:
        found = []
    return sorted(name for name in found if name.startswith(word))


def arguments(command: EntryPoint, last: str, word: str) -> list[str]:
    """Arguments of a command of which `word` may be the beginning, after the word `last`."""
    if "--config=" in command.config and last == "--config":
        return config_files(word)
    if "--config=" in command.config and word.startswith("--config="):
        return [f"--config={file}" for file in config_files(word.removeprefix("--config="))]
    if "--config." in command.config and word.startswith("--config."):
        return overrides(word)
    return options(command) if word.startswith("-") else []


def options(command: EntryPoint) -> list[str]:
    """The options of a command."""
    found = [*command.config, "--help"]
    if not command.options:
        return found
    source = pkgutil.resolve_name(command.options)
    if isinstance(source, str):
        return list({*found, *LISTED_OPTION.findall(source)})
    return list({*found, *OPTION.findall(source().format_usage())})


def config_files(start: str) -> list[str]:
    """Folders and Python files that begin with `start`, and the shipped config files."""
    paths = [Path(path) for path in glob.glob(f"{glob.escape(start)}*")]
    local = [f"{path}/" if path.is_dir() else str(path) for path in paths]
    shipped = [f"configs/{path.name}" for path in shipped_file("configs").glob("*.py")]
    return list({name for name in local if name.endswith((".py", "/"))} | {*shipped})


def overrides(word: str) -> list[str]:
    """`--config.KEY=` up to the end of the next section, or the values that a key may have."""
    known = keys(RunConfig)
    name, has_value, _ = word.removeprefix("--config.").partition("=")
    if has_value:
        values = ("true", "false") if name in known and known[name].type is bool else ()
        if name in known:
            values = values or known[name].choices
        return [f"--config.{name}={value}" for value in values]
    found = set()
    for key in known:
        section = key.find(".", len(name))
        found.add(f"{key}=" if section < 0 else key[: section + 1])
    return [f"--config.{key}" for key in found]
