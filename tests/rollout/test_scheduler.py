"""Pages and queues on the host: nothing leaks, nothing starves, whatever the order of events."""

import contextlib
import random

import numpy as np
import pytest

from jaxrl.rollout.api import Request
from jaxrl.rollout.pages import OutOfPages, PagePool
from jaxrl.rollout.scheduler import Plan, Scheduler

PAGE = 4


def request(tokens, max_tokens: int, sample: int = 0) -> Request:
    return Request(tokens=np.asarray(tokens, np.int32), max_tokens=max_tokens, sample=sample)


def scheduler(n_pages: int, *, max_num_seqs: int = 4, steps: int = 8, max_len: int = 64):
    pool = PagePool(n_pages, PAGE)
    return Scheduler(pool, max_num_seqs=max_num_seqs, steps_per_dispatch=steps, max_len=max_len)


def test_taking_more_pages_than_are_free_takes_none():
    pool = PagePool(3, PAGE)
    pages = pool.take(2)
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 3 are free"):
        pool.take(2)
    assert pool.n_used == 2
    pool.give_back(pages)
    assert pool.n_free == 3


def test_a_shared_page_is_free_after_its_last_holder_only():
    pool = PagePool(2, PAGE)
    pages = pool.share(pool.take(1))
    pool.give_back(pages)
    assert pool.n_used == 1
    pool.give_back(pages)
    assert pool.n_used == 0
    with pytest.raises(AssertionError, match="free already"):
        pool.give_back(pages)


def test_pages_are_found_by_the_tokens_before_and_in_them():
    pool = PagePool(8, PAGE)
    tokens = np.arange(10, dtype=np.int32)
    pages = pool.take(3)
    pool.remember(tokens, pages)
    assert pool.find(tokens) == pages
    assert pool.find(tokens[:8]) == pages[:2]
    assert pool.find(tokens[:9]) == pages[:2]  # the third page is known with both its tokens only
    assert pool.find(tokens[4:]) == []  # the same tokens behind nothing are others
    pool.give_back(pages)
    assert pool.find(tokens) == []


def test_a_second_sample_copies_the_partly_filled_page_and_shares_the_full_ones():
    s = scheduler(16)
    prompt = range(7)  # 6 keys: one full page, two keys in the next
    for i in range(3):
        s.submit(request(prompt, 4, sample=i))
    plan = s.plan()
    [fill] = plan.fills
    assert (fill.start, fill.tokens.tolist()) == (0, [0, 1, 2, 3, 4, 5])
    first, second, third = plan.decode
    assert first.pages[0] == second.pages[0] == third.pages[0]
    assert plan.copies == [(first.pages[1], second.pages[1]), (first.pages[1], third.pages[1])]


def test_prompts_that_begin_alike_share_the_full_pages_of_the_beginning():
    s = scheduler(16)
    system = list(range(8))
    s.submit(request([*system, 20, 21, 22], 4))
    s.submit(request([*system, 30, 31], 4))
    plan = s.plan()
    first, second = plan.decode
    assert first.pages[:2] == second.pages[:2]
    assert [(fill.start, fill.tokens.tolist()) for fill in plan.fills] == [
        (0, [*system, 20, 21]),
        (8, [30]),
    ]
    assert plan.copies == []


def test_a_prompt_without_room_for_a_response_is_refused():
    with pytest.raises(ValueError, match="64 tokens leaves no room"):
        scheduler(32).prefill(np.arange(64, dtype=np.int32))


def test_the_pages_of_a_prompt_stay_for_samples_that_wait():
    s = scheduler(16, max_num_seqs=1)
    for i in range(2):
        s.submit(request(range(9), 4, sample=i))
    s.advance(s.plan().decode[0], [5, 5, 5, 5], "length")
    plan = s.plan()
    assert plan.fills == [] and plan.decode[0].request.sample == 1
    s.advance(plan.decode[0], [5], "stop")
    assert s.pool.n_used == 0


def test_the_newest_goes_back_when_pages_run_out():
    s = scheduler(4, steps=4)  # 16 keys
    s.submit(request(range(4), 12))
    s.submit(request(range(10, 14), 12))
    old, new = s.plan().decode
    s.advance(old, [0] * 4, "")
    s.advance(new, [0] * 4, "")
    plan = s.plan()  # 7 keys each in 2 pages; every page is taken
    assert plan.decode == [old, new] and plan.n_steps == 1
    for seq in plan.decode:
        s.advance(seq, [0], "")
    assert s.plan().decode == [old]
    assert (s.n_preempted, list(s.waiting)) == (1, [new])


def test_prefixes_that_hold_everything_are_an_error_and_no_endless_wait():
    s = scheduler(4)
    prefix, _ = s.prefill(np.arange(13, dtype=np.int32))
    s.submit(request(range(20, 29), 4))
    with pytest.raises(OutOfPages, match="prefixes hold 3 of 4 pages"):
        s.plan()
    s.release_prefix(prefix)
    assert len(s.plan().decode) == 1


def test_freeing_an_unknown_slot_raises():
    s = scheduler(4)
    slot = s.submit(request(range(3), 4))
    s.free(slot)
    with pytest.raises(KeyError, match="neither waiting nor running"):
        s.free(slot)


def check_pages(s: Scheduler, prefixes: list) -> None:
    """Every page's holders are exactly the sequences, prefixes and kept prompts that name it, and no
    page has two sequences that write to it."""
    held = np.zeros(s.pool.n_pages, int)
    for pages in (
        [q.pages for q in s.running] + [p.pages for p in prefixes] + list(s._kept.values())
    ):
        assert len(set(pages)) == len(pages)
        np.add.at(held, np.array(pages, int), 1)
    assert [s.pool.holders(p) for p in range(s.pool.n_pages)] == held.tolist()
    assert s.pool.n_used == int((held > 0).sum())
    assert all(not q.pages for q in s.waiting)
    written = [q.pages[(q.n_tokens - 1) // PAGE :] for q in s.running]
    flat = [page for pages in written for page in pages]
    assert len(flat) == len(set(flat))


class Keys:
    """What the device would hold: for every page the tokens whose keys were written to it."""

    def __init__(self, n_pages: int):
        self.pages = [[None] * PAGE for _ in range(n_pages)]

    def run(self, plan) -> None:
        for fill in plan.fills:
            for i, token in enumerate(fill.tokens.tolist(), fill.start):
                self.pages[fill.pages[i // PAGE]][i % PAGE] = (i, token)
        for source, target in plan.copies:
            self.pages[target] = list(self.pages[source])
        for seq in plan.decode:
            for i, token in enumerate(seq.cached_tokens().tolist()):
                assert self.pages[seq.pages[i // PAGE]][i % PAGE] == (i, token)

    def write(self, seq, position: int, token: int) -> None:
        self.pages[seq.pages[position // PAGE]][position % PAGE] = (position, token)


@pytest.mark.parametrize("seed", range(200))
def test_no_page_leaks_every_key_is_right_and_every_request_ends(seed):
    rng = random.Random(seed)
    n_pages = rng.randint(6, 14)
    s = scheduler(n_pages, max_num_seqs=rng.randint(1, 5), steps=rng.choice([1, 3, 8]), max_len=24)
    keys = Keys(n_pages)
    prompts = [list(range(k, k + rng.randint(1, 12))) for k in (0, 0, 3)]
    n_left = rng.randint(1, 14)
    prefixes: list = []
    ended: dict[int, int] = {}
    wanted: dict[int, int] = {}
    n_plans = 0
    while n_left or s.n_unfinished:
        event = rng.random()
        if n_left and event < 0.4:
            n_left -= 1
            max_tokens = rng.randint(1, 12)
            wanted[s.submit(request(rng.choice(prompts), max_tokens))] = max_tokens
        elif s.n_unfinished and event < 0.45:
            slot = rng.choice([seq.slot for seq in [*s.running, *s.waiting]])
            s.free(slot)
            del wanted[slot]
        elif event < 0.5 and not prefixes and n_pages >= 10:
            with contextlib.suppress(OutOfPages):
                prefix, fills = s.prefill(np.array(rng.choice(prompts), np.int32))
                prefixes.append(prefix)
                keys.run(Plan(fills, [], [], 0))
        elif event < 0.55 and prefixes:
            s.release_prefix(prefixes.pop())
        elif s.n_unfinished:
            n_plans += 1
            plan = s.plan()
            keys.run(plan)
            check_pages(s, prefixes)
            assert plan.decode, "nothing runs although something waits"
            for seq in plan.decode:
                n_new = min(rng.randint(1, plan.n_steps), seq.remaining)
                tokens = [100 + seq.slot] * n_new
                last = seq.last_token
                for i, token in enumerate(
                    tokens
                ):  # a step writes the last token's key, then samples
                    keys.write(seq, seq.n_tokens - 1 + i, last)
                    last = token
                done = n_new == seq.remaining or rng.random() < 0.1
                s.advance(seq, tokens, "length" if done else "")
                if done:
                    ended[seq.slot] = len(seq.generated)
        check_pages(s, prefixes)
        assert n_plans < 1000
    for prefix in prefixes:
        s.release_prefix(prefix)
    assert ended.keys() == wanted.keys()
    assert all(ended[slot] <= wanted[slot] for slot in wanted)
    assert s.pool.n_used == 0 and not s._kept and not s._waiting_prompts
