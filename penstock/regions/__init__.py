"""Cuts rendered text into segments: which message, role and part each byte belongs to.

In: a batch as `Rendered`. Out: `segments.Segments`, and errors for rows that must be refused.

`splitter` is the entry: it learns a template's headers and stops from probe conversations (`calibrate`, `headers`,
`stops`), then cuts by structure (`structure`) or by the author's `{% generation %}` tags (`tagged`), and notes what the
template left out (`dropped`). `chain_segments` does the same for turns rendered as inference sees them.
"""
