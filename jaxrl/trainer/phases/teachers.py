"""Scores of a step's responses by their teachers, before the responses are packed.

Each response is read by the teacher of its row's data_source: a model on the devices, one after the
other, or a server.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.config.teachers import teacher_of, teachers
from jaxrl.data.packing import Packed, gather, pack_samples
from jaxrl.learner.requirements import teacher_top_k
from jaxrl.learner.scorer import Scorer
from jaxrl.models.decoder import Decoder
from jaxrl.teachers.endpoint import TeacherEndpoint, total_counts
from jaxrl.trainer.core import Core
from jaxrl.trainer.phases.self_distillation import read_by_teacher
from jaxrl.types import TeacherTokens, TrainingSample
from sharding import hosts, to_device


class TeacherFailed(hosts.AgreedError):
    """A teacher at a server could not read too many responses of a step."""


def read_by_teachers(
    core: Core, samples: Sequence[TrainingSample]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """(samples with `teacher` or `ref_logp`, metrics).

    `teacher` has the most likely ids with algorithm.kl_top_k; otherwise `ref_logp` has the logprobs
    of the response. A sample without a text for a self-distillation teacher keeps None; one that a
    server failed to read is `unread`. Raises TeacherFailed if these are too many.
    """
    has_own_prompts = bool(core.cfg.self_distillation.context)
    by_teacher: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        if not has_own_prompts or sample.teacher_prompt is not None:
            teacher = teacher_of(teachers(core.cfg.algorithm), sample.source)
            by_teacher.setdefault(teacher, []).append(i)
    filled, metrics = list(samples), {}
    if core.learner.student_scorer is not None:
        samples = with_student_ids(core, core.learner.student_scorer, samples)
    for teacher, mine in sorted(by_teacher.items()):
        given = [samples[i] for i in mine]
        read = read_by_teacher(given) if has_own_prompts else given
        endpoint = core.endpoints.get(teacher)
        if endpoint is None:
            found = read_on_devices(core, *device_teacher(core, teacher), read)
        else:
            found, counts = read_at_endpoint(core, endpoint, read)
            metrics |= {name: metrics.get(name, 0.0) + n for name, n in counts.items()}
        for i, fields in zip(mine, found, strict=True):
            filled[i] = dataclasses.replace(samples[i], **fields)
    return filled, metrics


def with_student_ids(
    core: Core, scorer: Scorer, samples: Sequence[TrainingSample]
) -> list[TrainingSample]:
    """Fills `teacher` with the policy's most likely ids and their logprobs under the policy."""
    packed = pack_samples(samples, core.cfg, core.learner.n_ranks)
    with (
        core.no_compile("scoring"),
        scorer.layout.weights(core.state.params, core.clock.timed("reshard")) as params,
        core.clock.timed("old_log_prob"),
    ):
        found = scorer.top_k(params, [p.batch for p in packed], on_batch=core.check_stop)
    pairs = zip(samples, most_likely(found, packed), strict=True)
    return [dataclasses.replace(s, teacher=tokens) for s, tokens in pairs]


def most_likely(
    found: Sequence[tuple[np.ndarray, ...]], packed: Sequence[Packed]
) -> list[TeacherTokens]:
    """The (ids, logprobs) [B, T, k] of each packed batch as those of each sample."""
    ids, logp = (gather(field, packed) for field in zip(*found, strict=True))
    return [TeacherTokens(*pair) for pair in zip(ids, logp, strict=True)]


def device_teacher(core: Core, index: int) -> tuple[Scorer, Decoder | None]:
    """The scorer and the weights of a teacher on the devices, by its index among all."""
    before = [t for t in teachers(core.cfg.algorithm)[:index] if not t.is_endpoint]
    if not before:
        return core.learner.ref_scorer, core.ref_params
    at = len(before) - 1
    return core.learner.teachers[at].scorer, core.more_references[at]


def read_on_devices(
    core: Core, scorer: Scorer, params: Decoder | None, samples: Sequence[TrainingSample]
) -> list[dict[str, TeacherTokens | np.ndarray]]:
    """The fields of each sample. Offloaded weights are on the devices during this call only."""
    packed = pack_samples(samples, core.cfg, core.learner.n_ranks)
    batches = [p.batch for p in packed]
    with core.no_compile("scoring"), scorer.layout.on_mesh(), core.clock.timed("ref"):
        params = to_device(params)
        if not scorer.most_likely:
            logps = gather(scorer.logps(params, batches, on_batch=core.check_stop), packed)
            return [{"ref_logp": logp} for logp in logps]
        found = scorer.top_k(params, batches, on_batch=core.check_stop)
    return [{"teacher": tokens} for tokens in most_likely(found, packed)]


def read_at_endpoint(
    core: Core, endpoint: TeacherEndpoint, samples: Sequence[TrainingSample]
) -> tuple[list[dict[str, TeacherTokens | np.ndarray | bool]], dict[str, float]]:
    """(the fields of each sample, counts). Each process sends the requests for its share."""
    with core.clock.timed("ref"):
        with hosts.raise_together():  # the cache's folder may be full
            own, sent = endpoint.read(samples[hosts.local_slice(len(samples))])
        scores, counts = hosts.gather_items(own), total_counts(hosts.gather(sent))
    settings = core.cfg.teacher_endpoint
    if counts.failed > settings.max_error_fraction * len(samples):
        raise TeacherFailed(
            f"step {core.clock.step + 1}: the teacher could not read {counts.failed} of "
            f"{len(samples)} responses (config.teacher_endpoint.max_error_fraction="
            f"{settings.max_error_fraction}): {counts.reason}; restart its server and resume the "
            "run"
        )
    top_k = teacher_top_k(core.cfg)
    fields: list[dict[str, TeacherTokens | np.ndarray | bool]] = []
    for one in scores:
        if one is None:
            fields.append({"unread": True})
        elif top_k:
            fields.append({"teacher": TeacherTokens(one.ids, one.top_logp)})
        else:
            fields.append({"ref_logp": one.logp})
    return fields, {
        "teacher/requests": float(counts.requests),
        "teacher/cached": float(counts.cached),
        "teacher/failed": float(counts.failed),
    }
