"""verl's reinforcement learning: main_ppo, the one-step-off and the fully asynchronous trainer."""

import math

from jaxrl.migrate.migration import DIFFERS, UNNEEDED, Migration, freeze_vision
from jaxrl.migrate.verl_correction import correction
from jaxrl.migrate.verl_names import (
    ACTOR,
    ADVANTAGES,
    AGGREGATIONS,
    CRITIC,
    DEFAULTS,
    DISTILLATION,
    KLS,
    LOSS_KEYS,
    LOSSES,
    MODEL,
    NEUTRAL,
    REF,
    RENAMED,
    ROLLOUT,
    SHARED_WITH_CRITIC,
)
from jaxrl.migrate.verl_rewards import episodes, rewards
from jaxrl.migrate.verl_training import (
    SECTIONS,
    adapters,
    data_files,
    devices,
    length,
    mesh,
    offload,
    optimizer,
    optimizer_offload,
    recomputation,
    sizes,
    token_budget,
    trainer,
)


def ppo(found: Migration) -> None:
    """Translates a run of main_ppo, which other programs of verl extend."""
    for name, ours in RENAMED.items():
        found.carry(name, ours)
    for name, (value, reason, keys) in NEUTRAL.items():
        found.refuse_unless(name, value, reason, *keys)
    devices(found)
    data(found)
    length(found)
    prefixes = (ACTOR, *(ACTOR + section for section in SECTIONS))
    mesh(found, prefixes)
    batch(found)
    advantage(found)
    loss(found)
    distillation(found)
    kl(found)
    sampling(found)
    engine(found)
    router_replay(found, prefixes)
    prompts = found.config["data.prompts_per_step"]
    updates = math.ceil(prompts / (found.config["learner.mini_batch_prompts"] or prompts))
    optimizer(found, ACTOR + "optim.", updates * found.number(ACTOR + "ppo_epochs", 1))
    recomputation(found, prefixes, MODEL)
    optimizer_offload(found, (ACTOR, "critic."))
    adapters(found, MODEL)
    freeze_vision(found, ACTOR + "freeze_vision_tower")
    has_reference = found.config.get("algorithm.kl_coef") and not found.config.get("lora.rank")
    roles = {REF: "reference"} if has_reference else {}
    if found.config.get("algorithm.advantage") == "gae":
        roles["critic."] = "critic"
    if found.get("reward_model.enable"):
        roles["reward_model.model."] = "reward_model"
    offload(found, roles)
    correction(found)
    rewards(found)
    episodes(found)
    trainer(found)


def one_step_off(found: Migration) -> None:
    ppo(found)
    found.config |= {"schedule.mode": "async", "schedule.max_staleness": 1}
    rollout_devices(found)


def fully_async(found: Migration) -> None:
    """Prompts between two transfers of weights are a step here, their mini-batches its updates."""
    section = "async_training."
    mini = found.number(ACTOR + "ppo_mini_batch_size", 256)
    batches = found.number(section + "require_batches", 1)
    every = found.number(section + "trigger_parameter_sync_step", 1)
    prompts = mini * batches * every
    found.settings.put("data.train_batch_size", prompts)
    ppo(found)
    n_prompts = found.number("rollout.total_rollout_steps", 0)
    found.config["total_steps"] = n_prompts // prompts
    found.config.pop("total_epochs", None)
    threshold = found.number(section + "staleness_threshold", 0)
    staleness = max(1, math.ceil(threshold))
    found.config |= {"schedule.mode": "async", "schedule.max_staleness": staleness}
    found.note(
        DIFFERS,
        section + "staleness_threshold",
        f"schedule.max_staleness={staleness}: a bound for every response, in training steps of "
        f"{prompts} prompts; verl's is a share of stale samples",
    )
    if found.get(section + "partial_rollout", True) is False:
        found.note(DIFFERS, section + "partial_rollout", "unfinished responses always continue")
    rollout_devices(found)


def rollout_devices(found: Migration) -> None:
    """Devices that generate. Every host here has both kinds, in verl whole hosts may generate."""
    if found.config.pop("rollout.release_kv", False):
        found.note(UNNEEDED, ROLLOUT + "free_cache_engine", "training has other devices")
    n_nodes, per_node = (found.number(f"rollout.{n}", 1) for n in ("nnodes", "n_gpus_per_node"))
    n_training = found.n_devices or 0
    total = n_training + n_nodes * per_node
    hosts = max(found.number("trainer.nnodes", 1), 1) + (n_nodes if n_nodes * per_node >= 8 else 0)
    hosts = 1 if total <= 8 else hosts
    if n_nodes * per_node % hosts or n_training % hosts:
        found.refuse(
            "rollout.n_gpus_per_node",
            f"{n_nodes * per_node} devices that generate and {n_training} that train cannot be "
            f"divided over {hosts} hosts; set the devices of the rollout per process, or workers",
            "schedule.rollout_devices",
            "schedule.rollout_workers",
        )
        return
    found.config["schedule.rollout_devices"] = n_nodes * per_node // hosts
    found.n_devices = total
    found.n_processes = hosts


def data(found: Migration) -> None:
    data_files(found)
    names = (("prompt", "prompt_key"), ("data_source", "reward_fn_key"))
    columns = [(ours, found.get(f"data.{key}")) for ours, key in names]
    columns.append(("images", images(found)))
    if renamed := tuple(f"{ours}:{name}" for ours, name in columns if name not in (None, ours)):
        found.config["data.columns"] = renamed
    for name in ("video_key", "audio_key"):
        if found.has(f"data.{name}"):
            found.refuse(
                f"data.{name}",
                f"jaxrl reads text and images only; add ~data.{name} if the rows have nothing else",
            )
    if found.has("data.custom_cls.path"):
        found.refuse(
            "data.custom_cls.path",
            "a dataset class has no counterpart; write its rows to a file, and add "
            "~data.custom_cls.path",
        )


def images(found: Migration) -> str | None:
    """The column of images, if the run names it, as verl's scripts for images do."""
    if not found.has("data.image_key"):
        return None
    found.config["data.images"] = True
    for name in ("min_pixels", "max_pixels"):
        found.carry(f"data.mm_processor_kwargs.{name}", f"data.image_kwargs.{name}")
    return found.get("data.image_key")


def batch(found: Migration) -> None:
    """Mini-batch and token budgets. verl counts tokens per GPU, jaxrl per data-parallel rank."""
    prompts = found.number("data.train_batch_size", DEFAULTS["data.train_batch_size"])
    mini = found.number(ACTOR + "ppo_mini_batch_size", prompts)
    found.config["data.prompts_per_step"] = prompts
    found.config["learner.mini_batch_prompts"] = 0 if mini >= prompts else mini
    longest = sum(found.number(f"data.max_{part}_length", 512) for part in ("prompt", "response"))
    sequences = found.number(ACTOR + "ppo_micro_batch_size_per_gpu", None)
    dynamic = found.get(ACTOR + "use_dynamic_bsz")
    shared = found.config["mesh.sequence"]
    tokens = found.number(ACTOR + "ppo_max_token_len_per_gpu", 16384) * shared
    if not dynamic and sequences:
        tokens = sequences * longest
    budget = token_budget(found, tokens, longest)
    found.config["learner.token_budget"] = budget
    for role, ours in ((ROLLOUT, "score"), (REF, "ref")):
        scored = found.number(role + "log_prob_max_token_len_per_gpu", 0) * shared
        if found.get(role + "log_prob_use_dynamic_bsz", dynamic) and scored >= 2 * budget:
            found.config[f"{ours}.token_budget"] = scored // budget * budget
    critic = found.number("critic.ppo_max_token_len_per_gpu", 0)
    if critic and found.get("algorithm.adv_estimator") == "gae":
        n_gpus = found.number("critic.ulysses_sequence_parallel_size", 1)
        found.config["critic.token_budget"] = token_budget(found, critic * n_gpus, longest)


def advantage(found: Migration) -> None:
    found.choose("algorithm.adv_estimator", ADVANTAGES, "algorithm.advantage")
    name = found.config.get("algorithm.advantage")
    if name == "gae":
        for theirs, ours in CRITIC.items():
            found.carry(theirs, ours)
        found.carry("algorithm.lam", "algorithm.lam")
        for theirs, of_policy in SHARED_WITH_CRITIC.items():
            own, shared = found.settings.values.get(theirs), found.settings.values.get(of_policy)
            if own is not None and own != shared:
                found.note(DIFFERS, theirs, f"the critic has the learner's, from {of_policy}")
    elif found.settings.values.get("trainer.critic_warmup"):
        found.note(UNNEEDED, "trainer.critic_warmup", f"{name} has no critic")
    if name in ("gae", "reinforce_plus_plus"):
        found.carry("algorithm.gamma", "algorithm.gamma")
    if found.get("algorithm.filter_groups.enable", False):
        batches = found.number("algorithm.filter_groups.max_num_gen_batches", 0)
        found.config["algorithm.dynamic_sampling"] = True
        found.config["algorithm.dynamic_sampling_batches"] = batches or 10
        if not batches:
            found.note(
                DIFFERS,
                "algorithm.filter_groups.max_num_gen_batches",
                "no limit in verl; algorithm.dynamic_sampling_batches is set to 10",
            )


def loss(found: Migration) -> None:
    found.choose(ACTOR + "policy_loss.loss_mode", LOSSES, "algorithm.policy_loss")
    name = found.config.get("algorithm.policy_loss", "")
    both = found.number(ACTOR + "clip_ratio", 0.2)
    for end in ("low", "high"):
        found.config[f"algorithm.clip_{end}"] = found.number(f"{ACTOR}clip_ratio_{end}", both)
    if name != "gmpo":  # a ratio is above 0, so a lower bound below that is none
        found.config["algorithm.clip_low"] = min(1.0, found.config["algorithm.clip_low"])
    if found.given(ACTOR + "clip_ratio") and not found.given(ACTOR + "clip_ratio_low"):
        found.note(
            DIFFERS,
            ACTOR + "clip_ratio",
            "recent versions of verl read only clip_ratio_low and clip_ratio_high; both are set to "
            "it here",
        )
    for theirs, ours in LOSS_KEYS.get(name, {}).items():
        found.carry(ACTOR + theirs, f"algorithm.{ours}")
    if name == "sapo":  # verl ignores the mode for it
        found.config["algorithm.aggregation"] = "seq_mean_token_mean"
    else:
        found.choose(ACTOR + "loss_agg_mode", AGGREGATIONS, "algorithm.aggregation")
    if found.config.get("algorithm.aggregation") == "seq_mean_token_sum_norm":
        scale_factor(found)
    mode = found.settings.values.get("critic.loss_agg_mode")
    if mode is not None and found.config.get("algorithm.advantage") == "gae":
        found.choose("critic.loss_agg_mode", AGGREGATIONS, "critic.aggregation")
    # verl trains on groups of equal rewards too: their tokens count in the mean.
    found.config["algorithm.drop_flat_groups"] = False


def scale_factor(found: Migration) -> None:
    """The divisor of seq-mean-token-sum-norm: verl's default is the longest row of the batch."""
    longest = found.config.get("data.max_response_len", 512)
    factor = found.number(ACTOR + "loss_scale_factor", longest)
    if factor != longest:
        found.refuse(
            ACTOR + "loss_scale_factor",
            f"jaxrl divides by data.max_response_len={longest}; multiply learner.lr by "
            f"{longest}/{factor} with another optimizer than AdamW, or write an aggregation",
            "algorithm.aggregation",
        )


def kl(found: Migration) -> None:
    """The KL term: verl may have one in the loss and one in the reward, jaxrl has one."""
    if "algorithm.kl_coef" in found.config:  # of the distillation
        return
    in_loss = found.get(ACTOR + "use_kl_loss", False)
    in_reward = found.get("algorithm.use_kl_in_reward", False)
    if in_loss and in_reward:
        found.refuse(
            "algorithm.use_kl_in_reward",
            f"jaxrl has one KL term, and {ACTOR}use_kl_loss=True is a second one",
            "algorithm.kl_in",
        )
    if in_loss:
        found.config["algorithm.kl_in"] = "loss"
        found.carry(ACTOR + "kl_loss_coef", "algorithm.kl_coef")
        found.choose(ACTOR + "kl_loss_type", KLS, "algorithm.kl")
        if found.config.get("algorithm.kl", "").startswith("k3"):
            found.config["algorithm.kl_clamp"] = 10.0  # as verl clamps it
        found.carry(REF + "model.path", "algorithm.teacher")
    elif in_reward:
        found.config["algorithm.kl_in"] = "reward"
        found.carry("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef")
        found.choose("algorithm.kl_penalty", KLS, "algorithm.kl")
        if found.get("algorithm.kl_ctrl.type") == "adaptive":
            found.carry("algorithm.kl_ctrl.target_kl", "algorithm.kl_target")
            found.carry("algorithm.kl_ctrl.horizon", "algorithm.kl_horizon", float)
        found.carry(REF + "model.path", "algorithm.teacher")
    else:
        found.config["algorithm.kl_coef"] = 0.0


def distillation(found: Migration) -> None:
    """On-policy distillation by the log ratio to a teacher as the only reward."""
    if not found.get(DISTILLATION + "enabled", False):
        return
    teachers = distillation_teachers(found)
    section = DISTILLATION + "distillation_loss."
    mode = found.get(section + "loss_mode")
    only_teacher = found.get(section + "use_task_rewards", True) is False
    if teachers and mode == "k1" and only_teacher and found.get(section + "use_policy_gradient"):
        (_, first), *more = teachers
        found.config |= {
            "algorithm.advantage": "distill",
            "algorithm.teacher": first,
            "algorithm.more_teachers": tuple(f"{path}?source={key}" for key, path in more),
            "algorithm.kl": "k1",
            "algorithm.kl_in": "reward",
            "algorithm.kl_coef": 1.0,
        }
        found.carry(section + "loss_max_clamp", "algorithm.kl_clamp", float)
        reason = "the log ratio to the teacher is the only reward here"
        found.refuse_unless(section + "distillation_loss_coef", 1.0, reason, "algorithm.kl_coef")
        return
    found.refuse(
        DISTILLATION + "enabled",
        f"loss_mode={mode} with {len(teachers)} teacher{'s' * (len(teachers) != 1)} and "
        f"use_task_rewards={not only_teacher}: jaxrl distills by policy gradient of k1 and without "
        "other rewards (algorithm.advantage=distill)",
        "algorithm.advantage",
    )


def distillation_teachers(found: Migration) -> list[tuple[str, str]]:
    """(key, path) of the teachers, by the data_source of their rows; refuses other keys."""
    models = DISTILLATION + "teacher_models."
    names = [n.removesuffix(".model_path") for n in found.settings.values if n.startswith(models)]
    names = [name for name in dict.fromkeys(names) if found.given(f"{name}.model_path")]
    teachers = [(str(found.get(f"{n}.key", "")), str(found.get(f"{n}.model_path"))) for n in names]
    column = found.get(DISTILLATION + "teacher_key", "data_source")
    if len(teachers) == 1:
        return teachers
    if column != "data_source" or not all(key for key, _ in teachers):
        found.refuse(
            DISTILLATION + "teacher_key",
            f"several teachers are chosen by data_source, and each needs a key; given are "
            f"{column} and {teachers}",
            "algorithm.more_teachers",
        )
    elif teachers:
        found.note(
            DIFFERS,
            f"{names[0]}.key",
            "this teacher reads all rows whose data_source is the key of no other",
        )
    return teachers


def sampling(found: Migration) -> None:
    for name, ours in ((ROLLOUT + "top_k", "rollout"), (ROLLOUT + "val_kwargs.top_k", "eval")):
        k = found.number(name, -1)
        found.config[f"{ours}.sampling.top_k"] = k if 0 < k < 1_000_000 else 0  # -1, or all
    temperature = found.number(ROLLOUT + "val_kwargs.temperature", 0)
    found.config["eval.sampling.temperature"] = temperature
    if found.get(ROLLOUT + "val_kwargs.do_sample", False) is not True and temperature:
        found.note(
            DIFFERS,
            ROLLOUT + "val_kwargs.temperature",
            "validation samples, as in recent versions of verl; earlier ones are greedy without "
            "val_kwargs.do_sample=True: set eval.sampling.temperature=0 for that",
        )


def engine(found: Migration) -> None:
    """Devices of an engine replica. vLLM's expert groups are its tensor and data groups."""
    tensor = found.number(ROLLOUT + "tensor_model_parallel_size", 0)
    experts = found.number(ROLLOUT + "expert_parallel_size", 1)
    ranks = found.number(ROLLOUT + "data_parallel_size", 1)
    found.config["rollout.tensor"] = tensor
    if found.has(ROLLOUT + "quantization"):
        found.choose(ROLLOUT + "quantization", {"int8": "int8"}, "rollout.dtype")
    if experts > 1:
        found.config["rollout.expert"] = ranks
        found.note(
            DIFFERS,
            ROLLOUT + "expert_parallel_size",
            f"a replica has rollout.tensor x rollout.expert = {tensor or 1} x "
            f"{found.config['rollout.expert']} devices",
        )
    own, of_reference = found.config, sizes(found, (REF, *(REF + s for s in SECTIONS)))
    names = [REF + s + n for s in ("", *SECTIONS) for n in ("ulysses_sequence_parallel_size",)]
    if any(found.given(name) for name in [*names, REF + "megatron.tensor_model_parallel_size"]):
        for axis in ("sequence", "tensor"):
            if of_reference[axis] != own[f"mesh.{axis}"]:
                found.config[f"ref.{axis}"] = of_reference[axis]


def router_replay(found: Migration, prefixes: tuple[str, ...]) -> None:
    """The mode of the actor's backend; for R3 the engine needs no flag here.

    "disabled", verl's default, leaves the default of jaxrl.
    """
    modes = {"R2": "R2", "R3": "R3"}
    for name in (f"{prefix}router_replay.mode" for prefix in prefixes):
        if found.get(name, "disabled") != "disabled":
            found.choose(name, modes, "learner.router_replay")
    if found.config.get("learner.router_replay") == "R2":
        found.config["algorithm.old_logp"] = "recompute"
