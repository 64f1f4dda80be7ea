"""Check that a mesh divides a model's dimensions, without devices."""

import math
from collections.abc import Mapping

import jax

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import is_spec
from sharding import TRAIN, Rules

AXIS_NAMES = {
    "layers": "layers",
    "heads": "query heads",
    "kv_heads": "kv heads",
    "ffw": "feed-forward features",
    "vocab": "vocabulary entries",
    "experts": "experts",
    "w_embed": "model features",
}


def check_mesh(
    cfg: DecoderConfig,
    mesh_sizes: Mapping[str, int],
    rules: Rules = TRAIN,
    *,
    keys: str = "config.mesh sizes",
) -> None:
    """Raises one ValueError that lists every dimension of `cfg` that the mesh does not divide.

    `keys` names the settings to change.
    """
    errors = set()

    def shards(logical: str) -> tuple[int, str]:
        """(number of shards of a logical axis, the mesh sizes that determine it)."""
        sizes = {axis: mesh_sizes.get(axis, 1) for axis in rules.mesh_axes(logical)}
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        return math.prod(sizes.values()), shown

    n, shown = shards("attn_heads")
    errors.update(
        f"{heads} query heads over {shown} in attention (not with learner.sequence_parallel='ring')"
        for heads in {mixer.N for mixer in cfg.paged_layers}
        if heads % n
    )
    if rules.ulysses > 1:
        errors.update(
            _place_errors(
                cfg, shards("time")[0] // shards("layers")[0], shards("kv_heads")[0], rules.ulysses
            )
        )
    n, shown = shards("experts")
    if n > 1 and not cfg.expert_layers:
        errors.add(f"no experts to shard over {shown}")
    n, shown = shards("layers")
    if n > 1 and len(cfg.runs) > 1:
        errors.add(f"{cfg.L} layers, which do not repeat one period, over {shown}")
    if n > 1 and cfg.input_P:
        errors.add(f"layers with inputs by token, which pipelines do not support, over {shown}")
    for spec in jax.tree.leaves(decoder_specs(cfg), is_leaf=is_spec):
        for size, logical in zip(spec.shape, spec.axes, strict=True):
            n, shown = shards(logical) if logical else (1, "")
            if size % n:
                blocks = "nf4 blocks of " if spec.hf.endswith("weight_scale") else ""
                errors.add(f"{size} {blocks}{AXIS_NAMES[logical]} over {shown}")
    if errors:
        raise ValueError(
            f"the mesh does not divide this {cfg.family} model evenly: "
            f"{'; '.join(sorted(errors))}. Set {keys} that divide these numbers"
        )


def _place_errors(cfg: DecoderConfig, n_time: int, n_tensor: int, ulysses: int) -> list[str]:
    """The sizes that the devices of one place of a ring do not divide."""
    errors = []
    if n_time % ulysses:
        errors.append(f"sequence={n_time} devices over learner.ulysses_size={ulysses}")
    shown = f"tensor={n_tensor} x learner.ulysses_size={ulysses}"
    return errors + [
        f"{heads} kv heads over {shown}"
        for heads in {mixer.K for mixer in cfg.paged_layers}
        if heads % (n_tensor * ulysses)
    ]
