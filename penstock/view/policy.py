"""Loss policies: the weight of each run of tokens in the loss.

`run_weights` returns one weight per run, 0 where it is not trained. The same function handles one example and a whole
shard, so ledgers count exactly what is served.

An assistant message is trained on its body and its stop token, never on its header or on white space after the stop.
If the row gives a message a weight, it applies to the runs that the policy trains; under `customized` it also selects
messages of other roles. Runs that belong to no message are trained only by `all_tokens`. Context that is trained in
another example of the row is never trained here.
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
    """The runs that the policy trains in rows without weights."""
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
    """Which runs are the body or the stop token of a message."""
    return runs.of_part(Part.BODY, Part.STOP)
