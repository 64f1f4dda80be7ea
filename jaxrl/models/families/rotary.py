"""Rotary embedding in config.json: rope_theta, rope_scaling and rope_parameters.

transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`. Both are
read, together too. The older names are written, because every version understands them.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxrl.json_text import shown
from jaxrl.models.families.entries import is_off
from jaxrl.models.rope_config import LONG_ROPE, NO_ROPE, ROPE_KINDS, Rope

ConfigJson = Mapping[str, Any]
LOCAL, GLOBAL = "sliding_attention", "full_attention"
ORIGINAL_LEN = "original_max_position_embeddings"
# Entries of all rotary scalings; each reads its own, as in transformers.
KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    ORIGINAL_LEN,
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "finetuned",  # a note of the first YaRN models
}
# Positions of images; those of text are equal on all axes.
MROPE = {"mrope_section", "mrope_interleaved"}
INTERLEAVED, CHUNKED = "interleaved", "chunked"


def read_rope(
    c: ConfigJson,
    *,
    theta: float = 10_000.0,
    partial: bool = False,
    mrope: str = "",
    neutral: Collection[str] = (),
) -> Rope:
    """Rotary embedding of all layers; `theta` is the family's default base.

    `partial`: the family may rotate a part of each head only. `mrope`: it may have positions of
    images, and its pairs of an axis are "interleaved" or "chunked". `neutral`: entries without
    effect on the family.

    A non-empty rope_scaling replaces rope_parameters, as in transformers. Raises ValueError for
    scalings that are not in `ROPE_KINDS`, and if the replaced entry has another base.
    """
    new, old = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
    for name, entry in (("rope_parameters", new), ("rope_scaling", old)):
        if {LOCAL, GLOBAL} & entry.keys():
            raise ValueError(
                f"{name} by layer type is supported for gemma3 and olmo3 only; write one entry"
            )
    entries = top_entries(c, theta) | (old or new)
    base = entries["rope_theta"]
    if old and "rope_theta" not in old and new.get("rope_theta", base) != base:
        raise ValueError(
            f"rope_scaling replaces rope_parameters with its rope_theta={new['rope_theta']:g}, so "
            f"the base would be {base:g}; write rope_theta into rope_scaling, or the scaling into "
            "rope_parameters without rope_scaling"
        )
    if ORIGINAL_LEN in c:
        entries[ORIGINAL_LEN] = c[ORIGINAL_LEN]
    share, section = 1.0, ()
    if partial:
        share = float(entries.pop("partial_rotary_factor", 1.0))
    if mrope:
        section, neutral = _read_section(entries, mrope), MROPE
    entries = {name: value for name, value in entries.items() if name not in neutral}
    rope = parse_rope(entries, max_len=c["max_position_embeddings"])
    chunked = mrope == CHUNKED and bool(section)
    return dataclasses.replace(rope, rotary=share, mrope_section=section, mrope_chunked=chunked)


def _read_section(entries: dict[str, Any], mrope: str) -> tuple[int, ...]:
    """`mrope_section`, of which transformers reads three numbers in one order for each family.

    Older files of models with chunks name the type "mrope", which is "default" in `entries` then.
    """
    section = tuple(entries.get("mrope_section") or ())
    if section and (len(section) != 3 or min(section) < 0):
        raise ValueError(
            f"mrope_section is {shown(list(section))}; write three numbers of feature pairs, of "
            "time, height and width"
        )
    known = mrope == INTERLEAVED
    if (found := entries.get("mrope_interleaved")) not in (None, known):
        raise ValueError(
            f"mrope_interleaved is {shown(found)}, and transformers computes this model as if it "
            f"were {shown(known)}; set it to that if the weights may be used so"
        )
    for name in ("rope_type", "type"):
        if mrope == CHUNKED and entries.get(name) == "mrope":
            entries[name] = "default"
    return section


def top_entries(c: ConfigJson, theta: float) -> dict[str, Any]:
    """The entries that older files have at the top level, as defaults of the objects."""
    partial = "partial_rotary_factor"
    return {"rope_theta": c.get("rope_theta", theta)} | (
        {partial: c[partial]} if partial in c else {}
    )


def read_layer_ropes(
    c: ConfigJson, family: str, *, theta: float, local_theta: float
) -> tuple[Rope, Rope]:
    """(rotary embedding of global layers, of local layers) of Gemma 3 and OLMo 3.

    rope_scaling changes the entries of the global layers, as in transformers.
    """
    new, old = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
    check_layer_ropes(new, old, family)
    full = top_entries(c, theta) | (new.get(GLOBAL) or {}) | old
    local = {"rope_theta": c.get("rope_local_base_freq", local_theta)} | (new.get(LOCAL) or {})
    max_len = c["max_position_embeddings"]
    return parse_rope(full, max_len=max_len), parse_rope(local, max_len=max_len)


def check_layer_ropes(new: ConfigJson, old: ConfigJson, family: str) -> None:
    """Raises ValueError for rope_parameters or a rope_scaling that transformers would ignore."""
    if extra := sorted(new.keys() - {LOCAL, GLOBAL}):
        raise ValueError(
            f"rope_parameters of {family} models has {GLOBAL} and {LOCAL}, and transformers "
            f"ignores {', '.join(extra)} next to them; write the entries of each"
        )
    if "type" in old and not old.get("rope_type"):
        raise ValueError(
            f"rope_scaling of {family} models has type={old['type']!r}, which transformers "
            "ignores; write rope_type instead"
        )
    if not all((entries or {}).get("truncate", True) for entries in (old, *new.values())):
        raise ValueError(
            f"truncate=false in rope_parameters or rope_scaling of {family} models is ignored by "
            "transformers; remove it"
        )


def parse_rope(entries: ConfigJson, *, max_len: int) -> Rope:
    """The rotary embedding that one object of rope entries describes."""
    kind = entries.get("rope_type") or entries.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}. Without "
            "scaling the model is correct only up to its original length; to use it there, remove "
            "the scaling from rope_scaling or rope_parameters in config.json"
        )
    for name in entries.keys() - KNOWN:
        if not is_off(entries[name]):
            raise ValueError(
                f"{name} of the rotary embedding is {shown(entries[name])}, which is not known in "
                f"rope_parameters and rope_scaling; known: {', '.join(sorted(KNOWN))}"
            )
    if entries.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = float(entries["rope_theta"])
    match kind:
        case "linear" | "dynamic":
            return Rope(theta=theta, kind=kind, factor=float(entries["factor"]))
        case "llama3":
            return _parse_llama3(entries, theta=theta, max_len=max_len)
        case "yarn":
            return _parse_yarn(entries, theta=theta, max_len=max_len)
    return Rope(theta=theta)


def _parse_llama3(entries: ConfigJson, *, theta: float, max_len: int) -> Rope:
    low, high = float(entries["low_freq_factor"]), float(entries["high_freq_factor"])
    if low >= high:
        raise ValueError(f"low_freq_factor={low:g} is not below high_freq_factor={high:g}")
    return Rope(
        theta=theta,
        kind="llama3",
        factor=float(entries["factor"]),
        low_freq_factor=low,
        high_freq_factor=high,
        original_len=int(entries.get(ORIGINAL_LEN, max_len)),
    )


def _parse_yarn(entries: ConfigJson, *, theta: float, max_len: int) -> Rope:
    if theta <= 1:
        raise ValueError(f"rope_theta={theta:g} of a yarn scaling is not above 1")
    original_len = int(entries.get(ORIGINAL_LEN, max_len))
    factor = float(entries.get("factor") or max_len / original_len)
    attention_factor = entries.get("attention_factor")
    if attention_factor is None:
        one, all_dims = entries.get("mscale"), entries.get("mscale_all_dim")
        if not one or not all_dims:
            one, all_dims = 1.0, 0.0
        attention_factor = yarn_amplitude(factor, one) / yarn_amplitude(factor, all_dims)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_len=original_len,
        beta_fast=float(entries.get("beta_fast") or 32),
        beta_slow=float(entries.get("beta_slow") or 1),
        truncate=entries.get("truncate", True),
        attention_factor=float(attention_factor),
    )


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """sqrt(1 / t) = 0.1 ln(factor) + 1 (https://arxiv.org/abs/2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def scaling_json(rope: Rope) -> dict[str, Any] | None:
    """`rope_scaling` of a config file; None without scaling."""
    if rope.kind in ("default", NO_ROPE, LONG_ROPE):  # phi3 writes its longrope itself
        return None
    if rope.kind in ("linear", "dynamic"):
        return dict(rope_type=rope.kind, factor=rope.factor)
    if rope.kind == "yarn":
        usual = Rope(attention_factor=yarn_amplitude(rope.factor))
        names = ("beta_fast", "beta_slow", "truncate", "attention_factor")
        changed = {n: getattr(rope, n) for n in names if getattr(rope, n) != getattr(usual, n)}
        original = {ORIGINAL_LEN: rope.original_len}
        return dict(rope_type="yarn", factor=rope.factor) | original | changed
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        ORIGINAL_LEN: rope.original_len,
    }


def parameters_json(rope: Rope) -> dict[str, Any]:
    """An object of `rope_parameters` with the base and the scaling of one kind of layer."""
    partial = {} if rope.rotary == 1 else dict(partial_rotary_factor=rope.rotary)
    kind = scaling_json(rope) or dict(rope_type="default")
    section = {} if not rope.mrope_section else dict(mrope_section=list(rope.mrope_section))
    if section and not rope.mrope_chunked:
        section |= dict(mrope_interleaved=True)
    return dict(rope_theta=rope.theta) | partial | kind | section


def with_parameters(base: dict[str, Any], rope: Rope) -> dict[str, Any]:
    """The entries `base` with `rope_parameters` in place of the older names."""
    older = ("rope_theta", "rope_scaling")
    rest = {name: value for name, value in base.items() if name not in older}
    return rest | dict(rope_parameters=parameters_json(rope))
