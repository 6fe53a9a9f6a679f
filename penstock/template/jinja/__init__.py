"""The reference engine: transformers' jinja2 environment, with bounded work and traced strings.

In: conversations. Out: `Rendered`, with the bytes that transformers gives; other engines are compared with it.

`reference` is the entry. `sandbox` is the environment (`extensions` holds what transformers adds to jinja2);
`metering`, `costs` and `budget` bound its work. `tracer` renders a row again with strings that know their message
(`traced_string`), which tells who printed what.
"""
