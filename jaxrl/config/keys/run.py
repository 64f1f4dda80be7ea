"""A whole run: its own keys, checkpoints, logs, and one field per section."""

import dataclasses
import pathlib

from jaxrl.config.choices import BEST_MODES, LOGGERS, ONE_RANGE
from jaxrl.config.keys.algorithm import AlgorithmConfig
from jaxrl.config.keys.data import DataConfig, EnvConfig, RewardConfig, RewardModelConfig
from jaxrl.config.keys.devices import DistributedConfig, MeshConfig, ModelConfig, ScoringConfig
from jaxrl.config.keys.learner import CriticConfig, LearnerConfig, PreferenceConfig
from jaxrl.config.keys.lora import LoRAConfig
from jaxrl.config.keys.rollout import EvalConfig, RolloutConfig, SamplingConfig
from jaxrl.config.keys.schedule import ScheduleConfig
from jaxrl.config.keys.self_distillation import SelfDistillationConfig
from jaxrl.config.keys.teacher_endpoint import TeacherEndpointConfig
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(0, "Steps between checkpoints; 0 = only at the end and on interruption", ge=0)
    keep: int = key(2, "Number of newest checkpoints kept", ge=1)
    best_metric: str = key("", "Validation metric whose best checkpoint is also kept; '' = none")
    best_mode: str = key(
        "max", "Whether the largest or the smallest best_metric is best", choices=BEST_MODES
    )
    export_hf: bool = key(True, "Export the final weights as a Hugging Face folder")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    loggers: tuple[str, ...] = key(
        ("console", "jsonl", "tensorboard"), "Destinations of metrics", choices=LOGGERS
    )
    project: str = key("jaxrl", "Project name of the trackers; the experiment of mlflow")
    samples_every: int = key(5, "Steps between completions printed on the console; 0 = never", ge=0)
    samples: int = key(2, "Completions printed each time", ge=0)
    trajectories: int = key(
        0,
        "Samples per step whose tokens, turns and times samples.jsonl also has, for the report's "
        "trajectory viewer: the lowest rewards, the largest logprob differences, the longest",
        ge=0,
    )
    prometheus_port: int = key(
        0, "Port that serves the newest metrics to Prometheus at /metrics; 0 = off", ge=0, le=65535
    )
    prometheus_host: str = key(
        "127.0.0.1", "Address at which they are served; '0.0.0.0' = all interfaces"
    )


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    steps: tuple[int, ...] = key(
        (), "Steps whose JAX trace is written to run_dir/profile; the first step is 1", ge=1
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    name: str = key("run", "Name of the run")
    run_dir: str = key("", "Run folder; '' = runs/<name>")
    resume: bool = key(
        False, "Fail if there is no checkpoint. An existing checkpoint is always resumed"
    )
    seed: int = key(0, "Random seed of sampling, shuffling and initialization", ge=0)
    total_steps: int = key(0, "Training steps; 0 = total_epochs over the data", ge=0)
    total_epochs: int = key(1, "Passes over the training prompts, used if total_steps is 0", ge=1)
    assert_no_recompile: bool = key(
        True, "Stop and print the shapes if a program compiles after warm-up"
    )
    plan_check: bool = key(
        True,
        "Compile all programs before loading anything, stop if they do not fit device memory "
        "together, and size the KV pool from what they leave. Only on devices that report their "
        "memory",
    )
    check_finite: bool = key(True, "Stop and save the batch if loss or gradient is not finite")
    compilation_cache: str = key(
        "", "Folder of JAX's persistent compilation cache; '' = ~/.cache/jaxrl/xla"
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    lora: LoRAConfig = dataclasses.field(default_factory=LoRAConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    score: ScoringConfig = dataclasses.field(default_factory=ScoringConfig)
    ref: ScoringConfig = dataclasses.field(default_factory=ScoringConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    self_distillation: SelfDistillationConfig = dataclasses.field(
        default_factory=SelfDistillationConfig
    )
    teacher_endpoint: TeacherEndpointConfig = dataclasses.field(
        default_factory=TeacherEndpointConfig
    )
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    env: EnvConfig = dataclasses.field(default_factory=EnvConfig)
    reward_model: RewardModelConfig = dataclasses.field(default_factory=RewardModelConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)

    @property
    def run_path(self) -> pathlib.Path:
        return pathlib.Path(self.run_dir or f"runs/{self.name}")

    @property
    def engine_len(self) -> int:
        """Maximum length of a sequence in the engine: rollouts, and verdicts of a judge there."""
        judge = self.reward.judge
        return max(self.data.max_len, judge.max_len if judge.on_own_engine else 0)

    @property
    def sequences_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.n

    @property
    def mini_batch_prompts(self) -> int:
        """Prompts of one optimizer step."""
        return self.learner.mini_batch_prompts or self.data.prompts_per_step

    @property
    def mini_batches_per_step(self) -> int:
        return self.data.prompts_per_step // self.mini_batch_prompts

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one training step."""
        return self.mini_batches_per_step * self.learner.epochs

    @property
    def shares_prefixes(self) -> bool:
        """Whether the common tokens of sequences are computed once (learner.shared_prefixes)."""
        return self.learner.shared_prefixes != "off" and self.model.attention not in ONE_RANGE

    @property
    def max_teacher_prompt_len(self) -> int:
        """Tokens that the prompt of a self-distillation teacher may have: a row has a response."""
        room = max(self.learner.row_lens) - self.data.max_response_len
        return self.self_distillation.max_prompt_len or room

    @property
    def has_critic(self) -> bool:
        """Whether tokens have values, from a separate critic or the policy's value head."""
        return self.algorithm.advantage == "gae"

    @property
    def critic_run(self) -> "RunConfig":
        """The run with the model, learner, aggregation and pipeline stages of a separate critic."""
        critic, learner = self.critic, self.learner
        algorithm = dataclasses.replace(self.algorithm, parts=(), source_parts=())
        if critic.aggregation != "auto":
            algorithm = dataclasses.replace(algorithm, aggregation=critic.aggregation)
        return dataclasses.replace(
            self,
            algorithm=algorithm,
            model=dataclasses.replace(self.model, path=critic.path or self.model.path),
            mesh=dataclasses.replace(self.mesh, stage=critic.mesh.stage or self.mesh.stage),
            learner=dataclasses.replace(
                learner,
                lr=critic.lr,
                weight_decay=critic.weight_decay,
                epochs=critic.epochs or learner.epochs,
                remat=critic.remat or learner.remat,
                token_budget=critic.token_budget or learner.token_budget,
                router_aux_coef=0.0,
                router_bias_rate=0.0,
                router_replay="off",
                ema=0.0,
            ),
        )

    @property
    def reward_model_run(self) -> "RunConfig":
        """The run with the model, batches and pipeline stages of the reward model."""
        reward_model = self.reward_model
        learner = dataclasses.replace(self.learner, matmul_dtype="auto")
        if reward_model.token_budget:
            learner = dataclasses.replace(
                learner, token_budget=reward_model.token_budget, buckets=()
            )
        stage = reward_model.mesh.stage or self.mesh.stage
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, path=reward_model.path),
            mesh=dataclasses.replace(self.mesh, stage=stage),
            learner=learner,
        )

    @property
    def judge_run(self) -> "RunConfig":
        """The run with the model, lengths and engine of a judge from reward.judge.path.

        Its rollout is the judging; it has no adapters, and no judge.
        """
        judge = self.reward.judge
        pages_per_verdict = -(-judge.max_len // self.rollout.page_len)
        rollout = dataclasses.replace(
            self.rollout,
            dtype="auto",
            sampling=SamplingConfig(),
            max_num_seqs=judge.max_num_seqs,
            n_pages=judge.n_pages or judge.max_num_seqs * pages_per_verdict,
            spec_tokens=0,
        )
        data = dataclasses.replace(
            self.data,
            max_prompt_len=judge.max_prompt_len,
            max_response_len=judge.max_verdict_len,
        )
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, path=judge.path),
            lora=LoRAConfig(base_dtype=judge.dtype),
            data=data,
            rollout=rollout,
            algorithm=AlgorithmConfig(),
            learner=dataclasses.replace(self.learner, router_replay="off"),
            critic=CriticConfig(),
            reward=RewardConfig(),
        )

    def n_steps(self, n_prompts: int) -> int:
        """Training steps over `n_prompts` training prompts."""
        return self.total_steps or n_prompts // self.data.prompts_per_step * self.total_epochs
