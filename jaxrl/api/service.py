"""The answers of the endpoints: requests are checked and queued, their results retrieved later."""

import asyncio
import dataclasses
import datetime
import functools
import re
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

from jaxrl.api.adapters import PARTS
from jaxrl.api.fields import (
    SampleRequest,
    adam_params,
    adapter_choice,
    flag,
    integer,
    mapping,
    sample_request,
    text,
)
from jaxrl.api.lanes import OptimizerCall, TrainingCall, pack_lanes
from jaxrl.api.losses import read_loss, read_samples
from jaxrl.api.messages import read_training_request
from jaxrl.api.models import SCHEME, TrainedModels
from jaxrl.api.queue import QueuedWork, Results, TrainingQueue
from jaxrl.api.sampling import Sampler
from jaxrl.api.store import SAMPLE, GroupCommit, RequestResult, Store
from jaxrl.data.images.reader import ImageReader
from jaxrl.http.errors import RequestError
from jaxrl.json_text import Json
from jaxrl.serve.compilation import BackgroundCompiler
from jaxrl.serve.metrics import ServerMetrics

NAME = re.compile(r"[\w.-]{1,200}")
INFLIGHT = "~inflight"  # no name that `_name` accepts
FULL = "this server trains all weights (--full) and no adapters; set the rank to 0"
NOT_FULL = "this server trains adapters; send lora_config with a rank, or start it with --full"
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 86400


class Service:
    """The state shared by all routes; used on the event loop."""

    def __init__(
        self,
        store: Store,
        models: TrainedModels,
        sampler: Sampler,
        compiler: BackgroundCompiler,
        *,
        name: str,
        max_waiting: int,
        max_queued: int,
    ):
        self.store, self.models, self.sampler_of = store, models, sampler
        self.name, self.max_waiting = name, max_waiting
        self.commits = GroupCommit(store)
        self.results = Results(store, self.commits)
        self.queue = TrainingQueue(self.results, models.run_shared, models.max_lanes, max_queued)
        self._compiler = compiler
        self._n_sampling = 0  # sequences
        self._running: asyncio.Task | None = None

    @property
    def metrics(self) -> ServerMetrics:
        return self.sampler_of.metrics

    @property
    def max_len(self) -> int:
        return self.sampler_of.model.max_model_len

    @property
    def n_vocab(self) -> int:
        return self.sampler_of.model.engine.cfg.V

    def start(self) -> None:
        self.sampler_of.engine.start()
        self._compiler.start()
        self._running = asyncio.create_task(self.queue.run())

    def begin_shutdown(self) -> None:
        """Answers clients that wait for results; they find them after a restart."""
        self.results.end_polls()

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
        await self.results.cancel()
        self._compiler.stop()
        await asyncio.to_thread(self.sampler_of.engine.stop)
        self.store.close()

    # Sessions and models

    def capabilities(self, client: str, path: Mapping[str, Any]) -> Json:
        model = {"model_name": self.name, "max_context_length": self.max_len}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    def create_session(self, client: str, body: Mapping[str, Any]) -> Json:
        session = secrets.token_hex(8)
        details = {name: body.get(name) for name in ("user_metadata", "tags", "display_name")}
        self.store.add_session(session, client, details)
        return {"type": "create_session", "session_id": session}

    def heartbeat(self, client: str, body: Mapping[str, Any]) -> Json:
        self.store.see_session(text(body, "session_id"), client)
        return {"type": "session_heartbeat"}

    def create_model(self, client: str, body: Mapping[str, Any]) -> Json:
        choice, seed = adapter_choice(body)
        self._check_base(text(body, "base_model"))
        if (choice is None) != self._trains_all:
            raise RequestError(400, FULL if self._trains_all else NOT_FULL, param="lora_config")
        details = {"rank": 0}  # of all weights
        if choice is not None:
            choice = choice.possible(self._cfg)
            # Before the request is accepted, so that the error names the field.
            choice.lora(self._cfg, self.models.max_rank)
            details = dataclasses.asdict(choice)
        model = self._new_model(client, body, details)
        work = functools.partial(self.models.create, model, choice, seed)
        return self._train(client, model, f"{model}:create", "create_model", work)

    def load_weights(self, client: str, body: Mapping[str, Any]) -> Json:
        if body.get("weights_access_token"):
            raise RequestError(400, "weights_access_token is not supported; leave it out")
        checkpoint = self.store.checkpoint(text(body, "path"), client)
        if checkpoint["kind"] != "training":
            raise RequestError(
                400, f"{checkpoint['path']} has weights for sampling only; load one of save_state"
            )
        self._check_trained(checkpoint)
        optimizer = flag(body, "optimizer", False)
        if body.get("base_model"):
            self._check_base(text(body, "base_model"))
        if body.get("session_id"):
            details = {"rank": checkpoint["details"]["rank"]}
            details |= {name: checkpoint["details"].get(name) for name in PARTS}
            model, seq_id = self._new_model(client, body, details), 0
        else:
            model, seq_id = text(body, "model_id"), integer(body, "seq_id")
            self.models.check(model, client)
        work = functools.partial(self.models.load, model, checkpoint, optimizer)
        request = f"{model}:{seq_id or 'load'}"
        return self._train(client, model, request, "load_weights", work, seq_id)

    def _new_model(self, client: str, body: Mapping[str, Any], details: Json) -> str:
        """The id of a model of a session; it is the same if a client sends its request again."""
        session = text(body, "session_id")
        self.store.session(session, client)
        model = f"{session}:train:{integer(body, 'model_seq_id')}"
        details = details | {"user_metadata": body.get("user_metadata")}
        if not self.store.has_model(model):
            self.store.add_model(model, client, session, details)
        return model

    def _check_base(self, name: str) -> None:
        if name != self.name:
            message = f"the base_model {name!r} is not served here; set {self.name!r}"
            raise RequestError(400, message, param="base_model")

    def _check_trained(self, checkpoint: Json) -> None:
        """Raises RequestError (400) for an adapter if all weights are trained, and vice versa."""
        if (checkpoint["details"]["rank"] == 0) != self._trains_all:
            raise RequestError(
                400, f"{checkpoint['path']}: {FULL if self._trains_all else NOT_FULL}"
            )

    def info(self, client: str, body: Mapping[str, Any]) -> Json:
        model = self.store.model(text(body, "model_id"), client)
        data = {"arch": self._cfg.family, "model_name": self.name, "tokenizer_id": self.name}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model["id"],
            "is_lora": not self._trains_all,
            "lora_rank": model["details"]["rank"] or None,
            "model_name": self.name,
        }

    @property
    def _reader(self) -> ImageReader | None:
        return self.sampler_of.model.images

    @property
    def _trains_all(self) -> bool:
        return self.models.files.trainer.trains_all

    @property
    def _cfg(self) -> Any:
        return self.models.files.trainer.base.cfg

    # Training

    def forward_backward(self, client: str, parsed: tuple[int, TrainingCall]) -> Json:
        seq_id, call = parsed
        self.models.check(call.model, client)
        request = f"{call.model}:{seq_id}"
        return self._train(client, call.model, request, "forward_backward", call, seq_id)

    def parse_training(self, raw: bytes) -> tuple[int, TrainingCall]:
        """(seq_id, call) of a body; may be called by any thread."""
        request, trainer = read_training_request(raw), self.models.files.trainer
        loss = read_loss(request.loss, request.options)
        limits = dict(n_vocab=self.n_vocab, max_len=self.max_len)
        samples = read_samples(request.loss, request.data, **limits, reader=self._reader)
        targets = [datum.tensors["target_tokens"] for datum in request.data]
        lanes = pack_lanes(samples, targets, trainer.cfg, trainer.n_ranks)
        return request.seq_id, TrainingCall(request.model_id, loss, request.forward_only, lanes)

    def optim_step(self, client: str, body: Mapping[str, Any]) -> Json:
        step = OptimizerCall(text(body, "model_id"), adam_params(body))
        return self._model_request(client, body, "optim_step", step)

    def save_weights(self, client: str, body: Mapping[str, Any]) -> Json:
        model, details = text(body, "model_id"), self._saved(client, body)
        name = _name(body) or secrets.token_hex(8)
        path = f"{SCHEME}{model}/weights/{name}"
        again = self.store.has_future(f"{model}:{body.get('seq_id')}")
        known = any(row["path"] == path for row in self.store.checkpoints(client))
        if known and not again and not flag(body, "overwrite", False):
            raise RequestError(422, f"there is a checkpoint {path}; set overwrite=True or a name")
        work = functools.partial(self.models.save_state, model, client, name, **details)
        return self._model_request(client, body, "save_weights", work)

    def save_for_sampler(self, client: str, body: Mapping[str, Any]) -> Json:
        model, details = text(body, "model_id"), self._saved(client, body)
        name, sampler, kind = _name(body), "", body.get("kind", "snapshot")
        if kind not in ("snapshot", "inflight") or (kind == "inflight" and name):
            message = f"kind={kind!r} must be 'snapshot', or 'inflight' without a name"
            raise RequestError(400, message, param="kind")
        if not name:
            session = self.store.model(model, client)["session"]
            sampler = f"{session}:sample:{integer(body, 'sampling_session_seq_id')}"
        if kind == "inflight":  # all of them read the newest weights at this path
            name = INFLIGHT
        name = name or secrets.token_hex(8)
        work = functools.partial(
            self.models.save_for_sampler, model, client, name, sampler, **details
        )
        return self._model_request(client, body, "save_weights_for_sampler", work)

    def save_external(self, client: str, body: Mapping[str, Any]) -> Json:
        raise RequestError(
            400,
            "save_weights_external is not supported; save_weights_for_sampler writes an adapter in "
            "PEFT's format to the server's run folder",
        )

    def _saved(self, client: str, body: Mapping[str, Any]) -> Json:
        """The lifetime and the metadata of a checkpoint that a request asks for."""
        ttl_s = None if body.get("ttl_seconds") is None else integer(body, "ttl_seconds")
        if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            message = f"ttl_seconds={ttl_s} is not within {MIN_TTL_S} to {MAX_TTL_S}"
            raise RequestError(400, message, param="ttl_seconds")
        model = self.store.model(text(body, "model_id"), client)
        details = {name: model["details"].get(name) for name in ("rank", *PARTS)}
        metadata = details | {"user_metadata": dict(mapping(body, "user_metadata")) or None}
        return {"ttl_s": ttl_s, "metadata": metadata}

    def _model_request(
        self, client: str, body: Mapping[str, Any], kind: str, work: QueuedWork
    ) -> Json:
        model, seq_id = text(body, "model_id"), integer(body, "seq_id")
        self.models.check(model, client)
        return self._train(client, model, f"{model}:{seq_id}", kind, work, seq_id)

    def _train(
        self, client: str, model: str, request: str, kind: str, work: QueuedWork, seq_id: int = 0
    ) -> Json:
        """Queues a training request, unless the client sends it again; the future of its result."""
        self.queue.check_room(client)
        if self.store.begin(request, client, kind, model if seq_id else "", seq_id):
            self.queue.accept(client)  # before others of the same commit are checked
            add = functools.partial(self.queue.add, client, model, request, work)
            self.commits.after(add, functools.partial(self.queue.drop, client))
        return {"request_id": request, "model_id": model}

    def result(self, request: str, client: str) -> RequestResult:
        """The outcome so far; `results.wait` waits for one."""
        return self.results.result(request, client)

    # Sampling

    def create_sampling_session(self, client: str, body: Mapping[str, Any]) -> Json:
        session, path = text(body, "session_id"), body.get("model_path")
        self.store.session(session, client)
        if body.get("base_model"):
            self._check_base(text(body, "base_model"))
        elif not path:
            raise RequestError(400, "set model_path or base_model")
        if path:
            self._check_trained(self.store.checkpoint(text(body, "model_path"), client))
        sampler = f"{session}:sample:{integer(body, 'sampling_session_seq_id')}"
        self.store.add_sampler(sampler, client, session, str(path or ""))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def parse_sample(self, body: Mapping[str, Any]) -> SampleRequest:
        """The request of a body; may be called by any thread."""
        return sample_request(
            body,
            n_vocab=self.n_vocab,
            max_len=self.max_len,
            max_samples=self.max_waiting,
            reader=self._reader,
        )

    def sample(self, client: str, body: Mapping[str, Any], request: SampleRequest) -> Json:
        sampler = text(body, "sampling_session_id")
        path = self.store.sampler(sampler, client)["path"]
        if self._n_sampling and self._n_sampling + request.n > self.max_waiting:
            raise RequestError(429, f"{self._n_sampling} sequences are sampled; try again later")
        folder = self.models.sampled_folder(path, client)
        name = f"{sampler}:{integer(body, 'seq_id')}"
        if self.store.begin(name, client, SAMPLE):

            async def work() -> bytes:
                try:
                    return await self.sampler_of.sample(request, folder)
                finally:
                    self._end_sampling(request.n)

            self._n_sampling += request.n
            start = functools.partial(self.results.start, name, work)
            self.commits.after(start, functools.partial(self._end_sampling, request.n))
        ids = [f"{name}:{i}" for i in range(request.n)]
        return {"request_id": name, "sample_sequence_ids": ids}

    def _end_sampling(self, n: int) -> None:
        self._n_sampling -= n

    # What there is

    def weights_info(self, client: str, body: Mapping[str, Any]) -> Json:
        details = self.store.checkpoint(text(body, "tinker_path"), client)["details"]
        switches = {name: details.get(name) for name in PARTS}
        found = {"base_model": self.name, "is_lora": not self._trains_all}
        return found | {"lora_rank": details["rank"] or None} | switches

    def training_runs(self, client: str, path: Mapping[str, Any]) -> Json:
        runs = [self._run(client, model) for model in self.store.models(client)]
        return _page(path, "training_runs", runs)

    def training_run(self, client: str, path: Mapping[str, Any]) -> Json:
        return self._run(client, self.store.model(path["model"], client))

    def _run(self, client: str, model: Json) -> Json:
        saved = [row for row in self.store.checkpoints(client) if row["model"] == model["id"]]
        last = {kind: None for kind in ("training", "sampler")}
        last |= {row["kind"]: _checkpoint(row) for row in saved}
        return {
            "training_run_id": model["id"],
            "base_model": self.name,
            "model_owner": client,
            "is_lora": not self._trains_all,
            "corrupted": bool(model["lost"]),
            "lora_rank": model["details"]["rank"] or None,
            "last_request_time": _time(model["seen"]),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": model["details"]["user_metadata"],
        }

    def checkpoints_of(self, client: str, path: Mapping[str, Any]) -> Json:
        self.store.model(path["model"], client)
        rows = self.store.checkpoints(client)
        return {"checkpoints": [_checkpoint(r) for r in rows if r["model"] == path["model"]]}

    def checkpoints(self, client: str, path: Mapping[str, Any]) -> Json:
        return _page(path, "checkpoints", list(map(_checkpoint, self.store.checkpoints(client))))

    def delete_checkpoint(self, client: str, path: Mapping[str, Any]) -> None:
        name = f"{SCHEME}{path['model']}/{path['kind']}/{path['name']}"
        folder = self.store.checkpoint(name, client)["folder"]
        self.store.remove_checkpoint(name, client)
        self.commits.after(functools.partial(shutil.rmtree, folder, ignore_errors=True))

    def sessions(self, client: str, path: Mapping[str, Any]) -> Json:
        return _page(path, "sessions", [row["id"] for row in self.store.sessions(client)])

    def session(self, client: str, path: Mapping[str, Any]) -> Json:
        session = self.store.session(path["session"], client)

        def ids(rows: list[Json]) -> list[str]:
            return [row["id"] for row in rows if row["session"] == session["id"]]

        return {
            "training_run_ids": ids(self.store.models(client)),
            "sampler_ids": ids(self.store.samplers(client)),
            "user_metadata": session["details"]["user_metadata"],
            "display_name": session["details"]["display_name"],
        }

    def sampler(self, client: str, path: Mapping[str, Any]) -> Json:
        found = self.store.sampler(path["sampler"], client)
        return {
            "sampler_id": found["id"],
            "base_model": self.name,
            "model_path": found["path"] or None,
        }


def _name(body: Mapping[str, Any]) -> str:
    """The name of a checkpoint that a client chooses; "" without one."""
    if body.get("path") is None:
        return ""
    name = text(body, "path")
    if not NAME.fullmatch(name):
        raise RequestError(
            400,
            f"the name {name!r} of a checkpoint may have letters, digits, '_', '.' and '-' only",
            param="path",
        )
    return name


def _checkpoint(row: Json) -> Json:
    return {
        "checkpoint_id": "/".join(row["path"].split("/")[-2:]),
        "checkpoint_type": row["kind"],
        "time": _time(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["n_bytes"],
        "user_metadata": row["details"]["user_metadata"],
        "expires_at": None if row["expires"] is None else _time(row["expires"]),
    }


def _page(path: Mapping[str, Any], name: str, rows: list[Any]) -> Json:
    """A part of the rows, the newest first, by the query's limit and offset."""
    try:
        limit, offset = int(path.get("limit", 20)), int(path.get("offset", 0))
    except ValueError as error:
        raise RequestError(400, "limit and offset must be integers") from error
    cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
    return {name: rows[::-1][offset : offset + limit], "cursor": cursor}


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
