"""Loads the data of a run: tokenizer and chat template, prompts, and the batch iterator."""

from collections.abc import Sequence
from pathlib import Path

from jaxrl.config.keys import RunConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.data.items import ItemMaker, load_items
from jaxrl.data.iterator import BatchIterator
from jaxrl.data.prompts import prompt_maker
from jaxrl.data.tokenizer import check_tokenizer, load_tokenizer
from jaxrl.models.config import DecoderConfig
from jaxrl.rewards.functions import need_answer
from jaxrl.types import Prompt


def make_renderer(cfg: RunConfig, folder: Path, decoder: DecoderConfig) -> ChatRenderer:
    """The policy's tokenizer with the chat template of the config."""
    tokenizer = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    check_tokenizer(tokenizer, decoder.V)
    data = cfg.data
    return ChatRenderer(
        tokenizer,
        template=data.chat_template,
        system_prompt=data.system_prompt,
        arguments=data.template_kwargs,
        today=data.date,
    )


def make_prompt_maker(cfg: RunConfig, renderer: ChatRenderer) -> ItemMaker[Prompt]:
    """Makes prompts with the answers that the reward functions need."""
    answer_for = ", ".join(need_answer(cfg.reward.functions))
    return prompt_maker(renderer, cfg.data, answer_for=answer_for)


def load_val[T](cfg: RunConfig, maker: ItemMaker[T]) -> list[T]:
    """The validation items; none without data.val."""
    data = cfg.data
    return load_items(data.val, maker, max_rows=data.val_max_samples) if data.val else []


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
