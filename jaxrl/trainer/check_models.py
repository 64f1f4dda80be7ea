"""The models beside the policy, a critic's and a teacher's: whether they read and write its tokens."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from jaxrl.config.keys import RunConfig
from jaxrl.data.tokenizer import check_same_tokenizer
from jaxrl.learner.requirements import full_kl_in_loss
from jaxrl.models.config import DecoderConfig
from jaxrl.models.files.hf_load import model_config


def check_critic(cfg: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the critic's model has another tokenizer than the policy."""
    if cfg.critic.path:
        key, n_rows = f"config.critic.path={cfg.critic.path}", model_config(folder).V
        check_same_tokenizer(tokenizer, folder, key, n_rows)


def check_teacher(
    cfg: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase, policy: DecoderConfig
) -> None:
    """Raises ValueError if the teacher has another tokenizer, or if a KL over the vocabulary cannot compare its
    logits with the policy's."""
    if not cfg.algorithm.teacher:
        return
    key, teacher = f"config.algorithm.teacher={cfg.algorithm.teacher}", model_config(folder)
    check_same_tokenizer(tokenizer, folder, key, teacher.V)
    ours, theirs = (policy.V, policy.logit_softcap), (teacher.V, teacher.logit_softcap)
    if full_kl_in_loss(cfg) and ours != theirs:
        raise ValueError(
            f"{key}: config.algorithm.kl={cfg.algorithm.kl!r} compares all logits, but the teacher has {theirs[0]} of "
            f"them, soft-capped at {theirs[1]}, and the policy {ours[0]} at {ours[1]}; set an algorithm.kl of sampled "
            "tokens, such as 'k1' with algorithm.kl_in='reward'"
        )
