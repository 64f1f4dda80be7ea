"""The "score" head (one number per token): parity with transformers, files, meshes, packing.

Tests of jaxrl/models/decoder.py and pipeline.py.
"""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl.models.decoder import Decoder
from jaxrl.models.files.hf_load import load_model
from jaxrl.models.files.hf_save import save_model
from jaxrl.models.packed import forward_packed
from sharding import PIPELINE, TRAIN, ULYSSES, Rules, make_mesh, put_batch

GOLDEN = Path(__file__).parent / "golden"
SCORES = Path(__file__).parent / "golden_scores"
MODELS = sorted(path.name for path in SCORES.iterdir())
SCORE = ("score",)


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, T], torch's score of each [B, T])."""
    saved = np.load(SCORES / name / "golden.npz")
    return saved["tokens"], saved["scores"]


@functools.partial(jax.jit, static_argnames="rules")
def packed_scores(model: Decoder, tokens, segments, positions, *, rules: Rules = TRAIN):
    hidden = forward_packed(model, tokens, segments, positions, rules=rules)
    return model.scores(hidden, rules)


def load(folder: Path, rules: Rules = TRAIN, **options) -> Decoder:
    return load_model(folder, rules=rules, heads=SCORE, **options)[1]


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        ("qwen2", True),
        pytest.param("llama", False, marks=pytest.mark.thorough),
        pytest.param("gemma3", True, marks=pytest.mark.thorough),
    ],
)
def test_scores_equal_those_of_transformers(name, stacked, one_device):
    tokens, expected = golden(name)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    model = load(SCORES / name, stacked=stacked)
    scores = packed_scores(model, tokens, np.ones_like(tokens), positions)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(scores), expected, atol=1e-4, rtol=1e-4)


def test_packed_segments_have_the_scores_of_single_rows(one_device):
    tokens, expected = golden("qwen2")
    row = np.concatenate([tokens[0, :23], tokens[1, :14], np.zeros(3, np.int32)])
    segments = np.array([1] * 23 + [2] * 14 + [0] * 3)
    positions = np.concatenate([np.arange(23), np.arange(14), np.zeros(3, int)])
    scores = packed_scores(load(SCORES / "qwen2"), row[None], segments[None], positions[None])
    wanted = np.concatenate([expected[0, :23], expected[1, :14]])
    np.testing.assert_allclose(np.asarray(scores)[0, :37], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rules", "sizes"),
    [
        pytest.param(PIPELINE, dict(fsdp=2, stage=2), id="pipeline"),
        pytest.param(
            TRAIN, dict(replica=2, fsdp=2, tensor=2), id="hsdp", marks=pytest.mark.thorough
        ),
        pytest.param(ULYSSES, dict(fsdp=2, sequence=2), id="ulysses", marks=pytest.mark.thorough),
    ],
)
def test_a_mesh_has_the_scores_of_one_device(rules, sizes):
    tokens, expected = golden("llama")
    rows, wanted = np.tile(tokens, (2, 1)), np.tile(expected, (2, 1))
    positions = np.broadcast_to(np.arange(tokens.shape[1]), rows.shape)
    with jax.set_mesh(make_mesh(**sizes)):
        model = load(SCORES / "llama", rules, stacked=rules is PIPELINE)
        put = functools.partial(put_batch, rules=rules)
        batch = put((rows, np.ones_like(rows), positions))
        found = np.asarray(packed_scores(model, *batch, rules=rules))
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


def test_the_gradient_reaches_head_and_backbone(one_device):
    tokens, _ = golden("llama")
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    @jax.grad
    def gradient(model: Decoder):
        return packed_scores(model, tokens, np.ones_like(tokens), positions).sum()

    grads = gradient(load(SCORES / "llama"))
    assert np.abs(grads.score).max() > 0 and np.abs(grads.layers[0].attn.q.w).max() > 0


def test_a_classifier_keeps_every_bit_in_files_and_its_config(one_device, tmp_path):
    for name in MODELS:
        model = load(SCORES / name)
        for source in (SCORES / name, None):
            save_model(tmp_path / name, model, source=source)
            before = load_file(SCORES / name / "model.safetensors")
            after = load_file(tmp_path / name / "model.safetensors")
            assert before.keys() == after.keys() and "score.weight" in after
            for tensor in before:
                np.testing.assert_array_equal(before[tensor], after[tensor])
            config = transformers.AutoConfig.from_pretrained(tmp_path / name)
            theirs = json.loads((SCORES / name / "config.json").read_text())
            assert config.architectures == theirs["architectures"] and config.num_labels == 1


def test_a_language_model_becomes_a_classifier_whose_scores_are_zero(one_device, tmp_path):
    """Its unembedding, tied or not, is dropped; the export is a classifier."""
    for name in ("llama", "gemma2"):
        model = load(GOLDEN / name)
        assert model.lm_head is None and not np.asarray(model.score).any()
        save_model(tmp_path / name, model, source=GOLDEN / name)
        names = load_file(tmp_path / name / "model.safetensors").keys()
        assert "score.weight" in names and "lm_head.weight" not in names
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert config.num_labels == 1 and "SequenceClassification" in config.architectures[0]
        load(tmp_path / name)


def test_both_heads_share_a_backbone(one_device):
    saved = np.load(GOLDEN / "llama" / "golden.npz")
    tokens = saved["tokens"]
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    _, model = load_model(GOLDEN / "llama", rules=TRAIN, heads=("vocab", "score"))

    @jax.jit
    def both(model, tokens, positions):
        hidden = forward_packed(model, tokens, jnp.ones_like(tokens), positions, rules=TRAIN)
        return model.logits(hidden, TRAIN), model.scores(hidden, TRAIN)

    logits, scores = both(model, tokens, positions)
    np.testing.assert_allclose(np.asarray(logits), saved["logits"], atol=1e-4, rtol=1e-4)
    assert not np.asarray(scores).any()


def test_a_missing_head_is_a_clear_error(one_device):
    hidden = jnp.zeros((1, 4, 32))
    with pytest.raises(ValueError, match=r"heads \('score',\) and so no logits"):
        load(SCORES / "llama").logits(hidden, TRAIN)
    _, model = load_model(GOLDEN / "llama", rules=TRAIN)
    with pytest.raises(ValueError, match=r"heads \('vocab',\) and so no scores"):
        model.scores(hidden, TRAIN)


def test_folders_that_do_not_fit_the_heads_are_rejected(one_device, tmp_path):
    with pytest.raises(
        ValueError, match=r"1 missing: lm_head\.weight\n.*unexpected: score\.weight"
    ):
        load_model(SCORES / "llama", rules=TRAIN)
    shutil.copy(SCORES / "llama" / "config.json", tmp_path)
    tensors = load_file(SCORES / "llama" / "model.safetensors")
    two = np.zeros((2, 32), np.float32)
    save_file(tensors | {"score.weight": two}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"score\.weight is \[2, 32\], expected \[1, 32\]"):
        load(tmp_path)
