"""Renders conversations with a chat template and records which message printed which bytes.

In: a template with its special tokens and variables, then rows as JSON bytes (or `Conversation`s read in Python).
Out: `rendered.Rendered`, the texts of a batch with the pieces that belong to each message.

`renderer` is the entry: it compiles the template for the C machine (`compiler`, `expressions`, `bytecode`), compares it
with jinja2 (`reference`, in a `sandbox` with a `budget`, and `tracing`) on probe conversations (`probes`), then serves
each row with the fastest engine that is exact for it. `turns` renders each assistant turn as inference sees it.
"""
