"""Mistral Small 3.1 and 3.2, and Ministral 3: the text part of image-and-text models.

The language model is one of type `mistral` or `ministral3`. Definition: transformers' model type
`mistral3`.
"""

from jaxrl.models.families import entries, fields

# The top level; the language model is in text_config.
IMAGE_ENTRIES = entries.Entries(
    classes=("Mistral3",),
    read=frozenset(
        {"model_type", "architectures", "auto_map", "text_config", "tie_word_embeddings"}
    ),
    neutral=frozenset(
        {
            *("vision_config", "image_token_index", "image_token_id", "vision_feature_layer"),
            *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
        }
    ),
)


def text_part(config: fields.ConfigJson) -> fields.ConfigJson:
    """`entries.language_part`, without tie_word_embeddings, which transformers does not read."""
    text = dict(config.get("text_config") or {})
    text.pop("tie_word_embeddings", None)
    config = {**config, "text_config": text}
    types = ("mistral", "ministral3")
    return entries.language_part(config, IMAGE_ENTRIES, "mistral3", tied=True, text_types=types)
