"""Keys of the rewards `judge` and `judge_pairs`: a language model that judges by a rubric."""

import dataclasses

from jaxrl.config.choices import BASE_DTYPES, JUDGE_WEIGHTS, OPPONENTS
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    url: str = key(
        "",
        "Base URL of the OpenAI-compatible server of the judge, such as "
        "'http://judge:8000/v1'; '' = no judge",
    )
    weights: str = key(
        "server",
        "The judge: server = the model at url; on the run's own engine: policy = the current "
        "weights, reference = the initial ones, which a KL or adapters keep; checkpoint = the "
        "model at path, with an engine on the run's devices",
        choices=JUDGE_WEIGHTS,
    )
    path: str = key(
        "",
        "Folder or hub id of the model of weights = checkpoint, which may be of another family "
        "and have another tokenizer than the policy",
    )
    dtype: str = key(
        "auto",
        "weights = checkpoint: storage of the matrices of its layers: auto (model.dtype), int8 "
        "with a scale per output, or nf4",
        choices=BASE_DTYPES,
    )
    chat_template: str = key(
        "", "weights = checkpoint: as data.chat_template, of the judge; '' = the checkpoint's"
    )
    max_num_seqs: int = key(
        16, "weights = checkpoint: maximum verdicts decoded together by one engine replica", ge=1
    )
    n_pages: int = key(
        0,
        "weights = checkpoint: KV pages per replica of its engine; 0 = those of max_num_seqs "
        "verdicts of maximum length",
        ge=0,
    )
    max_prompt_len: int = key(
        0,
        "Maximum length in tokens of the rubric, conversation and responses that a judge on the "
        "run's devices reads; 0 with a server",
        ge=0,
    )
    model: str = key("", "Name of the judge's model at the server")
    rubric: str = key("", "YAML or JSON file with the criteria, their weights and scales")
    reference: str = key(
        "",
        "Column of the data with a reference answer that the judge sees, 'answer' for the ground "
        "truth; '' = none",
    )
    thinking: bool = key(
        False, "Show the judge the whole response; False = only what follows its last </think>"
    )
    explain: bool = key(
        True, "Ask for an explanation before the scores; False = verdicts of a few tokens"
    )
    temperature: float = key(0.0, "Sampling temperature of the judge", ge=0)
    max_verdict_len: int = key(1024, "Maximum length of a verdict in tokens", ge=1)
    timeout_s: float = key(60.0, "Seconds that one request may take", gt=0)
    attempts: int = key(3, "Requests per response until there is a valid verdict", ge=1, le=10)
    concurrency: int = key(16, "Requests in flight in each of reward.workers processes", ge=1)
    api_key_env: str = key("", "Environment variable with the server's API key; '' = no key")
    cache: bool = key(
        True, "Keep valid verdicts in judge/ of the run folder, and use them for equal requests"
    )
    prompt_price: float = key(
        0.0, "Price of a million prompt tokens, for the metric reward/judge/cost", ge=0
    )
    completion_price: float = key(0.0, "Price of a million completion tokens", ge=0)
    against: str = key(
        "group",
        "Opponents in judge_pairs: group = other responses to the prompt, reference = the answer "
        "in the column `reference`",
        choices=OPPONENTS,
    )
    opponents: int = key(
        0,
        "Responses of the group with which judge_pairs compares each response, an even number, "
        "drawn by the texts; 0 = all others",
        ge=0,
    )
    swap: bool = key(
        True,
        "Compare each pair in both orders and take the mean, which cancels a preference of the "
        "judge for a position",
    )

    @property
    def is_local(self) -> bool:
        """Whether the judge is on the run's devices."""
        return self.weights != "server"

    @property
    def on_own_engine(self) -> bool:
        """Whether the engine of the rollouts is the judge."""
        return self.weights in ("policy", "reference")

    @property
    def max_len(self) -> int:
        """Tokens of a request and its verdict together, on the run's devices."""
        return self.max_prompt_len + self.max_verdict_len
