"""Operations on whole rows as shards over their heads."""

from collections.abc import Callable

import jax

from sharding import Rules


def shard_heads(local: Callable, args: tuple, specs: tuple, out_specs: tuple):
    """`local` on each device's rows and heads."""
    args = tuple(
        jax.tree.map(lambda a, to=spec: jax.reshard(a, to), arg)
        for arg, spec in zip(args, specs, strict=True)
    )
    return jax.shard_map(local, in_specs=specs, out_specs=out_specs, check_vma=False)(*args)


def check_heads(n_heads: int, rules: Rules) -> None:
    if n_heads % (n := rules.n_shards("heads")):
        shown = " x ".join(rules.mesh_axes("heads"))
        raise ValueError(
            f"{n_heads} value heads of gated DeltaNet cannot be shared by {n} devices ({shown}); "
            f"set config.mesh sizes whose product divides {n_heads}"
        )
