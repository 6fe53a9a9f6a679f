"""Checks that what a training configuration promises really happens, and issues a certificate.

In: a `penstock train` configuration, or a factory that returns a trainer, a model or a training step. Out: a
`Certificate` with a verdict per promise (engaged, not engaged, unknown) and its evidence.

`verifier` drives it all. Each observation is a job (`jobs`) that a `Supervisor` runs in a process of its own (`probe`),
where an `Observer` (`observation`) records a few training steps of a target (`targets`) as plain facts (`facts`).
`judge` turns facts into findings; `bisection` finds the kernel behind a wrong loss.

This package imports neither torch nor transformers; the probe processes do.
"""

from penstock.verify.certificate import PROMISES, Certificate, Finding, PackageInfo, Verdict, required_promises
from penstock.verify.verifier import VerifyOptions, verify

__all__ = [
    "PROMISES",
    "Certificate",
    "Finding",
    "PackageInfo",
    "Verdict",
    "VerifyOptions",
    "required_promises",
    "verify",
]
