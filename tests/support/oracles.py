"""Float64 oracles, written from the formulas by loops.

They import nothing from the library: a rule that is wrong there cannot be wrong
here for the same reason.
"""

import math

import numpy as np


def ancestors(parents):
    """visible[i][j]: j is i or an ancestor of i, found by walking up."""
    size = len(parents)
    seen = np.zeros((size, size), bool)
    for i in range(size):
        j = i
        while j >= 0:
            seen[i, j] = True
            j = int(parents[j])
    return seen


def block_visibility(anchors, num_query, seq_len, window=None, causal=False):
    """Who sees whom for one sequence's blocks.

    Returns:
      context [N, Q, S] and block [N, Q, N, Q], bool.
    """
    n = len(anchors)
    context = np.zeros((n, num_query, seq_len), bool)
    block = np.zeros((n, num_query, n, num_query), bool)
    for i in range(n):
        for q in range(num_query):
            at = anchors[i] + q
            for k in range(seq_len):
                context[i, q, k] = k < anchors[i] and (
                    window is None or at - k < window
                )
            for j in range(n):
                for r in range(num_query):
                    same = i == j
                    order = (not causal) or r <= q
                    near = window is None or abs(q - r) < window
                    block[i, q, j, r] = same and order and near
    return context, block


def labels(tokens, supervised, length, anchors, num_draft):
    """Label ids and validity `[N, M]`: draft j stands for position anchor + j."""
    ids = np.zeros((len(anchors), num_draft), np.int64)
    valid = np.zeros((len(anchors), num_draft), bool)
    for i, anchor in enumerate(anchors):
        for j in range(1, num_draft + 1):
            at = anchor + j
            if at < length and supervised[at]:
                ids[i, j - 1] = tokens[at]
                valid[i, j - 1] = True
    return ids, valid


def anchor_candidates(supervised, length):
    """Positions with a supervised token here and next."""
    return [a for a in range(length - 1) if supervised[a] and supervised[a + 1]]


def decay(num_draft, gamma):
    """Weight of drafts 1..M."""
    return np.array(
        [
            1.0 if gamma == 0 else math.exp(-(j - 1) / gamma)
            for j in range(1, num_draft + 1)
        ]
    )


def dpace(prob, valid, alpha):
    """D-PACE weights of one block."""
    size = len(prob)
    weight = np.zeros(size)
    for j in range(size):
        if not valid[j]:
            continue
        for i in range(j, size):
            if valid[i]:
                prefix = 1.0
                for k in range(i + 1):
                    prefix *= (1 - alpha) * prob[k] + alpha
                weight[j] += prefix
    return weight


def log_softmax(logits):
    """Row-wise, float64."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def hard_label_loss(
    hidden,
    head,
    columns,
    trained,
    kind,
    gamma=0.0,
    alpha=0.5,
    kl_scale=1.0,
    kl_decay=1.0,
):
    """Numerator, denominator and d(numerator)/d(hidden), all float64.

    Args:
      hidden: [X, M, D]; head: [D, U].
      columns: [X, M] head column of each label.
      trained: [X, M] bool.
      kind: "ce", "dpace", "lk_alpha", "lk_lambda", "lk_tv".
    """
    hidden = np.asarray(hidden, np.float64)
    head = np.asarray(head, np.float64)
    blocks, num_draft, _ = hidden.shape
    numerator, denominator = 0.0, 0.0
    gradient = np.zeros_like(hidden)
    steps = decay(num_draft, gamma)
    for x in range(blocks):
        logp = log_softmax(hidden[x] @ head)
        prob = np.exp([logp[j, columns[x][j]] for j in range(num_draft)])
        prob = np.where(trained[x], prob, 0.0)
        extra = (
            dpace(prob, trained[x], alpha) if kind == "dpace" else np.ones(num_draft)
        )
        for j in range(num_draft):
            if not trained[x][j]:
                continue
            weight = steps[j] * extra[j]
            p = prob[j]
            ce = -math.log(p)
            if kind in ("ce", "dpace", "lk_alpha"):
                value, slope = ce, 1.0
            elif kind == "lk_tv":
                value, slope = 1 - p, p
            else:
                mix = kl_scale * math.exp(-kl_decay * p)
                value, slope = mix * ce + (1 - mix) * (1 - p), mix + (1 - mix) * p
            numerator += weight * value
            denominator += weight
            # d ce / d logits = softmax - one-hot; slope is d value / d ce.
            row = np.exp(logp[j])
            row[columns[x][j]] -= 1.0
            gradient[x, j] = weight * slope * (head @ row)
    return numerator, denominator, gradient


def emitted(hits, valid):
    """Tokens of one block's round: accepted prefix, and one more if text is left."""
    run = 0
    while run < len(valid) and valid[run]:
        run += 1
    accepted = 0
    while accepted < run and hits[accepted]:
        accepted += 1
    ends_inside = run < len(valid)
    return min(accepted + 1, run) if ends_inside else accepted + 1


def rms_norm(x, scale, eps):
    """Float64 RMSNorm of one row."""
    return x / math.sqrt(float((x * x).mean()) + eps) * scale


def rope(head, position, theta):
    """Half-split rotation of one head's channels."""
    half = len(head) // 2
    out = np.zeros_like(head)
    for i in range(half):
        angle = position * theta ** (-2.0 * i / len(head))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = head[i] * cos - head[i + half] * sin
        out[i + half] = head[i + half] * cos + head[i] * sin
    return out


def draft_block(
    weights,
    embed,
    features,
    anchor_token,
    anchor,
    mask_id,
    num_query,
    *,
    kinds,
    num_heads,
    num_kv_heads,
    head_dim,
    theta,
    eps,
):
    """Final-norm rows `[Q, D]` of one block, key by key.

    Args:
      weights: the backbone's tree as float64 arrays.
      embed: [V, D].
      features: [S, L, D]; only rows before `anchor` are read.
      anchor_token: id at the anchor.
      anchor: absolute position of row 0.
      mask_id: id of the other rows.
      num_query: Q.
      kinds: (causal, window) per layer.
    """
    group = num_heads // num_kv_heads
    context = [
        rms_norm(np.concatenate(list(f)) @ weights["fc"], weights["hidden_norm"], eps)
        for f in features[:anchor]
    ]
    ids = [anchor_token] + [mask_id] * (num_query - 1)
    rows = [np.array(embed[i], np.float64) for i in ids]
    for index, (causal, window) in enumerate(kinds):
        w = weights[f"layers_{index}"]

        def head_of(row, g, slot, norm, position, w=w):
            out = row @ w["qkv"][:, g, slot]
            if norm is not None:
                if norm in w:
                    out = rms_norm(out, w[norm], eps)
                out = rope(out, position, theta)
            return out

        normed = [rms_norm(x, w["input_norm"], eps) for x in rows]
        mixed = []
        for q in range(num_query):
            outs = []
            for h in range(num_heads):
                g = h // group
                query = head_of(normed[q], g, h % group, "q_norm", anchor + q)
                scores, values = [], []
                for k, c in enumerate(context):
                    if window is None or anchor + q - k < window:
                        key = head_of(c, g, group, "k_norm", k)
                        scores.append(query @ key / math.sqrt(head_dim))
                        values.append(head_of(c, g, group + 1, None, k))
                for r in range(num_query):
                    near = window is None or abs(q - r) < window
                    if near and (r <= q or not causal):
                        key = head_of(normed[r], g, group, "k_norm", anchor + r)
                        scores.append(query @ key / math.sqrt(head_dim))
                        values.append(
                            head_of(normed[r], g, group + 1, None, anchor + r)
                        )
                probs = np.exp(log_softmax(np.array(scores)))
                outs.append(sum(p * v for p, v in zip(probs, values, strict=True)))
            mixed.append(np.concatenate(outs))
        for q in range(num_query):
            rows[q] = rows[q] + mixed[q] @ w["out"]
            y = rms_norm(rows[q], w["mlp_norm"], eps)
            gate, up = y @ w["gate_up"][:, 0], y @ w["gate_up"][:, 1]
            rows[q] = rows[q] + (gate / (1 + np.exp(-gate)) * up) @ w["down"]
    return np.stack([rms_norm(x, weights["norm"], eps) for x in rows])
