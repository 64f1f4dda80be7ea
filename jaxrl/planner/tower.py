"""Memory of a vision tower and of its training, for the formulas of plans."""

import dataclasses

import jax

from jaxrl.config.remat import parse_remat
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split, with_adapters
from jaxrl.models.spec import count_params, is_spec
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.flops import tower_activation_bytes
from jaxrl.models.vision.tower import tower_specs
from jaxrl.planner.sizes import CandidateSettings, Job, Sizes


def tower_bytes(
    job: Job, tower: TowerConfig, policy: Sizes, settings: CandidateSettings
) -> tuple[float, float]:
    """(bytes of the state, of an update's gradients and activations) of a tower on a device.

    Without training it has weights only. Else the sizes of `policy` hold for it too: bytes of the
    optimizer state and of summed gradients for each parameter that is trained. The reference has
    another copy. A micro-batch may show images at all of its tokens, whose blocks are recomputed,
    or at a quarter of them, with the policy of the decoder (`Decoder.encode_images`). The stages of
    a pipeline share the patches, and each has the whole tower.
    """
    shards = policy.fsdp * policy.tensor
    weights = policy.item_bytes * count_params(tower_specs(tower)) / shards
    if job.decoder.tower is None:
        return weights, 0.0
    whole = dataclasses.replace(with_adapters(job.cfg.lora, job.decoder), stacked=True)
    trained = split(decoder_specs(whole))[0].tower
    specs = jax.tree.leaves(trained, is_leaf=is_spec)
    n_trained = count_params([spec for spec in specs if is_spec(spec)]) / shards
    copies = 1 + (job.keeps_reference and "reference" not in settings.offload)
    state, sums = copies * weights, 0.0
    if "optimizer" not in settings.offload:
        state += n_trained * policy.optimizer_bytes / policy.trained
    if "gradients" not in settings.offload:
        sums = n_trained * policy.gradient_bytes / policy.trained
    n_patches = int(policy.local_tokens / policy.stage) * tower.merge**2
    size = policy.item_bytes
    most = tower_activation_bytes(tower, n_patches, size)
    few = tower_activation_bytes(tower, n_patches // 4, size)
    kept = {"full": 0, "offload": 0, "attention": 1, "mlp": 1}
    products = 4 + 2 * tower.ffn.n_matrices * tower.ffn.F / tower.D
    factors = [
        kept.get(part.policy, products) * part.n_layers
        for part in parse_remat(settings.remat).ranges(tower.L)
    ]
    few += n_patches // 4 * size * tower.D * sum(factors) / policy.tensor
    return state, sums + max(most, few)
