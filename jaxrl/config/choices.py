"""Allowed names of the keys that are a choice. A test compares them with the code's own tables."""

DTYPES = ("auto", "float32", "bfloat16")
QUANTIZED_DTYPES = ("int8", "fp8")
MATMUL_DTYPES = ("auto", *QUANTIZED_DTYPES)  # of products in training
ROLLOUT_DTYPES = (*DTYPES, "int8")
ADAPTER_INITS = ("default", "pissa")
BASE_DTYPES = ("auto", "int8", "nf4")  # of frozen weights: below adapters, of a judge
KV_DTYPES = (*DTYPES, *QUANTIZED_DTYPES)
LAYERS = ("auto", "list", "stacked")
FREEZE_VISION = ("all", "tower", "none")  # what training leaves as it is
ROUTER_REPLAYS = ("auto", "off", "R2", "R3")
ATTENTIONS = ("auto", "blockwise", "reference", "splash", "triton", "cudnn")
ONE_RANGE = ("cudnn",)  # a query sees one range of keys, so segments share no prefixes
GATED_DELTAS = ("auto", "mosaic", "triton", "xla")
GROUPED_MATMULS = ("auto", "blocks", "ragged_dot", "reference", "triton")
PAGED_ATTENTIONS = ("auto", "columns", "reference", "ragged", "triton")
ON_ERRORS = ("exclude", "value")
# Columns of a dataset that have a meaning here; the first of a group that a row has is used.
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "instruction", "query", "input")
CONVERSATION_COLUMNS = ("messages", "conversations")  # with the turns that SFT learns
TRUTH_COLUMNS = ("reward_model", "answer", "ground_truth", "label", "solution", "target")
COMPLETION_COLUMNS = ("response", "completion", "output", "answer")
TEXT_COLUMN = "text"  # of SFT: plain text without turns
PAIR_COLUMNS = ("chosen", "rejected", "margin")
SYSTEM_COLUMNS = ("system", "system_prompt")
OTHER_COLUMNS = ("history", "tools", "data_source", "ability", "extra_info")
IMAGE_ERRORS = ("error", "drop")  # a row with an image that cannot be used
SPECIAL_TOKENS = ("error", "text", "token")  # what their text in a message means
TRUNCATIONS = ("error", "left", "right", "middle")
ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "grpo_passk",
    "grpo_batch_std",
    "max_rl",
    "gdpo",
    "flash_reinforce",
    "online_dpo",
    "rae",
    "hierarchical_grpo",
    "gigpo",
    "optimal_token_baseline",
    "gae",
    "distill",
)
# What a reward model trains on: pairs of answers, or a label of each step
SCORE_OBJECTIVES = ("pairs", "steps", "attributes")
ONE_LABEL = ("LABEL_0",)  # transformers' name of the only output of a classifier
STEP_REWARDS = ("", "min", "mean", "product", "last", "tokens")
TOKEN_REWARD_ADVANTAGES = ("reinforce_plus_plus", "gae", "optimal_token_baseline")
TURN_ADVANTAGES = ("gigpo",)  # one advantage per turn, compared with other samples of the prompt
# One advantage per token, from token rewards; all others give a response one advantage.
DISCOUNTED_ADVANTAGES = ("reinforce_plus_plus", "gae", "distill", *TURN_ADVANTAGES)
BASELINE_ADVANTAGES = ("optimal_token_baseline",)  # a baseline for each token, from the group
ROLE_ADVANTAGES = ("rae", "hierarchical_grpo")  # of an agent's conversations, each by its reward
# remax: equal without a KL in the reward
TOKEN_ADVANTAGES = (*DISCOUNTED_ADVANTAGES, *BASELINE_ADVANTAGES, "remax", *ROLE_ADVANTAGES)
BATCH_ADVANTAGES = ("flash_reinforce",)  # compares all samples of a step
GROUP_ADVANTAGES = (
    *(a for a in ADVANTAGES if a not in (*TOKEN_ADVANTAGES, *BATCH_ADVANTAGES)),
    *TURN_ADVANTAGES,
    *BASELINE_ADVANTAGES,
)
BRANCH_CREDITS = ("all", "last")
POLICY_LOSSES = (
    "ppo_clip",
    "dual_clip",
    "policy_gradient",
    "gspo",
    "gspo_token",
    "cispo",
    "gmpo",
    "sapo",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "vespo",
)
RESPONSE_LOSSES = ("gspo", "gmpo", "vespo")  # one weight for all tokens of a response
PENALIZED_LOSSES = ("dppo_tv", "dppo_kl", "dro")  # with log_ratio_penalty
AGGREGATIONS = (
    "token_mean",
    "token_sum",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
)
# Of algorithm.parts: terms of the tokens that the policy sampled, cross-entropy on given ones
KL_PARTS = ("kl", "distillation")
RESPONSE_PARTS = ("policy", *KL_PARTS, "entropy")
GIVEN_PARTS = ("observations", "demonstrations")
OBSERVATION_ROLES = ("tool", "user", "system")
PART_KINDS = (*RESPONSE_PARTS, *GIVEN_PARTS, "router")
MAX_PARTS = 31  # bits of an int32
PART_AGGREGATIONS = tuple(
    name for name in AGGREGATIONS if name != "token_sum"
)  # with a denominator
TEACHER_CONTEXTS = ("demonstration", "solution", "feedback")  # of self_distillation.context
SELF_TEACHERS = ("reference", "policy")
KLS = (
    *("k1", "abs", "k2", "k3", "k3_unbiased", "full", "jsd"),
    *("k1+", "abs+", "k2+", "k3+", "full+"),
)
TOP_K_FROM = ("teacher", "student", "union")
FULL_KLS = ("full", "jsd", "full+")  # over the whole vocabulary
KL_PLACES = ("loss", "reward")
KL_RATIO_LEVELS = ("token", "response")
CORRECTIONS = ("none", "token_tis", "seq_tis", "icepop", "seq_icepop")
MASKING_CORRECTIONS = ("icepop", "seq_icepop")  # weight 0 outside of two bounds
# verl's names: what is summed up over a response, and the KL estimate of a token
REJECTION_SCOPES = ("all", "policy_loss")
RATIO_REJECTIONS = ("token_k1", "seq_sum_k1", "seq_mean_k1")  # with two bounds of a ratio
REJECTIONS = (
    "none",
    *RATIO_REJECTIONS,
    "token_k2",
    "token_k3",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_mean_binary_kl",
    "seq_max_k2",
    "seq_max_k3",
)
OLD_LOGPS = ("auto", "rollout", "recompute")
OFFLOADS = ("optimizer", "gradients", "policy", "reference", "critic", "reward_model", "judge")
REMATS = ("full", "offload", "attention", "mlp", "dots", "none")
REMATS_OF_1F1B = ("full", "attention", "mlp", "dots")  # the same activations of every layer
SHARED_PREFIXES = ("auto", "on", "off")
SEQUENCE_PARALLELS = ("ulysses", "ring")
PIPELINE_SCHEDULES = ("gpipe", "1f1b")
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
OPTIMIZERS_WITH_MOMENTS = ("adamw", "lion", "muon")  # that moment_dtype applies to
MOMENT_DTYPES = ("float32", "bfloat16", "int8")
LR_SCHEDULES = ("constant", "linear", "cosine")
PREFERENCE_LOSSES = (
    "dpo",
    "dpo_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "kto",
    "bco",
    "apo_zero_unpaired",
    "simpo",
    "cpo",
    "cpo_hinge",
    "cpo_ipo",
    "orpo",
)
PREFERENCE_TERMS = (*PREFERENCE_LOSSES, "sft")  # of a sum of losses
CPO_LOSSES = ("cpo", "cpo_hinge", "cpo_ipo")
REFERENCE_FREE_LOSSES = ("simpo", *CPO_LOSSES, "orpo", "sft")
LABELLED_LOSSES = ("kto", "bco", "apo_zero_unpaired")  # of answers with a label, which are no pairs
MEAN_LOSSES = ("dpo_norm", "simpo", "orpo")  # of means over the tokens of an answer
IPO_LOSSES = ("ipo", "cpo_ipo")  # of sums or means
SMOOTHED_LOSSES = ("dpo", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo")
# Those of a difference of log ratios, for which f-DPO's derivation holds
F_DIVERGENCE_LOSSES = ("dpo", "dpo_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
IPO_REDUCTIONS = ("sum", "mean")
BEST_MODES = ("max", "min")
ENVIRONMENTS = (
    "calculator",
    "calculator_tool",
    "functions",
    "guess_number",
    "gymnasium",
    "mcp",
    "openenv",
    "retry",
)
AGENTS = ("harbor", "nemo_gym")
TOOL_FORMATS = (
    "auto",
    "hermes",
    "llama3",
    "mistral",
    "deepseek",
    "qwen3_coder",
    "harmony",
    "glm",
    "kimi",
    "gemma4",
)
REWARDS = (
    "by_source",
    "code",
    "environment",
    "exact",
    "format",
    "gsm8k",
    "judge",
    "judge_pairs",
    "last_number",
    "math",
    "reasoning_gym",
    "remote",
)
SCHEDULES = ("sync", "partial", "async")
OPPONENTS = ("group", "reference")
JUDGE_WEIGHTS = ("server", "policy", "reference", "checkpoint")
GROUP_ORDERS = ("prompt", "arrival")
WEIGHT_TRANSFERS = ("full", "delta")
ENGINES = ("auto", "process", "mesh")
ROLLOUT_LAYOUTS = ("replicas", "training")
STARTS = ("auto", "on", "off")
LOGGERS = (
    "console",
    "jsonl",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "clearml",
    "trackio",
)
