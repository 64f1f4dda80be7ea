"""Loads the data of a run: tokenizer and chat template, prompts, and the batch iterator."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl.config.keys import RunConfig, SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.items import ItemMaker, load_items, load_sources
from jaxrl.data.iterator import Batches, BatchIterator, EndlessItems
from jaxrl.data.mixing import MixedIterator, most_per_step, shares
from jaxrl.data.prompts import prompt_maker
from jaxrl.data.streaming import ItemStream
from jaxrl.data.tokenizer import check_tokenizer, load_tokenizer, stop_ids
from jaxrl.models.config import DecoderConfig
from jaxrl.rewards.functions import need_answer
from jaxrl.trainer.setup.truths import with_checked_truths
from jaxrl.types import Prompt

logger = logging.getLogger(__name__)


def make_renderer(cfg: RunConfig, folder: Path, decoder: DecoderConfig) -> ChatRenderer:
    """The policy's tokenizer with the chat template of the config."""
    tokenizer = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    check_tokenizer(tokenizer, decoder.V)
    data = cfg.data
    renderer = ChatRenderer(
        tokenizer,
        template=data.chat_template,
        system_prompt=data.system_prompt,
        arguments=data.template_kwargs,
        today=data.date,
        special_tokens=data.special_tokens,
    )
    if data.chat_template:  # a checkpoint's own template belongs to its tokenizer
        warn_of_endless_turns(renderer, stop_ids(folder, tokenizer), cfg.rollout.sampling)
    return renderer


def warn_of_endless_turns(
    renderer: ChatRenderer, stop: Sequence[int], sampling: SamplingConfig
) -> None:
    """Warns if the template ends a turn with nothing that stops generation."""
    end = renderer.turn_end()
    tokens = renderer.tokenizer(end, add_special_tokens=False)["input_ids"]
    stops = {*stop, *sampling.stop_token_ids}
    if not stops.intersection(tokens) and not any(text in end for text in sampling.stop):
        logger.warning(
            "data.chat_template ends an assistant turn with %r, which has no stop token (%s), so a "
            "model that follows it never stops; add its token to rollout.sampling.stop_token_ids, "
            "or set another template",
            end[:40],
            ", ".join(map(repr, renderer.tokenizer.convert_ids_to_tokens(sorted(stops)))),
        )


def make_prompt_maker(cfg: RunConfig, renderer: ChatRenderer) -> ItemMaker[Prompt]:
    """Makes prompts with the answers that the reward functions need and can match."""
    answer_for = ", ".join(need_answer(cfg.reward.functions))
    maker = prompt_maker(renderer, cfg.data, answer_for=answer_for)
    return with_checked_truths(maker, cfg.reward.functions)


def load_val[T](cfg: RunConfig, maker: ItemMaker[T]) -> list[T]:
    """The validation items; none without data.val."""
    data = cfg.data
    return load_items(data.val, maker, max_rows=data.val_max_samples) if data.val else []


def make_iterator[T](cfg: RunConfig, maker: ItemMaker[T]) -> Batches[T]:
    """The iterator over batches of data.train, with the order and the shares that the config sets.

    Raises the errors of the sources and of the maker.
    """
    data, size = cfg.data, cfg.data.prompts_per_step
    skip = data.skip_solved > 0
    if not data.weights and not data.streaming:
        items = load_items(data.train, maker)
        return BatchIterator(
            items, prompts_per_step=size, shuffle=data.shuffle, seed=cfg.seed, skip_solved=skip
        )
    groups = [(source,) for source in data.train] if data.weights else [data.train]
    streams = stream_sources(cfg, maker, groups) if data.streaming else keep_sources(cfg, maker)
    identity = {"shuffle": data.shuffle, "seed": cfg.seed, "n_prompts": [len(s) for s in streams]}
    return MixedIterator(
        streams,
        prompts_per_step=size,
        weights=data.weights or (1.0,),
        final_weights=data.final_weights,
        ramp=data.weights_ramp,
        skip_solved=skip,
        identity=identity,
    )


def keep_sources[T](cfg: RunConfig, maker: ItemMaker[T]) -> list[EndlessItems[T]]:
    """The sources of data.train in memory, each with its own order."""
    data = cfg.data
    first = shares(data.weights)
    last = shares(data.final_weights) if data.final_weights else first
    return [
        EndlessItems(
            items,
            shuffle=data.shuffle,
            seed=source_seed(cfg.seed, i),
            min_left=most_per_step(data.prompts_per_step, max(first[i], last[i]), len(first)),
        )
        for i, items in enumerate(load_sources(data.train, maker))
    ]


def stream_sources[T](
    cfg: RunConfig, maker: ItemMaker[T], groups: Sequence[Sequence[str]]
) -> list[ItemStream[T]]:
    """One stream for each group of sources."""
    streams: list[ItemStream[T]] = []
    for i, sources in enumerate(groups):
        streams.append(
            ItemStream(
                sources,
                maker,
                first=sum(map(len, streams)),
                shuffle=cfg.data.shuffle,
                buffer=cfg.data.shuffle_buffer,
                seed=source_seed(cfg.seed, i),
            )
        )
    return streams


def source_seed(seed: int, source: int) -> int:
    """The seed of the order of a source, so that equally long sources have different orders."""
    return int(np.random.SeedSequence([seed, source]).generate_state(1)[0]) >> 1
