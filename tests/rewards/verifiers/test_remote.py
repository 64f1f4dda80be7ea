import time

import numpy as np
import pytest

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.verifiers.remote import remote
from jaxrl.types import Prompt, Rollout


def lengths(body):
    return {"rewards": [len(query) for query in body["query"]]}


def request_scores(url, n=2, **options):
    texts = [f"prompt {i}" for i in range(n)]
    return remote(
        ["s"] * n,
        ["r"] * n,
        [f"label {i}" for i in range(n)],
        [{}] * n,
        prompt_strs=texts,
        query_strs=[text + " r" for text in texts],
        url=url,
        **{"timeout_s": 5.0, "wait_s": 0.01} | options,
    )


def test_one_request_has_the_batch_in_openrlhfs_format(serve):
    server = serve(lengths)
    assert request_scores(server.url) == [{"score": 10}, {"score": 10}]
    assert server.requests == [
        {
            "query": ["prompt 0 r", "prompt 1 r"],
            "prompts": ["prompt 0", "prompt 1"],
            "labels": ["label 0", "label 1"],
        }
    ]


def test_scores_and_extra_logs_are_returned_with_the_reward(serve):
    logs = {"length": [3, 4], "of the batch": 7}
    server = serve({"rewards": [0.5, 1], "scores": [0, 1], "extra_logs": logs})
    assert request_scores(server.url) == [
        {"score": 0.5, "scores": 0, "length": 3},
        {"score": 1, "scores": 1, "length": 4},
    ]


def test_a_failed_request_is_retried_with_exponential_backoff(serve):
    server = serve(503, 429, lengths)
    start = time.monotonic()
    assert request_scores(server.url, wait_s=0.1) == [{"score": 10}] * 2
    assert len(server.requests) == 3
    assert time.monotonic() - start >= 0.1 + 0.2


def test_a_retry_goes_to_the_next_server(serve):
    server = serve(lengths)
    closed = serve(lengths)
    closed.close()
    for _ in range(4):  # the first server is random
        assert request_scores(f"{closed.url},{server.url}", attempts=2) == [{"score": 10}] * 2


def test_attempts_and_time_are_limited(serve):
    server = serve(500)
    with pytest.raises(RuntimeError, match=r"after 3 attempts .* returned status 500"):
        request_scores(server.url, attempts=3)
    assert len(server.requests) == 3
    slow = serve(lambda body: time.sleep(3) or lengths(body))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"within 1.5 s; .*sent no reply within 0"):
        request_scores(slow.url, timeout_s=1.5)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "answer, error",
    [
        (404, "returned status 404"),
        (b"<html>", "which is not JSON"),
        ([1, 2], "no list of 'rewards' but list"),
        ({"reward": [1, 2]}, r"no list of 'rewards' but \['reward'\]"),
        ({"rewards": [1, 2, 3]}, "returned 3 rewards for 2 queries"),
        ({"rewards": [1, 2], "extra_logs": {"a": [1]}}, "returned 1 a for 2 queries"),
    ],
)
def test_an_invalid_response_is_an_error_without_a_retry(serve, answer, error):
    server = serve(answer)
    with pytest.raises((RuntimeError, ValueError), match=error):
        request_scores(server.url)
    assert len(server.requests) == 1


def rollouts(n):
    for i in range(n):
        prompt = Prompt(id=i, messages=(), tokens=np_tokens(10 + i), answer=str(i))
        tokens = np_tokens(100, 101)
        logp, mask = tokens.astype("float32"), tokens > 0
        yield Rollout(prompt, 0, tokens, logp, mask, tokens, "stop", text="no specials")


def np_tokens(*ids):
    return np.array(ids, np.int32)


def test_the_pool_sends_batches_and_one_bad_score_is_one_error(serve):
    def answer(body):
        return {
            "rewards": [float("nan") if label == "3" else int(label) for label in body["labels"]]
        }

    server = serve(answer)
    spec = f"remote?url={server.url}&batch_size=4"
    cfg = RewardConfig(functions=(spec,), workers=2, error_value=-1.0)
    with RewardPool(cfg, decode=lambda tokens: " ".join(map(str, tokens))) as pool:
        scored = pool.score(list(rollouts(10)))
    assert [r.value for r in scored] == [0, 1, 2, -1, 4, 5, 6, 7, 8, 9]
    assert (
        scored[3].error == "remote: ValueError: the function returned nan; return a finite number"
    )
    assert not scored[4].error
    assert sorted(len(body["query"]) for body in server.requests) == [2, 4, 4]
    assert {body["query"][0] for body in server.requests} == {
        "10 100 101",
        "14 100 101",
        "18 100 101",
    }
    assert {body["prompts"][0] for body in server.requests} == {"10", "14", "18"}


def test_an_unanswered_batch_is_an_error_for_each_response(serve):
    server = serve(lambda body: time.sleep(5) or {})
    spec = f"remote?url={server.url}&timeout_s=1.5&wait_s=0.01"
    cfg = RewardConfig(functions=(spec,), workers=1, timeout_s=60.0)
    with RewardPool(cfg, decode=str) as pool:
        start = time.monotonic()
        scored = pool.score(list(rollouts(3)))
    assert all("no score after" in r.error and r.value == 0.0 for r in scored)
    assert time.monotonic() - start < 4
