"""Why a drafter is accepted less than it should be: training against serving.

Checks in forward order, each a list of findings; the first that differs is the
one to mend, since whatever follows it differs too (training notes, A18). Here is
what needs a drafter and a text at most; who loads, captures and decodes them is
`experiments.why`.

    contract      what the folder says against the target and its configuration
    template      the prompt as in training and as served
    visibility    which features may and do move a block, by perturbation
    features      as captured against as served, every plane
    logits        labels and draft logits, slot by slot
    weights       what training never moved
    draft state   one piece, chunks, rounds: the same proposals
    served        a canned round has drafts (`experiments.why_stages`)

`findings` is what all of them return, `text` what they are made on, `runner` the
drafter, trained and served.
"""

from spec_jax.evals.why.contract import rope_finding, vocabulary_finding
from spec_jax.evals.why.draft_state import drafts_finding, state_findings
from spec_jax.evals.why.features import (
    FEATURE_TOLERANCE,
    gap_of,
    plane_finding,
    teacher_finding,
)
from spec_jax.evals.why.findings import (
    CHECKS,
    DIFFERS,
    OK,
    SKIPPED,
    Finding,
    compare,
    first_difference,
    sentence,
    table,
    until_first,
    verdict,
)
from spec_jax.evals.why.logits import logit_findings, slot_gaps
from spec_jax.evals.why.runner import NUM_ANCHORS, Runner
from spec_jax.evals.why.template import template_findings
from spec_jax.evals.why.text import Text, require_rows
from spec_jax.evals.why.visibility import visibility_findings
from spec_jax.evals.why.weights import weight_findings

__all__ = [
    "CHECKS",
    "DIFFERS",
    "FEATURE_TOLERANCE",
    "NUM_ANCHORS",
    "OK",
    "SKIPPED",
    "Finding",
    "Runner",
    "Text",
    "compare",
    "drafts_finding",
    "first_difference",
    "gap_of",
    "logit_findings",
    "plane_finding",
    "require_rows",
    "rope_finding",
    "sentence",
    "slot_gaps",
    "state_findings",
    "table",
    "teacher_finding",
    "template_findings",
    "until_first",
    "verdict",
    "visibility_findings",
    "vocabulary_finding",
    "weight_findings",
]
