"""Compiles chat templates to bytecode for the C machine.

In: a template's jinja2 syntax tree and the recipe's variables. Out: `bytecode.Bytecode`, which `assemble`s to what
`native.Program` loads, or `NotCompiled` with a reason, in which case the reference renders the template.

`compiler` is the entry and compiles statements; `expressions` compiles expressions; `bytecode` collects instructions,
constants and jump labels.
"""
