"""How a run leaves its folder: checkpoints, export, report, and a word on how to go on."""

import dataclasses
import shlex
import sys
from pathlib import Path

from jaxrl.data.tokenizer import padding_id
from jaxrl.learner.state import averaged
from jaxrl.models.decoder import Decoder, with_heads
from jaxrl.models.files.hf_save import save_model
from jaxrl.report import write_report
from jaxrl.trainer.run import Job
from jaxrl.types import TrainState
from sharding import hosts


def save(run: Job) -> None:
    """Starts the checkpoint of this step: the state, and all else that the next step depends on."""
    host = {
        "step": run.step,
        "iterator": run.position,
        "coefs": dataclasses.asdict(run.coefs),
        "reward_scale": dataclasses.asdict(run.reward_scale),
        "validated_at": run.validated_at,
        "val_metrics": run.val_metrics,
    }
    metrics = run.val_metrics if run.validated_at == run.step else {}
    with run.timed("save_checkpoint"):
        run.checkpoints.save(run.step, saved_state(run), host, metrics)
    run.saved_at = run.step


def saved_state(run: Job) -> TrainState:
    """With the reference model where it is not that of step 0, and the state of a critic of its own."""
    ref = run.ref_params if run.cfg.algorithm.ref_refresh_every else None
    critic = None if run.critic is None else run.critic.state
    return dataclasses.replace(run.state, ref=ref, critic=critic)


def stopped(run: Job, signal: object) -> None:
    """Waits for the checkpoint and says how to go on."""
    run.checkpoints.wait()
    run.progress.status(
        f"{signal}: saved after step {run.step} of {run.total_steps}. To go on:\n"
        f"  {resume_command()}"
    )
    if hosts.is_main_process():
        write_report(run.folder)


def finish(run: Job) -> None:
    """The last checkpoint, the weights as a Hugging Face folder, and the report."""
    run.checkpoints.wait()
    if run.cfg.checkpoint.export_hf:
        export(run)
    if hosts.is_main_process():
        run.progress.status(f"report in {write_report(run.folder)}")


def export(run: Job) -> None:
    """A language model in hf/, its average in hf_ema/, the values beside it as a sequence classifier in hf_critic/; a
    model of scores alone is such a classifier, in hf/ and hf_ema/."""
    params, critic = run.state.params, run.critic
    has_logits = "vocab" in params.cfg.heads
    heads = ("vocab",) if has_logits else params.cfg.heads
    save = save_language_model if has_logits else save_classifier
    save(run, run.folder / "hf", with_heads(params, heads), run.model_folder)
    run.progress.status(f"Hugging Face export in {run.folder / 'hf'}")
    if run.cfg.learner.ema:
        average = with_heads(averaged(run.state), heads)
        save(run, run.folder / "hf_ema", average, run.model_folder)
        run.progress.status(f"the averaged weights in {run.folder / 'hf_ema'}")
    if critic is not None:
        with critic.values.layout.on_mesh():
            save_classifier(run, run.folder / "hf_critic", critic.state.params, critic.folder)
    elif run.values is not None and has_logits:
        values = with_heads(params, ("score",))
        save_classifier(run, run.folder / "hf_critic", values, run.model_folder)


def save_language_model(run: Job, target: Path, params: Decoder, source: Path) -> None:
    save_model(target, params, source=source)


def save_classifier(run: Job, target: Path, params: Decoder, source: Path) -> None:
    """With the padding token by which transformers finds the last token of a row, and the chat template of the run:
    its scores are of texts so written."""
    ids = {"pad_token_id": padding_id(source, run.renderer.tokenizer)}
    save_model(target, params, source=source, config=ids)
    if run.cfg.data.chat_template and hosts.is_main_process():
        (target / "chat_template.jinja").write_text(run.renderer.template)


def resume_command() -> str:
    """This process's command with config.resume set."""
    argv = [a for a in sys.argv[1:] if not a.startswith("--config.resume")]
    name = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
    program = name if name.startswith("jaxrl.") else "jaxrl.train"
    return shlex.join(["python", "-m", program, *argv, "--config.resume=True"])
