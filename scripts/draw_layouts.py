"""Draws docs/layouts.svg: the shards of a layer's arrays on eight devices, for each preset.

    python scripts/draw_layouts.py docs/layouts.svg

The picture follows from the rules of sharding/rules.py on meshes of simulated devices: one row per
strategy, one column per array, and each shard has the numbers of the devices that hold it.
"""

import sys
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from sharding import PRESETS, Rules, make_mesh  # noqa: E402  the device count is set first

LAYOUTS = [  # title, preset, mesh sizes
    ("FSDP: fsdp 8", "train", {"fsdp": 8}),
    ("HSDP: replica 2, fsdp 4", "train", {"replica": 2, "fsdp": 4}),
    ("Tensor: fsdp 2, tensor 4", "train", {"fsdp": 2, "tensor": 4}),
    ("Ulysses: fsdp 2, sequence 4", "ulysses", {"fsdp": 2, "sequence": 4}),
    ("Ulysses and tensor: 2 x 2 x 2", "ulysses", {"fsdp": 2, "sequence": 2, "tensor": 2}),
    ("Ring: fsdp 2, sequence 4", "ring", {"fsdp": 2, "sequence": 4}),
    ("Stages: stage 2, fsdp 4", "pipeline", {"stage": 2, "fsdp": 4}),
    ("Experts: fsdp 2, expert 4", "train", {"fsdp": 2, "expert": 4}),
]
SIDE, GAP, LEFT, TOP = 112, 26, 190, 58
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


def arrays(rules: Rules) -> list[tuple[str, str, str, jax.P]]:
    """(title, name of the rows, name of the columns, spec) of a layer's weights and activations."""
    body = rules.in_stage() if rules.layers else rules
    inside = body if rules.ring else body.whole_rows()
    return [
        ("all layers", "layers", "model", rules.spec("layers", "w_embed")),
        ("query weight", "heads", "model", rules.spec("heads", "w_embed")),
        ("the same in use", "heads", "model", rules.gathered("heads", "w_embed")),
        ("residual stream", "rows", "tokens", rules.spec("batch", "time")),
        ("attention of a row", "heads", "tokens", inside.spec("heads", "time")),
        ("feed-forward of a row", "features", "tokens", body.spec("ffw", "time")),
        ("experts of a layer", "experts", "model", rules.spec("experts", "w_embed")),
    ]


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"{__doc__}\nusage: draw_layouts.py OUT.svg")
    n_columns = len(arrays(Rules()))
    width = LEFT + n_columns * (SIDE + GAP)
    height = TOP + len(LAYOUTS) * (SIDE + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for j, (title, rows, columns, _) in enumerate(arrays(Rules())):
        x = LEFT + j * (SIDE + GAP) + SIDE / 2
        parts.append(text(x, 20, title, bold=True))
        parts.append(text(x, 36, f"{rows} down, {columns} across", size=9.5))
    for i, (title, preset, sizes) in enumerate(LAYOUTS):
        y = TOP + i * (SIDE + GAP)
        parts.append(text(LEFT - 14, y + SIDE / 2, title, bold=True, anchor="end"))
        mesh = make_mesh(None, **sizes)
        for j, (_, _, _, spec) in enumerate(arrays(PRESETS[preset])):
            parts += drawing(LEFT + j * (SIDE + GAP), y, jax.NamedSharding(mesh, spec))
    parts.append("</svg>")
    Path(sys.argv[1]).write_text("\n".join(parts) + "\n")


def drawing(x: float, y: float, sharding: jax.NamedSharding) -> list[str]:
    """The shards of an 8 x 8 array, each with the devices that hold it."""
    holders: dict[tuple, list[int]] = {}
    for device, index in sharding.devices_indices_map((8, 8)).items():
        region = tuple((s.start or 0, 8 if s.stop is None else s.stop) for s in index)
        holders.setdefault(region, []).append(device.id)
    parts, unit = [], SIDE / 8
    for ((top, bottom), (left, right)), devices in sorted(holders.items()):
        w, h = (right - left) * unit, (bottom - top) * unit
        at_x, at_y = x + left * unit, y + top * unit
        color = COLORS[min(devices)] if len(devices) < 8 else "#cccccc"
        parts.append(
            f'<rect x="{at_x:.1f}" y="{at_y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{color}" '
            'fill-opacity="0.55" stroke="#fff"/>'
        )
        parts += label(at_x + w / 2, at_y + h / 2, w, h, sorted(devices))
    return parts


def label(x: float, y: float, w: float, h: float, devices: list[int]) -> list[str]:
    """The numbers of the devices, wrapped to the width."""
    if len(devices) == 8:
        return [text(x, y + 4, "all")]
    per_line = int(np.clip(w // 11, 1, len(devices)))
    lines = [devices[i : i + per_line] for i in range(0, len(devices), per_line)]
    size = min(11, h / len(lines) * 0.9)
    top = y - (len(lines) - 1) * size / 2 + size * 0.35
    return [
        text(x, top + k * size, " ".join(map(str, line)), size=size) for k, line in enumerate(lines)
    ]


def text(x: float, y: float, words: str, *, bold=False, anchor="middle", size=11.0) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size:.1f}"{weight}>{words}</text>'


if __name__ == "__main__":
    main()
