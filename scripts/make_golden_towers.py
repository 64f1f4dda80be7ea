"""Writes tiny random image-and-text checkpoints and what transformers' vision towers compute.

tests/models/vision/golden/<name>/ has a checkpoint, saved by transformers, and the patches, grids
and features of a few images of odd sizes: those of all images one after the other, and of towers
with deepstack also those of each of its layers. A tower with limits (`gemma4_limits`) has the
gradient of the sum of the sines of its features too.

torch is not a dependency of the project; run this in the environment of scripts/make_golden.py:
    /tmp/torch/bin/python scripts/make_golden_towers.py tests/models/vision/golden [NAME ...]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  only in that environment
import transformers

TEXT = dict(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
)
TOKENS = dict(image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)
QWEN = dict(
    depth=3,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    patch_size=2,
    out_hidden_size=8,
    rope_parameters=dict(rope_type="axial", rope_theta=50.0),
)
TABLE = QWEN | dict(num_position_embeddings=25)
DELTA = dict(
    layer_types=["full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
)
SIGLIP = dict(
    model_type="siglip_vision_model",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=12,
    patch_size=2,
    vision_use_head=False,
)
POOLED = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=12,
    patch_size=2,
    pooling_kernel_size=2,
    position_embedding_size=20,
    standardize=True,
    rope_parameters=dict(rope_type="axial", rope_theta=50.0),
)
GLOBAL = dict(
    layer_types=["full_attention"],
    global_head_dim=8,
    num_global_key_value_heads=1,
    hidden_size_per_layer_input=0,
    rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=50.0)),
)
# The form of E2B and E4B: limits, inputs of layers by token, shared keys and values, audio
LIMITED = POOLED | dict(standardize=False, use_clipped_linears=True)
BY_TOKEN = GLOBAL | dict(
    num_hidden_layers=2,
    layer_types=["full_attention"] * 2,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=32,
    num_kv_shared_layers=1,
    use_double_wide_mlp=True,
)
AUDIO = dict(
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    subsampling_conv_channels=[4, 2],
    conv_kernel_size=3,
    attention_chunk_size=2,
    attention_context_left=3,
    output_proj_dims=6,
)
# name -> (class, vision_config, text_config, entries of the top level)
MODELS = {
    "qwen3_vl": ("Qwen3VL", TABLE | dict(deepstack_visual_indexes=[2, 0]), TEXT, TOKENS),
    "qwen3_5": ("Qwen3_5", TABLE, TEXT | DELTA, TOKENS),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        QWEN | dict(window_size=8, fullatt_block_indexes=[1]),
        {k: v for k, v in TEXT.items() if k != "head_dim"}
        | dict(rope_parameters=dict(rope_type="default", rope_theta=50.0, mrope_section=[2, 1, 1])),
        TOKENS,
    ),
    "gemma3": ("Gemma3", SIGLIP, TEXT, dict(mm_tokens_per_image=9, image_token_index=5)),
    "gemma4": ("Gemma4", POOLED, TEXT | GLOBAL, dict(image_token_id=5, audio_config=None)),
    "gemma4_limits": (
        "Gemma4",
        LIMITED,
        TEXT | BY_TOKEN,
        dict(image_token_id=5, audio_token_id=6, audio_config=AUDIO),
    ),
}
GRIDS = np.array([(1, 4, 6), (1, 10, 2), (1, 6, 14), (1, 2, 2)])  # in patches
N_SQUARE = 3  # images of a tower with one size


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random values of all parameters, those of norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = [(name, value) for name, value in model.named_buffers() if ".std_" in name]
        limits = [(n, v) for n, v in model.named_buffers() if n.endswith(("put_min", "put_max"))]
        for name, value in limits:
            size = 0.5 + torch.rand(value.shape, generator=generator)
            value.copy_(-size if name.endswith("min") else size)
        for name, value in [*model.named_parameters(), *buffers]:
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name or "ln_q" in name or "std_scale" in name:
                plain = "std_scale" in name or (value.mean() > 0.5 and name.endswith("weight"))
                start = 1.0 if plain else 0.0
                value.copy_(start + 0.3 * noise)
            else:
                n_in = value[0].numel() if value.ndim > 1 else 4
                value.copy_(1.5 * n_in**-0.5 * noise)


def packed_images(model: torch.nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Patches of images of several sizes, and the features of all of them."""
    c = model.config.vision_config
    width = c.in_channels * c.temporal_patch_size * c.patch_size**2
    n_patches = int(GRIDS.prod(axis=1).sum())
    patches = rng.normal(size=(n_patches, width)).astype(np.float32)
    found = model.model.visual(torch.from_numpy(patches), grid_thw=torch.from_numpy(GRIDS))
    saved = dict(patches=patches, grids=GRIDS, features=found.pooler_output.numpy())
    if deep := found.get("deepstack_features"):
        saved["deep"] = np.stack([one.numpy() for one in deep])
    return saved


def square_images(model: torch.nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The same of images of the tower's size, whose patches are in the order of rows."""
    c = model.config.vision_config
    n, p = c.image_size // c.patch_size, c.patch_size
    pixels = rng.normal(size=(N_SQUARE, 3, n * p, n * p)).astype(np.float32)
    found = model.model.get_image_features(torch.from_numpy(pixels)).pooler_output
    patches = pixels.reshape(N_SQUARE, 3, n, p, n, p).transpose(0, 2, 4, 1, 3, 5)
    return dict(
        patches=patches.reshape(N_SQUARE * n * n, 3 * p * p),
        grids=np.array([(1, n, n)] * N_SQUARE),
        features=found.flatten(0, 1).numpy(),
    )


def pooled_images(model: torch.nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The same of images of several sizes with patches in the order of rows, one at a time."""
    width, patches, features = 3 * model.config.vision_config.patch_size**2, [], []
    for _, h, w in GRIDS:
        places = np.stack(np.divmod(np.arange(h * w), w)[::-1], axis=-1)  # (x, y)
        patches.append(rng.uniform(size=(h * w, width)).astype(np.float32))
        inputs = torch.from_numpy(patches[-1])[None], torch.from_numpy(places)[None]
        features.append(model.model.get_image_features(*inputs).pooler_output[0])
    features = torch.cat(features)
    saved = dict(patches=np.concatenate(patches), grids=GRIDS, features=features.detach().numpy())
    return saved | (gradients(model, features) if features.requires_grad else {})


def gradients(model: torch.nn.Module, features: torch.Tensor) -> dict[str, np.ndarray]:
    """The gradient of the sum of the sines of the features, for each parameter that has one."""
    features.sin().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {f"grad:{name}": grad.numpy() for name, grad in found.items()}


WRITERS = {"siglip_vision_model": square_images, "gemma4_vision": pooled_images}


def main(target: Path, names: list[str]) -> None:
    """Writes all folders, or those of these names only."""
    for seed, (name, (family, vision, text, more)) in enumerate(MODELS.items()):
        if names and name not in names:
            continue
        config = getattr(transformers, f"{family}Config")(
            vision_config=vision, text_config=text, **more
        )
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
        randomise(model, seed)
        model.save_pretrained(target / name)
        rng = np.random.default_rng(seed)
        with torch.set_grad_enabled(name == "gemma4_limits"):
            saved: Any = WRITERS.get(config.vision_config.model_type, packed_images)(model, rng)
        np.savez_compressed(target / name / "golden_tower.npz", **saved)
        print(f"{name}: |feature| up to {np.abs(saved['features']).max():.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
