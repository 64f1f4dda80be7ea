"""Writes the checkpoints, the Hugging Face export and the report of a run."""

import dataclasses
import shlex
import sys
from pathlib import Path

import jax

from jaxrl.checkpoint.errors import CheckpointError, one_line
from jaxrl.learner.state import averaged, checkpoint_state
from jaxrl.models.decoder import Decoder, with_heads
from jaxrl.models.files.adapter import save_adapter
from jaxrl.models.files.export_form import copied_tensors
from jaxrl.models.files.hf_config import config_path
from jaxrl.models.files.hf_save import save_model
from jaxrl.models.files.kept_record import warn_of_change
from jaxrl.report import write_report
from jaxrl.runtime.folder_lock import FolderLockError
from jaxrl.tracking.logger import warn
from jaxrl.trainer.core import Core
from jaxrl.trainer.export import classifier_settings, language_model_settings
from jaxrl.trainer.phases.update import NonFiniteError
from jaxrl.types import TrainState
from sharding import hosts


def save(core: Core) -> None:
    """Starts an asynchronous checkpoint of all state that the next step depends on."""
    core.check_lock()
    host = {
        "step": core.clock.step,
        "iterator": core.position,
        "contents": core.contents,
        "coefs": dataclasses.asdict(core.coefs),
        "reward_scale": dataclasses.asdict(core.reward_scale),
        "role_baselines": dict(core.role_baselines),
        "length_stage": dataclasses.asdict(core.length_stage),
        "validated_at": core.clock.validated_at,
        "val_metrics": core.clock.val_metrics,
    }
    if core.in_flight is not None:
        host["in_flight"] = core.in_flight()
    metrics = core.clock.val_metrics if core.clock.validated_at == core.clock.step else {}
    with core.clock.timed("save_checkpoint"):
        core.checkpoints.save(core.clock.step, saved_state(core), host, metrics)
    core.clock.saved_at = core.clock.step


def saved_state(core: Core) -> TrainState:
    """The training state, plus a separate critic, and the reference model if it is refreshed.

    Frozen parameters are left out: a resumed run reads them from the model's folder.
    """
    ref = core.ref_params if core.cfg.algorithm.ref_refresh_every else None
    critic = None if core.learner.critic is None else checkpoint_state(core.learner.critic.state)
    return dataclasses.replace(checkpoint_state(core.state), ref=ref, critic=critic)


def check_disk(core: Core) -> None:
    """Warns if a later checkpoint or the export of the run does not fit the disk.

    Raises CheckpointError if the first one does not fit.
    """
    step, total = core.clock.step, core.clock.total_steps
    if core.clock.done:
        return
    every = core.cfg.checkpoint.every or total
    n_saves = -(-total // every) - step // every
    exported = [core.state.params] * (1 + bool(core.cfg.learner.ema))
    exported += [] if core.learner.critic is None else [core.learner.critic.params]
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(exported))
    copied = copied_tensors(core.models.folders.policy)  # such as a vision tower
    n_bytes += sum(tensor.n_bytes for tensor in copied.values())
    warning = core.checkpoints.check_room(
        saved_state(core),
        n_saves=n_saves,
        export_bytes=n_bytes if core.cfg.checkpoint.export_hf else 0,
    )
    if warning and hosts.is_main_process():
        warn(warning)


def save_after_error(core: Core, error: Exception) -> None:
    """Saves the last complete step of a run that ends with `error`, such as lost reward workers.

    The state is intact until the first update of a step. A save needs all processes, so with
    several it happens only for errors that all of them raise. If it fails too, that is reported.
    """
    agreed = hosts.n_processes() == 1 or isinstance(error, hosts.AgreedError | NonFiniteError)
    cannot_save = isinstance(error, CheckpointError | FolderLockError)
    if not core.clock.step_restartable or not agreed or cannot_save:
        return
    try:
        save(core)
        report_saved(core, "the run stops with an error")
    except Exception as failure:
        core.session.progress.status(
            f"the last complete step could not be saved: {one_line(failure)}"
        )


def report_saved(core: Core, reason: str) -> None:
    """Waits for the checkpoint and prints how to resume the run."""
    core.checkpoints.wait()
    core.session.progress.status(
        f"{reason}: saved after step {core.clock.step} of {core.clock.total_steps}. To resume:\n"
        f"  {resume_command()}"
    )
    if hosts.is_main_process():
        write_report(core.cfg.run_path)


def finish(core: Core) -> None:
    """Waits for the last checkpoint, then writes the Hugging Face export and the report."""
    core.checkpoints.wait()
    if core.cfg.checkpoint.export_hf:
        export(core)
    if hosts.is_main_process():
        core.session.progress.status(f"report in {write_report(core.cfg.run_path)}")


def export(core: Core) -> None:
    """Exports the model to hf/, the averaged weights to hf_ema/, and the critic to hf_critic/.

    The policy is exported as a causal language model, or as the image-and-text model that it is a
    part of; a critic or reward model as a sequence classifier. Adapters are merged into these
    models, and exported by themselves to adapter/.
    Raises ValueError if the policy's folder was removed or damaged during the run.
    """
    with hosts.raise_together():
        check_source(core)
    params, critic = core.state.params, core.learner.critic
    has_logits = "vocab" in params.cfg.heads
    heads = ("vocab",) if has_logits else params.cfg.heads
    write = save_language_model if has_logits else save_classifier
    write(core, core.cfg.run_path / "hf", with_heads(params, heads), core.models.folders.policy)
    core.session.progress.status(f"Hugging Face export in {core.cfg.run_path / 'hf'}")
    if params.cfg.lora is not None:
        save_adapter(
            core.cfg.run_path / "adapter",
            params,
            base=core.cfg.model.path,
            source=core.models.folders.policy,
        )
        core.session.progress.status(f"adapter in PEFT's format in {core.cfg.run_path / 'adapter'}")
    if core.cfg.learner.ema:
        average = with_heads(averaged(core.state), heads)
        write(core, core.cfg.run_path / "hf_ema", average, core.models.folders.policy)
        core.session.progress.status(f"averaged weights in {core.cfg.run_path / 'hf_ema'}")
    if critic is not None:
        with critic.scorer.layout.on_mesh():
            save_classifier(core, core.cfg.run_path / "hf_critic", critic.params, critic.folder)
    elif core.learner.value_scorer is not None and has_logits:
        values = with_heads(params, ("score",))
        save_classifier(core, core.cfg.run_path / "hf_critic", values, core.models.folders.policy)


def check_source(core: Core) -> None:
    """Compares the policy's folder with that at the start; an export reads the rest from it.

    Only the main process does. Raises ValueError if the folder is gone or has lost its files.
    """
    run, folder = core.cfg.run_path, core.models.folders.policy
    if not hosts.is_main_process():
        return
    try:
        config_path(folder)
        if "vocab" in core.state.params.cfg.heads:
            warn_of_change(run, folder)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"an export copies the configuration, the tokenizer and tensors that are not trained "
            f"from the model folder, and {error}. Nothing of the run is lost: its checkpoint of "
            f"step {core.clock.step} is complete. Restore the folder, then run python -m "
            f"jaxrl.convert {run} --step=last --output={run / 'hf'}"
        ) from error


def save_language_model(core: Core, target: Path, params: Decoder, source: Path) -> None:
    """Writes a causal language model with the chat template and the stop tokens of the run."""
    settings = language_model_settings(core.cfg, core.models.renderer, source)
    save_model(target, params, source=source, settings=settings)


def save_classifier(core: Core, target: Path, params: Decoder, source: Path) -> None:
    """Writes a sequence classifier with the run's chat template and a padding token."""
    settings = classifier_settings(core.cfg, core.models.renderer, source)
    save_model(target, params, source=source, settings=settings)


def resume_command() -> str:
    """The command line of this process with config.resume set; words if it is another program."""
    if not any(arg.lstrip("-").startswith("config") for arg in sys.argv[1:]):
        return "call jaxrl.train again with the same arguments"
    argv = [a for a in sys.argv[1:] if not a.startswith("--config.resume")]
    name = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    program = name if name.startswith("jaxrl.") else "jaxrl.train"
    return shlex.join(["python", "-m", program, *argv, "--config.resume=True"])
