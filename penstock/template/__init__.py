"""Renders conversations with a chat template and records which message printed which bytes.

In: a template with its special tokens and variables, then rows as JSON bytes (or `Conversation`s read in Python).
Out: `rendered.Rendered`, the texts of a batch with the pieces that belong to each message.

`renderer` is the entry: it compiles the template (`compile`), compares the C machine (`machine`) with the reference
(`jinja`) on probe conversations (`probes`, `probe_checks`), then serves each row with the fastest engine that is exact
for it. `turns` renders each assistant turn as inference sees it.
"""
