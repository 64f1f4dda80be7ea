"""Shows what is learned: the first training sequences of a run, with the learned text marked."""

from collections.abc import Sequence

from jaxrl.data.demonstrations import to_sample
from jaxrl.data.preferences import Labelled, Pair
from jaxrl.data.ratings import RatedAnswer
from jaxrl.data.steps import LabelledSteps
from jaxrl.tracking.first_samples import with_brackets, write_first_samples
from jaxrl.tracking.logger import warn
from jaxrl.tracking.samples import MAX_CHARS
from jaxrl.trainer.core import Core
from jaxrl.types import Demonstration, Rollout, TrainingSample
from sharding.hosts import is_main_process

OfflineItem = Demonstration | Pair | Labelled | LabelledSteps | RatedAnswer
N_WRITTEN = 8  # sequences in first_samples.jsonl


def show_first_samples(core: Core, items: Sequence[Rollout | OfflineItem]) -> None:
    """Writes the first sequences of a new run to first_samples.jsonl and logs some of them.

    A full disk does not end the run.
    """
    if not is_main_process():
        return
    samples = [sample for item in items[:N_WRITTEN] for sample in _sequences(item)][:N_WRITTEN]
    parts = [
        (s.prompt_id, core.models.renderer.learned_parts(s.prompt_tokens, s.tokens, s.loss_mask))
        for s in samples
    ]
    try:
        write_first_samples(core.cfg.run_path, parts)
    except OSError as error:
        warn("the first samples cannot be written; the run continues", error)
    shown = parts[: core.cfg.log.samples] if core.cfg.log.samples_every else []
    for prompt_id, found in shown:
        text = with_brackets(found, MAX_CHARS)
        core.logger.text(f"sample of row {prompt_id}, with what is learned in ⟦⟧:\n{text}")


def _sequences(item: Rollout | OfflineItem) -> list[TrainingSample]:
    if isinstance(item, Pair):
        return [to_sample(item.chosen), to_sample(item.rejected)]
    if isinstance(item, Labelled | LabelledSteps | RatedAnswer):
        return [to_sample(item.completion)]
    if isinstance(item, Demonstration):
        return [to_sample(item)]
    return [
        TrainingSample(r.prompt.tokens, r.tokens, r.loss_mask, prompt_id=r.prompt.id)
        for r in item.sequences
    ]
