"""Runs on datasets as users of verl, OpenRLHF and TRL have them, and on mixed and streamed ones."""

import dataclasses
import json

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl import dpo, sft, train
from jaxrl.config import resolve
from jaxrl.runtime.signals import Interrupted
from jaxrl.trainer.offline.sft import SFT
from tests.trainer.conftest import LLAMA, write_model
from tests.trainer.offline.test_offline import metrics, offline, weights

pytestmark = pytest.mark.thorough

SUMS = [(f"What is {a} + {b}?", str(a + b)) for a in range(4) for b in range(3)]


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def verl_rows(split):
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} Answer after ####."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": i, "answer": f"#### {answer}"},
        }
        for i, (question, answer) in enumerate(SUMS)
    ]


def run(config, steps=2):
    config.total_steps = steps
    assert train.train(resolve(config))
    return [line for line in metrics(config.run_dir) if "reward/mean" in line]


def test_verls_gsm8k_parquet_trains(tiny_config, tmp_path):
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(verl_rows(split)), tmp_path / f"{split}.parquet")
    tiny_config.data.train = (str(tmp_path / "train.parquet"),)
    tiny_config.data.val = (str(tmp_path / "test.parquet"),)
    tiny_config.data.val_max_samples = 3
    tiny_config.reward.functions = ("gsm8k", *tiny_config.reward.functions)
    assert len(run(tiny_config)) == 2


def test_openrlhfs_jsonl_trains(tiny_config, tmp_path):
    rows = [{"input": question, "label": answer} for question, answer in SUMS]
    tiny_config.data.train = tiny_config.data.val = (jsonl(tmp_path / "rows.jsonl", rows),)
    tiny_config.reward.functions = ("last_number", *tiny_config.reward.functions)
    assert len(run(tiny_config)) == 2


def test_a_dataset_in_the_hubs_cache_trains_without_network(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "datasets--org--sums"
    snapshot = folder / "snapshots" / ("c" * 40)
    rows = [{"question": question, "answer": answer} for question, answer in SUMS]
    for split in ("train", "test"):
        (snapshot / "main").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), snapshot / "main" / f"{split}-0.parquet")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    tiny_config.data.train = ("hf:org/sums?split=train&subset=main",)
    tiny_config.data.val = ("hf:org/sums@main?split=test&subset=main",)
    assert len(run(tiny_config)) == 2


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
TOOL_TEMPLATE = """
{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


def test_trls_conversations_with_tool_calls_train(tiny_config, tmp_path):
    tiny_config.model.path = str(
        write_model(tmp_path / "model", dataclasses.replace(LLAMA, max_len=512))
    )
    rows = []
    for i, (question, answer) in enumerate(SUMS):
        arguments = {"a": i} if i % 2 else {"a": i, "b": 2}
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": answer},
            {"role": "assistant", "content": f"It is {answer}."},
        ]
        rows.append({"messages": messages, "tools": TOOLS})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "tools.jinja").write_text(TOOL_TEMPLATE)
    config = offline(tiny_config, (str(tmp_path / "rows.parquet"),))
    config.data.chat_template = str(tmp_path / "tools.jinja")
    config.data.max_prompt_len, config.learner.token_budget = 500, 1024
    config.total_steps = 3
    assert sft.train(resolve(config))
    losses = [line["loss/nll"] for line in metrics(config.run_dir) if "loss/nll" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_trls_conversational_preferences_train(tiny_config, tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": answer}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for question, answer in SUMS
    ]
    config = offline(tiny_config, (jsonl(tmp_path / "rows.jsonl", rows),))
    config.total_steps = 2
    assert dpo.train(resolve(config))


@pytest.fixture
def mixed(tiny_config, tmp_path):
    """SFT on two sources, two thirds of a step from the first, later one third."""
    config = offline(tiny_config, ())
    rows = [{"question": question, "answer": answer} for question, answer in SUMS]
    config.data.train = tuple(jsonl(tmp_path / f"{name}.jsonl", rows) for name in "ab")
    config.data.weights, config.data.final_weights = (2.0, 1.0), (1.0, 2.0)
    config.data.weights_ramp, config.data.prompts_per_step = 3, 6
    config.data.val, config.total_steps, config.checkpoint.every = (), 5, 1
    return config


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixed_run_resumes_bitwise(mixed, tmp_path, streaming, monkeypatch):
    mixed.data.streaming, mixed.data.shuffle_buffer = streaming, 5
    assert sft.train(resolve(mixed))
    uninterrupted, mixed.run_dir = mixed.run_dir, str(tmp_path / "resumed")

    def interrupt_at_step_3(run, items):
        if run.core.clock.step == 2:
            raise Interrupted("SIGINT")
        return SFT.make_samples(run, items)

    interrupted = dataclasses.replace(SFT, make_samples=interrupt_at_step_3)
    monkeypatch.setattr(sft, "SFT", interrupted)
    assert not sft.train(resolve(mixed))
    monkeypatch.setattr(sft, "SFT", SFT)
    assert sft.train(resolve(mixed))
    for name, one in weights(uninterrupted).items():
        np.testing.assert_array_equal(one, weights(mixed.run_dir)[name])
    assert metrics(mixed.run_dir) == metrics(uninterrupted)
