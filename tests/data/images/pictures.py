"""Pictures, and the files of models with images, for the tests of this folder."""

import io

import numpy as np
from PIL import Image

from scripts.make_tiny_vlm import PROCESSOR

TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]  # 267, 268, 269
QWEN = PROCESSOR | {"size": {"shortest_edge": 64, "longest_edge": 4096}}
GEMMA3 = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 16, "width": 16},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GEMMA4 = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "max_soft_tokens": 70,
    "pooling_kernel_size": 2,
}
QWEN_CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": 269,
    "vision_config": {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
GEMMA3_CONFIG = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "image_token_index": 269,
    "boi_token_index": 267,
    "eoi_token_index": 268,
    "vision_config": {"patch_size": 4},
}
GEMMA4_CONFIG = {
    "model_type": "gemma4",
    "image_token_id": 269,
    "boi_token_id": 267,
    "eoi_token_id": 268,
    "vision_config": {"patch_size": 4, "pooling_kernel_size": 2},
}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
