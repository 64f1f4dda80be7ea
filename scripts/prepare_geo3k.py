"""Converts a local copy of Geometry3K, with its images, to parquet in verl's schema.

    hf download hiyouga/geometry3k --repo-type dataset --local-dir path/to/geometry3k
    uv run python scripts/prepare_geo3k.py --input=path/to/geometry3k --output=data/geo3k

--input has parquet files of the splits train, validation and test, with rows {"images": [{"bytes",
"path"}], "problem": "<image>...", "answer"}; a split may be absent. Writes OUTPUT/train.parquet
(2101 rows), OUTPUT/validation.parquet (300 rows) and OUTPUT/test.parquet (601 rows), with

    config.data.train = ("data/geo3k/train.parquet",)
    config.data.val = ("data/geo3k/test.parquet",)
    config.reward.functions = ("math",)
"""

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.sources.files import read_rows

SPLITS = ("train", "validation", "test")
INSTRUCTION = (  # verl's
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    "answer MUST BE put in \\boxed{}."
)


def convert(row: dict[str, Any], *, place: str, split: str, index: int, instruction: str) -> dict:
    """One row in verl's schema, with its images as bytes."""
    problem, answer, images = (row.get(name) for name in ("problem", "answer", "images"))
    images = images if isinstance(images, list) else []
    has_bytes = all(isinstance(image, dict) and image.get("bytes") for image in images)
    n_places = problem.count("<image>") if isinstance(problem, str) else 0
    if not isinstance(answer, str) or not images or not has_bytes or n_places != len(images):
        raise ValueError(
            f'{place} is not a Geometry3K row; give a "problem" with one <image> for each of the '
            '"images" ({"bytes", "path"}), and an "answer"'
        )
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{problem} {instruction}".strip()}],
        "images": [{"bytes": image["bytes"], "path": image.get("path")} for image in images],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": problem, "answer": answer},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--input", type=Path, required=True, help="folder of the dataset")
    parser.add_argument("--output", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--instruction", default=INSTRUCTION, help="appended to every problem")
    args = parser.parse_args()

    splits = [split for split in SPLITS if any(args.input.rglob(f"{split}*.parquet"))]
    if not splits:
        parser.error(f"{args.input} has no parquet file of the splits {', '.join(SPLITS)}")
    args.output.mkdir(parents=True, exist_ok=True)
    for split in splits:
        rows = [
            convert(row, place=place, split=split, index=i, instruction=args.instruction)
            for i, (place, row) in enumerate(read_rows(f"{args.input}?split={split}"))
        ]
        path = args.output / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
