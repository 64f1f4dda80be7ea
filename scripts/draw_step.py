"""Draw docs/training_step.svg (one step) and docs/data_flow.svg (types from prompt to update).

python scripts/draw_step.py docs

Both pictures have their own background and follow the reader's light or dark color scheme.
"""

import sys
from pathlib import Path

STYLE = """<style>
  .page { fill: #ffffff; } .host { fill: #fff4e0; stroke: #d9902f; }
  .device { fill: #e6f0fa; stroke: #3b7ab8; }
  .shared { fill: #d9f0e3; stroke: #2f8f5b; } .title { fill: #1c1f24; font-weight: bold; }
  .words { fill: #3d434b; } .type { fill: #7a3e9d; font-family: monospace; }
  .arrow { stroke: #5b626b; fill: none; stroke-width: 1.6; } .head { fill: #5b626b; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #16191d; } .host { fill: #3a2c16; stroke: #d9a14f; }
    .device { fill: #16293c; stroke: #5b9bd9; }
    .shared { fill: #143424; stroke: #4fb582; } .title { fill: #f2f4f6; } .words { fill: #c4cad1; }
    .type { fill: #d3a6ee; } .arrow { stroke: #a3abb5; } .head { fill: #a3abb5; }
  }
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4"
  markerWidth="7" markerHeight="7" orient="auto">
  <path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>"""

STEP = [  # where it runs, title, lines
    ("host", "1  Prompts", ["dataset rows,", "chat template,", "tokens"]),
    ("device", "2  Rollout", ["paged KV cache,", "continuous batching,", "sampling on device"]),
    ("host", "3  Reward", ["worker processes:", "verifiers, sandbox,", "reward models, tools"]),
    ("host", "4  Experience", ["advantages per group,", "filtering,", "packed sequences"]),
    ("device", "5  Score", ["old and reference", "logprobs, values;", "only if needed"]),
    ("device", "6  Update", ["loss, gradient", "accumulation, clip,", "AdamW"]),
]
FLOW = [  # package, what it does, the type that leaves it
    (
        "jaxrl/data",
        "reads rows, applies the chat template",
        "Prompt: messages, tokens, answer, source",
    ),
    (
        "jaxrl/rollout + jaxrl/engine",
        "generates n completions per prompt, in one or several turns",
        "Rollout: tokens, logp, loss_mask, version, finish, text",
    ),
    (
        "jaxrl/rewards",
        "scores each rollout in a worker process",
        "ScoredRollout: rollout, reward (value, parts, error)",
    ),
    (
        "jaxrl/trainer",
        "filters groups, computes advantages, splits into mini-batches",
        "TrainingSample: tokens, advantages, returns, rollout_logp",
    ),
    (
        "jaxrl/data/packing.py",
        "packs samples into micro-batches by token budget",
        "Batch: arrays [B, T], segments, positions, mask",
    ),
    (
        "jaxrl/learner",
        "forward, chunked logprob, loss, gradient, optimizer",
        "TrainState: params, opt_state, step",
    ),
    ("jaxrl/engine", "reads the new params in place or through one reshard", ""),
]


def text(x: float, y: float, words: str, kind: str, *, size=12.5, anchor="start") -> str:
    place = f'x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{words}</text>'


def box(x: float, y: float, w: float, h: float, kind: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" class="{kind}" stroke-width="1.4"/>'
    )


def arrow(path: str) -> str:
    return f'<path d="{path}" class="arrow" marker-end="url(#head)"/>'


def picture(width: int, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" role="img">'
    )
    page = f'<rect width="{width}" height="{height}" rx="10" class="page"/>'
    return "\n".join([head, STYLE, page, *parts, "</svg>"]) + "\n"


def training_step() -> str:
    """Six boxes from left to right, and below them the weights that three of them share."""
    side, gap, top, tall = 146, 22, 44, 112
    parts = []
    for i, (kind, title, lines) in enumerate(STEP):
        x = 20 + i * (side + gap)
        parts += [box(x, top, side, tall, kind), text(x + 12, top + 26, title, "title", size=15)]
        parts += [text(x + 12, top + 50 + 18 * j, s, "words") for j, s in enumerate(lines)]
        if i:
            y = top + tall / 2
            parts.append(arrow(f"M{x - gap + 2} {y} L{x - 2} {y}"))
    width = 20 + len(STEP) * (side + gap) - gap + 20
    low = top + tall + 54
    parts += [
        box(20, low, width - 40, 52, "shared"),
        text(
            width / 2,
            low + 22,
            "One model function, one set of weights in device memory",
            "title",
            size=14,
            anchor="middle",
        ),
        text(
            width / 2,
            low + 41,
            "the engine generates with the trainer's arrays, or with one reshard of them on device",
            "words",
            size=12,
            anchor="middle",
        ),
    ]
    for i, words in ((1, "read"), (4, "read"), (5, "read, update")):
        x = 20 + i * (side + gap) + side / 2
        up, down = top + tall + 3, low - 3
        parts.append(arrow(f"M{x} {down} L{x} {up}"))
        if i == 5:
            parts.append(arrow(f"M{x + 16} {up} L{x + 16} {down}"))
        parts.append(text(x - 8, (up + down) / 2 + 4, words, "words", size=12, anchor="end"))
    y = 26
    parts += [
        box(20, y - 12, 16, 14, "host"),
        text(42, y, "host (CPU processes)", "words", size=12),
        box(190, y - 12, 16, 14, "device"),
        text(212, y, "device (compiled by JAX)", "words", size=12),
    ]
    return picture(width, low + 72, parts)


def data_flow() -> str:
    """One box per package from top to bottom; the arrows carry the type that is passed on."""
    wide, tall, gap, left = 540, 50, 40, 60
    parts = []
    for i, (package, words, out) in enumerate(FLOW):
        y = 20 + i * (tall + gap)
        kind = "device" if package.endswith(("learner", "engine")) else "host"
        parts += [
            box(20, y, wide, tall, kind),
            text(34, y + 21, package, "title", size=14),
            text(34, y + 40, words, "words"),
        ]
        if out:
            parts.append(arrow(f"M{left} {y + tall + 2} L{left} {y + tall + gap - 3}"))
            parts.append(text(left + 14, y + tall + gap / 2 + 4, out, "type", size=12))
    last = 20 + (len(FLOW) - 1) * (tall + gap)
    x, again = 20 + wide + 40, 20 + tall + gap + tall / 2
    parts.append(
        arrow(
            f"M{22 + wide} {last + tall / 2} L{x} {last + tall / 2} "
            f"L{x} {again} L{23 + wide} {again}"
        )
    )
    parts.append(text(x + 8, (last + again) / 2, "next step", "words"))
    return picture(x + 90, last + tall + 20, parts)


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "training_step.svg").write_text(training_step())
    (folder / "data_flow.svg").write_text(data_flow())


if __name__ == "__main__":
    main()
