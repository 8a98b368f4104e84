"""Attention in plain Python, one key at a time: what the backends are compared with."""

import math

import numpy as np

from jdecode.attention import visibility

EMPTY = int(visibility.EMPTY)


def sees(query: int, key: int, window: int | None, num_sinks: int) -> bool:
    """The rule of visibility in words of plain Python."""
    if key == EMPTY or key > query:
        return False
    return window is None or query - key < window or key < num_sinks


def attend(q, k, v, query_positions, key_positions, *, scale, window=None, num_sinks=0, soft_cap=None):
    """Attention one query, one head and one key at a time, in Python floats."""
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(q.shape[:3]):
        head = n // (num_heads // num_kv_heads)
        seen = [s for s in range(k.shape[1]) if sees(query_positions[b][t], key_positions[b][s], window, num_sinks)]
        scores = []
        for s in seen:
            score = scale * sum(float(x) * float(y) for x, y in zip(q[b, t, n], k[b, s, head], strict=True))
            scores.append(score if soft_cap is None else soft_cap * math.tanh(score / soft_cap))
        weights = [math.exp(score - max(scores)) for score in scores]
        for s, weight in zip(seen, weights, strict=True):
            out[b, t, n] += weight / sum(weights) * v[b, s, head].astype(np.float64)
    return out


def gradients(q, k, v, g, query_positions, key_positions, *, scale, window=None, num_sinks=0, soft_cap=None):
    """Derivatives of ``sum(g * out)`` for q, k and v, one query and one head at a time, in float64.

    With p the softmax of the scores s: dv = p g; dp = g v; ds = p (dp - sum(p dp)); a cap c tanh(s / c) has the
    derivative 1 - tanh(s / c)**2.
    """
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, t, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        seen = [s for s in range(k.shape[1]) if sees(query_positions[b][t], key_positions[b][s], window, num_sinks)]
        if not seen:
            continue
        score = scale * k[b, seen, head] @ q[b, t, n]
        slope = np.ones_like(score)
        if soft_cap is not None:
            slope = 1 - np.tanh(score / soft_cap) ** 2
            score = soft_cap * np.tanh(score / soft_cap)
        p = np.exp(score - score.max())
        p /= p.sum()
        dp = v[b, seen, head] @ g[b, t, n]
        ds = scale * slope * p * (dp - (p * dp).sum())
        dq[b, t, n] += ds @ k[b, seen, head]
        dk[b, seen, head] += ds[:, None] * q[b, t, n]
        dv[b, seen, head] += p[:, None] * g[b, t, n]
    return dq, dk, dv
