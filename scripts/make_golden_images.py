"""Writes what transformers' language models compute from features of images.

tests/models/golden_images/<name>.npz has, for a tiny checkpoint of tests/models/golden/, two rows
of tokens with images, the features that replace their placeholders, those that are added to the
first hidden states (deepstack), positions by axis (M-RoPE), and torch's logits. positions.json has
the positions of `get_rope_index` for lists of texts and images.

    /tmp/torch/bin/python scripts/make_golden_images.py tests/models
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import transformers
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

MERGE, IMAGE = 2, 60  # patches of a token on each side; the placeholder
# Rows of a text's length, or of an image's grid of patches.
ROWS = [[5, (1, 4, 6), 3, (1, 2, 4), 12], [(1, 6, 4), 18, (1, 2, 2), 3]]
POSITIONS = [
    [7],
    [3, (1, 4, 4), 5],
    [(1, 2, 8), 4],
    [2, (1, 8, 2), 1, (1, 4, 6), 6, (1, 2, 2)],
    [1, (3, 4, 6), 2],
]
N_DEEP = {
    "qwen3_vl": 2,
    "qwen2_5_vl": 0,
    "qwen3_5": 0,
    "gemma3": 0,
    "gemma4": 0,
    "gemma4_shared": 0,
}
# Models in which the tokens of an image see each other.
WHOLE = {"gemma3": gemma3, "gemma4": gemma4, "gemma4_shared": gemma4}


def kinds(row: list) -> np.ndarray:
    """1 at the tokens of images, 0 at those of text."""
    sizes = [n if isinstance(n, int) else int(np.prod(n)) // MERGE**2 for n in row]
    return np.repeat([0 if isinstance(n, int) else 1 for n in row], sizes)


def positions_of(model_class, row: list) -> tuple[np.ndarray, int]:
    """(int [3, T], delta) of one row."""
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = model_class.get_vision_position_ids.__get__(model)
    types = torch.from_numpy(kinds(row))[None]
    grids = torch.tensor([n for n in row if not isinstance(n, int)]).reshape(-1, 3)
    found, delta = model_class.get_rope_index(model, torch.zeros_like(types), types, grids)
    return found[:, 0].numpy(), int(delta[0, 0])


def text_model(folder: Path, name: str):
    """(decoder without its head, head) of a checkpoint."""
    if name in ("qwen3_vl", "qwen2_5_vl"):
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        return model.model.language_model, model.lm_head
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model.model, model.lm_head


def main(target: Path) -> None:
    out = target / "golden_images"
    out.mkdir(exist_ok=True)
    found = []
    for row in POSITIONS:
        positions, delta = positions_of(Qwen3VLModel, row)
        other, other_delta = positions_of(Qwen2_5_VLModel, row)
        assert np.array_equal(positions, other) and delta == other_delta
        found.append(dict(parts=row, positions=positions.tolist(), delta=delta))
    (out / "positions.json").write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    for seed, (name, n_deep) in enumerate(N_DEEP.items()):
        model, head = text_model(target / "golden" / name, name)
        draw = np.random.default_rng(seed)
        types = np.stack([kinds(row) for row in ROWS])
        tokens = np.where(types, IMAGE, draw.integers(3, IMAGE, types.shape)).astype(np.int32)
        n = int(types.sum())
        rows = draw.normal(size=(n, 32)).astype(np.float32)
        deep = 0.5 * draw.normal(size=(n_deep, n, 32)).astype(np.float32)
        positions = np.stack([positions_of(Qwen3VLModel, row)[0] for row in ROWS], axis=1)
        more = {}
        with torch.no_grad():
            x = model.embed_tokens(torch.from_numpy(tokens).long())
            mask = torch.from_numpy(types == 1)
            x[mask] = torch.from_numpy(rows)
            if n_deep:
                more |= dict(
                    visual_pos_masks=mask, deepstack_visual_embeds=list(torch.from_numpy(deep))
                )
            if module := WHOLE.get(name):
                types = torch.from_numpy(types)
                device = (types.device,) if module is gemma4 else ()
                groups = module.get_block_sequence_ids_for_mask(types, *device)
                masks = module.create_masks_for_vision_model(
                    model.config, x, None, None, None, block_sequence_ids=groups
                )
                more |= dict(attention_mask=masks)
            else:
                more |= dict(position_ids=torch.from_numpy(positions))
            if getattr(model, "hidden_size_per_layer_input", 0):  # as Gemma4Model has them
                padded = torch.from_numpy(
                    np.where(tokens == IMAGE, model.config.pad_token_id, tokens)
                )
                more |= dict(per_layer_inputs=model.get_per_layer_inputs(padded.long(), x))
            hidden = model(inputs_embeds=x, use_cache=False, **more).last_hidden_state
            logits = head(hidden).numpy()[..., ::8]  # every eighth word
            if cap := getattr(model.config, "final_logit_softcapping", None):
                logits = cap * np.tanh(logits / cap)
        np.savez_compressed(
            out / f"{name}.npz",
            tokens=tokens,
            rows=rows,
            deep=deep,
            positions=positions.astype(np.int32),
            logits=logits,
        )
        print(f"{name}: |logit| up to {np.abs(logits).max():.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
