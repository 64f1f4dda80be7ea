"""The rows of a decode dispatch: what they carry, how long they go on, how their tokens are drawn."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl import types
from jaxrl.engine.sampling import SamplingParams, sample
from sharding import Rules


@struct.dataclass
class DecodeRows:
    """The sequences of one dispatch, B rows; a row with position -1 is padding."""

    token: types.Array  # int32 [B], the last token of the sequence
    position: types.Array  # int32 [B], its position
    remaining: types.Array  # int32 [B], tokens that may still be sampled
    seed: types.Array  # uint32 [B], as are the next two
    prompt_id: types.Array
    sample: types.Array
    stop_ids: types.Array  # int32 [B, n_stop], -1 = none
    page_table: types.Array  # int32 [B, C]
    sampling: SamplingParams
    history: types.Array = None  # int32 [B, S], all tokens so far; None where nothing is drafted


def going(
    n_steps: Int[Array, ""], leave_at: Int[Array, ""], replicas: tuple[str, ...]
) -> Callable[[tuple], jax.Array]:
    """The condition of a decode loop whose state begins with (step, cache, position): fewer than `n_steps`
    steps, and more than `leave_at` rows going on in one of the replicas, which all make the same number of steps."""

    def condition(state: tuple) -> jax.Array:
        step, _, position, *_ = state
        n_going = jnp.sum(position >= 0)
        if replicas:
            n_going = jax.lax.pmax(n_going, replicas)
        return (step < n_steps) & (n_going > leave_at)

    return condition


def sample_rows(
    logits: Float[Array, "B V"], uniform: Float[Array, "B"], params: SamplingParams, *, rules: Rules
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """`sample`, by each device for its share of the rows: the devices that hold the vocabulary in shards
    trade them for whole rows, which moves less than bringing all logits to every device."""
    axes = rules.mesh_axes("vocab")
    if uniform.shape[0] % rules.n_shards("vocab"):
        axes = ()  # too few rows: every device samples them all
    by_row = jax.P(axes or None)
    lay = functools.partial(jax.reshard, out_shardings=by_row)
    local = jax.shard_map(sample, in_specs=by_row, out_specs=by_row, check_vma=False)
    drawn = local(lay(logits), lay(uniform), jax.tree.map(lay, params))
    return jax.tree.map(lambda a: jax.reshard(a, jax.P()), drawn)
