"""Loads the data of a run: tokenizer and chat template, prompts, and the batch iterator."""

from collections.abc import Sequence
from pathlib import Path

from jaxrl.config.keys import RunConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.data.iterator import BatchIterator
from jaxrl.data.prompts import load_prompts
from jaxrl.data.tokenizer import check_tokenizer, load_tokenizer
from jaxrl.io.tracking.progress import Progress
from jaxrl.models.config import DecoderConfig
from jaxrl.types import Prompt


def make_renderer(cfg: RunConfig, folder: Path, decoder: DecoderConfig) -> ChatRenderer:
    """The policy's tokenizer with the chat template of the config."""
    tokenizer = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    check_tokenizer(tokenizer, decoder.V)
    data = cfg.data
    return ChatRenderer(tokenizer, template=data.chat_template, system_prompt=data.system_prompt)


def load_data(
    cfg: RunConfig, renderer: ChatRenderer, progress: Progress
) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, validation prompts)."""
    data = cfg.data
    prompts = load_prompts(data.train, renderer=renderer, data=data)
    val_prompts = load_val(cfg, renderer) if data.val else []
    progress.status(f"data: {len(prompts)} training prompts, {len(val_prompts)} for validation")
    return prompts, val_prompts


def load_val(cfg: RunConfig, renderer: ChatRenderer) -> list[Prompt]:
    """The validation prompts."""
    data = cfg.data
    return load_prompts(data.val, renderer=renderer, data=data, limit=data.val_prompts)


def make_iterator[T](cfg: RunConfig, items: Sequence[T]) -> BatchIterator[T]:
    """The iterator over batches of the items, with the order that the config sets."""
    data = cfg.data
    return BatchIterator(
        items,
        prompts_per_step=data.prompts_per_step,
        shuffle=data.shuffle,
        seed=cfg.seed,
        skip_solved=data.skip_solved > 0,
    )
