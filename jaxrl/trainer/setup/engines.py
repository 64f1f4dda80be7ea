"""Builds engines, environments, reward functions and the reward model of a run."""

import contextlib
import dataclasses
import functools
from pathlib import Path

from jaxrl.config.keys import RolloutConfig, RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.tokenizer import stop_ids
from jaxrl.engine.engine import PagedEngine
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.layout import Layout, check_idle_policy, rollout_layout
from jaxrl.learner.reward_model import RewardModel, open_reward_model
from jaxrl.models.config import DecoderConfig
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.agents.endpoint import AgentEndpoint
from jaxrl.rollout.agents.episode import AgentLimits
from jaxrl.rollout.agents.runner import Agents
from jaxrl.rollout.engines import Engines
from jaxrl.rollout.multi_turn import EpisodeLimits
from jaxrl.rollout.paged_engine import paged_engine
from jaxrl.rollout.remote.division import generating_processes
from jaxrl.rollout.remote.pool import WorkerPool
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.tool_calls.formats import ToolFormat, tool_format
from jaxrl.trainer.phases.sampling import policy_on_host
from jaxrl.trainer.run import Core
from jaxrl.trainer.setup.devices import Policy, Session
from jaxrl.trainer.setup.models import Models
from sharding import hosts


def open_environments(
    cfg: RunConfig, stack: contextlib.ExitStack
) -> EnvironmentPool | Agents | None:
    """The processes of environments, or of agents with their endpoint; None if none is set."""
    if not cfg.env.episodes:
        return None
    pool = stack.enter_context(EnvironmentPool(cfg.env))
    return Agents(pool, stack.enter_context(AgentEndpoint())) if cfg.env.agent else pool


def local_engine(
    cfg: RunConfig, rollout: RolloutConfig, models: Models, policy: Policy
) -> tuple[Layout, PagedEngine]:
    """The engine of this process, with the sizes in `rollout`."""
    layout = rollout_layout(cfg, policy.decoder, policy.dtype, policy.rollout_devices)
    engine = make_engine(
        cfg, rollout, layout, policy.decoder, models.folders.policy, models.renderer
    )
    return layout, engine


def check_rollout_layout(cfg: RunConfig, policy: Policy) -> None:
    """Raises ValueError, before weights are loaded, if the layout of the rollout is invalid."""
    if not cfg.schedule.rollout_workers:
        layout = rollout_layout(cfg, policy.decoder, policy.dtype, policy.rollout_devices)
        check_idle_policy(cfg, layout)


def with_idle_policy(
    layout: Layout | RemoteWeights, engine: PagedEngine | WorkerPool, core: Core
) -> Layout | RemoteWeights:
    """The layout of the rollout, which has training's weights in host memory if that is set."""
    if "policy" not in core.cfg.learner.offload:
        return layout
    assert isinstance(layout, Layout) and isinstance(engine, PagedEngine), "schedule.mode='sync'"
    return dataclasses.replace(layout, while_copied=functools.partial(policy_on_host, core, engine))


def make_engines(
    cfg: RunConfig,
    layout: Layout | RemoteWeights,
    engine: PagedEngine | WorkerPool,
    models: Models,
    session: Session,
    environments: EnvironmentPool | Agents | None,
) -> Engines:
    """The engine with everything else that a rollout needs."""
    check_independent_engines(cfg, layout)
    return Engines(
        layout=layout,
        engine=engine,
        renderer=models.renderer,
        eos_ids=stop_ids(models.folders.policy, models.renderer.tokenizer),
        limits=EpisodeLimits(cfg.data.max_prompt_len, cfg.data.max_response_len, cfg.env.max_turns),
        agent_limits=AgentLimits(
            context_len=cfg.data.max_len,
            max_turns=cfg.env.max_turns,
            timeout_s=cfg.env.episode_timeout_s,
            needs_reward=any(f.partition("?")[0] == "environment" for f in cfg.reward.functions),
        ),
        environments=environments,
        tool_format=episode_tool_format(cfg, environments, models.renderer),
        progress=session.progress,
        stop=session.stop,
        n_generating=generating_processes(cfg),
    )


def episode_tool_format(
    cfg: RunConfig, environments: EnvironmentPool | Agents | None, renderer: ChatRenderer
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


def make_engine(
    cfg: RunConfig,
    rollout: RolloutConfig,
    layout: Layout,
    decoder: DecoderConfig,
    model_folder: Path,
    renderer: ChatRenderer,
    *,
    adjustable: bool = False,
) -> PagedEngine:
    """The paged engine of the policy; `adjustable` as in PagedEngine."""
    eos_ids = stop_ids(model_folder, renderer.tokenizer)
    return paged_engine(cfg, rollout, layout, decoder, eos_ids, adjustable=adjustable)


def load_reward_model(
    cfg: RunConfig, models: Models, policy: Policy, session: Session
) -> RewardModel | None:
    """The reward model; None if none is configured."""
    if models.folders.reward_model is None:
        return None
    with session.progress.waiting(f"loading the reward model {cfg.reward_model.path}"):
        return open_reward_model(cfg, models.folders.reward_model, policy.dtype)


def reward_pool(cfg: RunConfig, renderer: ChatRenderer) -> RewardPool:
    """The pool of reward functions."""
    return RewardPool(cfg.reward, functools.partial(renderer.decode, skip_special=False))
