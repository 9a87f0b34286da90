"""Every term and metric by float64 loops over one row at a time.

Written from the formulas; imports nothing from the library. `detached` is a second
set of values that everything without gradient is computed from: differences of
`numerator` in its first argument are then the wanted gradient.
"""

import math

import numpy as np

from tests.support import oracles


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def columns(case):
    """Each label's column, or None."""
    ids = case["target_ids"]
    table = {v: v for v in range(case["vocab"])}
    if ids is not None:
        table = {int(v): i for i, v in enumerate(ids)}
    return [[table.get(int(v)) for v in row] for row in case["labels"]]


def logits_of(case, v, x, m):
    head = v.get("head", case["frozen_head"])
    logits = v["hidden"][x, m] @ head
    if "correction" in v:
        logits = logits + v["correction"][x, m] @ v["correction_head"]
    return logits


def teacher_of(case, x, m, full):
    """p over the columns, and the target's favourite (an id when full)."""
    teacher = case["teacher"][x, m]
    if full and case["target_ids"] is not None:
        logp = oracles.log_softmax(teacher @ case["full_head"])
        return np.exp(logp)[case["target_ids"]], int(logp.argmax())
    logp = oracles.log_softmax(teacher @ case["frozen_head"])
    return np.exp(logp), int(logp.argmax())


def best_known(case, x, m):
    """The target's favourite of all tokens can be proposed."""
    ids = case["target_ids"]
    return ids is None or int((case["teacher"][x, m] @ case["full_head"]).argmax()) in {
        int(v) for v in ids
    }


def overlap_of(p, q):
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def lambda_mix(value, accept, detached_accept, o):
    w = o["kl_scale"] * math.exp(-o["kl_decay"] * detached_accept)
    return w * value + (1 - w) * (1 - accept)


def top_columns(logits, k):
    return sorted(range(len(logits)), key=lambda u: (-logits[u], u))[:k]


def row_terms(case, o, v, detached, x, m, column, counts=True):
    """Term values of one row, and what metrics read.

    `counts`: whether p says something there; else acceptance is 0.
    """
    logits = logits_of(case, v, x, m)
    logq = oracles.log_softmax(logits)
    q = np.exp(logq)
    out = {"hit": 0.0, "prob": 0.0, "covered": 0.0, "chosen": 0.0}
    if column is not None:
        ce = -logq[column]
        out["prob"] = math.exp(-ce)
        out["hit"] = float(
            all(logits[column] > logits[u] for u in range(len(q)) if u != column)
        )
        if o["kind"] in ("ce", "dpace", "lk_alpha"):
            out["ce"] = ce
        elif o["kind"] == "lk_tv":
            out["ce"] = 1 - math.exp(-ce)
        else:
            old = math.exp(oracles.log_softmax(logits_of(case, detached, x, m))[column])
            out["ce"] = lambda_mix(ce, math.exp(-ce), old, o)
    if "teacher" in case:
        full = o["teacher_mass"] == "full"
        p, best = teacher_of(case, x, m, full)
        lost = 1.0 - p.sum() if full else 0.0
        old_q = np.exp(oracles.log_softmax(logits_of(case, detached, x, m)))
        accept, old_accept = overlap_of(p, q), overlap_of(p, old_q)
        kl = sum(a * (math.log(a) - b) for a, b in zip(p, logq, strict=True))
        out["overlap"] = accept
        ours = int(logits.argmax())
        if full and case["target_ids"] is not None:
            ours = int(case["target_ids"][ours])
        out["agree"] = float(ours == best)
        out["soft_ce"] = -sum(a * b for a, b in zip(p, logq, strict=True))
        out["l1"] = sum(abs(a - b) for a, b in zip(p, q, strict=True)) + lost
        out["lk"] = {
            "alpha": -math.log(accept),
            "tv": 1 - accept,
            "lambda": lambda_mix(kl, accept, old_accept, o),
        }[o["lk_kind"]]
        if "confidence" in v:
            c = v["confidence"][x, m]
            target = 1 - 0.5 * (
                sum(abs(a - b) for a, b in zip(p, old_q, strict=True)) + lost
            )
            if not counts:
                target = out["overlap"] = 0.0
            out["confidence"] = target * softplus(-c) + (1 - target) * softplus(c)
            out["sigmoid"] = 1 / (1 + math.exp(-c))
    if "feature" in v:
        apart = np.abs(v["feature"][x, m] - case["feature_target"][x, m])
        out["smooth_l1"] = sum(0.5 * d * d if d < 1 else d - 0.5 for d in apart) / len(
            apart
        )
    if "query" in v:
        source = detached if o["selector_stop_gradient"] else v
        unary = logits_of(case, source, x, m)
        kept = top_columns(unary, case["size_k"])
        if column in kept:
            score = [unary[u] + v["query"][x, m] @ v["successor"][u] for u in kept]
            at = kept.index(column)
            out["covered"] = 1.0
            out["selector"] = -oracles.log_softmax(score)[at]
            out["chosen"] = float(
                all(score[at] > s for i, s in enumerate(score) if i != at)
            )
    return out


LABEL = ("ce", "selector")
LAW = ("soft_ce", "l1", "lk")
TEACHER = (*LAW, "confidence")


def everything(case, o, weights, v, detached=None, ramp=1.0):
    """Numerator, denominator and metrics {name: (sum, count)}."""
    detached = v if detached is None else detached
    at = columns(case)
    valid = case["valid"] > 0
    size_x, size_m = valid.shape
    whole = o["teacher_mass"] == "full" and case["target_ids"] is not None

    def uses(term, x, m):
        if not valid[x, m]:
            return False
        by_label = o["teacher_rows"] == "label"
        if term in LABEL or (term in LAW and not whole and by_label):
            return at[x][m] is not None
        return term not in LAW or whole or best_known(case, x, m)

    numerator, denominator, total = 0.0, 0.0, dict.fromkeys(weights, 0.0)
    named = {}

    def add(name, value, count=1.0):
        a, b = named.get(name, (0.0, 0.0))
        named[name] = (a + value, b + count)

    decay = oracles.decay(size_m, o["decay_gamma"])
    taught = any(t in weights for t in TEACHER)
    for x in range(size_x):
        rows = [
            row_terms(case, o, v, detached, x, m, at[x][m], uses("l1", x, m))
            if valid[x, m]
            else None
            for m in range(size_m)
        ]
        extra = np.ones(size_m)
        counted = [any(uses(t, x, m) for t in weights) for m in range(size_m)]
        if o["kind"] == "dpace":
            old = [
                row_terms(case, o, detached, detached, x, m, at[x][m])["prob"]
                if valid[x, m]
                else 0.0
                for m in range(size_m)
            ]
            extra = oracles.dpace(old, counted, o["dpace_alpha"])
        hit, chosen, run_c, run_a, alive = [], [], 1.0, 1.0, True
        for m in range(size_m):
            w = decay[m] * extra[m]
            row = rows[m]
            if counted[m]:
                denominator += w
            for term, a in weights.items():
                if row is None or not uses(term, x, m) or term not in row:
                    continue
                factor = ramp if term == "selector" else 1.0
                numerator += a * factor * w * row[term]
                total[term] += w * row[term]
            hit.append(row["hit"] if row else 0.0)
            chosen.append(row["chosen"] if row else 0.0)
            if row is None:
                alive = False
                continue
            add("acc", row["hit"])
            add(f"acc_{m + 1}", row["hit"])
            add("label_prob", row["prob"])
            add("unrepresentable", float(at[x][m] is None))
            if taught:
                ok = uses("l1", x, m)
                add("overlap", row["overlap"] if ok else 0.0)
                add(f"overlap_{m + 1}", row["overlap"] if ok else 0.0)
                add("teacher_agreement", row["agree"] if ok else 0.0)
            if "confidence" in weights:
                gap = row["sigmoid"] - row["overlap"]
                add("confidence_abs_error", abs(gap))
                add("confidence_bias", gap)
                if alive:
                    run_c *= row["sigmoid"]
                    run_a *= row["overlap"]
                    add("confidence_cumprod_bias", run_c - run_a)
            if "selector" in weights:
                add("selector_coverage", row["covered"])
                if row["covered"]:
                    add("selector_accuracy", row["chosen"])
        if valid[x, 0]:
            add("accept_length", oracles.emitted(hit, valid[x]))
            if "selector" in weights:
                add("walk_accept_length", oracles.emitted(chosen, valid[x]))
            if taught:
                add("tau_probabilistic", expected(x, rows, valid[x], uses))
    named["loss"] = (numerator, denominator)
    for term, value in total.items():
        named[f"{term}_loss"] = (value, denominator)
    return numerator, denominator, named


def expected(x, rows, valid, uses):
    """Mean of min(r + 1, what the text allows), by the law of r."""
    run = 0
    while run < len(valid) and valid[run]:
        run += 1
    limit = run + 1 if run == len(valid) else run
    accept = [rows[j]["overlap"] if uses("l1", x, j) else 0.0 for j in range(run)]
    mean, reach = 0.0, 1.0
    for r in range(run + 1):
        stop = 1 - accept[r] if r < run else 1.0
        mean += reach * stop * min(r + 1, limit)
        reach *= accept[r] if r < run else 0.0
    return mean


def gradient(case, o, weights, v, ramp=1.0, step=1e-5):
    """Central differences of the numerator in every entry of `v`."""
    slopes = {}
    for name, array in v.items():
        slope = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = array.copy()
                moved[index] += sign * step
                ends.append(everything(case, o, weights, v | {name: moved}, v, ramp)[0])
            slope[index] = (ends[0] - ends[1]) / (2 * step)
        slopes[name] = slope
    return slopes
