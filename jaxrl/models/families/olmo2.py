"""OLMo 2 (https://arxiv.org/abs/2501.00656).

Norms only after the mixer and after the MLP; the queries of all heads have one norm, and so have
the keys.
"""

from typing import Any

from jaxrl.models.config import POST_NORMS, DecoderConfig
from jaxrl.models.families import entries, fields

ENTRIES = entries.Entries(
    classes=("Olmo2",),
    read=entries.READ | entries.LATER_LEN | {"hidden_act", "attention_bias"},
)
DEFAULTS: dict[str, Any] = dict(rms_norm_eps=1e-5)  # of transformers


def olmo_config(c: fields.ConfigJson, family: str, **more: Any) -> DecoderConfig:
    """The config fields that OLMo 2 and 3 share."""
    bias = c.get("attention_bias", False)
    return fields.base_config(
        c,
        family,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        joint_norm=True,
        norms=POST_NORMS,
        **more,
    )


def from_hf(c: fields.ConfigJson) -> DecoderConfig:
    c = DEFAULTS | dict(c)
    return olmo_config(c, "olmo2", windows=fields.uniform_windows(c, None))


def to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    base = fields.base_json(cfg, "olmo2", "Olmo2ForCausalLM")
    return base | dict(attention_bias=cfg.attention_layers[0].qkv_bias)
