"""The errors of training.

PenstockError
└── TrainError
    ├── UnsupportedError   this model, data or machine can't do what the configuration asks; raised before training
    └── NonFiniteError     the loss or gradient of a step is not finite; names the step and the source rows
"""

from __future__ import annotations

from penstock.errors import PenstockError


class TrainError(PenstockError):
    """Training failed."""


class UnsupportedError(TrainError):
    """This model, data or machine can't do what the configuration asks."""


class NonFiniteError(TrainError):
    """A loss or gradient is not finite."""
