"""Loading a Hugging Face folder: every tensor goes from the file straight to the devices that hold it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.hf_config import config_from_hf
from jaxrl.models.files.safetensors import TensorInfo, map_tensor, read_header
from jaxrl.models.files.source import resolve_model
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.spec import ParamSpec, hf_names, init_params, is_spec, map_specs
from sharding import Rules

# Image-and-text checkpoints keep the language model behind a prefix, beside the parts not used here.
PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
SCORE = "score.weight"  # of a classifier; a language model has none, and its score starts at zero
SHOWN = 8  # names listed per kind of mistake


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ValueError where it is missing or broken."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} has no config.json; config.model.path must name a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def model_config(path: str | Path) -> DecoderConfig:
    """The decoder that a checkpoint holds, with logits, layers as a list. No weights are read."""
    return config_from_hf(read_config(resolve_model(path)))


def load_model(
    path: str | Path,
    *,
    rules: Rules,
    dtype: DTypeLike = jnp.float32,
    heads: tuple[str, ...] = ("vocab",),
    stacked: bool = False,
    grouped_matmul: str = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[DecoderConfig, Decoder]:
    """The checkpoint at `path` (anything `resolve_model` takes) on the mesh that is set.

    Each device's slice is read, cast and sent on its own: host memory holds about one tensor more
    than the host's own share. `heads`, `stacked` and `grouped_matmul` are fields of the config that the
    files do not hold: a language model loads with a "score" as well, which is zero then, and a sequence
    classifier of one label without logits. `on_progress` hears (bytes read, bytes in all).

    Raises ValueError, listing the names, where tensors are missing, unexpected or mis-shaped.
    """
    folder = resolve_model(path)
    cfg = dataclasses.replace(
        config_from_hf(read_config(folder)),
        heads=heads,
        stacked=stacked,
        grouped_matmul=grouped_matmul,
    )
    specs, tensors, mesh = decoder_specs(cfg), find_tensors(folder), jax.sharding.get_mesh()
    check_mesh(cfg, mesh.shape, rules)
    check_tensors(specs, tensors, folder)
    total = sum(tensors[name].n_bytes for name in expected_shapes(specs) if name in tensors)
    done = 0

    def load(spec: ParamSpec) -> jax.Array:
        nonlocal done
        if spec.hf == SCORE and SCORE not in tensors:
            return init_params(jax.random.key(0), spec, rules, dtype)
        infos = [tensors[name] for name in hf_names(spec)]
        leaf = read_param(spec, infos, NamedSharding(mesh, rules.spec(*spec.axes)), dtype)
        done += sum(info.n_bytes for info in infos)
        if on_progress is not None:
            on_progress(done, total)
        return leaf

    return cfg, map_specs(load, specs)


def load_params(folder: Path, rules: Rules, decoder: DecoderConfig, dtype: DTypeLike) -> Decoder:
    """As `load_model`, with those fields that the files do not hold as `decoder` has them."""
    return load_model(
        folder,
        rules=rules,
        dtype=dtype,
        heads=decoder.heads,
        stacked=decoder.stacked,
        grouped_matmul=decoder.grouped_matmul,
    )[1]


def find_tensors(folder: Path) -> dict[str, TensorInfo]:
    """The language model's tensors in a folder's safetensors files, by name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(
            {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        )
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} has no *.safetensors file; save the model in safetensors format "
            f"(save_pretrained of a recent transformers does) or download it again"
        )
    if lost := [file.name for file in files if not file.exists()]:
        raise ValueError(f"{folder} lacks {', '.join(lost)}; download or export it again")
    tensors = {}
    for file in files:
        for name, info in read_header(file).items():
            tensors[language_name(name)] = info
    return {
        name: info
        for name, info in tensors.items()
        if not name.removeprefix("model.").startswith(OTHER_PARTS)
        and not name.endswith("rotary_emb.inv_freq")
    }


def language_name(name: str) -> str:
    """A tensor's name as a text-only checkpoint has it."""
    for prefix, instead in PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def expected_shapes(specs: Decoder) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every parameter."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return {name: spec.hf_shape for spec in leaves for name in hf_names(spec)}


def check_tensors(specs: Decoder, tensors: dict[str, TensorInfo], folder: Path) -> None:
    """One error for all that does not fit; an lm_head that is not needed is left alone."""
    wanted = expected_shapes(specs)
    spare = {"lm_head.weight"} if specs.lm_head is None else set()
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    mistakes = {
        "missing": sorted(wanted.keys() - tensors.keys() - {SCORE}),
        "unexpected": sorted(tensors.keys() - wanted.keys() - spare),
        "of another shape": wrong,
    }
    lines = [
        f"  {len(names)} {kind}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for kind, names in mistakes.items()
        if names
    ]
    if lines:
        shown = "\n".join(lines)
        raise ValueError(
            f"the tensors in {folder} are not those of its config.json ({specs.cfg.family}):\n"
            f"{shown}\nuse the config.json that belongs to these weights"
        )


def read_param(
    spec: ParamSpec, infos: list[TensorInfo], sharding: NamedSharding, dtype: DTypeLike
) -> jax.Array:
    """One parameter in its sharding; a stacked one takes one tensor a layer, or a layer and expert,
    from `infos`."""
    places = np.arange(len(infos)).reshape(spec.lead)
    n_lead = places.ndim
    slices: dict[Any, np.ndarray] = {}  # devices that hold the same slice share the read

    def view(info: TensorInfo) -> np.ndarray:
        return map_tensor(info).reshape(spec.shape[n_lead:])

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if not n_lead:
            return np.array(view(infos[0])[index], dtype)
        here, rest = places[index[:n_lead]], index[n_lead:]
        out = np.empty((*here.shape, *view(infos[0])[rest].shape), dtype)
        for i in np.ndindex(here.shape):
            out[i] = view(infos[here[i]])[rest]
        return out

    def device_slice(index: Any) -> np.ndarray:
        place = tuple((s.start, s.stop) for s in index)
        if place not in slices:
            slices[place] = read(index)
        return slices[place]

    return jax.make_array_from_callback(spec.shape, sharding, device_slice)
