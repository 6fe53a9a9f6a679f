"""Every error that Penstock raises on purpose, as one tree.

    PenstockError
    ├── UsageError            the call itself is wrong (exit code 2)
    ├── SourceError           a source can't be found, read, sliced or understood
    ├── RowError              a row is invalid or refused
    ├── TemplateError         a chat template can't be found, parsed or used
    ├── TokenizerError        a tokenizer can't be found or is not supported
    │   └── EncoderPanic      an encoder crashes on a text
    ├── WorkerError           a worker process died or failed twice on a slice
    ├── StoreError            the cache can't be read or written
    │   ├── CorruptError      bytes on disk don't match their manifest
    │   └── FormatError       data has a different format version
    ├── ObjectError           an object store refuses a request or can't be reached
    │   ├── ObjectMissing     there is no such object or bucket
    │   ├── ObjectChanged     an object changed while it was read
    │   └── RangesUnsupported a web server sends only whole files
    ├── ViewError             a view can't be served
    │   └── RegionsUnknown    a loss policy needs regions that are unknown
    ├── FeedError             a batch can't be served, or a state belongs to another loader
    └── TrainError            training failed
        ├── UnsupportedError  this model, data or machine can't do what the configuration asks; raised before training
        └── NonFiniteError    the loss or gradient of a step is not finite; names the step and the source rows

Messages state what happened, where, the value and the remedy. Every error can be pickled.
"""

from __future__ import annotations

from penstock.printable import printable
from penstock.spelling import spelled


class PenstockError(Exception):
    """Base of all errors raised on purpose. Messages quote data, so they are made printable, and options, which
    are spelled as the caller does."""

    def __str__(self) -> str:
        return printable(spelled(self._message()))

    def _message(self) -> str:
        return super().__str__()


class UsageError(PenstockError):
    """The call itself is wrong: an unknown option, conflicting options or a missing argument."""


class SourceError(PenstockError):
    """A source can't be found, read, sliced or understood."""


class RowError(PenstockError):
    """A row is invalid or refused. `kind` is a short, stable name for the ledger; `where` is `file:line` once known."""

    def __init__(self, kind: str, reason: str, remedy: str = "", where: str = "") -> None:
        super().__init__(kind, reason, remedy, where)
        self.kind, self.reason, self.remedy, self.where = kind, reason, remedy, where

    def at(self, where: str) -> RowError:
        """Returns the same error with its location."""
        return RowError(self.kind, self.reason, self.remedy, where)

    def _message(self) -> str:
        text = f"{self.where}: {self.reason}" if self.where else self.reason
        stop = "" if text.endswith((".", "!", "?")) else "."  # a template's own words may be a whole sentence
        return f"{text}{stop} {self.remedy}" if self.remedy else text


class TemplateError(PenstockError):
    """A chat template can't be found, parsed or used."""


class TokenizerError(PenstockError):
    """A tokenizer can't be found or is of an unsupported kind."""


class EncoderPanic(TokenizerError):
    """An encoder crashes on a text. Caught internally; the text's row is rejected."""


class WorkerError(PenstockError):
    """A worker process died, or failed twice on the same slice."""


class StoreError(PenstockError):
    """The cache can't be read or written."""


class CorruptError(StoreError):
    """Bytes on disk don't match their manifest."""


class FormatError(StoreError):
    """Data has a format version that this version of Penstock does not read."""


class ObjectError(PenstockError):
    """An object store refuses a request, can't be reached or sends too little."""


class ObjectMissing(ObjectError):
    """There is no such object or bucket."""


class ObjectChanged(ObjectError):
    """An object changed while it was read."""


class RangesUnsupported(ObjectError):
    """A web server sends only whole files. Caught internally; the file is downloaded."""


class ViewError(PenstockError):
    """A view can't be served."""


class RegionsUnknown(ViewError):
    """A loss policy needs the regions of rows whose regions are unknown."""


class FeedError(PenstockError):
    """A batch can't be served, or a state belongs to another loader."""


class TrainError(PenstockError):
    """Training failed."""


class UnsupportedError(TrainError):
    """This model, data or machine can't do what the configuration asks."""


class NonFiniteError(TrainError):
    """A loss or gradient is not finite."""
