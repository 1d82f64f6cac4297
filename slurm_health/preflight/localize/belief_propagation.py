# SPDX-License-Identifier: Apache-2.0
"""Max-plus belief propagation: from "the slowest of these" to "which of these".

A test involves a few sources (two nodes; with a topology also leaf uplinks and the path between
them) and observes only the worst of them. Every source has a state on a common grid, 0 being
well. Because a test depends on the maximum alone, a message costs one pass over the grid:

    m(a) = L(a) F(a) + sum over b > a of L(b) f(b)

with L the likelihood of the observation given the maximum, F and f the distribution of the
maximum of the other sources. A slow test that a slower partner explains thus says nothing.

The long axis, tests, is the last one, so that it is worked through in one piece. A leading batch
axis lets a small run try several noise levels at once and weigh them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.floating[Any]]  # single precision where there are many of them
Ints = npt.NDArray[np.int64]

NONE = -1  # pads the sources of a test that has fewer than others
_SETTLED = 0.01  # messages that change by less, as logarithms, change nothing


@dataclass(frozen=True)
class Graph:
    """The sources of the tests, (up to K, tests), padded with the number of variables."""

    sources: Ints
    variables: int
    places: Ints  # where the messages belong in (batch, grid, variables and padding), flattened

    @staticmethod
    def of(rows: Ints, variables: int, *, batch: int, grid: int) -> Graph:
        """Index the tests, which are rows, by source."""
        sources = np.ascontiguousarray(np.where(rows == NONE, variables, rows).T)
        layers = np.arange(batch * grid) * (variables + 1)
        return Graph(sources, variables, (layers[:, None] + sources.reshape(-1)).reshape(-1))

    @property
    def alone(self) -> bool:
        """Whether every test has a single source: then Bayes' rule is all there is."""
        return len(self.sources) == 1

    @cached_property
    def present(self) -> Ints:
        """The variables that occur at all."""
        tests = np.bincount(self.sources.reshape(-1), minlength=self.variables + 1)
        return np.flatnonzero(tests[:-1])


@dataclass(frozen=True, kw_only=True)
class Beliefs:
    """The beliefs after propagation, all with a leading batch axis.

    They follow from the messages, and are worked out only if they are asked for.
    """

    graph: Graph
    likelihood: Numbers  # (grid, tests), 1 at its largest
    log_scale: Numbers  # of the likelihoods of all tests
    log_prior: Floats
    messages: Numbers  # (grid, K, tests), logarithms

    @cached_property
    def states(self) -> Floats:
        """The distributions of the variables, (grid, variables)."""
        states: Floats = np.exp(self._total - self._total.max(axis=1, keepdims=True))
        states /= states.sum(axis=1, keepdims=True)
        return states

    @cached_property
    def well(self) -> Floats:
        """The probability that all sources of a test are well."""
        well: Floats
        if self.graph.alone:
            well = self.states[:, 0, self.graph.sources[0]]
        else:
            well = (self._joint[:, 0] / self._joint.sum(axis=1)).astype(np.float64)
        return well

    def others(self, tolerated: int) -> Floats:
        """Return (tests, K), the probability that all sources of a test except the k-th are well.

        States up to `tolerated` count as well.
        """
        others = _others(self._cumulative[:, tolerated : tolerated + 1])[:, 0]
        in_rows: Floats = others.swapaxes(1, 2).astype(np.float64)
        return in_rows

    @cached_property
    def log_evidence(self) -> Floats:
        """Bethe's estimate of how well the model explains the data."""
        raw = _log(_outgoing(self.likelihood, _others(self._cumulative)))
        per_variable = _log_sum(_collect(self.graph, raw, self.log_prior))
        sources_of_test = (self.graph.sources < self.graph.variables).sum(axis=0)
        per_test = np.log(self._joint.sum(axis=1)) * (sources_of_test - 1)
        evidence: Floats = per_variable.sum(axis=1) - per_test.sum(axis=1) + self.log_scale
        return evidence

    @cached_property
    def _total(self) -> Floats:
        return _collect(self.graph, self.messages, self.log_prior)

    @cached_property
    def _cumulative(self) -> Numbers:
        return _incoming(self.graph, self.messages, self._total)

    @cached_property
    def _joint(self) -> Numbers:
        """The probabilities of the states of the worst source and what was observed."""
        joint: Numbers = self._cumulative.prod(axis=2)
        joint[:, 1:] -= joint[:, :-1]
        joint *= self.likelihood
        return np.maximum(joint, _tiny(joint), out=joint)


def propagate(
    graph: Graph,
    log_likelihood: Numbers,
    log_prior: Floats,
    *,
    sweeps: int,
    messages: Numbers | None = None,
    damping: float = 0.3,
) -> Beliefs:
    """Pass messages up to `sweeps` times along every test and return the beliefs.

    `log_likelihood` is (batch, grid, tests) and decides the precision, `log_prior` (batch, grid,
    variables). `messages` of an earlier call with the same graph make a warm start.
    """
    top = log_likelihood.max(axis=1, keepdims=True)
    log_likelihood = log_likelihood - top
    likelihood = np.exp(log_likelihood)
    if graph.alone:  # nothing comes back to change what a test says
        messages = np.maximum(log_likelihood, np.log(_tiny(log_likelihood)))[:, :, None]
        sweeps = 0
    elif messages is None:
        messages = np.zeros((*likelihood.shape[:2], *graph.sources.shape), dtype=likelihood.dtype)
    for left in reversed(range(sweeps)):
        incoming = _incoming(graph, messages, _collect(graph, messages, log_prior))
        fresh = _log(_outgoing(likelihood, _others(incoming)))
        fresh -= fresh.max(axis=1, keepdims=True)
        if damping:
            fresh *= 1 - damping
            fresh += damping * messages
        before, messages = messages, fresh
        if left and float(abs(messages - before).max(initial=0)) < _SETTLED:
            break
    return Beliefs(
        graph=graph,
        likelihood=likelihood,
        log_scale=top.sum(axis=(1, 2)),
        log_prior=log_prior,
        messages=messages,
    )


def _log_sum(logarithms: Floats) -> Floats:
    """Return the logarithm of the sum over the grid, which is axis 1."""
    peak = logarithms.max(axis=1)
    total: Floats = peak + np.log(np.exp(logarithms - peak[:, None]).sum(axis=1))
    return total


def _tiny(values: Numbers) -> float:
    return float(np.finfo(values.dtype).tiny)


def _log(values: Numbers) -> Numbers:
    """Replace numbers by their logarithms."""
    np.maximum(values, _tiny(values), out=values)
    logarithms: Numbers = np.log(values, out=values)
    return logarithms


def _collect(graph: Graph, messages: Numbers, log_prior: Floats) -> Floats:
    """Return prior times all messages per variable, in logarithms."""
    batch, grid, variables = log_prior.shape
    shape = (batch, grid, variables + 1)
    sums = np.bincount(graph.places, weights=messages.reshape(-1), minlength=math.prod(shape))
    total: Floats = log_prior + sums.reshape(shape)[:, :, :-1]
    return total


def _incoming(graph: Graph, messages: Numbers, total: Floats) -> Numbers:
    """Return the cumulative distributions of the sources without the test, like messages."""
    logarithms = np.full((*total.shape[:2], graph.variables + 1), -np.inf, dtype=messages.dtype)
    logarithms[:, :, :-1] = total
    logarithms[:, 0, -1] = 0.0  # the padding is surely well
    belief: Numbers = logarithms.take(graph.sources, axis=2)
    belief -= messages
    belief -= belief.max(axis=1, keepdims=True)
    np.exp(belief, out=belief)
    belief /= belief.sum(axis=1, keepdims=True)
    for state in range(1, belief.shape[1]):  # 20 times as fast as cumsum, which goes test by test
        belief[:, state] += belief[:, state - 1]
    return belief


def _others(cumulative: Numbers) -> Numbers:
    """Return per source the cumulative distribution of the worst of the others."""
    others = np.ones_like(cumulative)
    for place in range(1, cumulative.shape[2]):
        others[:, :, place] = others[:, :, place - 1] * cumulative[:, :, place - 1]
    later = cumulative[:, :, -1].copy()
    for place in reversed(range(cumulative.shape[2] - 1)):
        others[:, :, place] *= later
        later *= cumulative[:, :, place]
    return others


def _outgoing(likelihood: Numbers, others: Numbers) -> Numbers:
    """Return the messages to the sources."""
    likelihood = likelihood[:, :, None]
    message: Numbers = likelihood * others
    above = np.zeros_like(message[:, 0])  # what is observed if another source is worse
    for state in reversed(range(message.shape[1] - 1)):
        above += likelihood[:, state + 1] * (others[:, state + 1] - others[:, state])
        message[:, state] += above
    return message
