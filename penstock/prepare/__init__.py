"""Renders and tokenizes a slice of conversations, once per content.

In: a slice of rows and a recipe. Out: the columns of a shard, with a report of what was kept and what was not.

In reading order: `sources` finds files and cuts them into slices, `tokenizer` reads the tokenizer's files, `chat` reads
rows as conversations, `template` renders them, `regions` cuts the text into segments, `encode` makes token ids, and
`faithful` arranges turns as inference sees them. `recipe` records every decision that changes the result, `pipeline`
takes a slice through all stages, and `check` compares its result with the reference engines.
"""
