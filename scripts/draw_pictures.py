"""Writes questions about drawn pictures, for configs/vision_quickstart.py.

    python scripts/draw_pictures.py --output=data/pictures

OUTPUT/train.parquet and OUTPUT/val.parquet have rows in verl's schema: a picture of 32 x 32 pixels
with one to six squares of a colour on another one, and the question how many squares there are. No
picture is in both files. In train.parquet the column `response` has the mistakes of a labeller who
does not count further than four: with probability 0.7 (--mistakes) the label of a picture with five
or six squares is 4. `ground_truth` is always the number of squares. Needs the extra `vision`.
"""

import argparse
import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

SIZE, CELLS, MOST = 32, 4, 6  # pixels of a side; places for squares on a side; squares
COUNTED = 4  # squares, up to which the labeller makes no mistake
COLOURS = ("red", "lime", "blue", "white", "black", "yellow", "cyan", "magenta")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, help="the folder to write")
    parser.add_argument("--train", type=int, default=4096, help="rows for training")
    parser.add_argument("--val", type=int, default=512, help="rows for validation")
    parser.add_argument(
        "--mistakes",
        type=float,
        default=0.7,
        help="share of wrong labels of training pictures with more than four squares",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    folder, drawn = Path(args.output), rows(rng)
    folder.mkdir(parents=True, exist_ok=True)
    for split, n, mistakes in (("val", args.val, 0.0), ("train", args.train, args.mistakes)):
        path = folder / f"{split}.parquet"
        labelled = [label(next(drawn), rng, mistakes) for _ in range(n)]
        pq.write_table(pa.Table.from_pylist(labelled), path)
        print(f"{path}: {n} rows")


def rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Rows without end, of different pictures."""
    seen = set()
    while True:
        n, colours = rng.randint(1, MOST), rng.sample(COLOURS, 2)
        places = tuple(sorted(rng.sample(range(CELLS**2), n)))
        if (picture := (*colours, places)) in seen:
            continue
        seen.add(picture)
        yield {
            "data_source": "pictures",
            "prompt": [{"role": "user", "content": "<image>How many squares?"}],
            "images": [{"bytes": draw(colours, places), "path": None}],
            "reward_model": {"style": "rule", "ground_truth": str(n)},
        }


def label(row: dict[str, Any], rng: random.Random, mistakes: float) -> dict[str, Any]:
    """Adds the labeller's answer to a row."""
    n = int(row["reward_model"]["ground_truth"])
    wrong = n > COUNTED and rng.random() < mistakes
    return row | {"response": str(COUNTED if wrong else n)}


def draw(colours: Sequence[str], places: Sequence[int]) -> bytes:
    """A PNG file. A place is the number of a cell of the picture, row by row."""
    picture = Image.new("RGB", (SIZE, SIZE), colours[0])
    brush, cell = ImageDraw.Draw(picture), SIZE // CELLS
    for place in places:
        y, x = (cell * i + 2 for i in divmod(place, CELLS))
        brush.rectangle((x, y, x + cell - 4, y + cell - 4), fill=colours[1])
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    main()
