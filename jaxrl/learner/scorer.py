"""Logprobs of packed micro-batches in the layout of a role."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxrl.config.keys import RunConfig, ScoringConfig
from jaxrl.data.image_places import join_axis_positions, join_packed_images
from jaxrl.data.packing import empty_batch, empty_teacher
from jaxrl.data.routing import all_experts, join_packed_experts
from jaxrl.data.support import join_packed
from jaxrl.layout import Layout, training_rules
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.requirements import needs_collision
from jaxrl.learner.step import (
    call_queue,
    make_collision,
    make_score,
    make_top_k,
    put_batch,
    take_tokens,
)
from jaxrl.models.router_replay import routing_shape
from jaxrl.runtime.flat_program import flatten
from jaxrl.types import Batch, Tree


class Scorer:
    """Computes logprobs in the layout of a role (score or ref)."""

    def __init__(
        self,
        cfg: RunConfig,
        layout: Layout,
        role: ScoringConfig,
        *,
        restricted: bool = False,
        of_training: bool = False,
        replay: str = "off",
        encoder: ImageEncoder | None = None,
        most_likely: bool = False,
        n_given: int = 0,
    ):
        """`restricted`: under the supports of the batches.

        `of_training`: all parameters are given in training's layout; calls reshard them. `replay`
        is learner.router_replay, for the policy: it records experts (R2) or gets them (R3).
        `encoder` has the features of images. `most_likely`: scores the most likely ids in place of
        the targets, with `n_given` the ids that the batches have.
        """
        self.layout, self.restricted, self.of_training = layout, restricted, of_training
        self.encoder, self.most_likely, self.n_given = encoder, most_likely, n_given
        self.records, self.replays = replay == "R2", replay == "R3"
        self.keeps_entropy = cfg.algorithm.top_entropy < 1.0
        self.keeps_second = most_likely or self.keeps_entropy or needs_collision(cfg)
        if most_likely:
            self.score = make_top_k(cfg, layout.rules, given=n_given > 0)
        elif needs_collision(cfg):
            self.score = make_collision(cfg, layout.rules)
        else:
            self.score = make_score(cfg, layout.rules, records=self.records)
        self.n_joined = micro_batches_per_call(cfg, layout, role.token_budget)
        self.n_least = micro_batches_per_call(cfg, layout)

    def logps(
        self,
        params: Tree,
        batches: Sequence[Batch],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """Logprobs [B, T] of each micro-batch of training.

        `params` are sharded by the layout, whose mesh is the current one, except `of_training`.
        Micro-batches of one shape are joined: as many as the role's token budget has room for, and
        the remaining ones so that a rank has the same number of rows as in training. `on_batch` is
        called before each device call.
        """
        return [logp for logp, *_ in self._scores(params, batches, on_batch)]

    def top_k(
        self,
        params: Tree,
        batches: Sequence[Batch],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[tuple[np.ndarray, ...]]:
        """(ids, logprobs) [B, T, k] of each micro-batch, if the scorer is one of `most_likely`."""
        return self._scores(params, batches, on_batch)

    def with_collisions(
        self,
        params: Tree,
        batches: Sequence[Batch],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[tuple[np.ndarray, ...]]:
        """(logprobs, log Σ π² over the vocabulary) [B, T], if the algorithm reads the second."""
        return self._scores(params, batches, on_batch)

    def with_old_logp(
        self,
        params: Tree,
        batches: Sequence[Batch],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[Batch]:
        """The batches with `logps` as old_logp and, if it records them, the experts to replay.

        With algorithm.top_entropy, `selected` holds the entropies, by which the trainer selects.
        """
        filled = []
        for batch, (logp, *more) in zip(
            batches, self._scores(params, batches, on_batch), strict=True
        ):
            batch = dataclasses.replace(batch, old_logp=logp)
            if self.keeps_entropy:
                batch = dataclasses.replace(batch, selected=more.pop(0))
            if self.records:
                packed = all_experts(more[0], batch.segments)
                batch = dataclasses.replace(batch, experts=packed)
            filled.append(batch)
        return filled

    def routing(self, params: Tree) -> tuple[int, int] | None:
        """The shape of the experts of a token in a batch; None if the scorer replays none."""
        return routing_shape(params.cfg) if self.replays else None

    def _scores(
        self, params: Tree, batches: Sequence[Batch], on_batch: Callable[[], None]
    ) -> list[tuple[np.ndarray, ...]]:
        """(logprobs, a second field and experts [B, T, L, k] if kept) [B, T] of each batch."""
        if not self.of_training:
            return self._score(params, batches, on_batch)
        with self.layout.weights(params) as resharded:
            return self._score(resharded, batches, on_batch)

    def _score(
        self, params: Tree, batches: Sequence[Batch], on_batch: Callable[[], None]
    ) -> list[tuple[np.ndarray, ...]]:
        by_shape = collections.defaultdict(list)
        for i, batch in enumerate(batches):
            by_shape[batch.tokens.shape].append(i)
        found: dict[int, tuple[np.ndarray, ...]] = {}
        n_vocab, flat = params.cfg.V if self.restricted else 0, flatten(params)
        put = functools.partial(
            put_batch,
            rules=self.layout.rules,
            n_vocab=n_vocab,
            routing=self.routing(params),
            encoder=self.encoder,
            n_ids=self.n_given,
        )

        def read(group: list[int], n_joined: int, kept: list[jax.Array]) -> None:
            rows = [np.split(take_tokens(a, self.layout.rules), n_joined) for a in kept]
            found.update(zip(group, zip(*rows, strict=True), strict=False))

        with call_queue(n_vocab) as calls:
            for shape, indices in by_shape.items():
                for group, n_joined in self._groups(indices):
                    padding = [empty_batch(*shape)] * (n_joined - len(group))
                    joined = join_batches([*(batches[i] for i in group), *padding], self.n_given)
                    calls.make_room()
                    on_batch()
                    first, second, *experts = self.score(flat, put(joined))
                    kept = [first, *([second] if self.keeps_second else []), *experts]
                    calls.add(functools.partial(read, group, n_joined, kept))
        return [found[i] for i in range(len(batches))]

    def warm_up(self, params: Tree, batch: Batch) -> None:
        """Runs the calls for micro-batches of the shape of `batch`."""
        joined = self.n_joined > self.n_least
        self.logps(params, [batch] * (self.n_joined + 1 if joined else 1))

    def _groups(self, indices: list[int]) -> Iterator[tuple[list[int], int]]:
        """(micro-batches of a call, their number with padding)."""
        whole = len(indices) - len(indices) % self.n_joined
        for start in range(0, whole, self.n_joined):
            yield indices[start : start + self.n_joined], self.n_joined
        for start in range(whole, len(indices), self.n_least):
            yield indices[start : min(start + self.n_least, len(indices))], self.n_least


def join_batches(parts: Sequence[Batch], n_ids: int = 0) -> Batch:
    """Host batches of one shape as one batch, with the rows of the first one first.

    The parts of the objective are left out, the `n_ids` ids of a teacher if it is 0.
    """
    other = dict(support=None, experts=None, images=None, axis_positions=None, parts=None)
    other["teacher"] = None
    plain = [dataclasses.replace(part, **other) for part in parts]
    joined, size = jax.tree.map(lambda *rows: np.concatenate(rows), *plain), parts[0].tokens.size
    shape = parts[0].tokens.shape
    teachers = [part.teacher or empty_teacher(shape, n_ids) for part in parts] if n_ids else []
    return dataclasses.replace(
        joined,
        teacher=jax.tree.map(lambda *rows: np.concatenate(rows), *teachers) if teachers else None,
        support=join_packed([part.support for part in parts], size),
        experts=join_packed_experts([part.experts for part in parts], size),
        images=join_packed_images([part.images for part in parts]),
        axis_positions=join_axis_positions(
            [(part.axis_positions, part.positions) for part in parts]
        ),
    )


def micro_batches_per_call(cfg: RunConfig, layout: Layout, token_budget: int = 0) -> int:
    """Number of micro-batches of training that a role scores in one call.

    `token_budget` is the role's; 0 = training's. Training's mesh is the current one.
    Raises ValueError unless the number of data-parallel ranks of one is a multiple of that of the
    other.
    """
    ours = training_rules(cfg).n_shards("batch")
    with layout.on_mesh():
        theirs = layout.rules.n_shards("batch")
    if max(ours, theirs) % min(ours, theirs):
        raise ValueError(
            f"scoring with {theirs} data-parallel ranks is incompatible with the {ours} ranks of "
            "updates; set sizes in config.score, config.ref and config.mesh so that one number of "
            "ranks is a multiple of the other"
        )
    return max(theirs // ours, 1) * max(token_budget // cfg.learner.token_budget, 1)
