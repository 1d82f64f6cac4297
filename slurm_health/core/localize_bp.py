# SPDX-License-Identifier: Apache-2.0
"""Max-plus belief propagation: from "the slowest of these" to "which of these".

A test involves a few sources (two nodes; with a topology also leaf uplinks and the path between
them) and observes only the worst of them. Every source has a state on a common grid, 0 being
well. Because a test depends on the maximum alone, a message costs one pass over the grid:

    m(a) = L(a) F(a) + sum over b > a of L(b) f(b)

with L the likelihood of the observation given the maximum, F and f the distribution of the
maximum of the other sources. A slow test that a slower partner explains thus says nothing.

A leading batch axis lets a small run try several noise levels at once and weigh them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NONE = -1  # pads the sources of a test that has fewer than others
_TINY = 1e-290


@dataclass(frozen=True)
class Graph:
    """Which sources each test involves: `sources` is (tests, up to K), padded with NONE."""

    sources: Ints
    variables: int
    order: Ints  # positions in the flattened sources, grouped by variable, without padding
    starts: Ints  # where each present variable's group begins in `order`
    present: Ints  # the variables that occur at all

    @staticmethod
    def of(sources: Ints, variables: int) -> Graph:
        """Index the tests by source."""
        flat = sources.reshape(-1)
        order = np.argsort(flat, kind="stable").astype(np.int64)
        order = order[np.searchsorted(flat[order], 0) :]
        present, starts = np.unique(flat[order], return_index=True)
        return Graph(sources, variables, order, starts.astype(np.int64), present)


@dataclass(frozen=True)
class Beliefs:
    """What is believed after propagation, all with a leading batch axis.

    `states` is (variables, grid); `others` (tests, K) is the probability that all sources of a
    test except the k-th are well; `well` (tests) that all of them are; `log_evidence` is
    Bethe's estimate of how well the model explains the data.
    """

    states: Floats
    others: Floats
    well: Floats
    log_evidence: Floats
    messages: Floats


def propagate(
    graph: Graph,
    log_likelihood: Floats,
    log_prior: Floats,
    *,
    sweeps: int,
    messages: Floats | None = None,
    damping: float = 0.3,
) -> Beliefs:
    """Pass messages `sweeps` times along every test and return the beliefs.

    `log_likelihood` is (batch, tests, grid), `log_prior` (batch, variables, grid). `messages`
    of an earlier call with the same graph make a warm start.
    """
    batch, tests, grid = log_likelihood.shape
    top = log_likelihood.max(axis=2, keepdims=True)
    likelihood = np.exp(log_likelihood - top)
    if messages is None:
        messages = np.zeros((batch, tests, graph.sources.shape[1], grid))
    for _ in range(sweeps):
        incoming = _incoming(graph, messages, _collect(graph, messages, log_prior))
        raw, _, _ = _outgoing(likelihood, incoming)
        fresh = np.log(np.maximum(raw, _TINY))
        fresh -= fresh.max(axis=3, keepdims=True)
        messages = damping * messages + (1 - damping) * fresh
    total = _collect(graph, messages, log_prior)
    raw, others, everyone = _outgoing(likelihood, _incoming(graph, messages, total))
    joint = np.maximum(likelihood * everyone, _TINY)
    evidence = _log_evidence(graph, raw, joint, log_prior) + top.sum(axis=(1, 2))
    states = np.exp(total - total.max(axis=2, keepdims=True))
    states /= states.sum(axis=2, keepdims=True)
    well = joint[:, :, 0] / joint.sum(axis=2)
    return Beliefs(states, others[:, :, :, 0], well, evidence, messages)


def _collect(graph: Graph, messages: Floats, log_prior: Floats) -> Floats:
    """Return prior times all messages for each variable, in logarithms."""
    batch, tests, width, grid = messages.shape
    total = log_prior.copy()
    if len(graph.order):
        flat = messages.reshape(batch, tests * width, grid)[:, graph.order]
        total[:, graph.present] += np.add.reduceat(flat, graph.starts, axis=1)
    return total


def _incoming(graph: Graph, messages: Floats, total: Floats) -> Floats:
    """Return what each source would be believed to be without the test, (batch, tests, K, grid)."""
    outgoing = total[:, graph.sources] - messages
    outgoing -= outgoing.max(axis=3, keepdims=True)
    belief: Floats = np.exp(outgoing)
    belief /= belief.sum(axis=3, keepdims=True)
    padding = graph.sources == NONE
    if padding.any():
        belief[:, padding] = 0.0
        belief[:, padding, 0] = 1.0
    return belief


def _outgoing(likelihood: Floats, incoming: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the messages to the sources, the others' distribution, and everybody's density."""
    cumulative = np.cumsum(incoming, axis=3)
    width = incoming.shape[2]
    others = np.ones_like(cumulative)
    for source in range(width):
        for other in range(width):
            if other != source:
                others[:, :, source] *= cumulative[:, :, other]
    everyone = others[:, :, 0] * cumulative[:, :, 0]
    everyone = np.diff(everyone, axis=2, prepend=0.0)
    weighted = likelihood[:, :, None] * np.diff(others, axis=3, prepend=0.0)
    # what the observation says if another source is worse than this one
    above = np.cumsum(weighted[:, :, :, ::-1], axis=3)[:, :, :, ::-1] - weighted
    return likelihood[:, :, None] * others + np.maximum(above, 0.0), others, everyone


def _log_evidence(graph: Graph, raw: Floats, joint: Floats, log_prior: Floats) -> Floats:
    """Return Bethe's logarithm of the evidence, up to the scale of the likelihoods."""
    totals = _collect(graph, np.log(np.maximum(raw, _TINY)), log_prior)
    peak = totals.max(axis=2)
    per_variable = peak + np.log(np.exp(totals - peak[:, :, None]).sum(axis=2))
    sources_of_test = (graph.sources != NONE).sum(axis=1)
    per_test = np.log(joint.sum(axis=2)) * (sources_of_test - 1)
    evidence: Floats = per_variable.sum(axis=1) - per_test.sum(axis=1)
    return evidence
