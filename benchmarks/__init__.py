"""Benchmarks and long-running comparisons, each a command: `python -m benchmarks.NAME --help`.

`conformance`, `exactness` and `crash` check correctness at scale; `prepare`, `encoder`, `collate`, `packing`, `export`,
`end_to_end`, `cold`, `cache` and `memory` measure speed and memory and exit with 1 if a target is missed. `peers` runs
what people use on the same rows; `trainers` and `prepared` are its parts. `grow`, `material` and `models` provide data
and models; `meters`, `servers`, `interleave`, `oracle`, `masks` and `segments` are parts of the others.
"""
