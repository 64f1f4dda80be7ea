"""The adapters in training of all clients, and the work of their requests on the device."""

import asyncio
import collections
import dataclasses
import json
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl.api.adapters import WEIGHTS, AdapterChoice, AdapterFiles
from jaxrl.api.lanes import MAX_STEPS, OptimizerCall, SharedCall, TrainingCall
from jaxrl.api.store import Store
from jaxrl.api.training import LaneInput, TrainedAdapter
from jaxrl.http.errors import RequestError
from jaxrl.serve.engine_thread import ServingThread
from jaxrl.types import Tree

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}  # of checkpoints, by path


@dataclasses.dataclass(frozen=True)
class TrainedModels:
    """Methods run requests, and return the bodies of their results.

    Methods raise ValueError or RequestError for what the client can change.
    """

    store: Store
    engine: ServingThread
    files: AdapterFiles
    folder: Path  # of checkpoints
    max_rank: int
    max_models: int
    lost_after_s: float
    trained: dict[str, TrainedAdapter] = dataclasses.field(default_factory=dict)

    def check(self, model: str, owner: str) -> None:
        """Raises RequestError unless the client has this model and can train it."""
        if self.store.is_lost(model, owner):
            raise RequestError(
                422,
                f"the training state of {model} is gone, because the server was restarted or its "
                "client was silent; call create_training_client_from_state_with_optimizer with "
                "its last checkpoint",
            )

    def remove_unknown(self) -> None:
        """Deletes the folders of deleted, replaced and expired checkpoints, and incomplete ones."""
        kept = self.store.kept_folders()
        for folder in self.folder.glob("*") if self.folder.is_dir() else ():
            if str(folder) not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    async def create(self, model: str, choice: AdapterChoice | None, seed: int | None) -> bytes:
        """A new adapter of this choice, or without one all weights of the base model."""
        lora = choice and choice.lora(self.files.trainer.base.cfg, self.max_rank)
        start = secrets.randbelow(2**31) if seed is None else seed % 2**31
        await self._add(model, lambda: self.files.trainer.create(lora, start))
        return _json(model_id=model, type="create_model")

    async def load(self, model: str, checkpoint: dict[str, Any], optimizer: bool) -> bytes:
        """Replaces the model's weights, and moments, by those of a checkpoint."""
        folder = Path(checkpoint["folder"])
        await self._add(model, lambda: self.files.load(folder, optimizer=optimizer))
        return _json(path=checkpoint["path"], type="load_weights")

    def max_lanes(self, call: SharedCall) -> int:
        """Lanes of a full dispatch of calls of this kind."""
        if isinstance(call, OptimizerCall):
            return MAX_STEPS
        return self.files.trainer.max_lanes(call.kind[0])

    async def run_shared(self, calls: Sequence[SharedCall]) -> None:
        """Runs the next lane of each call, which have one kind; a call may be there several times.

        The results, and errors, are then in the calls.
        """
        await self._run_steps([call for call in calls if isinstance(call, OptimizerCall)])
        await self._run_lanes([call for call in calls if isinstance(call, TrainingCall)])

    async def _run_lanes(self, calls: Sequence[TrainingCall]) -> None:
        lanes: list[tuple[TrainingCall, LaneInput]] = []
        taken: collections.Counter[int] = collections.Counter()
        for call in calls:
            if (adapter := self.trained.get(call.model)) is None:
                call.error = self._unknown(call.model)
                continue
            micro = call.lanes[len(call.logps) + taken[id(call)]]
            taken[id(call)] += 1
            lanes.append((call, LaneInput(adapter, call.loss, micro.batch)))
        if not lanes:
            return
        forward_only, run = calls[0].forward_only, self.files.trainer.run_lanes
        inputs = [lane for _, lane in lanes]
        try:
            results = await self._on_device(lambda: run(inputs, forward_only=forward_only))
        except Exception as error:  # of the device: other calls continue
            for call, _ in lanes:
                call.error = error
            return
        for (call, _), (logp, total) in zip(lanes, results, strict=True):
            call.logps.append(logp)
            call.losses.append(total)

    async def _run_steps(self, calls: Sequence[OptimizerCall]) -> None:
        known = [call for call in calls if call.model in self.trained]
        for call in calls:
            if call not in known:
                call.error = self._unknown(call.model)
        adapters = [self.trained[call.model] for call in known]
        params, run = [call.params for call in known], self.files.trainer.optim_steps
        if not known:
            return
        try:
            results = await self._on_device(lambda: run(adapters, params))
        except Exception as error:  # of the device
            results = [error] * len(known)
        for call, result in zip(known, results, strict=True):
            if isinstance(result, Exception):
                call.error = result
            else:
                call.metrics = result

    async def save_state(self, model: str, owner: str, name: str, **details: Any) -> bytes:
        path = f"{SCHEME}{model}/weights/{name}"
        await self._save(self.files.save_state, model, owner, path, **details)
        return _json(path=path, type="save_weights")

    async def save_for_sampler(
        self, model: str, owner: str, name: str, sampler: str, **details: Any
    ) -> bytes:
        """Saves the weights, and opens the sampling session `sampler` with them, if not ""."""
        path = f"{SCHEME}{model}/sampler_weights/{name}"
        await self._save(self.files.save_weights, model, owner, path, **details)
        kind = "save_weights_for_sampler"
        if not sampler:
            return _json(path=path, type=kind)
        self.store.add_sampler(sampler, owner, self.store.model(model, owner)["session"], path)
        return _json(sampling_session_id=sampler, type=kind)

    def sampled_folder(self, path: str, owner: str) -> Path | None:
        """The folder of the weights at a path; None for the base model, ""."""
        if not path:
            return None
        found = self.store.checkpoint(path, owner)
        folder = Path(found["folder"])
        return folder / WEIGHTS if found["kind"] == "training" else folder

    async def _save(
        self,
        save: Callable[[Path, TrainedAdapter], None],
        model: str,
        owner: str,
        path: str,
        *,
        ttl_s: int | None,
        metadata: dict[str, Any],
    ) -> None:
        adapter = self._trained(model)
        folder = self.folder / secrets.token_hex(8)  # new, so that nothing reads another content
        await self._on_device(lambda: save(folder, adapter))
        n_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        self.store.add_checkpoint(
            path,
            owner,
            model=model,
            kind=KINDS[path.split("/")[-2]],
            folder=str(folder),
            expires=None if ttl_s is None else time.time() + ttl_s,
            n_bytes=n_bytes,
            details=metadata,
        )

    async def _add(self, model: str, make: Callable[[], TrainedAdapter]) -> None:
        if model not in self.trained:
            self._make_room()
        self.trained[model] = await self._on_device(make)

    def _make_room(self) -> None:
        """Drops the models of silent clients if there are too many.

        Raises RequestError (422) if there are still too many.
        """
        if len(self.trained) < self.max_models:
            return
        for model in self.store.silent_models(time.time() - self.lost_after_s):
            if self.trained.pop(model, None) is not None:
                self.store.lose_model(model)
        if len(self.trained) >= self.max_models and self.files.trainer.trains_all:
            raise RequestError(
                422,
                "this server trains all weights of one model (--full), and one is in training; try "
                "again later",
            )
        if len(self.trained) >= self.max_models:
            raise RequestError(
                422,
                f"the server trains {self.max_models} adapters at most (--max-models), and all of "
                "them are in use; try again later",
            )

    def _trained(self, model: str) -> TrainedAdapter:
        if (adapter := self.trained.get(model)) is None:
            raise self._unknown(model)
        return adapter

    def _unknown(self, model: str) -> RequestError:
        return RequestError(422, f"the model {model} was not created, or has been dropped")

    async def _on_device[T](self, work: Callable[[], T]) -> T:
        def command(params: Tree) -> tuple[Tree, T]:
            return params, work()

        return await asyncio.wrap_future(self.engine.run(command))


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, allow_nan=False).encode()
