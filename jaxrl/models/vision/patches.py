"""Patches of images in packed rows: their places, segments and positions, computed on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flax import struct
from jaxtyping import Float, Int

from jaxrl.models.vision.config import TowerConfig
from jaxrl.types import Grid


@runtime_checkable
class ImagePatches(Protocol):
    """The patches of one image, as its processor gives them."""

    @property
    def patches(self) -> np.ndarray: ...  # [P, C]

    @property
    def grid(self) -> Grid: ...


@struct.dataclass
class PatchRows:
    """Packed patches, the input of a tower. A row has the patches of its images, then padding."""

    patches: Any  # float [B, P, C]
    segments: Any  # int32 [B, P], one run per image (and frame); 0 is padding
    windows: Any  # int32 [B, P], one run per window; None without windows
    places: Any  # int32 [B, P, 2], row and column in the image; None without rotation
    taps: Any  # int32 [B, P, k], learned positions whose weighted sum is added; None without
    weights: Any  # float32 [B, P, k]
    order: Any  # int32 [B, F], place after the tower of each token; None: the same


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """The patches of an image in the order of the tower."""

    source: Int[np.ndarray, "P"]  # index among the image's patches
    places: Int[np.ndarray, "P 2"]
    frames: Int[np.ndarray, "P"]  # from 1
    windows: Int[np.ndarray, "P"]  # from 1, in all frames
    order: Int[np.ndarray, "F"]  # place of each token of the image


def n_tokens(cfg: TowerConfig, grid: Grid) -> int:
    """Tokens of an image in the decoder. Raises ValueError for a grid that the tower cannot take.

    `check_grid` has the reasons.
    """
    check_grid(cfg, grid)
    return grid[0] * grid[1] * grid[2] // cfg.merge**2


def example_grid(cfg: TowerConfig, pixels: int) -> Grid:
    """The grid of a square image of about so many pixels on each side, or of the tower's size."""
    token = cfg.patch * cfg.merge
    side = cfg.table if cfg.positions == "fixed" else max(pixels // token, 1) * cfg.merge
    return 1, side, side


def check_grid(cfg: TowerConfig, grid: Grid) -> None:
    """Raises ValueError unless tokens divide the grid, which a tower with one size has exactly."""
    frames, *sides = grid
    if min(grid) < 1 or any(side % cfg.merge for side in sides):
        raise ValueError(
            f"an image of {sides[0]} x {sides[1]} patches and {frames} frames has no whole tokens "
            f"of {cfg.merge} x {cfg.merge} patches; use the model's own image processor"
        )
    if cfg.positions == "axes" and max(sides) > cfg.table:
        raise ValueError(
            f"an image has {sides[0]} x {sides[1]} patches, and the {cfg.family} tower has learned "
            f"positions for {cfg.table} rows and columns; use the model's own image processor"
        )
    if cfg.positions == "fixed" and (frames, *sides) != (1, cfg.table, cfg.table):
        raise ValueError(
            f"an image has {sides[0]} x {sides[1]} patches and {frames} frames, and the "
            f"{cfg.family} tower takes images of {cfg.table} x {cfg.table} patches; use the "
            "model's own image processor"
        )


def image_layout(cfg: TowerConfig, grid: Grid) -> ImageLayout:
    """The order of an image's patches in the tower: tokens of a window are next to each other."""
    check_grid(cfg, grid)
    (frames, h, w), m = grid, cfg.merge
    raster = np.arange(h * w).reshape(h // m, m, w // m, m)
    tokens = raster.transpose(0, 2, 1, 3).reshape(-1, m * m)  # patches of each token
    window = np.zeros(len(tokens), np.int64)
    if cfg.window:
        row, column = np.divmod(np.arange(len(tokens)), w // m)
        window = row // cfg.window * w + column // cfg.window
    by_window = np.argsort(window, kind="stable")
    patches = tokens[by_window].reshape(-1)
    given = raster.reshape(-1) if cfg.rows_first else tokens.reshape(-1)
    source = np.argsort(given)[patches]
    n_patches, n_frames = h * w, np.arange(frames)[:, None]
    window = np.repeat(np.unique(window[by_window], return_inverse=True)[1], m * m)
    windows = n_frames * (window.max() + 1) + window + 1
    order = n_frames * len(tokens) + np.argsort(by_window)
    return ImageLayout(
        source=(n_frames * n_patches + source).reshape(-1),
        places=np.tile(np.stack(np.divmod(patches, w), axis=-1), (frames, 1)),
        frames=np.repeat(np.arange(frames) + 1, n_patches),
        windows=windows.reshape(-1),
        order=order.reshape(-1),
    )


def interpolation(
    cfg: TowerConfig, places: Int[np.ndarray, "P 2"], grid: Grid
) -> tuple[Int[np.ndarray, "P k"], Float[np.ndarray, "P k"]]:
    """(learned positions, their weights) of each patch: the table stretched over the image.

    Bilinear, and the corners of the table are the corners of the image. A tower with one size has
    the position itself, and one with two tables the column in the first and the row in the second.
    """
    if cfg.positions == "fixed":
        return places @ np.array([[cfg.table], [1]]), np.ones((len(places), 1), np.float32)
    if cfg.positions == "axes":
        return places[:, ::-1] + np.array([0, cfg.table]), np.ones((len(places), 2), np.float32)
    taps, weights = zip(*(_line(cfg.table, places[:, i], grid[1 + i]) for i in (0, 1)), strict=True)
    both = taps[0][:, :, None] * cfg.table + taps[1][:, None]
    shares = weights[0][:, :, None] * weights[1][:, None]
    return both.reshape(-1, 4), shares.reshape(-1, 4)


def _line(
    side: int, places: Int[np.ndarray, "P"], size: int
) -> tuple[Int[np.ndarray, "P 2"], Float[np.ndarray, "P 2"]]:
    """The two nearest of `side` positions and their weights, of places on a line of `size`."""
    at = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    taps = np.floor(at)[:, None] + np.arange(2, dtype=np.float32)
    return np.minimum(taps.astype(np.int64), side - 1), 1 - np.abs(at[:, None] - taps)


def pack_patches(
    cfg: TowerConfig, rows: Sequence[Sequence[ImagePatches]], n_patches: int
) -> PatchRows:
    """Rows of `n_patches` with the patches of these images, one after the other.

    The features of the i-th token of a row's images are then at place i of the tower's output.
    Raises ValueError for more patches, and for an image whose patches have another size.
    """
    if n_patches % cfg.merge**2:
        raise ValueError(
            f"rows of {n_patches} patches are no whole tokens of {cfg.merge**2} patches each; "
            f"set a multiple of {cfg.merge**2}"
        )
    k, shape, n = cfg.n_taps, (len(rows), n_patches), cfg.merge**2
    packed = PatchRows(
        patches=np.zeros((*shape, cfg.patch_features), np.float32),
        segments=np.zeros(shape, np.int32),
        windows=np.zeros(shape, np.int32) if cfg.window else None,
        places=None if cfg.attn.theta is None else np.zeros((*shape, 2), np.int32),
        taps=np.zeros((*shape, k), np.int32) if k else None,
        weights=np.zeros((*shape, k), np.float32) if k else None,
        order=np.tile(np.arange(n_patches // n, dtype=np.int32), (len(rows), 1))
        if cfg.window
        else None,
    )
    for b, images in enumerate(rows):
        start = 0
        for image in images:
            start = _add_image(cfg, packed, b, start, image)
    return packed


def _add_image(cfg: TowerConfig, packed: PatchRows, b: int, start: int, image: ImagePatches) -> int:
    """Writes an image to the row b from a place on; returns the place after it."""
    layout = image_layout(cfg, image.grid)
    expected = (len(layout.source), cfg.patch_features)
    if image.patches.shape != expected:
        raise ValueError(
            f"an image of the grid {image.grid} has patches {list(image.patches.shape)}, expected "
            f"{list(expected)}; use the model's own image processor"
        )
    end, n_patches = start + len(layout.source), packed.segments.shape[1]
    if end > n_patches:
        raise ValueError(f"the images of a row have {end} patches or more; {n_patches} fit")
    here, n = (b, slice(start, end)), cfg.merge**2
    packed.patches[here] = (image.patches[layout.source] - cfg.center) * cfg.gain
    packed.segments[here] = packed.segments[b].max() + layout.frames
    if packed.windows is not None:
        packed.windows[here] = packed.windows[b].max() + layout.windows
        packed.order[b, start // n : end // n] = start // n + layout.order
    if packed.places is not None:
        packed.places[here] = layout.places
    if packed.taps is not None:
        packed.taps[here], packed.weights[here] = interpolation(cfg, layout.places, image.grid)
    return end
