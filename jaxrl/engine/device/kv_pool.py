"""Size and allocation of the pools of KV pages and of states in device memory."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl.config.keys import RolloutConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kv_cache import KVCache, init_cache, page_bytes, slot_bytes
from sharding import Rules, hosts

log = logging.getLogger(__name__)


def n_state_slots(cfg: DecoderConfig, rollout: RolloutConfig) -> int:
    """Slots of state per replica: that of zeros, one per sequence, and the snapshots."""
    if not cfg.delta_layers:
        return 0
    n_snapshots = rollout.state_snapshots or max(rollout.max_num_seqs // 2, 1)
    return 1 + rollout.max_num_seqs + n_snapshots


@dataclasses.dataclass(frozen=True)
class KVPoolSpec:
    """The arrays of the pools, and their sharding over the current mesh."""

    cfg: DecoderConfig
    page_len: int
    dtype: DTypeLike  # of the pages
    rules: Rules
    n_slots: int = 0  # of state, per replica
    tail_dtype: DTypeLike = jnp.float32  # of the inputs of convolutions in the slots

    @property
    def n_replicas(self) -> int:
        """Replicas on the current mesh, each with a pool of the same number of pages."""
        return self.rules.n_shards("batch")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, summed over devices."""
        return page_bytes(self.cfg, self.page_len, self.dtype)

    @property
    def page_bytes_per_device(self) -> int:
        """Bytes of one page on one device of the current mesh."""
        return self.page_bytes // self.rules.n_shards("kv_heads")

    def allocate(self, n_pages: int) -> KVCache:
        """A zeroed cache with `n_pages` pages per replica."""
        return init_cache(
            self.cfg,
            n_pages,
            self.page_len,
            self.dtype,
            self.rules,
            n_slots=self.n_slots,
            tail_dtype=self.tail_dtype,
        )

    @property
    def slots_bytes_per_device(self) -> int:
        """Bytes of a replica's slots on one device of the current mesh."""
        slot = slot_bytes(self.cfg, self.tail_dtype) // self.rules.n_shards("heads")
        return self.n_slots * slot

    def n_pages(self, rollout: RolloutConfig, *, max_len: int, max_pages_per_seq: int) -> int:
        """Pages per replica.

        `rollout.n_pages` if set, otherwise enough for max_num_seqs sequences of maximum length,
        limited by the device memory that `memory_utilization` leaves. Raises ValueError if one
        sequence of `max_len` tokens does not fit.
        """
        if rollout.n_pages:
            return rollout.n_pages
        wanted = rollout.max_num_seqs * max_pages_per_seq
        n_pages = min(wanted, self._n_pages_that_fit(rollout.memory_utilization, wanted))
        if n_pages < max_pages_per_seq:
            states, lower = "", ""
            if self.n_slots:
                gib = self.slots_bytes_per_device / 2**30
                states = f" next to {self.n_slots} states of {gib:.2f} GiB together"
                lower = (
                    f"lower config.rollout.max_num_seqs ({rollout.max_num_seqs}) or "
                    "config.rollout.state_snapshots, "
                )
            raise ValueError(
                f"device memory has room for {max(n_pages, 0)} KV pages{states}, one sequence of "
                f"{max_len} tokens needs {max_pages_per_seq}; {lower}raise "
                f"config.rollout.memory_utilization ({rollout.memory_utilization}) or lower the "
                "maximum lengths"
            )
        if n_pages < wanted:
            log.info("KV pool: %d pages of the %d that max_num_seqs could fill", n_pages, wanted)
        return n_pages

    @property
    def fills_memory(self) -> bool:
        """Whether the devices report their memory, which then limits the pages."""
        return any(device.memory_stats() for device in jax.local_devices())

    def _n_pages_that_fit(self, memory_utilization: float, default: int) -> int:
        """Pages that fit in the memory of the fullest local device, or `default` if unknown."""
        page, fits = self.page_bytes_per_device, default
        for device in jax.local_devices():
            memory = device.memory_stats()
            if memory and "bytes_limit" in memory:
                left = memory_utilization * memory["bytes_limit"] - memory["bytes_in_use"]
                left -= self.slots_bytes_per_device
                fits = min(fits, int(left // page))
        if jax.sharding.get_mesh().is_multi_process:  # all processes schedule the same pages
            fits = min(hosts.gather(fits))
        return fits
