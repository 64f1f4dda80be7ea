"""Writes a small Qwen3-VL with random weights and a byte-level tokenizer.

    python scripts/make_tiny_vlm.py --output=models/tiny_vlm

Its tower reads images of 16 x 16 pixels as four tokens. It is a model to try a run with images on,
not one that has learned anything. Prints the number of its parameters.
"""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxrl.models.decoder import decoder_specs, init_model
from jaxrl.models.files.atomic_folder import atomic_folder, write_json
from jaxrl.models.files.export_form import whole_name
from jaxrl.models.files.hf_config import config_from_hf
from jaxrl.models.files.hf_save import SHARD_BYTES, param_tensors, write_weights
from jaxrl.models.spec import count_params, init_params
from jaxrl.models.vision.files import tower_tensors
from jaxrl.models.vision.tower import tower_specs
from jaxrl.models.vision.towers import tower_from_hf
from sharding import TRAIN, make_mesh

IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# A template as vision-language models have it; IMAGE is what the family writes for an image
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif -%}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, help="the folder to write")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    n = write_tiny_vlm(Path(args.output), args.width, args.layers, seed=args.seed)
    print(f"{args.output}: {n:,} parameters")


def write_tiny_vlm(folder: Path, width: int, n_layers: int, *, seed: int = 0) -> int:
    """Writes the model folder. Returns its number of parameters."""
    return write_random(folder, config_json(width, n_layers), PROCESSOR, "".join(IMAGE), seed=seed)


def write_random(
    folder: Path, config: dict[str, Any], processor: dict[str, Any], image: str, *, seed: int = 0
) -> int:
    """Writes a model with this config.json and preprocessor_config.json, and random weights.

    Its template has `image` for an image. Returns its number of parameters.
    """
    decoder, tower = config_from_hf(config), tower_from_hf(config)
    with jax.set_mesh(make_mesh()), atomic_folder(folder) as folder:
        text = init_model(decoder, seed=seed, rules=TRAIN)
        vision = init_params(jax.random.key(seed), tower_specs(tower), TRAIN, jnp.float32)
        named = [dataclasses.replace(t, name=whole_name(t.name)) for t in param_tensors(text, None)]
        tensors = [*named, *tower_tensors(vision)]
        write_weights(folder, tensors, SHARD_BYTES)
        tokenizer().save(str(folder / "tokenizer.json"))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        write_json(folder / "tokenizer_config.json", names)
        write_json(folder / "generation_config.json", {"eos_token_id": SPECIAL.index("<|im_end|>")})
        write_json(folder / "preprocessor_config.json", processor)
        (folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", image))
        write_json(folder / "config.json", config)
    return count_params(decoder_specs(decoder)) + count_params(tower_specs(tower))


def tokenizer() -> Tokenizer:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    found = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(list(SPECIAL))
    return found


def config_json(width: int, n_layers: int) -> dict[str, Any]:
    """config.json of a Qwen3-VL with heads of 16 features."""
    start, image, end = map(SPECIAL.index, IMAGE)
    text = dict(
        model_type="qwen3_vl_text",
        vocab_size=len(SPECIAL) + 256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=n_layers,
        num_attention_heads=width // 16,
        num_key_value_heads=max(1, width // 32),
        head_dim=16,
        max_position_embeddings=1024,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=10_000.0,
            mrope_section=[4, 2, 2],
            mrope_interleaved=True,
        ),
    )
    vision = dict(
        model_type="qwen3_vl_vision",
        depth=2,
        hidden_size=width,
        intermediate_size=2 * width,
        num_heads=width // 16,
        patch_size=PROCESSOR["patch_size"],
        temporal_patch_size=PROCESSOR["temporal_patch_size"],
        spatial_merge_size=PROCESSOR["merge_size"],
        out_hidden_size=width,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    )
    return dict(
        model_type="qwen3_vl",
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )


if __name__ == "__main__":
    main()
