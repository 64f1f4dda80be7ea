"""The served model: weights, tokenizer, and an engine with compiled programs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl.config.keys import RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.tokenizer import stop_ids
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import Layout, rollout_layout
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.models.config import DecoderConfig, LoRA, for_platform
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.adapted_tower import load_adapted_tower
from jaxrl.models.files.adapter import check_base_copies, load_with_adapters, warn_of_other_base
from jaxrl.models.files.adapter_stack import stack_adapters
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.files.source import resolve_model
from jaxrl.models.files.weight_files import find_tensors
from jaxrl.models.lora import add_adapters, with_adapters
from jaxrl.models.spec import abstract_params
from jaxrl.models.vision.towers import known_tower
from jaxrl.rollout.paged_engine import paged_engine
from jaxrl.runtime.backend import open_backend
from jaxrl.runtime.compilation import open_cache
from jaxrl.runtime.host_memory import keep_freed_memory
from jaxrl.serve.checkpoint_watcher import Checkpoints
from jaxrl.tracking.progress import Progress
from jaxrl.trainer.setup.models import open_text
from jaxrl.types import Tree
from sharding import make_mesh


@dataclasses.dataclass(frozen=True)
class Model:
    renderer: ChatRenderer
    engine: PagedEngine
    params: Tree
    mesh: Mesh
    max_model_len: int  # tokens of prompt and response together
    layout: Layout
    folder: Path  # of the base model
    step: int | None = None  # training step of the weights; None if not a checkpoint
    checkpoints: Checkpoints | None = None  # of the run that is served
    images: ImageReader | None = None  # None: the model reads text only
    # Of the features of images for the base model and for each adapter; none: it reads text only
    encoders: Sequence[ImageEncoder] = ()


def open_model(
    run: RunConfig,
    *,
    max_len: int,
    checkpoints: Path | None = None,
    step: int | None = None,
    adapters: Sequence[Path] = (),
    room: Callable[[DecoderConfig], LoRA] | None = None,
) -> Model:
    """Loads the model of `run.model.path` on the devices of `run.mesh`.

    Compiles the programs that suffice for every request; the others are pending.

    With `checkpoints`, the checkpoint folder of a run that started from that model, loads the
    weights of `step`; step 0 is the model itself. `adapters` are folders of adapters of the model
    in PEFT's format. `room` is the stack of adapters for a decoder, to which they are added later
    (models/files/adapter_stack.py). The KV pool and the model can lower `max_len`.

    Raises ValueError, OSError or CheckpointError, with one message, if the model cannot be loaded.
    """
    cache_problem = open_cache(run.compilation_cache)
    folder = resolve_model(run.model.path, key="--model")
    decoder = model_config(folder)
    max_len = min(max_len, decoder.context_len)
    lengths = dataclasses.replace(run.data, max_prompt_len=max_len - 1, max_response_len=1)
    run = dataclasses.replace(run, data=lengths)
    renderer, images = open_text(run, folder, decoder)
    tower = None if images is None else known_tower(folder)
    if (backend := open_backend()) == "cpu":
        keep_freed_memory()
    dtype, policy = for_platform(run, decoder, backend)
    policy = with_adapters(run.lora, policy)
    decoder = dataclasses.replace(policy, heads=("vocab",))
    with Progress() as progress:
        progress.status(f"{run.model.path}: {decoder.family}, {dtype}, on {backend}")
        if cache_problem:
            progress.status(f"warning: {cache_problem}")
        if checkpoints is not None:
            progress.status(f"step {step} of {checkpoints}")
        devices = make_mesh(**dataclasses.asdict(run.mesh))
        with jax.set_mesh(devices):
            layout = rollout_layout(run, decoder, dtype)
        mesh = layout.mesh(devices)
        with (
            jax.set_mesh(mesh),
            progress.waiting("loading weights and compiling the first programs"),
        ):
            specs = decoder_specs(policy)
            abstract = abstract_params(specs, layout.rules, layout.dtype, mesh)
            saved = None if checkpoints is None else Checkpoints(checkpoints, abstract, layout)
            load = functools.partial(load_initial, folder, decoder, layout, seed=run.seed)
            if saved is None or not step:
                params = load(start=run.lora.path, served=adapters, with_tower=tower is not None)
                params = layout.prepare(params)
            else:
                base = layout.prepare(load()) if saved.only_adapters else None
                params = saved.place(saved.read(step), base)
            if room is not None:
                stack, rules = room(params.cfg), layout.rules
                params = add_adapters(params, stack, seed=run.seed, rules=rules, dtype=layout.dtype)
            eos_ids = stop_ids(folder, renderer.tokenizer)
            engine = paged_engine(
                run, run.rollout, layout, params.cfg, eos_ids, adjustable=True, tower=tower
            )
            engine.warmup_first(params)
            encoders: Sequence[ImageEncoder] = ()
            if tower is not None:
                encoder = ImageEncoder(folder, tower, params.cfg, layout.rules, dtype)
                encoders = load_encoders(encoder, folder, adapters, params.cfg, layout, dtype)
            pool = engine.scheduler.pool
    max_model_len = min(max_len, pool.n_pages * pool.page_len)
    return Model(
        renderer,
        engine,
        params,
        mesh,
        max_model_len,
        layout,
        folder,
        step,
        saved,
        images=images,
        encoders=encoders,
    )


def load_encoders(
    base: ImageEncoder,
    folder: Path,
    adapters: Sequence[Path],
    decoder: DecoderConfig,
    layout: Layout,
    dtype: DTypeLike,
) -> list[ImageEncoder]:
    """The encoder of the model in `folder`, and that of each adapter, loaded.

    An adapter that changes the vision tower has a tower with the adapter merged, and features that
    are kept apart; the others use those of the base model.
    """
    base.load()
    encoders = [base]
    for adapter in adapters:
        tower = load_adapted_tower(adapter, folder, decoder, rules=layout.rules, dtype=dtype)
        encoders.append(base if tower is None else base.another(decoder))
        if tower is not None:
            encoders[-1].load(tower)
    return encoders


def load_initial(
    folder: Path,
    decoder: DecoderConfig,
    layout: Layout,
    *,
    seed: int,
    start: str = "",
    served: Sequence[Path] = (),
    with_tower: bool = False,
) -> Decoder:
    """The model in `folder`; with the adapters of `decoder`, or those that are `served`.

    `start` is the folder of the adapters that the run of `decoder` continued from. Adapters may
    change the vision tower if the server reads images, `with_tower`.
    """
    rules, dtype = layout.rules, layout.dtype
    params = load_with_adapters(folder, rules, decoder, dtype, seed=seed, adapter=start)
    for adapter in served:
        check_base_copies(adapter, find_tensors(folder))
        warn_of_other_base(adapter, str(folder))
    if not served:
        return params
    source = folder if with_tower else None
    return stack_adapters(params, served, rules=rules, dtype=dtype, source=source)
