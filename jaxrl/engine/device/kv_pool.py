"""Size and allocation of the pools of KV pages and of states in device memory."""

import bisect
import dataclasses
import logging
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl.config.keys import RolloutConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kv_cache import KVCache, init_cache, page_bytes, page_rules, slot_bytes
from jaxrl.runtime.device_memory import usable_bytes
from sharding import Rules, hosts

log = logging.getLogger(__name__)


def window_page_counts(cfg: DecoderConfig, rollout: RolloutConfig, max_len: int) -> dict[int, int]:
    """Pages of a running sequence in layers with a window, by window.

    Only windows with fewer pages than a sequence of `max_len` tokens. Models with states keep all
    pages in every layer.
    """
    page_len, n_steps = rollout.page_len, rollout.steps_per_dispatch * (1 + rollout.spec_tokens)
    windows = sorted({mixer.window for mixer in cfg.paged_layers})
    if cfg.state_layers:
        return {}
    counts = {window: -(-(window + n_steps) // page_len) + 1 for window in windows if window}
    return {window: n for window, n in counts.items() if n < -(-max_len // page_len)}


def n_state_slots(cfg: DecoderConfig, rollout: RolloutConfig) -> int:
    """Slots of state per replica: that of zeros, one per sequence, and the snapshots."""
    if not cfg.state_layers:
        return 0
    n_snapshots = rollout.state_snapshots or max(rollout.max_num_seqs // 2, 1)
    return 1 + rollout.max_num_seqs + n_snapshots


@dataclasses.dataclass(frozen=True)
class PoolBytes:
    """Bytes of a replica's KV pages on one device, by the number of its pages.

    Layers with a window have fewer. Their pools are sized for the sequences that fill the others at
    half of the maximum length, and the prefill of one sequence of maximum length. If all layers
    have a window, pages are numbers on the host, as many as sequences of maximum length need.
    """

    page_bytes: Mapping[int, int]  # of one page by window, 0: of the layers that keep all tokens
    counts: Mapping[int, int]  # pages of a running sequence by window
    max_num_seqs: int
    max_pages_per_seq: int

    def window_pages(self, n_pages: int) -> dict[int, int]:
        """Pages of layers with a window, by window."""
        fills = n_pages * (2 if self.page_bytes.get(0) else 1)
        n_seqs = min(-(-fills // self.max_pages_per_seq), self.max_num_seqs)
        return {
            window: min(n_seqs * count + self.max_pages_per_seq, n_pages)
            for window, count in self.counts.items()
        }

    def of_pages(self, n_pages: int) -> int:
        sizes = {0: n_pages, **self.window_pages(n_pages)}
        return sum(sizes[window] * page for window, page in self.page_bytes.items())

    def n_pages_in(self, n_bytes: int | float, wanted: int) -> int:
        """Pages of at most `n_bytes` bytes, up to `wanted`."""
        return max(bisect.bisect_right(range(wanted + 1), n_bytes, key=self.of_pages) - 1, 0)


NO_PAGES = PoolBytes({}, {}, 0, 1)


@dataclasses.dataclass(frozen=True)
class KVPoolSpec:
    """The arrays of the pools, and their sharding over the current mesh."""

    cfg: DecoderConfig
    page_len: int
    dtype: DTypeLike  # of the pages
    rules: Rules
    window_counts: Mapping[int, int]  # `window_page_counts`
    max_num_seqs: int
    max_pages_per_seq: int
    n_slots: int = 0  # of state, per replica
    tail_dtype: DTypeLike = jnp.float32  # of the inputs of convolutions in the slots

    @property
    def n_replicas(self) -> int:
        """Replicas on the current mesh, each with a pool of the same number of pages."""
        return self.rules.n_shards("batch")

    @property
    def bytes_per_device(self) -> PoolBytes:
        """Bytes of the pages on one device of the current mesh."""
        found = page_bytes(self.cfg, self.page_len, self.dtype, self.window_counts)
        shards = page_rules(self.cfg, self.rules).n_shards("kv_heads")
        return PoolBytes(
            {window: n // shards for window, n in found.items()},
            self.window_counts,
            self.max_num_seqs,
            self.max_pages_per_seq,
        )

    def allocate(self, n_pages: int) -> KVCache:
        """A zeroed cache with `n_pages` pages per replica."""
        return init_cache(
            self.cfg,
            n_pages,
            self.page_len,
            self.dtype,
            self.rules,
            window_pages=self.window_pages(n_pages),
            n_slots=self.n_slots,
            tail_dtype=self.tail_dtype,
        )

    @property
    def slots_bytes_per_device(self) -> int:
        """Bytes of a replica's slots on one device of the current mesh."""
        slot = slot_bytes(self.cfg, self.tail_dtype) // self.rules.n_shards("heads")
        return self.n_slots * slot

    def window_pages(self, n_pages: int) -> dict[int, int]:
        """Pages per replica of layers with a window, by window, if others have `n_pages`."""
        return self.bytes_per_device.window_pages(n_pages)

    def n_pages(self, rollout: RolloutConfig, *, max_len: int) -> int:
        """Pages per replica.

        `rollout.n_pages` if set, otherwise enough for max_num_seqs sequences of maximum length,
        limited by the device memory that `memory_utilization` leaves. Raises ValueError if one
        sequence of `max_len` tokens does not fit.
        """
        max_pages_per_seq = self.max_pages_per_seq
        windows = {mixer.window for mixer in self.cfg.paged_layers if mixer.window}
        if self.n_slots and any(window < max_len for window in windows):
            log.info("KV pool: layers with a window keep all pages, because the model has states")
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

    def _n_pages_that_fit(self, memory_utilization: float, wanted: int) -> int:
        """Pages that fit in the memory of the fullest local device, up to `wanted`."""
        fits = wanted
        for device in jax.local_devices():
            memory = device.memory_stats()
            if memory and "bytes_limit" in memory:
                left = usable_bytes(memory, memory_utilization) - memory["bytes_in_use"]
                left -= self.slots_bytes_per_device
                fits = self.bytes_per_device.n_pages_in(left, fits)
        if jax.sharding.get_mesh().is_multi_process:  # all processes schedule the same pages
            fits = min(hosts.gather(fits))
        return fits
