"""Writes tiny image-and-text checkpoints and the gradients of their towers in transformers.

tests/models/vision/golden_gradients/<name>/ has a checkpoint, saved by transformers, two samples of
tokens with images, their patches and grids, the summed negative logprob of the tokens after the
first text token that follows an image, and its gradient for each parameter of the tower and of its
projector.

    /tmp/torch/bin/python scripts/make_golden_tower_gradients.py \\
      tests/models/vision/golden_gradients
"""

import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import transformers
from make_golden_towers import QWEN, TABLE, TEXT, TOKENS, randomise

ROPE = dict(rope_type="default", rope_theta=50.0, mrope_section=[2, 1, 1])
LAYERS = TEXT | dict(num_hidden_layers=3, num_key_value_heads=2, rope_parameters=ROPE)
MODELS = {
    "qwen3_vl": ("Qwen3VL", TABLE | dict(deepstack_visual_indexes=[0, 2]), LAYERS),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        QWEN | dict(window_size=8, fullatt_block_indexes=[1]),
        {k: v for k, v in LAYERS.items() if k != "head_dim"}
        | dict(num_attention_heads=1, num_key_value_heads=1),
    ),
}
IMAGE, START, END = 5, 7, 8
# Samples of numbers of text tokens and grids of images
SAMPLES = [[3, (1, 4, 6), 2, (1, 2, 4), 6], [1, (1, 10, 2), 7]]
MERGE = 2


def draw_tokens(sample: list, rng: np.random.Generator) -> np.ndarray:
    parts = [
        rng.integers(9, 32, n)
        if isinstance(n, int)
        else [START, *[IMAGE] * (int(np.prod(n)) // MERGE**2), END]
        for n in sample
    ]
    return np.concatenate(parts).astype(np.int64)


def main(target: Path) -> None:
    for seed, (name, (family, vision, text)) in enumerate(MODELS.items()):
        config = getattr(transformers, f"{family}Config")(
            vision_config=vision, text_config=text, **TOKENS
        )
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
        randomise(model, seed)
        model.save_pretrained(target / name)
        rng, saved, total = np.random.default_rng(seed), {}, torch.zeros(())
        for i, sample in enumerate(SAMPLES):
            grids = np.array([part for part in sample if not isinstance(part, int)])
            width = 3 * 2 * model.config.vision_config.patch_size**2
            patches = rng.normal(size=(int(grids.prod(axis=1).sum()), width)).astype(np.float32)
            tokens = draw_tokens(sample, rng)
            mask = np.zeros(len(tokens) - 1, np.float32)
            mask[-sample[-1] :] = 1  # targets after the last image
            ids = torch.from_numpy(tokens)[None]
            logits = model(
                input_ids=ids,
                pixel_values=torch.from_numpy(patches),
                image_grid_thw=torch.from_numpy(grids),
                mm_token_type_ids=(ids == IMAGE).int(),
                use_cache=False,
            ).logits[0, :-1]
            logp = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
            total = total - (logp * torch.from_numpy(mask)).sum()
            saved |= {
                f"tokens{i}": tokens.astype(np.int32),
                f"mask{i}": mask,
                f"patches{i}": patches,
                f"grids{i}": grids,
            }
        total.backward()
        grads = {
            name: parameter.grad.numpy()
            for name, parameter in model.named_parameters()
            if name.startswith("model.visual.")
        }
        saved |= {"loss": total.detach().numpy()} | {f"grad:{n}": g for n, g in grads.items()}
        np.savez_compressed(target / name / "gradients.npz", **saved)
        largest = max(np.abs(g).max() for g in grads.values())
        print(f"{name}: loss {float(total):.2f}, {len(grads)} gradients up to {largest:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
