"""Updates do not depend on the layout, donate their state, and reject non-finite gradients.

Tests of jaxrl/learner/step.py and jaxrl/learner/loss.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.data.packing import gather, pack
from jaxrl.kernels.logprob.divergence import terms
from jaxrl.learner.policy_objective import Coefs
from jaxrl.learner.requirements import kl_in_loss
from jaxrl.learner.state import checkpoint_state
from jaxrl.learner.step import put_batch
from jaxrl.models.packed import forward_packed
from jaxrl.runtime.flat_program import FlatTree, unflatten
from jaxrl.types import TokenSets
from sharding import RING, copy_tree, make_mesh
from sharding.rules import TRAIN
from tests.learner.tiny_policy import (
    MODEL,
    batches,
    new_params,
    new_state,
    programs,
    rollouts,
    run_config,
    stack_layers,
    update_once,
)
from tests.marks import graded
from tests.models.resized import resized

ROLLOUTS = rollouts()
ONE = dict(row_len=32, token_budget=512)


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.fixture(scope="module")
def want():
    """16 rollouts in one micro-batch on one device, per aggregation."""
    known = {}

    def of(mode):
        if mode not in known:
            cfg = run_config(aggregation=mode, old_logp="rollout", entropy_coef=0.01)
            known[mode] = update_once(cfg, batches(ROLLOUTS, **ONE), {})
        return known[mode]

    return of


LAYOUTS = {
    "two micro-batches": (dict(row_len=32, token_budget=256), {}),
    "four micro-batches": (dict(row_len=32, token_budget=128), {}),
    "one sequence a row": (dict(row_len=24, token_budget=192), {}),
    "long rows": (dict(row_len=128, token_budget=256), {}),
    "fsdp 8": (dict(row_len=32, token_budget=64, n_ranks=8), dict(fsdp=8)),
    "replica 2, fsdp 2, tensor 2": (
        dict(row_len=32, token_budget=64, n_ranks=4),
        dict(replica=2, fsdp=2, tensor=2),
    ),
}


@pytest.mark.parametrize(
    "layout",
    graded(LAYOUTS, thorough=["four micro-batches", "long rows", "replica 2, fsdp 2, tensor 2"]),
)
def test_token_mean_does_not_depend_on_the_layout(layout, want):
    packing, mesh = LAYOUTS[layout]
    cfg = run_config(aggregation="token_mean", old_logp="rollout", entropy_coef=0.01)
    if mesh:  # rematerialization on a mesh must not change a number either
        cfg = dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, remat="full"))
    assert_same(update_once(cfg, batches(ROLLOUTS, **packing), mesh), want("token_mean"))


SEQUENCE_MEANS = "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"


@pytest.mark.parametrize("mode", graded(SEQUENCE_MEANS))
def test_sequence_means_do_not_depend_on_the_packing(mode, want):
    packing, mesh = LAYOUTS["long rows"]
    cfg = run_config(aggregation=mode, old_logp="rollout", entropy_coef=0.01)
    assert_same(update_once(cfg, batches(ROLLOUTS, **packing), mesh), want(mode))


# Losses and importance weights that depend on all tokens of a response.
RESPONSE_LEVEL = {
    "gspo": dict(policy_loss="gspo"),
    "gmpo, seq_tis, seq_mean_k1": dict(
        policy_loss="gmpo",
        old_logp="recompute",
        correction="seq_tis",
        rejection="seq_mean_k1",
        rejection_low=0.01,
        rejection_high=100.0,
    ),
}


@pytest.mark.parametrize("case", graded(RESPONSE_LEVEL))
def test_response_level_losses_do_not_depend_on_the_layout(case):
    cfg = run_config(
        **(dict(aggregation="seq_mean_token_mean", old_logp="rollout") | RESPONSE_LEVEL[case])
    )
    want = update_once(cfg, batches(ROLLOUTS, **ONE), {})
    packing, mesh = LAYOUTS["fsdp 8"]
    assert_same(update_once(cfg, batches(ROLLOUTS, **packing), mesh), want)


@pytest.mark.thorough
def test_adapted_coefficients_start_at_the_config_and_change_without_recompiling(one_device):
    keys = dict(entropy_coef=0.01, old_logp="rollout")
    fixed, adapting = run_config(**keys), run_config(**keys, entropy_target=1.0)
    micro_batches, results = batches(ROLLOUTS, **ONE), []
    for cfg, coefs in [(fixed, None), (adapting, None), (adapting, Coefs(kl=0.0, entropy=0.5))]:
        state, (_, update, _) = new_state(cfg), programs(cfg)
        n_before = update.n_compiled
        _, metrics = update.update(state, micro_batches, coefs=coefs)
        results.append((metrics["loss/total"], metrics["loss/policy"], metrics["loss/entropy"]))
    assert update.n_compiled == n_before > 0
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
    total, policy, entropy = results[2]
    np.testing.assert_allclose(total, policy - 0.5 * entropy, rtol=1e-5)


@pytest.mark.thorough
def test_full_kl_with_a_plus_has_its_value_and_the_gradient_of_k2(one_device):
    ref, results = new_params(seed=1), {}
    for kl in ("full", "full+", "k2"):
        cfg = run_config(kl=kl, kl_coef=0.5, temperature=1.0, old_logp="rollout")
        state, (_, update, score) = new_state(cfg), programs(cfg)
        [batch] = batches(ROLLOUTS, **ONE)
        ref_logp = np.asarray(score(ref, put_batch(batch, TRAIN))[0])
        _, results[kl] = update.update(
            state, [batch.replace(ref_logp=ref_logp)], ref_params=None if kl == "k2" else ref
        )
    assert results["full+"]["loss/kl"] == results["full"]["loss/kl"]
    norms = [results[kl]["optim/grad_norm"] for kl in ("full+", "k2", "full")]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
    assert abs(norms[2] / norms[1] - 1) > 1e-3


@pytest.mark.thorough
def test_stacked_layers_give_the_loss_and_gradient_of_listed_ones():
    listed = resized(MODEL, L=2)
    stacked = dataclasses.replace(listed, stacked=True)
    cfg = run_config(aggregation="token_mean", old_logp="rollout", entropy_coef=0.01)
    micro_batches = batches(ROLLOUTS, **ONE)
    grads, metrics, _ = update_once(cfg, micro_batches, {}, model=stacked)
    listed_grads, listed_metrics, _ = update_once(cfg, micro_batches, {}, model=listed)
    assert_same(metrics, listed_metrics)
    assert_same(grads, stack_layers(listed_grads, stacked))


def test_idle_rollouts_count_in_the_denominator(one_device):
    idle = [dataclasses.replace(r, advantages=None) for r in ROLLOUTS[8:]]
    cfg = run_config(old_logp="auto")
    results = []
    for some, extra in [
        (ROLLOUTS[:8] + idle, 0.0),
        (ROLLOUTS[:8], sum(len(r.tokens) for r in idle)),
    ]:
        state, (_, update, _) = new_state(cfg), programs(cfg)
        state, metrics = update.update(state, batches(some, **ONE), extra_weight=extra)
        names = ("loss/total", "loss/policy", "optim/grad_norm")
        results.append(({n: metrics[n] for n in names}, jax.device_get(state.params)))
    assert_same(*results)


def test_scores_are_those_of_tokens_in_the_loss(one_device):
    params, score = new_params(), programs(run_config())[2]
    batch = batches(ROLLOUTS, **ONE)[0]
    found = jax.device_get(score(params, put_batch(batch, TRAIN)))
    every = dataclasses.replace(batch, mask=np.ones_like(batch.mask))
    all_tokens = jax.device_get(score(params, put_batch(every, TRAIN)))
    assert 0 < batch.mask.sum() < 0.7 * batch.mask.size
    for got, want in zip(found, all_tokens, strict=True):
        np.testing.assert_array_equal(got[batch.mask == 0], 0.0)
        np.testing.assert_allclose(got, want * batch.mask, rtol=1e-6, atol=1e-6)


def test_on_policy_the_ratio_is_one_and_the_loss_follows_the_score(one_device):
    cfg = run_config(old_logp="auto")
    state, (_, update, score) = new_state(cfg), programs(cfg)
    [batch] = batches(ROLLOUTS, **ONE)
    logp, entropy = jax.device_get(score(state.params, put_batch(batch, TRAIN)))
    _, metrics = update.update(state, [batch])
    n = batch.mask.sum()
    # ratio 1: the loss is -A at every token
    np.testing.assert_allclose(
        metrics["loss/total"], -(batch.advantages * batch.mask).sum() / n, rtol=1e-5
    )
    np.testing.assert_allclose(metrics["loss/entropy"], (entropy * batch.mask).sum() / n, rtol=1e-5)
    gap = np.abs(logp - batch.rollout_logp)[batch.mask > 0]
    np.testing.assert_allclose(metrics["mismatch/logp_diff_mean"], gap.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["mismatch/logp_diff_max"], gap.max(), rtol=1e-5)
    assert metrics["loss/ratio_max"] == 1.0
    assert metrics["loss/clip_fraction"] == metrics["loss/approx_kl"] == 0.0


def with_supports(samples, params):
    """Samples from supports of 8 to 40 random ids, with the logprobs that an engine returns."""
    rng = np.random.default_rng(4)

    def sets(tokens):
        ids = [np.union1d(rng.choice(MODEL.V, rng.integers(8, 40)), token) for token in tokens]
        return TokenSets(np.array([len(i) for i in ids]), np.concatenate(ids).astype(np.int32))

    samples = [dataclasses.replace(s, support=sets(s.tokens)) for s in samples]
    score = programs(run_config())[2]
    packed = pack(samples, shapes=((4, 32),), align=8, n_ranks=1)
    logps = [np.asarray(score(params, put_batch(p.batch, TRAIN, MODEL.V))[0]) for p in packed]
    pairs = zip(samples, gather(logps, packed), strict=True)
    return [dataclasses.replace(s, behavior_logp=logp) for s, logp in pairs]


@pytest.mark.thorough
def test_a_kept_sampling_mask_gives_a_ratio_of_one_before_the_first_update(one_device):
    found = {}
    for keep in (True, False):
        cfg = run_config(old_logp="rollout", keep_sampling_mask=keep, clip_low=1.0)
        state = new_state(cfg)
        samples = with_supports(ROLLOUTS, state.params)
        for layout in ("one", "several") if keep else ("one",):
            packing = ONE if layout == "one" else dict(row_len=32, token_budget=64)
            _, metrics = programs(cfg)[1].update(new_state(cfg), batches(samples, **packing))
            found[keep, layout] = metrics
    kept, several, full = found[True, "one"], found[True, "several"], found[False, "one"]
    assert kept == pytest.approx(several, rel=1e-4, abs=1e-6)
    tokens = [s.n_loss_tokens for s in ROLLOUTS]
    want = -np.average([s.advantages[0] for s in ROLLOUTS], weights=tokens)
    np.testing.assert_allclose(kept["loss/total"], want, rtol=1e-4)
    np.testing.assert_allclose(kept["loss/ratio_max"], 1.0, rtol=1e-5)
    assert kept["loss/approx_kl"] < 1e-9 and kept["mismatch/logp_diff_max"] < 1e-5
    # Without the mask the ratio is the probability of the support.
    assert full["loss/ratio_max"] < 1.0 and full["loss/approx_kl"] > 0.05
    np.testing.assert_allclose(kept["loss/entropy"], full["loss/entropy"], rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rules", "sizes"),
    [(TRAIN, dict(replica=2, fsdp=2, tensor=2)), (RING, dict(fsdp=2, sequence=2, tensor=2))],
)
def test_a_kept_sampling_mask_gives_the_same_update_on_every_mesh(rules, sizes):
    cfg = run_config(old_logp="rollout", keep_sampling_mask=True)
    with jax.set_mesh(make_mesh()):
        samples = with_supports(ROLLOUTS, new_params())
        _, want = programs(cfg)[1].update(new_state(cfg), batches(samples, **ONE))
    n_ranks = sizes.get("replica", 1) * sizes["fsdp"]
    with jax.set_mesh(make_mesh(**sizes)):
        micro = batches(samples, row_len=32, token_budget=128, n_ranks=n_ranks)
        update = programs(cfg, rules=rules)[1]
        _, got = update.update(new_state(cfg, rules=rules), micro)
    assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert want["optim/grad_norm"] > 0.01


def test_updates_raise_the_logprob_of_good_responses_and_lower_that_of_bad_ones(one_device):
    cfg = run_config(old_logp="auto")
    state, (_, update, score) = new_state(cfg), programs(cfg)
    [batch] = batches(ROLLOUTS, **ONE)
    before = jax.device_get(score(state.params, put_batch(batch, TRAIN))[0])
    for _ in range(3):
        state, _ = update.update(state, [batch])
    after = jax.device_get(score(state.params, put_batch(batch, TRAIN))[0])
    assert np.sum((after - before) * batch.advantages * batch.mask) > 0


def test_the_step_is_clipped_by_the_norm_of_the_mean_gradient(one_device):
    _, shared, _ = programs(run_config())  # the gradient does not depend on the optimizer
    micro_batches = [*batches(ROLLOUTS[:8], **ONE), *batches(ROLLOUTS[8:], **ONE)]
    moved = []
    for clip_norm in (0.0, 0.5):
        cfg = run_config(
            learner=dict(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_norm=clip_norm)
        )
        state, (_, update, _) = new_state(cfg), programs(cfg)
        before, total = jax.device_get(state.params), shared.zeros(state.params)
        for batch in micro_batches:
            total = shared.accumulate(state.params, None, total, shared.put(batch), None, None)
        state, metrics = update.apply(state, total, np.float32(0))
        step = jax.tree.map(lambda a, b: a - b, before, jax.device_get(state.params))
        moved.append(float(optax.tree.norm(step)))
    np.testing.assert_allclose(moved, [metrics["optim/grad_norm"], 0.5], rtol=1e-4)
    assert metrics["optim/grad_norm"] > 0.5


def test_the_old_state_is_donated_and_copies_of_it_survive(one_device):
    cfg = run_config()
    state, (_, update, _) = new_state(cfg), programs(cfg)
    reference = copy_tree(state.params)
    new, _ = update.update(state, batches(ROLLOUTS, **ONE))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, reference)))


def test_the_optimizer_state_is_flat_after_an_update_and_whole_in_a_checkpoint(one_device):
    cfg = run_config()
    state, (_, update, _) = new_state(cfg), programs(cfg)
    structure, n_compiled = jax.tree.structure(checkpoint_state(state)), []
    for _ in range(2):
        state, _ = update.update(state, batches(ROLLOUTS, **ONE))
        n_compiled.append(update.n_compiled)
    assert n_compiled[0] == n_compiled[1]
    assert isinstance(state.opt_state, FlatTree)
    assert jax.tree.structure(checkpoint_state(state)) == structure


def test_a_non_finite_loss_is_reported_and_leaves_the_state_unchanged(one_device):
    cfg = run_config(old_logp="rollout", entropy_coef=0.01, log_ratio_clamp=0.0)
    state, (_, update, _) = new_state(cfg), programs(cfg)
    before = jax.device_get(state)
    [batch] = batches(ROLLOUTS, **ONE)
    overflowing = batch.replace(
        behavior_logp=batch.behavior_logp - 1000.0 * batch.mask
    )  # exp overflows
    state, metrics = update.update(state, [overflowing])
    assert metrics["optim/nonfinite"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, unflatten(jax.device_get(state)), before)
    state, metrics = update.update(state, [batch])
    assert metrics["optim/nonfinite"] == 0.0
    assert int(state.step) == 1


def test_an_update_without_an_accepted_token_leaves_the_state_unchanged(one_device):
    """So does one with padding only, which compiles the programs of a run."""
    cfg = run_config(rejection="seq_mean_k1")
    state, (_, update, _) = new_state(cfg), programs(cfg)
    state, _ = update.update(state, batches(ROLLOUTS, **ONE))  # Adam's moments are not zero
    before = jax.device_get(state)
    [batch] = batches(ROLLOUTS, **ONE)
    far = batch.replace(behavior_logp=batch.behavior_logp - 10.0 * batch.mask)
    state, metrics = update.update(state, [far])
    assert metrics["mismatch/rejected_fraction"] == 1.0
    assert metrics["loss/total"] == metrics["optim/grad_norm"] == metrics["optim/nonfinite"] == 0.0
    state, _ = update.update(state, [far.replace(mask=0 * far.mask)])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


@pytest.mark.thorough
def test_values_at_masked_tokens_have_no_effect(one_device):
    cfg = run_config(old_logp="recompute", kl_coef=0.1, kl="k3")
    [batch] = batches(ROLLOUTS, **ONE)
    hole = np.where(batch.mask > 0, 0.0, 1e30).astype(np.float32)
    dirty = batch.replace(
        **{
            name: getattr(batch, name) - hole
            for name in ("rollout_logp", "behavior_logp", "old_logp", "ref_logp", "advantages")
        }
    )
    results = []
    for b in (batch, dirty):
        state, (_, update, _) = new_state(cfg), programs(cfg)
        state, metrics = update.update(state, [b])
        results.append((metrics, jax.device_get(state.params)))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.thorough
def test_a_reference_equal_to_the_policy_gives_no_kl_and_no_gradient_of_it(one_device):
    kinds = [dict(kl="full"), dict(kl="k3"), dict(kl_coef=0.0)]
    results = []
    for kind in kinds:
        cfg = run_config(**(dict(kl_coef=0.5) | kind))
        state, (_, update, score) = new_state(cfg), programs(cfg)
        [batch] = batches(ROLLOUTS, **ONE)
        ref = copy_tree(state.params)
        logp, _ = score(ref, put_batch(batch, TRAIN))
        batch = batch.replace(ref_logp=np.asarray(logp))
        state, metrics = update.update(
            state, [batch], ref_params=ref if kind.get("kl") == "full" else None
        )
        assert ("loss/kl" in metrics) == kl_in_loss(cfg.algorithm)
        assert abs(metrics.get("loss/kl", 0.0)) < 1e-6
        results.append(metrics["optim/grad_norm"])
    np.testing.assert_allclose(results, results[0], rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("kl", ["full", "jsd"])
def test_full_kl_is_the_sum_over_the_vocabulary(one_device, kl):
    cfg = run_config(kl=kl, kl_coef=0.5, temperature=1.0)
    state, (_, update, _) = new_state(cfg), programs(cfg)
    ref = new_params(seed=1)
    [batch] = batches(ROLLOUTS, **ONE)
    b = put_batch(batch, TRAIN)
    want = jax.device_get(_naive_kl(state.params, ref, b, 1.0 if kl == "full" else 0.5))
    _, metrics = update.update(state, [batch], ref_params=ref)
    np.testing.assert_allclose(metrics["loss/kl"], want, rtol=1e-5)
    total = metrics["loss/policy"] + 0.5 * metrics["loss/kl"]
    np.testing.assert_allclose(metrics["loss/total"], total, rtol=1e-5)


def _naive_kl(params, ref, batch, beta):
    def log_softmax(p):
        hidden = forward_packed(p, batch.tokens, batch.segments, batch.positions, rules=TRAIN)
        return jax.nn.log_softmax(p.logits(hidden, TRAIN))

    logp, ref_logp = log_softmax(params), log_softmax(ref)
    kl = jnp.sum(terms(logp, ref_logp, beta), axis=-1)
    return jnp.sum(kl * batch.mask) / jnp.sum(batch.mask)


def test_nothing_compiles_after_the_first_update_of_a_shape(one_device):
    cfg = run_config()
    state, (_, update, _) = new_state(cfg), programs(cfg)
    micro_batches = [batches(ROLLOUTS[i::3], **ONE)[0] for i in range(3)]
    state, _ = update.update(state, micro_batches[:1])
    n = update.n_compiled
    state, _ = update.update(state, micro_batches)
    state, _ = update.update(state, micro_batches[:2])
    assert update.n_compiled == n > 0


def test_the_host_waits_for_a_micro_batch_two_calls_later(one_device, monkeypatch):
    """So that the devices have the next call while the host prepares the one after it."""
    cfg, events = run_config(), []
    state, (_, update, _) = new_state(cfg), programs(cfg)
    put, wait, read = update.put, jax.block_until_ready, jax.device_get

    def recorded(name, function):
        def run(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(update, "put", recorded("put", put))
    monkeypatch.setattr(jax, "block_until_ready", recorded("wait", wait))
    monkeypatch.setattr(jax, "device_get", recorded("metrics", read))
    update.update(state, [batches(ROLLOUTS[i::3], **ONE)[0] for i in range(3)])
    assert events == ["put", "put", "wait", "put", "wait", "wait", "metrics"]


def test_an_update_flattens_the_model_as_often_for_three_micro_batches_as_for_one(
    one_device, monkeypatch
):
    cfg, flatten, counts = run_config(), jax.tree.flatten, []
    state, (_, update, _) = new_state(cfg), programs(cfg)
    micro_batches = [batches(ROLLOUTS[i::3], **ONE)[0] for i in range(3)]
    state, _ = update.update(state, micro_batches[:1])  # compiled, which flattens trees too

    def counting(tree, *args, **kwargs):
        counts[-1] += isinstance(tree, type(state.params))
        return flatten(tree, *args, **kwargs)

    monkeypatch.setattr(jax.tree, "flatten", counting)
    for n in (1, 3):
        counts.append(0)
        state, _ = update.update(state, micro_batches[:n])
    assert counts[0] == counts[1] > 0


@pytest.mark.thorough
def test_lowering_needs_no_data_and_the_call_then_compiles_nothing_more(one_device):
    cfg = run_config(temperature=0.9)  # compiled by no other test
    state, (_, update, _) = new_state(cfg), programs(cfg)
    [batch] = batches(ROLLOUTS, **ONE)
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
        (state, put_batch(batch, TRAIN)),
    )
    compiled = {name: lower().compile() for name, lower in update.lowerings(*abstract).items()}
    assert set(compiled) == {"accumulate", "apply", "zeros"}
    assert compiled["accumulate"].memory_analysis().temp_size_in_bytes > 0
    seen = []

    def listen(name, seconds, **details):
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    update.update(state, [batch])
    jax.monitoring.unregister_event_duration_listener(listen)
    assert set(seen) <= {"jit(_zeros)"}
