"""Tests of rollout/turns.py: the record of tokens, and turns that are paused and cancelled."""

import dataclasses

import numpy as np
import pytest

from jaxrl.data.images.placed import PlacedTokens
from jaxrl.engine.api import Generated, Request
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.rollout.schedule.saved import decode, encode, group_states
from jaxrl.rollout.turns import ActiveTurn, ActiveTurns, Response, stop_string_end
from jaxrl.types import Prompt, TokenSets
from tests.trainer.schedule.test_generator import CASE, ToyEngine

PROMPT = Prompt(0, (), np.arange(3, dtype=np.int32), answer="")


def letters(tokens) -> str:
    return "".join("abcdefghijklmnopqrstuvwxyz"[t % 26] for t in tokens)


def generated(tokens, *, support=None, finish="", version=0):
    logp = -np.array(tokens, np.float32)
    tokens = np.array(tokens, np.int32)
    return Generated(0, tokens, logp, logp - 1, finish, support=support, version=version)


def sets(*counts):
    return TokenSets(np.array(counts), np.arange(sum(counts), dtype=np.int32))


@pytest.mark.parametrize("recorded", [False, True])
def test_every_field_of_a_rollout_has_the_tokens_in_order(recorded):
    response, turn = Response(PROMPT, 1), Response(PROMPT, 1)
    response.append(generated([4, 5], support=sets(1, 2) if recorded else None, version=2))
    response.append_given(PlacedTokens(np.array([6], np.int32)))
    turn.append(generated([7, 8, 9], support=sets(0, 3, 1) if recorded else None, version=3))
    turn.cut(2)
    response.extend(turn)
    response.finish = "turns"
    rollout = response.freeze(letters)
    assert rollout.tokens.tolist() == [4, 5, 6, 7, 8] and rollout.text == "efghi"
    assert rollout.logp.tolist() == [-4, -5, 0, -7, -8]
    assert rollout.behavior_logp.tolist() == [-5, -6, 0, -8, -9]
    assert rollout.versions.tolist() == [2, 2, 2, 3, 3]
    assert rollout.loss_mask.tolist() == [True, True, False, True, True]
    assert (rollout.sample, rollout.finish) == (1, "turns")
    if recorded:
        assert rollout.support.counts.tolist() == [1, 2, 0, 0, 3]
        assert rollout.support.ids.tolist() == [0, 1, 2, 0, 1, 2]


def routed(tokens, **fields):
    """New tokens, of which token t has the experts t and t + 1 in each of two layers."""
    experts = np.array(tokens, np.uint8)[:, None, None] + np.arange(2, dtype=np.uint8)
    return dataclasses.replace(
        generated(tokens, **fields), experts=np.broadcast_to(experts, (len(tokens), 2, 2))
    )


def test_the_experts_of_a_rollout_are_those_of_its_sampled_tokens():
    """They survive the checkpoint of a group in flight, next to a response without a record."""
    response, turn = Response(PROMPT, 1), Response(PROMPT, 1)
    response.append(routed([4, 5]))
    response.append_given(PlacedTokens(np.array([6], np.int32)))
    turn.append(routed([7, 8, 9]))
    turn.cut(2)
    response.extend(turn)
    experts = response.freeze(letters).experts
    assert experts.dtype == np.uint8 and experts.shape == (5, 2, 2)
    assert experts[:, 1, 0].tolist() == [4, 5, 0, 7, 8]
    one, other = Response(PROMPT, 0), Response(PROMPT, 1)
    one.append(generated([3]))
    other.append(routed([1, 2]))
    group = PromptGroup(PROMPT, seed=0, draw=0, index=0, responses=[one, other], version=1)
    states = group_states([group])
    other.append(routed([9]))  # after the moment of the checkpoint
    [restored] = decode(encode(states), lambda draw, index: PROMPT)
    assert restored.responses[0].experts == []
    restored.responses[1].append(routed([5]))
    assert restored.responses[1].freeze(letters).experts[:, 0, 1].tolist() == [2, 3, 6]
    restored.responses[0].append(routed([5]))
    with pytest.raises(ValueError, match=r"only 1 of 2 tokens .* have recorded experts"):
        restored.responses[0].freeze(letters)


def test_a_response_without_recorded_supports_has_none():
    response = Response(PROMPT, 0)
    response.append(generated([4], finish="stop"))
    assert response.ended and response.freeze(letters).support is None


def test_paused_turns_continue_and_cancelled_ones_leave_the_engine():
    engine = ToyEngine(CASE)
    turns = ActiveTurns(engine, letters)
    requests = [Request(PROMPT.tokens, max_tokens=30, prompt_id=i) for i in range(3)]
    for i, request in enumerate(requests):
        turns.submit(ActiveTurn(i, request, Response(PROMPT, 0), ()))
    turns.dispatch(0)
    turns.pause()
    assert not engine.slots and not turns.in_engine and [t.owner for t in turns.all] == [0, 1, 2]
    assert [t.owner for t in turns.cancel(lambda owner: owner == 1)] == [1]
    turns.resume()
    assert [t.owner for t in turns.cancel(lambda owner: owner == 2)] == [2]
    ended = [turn for _ in range(20) for turn in (turns.dispatch(0) if turns.in_engine else ())]
    assert [turn.owner for turn in ended] == [0] and not engine.slots
    n = len(ended[0].response.tokens)
    assert ended[0].response.tokens == list(range(n)) and turns.n_tokens >= n


def test_stop_strings_are_found_across_dispatches():
    tokens = [0, 1, 2, 3, 4]  # abcde
    assert stop_string_end(tokens, 2, ("bcd",), letters) == 4
    assert stop_string_end(tokens, 3, ("bcd", "cd"), letters) == 4
    assert stop_string_end(tokens, 0, ("x",), letters) is None
    assert stop_string_end(tokens, 0, ("e", "a"), letters) == 1
