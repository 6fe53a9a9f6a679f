"""Tools for contributors, not part of the package: fuzzing, fault injection, mutation testing, an NFS test machine.

Each module is a command (`python -m tools.NAME`): `fuzz` compares the template machine with its references, `faults`
fails system calls, `bit_flips` damages cache files, `mutation_test` checks that every small bug is caught, `nfs` runs a
command on real NFS mounts, `arguments` generates `penstock/arguments.py`. The tests run small versions of them.
"""
