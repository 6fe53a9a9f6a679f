"""Reads a tokenizer's files and compares them with what `AutoTokenizer` makes of the same folder.

In: a folder, a `tokenizer.json` or a Hub name. Out: `files.TokenizerFiles`, with the bytes of `tokenizer.json`, the
named special tokens, the chat templates and the model's end-of-sequence ids, resolved as transformers resolves them;
and `vocabulary.Vocabulary`, which describes the tokens.

`auto` answers whether transformers would produce the same ids. It imports transformers, so builds run it in a process
of its own.
"""
