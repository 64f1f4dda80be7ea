"""The folder of a run: whose it is, and whether this run may go on in it."""

from jaxrl.config import RunConfig, config_hash, from_json, to_json
from jaxrl.schema import flatten, to_dict


def open_folder(cfg: RunConfig) -> None:
    """Makes cfg.run_path and writes config.json.

    Raises ValueError if the folder holds checkpoints of a run whose numbers this config would change.
    """
    path = cfg.run_path / "config.json"
    if any(cfg.run_path.glob("checkpoints/[0-9]*")) and path.is_file():
        old = from_json(path.read_text())
        if config_hash(old) != config_hash(cfg):
            was, now = flatten(to_dict(old)), flatten(to_dict(cfg))
            changed = [f"{k}: {was[k]!r} -> {now[k]!r}" for k in now if was.get(k) != now[k]]
            raise ValueError(
                f"{cfg.run_path} holds the checkpoints of another run; this one would change "
                f"{'; '.join(changed)}. Set config.run_dir to another folder, or undo the changes to go on"
            )
    cfg.run_path.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(cfg))
