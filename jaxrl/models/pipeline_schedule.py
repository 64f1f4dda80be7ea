"""What a pipeline stage runs in each tick of 1F1B, with one or more chunks of layers per stage.

Megatron-LM, https://arxiv.org/abs/2104.04473, section 2.2: the layers are split into S V chunks,
and stage s has the chunks s, S + s, ..., (V - 1) S + s. A micro-batch passes through the ring of
stages V times. The stages take S micro-batches through all chunks, then the next S:

    tick        0    1    2    3    4    5    6    7    8   ...
    stage 0    F0   F1   F0'  F1'  F2   F3   F2'  F3'   .        forward; ' is the second chunk
                .    .    .    .   B0'  B1'  B0   B1   B2'  ...  backward
    stage 1     .   F0   F1   F0'  F1'  F2   F3   F2'  F3'       S = 2, V = 2, M = 4
                .    .    .   B0'  B1'  B0   B1   B2'  B3'  ...

The result of a unit, one micro-batch in one chunk, is the input of another stage's unit in the next
tick. Forward passes take M V + S - 1 ticks, and so do backward passes, which begin in tick V S - 1:
in units of a whole stage M + (S - 1) / V, of which (S - 1) / V are idle. V = 1 is 1F1B.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Unit(NamedTuple):
    """One micro-batch in one chunk of layers; an idle stage has its first or last unit."""

    chunk: jax.Array  # of the stage, 0 to V - 1
    micro_batch: jax.Array
    slot: jax.Array  # where the stage saves what backward needs of the unit
    busy: jax.Array  # False: the stage is idle


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The units of every stage and tick. Raises ValueError for M that S does not divide if V > 1.

    Stages and ticks are integers or int32 arrays of any shape.
    """

    n_stages: int  # S
    n_chunks: int  # V, per stage
    n_micro: int  # M

    def __post_init__(self):
        if self.n_chunks > 1 and self.n_micro % self.n_stages:
            raise ValueError(
                f"{self.n_micro} micro-batches do not divide into groups of {self.n_stages}, the "
                "number of stages, as interleaved 1F1B needs; change their number, or set "
                "learner.pipeline_schedule='1f1b'"
            )

    @property
    def period(self) -> int:
        """Units of a stage for S micro-batches."""
        return self.n_chunks * self.n_stages

    @property
    def n_units(self) -> int:
        """Units of a stage, forward and as often backward."""
        return self.n_chunks * self.n_micro

    @property
    def n_ticks(self) -> int:
        """Ticks from the first to the last forward unit; those of backward units are as many."""
        return self.n_units + self.n_stages - 1

    @property
    def n_saved(self) -> int:
        """Units of the first stage between their forward and their backward pass, at most."""
        return self.period + self.n_stages - 1

    def forward(self, stage: jax.Array | int, tick: jax.Array | int) -> Unit:
        index = tick - stage
        unit = jnp.clip(index, 0, self.n_units - 1)
        return self._unit(unit, self._slot(stage, tick), self._is_unit(index))

    def backward(self, stage: jax.Array | int, tick: jax.Array | int) -> Unit:
        index = self._backward_index(stage, tick)
        unit = self._forward_unit(jnp.clip(index, 0, self.n_units - 1))
        return self._unit(unit, self._slot(stage, stage + unit), self._is_unit(index))

    def n_returned(self, tick: jax.Array | int) -> jax.Array:
        """Micro-batches whose backward pass is complete before this tick."""
        index = jnp.maximum(self._backward_index(0, tick), 0)
        in_first_chunk = index % self.period - (self.period - self.n_stages)
        return index // self.period * self.n_stages + jnp.maximum(in_first_chunk, 0)

    def _unit(self, unit, slot, busy) -> Unit:
        group, rest = unit // self.period, unit % self.period
        micro_batch = group * self.n_stages + rest % self.n_stages
        return Unit(rest // self.n_stages, micro_batch, slot, busy)

    def _backward_index(self, stage, tick):
        return tick - (self.period + self.n_stages - 2 - stage)

    def _is_unit(self, index):
        return (index >= 0) & (index < self.n_units)

    def _forward_unit(self, index):
        """The forward unit of a backward unit: backward has the chunks in reverse order."""
        rest = index % self.period
        chunk = self.n_chunks - 1 - rest // self.n_stages
        return index - rest + chunk * self.n_stages + rest % self.n_stages

    def _slot(self, stage, tick):
        return jnp.asarray(self._slots)[stage, jnp.clip(tick, 0, self.n_ticks - 1)]

    @functools.cached_property
    def _slots(self) -> np.ndarray:
        """[S, forward ticks]: a slot without a unit that waits for its backward pass."""
        table = np.zeros((self.n_stages, self.n_ticks), np.int32)
        for stage in range(self.n_stages):
            free = list(range(self.n_saved))
            for tick in range(self.n_ticks):
                table[stage, tick] = free[-1]  # also if idle: the program always writes
                if self._is_unit(tick - stage):
                    free.pop()
                done = self._backward_index(stage, tick)
                if self._is_unit(done):
                    free.append(table[stage, stage + self._forward_unit(done)])
        return table
