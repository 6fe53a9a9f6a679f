"""The reference: transformers' jinja2 environment, with bounded work and traced strings."""
