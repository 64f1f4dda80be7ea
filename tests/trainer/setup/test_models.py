"""Tests of jaxrl/trainer/setup/models.py: templates whose turns never end are noticed."""

import dataclasses

import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.trainer.setup.models import make_renderer
from tests.trainer.conftest import LLAMA


@pytest.mark.parametrize(
    ("template", "sampling", "warned"),
    [
        ("chatml", {}, False),  # <|im_end|> is the end-of-sequence token
        ("llama3", {}, True),
        ("llama3", {"stop": ("<|eot_id|>",)}, False),
        ("plain", {}, False),
    ],
)
def test_a_template_whose_turns_have_no_stop_token_is_warned_of(
    template, sampling, warned, tiny_model, caplog
):
    cfg = RunConfig()
    sampling = dataclasses.replace(cfg.rollout.sampling, **sampling)
    cfg = dataclasses.replace(
        cfg,
        data=dataclasses.replace(cfg.data, chat_template=template),
        rollout=dataclasses.replace(cfg.rollout, sampling=sampling),
    )
    make_renderer(cfg, tiny_model, LLAMA)
    assert ("never stops" in caplog.text) == warned
    assert not warned or "'<|eot_id|>', which has no stop token ('<|im_end|>')" in caplog.text
