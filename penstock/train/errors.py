"""The errors of training.

PenstockError
└── TrainError
    ├── PromiseError     the configuration promises what can't be; raised before the first step
    └── NonFiniteError   the loss or the gradient of a step is no number; names the step and the source rows
"""

from __future__ import annotations

from penstock.errors import PenstockError


class TrainError(PenstockError):
    """Training can't go on."""


class UnsupportedError(TrainError):
    """The configuration promises what this model, data or machine can't keep."""


class NonFiniteError(TrainError):
    """A loss or a gradient is no number."""
