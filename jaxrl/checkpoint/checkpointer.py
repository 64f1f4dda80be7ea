"""Checkpoints of the training state and the host state, saved asynchronously."""

import contextlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from jaxrl.checkpoint.checksums import RECORD, verify_checksums, write_checksums
from jaxrl.checkpoint.errors import CheckpointError, DamageError, OrbaxLogFilter, one_line
from jaxrl.checkpoint.links import is_link, refuse_links
from jaxrl.checkpoint.state_handler import StateHandler, StateRestore, StateSave
from jaxrl.checkpoint.state_tree import Reader, StructureError, by_path, nested
from jaxrl.config.keys import CheckpointConfig
from jaxrl.types import TrainState
from sharding import hosts

METRICS = "metrics/metrics"  # the file of a step with the value of best_metric
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a step's folder until it is complete


class Checkpointer:
    """The checkpoints of one run, in `directory`/<step>/.

    A step's folder gets its final name once all of it is on disk, so a save that fails or is killed
    leaves the earlier checkpoints intact. An older checkpoint is removed only after a newer one is
    complete. The newest `cfg.keep` are kept, and the best by `cfg.best_metric`. Checksums of all
    files are written with a save and verified before a restore.
    """

    def __init__(self, directory: str | Path, cfg: CheckpointConfig):
        path = epath.Path(directory)
        self.directory = path if "://" in str(directory) else path.absolute()
        self.cfg = cfg
        self._saving: int | None = None
        self._cleaned = False
        self._log_filter = OrbaxLogFilter()
        self._log_filter.install()
        self._manager: ocp.CheckpointManager | None = self._open()

    def save(
        self,
        step: int,
        state: TrainState,
        host: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts a save and returns once the arrays may be modified or donated.

        `host` is JSON: data iterator, seeds and whatever else a resumed run needs. `metrics` has
        the value of `cfg.best_metric`. Saving a step again is a no-op. Raises CheckpointError if
        this save cannot start or the previous one, which ran in the background, failed.
        """
        self.wait()
        steps = hosts.broadcast(self.all_steps())  # a process may see another's files late
        if step in steps:
            return
        if steps and steps[-1] > step:
            raise CheckpointError(
                f"cannot save step {step} in {self.directory}: it has the later step {steps[-1]}; "
                f"remove the later checkpoints or set another config.run_dir"
            )
        host = json_copy(host)
        value = float((metrics or {}).get(self.cfg.best_metric, math.nan))
        args = ocp.args.Composite(
            state=StateSave(nested(by_path(state))), host=ocp.args.JsonSave(host)
        )
        self._saving = step
        try:
            self._remove_leftovers()
            self._check_space(state)
            self._opened().save(
                step,
                args=args,
                metrics={self.cfg.best_metric: value} if math.isfinite(value) else None,
                custom_metadata=RECORD,
                force=True,
            )
        except CheckpointError:
            raise
        except Exception as error:
            raise self._failed_save(error) from error

    def wait(self) -> None:
        """Blocks until the running save is complete; raises CheckpointError if it failed."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed_save(error) from error
        self._saving = None

    def restore(
        self, abstract_state: TrainState, step: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """(state, host state) of `step`, by default the newest.

        The leaves of `abstract_state` are arrays or ShapeDtypeStructs with shardings, on any mesh;
        the result has these shardings. Layers may be a list or stacked, whichever the checkpoint
        has. Values are restored bitwise. Raises CheckpointError if the step is missing, unreadable
        or from another architecture or optimizer.
        """
        self.wait()
        step = self.latest_step() if step is None else step
        if step is None or step not in self.all_steps():
            found = f"it has {self.all_steps()}" if self.all_steps() else "it has none"
            wanted = "a checkpoint" if step is None else f"step {step}"
            raise CheckpointError(
                f"{wanted} to resume from is not in {self.directory}: {found}; "
                f"check config.run_dir, or set config.resume=False"
            )
        try:
            with hosts.raise_together():
                verify(self.directory, step)
            return self._read(abstract_state, step)
        except StructureError as error:
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} is from another model or optimizer: "
                f"{error}; resume with the config.model and config.learner of that run, or set "
                f"another config.run_dir"
            ) from error
        except Exception as error:
            others = [other for other in self.all_steps() if other != step]
            remedy = (
                f"remove that folder to resume from step {others[-1]}"
                if others
                else "there is no other checkpoint"
            )
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} cannot be read: {one_line(error)}; "
                f"{remedy}"
            ) from error

    def all_steps(self) -> list[int]:
        """Steps of the complete checkpoints on disk, ascending."""
        return complete_steps(self.directory)

    def latest_step(self) -> int | None:
        return max(self.all_steps(), default=None)

    def close(self) -> None:
        """Waits for the running save, then stops the background threads."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
            self._log_filter.remove()

    def _opened(self) -> ocp.CheckpointManager:
        """The manager; a new one after a failed save."""
        self._manager = self._manager or self._open()
        return self._manager

    def _open(self) -> ocp.CheckpointManager:
        for folder in [self.directory / str(step) for step in self.all_steps()]:
            if is_link(folder):  # orbax would fail at its removal
                raise CheckpointError(
                    f"the checkpoint {folder} is a link; replace it by a copy of the folder, or "
                    f"remove the link"
                )
        options = manager_options(self.cfg, before_commit=self._write_checksums)
        handlers = {"state": StateHandler(), "host": ocp.JsonCheckpointHandler()}
        try:
            return ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)
        except Exception as error:
            for step in steps_with_damaged_metrics(self.directory):
                raise CheckpointError(
                    f"the checkpoint {self.directory / str(step)} cannot be read: {METRICS} is "
                    f"damaged; remove that folder"
                ) from error
            raise CheckpointError(
                f"the checkpoint folder {self.directory} cannot be opened: {one_line(error)}; "
                f"set config.run_dir to a folder you can write to"
            ) from error

    def _write_checksums(self) -> None:
        """Writes the checksums of a save. Orbax calls it last, before the final name is given."""
        names = (f"{self._saving}{UNFINISHED}", str(self._saving))  # the second in object storage
        for folder in [self.directory / name for name in names]:
            write_checksums(folder, step=self._saving)

    def _read(self, abstract_state: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
        manager = self._opened()
        saved = by_path(manager.item_metadata(step)["state"].tree)
        reader = Reader(abstract_state, saved)
        request = reader.request()
        restore_args = ocp.checkpoint_utils.construct_restore_args(request)
        args = ocp.args.Composite(
            state=StateRestore(request, restore_args=restore_args), host=ocp.args.JsonRestore()
        )
        read = manager.restore(step, args=args)
        if not isinstance(read["host"], dict):
            raise DamageError("the host state is not a JSON object")
        return reader.assemble(read["state"]), read["host"]

    def _failed_save(self, error: Exception) -> CheckpointError:
        """The error to raise after a failed save, whose manager cannot be used any further."""
        step, self._saving, self._manager = self._saving, None, None
        self._cleaned = False
        with contextlib.suppress(OSError):
            self._remove_leftovers()
        self._cleaned = False  # writes in flight may still leave files
        latest = self.latest_step()
        intact = (
            "there is no earlier one" if latest is None else f"the one of step {latest} is intact"
        )
        return CheckpointError(
            f"saving the checkpoint of step {step} in {self.directory} failed: {one_line(error)}; "
            f"{intact}; free disk space or make the folder writable, then run again with "
            f"--config.resume=True"
        )

    def _remove_leftovers(self) -> None:
        """Removes folders of saves that were killed or failed. Only runs that save call this."""
        if self._cleaned or not hosts.is_main_process():
            return
        for path in self.directory.iterdir():
            if UNFINISHED in path.name:
                with contextlib.suppress(OSError):
                    path.unlink() if is_link(path) else path.rmtree()
        self._cleaned = True

    def check_room(self, state: TrainState, *, n_saves: int, export_bytes: int) -> str:
        """A warning if the disk lacks room for a later one of `n_saves` or for the export, else "".

        Raises CheckpointError if the next save does not fit.
        """
        if (room := self._check_space(state)) is None:
            return ""
        n_bytes, free = room
        there, kept = len(self.all_steps()), self.cfg.keep + bool(self.cfg.best_metric)
        n_peak = max(
            min(there + n_saves, kept + 1) - there, 1
        )  # one goes when the next is complete
        n_end = max(min(there + n_saves, kept) - there, 0)
        needed = max(n_peak * n_bytes, n_end * n_bytes + export_bytes)
        if needed <= free:
            return ""
        export = f" and the export {gib(export_bytes)}" if export_bytes else ""
        return (
            f"the disk of {self.directory} has {gib(free)} free and the run needs {gib(needed)}: a "
            f"checkpoint takes {gib(n_bytes)}{export}. The first checkpoint fits, a later one or "
            f"the export does not; free disk space, lower config.checkpoint.keep (now "
            f"{self.cfg.keep}), set config.checkpoint.every=0 for a single one at the end or "
            "config.checkpoint.export_hf=False, or set another config.run_dir"
        )

    def _check_space(self, state: TrainState) -> tuple[int, int] | None:
        """(bytes of a save, free bytes); None in object storage.

        Raises CheckpointError, before anything is written, if the disk lacks room for a save. Each
        process's disk must have room for all processes: they usually share one.
        """
        if "://" in str(self.directory):
            return None
        local = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        )
        found = hosts.gather((local, shutil.disk_usage(self.directory).free))
        needed, free = sum(n for n, _ in found), min(n for _, n in found)
        if needed > free:
            raise CheckpointError(
                f"no room for the checkpoint in {self.directory}: it needs {gib(needed)} and "
                f"{gib(free)} are free; free disk space, lower config.checkpoint.keep (now "
                f"{self.cfg.keep}) or set another config.run_dir"
            )
        return needed, free


def gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**24 else f"{n_bytes / 2**20:.2f} MiB"


def manager_options(
    cfg: CheckpointConfig, *, before_commit: Callable[[], None]
) -> ocp.CheckpointManagerOptions:
    """Which checkpoints are kept; `before_commit` runs before a step's folder gets its name."""
    worst = -math.inf if cfg.best_mode == "max" else math.inf

    def value(metrics: Mapping[str, float]) -> float:
        return metrics.get(cfg.best_metric, worst)

    kept: list[preservation.PreservationPolicy] = [preservation.LatestN(max(cfg.keep, 1))]
    best: dict[str, Any] = {}
    if cfg.best_metric:
        kept.append(
            preservation.BestN(
                get_metric_fn=value,
                reverse=cfg.best_mode == "min",
                n=1,
                keep_checkpoints_without_metrics=False,
            )
        )
        best = {"best_fn": value, "best_mode": cfg.best_mode}  # makes orbax save metrics
    return ocp.CheckpointManagerOptions(
        preservation_policy=preservation.AnyPreservationPolicy(kept),
        save_root_metadata=False,
        async_options=ocp.AsyncOptions(
            # Where a folder cannot be made in the background, the threads that write into it wait
            # for five minutes, and the process cannot end. Making folders takes milliseconds.
            create_directories_asynchronously=False,
            post_finalization_callback=before_commit,
        ),
        **best,
    )


def steps_with_damaged_metrics(directory: epath.Path) -> Iterator[int]:
    """Steps whose metrics are not a JSON object; orbax reads all of them when it starts."""
    with contextlib.suppress(OSError):
        for step in complete_steps(directory):
            path = directory / str(step) / METRICS
            try:
                if path.exists() and not isinstance(json.loads(path.read_text()), dict):
                    yield step
            except ValueError:
                yield step


def verify(directory: Path | epath.Path, step: int) -> None:
    """Raises DamageError if a file of the checkpoint does not have the bytes that were saved.

    Also for links, and for a checkpoint that was saved with checksums and has lost them.
    """
    folder = directory / str(step)
    refuse_links(folder)
    if not verify_checksums(folder, step) and folder.exists():  # a server's may be removed
        warnings.warn(
            f"the checkpoint {folder} is of a version without checksums, so damage to its data "
            f"goes unnoticed; checkpoints that this version saves have them",
            stacklevel=2,
        )


def best_step(directory: Path | epath.Path, cfg: CheckpointConfig) -> int | None:
    """The complete checkpoint with the best `cfg.best_metric`; None if none was measured."""
    measured = {}
    for step in complete_steps(directory):
        path = directory / str(step) / METRICS
        values = json.loads(path.read_text()) if path.exists() else {}
        if cfg.best_metric in values:
            measured[step] = values[cfg.best_metric]
    best = max if cfg.best_mode == "max" else min
    return best(measured, key=measured.__getitem__) if measured else None


def find_step(directory: Path, step: str, cfg: CheckpointConfig) -> int:
    """The step that "last", "best" or a number names. Raises ValueError with those there are."""
    steps = complete_steps(directory) if directory.is_dir() else []
    if not steps:
        raise ValueError(f"{directory} has no complete checkpoint; set checkpoint.every in the run")
    listed = ", ".join(map(str, steps))
    if step == "last":
        return steps[-1]
    if step == "best":
        best = best_step(directory, cfg) if cfg.best_metric else None
        if best is None:
            raise ValueError(
                f"--step=best: the run measured no checkpoint (checkpoint.best_metric="
                f"{cfg.best_metric!r}); set --step to last or one of {listed}"
            )
        return best
    if not step.isdecimal() or int(step) not in steps:
        raise ValueError(f"--step={step} is not in {directory}; set last, best or one of {listed}")
    return int(step)


def complete_steps(directory: Path | epath.Path) -> list[int]:
    """Steps of the complete checkpoints on disk, ascending."""
    return sorted(ocp.path.step.checkpoint_steps(directory))


def json_copy(host: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `host` through JSON, so that later changes do not reach the running save."""
    try:
        return json.loads(json.dumps(dict(host)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the host state cannot be saved as JSON: {error}; use only plain numbers, strings, "
            f"lists and dicts"
        ) from error
