"""The engines of a run, the reward model, and the source of scored rollouts of its schedule."""

import contextlib
import dataclasses
import functools

from jaxrl.config.choices import ROLE_ADVANTAGES
from jaxrl.config.keys import RolloutConfig, RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.shared_batches import SharedBatches
from jaxrl.data.tokenizer import stop_ids
from jaxrl.engine.engine import PagedEngine
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.layout import Layout, check_idle_policy, rollout_layout
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.reward_model import RewardModel, open_reward_model
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.agents.episode import AgentLimits
from jaxrl.rollout.engines import Engines, generating_processes
from jaxrl.rollout.judge_model import load_judge
from jaxrl.rollout.local_judge import LocalJudge
from jaxrl.rollout.loop import RolloutLoop
from jaxrl.rollout.multi_turn import EpisodeLimits
from jaxrl.rollout.paged_engine import paged_engine
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.rollout.request_images import EpisodeImages
from jaxrl.tool_calls.formats import ToolFormat, tool_format
from jaxrl.trainer.core import Core, Source
from jaxrl.trainer.phases.sampling import SyncSource, policy_on_host
from jaxrl.trainer.schedule.engine_thread import EngineThread
from jaxrl.trainer.schedule.generator import GroupGenerator
from jaxrl.trainer.schedule.source import AsyncSource, PartialSource
from jaxrl.trainer.setup.devices import Policy
from jaxrl.trainer.setup.host import Environments, HostSide, open_environments
from jaxrl.trainer.setup.models import Models
from jaxrl.trainer.setup.workers import make_workers
from sharding import hosts


def check_rollout_layout(cfg: RunConfig, policy: Policy) -> None:
    """Raises ValueError, before weights are loaded, if the layout of the rollout is invalid."""
    if not cfg.schedule.rollout_workers:
        layout = rollout_layout(cfg, policy.decoder, policy.dtype, policy.rollout_devices)
        check_idle_policy(cfg, layout)


def open_engines(
    host: HostSide, policy: Policy, rollout: RolloutConfig, encoder: ImageEncoder | None = None
) -> Engines:
    """The engine of this process with the sizes in `rollout`, or the workers of the rollout.

    `encoder` computes the features of images, if the run has any.
    """
    session, cfg, models = host.session, host.session.cfg, host.models
    eos_ids = stop_ids(models.folders.policy, models.renderer.tokenizer)
    if session.ray is None:
        layout = rollout_layout(cfg, policy.decoder, policy.dtype, policy.rollout_devices)
        engine = paged_engine(cfg, rollout, layout, policy.decoder, eos_ids, tower=models.tower)
    else:
        layout, engine = make_workers(session.ray, host, policy)
    check_independent_engines(cfg, layout)
    return Engines(
        layout=layout,
        engine=engine,
        renderer=models.renderer,
        eos_ids=eos_ids,
        limits=EpisodeLimits(cfg.data.max_prompt_len, cfg.data.max_response_len, cfg.env.max_turns),
        agent_limits=AgentLimits(
            context_len=cfg.data.max_len,
            max_turns=cfg.env.max_turns,
            timeout_s=cfg.env.episode_timeout_s,
            needs_role_rewards=cfg.algorithm.advantage in ROLE_ADVANTAGES,
            needs_reward=any(f.partition("?")[0] == "environment" for f in cfg.reward.functions),
        ),
        environments=host.environments,
        tool_format=episode_tool_format(cfg, host.environments, models.renderer),
        progress=session.progress,
        stop=session.stop,
        n_generating=generating_processes(cfg),
        images=open_images(models, encoder),
    )


def open_local_judge(host: HostSide, engines: Engines) -> LocalJudge | None:
    """The judge on the devices of the run; None if there is none.

    Loads the model of reward.judge.path if it is set.
    """
    if host.judge is None:
        return None
    cfg, models = host.session.cfg, host.models
    if (folder := models.folders.judge) is not None:
        assert models.judge is not None, "a judge's folder has a renderer"
        eos_ids = stop_ids(folder, models.judge.tokenizer)
        with host.session.progress.waiting(f"loading the judge {cfg.reward.judge.path}"):
            model = load_judge(cfg, folder, eos_ids)
        return LocalJudge(host.judge, model.engine, models.judge, eos_ids, model)
    assert isinstance(engines.engine, PagedEngine), "schedule.rollout_workers=0"
    return LocalJudge(host.judge, engines.engine, engines.renderer, engines.eos_ids)


def open_images(models: Models, encoder: ImageEncoder | None) -> EpisodeImages | None:
    """The reader and the encoder of images for rollouts; None in a run without images."""
    if encoder is None:
        return None
    assert models.images is not None, "a run with a tower reads images"
    return EpisodeImages(models.images, encoder)


def with_idle_policy(engines: Engines, core: Core) -> Engines:
    """Engines whose rollout has training's weights in host memory, if that is set."""
    if "policy" not in core.cfg.learner.offload:
        return engines
    layout, engine = engines.layout, engines.engine
    assert isinstance(layout, Layout) and isinstance(engine, PagedEngine), "schedule.mode='sync'"
    idle = functools.partial(policy_on_host, core, engine)
    return dataclasses.replace(engines, layout=dataclasses.replace(layout, while_copied=idle))


def episode_tool_format(
    cfg: RunConfig, environments: Environments | None, renderer: ChatRenderer
) -> ToolFormat | None:
    """The format of the model's tool calls; None without an environment that has tools.

    Raises ValueError if the chat template has none, or does not render the tools.
    """
    if not isinstance(environments, EnvironmentPool) or not environments.tools:
        return None
    try:
        found = tool_format(renderer.template, cfg.env.tool_format)
        renderer.text([{"role": "user", "content": "?"}], tools=environments.tools)
    except ValueError as error:
        names = ", ".join(tool["function"]["name"] for tool in environments.tools)
        raise ValueError(
            f"config.env.name={cfg.env.name!r} has the tools {names}: {error}"
        ) from error
    return found


def check_independent_engines(cfg: RunConfig, layout: Layout | RemoteWeights) -> None:
    """Raises AgreedError if one engine spans several processes, and the run cannot use it."""
    if hosts.n_processes() == 1 or layout.per_process:
        return
    if cfg.env.episodes:
        reason = (
            f"{cfg.env.episodes!r}: environments and agents reply to the processes at different "
            "times"
        )
    elif cfg.schedule.mode == "partial":
        reason = "config.schedule.mode='partial': each process generates its share of the prompts"
    else:
        return
    raise hosts.AgreedError(
        f"{reason}, but one engine over all of them decodes in lock-step; set "
        "config.rollout.engines='process' and a mesh that allows it"
    )


def load_reward_model(host: HostSide, policy: Policy) -> RewardModel | None:
    """The reward model; None if none is configured."""
    cfg, folder = host.session.cfg, host.models.folders.reward_model
    if folder is None:
        return None
    with host.session.progress.waiting(f"loading the reward model {cfg.reward_model.path}"):
        return open_reward_model(cfg, folder, policy.dtype, policy_renderer=host.models.renderer)


def make_source(core: Core, engines: Engines, rewards: RewardPool) -> Source:
    """The source of `schedule.mode`, with what was in flight at the checkpoint.

    The stack of the session stops its thread and the processes of its environments, if it has any.
    """
    cfg, stack = core.cfg, core.session.stack
    if cfg.schedule.mode == "sync":
        return SyncSource()
    saved = None if core.in_flight is None else core.in_flight()
    loop = make_loop(cfg, engines, stack)
    if cfg.schedule.mode == "async":
        core.iterator = SharedBatches(core.iterator)
    generator = GroupGenerator(cfg, loop, rewards, core.iterator)
    if saved is not None:
        generator.restore(saved.get("processes", [saved]))
    if cfg.schedule.mode == "partial":
        return PartialSource(generator)
    thread = EngineThread(generator, cfg.schedule.lag, engines.layout.on_mesh)
    stack.callback(thread.close)
    outcomes = [(int(i), float(mean)) for i, mean in (saved or {}).get("outcomes", ())]
    return AsyncSource(thread, core.session.stop, outcomes)


def make_loop(cfg: RunConfig, engines: Engines, stack: contextlib.ExitStack) -> RolloutLoop:
    """Responses of a single turn, or episodes in separate processes.

    The processes in `engines` stay free for validation and baselines, while episodes of later steps
    are in flight.
    """
    reader = None if engines.images is None else engines.images.reader
    runner = engines.runner(open_environments(cfg, stack, reader), cfg.rollout.sampling)
    return RolloutLoop(runner, n=cfg.rollout.n, keep_kv=cfg.schedule.keep_kv)
