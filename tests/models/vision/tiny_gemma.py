"""A small Gemma 3 with random weights, whose images of 16 x 16 pixels are four tokens."""

from pathlib import Path

from scripts.make_tiny_vlm import IMAGE, SPECIAL, write_random
from tests.data.images.pictures import GEMMA3

START, TOKEN, END = map(SPECIAL.index, IMAGE)
CONFIG = dict(
    model_type="gemma3",
    architectures=["Gemma3ForConditionalGeneration"],
    mm_tokens_per_image=4,
    image_token_index=TOKEN,
    boi_token_index=START,
    eoi_token_index=END,
    tie_word_embeddings=True,
    text_config=dict(
        model_type="gemma3_text",
        vocab_size=len(SPECIAL) + 256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=1024,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=10_000.0),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
        tie_word_embeddings=True,
    ),
    vision_config=dict(
        model_type="siglip_vision_model",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_channels=3,
        image_size=16,
        patch_size=4,
        vision_use_head=False,
    ),
)


def write_tiny_gemma(folder: Path) -> Path:
    write_random(folder, CONFIG, GEMMA3, IMAGE[0])
    return folder
