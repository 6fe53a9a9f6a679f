"""Every error Penstock raises on purpose, as one tree.

    PenstockError
    ├── UsageError            the call itself is wrong (exit code 2)
    ├── SourceError           a source can't be found, read, sliced or understood
    ├── RowError              one row is bad: where, why, what to do
    ├── TemplateError         a chat template can't be found, parsed or used
    ├── TokenizerError        a tokenizer can't be found or is not served
    │   └── EncoderPanic      an engine breaks down on a text
    ├── WorkerError           a worker process died or failed twice on a slice
    ├── StoreError            the cache can't be read or written
    │   ├── CorruptError      bytes on disk are not what a manifest promises
    │   └── FormatError       written by another format version
    ├── ViewError             a view can't be served
    │   └── RegionsUnknown    a loss policy needs regions that are not certain
    └── FeedError             a batch can't be served, or a state belongs to another loader

Messages say what happened, where, the value, and the remedy. All of them survive pickling.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors raised on purpose."""


class UsageError(PenstockError):
    """The call itself is wrong: an unknown option, a contradiction, a missing argument."""


class SourceError(PenstockError):
    """A source can't be found, read, sliced or understood."""


class RowError(PenstockError):
    """One row is bad. `kind` is a stable short name for ledgers, `where` is `file:line` once known."""

    def __init__(self, kind: str, reason: str, remedy: str = "", where: str = "") -> None:
        super().__init__(kind, reason, remedy, where)
        self.kind, self.reason, self.remedy, self.where = kind, reason, remedy, where

    def at(self, where: str) -> RowError:
        """The same error, located."""
        return RowError(self.kind, self.reason, self.remedy, where)

    def __str__(self) -> str:
        text = f"{self.where}: {self.reason}" if self.where else self.reason
        return f"{text}. {self.remedy}" if self.remedy else text


class TemplateError(PenstockError):
    """A chat template can't be found, parsed or used."""


class TokenizerError(PenstockError):
    """A tokenizer can't be found, or is of a kind that is not served."""


class EncoderPanic(TokenizerError):
    """An engine breaks down on a text. Caught inside: the text's row is rejected."""


class WorkerError(PenstockError):
    """A worker process died, or failed twice on the same slice."""


class StoreError(PenstockError):
    """The cache can't be read or written."""


class CorruptError(StoreError):
    """Bytes on disk are not what a manifest promises."""


class FormatError(StoreError):
    """Written by another format version than this one reads."""


class ViewError(PenstockError):
    """A view can't be served."""


class RegionsUnknown(ViewError):
    """A loss policy needs regions, and these rows' regions are not certain."""


class FeedError(PenstockError):
    """A batch can't be served, or a state does not belong to this loader."""
