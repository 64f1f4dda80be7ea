"""Chunked logprob, entropy and KL (jaxrl/kernels/logprob/) against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.support import PackedSets, from_bits, to_bits
from jaxrl.kernels import logprob
from jaxrl.kernels.logprob import token_scores
from jaxrl.kernels.logprob.reference import head_logits, logprob_reference
from sharding import Rules, make_mesh
from tests.kernels.engine_logp import engine_logp

RULES = Rules()
CAPPED = dict(temperature=0.7, softcap=3.0)


def problem(B=8, T=13, D=32, V=500, E=16, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    inputs = dict(
        hidden=normal(B, T, D),
        unembed=normal(V, D) * 0.5,
        ref_hidden=normal(B, T, E),
        ref_unembed=normal(V, E) * 0.5,
        targets=jax.random.randint(next(keys), (B, T), 0, V),
    )
    return inputs, [normal(B, T) for _ in range(3)]


def scores_with_kl(hidden, unembed, targets, ref_hidden, ref_unembed, **k):
    """(logp, entropy, KL)."""
    return token_scores(hidden, unembed, targets, ref=(ref_hidden, ref_unembed), **k)[:3]


def value_and_grad(fn, inputs, weights):
    """Values, and the gradient of their weighted sum into hidden and unembed."""

    def loss(hidden, unembed):
        outs = fn(**(inputs | dict(hidden=hidden, unembed=unembed)))
        return sum(jnp.sum(a * w) for a, w in zip(outs, weights, strict=True)), outs

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, outs), grads = jax.jit(grad)(inputs["hidden"], inputs["unembed"])
    return jax.device_get((outs, grads))


def assert_close(want, got, tol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol), want, got)


@pytest.mark.parametrize(
    ("chunk", "n_grouped", "kind"),
    [
        (7, 4, CAPPED),
        *(
            pytest.param(chunk, n_grouped, kind, marks=pytest.mark.thorough)
            for chunk, n_grouped in [(1, 1), (7, 1), (7, 4), (40, 1), (40, 4), (1000, 4)]
            for kind in (dict(temperature=1.0), CAPPED)
            if (chunk, n_grouped, kind) != (7, 4, CAPPED)
        ),
    ],
)
def test_values_and_gradients_equal_the_naive_form(one_device, monkeypatch, chunk, n_grouped, kind):
    monkeypatch.setattr(logprob, "GROUPED_CHUNKS", {"cpu": n_grouped})
    inputs, weights = problem()

    def naive(**k):
        return logprob_reference(**k, **({"softcap": None} | kind))

    def kernel(**k):
        return scores_with_kl(
            **k,
            temperature=kind["temperature"],
            logit_softcap=kind.get("softcap"),
            chunk=chunk,
            rules=RULES,
        )

    want, got = (value_and_grad(f, inputs, weights) for f in (naive, kernel))
    assert_close(want[0], got[0])
    assert_close(want[1], got[1], tol=2e-5)  # sums over 104 tokens or 500 words


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param(dict(fsdp=2, tensor=2), marks=pytest.mark.thorough)], ids=str
)
def test_one_reduction_gives_logprob_and_entropy(monkeypatch, sizes):
    monkeypatch.setattr(logprob, "ONE_PASS", ("cpu",))
    inputs, weights = problem()
    inputs = {name: inputs[name] for name in ("hidden", "unembed", "targets")}
    inputs["hidden"] *= 20  # logits of up to 300

    def naive(**k):
        ref = dict(ref_hidden=k["hidden"], ref_unembed=k["unembed"])
        return logprob_reference(**k, **ref, temperature=0.7, softcap=None)[:2]

    def kernel(**k):
        scores = token_scores(**k, temperature=0.7, chunk=7, rules=RULES)
        return scores.logp, scores.entropy

    with jax.set_mesh(make_mesh()):
        want = value_and_grad(naive, inputs, weights[:2])
    with jax.set_mesh(make_mesh(**sizes)):
        got = value_and_grad(kernel, inputs, weights[:2])
    assert_close(want[0], got[0], tol=1e-4)
    assert_close(want[1], got[1], tol=1e-3)


@pytest.mark.parametrize("with_entropy", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_without_a_reference(one_device, with_entropy):
    inputs, weights = problem()
    policy = {name: inputs[name] for name in ("hidden", "unembed", "targets")}
    weights = [weights[0], weights[1] * with_entropy]
    rest = dict(ref_hidden=inputs["ref_hidden"], ref_unembed=inputs["ref_unembed"])

    def naive(**k):
        return logprob_reference(**k, **rest, temperature=1.3, softcap=None)[:2]

    def kernel(**k):
        return token_scores(**k, temperature=1.3, chunk=32, rules=RULES, with_entropy=with_entropy)[
            :2
        ]

    want, got = (value_and_grad(f, policy, weights) for f in (naive, kernel))
    assert_close(want[0][0], got[0][0])
    assert_close(want[0][1] * with_entropy, got[0][1])
    assert_close(want[1], got[1], tol=2e-5)


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param(dict(fsdp=2, tensor=4), marks=pytest.mark.thorough)], ids=str
)
def test_a_low_rank_change_of_the_unembedding(monkeypatch, sizes):
    """h Wᵀ + l Bᵀ is the product of [h, l] and [W, B]."""
    monkeypatch.setattr(logprob, "GROUPED_CHUNKS", {"cpu": 4})
    inputs, weights = problem()
    low = jax.random.normal(jax.random.key(7), (8, 13, 4))
    b = jax.random.normal(jax.random.key(8), (500, 4)) * 0.5
    both = dict(
        hidden=jnp.concatenate([inputs["hidden"], low], axis=-1),
        unembed=jnp.concatenate([inputs["unembed"], b], axis=-1),
    )
    with jax.set_mesh(make_mesh()):
        naive = functools.partial(logprob_reference, **CAPPED)
        outs, grads = value_and_grad(naive, inputs | both, weights)
        want = outs, [half for grad in grads for half in np.split(grad, [32], axis=-1)]

    def loss(hidden, low, unembed, b, targets, ref_hidden, ref_unembed, *weights):
        found = token_scores(
            *(hidden, unembed, targets),
            change=(low, b),
            ref=(ref_hidden, ref_unembed),
            temperature=0.7,
            logit_softcap=3.0,
            chunk=7,
            rules=RULES,
        )[:3]
        return sum(jnp.sum(a * w) for a, w in zip(found, weights, strict=True)), found

    arrays = [inputs["hidden"], low, inputs["unembed"], b, inputs["targets"]]
    arrays += [inputs["ref_hidden"], inputs["ref_unembed"], *weights]
    rows, tokens, matrix = ("batch", "time", None), ("batch", "time"), ("vocab", "w_embed")
    axes = [rows, rows, matrix, ("vocab", None), tokens, rows, matrix, tokens, tokens, tokens]
    with jax.set_mesh(make_mesh(**sizes)):
        placed = [jax.reshard(x, RULES.spec(*a)) for x, a in zip(arrays, axes, strict=True)]
        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
        (_, found), grads = jax.device_get(grad(*placed))
    assert_close(want[0], found)
    assert_close(want[1], list(grads), tol=2e-5)


def random_support(targets, V, seed=3):
    """(bits of 0 to V random ids with the target, the same as bool [B, T, V])."""
    rng = np.random.default_rng(seed)
    members = rng.random((*targets.shape, V)) < rng.random((*targets.shape, 1))
    np.put_along_axis(members, np.asarray(targets)[..., None], True, axis=-1)
    sets = from_bits(packed_bits(members.reshape(-1, V)))
    index = np.repeat(np.arange(targets.size), sets.counts)
    return jnp.asarray(to_bits(PackedSets(index, sets.ids), targets.shape, V)), members


def packed_bits(members):
    """uint32 [n, W] of bool [n, V], with numpy's own packing."""
    padded = np.pad(members, ((0, 0), (0, -members.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


@pytest.mark.parametrize(
    ("V", "chunk", "sizes"),
    [
        (500, 7, {}),  # no multiple of a word; vocabulary blocks with a rest
        pytest.param(1000, 40, {}, marks=pytest.mark.thorough),
        (500, 9, dict(fsdp=2, tensor=4)),  # shards of 125 ids start inside a word
    ],
)
def test_the_support_mass_and_its_gradient_equal_the_naive_form(monkeypatch, V, chunk, sizes):
    monkeypatch.setattr(logprob, "GROUPED_CHUNKS", {"cpu": 4})
    inputs, weights = problem(V=V)
    support, members = random_support(inputs["targets"], V)
    policy = {name: inputs[name] for name in ("hidden", "unembed", "targets")}

    def naive(hidden, unembed, targets):
        logits = head_logits(hidden, unembed, temperature=0.7, softcap=3.0)
        logp = jax.nn.log_softmax(logits)
        kept = jax.nn.log_softmax(jnp.where(members, logits, -jnp.inf))
        pick = lambda x: jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]  # noqa: E731
        return pick(kept), -jnp.sum(jnp.exp(logp) * logp, -1)

    def kernel(support=support, **k):
        found = token_scores(
            **k,
            support=support,
            temperature=0.7,
            logit_softcap=3.0,
            chunk=chunk,
            rules=RULES,
        )
        return found.logp - found.log_mass, found.entropy

    with jax.set_mesh(make_mesh()):
        want = value_and_grad(naive, policy, weights[:2])
    with jax.set_mesh(make_mesh(**sizes)):
        rows = RULES.spec("batch", "time")
        specs = dict(hidden=("batch", "time", None), unembed=("vocab", "w_embed"))
        placed = {
            k: jax.reshard(x, RULES.spec(*specs.get(k, ("batch", "time"))))
            for k, x in policy.items()
        }
        got = value_and_grad(kernel, placed, [jax.reshard(w, rows) for w in weights[:2]])
    assert_close(want[0], got[0])
    assert_close(want[1], got[1], tol=2e-5)


def test_a_support_of_all_ids_has_all_the_mass(one_device):
    inputs, _ = problem()
    policy = {name: inputs[name] for name in ("hidden", "unembed", "targets")}
    support = jnp.asarray(to_bits(None, (8, 13), 500))
    found = token_scores(**policy, support=support, temperature=1.0, chunk=32, rules=RULES)
    np.testing.assert_array_equal(found.log_mass, 0.0)


def test_masked_tokens_give_zeros_and_take_no_gradient(one_device):
    """Also if their hidden states are NaN and if whole chunks are skipped."""
    inputs, weights = problem()
    mask = jax.random.bernoulli(jax.random.key(5), 0.4, (8, 13)).astype(jnp.float32)
    naive = functools.partial(logprob_reference, temperature=0.9, softcap=None)
    kernel = functools.partial(scores_with_kl, temperature=0.9, chunk=9, rules=RULES, mask=mask)
    want = value_and_grad(naive, inputs, [w * mask for w in weights])
    kept = mask[..., None] > 0
    inputs["hidden"] = jnp.where(kept, inputs["hidden"], jnp.nan)
    got = value_and_grad(kernel, inputs, weights)
    assert_close(tuple(a * mask for a in want[0]), got[0])
    assert_close(want[1], got[1], tol=2e-5)


def test_a_mask_without_tokens_gives_zeros(one_device):
    inputs, weights = problem()
    kernel = functools.partial(
        scores_with_kl, temperature=1.0, chunk=9, rules=RULES, mask=jnp.zeros((8, 13))
    )
    for a in jax.tree.leaves(value_and_grad(kernel, inputs, weights)):
        assert not np.any(a)


@pytest.mark.parametrize(
    "mesh",
    [
        dict(sequence=2, tensor=4),
        pytest.param(dict(fsdp=8), marks=pytest.mark.thorough),
        pytest.param(dict(fsdp=2, tensor=4), marks=pytest.mark.thorough),
    ],
)
def test_same_numbers_on_every_mesh(mesh):
    """Devices have different numbers of unmasked tokens; one has none."""
    rules = Rules(time="sequence")
    inputs, weights = problem(T=14)
    inputs["mask"] = (jnp.arange(8)[:, None] * 2 > jnp.arange(14)).astype(jnp.float32)

    def kernel(**k):
        return scores_with_kl(**k, temperature=0.9, logit_softcap=5.0, chunk=9, rules=rules)

    results = []
    for sizes in ({}, mesh):
        with jax.set_mesh(make_mesh(**sizes)):
            tokens = rules.spec("batch", "time")
            rows = [jax.reshard(w, tokens) for w in weights]
            axes = dict(hidden=("batch", "time", None), ref_hidden=("batch", "time", None))
            axes |= dict(unembed=("vocab", "w_embed"), ref_unembed=("vocab", "w_embed"))
            axes |= dict(targets=("batch", "time"), mask=("batch", "time"))
            placed = {k: jax.reshard(inputs[k], rules.spec(*axes[k])) for k in inputs}
            results.append(value_and_grad(kernel, placed, rows))
    assert_close(*results, tol=2e-5)


def test_gradients_keep_the_sharding_and_dtype_of_the_weight():
    rules = Rules()
    inputs, _ = problem()
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        unembed = jax.reshard(inputs["unembed"], rules.spec("vocab", "w_embed")).astype(
            jnp.bfloat16
        )

        def loss(w):
            return jnp.sum(
                token_scores(
                    inputs["hidden"], w, inputs["targets"], temperature=1.0, chunk=16, rules=rules
                )[0]
            )

        grad = jax.jit(jax.grad(loss))(unembed)
    assert grad.sharding.spec == rules.spec("vocab", "w_embed") and grad.dtype == jnp.bfloat16


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("rows", "V", "with_entropy", "dtype"),
    [
        (8, 96, False, jnp.float32),
        pytest.param(2, 96, True, jnp.float32, marks=pytest.mark.thorough),
        pytest.param(2, 1000, False, jnp.float32, marks=pytest.mark.thorough),
        pytest.param(8, 1000, True, jnp.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_logprobs_are_bitwise_those_of_the_engine(one_device, V, with_entropy, rows, dtype):
    """The engine processes `rows` hidden states at a time, the trainer 104 in chunks of 33."""
    inputs, _ = problem(D=64, V=V)
    hidden, unembed = inputs["hidden"].astype(dtype), inputs["unembed"].astype(dtype)

    @jax.jit
    def engine(h, tokens, temperature):
        logits = head_logits(h, unembed, temperature=1.0, softcap=None)
        return engine_logp(logits / temperature[:, None], tokens)

    flat, tokens = hidden.reshape(-1, 64), inputs["targets"].reshape(-1)
    n = len(tokens)
    want = [
        engine(flat[i : i + rows], tokens[i : i + rows], jnp.full(rows, 0.7))
        for i in range(0, n, rows)
    ]
    trainer = jax.jit(
        lambda h: token_scores(
            h,
            unembed,
            inputs["targets"],
            temperature=0.7,
            chunk=33,
            rules=RULES,
            with_entropy=with_entropy,
        )
    )
    np.testing.assert_array_equal(np.concatenate(want), np.ravel(trainer(hidden)[0]))


def test_temporaries_are_far_below_tokens_by_vocabulary(one_device):
    B, T, D, V, chunk = 4, 512, 64, 8192, 128
    shapes = [((B, T, D), jnp.float32), ((V, D), jnp.float32), ((B, T), jnp.int32)]
    hidden, unembed, targets = (jax.ShapeDtypeStruct(*s) for s in shapes)

    def loss(hidden, unembed, targets):
        logp, entropy, *_ = token_scores(
            hidden, unembed, targets, temperature=1.0, chunk=chunk, rules=RULES
        )
        return jnp.sum(logp) + jnp.sum(entropy)

    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, unembed, targets)
    temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
    all_logits = B * T * V * 4  # 64 MiB; the reference needs several of these
    assert temporaries < all_logits / 2, (temporaries, all_logits)


@pytest.mark.parametrize("bad", [dict(temperature=0.0, chunk=8), dict(temperature=1.0, chunk=0)])
def test_invalid_temperatures_and_chunks_are_rejected(one_device, bad):
    inputs, _ = problem()
    args = inputs["hidden"], inputs["unembed"], inputs["targets"]
    with pytest.raises(ValueError, match="set"):
        token_scores(*args, **bad, rules=RULES)
