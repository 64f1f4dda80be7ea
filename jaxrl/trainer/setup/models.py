"""Resolves the model folders of a run and checks that all models use the policy's tokenizer."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from jaxrl.checkpoint.checkpointer import complete_steps
from jaxrl.config.keys import RunConfig, SamplingConfig
from jaxrl.config.teachers import Teacher, model_teachers
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.template import prints_date
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.tokenizer import check_same_tokenizer, check_tokenizer, load_tokenizer, stop_ids
from jaxrl.learner.requirements import full_kl_in_loss
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.adapter import (
    check_adapter,
    check_base_copies,
    warn_of_other_base,
)
from jaxrl.models.files.hf_load import classifier_config, model_config
from jaxrl.models.files.source import resolve_model
from jaxrl.models.files.weight_files import find_tensors, frozen_parts
from jaxrl.models.lora import adapters, check_frozen_parts, frozen_tensors
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.files import same_tower
from jaxrl.models.vision.towers import known_tower, with_trained_tower
from jaxrl.tracking.progress import Progress
from sharding import hosts

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelFolders:
    """The local folder of every model of a run."""

    policy: Path
    critic: Path  # the policy's folder unless critic.path is set
    teachers: Mapping[str, Path]  # those on the devices by role: "teacher", "teacher_2", ...
    reward_model: Path | None
    judge: Path | None  # of weights = "checkpoint"
    # Those of teachers, by role; without one, a teacher reads the policy's features.
    teacher_towers: Mapping[str, TowerConfig] = dataclasses.field(default_factory=dict)

    @property
    def reference(self) -> Path:
        """The first teacher's folder, or the policy's."""
        return self.teachers.get("teacher", self.policy)

    def other_configs(self) -> dict[str, DecoderConfig]:
        """The configs of the models other than the policy, keyed by the planner's role names."""
        folders = {"critic": self.critic, "teacher": self.reference, **self.teachers}
        if self.judge is not None:
            folders["judge"] = self.judge
        towers = self.teacher_towers
        found = {
            name: dataclasses.replace(model_config(folder), tower=towers.get(name))
            for name, folder in folders.items()
        }
        if self.reward_model is not None:
            found["reward_model"] = classifier_config(self.reward_model)
        return found


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of a run before the devices are opened."""

    folders: ModelFolders
    decoder: DecoderConfig  # "auto" values are not resolved yet
    renderer: ChatRenderer
    images: ImageReader | None  # None: the run has no images
    tower: TowerConfig | None  # that computes their features
    judge: ChatRenderer | None = None  # of reward.judge.path


def open_models(cfg: RunConfig, progress: Progress) -> Models:
    """Opens the model folders. The main process downloads first.

    Raises ValueError or OSError if a folder or model is invalid.
    """
    with hosts.main_process_first():
        policy = resolve_model(cfg.model.path)
        folders = ModelFolders(
            policy=policy,
            critic=resolve_optional("critic.path", cfg.critic.path) or policy,
            teachers={
                role: resolve_model(teacher.path, key=f"config.{teacher.key}")
                for role, teacher in model_teachers(cfg.algorithm).items()
            },
            reward_model=resolve_optional("reward_model.path", cfg.reward_model.path),
            judge=resolve_optional("reward.judge.path", cfg.reward.judge.path),
        )
    with hosts.raise_together():
        decoder = model_config(policy)
        renderer, images = open_text(cfg, policy, decoder)
        tower = known_tower(policy) if cfg.data.images else None
        if prints_date(renderer.template):
            progress.status(f"the chat template prints a date: {cfg.data.today} (data.today)")
        if images is not None:
            decoder = with_trained_tower(decoder, tower, cfg.model.freeze_vision)
            check_roles_with_images(cfg, folders)
            towers = {
                role: other_tower(cfg, teacher, folders.teachers[role], policy, images)
                for role, teacher in model_teachers(cfg.algorithm).items()
            }
            towers = {role: tower for role, tower in towers.items() if tower is not None}
            folders = dataclasses.replace(folders, teacher_towers=towers)
        check_critic(cfg, folders.critic, renderer.tokenizer)
        for role, teacher in model_teachers(cfg.algorithm).items():
            check_teacher(cfg, teacher, folders.teachers[role], renderer.tokenizer, decoder)
        check_adapters(cfg, folders, decoder)
        judge = None if folders.judge is None else open_judge_text(cfg, folders.judge)
    return Models(folders, decoder, renderer, images, tower, judge)


def make_renderer(cfg: RunConfig, folder: Path, decoder: DecoderConfig) -> ChatRenderer:
    """The policy's tokenizer with the chat template of the config."""
    return open_text(cfg, folder, decoder)[0]


def open_text(
    cfg: RunConfig, folder: Path, decoder: DecoderConfig
) -> tuple[ChatRenderer, ImageReader | None]:
    """(`make_renderer`, the reader of images if data.images asks for one).

    Raises ValueError for a model that reads no images.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    check_tokenizer(tokenizer, decoder.V)
    data = cfg.data
    images = ImageReader(folder, tokenizer, data) if data.images else None
    renderer = ChatRenderer(
        tokenizer,
        template=data.chat_template,
        system_prompt=data.system_prompt,
        arguments=data.template_kwargs,
        today=data.date,
        special_tokens=data.special_tokens,
        images=None if images is None else images.placeholders,
    )
    if data.chat_template:  # a checkpoint's own template belongs to its tokenizer
        warn_of_endless_turns(renderer, stop_ids(folder, tokenizer), cfg.rollout.sampling)
    return renderer, images


def open_judge_text(cfg: RunConfig, folder: Path) -> ChatRenderer:
    """The tokenizer and the chat template of a judge from reward.judge.path.

    Raises ValueError if its template rejects a system message, which has the rubric.
    """
    judge = cfg.reward.judge
    tokenizer = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    check_tokenizer(tokenizer, model_config(folder).V)
    renderer = ChatRenderer(tokenizer, template=judge.chat_template, today=cfg.data.date)
    try:
        renderer.render([{"role": role, "content": "?"} for role in ("system", "user")])
    except ValueError as error:
        raise ValueError(
            f"config.reward.judge.path={judge.path}: its chat template renders no request to a "
            f"judge, a system and a user message ({error}); set config.reward.judge.chat_template"
        ) from error
    return renderer


def warn_of_endless_turns(
    renderer: ChatRenderer, stop: Sequence[int], sampling: SamplingConfig
) -> None:
    """Warns if the template ends a turn with nothing that stops generation."""
    end = renderer.turn_end()
    tokens = renderer.tokenizer(end, add_special_tokens=False)["input_ids"]
    stops = {*stop, *sampling.stop_token_ids}
    if not stops.intersection(tokens) and not any(text in end for text in sampling.stop):
        logger.warning(
            "data.chat_template ends an assistant turn with %r, which has no stop token (%s), so a "
            "model that follows it never stops; add its token to rollout.sampling.stop_token_ids, "
            "or set another template",
            end[:40],
            ", ".join(map(repr, renderer.tokenizer.convert_ids_to_tokens(sorted(stops)))),
        )


def resolve_optional(key: str, path: str) -> Path | None:
    """The folder of a model other than the policy; None if the key is not set."""
    return resolve_model(path, key=f"config.{key}") if path else None


def check_roles_with_images(cfg: RunConfig, folders: ModelFolders) -> None:
    """Raises ValueError for images with a reward model, and with a critic of another tower."""
    if cfg.reward_model.path:
        raise ValueError(
            "config.reward_model.path scores text, and the run has images (config.data.images); "
            "leave it out, and score responses with config.reward.functions"
        )
    if folders.critic != folders.policy and not same_tower(folders.policy, folders.critic):
        raise ValueError(
            f"config.critic.path={folders.critic} has not the vision tower of the policy, whose "
            "features a critic of images (config.data.images) reads; set it to a model that was "
            "trained from the policy's model with a frozen tower, or leave it out"
        )


def other_tower(
    cfg: RunConfig, teacher: Teacher, folder: Path, policy: Path, images: ImageReader
) -> TowerConfig | None:
    """The tower of a teacher in a folder, if it is not the policy's.

    Raises ValueError for a teacher that reads images as other patches or as other tokens than the
    policy.
    """
    if folder == policy or same_tower(policy, folder):
        return None
    key = f"config.{teacher.key}={folder}"
    tower = known_tower(folder)
    tokenizer = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    if found := images.differences(ImageReader(folder, tokenizer, cfg.data)):
        raise ValueError(
            f"{key} reads an image otherwise than the policy: {', '.join(found)}. Set it to a "
            "model with the policy's image tokens and preprocessor_config.json"
        )
    if full_kl_in_loss(cfg):
        raise ValueError(
            f"{key} has not the vision tower of the policy, and config.algorithm.kl="
            f"{cfg.algorithm.kl!r} computes both models in one program with the features of one; "
            "set algorithm.kl_top_k, or an algorithm.kl of sampled tokens, such as 'k1' with "
            "algorithm.kl_in='reward'"
        )
    return tower


def check_critic(cfg: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the critic's tokenizer differs from the policy's."""
    if cfg.critic.path:
        key, n_rows = f"config.critic.path={cfg.critic.path}", model_config(folder).V
        other = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
        check_same_tokenizer(tokenizer, other, key, n_rows)


def check_teacher(
    cfg: RunConfig,
    named: Teacher,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    policy: DecoderConfig,
) -> None:
    """Raises ValueError if the teacher is incompatible with the policy.

    Both need the same tokenizer. A KL over the vocabulary also needs comparable logits.
    """
    key, teacher = f"config.{named.key}={named.path}", model_config(folder)
    other = load_tokenizer(folder, trust_remote_code=cfg.model.trust_remote_code)
    check_same_tokenizer(tokenizer, other, key, teacher.V)
    if cfg.algorithm.kl_top_k and policy.V < teacher.V:
        raise ValueError(
            f"{key} has {teacher.V} logits, more than the {policy.V} of the policy, which may have "
            "none of the teacher's most likely tokens (config.algorithm.kl_top_k); set "
            "algorithm.kl_top_k=0 with algorithm.kl='k1' and algorithm.kl_in='reward'"
        )
    same_logits = (policy.V, policy.logit_softcap) == (teacher.V, teacher.logit_softcap)
    if full_kl_in_loss(cfg) and not same_logits:
        raise ValueError(
            f"{key}: config.algorithm.kl={cfg.algorithm.kl!r} compares all logits, but the teacher "
            f"has {teacher.V} logits with soft cap {teacher.logit_softcap}, and the policy has "
            f"{policy.V} with soft cap {policy.logit_softcap}; set an algorithm.kl of sampled "
            "tokens, such as 'k1' with algorithm.kl_in='reward'"
        )


def check_adapters(cfg: RunConfig, folders: ModelFolders, policy: DecoderConfig) -> None:
    """Raises ValueError if the adapters of config.lora do not fit the policy or a separate critic.

    Those in config.lora.path must fit too, unless the run has them in a checkpoint already.
    """
    if cfg.lora.rank:
        frozen = frozen_tensors(frozen_parts(folders.policy), policy)
        check_frozen_parts(cfg.lora.target_modules, frozen)
    separate_critic = cfg.has_critic and not cfg.critic.shared
    for backbone in (policy, *([model_config(folders.critic)] if separate_critic else [])):
        decoder_specs(dataclasses.replace(backbone, lora=adapters(cfg.lora, backbone)))
    checkpoints = cfg.run_path / "checkpoints"
    resumes = checkpoints.is_dir() and bool(complete_steps(checkpoints))
    if cfg.lora.path and not resumes:
        decoder = dataclasses.replace(policy, lora=adapters(cfg.lora, policy))
        adapter = Path(cfg.lora.path).expanduser()
        check_adapter(adapter, decoder)
        warn_of_other_base(adapter, f"{cfg.model.path} ({folders.policy})")
        check_base_copies(adapter, find_tensors(folders.policy))
