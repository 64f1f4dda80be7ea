"""The run folder: creates or reuses it, and compares its config with that of an earlier run."""

from pathlib import Path

from jaxrl.config.keys import RunConfig
from jaxrl.config.saved import config_hash, differences, from_json, to_json
from sharding import hosts


def read_run_config(folder: Path) -> RunConfig | None:
    """The configuration of the run in `folder`; None if it is not a run folder.

    Raises ValueError if its config.json has keys that no longer exist.
    """
    path = folder / "config.json"
    is_run_folder = (folder / "hf").is_dir() or (folder / "checkpoints").is_dir()
    if not is_run_folder or not path.is_file():
        return None
    try:
        return from_json(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{error}\nTo use the exported model without this config, set {folder / 'hf'}"
        ) from error


def open_folder(cfg: RunConfig) -> None:
    """Creates cfg.run_path and writes config.json. Other processes check that the file exists.

    Raises ValueError if the folder has checkpoints of a run whose results this config would change.
    """
    path = cfg.run_path / "config.json"
    if not hosts.is_main_process():
        if not path.is_file():
            raise ValueError(
                f"the run folder {cfg.run_path.absolute()} of process 0 does not exist on this "
                "host; set config.run_dir to a folder on a disk that all hosts share"
            )
        return
    if any(cfg.run_path.glob("checkpoints/[0-9]*")) and path.is_file():
        old = from_json(path.read_text())
        if config_hash(old) != config_hash(cfg):
            raise ValueError(
                f"{cfg.run_path} holds the checkpoints of another run; this one would change "
                f"{'; '.join(differences(old, cfg))}. Set config.run_dir to another folder, or "
                "undo the changes to resume"
            )
    cfg.run_path.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(cfg))
