"""Formulas for the memory and the time of a judge from reward.judge.path."""

import math

from jaxrl.engine.device.kv_pool import n_state_slots
from jaxrl.planner.judge import requests_per_response
from jaxrl.planner.sizes import CandidateSettings, Job, model_sizes


def judge_bytes(job: Job, settings: CandidateSettings) -> float:
    """Weights, KV pages and states of a judge from reward.judge.path, in its engine's layout."""
    sizes, judge = model_sizes(job, "judge", settings), job.cfg.reward.judge
    n_sequences = judge.max_num_seqs
    if judge.n_pages:
        n_sequences = judge.n_pages / -(-judge.max_len // job.cfg.rollout.page_len)
    slots = n_state_slots(sizes.decoder, job.cfg.judge_run.rollout) * sizes.slot_bytes
    return sizes.rollout_copy * sizes.rollout_bytes + n_sequences * sizes.sequence_bytes + slots


def judge_seconds(job: Job, settings: CandidateSettings) -> float:
    """Time of the requests of a step to a judge from reward.judge.path, of maximum length.

    Prefill computes every prompt; decode reads the weights and the keys of its sequences.
    """
    chip, judge, sizes = job.machine.chip, job.cfg.reward.judge, model_sizes(job, "judge", settings)
    requests = requests_per_response(job.cfg) * job.n_sequences / sizes.n_replicas
    rate = chip.rate("f32" if sizes.item_bytes == 4 else "bf16")
    in_layers = sizes.active_params - sizes.head * (1 if sizes.decoder.tied else 2)
    prefill = requests * judge.max_prompt_len * 2 * in_layers / (sizes.tensor * rate)
    together = min(judge.max_num_seqs, math.ceil(requests))
    read = sizes.rollout_copy * sizes.rollout_bytes + together * sizes.sequence_bytes
    steps = math.ceil(requests / together) * judge.max_verdict_len
    return prefill + steps * read / chip.memory_bytes_per_s
