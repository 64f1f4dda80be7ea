"""python -m jaxrl.check_model MODEL: checks a model's files, logits, export and engine."""

import argparse
import dataclasses
import itertools
import math
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl.config.arguments.check_model import read
from jaxrl.runtime.start import begin_program

if __name__ == "__main__":  # answers a mistyped argument before the imports that take seconds
    ARGUMENTS = read(sys.argv[1:])
    begin_program()

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RolloutConfig, SamplingConfig
from jaxrl.engine.api import Request
from jaxrl.engine.engine import PagedEngine
from jaxrl.json_text import parse_json
from jaxrl.kernels.logprob import token_scores
from jaxrl.models.config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLAConfig,
    MLPConfig,
)
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.families.entries import WITHOUT_EFFECT
from jaxrl.models.files.export_form import copied_tensors
from jaxrl.models.files.hf_config import FAMILIES, config_path, folder_config, same_model
from jaxrl.models.files.hf_load import classifier_config, load_model
from jaxrl.models.files.hf_save import save_model
from jaxrl.models.files.quantized.scheme import folder_scheme, without_scheme
from jaxrl.models.files.quantized.tensors import FileTensor, read_tensor
from jaxrl.models.files.source import resolve_model
from jaxrl.models.files.tensor_shapes import SCORE, expected_shapes
from jaxrl.models.files.weight_files import find_tensors, skipped_parts
from jaxrl.models.layer_runs import layer_runs
from jaxrl.models.packed import forward_packed
from jaxrl.models.spec import count_params
from jaxrl.models.state_mixers import GatedDeltaNetConfig, ShortConvConfig
from jaxrl.models.vision.checks import changed_by_export, feature_difference, read_golden
from jaxrl.models.vision.files import load_tower
from jaxrl.models.vision.flops import tower_activation_bytes, tower_flops
from jaxrl.models.vision.patches import example_grid, n_tokens
from jaxrl.models.vision.tower import tower_specs
from jaxrl.models.vision.towers import folder_tower
from jaxrl.runtime.backend import open_backend
from sharding import DECODE, TRAIN, make_mesh

GOLDEN = "golden.npz"  # "tokens" [B, T], and "logits" [B, T, V] or "scores" [B, T] of transformers
ALLOWED = "1e-4"  # difference of logits, scores and logprobs in float32
TOLERANCE = float(ALLOWED)
MIXER_NAMES = {
    AttentionConfig: "attention",
    MLAConfig: "latent attention",
    GatedDeltaNetConfig: "gated DeltaNet",
    ShortConvConfig: "short convolution",
}
PAGE_LEN = 64
PROMPT_LENS = (5, 58, 90)  # the second response and the third prompt cross the end of a page
RESPONSE_LEN = 12
MAX_LEN = 128  # of the rows that are scored; at least the longest prompt with its response
IMAGE_SIDE = 448  # pixels of the image whose cost is shown, for a tower of any size


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """A row of the table; `passed` is None for a fact, and for what is not checked."""

    name: str
    text: str
    passed: bool | None = None


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """The model to check, on one device."""

    folder: Path
    cfg: DecoderConfig
    params: Decoder


def main(args: argparse.Namespace) -> None:
    """Prints the table; exits with status 1 if a check fails or the model cannot be loaded."""
    failed = False
    try:
        open_backend()
        with jax.set_mesh(make_mesh()):
            for row in check_rows(args.model, args.seed):
                failed |= row.passed is False
                mark = {None: "", True: "ok: ", False: "FAILED: "}[row.passed]
                print(f"{row.name:<12}{mark}{row.text}", flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(1 if failed else 0)


def check_rows(path: str, seed: int) -> Iterator[CheckRow]:
    """The rows of the table, each as soon as it is known, on the current mesh of one device.

    Raises ValueError for a folder that cannot be loaded.
    """
    folder = resolve_model(path)
    heads = ("score",) if SCORE in find_tensors(folder) else ("vocab",)
    labels = classifier_config(folder).labels
    yield from facts(folder, dataclasses.replace(folder_config(folder), heads=heads, labels=labels))
    yield from tower_rows(folder)
    cfg, params = load_model(folder, rules=TRAIN, heads=heads, labels=labels)
    model = LoadedModel(folder, cfg, params)
    yield check_golden(model)
    yield check_export(model)
    yield from check_engine(model, seed)


def facts(folder: Path, cfg: DecoderConfig) -> Iterator[CheckRow]:
    """The rows on what the config.json describes."""
    yield CheckRow("family", cfg.family + (", sequence classifier" if "score" in cfg.heads else ""))
    yield CheckRow("layers", layers_text(cfg))
    yield CheckRow("parameters", f"{count_params(decoder_specs(cfg)):,}")
    yield CheckRow("context", f"{cfg.context_len:,} tokens")
    if scheme := folder_scheme(folder):
        yield CheckRow("weights", f"{scheme.title}, dequantized to bfloat16; exports have no codes")
    if skipped := skipped_parts(folder):
        parts = ", ".join(f"{part} ({n} tensors)" for part, n in skipped.items())
        yield CheckRow("skipped", f"{parts}; an export has copies of them")
    config = without_scheme(parse_json(config_path(folder).read_text()))
    yield CheckRow("config.json", entries_text(config, cfg))


def tower_rows(folder: Path) -> Iterator[CheckRow]:
    """The rows on a vision tower, of a folder with one of a known kind."""
    try:
        if folder_tower(folder) is None:
            return
        cfg, tower = load_tower(folder, rules=TRAIN)
    except ValueError as error:  # the language model is checked without it
        yield CheckRow("tower", f"not checked: {error}")
        return
    grid, n = example_grid(cfg, IMAGE_SIDE), count_params(tower_specs(cfg))
    kept = tower_activation_bytes(cfg, math.prod(grid), 2)
    yield CheckRow(
        "tower",
        f"{cfg.L} blocks, {n:,} parameters; an image of {grid[1]} x {grid[2]} patches: "
        f"{n_tokens(cfg, grid)} tokens, {tower_flops(cfg, [grid]) / 1e9:,.3g} GFLOPs, "
        f"{kept / 1e6:,.3g} MB of activations in bfloat16 with remat full",
    )
    if (golden := read_golden(folder)) is None:
        text = "not checked: the folder has no golden_tower.npz (scripts/make_golden_towers.py)"
        yield CheckRow("features", text)
    else:
        worst = feature_difference(cfg, tower, golden)
        text = f"largest difference from transformers {worst:.1e} ({ALLOWED} allowed)"
        yield CheckRow("features", text, worst <= TOLERANCE)
    changed = changed_by_export(folder, cfg, tower)
    shown = f"would change {', '.join(changed[:4])}" if changed else "all equal bit for bit"
    yield CheckRow("tensors", f"of the tower in an export: {shown}", not changed)


def layers_text(cfg: DecoderConfig) -> str:
    """The layers by kind, with the repetitions of their period."""
    runs = []
    for run in layer_runs(cfg.layers):
        names = [layer_name(cfg.layers[layers[0]]) for layers in run]
        counts = [(name, len(list(same))) for name, same in itertools.groupby(names)]
        n = len(run[0])
        if len(counts) == 1:
            runs.append(f"{n * counts[0][1]} {counts[0][0]}")
        else:
            period = " + ".join(f"{count} {name}" for name, count in counts)
            runs.append(f"{period}, x {n}" if n > 1 else period)
    return "; ".join(runs)


def layer_name(layer: LayerConfig) -> str:
    """The kind of a layer in words: its mixer, and its experts."""
    mixer, ffn = layer.mixer, layer.ffn
    name = MIXER_NAMES[type(mixer)]
    if mixer.window:
        name += f" over {mixer.window} tokens"
    return name if isinstance(ffn, MLPConfig) else f"{name} with {ffn.top_k} of {ffn.E} experts"


def entries_text(config: Mapping[str, Any], cfg: DecoderConfig) -> str:
    """The entries of config.json by their use. All others have been refused by then."""
    entries = FAMILIES[cfg.family].ENTRIES
    text = config.get("text_config") or config
    n_read = len(entries.read & set(text))
    neutral = sorted((entries.neutral | WITHOUT_EFFECT) & set(text) - entries.read)
    other = sorted(set(text) - entries.read - set(neutral))
    parts = [f"{n_read} entries read"]
    parts += [f"without effect: {', '.join(neutral)}"] if neutral else []
    parts += [f"off or at their only supported value: {', '.join(other)}"] if other else []
    return "; ".join(parts)


def check_golden(model: LoadedModel) -> CheckRow:
    """Compares logits, or the scores of a classifier, with those of transformers."""
    name = "scores" if "score" in model.cfg.heads else "logits"
    path = model.folder / GOLDEN
    if not path.exists():
        return CheckRow(name, f"not checked: the folder has no {GOLDEN} (scripts/make_golden.py)")
    try:
        with np.load(path) as saved:
            tokens, expected = saved["tokens"], saved[name]
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} has not the arrays tokens and {name} ({error}); write it again with "
            "scripts/make_golden.py, or remove it"
        ) from error
    hidden = jax.jit(hidden_states)(model.params, jnp.asarray(tokens), jnp.ones_like(tokens))
    found = (model.params.scores if name == "scores" else model.params.logits)(hidden, TRAIN)
    if found.shape != expected.shape:
        text = f"{path} has {name} of the shape {expected.shape}, the model {found.shape}"
        return CheckRow(name, text, passed=False)
    found = np.asarray(found)
    text = f"largest difference from transformers {np.abs(found - expected).max():.1e}"
    passed = np.allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    return CheckRow(name, f"{text} ({ALLOWED} allowed)", passed)


def hidden_states(params: Decoder, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """Final hidden states of rows with one sequence each, which starts the row."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward_packed(params, tokens, segments, positions, rules=TRAIN)


def check_export(model: LoadedModel) -> CheckRow:
    """Exports the model, and compares every tensor of the language model with the folder's.

    In float32, to which the shorter types of files are cast without loss.
    """
    with tempfile.TemporaryDirectory() as place:
        target = Path(place) / "export"
        save_model(target, model.params, source=model.folder)
        names = expected_shapes(decoder_specs(model.cfg)).keys()
        before, after = find_tensors(model.folder), find_tensors(target)
        differ = sorted(
            name
            for name in names | after.keys()
            if name not in before
            or name not in after
            or float32_bytes(before[name]) != float32_bytes(after[name])
        )
        kept = copied_tensors(model.folder) if "vocab" in model.cfg.heads else {}
        copies = copied_tensors(target)
        differ += sorted(
            name
            for name in kept.keys() | copies.keys()
            if name not in kept or name not in copies or not same_tensor(kept[name], copies[name])
        )
        same_config = same_model(folder_config(target), model.cfg)
    if differ:
        shown = ", ".join(differ[:4]) + (", ..." if len(differ) > 4 else "")
        return CheckRow("export", f"{len(differ)} tensors differ: {shown}", passed=False)
    if not same_config:
        text = "the exported config.json describes another model"
        return CheckRow("export", text, passed=False)
    left_out = sorted(before.keys() - names)
    note = f"; {len(kept)} more copied unchanged" if kept else ""
    note += f"; not part of the model: {', '.join(left_out)}" if left_out else ""
    return CheckRow("export", f"{len(names)} tensors equal bit for bit{note}", passed=True)


def same_tensor(a: FileTensor, b: FileTensor) -> bool:
    """Whether tensors of two files are equal bit for bit."""
    same_type = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same_type and read_tensor(a).tobytes() == read_tensor(b).tobytes()


def float32_bytes(info: FileTensor) -> bytes:
    """The values of a tensor in a file."""
    return np.asarray(read_tensor(info)).astype(np.float32).tobytes()


def check_engine(model: LoadedModel, seed: int, tolerance: float = TOLERANCE) -> Iterator[CheckRow]:
    """Samples with the engine, and compares with the forward pass of training."""
    reason = ""
    if "vocab" not in model.cfg.heads:
        reason = "a sequence classifier has no logits to sample from"
    elif model.cfg.context_len < MAX_LEN:
        reason = f"sequences of {MAX_LEN} tokens exceed the model's context"
    if reason:
        yield CheckRow("engine", f"not checked: {reason}")
        yield CheckRow("greedy", f"not checked: {reason}")
        return
    requests = make_requests(model.cfg, seed)
    results = generate(model, requests)
    differences, gaps = [], []
    for request, (tokens, logps) in zip(requests, results, strict=True):
        expected, gap = score(model, request, tokens)
        if request.sampling.temperature:
            differences += [abs(a - b) for a, b in zip(logps, expected, strict=True)]
        else:
            gaps += list(gap)
    yield engine_row(np.array(differences), tolerance)
    yield greedy_row(np.array(gaps), tolerance)


def engine_row(differences: np.ndarray, tolerance: float = TOLERANCE) -> CheckRow:
    """The row on the engine's logprobs, by their differences from the trainer's."""
    worst = differences.max()
    allowed = ALLOWED if tolerance == TOLERANCE else f"{tolerance:g}"
    text = f"largest difference {worst:.1e} ({allowed} allowed)"
    text = "equal bit for bit" if worst == 0 else text
    text = f"logprobs of {len(differences)} sampled tokens against training: {text}"
    return CheckRow("engine", text, bool(worst <= tolerance))  # NaN fails


def greedy_row(gaps: np.ndarray, tolerance: float = TOLERANCE) -> CheckRow:
    """The row on greedy tokens, by how far their logprobs are below the largest."""
    n = int((gaps <= tolerance).sum())
    text = f"{n} of {len(gaps)} tokens are the most likely of the forward pass"
    return CheckRow("greedy", text, n == len(gaps))


def make_requests(cfg: DecoderConfig, seed: int) -> list[Request]:
    """A sampled and a greedy response to each of a few prompts of random tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, cfg.V, n, dtype=np.int32) for n in PROMPT_LENS]
    return [
        Request(
            tokens=tokens,
            max_tokens=RESPONSE_LEN,
            sampling=SamplingConfig(temperature=temperature),
            prompt_id=i,
            seed=seed,
            ignore_stop=True,
        )
        for i, tokens in enumerate(prompts)
        for temperature in (1.0, 0.0)
    ]


def generate(model: LoadedModel, requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of every request."""
    rollout = RolloutConfig(
        max_num_seqs=4,
        max_num_batched_tokens=2 * PAGE_LEN,
        page_len=PAGE_LEN,
        n_pages=16,
        steps_per_dispatch=RESPONSE_LEN // 2,
    )
    dtype = model.params.unembed.dtype
    engine = PagedEngine(model.cfg, rollout, rules=DECODE, dtype=dtype, max_len=MAX_LEN)
    slots = [engine.submit(request) for request in requests]
    made: dict[int, tuple[list[int], list[float]]] = {slot: ([], []) for slot in slots}
    while engine.n_unfinished:
        for new in engine.generate(model.params):
            tokens, logps = made[new.slot]
            tokens += new.tokens.tolist()
            logps += new.logp.tolist()
    engine.release()
    return [made[slot] for slot in slots]


def score(
    model: LoadedModel, request: Request, response: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs of a response, and how far each is below the largest: both [response_len]."""
    row = np.concatenate([request.tokens, np.array(response, np.int32)])
    tokens, targets = np.zeros((2, 1, MAX_LEN), np.int32)
    tokens[0, : len(row) - 1], targets[0, : len(row) - 1] = row[:-1], row[1:]
    segments = (np.arange(MAX_LEN)[None] < len(row) - 1).astype(np.int32)
    logp, gap = score_row(model.params, tokens, targets, segments)
    place = slice(len(request.tokens) - 1, len(row) - 1)
    return np.asarray(logp)[0, place], np.asarray(gap)[0, place]


@jax.jit
def score_row(
    params: Decoder, tokens: jax.Array, targets: jax.Array, segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logprobs of the targets as training computes them, and their distance to the largest."""
    hidden = hidden_states(params, tokens, segments)
    scores = token_scores(
        hidden,
        params.unembed,
        targets,
        temperature=1.0,
        logit_softcap=params.cfg.logit_softcap,
        chunk=MAX_LEN,
        rules=TRAIN,
    )
    largest = jax.nn.log_softmax(params.logits(hidden, TRAIN)).max(-1)
    return scores.logp, largest - scores.logp


if __name__ == "__main__":
    main(ARGUMENTS)
