"""Names of the tensors of vision towers and their projectors in files."""

import re

# Parts of an image-and-text model, by the start of their names.
PARTS = ("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision.")
# Published files and those of several versions of transformers differ in these prefixes.
PREFIX = re.compile(rf"^(model\.)?(?={'|'.join(map(re.escape, PARTS))})")
INNER = "vision_tower.vision_model."
BLOCK = re.compile(r"\.\d+\.(?=\D)")  # the number of a block, not the last part "mlp.0"


def common_name(name: str) -> str:
    """A tensor's name without the prefixes in which files differ."""
    name = PREFIX.sub("", name)
    return name.replace(INNER, "vision_tower.", 1) if name.startswith(INNER) else name


def is_of_tower(name: str) -> bool:
    """Whether a tensor or layer of this name is a part of a tower or its projector."""
    return common_name(name).startswith(PARTS)


def without_number(name: str) -> str:
    """The name that a layer has in all blocks."""
    return BLOCK.sub(".", name)
