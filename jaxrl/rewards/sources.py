"""The built-in reward of each data_source, for the reward by_source."""

_BY_PREFIX = {
    "addition/": "last_number",
    "subtraction/": "last_number",
    "multiplication/": "last_number",
    "chain_sum/": "last_number",
    "reasoning_gym/": "reasoning_gym",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "HuggingFaceH4/aime_2024": "math",
    "math": "math",
    "aime": "math",
    "numina": "math",
    "apps": "code",
    "codecontests": "code",
    "codeforces": "code",
    "taco": "code",
    "livecodebench": "code",
    "openai/openai_humaneval": "code",
    "mbpp": "code",
}


def reward_of(data_source: str) -> str:
    """The reward of the first table entry that is a prefix of `data_source`.

    Raises ValueError if there is none.
    """
    for prefix, reward in _BY_PREFIX.items():
        if data_source.startswith(prefix):
            return reward
    raise ValueError(
        f"by_source has no reward for data_source {data_source!r}; set reward.functions to a "
        f"reward for it. by_source has {', '.join(_BY_PREFIX)}"
    )
