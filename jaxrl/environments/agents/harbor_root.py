"""The files of a Harbor task and the commands that run in them, without a container.

Every command runs in new namespaces of mounts and processes (unshare of util-linux), with a folder
of the episode as its root. The system's folders are mounted there, read-only; other folders of this
machine do not exist in it. All processes of a command end with it.
"""

import math
import os
import shutil
import subprocess
from pathlib import Path

from jaxrl.data.sources.harbor import HarborTask
from jaxrl.json_text import parse_json

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "opt", "dev")
_ENTER = """
set -e
root=$1; workdir=$2; command=$3; shift 3
for name in "$@"; do
    if [ -L /$name ]; then [ -L $root/$name ] || ln -s "$(readlink /$name)" $root/$name
    elif [ -d /$name ]; then
        mkdir -p $root/$name
        mount --rbind /$name $root/$name
        mount -o remount,bind,ro $root/$name
    fi
done
mkdir -p $root/proc $root/tmp $root/root
mount -t proc proc $root/proc
exec chroot $root /bin/bash -c 'cd "$0" && exec /bin/bash -c "$1"' "$workdir" "$command"
"""
_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_REWARDS = Path("logs", "verifier")
_MAX_BYTES = 1 << 20  # of a reward file, and of a command's output that is kept
TIMED_OUT = 124


class TaskRoot:
    """The root of one episode of a task, below `folder`."""

    def __init__(self, task: HarborTask, folder: Path):
        self._task, self._root = task, folder / "root"
        self._output = folder / "output"
        self._path(task.workdir).mkdir(parents=True)
        for source, target in task.copies:
            _copy(task.folder / "environment" / source, self._path(target), target.endswith("/"))

    def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        """(exit status, output) of a shell command in the task's working folder."""
        return self._run(command, timeout_s, self._task.env, self._task.network)

    def verify(self) -> dict[str, float]:
        """The numbers of the verifier's reward file. Raises RuntimeError if there are none.

        The tests are copied now: no command of the model has read or changed them. Other logs of
        the commands than rewards stay, as tests may read them.
        """
        _remove(self._root / "tests")
        logs = self._root / "logs"
        _remove(self._root / _REWARDS if logs.is_dir() and not logs.is_symlink() else logs)
        shutil.copytree(self._task.folder / "tests", self._root / "tests")
        (self._root / _REWARDS).mkdir(parents=True)
        env = self._task.env | self._task.verifier_env
        status, output = self._run(
            "chmod +x /tests/test.sh && /tests/test.sh",
            self._task.verifier_s,
            env,
            self._task.verifier_network,
        )
        numbers = self._read_rewards()
        if numbers is None:
            raise RuntimeError(
                f"{self._task.folder}: the verifier wrote no valid reward.json or reward.txt to "
                f"/logs/verifier (exit status {status}): {output[-1000:]}"
            )
        return numbers

    def _read_rewards(self) -> dict[str, float] | None:
        for name, read in (("reward.json", _numbers), ("reward.txt", _number)):
            path = self._root / _REWARDS / name
            if not path.is_symlink() and path.is_file():
                with path.open() as file:
                    return read(file.read(_MAX_BYTES))
        return None

    def _run(
        self, command: str, timeout_s: float, env: dict[str, str], network: bool
    ) -> tuple[int, str]:
        namespaces = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        words = ["unshare", *namespaces, *(() if network else ("--net",))]
        inside = [str(self._root), self._task.workdir, command, *_SYSTEM]
        with self._output.open("wb") as file:
            try:
                status = subprocess.run(
                    [*words, "/bin/bash", "-c", _ENTER, "task", *inside],
                    env=_ENV | env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                ).returncode
            except subprocess.TimeoutExpired:
                status = TIMED_OUT
        with self._output.open("rb") as file:
            return status, file.read(_MAX_BYTES).decode(errors="replace")

    def _path(self, inside: str) -> Path:
        """The path on this machine of one in the task. Raises ValueError for one outside."""
        path = Path(os.path.normpath(f"{self._root}/{inside}"))
        if not path.is_relative_to(self._root):
            raise ValueError(f"{self._task.folder}: {inside} is not a path of the task")
        return path


def _copy(source: Path, target: Path, into: bool) -> None:
    """Copies as COPY of a Dockerfile does: the content of a folder, or a file."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    path = target / source.name if into else target
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, path)


def _remove(path: Path) -> None:
    """Deletes a file, link or folder; the target of a link stays."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _numbers(text: str) -> dict[str, float] | None:
    """The numbers of reward.json: one, or an object of numbers; None for anything else."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    named = value if isinstance(value, dict) else {"reward": value}
    if not all(isinstance(number, int | float) for number in named.values()):
        return None
    return {name: float(number) for name, number in named.items()}


def _number(text: str) -> dict[str, float] | None:
    """The number of reward.txt, in any form that Python reads; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return {"reward": number} if math.isfinite(number) else None
