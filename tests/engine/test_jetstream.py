"""Tests of jetstream.py: its protocol, and the package's orchestrator if it is installed."""

import asyncio
import logging
import types

import jax
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.engine.jetstream import JetStreamEngine
from sharding import make_mesh
from tests.engine.engine_cases import (
    FAMILIES,
    limit_pages,
    make_engine,
    make_params,
    make_requests,
    run,
)

GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


@pytest.fixture(scope="module")
def params(mesh):
    with jax.set_mesh(mesh):
        return make_params(FAMILIES["llama"])


SIZES = {"max_num_seqs": 3, "steps_per_dispatch": 4}


def adapter(params, mesh, **changes):
    changes = SIZES | changes
    options = {k: changes.pop(k) for k in ("result", "tokenizer", "sampling") if k in changes}
    engine = make_engine(FAMILIES["llama"], **changes)
    return JetStreamEngine(engine, params, mesh, **{"sampling": GREEDY} | options)


def prompts_and_tokens(params, mesh, n, max_tokens, sampling=GREEDY):
    """`n` prompts, and the tokens that the engine generates for each."""
    requests = make_requests(
        n, n_samples=1, max_tokens=max_tokens, ignore_stop=True, sampling=sampling
    )
    with jax.set_mesh(mesh):
        results = run(make_engine(FAMILIES["llama"], **SIZES), params, requests)
    return [r.tokens for r in requests], [tokens for tokens, _, _ in results]


def prefill(jet, tokens):
    padded = np.pad(tokens, (0, 256 - len(tokens)))
    return jet.prefill(params=jet.load_params(), padded_tokens=padded, true_length=len(tokens))


def drive(jet, prompts, n_tokens):
    """The first tokens of each prompt, as the orchestrator gets them.

    A slot is refilled once it has `n_tokens`; tokens beyond are discarded.
    """
    waiting, free = list(enumerate(prompts)), list(range(jet.max_concurrent_decodes))
    made, owner, state = [[] for _ in prompts], {}, jet.init_decode_state()
    while waiting or owner:
        while waiting and free:
            i, tokens = waiting.pop(0)
            owner[slot := free.pop(0)] = i
            state = jet.insert(prefill(jet, tokens), state, slot=slot)
        state, result = jet.generate(jet.load_params(), state)
        result.copy_to_host_async()
        for slot, i in list(owner.items()):
            part = result.convert_to_numpy().get_result_at_slot(slot)
            assert part.tokens.shape == part.valid.shape == (1, part.tokens.shape[1])
            made[i] += part.tokens[part.valid == 1].tolist()
            assert part.lengths.tolist() == [len(made[i])]
            if len(made[i]) >= n_tokens or not part.valid.all():
                free.append(slot)
                del owner[slot]
    return [tokens[:n_tokens] for tokens in made]


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(GREEDY, marks=pytest.mark.thorough), SamplingConfig(temperature=0.9)],
    ids=["greedy", "sampled"],
)
def test_the_verbs_give_the_tokens_of_the_engine(params, mesh, sampling):
    prompts, want = prompts_and_tokens(params, mesh, 7, 12, sampling)
    jet = adapter(params, mesh, sampling=sampling)
    assert drive(jet, prompts, 12) == want
    for slot in range(3):
        jet.free_resource(slot)
        jet.free_resource(slot)  # twice is once
    assert jet._engine.scheduler.pool.n_used == 0


def test_a_preempted_sequence_continues(params, mesh):
    prompts, want = prompts_and_tokens(params, mesh, 3, 60)
    jet = adapter(params, mesh)
    with jax.set_mesh(mesh):
        limit_pages(jet._engine, 6)  # too few for three sequences of maximum length
    assert drive(jet, prompts, 60) == want
    assert jet._engine.take_stats().n_preempted > 0


def test_a_sequence_at_the_end_of_the_context_is_no_longer_valid(params, mesh):
    tokens = np.arange(2, 252, dtype=np.int32)
    jet = adapter(params, mesh)
    (made,) = drive(jet, [tokens], 100)
    assert len(made) == 256 - 250
    _, result = jet.generate(jet.load_params(), None)
    assert not result.get_result_at_slot(0).valid.any()


def test_unsupported_calls_raise(params, mesh):
    jet = adapter(params, mesh)
    prefix = prefill(jet, np.arange(2, 20, dtype=np.int32))
    with pytest.raises(ValueError, match="slot 3 is out of range"):
        jet.insert(prefix, None, 3)
    with pytest.raises(NotImplementedError, match="pass the whole prompt"):
        jet.prefill(params=params, existing_prefix=prefix, padded_tokens=[2], true_length=1)


TOKENIZER = types.SimpleNamespace(pad_id=0, bos_id=2, eos_id=1, stop_tokens=set())


def test_the_packages_orchestrator_drives_the_adapter(params, mesh, monkeypatch):
    engine_api = pytest.importorskip("jetstream.engine.engine_api")
    orchestrator = pytest.importorskip("jetstream.core.orchestrator")
    multifuture = pytest.importorskip("jetstream.core.utils.async_multifuture")
    logging.getLogger().handlers.remove(orchestrator.handler)  # it logs every step to stdout
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)  # gone since jax 0.4.26
    prompts, want = prompts_and_tokens(params, mesh, 9, 12)
    fitting = [
        i for i, tokens in enumerate(prompts) if len(tokens) <= 128
    ]  # the package truncates others
    prompts, want = [prompts[i] for i in fitting], [want[i] for i in fitting]
    assert len(prompts) > 3  # slots are refilled
    jet = adapter(params, mesh, result=engine_api.ResultTokens, tokenizer=TOKENIZER)
    weights = [jet.load_params()]
    driver = orchestrator.Driver(
        prefill_engines=[jet],
        generate_engines=[jet],
        prefill_params=weights,
        generate_params=weights,
        interleaved_mode=True,
    )

    async def collect():
        channels = []
        for tokens in prompts:
            channels.append(multifuture.AsyncMultifuture())
            request = orchestrator.ActiveRequest(
                max_tokens=12,
                prefill_content=tokens,
                return_channel=channels[-1],
                history_path="no <bos> before the prompt",
                is_client_side_tokenization=True,
            )
            driver.place_request_on_prefill_queue(request)
        made = []
        for channel in channels:
            made.append([t async for samples in channel for t in samples[0].token_ids])
        return made

    try:
        assert asyncio.run(asyncio.wait_for(collect(), 120)) == want
    finally:
        driver.stop()
