"""Tests of jaxrl/rollout/remote/images.py: what is sent of the images of requests."""

import pickle

import numpy as np
import pytest

from jaxrl.engine.api import Request, RequestImage
from jaxrl.rollout.remote.images import ReceivedImages, SentImages


def image(digest: str, start: int = 1, n: int = 4) -> RequestImage:
    rows = np.full((n, 8), ord(digest), np.float32)  # 32 n bytes, and as many of deepstack
    return RequestImage(start, (1, 2, 2 * n), digest, rows, rows[:, None] + 1)


def request(*images: RequestImage) -> Request:
    return Request(np.zeros(9, np.int32), 4, images=images)


def same(a: RequestImage, b: RequestImage) -> bool:
    fields = a.start == b.start and a.grid == b.grid and a.digest == b.digest
    assert a.deep is not None and b.deep is not None
    return fields and np.array_equal(a.rows, b.rows) and np.array_equal(a.deep, b.deep)


def test_a_later_turn_sends_its_new_image_only():
    sent, held, turns = SentImages(), ReceivedImages(), ("ab", "abc", "abc", "d")
    found = []
    for turn in turns:
        given = request(*(image(digest, start) for start, digest in enumerate(turn)))
        requests, message = sent.send([given, given])
        held.receive(pickle.loads(pickle.dumps(message)))
        assert all(not one.images[0].rows.size for one in requests)
        for one in map(held.with_features, requests):
            assert all(map(same, one.images, given.images))
        found.append("".join(one.digest for one in message.new))
    assert found == ["ab", "c", "", "d"]


def test_images_that_no_request_uses_are_dropped_in_the_order_of_their_last_use():
    sent, held = SentImages(kept_bytes=3 * 256), ReceivedImages()  # three images
    for turn, dropped in (("abc", ()), ("a", ()), ("d", ("b",)), ("eb", ("c", "a")), ("a", ("d",))):
        requests, message = sent.send([request(*map(image, turn))])
        assert message.dropped == dropped
        held.receive(message)
        assert [one.digest for one in held.with_features(requests[0]).images] == list(turn)


def test_requests_in_use_may_need_more_than_is_kept():
    sent = SentImages(kept_bytes=0)
    assert len(sent.send([request(image("a"), image("b"))])[1].new) == 2
    assert sent.send([request(image("a"))])[1].dropped == ("b",)


def test_an_image_that_was_not_sent_is_an_error():
    requests, _ = SentImages().send([request(image("a"))])
    with pytest.raises(KeyError):
        ReceivedImages().with_features(requests[0])
