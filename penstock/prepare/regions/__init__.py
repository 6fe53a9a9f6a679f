"""Cuts rendered text into segments: which message, role and part each byte belongs to.

In: a batch as `Rendered`. Out: `segments.Segments`, and errors for rows that must be refused.

`splitter` is the entry: it learns a template's headers, stops and turn markers from probe conversations (`calibrate`,
`headers`, `markers`), then cuts by structure or by the author's `{% generation %}` tags (`structure`).
"""
