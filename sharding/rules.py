"""Logical axis -> mesh axes. A strategy (FSDP, tensor parallel, ...) is a `Rules` value, not code."""

import dataclasses

import jax

Axis = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axes of every logical axis; None means replicated."""

    batch: Axis = ("replica", "fsdp", "expert")  # rows of a packed batch
    time: Axis = None  # positions within a row, residual stream
    heads: Axis = "tensor"  # query heads, weights and activations
    kv_heads: Axis = "tensor"
    ffw: Axis = "tensor"
    vocab: Axis = "tensor"
    experts: Axis = (
        "expert"  # experts of a layer; their weights lie on it, tokens go there and back
    )
    embed: Axis = None  # the model dimension of activations
    w_embed: Axis = "fsdp"  # the model dimension of weights: gathered just before use

    def spec(self, *logical: str | None) -> jax.P:
        """PartitionSpec of an array whose dimensions carry these logical axes (None: replicated).

        Raises ValueError if two dimensions would land on one mesh axis.
        """
        axes = [None if name is None else getattr(self, name) for name in logical]
        flat = [a for axis in axes if axis for a in ((axis,) if isinstance(axis, str) else axis)]
        if len(flat) != len(set(flat)):
            raise ValueError(f"{logical} maps one mesh axis twice: {axes}; change one of the rules")
        return jax.P(*axes)

    def gathered(self, *logical: str | None) -> jax.P:
        """`spec` of a weight at its point of use: the FSDP shards of `w_embed` brought together."""
        return self.spec(*(None if name == "w_embed" else name for name in logical))


# FSDP and tensor parallelism are one rule set: the mesh sizes decide how much of each there is.
TRAIN = Rules()
DECODE = Rules(batch=None)  # every device steps all slots; weights stay where training keeps them
PRESETS: dict[str, Rules] = {"train": TRAIN, "decode": DECODE}
