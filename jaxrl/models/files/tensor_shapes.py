"""Compares the tensors that a model needs with those that its files contain."""

from collections.abc import Mapping

import jax

from jaxrl.models.decoder import Decoder
from jaxrl.models.spec import hf_names, is_spec

SCORE = "score.weight"  # only in classifiers; a language model's score head starts at zero
MAX_LISTED = 8  # names listed per kind of error


def expected_shapes(specs: Decoder) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every parameter."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return {name: spec.hf_shape for spec in leaves for name in hf_names(spec)}


def check_shapes(specs: Decoder, shapes: Mapping[str, tuple[int, ...]], complaint: str) -> None:
    """Raises one error for all mismatches, after `complaint`; an unused lm_head is ignored."""
    expected = expected_shapes(specs)
    unused = {"lm_head.weight"} if specs.lm_head is None else set()
    wrong = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    errors = {
        "missing": sorted(expected.keys() - shapes.keys() - {SCORE}),
        "unexpected": sorted(shapes.keys() - expected.keys() - unused),
        "with another shape": wrong,
    }
    lines = [
        f"  {len(names)} {kind}: " + ", ".join([*names[:MAX_LISTED], "..."][: len(names)])
        for kind, names in errors.items()
        if names
    ]
    if lines:
        shown = "\n".join(lines)
        raise ValueError(
            f"{complaint} ({specs.cfg.family}):\n{shown}\n"
            "use the configuration that belongs to these weights"
        )
