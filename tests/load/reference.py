"""A reference implementation of views in plain Python, token by token: slow, obvious and independent."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.prepare.chat.conversation import Part, Role
from tests.support.memory_dataset import Piece

Row = list[Piece]


@dataclass
class Token:
    id: int
    piece: Piece
    weight: float


@dataclass
class Outcome:
    """Served items as (row, start, tokens), and the ledger's numbers."""

    served: list[tuple[int, int, list[list[Token]]]] = field(default_factory=list)
    tokens: int = 0
    trained: int = 0
    masked: int = 0
    truncated: int = 0
    dropped: int = 0
    kept: int = 0
    dropped_rows: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, tokens: int) -> None:
        self.dropped_rows[reason] = self.dropped_rows.get(reason, 0) + 1
        self.dropped += tokens


def is_unknown(row: Row) -> bool:
    return len(row) == 1 and row[0].role is Role.NONE and row[0].part is Part.GLUE


def weigh(row: Row, policy: str) -> list[Token]:
    assistants = [piece.message for piece in row if piece.role is Role.ASSISTANT]
    users = [piece.message for piece in row if piece.role is Role.USER]
    tokens = []
    for piece in row:
        assistant, content = piece.role is Role.ASSISTANT, piece.part in (Part.BODY, Part.STOP)
        chosen = {
            "all_assistant_messages": assistant and content,
            "last_assistant_message": assistant and content and piece.message == max(assistants, default=None),
            "last_assistant_turn": assistant and content and piece.message > max(users, default=-1),
            "all_messages": content,
            "all_user_and_system_messages": content and piece.role in (Role.USER, Role.SYSTEM),
            "all_tokens": True,
            "customized": content and (assistant or piece.weight is not None),
        }[policy]
        weight = 0.0 if not chosen else 1.0 if piece.weight is None else piece.weight
        tokens += [Token(token, piece, weight) for token in piece.ids]
    return tokens


def serve(rows: list[Row], policy: str, overlong: str, limit: int | None) -> Outcome:
    outcome = Outcome()
    for number, row in enumerate(rows):
        tokens = weigh(row, policy)
        outcome.tokens += len(tokens)
        if is_unknown(row) and policy != "all_tokens":
            outcome.drop("regions_unknown", len(tokens))
            continue
        if limit is not None and len(tokens) > limit and overlong == "drop":
            outcome.drop("overlong", len(tokens))
            continue
        size = len(tokens)
        cut = size if limit is None else min(limit, size)
        windows = {
            "truncate": [(0, cut)],
            "truncate_left": [(size - cut, size)],
            "drop": [(0, size)],
            "split": [(at, min(at + cut, size)) for at in range(0, size, cut)] if size else [(0, 0)],
        }[overlong]
        good = [(start, end) for start, end in windows if any(token.weight > 0 for token in tokens[start:end])]
        if not good:
            outcome.drop("no_trained_token", size)
            continue
        outcome.kept += 1
        for start, end in windows:
            trained = sum(token.weight > 0 for token in tokens[start:end])
            outcome.trained += trained
            outcome.masked += end - start - trained if trained else 0
            outcome.dropped += 0 if trained else end - start
        outcome.truncated += size - sum(end - start for start, end in windows)
        outcome.served += [(number, start, [tokens[start:end]]) for start, end in good]
    return outcome


def common_prompt(chosen: list[Token], rejected: list[Token]) -> int:
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common].id == rejected[common].id:
        common += 1
    return min(_cut_back(chosen, common), _cut_back(rejected, common))


def _cut_back(side: list[Token], common: int) -> int:
    if not side:
        return common
    here = side[min(common, len(side) - 1)].piece
    if here.role is not Role.ASSISTANT or here.part is Part.HEADER:
        return common
    same = [
        at for at, token in enumerate(side) if token.piece.message == here.message and token.piece.part != Part.HEADER
    ]
    return min(at for at in same if side[at].piece.role is Role.ASSISTANT)


def serve_pairs(rows: list[list[Row]], policy: str, overlong: str, limit: int | None) -> Outcome:
    outcome = Outcome()
    for number, pair in enumerate(rows):
        sides = [weigh(side, policy) for side in pair]
        both = sum(map(len, sides))
        outcome.tokens += both
        if any(map(is_unknown, pair)) and policy != "all_tokens":
            outcome.drop("regions_unknown", both)
            continue
        longest = max(map(len, sides))
        if limit is not None and longest > limit and overlong == "drop":
            outcome.drop("overlong", both)
            continue
        prompt = common_prompt(*sides)
        for side in sides:
            for token in side[:prompt]:
                token.weight = 0.0
        start = min(max(longest - limit, 0), prompt) if limit is not None and overlong == "truncate_left" else 0
        cut = [side[start:] if limit is None else side[start : start + limit] for side in sides]
        if not all(any(token.weight > 0 for token in side) for side in cut):
            outcome.drop("no_trained_token", both)
            continue
        outcome.kept += 1
        trained = sum(token.weight > 0 for side in cut for token in side)
        outcome.trained += trained
        outcome.masked += sum(map(len, cut)) - trained
        outcome.truncated += both - sum(map(len, cut))
        outcome.served.append((number, start, cut))
    return outcome
