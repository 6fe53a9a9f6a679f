"""Checks that what a training configuration promises really happens, and issues a certificate.

In: a `penstock train` configuration, or a factory that returns a trainer, a model or a training step. Out: a
`Certificate` with a verdict per promise (engaged, not engaged, unknown) and its evidence.

`verifier` drives it all and finds the kernel that causes a wrong loss. Each observation is a job (`probe_jobs`) that
runs in a process of its own (`probe`), where an `Observer` records a few training steps of a target (`target`) as plain
`observations`. `judge` turns them into findings.

This package imports neither torch nor transformers; the probe processes do.
"""
