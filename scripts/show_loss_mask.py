"""Shows what SFT trains on: the rows of a dataset as sequences, with the learned text in brackets.

    python scripts/show_loss_mask.py MODEL_FOLDER rows.jsonl --rows=1 enable_thinking=False

MODEL_FOLDER has the tokenizer and the chat template, rows.jsonl is any source of data.train. Words
NAME=VALUE are arguments of the chat template (data.template_kwargs).
"""

import argparse
import itertools
import sys

from jaxrl.config.choices import SPECIAL_TOKENS
from jaxrl.config.command_line import read_value
from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.demonstrations import demonstration_maker
from jaxrl.data.items import load_items
from jaxrl.data.tokenizer import load_tokenizer, stop_ids
from jaxrl.tracking.first_samples import with_brackets


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python scripts/show_loss_mask.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder with the tokenizer")
    parser.add_argument("data", help="file, folder or pattern, as in data.train")
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help="of the chat template")
    parser.add_argument("--rows", type=int, default=1, help="rows to show (default: %(default)s)")
    parser.add_argument("--chat-template", default="", help="as data.chat_template")
    parser.add_argument("--system-prompt", default="", help="as data.system_prompt")
    parser.add_argument(
        "--special-tokens", default="error", choices=SPECIAL_TOKENS, help="as data.special_tokens"
    )
    options = parser.parse_args(argv)
    words = [word.partition("=") for word in options.arguments]
    try:
        tokenizer = load_tokenizer(options.model)
        renderer = ChatRenderer(
            tokenizer,
            template=options.chat_template,
            system_prompt=options.system_prompt,
            arguments={name: read_value(text) for name, _, text in words},
            special_tokens=options.special_tokens,
        )
        data = DataConfig(max_response_len=1 << 20)
        maker = demonstration_maker(renderer, data, stop=stop_ids(options.model, tokenizer))
        found = load_items((options.data,), maker, max_rows=options.rows)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for row, sequences in itertools.groupby(found, lambda d: d.id):
        for i, sequence in enumerate(sequences):
            n = f"{len(sequence.prompt_tokens) + len(sequence.tokens)} tokens"
            print(f"--- row {row}, sequence {i}, {n}, {sequence.n_loss_tokens} learned")
            arrays = sequence.prompt_tokens, sequence.tokens, sequence.loss_mask
            print(with_brackets(renderer.learned_parts(*arrays)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
