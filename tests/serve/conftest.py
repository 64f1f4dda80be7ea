"""A tiny random model with a tokenizer, in Hugging Face format."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_save import save_model
from jaxrl.models.spec import init_params
from sharding import make_mesh
from sharding.rules import TRAIN

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Call a tool as <tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if thinking %}<think>\n{% endif %}"
)
SHAPE = dict(L=2, D=64, N=4, K=2, H=16, F=96, V=272, max_len=1024)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A byte-level tokenizer with a chat template; <|im_end|> (id 2) ends a response."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=272, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(["What is the sum? The sum is the thing."] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer_folder):
    """A Llama with random weights and the tokenizer.

    The weights are scaled up so that the token distributions are far from uniform.
    """
    folder = tmp_path_factory.mktemp("served") / "model"
    with jax.set_mesh(make_mesh()):
        cfg = uniform_decoder("llama", **SHAPE)
        params = init_params(jax.random.key(1), decoder_specs(cfg), TRAIN, jnp.float32)
        save_model(folder, jax.tree.map(lambda w: w * 4.0 if w.ndim > 1 else w, params))
    return shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
