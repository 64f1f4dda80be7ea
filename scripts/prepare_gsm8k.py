"""Converts GSM8K's JSONL files to parquet in verl's schema.

    uv run python scripts/prepare_gsm8k.py --input=path/to/gsm8k --output=data/gsm8k

--input has train.jsonl and test.jsonl from github.com/openai/grade-school-math (one
{"question", "answer": "... #### 72"} per line); either may be absent. Writes OUTPUT/train.parquet
(7473 rows) and OUTPUT/test.parquet (1319 rows). Train on them with

    config.data.train = ("data/gsm8k/train.parquet",)
    config.data.val = ("data/gsm8k/test.parquet",)
    config.reward.functions = ("gsm8k",)  # "gsm8k?method=flexible" takes any last number
"""

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl.data.sources.files import read_rows

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's


def convert(row: dict[str, Any], *, place: str, split: str, index: int, instruction: str) -> dict:
    """One row in verl's schema. The ground truth is the number after "####", without commas."""
    if not isinstance(row.get("question"), str) or "####" not in str(row.get("answer")):
        raise ValueError(
            f'{place} is not a GSM8K row; give a "question" and an "answer" that ends in "#### n"'
        )
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{row['question']} {instruction}".strip()}],
        "ability": "math",
        "reward_model": {
            "style": "rule",
            "ground_truth": row["answer"].rpartition("####")[2].strip().replace(",", ""),
        },
        "extra_info": {
            "split": split,
            "index": index,
            "question": row["question"],
            "answer": row["answer"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--input", type=Path, required=True, help="folder with train.jsonl and test.jsonl"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--instruction", default=INSTRUCTION, help="appended to every question")
    args = parser.parse_args()

    files = [args.input / f"{split}.jsonl" for split in ("train", "test")]
    files = [file for file in files if file.is_file()]
    if not files:
        parser.error(f"{args.input} has neither train.jsonl nor test.jsonl")
    args.output.mkdir(parents=True, exist_ok=True)
    for file in files:
        rows = [
            convert(row, place=place, split=file.stem, index=i, instruction=args.instruction)
            for i, (place, row) in enumerate(read_rows(str(file)))
        ]
        path = args.output / f"{file.stem}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
