"""Checkpoints: the whole training state and the host's state, saved while training goes on."""

import contextlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from jaxrl.config.keys import CheckpointConfig
from jaxrl.io.checkpoint.orbax_noise import OrbaxNoise
from jaxrl.io.checkpoint.state_tree import Reader, StructureError, by_path, nested
from jaxrl.types import TrainState
from sharding import hosts

UNFINISHED = (
    ".orbax-checkpoint-tmp"  # part of the name of a step's folder until all of it is written
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what to do."""


class Checkpointer:
    """The checkpoints of one run: `directory`/<step>/.

    A step is a checkpoint only once all of it is on disk (its folder is renamed then), so a save that
    fails or is killed leaves the earlier ones as they were. An older checkpoint is removed only after a
    newer one is complete. The newest `cfg.keep` are kept, and the best by `cfg.best_metric`.
    """

    def __init__(self, directory: str | Path, cfg: CheckpointConfig):
        path = epath.Path(directory)
        self.directory = path if "://" in str(directory) else path.absolute()
        self.cfg = cfg
        self._saving: int | None = None
        self._cleaned = False
        self._noise = OrbaxNoise()
        self._noise.silence()
        self._open()

    def save(
        self,
        step: int,
        state: TrainState,
        host: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving and returns once the arrays may be changed or donated again.

        `host` is JSON: data iterator, seeds, whatever else a resumed run needs. `metrics` are what
        `cfg.best_metric` is looked up in. Saving a step again is a no-op. A failure of the save before,
        which went on in the background, is raised here.
        """
        self.wait()
        steps = hosts.broadcast(self.all_steps())  # a process may see another's files late
        if step in steps:
            return
        if steps and steps[-1] > step:
            raise CheckpointError(
                f"cannot save step {step} in {self.directory}: it holds the later step {steps[-1]}; "
                f"remove the later checkpoints or set another config.run_dir"
            )
        host = json_copy(host)
        self._remove_leftovers()
        self._check_space(state)
        value = float((metrics or {}).get(self.cfg.best_metric, math.nan))
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(nested(by_path(state))), host=ocp.args.JsonSave(host)
        )
        self._saving = step
        try:
            self._manager.save(
                step,
                args=args,
                metrics={self.cfg.best_metric: value} if math.isfinite(value) else None,
                force=True,
            )
        except Exception as error:
            raise self._failed_save(error) from error

    def wait(self) -> None:
        """Until the running save is complete; raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed_save(error) from error
        self._saving = None

    def restore(
        self, abstract_state: TrainState, step: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state and the host's state of `step` (default: the newest), laid out as asked for.

        `abstract_state` has arrays or ShapeDtypeStructs with shardings as leaves, on any mesh; layers
        may be a list or stacked whatever they were when saved. Numbers come back bitwise.
        """
        self.wait()
        step = self.latest_step() if step is None else step
        if step is None or step not in self.all_steps():
            there = f"it has {self.all_steps()}" if self.all_steps() else "it has none"
            wanted = "a checkpoint" if step is None else f"step {step}"
            raise CheckpointError(
                f"{wanted} to resume from is not in {self.directory}: {there}; "
                f"check config.run_dir, or set config.resume=False"
            )
        try:
            saved = by_path(self._manager.item_metadata(step)["state"].tree)
            reader = Reader(abstract_state, saved)
            request = reader.request()
            restore_args = ocp.checkpoint_utils.construct_restore_args(request)
            args = ocp.args.Composite(
                state=ocp.args.PyTreeRestore(request, restore_args=restore_args),
                host=ocp.args.JsonRestore(),
            )
            read = self._manager.restore(step, args=args)
            return reader.assemble(read["state"]), read["host"]
        except StructureError as error:
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} is of another model or optimizer: {error}; "
                f"resume with the config.model and config.learner it was made with, or set another config.run_dir"
            ) from error
        except Exception as error:
            others = [other for other in self.all_steps() if other != step]
            instead = (
                f"remove that folder to go on from step {others[-1]}"
                if others
                else "there is no other"
            )
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} cannot be read: {reason(error)}; {instead}"
            ) from error

    def all_steps(self) -> list[int]:
        """Steps whose checkpoints are complete on disk, ascending."""
        return complete_steps(self.directory)

    def latest_step(self) -> int | None:
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Of the complete checkpoints, the best by `cfg.best_metric`; None where none was measured."""
        self.wait()
        values = {step: self._manager.metrics(step) for step in self.all_steps()}
        measured = {
            s: v[self.cfg.best_metric] for s, v in values.items() if v and self.cfg.best_metric in v
        }
        best = max if self.cfg.best_mode == "max" else min
        return best(measured, key=measured.__getitem__) if measured else None

    def close(self) -> None:
        """Waits for the running save, then ends the background threads."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._noise.restore()

    def _open(self) -> None:
        worst = -math.inf if self.cfg.best_mode == "max" else math.inf

        def value(metrics: Mapping[str, float]) -> float:
            return metrics.get(self.cfg.best_metric, worst)

        kept: list[preservation.PreservationPolicy] = [preservation.LatestN(max(self.cfg.keep, 1))]
        best: dict[str, Any] = {}
        if self.cfg.best_metric:
            reverse = self.cfg.best_mode == "min"
            kept.append(
                preservation.BestN(
                    get_metric_fn=value,
                    reverse=reverse,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
            best = {"best_fn": value, "best_mode": self.cfg.best_mode}  # has the metrics saved
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation.AnyPreservationPolicy(kept),
            save_root_metadata=False,
            **best,
        )
        # Uncompressed: float32 weights shrink by 8 % only, and zstd would double the CPU time of a save.
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(use_compression=False),
            "host": ocp.JsonCheckpointHandler(),
        }
        try:
            self._manager = ocp.CheckpointManager(
                self.directory, options=options, item_handlers=handlers
            )
        except Exception as error:
            raise CheckpointError(
                f"the folder of checkpoints {self.directory} cannot be opened: {reason(error)}; "
                f"set config.run_dir to a folder you can write to"
            ) from error

    def _failed_save(self, error: Exception) -> CheckpointError:
        """Puts the manager back in order after a failed save and says what happened."""
        step, self._saving = self._saving, None
        self._remove_leftovers()
        self._cleaned = False  # writes that were under way may leave files behind even now
        self._open()
        latest = self.latest_step()
        good = (
            "there is no earlier one" if latest is None else f"the one of step {latest} is intact"
        )
        return CheckpointError(
            f"saving the checkpoint of step {step} in {self.directory} failed: {reason(error)}; {good}; "
            f"free disk space or allow writing there, then run again with --config.resume=True"
        )

    def _remove_leftovers(self) -> None:
        """Folders of saves that were killed or failed. Only a run that saves removes them."""
        if self._cleaned or not hosts.is_main_process():
            return
        for path in self.directory.iterdir():
            if UNFINISHED in path.name:
                with contextlib.suppress(OSError):
                    path.rmtree()
        self._cleaned = True

    def _check_space(self, state: TrainState) -> None:
        """Refuses a save for which the disk has no room, before anything is written. Where processes
        write to disks of their own, each is held to all of it; they share one as a rule."""
        if "://" in str(self.directory):
            return
        mine = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        )
        found = hosts.gather((mine, shutil.disk_usage(self.directory).free))
        needed, free = sum(n for n, _ in found), min(n for _, n in found)
        if needed > free:
            raise CheckpointError(
                f"no room for the checkpoint in {self.directory}: it needs {needed / 2**30:.2f} GiB and "
                f"{free / 2**30:.2f} GiB are free; free disk space, lower config.checkpoint.keep "
                f"(now {self.cfg.keep}) or set another config.run_dir"
            )


def complete_steps(directory: Path | epath.Path) -> list[int]:
    """Steps whose checkpoints are complete on disk, ascending."""
    return sorted(ocp.path.step.checkpoint_steps(directory))


def json_copy(host: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON makes of `host`, so that later changes of it do not reach the running save."""
    try:
        return json.loads(json.dumps(dict(host)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the host's state cannot be saved as JSON: {error}; give it plain numbers, strings, lists and dicts"
        ) from error


def reason(error: BaseException) -> str:
    """The error's own words in one line; of a long one the beginning and the end."""
    line = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {line if len(line) <= 300 else f'{line[:120]} ... {line[-160:]}'}"
    )
