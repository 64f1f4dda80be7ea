"""The tokenizer of a checkpoint folder: loading, checks, stop and padding tokens."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jaxrl.data.tokenizer_trial import try_tokenizer
from jaxrl.json_text import read_object

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(
    folder: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint folder. Reads only that folder, never a hub.

    Its tokenizer.json is tried in a child process first. Python code in the folder runs only with
    `trust_remote_code`. Raises FileNotFoundError if the folder or its tokenizer is missing,
    ValueError if it is broken or needs such code.
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
        if (file := folder / "tokenizer.json").is_file():
            try_tokenizer(file)
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except BaseException as error:  # transformers raises many types, and tokenizers panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the tokenizer in {folder} is Python code (auto_map in tokenizer_config.json), "
                "which is not run; use a model whose tokenizer class is part of transformers, or "
                "read the code and set config.model.trust_remote_code=True"
            ) from error
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the tokenizer in {folder} cannot be loaded ({reason[:300]}); replace tokenizer.json "
            "and tokenizer_config.json with those of the model"
        ) from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab: int) -> None:
    """Raises ValueError if the tokenizer has token ids outside a model's `vocab` embedding rows."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(
            f"the tokenizer has token ids up to {largest} ({token!r}), the model only {vocab} "
            "embedding rows (ids below it); use the tokenizer that belongs to the model in "
            "model.path, or resize the model's embeddings"
        )


def check_same_tokenizer(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, key: str, vocab: int
) -> None:
    """Raises ValueError unless the tokenizer `other` has the same token ids as `tokenizer`.

    `key` is the config key of the other model, `vocab` that model's number of embedding rows.
    """
    theirs, ours = other.get_vocab(), tokenizer.get_vocab()
    differ = [token for token, i in ours.items() if theirs.get(token) != i]
    differ += [token for token in theirs if token not in ours]
    if differ:
        raise ValueError(
            f"{key}: its tokenizer differs from the policy's in {len(differ)} tokens "
            f"(for example {differ[0]!r}); use a model of the policy's family"
        )
    if max(ours.values()) >= vocab:
        raise ValueError(
            f"{key}: the model has {vocab} embedding rows, the policy's tokenizer has "
            f"ids up to {max(ours.values())}; use a model of the policy's family"
        )


def stop_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end a completion, ascending.

    These are the tokenizer's end-of-sequence token and eos_token_id of generation_config.json (one
    id or a list), or of config.json if that file is absent. Raises ValueError if there is none, or
    if that entry is malformed.
    """
    found = _id_set(tokenizer.eos_token_id)
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.exists():
            found |= _eos_ids(path)
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


def _eos_ids(path: Path) -> set[int]:
    """eos_token_id of a JSON file."""
    value = read_object(path, "use the model's own file").get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if value is not None and not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError(f"eos_token_id in {path} is neither a token id nor a list of them")
    return _id_set(value)


def _id_set(ids: Any) -> set[Any]:
    """The ids in None, one id or a list of ids."""
    return set() if ids is None else set(ids if isinstance(ids, list) else [ids])
