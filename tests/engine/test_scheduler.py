"""Tests of scheduler.py and pages.py on chosen examples."""

import numpy as np
import pytest

from jaxrl.engine.api import Request
from jaxrl.engine.pages import OutOfPages, PagePool, PrefixMatch
from jaxrl.engine.scheduler import DispatchPlan, Scheduler
from jaxrl.engine.states import StateSlots

PAGE, ROW = 4, 8  # tokens of a page, and of a prefill row


def request(tokens, max_tokens: int, sample: int = 0) -> Request:
    return Request(tokens=np.asarray(tokens, np.int32), max_tokens=max_tokens, sample=sample)


def scheduler(
    n_pages: int,
    *,
    max_num_seqs: int = 4,
    steps: int = 8,
    max_len: int = 64,
    n_rows: int = 100,
    states: StateSlots | None = None,
):
    return Scheduler(
        PagePool(n_pages, PAGE),
        max_num_seqs=max_num_seqs,
        steps_per_dispatch=steps,
        max_len=max_len,
        row_len=ROW,
        rows_per_dispatch=n_rows,
        states=states,
    )


def test_allocating_more_pages_than_are_free_allocates_none():
    pool = PagePool(3, PAGE)
    pages = pool.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages requested, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.n_used == 2
    pool.release(pages)
    assert pool.n_free == 3


def test_a_shared_page_is_free_after_its_last_reference_only():
    pool = PagePool(2, PAGE)
    pages = pool.share(pool.allocate(1))
    pool.release(pages)
    assert pool.n_used == 1
    pool.release(pages)
    assert pool.n_used == 0
    with pytest.raises(AssertionError, match="free already"):
        pool.release(pages)


def test_pages_are_matched_by_the_tokens_before_and_in_them():
    pool = PagePool(8, PAGE)
    tokens = np.arange(10, dtype=np.int32)
    a, b, c = pages = pool.allocate(3)
    assert pool.add_prefix(tokens, pages) == pages
    assert pool.match_prefix(tokens) == PrefixMatch([a, b], c, 2)
    assert pool.match_prefix(tokens[:8]) == PrefixMatch([a, b])
    assert pool.match_prefix(np.append(tokens[:9], [77, 78, 79])) == PrefixMatch([a, b], c, 1)
    assert pool.match_prefix(tokens[:6]) == PrefixMatch([a], b, 2)  # the beginning of a full page
    assert pool.match_prefix(tokens[4:]) == PrefixMatch(
        []
    )  # the same tokens in another context do not match


def cached_pages(pool: PagePool, tokens) -> list[int]:
    return pool.match_prefix(np.array(tokens, np.int32)).pages


@pytest.mark.parametrize("keep", [True, False])
def test_unreferenced_pages_stay_cached_until_evicted_in_lru_order(keep):
    pool = PagePool(4, PAGE, keep=keep)
    one, two = np.arange(8, dtype=np.int32), np.arange(10, 18, dtype=np.int32)
    pages = [pool.add_prefix(tokens, pool.allocate(2)) for tokens in (one, two)]
    pool.release(pages[0])
    pool.release(pages[1])
    assert (pool.n_free, pool.n_used) == (4, 0)
    assert cached_pages(pool, one) == (pages[0] if keep else [])
    pool.release(pool.share(cached_pages(pool, one)))  # `two` is now the least recently used
    assert set(pool.allocate(1)) <= {pages[1][1]} or not keep  # and its last page goes first
    assert cached_pages(pool, two) == pages[1][:1] * keep
    pool.allocate(2)
    assert (cached_pages(pool, one), cached_pages(pool, two)) == (pages[0][:1] * keep, [])


def test_a_duplicate_page_is_released_for_the_cached_one():
    pool = PagePool(8, PAGE)
    first, second = (pool.allocate(2) for _ in range(2))
    pool.add_prefix(np.arange(8, dtype=np.int32), first)
    other_end = np.array([0, 1, 2, 3, 9, 9, 9, 9], np.int32)
    assert pool.add_prefix(other_end, second) == [first[0], second[1]]
    assert (pool._ref_counts[first[0]], pool._ref_counts[second[0]], pool.n_used) == (2, 0, 3)
    assert cached_pages(pool, other_end) == [first[0], second[1]]


def test_a_second_sample_copies_the_partly_filled_page_and_shares_the_full_ones():
    s = scheduler(16)
    prompt = range(7)  # 6 cached tokens: one full page, two in the next
    for i in range(3):
        s.submit(request(prompt, 4, sample=i))
    plan = s.plan()
    [chunk] = plan.prefill.chunks
    assert (chunk.start, chunk.tokens.tolist()) == (0, [0, 1, 2, 3, 4, 5])
    first, second, third = plan.decode
    assert first.pages[0] == second.pages[0] == third.pages[0]
    copies = [(first.pages[1], second.pages[1]), (first.pages[1], third.pages[1])]
    assert (plan.prefill.copies, plan.prefill.post_prefill_copies) == (
        [],
        copies,
    )  # after the prefill has written the page


def test_prompts_with_a_common_prefix_share_its_full_pages():
    s = scheduler(16)
    system = list(range(8))
    s.submit(request([*system, 20, 21, 22], 4))
    s.submit(request([*system, 30, 31], 4))
    plan = s.plan()
    first, second = plan.decode
    assert first.pages[:2] == second.pages[:2]
    assert [(chunk.start, chunk.tokens.tolist()) for chunk in plan.prefill.chunks] == [
        (0, [*system, 20, 21]),
        (8, [30]),
    ]
    assert plan.prefill.copies == plan.prefill.post_prefill_copies == []


def run_alone(s: Scheduler, tokens, sampled) -> DispatchPlan:
    """The plan that starts a request, which then samples the tokens `sampled` and ends."""
    slot = s.submit(request(tokens, len(sampled)))
    plan = s.plan()
    [seq] = plan.decode
    assert seq.slot == slot
    s.advance(seq, list(sampled), "length")
    return plan


def test_the_next_turn_of_a_conversation_computes_the_new_tokens_only():
    s = scheduler(16)
    turn = [*range(6), 50, 51, 52, 53]  # 6 of the prompt, 4 sampled: all but the last are cached
    [chunk] = run_alone(s, turn[:6], turn[6:]).prefill.chunks
    assert (chunk.start, len(chunk.tokens)) == (0, 5)
    assert s.pool.n_used == 0
    plan = run_alone(s, [*turn, 60, 61], [70])  # 11 tokens, 9 of them cached: 2 pages and a token
    [chunk] = plan.prefill.chunks
    assert (chunk.start, chunk.tokens.tolist()) == (9, [53, 60])
    [(source, target)] = plan.prefill.copies
    assert chunk.tables[0][2] == target != source
    assert s.n_cached_tokens == 9


def test_a_page_with_few_matching_tokens_is_not_copied():
    s = scheduler(16)
    s._prefill._min_copied_tokens = 2
    run_alone(s, [1, 2, 3], [4])
    assert run_alone(s, [1, 9, 9, 9], [4]).prefill.copies == []
    assert run_alone(s, [1, 2, 9, 9], [4]).prefill.copies != []


def test_new_weights_share_no_kv_of_old_ones():
    s = scheduler(16, max_num_seqs=3)
    run_alone(s, range(9), [5])
    s.submit(request(range(9), 8))
    [old] = s.plan().decode  # it keeps running while the weights change
    prefix, _ = s.prefill(np.arange(9, dtype=np.int32))
    assert s.n_cached_tokens == 16
    s.set_version(0)
    assert s.pool.match_prefix(np.arange(8, dtype=np.int32)).pages  # still the same weights
    s.set_version(1)
    s.submit(request(range(9), 8))
    [chunk] = s.plan().prefill.chunks
    assert (chunk.start, len(chunk.tokens), s.n_cached_tokens) == (0, 8, 16)
    with pytest.raises(ValueError, match="version 0, the engine has version 1; prefill it again"):
        s.insert(prefix, request(range(9), 8))
    s.release_prefix(prefix)
    s.advance(old, [3] * 8, "length")
    assert (
        s.pool.match_prefix(np.array([*range(9), 3, 3, 3], np.int32)).pages == (chunk.tables[0][:2])
    )


def test_a_preempted_sequence_reuses_its_pages_that_were_not_evicted():
    s = scheduler(6, steps=4)
    s.submit(request(range(8), 12))
    s.submit(request(range(10, 18), 12))
    for _ in range(2):
        plan = s.plan()
        for seq in plan.decode:
            s.advance(seq, [7] * plan.n_steps, "")
    old, new = plan.decode
    while new in s.running:
        s.advance(old, [7] * s.plan().n_steps, "length" if old.remaining <= 4 else "")
    assert new in s.waiting
    while old in s.running:
        plan = s.plan()
        s.advance(
            old,
            [7] * min(plan.n_steps, old.remaining),
            "length" if old.remaining <= plan.n_steps else "",
        )
    plan = s.plan()
    assert plan.decode == [new]
    assert plan.prefill.chunks[0].start > 0


def test_a_prompt_without_room_for_a_response_is_rejected():
    with pytest.raises(ValueError, match="64 tokens leaves no room"):
        scheduler(32).prefill(np.arange(64, dtype=np.int32))


def test_the_pages_of_a_prompt_stay_cached_for_waiting_samples():
    s = scheduler(16, max_num_seqs=1)
    for i in range(2):
        s.submit(request(range(9), 4, sample=i))
    s.advance(s.plan().decode[0], [5, 5, 5, 5], "length")
    plan = s.plan()
    assert plan.prefill.chunks == [] and plan.decode[0].request.sample == 1
    s.advance(plan.decode[0], [5], "stop")
    assert s.pool.n_used == 0


def test_the_newest_sequence_is_preempted_when_pages_run_out():
    s = scheduler(4, steps=4)  # 16 tokens
    s.submit(request(range(4), 12))
    s.submit(request(range(10, 14), 12))
    old, new = s.plan().decode
    s.advance(old, [0] * 4, "")
    s.advance(new, [0] * 4, "")
    plan = s.plan()  # 7 cached tokens each in 2 pages; no page is free
    assert plan.decode == [old, new] and plan.n_steps == 1
    for seq in plan.decode:
        s.advance(seq, [0], "")
    assert s.plan().decode == [old]
    assert (s.n_preempted, list(s.waiting)) == (1, [new])


def test_prefixes_that_hold_all_pages_raise_instead_of_blocking():
    s = scheduler(4)
    prefix, _ = s.prefill(np.arange(13, dtype=np.int32))
    s.submit(request(range(20, 29), 4))
    with pytest.raises(OutOfPages, match="prefixes hold 3 of 4 pages"):
        s.plan()
    s.release_prefix(prefix)
    assert len(s.plan().decode) == 1


def test_a_long_prompt_is_chunked_while_others_decode():
    s = scheduler(16, n_rows=1)  # 8 tokens a plan, two pages
    s.submit(request(range(40, 43), 20))
    [other] = s.plan().decode
    s.submit(request(range(21), 4))
    s.submit(request([30, 31], 4))  # no request overtakes
    n_used = s.pool.n_used
    for start in (0, 8):
        plan = s.plan(limit_prefill=True)
        [chunk] = plan.prefill.chunks
        assert (chunk.start, chunk.tokens.tolist()) == (start, list(range(start, start + 8)))
        assert plan.full and plan.previously_running == plan.decode == [other]
        assert len(s.waiting) == 2 and s.pool.n_used == n_used  # cached chunks are unreferenced
    plan = s.plan(limit_prefill=True)
    [chunk] = plan.prefill.chunks
    assert (chunk.start, chunk.tokens.tolist()) == (16, [16, 17, 18, 19])
    assert plan.full and plan.previously_running == [other] and len(plan.decode) == 2
    assert s.n_cached_tokens == 0
    plan = s.plan(limit_prefill=True)  # the third request has one token to prefill
    assert [len(chunk.tokens) for chunk in plan.prefill.chunks] == [1] and len(
        plan.previously_running
    ) == 2
    assert [seq.slot for seq in plan.decode] == [0, 1, 2]


def test_freeing_an_unknown_slot_raises():
    s = scheduler(4)
    slot = s.submit(request(range(3), 4))
    s.free(slot)
    with pytest.raises(KeyError, match="neither waiting nor running"):
        s.free(slot)


def test_pages_of_one_adapter_match_no_other_adapter():
    pool, tokens = PagePool(8, page_len=4), np.arange(8, dtype=np.int32)
    pages = [pool.add_prefix(tokens, pool.allocate(2), adapter) for adapter in range(3)]
    assert len({page for own in pages for page in own}) == 6
    for adapter in range(3):
        assert pool.match_prefix(tokens, adapter).pages == pages[adapter]
    assert pool.match_prefix(tokens, 3) == PrefixMatch([])
    for own in pages:
        pool.release(own)
    assert pool.allocate(8) and pool.match_prefix(tokens, 1) == PrefixMatch([])  # all evicted


def test_rows_that_end_at_a_state_count_in_the_row_budget():
    """A prompt whose first page is cached without the state after it is split there."""
    s = scheduler(16, n_rows=1, states=StateSlots(13))
    shared = [1, 1, 1, 1]
    s.submit(request([*shared, 2, 2, 2, 2, 9], 8))
    s.plan(limit_prefill=True)
    s.submit(request([*shared, 3, 3, 3, 3, 9], 8))
    s.submit(request([4] * 9, 8))
    chunks = []
    for _ in range(3):
        plan = s.plan(limit_prefill=True)
        assert plan.full
        chunks.append([(c.tokens.tolist(), c.start, c.source) for c in plan.prefill.chunks])
    # One row of 8 tokens would hold the second prompt, but with the split it takes two.
    ((first, start, source),), ((second, second_start, second_source),), third = chunks
    assert (first, start, source) == (shared, 0, 0)
    assert (second, second_start) == ([3] * 4, 4) and second_source != 0
    assert third == [([4] * 8, 0, 0)]
