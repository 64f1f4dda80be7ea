"""Golden models changed so that their gradients do not amplify rounding."""

import dataclasses

import jax

from jaxrl.models.decoder import Decoder, restrict

NORM_EPS = 0.1  # 1e-6 in the files
GEMMA4_EPS = 1.0  # its residual stream is larger
# Parts of the names of Gemma 4's weights, and their factors.
GEMMA4_FACTORS = {"q_norm": 0.2, "input_gate.gate": 0.1}


def smooth(model: Decoder) -> Decoder:
    """The model with larger epsilons of norms; of Gemma 4, softer attention and smaller gates.

    A norm multiplies the rounding of a vector whose terms cancel by up to 1 / √eps: the first token
    of a Gated DeltaNet has the output (q·k) v, and Gemma 4's input gates multiply 8 numbers by
    gelu(x) with x up to 30, of which tokens with x < 0 leave almost none. A norm also makes the
    gradient of the scale of its input zero, so that only rounding is left. Scores of 16 in a
    softmax, and 1 - tanh² in the derivative of gelu at 5, amplify rounding too.
    """
    gemma4 = model.cfg.family.startswith("gemma4")
    eps = GEMMA4_EPS if gemma4 else NORM_EPS
    model = restrict(model, dataclasses.replace(model.cfg, norm_eps=eps))
    factors = GEMMA4_FACTORS if gemma4 else {}

    def scaled(path, w: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return w * next((factor for part, factor in factors.items() if part in name), 1.0)

    return jax.tree_util.tree_map_with_path(scaled, model)
