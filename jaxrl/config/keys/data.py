"""Keys of prompts, rewards and environments."""

import dataclasses
import datetime
from collections.abc import Mapping

from jaxrl.config.choices import (
    IMAGE_ERRORS,
    ON_ERRORS,
    ONE_LABEL,
    SCORE_OBJECTIVES,
    SPECIAL_TOKENS,
    STEP_REWARDS,
    TOOL_FORMATS,
    TRUNCATIONS,
)
from jaxrl.config.keys.devices import RoleConfig
from jaxrl.config.keys.judge import JudgeConfig
from jaxrl.config.schema import Value, key


@dataclasses.dataclass(frozen=True)
class DataConfig:
    train: tuple[str, ...] = key(
        (),
        "Training prompts: parquet or JSONL files, dataset folders, hub ids such as "
        "'hf:org/name@revision?split=train&subset=main', or generated tasks such as "
        "'task:addition?digits=1,2'",
    )
    val: tuple[str, ...] = key((), "Validation prompts, in the same forms; () = no validation")
    demonstrations: tuple[str, ...] = key(
        (),
        "Demonstrations that an RL run trains on as well, with a part 'demonstrations' in "
        "algorithm.parts: sources as those of data.train, with the rows of SFT",
    )
    demonstrations_per_step: int = key(
        0, "Demonstrations per training step (global), divided over its updates", ge=0
    )
    columns: tuple[str, ...] = key(
        (),
        "Names of columns as 'name:column', such as 'prompt:input', 'answer:label': the data's "
        "column is read as that name; a dotted column is a path; of entries with one name the "
        "first that the row has counts; () = the usual names",
    )
    teacher_logprobs: str = key(
        "",
        "SFT: column with a teacher's most likely tokens at every learned token, which the loss "
        "compares (algorithm.kl_top_k) in place of the likelihood; '' = none",
    )
    prompts_per_step: int = key(64, "Prompts per training step (global)", ge=1)
    val_max_samples: int = key(
        0,
        "Maximum number of validation rows, evenly spaced over all rows of data.val, so the same "
        "in every run; 0 = all",
        ge=0,
    )
    max_prompt_len: int = key(
        512, "Maximum prompt length in tokens, including the chat template", ge=1
    )
    max_response_len: int = key(
        512, "Maximum response length in tokens, including the end-of-sequence token", ge=1
    )
    filter_overlong_prompts: bool = key(
        True, "Drop prompts longer than max_prompt_len before training"
    )
    truncation: str = key(
        "error",
        "How to handle an overlong prompt that was not filtered: fail, or truncate it at that side",
        choices=TRUNCATIONS,
    )
    shuffle: bool = key(True, "Reshuffle the training prompts in every epoch")
    weights: tuple[float, ...] = key(
        (),
        "Shares of the sources of data.train in every step, one weight per source; () = all rows "
        "of all sources once per epoch",
        ge=0,
    )
    final_weights: tuple[float, ...] = key(
        (), "Curriculum: the weights move from data.weights to these; () = constant", ge=0
    )
    weights_ramp: int = key(
        0, "Steps of prompts over which the weights move linearly to data.final_weights", ge=0
    )
    streaming: bool = key(
        False,
        "Read the rows of data.train from disk during the run instead of loading all at the start; "
        "needs total_steps",
    )
    shuffle_buffer: int = key(
        10_000,
        "Rows that are shuffled together with streaming, in addition to the order of the blocks of "
        "the files",
        ge=2,
    )
    skip_solved: float = key(
        0.0,
        "Curriculum: skip prompts whose samples have reached this mean reward, until too few for a "
        "step remain; 0 = off",
        ge=0,
    )
    pool_weights: tuple[float, ...] = key(
        (),
        "Curriculum: shares of hard, right and easy prompts in every step, such as (0.1, 0.8, "
        "0.1), by the running mean reward of each prompt; () = off",
        ge=0,
    )
    pool_edges: tuple[float, ...] = key(
        (0.2, 0.8),
        "Mean rewards below and above which prompts are hard and easy, with data.pool_weights",
    )
    pool_memory: float = key(
        0.5,
        "Weight of the earlier mean rewards of a prompt in its running one; 0 = only the last",
        ge=0,
        le=1,
    )
    progress: float = key(
        0.0,
        "With data.weights: share of the prompts that goes to the sources in proportion to their "
        "learning progress, the absolute change of their mean reward; 0 = off",
        ge=0,
        le=1,
    )
    progress_memory: tuple[float, ...] = key(
        (0.5, 0.9),
        "Weights of the earlier steps in the fast and the slow running mean reward of a source, "
        "whose difference is its learning progress; data.gate reads the slow one",
        ge=0,
        le=1,
    )
    gate: float = key(
        0.0,
        "With data.weights: a source is admitted when the running mean rewards of all sources "
        "before it reach this value; 0 = all from the start",
        ge=0,
    )
    gate_prompts: int = key(
        32, "Prompts of each admitted source before data.gate admits the next one", ge=1
    )
    length_stages: tuple[int, ...] = key(
        (),
        "Maximum response lengths of the first stages of training, in tokens and rising; the last "
        "stage has max_response_len; () = no stages",
        ge=1,
    )
    length_steps: int = key(1, "Steps of a stage at least, with data.length_stages", ge=1)
    length_truncated: float = key(
        0.0,
        "Running share of truncated responses that a stage reaches before it ends; 0 = any",
        ge=0,
        le=1,
    )
    length_reward: float = key(
        0.0, "Running mean reward that a stage reaches before it ends; 0 = any"
    )
    length_memory: float = key(
        0.8, "Weight of the earlier steps in these running means; 0 = only the last", ge=0, le=1
    )
    system_prompt: str = key(
        "", "System prompt added to every conversation that has none; '' = none"
    )
    rendered_prompts: bool = key(
        False,
        "Prompts that are text are already rendered: they are used as they are, without the chat "
        "template",
    )
    special_tokens: str = key(
        "error",
        "Text of a special token inside a message, such as '<|im_end|>': error = the row is "
        "refused, text = it is tokenized as ordinary text, token = it is the special token",
        choices=SPECIAL_TOKENS,
    )
    chat_template: str = key(
        "",
        "Chat template used instead of the checkpoint's: the path of a Jinja file, or a built-in "
        "one, such as 'chatml'; '' = the checkpoint's",
    )
    template_kwargs: Mapping[str, Value] = key(
        {},
        "Arguments of the chat template, by name: data.template_kwargs.enable_thinking=False",
    )
    today: str = key(
        "",
        "Date that chat templates print (strftime_now), YYYY-MM-DD; '' = the date of the run's "
        "first start, which resumed starts keep",
    )

    images: bool = key(
        False,
        "Read the images of rows, for a model with a vision tower; False = rows with images are "
        "refused",
    )
    image_root: str = key(
        "",
        "Folder of the image files that rows name: only files below it are read; '' = rows have "
        "their images as bytes",
    )
    image_kwargs: Mapping[str, Value] = key(
        {},
        "Settings of the model's image processor that replace those of its folder, by name: "
        "data.image_kwargs.max_pixels=401408 (Qwen), max_soft_tokens=140 (Gemma 4)",
    )
    max_image_pixels: int = key(
        64_000_000,
        "Largest image that is decoded, in pixels before it is resized for the model",
        ge=1,
        le=89_478_485,
    )
    on_error: str = key(
        "error",
        "A row with an image that is missing, damaged, too large, animated or of no size: error = "
        "the run stops and names it, drop = the row is dropped and counted",
        choices=IMAGE_ERRORS,
    )

    @property
    def has_curriculum(self) -> bool:
        """Whether the prompts of later steps depend on the mean rewards of earlier ones."""
        return bool(self.skip_solved or self.pool_weights or self.progress or self.gate)

    @property
    def date(self) -> datetime.date | None:
        """The date of data.today; None if the key is not set."""
        return datetime.date.fromisoformat(self.today) if self.today else None

    @property
    def max_len(self) -> int:
        """Maximum length of prompt and response together, in tokens."""
        return self.max_prompt_len + self.max_response_len


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = key(
        ("math",),
        "Reward functions: names in jaxrl/rewards or 'package.module:function', with options after "
        "a '?'; the reward is their weighted sum",
    )
    weights: tuple[float, ...] = key((), "Weight of each function in the sum; () = 1 each")
    workers: int = key(2, "Worker processes that run the functions", ge=1)
    timeout_s: float = key(
        10.0,
        "Seconds that one call may take before its worker is killed; for a single function "
        "'name?timeout_s=60'",
        gt=0,
    )
    normalize: bool = key(
        False,
        "Normalize rewards to (reward - mean) / standard deviation, over all rewards of the run so "
        "far",
    )
    clip: tuple[float, ...] = key(
        (), "(low, high) range to which rewards are clipped, after normalize; () = off"
    )
    overlong_buffer: int = key(
        0,
        "DAPO soft overlong penalty: the reward falls linearly over this many tokens before "
        "data.max_response_len; 0 = off",
        ge=0,
    )
    overlong_penalty: float = key(
        1.0,
        "Reward subtracted from a response of data.max_response_len tokens, with overlong_buffer",
        ge=0,
    )
    length_penalty: float = key(
        0.0,
        "Reward subtracted from the longest response of a prompt that is always solved; in "
        "proportion to the length, relative to the longest of the prompt, and to its mean reward; "
        "0 = off",
        ge=0,
    )
    truncated_coef: float = key(
        1.0,
        "Stop-properly penalty: factor of the reward of a response that is truncated at "
        "data.max_response_len, from 0 to 1; below 0 it replaces the reward; 1 = off",
        le=1,
    )
    on_error: str = key(
        "exclude",
        "Training on a response whose reward function or environment failed: exclude = it leaves "
        "its group, the statistics and the update; value = its reward is error_value",
        choices=ON_ERRORS,
    )
    error_value: float = key(
        0.0,
        "Reward of a response whose function raised, timed out or returned no finite number, in "
        "validation and with on_error=value",
    )
    max_error_fraction: float = key(
        0.5,
        "The run is saved and stops with an error if the reward function or the environment fails "
        "for a larger fraction of the responses of a step or validation; 1 = never",
        ge=0,
        le=1,
    )
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    name: str = key(
        "",
        "Environment for multi-turn rollouts: a name in jaxrl/environments or "
        "'package.module:Class', with options after a '?'; '' = none, single-turn responses",
    )
    agent: str = key(
        "",
        "Agent for multi-turn rollouts, instead of `name`: a function (base_url, api_key, task) "
        "that calls the model over an OpenAI-compatible endpoint of the run, as "
        "'path/to/file.py:function' or 'package.module:function', or 'harbor' or 'nemo_gym', with "
        "options after a '?'; '' = none",
    )
    command: str = key(
        "",
        "Agent for multi-turn rollouts, instead of `agent`: a program and its arguments, run once "
        "per episode without a shell; {base_url}, {api_key}, {prompt}, {task}, {seed} and {folder} "
        "are replaced; '' = none",
    )
    verifiers: str = key(
        "",
        "Agent for multi-turn rollouts, instead of `agent`: the id of an installed taskset of "
        "verifiers, with its options after a '?', whose tasks data.train='verifiers:ID' has; '' = "
        "none",
    )
    max_turns: int = key(8, "Maximum model turns per episode", ge=1)
    workers: int = key(
        64,
        "Concurrent episodes per process of the run; each uses one worker process",
        ge=1,
    )
    timeout_s: float = key(
        30.0,
        "Seconds that the environment may take for a reset or a step, or an agent between the "
        "answer to a request and its next request, before the episode is ended",
        gt=0,
    )
    episode_timeout_s: float = key(
        0.0,
        "Seconds that an episode of an agent may take in total, with the turns of the model; 0 = "
        "no limit other than timeout_s and max_turns",
        ge=0,
    )
    tool_format: str = key(
        "auto",
        "Format of tool calls in environments with tools; 'auto' = the chat template's format",
        choices=TOOL_FORMATS,
    )
    max_calls_per_turn: int = key(
        8, "Tool calls of one turn that are run; further ones get an error as their result", ge=1
    )
    tool_timeout_s: float = key(
        10.0, "Seconds that a tool may take before its call gets an error as its result", gt=0
    )
    max_result_chars: int = key(
        4096, "Characters of a tool's result that the model reads; the rest is cut off", ge=1
    )

    @property
    def program(self) -> str:
        """The agent, a function, command or taskset; "" for environments and single turns."""
        return self.agent or self.command or self.verifiers

    @property
    def kinds(self) -> dict[str, str]:
        """The keys that choose episodes, with their values."""
        return {
            "env.name": self.name,
            "env.agent": self.agent,
            "env.command": self.command,
            "env.verifiers": self.verifiers,
        }

    @property
    def episodes(self) -> str:
        """The environment or the agent; "" for single-turn rollouts."""
        return self.name or self.program


@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    """A model that scores responses, in addition to reward.functions."""

    path: str = key(
        "",
        "Sequence classifier, also a process reward model, in any form that model.path accepts; "
        "'' = none",
    )
    weight: float = key(1.0, "Weight of the reward model's score in the total reward")
    label_weights: tuple[float, ...] = key(
        (),
        "Weights of the labels of a classifier of several, in its order: the score is their "
        "weighted sum; () = it has one label",
    )
    chat_template: str = key(
        "",
        "Chat template for the conversations that it scores, as data.chat_template; '' = that of "
        "its tokenizer",
    )
    objective: str = key(
        "pairs",
        "jaxrl.reward_model: what is learned; pairs = chosen answers score higher than rejected "
        "ones, steps = the label of each step of an answer (process reward model), attributes = "
        "numbers that rate an answer, such as its helpfulness",
        choices=SCORE_OBJECTIVES,
    )
    attributes: tuple[str, ...] = key(
        (),
        "Objective attributes: the columns of the ratings, each a label of the classifier; a row "
        "may have only some of them",
    )
    step_separator: str = key(
        "\n", "Text that ends a step of an answer, for the objective steps and for step_reward"
    )
    step_reward: str = key(
        "",
        "Process reward model in RL: its score of a response, from the probabilities that the "
        "steps are right; tokens = each is a reward at the last token of its step; '' = one score "
        "at the end",
        choices=STEP_REWARDS,
    )
    token_budget: int = key(
        0,
        "Tokens per batch and data-parallel rank; also the longest conversation that it can score; "
        "0 = as the learner",
        ge=0,
    )
    mesh: RoleConfig = dataclasses.field(default_factory=RoleConfig)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the outputs of the trained classifier."""
        return self.attributes or ONE_LABEL
