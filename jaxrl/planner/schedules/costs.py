"""Costs of a simulated run from the numbers of its plan, for any split of the devices.

The plan is for all devices. A replica of the engine costs the same in every split. Training on m of
n devices takes n / m times as long, and holds n / m times the state per device: the micro-batch of
a device is the same, and there are n / m times as many of them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl.config.keys import RunConfig
from jaxrl.config.remat import parse_remat
from jaxrl.engine.device.batches import DispatchShapes, dispatch_shapes
from jaxrl.learner.requirements import (
    compares_student_ids,
    needs_old_logp,
    needs_ref_scores,
    policy_is_teacher,
)
from jaxrl.models.config import DecoderConfig
from jaxrl.models.flops import score_features
from jaxrl.planner.calibration import Factor, factors_of
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.schedules.engine import EngineCosts, ReplicaUsage, SimulatedEngine
from jaxrl.planner.schedules.simulation import TrainingCosts

ENGINE_PROGRAMS = ("prefill", "mixed", "copy_pages", "copy_states", "decode")
TOKENS_PER_RESPONSE = 16  # of a simulated response of mean length
Numbers = Mapping[str, Any]  # Plan.json()


@dataclasses.dataclass(frozen=True)
class Split:
    """Devices of the rollout and of training; the same ones if `shared`."""

    rollout: int
    training: int
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.rollout}" if self.shared else f"{self.rollout} + {self.training}"


@dataclasses.dataclass(frozen=True)
class RunCosts:
    """The plan of a run as costs. `inner` devices of training share the tokens of a sequence."""

    cfg: RunConfig
    decoder: DecoderConfig
    plan: Numbers

    @property
    def factors(self) -> Mapping[str, Factor]:
        """Factors of the chip; {} if the plan has only times at peak rates."""
        if not self.plan.get("calibrated_step_s"):
            return {}
        return factors_of(CHIPS[self.plan["topology"].partition(":")[0]]) or {}

    @property
    def n_devices(self) -> int:
        return math.prod(self.plan["mesh"].values())

    @property
    def replica_devices(self) -> int:
        return self.n_devices // self.plan["n_replicas"]

    @property
    def inner(self) -> int:
        sizes = {"fsdp": 1, "replica": 1} | self.plan["mesh"]
        return self.n_devices // (sizes["fsdp"] * sizes["replica"])

    def shared(self) -> Split:
        return Split(self.n_devices, self.n_devices, shared=True)

    def splits(self, most: int = 15) -> list[Split]:
        """Every split into whole replicas and whole training ranks, at most `most`, evenly spaced.

        Those whose training does not fit are left out.
        """
        unit = math.lcm(self.replica_devices, self.inner)
        unit *= max(self.n_devices // unit // (most + 1), 1)
        every = [Split(n, self.n_devices - n) for n in range(unit, self.n_devices, unit)]
        return [split for split in every if not self.misfit(split)]

    def split(self, rollout_devices: int) -> Split:
        """The split with that many rollout devices. Raises ValueError if it cannot be."""
        n, inner, replica = self.n_devices, self.inner, self.replica_devices
        split = Split(rollout_devices, n - rollout_devices)
        if not 0 < rollout_devices < n:
            raise ValueError(
                f"{rollout_devices} rollout devices of {n} leave {n - rollout_devices} for "
                f"training; set a number between {replica} and {n - inner}"
            )
        if rollout_devices % replica or split.training % inner:
            raise ValueError(
                f"{rollout_devices} rollout and {split.training} training devices are not whole "
                f"replicas of {replica} and whole ranks of {inner}; set a multiple of "
                f"{math.lcm(replica, inner)}"
            )
        if reason := self.misfit(split):
            raise ValueError(f"{reason}; set fewer rollout devices or a smaller token budget")
        return split

    def misfit(self, split: Split) -> str:
        """Why the split cannot run, else ''."""
        growth = self.n_devices / split.training - 1
        state = growth * sum(self.plan["resident"].values())
        peak = max(
            phase["live_bytes"] for name, phase in self.plan["phases"].items() if name != "rollout"
        )
        if (needs := peak + state) > self.plan["budget_bytes"]:
            return (
                f"training on {split.training} devices needs {needs / 2**30:.1f} GiB of "
                f"{self.plan['budget_bytes'] / 2**30:.1f} GiB per device"
            )
        if not self.sequences(split):
            return "no KV cache of a sequence of maximum length fits the rollout devices"
        return ""

    def pages(self, split: Split) -> int:
        """KV pages of a replica. Separate rollout devices hold no training state."""
        rollout, plan = self.cfg.rollout, self.plan
        if split.shared:
            used = max(phase["live_bytes"] for phase in plan["phases"].values())
        else:
            programs = plan["programs"]
            temporaries = max(programs[n]["temp_bytes"] for n in ENGINE_PROGRAMS if n in programs)
            used = plan["rollout_weight_bytes"] + temporaries
        wanted = rollout.n_pages or rollout.max_num_seqs * self._shapes.max_pages_per_seq
        left = plan["budget_bytes"] - used - plan.get("state_bytes", 0)
        return min(wanted, max(int(left // self._bytes_of_a_page()), 0))

    def _bytes_of_a_page(self) -> float:
        """Bytes of a page of all layers, of which those with a window have fewer pages."""
        plan, fewer = self.plan, 0.0
        for n, size in plan.get("window_pages", {}).values():
            fewer += (1 - n / max(plan["kv_pages"], 1)) * size
        return plan["page_bytes"] - fewer

    def sequences(self, split: Split) -> int:
        """Sequences of maximum length that a replica holds."""
        return self.pages(split) // self._shapes.max_pages_per_seq

    @property
    def _shapes(self) -> DispatchShapes:
        return dispatch_shapes(self.cfg.rollout, self.cfg.engine_len, self.decoder)

    def engine(self, split: Split, mean_len: int | float) -> SimulatedEngine:
        """An engine without sequences, for responses of this mean length."""
        shapes = self._shapes
        tokens = shapes.prefill_buckets[-1] * shapes.prefill_row_len
        prefill_s = _seconds(self.plan["programs"]["prefill"]) / tokens
        return SimulatedEngine(
            EngineCosts(self._decode(), prefill_s),
            self.cfg.rollout,
            shapes,
            n_replicas=split.rollout // self.replica_devices,
            n_pages=self.pages(split),
            prompt_len=self.plan["lengths"]["prompt"],
            response_len=self.cfg.data.max_response_len,
            unit=max(round(mean_len / TOKENS_PER_RESPONSE), 1),
        )

    def training(self, split: Split) -> TrainingCosts:
        programs, phases = self.plan["programs"], self.plan["phases"]
        slower = self.n_devices / split.training
        update_s = self.cfg.updates_per_step * _seconds(programs["apply"])
        time = "calibrated_s" if self.factors else "roofline_s"
        passes_s = sum(phases[name][time] for name in phases if name != "rollout")
        lengths = self.plan["lengths"]
        seq_len = lengths["prompt"] + lengths["response"]
        token_s = (passes_s - update_s) / (self.cfg.sequences_per_step * seq_len)
        pair_s = self._attention_pair_s()
        return TrainingCosts(
            token_s=slower * max(token_s - pair_s * seq_len / 2, 0.0),
            pair_s=slower * pair_s,
            update_s=slower * update_s,
            transfer_s=self._transfer_s(split),
        )

    def _attention_pair_s(self) -> float:
        """Time of all passes for one query and one key, on all devices together.

        A forward pass has two products of a query and a key, backward five, and remat of whole
        layers repeats the forward pass.
        """
        cfg, d, decode = self.cfg, self.decoder, self.plan["programs"]["decode"]
        whole = parse_remat(cfg.learner.remat).policy in ("full", "offload")
        update = 2 + 5 + 2 * whole
        scored = needs_old_logp(cfg) + needs_ref_scores(cfg) + policy_is_teacher(cfg)
        scored = 2 * (scored + compares_student_ids(cfg))
        flops = 2 * (scored + update * cfg.learner.epochs) * score_features(d)
        per_flop = decode["seconds"]["flops"] / decode["flops"]
        if self.factors:
            per_flop /= self.factors["attention"].value
        return flops * per_flop / self.n_devices

    def _decode(self) -> tuple[ReplicaUsage, ...]:
        """The decode program's seconds, divided into weights, sequences and keys."""
        program, lengths = self.plan["programs"]["decode"], self.plan["lengths"]
        n, d = self.cfg.rollout.max_num_seqs, self.decoder
        keys = n * (lengths["prompt"] + lengths["response"] / 2)
        seconds = program["seconds"]
        per_byte = seconds["memory"] / program["bytes_accessed"]
        per_flop = seconds["flops"] / program["flops"]
        tensor = self.cfg.rollout.tensor or self.cfg.mesh.tensor
        key_s = self.plan["page_bytes"] / self.cfg.rollout.page_len * per_byte
        weights_s = self.plan["rollout_weight_bytes"] * per_byte
        attention_s = 4 * score_features(d) / tensor * per_flop  # two products of a query and a key
        memory_s = max(seconds["memory"] - weights_s - keys * key_s, 0.0) / n
        flops_s = max(seconds["flops"] - keys * attention_s, 0.0) / n
        if self.factors:
            return self._calibrated_decode(n, keys, key_s, memory_s), self._host_rounds()
        return (
            ReplicaUsage(weights_s, memory_s, key_s),
            ReplicaUsage(0.0, flops_s, attention_s),
            ReplicaUsage(0.0, seconds["collectives"] / n, 0.0),
        )

    def _calibrated_decode(
        self, n: int, keys: float, key_s: float, sequence_s: float
    ) -> ReplicaUsage:
        """The calibrated time of a decode step with `n` sequences.

        `key_s` and `sequence_s` are at peak rates.
        """
        share = self.factors["memory"].value
        key_s, sequence_s = key_s / share, sequence_s / share
        fixed_s = _seconds(self.plan["programs"]["decode"]) - keys * key_s - n * sequence_s
        return ReplicaUsage(max(fixed_s, 0.0), sequence_s, key_s)

    def _host_rounds(self) -> ReplicaUsage:
        """The host's share of a decode step. A process plans for its replicas one by one."""
        steps = self.cfg.rollout.steps_per_dispatch
        together = self.plan["n_replicas"] / self.plan["n_processes"]
        return ReplicaUsage(
            self.factors["round"].value / steps,
            together * self.factors["sequence_round"].value / steps,
            0.0,
        )

    def _transfer_s(self, split: Split) -> float:
        """Time of new weights: the reshard on shared devices, else over the network once."""
        programs = self.plan["programs"]
        if split.shared:
            return _seconds(programs["reshard"]) if "reshard" in programs else 0.0
        chip = CHIPS[self.plan["topology"].partition(":")[0]]
        slow = chip.node and self.n_devices > chip.node
        rate = chip.network_bytes_per_s if slow else chip.link_bytes_per_s
        return self.plan["rollout_weight_bytes"] / rate


def _seconds(program: Numbers) -> float:
    """Calibrated time of a call; in a plan without it, as if all resources overlapped."""
    return program.get("calibrated_s") or max(program["seconds"].values())
