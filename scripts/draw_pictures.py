"""Writes questions about drawn pictures, for configs/vision_quickstart.py.

    python scripts/draw_pictures.py --output=data/pictures

OUTPUT/train.parquet and OUTPUT/val.parquet have rows in verl's schema: a picture of 32 x 32 pixels
with one to six squares of a colour on another one, and the question how many squares there are. No
picture is in both files. Needs the extra `vision`.
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
COLOURS = ("red", "lime", "blue", "white", "black", "yellow", "cyan", "magenta")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, help="the folder to write")
    parser.add_argument("--train", type=int, default=4096, help="rows for training")
    parser.add_argument("--val", type=int, default=128, help="rows for validation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder, drawn = Path(args.output), rows(random.Random(args.seed))
    folder.mkdir(parents=True, exist_ok=True)
    for split, n in (("val", args.val), ("train", args.train)):
        path = folder / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist([next(drawn) for _ in range(n)]), path)
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
            "response": str(n),
            "reward_model": {"style": "rule", "ground_truth": str(n)},
        }


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
