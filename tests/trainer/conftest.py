"""Fixtures with tiny random models and a config that trains one on one-digit sums in seconds."""

import json

import jax
import jax.numpy as jnp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxrl.config.keys import EnvConfig
from jaxrl.config.resolve import default_config
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import init_model
from jaxrl.models.files.hf_save import save_model
from scripts.make_tiny_vlm import write_tiny_vlm
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.data.images.pictures import encoded
from tests.models.resized import resized
from tests.trainer.tiny_episodes import AGENT, ENVIRONMENTS

LLAMA = uniform_decoder("llama", L=1, D=32, N=4, K=2, H=8, F=64, V=260, tied=True, max_len=256)
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "w": (255, 255, 255)}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a Llama with one layer and a byte-level tokenizer."""
    return write_model(tmp_path_factory.mktemp("tiny") / "model", LLAMA)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory):
    """Folder of the tiny Llama with two layers, one per pipeline stage."""
    cfg = resized(LLAMA, L=2)
    return write_model(tmp_path_factory.mktemp("two_layers") / "model", cfg)


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """Folder of the tiny Llama with two layers and separate embeddings and unembedding."""
    cfg = resized(LLAMA, L=2, tied=False)
    return write_model(tmp_path_factory.mktemp("untied") / "model", cfg)


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory):
    """Folder of a Mixtral with one layer and four experts, two of them active per token."""
    sizes = dict(L=1, D=32, N=4, K=2, H=8, F=32, V=260, tied=True, max_len=256)
    cfg = uniform_decoder("mixtral", **sizes, E=4, top_k=2, F_expert=32)
    return write_model(tmp_path_factory.mktemp("experts") / "model", cfg)


def write_model(folder, cfg):
    """Saves a random model of `cfg` with tokenizer and generation config; returns the folder."""
    with jax.set_mesh(make_mesh()):
        save_model(folder, init_model(cfg, seed=0, rules=TRAIN))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def perturbed(params):
    """The parameters moved away from their initial values by a fixed pattern."""

    def change(p):
        return p + 0.05 * jnp.cos(jnp.arange(p.size)).reshape(p.shape).astype(p.dtype)

    return jax.tree.map(change, params)


@pytest.fixture
def tiny_config(tiny_model, tmp_path, xla_cache, monkeypatch):
    """4 steps of 4 prompts x 4 samples, validation before and after, a dense reward, one device."""
    monkeypatch.setattr("jaxrl.trainer.setup.devices.check_devices", lambda *sizes: None)
    config = default_config()
    config.run_dir = str(tmp_path / "run")
    config.total_steps = 4
    config.compilation_cache = str(xla_cache)
    config.model.path = str(tiny_model)
    config.mesh.fsdp = 1
    config.data.train = ("task:addition?digits=1&size=64&split=train",)
    config.data.val = ("task:addition?digits=1&size=8&split=val",)
    config.data.chat_template = "chatml"
    config.data.prompts_per_step = 4
    config.data.max_prompt_len = 128
    config.data.max_response_len = 8
    config.rollout.n = 4
    config.rollout.max_num_seqs = 16
    config.rollout.max_num_batched_tokens = 256
    config.learner.token_budget = 256
    config.learner.halvings = 0
    config.learner.lr = 1e-3
    config.reward.functions = (f"{__file__}:short_is_good",)
    config.reward.workers = 1
    config.log.loggers = ("console", "jsonl")
    return config


def short_is_good(data_source, solution_str, ground_truth, extra_info=None):
    """Share of letters in the first 8 characters: differs between samples of a random model."""
    return sum(c.isalpha() for c in solution_str) / 8


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "environments.py"
    path.write_text(ENVIRONMENTS)
    return str(path)


@pytest.fixture(scope="module")
def echo(environments):
    with EnvironmentPool(EnvConfig(name=f"{environments}:Echo", workers=3)) as pool:
        yield pool


@pytest.fixture(scope="module")
def renderer(tiny_model):
    """Every byte is a token."""
    return ChatRenderer(load_tokenizer(tiny_model), template="chatml")


@pytest.fixture
def env_config(tiny_config, environments):
    tiny_config.env.name = f"{environments}:Letters"
    tiny_config.reward.functions = ("environment",)
    tiny_config.data.max_prompt_len, tiny_config.data.max_response_len = 64, 128
    tiny_config.rollout.sampling.stop = ("a", "e", "i", "o", "u", "0", "1", "2", " ")
    tiny_config.total_steps = 2
    return tiny_config


@pytest.fixture
def agent_config(tiny_config, tmp_path):
    """Two steps of 16 episodes, each of three turns in two conversations."""
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    tiny_config.env.agent, tiny_config.env.workers = f"{path}:agent", 8
    tiny_config.reward.functions = ("environment",)
    tiny_config.data.max_prompt_len, tiny_config.data.max_response_len = 64, 128
    tiny_config.rollout.sampling.stop = tiny_config.eval.sampling.stop = ("a", "e", "i", "0", " ")
    tiny_config.total_steps = 2
    return tiny_config


@pytest.fixture(scope="session")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(folder, width=32, n_layers=1)
    return folder


@pytest.fixture
def image_config(tiny_config, vlm, tmp_path):
    """Questions about squares of a colour, some with two of them."""
    rows = [
        {
            "question": "<image>" * n + "?",
            "answer": name,
            "images": [{"bytes": encoded(Image.new("RGB", (16 + 8 * i, 16), c))} for i in range(n)],
        }
        for name, c in COLOURS.items()
        for n in (1, 2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tiny_config.model.path = str(vlm)
    tiny_config.data.train = tiny_config.data.val = (str(tmp_path / "rows.parquet"),)
    tiny_config.data.chat_template = ""
    tiny_config.data.images = True
    tiny_config.data.max_prompt_len = 64
    tiny_config.total_steps = 2
    return tiny_config
