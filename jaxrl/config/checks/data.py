"""Rules between the keys of data."""

import datetime

from jaxrl.config.choices import (
    COMPLETION_COLUMNS,
    CONVERSATION_COLUMNS,
    OTHER_COLUMNS,
    PAIR_COLUMNS,
    PROMPT_COLUMNS,
    SYSTEM_COLUMNS,
    TEXT_COLUMN,
    TRUTH_COLUMNS,
)
from jaxrl.config.keys import DataConfig, RunConfig
from jaxrl.config.schema import nearest

_COLUMNS = (
    *PROMPT_COLUMNS,
    *CONVERSATION_COLUMNS,
    *TRUTH_COLUMNS,
    *COMPLETION_COLUMNS,
    *PAIR_COLUMNS,
    *SYSTEM_COLUMNS,
    TEXT_COLUMN,
    *OTHER_COLUMNS,
)


def data_errors(data: DataConfig) -> list[str]:
    """One line per broken rule, with the values and what to set instead."""
    return [
        *_column_errors(data),
        *_date_errors(data),
        *_weight_errors(data),
        *_pool_errors(data),
        *_curriculum_errors(data),
        *_streaming_errors(data),
        *_rendered_errors(data),
    ]


def _weight_errors(data: DataConfig) -> list[str]:
    errors = []
    for name in ("weights", "final_weights"):
        weights = getattr(data, name)
        if weights and (len(weights) != len(data.train) or not sum(weights) > 0):
            errors.append(
                f"data.{name}={weights} does not fit the {len(data.train)} sources of data.train; "
                "give one weight per source, one of them above 0"
            )
    if bool(data.final_weights) != bool(data.weights_ramp) or (
        data.final_weights and not data.weights
    ):
        errors.append(
            f"data.final_weights={data.final_weights} with data.weights={data.weights} and "
            f"data.weights_ramp={data.weights_ramp}; set all three, or none but data.weights"
        )
    return errors


def _pool_errors(data: DataConfig) -> list[str]:
    weights, edges, default = data.pool_weights, data.pool_edges, DataConfig()
    if not weights:
        changed = edges != default.pool_edges or data.pool_memory != default.pool_memory
        return [
            f"data.pool_edges={edges}, data.pool_memory={data.pool_memory} but "
            "data.pool_weights=(); set it, for example to (0.1, 0.8, 0.1), or omit these keys"
        ] * changed
    errors = []
    if len(weights) != 3 or not sum(weights) > 0:
        errors.append(
            f"data.pool_weights={weights} are not the shares of hard, right and easy prompts; set "
            "three numbers, for example (0.1, 0.8, 0.1)"
        )
    if len(edges) != 2 or not edges[0] < edges[1]:
        errors.append(
            f"data.pool_edges={edges} is no range of mean rewards; set (low, high), for example "
            "(0.2, 0.8)"
        )
    others = {
        "weights": data.weights,
        "streaming": data.streaming,
        "skip_solved": data.skip_solved,
    }
    errors += [
        f"data.pool_weights={weights} with data.{name}={value!r}; set one of them: pools order all "
        "prompts of all sources together, and leave out easy ones with the weight 0"
        for name, value in others.items()
        if value
    ]
    return errors


def _curriculum_errors(data: DataConfig) -> list[str]:
    """Rules of shares that follow the mean rewards of sources."""
    default, memory = DataConfig(), data.progress_memory
    used = {"progress": data.progress, "gate": data.gate}
    shown = ", ".join(f"data.{name}={value}" for name, value in used.items() if value)
    if not shown:
        changed = memory != default.progress_memory or data.gate_prompts != default.gate_prompts
        return [
            f"data.progress_memory={memory}, data.gate_prompts={data.gate_prompts} but "
            "data.progress=0 and data.gate=0; set one of them, or omit these keys"
        ] * changed
    errors = []
    if len(memory) != 2 or not memory[0] < memory[1] < 1:
        errors.append(
            f"data.progress_memory={memory} are no memories of a fast and a slow mean; set two "
            "numbers below 1, the smaller one first, for example (0.5, 0.9)"
        )
    if len(data.weights) < 2:
        errors.append(
            f"{shown} but data.weights={data.weights}; give one weight for each of at least two "
            "sources of data.train, for example (1, 1)"
        )
    elif data.gate and not data.weights[0]:
        errors.append(
            f"data.gate={data.gate} begins with the first source of data.train, whose weight in "
            f"data.weights={data.weights} is 0; order the sources by difficulty, easiest first"
        )
    if data.gate and data.final_weights:
        errors.append(
            f"data.gate={data.gate} with data.final_weights={data.final_weights}; set one of them"
        )
    if data.streaming:
        errors.append(f"{shown} needs the prompts in memory; set data.streaming=False")
    return errors


def length_errors(run: RunConfig) -> list[str]:
    """Rules of staged lengths."""
    data, stages = run.data, run.data.length_stages
    default = DataConfig()
    names = ("length_steps", "length_truncated", "length_reward", "length_memory")
    if not stages:
        return [
            f"data.{name}={getattr(data, name)} but data.length_stages=(); set it, for example to "
            f"({data.max_response_len // 2},), or omit the key"
            for name in names
            if getattr(data, name) != getattr(default, name)
        ]
    errors = []
    lens = [*stages, data.max_response_len]
    if sorted(set(lens)) != lens:
        errors.append(
            f"data.length_stages={stages} and data.max_response_len={data.max_response_len} do not "
            "rise; list shorter lengths first"
        )
    others = {
        "schedule.mode": (run.schedule.mode, "sync"),
        "env.episodes": (run.env.episodes, ""),
        "reward.overlong_buffer": (run.reward.overlong_buffer, 0),
    }
    errors += [
        f"data.length_stages={stages} limits single responses of synchronous rollouts, and no "
        f"penalty by data.max_response_len; {name}={value!r} does not go together with it, set "
        f"{name}={needed!r} or data.length_stages=()"
        for name, (value, needed) in others.items()
        if value != needed
    ]
    return errors


def _streaming_errors(data: DataConfig) -> list[str]:
    if not (data.streaming and data.skip_solved):
        return []
    return [
        f"data.skip_solved={data.skip_solved} needs all prompts in memory; set "
        "data.streaming=False or data.skip_solved=0"
    ]


def _rendered_errors(data: DataConfig) -> list[str]:
    if not (data.rendered_prompts and data.system_prompt):
        return []
    return [
        "data.system_prompt has no effect with data.rendered_prompts, whose prompts have theirs; "
        "remove one of the two"
    ]


def _date_errors(data: DataConfig) -> list[str]:
    try:
        datetime.date.fromisoformat(data.today or "2000-01-01")
    except ValueError:
        return [f"data.today={data.today!r} is not a date; write YYYY-MM-DD, such as 2025-01-31"]
    return []


def _column_errors(data: DataConfig) -> list[str]:
    errors = []
    for entry in data.columns:
        name, _, column = entry.partition(":")
        if name in _COLUMNS and column:
            continue
        guess = nearest(name, _COLUMNS)
        hint = f"did you mean '{guess}:{column or 'NAME'}'? " if guess else ""
        errors.append(
            f"data.columns has {entry!r}, which is not 'name:column' with a name that is read; "
            f"{hint}the names are {', '.join(dict.fromkeys(_COLUMNS))}"
        )
    return errors
