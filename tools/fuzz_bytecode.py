"""Damaged bytecode: programs of real templates with flipped bits and changed operands.

The verifier must refuse a program, or it must run without a memory error and come to an end.
"""

from __future__ import annotations

import array
import functools
import random
from typing import Any

from benchmarks.clock import DATE
from penstock.native import native
from penstock.prepare.template.compiler import Compiler, conversation_layout, encoded
from penstock.prepare.template.delegated import Delegate
from penstock.prepare.template.probes import PROBES
from penstock.prepare.template.sandbox import Sandbox

ROWS = [row for conversation in PROBES if (row := encoded(conversation)) is not None]
DELEGATE = Delegate(DATE).parts
BASE = {"documents": None, "add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def program_of(template: str) -> list[Any]:
    """The arguments of `native.Program`, without the layout. Raises NotCompiled."""
    tree = Sandbox(DATE).parse_template(template)
    return list(Compiler(BASE, DATE.strftime).compile(tree).assemble())


def damaged(program: list[Any], rnd: random.Random) -> list[Any]:
    """A copy of a program with one to three changes."""
    code, constants, macros, slots, branches = program
    words, constants, macros = array.array("i", code), list(constants), list(macros)
    for _ in range(rnd.choice((1, 1, 1, 2, 3))):
        at = rnd.randrange(len(words))
        match rnd.randrange(10):
            case 0:
                words[at] ^= rnd.choice((1, 2, 4, 8, 16, 32, 64, 1 << 20, -1 << 31))
            case 1 | 2 | 3:
                words[at] = rnd.randrange(-1, 100)
            case 4:
                words[at] = words[rnd.randrange(len(words))]
            case 5:
                words[at] = rnd.randrange(len(words))
            case 6:
                del words[at : at + rnd.randrange(1, 4)]
            case 7:
                words.insert(at, rnd.randrange(100))
            case 8 if constants:
                constants[rnd.randrange(len(constants))] = rnd.choice((0, -1, 1.5, None, "", "x", [], ["a"], ..., {}))
            case _ if macros:
                entry, arguments, own, parent, takes, names = rnd.choice(macros)
                own, parent, takes = (
                    max(0, own + rnd.choice((-1, 0, 9))),
                    parent + rnd.choice((-1, 0, 1)),
                    takes ^ rnd.choice((0, 1, 4)),
                )
                macros[rnd.randrange(len(macros))] = (entry, arguments, own, parent, takes, names)
            case _:
                slots = max(0, slots - 1)
        if not words:
            words.append(0)
    return [words.tobytes(), constants, macros, slots, branches]


def runs(program: list[Any]) -> bool:
    """Whether the verifier accepts a program, which then renders all probes."""
    assert native is not None
    try:
        loaded = native.Program(*program, conversation_layout(["</s>"]), DELEGATE)
    except ValueError:
        return False
    loaded.render(ROWS)
    loaded.render_turns(ROWS[:20])
    return True


def attempt(template: str, seed: str) -> bool:
    """Whether a damaged copy of a template's program, chosen by the seed, is accepted and runs."""
    return runs(damaged(program_of(template), random.Random(seed)))  # noqa: S311
