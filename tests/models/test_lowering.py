"""The layers of a list are traced and lowered once: a start does not depend on their number."""

import re

import jax
import jax.numpy as jnp

from jaxrl.models.config import DecoderConfig, uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.kv_cache import init_cache
from jaxrl.models.packed import forward_packed
from jaxrl.models.paged import forward_paged
from jaxrl.models.spec import init_params
from sharding import DECODE, TRAIN
from tests.models.resized import resized

CFG = uniform_decoder("llama", L=4, D=32, N=2, K=1, H=16, F=64, V=64, tied=True)
IDS = jax.ShapeDtypeStruct((2, 64), jnp.int32)


def abstract_model(cfg: DecoderConfig):
    return jax.eval_shape(
        lambda: init_params(jax.random.key(0), decoder_specs(cfg), TRAIN, jnp.float32)
    )


def lowered_layers(function, *args) -> tuple[int, int]:
    """(functions of layers in the lowered program, calls of them)."""
    text = jax.jit(function).lower(*args).as_text()
    layer = r"@\w*layer_fn\w*"
    functions, uses = re.findall(rf"func\.func private {layer}", text), re.findall(layer, text)
    return len(functions), len(uses) - len(functions)


def test_the_gradient_of_all_layers_has_one_forward_and_one_backward_function(one_device):
    def loss(model, tokens, segments, positions):
        hidden = forward_packed(model, tokens, segments, positions, rules=TRAIN, remat="full")
        return jnp.sum(hidden)

    model = abstract_model(CFG)
    assert lowered_layers(jax.value_and_grad(loss), model, IDS, IDS, IDS) == (2, 8)


def test_layers_of_two_windows_are_two_functions(one_device):
    def score(model, tokens, segments, positions):
        return forward_packed(model, tokens, segments, positions, rules=TRAIN)

    cfg = resized(CFG, windows=(32, 0, 32, 0))
    assert lowered_layers(score, abstract_model(cfg), IDS, IDS, IDS) == (2, 4)


def test_a_layer_of_the_engine_gets_its_own_pages_only(one_device):
    def decode(model, cache, tokens, positions):
        table = jnp.zeros((2, 1), jnp.int32)
        return forward_paged(model, tokens, positions, cache, {0: table}, rules=DECODE)

    cache = jax.eval_shape(lambda: init_cache(CFG, 2, 64, jnp.float32, DECODE))
    token = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    assert lowered_layers(decode, abstract_model(CFG), cache, token, token) == (1, 4)
