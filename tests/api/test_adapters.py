import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.api.adapters import AdapterChoice, room_for
from jaxrl.api.room import AdapterRoom
from jaxrl.api.training import Trainer
from jaxrl.config.keys import RunConfig
from jaxrl.http.errors import RequestError
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split
from jaxrl.models.spec import init_params
from sharding import make_mesh
from sharding.rules import TRAIN

DECODER = uniform_decoder("llama", L=1, D=8, N=2, K=1, H=4, F=12, V=10, max_len=8)
TIED = dataclasses.replace(DECODER, tied=True)


def test_a_tied_unembedding_is_left_out_of_the_default_adapter():
    choice = AdapterChoice(rank=2).possible(TIED)
    assert choice.train_unembed is False and "lm_head" not in choice.lora(TIED, 4).targets
    untied = AdapterChoice(rank=2).possible(DECODER)
    assert untied.train_unembed and "lm_head" in untied.lora(DECODER, 4).targets


def test_only_a_tied_unembedding_is_no_adapter():
    choice = AdapterChoice(2, train_attn=False, train_mlp=False).possible(TIED)
    with pytest.raises(RequestError, match="trains no layer"):
        choice.lora(TIED, 4)


@pytest.fixture
def trainer():
    with jax.set_mesh(make_mesh(fsdp=1)):
        base = init_params(jax.random.key(0), decoder_specs(DECODER), TRAIN, jnp.float32)
        room = AdapterRoom(DECODER, room_for(DECODER, 4), TRAIN)
        yield Trainer(RunConfig(), base, room, 1, jnp.float32)


def test_an_adapter_is_padded_with_zeros_and_cut_to_what_it_was(trainer):
    lora = AdapterChoice(3, train_mlp=False).lora(DECODER, 4)
    single = trainer.single(lora, seed=1)
    arrays = trainer.create(lora, 1).weights
    own = jax.tree.leaves(split(single)[0])
    assert sum(map(jnp.sum, arrays)) == pytest.approx(float(sum(map(jnp.sum, own))), abs=1e-6)
    assert {array.shape[1] for array in arrays} >= {4}  # of A, in groups of equal shapes
    back = trainer.room.cut(arrays, trainer.single(lora))
    jax.tree.map(np.testing.assert_array_equal, back, single)


def test_an_adapter_of_a_larger_rank_has_no_room(trainer):
    with pytest.raises(ValueError, match="up to the rank 4 \\(--max-rank\\)"):
        trainer.create(AdapterChoice(5).lora(DECODER, 8), 0)
