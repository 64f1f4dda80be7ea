"""Compares the tensors that a model needs with those that its files contain."""

from collections.abc import Mapping, Set

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
    unused = {"lm_head.weight"} if specs.lm_head is None else set()
    if shown := mismatches(expected_shapes(specs), shapes, optional={SCORE}, unused=unused):
        raise ValueError(
            f"{complaint} ({specs.cfg.family}):\n{shown}\n"
            "use the configuration that belongs to these weights"
        )


def mismatches(
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    optional: Set[str] = frozenset(),
    unused: Set[str] = frozenset(),
) -> str:
    """The tensors that differ from the expected ones, a line per kind of error; "" for none."""
    wrong = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    errors = {
        "missing": sorted(expected.keys() - shapes.keys() - optional),
        "unexpected": sorted(shapes.keys() - expected.keys() - unused),
        "with another shape": wrong,
    }
    return "\n".join(
        f"  {len(names)} {kind}: " + ", ".join([*names[:MAX_LISTED], "..."][: len(names)])
        for kind, names in errors.items()
        if names
    )
