"""Rewards and episodes of several turns of verl's reinforcement learning."""

from jaxrl.migrate.migration import DECIDE, NONE, Migration
from jaxrl.migrate.verl_names import EPISODES, MULTI_TURN, OVERLONG_BUFFERS, ROLLOUT


def rewards(found: Migration) -> None:
    section = "custom_reward_function."
    path = found.first(section + "path", "reward." + section + "path")
    name = found.first(section + "name", "reward." + section + "name")
    sections = (f"{section}reward_kwargs.", f"reward.{section}reward_kwargs.")
    given = [n for n in found.settings.values if n.startswith(sections)]
    options = [f"{n.rsplit('reward_kwargs.', 1)[1]}={found.get(n)}" for n in given]
    query = f"?{'&'.join(options)}" if options else ""
    found.config["reward.functions"] = (
        f"{path}:{name or 'compute_score'}{query}" if path else "by_source",
    )
    for prefix in OVERLONG_BUFFERS:
        if found.get(prefix + "enable", False):
            found.carry(prefix + "len", "reward.overlong_buffer")
            found.config["reward.overlong_penalty"] = found.get(prefix + "penalty_factor", 1.0)
    manager = found.first("reward_model.reward_manager", "reward.reward_manager.name")
    if manager not in (None, "naive", "dapo"):
        given = "reward.reward_manager.name"
        name = given if found.given(given) else "reward_model.reward_manager"
        found.note(NONE, name, "functions are called once per response")
    for switch, model in (
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        if not found.get(switch, False):
            continue
        if path:
            found.refuse(
                model,
                f"{path} alone gives verl's reward and asks this model over HTTP; serve it for the "
                "function and set '', or set its path to add the score of its head",
                "reward_model.path",
            )
        else:
            found.carry(model, "reward_model.path")
            found.config["reward.functions"] = ()


def episodes(found: Migration) -> None:
    """Several turns need an environment here, which no setting of verl gives."""
    agent = ROLLOUT + "agent."
    names = [agent + name for name in ("agent_loop_config_path", "agent_loop_manager_class")]
    if found.settings.values.get(agent + "default_agent_loop") != "single_turn_agent":
        names.append(agent + "default_agent_loop")
    if found.get(MULTI_TURN + "enable", False):
        names.append(MULTI_TURN + "enable")
    names = [name for name in names if found.has(name)]
    if not names:
        return
    for name, ours in EPISODES.items():
        found.carry(name, ours)
    found.refuse(
        names[-1],
        "write the tools as an environment (docs/how_to/environments.md) and give its name",
        "env.name",
        "env.agent",
    )
    for name in ("tool_config_path", "interaction_config_path"):
        if found.settings.values.get(MULTI_TURN + name):
            found.note(DECIDE, MULTI_TURN + name, "its classes become those of env.name")
