"""The tokenizer of a checkpoint folder: loading, checks, stop and padding tokens."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint folder. Reads only that folder, never a hub.

    Raises FileNotFoundError if the folder or its tokenizer is missing, ValueError if it is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; set model.path to a Hugging Face checkpoint folder"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(
            f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy "
            "tokenizer.json and tokenizer_config.json of the model into it"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many types
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the tokenizer in {folder} cannot be loaded ({reason}); replace tokenizer.json and "
            "tokenizer_config.json with those of the model"
        ) from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab: int) -> None:
    """Raises ValueError if the tokenizer has token ids outside a model's `vocab` embedding rows."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(
            f"the tokenizer has token ids up to {largest} ({token!r}), the model only {vocab} "
            "embedding rows (ids below it); use the tokenizer that belongs to the model in "
            "model.path, or resize the model's embeddings"
        )


def check_same_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: str | Path, key: str, vocab: int
) -> None:
    """Raises ValueError unless the model in `folder` uses the same token ids as `tokenizer`.

    `key` is the config key that names the folder, `vocab` the model's number of embedding rows.
    """
    theirs, ours = load_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    differ = [token for token, i in ours.items() if theirs.get(token) != i]
    differ += [token for token in theirs if token not in ours]
    if differ:
        raise ValueError(
            f"{key}: the tokenizer of {folder} differs from the policy's in {len(differ)} tokens "
            f"(for example {differ[0]!r}); use a model of the policy's family"
        )
    if max(ours.values()) >= vocab:
        raise ValueError(
            f"{key}: the model in {folder} has {vocab} embedding rows, the policy's tokenizer has "
            f"ids up to {max(ours.values())}; use a model of the policy's family"
        )


def stop_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end a completion, ascending.

    These are the tokenizer's end-of-sequence token and eos_token_id of generation_config.json (one
    id or a list), or of config.json if that file is absent. Raises ValueError if there is none.
    """
    found = _id_set(tokenizer.eos_token_id)
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.is_file():
            found |= _id_set(json.loads(path.read_text()).get("eos_token_id"))
            break
    if not found:
        raise ValueError(
            f"neither the tokenizer nor generation_config.json in {folder} has an end-of-sequence "
            "token, so no completion could end; set eos_token_id in generation_config.json"
        )
    return tuple(sorted(found))


def padding_id(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """A padding token that does not end a completion; None if there is none.

    The tokenizer's own padding token is preferred, then its other special tokens.
    """
    stop = stop_ids(folder, tokenizer)
    known = [tokenizer.pad_token_id, *sorted(tokenizer.all_special_ids)]
    known += sorted(tokenizer.added_tokens_decoder)
    return next((i for i in known if i is not None and i not in stop), None)


def _id_set(ids: Any) -> set[int]:
    """The ids in None, one id or a list of ids."""
    return set() if ids is None else set(ids if isinstance(ids, list) else [ids])
