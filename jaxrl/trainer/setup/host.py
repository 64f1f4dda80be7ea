"""Stage two of opening a run: models, data, rewards and environments, before any device is opened.

A wrong tokenizer, dataset or reward ends a run here, in seconds.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl.config.choices import OBSERVATION_ROLES, RESPONSE_PARTS
from jaxrl.config.keys import DataConfig, RunConfig
from jaxrl.config.parts import parse_parts, parse_source_parts, part_of
from jaxrl.config.teachers import teachers
from jaxrl.data.demonstrations import demonstration_maker
from jaxrl.data.difficulty import DifficultyIterator
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.items import ItemMaker, load_items, load_sources
from jaxrl.data.iterator import Batches, BatchIterator, EndlessItems, StepItems
from jaxrl.data.mixing import MixedIterator, most_per_step, shares
from jaxrl.data.prompts import prompt_maker
from jaxrl.data.source_rates import SourceCurriculum
from jaxrl.data.streaming import ItemStream
from jaxrl.data.tokenizer import stop_ids
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.learner.requirements import teacher_top_k
from jaxrl.models.config import DecoderConfig
from jaxrl.models.files.hf_load import model_config
from jaxrl.rewards.functions import need_answer
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.worker_thread import OwnFunctions
from jaxrl.rollout.agents.endpoint import AgentEndpoint
from jaxrl.rollout.agents.runner import Agents
from jaxrl.rollout.judge_endpoint import JudgeEndpoint
from jaxrl.runtime.multihost import check_same_data, check_same_order
from jaxrl.teachers.endpoint import TeacherEndpoint
from jaxrl.trainer.phases.self_distillation import demonstration
from jaxrl.trainer.setup.models import Models, open_models
from jaxrl.trainer.setup.session import Session
from jaxrl.trainer.setup.truths import report_truths, with_checked_truths
from jaxrl.types import Demonstration, Prompt
from sharding import hosts

Environments = EnvironmentPool | Agents  # agents with their endpoint


@dataclasses.dataclass(frozen=True)
class HostSide:
    """The host side of a run, before its devices are opened."""

    session: Session
    models: Models
    val: Sequence  # validation items
    iterator: Batches | None = None  # None in an evaluation
    rewards: RewardPool | None = None  # None in offline training
    judge: JudgeEndpoint | None = None  # None: no judge is on the run's devices
    environments: Environments | None = None
    demonstrations: StepItems[Demonstration] | None = None  # of an RL run that trains on them
    # Teachers at servers, by index among all
    endpoints: Mapping[int, TeacherEndpoint] = dataclasses.field(default_factory=dict)

    @property
    def datasets(self) -> dict[str, Sequence]:
        """The items of training by the key of their sources."""
        assert self.iterator is not None
        found = {"data.train": self.iterator.items, "data.val": self.val}
        if self.demonstrations is not None:
            found["data.demonstrations"] = self.demonstrations.items
        return found


def open_host(session: Session, own: OwnFunctions | None = None) -> HostSide:
    """Prompts for training and validation, their rewards, and environments if they are set.

    `own` is as in RewardPool.
    """
    cfg, models = session.cfg, open_models(session.cfg, session.progress)
    with hosts.raise_together():
        check_no_teacher_column(cfg)
        maker = make_prompt_maker(cfg, models)
        iterator, val = make_iterator(cfg, maker), load_val(cfg, maker)
        demonstrations = open_demonstrations(cfg, models)
        if cfg.algorithm.parts:
            check_part_sources(cfg, iterator.items, demonstrations)
        check_teacher_texts(cfg, iterator.items, models.decoder)
        check_teacher_sources(cfg, iterator.items)
        endpoints = open_endpoints(cfg, models)
        judge = open_judge(session, models)
        rewards = open_rewards(session, models, iterator.items, val, own, judge)
        environments = open_environments(cfg, session.stack, models.images)
    for endpoint in endpoints.values():
        endpoint.reopen(hosts.broadcast(endpoint.found))
    host = HostSide(
        session, models, val, iterator, rewards, judge, environments, demonstrations, endpoints
    )
    check_items(host)
    return host


def open_offline_host(session: Session, maker: Callable[..., ItemMaker]) -> HostSide:
    """The items of offline training; `maker` as in OfflineObjective."""
    cfg, models = session.cfg, open_models(session.cfg, session.progress)
    with hosts.raise_together():
        check_context(cfg, models.decoder)
        stop = stop_ids(models.folders.policy, models.renderer.tokenizer)
        made = maker(models.renderer, cfg, stop=stop, images=models.images)
        iterator, val = make_iterator(cfg, made), load_val(cfg, made)
    host = HostSide(session, models, val, iterator)
    check_items(host)
    return host


def open_evaluation_host(session: Session, own: OwnFunctions | None = None) -> HostSide:
    """The prompts of an evaluation, their rewards, and environments if they are set.

    `own` is as in RewardPool.
    """
    cfg, models = session.cfg, open_models(session.cfg, session.progress)
    with hosts.raise_together():
        prompts = load_val(cfg, make_prompt_maker(cfg, models))
        rewards = open_rewards(session, models, prompts, [], own)
        environments = open_environments(cfg, session.stack, models.images)
    session.progress.status(f"data: {len(prompts)} prompts")
    check_same_data({"data.val": prompts})
    return HostSide(session, models, prompts, rewards=rewards, environments=environments)


def check_context(cfg: RunConfig, decoder: DecoderConfig) -> None:
    """Raises ValueError if sequences may be longer than the model's context, as the engine does."""
    if cfg.data.max_len > decoder.context_len:
        raise ValueError(
            f"prompt and response may take {cfg.data.max_len} tokens, the model supports "
            f"{decoder.context_len}; lower config.data.max_prompt_len or "
            "config.data.max_response_len"
        )


def open_rewards(
    session: Session,
    models: Models,
    prompts: Sequence[Prompt],
    more: Sequence[Prompt],
    own: OwnFunctions | None = None,
    judge: JudgeEndpoint | None = None,
) -> RewardPool:
    """The pool of reward functions, after checks of the columns and truths of the prompts."""
    decode = functools.partial(models.renderer.decode, skip_special=False)
    cfg = session.cfg.reward
    if judge is not None:
        local = dataclasses.replace(cfg.judge, url=judge.url, model=judge_name(session.cfg))
        cfg = dataclasses.replace(cfg, judge=local)
    rewards = session.stack.enter_context(
        RewardPool(cfg, decode, own=own, run_folder=session.cfg.run_path)
    )
    rewards.check_columns(prompts)
    report_truths(session.cfg, rewards, [*prompts, *more], session.progress)
    return rewards


def judge_name(cfg: RunConfig) -> str:
    """The name of a judge on the run's devices: all that its verdicts depend on, for their cache.

    Except for the files of its folder, which stay as they are.
    """
    judge, rollout = cfg.reward.judge, cfg.rollout
    weights = (judge.path, judge.dtype) if judge.path else (cfg.model.path, cfg.lora.base_dtype)
    dtypes = (cfg.model.dtype, rollout.dtype, rollout.kv_dtype)
    templates = (judge.chat_template, cfg.data.chat_template, str(cfg.data.template_kwargs))
    return " ".join((judge.weights, *weights, *dtypes, *templates, cfg.data.today))


def open_judge(session: Session, models: Models) -> JudgeEndpoint | None:
    """The endpoint of a judge on the run's devices; None if the judge is a server.

    Raises ValueError for a run of several processes, whose engines are in step, and for requests
    that are longer than the model's context.
    """
    cfg, folder = session.cfg, models.folders.judge
    if not cfg.reward.judge.is_local:
        return None
    run, decoder = cfg, models.decoder
    if folder is not None:
        run, decoder = cfg.judge_run, model_config(folder)
    if run.engine_len > decoder.context_len:
        raise ValueError(
            f"a judge's prompt and verdict may take {run.engine_len} tokens, the model supports "
            f"{decoder.context_len}; lower config.reward.judge.max_prompt_len or "
            "config.reward.judge.max_verdict_len"
        )
    if (n := hosts.n_processes()) > 1:
        raise ValueError(
            f"config.reward.judge.weights={cfg.reward.judge.weights!r} is for one process, "
            f"this run has {n}; serve the judge with `python -m jaxrl.serve` on other devices and "
            "set config.reward.judge.url"
        )
    return session.stack.enter_context(JudgeEndpoint())


def open_environments(
    cfg: RunConfig, stack: contextlib.ExitStack, images: ImageReader | None
) -> Environments | None:
    """The processes of environments, or of agents with their endpoint; None if none is set.

    `images` reads those of agents' messages; None is a run that reads text.
    """
    if not cfg.env.episodes:
        return None
    pool = stack.enter_context(EnvironmentPool(cfg.env))
    if not cfg.env.program:
        return pool
    return Agents(pool, stack.enter_context(AgentEndpoint(images)))


def check_items(host: HostSide) -> None:
    """Shows how many items there are. Raises AgreedError if the processes read different ones."""
    session, iterator = host.session, host.iterator
    assert iterator is not None
    n_train = "streamed" if session.cfg.data.streaming else len(iterator.items)
    text = f"data: {n_train} training items, {len(host.val)} for validation"
    if host.demonstrations is not None:
        text += f", {len(host.demonstrations.items)} demonstrations"
    session.progress.status(text)
    check_same_data(host.datasets)
    check_same_order(iterator.state())


def make_prompt_maker(cfg: RunConfig, models: Models) -> ItemMaker[Prompt]:
    """Makes prompts with the answers that the reward functions need and can match."""
    answer_for = ", ".join(need_answer(cfg.reward.functions))
    maker = prompt_maker(models.renderer, cfg.data, answer_for=answer_for, images=models.images)
    return with_checked_truths(maker, cfg.reward.functions)


def open_demonstrations(cfg: RunConfig, models: Models) -> StepItems[Demonstration] | None:
    """The demonstrations of an RL run; None without data.demonstrations."""
    data = cfg.data
    if not data.demonstrations:
        return None
    stop = stop_ids(models.folders.policy, models.renderer.tokenizer)
    maker = demonstration_maker(models.renderer, data, stop=stop, images=models.images)
    return StepItems(
        load_items(data.demonstrations, maker),
        per_step=data.demonstrations_per_step,
        shuffle=data.shuffle,
        seed=cfg.seed,
    )


def check_part_sources(
    cfg: RunConfig, prompts: Sequence[Prompt], demonstrations: StepItems[Demonstration] | None
) -> None:
    """Raises ValueError for a part or a list of parts without rows, and rows without a part."""
    algorithm, sampled = cfg.algorithm, {p.source for p in prompts}
    given = {d.source for d in demonstrations.items} if demonstrations is not None else set()
    all_known = not cfg.data.streaming  # otherwise only the first rows are known
    for part in parse_parts(algorithm.parts):
        source = part.options.source
        sources = given if part.kind == "demonstrations" else sampled
        is_known = all_known or part.kind == "demonstrations"
        if source and source not in sources and is_known:
            raise ValueError(
                f"config.algorithm.parts has {part.name!r}, but no row has the data_source "
                f"{source!r}; the sources are {', '.join(sorted(sources))}"
            )
    named = parse_source_parts(algorithm.source_parts)
    if (unknown := sorted(named.keys() - sampled - given)) and all_known:
        raise ValueError(
            f"config.algorithm.source_parts names {', '.join(unknown)}, but no row has this "
            f"data_source; the sources are {', '.join(sorted(sampled | given))}"
        )
    check_trained_sources(cfg, sampled, given)


def check_trained_sources(cfg: RunConfig, sampled: set[str], given: set[str]) -> None:
    """Raises ValueError for a data_source of prompts or demonstrations that no part trains."""
    algorithm = cfg.algorithm
    for source in sorted(given):
        if part_of(algorithm, "demonstrations", source) is None:
            raise ValueError(
                f"rows of data.demonstrations have the data_source {source!r}, which no entry of "
                f"config.algorithm.parts={algorithm.parts} trains with "
                f"config.algorithm.source_parts={algorithm.source_parts}; add "
                f"'demonstrations?source={source}', or an entry without a source"
            )
    tokens = [(kind, "") for kind in (*RESPONSE_PARTS, "observations")]
    tokens += [("observations", role) for role in OBSERVATION_ROLES]
    others = algorithm.kl_coef or algorithm.entropy_coef or algorithm.entropy_target
    if "policy" not in algorithm.part_kinds or others:  # terms of the rows of all sources
        return
    for source in sorted(sampled):
        if all(part_of(algorithm, kind, source, role) is None for kind, role in tokens):
            raise ValueError(
                f"config.algorithm.parts={algorithm.parts} with config.algorithm.source_parts="
                f"{algorithm.source_parts} leaves the rows of data.train with the data_source "
                f"{source!r} without a part; name 'policy' or another part of the responses for "
                "them, or remove these rows"
            )


def check_teacher_texts(cfg: RunConfig, prompts: Sequence[Prompt], decoder: DecoderConfig) -> None:
    """Raises ValueError for self-distillation without texts, or beyond the model's context."""
    settings = cfg.self_distillation
    if not settings.context:
        return
    longest = cfg.max_teacher_prompt_len + cfg.data.max_response_len
    if longest > decoder.context_len:
        raise ValueError(
            f"the teacher's prompt and a response may take {longest} tokens, the model supports "
            f"{decoder.context_len}; set config.self_distillation.max_prompt_len to at most "
            f"{decoder.context_len - cfg.data.max_response_len}"
        )
    column = settings.demonstration
    if "demonstration" in settings.context and not any(demonstration(p, column) for p in prompts):
        columns = sorted({name for p in prompts for name in p.extra})
        raise ValueError(
            f"config.self_distillation.demonstration={column!r} is a column that no row has as "
            f"text; set 'answer' or one of {', '.join(columns) or 'the columns of the data'}"
        )


def check_no_teacher_column(cfg: RunConfig) -> None:
    """Raises ValueError for a teacher's logprobs of given responses in a run that samples them."""
    if column := cfg.data.teacher_logprobs:
        raise ValueError(
            f"config.data.teacher_logprobs={column!r} has logprobs of given responses, which "
            "jaxrl.sft trains on; leave it out, or set config.algorithm.teacher"
        )


def check_teacher_sources(cfg: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError for a teacher of a data_source that no row has."""
    sources = {prompt.source for prompt in prompts}
    for teacher in teachers(cfg.algorithm)[1:]:
        source = teacher.options.source
        if source not in sources and not cfg.data.streaming:  # only the first rows are known
            raise ValueError(
                f"config.{teacher.key} names {teacher.path!r} for the data_source {source!r}, "
                f"which no row has; the sources are {', '.join(sorted(sources))}"
            )


def open_endpoints(cfg: RunConfig, models: Models) -> dict[int, TeacherEndpoint]:
    """The teachers at servers, which the main process asks what they are; by index among all."""
    found, n_vocab = {}, models.decoder.V
    longest = cfg.data.max_len
    if cfg.self_distillation.context:
        longest = cfg.max_teacher_prompt_len + cfg.data.max_response_len
    for i, teacher in enumerate(teachers(cfg.algorithm)):
        if teacher.is_endpoint:
            k = teacher_top_k(cfg)
            found[i] = TeacherEndpoint(teacher, cfg.teacher_endpoint, k=k, n_vocab=n_vocab)
            if hosts.is_main_process():
                found[i].open(models.renderer.tokenizer, max_len=longest)
    return found


def load_val[T](cfg: RunConfig, maker: ItemMaker[T]) -> list[T]:
    """The validation items; none without data.val."""
    data = cfg.data
    return load_items(data.val, maker, max_rows=data.val_max_samples) if data.val else []


def make_iterator[T](cfg: RunConfig, maker: ItemMaker[T]) -> Batches[T]:
    """The iterator over batches of data.train, with the order and the shares that the config sets.

    Raises the errors of the sources and of the maker.
    """
    data, size = cfg.data, cfg.data.prompts_per_step
    if data.pool_weights:
        return DifficultyIterator(
            load_items(data.train, maker),
            prompts_per_step=size,
            shuffle=data.shuffle,
            seed=cfg.seed,
            weights=data.pool_weights,
            edges=data.pool_edges,
            memory=data.pool_memory,
        )
    skip = data.skip_solved
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
        curriculum=source_curriculum(data),
        identity=identity,
    )


def source_curriculum(data: DataConfig) -> SourceCurriculum | None:
    """The curriculum over the sources; None if their shares do not follow mean rewards."""
    if not (data.progress or data.gate):
        return None
    return SourceCurriculum(data.progress, data.progress_memory, data.gate, data.gate_prompts)


def keep_sources[T](cfg: RunConfig, maker: ItemMaker[T]) -> list[EndlessItems[T]]:
    """The sources of data.train in memory, each with its own order."""
    data = cfg.data
    first = shares(data.weights)
    last = shares(data.final_weights) if data.final_weights else first
    if source_curriculum(data):  # one source may fill a step
        first = last = [1.0] * len(first)
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
