"""Checks of a folder's vision tower: its features, and the tensors of an export."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from jaxrl.json_text import read_object
from jaxrl.models.files.hf_config import ADVICE, config_path
from jaxrl.models.files.quantized.tensors import read_tensor
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.files import tower_files, tower_tensors
from jaxrl.models.vision.names import common_name
from jaxrl.models.vision.patches import pack_patches
from jaxrl.models.vision.tower import Tower
from jaxrl.models.vision.towers import tower_from_hf, tower_to_hf
from jaxrl.types import Grid
from sharding import TRAIN

GOLDEN = "golden_tower.npz"  # of scripts/make_golden_towers.py


@dataclasses.dataclass(frozen=True)
class GoldenImage:
    """An image of a golden file."""

    patches: np.ndarray
    grid: Grid


@dataclasses.dataclass(frozen=True)
class GoldenImages:
    """Images and what transformers computed for them."""

    images: list[GoldenImage]
    features: np.ndarray  # [F, O], of the tokens of all images
    deep: np.ndarray  # [n, F, O], of deepstack


def read_golden(folder: Path) -> GoldenImages | None:
    """The golden file of a folder; None if it has none."""
    if not (folder / GOLDEN).exists():
        return None
    with np.load(folder / GOLDEN) as saved:
        patches, grids, features = saved["patches"], saved["grids"], saved["features"]
        deep = saved["deep"] if "deep" in saved else np.zeros((0, *features.shape), np.float32)
    parts = np.split(patches, np.cumsum(grids.prod(axis=1))[:-1])
    images = [
        GoldenImage(part, (int(t), int(h), int(w)))
        for part, (t, h, w) in zip(parts, grids, strict=True)
    ]
    return GoldenImages(images, features, deep)


def feature_difference(cfg: TowerConfig, tower: Tower, golden: GoldenImages) -> float:
    """The largest difference of the features of packed images from those of transformers."""
    n = sum(len(image.patches) for image in golden.images)
    rows = pack_patches(cfg, [golden.images], n)
    out, deep = jax.jit(lambda tower, rows: tower(rows, rules=TRAIN))(tower, rows)
    found = np.stack([np.asarray(one)[0] for one in (out, *deep)])
    return float(np.abs(found - np.concatenate([golden.features[None], golden.deep])).max())


def changed_by_export(folder: Path, cfg: TowerConfig, tower: Tower) -> list[str]:
    """Tensors whose values an export would change, in float32, and vision_config if it would."""
    files, changed = tower_files(folder), []
    for tensor in tower_tensors(tower):
        before = np.asarray(read_tensor(files[common_name(tensor.name)])).astype(np.float32)
        if before.tobytes() != tensor.read().astype(np.float32).tobytes():
            changed.append(tensor.name)
    config = read_object(config_path(folder), ADVICE)
    same = tower_from_hf(config | tower_to_hf(cfg)) == cfg
    return changed if same else [*changed, "vision_config"]
