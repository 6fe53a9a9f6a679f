"""Loss policies: how much each run of tokens counts in the loss.

Enters: the runs of one example or of a whole shard; the same function serves both, so that what is counted is what is
served. Leaves: one weight per run, 0 where it is not trained.

An assistant message is trained on its body and its stop token, never on its header or on white space after the stop.
A weight that the row gives to a message multiplies the runs that the policy trains, whatever the policy; under
`customized` it also decides for messages of other roles. Runs that no message made are trained by `all_tokens` alone.
Context, which is trained in another example of the row, is trained by none.
"""

from __future__ import annotations

import numpy as np

from penstock.arrays import Bool
from penstock.chat.conversation import Part, Role
from penstock.view.runs import Float32, Runs
from penstock.view.settings import LossPolicy


def run_weights(policy: LossPolicy, runs: Runs) -> Float32:
    """The loss weight of each run."""
    chosen = _chosen(policy, runs)
    weights = chosen.astype(np.float32)
    if runs.weights is None:
        return weights
    given = ~np.isnan(runs.weights)
    if policy is LossPolicy.CUSTOMIZED:
        given &= _is_content(runs)
    else:
        given &= chosen
    np.copyto(weights, runs.weights, where=given)
    return weights


def _chosen(policy: LossPolicy, runs: Runs) -> Bool:
    """The runs that the policy trains where the row gives no weights."""
    assistant = runs.by(Role.ASSISTANT)
    match policy:
        case LossPolicy.ALL_ASSISTANT_MESSAGES | LossPolicy.CUSTOMIZED:
            return assistant & _is_content(runs)
        case LossPolicy.LAST_ASSISTANT_MESSAGE:
            last = runs.highest_message(assistant) if runs.last_assistants is None else runs.last_assistants
            trained: Bool = runs.messages == np.repeat(last, runs.counts)
            return trained & assistant & _is_content(runs)
        case LossPolicy.LAST_ASSISTANT_TURN:
            last = runs.highest_message(runs.by(Role.USER)) if runs.last_users is None else runs.last_users
            trained = runs.messages > np.repeat(last, runs.counts)
            return trained & assistant & _is_content(runs)
        case LossPolicy.ALL_MESSAGES:
            return _is_content(runs)
        case LossPolicy.ALL_USER_AND_SYSTEM_MESSAGES:
            return runs.by(Role.USER, Role.SYSTEM) & _is_content(runs)
        case LossPolicy.ALL_TOKENS:
            return ~runs.of_part(Part.CONTEXT)


def _is_content(runs: Runs) -> Bool:
    """Bodies and stop tokens: what a message says, and that it ends."""
    return runs.of_part(Part.BODY, Part.STOP)
