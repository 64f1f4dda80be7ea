"""Whole runs with the chat templates of model families: SFT, then RL in an environment."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl import sft
from jaxrl.config.resolve import default_config, resolve
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.turns import render_turns
from jaxrl.data.tokenizer import load_tokenizer, stop_ids
from jaxrl.tracking.json_lines import read_lines
from jaxrl.train import train
from tests.data.families import vocabulary, write_tokenizer
from tests.trainer.conftest import LLAMA, write_model

REASONING = ("r1_distill", "qwen3")
LETTERS = '''
class Letters:
    """Two turns; each rewards the share of letters in the completion."""

    def __init__(self):
        self.left = 2

    def reset(self, prompt):
        return None

    def step(self, completion):
        self.left -= 1
        return "More.", sum(c.isalpha() for c in completion) / 8, self.left == 0
'''


@pytest.fixture
def model(tmp_path, request):
    """The folder of a tiny Llama with tokenizer and template of the family `request.param`."""
    shape = dataclasses.replace(LLAMA, V=vocabulary().get_vocab_size())
    return write_tokenizer(write_model(tmp_path / "model", shape), request.param)


def rows(family):
    """Conversations of two questions, with reasoning for the families that have it."""
    thought = "<think>\nadd\n</think>\n\n" if family in REASONING else ""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{a} + {a}?"},
                {"role": "assistant", "content": f"{thought}{a + a}"},
                {"role": "user", "content": "And one more?"},
                {"role": "assistant", "content": f"{thought}{a + a + 1}"},
            ]
        }
        for a in range(8)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["r1_distill", "qwen3", "llama3_1", "mistral_v0_3", "gemma2", "gemma3"],
    indirect=True,
)
def test_sft_and_episodes_with_the_template_of_a_family(tiny_config, model, tmp_path, request):
    family = request.node.callspec.params["model"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows(family))))
    (tmp_path / "letters.py").write_text(LETTERS)
    rl = tiny_config.copy_and_resolve_references()
    tiny_config.rollout.update(default_config().rollout)
    tiny_config.reward.update(default_config().reward)
    tiny_config.model.path, tiny_config.data.chat_template = str(model), ""
    tiny_config.data.train = tiny_config.data.val = (str(tmp_path / "rows.jsonl"),)
    tiny_config.data.prompts_per_step, tiny_config.data.max_response_len = 8, 96
    tiny_config.total_steps = 1
    assert sft.train(resolve(tiny_config))
    tokenizer = load_tokenizer(model)
    turns = [
        render_turns(ChatRenderer(tokenizer), row["messages"], stop_ids(model, tokenizer))
        for row in rows(family)
    ]
    assert len(turns[0]) == (2 if family in REASONING else 1)
    [line] = [x for x in read_lines(Path(tiny_config.run_dir, "metrics.jsonl")) if "loss/nll" in x]
    n_learned = [sum(mask.sum() for _, mask in found) for found in turns]
    # a step has 8 sequences; all conversations have equally many learned tokens per turn, nearly
    assert line["perf/own_tokens"] == pytest.approx(np.mean(n_learned) * 8 / len(turns[0]), rel=0.1)

    rl.model.path, rl.data.chat_template = str(Path(tiny_config.run_dir) / "hf"), ""
    rl.run_dir, rl.total_steps = str(tmp_path / "rl"), 2
    rl.env.name, rl.env.workers = f"{tmp_path / 'letters.py'}:Letters", 4
    rl.reward.functions, rl.data.max_response_len = ("environment",), 96
    rl.rollout.sampling.stop = tuple("aeiou012 ")  # a random model seldom ends a turn
    assert train(resolve(rl))
    trained = [
        x for x in read_lines(Path(rl.run_dir, "metrics.jsonl")) if "mismatch/logp_diff_max" in x
    ]
    assert len(trained) == 2
    assert all(line["mismatch/logp_diff_max"] < 1e-4 for line in trained)  # exact tokens
    assert all(line["env/failures"] == 0 for line in trained)
