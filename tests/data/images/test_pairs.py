"""Tests of preference data with images: both answers have those of the prompt, and refusals."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.trainer.offline.unpaired import with_prompts
from tests.data.images.pictures import encoded, picture

WIDE, TALL = encoded(picture(24, 8)), encoded(picture(16, 32))  # 3 and 8 tokens
PAD = 269


def write(tmp_path, *rows):
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def turns(question, *answer):
    roles = ("user", "assistant")
    return [{"role": r, "content": c} for r, c in zip(roles, (question, *answer), strict=False)]


FORMS = [
    {"prompt": "<image>?", "chosen": "a", "rejected": "b", "images": [WIDE]},
    {"prompt": turns("<image>?"), "chosen": "a", "rejected": "b", "images": [WIDE]},
    {"chosen": turns("<image>?", "a"), "rejected": turns("<image>?", "b"), "images": [WIDE]},
    {"chosen": turns("?", "a"), "rejected": turns("?", "b"), "image": WIDE},
    {
        side: [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        for side, answer in (("chosen", "a"), ("rejected", "b"))
    }
    | {"images": [WIDE]},  # TRL
    {
        "prompt": "<image>?",
        "chosen": turns("<image>?", "a"),
        "rejected": turns("<image>?", "b"),
        "images": [WIDE],
    },
]


@pytest.mark.parametrize("row", FORMS)
def test_all_forms_give_the_image_to_both_answers(load_pairs, tmp_path, row):
    [pair] = load_pairs(write(tmp_path, row))
    [first] = load_pairs(write(tmp_path, FORMS[0]))
    for one, same in ((pair.chosen, first.chosen), (pair.rejected, first.rejected)):
        np.testing.assert_array_equal(one.prompt_tokens, same.prompt_tokens)
        np.testing.assert_array_equal(one.tokens, same.tokens)
        assert (one.prompt_tokens == PAD).sum() == 3 and one.images == same.images
        assert one.axis_positions.shape == (3, len(one.prompt_tokens) + len(one.tokens))
        assert one.prompt_tokens[one.images[0].start] == PAD and one.loss_mask.all()


def test_an_answer_with_a_label_has_the_images_of_its_prompt(load_pairs, tmp_path):
    row = {"prompt": "<image>?", "completion": "a", "label": True, "images": [WIDE]}
    [labelled], [pair] = (load_pairs(write(tmp_path, one)) for one in (row, FORMS[0]))
    np.testing.assert_array_equal(labelled.completion.tokens, pair.chosen.tokens)
    assert labelled.completion.images == pair.chosen.images


def test_an_answer_after_another_prompt_has_its_images_and_positions(load_pairs, tmp_path):
    other = {"prompt": "<image>? <image>", "chosen": "a", "rejected": "b", "images": [TALL, WIDE]}
    [one, two] = load_pairs(write(tmp_path, FORMS[0], other))
    [mixed] = with_prompts([one.rejected], [two.chosen], 1000)
    # the same tokens as the other pair's own rejected completion
    assert mixed.images == two.rejected.images
    np.testing.assert_array_equal(mixed.prompt_tokens, two.rejected.prompt_tokens)
    np.testing.assert_array_equal(mixed.axis_positions, two.rejected.axis_positions)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"images": [WIDE, TALL]}, "1 places of images .* has 2 images"),
        ({"chosen": "<image>a"}, "2 places of images .* has 1 images"),
        (
            {
                "prompt": turns("<image>?", "a"),
                "chosen": turns("!", "a"),
                "rejected": turns(".", "b"),
            },
            "2 image tokens .* for 1 images",
        ),
        (
            {
                "prompt": "?",
                "images": None,
                "chosen": [{"role": "assistant", "content": [{"type": "image", "image": WIDE}]}],
                "rejected": [{"role": "assistant", "content": [{"type": "image", "image": TALL}]}],
            },
            "chosen, rejected and the prompt have different images",
        ),
        (
            {
                "prompt": "?",
                "images": None,
                "chosen": [{"role": "assistant", "content": [{"type": "image", "image": WIDE}]}],
                "rejected": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "image", "image": WIDE, "text": None},
                            {"type": "text", "image": None, "text": "no"},
                        ],
                    }
                ],
            },
            "an answer has an image",
        ),
    ],
)
def test_pairs_whose_images_are_not_those_of_the_prompt_are_refused(
    load_pairs, tmp_path, change, message
):
    with pytest.raises(ValueError, match=message):
        load_pairs(write(tmp_path, FORMS[0] | change))
